"""Saving while training goes on.

[Note: copy at the boundary]
    Parameters and optimizer states change in the optimizer's step only. Until then a save reads the
    tensors themselves, in another thread. A hook before the step waits until everything has been read.
    Meanwhile it copies pieces that have not been read yet, those to be written last first, until it meets
    the writing thread or has used up a budget. No lock is held while bytes are copied: both may read a
    piece, as nothing changes it before the hook returns. Everything else in the state (buffers,
    generators, averages) may change at any moment, so the same is done with it before ``save`` returns. A
    tensor that is changed nevertheless is noticed by its version, and the save fails: a checkpoint is of
    one moment.

[Note: priority of a save]
    Blocks are written with the priority BACKGROUND: reads of backward and writes of activations overtake
    them. As soon as training waits for the save, further blocks have a higher priority.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from penstock.checkpoint.api import Saved
from penstock.checkpoint.disk import having_threads
from penstock.checkpoint.regions import Plain, SourceRegion
from penstock.checkpoint.streams import BUFFERS_BYTES
from penstock.checkpoint.tensors import Prepared
from penstock.core.errors import CheckpointError, PenstockError, PenstockWarning
from penstock.core.locks import condition
from penstock.core.units import MIB
from penstock.homed import has_address
from penstock.io.engine import Priority
from penstock.io.mapping import PAGE_BYTES
from penstock.store.arena import Arena
from penstock.store.engine import shared_engine
from penstock.store.window import TransferWindow

PIECE_BYTES: Final = 2 * MIB
"""Bytes copied at once: a huge page, and less than a block."""
_ALIGNMENT_BYTES: Final = 64

Write = Callable[["Saving", list[list[tuple[int, SourceRegion]]]], Saved]
"""Function that writes the regions of all files, and notes in its first argument what it has read."""

_under_way: weakref.WeakSet[Saving] = weakref.WeakSet()
"""Saves that may still read, and some that have ended."""


class TensorSnapshot(SourceRegion):
    """A tensor's bytes; those of some pieces are copies of what they were."""

    def __init__(
        self,
        saving: Saving,
        region: SourceRegion,
        tensor: torch.Tensor,
        name: str,
        place: tuple[int, int],
    ) -> None:
        """Copy nothing yet.

        Args:
            saving: Save that reads it.
            region: Its bytes.
            tensor: The tensor.
            name: Its name in errors.
            place: Number of the file that it goes to, and its offset there.
        """
        self.nbytes = region.nbytes
        self.storage = _storage(tensor)
        self._saving = saving
        self._place = place
        self._region = region
        self._tensor = tensor
        self._name = name
        self.has_version = not tensor.is_inference()
        self._version = tensor._version if self.has_version else 0
        self._copies: dict[int, SourceRegion] = {}

    @property
    def was_changed(self) -> bool:
        """Return whether the tensor has been changed."""
        return self.has_version and self._tensor._version != self._version

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return -(-self.nbytes // PIECE_BYTES)

    def piece_bytes(self, piece: int) -> int:
        """Return the length of a piece."""
        return min(PIECE_BYTES, self.nbytes - piece * PIECE_BYTES)

    def end(self, piece: int) -> tuple[int, int]:
        """Return the file of a piece, and the offset of its end there."""
        file, start = self._place
        return file, start + piece * PIECE_BYTES + self.piece_bytes(piece)

    def has_copy(self, piece: int) -> bool:
        """Return whether a piece has been copied."""
        return piece in self._copies

    def copy_out(self, start: int, stop: int, address: int) -> None:
        """Copy some bytes to memory. Raises CheckpointError if the tensor was changed."""
        for piece, low, high in _pieces(start, stop):
            copy = self._saving.reads(self, piece)
            if copy is not None:
                first = piece * PIECE_BYTES
                copy.copy_out(low - first, high - first, address + low - start)
                continue
            try:
                self._region.copy_out(low, high, address + low - start)
                was_changed = self.was_changed  # now: afterwards the optimizer's step may come
            finally:
                self._saving.has_read()
            if was_changed:
                raise CheckpointError(
                    f"{self._name} was changed while it was being saved, not by a step of an"
                    " optimizer in the state: this save is given up; call wait() or before_update()"
                    " before that change"
                )

    def copy_of(self, piece: int) -> SourceRegion | None:
        """Return the copy of a piece, if there is one."""
        return self._copies.get(piece)

    def copied(self, piece: int, memory: torch.Tensor) -> SourceRegion:
        """Copy a piece to memory of its length."""
        start = piece * PIECE_BYTES
        self._region.copy_out(start, start + memory.numel(), memory.data_ptr())
        return Plain(memory)

    def take(self, piece: int, copy: SourceRegion) -> None:
        """Use a copy in place of a piece from now on."""
        self._copies[piece] = copy


class Saving:
    """A save that runs in a thread of its own. Its methods are for the training thread.

    Attributes:
        stall_s: Time for which it has blocked training so far.
        copied_bytes: Bytes that had to be copied.
    """

    def __init__(
        self,
        prepared: Prepared,
        write: Write,
        *,
        steady: frozenset[int],
        optimizers: Sequence[torch.optim.Optimizer],
        copies_bytes: int,
    ) -> None:
        """Begin to write; return when everything that may change at any moment is read or copied.

        Args:
            prepared: The state.
            write: Writes it.
            steady: Addresses of storages that change in the optimizers' steps only, or never.
            optimizers: Those optimizers.
            copies_bytes: Memory for copies; for what does not fit, training waits.

        Raises:
            TransferError: The system starts no thread. Nothing is saved then.
        """
        start = time.perf_counter()
        self.stall_s = 0.0
        self.copied_bytes = 0
        self._changed = condition()
        self._released = (0, 0)
        self._window: TransferWindow[Any] | None = None
        self._awaited = False
        self._reading: TensorSnapshot | None = None
        self._over = False
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._copies = (
            Arena(copies_bytes, owner="checkpoint") if copies_bytes >= PAGE_BYTES else None
        )
        self._all: list[TensorSnapshot] = []
        regions = self._sources(prepared)
        unsteady = [
            each for each in self._all if each.storage not in steady or not each.has_version
        ]
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in optimizers]
        self._thread = threading.Thread(
            target=self._run, args=(write, regions), name="penstock-checkpoint"
        )
        _under_way.add(self)
        try:
            with having_threads("a checkpoint"):
                shared_engine().start()  # the save may have to go on when the program ends
                self._thread.start()
            self._let_change(unsteady)
        except BaseException:  # the caller gets no object to wait for
            self._let_go()
            if self._thread.ident is None:
                self._end()  # nothing reads: the optimizers must not wait for that
            else:
                self._thread.join()
            raise
        self.stall_s += time.perf_counter() - start

    @property
    def done(self) -> bool:
        """Return whether it has ended, successfully or not."""
        return self._over

    def wait(self) -> Saved:
        """Wait until it is durable. Raises as :func:`penstock.checkpoint.save`."""
        start = time.perf_counter()
        self._hurry()
        self._thread.join()
        self.stall_s += time.perf_counter() - start
        self._let_go()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def before_update(self) -> None:
        """Wait until everything in the state may change; torch's optimizers call it."""
        start = time.perf_counter()
        self._let_change(self._all)  # hooks stay until wait(): torch is going through them now
        self.stall_s += time.perf_counter() - start

    def _let_change(self, sources: Sequence[TensorSnapshot]) -> None:
        """See [Note: copy at the boundary]."""
        needed = self._copy_from_the_end(sources)
        mine = frozenset(map(id, sources))
        with self._changed:
            while not self._over and (self._released < needed or id(self._reading) in mine):
                if self._released < needed:
                    self._hurry()
                self._changed.wait()

    def _hurry(self) -> None:
        """Raise the priority of the writes that follow; see [Note: priority of a save]."""
        self._awaited = True
        if self._window is not None:
            self._window.priority = Priority.PREFETCH

    def _copy_from_the_end(self, sources: Sequence[TensorSnapshot]) -> tuple[int, int]:
        """Copy what the budget allows; return the end of what the writing thread must read itself."""
        for source in reversed(sources):
            for piece in reversed(range(source.pieces)):
                nbytes, end = source.piece_bytes(piece), source.end(piece)
                if self._over or end <= self._released:
                    return 0, 0
                if source.has_copy(piece):
                    continue
                memory = self._memory(nbytes)
                if memory is None:
                    return end
                if source.was_changed:
                    return 0, 0  # the thread that writes will report it
                copy = source.copied(piece, memory)
                self.copied_bytes += nbytes
                with self._changed:
                    source.take(piece, copy)
        return 0, 0

    def _memory(self, nbytes: int) -> torch.Tensor | None:
        """Return memory for a copy, which is freed when the tensor dies; None if there is no more."""
        copies = self._copies
        if copies is None or copies.account.free_bytes < nbytes + BUFFERS_BYTES:
            return None  # the thread that writes needs the rest
        try:
            block = copies.allocate(nbytes, alignment=_ALIGNMENT_BYTES)
        except PenstockError:
            return None
        return None if block is None else torch.from_numpy(block.lend(0, nbytes))

    def _end(self) -> None:
        """Note that nothing will be read any more."""
        with self._changed:
            self._over = True
            self._all = []
            self._changed.notify_all()
        if self._copies is not None:
            self._copies.close()

    # -- for the thread that writes -------------------------------------------------------------------

    def reads(self, source: TensorSnapshot, piece: int) -> SourceRegion | None:
        """Return the copy of a piece; if None, the tensor is being read until ``has_read``."""
        with self._changed:
            copy = source.copy_of(piece)
            if copy is None:
                self._reading = source
            return copy

    def has_read(self) -> None:
        """Note that no tensor is being read any more."""
        with self._changed:
            self._reading = None
            self._changed.notify_all()

    def begins(self, window: TransferWindow[Any]) -> None:
        """Note that the writes go through a window."""
        window.priority = Priority.BACKGROUND
        self._window = window
        if self._awaited:  # since before there was a window, or just now
            self._hurry()

    def released(self, file: int, end: int) -> None:
        """Note that the bytes before ``end`` of a file, by its number, have been read."""
        with self._changed:
            self._released = (file, end)
            self._changed.notify_all()

    def _run(self, write: Write, regions: list[list[tuple[int, SourceRegion]]]) -> None:
        try:
            self._saved = write(self, regions)
        except BaseException as error:  # noqa: BLE001  (``wait`` raises it)
            self._error = error.with_traceback(None)
            if not threading.main_thread().is_alive():  # the program ends without ``wait``
                warnings.warn(failure_told(error), PenstockWarning, stacklevel=2)
        self._end()

    def _before_step(self, *_: Any) -> None:
        self.before_update()

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _sources(self, prepared: Prepared) -> list[list[tuple[int, SourceRegion]]]:
        made: list[list[tuple[int, SourceRegion]]] = []
        for number, plan in enumerate(prepared.plans):
            members = [i for i in plan.members if prepared.entries[i].nbytes]
            header, *others = plan.regions(prepared.tensors)
            file: list[tuple[int, SourceRegion]] = [header]
            for index, (offset, region) in zip(members, others, strict=True):
                tensor, name = prepared.tensors[index], prepared.entries[index].name
                source = TensorSnapshot(self, region, tensor, name, (number, offset))
                self._all.append(source)
                file.append((offset, source))
            made.append(file)
        return made


def failure_told(error: BaseException) -> str:
    """Return the message on a save that failed while nobody waited for it."""
    return f"a checkpoint could not be saved, and those before it stay: {error}"


def let_all_change() -> None:
    """Wait until no save reads a tensor any more, so that the memory of all may be freed."""
    for saving in tuple(_under_way):
        saving.before_update()


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers of the pieces that some bytes lie in, and the bytes in each."""
    while start < stop:
        piece = start // PIECE_BYTES
        end = min(stop, (piece + 1) * PIECE_BYTES)
        yield piece, start, end
        start = end


def steady_in(
    optimizers: Sequence[torch.optim.Optimizer], private: Sequence[object]
) -> frozenset[int]:
    """Return addresses of storages that change in the optimizers' steps only, or that nothing else has.

    Weights that rest on flash while a device works with them have none, so saves read them at once.

    Args:
        optimizers: The optimizers.
        private: Tensors that nothing else has, and other values.
    """
    found = list(private)
    for optimizer in optimizers:
        found += (each for group in optimizer.param_groups for each in group["params"])
        found += (each for state in optimizer.state.values() for each in state.values())
    tensors = (each for each in found if isinstance(each, torch.Tensor))
    return frozenset(_storage(each) for each in tensors if has_address(each))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
