"""Suspending a job between two steps, with its memory on flash, and resuming it in the same process.

1. All memory that can be moved (see :mod:`.state`) is written to unnamed files: directly from the
   tensors' huge pages, and from small pages through a few buffers, by the engine that offloads
   activations.
2. Only when all of it is written are the pages freed ([Note: swapped pages]), and with them the memory
   that Penstock and the C library hold in reserve. A failed write leaves the job as it was. The files
   stay, to be overwritten at the next suspend, and are discarded with the session.
3. To resume, each page is read to its old address. Storages, views and addresses are the same as before,
   and every byte is checked. A failed read can be repeated; until then its tensor stays inaccessible.

On a GPU a storage is freed as a whole, through a buffer in host memory, and gets another address
afterwards: captured CUDA graphs become invalid. Pinned host memory is unpinned and freed, too; it is
pinned again, at the same addresses, when all is restored.
"""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from penstock import staging
from penstock.checkpoint.background import let_all_change
from penstock.checkpoint.regions import await_devices
from penstock.core.errors import ClosedError, ConfigError, PenstockError, SuspendError
from penstock.core.garbage_collector import without_collection
from penstock.io import pages as memory
from penstock.observe.recorder import Recorder
from penstock.store.base import Tier
from penstock.store.blob import StrPath
from penstock.swap.recall import Recall
from penstock.swap.space import SwapSpace
from penstock.swap.state import SuspendableStorage, storages_of, tensors_of
from penstock.swap.swap_in import SwapIn
from penstock.swap.swap_out import SwapOut
from penstock.swap.write_batch import SwappedStorage

_asleep: weakref.WeakSet[Suspended] = weakref.WeakSet()


class Suspendable(Protocol):
    """A job that can be suspended, such as a :class:`penstock.Session`."""

    suspended: Suspended | None
    """Suspended memory; None while the job runs."""
    space: SwapSpace | None
    """Space that the last suspend used."""
    recorder: Recorder
    wrap_tier: Callable[[Tier], Tier] | None
    """Wrapper applied to each tier that is opened for it."""

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories to which it offloads."""

    @property
    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """The known outermost modules, each with its name."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The known optimizers."""

    def free_idle(self) -> None:
        """Free memory held in reserve; the job moves nothing until ``reacquire``."""

    def reacquire(self) -> None:
        """Allocate again what ``free_idle`` freed, unless that happens on demand."""


