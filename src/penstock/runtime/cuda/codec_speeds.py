"""How fast a worker encodes and decodes storages of a device, beside the network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock.core.locks import Lock

LEAST_PIECES: Final = 8
"""Fewer pieces tell too little: with the first ones kernels are loaded."""


class CodecSpeeds:
    """Bytes of the source per second of the worker's time, by codec and type. Thread-safe."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._lock = Lock()
        self._work: dict[tuple[str, str, bool], tuple[int, int, int]] = {}
        """Pieces, their bytes, and the time that they took in ns."""

    @contextmanager
    def timed(self, codec: str, dtype: str, nbytes: int, *, decoding: bool) -> Iterator[None]:
        """Count a piece that is encoded or decoded inside, unless that fails."""
        start_ns = time.perf_counter_ns()
        yield
        took_ns = time.perf_counter_ns() - start_ns
        with self._lock:
            key = codec, dtype, decoding
            pieces, before, before_ns = self._work.get(key, (0, 0, 0))
            self._work[key] = pieces + 1, before + nbytes, before_ns + took_ns

    def limit(self, codec: str, dtype: str, bytes_per_s: float, *, decoding: bool) -> float:
        """Return a speed, or what was achieved so far if that is less and enough pieces tell it."""
        pieces, nbytes, took_ns = self._work.get((codec, dtype, decoding), (0, 0, 0))
        if pieces < LEAST_PIECES:
            return bytes_per_s
        return min(bytes_per_s, nbytes * 1e9 / max(1, took_ns))
