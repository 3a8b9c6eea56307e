"""The steps that G10's artifact simulates, as profiles: its kernels, its tensors, its times on an A100.

The artifact (github.com/platformxlab/G10, commit de2c8c6, Apache License 2.0) builds the kernels of a
step and the tensors that each of them reads and writes from a description of the network, and reads what
every kernel took from traces. ``_papers_artifact.json`` was derived from what its program says of that
(``statistics/kernels.config``) for the three batches in ``_papers_g10.py``. To derive it again, build the
artifact, run its three configurations, and

    python benchmarks/macro/_papers_artifact.py G10/results > benchmarks/macro/_papers_artifact.json

A tensor that is made in forward and read in backward is a slot: saved when the last kernel of forward
that uses it has ended, needed when the first of backward begins. All else is on its way.
"""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from penstock.lab.dry.profile import add_device_memory
from penstock.plan import PassProfile, Profile, SlotKey, SlotProfile, Transient

DERIVED = Path(__file__).with_suffix(".json")
RUNS = {
    "bert-base": "BERT_Base/256-FlashNeuron",
    "resnet152": "ResNet152/1280-FlashNeuron",
    "senet154": "SENet154/1024-FlashNeuron",
}
PAGE_BYTES = 4096
"""The artifact rounds tensors up to pages."""
CYCLES_PER_US = 1200
"""Of its GPU, 1.2 GHz: it tells times in cycles."""
LOSS = "makeLoss"
"""The first kernel of backward."""


def profile(network: str) -> Profile:
    """Of the whole device, without operators: nothing can be computed again."""
    known = json.loads(DERIVED.read_text(encoding="utf-8"))["networks"][network]
    at_ns = [round(1000 * us) for us in accumulate(known["kernels_us"], initial=0)]
    turn = known["first_of_backward"]
    slots = tuple(
        SlotProfile(
            key=SlotKey(f"tensor{i}", 0, pages * PAGE_BYTES),
            pass_index=0,
            saved_at_ns=at_ns[last + 1],
            needed_at_ns=at_ns[first],
            kind="tensor",
            held_elsewhere=False,
            dtype="float32",
        )
        for i, (pages, last, first) in enumerate(known["slots"])
    )
    others = tuple(
        Transient(when_ns, pages * PAGE_BYTES)
        for when_ns, pages in zip(at_ns, [*known["others_pages"], 0], strict=True)
    )
    step = Profile("cuda", slots, (PassProfile(0, 0, at_ns[turn], at_ns[-1]),))
    return add_device_memory(step, known["fixed_pages"] * PAGE_BYTES, others)


@dataclass
class _Tensor:
    """One of the artifact's, and the kernels that use it, in order."""

    pages: int
    fixed: bool
    uses: list[int]


def derived(kernels: str) -> dict[str, Any]:
    """What a profile is made of, from the text of ``kernels.config``."""
    took, turn, tensors = _read(kernels)
    fixed = sum(one.pages for one in tensors if one.fixed)
    moving = [one for one in tensors if not one.fixed]
    slots = sorted(
        (
            (one.pages, max(k for k in one.uses if k < turn), min(k for k in one.uses if k >= turn))
            for one in moving
            if one.uses[0] < turn <= one.uses[-1]
        ),
        key=lambda slot: slot[1],
    )
    needs = sorted({first for _, _, first in slots})
    others = [0] * len(took)
    for one in moving:
        for first, last in _on_its_way(one.uses, turn, needs):
            for k in range(first, last + 1):
                others[k] += one.pages
    return {
        "first_of_backward": turn,
        "fixed_pages": fixed,
        "kernels_us": [round(cycles / CYCLES_PER_US, 1) for cycles in took],
        "others_pages": others,
        "slots": slots,
    }


def _on_its_way(uses: list[int], turn: int, needs: list[int]) -> Iterator[tuple[int, int]]:
    """From which kernel to which a tensor is there, but for when it is a slot.

    A slot is taken to be freed when the next one is needed; if it is used after that, it is there on.
    """
    if not uses[0] < turn <= uses[-1]:
        yield uses[0], uses[-1]
        return
    yield uses[0], max(k for k in uses if k < turn)
    later = bisect_right(needs, min(k for k in uses if k >= turn))
    if later < len(needs) and needs[later] <= uses[-1]:
        yield needs[later], uses[-1]


def _read(kernels: str) -> tuple[list[int], int, list[_Tensor]]:
    """Cycles of each kernel, which is the first of backward, and the tensors in the order of use."""
    took: list[int] = []
    turn = -1
    tensors: dict[int, _Tensor] = {}
    for line in kernels.splitlines():
        if line.startswith("Kernel ID:") and line.endswith(f"Name: {LOSS}"):
            turn = len(took)
        elif line.startswith("Execution Time:"):
            took.append(int(line.split()[-1]))
        elif found := re.match(r"tensor(\d+) .*\(global\)\?: (\d), Size in byte: (\d+),", line):
            name, fixed, nbytes = map(int, found.groups())
            tensors.setdefault(name, _Tensor(nbytes // PAGE_BYTES, bool(fixed), []))
            tensors[name].uses.append(len(took) - 1)
    return took, turn, list(tensors.values())


if __name__ == "__main__":
    runs = {
        name: derived((Path(sys.argv[1]) / run / "statistics/kernels.config").read_text("utf-8"))
        for name, run in RUNS.items()
    }
    source = "derived from github.com/platformxlab/G10 at de2c8c6, Apache License 2.0"
    print(json.dumps({"source": source, "networks": runs}, separators=(",", ":")))
