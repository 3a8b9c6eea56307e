"""Computing speed of a device, measured with torch, as a roofline model needs it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any, Final

import torch

from penstock.lab import zoo
from penstock.plan.machine import PRODUCT_SIDES, Compute

ROUND_S: Final = 0.3
"""Duration for which one thing is repeated; the best or the median of its rounds counts."""
_LONG_S: Final = 0.02
"""Time of a matrix product that is large enough."""
_SIDES: Final = (512, 1024, 2048, 4096, 8192, 16384)
_STREAM_FLOATS: Final = {"cpu": 1 << 24, "cuda": 1 << 28}
_LOAD: Final[dict[str, Any]] = {"image_size": 96}
_BATCH: Final = {"cpu": 8, "cuda": 128}
_CONVOLUTIONS: Final = ((64, 64, 3, 56), (256, 64, 1, 56), (256, 256, 3, 14), (64, 128, 3, 28))
"""Convolutions (input channels, output channels, kernel, side of the map) of ResNets and VGGs."""
_LINEAR: Final = (1024, 4096)
"""Input and output features of a transformer's layer."""
_LAYERS: Final = 8
"""Layers used in turn, so that the weights of each come from memory and not from a cache."""

Wait = Callable[[], None]


def device() -> torch.device:
    """Return the device that a session would use: CUDA if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_bytes(where: torch.device) -> int:
    """Return the memory of a CUDA device; 0 for the CPU, which uses host memory."""
    return torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else 0


def measure(where: torch.device) -> Compute:
    """Measure peak arithmetic, the share of it that layers reach, memory bandwidth, and launches."""
    wait = _waiter(where)
    layers = _layer_flops(where, wait)
    # elsewhere the launch of a small product takes longer than the product
    products = _product_flops(wait) if where.type == "cpu" else []
    # some algorithms save multiplications
    peak = max(_peak_flops(where, torch.float32, wait), *layers, *products)
    return Compute(
        float32_flops_per_s=peak,
        half_flops_per_s=_peak_flops(where, torch.bfloat16, wait),
        efficiency=statistics.median(layers) / peak,
        memory_bytes_per_s=_stream(where, wait),
        operator_s=_launch_s(where, wait),
        product_efficiency=_shares(products, peak),
    )


class Load:
    """A network in training, to be timed with and without simultaneous transfers."""

    def __init__(self, where: torch.device) -> None:
        """Build the network: many operators, some bound by arithmetic and some by memory."""
        self._wait = _waiter(where)
        self._network = zoo.build("resnet18", **_LOAD).to(where)
        self._batch = zoo.example_batch(self._network, _BATCH[where.type], device=where)

    def run(self, seconds: float) -> float:
        """Train for about ``seconds``; return the median seconds of a step."""
        times: list[float] = []
        begun = time.perf_counter()
        while not times or time.perf_counter() - begun < seconds:
            start = time.perf_counter()
            self._network(self._batch.inputs, self._batch.targets).backward()
            self._network.zero_grad()
            self._wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def copies(where: torch.device, nbytes: int) -> tuple[float, float]:
    """Return the best bytes per second from a CUDA device to pinned memory, and back."""
    wait = _waiter(where)
    here = torch.empty(nbytes, dtype=torch.uint8, device=where)
    there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    out_s = _best_s(lambda: there.copy_(here, non_blocking=True), wait)
    back_s = _best_s(lambda: here.copy_(there, non_blocking=True), wait)
    return nbytes / out_s, nbytes / back_s


def _waiter(where: torch.device) -> Wait:
    if where.type == "cuda":
        return lambda: torch.cuda.synchronize(where)
    return lambda: None


@contextmanager
def _no_quicker_formats() -> Iterator[None]:
    """Disable TF32 inside the block, so that float32 is computed as such."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _peak_flops(where: torch.device, dtype: torch.dtype, wait: Wait) -> float:
    best = 0.0
    with _no_quicker_formats():
        for side in _SIDES:
            left, right = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
            took_s = _best_s(lambda a=left, b=right: a @ b, wait)  # type: ignore[misc]
            best = max(best, 2 * side**3 / took_s)
            if took_s > _LONG_S:
                break
    return best


def _layer_flops(where: torch.device, wait: Wait) -> list[float]:
    """Return operations per second of typical layers, in forward and backward."""
    found = []
    batch = _BATCH[where.type]
    with _no_quicker_formats():
        for channels, out, kernel, side in _CONVOLUTIONS:
            layer = torch.nn.Conv2d(channels, out, kernel, padding=kernel // 2, device=where)
            images = torch.randn(batch, channels, side, side, device=where, requires_grad=True)
            flops = 6 * batch * out * side * side * channels * kernel**2
            found.append(flops / min(_both_ways_s([layer], images, wait)))
        linear = torch.nn.Linear(*_LINEAR, device=where)
        inputs = torch.randn(64 * batch, _LINEAR[0], device=where, requires_grad=True)
        flops = 6 * 64 * batch * _LINEAR[0] * _LINEAR[1]
        found.append(flops / min(_both_ways_s([linear], inputs, wait)))
    return found


def _product_flops(wait: Wait) -> list[float]:
    """Return operations per second of linear layers, both ways, for ``PRODUCT_SIDES`` rows."""
    found = []
    layers = [torch.nn.Linear(*_LINEAR, bias=False) for _ in range(_LAYERS)]
    for rows in PRODUCT_SIDES:
        inputs = torch.randn(rows, _LINEAR[0], requires_grad=True)
        took_s = statistics.median(_both_ways_s(layers, inputs, wait))
        found.append(6 * rows * _LINEAR[0] * _LINEAR[1] / took_s)
    return found


def _shares(rates: Sequence[float], peak: float) -> tuple[float, ...]:
    """Return rates for ``PRODUCT_SIDES`` as fractions of the peak, with four digits.

    More rows are never counted as slower, nor as taking less time in all.
    """
    found: list[float] = []
    for rate, rows, fewer in zip(rates, PRODUCT_SIDES, (1, *PRODUCT_SIDES), strict=False):
        share = float(f"{rate / peak:.4g}")
        if found:
            share = min(max(share, found[-1]), found[-1] * rows / fewer)
        found.append(share)
    return tuple(found)


def _both_ways_s(
    layers: Sequence[torch.nn.Module], inputs: torch.Tensor, wait: Wait
) -> list[float]:
    """Return the seconds of forward and backward, with each layer in turn."""
    slope = torch.ones_like(layers[0](inputs))
    turns = cycle(layers)

    def work() -> None:
        layer = next(turns)
        layer.zero_grad()
        layer(inputs).backward(slope)

    return _times_s(work, wait)


def _stream(where: torch.device, wait: Wait) -> float:
    count = _STREAM_FLOATS[where.type]
    left, right, total = (torch.ones(count, device=where) for _ in range(3))
    return 3 * 4 * count / _best_s(lambda: torch.add(left, right, out=total), wait)


def _launch_s(where: torch.device, wait: Wait) -> float:
    """Return the seconds of a tiny operator in a sequence of them."""
    small = torch.ones(1, device=where)
    count = 1000

    def many() -> None:
        for _ in range(count):
            small.add_(1)

    return _best_s(many, wait) / count


def _best_s(work: Callable[[], object], wait: Wait) -> float:
    return min(_times_s(work, wait))


def _times_s(work: Callable[[], object], wait: Wait) -> list[float]:
    """Return the seconds of several runs, after one to warm up."""
    work()
    wait()
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < 3 or time.perf_counter() - begun < ROUND_S:
        start = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - start)
    return found
