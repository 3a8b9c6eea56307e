"""Ratios of codecs on a saved storage, measured on a sample of it: they are never assumed.

Some stretches of the live storage are encoded and decoded in the calling thread, so a sample costs tens
of microseconds. It is taken only in passes that the planner asks for it.
"""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

import numpy as np
import torch

from penstock.codec import registry
from penstock.codec.base import HEADER_BYTES, ITEMSIZE, Bytes, Codec
from penstock.core.units import KIB, round_down
from penstock.io.mapping import memory_at
from penstock.plan.profile import CodecSample

POSITIVE: Final = "positive"
"""The codec for what only the backward of a ReLU needs."""
STRETCHES: Final = 4
STRETCH_BYTES: Final = 256 * KIB
CHAINS: Final = ("zero-value+exponent",)
"""Tried besides: what is left of a ReLU's output is as smooth as its input."""


class CodecSampler(Protocol):
    """Measures codecs on the storages of one device. Thread-safe."""

    def sample(
        self, storage: torch.UntypedStorage, dtype: str, *, sign_only: bool
    ) -> tuple[CodecSample, ...]:
        """Measure every codec that may be chosen for elements of this type."""

    def fell_short(self) -> bool:
        """Return whether a codec has proved far slower than was told since this was called last."""


class Sampler(threading.local):
    """Measures codecs on storages in host memory. Thread-safe: each thread has its own buffers.

    These are too small to count against a budget: three stretches.
    """

    def __init__(self) -> None:
        self._out = np.empty(2 * STRETCH_BYTES + HEADER_BYTES, np.uint8)
        self._back = np.empty(STRETCH_BYTES, np.uint8)
        self._warm: set[tuple[str, str]] = set()

    def fell_short(self) -> bool:
        """Return False: a codec shares a core with the network, and is measured on that."""
        return False

    def sample(
        self, storage: torch.UntypedStorage, dtype: str, *, sign_only: bool
    ) -> tuple[CodecSample, ...]:
        """Measure every lossless codec that accepts ``dtype``.

        Args:
            storage: In host memory. One that does not begin where its elements could is never encoded,
                so nothing is measured.
            dtype: Of its elements, as ``"float32"``.
            sign_only: Whether the codec ``positive`` may turn out to be enough, so that it is
                measured as well.
        """
        if not storage.nbytes() or storage.data_ptr() % ITEMSIZE.get(dtype, 1):
            return ()
        codecs = chosen_codecs(dtype, sign_only=sign_only)
        memory = memory_at(storage.data_ptr(), storage.nbytes())
        pieces = [memory[start:stop] for start, stop in stretches(storage.nbytes(), STRETCH_BYTES)]
        for codec in codecs:
            if (codec.name, dtype) not in self._warm:  # its code is compiled when it is first used
                self._warm.add((codec.name, dtype))
                self._measure(codec, [_easy(dtype), pieces[0]], dtype)
        return tuple(self._measure(codec, pieces, dtype) for codec in codecs)

    def _measure(self, codec: Codec, pieces: list[Bytes], dtype: str) -> CodecSample:
        source = frames = encode_ns = decode_ns = 0
        for stretch in pieces:
            start_ns = time.perf_counter_ns()
            length = codec.encode(stretch, self._out, dtype=dtype)
            middle_ns = time.perf_counter_ns()
            codec.decode(self._out[:length], self._back[: stretch.size])
            decode_ns += time.perf_counter_ns() - middle_ns
            encode_ns += middle_ns - start_ns
            source += stretch.size
            frames += length - HEADER_BYTES  # of a whole storage, headers are a thousandth
        return CodecSample(
            codec=codec.name,
            ratio=frames / source,
            encode_bytes_per_s=source * 1e9 / max(encode_ns, 1),
            decode_bytes_per_s=source * 1e9 / max(decode_ns, 1),
        )


def _easy(dtype: str) -> Bytes:
    """Bytes that every codec makes fewer of, so that all of its code runs: every other element is 0."""
    elements = np.zeros((1024, 2, ITEMSIZE[dtype]), np.uint8)
    elements[:, 1, -1] = 1
    return elements.reshape(-1)


def chosen_codecs(dtype: str, *, sign_only: bool) -> list[Codec]:
    """Those that may be chosen by what they make of elements of a type; arguments as for ``sample``."""
    codecs = list(registry.lossless_for(dtype))
    codecs += [c for c in map(registry.get, CHAINS) if c.accepts(dtype)]
    if sign_only and registry.get(POSITIVE).accepts(dtype):
        codecs.append(registry.get(POSITIVE))
    return codecs


def stretches(nbytes: int, most_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of up to four stretches, evenly spread, at multiples of any element's size.

    Args:
        nbytes: Length of the whole.
        most_bytes: Of one stretch; a multiple of 8.
    """
    length = min(most_bytes, round_down(max(nbytes // STRETCHES, 8), 8))
    step = max(nbytes - length, 0) // max(STRETCHES - 1, 1)
    starts = {round_down(index * step, 8) for index in range(STRETCHES)}
    return [(start, min(start + length, nbytes)) for start in sorted(starts)]
