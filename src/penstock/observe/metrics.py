"""Figures of a run under stable names, for a logger of a host: Weights & Biases, TensorBoard, MLflow."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.observe.clients import ON_FLASH
from penstock.observe.events import Stage
from penstock.observe.totals import StepTotals, Totals


def metrics(totals: Totals, steps: Sequence[StepTotals]) -> dict[str, float]:
    """Return the figures of the last ended step, or of the run so far before one has ended.

    Args:
        totals: Totals of the run.
        steps: Totals of ended steps, the last one last.
    """
    last = steps[-1].totals if steps else totals
    found = {
        "step_s": last.elapsed_ns / 1e9,
        "stall_s": last.stall_ns / 1e9,
        "copied_out_bytes": moved_bytes(last, Stage.COPY_OUT),
        "copied_in_bytes": moved_bytes(last, Stage.COPY_IN),
        "flash_written_bytes": moved_bytes(last, Stage.WRITE),
        "flash_read_bytes": moved_bytes(last, Stage.READ),
        "flash_written_total_bytes": moved_bytes(totals, Stage.WRITE),
    }
    found |= {f"{name}_peak_bytes": use.peak_bytes for name, use in last.memory.items()}
    return {f"penstock/{name.replace(' ', '_')}": float(value) for name, value in found.items()}


def moved_bytes(totals: Totals, stage: Stage) -> int:
    """Return the bytes of a stage; for flash those of every client."""
    on_flash = stage in (Stage.WRITE, Stage.READ)
    return sum(
        flow.nbytes
        for (each, tier), flow in totals.flows.items()
        if each is stage and (tier in ON_FLASH or not on_flash)
    )
