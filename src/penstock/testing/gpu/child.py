"""What one process of :mod:`.command` does: ``python -m penstock.testing.gpu.child WHAT --records FILE``.

``WHAT`` is a module beside this one whose ``work(options)`` is called; it appends to the file what it
finds, as soon as it has found it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Do it; returns the exit code of ``work``."""
    parser = argparse.ArgumentParser(prog="python -m penstock.testing.gpu.child")
    parser.add_argument("what", choices=("machine", "contract", "figures"))
    parser.add_argument("names", nargs="*", help="facts, or one figure")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--device", help="its kind, as torch calls it")
    parser.add_argument("--dir", default=".", help="on a disk, to spill to")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes of figures")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a figure")
    parser.add_argument("--preload", action="append", default=[], help="import a module first")
    options = parser.parse_args(argv)
    faulthandler.enable()  # a crash tells where
    for name in options.preload:
        importlib.import_module(name)
    work = importlib.import_module(f"penstock.testing.gpu.{options.what}").work
    return int(work(options))


if __name__ == "__main__":
    sys.exit(main())
