"""Agreement of a job's ranks on the step after which all of them sleep.

[Note: one step for all ranks]
    The order to sleep is one text in the store of the ranks. It is replaced as a whole, and only if it
    is still what the rank has read: a rank that comes second reads again.

    1. A rank that is asked at the end of its step n orders a sleep after step n + 1.
    2. Every rank joins the order when it sees it. One that has ended a later step moves the order there.
    3. At the ordered step a rank notes that it has arrived, and waits. When all have arrived, the order
       is not moved any more: all sleep after the same step, whenever each of them has looked.
    4. A rank that has not joined may be in a later step, where it waits for this one in a collective: two
       optimizers step between two collectives, and some ranks reduce only now and then. So a rank waits
       for a short time, then moves the order to a later step, each time twice as far, and trains on. If
       all have joined, it waits for longer: then one of them takes long for this step, or counts others.
    5. A rank that is to go on, or cannot sleep, ends the order for all. The next one has a new number.
    6. A rank that loses the store before all have arrived trains on, unless it was asked itself.

[Note: requests of this rank's own]
    A rank that follows an order is ``asked``, whichever rank was. Only the number of requests tells one
    that came to this rank. When an order has ended, those are done with that came before the rank last
    saw it in force. A later one is meant for the next sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from penstock.swap.pending_signals import PendingSignals

if TYPE_CHECKING:
    from penstock.runtime.rank_store import RankStore

_NAME: Final = "sleep"
_LOOK_S: Final = 0.2
"""Interval at which a rank looks for an order of another one, and whether all are to wake."""
_PATIENCE_S: Final = 0.2
"""Longest time that a rank waits at the ordered step for others to join."""
_ARRIVAL_S: Final = 60.0
"""Longest time that it waits for others that have joined."""
_POLL_S: Final = 0.01
_TOLD_LEAP: Final = 4
"""Leap from which the user is told which ranks are missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SleepOrder:
    """Order to all ranks of a job."""

    number: int = 0
    step: int = 0
    """Step after which all sleep; 0 while nobody is to sleep."""
    saves: bool = False
    """True if a rank has a Checkpointer: all sleep one step later, when it has saved."""
    joined: int = 0
    """Ranks that have seen it, one bit each."""
    arrived: int = 0
    """Ranks that wait at the end of the step."""

    @classmethod
    def from_text(cls, text: str) -> SleepOrder:
        """Return the order that ``to_text`` has written; no order for an empty text."""
        if not text:
            return cls()
        number, step, saves, joined, arrived = text.split()
        return cls(
            number=int(number),
            step=int(step),
            saves=saves == "1",
            joined=int(joined, 16),
            arrived=int(arrived, 16),
        )

    def to_text(self) -> str:
        """Return the text of the order for the store."""
        return f"{self.number} {self.step} {int(self.saves)} {self.joined:x} {self.arrived:x}"


