"""One checkpoint: saved whole or not at all, loaded whole or refused.

[Note: a save]
    Everything is written into a hidden directory beside the final one, ``.NAME.saving``, which its writer
    holds locked. Each data file, then the manifest, then the directory are waited for until they are on
    the device. Then one rename gives it its name, or swaps it with what has that name; and the parent
    directory is waited for. Whenever the writer is killed, there is under that name what was there
    before, or all of the new one. The next save to that name, or a ``Checkpointer``, removes what a
    dead writer left: one that is alive holds the lock.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from penstock.checkpoint.disk import Directory, Disk, is_still, lock
from penstock.checkpoint.encoded import EncodedBody
from penstock.checkpoint.frames import Encoder
from penstock.checkpoint.leaves import Leaf, collect
from penstock.checkpoint.manifest import (
    BLOCK_BYTES,
    FILE_NAME,
    FileEntry,
    Manifest,
    TensorEntry,
    blocks_of,
)
from penstock.checkpoint.moves import await_devices
from penstock.checkpoint.packing import FILE_BYTES, FilePlan, pack
from penstock.checkpoint.reading import Health, Opened, some
from penstock.checkpoint.streams import Buffers, digest, fill
from penstock.checkpoint.targets import Targets, frozen_in, plain_state
from penstock.checkpoint.values import FormError, Json
from penstock.checkpoint.writing import Base, FilesWriter, Watcher
from penstock.core.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    NoSpaceError,
    PenstockError,
    free_space_bytes,
)
from penstock.core.units import MIB, format_bytes, round_up
from penstock.io.engine import Engine

_SAVING: Final = ".{}.saving"
_SLACK_BYTES: Final = MIB
"""For the manifest's file and the file system's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a save has done.

    Attributes:
        path: The checkpoint.
        nbytes: Of its data files.
        written_bytes: What of them went to the device; the others were there.
        seconds: From the call until it was durable.
    """

    path: str
    nbytes: int
    written_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """A tensor whose bytes a checkpoint has.

    Attributes:
        name: Its name there.
        tensor: It.
        path: The data file.
        offset_bytes: Where in the file it begins.
        nbytes: How long it is.
    """

    name: str
    tensor: torch.Tensor
    path: str
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A state that is about to be saved: what goes where.

    Attributes:
        document: What is no tensor.
        leaves: The tensors.
        plans: Files.
        entries: What the manifest says of the tensors.
    """

    document: Json
    leaves: Sequence[Leaf]
    plans: Sequence[FilePlan]
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(each.nbytes for each in self.plans)


