"""A disk whose power fails: what may be left of all that was written below a directory.

1. ``Disk(directory)``; in ``with recording(disk):`` whatever is to be tried. All of it is done, and each
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
    What one call changes in a directory is there as a whole or not at all: any call may be missing, but
    those that are not came in their order. A file may have several names; a directory has one, the last
    that it got of those that are left.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
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

    def apply(self, contents: Mapping[int, Content]) -> None:
        """Make it."""
        content = contents[self.node]
        if isinstance(content, dict):
            made = {name: node for name, node in self.names.items() if node is not None}
            moved = [node for node in made.values() if isinstance(contents[node], dict)]
            for name in [name for name, node in content.items() if node in moved]:
                del content[name]
            for name in self.names:
                content.pop(name, None)
            content.update(made)
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

    Changes by other means than the calls of :mod:`penstock.testing.power_calls` are not seen: see
    ``missed``.

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
        self._held: list[int] = []
        self._lock = Lock()
        self._take(self.root)

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
            order: Shuffles what is left of files; None: as it was written.
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
            left.sort(key=lambda change: change.ended if change.what == "names" else 0)
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
        made.now, made.root, made._lock, made._held = at, Path(into), Lock(), []
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
        return self._nodes.get(_identity(file))

    def add(self, file: int | str) -> int:
        """Number a file or directory that is new."""
        is_directory = stat.S_ISDIR(os.stat(file).st_mode)
        with self._lock:
            node = self._nodes[_identity(file)] = len(self._contents)
            self._contents[node] = {} if is_directory else bytearray()
        return node

    def hold(self, path: str) -> None:
        """Have the system give nothing new the identity of what loses its name."""
        with self._lock:
            self._held.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))

    def let_go(self) -> None:
        """Close what was held open so that no inode number came back."""
        while self._held:
            held = self._held.pop()
            if os.fstat(held).st_nlink == 0:
                self._nodes.pop(_identity(held), None)
            os.close(held)

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
            change.apply(contents)
        return contents

    def _take(self, path: Path) -> int:
        known = self.node_of(str(path))
        if known is not None:
            return known
        node = self._nodes[_identity(path)] = len(self._contents)
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
        made: dict[int, Path] = {}
        for path, node in self._walk(contents, Path(into)):
            content = contents[node]
            if isinstance(content, dict):
                path.mkdir(exist_ok=True)
            elif node in made:
                os.link(made[node], path)
            else:
                path.write_bytes(content)
            made.setdefault(node, path)
        return {_identity(path): node for node, path in made.items()}

    def _walk(
        self, contents: Mapping[int, Content], path: Path, node: int = _ROOT
    ) -> Iterator[tuple[Path, int]]:
        yield path, node
        content = contents[node]
        if isinstance(content, dict):
            for name, inner in content.items():
                yield from self._walk(contents, path / name, inner)


def _identity(file: int | str | Path) -> tuple[int, int]:
    facts = os.stat(file)
    return facts.st_dev, facts.st_ino
