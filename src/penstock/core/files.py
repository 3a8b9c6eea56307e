"""Paths and files from users: checking of paths, opening of files, parsing of their text."""

from __future__ import annotations

import errno as errnos
import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterable
from typing import Any, Final

from penstock.core.errors import ConfigError, transfer_error

MAX_TEXT_BYTES: Final = 1 << 30
"""Length of the longest text file that is read whole."""
_KINDS: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def given_path(path: str | os.PathLike[str], what: str) -> str:
    """Return the path as a string.

    Args:
        path: The user's path. An empty one, as from an unset variable, would be the current directory.
        what: The setting or argument, for the error.

    Raises:
        ConfigError: The path is empty, is no path, or holds a character that no path can have.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{what} is {path!r}, which is not a path; give a string")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise ConfigError(f"{what} is {path!r}, a path of bytes; give a string")
    if not text:
        raise ConfigError(f"{what} is an empty path; name it, or '.' for the current directory")
    try:
        if b"\0" not in os.fsencode(text):
            return text
    except UnicodeEncodeError:
        pass
    raise ConfigError(f"{what} is {text!r}, which has a character that no path can have")


def given_paths(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], what: str
) -> tuple[str, ...]:
    """Return one path or several as strings. Raises ConfigError as ``given_path``."""
    several = (paths,) if isinstance(paths, str | bytes | os.PathLike) else paths
    if not isinstance(several, Iterable):
        raise ConfigError(f"{what} is {paths!r}, which is neither a path nor several")
    return tuple(given_path(each, what) for each in several)


def absolute_path(path: str | os.PathLike[str], what: str) -> str:
    """Return the absolute path. Raises ConfigError as ``given_path``."""
    return os.path.abspath(given_path(path, what))


def open_regular(
    path: str,
    flags: int = os.O_RDONLY,
    mode: int = 0o666,
    *,
    dir_fd: int | None = None,
    called: str = "",
) -> int:
    """Open a regular file and return its descriptor; also an ``opener`` for ``open``.

    Any other file is refused at once: opening a pipe may wait for ever, and reading a device may never
    end.

    Args:
        path: The file.
        flags: Flags as of ``os.open``.
        mode: Permissions of a file that is created.
        dir_fd: The directory that ``path`` is relative to.
        called: Name of the file in errors, if not ``path``.

    Raises:
        TransferError: The path leads to something that is not a regular file, or has a character that no
            path can have.
        OSError: The file cannot be opened.
    """
    flags |= os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(path, flags | os.O_NONBLOCK, mode, dir_fd=dir_fd)
    except BlockingIOError:  # a lease, which only regular files have, is broken by a blocking open
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
    except ValueError as error:
        raise transfer_error(
            errno=errnos.EINVAL,
            op="open",
            path=called or path,
            offset_bytes=0,
            nbytes=0,
            advice="the name has a character that no path can have",
        ) from error
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind):
        os.close(fd)
        raise not_regular(called or path, kind)
    os.set_blocking(fd, True)
    return fd


def not_regular(path: str, kind: int) -> OSError:
    """Return the error that ``path`` is not a regular file.

    Args:
        path: The path, for the message.
        kind: Its ``st_mode``.
    """
    named = next((name for test, name in _KINDS if test(kind)), "something else")
    return transfer_error(
        errno=errnos.EISDIR if stat.S_ISDIR(kind) else errnos.EINVAL,
        op="open",
        path=path,
        offset_bytes=0,
        nbytes=0,
        advice=f"it is {named}; only a regular file can be used here",
    )


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a regular file.

    Raises:
        OSError: The file cannot be opened or read, or is not a regular one.
        ValueError: The file is not UTF-8, or longer than 1 GiB.
    """
    with open(path, encoding="utf-8", opener=open_regular) as file:
        if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
            raise ValueError(f"it is longer than {MAX_TEXT_BYTES} bytes")
        return file.read()


def parse_json(text: str | bytes | bytearray, **hooks: Any) -> Any:
    """Parse JSON as ``json.loads`` does. Raises ValueError for any error in it."""
    return _parsed(lambda: json.loads(text, **hooks))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError for any error in it."""
    found: dict[str, Any] = _parsed(lambda: tomllib.loads(text))
    return found


def _parsed(parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
