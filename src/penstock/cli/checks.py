"""Checks of ``penstock doctor``: each function checks one thing and advises what to do about it."""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.cli import system
from penstock.cli.paths import spill_directory
from penstock.core import knobs
from penstock.core.errors import (
    ConfigError,
    PenstockError,
    PenstockWarning,
    TransferError,
    free_space_bytes,
)
from penstock.core.fs import filesystem_of
from penstock.core.memory import cgroup_limits, memory_sizes
from penstock.core.units import GIB, MIB, format_bandwidth, format_bytes
from penstock.io import cufile, numa
from penstock.io.aio import default_engine
from penstock.io.files import open_unlinked
from penstock.observe.recorder import Recorder
from penstock.plan.machine import Machine
from penstock.runtime import probe
from penstock.store.arena import Arena
from penstock.store.flash import FlashTier

LEAST_PYTHON: Final = (3, 11)
LEAST_TORCH: Final = (2, 8)
LITTLE_SPACE_BYTES: Final = 10 * GIB
SLOW_BYTES_PER_S: Final = 500_000_000
"""Bandwidth below which a disk is too slow for Penstock, such as a SATA SSD or a network."""
_ARENA_BYTES: Final = 32 * MIB
_PROBE_BYTES: Final = 64 * MIB
_EXTRAS: Final = {
    "matplotlib": ("matplotlib", "plot"),
    "scikit-learn": ("sklearn", "data"),
    "pillow": ("PIL", "data"),
}


