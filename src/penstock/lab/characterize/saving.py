"""Three ways to save a job, each measured in the same way, and restoring what was saved.

``stall_s`` is how long the training loop is held up; ``latency_s`` how long until the checkpoint is on
the device; ``restore_s`` how long until a job that is there has it again, with none of it in the page
cache. ``torch.save`` gives control back before its bytes are on the device, so its latency has the
``fsync`` that its users leave out. What is saved in the background stalls by the call, by what the next
step of the optimizer waits; ``beside_s`` is what the steps meanwhile took longer in all, that included.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import torch

from penstock import checkpoint
from penstock.checkpoint import Checkpointer, Saved, Saving
from penstock.lab.characterize.training import Training

WAYS: Final = ("torch_save", "sync", "async")


def save(
    training: Training, way: str, folder: Path, *, steps: int, step_s: float
) -> dict[str, Any]:
    """Save once.

    Args:
        training: What.
        way: One of ``WAYS``.
        folder: A directory of this rank's own; what is there is replaced.
        steps: How many steps follow, as on every rank.
        step_s: What one takes when nothing is saved.

    Returns:
        ``stall_s``, ``latency_s``, ``nbytes``, and of ``async`` ``beside_s`` and ``copied_bytes``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    made = _SAVES[way](training, folder, steps) if training.saves else _only_steps(training, steps)
    took = made.pop("steps_s")
    if way == "async" and training.saves:
        late = sum(max(0.0, each - step_s) for each in took)
        made["beside_s"] = made.pop("call_s") + late
    return made


def restore(training: Training, way: str, folder: Path, *, wanted: str) -> dict[str, Any]:
    """Restore what ``save`` has left, cold; ``restore_s``, and whether its bits are those wanted."""
    if not training.saves:
        return {}
    training.wipe()
    _drop(folder)
    start = time.perf_counter()
    _LOADS[way](training, folder)
    seconds = time.perf_counter() - start
    return {"restore_s": seconds, "same": training.fingerprint() == wanted}


def _torch_save(training: Training, folder: Path, steps: int) -> dict[str, Any]:
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


def _sync_save(training: Training, folder: Path, steps: int) -> dict[str, Any]:
    with Checkpointer(folder, keep=1) as checkpoints:
        start = time.perf_counter()
        saved = cast(Saved, checkpoints.save(training.count, training.state()))
        seconds = time.perf_counter() - start
    return _only_steps(training, steps) | {
        "stall_s": seconds,
        "latency_s": seconds,
        "nbytes": saved.nbytes,
    }


def _async_save(training: Training, folder: Path, steps: int) -> dict[str, Any]:
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


def _only_steps(training: Training, steps: int) -> dict[str, Any]:
    return {"steps_s": [training.step() for _ in range(steps)]}


def _torch_load(training: Training, folder: Path) -> None:
    state = torch.load(folder / "state.pt", weights_only=True)
    training.module.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])


def _load(training: Training, folder: Path) -> None:
    (path,) = folder.glob("step-*")
    checkpoint.load(path, training.state())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _drop(folder: Path) -> None:
    """Nothing of it is in the page cache afterwards."""
    for each in folder.rglob("*"):
        if each.is_file():
            fd = os.open(each, os.O_RDONLY)
            with suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def median(found: list[dict[str, Any]], name: str) -> float | None:
    """Of what several saves say; None if none of them says it."""
    values = [each[name] for each in found if each.get(name) is not None]
    return statistics.median(values) if values else None


_SAVES: Final[dict[str, Callable[[Training, Path, int], dict[str, Any]]]] = {
    "torch_save": _torch_save,
    "sync": _sync_save,
    "async": _async_save,
}
_LOADS: Final[dict[str, Callable[[Training, Path], None]]] = {
    "torch_save": _torch_load,
    "sync": _load,
    "async": _load,
}
