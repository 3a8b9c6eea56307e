"""The command ``penstock ssd``, which simulates SSDs."""

from __future__ import annotations

import argparse
from typing import Final

from penstock.cli.command import new_parser
from penstock.lab.cli import ssd_machine, ssd_run, ssd_sweep, ssd_update

_EXAMPLES: Final = """\
examples:
  penstock ssd run mqsim-default randread --queue-depth 16
  penstock ssd weight-update --device optimstore --parameters 6.7e9 --optimizer adam \\
      --placement host,controller,die"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of ``penstock ssd``."""
    made = new_parser(
        "ssd",
        "Simulate an SSD: time, energy and wear.",
        examples=_EXAMPLES,
    )
    what = made.add_subparsers(metavar="WHAT", required=True)
    ssd_run.add_parser(what)
    ssd_update.add_parser(what)
    ssd_sweep.add_parser(what)
    ssd_machine.add_parser(what)
    return made
