"""A limit of a drive's power: commands that have arrived wait in turn for others to end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.lab.ssd.commands import KIND, Op, Target
from penstock.lab.ssd.usage import Power


class PowerCap:
    """Limit for the power of arrays that work at the same time."""

    def __init__(self, power: Power, cap_w: float) -> None:
        """Start without load.

        Raises:
            ConfigError: The limit is too low for any command.
        """
        self._power = power
        self._cap_w = power.for_arrays(cap_w) * (1 + 1e-12)
        self._drawn_w: dict[Target, float] = {}
        self._parked: deque[tuple[Target, list[Op]]] = deque()

    def try_start(self, target: Target, ops: list[Op]) -> bool:
        """Return True if there is power for a command now; otherwise keep it, after all that wait."""
        need = self._power.watts(KIND[ops[0].queue], len(ops))
        if self._parked or sum(self._drawn_w.values()) + need > self._cap_w:
            self._parked.append((target, ops))
            return False
        self._drawn_w[target] = need
        return True

    def finish(self, target: Target) -> Iterator[tuple[Target, list[Op]]]:
        """End a command and yield those that may start now; start each before taking the next."""
        del self._drawn_w[target]
        waiting, self._parked = self._parked, deque()
        while waiting:
            yield waiting.popleft()
            if self._parked:  # without power for this one, none behind it may start
                self._parked.extend(waiting)
                return
