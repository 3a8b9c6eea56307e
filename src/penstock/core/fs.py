"""File system helpers: checks of directories, free space, locks, and durable small files.

They are implemented only here, so that checks and messages are the same for a tier, an optimizer, a
checkpoint and the manager of jobs.
"""

from __future__ import annotations

import errno as errnos
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.core.errors import ConfigError, NoSpaceError, free_space_bytes
from penstock.core.files import given_paths
from penstock.core.process import release_in_child
from penstock.core.units import format_bytes

_MEMORY_FILESYSTEMS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


# -- directories ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileSystem:
    """File system of a directory."""

    kind: str
    """Name in ``/proc/mounts``: ``"ext4"``, ``"tmpfs"``, ...; ``"unknown"`` if not known."""
    is_memory: bool
    """True if its files are in memory, so that offloading to it frees none."""


def filesystem_of(path: str | os.PathLike[str]) -> FileSystem:
    """Return the file system that ``path`` (or, if it is missing, its nearest parent) lies on."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return FileSystem("unknown", False)
    real = Path(path).resolve()
    kind, longest = "unknown", -1
    for line in mounts:  # id parent major:minor root MOUNT-POINT options [tags] - KIND source ...
        fields, _, rest = line.partition(" - ")
        mount = Path(_unescape(fields.split(" ")[4]))
        # A later mount on the same point hides an earlier one.
        if len(mount.parts) >= longest and real.is_relative_to(mount):
            kind, longest = rest.split(" ")[0], len(mount.parts)
    return FileSystem(kind, kind in _MEMORY_FILESYSTEMS)


def _unescape(mount: str) -> str:
    for octal in ("\\040", "\\011", "\\012", "\\134"):
        mount = mount.replace(octal, chr(int(octal[1:], 8)))
    return mount


def check_directory(path: str, what: str, *, allow_memory_filesystem: bool = False) -> None:
    """Check that files can be made in a directory, and that they are on a disk.

    Args:
        path: The directory.
        what: The setting or argument, for the error.
        allow_memory_filesystem: Whether a file system in memory will do.

    Raises:
        ConfigError: It is missing, not a directory, not writable, or in memory.
    """
    if not os.path.exists(path):
        raise ConfigError(f"{what} {path!r} does not exist; create it or name another")
    if not os.path.isdir(path):
        raise ConfigError(f"{what} {path!r} is not a directory; name one")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{what} {path!r} is not writable for user {os.geteuid()}; change its mode or name another"
        )
    system = filesystem_of(path)
    if system.is_memory and not allow_memory_filesystem:
        raise ConfigError(
            f"{what} {path!r} is on {system.kind}, so its files are in memory and would save none; name"
            " a directory on a disk"
        )


def check_directories(
    directories: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    what: str,
    *,
    allow_memory_filesystem: bool = False,
) -> tuple[str, ...]:
    """Return the absolute paths of one or several directories that can be written to.

    Raises:
        ConfigError: None is named, one is named twice, or ``check_directory`` refuses one.
    """
    paths = tuple(os.path.abspath(each) for each in given_paths(directories, what))
    if not paths:
        raise ConfigError(f"no {what} is named; name one")
    real = [os.path.realpath(path) for path in paths]
    for path, where in zip(paths, real, strict=True):
        check_directory(path, what, allow_memory_filesystem=allow_memory_filesystem)
        if real.count(where) > 1:
            raise ConfigError(f"{what} {path!r} is named twice; name each one once")
    return paths


# -- space ---------------------------------------------------------------------------------------


def check_space(
    needed_bytes: Iterable[tuple[str, int]],
    advice: str | Callable[[int, int], str],
    *,
    op: str = "allocate",
) -> None:
    """Check that each file system has the space that is needed in all directories on it.

    Check before a reservation: one that fails takes all there is for a moment, which harms others. A
    file system that cannot tell what is free is believed to have enough; so is one that is not there.

    Args:
        needed_bytes: Directories, and how much each is to hold in addition.
        advice: What to do, or a function that says it, given bytes needed and free.
        op: The operation, for the error.

    Raises:
        NoSpaceError: Names the directories on that file system, bytes needed and free, and the advice.
    """
    devices: dict[int, list[tuple[str, int]]] = {}
    for path, nbytes in needed_bytes:
        with suppress(OSError):
            devices.setdefault(os.stat(path).st_dev, []).append((path, nbytes))
    for those in devices.values():
        needed = sum(nbytes for _, nbytes in those)
        free = free_space_bytes(those[0][0])
        if 0 <= free < needed:
            then = advice if isinstance(advice, str) else advice(needed, free)
            raise NoSpaceError(
                errno=errnos.ENOSPC,
                op=op,
                path=", ".join(path for path, _ in those),
                offset_bytes=0,
                nbytes=needed,
                free_bytes=free,
                advice=f"{format_bytes(needed)} are needed there, {format_bytes(free)} are free; {then}",
            )


# -- locks ---------------------------------------------------------------------------------------


def try_lock(fd: int) -> bool:
    """Take the exclusive lock (``flock``) of an open file or directory, and return whether it is ours.

    It is held until every copy of the descriptor is closed, those of children included.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errnos.EWOULDBLOCK, errnos.EACCES):
            return False
        raise
    return True