class CheckStatus(enum.StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    """Penstock works, but more slowly, or with fewer resources than possible."""
    FAIL = "fail"
    """Penstock, or offloading to this directory, does not work."""


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """A checked thing and the result."""

    name: str
    verdict: CheckStatus
    value: str
    advice: str = ""
    """Advice to the user; ``""`` if there is none."""


def all_checks(directories: Iterable[str]) -> list[DoctorCheck]:
    """Run all checks in the order of the layers: Python, memory, disks, GPU."""
    checks = [
        python(),
        torch(),
        cuda(),
        *settings(),
        huge_pages(),
        arena_pages(),
        torch_pages(),
        memory(),
        numa_nodes(),
        freed_memory(),
    ]
    for directory in directories:
        checks += disk(directory)
    return [*checks, gpu_direct(), extras()]


def python() -> DoctorCheck:
    """Check the interpreter's version."""
    value = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    if sys.version_info < LEAST_PYTHON:
        return DoctorCheck("python", CheckStatus.FAIL, value, "install Python 3.11 or later")
    if platform.system() != "Linux":
        return DoctorCheck("python", CheckStatus.FAIL, value, "Penstock's I/O needs Linux")
    return DoctorCheck("python", CheckStatus.OK, value)


def torch() -> DoctorCheck:
    """Check that torch is installed and recent enough."""
    try:
        version: str = importlib.import_module("torch").__version__
    except Exception as error:  # noqa: BLE001  (a broken installation may fail in any way)
        return DoctorCheck("torch", CheckStatus.FAIL, f"{error}", "install torch 2.8 or later")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < LEAST_TORCH:
        return DoctorCheck("torch", CheckStatus.FAIL, version, "install torch 2.8 or later")
    return DoctorCheck("torch", CheckStatus.OK, version)


def cuda() -> DoctorCheck:
    """Check which devices torch sees, and the driver."""
    try:
        lib: Any = importlib.import_module("torch")
    except Exception:  # noqa: BLE001
        return DoctorCheck("cuda", CheckStatus.WARN, "unknown, because torch is not usable")
    driver = system.nvidia_driver()
    if lib.cuda.is_available():
        found = [lib.cuda.get_device_properties(i) for i in range(lib.cuda.device_count())]
        devices = ", ".join(f"{each.name} ({format_bytes(each.total_memory)})" for each in found)
        return DoctorCheck(
            "cuda", CheckStatus.OK, f"CUDA {lib.version.cuda}, driver {driver}: {devices}"
        )
    if driver is not None:
        built = lib.version.cuda or "none: a build for CPUs"
        return DoctorCheck(
            "cuda",
            CheckStatus.WARN,
            f"driver {driver} is loaded, but torch sees no device (its CUDA: {built})",
            "install a build of torch for CUDA; check CUDA_VISIBLE_DEVICES",
        )
    return DoctorCheck("cuda", CheckStatus.OK, "no GPU: the device is host memory")


def numa_nodes(
    sysfs: Path = numa.SYSFS,
    allowed: Callable[[], frozenset[int] | None] = numa.allowed_nodes,
) -> DoctorCheck:
    """Check the NUMA nodes of the GPUs, at which pinned memory is allocated."""
    count = numa.nodes(sysfs)
    if count == 1:
        return DoctorCheck("NUMA", CheckStatus.OK, "one node: all memory is equally near")
    value = f"{count} nodes"
    try:
        lib: Any = importlib.import_module("torch")
        found = [lib.cuda.get_device_properties(i) for i in range(lib.cuda.device_count())]
    except Exception:  # noqa: BLE001  (torch, or its driver, is broken: other checks say so)
        return DoctorCheck("NUMA", CheckStatus.OK, value)
    nodes = {}
    for number, each in enumerate(found):
        nodes[number] = numa.node_of(each, sysfs)
        where = "node unknown" if nodes[number] is None else f"node {nodes[number]}"
        value += f"; GPU {number} ({numa.pci_address(each) or 'address unknown'}): {where}"
    mine = allowed()
    away = [str(n) for n, node in nodes.items() if mine and node is not None and node not in mine]
    if not away:
        return DoctorCheck("NUMA", CheckStatus.OK, value)
    return DoctorCheck(
        "NUMA",
        CheckStatus.WARN,
        f"{value}; this process may not use the memory of GPU {', '.join(away)}'s node",
        "allow it that node (cpuset.mems of its cgroup), or use a GPU at its own node; otherwise copies"
        " cross the link between sockets",
    )


def settings() -> list[DoctorCheck]:
    """List Penstock's environment variables, and check those that are set."""
    in_force, wrong = [], []
    for name, read in knobs.KNOBS.items():
        try:
            value = read()
        except ConfigError as error:
            wrong.append(
                DoctorCheck(name, CheckStatus.FAIL, str(error), "correct the variable, or unset it")
            )
            continue
        shown = format_bytes(int(value)) if read.__name__.endswith("_bytes") else f"{value}"
        source = "environment" if os.environ.get(name) else "default"
        in_force.append(f"{name}: {shown} ({source})")
    for name in sorted(os.environ):
        if name.startswith("PENSTOCK_") and name not in knobs.KNOBS:
            text = f"{name}={os.environ[name]!r} has no effect: Penstock has no such variable"
            wrong.append(DoctorCheck(name, CheckStatus.WARN, text, "correct its name, or unset it"))
    return [DoctorCheck("settings", CheckStatus.OK, "\n".join(in_force)), *wrong]


def huge_pages(path: Path = system.HUGE_PAGES) -> DoctorCheck:
    """Check that the kernel gives 2 MiB pages on request."""
    mode = system.huge_page_mode(path)
    advice = f"as root: echo madvise > {path}; without it reads are up to three times slower"
    if mode is None:
        return DoctorCheck(
            "huge pages", CheckStatus.WARN, "not supported by the kernel", "use another kernel"
        )
    if mode == "never":
        return DoctorCheck("huge pages", CheckStatus.WARN, mode, advice)
    return DoctorCheck("huge pages", CheckStatus.OK, mode)


def arena_pages() -> DoctorCheck:
    """Check that memory for transfers really consists of huge pages."""
    arena = Arena(_ARENA_BYTES)
    block = arena.allocate(_ARENA_BYTES)
    assert block is not None  # an arena of that size, and nothing else in it
    huge = system.anon_huge_bytes(arena.address)
    block.free()
    arena.close()
    if huge is None:
        return DoctorCheck(
            "buffers", CheckStatus.WARN, "unknown, because /proc/self/smaps cannot be read"
        )
    value = f"{format_bytes(huge)} of {format_bytes(_ARENA_BYTES)} in huge pages"
    if huge < _ARENA_BYTES // 2:
        advice = "see `huge pages`; if that is ok, memory is fragmented: free some, or reboot"
        return DoctorCheck("buffers", CheckStatus.WARN, value, advice)
    return DoctorCheck("buffers", CheckStatus.OK, value)


def torch_pages(path: Path = system.HUGE_PAGES) -> DoctorCheck:
    """Check that torch requests huge pages for large CPU tensors."""
    name = "THP_MEM_ALLOC_ENABLE"
    if os.environ.get(name) == "1":
        return DoctorCheck("tensor pages", CheckStatus.OK, f"{name}=1")
    if system.huge_page_mode(path) == "always":
        return DoctorCheck("tensor pages", CheckStatus.OK, "the kernel always gives huge pages")
    return DoctorCheck(
        "tensor pages",
        CheckStatus.WARN,
        f"{name} is not set: large CPU tensors have 4 KiB pages",
        f"set {name}=1 before Python starts; `penstock run` does it itself",
    )


def memory() -> DoctorCheck:
    """Check the memory of the machine, and the limits of this process."""
    sizes = memory_sizes()
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    value = f"{format_bytes(total)}, {format_bytes(available)} available"
    group = min((each.nbytes for each in cgroup_limits()), default=total)
    if group < total:
        value += f"; a cgroup limits it to {format_bytes(group)}"
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        value += f"; address space is limited to {format_bytes(address_space)}"
        advice = "`ulimit -v unlimited`: buffers reserve more addresses than memory"
        return DoctorCheck("memory", CheckStatus.WARN, value, advice)
    return DoctorCheck("memory", CheckStatus.OK, value)


def freed_memory(balloons: Path = system.BALLOONS) -> DoctorCheck:
    """Check whether memory that the process frees is slow to allocate again.

    A virtual machine with free page reporting returns memory that has been free for about a second to
    its host. Touching it again was measured to take fifty times as long as touching present memory.
    """
    if not system.reports_free_pages(balloons):
        return DoctorCheck("freed memory", CheckStatus.OK, "stays with this machine")
    name = "MALLOC_TRIM_THRESHOLD_"
    if os.environ.get(name, "0").isdigit() and int(os.environ.get(name, "0")) >= GIB:
        return DoctorCheck("freed memory", CheckStatus.OK, f"{name} keeps it in the process")
    return DoctorCheck(
        "freed memory",
        CheckStatus.WARN,
        "this virtual machine returns it to its host, so allocating it again is slow",
        f"for even step times, set {name} and MALLOC_MMAP_THRESHOLD_ to 4294967296 before Python"
        " starts; the process then keeps all memory that it has used",
    )


def disk(directory: str) -> list[DoctorCheck]:
    """Check a directory: whether it is usable, direct I/O, free space, and a rough bandwidth."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)  # a check reports the same
        try:
            path = spill_directory(directory)
            return [direct_io(path), free_space(path), quick_bandwidth(path)]
        except (ConfigError, TransferError) as error:
            # of the directory, of a file in it, or of a variable that a check needs
            return [DoctorCheck(directory, CheckStatus.FAIL, str(error))]


def direct_io(path: str) -> DoctorCheck:
    """Check whether transfers can bypass the page cache, and their alignment."""
    kind = filesystem_of(path).kind
    file = open_unlinked(path)
    direct, granule = file.direct, file.granule_bytes
    file.close()
    if direct:
        return DoctorCheck(f"{path}: direct I/O", CheckStatus.OK, f"{kind}, granule {granule} B")
    buffered = knobs.buffered_io()
    advice = "unset PENSTOCK_BUFFERED_IO" if buffered else "name a directory on a local ext4 or xfs"
    return DoctorCheck(f"{path}: direct I/O", CheckStatus.WARN, f"none on {kind}: slower", advice)


def free_space(path: str) -> DoctorCheck:
    """Check the free space for offloading."""
    free = free_space_bytes(path)
    name, value = f"{path}: free space", format_bytes(free)
    if free < knobs.slab_bytes():
        return DoctorCheck(
            name, CheckStatus.FAIL, value, "free some space, or name another directory"
        )
    if free < LITTLE_SPACE_BYTES:
        return DoctorCheck(name, CheckStatus.WARN, value, "a large network offloads more than that")
    return DoctorCheck(name, CheckStatus.OK, value)


def quick_bandwidth(path: str) -> DoctorCheck:
    """Check the bandwidth as a session measures it before its first step, with a few ms of I/O."""
    name = f"{path}: bandwidth"
    try:
        machine = _probed(path)
    except ConfigError:
        raise
    except PenstockError as error:
        return DoctorCheck(
            name, CheckStatus.FAIL, str(error), "free some space, or name another directory"
        )
    write, read = machine.flash_write_bytes_per_s, machine.flash_read_bytes_per_s
    value = f"read {format_bandwidth(read)}, write {format_bandwidth(write)}"
    if min(write, read) < SLOW_BYTES_PER_S:
        advice = "name a directory on an NVMe SSD; `penstock bench io` measures longer"
        return DoctorCheck(name, CheckStatus.WARN, value, advice)
    return DoctorCheck(name, CheckStatus.OK, value)


def gpu_direct(available: Callable[[], cufile.Availability] = cufile.available) -> DoctorCheck:
    """Check whether transfers between GPU and SSD could bypass host memory."""
    if system.nvidia_driver() is None:
        return DoctorCheck("GPU-direct", CheckStatus.OK, "not needed without a GPU")
    found = available()
    if found:
        return DoctorCheck("GPU-direct", CheckStatus.OK, found.reason)
    advice = "optional: transfers go through host memory without it"
    return DoctorCheck("GPU-direct", CheckStatus.WARN, found.reason, advice)


def extras() -> DoctorCheck:
    """Check the packages that only parts of Penstock use."""
    there, missing = [], []
    for package, (module, extra) in _EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            missing.append((package, extra))
        else:
            there.append(f"{package} {importlib.metadata.version(package)}")
    value = ", ".join([*there, *(f"no {package}" for package, _ in missing)])
    wanted = ",".join(sorted({extra for _, extra in missing}))
    advice = f"for plots and the demonstration: pip install 'penstock[{wanted}]'" if missing else ""
    return DoctorCheck("optional", CheckStatus.OK, value, advice)


def _probed(path: str) -> Machine:
    engine = default_engine()
    try:
        tier = FlashTier(path, capacity_bytes=_PROBE_BYTES, engine=engine, recorder=Recorder())
        try:
            return probe.measure({"flash": tier})
        finally:
            tier.close()
    finally:
        engine.close()