class Suspended:
    """A job whose memory is on flash. It must not be used until ``resume`` has restored it.

    Not thread-safe: the thread that suspends a job resumes it. Until then, reading or writing one of its
    tensors ends the process by SIGSEGV ([Note: swapped pages]). A forked child must not resume it.

    Attributes:
        nbytes: Bytes on flash, which is also the size of the freed memory.
        written_bytes: Bytes of those that had to be written, because no checkpoint has them.
        stayed: Reasons, by name, for tensors that stayed resident.
    """

    def __init__(
        self,
        held: Sequence[SuspendableStorage],
        *,
        tier: Tier,
        stayed: dict[str, str],
        recall: Recall | None = None,
        while_writing: Callable[[], None],
    ) -> None:
        """Write what no checkpoint has, then free the memory.

        Args:
            held: Storages to suspend.
            tier: Target tier. It must stay open until everything is restored.
            stayed: Reasons for tensors that stay resident.
            recall: Checkpoint with a part of the memory; closed when all is restored, or on failure.
            while_writing: Function called while the device is writing.

        Raises:
            TransferError: A write failed; nothing has changed.
        """
        self.nbytes = sum(each.nbytes for each in held)
        self.stayed = stayed
        self._tier = tier
        self._recall = recall
        known = frozenset[SuspendableStorage]() if recall is None else recall.held
        self._storages = [SwappedStorage(each, recalled=each in known) for each in held]
        outgoing = [each for each in self._storages if not each.recalled]
        self.written_bytes = sum(each.held.nbytes for each in outgoing)
        swap_out = SwapOut(tier)
        self._batches = swap_out.batches
        try:
            swap_out.run(outgoing, while_writing)
        except BaseException:
            self._discard_all()
            for batch in self._batches:  # until then their space is taken
                with suppress(Exception):
                    batch.ticket.written.wait()
            raise
        _asleep.add(self)
        try:
            self._free_all()
        except BaseException:  # such as Ctrl-C
            self.resume()
            raise

    @property
    def is_restored(self) -> bool:
        """True if everything has been restored."""
        return all(each.restored for each in self._storages)

    @without_collection()
    def resume(self) -> None:
        """Restore every tensor at its old address. Idempotent.

        Raises:
            SuspendError: Some could not be read. They are named, and stay inaccessible; all others are
                restored. Call it again to repeat the reads.
        """
        for each in self._storages:
            if each.prefetched:
                assert each.held.pages is not None
                memory.unprotect(each.held.pages)
                each.prefetched, each.restored = False, True
        failed = self._swap_in(
            [each for each in self._storages if each.freed and not each.restored]
        )
        if failed:
            name, error = next(iter(failed.items()))
            raise SuspendError(
                f"{len(failed)} of {len(self._storages)} tensors could not be restored from flash, the"
                f" first is {name}: {error}; they stay suspended: call resume() again once the cause is"
                " removed, or load a checkpoint"
            ) from error
        self._discard_all()
        _asleep.discard(self)

    @without_collection()
    def prefetch(self, nbytes: int) -> int:
        """Prefetch up to ``nbytes`` into memory before ``resume``; free what exceeds that.

        Until ``resume`` the memory stays inaccessible. Failed reads are ignored; ``resume`` repeats and
        reports them. Device memory and memory in a checkpoint is not prefetched.

        Returns:
            The number of prefetched bytes.
        """
        there = sum(each.held.nbytes for each in self._storages if each.prefetched)
        for each in self._storages:
            if each.prefetched and there > nbytes and each.held.pages is not None:
                memory.free_pages(each.held.pages)
                each.prefetched = False
                there -= each.held.nbytes
        wanted = list[SwappedStorage]()
        for each in self._storages:
            if each.restored or each.prefetched or each.held.pages is None or each.recalled:
                continue
            if there + each.held.nbytes > nbytes:
                break
            wanted.append(each)
            there += each.held.nbytes
        self._swap_in(wanted)
        for each in wanted:
            each.prefetched, each.restored = each.restored, False
            if each.prefetched and each.held.pages is not None:
                memory.protect([each.held.pages])
        return sum(each.held.nbytes for each in self._storages if each.prefetched)

    # -- out --------------------------------------------------------------------------------------

    def _discard_all(self) -> None:
        """Discard all its bytes on flash."""
        for batch in self._batches:
            self._tier.discard(batch.ticket)
        if self._recall is not None:
            self._recall.close()

    def _free_all(self) -> None:
        devices = set()
        for each in self._storages:
            pages, storage = each.held.pages, each.held.storage
            each.freed = True  # first, so that it is restored if this is interrupted
            if pages is None:
                devices.add(storage.device.type)
                storage.resize_(0)
                continue
            try:
                memory.free_pages(pages)
            except PenstockError as error:  # locked memory, or too many mappings
                self.stayed[each.held.name] = str(error)
                self.nbytes -= each.held.nbytes
                each.restored = True
        if "cuda" in devices:
            torch.cuda.empty_cache()

    # -- in ---------------------------------------------------------------------------------------

    def _swap_in(self, wanted: Sequence[SwappedStorage]) -> dict[str, BaseException]:
        """Restore and open storages; return the errors of those that failed, by name."""
        swap_in = SwapIn(wanted, self._batches, tier=self._tier, recall=self._recall)
        swap_in.run()
        return swap_in.failed

    def open_for_exit(self) -> None:
        """Open all remaining pages, which read as zeros, because clean-up at exit may touch them."""
        for each in self._storages:
            if each.freed and not each.restored and each.held.pages is not None:
                memory.unprotect(each.held.pages)


