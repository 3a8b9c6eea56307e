"""Suspending an unchanged script at the end of a step, by a signal or by its manager.

SIGUSR1 suspends it and SIGUSR2 resumes it; a manager of jobs does the same through a file ([Note:
channel]). The ranks of a job sleep together ([Note: one step for all ranks]). The script's own thread
suspends the job between two steps, and waits there. An exception that ends the wait, such as Ctrl-C, is
raised in the script after its memory has been restored.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.core.errors import PenstockError
from penstock.core.process import fork_guard
from penstock.core.ranks import rank
from penstock.core.units import MIB, format_bytes
from penstock.swap.channel import JobEnd
from penstock.swap.pending_signals import PendingSignals
from penstock.swap.resume_record import ResumeRecord
from penstock.swap.sleep_agreement import SleepAgreement
from penstock.swap.suspend import Suspendable, resume, suspend

if TYPE_CHECKING:
    from penstock.runtime.rank_store import RankStore

_POLL_S: Final = 0.02
"""Interval at which a sleeping job polls for its wake-up: a signal handler must not take locks."""
_REPORT_S: Final = 0.05
"""Minimum interval between reports of the number of steps to the manager."""
_PREFETCH_BYTES: Final = 128 * MIB
"""Bytes that are prefetched between two polls."""


class Stepping(Suspendable, Protocol):
    """A job that reports the end of steps, such as a :class:`penstock.Session`."""

    on_step: Callable[[], None] | None
    """Function that the training thread calls between two steps."""

    @property
    def ranks(self) -> RankStore | None:
        """Store of the job's ranks; None without other ranks, or before they can be reached."""