class SleepAgreement:
    """One rank's part in the agreement ([Note: one step for all ranks]). For the training thread.

    While this rank follows an order, ``asked`` of the signals is true, whichever rank was asked: a signal
    to go on makes it false on any of them.
    """

    def __init__(
        self, ranks: RankStore, signals: PendingSignals, *, tell: Callable[[str], None]
    ) -> None:
        """Begin.

        Args:
            ranks: Store of the ranks.
            signals: Handler of this rank's signals.
            tell: Function that prints a line for the user.
        """
        self._ranks = ranks
        self._signals = signals
        self._tell = tell
        self._bit = 1 << ranks.rank
        self._all = (1 << ranks.world_size) - 1
        self._order = SleepOrder()
        self._followed: int | None = None  # number of the order that this rank has joined
        self._wakes = signals.wakes
        self._seen_sleeps = 0  # requests to sleep that came before the last look
        self._past_sleeps = 0  # of these: of orders that have ended
        self._has_checkpointer = False
        self._is_lost = False
        self._leap = 1
        self._next_look_s = 0.0

    @property
    def saves(self) -> bool:
        """True if a rank is to save a checkpoint before all sleep."""
        return self._order.saves

    @property
    def was_asked_here(self) -> bool:
        """True if this process is to sleep because of a signal to itself."""
        return self._signals.asked and self._signals.sleeps > self._past_sleeps

    def is_due(self, steps: int, *, has_checkpointer: bool) -> bool:
        """Return whether to sleep now, or to save and sleep after the next step.

        Waits for other ranks at the ordered step, for a short time.

        Args:
            steps: Number of steps that this rank has ended.
            has_checkpointer: True if this rank saves before it sleeps.
        """
        self._has_checkpointer = has_checkpointer
        if self._is_lost:
            return self._is_asked_alone()
        if not self._knows_of_an_order():
            return False
        if self._follows and self._order.step > steps:
            return False
        try:
            self._await_others(steps)
        except BaseException:  # such as Ctrl-C
            self.end()
            raise
        return self._is_at_its_step(steps)

    def holds(self) -> bool:
        """Return whether this rank is to stay asleep."""
        if not self._is_lost and (not self._follows or time.monotonic() >= self._next_look_s):
            self._look(None)
        return self._is_asked_alone() if self._is_lost else self._follows

    def end(self) -> None:
        """End the order that this rank follows: all ranks go on.

        A request to this rank that is meant for the next sleep stays.
        """
        if not self._is_lost:
            self._look(None, ends=True)
        if self._is_lost:
            self._past_sleeps = self._seen_sleeps
        if not self.was_asked_here:
            self._signals.asked = False

    @property
    def _follows(self) -> bool:
        """True if this rank follows an order, and was not asked to go on."""
        return self._followed is not None and self._signals.asked

    def _knows_of_an_order(self) -> bool:
        """Return whether there may be something to do; it looks for other ranks' orders now and then."""
        if self._signals.asked or self._followed is not None:
            return True
        now = time.monotonic()
        if now < self._next_look_s:
            return False
        self._next_look_s = now + _LOOK_S
        wakes = self._signals.wakes
        if SleepOrder.from_text(self._ranks.glance(_NAME)).step:
            return True
        self._wakes = wakes  # of earlier orders
        return False

    def _await_others(self, steps: int) -> None:
        """Wait at the ordered step until all ranks have arrived; move it if that takes too long."""
        begun = time.monotonic()
        while not self._is_decided(steps):
            patience_s = _ARRIVAL_S if self._order.joined == self._all else _PATIENCE_S
            if time.monotonic() < begun + patience_s:
                time.sleep(_POLL_S)
                continue
            if self._leap == _TOLD_LEAP:
                self._tell(
                    f"not suspended yet: {self._missing()} not come to step {steps}, after which all were"
                    " to sleep; training goes on until all have come to the same step"
                )
            self._look(steps, at_least=steps + self._leap)
            self._leap *= 2

    def _is_decided(self, steps: int) -> bool:
        """Look; return whether to go on now, or to sleep now.

        A rank that has noted its arrival goes on only when the store says so, even if it was just asked
        to: all others may be asleep.
        """
        self._look(steps)
        if self._is_lost or self._followed is None:
            return True
        return self._order.step != steps or self._order.arrived == self._all

    def _is_at_its_step(self, steps: int) -> bool:
        if self._is_lost:
            return self._is_asked_alone()
        return self._followed is not None and self._order.step <= steps

    def _is_asked_alone(self) -> bool:
        """Return whether this rank is to sleep, without the store."""
        self._seen_sleeps = self._signals.sleeps
        return self._signals.asked

    def _missing(self) -> str:
        arrived = self._order.arrived
        missing = [str(each) for each in range(self._ranks.world_size) if not arrived >> each & 1]
        return f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(missing)} have"

    def _look(self, steps: int | None, *, at_least: int = 0, ends: bool = False) -> None:
        """Read the order, and change it as this rank has to.

        Args:
            steps: Number of steps that this rank has ended; None if it must not join.
            at_least: Step to which to move the order if not all have arrived.
            ends: End the order, if this rank has joined it.
        """
        self._next_look_s = time.monotonic() + _LOOK_S
        sleeps, wakes = self._signals.sleeps, self._signals.wakes
        is_woken = wakes != self._wakes
        text = self._ranks.exchange(_NAME, "", "")
        while text is not None:
            order = SleepOrder.from_text(text)
            changed = self._changed(order, steps, at_least, is_woken=is_woken, ends=ends)
            if changed == order:
                self._follow(order, sleeps, wakes)
                return
            wanted = changed.to_text()
            text = self._ranks.exchange(_NAME, text, wanted)
            is_woken = is_woken and text != wanted
        self._is_lost = True
        if self._order.arrived != self._all and not self.was_asked_here:
            self._signals.asked = False
        self._tell(
            "the other ranks cannot be reached any more, because the key-value store of the job is lost:"
            " signals act on this process only, so send them to every rank"
        )

    def _changed(
        self,
        order: SleepOrder,
        steps: int | None,
        at_least: int,
        *,
        is_woken: bool,
        ends: bool,
    ) -> SleepOrder:
        """Return what this rank makes of the order; the same if it has nothing to change."""
        signals = self._signals
        if self._followed not in (None, order.number):  # it has ended
            self._followed, self._past_sleeps = None, self._seen_sleeps
            if signals.sleeps == self._seen_sleeps:
                signals.asked = False
        if not order.step:
            if steps is None or not signals.asked:
                return order
            return replace(order, step=steps + 1, saves=self._has_checkpointer, joined=self._bit)
        is_to_go_on = not signals.asked and (self._followed is not None or is_woken)
        if is_to_go_on or (ends and order.joined & self._bit):
            return SleepOrder(number=order.number + 1)
        if steps is None or order.arrived == self._all:
            return order
        step = max(order.step, steps, at_least)
        arrived = order.arrived if step == order.step else 0
        return replace(
            order,
            step=step,
            saves=order.saves or self._has_checkpointer,
            joined=order.joined | self._bit,
            arrived=arrived | self._bit if step == steps else arrived,
        )

    def _follow(self, order: SleepOrder, sleeps: int, wakes: int) -> None:
        """Note the order in force, which takes these numbers of requests into account."""
        self._order, self._seen_sleeps, self._wakes = order, sleeps, wakes
        if order.step and order.joined & self._bit and self._followed is None:
            self._followed, self._leap = order.number, 1
            if not self._signals.asked:
                self._past_sleeps = sleeps
            self._signals.asked = True
            if self._signals.wakes != wakes:  # it came just now
                self._signals.asked = False
