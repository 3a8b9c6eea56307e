"""The commands ``penstock data info``, ``verify`` and ``pack``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.command import add_command, size
from penstock.cli.output import print_result, show, write_json
from penstock.cli.progress import progress
from penstock.core.errors import ConfigError
from penstock.core.files import parse_json
from penstock.core.units import format_bandwidth, format_bytes, parse_bytes
from penstock.data.build import Opened, open_index
from penstock.data.formats import FORMATS
from penstock.data.packing import pack
from penstock.data.rates import known_rates
from penstock.data.verify import verify
from penstock.observe.summary_text import add_row, grid


def add_parsers(what: Any) -> None:
    """Add the three commands to the subcommands of ``penstock data``."""
    _add(what, "info", "show the contents of a data set, and their places; builds its index", _info)
    made = _add(what, "verify", "read everything, and compare checksums if there are any", _verify)
    made.add_argument("--decode", action="store_true", help="decode each sample too")
    made = _add(what, "pack", "write a data set as one packed file", _pack)
    made.add_argument("out", metavar="OUT.pstk", help="the file to write; must not exist")
    made.add_argument(
        "--align",
        metavar="SIZE",
        type=size,
        help="bytes that records are aligned to (default: 4096, or 64 for small ones)",
    )


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a data set."""
    parser.add_argument("path", metavar="PATH", help="a file or a directory")
    parser.add_argument(
        "--format",
        metavar="NAME",
        help=f"{', '.join(FORMATS)} (default: by the names of the files)",
    )
    parser.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[],
        help="option of the format, such as context=1024; repeat it for several",
    )  # fmt: skip
    parser.add_argument(
        "--index-dir",
        metavar="DIR",
        help="directory of the index (default: that of PENSTOCK_CACHE)",
    )
    parser.add_argument("--rebuild", action="store_true", help="build the index again")


def open_data_set(options: argparse.Namespace) -> Opened:
    """Open the data set that the options name, with progress messages of a long build."""
    with progress("index") as tell:
        return open_index(
            options.path,
            format_name=options.format,
            options=format_options(options.option),
            index_dir=options.index_dir,
            rebuild=options.rebuild,
            progress=tell,
        )


def format_options(settings: list[str]) -> dict[str, Any]:
    """Parse settings ``NAME=VALUE``. Raises ConfigError."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, sign, value = setting.partition("=")
        if not sign:
            raise ConfigError(f"--option {setting!r} has no value; write it like context=1024")
        try:
            found[name.strip()] = parse_json(value)
        except ValueError:
            found[name.strip()] = value.strip()
    return found


def _add(
    what: Any, name: str, text: str, execute: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    made = add_command(what, name, text, execute)
    add_data_options(made)
    return made


def _info(options: argparse.Namespace) -> int:
    opened = open_data_set(options)
    facts = facts_of(opened)
    print_result(options.json, lambda: facts, lambda: _info_text(facts))
    return 0


def facts_of(opened: Opened) -> dict[str, Any]:
    """Return the facts of a data set: the JSON document of ``info``."""
    index = opened.index
    longest, nbytes = index.longest()
    rates = known_rates(opened)
    return {
        "schema": 1,
        "penstock": __version__,
        "path": opened.root,
        "format": index.format,
        "samples": index.samples,
        "fields": list(index.fields),
        "left_out": list(index.meta.get("left_out", ())),
        "files": len(index.files),
        "file_bytes": int(index.files.sizes.sum()),
        "data_bytes": index.data_bytes,
        "mean_sample_bytes": index.data_bytes / index.samples,
        "longest_sample": longest,
        "longest_sample_bytes": nbytes,
        "checksums": len(index.sums) > 0,
        "classes": len(set(index.labels.tolist())),
        "index_path": opened.index_path,
        "index_bytes": index.nbytes,
        "index_built": opened.built,
        "options": dict(index.options),
        "rates": None if rates is None else asdict(rates),
        "full_shuffle_is_quick": None if rates is None else rates.full_is_quick,
    }


def _info_text(facts: dict[str, Any]) -> RenderableType:
    table = grid(f"{facts['path']}: {facts['format']}", ("", ""))
    add_row(table, "samples", f"{facts['samples']}")
    add_row(table, "fields", ", ".join(facts["fields"]))
    if facts["left_out"]:
        add_row(table, "left out", ", ".join(facts["left_out"]))
    add_row(table, "files", f"{facts['files']}, {format_bytes(facts['file_bytes'])}")
    add_row(table, "a sample", f"{format_bytes(facts['mean_sample_bytes'])} on average")
    longest = f"{facts['longest_sample']}, {format_bytes(facts['longest_sample_bytes'])}"
    add_row(table, "longest", longest)
    if facts["classes"]:
        add_row(table, "classes", str(facts["classes"]))
    add_row(table, "checksums", "yes" if facts["checksums"] else "no")
    if facts["rates"] is not None:
        random, sequence = map(format_bandwidth, facts["rates"].values())
        order = "full shuffle" if facts["full_shuffle_is_quick"] else "window"
        add_row(table, "measured", f"{random} at random, {sequence} in sequence; auto: {order}")
    built = "built now" if facts["index_built"] else "already built"
    where = facts["index_path"] or "in memory only"
    add_row(table, "index", f"{format_bytes(facts['index_bytes'])}, {built}: {where}")
    return table


def _verify(options: argparse.Namespace) -> int:
    opened = open_data_set(options)
    with progress("verify") as tell:
        verdict = verify(opened, decode=options.decode, progress=tell)
    if options.json:
        document = {"schema": 1, "penstock": __version__, "path": opened.root, **asdict(verdict)}
        write_json(document, sys.stdout)
    else:
        rate = format_bandwidth(verdict.data_bytes / verdict.seconds)
        compared = "checksums compared" if verdict.checksums else "no checksums to compare"
        head = f"{verdict.samples} samples read at {rate}, {compared}: {verdict.bad} bad"
        show(Group(Text(head), *(Text(each) for each in verdict.first_bad)), sys.stdout)
    return 1 if verdict.bad else 0


def _pack(options: argparse.Namespace) -> int:
    align = None if options.align is None else parse_bytes(options.align, what="--align")
    opened = open_data_set(options)
    with progress("pack") as tell:
        written = pack(opened, options.out, align_bytes=align, progress=tell)
    if options.json:
        write_json({"schema": 1, "penstock": __version__, **asdict(written)}, sys.stdout)
    else:
        nbytes = format_bytes(written.file_bytes)
        show(Text(f"{written.records} records, {nbytes}: {written.path}"), sys.stdout)
    return 0
