"""A job between two steps, with its memory on flash: suspended, and resumed in the same process.

1. Everything that can go is written (:mod:`.state` says what that is): straight from the tensors' own
   pages, by the engine that spills activations, to files that have no name.
2. When all of it is written, and not before, the pages are given back ([Note: pages at rest]), and
   what Penstock and the C library hold in reserve. A write that fails leaves the job as it was. The
   files stay, to be overwritten when it is suspended again, and vanish with the session.
3. To resume, each page is read to where it was. Storages, views and addresses are the same as before,
   and every byte is checked. A read that fails can be tried again; until then its tensor stays closed.

On a GPU a storage gives its memory back as a whole, through a buffer in host memory, and has another
address afterwards: what was captured in a CUDA graph is not valid any more.
"""

from __future__ import annotations

import atexit
import gc
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from penstock.core.errors import ClosedError, ConfigError, PenstockError, SuspendError
from penstock.core.units import MIB, round_up
from penstock.io import pages as memory
from penstock.io.aio import default_engine
from penstock.io.engine import Transfer
from penstock.jobs.state import Held, storages_of, tensors_of
from penstock.observe.recorder import Recorder
from penstock.tier import checksums
from penstock.tier.base import Ticket, Tier
from penstock.tier.flash import FlashTier, StrPath
from penstock.tier.slabs import UNIT_BYTES

STAGED_BYTES: Final = 256 * MIB
"""How much of a device's memory waits in host memory to be written, or has been read for it."""

_asleep: weakref.WeakSet[Suspended] = weakref.WeakSet()


@dataclass(slots=True)
class _Away:
    """A storage on flash."""

    held: Held
    ticket: Ticket
    gone: bool = False
    """Whether its memory may have been given back."""
    back: bool = False
    """Whether it is there again, or still."""


class Space:
    """Where a job's memory rests: files without names, kept while the job lives.

    To overwrite what a file system has given once is about twice as quick as to write anew.

    Attributes:
        tier: Checks every byte, for it holds the only copy.
    """

    def __init__(
        self,
        flash: StrPath | Sequence[StrPath],
        *,
        capacity_bytes: int,
        recorder: Recorder,
        wrap_tier: Callable[[Tier], Tier] | None = None,
    ) -> None:
        """Check the directories and their free space.

        Raises:
            NoSpaceError: The file systems have not the space; the figures are in it.
            ConfigError: A directory cannot be used.
        """
        self._flash = flash
        self._closing = ExitStack()
        engine = default_engine()
        self._closing.callback(engine.close)
        try:
            tier = FlashTier(
                flash,
                capacity_bytes=capacity_bytes,
                engine=engine,
                recorder=recorder,
                name="suspended",
                checksum=checksums.full,
            )
        except BaseException:
            self._closing.close()
            raise
        self.tier: Tier = wrap_tier(tier) if wrap_tier is not None else tier
        self._closing.callback(self.tier.close)

    @staticmethod
    def needed_bytes(held: Sequence[Held], flash: StrPath | Sequence[StrPath]) -> int:
        """The capacity that so much takes."""
        directories = 1 if isinstance(flash, (str, os.PathLike)) else len(flash)
        return sum(round_up(each.nbytes, UNIT_BYTES) for each in held) + directories * UNIT_BYTES

    def serves(self, flash: StrPath | Sequence[StrPath], capacity_bytes: int) -> bool:
        """Whether it is in these directories and large enough."""
        return self._flash == flash and self.tier.spec.capacity_bytes >= capacity_bytes

    def close(self) -> None:
        """Give the files back. Idempotent."""
        self._closing.close()


