"""What ``penstock doctor`` looks at: each function looks at one thing and says what to do about it."""

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
from penstock.core.errors import ConfigError, PenstockError, PenstockWarning, free_space_bytes
from penstock.core.fs import filesystem_of
from penstock.core.units import GIB, MIB, format_bandwidth, format_bytes
from penstock.io import cufile, numa
from penstock.io.aio import default_engine
from penstock.io.arena import Arena
from penstock.io.files import open_unlinked
from penstock.observe.recorder import Recorder
from penstock.plan.machine import Machine
from penstock.runtime import probe
from penstock.tier.flash import FlashTier

LEAST_PYTHON: Final = (3, 11)
LEAST_TORCH: Final = (2, 8)
LITTLE_SPACE_BYTES: Final = 10 * GIB
SLOW_BYTES_PER_S: Final = 500_000_000
"""Below this a disk is none of those that Penstock is for: a SATA SSD, a network."""
_ARENA_BYTES: Final = 32 * MIB
_PROBE_BYTES: Final = 64 * MIB
_CGROUPS: Final = Path("/sys/fs/cgroup")
_EXTRAS: Final = {
    "matplotlib": ("matplotlib", "plot"),
    "scikit-learn": ("sklearn", "data"),
    "pillow": ("PIL", "data"),
}