@dataclass(frozen=True, kw_only=True)
class Store:
    """How checkpoints are made and read; the defaults are right but for tests.

    Attributes:
        disk: Changes directories.
        make_engine: Makes what moves blocks; None: the default one.
        block_bytes: What has a checksum of its own, in checkpoints that it makes.
        file_bytes: A file is closed once it is as long as this.
    """

    disk: Disk = field(default_factory=Disk)
    make_engine: Callable[[], Engine] | None = None
    block_bytes: int = BLOCK_BYTES
    file_bytes: int = FILE_BYTES

    # -- save ---------------------------------------------------------------------------------------

    def prepare(self, state: object, *, private: list[Any] | None = None) -> Prepared:
        """Say what of a state goes where.

        Args:
            state: It.
            private: Where parts are added that were made for the occasion.

        Raises:
            CheckpointError: Something has no form in a checkpoint.
        """
        plain = plain_state(state, [] if private is None else private)
        document, leaves = collect(plain, frozenset(each.data_ptr() for each in frozen_in(state)))
        await_devices(each.tensor.device for each in leaves)
        plans, entries = pack(leaves, file_bytes=self.file_bytes)
        return Prepared(document, leaves, plans, entries)

    def save(
        self,
        path: str | os.PathLike[str],
        state: object,
        *,
        facts: Mapping[str, Json] | None = None,
        base: str | os.PathLike[str] | None = None,
        codec: str | None = None,
    ) -> Saved:
        """See :func:`penstock.checkpoint.save`."""
        encoder = None if codec is None else Encoder(codec)
        prepared = self.prepare(state)
        return self.write(path, prepared, facts=facts, base=base, encoder=encoder)

    def write(
        self,
        path: str | os.PathLike[str],
        prepared: Prepared,
        *,
        facts: Mapping[str, Json] | None = None,
        base: str | os.PathLike[str] | None = None,
        encoder: Encoder | None = None,
        watcher: Watcher | None = None,
        regions: Sequence[Any] | None = None,
    ) -> Saved:
        """Save what was prepared. Raises as :func:`penstock.checkpoint.save`.

        Args:
            path: The checkpoint.
            prepared: What ``prepare`` has made.
            facts: What its manifest says of it.
            base: An earlier checkpoint, whose unchanged files are kept.
            encoder: Makes frames of tensors.
            watcher: Told which bytes are not read any more.
            regions: What is in each file; that of the plans if None.
        """
        start = time.perf_counter()
        where = os.path.abspath(path)
        with self.disk.open(_parent(where)) as parent, self._opened_base(base) as old:
            name = os.path.basename(where)
            _check_replaceable(where)
            with self._claim(parent, name) as hidden:
                if old is None:
                    _check_space(parent, prepared.nbytes)
                if regions is None:
                    regions = [plan.regions(prepared.leaves) for plan in prepared.plans]
                nbytes, written = self._write_all(
                    hidden,
                    prepared,
                    regions,
                    facts=facts,
                    base=old,
                    encoder=encoder,
                    watcher=watcher,
                )
                self._publish(parent, name)
        seconds = time.perf_counter() - start
        return Saved(path=where, nbytes=nbytes, written_bytes=written, seconds=seconds)

    @contextmanager
    def _opened_base(self, base: str | os.PathLike[str] | None) -> Any:
        if base is None:
            yield None
            return
        with Opened(os.path.abspath(base), self.disk) as opened:
            usable = opened.manifest.block_bytes == self.block_bytes
            yield Base(opened.directory, opened.manifest) if usable else None

    @contextmanager
    def _claim(self, parent: Directory, name: str) -> Any:
        """The hidden directory, empty and ours alone; removed if anything raises."""
        hidden_name = _SAVING.format(name)
        while True:
            self.disk.make_directory(parent, hidden_name)
            hidden = self.disk.open_in(parent, hidden_name)
            try:
                if not lock(hidden):
                    raise ConfigError(
                        f"another process, or another thread, is saving to {parent.join(name)!r} now:"
                        " give each writer a name of its own"
                    )
                if is_still(parent, hidden_name, hidden):
                    break
            except BaseException:
                hidden.close()
                raise
            hidden.close()  # its writer has just finished with it: begin anew
        with hidden:
            try:
                self.disk.clear(hidden)
                yield hidden
            except BaseException:
                if is_still(parent, hidden_name, hidden):
                    with suppress(PenstockError):  # the next save removes what is left
                        self.disk.remove(parent, hidden_name)
                raise

    def _write_all(
        self,
        hidden: Directory,
        prepared: Prepared,
        regions: Sequence[Any],
        *,
        facts: Mapping[str, Json] | None,
        base: Base | None,
        encoder: Encoder | None,
        watcher: Watcher | None,
    ) -> tuple[int, int]:
        """How long all files are, and how much of that went to the device."""
        entries = list(prepared.entries)
        engine = None if self.make_engine is None else self.make_engine()
        try:
            with Buffers(self.block_bytes, engine) as buffers:
                writer = FilesWriter(self.disk, hidden, buffers, base=base, watcher=watcher)
                try:
                    if encoder is None:
                        for plan in prepared.plans:
                            writer.expect(plan.name, plan.nbytes)
                    for plan, each in zip(prepared.plans, regions, strict=True):
                        if encoder is None:
                            writer.add(plan.name, plan.nbytes, each)
                            continue
                        body = EncodedBody(plan, prepared.leaves, each, encoder)
                        writer.add_encoded(plan.name, plan.nbytes, body)
                        body.enter(entries)
                    self.disk.write(
                        hidden,
                        FILE_NAME,
                        _manifest(
                            files=tuple(writer.entries),
                            tensors=tuple(entries),
                            state=prepared.document,
                            facts={"saved_unix_s": int(time.time()), **(facts or {})},
                            block_bytes=self.block_bytes,
                        ),
                    )
                    writer.finish(lambda: self.disk.sync_file(hidden, FILE_NAME))
                except BaseException:
                    writer.abandon()
                    raise
        finally:
            if engine is not None:
                engine.close()
        self.disk.sync(hidden)
        return sum(each.nbytes for each in writer.entries), writer.written_bytes

    def _publish(self, parent: Directory, name: str) -> None:
        hidden_name = _SAVING.format(name)
        if not os.path.lexists(parent.join(name)):
            self.disk.rename(parent, hidden_name, name)
            self.disk.sync(parent)
            return
        if not self.disk.exchange(parent, hidden_name, name):
            raise CheckpointError(
                f"{parent.join(name)!r} exists, and this file system cannot swap two directories at"
                " once: save under another name"
            )
        self.disk.sync(parent)
        with suppress(PenstockError):  # the next save removes what is left of the old one
            self.disk.remove(parent, hidden_name)

    # -- for several writers of one checkpoint --------------------------------------------------------

    @contextmanager
    def claimed(self, path: str) -> Any:
        """The hidden directory of a path, empty and ours alone, until ``publish`` or an error."""
        _check_replaceable(path)
        with (
            self.disk.open(_parent(path)) as parent,
            self._claim(parent, os.path.basename(path)) as hidden,
        ):
            yield hidden

    def hidden_path(self, path: str) -> str:
        """Of the hidden directory of a path."""
        return os.path.join(os.path.dirname(path), _SAVING.format(os.path.basename(path)))

    def publish(
        self,
        path: str,
        files: tuple[FileEntry, ...],
        tensors: tuple[TensorEntry, ...],
        document: Json,
    ) -> None:
        """Write the manifest of what is in the hidden directory, and give it its name."""
        manifest = _manifest(
            files=files,
            tensors=tensors,
            state=document,
            facts={"saved_unix_s": int(time.time())},
            block_bytes=self.block_bytes,
        )
        with self.disk.open(_parent(path)) as parent:
            with self.disk.open(self.hidden_path(path)) as hidden:
                self.disk.write(hidden, FILE_NAME, manifest)
                self.disk.sync_file(hidden, FILE_NAME)
                self.disk.sync(hidden)
            self._publish(parent, os.path.basename(path))

    # -- load ---------------------------------------------------------------------------------------

    def load(
        self, path: str | os.PathLike[str], into: object = None, *, partial: bool = False
    ) -> Any:
        """See :func:`penstock.checkpoint.load`."""
        where = os.path.abspath(path)
        with Opened(where, self.disk) as opened:
            targets = Targets(opened.manifest, partial=partial)
            state = opened.manifest.state
            made = targets.value(state, ()) if into is None else targets.bind(into, state)
            targets.check(where)
            with self._engine() as engine:
                try:
                    opened.read(targets.regions(), engine=engine)
                except DamagedError as error:
                    if into is None:
                        raise
                    raise _half_set(error) from error
        targets.settle()
        return made()

    def verify(self, path: str | os.PathLike[str]) -> Health:
        """See :func:`penstock.checkpoint.verify`."""
        where = os.path.abspath(path)
        try:
            with Opened(where, self.disk) as opened, self._engine() as engine:
                damage = opened.verify(engine=engine)
                return Health(where, opened.manifest.nbytes, tuple(map(str, damage)))
        except CheckpointError as error:
            return Health(where, damage=(str(error),))

    def unchanged(self, path: str | os.PathLike[str], state: object) -> list[Place]:
        """See :func:`penstock.checkpoint.unchanged`."""
        where = os.path.abspath(path)
        prepared = self.prepare(state)
        with Opened(where, self.disk) as opened:
            manifest = opened.manifest
        found: list[Place] = []
        known = {each.name: each for each in manifest.files}
        for number, plan in enumerate(prepared.plans):
            entry = known.get(plan.name)
            if entry is None or entry.nbytes != plan.nbytes:
                continue
            same = _same_blocks(plan, prepared.leaves, entry.sums, manifest.block_bytes)
            for index in plan.leaves:
                each = prepared.entries[index]
                if each.file == number and _within(each, same, manifest.block_bytes):
                    leaf = prepared.leaves[index]
                    found.append(
                        Place(
                            name=each.name,
                            tensor=leaf.tensor,
                            path=os.path.join(where, plan.name),
                            offset_bytes=each.offset_bytes,
                            nbytes=each.nbytes,
                        )
                    )
        return found

    @contextmanager
    def _engine(self) -> Any:
        engine = None if self.make_engine is None else self.make_engine()
        try:
            yield engine
        finally:
            if engine is not None:
                engine.close()


