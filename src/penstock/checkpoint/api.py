"""One checkpoint: saved whole or not at all ([Note: a save]), loaded whole or refused, verified."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
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
    check_replaceable,
    claim,
    held_bytes,
    hidden_name_of,
    parent_of,
    publish,
)
from penstock.checkpoint.streams import BUFFERS_BYTES, Buffers, Regions
from penstock.checkpoint.targets import Targets
from penstock.checkpoint.tensors import FILE_BYTES, Prepared, prepare
from penstock.checkpoint.unchanged import Place, places
from penstock.checkpoint.values import FormError, Json
from penstock.checkpoint.writer import EncodedBody, FilesWriter, Watcher
from penstock.core.errors import CheckpointError, DamagedError
from penstock.core.files import absolute_path
from penstock.io.engine import Engine
from penstock.io.prefault import Prefault


def save(
    path: str | os.PathLike[str],
    state: object,
    *,
    facts: Mapping[str, Json] | None = None,
    base: str | os.PathLike[str] | None = None,
    codec: str | None = None,
) -> Saved:
    """Save a state. Returns when it is on the device; until then what was there before is there.

    Bytes go from the tensors through some buffers of 16 MiB in all to new files, past the page cache. No
    tensor may change meanwhile.

    Args:
        path: A directory that is made; an empty one, or a checkpoint, is replaced, at once and when the
            new one is durable. Its parent must exist.
        state: Nested dictionaries, lists and tuples of tensors on any device, NumPy arrays, numbers,
            strings, bytes, None, and of objects with a ``state_dict``. Tensors that share memory are
            saved once. Nothing is pickled.
        facts: What the manifest says of it beside: a dictionary of JSON.
        base: An earlier checkpoint on the same file system: of files that have not changed since, it has
            links, and they are not written. See the note on unchanged blocks in the manual.
        codec: Encode tensors without loss, with ``"exponent"``, ``"zero-value"``,
            ``"zero-value+exponent"`` or ``"narrow"``: fewer bytes on flash, which only this library
            reads. Those that it would not make shorter stay as they are.

    Returns:
        What was done.

    Raises:
        CheckpointError: Something in the state has no form in a checkpoint, named by its keys; or the
            path is that of something else.
        ConfigError: Another writer is saving to this path; or there is no such codec.
        NoSpaceError: There is no room, seen before or met during the save; nothing is left of it.
        TransferError: The device refuses; the same.
    """
    return CheckpointStore().save(path, state, facts=facts, base=base, codec=codec)


def load(path: str | os.PathLike[str], into: object = None, *, partial: bool = False) -> Any:
    """Load a state: anew, or into what is there. Every byte is proven before it is used.

    Args:
        path: A checkpoint.
        into: What was saved, or its like: dictionaries, lists, tensors, and objects with
            ``load_state_dict``. Tensors keep their memory: modules' parameters and buffers, and states of
            an optimizer where it has them already. Lists and dictionaries of plain values become what
            was saved, however long that is. None: everything is made anew, in huge pages.
        partial: Whether the checkpoint may have keys that ``into`` has not.

    Returns:
        ``into``, or a new state.

    Raises:
        MismatchError: The checkpoint is of another state; names the first keys, shapes and dtypes that
            differ. Nothing was changed.
        DamagedError: It is torn or damaged: which file, where, and which tensors. Those that lie before
            have been set already, and are in ``overwritten``: load another checkpoint over them, or
            ``verify`` first.
        CheckpointError: There is none.
        TransferError: The device refuses.
    """
    return CheckpointStore().load(path, into, partial=partial)


def verify(path: str | os.PathLike[str]) -> Health:
    """Read a checkpoint, and say what is damaged. Raises TransferError if the device refuses."""
    return CheckpointStore().verify(path)


def unchanged(path: str | os.PathLike[str], state: object) -> list[Place]:
    """Which tensors of a state are, byte for byte, what a checkpoint has: by its checksums, unread.

    What this returns may be dropped from memory, and be loaded again. A tensor that shares a block of the
    file with one that changed is not among it.

    Args:
        path: A checkpoint of that state.
        state: As for ``save``.

    Raises:
        CheckpointError: As ``save`` and ``load``.
    """
    return CheckpointStore().unchanged(path, state)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Result of a save.

    Attributes:
        path: The checkpoint.
        nbytes: Of its data files.
        written_bytes: What of them went to the device; the others were there.
        reused_bytes: What of that was written over files of a retired checkpoint.
        seconds: From the call until it was durable.
    """

    path: str
    nbytes: int
    written_bytes: int
    reused_bytes: int = 0
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """How checkpoints are made and read; the defaults are right but for tests.

    Attributes:
        disk: Changes directories.
        make_engine: Makes the engine of each call, which closes it; None: the engine of this process.
        block_bytes: What has a checksum of its own, in checkpoints that it makes.
        file_bytes: A file is closed once it is as long as this.
    """

    disk: Disk = field(default_factory=Disk)
    make_engine: Callable[[], Engine] | None = None
    block_bytes: int = BLOCK_BYTES
    file_bytes: int = FILE_BYTES

    # -- save ---------------------------------------------------------------------------------------

    def prepare(self, state: object, *, private: list[Any] | None = None) -> Prepared:
        """See :func:`penstock.checkpoint.tensors.prepare`."""
        return prepare(state, private=private, file_bytes=self.file_bytes)

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
        buffers_bytes: int = BUFFERS_BYTES,
        reuse: bool = False,
    ) -> Saved:
        """Save what was prepared. Raises as :func:`penstock.checkpoint.save`.

        Args:
            path: The checkpoint.
            prepared: What ``prepare`` has made.
            facts: What its manifest says of it.
            base: An earlier checkpoint, whose unchanged files are kept.
            encoder: Makes frames of tensors.
            watcher: Observer of the writes.
            regions: What is in each file; that of the plans if None.
            buffers_bytes: What may be on its way at once.
            reuse: Whether to write over the spare's files if there is a spare; not with a base.
        """
        start = time.perf_counter()
        where = absolute_path(path, "the checkpoint")
        _check_facts(facts)
        with (
            having_threads(where),
            self.disk.open(parent_of(where)) as parent,
            self._opened_base(base) as old,
        ):
            name = os.path.basename(where)
            check_replaceable(where)
            needed = {each.name: each.nbytes for each in prepared.plans}
            spare = needed.keys() if reuse and base is None else None
            with claim(self.disk, parent, name, spare=spare) as hidden:
                if old is None:
                    check_fits(parent, prepared.nbytes - held_bytes(hidden, needed))
                if regions is None:
                    regions = [plan.regions(prepared.tensors) for plan in prepared.plans]
                writer = self._write_all(
                    hidden,
                    prepared,
                    regions,
                    facts=facts,
                    base=old,
                    encoder=encoder,
                    watcher=watcher,
                    buffers_bytes=buffers_bytes,
                )
                publish(self.disk, parent, name)
        seconds = time.perf_counter() - start
        return Saved(
            path=where,
            nbytes=sum(each.nbytes for each in writer.entries),
            written_bytes=writer.written_bytes,
            reused_bytes=writer.reused_bytes,
            seconds=seconds,
        )

    @contextmanager
    def _opened_base(self, base: str | os.PathLike[str] | None) -> Any:
        if base is None:
            yield None
            return
        with OpenCheckpoint(absolute_path(base, "base"), self.disk) as opened:
            yield opened if opened.manifest.block_bytes == self.block_bytes else None

    def _write_all(
        self,
        hidden: Directory,
        prepared: Prepared,
        regions: Sequence[Any],
        *,
        facts: Mapping[str, Json] | None,
        base: OpenCheckpoint | None,
        encoder: Encoder | None,
        watcher: Watcher | None,
        buffers_bytes: int,
    ) -> FilesWriter:
        """Return the writer, after all files and the manifest are written."""
        entries = list(prepared.entries)
        engine = None if self.make_engine is None else self.make_engine()
        try:
            with Buffers(self.block_bytes, engine, memory_bytes=buffers_bytes) as buffers:
                writer = FilesWriter(
                    self.disk,
                    hidden,
                    buffers,
                    base=base,
                    watcher=watcher,
                    spare=hidden.names(),
                )
                try:
                    if encoder is None:
                        for plan in prepared.plans:
                            writer.expect(plan.name, plan.nbytes)
                    for plan, each in zip(prepared.plans, regions, strict=True):
                        if encoder is None:
                            writer.add(plan.name, plan.nbytes, each)
                            continue
                        body = EncodedBody(plan, prepared.entries, each, encoder)
                        writer.add_encoded(plan.name, plan.nbytes, body)
                        for index, entry in body.entries.items():
                            entries[index] = entry
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
                    writer.finish(
                        lambda: self.disk.sync_file(hidden, FILE_NAME),
                        lambda: self.disk.sync(hidden),
                    )
                except BaseException:
                    writer.abandon()
                    raise
        finally:
            if engine is not None:
                engine.close()
        return writer

    @contextmanager
    def claimed(self, path: str) -> Any:
        """The hidden directory of a path, empty and ours alone, until ``publish`` or an error."""
        check_replaceable(path)
        with (
            self.disk.open(parent_of(path)) as parent,
            claim(self.disk, parent, os.path.basename(path)) as hidden,
        ):
            yield hidden

    def hidden_path(self, path: str) -> str:
        """Of the hidden directory of a path."""
        return os.path.join(os.path.dirname(path), hidden_name_of(os.path.basename(path)))

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
        with self.disk.open(parent_of(path)) as parent:
            with self.disk.open(self.hidden_path(path)) as hidden:
                self.disk.write(hidden, FILE_NAME, manifest)
                self.disk.sync_file(hidden, FILE_NAME)
                self.disk.sync(hidden)
            publish(self.disk, parent, os.path.basename(path))

    # -- load ---------------------------------------------------------------------------------------

    def load(
        self, path: str | os.PathLike[str], into: object = None, *, partial: bool = False
    ) -> Any:
        """See :func:`penstock.checkpoint.load`."""
        with torch.inference_mode(mode=False):  # what is made here is to be trained on
            return self._load(absolute_path(path, "the checkpoint"), into, partial=partial)

    def _load(self, where: str, into: object, *, partial: bool) -> Any:
        with (
            OpenCheckpoint(where, self.disk) as opened,
            self._engine() as engine,
            ExitStack() as supply,
        ):
            targets = Targets(opened.manifest, partial=partial)
            made: Callable[[], Any] | None = None

            def bind() -> Mapping[int, Regions]:
                nonlocal made
                state = opened.manifest.state
                made = targets.value(state, ()) if into is None else targets.bind(into, state)
                targets.differences.check(where)
                supply.enter_context(Prefault(targets.new_memory))
                return targets.regions()

            try:
                opened.read(bind, engine=engine)
            except DamagedError as error:
                if into is None:
                    raise
                raise _half_set(error) from error
        targets.settle()
        assert made is not None
        return made()

    def verify(self, path: str | os.PathLike[str]) -> Health:
        """See :func:`penstock.checkpoint.verify`."""
        where = absolute_path(path, "the checkpoint")
        try:
            with OpenCheckpoint(where, self.disk) as opened, self._engine() as engine:
                damage = opened.verify(engine=engine)
                return Health(where, opened.manifest.nbytes, tuple(map(str, damage)))
        except CheckpointError as error:
            return Health(where, damage=(str(error),))

    def unchanged(self, path: str | os.PathLike[str], state: object) -> list[Place]:
        """See :func:`penstock.checkpoint.unchanged`."""
        where = absolute_path(path, "the checkpoint")
        prepared = self.prepare(state)
        with OpenCheckpoint(where, self.disk) as opened:
            manifest = opened.manifest
        return places(where, manifest, prepared)

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


def _check_facts(facts: Mapping[str, Json] | None) -> None:
    """Before anything is written. Raises CheckpointError."""
    try:
        json.dumps(dict(facts or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"facts are a dictionary of JSON: {error}; convert it, or put it into the state"
        ) from error


def _manifest(**fields: Any) -> bytes:
    try:
        return Manifest(**fields).encode()
    except FormError as error:
        raise CheckpointError(f"this state cannot be saved: {error}") from error
