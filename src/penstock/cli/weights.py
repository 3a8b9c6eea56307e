"""The command ``penstock weights``, which shows, verifies and converts safetensors files."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np

from penstock.cli.command import add_command, new_parser
from penstock.cli.output import show, write_json
from penstock.cli.progress import progress_of_bytes
from penstock.core.errors import ConfigError, DamagedError, TransferError
from penstock.core.units import format_bytes
from penstock.io.files import open_path
from penstock.observe.summary_text import text_table
from penstock.weights.pieces import PIECE_BYTES, PieceReader
from penstock.weights.safetensors import WeightFile, open_source

_EXAMPLES: Final = """\
examples:
  penstock weights info models/llama
  penstock weights verify models/llama --json
  penstock weights import models/llama /nvme/llama --type bfloat16

The exit code is 0 if all files are intact, otherwise 1."""
_TYPES: Final = ("float64", "float32", "float16", "bfloat16")


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``penstock weights``."""
    made = new_parser(
        "weights",
        "Show what safetensors files have, verify them, and convert them.",
        examples=_EXAMPLES,
    )
    what = made.add_subparsers(metavar="WHAT", required=True)
    info = add_command(what, "info", "show the tensors, types and bytes of each file", _info)
    check = add_command(
        what,
        "verify",
        "check headers, lengths and the index, and read every byte",
        _verify,
        description=(
            "Check headers, lengths and the index of safetensors, and read every byte. The format has no"
            "\nchecksums of values: a flipped bit that the device does not report is not found."
        ),
    )
    bring = add_command(
        what,
        "import",
        "write them to a folder of aligned files of another size or type",
        _import,
        description=(
            "Read safetensors in one pass, and write them to a folder as of Hugging Face, in which large"
            "\ntensors begin at multiples of 4 KiB: penstock.weights.load(..., in_place=True) reads them"
            "\nto where they are used. About 250 MiB are in memory at a time. Files that are no weights,"
            "\nas config.json, are not copied."
        ),
    )
    for each in (info, check):
        each.add_argument("path", metavar="PATH", help="a .safetensors file, or a folder of them")
    bring.add_argument("source", metavar="SOURCE", help="a .safetensors file, or a folder of them")
    bring.add_argument("directory", metavar="DIRECTORY", help="made if it is missing")
    bring.add_argument(
        "--shard",
        metavar="SIZE",
        default="5GB",
        help="most bytes of values in a file (default: 5GB)",
    )
    bring.add_argument(
        "--type", choices=_TYPES, help="round floating-point tensors of 2 to 8 bytes to this type"
    )
    bring.add_argument(
        "--no-verify", action="store_true", help="do not read the files again to compare checksums"
    )
    return made


@dataclass(slots=True)
class _Facts:
    """Contents of a file, in short.

    Attributes:
        path: Its path.
        tensors: How many.
        nbytes: Bytes of the file.
        types: Codes of their types, the most frequent first.
        largest: Name of the longest.
        largest_bytes: Its bytes.
    """

    path: str
    tensors: int
    nbytes: int
    types: list[str] = field(default_factory=list)
    largest: str = ""
    largest_bytes: int = 0


def _facts_of(file: WeightFile) -> _Facts:
    counts: dict[str, int] = {}
    made = _Facts(file.path, len(file.tensors), file.size_bytes)
    for tensor in file.tensors:
        counts[tensor.code] = counts.get(tensor.code, 0) + 1
        if tensor.nbytes > made.largest_bytes:
            made.largest, made.largest_bytes = tensor.name, tensor.nbytes
    made.types = sorted(counts, key=lambda code: (-counts[code], code))
    return made


def _info(options: argparse.Namespace) -> int:
    return _show(options, options.path)


def _import(options: argparse.Namespace) -> int:
    conversion = importlib.import_module("penstock.weights.conversion")
    torch = importlib.import_module("torch")
    dtype = None if options.type is None else getattr(torch, options.type)
    found = [tensor for file in open_source(options.source) for tensor in file.tensors]
    read = sum(tensor.nbytes for tensor in found)
    written = sum(conversion.bytes_as(tensor, dtype) for tensor in found)
    with progress_of_bytes("import", read + written * (1 if options.no_verify else 2)):
        conversion.convert(
            options.source,
            options.directory,
            shard=options.shard,
            dtype=dtype,
            verify=not options.no_verify,
        )
    return _show(options, options.directory)


def _show(options: argparse.Namespace, path: str) -> int:
    found = [_facts_of(file) for file in open_source(path)]
    if options.json:
        write_json({"schema": 1, "files": [asdict(each) for each in found]}, sys.stdout)
        return 0
    rows = [
        (
            each.path,
            str(each.tensors),
            format_bytes(each.nbytes),
            ", ".join(each.types),
            f"{each.largest} ({format_bytes(each.largest_bytes)})" if each.largest else "",
        )
        for each in found
    ]
    if len(found) > 1:
        tensors, nbytes = sum(each.tensors for each in found), sum(each.nbytes for each in found)
        rows.append(("all", str(tensors), format_bytes(nbytes), "", ""))
    show(text_table(("file", "tensors", "size", "types", "largest"), rows), sys.stdout)
    return 0


def _verify(options: argparse.Namespace) -> int:
    if not os.path.exists(options.path):
        raise ConfigError(f"{options.path!r} does not exist")
    damage: dict[str, str] = {}
    files: list[WeightFile] = []
    try:
        files = open_source(options.path)
    except ConfigError:
        raise
    except (DamagedError, TransferError) as error:
        damage[options.path] = str(error)
    with progress_of_bytes(f"verify {options.path}", sum(file.size_bytes for file in files)):
        for file in files:
            try:
                _read(file)
            except TransferError as error:
                damage[file.path] = str(error)
    paths = [file.path for file in files] or [options.path]
    sizes = {file.path: file.size_bytes for file in files}
    if options.json:
        rows = [
            {"path": path, "nbytes": sizes.get(path, 0), "damage": damage.get(path)}
            for path in paths
        ]
        write_json({"schema": 1, "ok": not damage, "checksums": False, "files": rows}, sys.stdout)
    else:
        fine = "whole and readable; the format has no checksums"
        table = [(path, format_bytes(sizes.get(path, 0)), damage.get(path, fine)) for path in paths]
        show(text_table(("file", "size", "state"), table), sys.stdout)
    return 1 if damage else 0


def _read(file: WeightFile) -> None:
    """Read all of a file. Raises TransferError."""
    opened = open_path(file.path, "r")
    try:
        memory = np.empty(min(PIECE_BYTES, file.size_bytes), np.uint8)
        with PieceReader(opened, 0, file.size_bytes, owner="weights") as reader:
            for at in range(0, file.size_bytes, PIECE_BYTES):
                reader.fill(memory[: min(PIECE_BYTES, file.size_bytes - at)])
    finally:
        opened.close()
