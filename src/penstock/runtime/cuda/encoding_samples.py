"""Ratio and speed of codecs on a device's storages: measured, never assumed.

How much shorter a codec makes a storage is asked of a sample of each, 1 MiB at most, since that differs
from storage to storage. How fast it is on this device is measured once for each codec and type, on as
many bytes as a piece has (``PROBE_BYTES``): on a sample of 1 MiB the launches of kernels would take most
of the time. What is timed is device time between two events, waits for lengths and checks included, as
when storages are encoded; a first round, in which kernels are loaded, is not.

That is how fast a codec is alone. Beside a network its worker waits for the interpreter, and its kernels
for the device: on an H100 a piece of 7 MB took 3 ms. So the worker's time is counted too, and what a
later sample tells is the slower of both. Where it is less than half of what was told before
(``fell_short``), the planner asks for another one.

What a sample takes is charged to the budget while it is taken. Where there is no room for that, it is a
shorter one, or none: then nothing is known of the storage, and it goes as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from penstock.codec.base import HEADER_BYTES, ITEMSIZE
from penstock.codec.device import FORMS
from penstock.codec.device.base import decode_tensor, encode_tensor, scratch_bytes
from penstock.core.units import KIB, MIB
from penstock.plan.encoding import MARGIN
from penstock.plan.profile import CodecSample
from penstock.runtime.cuda.codec_speeds import CodecSpeeds
from penstock.runtime.cuda.link import CudaLink, device_time
from penstock.runtime.sampling import STRETCH_BYTES, chosen_codecs, stretches
from penstock.staging import bytes_of
from penstock.store.account import Account
from penstock.store.frames import SCRATCH

PROBE_BYTES: Final = 8 * MIB
"""Bytes on which a codec's speed is measured."""
LEAST_STRETCH_BYTES: Final = 16 * KIB
"""Shorter stretches tell too little."""
SHORT: Final = 2.0
"""How much faster a codec was told to be than it is, for another sample."""


