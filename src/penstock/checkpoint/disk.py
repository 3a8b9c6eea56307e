"""Changes of directories by checkpoints, one method each, so that tests can stop before any of them.

Data files are written through an engine.
"""

from __future__ import annotations

import ctypes
import errno as errnos
import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from penstock.core.errors import (
    NO_SPACE_ERRNOS,
    NoSpaceError,
    TransferError,
    free_space_bytes,
)
from penstock.core.fs import try_lock
from penstock.core.process import release_in_child
from penstock.io.files import DirectFile, open_at
from penstock.io.traffic_report import written
from penstock.observe.clients import CHECKPOINTS

_RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2
_FICLONE: Final = 0x40049409
_PERMISSIONS: Final = 0o666
_NOT_POSSIBLE: Final = frozenset(
    {errnos.EINVAL, errnos.ENOSYS, errnos.EOPNOTSUPP, errnos.ENOTTY, errnos.EXDEV}
)
NO_DIRECTORY: Final = frozenset({errnos.ENOTDIR, errnos.ELOOP})
_NO_LINK: Final = frozenset(
    {errnos.EPERM, errnos.EMLINK, errnos.EXDEV, errnos.EOPNOTSUPP, errnos.ENOENT}
)

_libc = ctypes.CDLL(None, use_errno=True)


