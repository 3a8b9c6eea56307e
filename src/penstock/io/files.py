"""Files for engines: with O_DIRECT where the file system allows it, else buffered but not cached.

Spill files have no name: they are created unlinked, so a crash leaves nothing behind. They are closed on
exec. A forked child inherits them, and their space is free when the last copy is closed.
"""

from __future__ import annotations

import ctypes
import errno as errnos
import fcntl
import os
import secrets
import struct
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from penstock.core import knobs
from penstock.core.errors import (
    ClosedError,
    ConfigError,
    PenstockWarning,
    TransferError,
    transfer_error,
)
from penstock.core.files import open_regular
from penstock.core.fs import filesystem_of

Mode = Literal["r", "r+", "w+", "x+"]
"""Modes as of ``open``: read; read and write; the same, created or emptied; the same, must be new."""

_FLAGS: Final[dict[str, int]] = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w+": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x+": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}
_OWNER_ONLY: Final = 0o600

MAX_GRANULE_BYTES: Final = 4096
"""Coarsest alignment required of callers; files that need more are used buffered."""

_CANNOT_RESERVE: Final = frozenset({errnos.EOPNOTSUPP, errnos.EINVAL, errnos.ENOSYS})
_NO_TMPFILE: Final = frozenset({errnos.EOPNOTSUPP, errnos.EISDIR, errnos.EINVAL, errnos.ENOENT})

_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000  # Linux 6.1
_STATX_BYTES: Final = 256
_SYNC_FILE_RANGE_ALL: Final = 7  # wait before, write, wait after

_libc = ctypes.CDLL(None, use_errno=True)
_warned: set[str] = set()  # directories; at most one warning each


