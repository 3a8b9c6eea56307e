"""PCIe: one queue of messages each way, first come, first served."""

from __future__ import annotations

from heapq import heappush
from typing import Any

from penstock.ssd.device import Link, duration_ps
from penstock.ssd.events import Action, Events

REQUEST_BYTES = 4
"""Of a message that asks the other side for data, beside a packet's overhead."""


class Lane:
    """One direction.

    Attributes:
        busy_ps: For how long it has carried something.
        nbytes: Payload that it has carried, of data only.
    """

    __slots__ = ("_events", "_free_ps", "_link", "_rate", "_took", "busy_ps", "nbytes")

    def __init__(self, link: Link, bytes_per_s: int, events: Events) -> None:
        self._link = link
        self._rate = bytes_per_s
        self._events = events
        self._free_ps = 0
        self._took: dict[int, int] = {}
        self.busy_ps = self.nbytes = 0

    def send(self, payload_bytes: int, action: Action, about: Any) -> None:
        """Carry a message behind all that came before it; then ``action(about)``."""
        took = self._took.get(payload_bytes)
        if took is None:
            took = self._took[payload_bytes] = duration_ps(
                self._link.wire_bytes(payload_bytes), self._rate
            )
        events = self._events
        free = self._free_ps if self._free_ps > events.now_ps else events.now_ps
        free += took
        self._free_ps = free
        self.busy_ps += took
        heappush(events.heap, (free, events.tick(), action, about))
