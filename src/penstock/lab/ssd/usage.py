"""Activity of a drive over time: working channels and dies, and power, in constant memory.

Time is cut into a fixed number of parts. When a run outlasts them, each two are merged into one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.commands import ERASE, PROGRAM, READ
from penstock.lab.ssd.device import PS_PER_S, Device

_PJ: Final = 1e-12
_BITS: Final = 8
_FIRST_PS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class UsageInterval:
    """One part of the time."""

    begin_s: float
    end_s: float
    channels: float
    """Share of the channels that worked, on average."""
    dies: float
    """Share of the targets that execute one command at a time: dies, or chips."""
    watts: float
    """Power of arrays, channels, and the static power; without link and correction."""


class Usage:
    """Recorder of the activity of a drive's flash."""

    def __init__(self, device: Device, targets: int, *, parts: int = 256) -> None:
        """Start to record.

        Args:
            device: Device with the energies.
            targets: Number of the drive's targets: dies, or chips.
            parts: Number of parts of the time, even; between half and all of them are filled at the end.
        """
        if parts < 2 or parts % 2:
            raise ConfigError(f"parts is {parts}; it must be even, and 2 or more")
        self._channels, self._targets, self._parts = device.geometry.channels, targets, parts
        self._power = Power(device)
        self._width_ps = _FIRST_PS
        self._end_ps = 0
        self._bus, self._array, self._joules = ([0.0] * parts for _ in range(3))

    def sent(self, begin_ps: int, took_ps: int, nbytes: int) -> None:
        """Record a transfer of a channel."""
        self._add(self._bus, begin_ps, took_ps, float(took_ps))
        self._add(self._joules, begin_ps, took_ps, nbytes * self._power.channel_j_per_byte)

    def worked(self, begin_ps: int, took_ps: int, kind: int, planes: int) -> None:
        """Record a command of an array."""
        self._add(self._array, begin_ps, took_ps, float(took_ps))
        self._add(self._joules, begin_ps, took_ps, self._power.joules(kind, planes))

    def moments(self) -> tuple[UsageInterval, ...]:
        """Return the parts of the time up to the last activity."""
        count = -(-self._end_ps // self._width_ps)
        seconds = self._width_ps / PS_PER_S
        return tuple(
            UsageInterval(
                number * seconds,
                (number + 1) * seconds,
                self._bus[number] / self._width_ps / self._channels,
                self._array[number] / self._width_ps / self._targets,
                self._joules[number] / seconds + self._power.static_w,
            )
            for number in range(count)
        )

    def _add(self, sums: list[float], begin_ps: int, took_ps: int, amount: float) -> None:
        """Spread an amount evenly over its time."""
        end_ps = begin_ps + took_ps
        while end_ps > self._width_ps * self._parts:
            self._halve()
        self._end_ps = max(self._end_ps, end_ps)
        width = self._width_ps
        first, last = begin_ps // width, max(begin_ps, end_ps - 1) // width
        if first == last:
            sums[first] += amount
            return
        for number in range(first, last + 1):
            inside = min(end_ps, (number + 1) * width) - max(begin_ps, number * width)
            sums[number] += amount * inside / took_ps

    def _halve(self) -> None:
        self._width_ps *= 2
        for sums in (self._bus, self._array, self._joules):
            pairs = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
            sums[:] = pairs + [0.0] * (self._parts - len(pairs))


class Power:
    """Joules and watts of commands on one device.

    Attributes:
        static_w: Static power of the controller.
        channel_j_per_byte: Energy of a byte over a channel.
    """

    def __init__(self, device: Device) -> None:
        """Compute them from the device's constants."""
        cost, geometry, cell = device.energy, device.geometry, device.cell
        self.static_w = cost.controller_static_w
        self.channel_j_per_byte = _BITS * cost.channel_pj_per_bit * _PJ
        page = geometry.page_bytes * _BITS * _PJ
        block = page * geometry.pages_per_block
        self._joules = {
            READ: page * cost.read_pj_per_bit,
            PROGRAM: page * cost.program_pj_per_bit,
            ERASE: block * cost.erase_pj_per_bit,
        }
        shortest_ns = {
            READ: min(cell.read_ns),
            PROGRAM: min(cell.program_ns),
            ERASE: max(1, cell.erase_ns),
        }
        self._watts = {
            kind: joules / shortest_ns[kind] * 1e9 for kind, joules in self._joules.items()
        }
        link = device.link
        # highest power beside arrays: every channel sends and its data is corrected, the link is full
        self._beside_w = self.static_w + geometry.channels * device.channel.bytes_per_s * (
            self.channel_j_per_byte + _BITS * cost.controller_ecc_pj_per_bit * _PJ
        )
        carried = (link.up_bytes_per_s + link.down_bytes_per_s) * cost.link_pj_per_bit / 2
        carried += 2 * link.down_bytes_per_s * cost.controller_dram_pj_per_bit
        self._beside_w += carried * _BITS * _PJ
        self._most_planes = geometry.planes_per_die if device.channel.multi_plane else 1

    def joules(self, kind: int, planes: int) -> float:
        """Return the energy of a command."""
        return self._joules[kind] * planes

    def watts(self, kind: int, planes: int) -> float:
        """Return the highest power of a command."""
        return self._watts[kind] * planes

    def for_arrays(self, cap_w: float) -> float:
        """Return the power that a limit of the drive leaves for arrays that work at the same time.

        Raises:
            ConfigError: It is too low even for one command; the message names the lowest limit.
        """
        largest = max(self.watts(kind, self._most_planes) for kind in self._watts)
        left = cap_w - self._beside_w
        if not left >= largest:
            raise ConfigError(
                f"a power cap of {cap_w} W leaves nothing for flash; this drive needs"
                f" {self._beside_w + largest:.2f} W for one command while its channels and link are busy"
            )
        return left