class StepSuspender:
    """Suspends and resumes a job on signals and orders of its manager. Create it in the main thread.

    Attributes:
        signals: Handler of the signals.
    """

    def __init__(
        self,
        job: Stepping,
        *,
        tell: Callable[[str], None],
        channel: JobEnd | None = None,
        record: ResumeRecord | None = None,
        pending: PendingSignals | None = None,
    ) -> None:
        """Begin.

        Args:
            job: Job to suspend; its steps must end in the main thread.
            tell: Function that prints a line for the user.
            channel: Channel to its manager, if it has one.
            record: Record that lets another process resume the job, if wanted.
            pending: Handler of the signals, if there is one already.
        """
        self.signals = PendingSignals() if pending is None else pending
        self._job = job
        self._tell = tell
        self._channel = channel
        self._record = record
        self._steps = 0
        self._heard_sleeps = 0  # requests that came before the last step ended
        self._agreement: SleepAgreement | None = None
        if record is not None:
            record.set_sleep(self._sleep_with)
            record.set_ranks(lambda: job.ranks)
        self._waits_for_others = False
        self._refused = -1
        self._prefetch_failed = False
        self._reported_s = 0.0
        self._guard = fork_guard()
        job.on_step = self.step_over
        self._report(state="awake")

    @property
    def _is_to_sleep(self) -> bool:
        if self._agreement is not None:
            return self._agreement.holds()
        if self._channel is None:
            return self.signals.asked
        order = self._channel.look()
        return order.sleep and order.number != self._refused

    @property
    def why_awake(self) -> str | None:
        """Reason why the run has not slept although a signal asked this process to; None without one."""
        if not self.signals.asked:
            return None
        if self._agreement is None or self.signals.sleeps > self._heard_sleeps:
            return "it sleeps when the step() of a torch optimizer ends, and none has ended since"
        if self._agreement.was_asked_here:
            return "all ranks sleep after the same step, and not all of them came to it"
        return None

    def step_over(self) -> None:
        """Sleep after a step, if asked to. Raises an exception that interrupts the sleep."""
        if self._guard.in_child:
            return
        self._count()
        self._heard_sleeps = self.signals.sleeps
        if self.signals.asked and self._channel is not None:
            self.signals.asked = False
            self._tell(
                "the signal is ignored, because this job has a manager, and other jobs would wait for it;"
                " use `penstock jobs suspend`"
            )
        record = self._record
        if record is not None:
            record.step_over(self._job, self._steps)
        if not self._is_due():
            self._waits_for_others = False
            if record is not None:
                record.cancel()
        elif not self._waits_for_checkpoint():
            self._sleep()

    def _is_due(self) -> bool:
        """Return whether to sleep, or to save and then sleep, after this step."""
        ranks = self._job.ranks if self._channel is None and self._agreement is None else None
        if ranks is not None:
            self._agreement = SleepAgreement(ranks, self.signals, tell=self._tell)
            if self._record is not None:
                self._record.set_sleep(None)  # others would wait for this rank in the next step
        if self._agreement is None:
            return self._is_to_sleep
        saves = self._record is not None and self._record.has_checkpointer
        return self._agreement.is_due(self._steps, has_checkpointer=saves)

    def _waits_for_checkpoint(self) -> bool:
        """Return whether to train on for one step, after which this rank or another one has saved."""
        others_save = self._agreement is not None and self._agreement.saves
        if self._record is not None:
            return self._record.waits_for_checkpoint(of_others=others_save)
        self._waits_for_others = others_save and not self._waits_for_others
        return self._waits_for_others

    def _sleep_with(self, checkpoint: str, state: object) -> None:
        """Sleep after a checkpoint that was saved for it."""
        self._sleep(checkpoint=checkpoint, state=state)

    def _sleep(self, **known: Any) -> None:
        if self._agreement is None and self._channel is None and rank() is not None:
            self._tell(
                "only this rank sleeps, because without a process group or torchrun's agent the ranks"
                " cannot agree on a step: send the signal to every rank"
            )
        try:
            with _signals_deferred():
                if self._record is not None:
                    self._record.write(self._job, self._steps)
                self._suspend(**known)
            while self._is_to_sleep:
                self._prefetch()
                time.sleep(_POLL_S)
        except (PenstockError, OSError, MemoryError, RuntimeError) as error:  # such as no threads
            self._refuse(error)
        finally:
            with _signals_deferred():
                if self._agreement is None:
                    self.signals.asked = False
                else:
                    self._agreement.end()
                self._resume()

    def _count(self) -> None:
        self._steps += 1
        if self._channel is None:
            return
        self._channel.status.steps = self._steps
        now = time.monotonic()
        if now - self._reported_s >= _REPORT_S:
            self._reported_s = now
            self._channel.tell()

    def _report(self, *, moved_bytes: int = 0, moving_s: float = 0.0, **changes: Any) -> None:
        if self._channel is not None:
            status = self._channel.status
            status.moved_bytes += moved_bytes
            status.moving_s += moving_s
            self._channel.tell(order=self._channel.order.number, **changes)

    def _refuse(self, error: Exception) -> None:
        self._tell(f"cannot be suspended, and continues: {error}")
        if self._channel is not None:
            self._refused = self._channel.order.number
            self._report(refused=str(error))

    def _suspend(self, **known: Any) -> None:
        self._report(state="suspending", refused="")
        self._prefetch_failed = False
        begun = time.monotonic()
        suspended = suspend(self._job, **known)
        took = time.monotonic() - begun
        wake = (
            f"kill -USR2 {self._guard.pid} resumes it"
            if self._channel is None
            else "its manager wakes it"
        )
        if self._agreement is not None:
            wake += " and all other ranks"
        self._tell(
            f"suspended process {self._guard.pid}: {format_bytes(suspended.nbytes)} on flash, after"
            f" {took:.1f} s; {wake}"
        )
        sleeps = 0 if self._channel is None else self._channel.status.sleeps + 1
        self._report(
            state="asleep",
            flash_bytes=suspended.nbytes,
            sleeps=sleeps,
            moved_bytes=suspended.written_bytes,
            moving_s=took,
        )

    def _prefetch(self) -> None:
        """Prefetch what the manager allows, a piece at a time.

        Never raises, because that would wake the job while another one may use its memory. ``resume``
        repeats a failed read.
        """
        suspended = self._job.suspended
        if self._channel is None or suspended is None or self._prefetch_failed:
            return
        there = self._channel.status.fetched_bytes
        allowed = self._channel.order.fetch_bytes
        if allowed == there:
            return
        try:
            now = suspended.prefetch(min(allowed, there + _PREFETCH_BYTES))
        except (PenstockError, OSError, MemoryError, RuntimeError) as error:
            self._prefetch_failed = True
            self._tell(f"its memory is not prefetched any further: {error}")
            return
        if now != there:
            self._report(fetched_bytes=now)

    def _resume(self) -> None:
        if self._job.suspended is None:
            self._report(state="awake")
            return
        self._report(state="waking")
        begun = time.monotonic()
        nbytes = self._job.suspended.nbytes
        resume(self._job)
        took = time.monotonic() - begun
        self._tell(f"resumed process {self._guard.pid} in {took:.1f} s")
        self._report(
            state="awake", flash_bytes=0, fetched_bytes=0, moved_bytes=nbytes, moving_s=took
        )


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer the handlers of SIGINT and SIGTERM to the end of the block."""
    missed: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda heard, frame: missed.append(heard))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for heard in missed:
            signal.raise_signal(heard)
