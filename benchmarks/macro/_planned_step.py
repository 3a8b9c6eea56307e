"""Requests to ``penstock plan`` for a step of the networks of the benchmarks of weights."""

import tempfile
from pathlib import Path

from penstock.cli import plan, plan_step


def request_of(call, words):
    """The request of the command.

    Args:
        call: Arguments of ``_weights_model.planned``, which makes the network.
        words: Options of the command, as on its line.
    """
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder, "network.py")
        network.write_text(
            "import _weights_model\n\n\ndef build(batch):\n"
            f"    return _weights_model.planned(*{tuple(call)!r})\n"
        )
        return plan_step.check_step(plan.parser().parse_args([f"{network}:build", *words.split()]))


def figures_of(step):
    """What a plan foretells of a step, beside what is measured of one."""
    return {
        "memory_bytes": step.memory.total,
        "step_s": step.replayed.step_ns / 1e9,
        "read_bytes": step.read_bytes,
        "written_bytes": step.written_bytes,
        "binds": step.bounds.binds,
    }


def beside(said, found):
    """What was said, and what was measured as a ratio to it."""
    ratios = {
        f"measured_of_{key}": found[key] / value
        for key, value in said.items()
        if found.get(key) is not None and value
    }
    return {**said, **ratios}
