"""Energy of a machine: RAPL counters of the processor packages, NVML of the GPUs, or a model.

A virtual machine usually has no RAPL counter. Its processor is then taken to draw ``CORE_WATTS`` for each
core while that is busy, and nothing else: what is idle, memory, drives and fans are not counted. So these
joules compare what jobs make the processor do on this machine; they are no measurement.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

POWERCAP: Final = Path("/sys/class/powercap")
CORE_WATTS: Final = 10.0
"""Power of a busy core: 120 W by 12 cores, the thermal design power of the Xeon Silver 4310 (Intel's data
sheet), which the poster's machine has."""
_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4, 7)
"""Places in its first line of the time that no core works here: idle, waiting for I/O, stolen."""
_COUNTED: Final = 8
"""Places in it; the time of guests, which follows, is in these too."""
_NVML_LIBRARY: Final = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class Package:
    """A RAPL domain of one processor package.

    Attributes:
        counter: File of the counter, in microjoules.
        range_uj: Value at which the counter wraps around.
    """

    counter: Path
    range_uj: int


class EnergyMeter:
    """Energy of the whole machine since ``start``, in joules.

    Attributes:
        source: Name of the sources, counters and model.
    """

    def __init__(self, powercap: Path = POWERCAP, stat: Path = _STAT) -> None:
        """Find the counters of this machine and start."""
        self._packages = _packages(powercap)
        self._gpus = _gpus()
        self._stat = stat
        sources = [f"RAPL, {len(self._packages)} packages"] if self._packages else []
        sources += [f"NVML, {len(self._gpus)} GPUs"] if self._gpus else []
        if not self._packages:
            sources.append(
                f"a model of the processor, which has no readable RAPL counter: {CORE_WATTS:g} W for"
                " each busy core, nothing for what is idle, memory and drives"
            )
        self.source = " and ".join(sources)
        self._started = self._read()

    def start(self) -> None:
        """Measure from now on."""
        self._started = self._read()

    def joules(self) -> float:
        """Return joules since ``start``. A counter may wrap around once."""
        total = 0.0
        packages = [*self._packages, *(None for _ in self._started[len(self._packages) :])]
        for package, before, now in zip(packages, self._started, self._read(), strict=True):
            used = now - before
            if used < 0 and package is not None:
                used += package.range_uj / 1e6
            total += used
        return total

    def _read(self) -> list[float]:
        packages = [int(each.counter.read_text()) / 1e6 for each in self._packages]
        modelled = [] if packages else [CORE_WATTS * _busy_core_seconds(self._stat)]
        return packages + modelled + [_gpu_joules(*each) for each in self._gpus]


def _busy_core_seconds(stat: Path) -> float:
    """Return the seconds that cores have worked since the machine was started, all together."""
    times = [int(each) for each in stat.read_text().split("\n", 1)[0].split()[1:][:_COUNTED]]
    return (sum(times) - sum(times[each] for each in _IDLE)) / os.sysconf("SC_CLK_TCK")


def _packages(powercap: Path) -> list[Package]:
    """Find the counters of whole packages, which include those of their parts."""
    found = []
    for each in sorted(powercap.glob("*-rapl:*")):
        if each.name.count(":") != 1:
            continue
        with suppress(OSError, ValueError):  # since PLATYPUS only root may read it
            package = Package(each / "energy_uj", int((each / "max_energy_range_uj").read_text()))
            int(package.counter.read_text())
            found.append(package)
    return found


def _gpus() -> list[tuple[Any, ctypes.c_void_p]]:
    """Return (library, handle) of each GPU that counts its energy."""
    try:
        library = ctypes.CDLL(_NVML_LIBRARY)
    except OSError:
        return []
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue
        millijoules = ctypes.c_ulonglong()
        if not library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
            found.append((library, handle))
    return found


def _gpu_joules(library: Any, handle: ctypes.c_void_p) -> float:
    millijoules = ctypes.c_ulonglong()
    library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
    return millijoules.value / 1e3
