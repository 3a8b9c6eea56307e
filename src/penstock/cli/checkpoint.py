"""The command ``penstock checkpoint``, which lists, shows and verifies checkpoints."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from penstock.checkpoint.api import verify
from penstock.checkpoint.listing import listing, spare_bytes, steps_in
from penstock.checkpoint.manifest import FILE_NAME, VERSION
from penstock.checkpoint.reader import OpenCheckpoint
from penstock.cli.command import add_command, new_parser
from penstock.cli.output import show, write_json, write_text
from penstock.cli.progress import progress_of_bytes
from penstock.core.errors import CheckpointError, PenstockError
from penstock.core.files import given_path
from penstock.core.units import format_bytes
from penstock.observe.summary_text import text_table

_EXAMPLES: Final = """\
examples:
  penstock checkpoint list runs/bert
  penstock checkpoint info runs/bert/step-000000000300
  penstock checkpoint verify runs/bert/step-000000000300 --json

The exit code is 0 if all checkpoints are intact, otherwise 1."""
_THERE: Final = "present, not verified"
_YEAR_10000: Final = 253402300800
"""Unix time in seconds from which on times are not shown, as a clock or manifest must be wrong."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``penstock checkpoint``."""
    made = new_parser(
        "checkpoint",
        "List checkpoints, show the contents of one, verify it.",
        examples=_EXAMPLES,
    )
    what = made.add_subparsers(metavar="WHAT", required=True)
    kinds = {
        "list": ("DIR", "list the checkpoints in the directory of a Checkpointer", _list),
        "info": ("PATH", "show the contents of a checkpoint: parts, tensors, bytes", _info),
        "verify": ("PATH", "read all of a checkpoint and compare its checksums", _verify),
    }
    for name, (operand, text, execute_it) in kinds.items():
        each = add_command(what, name, text, execute_it)
        each.add_argument(
            "path",
            metavar=operand,
            nargs="+" if name == "verify" else None,
            help="directory of the checkpoints" if name == "list" else "directory of a checkpoint",
        )
    return made


def _list(options: argparse.Namespace) -> int:
    if os.path.lexists(os.path.join(options.path, FILE_NAME)):
        raise CheckpointError(
            f"{options.path!r} is a checkpoint: use `penstock checkpoint info` for it, or `list` for its"
            f" directory, {os.path.dirname(os.path.abspath(options.path))!r}"
        )
    found, spare = listing(options.path), spare_bytes(options.path)
    if options.json:
        checkpoints = [{**asdict(each), "ok": each.ok} for each in found]
        document = {"schema": 1, "checkpoints": checkpoints, "spare_bytes": spare}
        write_json(document, sys.stdout)
    elif not found and not spare:
        write_text(f"no checkpoints in {options.path!r}\n", sys.stdout)
    else:
        rows = [
            (str(each.step), format_bytes(each.nbytes), _when(each.facts), each.damage or _THERE)
            for each in found
        ]
        if spare:
            rows.append(("", format_bytes(spare), "", "spare: the next save overwrites it"))
        show(text_table(("step", "size", "saved", "state"), rows), sys.stdout)
    return 0 if all(each.ok for each in found) else 1


def _info(options: argparse.Namespace) -> int:
    _check_is_one(options.path)
    with OpenCheckpoint(options.path) as opened:
        manifest = opened.manifest
    parts: dict[str, _Part] = {}
    for tensor in manifest.tensors:
        part = parts.setdefault(tensor.name.partition(".")[0], _Part())
        part.tensors += 1
        if tensor.owner < 0:
            part.nbytes += tensor.nbytes
            part.stored_bytes += tensor.file_bytes
        if tensor.codec and tensor.codec not in part.codecs:
            part.codecs.append(tensor.codec)
    if options.json:
        document: dict[str, Any] = {
            "schema": 1,
            "path": options.path,
            "version": VERSION,
            "nbytes": manifest.nbytes,
            "facts": dict(manifest.facts),
            "files": [{"name": each.name, "nbytes": each.nbytes} for each in manifest.files],
            "parts": {name: asdict(part) for name, part in parts.items()},
        }
        write_json(document, sys.stdout)
        return 0
    rows = [
        (
            name,
            str(part.tensors),
            format_bytes(part.nbytes),
            format_bytes(part.stored_bytes),
            ", ".join(part.codecs),
        )
        for name, part in parts.items()
    ]
    nbytes = format_bytes(sum(part.nbytes for part in parts.values()))
    total = str(len(manifest.tensors)), nbytes, format_bytes(manifest.nbytes), ""
    rows.append(("all, with headers", *total))
    show(text_table(("part", "tensors", "size", "in the files", "codec"), rows), sys.stdout)
    return 0


@dataclass(slots=True)
class _Part:
    """Totals of a top-level key."""

    tensors: int = 0
    nbytes: int = 0
    stored_bytes: int = 0
    codecs: list[str] = field(default_factory=list)


def _check_is_one(path: str) -> None:
    """Raise CheckpointError if ``path`` is a directory of checkpoints and not a checkpoint."""
    given_path(path, "the checkpoint")
    if not os.path.isdir(path) or os.path.lexists(os.path.join(path, FILE_NAME)):
        return
    if found := steps_in(path):
        raise CheckpointError(
            f"{path!r} contains checkpoints but is not one: name one of them, such as the latest,"
            f" {found[0][1]!r}; `penstock checkpoint list` shows all"
        )


def _verify(options: argparse.Namespace) -> int:
    for path in options.path:
        _check_is_one(path)
    found = []
    for path in options.path:
        with progress_of_bytes(f"verify {path}", _bytes_of(path)):
            found.append(verify(path))
    if options.json:
        write_json(
            {"schema": 1, "checkpoints": [{**asdict(each), "ok": each.ok} for each in found]},
            sys.stdout,
        )
    else:
        rows = [
            (each.path, format_bytes(each.nbytes), "intact" if each.ok else "\n".join(each.damage))
            for each in found
        ]
        show(text_table(("checkpoint", "size", "state"), rows), sys.stdout)
    return 0 if all(each.ok for each in found) else 1


def _bytes_of(path: str) -> int:
    """Return the bytes of a checkpoint; 0 if it does not say them."""
    try:
        with OpenCheckpoint(path) as opened:
            return opened.manifest.nbytes
    except PenstockError:
        return 0  # verify says why


def _when(facts: Any) -> str:
    seconds = facts.get("saved_unix_s")
    if not isinstance(seconds, int) or not 0 <= seconds < _YEAR_10000:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
