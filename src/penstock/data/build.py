"""Finding, building and checking a data set's index."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core import knobs
from penstock.core.errors import (
    ChecksumError,
    ConfigError,
    DatasetError,
    PenstockError,
    PenstockWarning,
    TransferError,
)
from penstock.core.files import absolute_path, given_path
from penstock.data.cache import make_directory
from penstock.data.files import FileTable, list_files
from penstock.data.formats import FORMATS, IndexingJob, Progress
from penstock.data.index import Index

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Opened:
    """A data set whose index is there."""

    root: str
    index: Index
    index_path: str | None
    """Path of the index; ``None``: it is only in memory."""
    built: bool
    """True if the index was built now."""


def open_index(
    paths: Paths,
    *,
    format_name: str | None = None,
    options: Mapping[str, Any] | None = None,
    index_dir: str | os.PathLike[str] | None = None,
    rebuild: bool = False,
    progress: Progress = lambda _: None,
) -> Opened:
    """Find a data set's index, or build it.

    One that is damaged, or that another user may have written, is built anew, with a PenstockWarning; one
    that cannot be kept stays in memory, likewise.

    Args:
        paths: A file, a directory, or files.
        format_name: Of :data:`FORMATS`; None: told by the files' names.
        options: Of the format.
        index_dir: Where the index is kept; the directory ``PENSTOCK_CACHE`` if None.
        rebuild: Build it anew.
        progress: Told the share that is done, 0 to 1, while it is built.

    Raises:
        ConfigError: An unknown format or option, or a package that is missing.
        DatasetError: A damaged data set, or one that changed since; says what changed.
        ChecksumError: A packed set's header or tables are damaged.
        TransferError: Something cannot be read.
    """
    root, names, listed = _names(paths)
    chosen_name = _format(format_name, root, names)
    found = FORMATS[chosen_name]
    if listed:
        names = [name for name in names if found.accept(os.path.basename(name))]
    if not names:
        raise DatasetError(f"{root!r} has no file of the format {chosen_name}")
    chosen = _options(chosen_name, options or {})
    path = _index_path(index_dir, root, None if listed else names, chosen_name, chosen)
    kept, doubt = (None, "") if rebuild else _kept(path)
    if kept is not None:
        kept.files.check(root, names if listed else None)
        return Opened(root=root, index=kept, index_path=path, built=False)
    job = IndexingJob(root=root, names=names, options=chosen, progress=progress, whole=listed)
    table = FileTable.of(root, names)
    try:
        index = found.build(job).build(table, chosen)
    except FileNotFoundError as error:
        raise DatasetError(f"a file vanished while the index was built: {error}") from error
    except PenstockError:
        raise
    except Exception as error:  # there is no list of what other packages raise about damaged files
        raise DatasetError(
            f"{root!r} cannot be indexed as {chosen_name}; it is damaged, or of another format:"
            f" {type(error).__name__}: {error}"
        ) from error
    index.check_within()
    table.check(root, None)  # nobody wrote to them meanwhile
    where: str | None = path
    try:
        make_directory(os.path.dirname(path))
        index.save(path)
    except (DatasetError, TransferError) as error:
        where, doubt = None, f"{error}; it stays in memory"
    if doubt:
        warnings.warn(f"the index was built anew: {doubt}", PenstockWarning, stacklevel=3)
    return Opened(root=root, index=index, index_path=where, built=True)


def _kept(path: str) -> tuple[Index | None, str]:
    """Return the index that was kept, if it can be used, and why not if there is one."""
    try:
        return Index.load(path), ""
    except FileNotFoundError:
        return None, ""
    except (ChecksumError, DatasetError, TransferError) as error:
        return None, str(error)


def _names(paths: Paths) -> tuple[str, list[str], bool]:
    """(root, names, whether they are a directory's)."""
    if isinstance(paths, str | os.PathLike):
        path = absolute_path(paths, "the data set")
        if os.path.isdir(path):
            return path, list_files(path, lambda _: True), True
        paths = [path]
    files = [absolute_path(each, "the data set") for each in paths]
    missing = [each for each in files if not os.path.isfile(each)]
    if missing or not files:
        raise DatasetError(f"data set {missing[0]!r} is missing" if missing else "no file is named")
    root = os.path.commonpath([os.path.dirname(each) for each in files])
    return root, [os.path.relpath(each, root) for each in files], False


def _format(name: str | None, root: str, names: Sequence[str]) -> str:
    """Return the name of the format."""
    if name is not None:
        if name not in FORMATS:
            raise ConfigError(f"format {name!r} is none of {', '.join(FORMATS)}")
        return name
    for known, found in FORMATS.items():
        if any(found.accept(os.path.basename(each)) for each in names):
            return known
    if not names:
        raise DatasetError(f"the data set {root!r} has no files")
    what = (
        repr(os.path.join(root, names[0]))
        if len(names) == 1
        else f"the {len(names)} files of {root!r}"
    )
    raise DatasetError(
        f"the format of {what} cannot be told from names; name it, one of {', '.join(FORMATS)}"
    )


def _options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    options = FORMATS[name].options
    unknown = sorted(set(given) - set(options))
    if unknown:
        known = ", ".join(options) or "none"
        raise ConfigError(f"the format {name} has no option {unknown[0]!r}; it has {known}")
    return {**options, **given}


def _index_path(
    directory: str | os.PathLike[str] | None,
    root: str,
    names: Sequence[str] | None,
    format_name: str,
    options: Mapping[str, Any],
) -> str:
    folder = knobs.cache_directory() if directory is None else given_path(directory, "index_dir")
    what = json.dumps([root, names, format_name, options], sort_keys=True, default=str)
    key = hashlib.blake2b(what.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()
    return os.path.join(folder, f"{os.path.basename(root) or 'root'}-{key}.index")
