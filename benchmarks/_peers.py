"""Which interpreter has a peer: this one, or another environment's where it cannot live in this one."""

import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def has(package, python=sys.executable):
    """The version of a package that an interpreter has; None: it has none."""
    if python == sys.executable:
        try:
            return version(package)
        except PackageNotFoundError:
            return None
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def interpreter(package, others=()):
    """One that has a package: this one, or the first of the others; None: there is none."""
    return next((each for each in (sys.executable, *others) if has(package, each)), None)
