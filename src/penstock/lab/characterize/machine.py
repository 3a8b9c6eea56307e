"""Facts of the machine for the result document."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from penstock import __version__
from penstock.core.errors import ConfigError
from penstock.core.fs import filesystem_of
from penstock.lab.characterize.energy import EnergyMeter

_PIPELINE: Final = 2


def device_kind() -> str:
    """Return ``cuda`` if there is a device, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def process_count(parallel: str) -> int:
    """Return the number of processes of a job. Raises ConfigError if there are GPUs, but too few."""
    if parallel == "none":
        return 1
    if device_kind() == "cpu":
        return _PIPELINE
    count = torch.cuda.device_count()
    if count < _PIPELINE:
        raise ConfigError(
            f"parallel={parallel!r} needs two GPUs and this machine has {count}; hide it with"
            " CUDA_VISIBLE_DEVICES= to run two processes on the CPU"
        )
    return count if parallel == "ddp" else _PIPELINE


def threads_per_process(world: int) -> int:
    """Return the number of threads for each of the processes of a job; 0: torch's default.

    Each process of torch takes all cores by default. Several would then have more threads than there are
    cores, and the threads of one spin while they wait for each other, on the cores that the others need.
    """
    if world == 1 or "OMP_NUM_THREADS" in os.environ:
        return 0
    return max(1, len(os.sched_getaffinity(0)) // world)


def machine(directory: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the machine, without host name and paths, which would be published with the results."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "device": torch.cuda.get_device_name() if facts["device"] == "cuda" else "cpu",
        "processes": facts["world"],
        "filesystem": filesystem_of(directory).kind,
        "energy": EnergyMeter().source,
        "penstock": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match[1].strip() if match else platform.machine()
