"""Three ways to save a job and to restore it, all measured in the same way.

``stall_s`` is the time for which the training loop waits; ``latency_s`` the time until the checkpoint is
on the device; ``restore_s`` the time for a running job to read it back, none of it in the page cache.
``torch.save`` returns before its bytes are on the device, so its latency includes the ``fsync`` that its
users leave out. The stall of a background save is the call plus the wait of the optimizer's next step;
``beside_s`` is the total delay of the steps meanwhile, which includes that stall.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import torch

from penstock import checkpoint
from penstock.checkpoint import Checkpointer, Saved, Saving
from penstock.lab.characterize.training import RankTraining

WAYS: Final = ("torch_save", "sync", "async")
_MAX_STEPS_WHILE_SAVING: Final = 50


def save(
    training: RankTraining, way: str, folder: Path, *, steps: int, step_s: float
) -> dict[str, Any]:
    """Save once.

    Args:
        training: The training to save.
        way: One of ``WAYS``.
        folder: A directory of this rank's own; its contents are replaced.
        steps: Number of steps that follow, the same on every rank.
        step_s: Time of a step without a save.

    Returns:
        ``stall_s``, ``latency_s``, ``nbytes``, and for ``async`` also ``beside_s`` and ``copied_bytes``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    made = _SAVES[way](training, folder, steps) if training.saves else _only_steps(training, steps)
    took = made.pop("steps_s")
    if way == "async" and training.saves:
        late = sum(max(0.0, each - step_s) for each in took)
        made["beside_s"] = made.pop("call_s") + late
    return made


def each_way(
    saves: Mapping[str, Sequence[Mapping[str, Any]]], step_s: float
) -> Iterator[tuple[str, int]]:
    """Yield each way and how many steps are to follow its save: in the background until it is durable.

    Args:
        saves: By way, what ``save`` has returned; the caller adds each save before it asks for the next.
        step_s: Time of a step.
    """
    for way in WAYS:
        steps = 0
        if way == "async":
            latency_s = saves["sync"][-1]["latency_s"]
            steps = min(_MAX_STEPS_WHILE_SAVING, 1 + math.ceil(latency_s / step_s))
        yield way, steps


def restore(training: RankTraining, way: str, folder: Path, *, wanted: str) -> dict[str, Any]:
    """Restore a saved state from a cold cache; return ``restore_s`` and ``same``: all bits are equal."""
    if not training.saves:
        return {}
    training.wipe()
    _evict_page_cache(folder)
    start = time.perf_counter()
    _LOADS[way](training, folder)
    seconds = time.perf_counter() - start
    return {"restore_s": seconds, "same": training.fingerprint() == wanted}


def _torch_save(training: RankTraining, folder: Path, steps: int) -> dict[str, Any]:
    path = folder / "state.pt"
    start = time.perf_counter()
    torch.save(
        {
            "model": training.module.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "step": training.count,
            "rng": torch.get_rng_state(),
        },
        path,
    )
    stall = time.perf_counter() - start
    for each in (path, folder):
        _sync(each)
    latency = time.perf_counter() - start
    return _only_steps(training, steps) | {
        "stall_s": stall,
        "latency_s": latency,
        "nbytes": path.stat().st_size,
    }


def _sync_save(training: RankTraining, folder: Path, steps: int) -> dict[str, Any]:
    with Checkpointer(folder, keep=1) as checkpoints:
        start = time.perf_counter()
        saved = cast(Saved, checkpoints.save(training.count, training.state()))
        seconds = time.perf_counter() - start
    return _only_steps(training, steps) | {
        "stall_s": seconds,
        "latency_s": seconds,
        "nbytes": saved.nbytes,
    }


def _async_save(training: RankTraining, folder: Path, steps: int) -> dict[str, Any]:
    with Checkpointer(folder, keep=1) as checkpoints:
        start = time.perf_counter()
        saving = cast(Saving, checkpoints.save(training.count, training.state(), wait=False))
        call = time.perf_counter() - start
        counted = saving.stall_s
        took = [training.step() for _ in range(steps)]
        held = saving.stall_s - counted
        saved = saving.wait()
    return {
        "stall_s": call + held,
        "latency_s": call + saved.seconds,
        "nbytes": saved.nbytes,
        "copied_bytes": saving.copied_bytes,
        "call_s": call,
        "steps_s": took,
    }


def _only_steps(training: RankTraining, steps: int) -> dict[str, Any]:
    return {"steps_s": [training.step() for _ in range(steps)]}


def _torch_load(training: RankTraining, folder: Path) -> None:
    state = torch.load(folder / "state.pt", weights_only=True)
    training.module.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])


def _load(training: RankTraining, folder: Path) -> None:
    (path,) = folder.glob("step-*")
    checkpoint.load(path, training.state())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _evict_page_cache(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for each in folder.rglob("*"):
        if each.is_file():
            fd = os.open(each, os.O_RDONLY)
            with suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


_SAVES: Final[dict[str, Callable[[RankTraining, Path, int], dict[str, Any]]]] = {
    "torch_save": _torch_save,
    "sync": _sync_save,
    "async": _async_save,
}
_LOADS: Final[dict[str, Callable[[RankTraining, Path], None]]] = {
    "torch_save": _torch_load,
    "sync": _load,
    "async": _load,
}
