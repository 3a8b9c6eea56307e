"""Result files: figures beside the hardware, versions and configuration that they belong to.

No absolute path and no host name is recorded: results are committed.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.core.fs import filesystem_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"


def write(
    name: str,
    figures: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    directory: str | os.PathLike[str] | None = None,
    into: str | os.PathLike[str] = RESULTS,
) -> Path:
    """Write ``<into>/<name>.json`` and return its path.

    Args:
        name: By default the name of the script: ``Path(__file__).stem``.
        figures: What was measured; units in the names.
        config: All that was chosen. Must not hold paths; name the directory by ``directory``.
        directory: What was measured on, if files were; only its kind of file system is recorded.
        into: Where results go.
    """
    result = {
        "name": name,
        "figures": dict(figures),
        "config": dict(config),
        "hardware": hardware(directory),
        "versions": versions(),
        "commit": commit(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    path = Path(into) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def earlier(name: str) -> dict[str, Any]:
    """The figures of the result file of this name; empty if there is none."""
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.exists() else {}
    return dict(found)


def page_head(command: str, mark: str = "table") -> str:
    """The beginning of a file that a page of the manual includes from ``mark`` on.

    Args:
        command: What writes it, relative to ``benchmarks``.
        mark: Where the included part begins.
    """
    written = f"<!-- Written by benchmarks/{command}; do not edit. -->"
    return f"---\norphan: true\n---\n\n{written}\n<!-- {mark} -->\n\n"


def hardware(directory: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Processor, cores, memory, kernel, and the kind of file system of ``directory``."""
    found: dict[str, Any] = {
        "cpu": _first(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": re.match(r"[\d.]*", platform.release())[0],
        "transparent_huge_pages": _first(
            r"\[(\w+)\]", "/sys/kernel/mm/transparent_hugepage/enabled"
        ),
    }
    if directory is not None:
        found["filesystem"] = filesystem_of(directory).kind
    return found


def versions() -> dict[str, str]:
    """Of Python and of what a result may depend on."""
    found = {"python": platform.python_version()}
    for package in ("penstock", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str | None:
    """The commit that was measured, with ``+changes`` if the tree was not clean."""
    command = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        status = [*command, "status", "--porcelain", "--", "src", "benchmarks/*.py"]
        dirty = subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+changes" if dirty else head


def summary(samples: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, least and most, and how many."""
    return {
        "median": round(statistics.median(samples), digits),
        "min": round(min(samples), digits),
        "max": round(max(samples), digits),
        "samples": len(samples),
    }


def warn_if_busy() -> None:
    """Say on stderr if somebody else is using the machine."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.5 * cores:
        print(f"the machine is busy: load {load:.1f} on {cores} cores", file=sys.stderr)


def _first(pattern: str, path: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text(encoding="utf-8"))
    except OSError:
        return None
    return match[1].strip() if match else None
