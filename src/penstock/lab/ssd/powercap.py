"""A cap on what a drive draws: commands that have arrived wait for others to be done, in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.lab.ssd.commands import KIND, Op, Target
from penstock.lab.ssd.usage import Power


class PowerCap:
    """What arrays that work at the same time may draw together."""

    def __init__(self, power: Power, cap_w: float) -> None:
        """Nothing is drawn yet.

        Raises:
            ConfigError: The cap is too low for any command.
        """
        self._power = power
        self._cap_w = power.for_arrays(cap_w) * (1 + 1e-12)
        self._drawn_w: dict[Target, float] = {}
        self._parked: deque[tuple[Target, list[Op]]] = deque()

    def draws(self, target: Target, ops: list[Op]) -> bool:
        """Whether there is power for a command now; if not it is kept, behind all that wait."""
        need = self._power.watts(KIND[ops[0].queue], len(ops))
        if self._parked or sum(self._drawn_w.values()) + need > self._cap_w:
            self._parked.append((target, ops))
            return False
        self._drawn_w[target] = need
        return True

    def rests(self, target: Target) -> Iterator[tuple[Target, list[Op]]]:
        """A command is over: those that waited, each to be begun anew before the next is told."""
        del self._drawn_w[target]
        waiting, self._parked = self._parked, deque()
        while waiting:
            yield waiting.popleft()
            if self._parked:  # no power for this one, so for none behind it
                self._parked.extend(waiting)
                return