class Suspended:
    """A job whose memory is on flash. ``resume`` brings it back; until then nobody may use it.

    Not thread-safe: whoever suspends a job resumes it. While it lasts, reading or writing one of its
    tensors ends the process by SIGSEGV ([Note: pages at rest]). A forked child must not resume it.

    Attributes:
        nbytes: What went to flash; so much memory has been given back.
        stayed: Tensors that could not go, with the reason.
    """

    def __init__(self, held: Sequence[Held], *, tier: Tier, stayed: dict[str, str]) -> None:
        """Write everything, then give the memory back.

        Args:
            held: What is to go.
            tier: Where to. It must not be closed before everything is back.
            stayed: What stays.

        Raises:
            TransferError: Something could not be written; nothing has changed.
        """
        self.nbytes = sum(each.nbytes for each in held)
        self.stayed = stayed
        self._tier = tier
        self._away: list[_Away] = []
        try:
            self._write(held)
        except BaseException:
            for each in self._away:
                tier.discard(each.ticket)
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

    def resume(self) -> None:
        """Have every tensor as it was, at the same place. Idempotent.

        Raises:
            SuspendError: Some could not be read. They are named, and closed still; all others are back.
                Call it again to try once more.
        """
        missing = [each for each in self._away if each.gone and not each.back]
        failed: dict[str, BaseException] = {}
        reads: deque[tuple[_Away, Transfer, torch.Tensor | None]] = deque()
        staged = 0
        for each in missing:
            transfer, buffer = self._begin_read(each)
            reads.append((each, transfer, buffer))
            staged += 0 if buffer is None else buffer.nbytes
            while staged > STAGED_BYTES:
                _, _, first = reads[0]
                staged -= 0 if first is None else first.nbytes
                self._end_read(*reads.popleft(), failed)
        while reads:
            self._end_read(*reads.popleft(), failed)
        if failed:
            name, error = next(iter(failed.items()))
            raise SuspendError(
                f"{len(failed)} of {len(self._away)} tensors could not be brought back from flash, the"
                f" first is {name}: {error}; they stay suspended: call resume() again once the cause is"
                " removed, or go back to a checkpoint"
            ) from error
        _asleep.discard(self)

    # -- out --------------------------------------------------------------------------------------

    def _write(self, held: Sequence[Held]) -> None:
        staged: deque[Ticket] = deque()
        for each in held:
            source = each.storage
            if each.pages is None:
                source = torch.UntypedStorage(each.nbytes)  # type: ignore[no-untyped-call]
                source.copy_(each.storage)
            address, nbytes = each.pages or (source.data_ptr(), each.nbytes)
            ticket = self._tier.write(address, nbytes, keep_alive=source, label=each.name)
            self._away.append(_Away(each, ticket))
            if each.pages is None:
                staged.append(ticket)
                while sum(one.nbytes for one in staged) > STAGED_BYTES:
                    staged.popleft().written.wait()
            del source
        gc.collect(1)  # meanwhile: what the last steps left behind need not stay in memory
        for away in self._away:
            away.ticket.written.wait()

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
                memory.give_back(pages)
            except PenstockError as error:  # locked memory
                memory.open_again(pages)
                self.stayed[each.held.name] = str(error)
                self._tier.discard(each.ticket)
                self.nbytes -= each.held.nbytes
                each.back = True
        if "cuda" in devices:
            torch.cuda.empty_cache()

    # -- back -------------------------------------------------------------------------------------

    def _begin_read(self, away: _Away) -> tuple[Transfer, torch.Tensor | None]:
        pages, ticket, granule = away.held.pages, away.ticket, self._tier.spec.granule_bytes
        if pages is not None:
            memory.open_again(pages)
            return self._tier.read(ticket, pages.address, keep_alive=away.held.storage), None
        buffer = torch.empty(ticket.window.nbytes + granule, dtype=torch.uint8)
        start = round_up(buffer.data_ptr(), granule) - buffer.data_ptr()
        target = buffer[start : start + ticket.window.nbytes]
        return self._tier.read(ticket, target.data_ptr(), keep_alive=target), target

    def _end_read(
        self,
        away: _Away,
        transfer: Transfer,
        buffer: torch.Tensor | None,
        failed: dict[str, BaseException],
    ) -> None:
        pages, storage = away.held.pages, away.held.storage
        try:
            transfer.wait()
        except (PenstockError, OSError) as error:
            failed[away.held.name] = error
            if pages is not None:
                memory.close_to_all([pages])
            return
        if buffer is not None:
            skew = away.ticket.window.skew
            storage.resize_(away.ticket.nbytes)
            storage.copy_(buffer[skew : skew + away.ticket.nbytes].clone().untyped_storage())
        away.back = True
        self._tier.discard(away.ticket)

    def open_for_exit(self) -> None:
        """The process ends: what cleans up behind it may touch what is left, which is zeros."""
        for each in self._away:
            if each.gone and not each.back and each.held.pages is not None:
                memory.open_again(each.held.pages)


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

    def give_back_idle(self) -> None:
        """Give back to the system what it holds in reserve."""


def suspend(
    job: Job, *, flash: StrPath | Sequence[StrPath] | None = None, also: Sequence[torch.Tensor] = ()
) -> Suspended:
    """Move all memory of a job to flash, between two steps; the process lives on.

    Parameters, gradients, buffers and states of the optimizers that the session knows go: those of its
    model, and of each optimizer that was given or has stepped. Storages, views and addresses stay valid,
    but nobody may touch them until ``resume``: see [Note: pages at rest]. Not thread-safe.

    Args:
        job: An open :class:`penstock.Session`.
        flash: A directory, or several; without, those of the session.
        also: More tensors that are to go, as copies of weights, or data that is held in memory.

    Raises:
        SuspendError: A backward is under way.
        ClosedError: The job is suspended already.
        NoSpaceError: The file systems have not the space. Nothing has changed; so of the next ones.
        ConfigError: There is no directory, or one cannot be used.
        TransferError: Something could not be written.
    """
    if torch._C._current_graph_task_id() != -1:
        raise SuspendError("suspend: a backward is under way; call it between two steps")
    if job.suspended is not None:
        raise ClosedError("suspend: this job is suspended already; resume it first")
    directories = job.directories if flash is None else flash
    if not directories:
        raise ConfigError("suspend: there is no directory to write to; name one with flash=")
    for optimizer in job.optimizers:
        rest = getattr(optimizer, "rest", None)  # its states are on flash already
        if rest is not None:
            rest()
    named = [(f"also.{place}", tensor) for place, tensor in enumerate(also)]
    held, stayed = storages_of([*tensors_of(job.modules, job.optimizers), *named])
    needed = Space.needed_bytes(held, directories)
    if job.space is not None and not job.space.serves(directories, needed):
        job.space.close()
        job.space = None
    if job.space is None:
        job.space = Space(
            directories, capacity_bytes=needed, recorder=job.recorder, wrap_tier=job.wrap_tier
        )
    job.suspended = made = Suspended(held, tier=job.space.tier, stayed=stayed)
    job.give_back_idle()
    memory.trim_heap()
    return made


def resume(job: Job) -> None:
    """Bring a job's memory back. Does nothing if it is not suspended.

    Raises:
        SuspendError: Some could not be read; see ``Suspended.resume``.
    """
    if job.suspended is not None:
        job.suspended.resume()
        job.suspended = None


@atexit.register
def _open_all_for_exit() -> None:
    for each in tuple(_asleep):
        each.open_for_exit()
