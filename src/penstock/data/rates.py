"""How fast flash delivers samples at random, beside the same bytes in sequence: a short probe, once.

What was measured is kept beside the index, so that the same set has the same order the next time.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from typing import Final

import numpy as np

from penstock.core.errors import DatasetError
from penstock.core.files import parse_json
from penstock.data.build import Opened
from penstock.data.cache import keep, read_kept
from penstock.data.permutation import Numbers
from penstock.data.reader import Reader

FULL_SHARE: Final = 0.8
"""Of the sequential rate: a full shuffle that is no slower costs nothing worth a window."""
LEAST_BYTES: Final = 64 << 20
"""Smaller sets are not probed."""
_PROBE_BYTES: Final = 8 << 20
_MOST_SAMPLES: Final = 2048
_ROUNDS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRates:
    """Of one data set on one device, in bytes of samples."""

    random_bytes_per_s: float
    sequential_bytes_per_s: float

    @property
    def full_is_quick(self) -> bool:
        """Return whether samples may as well be read one by one."""
        return self.random_bytes_per_s >= FULL_SHARE * self.sequential_bytes_per_s


def known_rates(opened: Opened) -> DatasetRates | None:
    """Return rates measured before; None: there are none for this index that can be trusted."""
    if opened.index_path is None:
        return None
    try:
        found = parse_json(read_kept(_path(opened.index_path)))
        if found.pop("index") != _stamp(opened.index_path):
            return None
        rates = DatasetRates(**{name: float(value) for name, value in found.items()})
    except (OSError, ValueError, TypeError, AttributeError, KeyError, OverflowError):
        return None
    return rates if all(map(math.isfinite, astuple(rates))) else None


def rates_of(opened: Opened, reader: Reader) -> DatasetRates | None:
    """Return rates measured before, or measure them now, in some 50 ms.

    Nothing may be under way. None: the set is small, or its file system has no direct I/O, so that memory
    would be measured.

    Raises:
        TransferError: A sample cannot be read.
        DatasetError: A file is missing.
    """
    known = known_rates(opened)
    if known is not None or opened.index.data_bytes < LEAST_BYTES or not reader.is_direct:
        return known
    samples, mean = opened.index.samples, max(1, opened.index.data_bytes // opened.index.samples)
    room = min(_PROBE_BYTES, reader.memory.limit_bytes // 4)
    count = min(samples, _MOST_SAMPLES, room // (mean + 8192))
    if count < 2:
        return None
    random = np.random.default_rng(samples)
    times = {"random": list[float](), "sequential": list[float]()}
    for _ in range(_ROUNDS):
        start = int(random.integers(0, samples - count + 1))
        times["random"].append(_time(reader, np.sort(random.integers(0, samples, count))))
        times["sequential"].append(_time(reader, np.arange(start, start + count)))
    found = DatasetRates(
        random_bytes_per_s=count * mean / min(times["random"]),
        sequential_bytes_per_s=count * mean / min(times["sequential"]),
    )
    _keep(opened, found)
    return found


def _time(reader: Reader, samples: Numbers) -> float:
    plan = reader.plan(samples)
    started = time.perf_counter()
    pending = reader.start(plan)
    assert pending is not None, "a quarter of the read memory is enough"
    pending.wait("skip").free()
    return time.perf_counter() - started


def _path(index_path: str) -> str:
    return f"{index_path}.rates"


def _stamp(index_path: str) -> str:
    facts = os.stat(index_path)
    return f"{facts.st_size} {facts.st_mtime_ns}"


def _keep(opened: Opened, rates: DatasetRates) -> None:
    """A cache that cannot be written costs a probe each time."""
    if opened.index_path is None:
        return
    with suppress(OSError, DatasetError):
        document = {"index": _stamp(opened.index_path), **asdict(rates)}
        keep(_path(opened.index_path), json.dumps(document).encode())
