"""Work of transfers: the delay of computing by each write and read, measured in training.

Bandwidth determines the time of a transfer. In addition every write and every read causes work: the
training thread submits it, memory is touched, and the threads that move bytes and compute checksums
compete for cores. This work is measured in a session:

1. A stack of linear layers, each of which saves one storage, trains under the policy ``all``,
   alternating with steps without a session.
2. The additional time of a step, minus the waits that a replay predicts, is the work of its transfers:
   of writes in forward, of reads in backward. The faster steps of both kinds count.
3. This is done with small and with large storages, to separate the work per transfer and per byte.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from penstock.api import Session, offload
from penstock.core.units import GIB, MIB, format_duration
from penstock.observe.recorder import Stage
from penstock.plan.machine import Machine
from penstock.plan.replay import replay

SMALL: Final = (MIB, 48)
"""Size and number of small storages."""
LARGE: Final = (8 * MIB, 16)
FEATURES: Final = 512
"""Number of features of each layer: computing takes long enough to hide transfers of a few GB/s."""
_WARM_UP: Final = 4
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class TransferWork:
    """Delay of computing by transfers in one direction."""

    transfer_s: float
    """Delay by each transfer."""
    per_byte_s: float
    """Additional delay by each byte."""

    def beyond(self, known_s_per_byte: float) -> TransferWork:
        """Return the work that exceeds a known delay per byte."""
        return TransferWork(self.transfer_s, max(0.0, self.per_byte_s - known_s_per_byte))

    def __str__(self) -> str:
        """Format such as ``"120 µs and 0.05 ns/B"``."""
        return f"{format_duration(self.transfer_s)} and {self.per_byte_s * 1e9:.3g} ns/B"


class _Step(NamedTuple):
    """Seconds of the two parts of a step."""

    forward: float
    backward: float


class LayerStack:
    """A network of layers, each of which saves ``nbytes``."""

    def __init__(self, nbytes: int, layers: int) -> None:
        """Build the network, such that values neither grow nor vanish, which would slow arithmetic."""
        self.nbytes = nbytes
        self.layers = layers
        made = [torch.nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(layers)]
        for layer in made:
            torch.nn.init.orthogonal_(layer.weight)
        self.network = torch.nn.Sequential(*made)
        self._rows = torch.randn(nbytes // FEATURES // _FLOAT_BYTES, FEATURES)

    def step(self) -> _Step:
        """Train one step."""
        begun = time.perf_counter()
        total = self.network(self._rows).sum()
        turned = time.perf_counter()
        total.backward()
        ended = time.perf_counter()
        self.network.zero_grad()
        return _Step(turned - begun, ended - turned)


def measure(directory: str, machine: Machine, seconds: float) -> tuple[TransferWork, TransferWork]:
    """Measure the work of writes to a flash tier, and of reads from it.

    Args:
        directory: Directory of the tier.
        machine: Other measurements of this machine, for the prediction of waits.
        seconds: Total duration, approximately.
    """
    small, large = (
        added_seconds(LayerStack(*size), directory, machine, seconds / 2) for size in (SMALL, LARGE)
    )
    written, read = zip(small, large, strict=True)
    sizes = SMALL[0], LARGE[0]
    return affine(written, sizes), affine(read, sizes)


def added_seconds(
    stack: LayerStack, directory: str, machine: Machine, seconds: float
) -> tuple[float, float]:
    """Measure the seconds that each write, and each read, of one stack adds to a step.

    The budget is half of the saved bytes, so that memory is freed and touched again, as in real use.
    """
    until = time.perf_counter() + seconds
    plain, moving = list[_Step](), list[_Step]()
    with offload(
        stack.network,
        device_memory=stack.layers * stack.nbytes // 2 + stack.nbytes,
        flash=directory,
        flash_capacity=GIB,
        floor=MIB,
        policy="all",
        codec="none",
    ) as session:
        for _ in range(_WARM_UP):
            stack.step()
        while not plain or time.perf_counter() < until:
            with session.paused():
                stack.step()
                plain.append(stack.step())
            stack.step()
            before = _moved(session)
            moving.append(stack.step())
            counts = [
                after - earlier for after, earlier in zip(_moved(session), before, strict=True)
            ]
        waits = _predicted_waits(session, machine)
    parts = zip(_quick(moving), _quick(plain), waits, counts, strict=True)
    written, read = ((one - alone - wait) / max(count, 1) for one, alone, wait, count in parts)
    return written, read


def _predicted_waits(session: Session, machine: Machine) -> _Step:
    """Return the predicted waits for memory in forward, and for reads in backward."""
    assert session.profile is not None
    assert session.plan is not None
    found = replay(session.profile, session.plan, machine)
    return _Step(found.budget_ns / 1e9, (found.demand_ns + found.late_ns) / 1e9)


def _quick(steps: list[_Step]) -> _Step:
    """Return the lower quartile of each part, because other load only adds time."""
    return _Step(*(sorted(part)[len(part) // 4] for part in zip(*steps, strict=True)))


def affine(more_s: tuple[float, float], sizes: tuple[int, int]) -> TransferWork:
    """Split the work into a part per transfer and a part per byte; neither is negative.

    Args:
        more_s: Work of a small and of a large transfer.
        sizes: Sizes of the transfers in bytes.
    """
    (small_s, large_s), (small, large) = more_s, sizes
    per_byte_s = max(0.0, (large_s - small_s) / (large - small))
    transfer_s = small_s - per_byte_s * small
    if transfer_s < 0:
        return TransferWork(0.0, max(0.0, large_s / large))
    return TransferWork(transfer_s, per_byte_s)


def _moved(session: Session) -> list[int]:
    """Return the numbers of writes and reads so far."""
    now = session.recorder.snapshot()
    return [now.flow(stage, "flash").count for stage in (Stage.WRITE, Stage.READ)]
