"""Brings weights to memory: when they are needed, and before, as long as there is room.

Reads begin in the order of uses (:mod:`.order`). If there is no room, something leaves that is needed
later than what would be read (:mod:`.eviction`): once it is chosen what stays, nothing of that, unless a
weight is needed now.
"""

from __future__ import annotations

from typing import Final

from penstock.core.locks import defer
from penstock.core.units import MIB
from penstock.io.engine import Priority
from penstock.observe.clients import waiting_for
from penstock.observe.events import StallCause
from penstock.weights.eviction import WeightEviction
from penstock.weights.stays import Stay, WeightTable

AHEAD_BYTES: Final = 256 * MIB
"""Most bytes of reads in flight at once, but for a longer weight."""
AHEAD_SHARE: Final = 4
"""Part of the limit: before it is chosen what stays, weights leave for others that come before so much is
used."""


class WeightReads:
    """Brings weights to memory, and lets them be used there. Thread-safe.

    Attributes:
        forced: Times that the limit was exceeded.
    """

    def __init__(self, table: WeightTable, eviction: WeightEviction) -> None:
        """Bring the weights of a table.

        Args:
            table: The weights.
            eviction: Frees their memory.
        """
        self._table = table
        self._eviction = eviction
        self.forced = 0

    def acquire(self, stay: Stay, *, is_touch: bool = False, trains: bool = False) -> None:
        """Bring a weight and pin it.

        Args:
            stay: The weight.
            is_touch: True for a use that does not belong to the order of uses.
            trains: True if backward or an update uses it: the pass is one of training, even after one
                without gradients.
        """
        with self._table.wake:
            if trains and not self._table.order.is_training:
                self._table.begin_pass(None)
            if not is_touch:
                self._table.note_use(stay)
            stay.pins += 1
        try:
            if stay.storage is None:
                with waiting_for(StallCause.WEIGHTS, stay.home.name):
                    self._bring(stay)
            else:
                self._bring(stay)
        except BaseException:
            with self._table.wake:
                stay.at_home += stay.storage is None  # which ``release`` takes away
            self.release(stay)
            raise
        storage = stay.storage
        if storage is not None:
            self._table.memory.use(storage)
        self.pump()

    def release(self, stay: Stay) -> None:
        """End what ``acquire`` has begun."""
        with self._table.wake:
            stay.pins -= 1
            if stay.storage is None:
                stay.at_home -= 1
                stay.home.check_version()
            parameter = stay.home.parameter
            if not stay.pins and parameter is not None:
                parameter.__class__ = stay.home.kinds.resting
                self._table.check_memory(stay)
            self._eviction.let_leave()
            self._table.wake.notify_all()

    def _bring(self, stay: Stay) -> None:
        while True:
            with self._table.wake:
                if stay.storage is not None:
                    stay.show_busy()
                    return
                is_gone = stay.home.parameter is None  # the program has dropped it
                at_home = stay.others_at_home
                if at_home and not (is_gone or stay.home.is_mapped):
                    self._table.wake.wait()
                    continue
                if stay.coming is None and (is_gone or at_home or stay.home.is_lent):
                    stay.at_home += 1
                    stay.show_busy()
                    return
                is_begun = stay.coming is not None or self.begin(stay, Priority.DEMAND)
                has_room = is_begun or self._make_room(stay)
                if not is_begun and has_room:
                    continue
            if not has_room and not self._table.memory.wait_for_room(stay.home.nbytes):
                with self._table.wake:
                    if stay.storage is None and stay.coming is None:
                        self.forced += 1
                        self.begin(stay, Priority.DEMAND, force=True)
            self.finish(stay)

    def finish(self, stay: Stay) -> None:
        """Wait for the read of a weight, if there is one, and let the weight be in memory."""
        coming = stay.coming
        if coming is None:
            return
        if not coming.done:
            coming.promote(Priority.DEMAND)
            try:
                coming.wait()
            except Exception:
                if not coming.done:  # it is of a signal handler, and the read goes on
                    raise
        with self._table.wake:
            error = self._table.arrived(stay) if stay.coming is coming else None
        if error is not None:
            raise error

    def begin(self, stay: Stay, priority: Priority, *, force: bool = False) -> bool:
        """Begin to read a weight if there is memory for it. Under the lock."""
        home = stay.home
        home.check_version()
        resting = home.resting
        home.settle()
        self._table.resting_moved(stay, resting)
        begun = self._table.memory.begin(home, priority, force=force)
        if begun is None:
            return False
        block, coming = begun
        stay.block, stay.coming = block, coming
        self._table.coming_bytes += home.nbytes
        coming.add_done_callback(lambda _: defer(self._eviction.moved))
        return True

    def _make_room(self, stay: Stay) -> bool:
        """Free memory for a weight that is needed now; return False if nothing can go. Under the lock."""
        if self._eviction.let_leave():
            return True
        if any(each.writing is not None for each in self._table.leaving):
            self._table.wake.wait()
            return True
        if self._eviction.free(stay.home.nbytes) or self._eviction.take_unneeded_read(stay):
            return True
        if self._eviction.writing or self._table.coming_bytes:
            self._table.wake.wait()
            return True
        return False

    def pump(self) -> None:
        """Begin the reads of what is needed next, as far as there is room."""
        with self._table.wake:
            self._eviction.let_leave()
        while self._begin_reads():
            pass

    def _begin_reads(self) -> bool:
        """Do so; return True if something has left memory, which is free only when the lock is."""
        with self._table.wake:
            if excess := self._table.memory.excess_bytes:
                return self._eviction.free(excess)
            order = self._table.order
            before, ahead = 0, min(AHEAD_BYTES, self._table.account.limit_bytes // AHEAD_SHARE)
            for distance, index in enumerate(order.upcoming()):
                stay = self._table.stays[index]
                before, near = before + stay.home.nbytes, before <= ahead
                if stay.storage is not None or stay.coming is not None or stay.at_home:
                    continue
                if stay.home.parameter is None or stay.home.is_lent:
                    continue
                if (
                    self._table.coming_bytes
                    and self._table.coming_bytes + stay.home.nbytes > AHEAD_BYTES
                ):
                    return False
                if not self.begin(stay, Priority.PREFETCH):
                    chosen = order.chosen_limit_bytes is not None
                    return (chosen or near) and self._eviction.free(
                        stay.home.nbytes, later_than=distance, spares=chosen
                    )
        return False
