"""Description of a machine, without paths and names of hosts and users."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any, Final

import torch

from penstock import __version__
from penstock.core.fs import filesystem_of
from penstock.testing.gpu import processes

_DRIVER: Final = Path("/proc/driver/nvidia/version")


def kind_of(given: str | None) -> str:
    """Return the kind of device to check: the given one, or that of this torch, or ``"cpu"``."""
    if given is not None:
        return given
    here = torch.accelerator.current_accelerator()
    return "cpu" if here is None else here.type


def machine(directory: str, kind: str) -> dict[str, Any]:
    """Return versions, devices of a kind, memory and the file system of ``directory``.

    Without a usable device ``devices`` is empty, and ``lacking`` gives the reason.
    """
    devices, lacking = [], ""
    try:
        module: Any = torch.get_device_module(kind)
        if kind == "cpu":
            lacking = f"this torch ({torch.__version__}) is built for CPUs only"
        elif kind == "mps":
            lacking = "the memory of 'mps' is the CPU's, and it has no streams: Penstock refuses it"
        elif not module.is_available():
            lacking = (
                f"torch ({torch.__version__}) sees no device of kind {kind!r} (is it built for that, and"
                " is the driver loaded? see also CUDA_VISIBLE_DEVICES)"
            )
        else:
            devices = [_device(module, index) for index in range(module.device_count())]
            torch.zeros(1, device=kind)
    except Exception as error:  # noqa: BLE001  (a driver may fail in any way)
        devices, lacking = [], f"the device cannot be used: {type(error).__name__}: {error}"
    return {
        "kind": kind,
        "devices": devices,
        "lacking": lacking,
        "driver": _first(r"\b(\d+\.\d+(?:\.\d+)?)\b", _DRIVER),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "torch": torch.__version__,
        "penstock": __version__,
        "python": platform.python_version(),
        "kernel": (re.match(r"[\d.]*", platform.release()) or [""])[0],
        "cpu": _first(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo")) or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "filesystem": filesystem_of(directory).kind,
        "free_bytes": shutil.disk_usage(directory).free,
    }


def work(options: argparse.Namespace) -> int:
    """Record the machine, in a process of :mod:`.child`."""
    processes.append(options.records, machine(options.dir, kind_of(options.device)))
    return 0


def _device(module: Any, index: int) -> dict[str, Any]:
    properties = module.get_device_properties(index)
    capability = [getattr(properties, name, None) for name in ("major", "minor")]
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": None if None in capability else "{}.{}".format(*capability),
        "multiprocessors": getattr(properties, "multi_processor_count", None),
    }


def _first(pattern: str, path: Path) -> str | None:
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match[1].strip() if match else None
