"""Pages and drivers of this machine, from ``/proc`` and ``/sys``. No function raises OSError."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BALLOONS: Final = Path("/sys/bus/virtio/drivers/virtio_balloon")
_FREE_PAGE_REPORTING: Final = 5
"""Number of the feature bit VIRTIO_BALLOON_F_REPORTING (VIRTIO 1.2, section 5.5.3)."""
_NVIDIA: Final = Path("/proc/driver/nvidia/version")


def huge_page_mode(path: Path = HUGE_PAGES) -> str | None:
    """Return the mode of 2 MiB pages: ``"always"``, ``"madvise"``, ``"never"``, or ``None``."""
    try:
        match = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return None
    return match[1] if match else None


def anon_huge_bytes(address: int, smaps: Path = Path("/proc/self/smaps")) -> int | None:
    """Return ``AnonHugePages`` of the mapping that contains ``address``, or ``None`` if unknown."""
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return None
    inside = False
    for line in lines:
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span is not None:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def reports_free_pages(balloons: Path = BALLOONS) -> bool:
    """Return whether this is a virtual machine that returns free memory to its host."""
    try:
        features = [file.read_text().strip() for file in balloons.glob("virtio*/features")]
    except OSError:
        return False
    return any(bits[_FREE_PAGE_REPORTING : _FREE_PAGE_REPORTING + 1] == "1" for bits in features)


def nvidia_driver() -> str | None:
    """Return the version of the loaded driver; ``None`` if there is none."""
    try:
        match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", _NVIDIA.read_text())
    except OSError:
        return None
    return match[1] if match else "of unknown version"
