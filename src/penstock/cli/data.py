"""The command ``penstock data``, which shows, verifies, packs and measures data sets."""

from __future__ import annotations

import argparse
from typing import Final

from penstock.cli import data_bench, data_files
from penstock.cli.command import new_parser

_EXAMPLES: Final = """\
examples:
  penstock data info /nvme/imagenet
  penstock data info train.bin --format tokens --option context=1024
  penstock data verify shards/ --decode
  penstock data pack images/ images.pstk
  penstock data bench images.pstk --batch 64 --memory 64MiB"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``penstock data``."""
    made = new_parser(
        "data",
        "Describe, verify, pack and measure data sets that stay on flash.",
        examples=_EXAMPLES,
    )
    what = made.add_subparsers(metavar="WHAT", required=True)
    data_files.add_parsers(what)
    data_bench.add_parser(what)
    return made