def _half_set(error: DamagedError) -> DamagedError:
    """A load into tensors has ended in the middle: what has become of them."""
    names = error.overwritten
    if not names:
        return DamagedError(f"{error}; nothing was changed", path=error.path)
    return DamagedError(
        f"{error}; {len(names)} tensors have been overwritten already, wholly or in part: {some(names)};"
        " train on with none of them before another checkpoint is loaded",
        path=error.path,
        overwritten=names,
    )


def remove_leftovers(disk: Disk, parent: Directory, names: Iterable[str]) -> None:
    """Remove hidden directories whose writers are dead. Raises TransferError."""
    for name in names:
        hidden = disk.open_in(parent, name)
        with hidden:
            if lock(hidden) and is_still(parent, name, hidden):
                disk.remove(parent, name)


def is_hidden(name: str) -> bool:
    """Whether a name is that of a directory in which something is being saved."""
    return name.startswith(".") and name.endswith(".saving")


def _manifest(**fields: Any) -> bytes:
    try:
        return Manifest(**fields).encode()
    except FormError as error:
        raise CheckpointError(f"this state cannot be saved: {error}") from error


def _same_blocks(
    plan: FilePlan, leaves: Sequence[Leaf], sums: Sequence[str], block_bytes: int
) -> list[bool]:
    regions = plan.regions(leaves)
    starts = [start for start, _ in regions]
    same = []
    with Buffers(block_bytes) as buffers:
        block = buffers.take()
        assert block is not None
        for offset, known in zip(blocks_of(plan.nbytes, block_bytes), sums, strict=True):
            end = min(offset + block_bytes, plan.nbytes)
            fill(regions, starts, offset, end, block.address)
            same.append(digest(block.address, end - offset) == known)
        buffers.give(block)
    return same


