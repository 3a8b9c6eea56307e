"""A disk whose power fails: what may be left of all that was written below a directory.

1. ``Disk(directory)``; in ``with disk.recording():`` whatever is to be tried. All of it is done, and each
   change is noted, with the moments at which its system call began and ended.
2. ``disk.volatile(at)``: the changes that nobody can rely on at a moment.
3. ``disk.lose_power(at, into, fates)``: what is left then, in another directory; ``disk.kill(at, into)``:
   what the next process finds where only the process has died, and the power may fail later.

[Note: what a loss of power leaves]
    A change of a file is safe when ``fsync`` or ``fdatasync`` of that file has returned, if it was called
    after the change had returned; a name is safe by ``fsync`` of its directory. If that call fails, no
    later one makes the change safe: Linux takes what it could not write for written. O_DIRECT makes no
    change safe, for it may be in the device's own cache. Every other change may be there, or not, or be
    torn between sectors, and they may have come in any order. What a torn write has made longer may be
    zeros.
    What one call changes in a directory is there as a whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

from penstock.core.locks import Lock

Content = bytearray | dict[str, int]
"""Of a file, or of a directory: which node has which name."""

LOST: Final = 0
KEPT: Final = 1
"""What becomes of a change; any higher number: it is torn, in one of so many ways."""

_ROOT: Final = 0


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What one system call has changed in one file or directory."""

    node: int
    """Number of the file or directory."""
    begun: int
    ended: int
    """Moments."""
    what: Literal["write", "truncate", "extend", "names"]
    offset_bytes: int = 0
    """Where was written; or the length that the file has got, or has at least."""
    data: bytes = b""
    names: Mapping[str, int | None] = field(default_factory=dict)
    """The node that a name leads to; None: there is no such name any more."""

    def apply(self, content: Content) -> None:
        """Make it."""
        if isinstance(content, dict):
            for name, node in self.names.items():
                content.pop(name, None)
                if node is not None:
                    content[name] = node
            return
        content.extend(bytes(max(0, self.offset_bytes - len(content))))
        if self.what == "write":
            content[self.offset_bytes : self.offset_bytes + len(self.data)] = self.data
        elif self.what == "truncate":
            del content[self.offset_bytes :]

    def left(self, fate: int, sector_bytes: int) -> Iterator[Change]:
        """What is left of it."""
        if fate == KEPT or (fate != LOST and self.what != "write"):
            yield self
        elif fate != LOST:
            random, end = Random(fate), self.offset_bytes + len(self.data)
            if random.random() < 0.5:
                yield replace(self, what="extend", offset_bytes=end, data=b"")
            start = self.offset_bytes
            while start < end:
                stop = min(end, (start // sector_bytes + 1) * sector_bytes)
                if random.random() < 0.5:
                    part = self.data[start - self.offset_bytes : stop - self.offset_bytes]
                    yield replace(self, offset_bytes=start, data=part)
                start = stop


@dataclass(frozen=True, slots=True)
class Sync:
    """A call that waited for a file or directory."""

    node: int
    begun: int
    ended: int
    failed: bool


class Disk:
    """Everything below a directory, and how it came there. Thread-safe.

    Changes by other means than the functions of ``os`` that are named here are not seen: see ``missed``.

    Attributes:
        root: The directory.
        now: The present moment; the end of each call that is noted is one of its own.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Take what is there as safe."""
        self.now = 0
        self.root = Path(directory)
        self._contents: dict[int, Content] = {}
        self._nodes: dict[tuple[int, int], int] = {}  # by device and inode
        self._changes: list[Change] = []
        self._syncs: list[Sync] = []
        self._lock = Lock()
        self._take(self.root)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is changed; of one disk at a time, by any thread."""
        before = {name: getattr(os, name) for name in _CALLS}
        for name, wrap in _CALLS.items():
            setattr(os, name, wrap(self, before[name]))
        try:
            yield
        finally:
            for name, call in before.items():
                setattr(os, name, call)

    def volatile(self, at: int) -> list[Change]:
        """What was begun by then and is not safe. See [Note: what a loss of power leaves]."""
        return [each for each in self._changes if each.begun <= at and not self._is_safe(each, at)]

    def lose_power(
        self,
        at: int,
        into: str | os.PathLike[str],
        fates: Sequence[int],
        *,
        order: Random | None = None,
        sector_bytes: int = 512,
    ) -> Disk:
        """Make what a loss of power has left.

        Args:
            at: The moment.
            into: An empty directory.
            fates: ``LOST``, ``KEPT`` or a way of being torn, for each of ``volatile(at)``.
            order: Shuffles what is left; None: as it was written.
            sector_bytes: What is never torn.
        """
        settled = [each for each in self._changes if self._is_safe(each, at)]
        left: list[Change] = []
        for change, fate in zip(self.volatile(at), fates, strict=True):
            # beneath what has come, and was waited for, since it was given up
            was_given_up = self._waited(change, at) is not None
            (settled if was_given_up else left).extend(change.left(fate, sector_bytes))
        settled.sort(key=lambda change: change.ended)
        if order is not None:
            order.shuffle(left)
        self._make(self._contents_after([*settled, *left]), into)
        return Disk(into)

    def kill(self, at: int, into: str | os.PathLike[str]) -> Disk:
        """Make what there is when the process has died; its changes become safe no sooner for that.

        A call that it was in is completed.
        """
        changes = [
            replace(each, ended=min(each.ended, at)) for each in self._changes if each.begun <= at
        ]
        made = Disk.__new__(Disk)
        made.now, made.root, made._lock = at, Path(into), Lock()
        made._contents, made._changes = dict(self._contents), changes
        made._syncs = [each for each in self._syncs if each.ended <= at]
        made._nodes = self._make(self._contents_after(changes), into)
        return made

    def missed(self) -> list[str]:
        """Files and directories that are not as they should be: they were changed unseen."""
        contents = self._contents_after(self._changes)
        wrong = []
        for path, node in self._walk(contents, self.root):
            content = contents[node]
            if isinstance(content, dict):
                is_same = path.is_dir() and set(content) == set(os.listdir(path))
            else:
                is_same = path.is_file() and path.read_bytes() == content
            if not is_same:
                wrong.append(str(path))
        return wrong

    # -- noting -----------------------------------------------------------------------------------

    def note(self, begun: int, node: int, what: Any, offset_bytes: int = 0, **more: Any) -> None:
        """A call that has changed something has ended."""
        with self._lock:
            self.now += 1
            self._changes.append(Change(node, begun, self.now, what, offset_bytes, **more))

    def note_sync(self, begun: int, node: int, *, failed: bool) -> None:
        """A call that has waited for something has ended."""
        with self._lock:
            self.now += 1
            self._syncs.append(Sync(node, begun, self.now, failed))

    def node_of(self, file: int | str) -> int | None:
        """The number of an open file, or of a path; None: it is none of these."""
        facts = os.stat(file)
        return self._nodes.get((facts.st_dev, facts.st_ino))

    def add(self, descriptor: int) -> int:
        """Number a file that is new."""
        facts = os.fstat(descriptor)
        with self._lock:
            node = self._nodes[facts.st_dev, facts.st_ino] = len(self._contents)
            self._contents[node] = bytearray()
        return node

    # -- states -----------------------------------------------------------------------------------

    def _is_safe(self, change: Change, at: int) -> bool:
        sync = self._waited(change, at)
        return sync is not None and not sync.failed

    def _waited(self, change: Change, at: int) -> Sync | None:
        """The call that has waited for a change by then."""
        for each in self._syncs:
            if each.node == change.node and change.ended <= each.begun and each.ended <= at:
                return each
        return None

    def _contents_after(self, changes: Sequence[Change]) -> dict[int, Content]:
        contents = {node: content.copy() for node, content in self._contents.items()}
        for change in changes:
            change.apply(contents[change.node])
        return contents

    def _take(self, path: Path) -> int:
        facts = path.stat()
        node = self._nodes[facts.st_dev, facts.st_ino] = len(self._contents)
        if path.is_dir():
            content: dict[str, int] = {}
            self._contents[node] = content
            content.update({each.name: self._take(each) for each in sorted(path.iterdir())})
        else:
            self._contents[node] = bytearray(path.read_bytes())
        return node

    def _make(
        self, contents: Mapping[int, Content], into: str | os.PathLike[str]
    ) -> dict[tuple[int, int], int]:
        """Write out a tree of files; the numbers of what it is made of."""
        nodes = {}
        for path, node in self._walk(contents, Path(into)):
            content = contents[node]
            if isinstance(content, dict):
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(content)
            facts = path.stat()
            nodes[facts.st_dev, facts.st_ino] = node
        return nodes

    def _walk(
        self, contents: Mapping[int, Content], path: Path, node: int = _ROOT
    ) -> Iterator[tuple[Path, int]]:
        yield path, node
        content = contents[node]
        if isinstance(content, dict):
            for name, inner in content.items():
                yield from self._walk(contents, path / name, inner)


_Wrap = Callable[[Disk, Callable[..., Any]], Callable[..., Any]]


def _open(disk: Disk, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(path: Any, flags: int, *args: Any, **more: Any) -> Any:
        begun = disk.now
        descriptor = call(path, flags, *args, **more)
        node = disk.node_of(descriptor)
        if node is not None:
            if flags & os.O_TRUNC:
                disk.note(begun, node, "truncate")
        elif flags & os.O_CREAT and more.get("dir_fd") is None:
            parent = disk.node_of(os.path.dirname(os.path.abspath(path)))
            if parent is not None:
                names = {os.path.basename(path): disk.add(descriptor)}
                disk.note(begun, parent, "names", names=names)
        return descriptor

    return noted


def _write(disk: Disk, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(descriptor: int, data: Any, offset: int) -> Any:
        node = disk.node_of(descriptor)
        if node is None:
            return call(descriptor, data, offset)
        # the memory may be another's as soon as this returns
        kept = b"".join(map(bytes, data)) if isinstance(data, list) else bytes(data)
        begun = disk.now
        moved = call(descriptor, data, offset)
        disk.note(begun, node, "write", offset, data=kept[:moved])
        return moved

    return noted


def _resize(what: str) -> _Wrap:
    def wrap(disk: Disk, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(descriptor: int, *args: int) -> Any:
            node, begun = disk.node_of(descriptor), disk.now
            call(descriptor, *args)
            if node is not None:
                disk.note(begun, node, what, sum(args))

        return noted

    return wrap


def _sync(disk: Disk, call: Callable[..., Any]) -> Callable[..., Any]:
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


_CALLS: Final[dict[str, _Wrap]] = {
    "open": _open,
    "pwrite": _write,
    "pwritev": _write,
    "ftruncate": _resize("truncate"),
    "posix_fallocate": _resize("extend"),
    "fsync": _sync,
    "fdatasync": _sync,
}
