"""Child process of :mod:`.command`: ``python -m penstock.testing.gpu.child WHAT --records FILE``.

``WHAT`` is a module of this package whose ``work(options)`` is called; it appends its results to the
file as soon as they are known.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``work``, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m penstock.testing.gpu.child")
    parser.add_argument("what", choices=("machine", "contract", "figures"))
    parser.add_argument("names", nargs="*", help="facts, or one figure")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--device", help="kind of device, as in torch")
    parser.add_argument("--dir", default=".", help="directory on a disk, to offload to")
    parser.add_argument("--scale", type=float, default=1.0, help="scale of the sizes of figures")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a figure")
    parser.add_argument("--preload", action="append", default=[], help="import a module first")
    options = parser.parse_args(argv)
    faulthandler.enable()  # shows where a crash happens
    for name in options.preload:
        importlib.import_module(name)
    work = importlib.import_module(f"penstock.testing.gpu.{options.what}").work
    return int(work(options))


if __name__ == "__main__":
    sys.exit(main())