class DirectFile:
    """Open file for engines. See :class:`penstock.io.engine.File`.

    Thread-safe except for ``close``, which must come after the last transfer.

    Attributes:
        path: Its path, or the directory of an unlinked one.
        direct: True if it is open with O_DIRECT.
        granule_bytes: Alignment of addresses, offsets and lengths; 1 if buffered.
    """

    def __init__(self, fd: int, path: str, granule_bytes: int) -> None:
        """Take ownership of a descriptor. See ``open_unlinked`` and ``open_path``.

        Args:
            fd: The descriptor.
            path: Its name in errors.
            granule_bytes: Alignment of direct transfers; 0 if the descriptor is buffered.
        """
        self._fd = fd
        self.path = path
        self.direct = granule_bytes > 0
        self.granule_bytes = granule_bytes or 1
        if not self.direct:
            # Without read-ahead, whose pages would stay in the page cache.
            with suppress(OSError):  # only a hint
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __repr__(self) -> str:
        how = f"direct, granule {self.granule_bytes}" if self.direct else "buffered"
        return f"DirectFile({self.path!r}, {how}{', closed' if self._fd < 0 else ''})"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # at exit the system closes it, and globals may be gone
            self.close()

    @property
    def fd(self) -> int:
        """File descriptor. Raises ClosedError after ``close``."""
        if self._fd < 0:
            raise ClosedError(f"{self!r} is used after its close")
        return self._fd

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return os.fstat(self.fd).st_size

    def preallocate(self, nbytes: int) -> None:
        """Make the file at least ``nbytes`` long, with its space reserved; contents are zero.

        If the file system cannot reserve space, the file is only extended, and a full disk is noticed
        when it is written to.

        Raises:
            NoSpaceError: The file system is full; the file is as long as it was.
            TransferError: Any other failure.
        """
        size = self.size_bytes
        try:
            try:
                os.posix_fallocate(self.fd, 0, nbytes)
            except OSError as error:
                if error.errno not in _CANNOT_RESERVE:
                    raise
                os.ftruncate(self.fd, max(size, nbytes))
        except OSError as error:
            with suppress(OSError):  # free the space that a failed attempt has reserved
                os.ftruncate(self.fd, size)
            raise transfer_error(
                errno=error.errno or errnos.EIO,
                op="allocate",
                path=self.path,
                offset_bytes=size,
                nbytes=nbytes - size,
            ) from error

    def close(self) -> None:
        """Close the descriptor; an unlinked file is then gone. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


def open_unlinked(directory: str | os.PathLike[str]) -> DirectFile:
    """Create an empty file without a name in ``directory``, accessible to this user only.

    Raises:
        TransferError: The directory is missing, not a directory, not writable, ...
    """
    where = os.fspath(directory)
    return _direct(_open_unlinked(where), where, where)


def open_unlinked_buffered(directory: str | os.PathLike[str]) -> DirectFile:
    """Create a file as ``open_unlinked``, without O_DIRECT, for an engine that reopens it, as cuFile."""
    where = os.fspath(directory)
    return DirectFile(_open_unlinked(where), where, 0)


def open_path(path: str | os.PathLike[str], mode: Mode) -> DirectFile:
    """Open a regular file by its path. A file that is created is accessible to this user only.

    Raises:
        ConfigError: An unknown mode.
        TransferError: The file cannot be opened, or is not a regular one.
    """
    where = os.fspath(path)
    if mode not in _FLAGS:
        raise ConfigError(f"mode {mode!r} of {where!r} is unknown; known are {', '.join(_FLAGS)}")
    try:
        fd = open_regular(where, _FLAGS[mode], _OWNER_ONLY)
    except TransferError:
        raise
    except OSError as error:
        raise _open_error(error, where) from error
    return _direct(fd, where, str(Path(where).parent))


def open_at(
    directory_fd: int, name: str, mode: Mode, *, path: str, permissions: int = _OWNER_ONLY
) -> DirectFile:
    """Open a regular file by its name in an open directory; a symbolic link is refused.

    Args:
        directory_fd: Descriptor of the directory.
        name: Without a slash: nothing outside the directory can be reached.
        mode: As of ``open_path``.
        path: Its name in errors.
        permissions: Permissions of a file that is created, reduced by the process's umask.

    Raises:
        ConfigError: An unknown mode, or a name that leaves the directory.
        TransferError: The file cannot be opened, or is not a regular one.
    """
    if mode not in _FLAGS or "/" in name or name in ("", ".", ".."):
        raise ConfigError(f"{name!r} cannot be opened in {path!r} with mode {mode!r}")
    try:
        flags = _FLAGS[mode] | os.O_NOFOLLOW
        fd = open_regular(name, flags, permissions, dir_fd=directory_fd, called=path)
    except TransferError:
        raise
    except OSError as error:
        raise _open_error(error, path) from error
    return _direct(fd, path, os.path.dirname(path))


def drop_cache(fd: int, offset: int, nbytes: int, *, written: bool) -> None:
    """Drop a buffered file's pages from the page cache, after writing dirty ones. Raises OSError.

    Otherwise the page cache would hold the bytes that were offloaded to free memory.
    """
    if written:
        _write_out(fd, offset, nbytes)
    with suppress(OSError):  # only a hint
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _open_unlinked(directory: str) -> int:
    try:
        return _open_nameless(directory)
    except OSError as error:
        raise _open_error(error, directory) from error


def _open_nameless(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, _OWNER_ONLY)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    path = os.path.join(directory, f".penstock-{os.getpid()}-{secrets.token_hex(8)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
    try:
        os.unlink(path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_error(error: OSError, path: str) -> Exception:
    code = error.errno or errnos.EIO
    return transfer_error(errno=code, op="open", path=path, offset_bytes=0, nbytes=0)


def _direct(fd: int, path: str, directory: str) -> DirectFile:
    """Switch on O_DIRECT if possible; warn once per directory if not."""
    wanted = not knobs.buffered_io()
    file = DirectFile(fd, path, _granule(fd) if wanted else 0)
    if file.direct:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    elif wanted:
        _warn_buffered(directory)
    return file


def _granule(fd: int) -> int:
    """Return the alignment of direct transfers on this file; 0 if there can be none."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return 0
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    aligns = _dio_align(fd)
    granule = MAX_GRANULE_BYTES if aligns is None else max(aligns) if min(aligns) else 0
    return granule if granule <= MAX_GRANULE_BYTES else 0


def _dio_align(fd: int) -> tuple[int, int] | None:
    """Return the (memory, offset) alignment from ``statx``; zeros: no direct I/O; None: not reported."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        failed = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    except AttributeError:  # a C library from before 2018
        return None
    (mask,) = struct.unpack_from("=I", buffer, 0)
    if failed or not mask & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", buffer, 0x98)
    return memory, offset


def _warn_buffered(directory: str) -> None:
    real = os.path.realpath(directory)
    if real in _warned:
        return
    _warned.add(real)
    kind = filesystem_of(real).kind
    warnings.warn(
        f"{directory!r} is on {kind}, which has no direct I/O: transfers are buffered, slower, and"
        " cost a copy on the CPU; name a directory on a local ext4 or xfs if there is one",
        PenstockWarning,
        stacklevel=4,
    )


def _write_out(fd: int, offset: int, nbytes: int) -> None:
    """Write a range's dirty pages and wait for them; cheaper than ``fdatasync`` of the whole file."""
    try:
        sync = _libc.sync_file_range
    except AttributeError:
        os.fdatasync(fd)
        return
    arguments = (ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_ALL)
    if sync(fd, *arguments) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errnos.ENOSYS, errnos.ESPIPE, errnos.EINVAL):
        raise OSError(code, os.strerror(code))
    os.fdatasync(fd)
