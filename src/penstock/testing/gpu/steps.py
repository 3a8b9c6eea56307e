"""Step time and device memory with offloaded activations, compared with the same step without.

All modes train one network in one process, in alternating steps, and every time is a ratio to the plain
step of the same round. The bound follows from the speeds of link and flash, measured in this run. What
does not fit the budget has to leave in forward, and comes back in backward: so forward takes no less than
the copies out, and backward no less than those back. Flash does one thing at a time: a step takes no
less than its writes and its reads together.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

import penstock
from penstock.core.units import GIB, MIB
from penstock.lab import zoo
from penstock.observe import Stage, Stall

Modes: TypeAlias = Mapping[str, Callable[[], AbstractContextManager[Any]]]
"""Contexts of a step, by the name of the mode."""
WARM_UP: Final = 4
"""Number of steps under a session before timing, in which it profiles, plans, and becomes steady."""


@dataclass(frozen=True)
class TrainingJob:
    """A network in training.

    Attributes:
        network: Name in :mod:`penstock.lab.zoo`.
        batch: Number of samples.
        overrides: Changes of its configuration.
        dtype: Type of autocast; float32 for none.
        size: Size: as published, or tiny.
    """

    network: str
    batch: int
    overrides: dict[str, Any]
    dtype: torch.dtype
    size: Literal["full", "tiny"] = "full"


JOBS: Final = {
    "resnet50": TrainingJob("resnet50", 256, {"image_size": 224}, torch.float32),
    "gpt2": TrainingJob("gpt2", 24, {"sequence_length": 1024, "dropout": 0.0}, torch.bfloat16),
}


class NetworkTraining:
    """One network on the current device, a step at a time.

    Attributes:
        network: The network.
        batch_size: Number of samples in a step.
        optimizer: SGD without momentum, which has no state.
        forward_s: Device time of the last step's forward, in seconds.
    """

    forward_s: float = 0.0

    def __init__(self, job: TrainingJob, batch_size: int) -> None:
        """Build the network and one batch for all steps."""
        torch.manual_seed(0)
        self.batch_size = batch_size
        self.network = zoo.build(job.network, size=job.size, **job.overrides).to("cuda")
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)
        self._batch = zoo.example_batch(self.network, batch_size, device="cuda")
        self._autocast = job.dtype is torch.bfloat16

    def step(self) -> tuple[float, int]:
        """Train one step; return seconds and the peak of allocated device memory."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        events[0].record()
        with torch.autocast("cuda", torch.bfloat16, enabled=self._autocast):
            loss = self.network(*self._batch)
        events[1].record()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        self.forward_s = events[0].elapsed_time(events[1]) / 1e3
        return time.perf_counter() - start, torch.cuda.max_memory_allocated()

    def kept(self, rounds: int = 0) -> tuple[int, float]:
        """Return what a session costs that offloads nothing, after a step.

        Args:
            rounds: Number of steps to measure, in turns with plain ones.

        Returns:
            The peak of the bytes that autograd holds, and the median ratio to the plain step of the same
            round; 0 without rounds.
        """
        ratios = []
        with penstock.offload(self.network, policy="keep") as session:
            self.step()
            saved = session.budget.peak_bytes
            self.step()
            for _ in range(rounds):
                with session.paused():
                    plain_s, _ = self.step()
                ratios.append(self.step()[0] / plain_s)
        return saved, statistics.median(ratios) if ratios else 0.0


