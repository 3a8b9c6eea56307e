"""Energy, where the machine reports it: RAPL counters of the processor packages, NVML of the GPUs.

A virtual machine usually reports neither; the result then says so and has no figure.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

POWERCAP: Final = Path("/sys/class/powercap")
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
        source: Name of the sources, or the reason why there is none.
    """

    def __init__(self, powercap: Path = POWERCAP) -> None:
        """Find the counters of this machine and start."""
        self._packages = _packages(powercap)
        self._gpus = _gpus()
        sources = [f"RAPL, {len(self._packages)} packages"] if self._packages else []
        sources += [f"NVML, {len(self._gpus)} GPUs"] if self._gpus else []
        self.source = (
            " and ".join(sources)
            or "unreported: no readable RAPL counter and no NVML on this machine"
        )
        self._started = self._read()

    def start(self) -> None:
        """Measure from now on."""
        self._started = self._read()

    def joules(self) -> float | None:
        """Return joules since ``start``; None without a source. A counter may wrap around once."""
        if not self._started:
            return None
        total = 0.0
        for package, before, now in zip(
            [*self._packages, *(None for _ in self._gpus)], self._started, self._read(), strict=True
        ):
            used = now - before
            if used < 0 and package is not None:
                used += package.range_uj / 1e6
            total += used
        return total

    def _read(self) -> list[float]:
        packages = [int(each.counter.read_text()) / 1e6 for each in self._packages]
        return packages + [_gpu_joules(*each) for each in self._gpus]


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
