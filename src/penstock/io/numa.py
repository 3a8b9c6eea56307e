"""NUMA nodes of memory and devices.

A machine with several sockets has memory and devices at each. A copy between a device and memory of
another node crosses the shared link between the sockets. Memory belongs to the node of the core that
first touches it, unless another node was requested before.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any, Final

SYSFS: Final = Path("/sys")
_PREFERRED: Final = 1
"""``MPOL_PREFERRED``: use other nodes if this one is full, where ``MPOL_BIND`` would end the process."""
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
"""Number of the system call ``mbind``, for which the C library has no function."""
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)

_libc = ctypes.CDLL(None, use_errno=True)


def node_of(properties: Any, sysfs: Path = SYSFS) -> int | None:
    """Return the node of a CUDA device.

    Args:
        properties: The result of ``torch.cuda.get_device_properties``.
        sysfs: Directory in which the kernel describes devices.

    Returns:
        Number of the node; None if the machine has none, or does not report it.
    """
    address = pci_address(properties)
    if address is None:
        return None
    try:
        node = int((sysfs / "bus" / "pci" / "devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def pci_address(properties: Any) -> str | None:
    """Return a device's PCI address, as ``"0000:3b:00.0"``; None if this torch does not report it."""
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def prefer(address: int, nbytes: int, node: int) -> str:
    """Prefer a node for pages that are not resident yet.

    Args:
        address: First address, a multiple of the system's page.
        nbytes: Length of the memory.
        node: Number of the node.

    Returns:
        ``""``, or the reason for a refusal: there is no such node, or the process may not use it.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"not supported on {platform.machine()}"
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    failed = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_ulong(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_PREFERRED),
        mask,
        ctypes.c_ulong(words * _WORD_BITS + 1),
        ctypes.c_ulong(0),
    )
    return os.strerror(ctypes.get_errno()) if failed else ""


def nodes(sysfs: Path = SYSFS) -> int:
    """Return the number of nodes with memory; 1 if the kernel does not report it."""
    try:
        text = (sysfs / "devices" / "system" / "node" / "has_memory").read_text()
        return max(1, len(_numbers(text)))
    except (OSError, ValueError):
        return 1


def allowed_nodes(status: Path = Path("/proc/self/status")) -> frozenset[int] | None:
    """Return the nodes whose memory this process may use; None if the kernel does not report them."""
    try:
        lines = status.read_text().splitlines()
        found = next(each for each in lines if each.startswith("Mems_allowed_list:"))
        return _numbers(found.partition(":")[2])
    except (OSError, ValueError, StopIteration):
        return None


def _numbers(text: str) -> frozenset[int]:
    """Parse a list of numbers as the kernel writes it: ``"0-3,8"``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
