"""Simulated loss of power: the possible states of the files below a directory.

1. ``PowerLossDisk(directory)``; the code under test runs in ``with recording(disk):``. It is executed,
   and each change is recorded, with the moments at which its system call began and ended.
2. ``disk.volatile(at)`` returns the changes that are not durable at a moment.
3. ``disk.lose_power(at, into, fates)`` writes the remaining state to another directory;
   ``disk.kill(at, into)`` writes the state after only the process has died, before a later loss of power.

[Note: what a loss of power leaves]
    A change of a file is safe when a later ``fsync`` or ``fdatasync`` of that file has returned; a name
    is safe by ``fsync`` of its directory. If that call fails, no later one makes the change safe: Linux
    marks pages as written although it could not write them. O_DIRECT makes no change safe, since it may
    be in the device's own cache. Every other change may be present, or absent, or torn between sectors,
    and changes may be applied in any order. A torn write that has extended the file may leave zeros.
    A call's change of a directory is present as a whole or absent: any call may be missing, but the
    others are applied in their order. A file may have several names; a directory has one, the last one
    of those that remain.
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
"""Content of a file, or of a directory: node numbers by name."""

LOST: Final = 0
KEPT: Final = 1
"""Fates of a change; any higher number is the seed of a torn one."""

_ROOT: Final = 0


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Change of one file or directory by one system call."""

    node: int
    """Number of the file or directory."""
    begun: int
    ended: int
    """Moment of the end."""
    what: Literal["write", "truncate", "extend", "names"]
    offset_bytes: int = 0
    """Offset of a write, or the new length, or the new minimum length."""
    data: bytes = b""
    names: Mapping[str, int | None] = field(default_factory=dict)
    """New node of each name; None for a removed name."""

    def apply(self, contents: Mapping[int, Content]) -> None:
        """Apply the change."""
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
        """Yield the parts that remain."""
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
    """A call that synchronized a file or directory."""

    node: int
    begun: int
    ended: int
    failed: bool


class PowerLossDisk:
    """Content of a directory with the history of its changes. Thread-safe.

    Only changes by the calls in :mod:`power_calls` are seen; see ``missed``.

    Attributes:
        root: The directory.
        now: Present moment; the end of each recorded call is a new moment.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Read the present content, which counts as safe."""
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
        """Return the changes begun by a moment and not safe. See [Note: what a loss of power leaves]."""
        return [each for each in self._changes if each.begun <= at and not self._is_safe(each, at)]

    def lose_power(
        self,
        at: int,
        into: str | os.PathLike[str],
        fates: Sequence[int],
        *,
        order: Random | None = None,
        sector_bytes: int = 512,
    ) -> PowerLossDisk:
        """Write the state after a loss of power.

        Args:
            at: Moment of the loss.
            into: An empty directory.
            fates: ``LOST``, ``KEPT`` or the seed of a torn change, for each of ``volatile(at)``.
            order: Random order of the remaining changes of files; None for the order of writing.
            sector_bytes: Size of a sector, which is never torn.
        """
        settled = [each for each in self._changes if self._is_safe(each, at)]
        left: list[Change] = []
        for change, fate in zip(self.volatile(at), fates, strict=True):
            # before later synchronized changes, if the system has given it up
            was_given_up = self._waited(change, at) is not None
            (settled if was_given_up else left).extend(change.left(fate, sector_bytes))
        settled.sort(key=lambda change: change.ended)
        if order is not None:
            order.shuffle(left)
            left.sort(key=lambda change: change.ended if change.what == "names" else 0)
        self._make(self._contents_after([*settled, *left]), into)
        return PowerLossDisk(into)

    def kill(self, at: int, into: str | os.PathLike[str]) -> PowerLossDisk:
        """Write the state after the process has died, which does not make its changes safe.

        A running call is completed.
        """
        changes = [
            replace(each, ended=min(each.ended, at)) for each in self._changes if each.begun <= at
        ]
        made = PowerLossDisk.__new__(PowerLossDisk)
        made.now, made.root, made._lock, made._held = at, Path(into), Lock(), []
        made._contents, made._changes = dict(self._contents), changes
        made._syncs = [each for each in self._syncs if each.ended <= at]
        made._nodes = self._make(self._contents_after(changes), into)
        return made

    def missed(self) -> list[str]:
        """Return files and directories that were changed by unrecorded calls."""
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

    # -- recording --------------------------------------------------------------------------------

    def note(self, begun: int, node: int, what: Any, offset_bytes: int = 0, **more: Any) -> None:
        """Record a change at the end of its call."""
        with self._lock:
            self.now += 1
            self._changes.append(Change(node, begun, self.now, what, offset_bytes, **more))

    def note_sync(self, begun: int, node: int, *, failed: bool) -> None:
        """Record a synchronization at the end of its call."""
        with self._lock:
            self.now += 1
            self._syncs.append(Sync(node, begun, self.now, failed))

    def node_of(self, file: int | str) -> int | None:
        """Return the number of an open file or a path, or None if it is not below the directory."""
        return self._nodes.get(_identity(file))

    def add(self, file: int | str) -> int:
        """Assign a number to a new file or directory."""
        is_directory = stat.S_ISDIR(os.stat(file).st_mode)
        with self._lock:
            node = self._nodes[_identity(file)] = len(self._contents)
            self._contents[node] = {} if is_directory else bytearray()
        return node

    def hold(self, path: str) -> None:
        """Hold a file open whose name is removed, so that its inode number is not reused."""
        with self._lock:
            self._held.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))

    def close_held(self) -> None:
        """Close the files that ``hold`` keeps open."""
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
        """Return the first call that has synchronized a change by a moment, or None."""
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
        """Write a tree of files; return the numbers of its files and directories."""
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
