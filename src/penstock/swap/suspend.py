"""A job between two steps, with its memory on flash: suspended, and resumed in the same process.

1. Everything that can go is written (:mod:`.state` says what that is): straight from the tensors' own
   huge pages, and from small ones by way of a few buffers, by the engine that spills activations, to
   files that have no name.
2. When all of it is written, and not before, the pages are given back ([Note: swapped pages]), and
   what Penstock and the C library hold in reserve. A write that fails leaves the job as it was. The
   files stay, to be overwritten when it is suspended again, and vanish with the session.
3. To resume, each page is read to where it was. Storages, views and addresses are the same as before,
   and every byte is checked. A read that fails can be tried again; until then its tensor stays closed.

On a GPU a storage gives its memory back as a whole, through a buffer in host memory, and has another
address afterwards: what was captured in a CUDA graph is not valid any more. Pinned memory of the host is
unpinned and given back, too; it is pinned again, at the same addresses, when all is there.
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
from penstock.checkpoint.moves import await_devices
from penstock.core.errors import ClosedError, ConfigError, PenstockError, SuspendError
from penstock.core.garbage import without_collection
from penstock.io import pages as memory
from penstock.observe.recorder import Recorder
from penstock.swap.recall import Recall
from penstock.swap.space import Space
from penstock.swap.state import Held, storages_of, tensors_of
from penstock.swap.swap_in import SwapIn
from penstock.swap.swap_out import SwapOut
from penstock.swap.write_batch import SwappedStorage
from penstock.tier.base import Tier
from penstock.tier.flash import StrPath

_asleep: weakref.WeakSet[Suspended] = weakref.WeakSet()


class Job(Protocol):
    """What can be suspended; a :class:`penstock.Session` can."""

    suspended: Suspended | None
    """While it is."""
    space: Space | None
    """Where it rested last."""
    recorder: Recorder
    wrap_tier: Callable[[Tier], Tier] | None
    """Applied to each tier that is opened for it."""

    @property
    def directories(self) -> tuple[str, ...]:
        """Where it spills to."""

    @property
    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Those that it knows, outermost ones, by name."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that it knows."""

    def rest(self) -> None:
        """Give back to the system what it holds in reserve; it moves nothing until ``wake``."""

    def wake(self) -> None:
        """Take again what ``rest`` gave back, as far as that is not taken when it is needed."""


class Suspended:
    """A job whose memory is on flash. ``resume`` brings it back; until then nobody may use it.

    Not thread-safe: whoever suspends a job resumes it. While it lasts, reading or writing one of its
    tensors ends the process by SIGSEGV ([Note: swapped pages]). A forked child must not resume it.

    Attributes:
        nbytes: What is on flash; so much memory has been given back.
        written_bytes: What of it had to be written, because no checkpoint has it.
        stayed: Tensors that could not go, with the reason.
    """

    def __init__(
        self,
        held: Sequence[Held],
        *,
        tier: Tier,
        stayed: dict[str, str],
        recall: Recall | None = None,
        meanwhile: Callable[[], None],
    ) -> None:
        """Write what no checkpoint has, then give the memory back.

        Args:
            held: What is to go.
            tier: Where to. It must not be closed before everything is back.
            stayed: What stays.
            recall: What a checkpoint has of it; closed when that is back, or if this fails.
            meanwhile: Called while the device is writing.

        Raises:
            TransferError: Something could not be written; nothing has changed.
        """
        self.nbytes = sum(each.nbytes for each in held)
        self.stayed = stayed
        self._tier = tier
        self._recall = recall
        known = frozenset[Held]() if recall is None else recall.held
        self._away = [SwappedStorage(each, recalled=each in known) for each in held]
        leaving = [each for each in self._away if not each.recalled]
        self.written_bytes = sum(each.held.nbytes for each in leaving)
        departure = SwapOut(tier)
        self._parcels = departure.parcels
        try:
            departure.run(leaving, meanwhile)
        except BaseException:
            self._discard_all()
            for parcel in self._parcels:  # until then their space is taken
                with suppress(Exception):
                    parcel.ticket.written.wait()
            raise
        _asleep.add(self)
        try:
            self._give_back()
        except BaseException:  # Ctrl-C, say
            self.resume()
            raise

    @property
    def is_back(self) -> bool:
        """Whether everything has been brought back."""
        return all(each.back for each in self._away)

    @without_collection()
    def resume(self) -> None:
        """Have every tensor as it was, at the same place. Idempotent.

        Raises:
            SuspendError: Some could not be read. They are named, and closed still; all others are back.
                Call it again to try once more.
        """
        for each in self._away:
            if each.ahead:
                assert each.held.pages is not None
                memory.unprotect(each.held.pages)
                each.ahead, each.back = False, True
        failed = self._bring_back([each for each in self._away if each.gone and not each.back])
        if failed:
            name, error = next(iter(failed.items()))
            raise SuspendError(
                f"{len(failed)} of {len(self._away)} tensors could not be brought back from flash, the"
                f" first is {name}: {error}; they stay suspended: call resume() again once the cause is"
                " removed, or go back to a checkpoint"
            ) from error
        self._discard_all()
        _asleep.discard(self)

    @without_collection()
    def fetch(self, nbytes: int) -> int:
        """Have as much as this in memory ahead of ``resume``; what there is more goes again.

        Until ``resume`` it is closed as the rest. What cannot be read now is left to ``resume`` to tell.
        Memory of devices and what a checkpoint has does not come ahead.

        Returns:
            How many bytes are there.
        """
        there = sum(each.held.nbytes for each in self._away if each.ahead)
        for each in self._away:
            if each.ahead and there > nbytes and each.held.pages is not None:
                memory.free_pages(each.held.pages)
                each.ahead = False
                there -= each.held.nbytes
        wanted = list[SwappedStorage]()
        for each in self._away:
            if each.back or each.ahead or each.held.pages is None or each.recalled:
                continue
            if there + each.held.nbytes > nbytes:
                break
            wanted.append(each)
            there += each.held.nbytes
        self._bring_back(wanted)
        for each in wanted:
            each.ahead, each.back = each.back, False
            if each.ahead and each.held.pages is not None:
                memory.protect([each.held.pages])
        return sum(each.held.nbytes for each in self._away if each.ahead)

    # -- out --------------------------------------------------------------------------------------

    def _discard_all(self) -> None:
        """Nothing of it on flash is needed any more."""
        for parcel in self._parcels:
            self._tier.discard(parcel.ticket)
        if self._recall is not None:
            self._recall.close()

    def _give_back(self) -> None:
        devices = set()
        for each in self._away:
            pages, storage = each.held.pages, each.held.storage
            each.gone = True  # first, so that it is brought back should this be interrupted
            if pages is None:
                devices.add(storage.device.type)
                storage.resize_(0)
                continue
            try:
                memory.free_pages(pages)
            except PenstockError as error:  # locked memory, or too many mappings
                self.stayed[each.held.name] = str(error)
                self.nbytes -= each.held.nbytes
                each.back = True
        if "cuda" in devices:
            torch.cuda.empty_cache()

    # -- back -------------------------------------------------------------------------------------

    def _bring_back(self, wanted: Sequence[SwappedStorage]) -> dict[str, BaseException]:
        """Have them filled and open; why some could not be, by name."""
        coming = SwapIn(wanted, self._parcels, tier=self._tier, recall=self._recall)
        coming.run()
        return coming.failed

    def open_for_exit(self) -> None:
        """The process ends: what cleans up behind it may touch what is left, which is zeros."""
        for each in self._away:
            if each.gone and not each.back and each.held.pages is not None:
                memory.unprotect(each.held.pages)


