"""G10 (MICRO 2023) on paper: its machine and batches, with our tensors and kernel times and with its own.

Three times over: what PyTorch saves, timed by our roofline; the same with all of its computing slower, so
that the step takes as long as G10 traced it; and the tensors and kernels of G10's artifact
(``_papers_artifact.py``), which are the workload that its own figures are of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import _papers_artifact
from _papers_paper import Line, OnPaper, percent, took

from penstock.plan import Machine


@dataclass(frozen=True)
class Traced:
    """What G10's artifact holds of one network (its directories ``results`` and ``example_results``)."""

    batch: int
    flashneuron: float
    """What FlashNeuron reaches there of the ideal speed."""
    g10: float
    """What G10 does."""
    traced_s: float
    """The sum of the times of all kernels of a step, traced on an A100: its ideal."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """What its network has in place of the zoo's default."""


G10 = {
    "bert-base": Traced(256, 0.713, 0.997, 7.285, {"sequence_length": 128}),
    "resnet152": Traced(1280, 0.642, 0.984, 112.589),
    "senet154": Traced(1024, 0.533, 0.934, 132.870),
}
POLICIES = ("keep", "vdnn-dyn", "flashneuron", "lifetime", "recompute", "auto")
OF_BOUND = 0.95
"""What ``auto`` is to reach of the most that any plan can."""


def margin(name: str) -> float:
    """Half of what lies between the nearest two of G10's three shares: it tells them from each other."""
    shares = sorted((getattr(one, name) for one in G10.values()), reverse=True)
    return min(more - less for more, less in pairwise(shares)) / 2


def measure(*, quick: bool) -> dict[str, Any]:
    found = {}
    for name in () if quick else G10:
        with took(f"{name}, as in G10"):
            found[name] = in_its_setting(name)
    return found


def in_its_setting(name: str) -> dict[str, Any]:
    machine, known = Machine.preset("a100-g10"), G10[name]
    paper = OnPaper(name, machine, known.overrides)
    theirs = OnPaper(name, machine, known={known.batch: _papers_artifact.profile(name)})
    roofline_s = paper.run("keep", known.batch)["ideal_s"]
    slower = known.traced_s / roofline_s
    traced = OnPaper(name, slowed(machine, slower), known.overrides)
    return {
        "roofline_s": roofline_s,
        "traced_s": known.traced_s,
        "slower": round(slower, 2),
        "roofline": runs(paper, known.batch),
        "traced": runs(traced, known.batch),
        "artifact": runs(theirs, known.batch),
    }


def runs(paper: OnPaper, batch: int) -> dict[str, Any]:
    return {
        "saved_bytes": paper.profile(batch).saved_bytes,
        "most_share": paper.most_share(batch),
        "policies": {one: paper.run(one, batch) for one in POLICIES},
    }


def slowed(machine: Machine, slower: float) -> Machine:
    """The same with a device that takes so many times as long for everything."""
    one = machine.compute
    assert one is not None
    compute = replace(
        one,
        float32_flops_per_s=one.float32_flops_per_s / slower,
        half_flops_per_s=one.half_flops_per_s / slower,
        memory_bytes_per_s=one.memory_bytes_per_s / slower,
        operator_s=one.operator_s * slower,
    )
    return replace(machine, compute=compute)


# -- beside the paper ---------------------------------------------------------------------------------


def lines(found: dict[str, Any]) -> Iterator[Line]:
    for name, row in found.items():
        what = f"{name}, batch {G10[name].batch}"
        if row["roofline"]["policies"]["keep"]["feasible"]:
            saved = row["roofline"]["saved_bytes"] / 1e9
            ours = f"{saved:.0f} GB are saved: all fits, and there is nothing to plan"
            yield Line(f"{what}, PyTorch's tensors", "", ours, None)
        else:
            line = _as_in_g10(name, f"{what}, roofline", "flashneuron", row["roofline"])
            yield replace(line, within=None, aim="")
            yield _auto(name, f"{what}, roofline", row["roofline"])
            yield _as_in_g10(name, f"{what}, kernels as traced", "flashneuron", row["traced"])
            yield _auto(name, f"{what}, kernels as traced", row["traced"])
        theirs = f"{what}, G10's kernels and tensors"
        yield _as_in_g10(name, theirs, "flashneuron", row["artifact"])
        yield _as_in_g10(name, theirs, "lifetime", row["artifact"])
        yield _auto(name, theirs, row["artifact"])


def _as_in_g10(name: str, what: str, policy: str, found: dict[str, Any]) -> Line:
    system = {"flashneuron": "FlashNeuron", "lifetime": "G10"}[policy]
    share, points = getattr(G10[name], system.lower()), margin(system.lower())
    ours = found["policies"][policy]
    return Line(
        f"{what}: {policy}'s share of ideal",
        f"{percent(share)} by {system}",
        percent(ours["share_of_ideal"]) if ours["feasible"] else "does not fit",
        ours["feasible"] and abs(ours["share_of_ideal"] - share) <= points,
        f"within {100 * points:.2f} points",
    )


def _auto(name: str, what: str, found: dict[str, Any]) -> Line:
    auto, most = found["policies"]["auto"], found["most_share"]
    share = auto["share_of_ideal"]
    return Line(
        f"{what}: auto's share of ideal",
        f"{percent(G10[name].g10)} by G10",
        f"{percent(share)}; {percent(share / most)} of the {percent(most)} that no plan exceeds"
        if auto["feasible"]
        else "does not fit",
        auto["feasible"] and share >= OF_BOUND * most,
        "at least 95 % of the bound",
    )