class FileLock:
    """An exclusive lock of a file or directory, held until it is closed or the process ends.

    A forked child closes its copy: a worker would hold the lock for as long as it lives. Keep a
    reference until then; an object that was forgotten stays locked, in children as well.

    Attributes:
        fd: Of the file or directory; -1 once it is closed.
    """

    def __init__(self, fd: int, what: str, advice: str) -> None:
        """Take the lock; the descriptor is owned, and closed if that fails.

        Args:
            fd: Of the file or directory.
            what: What is locked, for the error.
            advice: What to do if it is in use.

        Raises:
            ConfigError: Another process holds the lock, or another object in this one.
            OSError: The file system has no locks.
        """
        self.fd = fd
        try:
            if not try_lock(fd):
                raise ConfigError(f"{what} is in use by {_holder(fd)}; {advice}")
        except BaseException:
            self.close()
            raise
        release_in_child(self, FileLock.close)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holder(fd: int) -> str:
    """Name the process that took a lock; the kernel lists those of this container by device and inode."""
    with suppress(OSError, IndexError, ValueError):
        facts = os.fstat(fd)
        device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            _, kind, _, _, pid, place, *_ = line.split()
            if kind == "FLOCK" and place == f"{device}:{facts.st_ino}" and int(pid) > 0:
                return "this process" if int(pid) == os.getpid() else f"process {pid}"
    return "another process"


# -- small files ---------------------------------------------------------------------------------


def sync_directory(path: str) -> None:
    """Wait until the names in a directory are on the device. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_durably(temporary: str, path: str) -> None:
    """Rename a file that is on the device, and wait until the name is, too. Raises OSError."""
    os.rename(temporary, path)
    sync_directory(os.path.dirname(path) or os.curdir)


def write_durably(
    path: str,
    data: bytes,
    *,
    permissions: int = 0o666,
    dir_fd: int | None = None,
    is_shared: bool = False,
    sync_name: bool = True,
) -> None:
    """Replace a small file. After a crash or a loss of power the old or the new one is there, whole.

    Args:
        path: The file; may be missing.
        data: Its new content.
        permissions: As of ``os.open``.
        dir_fd: The directory that ``path`` is a name in.
        is_shared: Whether several processes may write it at once. A crash then leaves a temporary file
            behind, which otherwise the next call uses.
        sync_name: Whether to wait until it is the new one for certain.

    Raises:
        OSError: It cannot be written; the old one stays.
    """
    suffix = f"{os.getpid()}-{secrets.token_hex(4)}.tmp" if is_shared else "new"
    temporary = f"{path}.{suffix}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags | (os.O_EXCL if is_shared else 0), permissions, dir_fd=dir_fd)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)  # always: else the name may outlive the content
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        os.rename(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    if sync_name and dir_fd is not None:
        os.fsync(dir_fd)
    elif sync_name:
        sync_directory(os.path.dirname(path) or os.curdir)