@without_collection()
def suspend(
    job: Job,
    *,
    flash: StrPath | Sequence[StrPath] | None = None,
    also: Sequence[torch.Tensor] = (),
    checkpoint: StrPath | None = None,
    state: object = None,
) -> Suspended:
    """Move all memory of a job to flash, between two steps; the process lives on.

    Parameters, gradients, buffers and states of the optimizers that the session knows go: those of its
    model, and of each optimizer that was given or has stepped. Storages, views and addresses stay valid,
    but nobody may touch them until ``resume``: see [Note: swapped pages]. Not thread-safe.

    Args:
        job: An open :class:`penstock.Session`.
        flash: A directory, or several; without, those of the session.
        also: More tensors that are to go, as copies of weights, or data that is held in memory.
        checkpoint: The path of one that was saved of this job. What it has, byte for byte, is not written
            once more; it need not be there any more when the job is resumed.
        state: What that was saved from: ``penstock.checkpoint.save(checkpoint, state)``.

    Raises:
        SuspendError: A backward is under way; or this is no session.
        ClosedError: The job is suspended already.
        NoSpaceError: The file systems have not the space. Nothing has changed; so of the next ones.
        ConfigError: There is no directory, or one cannot be used; or a checkpoint without its state.
        TransferError: Something could not be written.
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    _check_is_job(job)
    if torch._C._current_graph_task_id() != -1:
        raise SuspendError("suspend: a backward is under way; call it between two steps")
    if job.suspended is not None:
        raise ClosedError("suspend: this job is suspended already; resume it first")
    if (checkpoint is None) != (state is None):
        raise ConfigError(
            "suspend: checkpoint=... and state=... belong together: the path, and what was saved to it"
        )
    directories = job.directories if flash is None else flash
    if not directories:
        raise ConfigError(
            "suspend: there is no directory to write to; name one with flash=..., or --flash of"
            " `penstock run`"
        )
    let_all_change()  # saves on their way read the tensors themselves
    for optimizer in job.optimizers:
        rest = getattr(optimizer, "rest", None)  # its states are on flash already
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

    def give_back_idle() -> None:
        gc.collect(1)  # what the last steps left behind need not stay in memory
        job.rest()
        staging.give_back_idle()
        memory.trim_heap()

    try:
        job.suspended = Suspended(
            held, tier=tier, stayed=stayed, recall=recall, meanwhile=give_back_idle
        )
    except BaseException:
        job.wake()
        raise
    if any(each.pages is None for each in held):  # it went through the heap
        memory.trim_heap()
    return job.suspended


def _check_is_job(job: object) -> None:
    if not hasattr(job, "suspended"):
        raise SuspendError(
            f"there is no job to suspend or resume of a {type(job).__name__}; give the session, as of"
            " `with penstock.offload(model, optimizer, flash=...) as session`"
        )


def _space_for(
    job: Job,
    held: Sequence[Held],
    recall: Recall | None,
    directories: StrPath | Sequence[StrPath],
) -> Space:
    """The job's, or a larger one."""
    known = frozenset[Held]() if recall is None else recall.held
    needed = Space.needed_bytes([each for each in held if each not in known], directories)
    if job.space is not None and not job.space.serves(directories, needed):
        job.space.close()
        job.space = None
    if job.space is None:
        job.space = Space(
            directories, capacity_bytes=needed, recorder=job.recorder, wrap_tier=job.wrap_tier
        )
    return job.space


def resume(job: Job) -> None:
    """Bring a job's memory back. Does nothing if it is not suspended.

    Raises:
        SuspendError: Some could not be read; see ``Suspended.resume``.
    """
    _check_is_job(job)
    if job.suspended is not None:
        job.suspended.resume()
        job.suspended = None
        job.wake()


@atexit.register
def _open_all_for_exit() -> None:
    for each in tuple(_asleep):
        each.open_for_exit()