@without_collection()
def suspend(
    job: Suspendable,
    *,
    flash: StrPath | Sequence[StrPath] | None = None,
    also: Sequence[torch.Tensor] = (),
    checkpoint: StrPath | None = None,
    state: object = None,
) -> Suspended:
    """Move all memory of a job to flash between two steps; the process continues to exist.

    This moves the parameters, gradients, buffers and optimizer states that the session knows: those of
    its model, and of each optimizer that was passed or has stepped. Storages, views and addresses stay
    valid, but must not be accessed until ``resume``: see [Note: swapped pages]. Not thread-safe.

    Args:
        job: An open :class:`penstock.Session`.
        flash: A directory, or several; by default those of the session.
        also: Further tensors to move, such as copies of weights, or data in memory.
        checkpoint: Path of a checkpoint of this job. Memory with the same bytes is not written again; the
            checkpoint may be removed before the job is resumed.
        state: State from which it was saved: ``penstock.checkpoint.save(checkpoint, state)``.

    Raises:
        SuspendError: A backward is running, weights on a device rest on flash, or ``job`` is not a
            session. After this and all the following errors nothing has changed.
        ClosedError: The job is already suspended.
        NoSpaceError: The file systems do not have the space.
        ConfigError: There is no usable directory, or a checkpoint without its state.
        TransferError: A write failed.
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    _check_is_job(job)
    if torch._C._current_graph_task_id() != -1:
        raise SuspendError("suspend: a backward is running; call suspend between two steps")
    if getattr(job, "streams_device_weights", False):
        raise SuspendError(
            "suspend: weights of this job that are used on a device rest elsewhere (weights='flash' or"
            " 'host'), and suspend cannot move those in device memory; close the session"
        )
    if job.suspended is not None:
        raise ClosedError("suspend: this job is already suspended; resume it first")
    if (checkpoint is None) != (state is None):
        raise ConfigError(
            "suspend: pass both checkpoint=... (the path) and state=... (the saved state), or neither"
        )
    directories = job.directories if flash is None else flash
    if not directories:
        raise ConfigError(
            "suspend: there is no directory to write to; name one with flash=..., or --flash of"
            " `penstock run`"
        )
    let_all_change()  # running saves read the tensors themselves
    for optimizer in job.optimizers:
        rest = getattr(optimizer, "rest", None)  # its states are already on flash
        if rest is not None:
            rest()
    named = [(f"also.{place}", tensor) for place, tensor in enumerate(also)]
    held, stayed = storages_of([*tensors_of(job.modules, job.optimizers), *named])
    await_devices(each.storage.device for each in held)
    recall = None if checkpoint is None else Recall(checkpoint, state, held)
    try:
        tier = _space_for(job, held, recall, directories).tier
    except BaseException:
        if recall is not None:
            recall.close()
        raise

    def free_idle_memory() -> None:
        gc.collect(1)  # free garbage of the last steps
        job.free_idle()
        staging.free_idle()
        memory.trim_heap()

    try:
        job.suspended = Suspended(
            held, tier=tier, stayed=stayed, recall=recall, while_writing=free_idle_memory
        )
    except BaseException:
        job.reacquire()
        raise
    if any(each.pages is None for each in held):  # it went through the heap
        memory.trim_heap()
    return job.suspended


def _check_is_job(job: object) -> None:
    if not hasattr(job, "suspended"):
        raise SuspendError(
            f"a {type(job).__name__} cannot be suspended or resumed; pass the session, as in"
            " `with penstock.offload(model, optimizer, flash=...) as session`"
        )


def _space_for(
    job: Suspendable,
    held: Sequence[SuspendableStorage],
    recall: Recall | None,
    directories: StrPath | Sequence[StrPath],
) -> SwapSpace:
    """Return the job's space, or a new one if that is too small."""
    known = frozenset[SuspendableStorage]() if recall is None else recall.held
    needed = SwapSpace.needed_bytes([each for each in held if each not in known], directories)
    if job.space is not None and not job.space.serves(directories, needed):
        job.space.close()
        job.space = None
    if job.space is None:
        job.space = SwapSpace(
            directories, capacity_bytes=needed, recorder=job.recorder, wrap_tier=job.wrap_tier
        )
    return job.space


def resume(job: Suspendable) -> None:
    """Restore a job's memory. Does nothing if it is not suspended.

    Raises:
        SuspendError: Some tensors could not be read; see ``Suspended.resume``.
    """
    _check_is_job(job)
    if job.suspended is not None:
        job.suspended.resume()
        job.suspended = None
        job.reacquire()


@atexit.register
def _open_all_for_exit() -> None:
    for each in tuple(_asleep):
        each.open_for_exit()