def fitting_batch(job: TrainingJob, *, wanted: int, most_saved_bytes: int) -> int:
    """Return the largest batch up to ``wanted`` for which autograd saves up to ``most_saved_bytes``."""
    small = min(wanted, 4)
    each = max(1, NetworkTraining(job, small).kept()[0] // small)
    return max(1, min(wanted, most_saved_bytes // each))


def measure(
    training: NetworkTraining,
    *,
    budget_share: float,
    host_memory: int,
    flash: str | tuple[str, ...],
    rounds: int,
    end_s: float,
    settings: Mapping[str, Any] | None = None,
    more_modes: Callable[[zoo.Network, penstock.Session], Modes] = lambda *_: {},
) -> dict[str, Any]:
    """Train under a budget, alternating with plain steps; return figures with units in their names.

    Args:
        training: The training.
        budget_share: Budget as a share of the bytes that autograd saves.
        host_memory: Bytes of pinned host memory.
        flash: A directory, or ``()`` to offload to host memory only.
        rounds: Number of steps of each mode.
        end_s: Moment after which no round begins, by ``time.monotonic``.
        settings: Settings of the session that override those of the arguments.
        more_modes: Function that returns further modes; ``session.paused`` disables a session.
    """
    for _ in range(2):
        training.step()
    saved, kept_ratio = training.kept(rounds)
    chosen: dict[str, Any] = {
        "device_memory": max(1, int(saved * budget_share)),
        "host_memory": host_memory,
        "flash": flash,
        **(settings or {}),
    }
    with penstock.offload(training.network, training.optimizer, **chosen) as session:
        for _ in range(WARM_UP):
            training.step()
        modes: Modes = {
            "plain": session.paused,
            "penstock": nullcontext,
            **more_modes(training.network, session),
        }
        figures = {"saved_bytes": saved, "batch": training.batch_size, "kept_ratio": kept_ratio}
        return figures | _compare(session, training, modes, rounds, end_s)


def _compare(
    session: penstock.Session, training: NetworkTraining, modes: Modes, rounds: int, end_s: float
) -> dict[str, Any]:
    session.budget.reset_peak()
    samples: dict[str, list[tuple[float, int]]] = {mode: [] for mode in modes}
    forward_s: list[float] = []
    before = session.recorder.snapshot()
    for _ in range(rounds):
        for mode, context in modes.items():
            with context():
                samples[mode].append(training.step())
            if mode == "plain":
                forward_s.append(training.forward_s)
        if time.monotonic() > end_s:
            break
    done = len(samples["plain"])
    after = session.recorder.snapshot()
    figures: dict[str, Any] = {
        mode: _figures_of(times, samples["plain"]) for mode, times in samples.items()
    }
    moved = {
        f"{stage}.{tier}": (flow.nbytes - before.flow(stage, tier).nbytes) // done
        for (stage, tier), flow in after.flows.items()
        if stage in (Stage.COPY_OUT, Stage.COPY_IN, Stage.WRITE, Stage.READ)
    }
    machine = session.planner.machine
    stores: Any = session._stores
    out, back = stores._accelerator.mover.measure()
    figures |= {
        "rounds": done,
        "budget_bytes": session.budget.limit_bytes,
        "peak_charged_bytes": session.budget.peak_bytes,
        "moved_bytes_per_step": moved,
        "stall_s_per_step": (after.stall_ns - before.stall_ns) / 1e9 / done,
        "stalls_s_per_step": {
            cause: (stall.total_ns - _total_ns(before.stalls.get(cause))) / 1e9 / done
            for cause, stall in after.stalls.items()
        },
        "codecs": sorted({each.codec for each in session.plan.decisions} - {""})
        if session.plan
        else [],
        "recomputed": len(session.plan.recomputed) if session.plan else 0,
        "link_out_bytes_per_s": out,
        "link_in_bytes_per_s": back,
        "plain_forward_s": statistics.median(forward_s),
        "foretold_step_s": session.planner.foreseen and session.planner.foreseen.step_ns / 1e9,
    }
    if session.config.flash:
        figures |= {
            "flash_write_bytes_per_s": machine.flash_write_bytes_per_s,
            "flash_read_bytes_per_s": machine.flash_read_bytes_per_s,
        }
    figures["bound_ratio"] = _bound(figures)
    return figures


def _total_ns(stall: Stall | None) -> int:
    return 0 if stall is None else stall.total_ns


def _figures_of(mine: list[tuple[float, int]], plain: list[tuple[float, int]]) -> dict[str, Any]:
    ratios = [one[0] / other[0] for one, other in zip(mine, plain, strict=True)]
    return {
        "step_s": statistics.median(seconds for seconds, _ in mine),
        "ratio_to_plain": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "peak_allocated_bytes": max(nbytes for _, nbytes in mine),
    }


def _bound(figures: Mapping[str, Any]) -> float:
    """Return the least ratio to the plain step that link and flash allow for these bytes."""
    moved = figures["moved_bytes_per_step"]

    def seconds(stage: str, speed: str) -> float:
        nbytes = sum(size for name, size in moved.items() if name.startswith(f"{stage}."))
        return float(nbytes / figures[f"{speed}_bytes_per_s"]) if nbytes else 0.0

    plain_s, forward_s = float(figures["plain"]["step_s"]), float(figures["plain_forward_s"])
    on_link_s = max(forward_s, seconds("copy_out", "link_out"))
    on_link_s += max(plain_s - forward_s, seconds("copy_in", "link_in"))
    on_flash_s = seconds("write", "flash_write") + seconds("read", "flash_read")
    return max(on_link_s, on_flash_s) / plain_s


def pinned_bytes() -> int:
    """Return the bytes that a session may pin here: up to 16 GiB and a quarter of the memory."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(64 * MIB, min(16 * GIB, physical // 4))
