"""The command ``penstock characterize``: the poster's experiment on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.cli.command import new_parser
from penstock.cli.output import say, show, write_json
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.files import given_path, parse_json, read_text
from penstock.core.fs import check_directory
from penstock.lab.characterize.networks import NETWORKS, SCALE_MEANS
from penstock.lab.characterize.settings import Settings

_DESCRIPTION = """\
Train the nine networks of the poster "How to Exploit Flash Memory for DNN Training" on this
machine, and report what checkpoints and other jobs cost them, and how much DRAM they hold while
they wait.

networks: """


def parser() -> argparse.ArgumentParser:
    """Build the parser of ``penstock characterize``."""
    made = new_parser(
        "characterize",
        f"{_DESCRIPTION}{', '.join(NETWORKS)}",
        examples=textwrap.fill(f"Scale: {SCALE_MEANS}.", 100),
        execute=execute,
    )
    defaults = Settings()
    made.add_argument(
        "--networks",
        nargs="*",
        default=list(defaults.networks),
        metavar="NAME",
        help="networks to train (default: all nine; with --mix there may be none)",
    )
    made.add_argument(
        "--mix",
        nargs="+",
        default=[],
        metavar="NAME",
        help="networks to train at the same time as well, one job each (default: none)",
    )
    made.add_argument(
        "--epochs",
        type=int,
        default=defaults.epochs,
        metavar="N",
        help="epochs for each network (default: %(default)s)",
    )
    made.add_argument(
        "--steps", type=int, metavar="N", help="steps of an epoch (default: 100 times the scale)"
    )
    made.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of each process (default: torch's, or a rank's share of the cores)",
    )
    made.add_argument(
        "--parallel",
        default=defaults.parallel,
        metavar="HOW",
        help="parallelism: none, ddp or pipeline (default: %(default)s)",
    )
    made.add_argument(
        "--colocate",
        type=int,
        default=defaults.colocate,
        metavar="N",
        help="number of copies, and of programs of each kind, beside a job (default: %(default)s)",
    )
    made.add_argument(
        "--scale",
        type=float,
        default=defaults.scale,
        metavar="X",
        help="factor of the networks' size, up to 1; see below (default: %(default)s)",
    )
    made.add_argument(
        "--dir",
        default=".",
        metavar="DIR",
        help="directory for checkpoints, which are removed (default: the current one)",
    )
    made.add_argument(
        "--out",
        metavar="DIR",
        help="write characterize.json and characterize.svg to this directory",
    )
    made.add_argument(
        "--merge",
        nargs="+",
        metavar="FILE",
        help="measure nothing; join the characterize.json of several runs",
    )
    return made


def execute(options: argparse.Namespace) -> int:
    """Measure, or join results, and show them."""
    out = None if options.out is None else _directory(options.out)
    with _results(named=bool(options.merge)):
        document = _merged(options.merge) if options.merge else _measured(options)
        if out is not None:
            _write(document, out)
        if options.json:
            write_json(document, sys.stdout)
        else:
            from penstock.lab.characterize.tables import table  # noqa: PLC0415  (loads torch)

            show(table(document), sys.stdout)
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    settings = Settings(
        networks=tuple(options.networks),
        mix=tuple(options.mix),
        epochs=options.epochs,
        steps=options.steps,
        parallel=options.parallel,
        threads=options.threads,
        colocate=options.colocate,
        scale=options.scale,
        directory=options.dir,
    )
    from penstock.lab.characterize.experiment import characterize  # noqa: PLC0415  (loads torch)

    before = signal.signal(
        signal.SIGTERM, _interrupt
    )  # so that processes end and files are removed
    try:
        return characterize(settings, say=say)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _merged(names: list[str]) -> dict[str, Any]:
    from penstock.lab.characterize.experiment import merge  # noqa: PLC0415  (loads torch)

    return merge([_document(name) for name in names])


@contextmanager
def _results(named: bool) -> Iterator[None]:
    """Turn errors from incomplete files into one line, if files were named."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if not named or isinstance(error, PenstockError):
            raise
        raise ConfigError(
            f"--merge: a file is not a whole result ({type(error).__name__}: {error}); measure again"
        ) from error


def _document(name: str) -> dict[str, Any]:
    try:
        found = parse_json(read_text(name))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--merge: {name!r} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != 1 or "networks" not in found:
        raise ConfigError(f"--merge: {name!r} is not a result of penstock characterize, schema 1")
    return found


def _directory(name: str) -> Path:
    try:
        os.makedirs(given_path(name, "--out"), exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {name!r} cannot be made: {error.strerror}") from error
    check_directory(name, "--out", allow_memory_filesystem=True)
    return Path(name)


def _write(document: dict[str, Any], out: Path) -> None:
    from penstock.lab.characterize.figures import plot  # noqa: PLC0415  (loads torch)

    with (out / "characterize.json").open("w", encoding="utf-8") as file:
        write_json(document, file)
    try:
        plot(document, out / "characterize.svg")
    except ConfigError as error:  # matplotlib is an extra
        say(f"no picture: {error}")