class Verdict(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """Penstock works, but slower or with less than it could have."""
    FAIL = "fail"
    """Penstock, or spilling to this directory, does not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, and what was found."""

    name: str
    verdict: Verdict
    value: str
    advice: str = ""
    """What to do; ``""`` where there is nothing."""


def all_checks(directories: Iterable[str]) -> list[Check]:
    """Everything, in the order of the layers: Python, memory, disks, GPU."""
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


def python() -> Check:
    """The interpreter's version."""
    value = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    if sys.version_info < LEAST_PYTHON:
        return Check("python", Verdict.FAIL, value, "install Python 3.11 or later")
    if platform.system() != "Linux":
        return Check("python", Verdict.FAIL, value, "Penstock's I/O needs Linux")
    return Check("python", Verdict.OK, value)


def torch() -> Check:
    """Whether torch is there, and recent enough."""
    try:
        version: str = importlib.import_module("torch").__version__
    except Exception as error:  # noqa: BLE001  (a broken installation may fail in any way)
        return Check("torch", Verdict.FAIL, f"{error}", "install torch 2.8 or later")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < LEAST_TORCH:
        return Check("torch", Verdict.FAIL, version, "install torch 2.8 or later")
    return Check("torch", Verdict.OK, version)


def cuda() -> Check:
    """What devices torch sees, and by which driver."""
    try:
        lib: Any = importlib.import_module("torch")
    except Exception:  # noqa: BLE001
        return Check("cuda", Verdict.WARN, "unknown, for there is no torch")
    driver = system.nvidia_driver()
    if lib.cuda.is_available():
        found = [lib.cuda.get_device_properties(i) for i in range(lib.cuda.device_count())]
        devices = ", ".join(f"{each.name} ({format_bytes(each.total_memory)})" for each in found)
        return Check("cuda", Verdict.OK, f"CUDA {lib.version.cuda}, driver {driver}: {devices}")
    if driver is not None:
        built = lib.version.cuda or "none: a build for CPUs"
        return Check(
            "cuda",
            Verdict.WARN,
            f"driver {driver} is loaded, but torch sees no device (its CUDA: {built})",
            "install a torch for CUDA; see also CUDA_VISIBLE_DEVICES",
        )
    return Check("cuda", Verdict.OK, "no GPU: the device is host memory")


def numa_nodes(
    sysfs: Path = numa.SYSFS,
    allowed: Callable[[], frozenset[int] | None] = numa.allowed_nodes,
) -> Check:
    """At which NUMA nodes the GPUs are: there pinned memory is taken."""
    count = numa.nodes(sysfs)
    if count == 1:
        return Check("NUMA", Verdict.OK, "one node: all memory is as near")
    value = f"{count} nodes"
    try:
        lib: Any = importlib.import_module("torch")
        found = [lib.cuda.get_device_properties(i) for i in range(lib.cuda.device_count())]
    except Exception:  # noqa: BLE001  (torch, or its driver, is broken: other checks say so)
        return Check("NUMA", Verdict.OK, value)
    nodes = {}
    for number, each in enumerate(found):
        nodes[number] = numa.node_of(each, sysfs)
        where = "not told" if nodes[number] is None else f"node {nodes[number]}"
        value += f"; GPU {number} ({numa.pci_address(each) or 'address not told'}): {where}"
    mine = allowed()
    away = [str(n) for n, node in nodes.items() if mine and node is not None and node not in mine]
    if not away:
        return Check("NUMA", Verdict.OK, value)
    return Check(
        "NUMA",
        Verdict.WARN,
        f"{value}; this process may not use the memory of GPU {', '.join(away)}'s node",
        "allow it that node (cpuset.mems of its cgroup), or give it a GPU of its own; copies cross"
        " the sockets' link otherwise",
    )


def settings() -> list[Check]:
    """Tell each environment variable of Penstock's that is in force, and check those that are set."""
    in_force, wrong = [], []
    for name, read in knobs.KNOBS.items():
        try:
            value = read()
        except ConfigError as error:
            wrong.append(Check(name, Verdict.FAIL, str(error), "correct the variable, or unset it"))
            continue
        shown = format_bytes(int(value)) if read.__name__.endswith("_bytes") else f"{value}"
        source = "environment" if os.environ.get(name) else "default"
        in_force.append(f"{name}: {shown} ({source})")
    for name in sorted(os.environ):
        if name.startswith("PENSTOCK_") and name not in knobs.KNOBS:
            text = f"{name}={os.environ[name]!r} has no effect: Penstock has no such variable"
            wrong.append(Check(name, Verdict.WARN, text, "correct its name, or unset it"))
    return [Check("settings", Verdict.OK, "\n".join(in_force)), *wrong]


def huge_pages(path: Path = system.HUGE_PAGES) -> Check:
    """Whether the kernel gives 2 MiB pages to those who ask."""
    mode = system.huge_page_mode(path)
    advice = f"as root: echo madvise > {path}; reads are up to three times slower without"
    if mode is None:
        return Check("huge pages", Verdict.WARN, "the kernel has none", "use another kernel")
    if mode == "never":
        return Check("huge pages", Verdict.WARN, mode, advice)
    return Check("huge pages", Verdict.OK, mode)


def arena_pages() -> Check:
    """Whether memory for transfers really lies in huge pages."""
    arena = Arena(_ARENA_BYTES)
    block = arena.allocate(_ARENA_BYTES)
    assert block is not None  # an arena of that size, and nothing else in it
    huge = system.anon_huge_bytes(arena.address)
    block.free()
    arena.close()
    if huge is None:
        return Check("buffers", Verdict.WARN, "unknown, for /proc/self/smaps cannot be read")
    value = f"{format_bytes(huge)} of {format_bytes(_ARENA_BYTES)} in huge pages"
    if huge < _ARENA_BYTES // 2:
        advice = "see `huge pages`; if that is ok, memory is fragmented: free some, or reboot"
        return Check("buffers", Verdict.WARN, value, advice)
    return Check("buffers", Verdict.OK, value)


def torch_pages(path: Path = system.HUGE_PAGES) -> Check:
    """Whether torch asks for huge pages under its large CPU tensors."""
    name = "THP_MEM_ALLOC_ENABLE"
    if os.environ.get(name) == "1":
        return Check("tensor pages", Verdict.OK, f"{name}=1")
    if system.huge_page_mode(path) == "always":
        return Check("tensor pages", Verdict.OK, "the kernel gives huge pages to all")
    return Check(
        "tensor pages",
        Verdict.WARN,
        f"{name} is not set: large CPU tensors have 4 KiB pages",
        f"set {name}=1 before Python starts; `penstock run` does it by itself",
    )


def memory() -> Check:
    """How much there is, and what limits this process below that."""
    sizes = system.memory_sizes()
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    value = f"{format_bytes(total)}, {format_bytes(available)} available"
    group = system.cgroup_limit_bytes(Path("/proc/self/cgroup"), _CGROUPS)
    if group is not None and group < total:
        value += f"; a cgroup limits it to {format_bytes(group)}"
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        value += f"; address space is limited to {format_bytes(address_space)}"
        advice = "`ulimit -v unlimited`: buffers reserve more addresses than memory"
        return Check("memory", Verdict.WARN, value, advice)
    return Check("memory", Verdict.OK, value)


def freed_memory(balloons: Path = system.BALLOONS) -> Check:
    """Whether memory that the process frees is slow to take again.

    A virtual machine with free page reporting gives what has been free for a second or so back to
    its host. Touching it again was seen to take fifty times as long as touching memory that is there.
    """
    if not system.reports_free_pages(balloons):
        return Check("freed memory", Verdict.OK, "stays with this machine")
    name = "MALLOC_TRIM_THRESHOLD_"
    if os.environ.get(name, "0").isdigit() and int(os.environ.get(name, "0")) >= GIB:
        return Check("freed memory", Verdict.OK, f"{name} keeps it with the process")
    return Check(
        "freed memory",
        Verdict.WARN,
        "this virtual machine returns it to its host: taken again, it is slow",
        f"for even step times, set {name} and MALLOC_MMAP_THRESHOLD_ to 4294967296 before Python"
        " starts; the process then keeps what it has once used",
    )


def disk(directory: str) -> list[Check]:
    """A directory: usable at all, direct I/O, free space, and a first bandwidth."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)  # a check says the same
        try:
            path = spill_directory(directory)
            return [direct_io(path), free_space(path), quick_bandwidth(path)]
        except ConfigError as error:  # of the directory, or of a variable that a check needs
            return [Check(directory, Verdict.FAIL, str(error))]


def direct_io(path: str) -> Check:
    """Whether transfers can pass by the page cache, and how they must be aligned."""
    kind = filesystem_of(path).kind
    file = open_unlinked(path)
    direct, granule = file.direct, file.granule_bytes
    file.close()
    if direct:
        return Check(f"{path}: direct I/O", Verdict.OK, f"{kind}, granule {granule} B")
    buffered = knobs.buffered_io()
    advice = "unset PENSTOCK_BUFFERED_IO" if buffered else "name one on a local ext4 or xfs"
    return Check(f"{path}: direct I/O", Verdict.WARN, f"none on {kind}: slower", advice)


def free_space(path: str) -> Check:
    """How much could be spilled."""
    free = free_space_bytes(path)
    name, value = f"{path}: free space", format_bytes(free)
    if free < knobs.slab_bytes():
        return Check(name, Verdict.FAIL, value, "free some space, or name another directory")
    if free < LITTLE_SPACE_BYTES:
        return Check(name, Verdict.WARN, value, "a large network spills more than that")
    return Check(name, Verdict.OK, value)


def quick_bandwidth(path: str) -> Check:
    """What a session would measure before its first step; a few ms of I/O."""
    name = f"{path}: bandwidth"
    try:
        machine = _probed(path)
    except ConfigError:
        raise
    except PenstockError as error:
        return Check(name, Verdict.FAIL, str(error), "free some space, or name another directory")
    write, read = machine.flash_write_bytes_per_s, machine.flash_read_bytes_per_s
    value = f"read {format_bandwidth(read)}, write {format_bandwidth(write)}"
    if min(write, read) < SLOW_BYTES_PER_S:
        advice = "name a directory on an NVMe SSD; `penstock bench io` measures longer"
        return Check(name, Verdict.WARN, value, advice)
    return Check(name, Verdict.OK, value)


def gpu_direct(available: Callable[[], cufile.Availability] = cufile.available) -> Check:
    """Whether transfers between GPU and SSD could leave host memory out."""
    if system.nvidia_driver() is None:
        return Check("GPU-direct", Verdict.OK, "not needed without a GPU")
    found = available()
    if found:
        return Check("GPU-direct", Verdict.OK, found.reason)
    advice = "optional: transfers go through host memory without it"
    return Check("GPU-direct", Verdict.WARN, found.reason, advice)


def extras() -> Check:
    """Packages that only parts of Penstock use."""
    there, missing = [], []
    for package, (module, extra) in _EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            missing.append((package, extra))
        else:
            there.append(f"{package} {importlib.metadata.version(package)}")
    value = ", ".join([*there, *(f"no {package}" for package, _ in missing)])
    wanted = ",".join(sorted({extra for _, extra in missing}))
    advice = f"for plots and the demonstration: pip install 'penstock[{wanted}]'" if missing else ""
    return Check("optional", Verdict.OK, value, advice)


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
