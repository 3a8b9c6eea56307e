"""A tier that is as slow as a device one does not have."""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass, field

from penstock.core.errors import ConfigError
from penstock.core.locks import condition
from penstock.io.engine import Priority, Transfer
from penstock.observe.clock import Clock, RealClock
from penstock.store.base import Place, Tier
from penstock.store.wrappers import WrapperTier


@dataclass(slots=True, eq=False)
class ChannelTurn:
    """One transfer's use of a channel."""

    inner: Transfer
    """The work, which the tier inside does at its own pace."""
    busy_ns: int
    """How long it occupies the channel."""
    priority: Priority
    order: int
    arrived_ns: int
    waiting: bool = True
    """It has neither begun nor been withdrawn."""
    outer: Transfer = field(init=False)
    """Future that the caller sees."""


@dataclass(slots=True)
class ThrottledChannel:
    """The wire to an emulated device: one turn at a time, the best priority first, then the oldest.

    Knows no thread and no clock: the caller says what time it is. Not thread-safe.
    """

    latency_ns: int = 0
    """From the end of a turn to the end of the transfer; turns of others go on meanwhile."""
    _free_ns: int = 0
    _queue: list[tuple[int, int, ChannelTurn]] = field(default_factory=list)

    def add(self, turn: ChannelTurn) -> None:
        """Queue a turn, or queue it again after its priority has been raised."""
        heapq.heappush(self._queue, (turn.priority, turn.order, turn))

    def begin(self, now_ns: int) -> list[tuple[int, ChannelTurn]]:
        """Begin every turn whose time has come by ``now_ns``; say when its transfer ends (ns)."""
        begun = []
        while (turn := self._head()) is not None and self._free_ns <= now_ns:
            heapq.heappop(self._queue)
            turn.waiting = False
            start_ns = max(self._free_ns, turn.arrived_ns)  # whoever asks late loses nothing
            self._free_ns = start_ns + turn.busy_ns
            begun.append((self._free_ns + self.latency_ns, turn))
        return begun

    def next_ns(self) -> int | None:
        """When ``begin`` has something to do next; ``None`` while nothing waits."""
        return None if self._head() is None else self._free_ns

    def _head(self) -> ChannelTurn | None:
        while self._queue:
            turn = self._queue[0][2]
            if turn.waiting:
                return turn
            heapq.heappop(self._queue)  # withdrawn, or begun by its entry with a better priority
        return None


class ThrottledTier(WrapperTier):
    """Emulates a slower SSD: a transfer ends no earlier than the slow device would have ended it.

    Each direction is a channel (or both share one) that transfers take in turns. The tier inside
    begins its work at once; the transfer settles, and its source is released, when that work
    is done *and* latency plus bytes over bandwidth have passed since its turn came. What waits for
    its turn can be cancelled and promoted. One thread keeps the time, and sleeps in between.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        write_bytes_per_s: int,
        read_bytes_per_s: int,
        latency_s: float = 0.0,
        shared: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Wrap ``inner``.

        Args:
            inner: The tier that does the work.
            write_bytes_per_s: Bandwidth of writes.
            read_bytes_per_s: Bandwidth of reads.
            latency_s: Added to every transfer; those of several transfers overlap.
            shared: Reads and writes take turns on one channel, as on a link that is half duplex.
            clock: Tells the time; must go at the pace of real time. Defaults to the real clock.

        Raises:
            ConfigError: A bandwidth is not positive, or the latency is negative.
        """
        super().__init__(inner)
        if min(write_bytes_per_s, read_bytes_per_s) <= 0 or latency_s < 0:
            raise ConfigError(
                f"throttled tier {inner.spec.name}: write_bytes_per_s={write_bytes_per_s},"
                f" read_bytes_per_s={read_bytes_per_s} must be positive, latency_s={latency_s} not"
                " negative"
            )
        self._bytes_per_s = {"write": write_bytes_per_s, "read": read_bytes_per_s}
        latency_ns = round(latency_s * 1e9)
        writes = ThrottledChannel(latency_ns=latency_ns)
        self._channels = {
            "write": writes,
            "read": writes if shared else ThrottledChannel(latency_ns=latency_ns),
        }
        self._clock = RealClock() if clock is None else clock
        self._changed = condition()
        self._ends: list[tuple[int, int, ChannelTurn]] = []
        self._turns = 0
        self._thread: threading.Thread | None = None
        self._stopping = False

    def _write(
        self, place: Place, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        transfer = self.inner._write(place, address, nbytes, keep_alive, priority)
        return self._queue(transfer, "write", priority)

    def _read(
        self, place: Place, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        transfer = self.inner._read(place, address, nbytes, keep_alive, priority)
        return self._queue(transfer, "read", priority)

    def _close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self.inner.close()

    # -- the queue --------------------------------------------------------------------------------

    def _queue(self, inner: Transfer, op: str, priority: Priority) -> Transfer:
        channel = self._channels[op]
        busy_ns = inner.nbytes * 10**9 // self._bytes_per_s[op]
        with self._changed:
            self._turns += 1
            turn = ChannelTurn(inner, busy_ns, priority, self._turns, self._clock.now_ns())
            turn.outer = Transfer(
                inner.nbytes,
                cancel=lambda _: self._withdraw(turn),
                promote=lambda _, better: self._raise(turn, channel, better),
            )
            channel.add(turn)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._keep_time, name=f"penstock-throttle-{self.spec.name}", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return turn.outer

    def _withdraw(self, turn: ChannelTurn) -> bool:
        with self._changed:
            if not turn.waiting or not (turn.inner.cancel() or turn.inner.done):
                return False
            turn.waiting = False
            return True

    def _raise(self, turn: ChannelTurn, channel: ThrottledChannel, priority: Priority) -> None:
        turn.inner.promote(priority)
        with self._changed:
            if turn.waiting and priority < turn.priority:
                turn.priority = priority
                channel.add(turn)

    # -- the thread -------------------------------------------------------------------------------

    def _keep_time(self) -> None:
        while True:
            with self._changed:
                while not (ended := self._advance()):
                    if self._stopping:
                        return
                    self._changed.wait(self._sleep_s())
            while ended:
                _settle_with_inner(ended.pop(0))

    def _advance(self) -> list[ChannelTurn]:
        """Begin the turns whose time has come; take out those whose transfer ends by now."""
        now_ns = self._clock.now_ns()
        for channel in self._channels.values():
            for end_ns, turn in channel.begin(now_ns):
                heapq.heappush(self._ends, (end_ns, turn.order, turn))
        ended = []
        while self._ends and self._ends[0][0] <= now_ns:
            ended.append(heapq.heappop(self._ends)[2])
        return ended

    def _sleep_s(self) -> float | None:
        times = [channel.next_ns() for channel in self._channels.values()]
        times.append(self._ends[0][0] if self._ends else None)
        known = [time_ns for time_ns in times if time_ns is not None]
        return max(0, min(known) - self._clock.now_ns()) / 1e9 if known else None


def _settle_with_inner(turn: ChannelTurn) -> None:
    outer = turn.outer
    turn.inner.add_done_callback(lambda done: outer.settle(done.error))
