"""By how much computing is later for each transfer: what the runtime itself takes, measured in training.

Bandwidth says how long bytes are under way. Beside that every write and every read takes work: it is
arranged in the thread that trains, memory is touched, and the threads that move the bytes, and make and
compare checksums, run on cores that want to compute. What that comes to is measured as a session has it:

1. A stack of linear layers, which saves one storage for each, trains under the policy ``all``. Steps
   without a session take turns with those.
2. What a step takes longer, but for the waits that a replay foretells, is the work of its transfers: in
   forward of its writes, in backward of its reads. Of both kinds of steps the quicker ones count.
3. Twice, with small and with large storages: so the work is told by transfer and by byte.
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
"""Bytes of each storage, and how many of them."""
LARGE: Final = (8 * MIB, 16)
FEATURES: Final = 512
"""Of each layer. Computing takes long enough to hide what a few GB/s move."""
_WARM_UP: Final = 4
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Work:
    """Of one direction: what makes computing later."""

    transfer_s: float
    """For each transfer."""
    per_byte_s: float
    """For each of its bytes, beside the former."""

    def beyond(self, known_s_per_byte: float) -> Work:
        """What there is of it beside so much for each byte."""
        return Work(self.transfer_s, max(0.0, self.per_byte_s - known_s_per_byte))

    def __str__(self) -> str:
        """As ``"120 µs and 0.05 ns/B"``."""
        return f"{format_duration(self.transfer_s)} and {self.per_byte_s * 1e9:.3g} ns/B"


class _Step(NamedTuple):
    """Seconds of its two parts."""

    forward: float
    backward: float


class Stack:
    """Layers in training, each of which saves ``nbytes``."""

    def __init__(self, nbytes: int, layers: int) -> None:
        """Build it. Values neither grow nor vanish on their way, or arithmetic would be slow."""
        self.nbytes = nbytes
        self.layers = layers
        made = [torch.nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(layers)]
        for layer in made:
            torch.nn.init.orthogonal_(layer.weight)
        self.network = torch.nn.Sequential(*made)
        self._rows = torch.randn(nbytes // FEATURES // _FLOAT_BYTES, FEATURES)

    def step(self) -> _Step:
        """Train."""
        begun = time.perf_counter()
        total = self.network(self._rows).sum()
        turned = time.perf_counter()
        total.backward()
        ended = time.perf_counter()
        self.network.zero_grad()
        return _Step(turned - begun, ended - turned)


def measure(directory: str, machine: Machine, seconds: float) -> tuple[Work, Work]:
    """Of writes to a flash tier in ``directory``, and of reads from it; in about so long.

    Args:
        directory: Where the tier is.
        machine: What else is known of this one, so that waits can be foretold.
        seconds: How long to measure, altogether.
    """
    small, large = (more(Stack(*size), directory, machine, seconds / 2) for size in (SMALL, LARGE))
    written, read = zip(small, large, strict=True)
    sizes = SMALL[0], LARGE[0]
    return affine(written, sizes), affine(read, sizes)


def more(stack: Stack, directory: str, machine: Machine, seconds: float) -> tuple[float, float]:
    """Seconds more that each write, and each read, of one stack makes a step take.

    The budget is half of what is saved, so that memory is given back and touched again, as in use.
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
        waits = _foretold_waits(session, machine)
    parts = zip(_quick(moving), _quick(plain), waits, counts, strict=True)
    written, read = ((one - alone - wait) / max(count, 1) for one, alone, wait, count in parts)
    return written, read


def _foretold_waits(session: Session, machine: Machine) -> _Step:
    """For room in forward, and for reads in backward, by the plan that is followed."""
    assert session.profile is not None
    assert session.plan is not None
    found = replay(session.profile, session.plan, machine)
    return _Step(found.budget_ns / 1e9, (found.demand_ns + found.late_ns) / 1e9)


def _quick(steps: list[_Step]) -> _Step:
    """Of each part, what a quarter of the steps do not take: what else a machine does only adds."""
    return _Step(*(sorted(part)[len(part) // 4] for part in zip(*steps, strict=True)))


def affine(more_s: tuple[float, float], sizes: tuple[int, int]) -> Work:
    """What is there for each transfer, and for each byte; neither is negative.

    Args:
        more_s: Of a small and of a large transfer.
        sizes: Their bytes.
    """
    (small_s, large_s), (small, large) = more_s, sizes
    per_byte_s = max(0.0, (large_s - small_s) / (large - small))
    transfer_s = small_s - per_byte_s * small
    if transfer_s < 0:
        return Work(0.0, max(0.0, large_s / large))
    return Work(transfer_s, per_byte_s)


def _moved(session: Session) -> list[int]:
    """How many writes and reads there were."""
    now = session.recorder.snapshot()
    return [now.flow(stage, "flash").count for stage in (Stage.WRITE, Stage.READ)]
