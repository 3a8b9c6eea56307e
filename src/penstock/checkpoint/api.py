"""One checkpoint: saved whole or not at all ([Note: a save]), loaded whole or refused, verified."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.checkpoint.disk import Directory, Disk, having_threads
from penstock.checkpoint.frames import Encoder
from penstock.checkpoint.manifest import (
    BLOCK_BYTES,
    FILE_NAME,
    FileEntry,
    Manifest,
    TensorEntry,
)
from penstock.checkpoint.reader import Health, OpenCheckpoint, some
from penstock.checkpoint.staging import (
    check_fits,
    check_rank,
    check_replaceable,
    claim,
    held_bytes,
    hidden_name_of,
    parent_of,
    publish,
    rank_facts,
)
from penstock.checkpoint.streams import BUFFERS_BYTES, Buffers, SourceRegions
from penstock.checkpoint.targets import Targets
from penstock.checkpoint.tensors import FILE_BYTES, Prepared, prepare
from penstock.checkpoint.unchanged import Place, places
from penstock.checkpoint.values import FormError, Json
from penstock.checkpoint.writer import FilesWriter, Watcher
from penstock.core.errors import CheckpointError, DamagedError
from penstock.core.files import absolute_path
from penstock.io.engine import Engine
from penstock.io.prefault import Prefault


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Result of a save.

    Attributes:
        path: The checkpoint.
        nbytes: Bytes of its data files.
        written_bytes: Bytes of those that were written; the others were there.
        reused_bytes: Bytes of those that were written over files of a retired checkpoint.
        seconds: Time from the call until it was durable.
    """

    path: str
    nbytes: int
    written_bytes: int
    reused_bytes: int = 0
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """Saves and loads checkpoints. Only tests need other settings than the defaults.

    Attributes:
        disk: Changes directories.
        make_engine: Makes the engine of each call, which closes it; None: the engine of this process.
        block_bytes: Length of the blocks of new checkpoints, each of which has a checksum.
        file_bytes: A file is closed once it is as long as this.
    """

    disk: Disk = field(default_factory=Disk)
    make_engine: Callable[[], Engine] | None = None
    block_bytes: int = BLOCK_BYTES
    file_bytes: int = FILE_BYTES

    def save(
        self,
        path: str | os.PathLike[str],
        state: object,
        *,
        facts: Mapping[str, Json] | None = None,
        base: str | os.PathLike[str] | None = None,
        codec: str | None = None,
    ) -> Saved:
        """Save a state; return when it is on the device. Until then the earlier checkpoint stays.

        Bytes go from the tensors through 16 MiB of buffers to new files, past the page cache. No tensor
        may change meanwhile.

        Args:
            path: Directory to create. An empty one, or a checkpoint, is replaced in one step once the new
                one is durable. Its parent must exist.
            state: Nested dictionaries, lists and tuples of tensors on any device, NumPy arrays, numbers,
                strings, bytes, None, and of objects with a ``state_dict``. Tensors that share memory are
                saved once. Nothing is pickled.
            facts: Further facts for the manifest, as a dictionary of JSON.
            base: An earlier checkpoint on the same file system. Files that have not changed since are
                linked, not written. See the note on unchanged blocks in the manual.
            codec: Encode tensors without loss, with ``"exponent"``, ``"zero-value"``,
                ``"zero-value+exponent"`` or ``"narrow"``: fewer bytes on flash, which only this library
                reads. Tensors that would not become shorter stay as they are.

        Returns:
            What was written, and how long it took.

        Raises:
            CheckpointError: Something in the state has no form in a checkpoint, named by its keys; or the
                path is that of something else.
            ConfigError: Another writer is saving to this path; or another rank of a job of several has
                saved to it; or there is no such codec.
            NoSpaceError: There is no room, before or during the save; nothing is left of it.
            TransferError: The device refuses; nothing is left of it either.
        """
        encoder = None if codec is None else Encoder(codec)
        return self.write(path, self.prepare(state), facts=facts, base=base, encoder=encoder)

    def load(
        self, path: str | os.PathLike[str], into: object = None, *, partial: bool = False
    ) -> Any:
        """Load a state into new tensors, or into existing ones. Each byte is checked before it is used.

        Args:
            path: A checkpoint.
            into: The state that was saved, or one like it: dictionaries, lists, tensors, and objects with
                ``load_state_dict``. Tensors keep their memory: modules' parameters and buffers, and those
                states of an optimizer that exist. Lists and dictionaries of plain values get the saved
                length. None: everything is new, in huge pages.
            partial: Allow keys in the checkpoint that ``into`` does not have.

        Returns:
            ``into``, or a new state.

        Raises:
            MismatchError: The checkpoint is of another state; names the first keys, shapes and dtypes
                that differ. Nothing was changed.
            DamagedError: It is torn or damaged: which file, where, and which tensors. Those that were set
                before are in ``overwritten``: load another checkpoint over them, or ``verify`` first.
            CheckpointError: There is none.
            TransferError: The device refuses.
        """
        where = absolute_path(path, "the checkpoint")
        with torch.inference_mode(mode=False):  # new tensors are to be trained on
            return self._load(where, into, partial=partial)

    def verify(self, path: str | os.PathLike[str]) -> Health:
        """Read a checkpoint and report its damage. Raises TransferError if the device refuses."""
        where = absolute_path(path, "the checkpoint")
        try:
            with OpenCheckpoint(where, self.disk) as opened, self._engine() as engine:
                damage = opened.verify(engine=engine)
                return Health(where, opened.manifest.nbytes, tuple(map(str, damage)))
        except CheckpointError as error:
            return Health(where, damage=(str(error),))

    def unchanged(self, path: str | os.PathLike[str], state: object) -> list[Place]:
        """Find the tensors of a state that a checkpoint has byte for byte, without reading its files.

        The memory of these tensors may be freed, and loaded again. A tensor that shares a block of a file
        with one that has changed is not among them.

        Args:
            path: A checkpoint of that state.
            state: As for ``save``.

        Raises:
            CheckpointError: As ``save`` and ``load``.
        """
        where = absolute_path(path, "the checkpoint")
        prepared = self.prepare(state)
        with OpenCheckpoint(where, self.disk) as opened:
            manifest = opened.manifest
        return places(where, manifest, prepared)

    # -- for a Checkpointer ---------------------------------------------------------------------------

    def prepare(self, state: object, *, private: list[Any] | None = None) -> Prepared:
        """See :func:`penstock.checkpoint.tensors.prepare`."""
        return prepare(state, private=private, file_bytes=self.file_bytes)

    def write(
        self,
        path: str | os.PathLike[str],
        prepared: Prepared,
        *,
        facts: Mapping[str, Json] | None = None,
        base: str | os.PathLike[str] | None = None,
        encoder: Encoder | None = None,
        watcher: Watcher | None = None,
        regions: Sequence[SourceRegions] | None = None,
        buffers_bytes: int = BUFFERS_BYTES,
        reuse: bool = False,
    ) -> Saved:
        """Save a prepared state. Raises as ``save``.

        Args:
            path: The checkpoint.
            prepared: Result of ``prepare``.
            facts: Facts for its manifest.
            base: An earlier checkpoint, whose unchanged files are kept.
            encoder: Makes frames of tensors.
            watcher: Observer of the writes.
            regions: Contents of each file; those of the plans if None.
            buffers_bytes: Most bytes in flight at once.
            reuse: Write over the spare's files if there is a spare; not with a base.
        """
        start = time.perf_counter()
        where = absolute_path(path, "the checkpoint")
        _check_facts(facts)
        said = {**rank_facts(), **(facts or {})}
        name = os.path.basename(where)
        needed = {each.name: each.nbytes for each in prepared.plans}
        with (
            having_threads(where),
            self.disk.open(parent_of(where)) as parent,
            self._opened_base(base) as old,
        ):
            check_replaceable(where)
            spare = needed.keys() if reuse and base is None else None
            with claim(self.disk, parent, name, spare=spare) as hidden:
                check_rank(where)
                if old is None:
                    check_fits(parent, prepared.nbytes - held_bytes(hidden, needed))
                if regions is None:
                    regions = [plan.regions(prepared.tensors) for plan in prepared.plans]
                with (
                    self._engine() as engine,
                    FilesWriter(
                        self.disk,
                        hidden,
                        Buffers(self.block_bytes, engine, memory_bytes=buffers_bytes),
                        base=old,
                        watcher=watcher,
                        spare=hidden.names(),
                    ) as writer,
                ):
                    entries = writer.write_all(prepared, regions, encoder)
                    manifest = self._manifest(writer.entries, entries, prepared.document, said)
                    self.disk.write(hidden, FILE_NAME, manifest)
                    writer.finish(
                        lambda: self.disk.sync_file(hidden, FILE_NAME),
                        lambda: self.disk.sync(hidden),
                    )
                publish(self.disk, parent, name)
        return Saved(
            path=where,
            nbytes=sum(each.nbytes for each in writer.entries),
            written_bytes=writer.written_bytes,
            reused_bytes=writer.reused_bytes,
            seconds=time.perf_counter() - start,
        )

    # -- for several writers --------------------------------------------------------------------------

    @contextmanager
    def claimed(self, path: str) -> Iterator[Directory]:
        """Hold the hidden directory of a path, empty and locked, until ``publish`` or an error."""
        check_replaceable(path)
        with (
            self.disk.open(parent_of(path)) as parent,
            claim(self.disk, parent, os.path.basename(path)) as hidden,
        ):
            yield hidden

    def hidden_path(self, path: str) -> str:
        """Return the path of the hidden directory of a path."""
        return os.path.join(os.path.dirname(path), hidden_name_of(os.path.basename(path)))

    def publish(
        self,
        path: str,
        files: Sequence[FileEntry],
        tensors: Sequence[TensorEntry],
        document: Json,
    ) -> None:
        """Write the manifest into the hidden directory, and give that its name."""
        manifest = self._manifest(files, tensors, document)
        with self.disk.open(parent_of(path)) as parent:
            with self.disk.open(self.hidden_path(path)) as hidden:
                self.disk.write(hidden, FILE_NAME, manifest)
                self.disk.sync_file(hidden, FILE_NAME)
                self.disk.sync(hidden)
            publish(self.disk, parent, os.path.basename(path))

    def _manifest(
        self,
        files: Sequence[FileEntry],
        tensors: Sequence[TensorEntry],
        document: Json,
        facts: Mapping[str, Json] | None = None,
    ) -> bytes:
        try:
            return Manifest(
                files=tuple(files),
                tensors=tuple(tensors),
                state=document,
                facts={"saved_unix_s": int(time.time()), **(facts or {})},
                block_bytes=self.block_bytes,
            ).encode()
        except FormError as error:
            raise CheckpointError(f"this state cannot be saved: {error}") from error

    @contextmanager
    def _opened_base(self, base: str | os.PathLike[str] | None) -> Iterator[OpenCheckpoint | None]:
        if base is None:
            yield None
            return
        with OpenCheckpoint(absolute_path(base, "base"), self.disk) as opened:
            yield opened if opened.manifest.block_bytes == self.block_bytes else None

    @contextmanager
    def _engine(self) -> Iterator[Engine | None]:
        engine = None if self.make_engine is None else self.make_engine()
        try:
            yield engine
        finally:
            if engine is not None:
                engine.close()

    def _load(self, where: str, into: object, *, partial: bool) -> Any:
        with (
            OpenCheckpoint(where, self.disk) as opened,
            self._engine() as engine,
            ExitStack() as supply,
        ):
            targets = Targets(opened.manifest, partial=partial)
            state = opened.manifest.state
            made = targets.value(state, ()) if into is None else targets.bind(into, state)
            targets.differences.check(where)
            supply.enter_context(Prefault(targets.new_memory))
            try:
                opened.read(targets.regions(), engine=engine)
            except DamagedError as error:
                if into is None:
                    raise
                raise _half_set(error) from error
        targets.settle()
        return made()


def _half_set(error: DamagedError) -> DamagedError:
    """Return the error of a load into tensors that has ended in the middle."""
    names = error.overwritten
    if not names:
        return DamagedError(f"{error}; nothing was changed", path=error.path)
    return DamagedError(
        f"{error}; {len(names)} tensors have been overwritten already, wholly or in part: {some(names)};"
        " train on with none of them before another checkpoint is loaded",
        path=error.path,
        overwritten=names,
    )


def _check_facts(facts: Mapping[str, Json] | None) -> None:
    """Check facts before anything is written. Raises CheckpointError."""
    try:
        json.dumps(dict(facts or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"facts are a dictionary of JSON: {error}; convert it, or put it into the state"
        ) from error


_default = CheckpointStore()
save = _default.save
load = _default.load
verify = _default.verify
unchanged = _default.unchanged