class Directory:
    """An open directory.

    Attributes:
        path: Its path in errors; it may have been renamed since.
        fd: Its descriptor.
    """

    def __init__(self, fd: int, path: str) -> None:
        """Take ownership of a descriptor."""
        self.fd = fd
        self.path = path

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def join(self, name: str) -> str:
        """Return the path of an entry."""
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        """List the names in the directory, sorted. Raises TransferError."""
        try:
            return sorted(os.listdir(self.fd))
        except OSError as error:
            raise failed("list", self.path, error) from error

    def close(self) -> None:
        """Close the descriptor, which frees the lock. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Disk:
    """The operating system's calls. Each raises TransferError, and has then changed nothing.

    Overridden to inject faults.
    """

    def open(self, path: str) -> Directory:
        """Open a directory."""
        try:
            return Directory(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)
        except OSError as error:
            raise failed("open", path, error) from error

    def open_in(self, parent: Directory, name: str) -> Directory:
        """Open a directory in a directory; a symbolic link is refused."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return Directory(os.open(name, flags, dir_fd=parent.fd), parent.join(name))
        except OSError as error:
            raise failed("open", parent.join(name), error) from error

    def make_path(self, path: str) -> None:
        """Make a directory and those missing above it; each name is durable before the next is made.

        The lowest existing name may not be durable, if the process that made it was killed: it is synced
        too.
        """
        where, missing = os.path.realpath(path), list[str]()
        while not os.path.lexists(where):
            where, name = os.path.split(where)
            missing.append(name)
        with suppress(PermissionError):  # then this user has made nothing there
            self._sync_above(where)
        while missing:
            where = os.path.join(where, missing.pop())
            try:
                with suppress(FileExistsError):
                    os.mkdir(where)
            except OSError as error:
                raise failed("make", where, error) from error
            try:
                self._sync_above(where)
            except TransferError:  # no later sync would help: the next attempt must make it again
                with suppress(OSError):
                    os.rmdir(where)
                raise

    def make_directory(self, parent: Directory, name: str) -> bool:
        """Make a directory; False if there is something of that name."""
        try:
            os.mkdir(name, dir_fd=parent.fd)
        except FileExistsError:
            return False
        except OSError as error:
            raise failed("make", parent.join(name), error) from error
        return True

    def create(self, directory: Directory, name: str, nbytes: int) -> DirectFile:
        """Create a file with its space reserved."""
        path = directory.join(name)
        file = open_at(directory.fd, name, "x+", path=path, permissions=_PERMISSIONS)
        try:
            if nbytes:
                file.preallocate(nbytes)
        except BaseException:
            file.close()
            raise
        return file

    def reuse(self, directory: Directory, name: str, nbytes: int) -> DirectFile | None:
        """Open a file to be overwritten, with its space reserved. See [Note: spare files].

        Returns:
            The file; None if its content may be needed, or if it is no file: then it is removed.
        """
        path = directory.join(name)
        try:
            file = open_at(directory.fd, name, "r+", path=path)
        except TransferError:
            self.drop(directory, name)
            return None
        try:
            facts = os.fstat(file.fd)
            if facts.st_nlink == 1 and is_alone(file.fd):
                if min(facts.st_size, facts.st_blocks * 512) < nbytes:
                    file.preallocate(nbytes)
                return file
            self.drop(directory, name)
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def clone(self, source: DirectFile, target: DirectFile) -> bool:
        """Share all data of a file with another; False if the file system cannot."""
        try:
            fcntl.ioctl(target.fd, _FICLONE, source.fd)
        except OSError as error:
            if error.errno in _NOT_POSSIBLE:
                return False
            raise failed("clone", target.path, error) from error
        return True

    def link(self, source: Directory, directory: Directory, name: str) -> bool:
        """Link a file of another checkpoint into this one; False if that is not possible.

        Its data are synced: that checkpoint may be a new copy.
        """
        try:
            os.link(
                name, name, src_dir_fd=source.fd, dst_dir_fd=directory.fd, follow_symlinks=False
            )
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise failed("link", directory.join(name), error) from error
        self.sync_file(directory, name)
        return True

    def size_bytes(self, directory: Directory, name: str) -> int:
        """Return the length of a file in a directory."""
        try:
            return os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_size
        except OSError as error:
            raise failed("stat", directory.join(name), error) from error

    def write(self, directory: Directory, name: str, data: bytes) -> None:
        """Make a new file of a few bytes; ``sync_file`` waits for it."""
        path = directory.join(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, _PERMISSIONS, dir_fd=directory.fd)
            try:
                rest = memoryview(data)
                with written(CHECKPOINTS, len(data), path):
                    while rest:
                        rest = rest[os.write(fd, rest) :]
            finally:
                os.close(fd)
        except OSError as error:
            raise failed("write", path, error, len(data)) from error

    def sync_file(self, directory: Directory, name: str) -> None:
        """Wait until a small file is on the device, and drop its pages from the cache."""
        path = directory.join(name)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=directory.fd)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        except OSError as error:
            raise failed("sync", path, error) from error

    def finish(self, file: DirectFile, nbytes: int) -> None:
        """Give a file its exact length, and wait until all of it is on the device, but for its times."""
        try:
            if file.size_bytes != nbytes:
                os.ftruncate(file.fd, nbytes)
            os.fdatasync(file.fd)
        except OSError as error:
            raise failed("sync", file.path, error, nbytes) from error

    def sync(self, directory: Directory) -> None:
        """Wait until the names in a directory are on the device."""
        try:
            os.fsync(directory.fd)
        except OSError as error:
            raise failed("sync", directory.path, error) from error

    def rename(self, parent: Directory, name: str, to: str) -> None:
        """Give something another name in its directory; one that exists is not replaced."""
        try:
            if renameat2(parent.fd, name, to, _RENAME_NOREPLACE):
                return
            with suppress(FileNotFoundError):
                os.stat(to, dir_fd=parent.fd, follow_symlinks=False)
                raise FileExistsError(errnos.EEXIST, "")
            os.rename(name, to, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
        except OSError as error:
            raise failed("rename", parent.join(to), error) from error

    def exchange(self, parent: Directory, name: str, other: str) -> bool:
        """Swap the names of two, at once; False if this file system cannot."""
        try:
            return renameat2(parent.fd, name, other, RENAME_EXCHANGE)
        except OSError as error:
            raise failed("rename", parent.join(other), error) from error

    def remove(self, parent: Directory, name: str) -> None:
        """Remove a directory with its files, or whatever has its name, if anything has.

        Of a link only the link is removed. The present name is durable before a file is removed: else a
        loss of power could bring back a part of a checkpoint under its earlier name.
        """
        try:
            fd = os.open(
                name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent.fd
            )
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in NO_DIRECTORY:
                self.drop(parent, name)
                return
            raise failed("remove", parent.join(name), error) from error
        with Directory(fd, parent.join(name)) as directory:
            self.sync(parent)
            self.clear(directory)
        try:
            os.rmdir(name, dir_fd=parent.fd)
        except OSError as error:
            raise failed("remove", parent.join(name), error) from error

    def clear(self, directory: Directory) -> None:
        """Remove everything in a directory."""
        for name in directory.names():
            self.drop(directory, name)

    def drop(self, directory: Directory, name: str) -> None:
        """Remove one entry of a directory, if it exists."""
        try:
            facts = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode):
                self.remove(directory, name)
            else:
                os.unlink(name, dir_fd=directory.fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if isinstance(error, TransferError):
                raise
            raise failed("remove", directory.join(name), error) from error

    def _sync_above(self, path: str) -> None:
        with self.open(os.path.dirname(path)) as parent:
            self.sync(parent)


def lock(directory: Directory) -> bool:
    """Lock a directory until it is closed, or the process ends; return False if another has it."""
    try:
        if not try_lock(directory.fd):
            return False
    except OSError as error:
        raise failed("lock", directory.path, error) from error
    release_in_child(directory, Directory.close)  # a worker would hold it for as long as it lives
    return True


def is_alone(fd: int) -> bool:
    """Return whether nothing else has a file open or mapped, in any process; False if unknown.

    Only then does the kernel grant a write lease. A process that opens the file in that moment waits
    until the lease is returned, and this one gets a signal: SIGURG, which is ignored by default.

    Args:
        fd: Descriptor of the file, open for writing.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (AttributeError, OSError):
        return False
    return True


def leads_to(path: str, directory: Directory, parent: Directory | None = None) -> bool:
    """Return whether a path, or a name in a parent, still leads to a directory opened by it."""
    with suppress(OSError):
        if parent is None:
            found = os.stat(path)
        else:
            found = os.stat(path, dir_fd=parent.fd, follow_symlinks=False)
        return os.path.samestat(found, os.fstat(directory.fd))
    return False


@contextmanager
def having_threads(path: str) -> Iterator[None]:
    """Raise TransferError if the system starts no thread in the block."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise failed("a thread for the save", path, OSError(errnos.EAGAIN, "")) from error


def failed(op: str, path: str, error: OSError, nbytes: int = 0) -> TransferError:
    """Return the TransferError, or NoSpaceError, for an error of the system."""
    if isinstance(error, TransferError):
        return error
    code = error.errno or errnos.EIO
    full = code in NO_SPACE_ERRNOS
    free = free_space_bytes(path)
    return (NoSpaceError if full else TransferError)(
        errno=code,
        op=op,
        path=path,
        offset_bytes=0,
        nbytes=nbytes,
        free_bytes=free_space_bytes(os.path.dirname(path)) if free < 0 else free,
        advice="free some space or name another directory" if full else "",
    )


def renameat2(fd: int, name: str, to: str, flag: int) -> bool:
    """Rename with a flag; return False if the system cannot. Raises OSError for other reasons."""
    try:
        call = _libc.renameat2
    except AttributeError:  # a C library from before 2018
        return False
    if call(fd, os.fsencode(name), fd, os.fsencode(to), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_POSSIBLE:
        return False
    raise OSError(code, os.strerror(code))
