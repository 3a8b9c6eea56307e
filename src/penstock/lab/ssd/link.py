"""PCIe: one queue of messages in each direction, served in order."""

from __future__ import annotations

from heapq import heappush
from typing import Any

from penstock.lab.ssd.device import HostLink
from penstock.lab.ssd.events import Action, Events

REQUEST_BYTES = 4
"""Size of a message that asks the other side for data, without a packet's overhead."""


class LinkDirection:
    """One direction of the link.

    Attributes:
        busy_ps: Time for which it has carried something.
        nbytes: Payload that it has carried, of data only.
    """

    __slots__ = ("_events", "_free_ps", "_heap", "_tick", "_took", "busy_ps", "nbytes")

    def __init__(self, link: HostLink, bytes_per_s: int, events: Events) -> None:
        self._events = events
        self._heap, self._tick = events.heap, events.tick
        self._free_ps = 0
        self._took = _Times(link, bytes_per_s)
        self.busy_ps = self.nbytes = 0

    def send(self, payload_bytes: int, action: Action, about: Any) -> None:
        """Carry a message after all earlier ones; then call ``action(about)``."""
        took = self._took[payload_bytes]
        free, now = self._free_ps, self._events.now_ps
        free = took + (free if free > now else now)
        self._free_ps = free
        self.busy_ps += took
        heappush(self._heap, (free, self._tick(), action, about))


class _Times(dict[int, int]):
    """Times for which a message occupies a lane, by its payload."""

    def __init__(self, link: HostLink, bytes_per_s: int) -> None:
        super().__init__()
        self._link, self._rate = link, bytes_per_s

    def __missing__(self, payload_bytes: int) -> int:
        took = self[payload_bytes] = self._link.message_ps(payload_bytes, self._rate)
        return took