class DeviceSampler:
    """Measures codecs on storages of a device, on the caller's current stream. Thread-safe; waits."""

    def __init__(self, link: CudaLink, budget: Account, achieved: CodecSpeeds) -> None:
        """Know nothing yet.

        Args:
            link: To the device; times rounds.
            budget: The device's: what a sample takes is charged to it for as long.
            achieved: What the worker achieves.
        """
        self._probed: dict[tuple[str, str], tuple[float, float]] = {}
        self._told: dict[tuple[str, str], tuple[float, float]] = {}
        self._link = link
        self._budget = budget
        self._achieved = achieved
        self._lock = threading.Lock()

    def fell_short(self) -> bool:
        """Return whether the worker is less than half as fast with a codec as was told; once for each."""
        with self._lock:
            short = [key for key, told in self._told.items() if self._is_short(key, told)]
            for key in short:
                del self._told[key]
        return bool(short)

    def _is_short(self, key: tuple[str, str], told: tuple[float, float]) -> bool:
        return any(
            speed > SHORT * self._achieved.limit(*key, speed, decoding=decoding)
            for decoding, speed in zip((False, True), told, strict=True)
        )

    def sample(
        self, storage: torch.UntypedStorage, dtype: str, *, sign_only: bool
    ) -> tuple[CodecSample, ...]:
        """Measure every lossless codec that accepts ``dtype`` and has a device form.

        Args:
            storage: On the device, complete in the caller's current stream. One that does not begin
                where its elements could is never encoded, so nothing is measured.
            dtype: Of its elements, as ``"float32"``.
            sign_only: Whether the codec ``positive`` may turn out to be enough, so that it is
                measured as well.
        """
        if not storage.nbytes() or storage.data_ptr() % ITEMSIZE.get(dtype, 1):
            return ()
        names = [codec.name for codec in chosen_codecs(dtype, sign_only=sign_only)]
        names = [name for name in names if name in FORMS]
        try:
            return self._sample(storage, dtype, names)
        except torch.OutOfMemoryError:  # the budget has room, but the device has not
            return ()

    def _sample(
        self, storage: torch.UntypedStorage, dtype: str, names: list[str]
    ) -> tuple[CodecSample, ...]:
        stretch_bytes = STRETCH_BYTES
        while names and stretch_bytes >= LEAST_STRETCH_BYTES:
            places = stretches(storage.nbytes(), stretch_bytes)
            nbytes = sum(stop - start for start, stop in places)
            with self._charged(_room(names, dtype, nbytes, storage.device)) as charged:
                if charged:
                    memory = bytes_of(storage)
                    row = torch.cat([memory[start:stop] for start, stop in places])
                    return tuple(self._measure(name, row, dtype) for name in names)
            stretch_bytes //= 2
        return ()

    @contextmanager
    def _charged(self, nbytes: int) -> Iterator[bool]:
        """Charge ``nbytes`` inside the ``with`` block; yield whether that was possible."""
        charged = self._budget.try_take(nbytes, SCRATCH)
        try:
            yield charged
        finally:
            if charged:
                self._budget.free(nbytes, SCRATCH)

    def _measure(self, name: str, row: Tensor, dtype: str) -> CodecSample:
        ratio, speeds = self._round(name, row, dtype)
        if ratio < 1 - MARGIN:  # else it gives up early, and its speed says nothing
            speeds = self._probed_speeds(name, row, dtype)
        speeds = self._tell(name, dtype, speeds)
        return CodecSample(
            codec=name,
            ratio=ratio,
            encode_bytes_per_s=speeds[0],
            decode_bytes_per_s=speeds[1],
        )

    def _probed_speeds(self, name: str, row: Tensor, dtype: str) -> tuple[float, float]:
        """Return the speeds of a codec alone, as measured before or now."""
        with self._lock:
            probed = self._probed.get((name, dtype))
            if probed is None:
                probed = self._probed[name, dtype] = self._probe(name, row, dtype)
        return probed

    def _tell(self, name: str, dtype: str, speeds: tuple[float, float]) -> tuple[float, float]:
        """Return speeds of a codec, or those of the worker with it where they are less."""
        encode, decode = (
            self._achieved.limit(name, dtype, speed, decoding=decoding)
            for decoding, speed in zip((False, True), speeds, strict=True)
        )
        with self._lock:  # samples of other storages may have been slower
            told = self._told.get((name, dtype), (0.0, 0.0))
            self._told[name, dtype] = max(encode, told[0]), max(decode, told[1])
        return encode, decode

    def _probe(self, name: str, row: Tensor, dtype: str) -> tuple[float, float]:
        """On as many bytes as there is room for, up to ``PROBE_BYTES``: the sample over and over."""
        times = max(1, PROBE_BYTES // row.numel())
        while times > 1:
            with self._charged(_room([name], dtype, times * row.numel(), row.device)) as charged:
                if charged:
                    long = row.repeat(times)
                    self._round(name, long, dtype)
                    return self._round(name, long, dtype)[1]
            times //= 2
        return self._round(name, row, dtype)[1]

    def _round(self, name: str, row: Tensor, dtype: str) -> tuple[float, tuple[float, float]]:
        """Encode and decode a row: what is left of it, and how fast that was."""
        link, device = self._link, row.device
        frame, encode_ns = device_time(link, device, lambda _: encode_tensor(name, row, dtype))
        _, decode_ns = device_time(link, device, lambda _: decode_tensor(frame, row.numel()))
        source = row.numel()
        speeds = source * 1e9 / encode_ns, source * 1e9 / decode_ns
        return (frame.numel() - HEADER_BYTES) / source, speeds


def _room(names: list[str], dtype: str, nbytes: int, device: torch.device) -> int:
    """Return the most bytes that a trial of codecs takes: the sample, a frame, and the codec's own."""
    most = max(scratch_bytes(name, dtype, nbytes, device) for name in names)
    return 2 * nbytes + HEADER_BYTES + most
