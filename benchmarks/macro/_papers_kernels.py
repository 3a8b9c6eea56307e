"""How long the ideal step of the model is, beside what others measured on the same card.

convnet-benchmarks (Soumith Chintala, https://github.com/soumith/convnet-benchmarks, the tables of its
README at commit b458aab6) timed four networks, forward and backward, on a Titan X with cuDNN 4, 32 bits.
vDNN measured with the same card and the same cuDNN. Nothing of the model is fitted to these figures: they
say what it is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from _papers_paper import GIB, Line, OnPaper
from _papers_vdnn import with_cudnns_pooling

from penstock.plan import Machine

MEASURED = {
    "alexnet": (128, 0.081),
    "overfeat": (128, 0.268),
    "vgg11": (64, 0.529),
    "googlenet": (128, 0.470),
}
"""Batch, and seconds of forward and backward."""


def measure(*, quick: bool) -> dict[str, Any]:
    machine = replace(Machine.preset("titan-x"), device_bytes=1024 * GIB)
    found = {}
    for name, (batch, seconds) in MEASURED.items():
        paper = OnPaper(name, machine, adapted=with_cudnns_pooling)
        ideal_s = paper.run("keep", batch)["ideal_s"]
        found[name] = {"batch": batch, "measured_s": seconds, "ideal_s": ideal_s}
        if quick:
            break
    return found


def lines(found: dict[str, Any]) -> Iterator[Line]:
    for name, row in found.items():
        yield Line(
            f"step of {name}, batch {row['batch']}, nothing moved: Titan X, cuDNN 4",
            f"{1e3 * row['measured_s']:.0f} ms, measured by convnet-benchmarks",
            f"{1e3 * row['ideal_s']:.0f} ms ({row['ideal_s'] / row['measured_s'] - 1:+.0%})",
            None,
        )
