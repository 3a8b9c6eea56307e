"""Wrappers of the system calls whose changes :class:`power_loss.PowerLossDisk` records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, Final

from penstock.checkpoint import disk as checkpoint_disk
from penstock.io.threads import ThreadEngine
from penstock.store.engine import shared_engine
from penstock.testing.shared_engine import shared_engine_replaced
from power_loss import PowerLossDisk

_Call = Callable[..., Any]
_Wrap = Callable[[PowerLossDisk, _Call], _Call]


def _full(path: Any, dir_fd: int | None) -> str:
    """Return a path that begins at the root."""
    start = os.getcwd() if dir_fd is None else f"/proc/self/fd/{dir_fd}"
    return os.path.join(start, os.fsdecode(path))


def _parent(disk: PowerLossDisk, path: str) -> int | None:
    """Return the number of the parent directory of a path."""
    directory = os.path.dirname(path)
    return disk.node_of(directory) if os.path.isdir(directory) else None


# -- files ----------------------------------------------------------------------------------------


def _open(disk: PowerLossDisk, call: _Call) -> _Call:
    def noted(path: Any, flags: int, *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
        begun = disk.now
        descriptor = call(path, flags, *args, dir_fd=dir_fd, **more)
        node = disk.node_of(descriptor)
        if node is not None:
            if flags & os.O_TRUNC:
                disk.note(begun, node, "truncate")
        elif flags & os.O_CREAT:
            where = _full(path, dir_fd)
            parent = _parent(disk, where)
            if parent is not None:
                names = {os.path.basename(where): disk.add(descriptor)}
                disk.note(begun, parent, "names", names=names)
        return descriptor

    return noted


def _write_at(disk: PowerLossDisk, call: _Call) -> _Call:
    def noted(descriptor: int, data: Any, offset: int) -> Any:
        node = disk.node_of(descriptor)
        if node is None:
            return call(descriptor, data, offset)
        # the memory may be reused as soon as this returns
        kept = b"".join(map(bytes, data)) if isinstance(data, list) else bytes(data)
        begun = disk.now
        moved = call(descriptor, data, offset)
        disk.note(begun, node, "write", offset, data=kept[:moved])
        return moved

    return noted


def _write(disk: PowerLossDisk, call: _Call) -> _Call:
    def noted(descriptor: int, data: Any) -> Any:
        node = disk.node_of(descriptor)
        if node is None:
            return call(descriptor, data)
        begun, offset = disk.now, os.lseek(descriptor, 0, os.SEEK_CUR)
        moved = call(descriptor, data)
        disk.note(begun, node, "write", offset, data=bytes(data)[:moved])
        return moved

    return noted


def _resize(what: str) -> _Wrap:
    def wrap(disk: PowerLossDisk, call: _Call) -> _Call:
        def noted(descriptor: int, *args: int) -> Any:
            node, begun = disk.node_of(descriptor), disk.now
            call(descriptor, *args)
            if node is not None:
                disk.note(begun, node, what, sum(args))

        return noted

    return wrap


def _sync(disk: PowerLossDisk, call: _Call) -> _Call:
    def noted(descriptor: int) -> Any:
        node, begun = disk.node_of(descriptor), disk.now
        failed = True
        try:
            call(descriptor)
            failed = False
        finally:
            if node is not None:
                disk.note_sync(begun, node, failed=failed)

    return noted


# -- names ----------------------------------------------------------------------------------------


def _make_directory(disk: PowerLossDisk, call: _Call) -> _Call:
    def noted(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        begun, where = disk.now, _full(path, dir_fd)
        parent = _parent(disk, where)
        call(path, mode, dir_fd=dir_fd)
        if parent is not None:
            disk.note(begun, parent, "names", names={os.path.basename(where): disk.add(where)})

    return noted


def _remove(disk: PowerLossDisk, call: _Call) -> _Call:
    def noted(path: Any, *, dir_fd: int | None = None) -> None:
        begun, where = disk.now, _full(path, dir_fd)
        parent = _parent(disk, where)
        if parent is not None and os.path.lexists(where):
            disk.hold(where)
        call(path, dir_fd=dir_fd)
        if parent is not None:
            disk.note(begun, parent, "names", names={os.path.basename(where): None})

    return noted


def _link(disk: PowerLossDisk, call: _Call) -> _Call:
    def noted(
        source: Any,
        target: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        begun, where = disk.now, _full(target, dst_dir_fd)
        parent = _parent(disk, where)
        call(
            source,
            target,
            src_dir_fd=src_dir_fd,
            dst_dir_fd=dst_dir_fd,
            follow_symlinks=follow_symlinks,
        )
        if parent is not None:
            node = disk.node_of(where)
            assert node is not None, f"{where} is linked from elsewhere"
            disk.note(begun, parent, "names", names={os.path.basename(where): node})

    return noted


def _rename(disk: PowerLossDisk, call: _Call) -> _Call:
    def noted(
        source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        old, new = _full(source, src_dir_fd), _full(target, dst_dir_fd)
        begun, parent, into = disk.now, _parent(disk, old), _parent(disk, new)
        assert parent == into, f"{old} moves to another directory, which is not simulated"
        node = None if parent is None else disk.node_of(old)
        call(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if parent is not None:
            names = {os.path.basename(old): None, os.path.basename(new): node}
            disk.note(begun, parent, "names", names=names)

    return noted


def _rename_in(disk: PowerLossDisk, call: _Call) -> _Call:
    def noted(descriptor: int, name: str, to: str, flag: int) -> Any:
        begun, parent = disk.now, disk.node_of(descriptor)
        if parent is None:
            return call(descriptor, name, to, flag)
        node = disk.node_of(_full(name, descriptor))
        is_swap = flag == checkpoint_disk.RENAME_EXCHANGE
        other = disk.node_of(_full(to, descriptor)) if is_swap else None
        done = call(descriptor, name, to, flag)
        if done:
            disk.note(begun, parent, "names", names={name: other, to: node})
        return done

    return noted


CALLS: Final[dict[tuple[ModuleType, str], _Wrap]] = {
    (os, "open"): _open,
    (os, "write"): _write,
    (os, "pwrite"): _write_at,
    (os, "pwritev"): _write_at,
    (os, "ftruncate"): _resize("truncate"),
    (os, "posix_fallocate"): _resize("extend"),
    (os, "fsync"): _sync,
    (os, "fdatasync"): _sync,
    (os, "mkdir"): _make_directory,
    (os, "rmdir"): _remove,
    (os, "unlink"): _remove,
    (os, "link"): _link,
    (os, "rename"): _rename,
    (checkpoint_disk, "renameat2"): _rename_in,
}
"""Wrappers by module and name of the function."""


@contextmanager
def recording(disk: PowerLossDisk) -> Iterator[None]:
    """Record changes by any thread inside the block; for one disk at a time.

    The shared engine is one of threads meanwhile: asynchronous writes pass no function of Python.
    """
    before = {place: getattr(*place) for place in CALLS}
    for place, wrap in CALLS.items():
        setattr(*place, wrap(disk, before[place]))
    threads = isinstance(shared_engine(), ThreadEngine)
    try:
        with nullcontext() if threads else shared_engine_replaced(ThreadEngine()):
            yield
    finally:
        for place, call in before.items():
            setattr(*place, call)
        disk.close_held()