def _within(entry: TensorEntry, same: Sequence[bool], block_bytes: int) -> bool:
    if not entry.nbytes:
        return False
    end = entry.offset_bytes + entry.nbytes
    return all(same[entry.offset_bytes // block_bytes : -(-end // block_bytes)])


def _parent(path: str) -> str:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise CheckpointError(
            f"{parent!r}, in which {path!r} is to be, is no directory: make it first"
        )
    if os.path.basename(path).startswith("."):
        raise CheckpointError(f"{path!r}: the name of a checkpoint must not begin with a dot")
    return parent


def _check_replaceable(path: str) -> None:
    """Nothing but a checkpoint is ever replaced."""
    if os.path.lexists(path) and (
        os.path.islink(path) or not os.path.isfile(os.path.join(path, FILE_NAME))
    ):
        raise CheckpointError(
            f"{path!r} exists and is no checkpoint: it is not replaced; remove it, or name another"
        )


def _check_space(parent: Directory, nbytes: int) -> None:
    free = free_space_bytes(parent.path)
    needed = round_up(nbytes, 4096) + _SLACK_BYTES
    if 0 <= free < needed:
        raise NoSpaceError(
            errno=errno.ENOSPC,
            op="allocate",
            path=parent.path,
            offset_bytes=0,
            nbytes=needed,
            free_bytes=free,
            advice=f"this checkpoint takes {format_bytes(needed)} and {format_bytes(free)} are free; what"
            " is there is kept: free some space, keep fewer, or name another directory",
        )
