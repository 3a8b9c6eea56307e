"""One checkpoint: saved whole or not at all ([Note: a save]), loaded whole or refused."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.checkpoint.disk import Directory, Disk, having_threads
from penstock.checkpoint.encoded import EncodedBody
from penstock.checkpoint.frames import Encoder
from penstock.checkpoint.hidden import (
    check_fits,
    check_replaceable,
    claim,
    hidden_name_of,
    parent_of,
    publish,
)
from penstock.checkpoint.manifest import (
    BLOCK_BYTES,
    FILE_NAME,
    FileEntry,
    Manifest,
    TensorEntry,
)
from penstock.checkpoint.packing import FILE_BYTES
from penstock.checkpoint.prepared import Prepared, prepare
from penstock.checkpoint.reading import Health, OpenCheckpoint, some
from penstock.checkpoint.spare import held_bytes
from penstock.checkpoint.streams import BUFFERS_BYTES, Buffers
from penstock.checkpoint.targets import Targets
from penstock.checkpoint.unchanged import Place, places
from penstock.checkpoint.values import FormError, Json
from penstock.checkpoint.writing import Base, FilesWriter, Watcher
from penstock.core.errors import CheckpointError, DamagedError
from penstock.core.files import absolute_path
from penstock.io.engine import Engine
from penstock.io.prefault import Prefault


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
        """See :func:`penstock.checkpoint.prepared.prepare`."""
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
                    regions = [plan.regions(prepared.leaves) for plan in prepared.plans]
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
            usable = opened.manifest.block_bytes == self.block_bytes
            yield Base(opened.directory, opened.manifest) if usable else None

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
        with OpenCheckpoint(where, self.disk) as opened:
            targets = Targets(opened.manifest, partial=partial)
            state = opened.manifest.state
            made = targets.value(state, ()) if into is None else targets.bind(into, state)
            targets.differences.check(where)
            regions = targets.regions()
            with self._engine() as engine, Prefault(targets.new_memory):
                try:
                    opened.read(regions, engine=engine)
                except DamagedError as error:
                    if into is None:
                        raise
                    raise _half_set(error) from error
        targets.settle()
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
