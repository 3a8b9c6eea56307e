"""vDNN (MICRO 2016) on paper: average memory, VGG-16 at batch 256, and VGGs of up to 416 layers.

Static baseline
    What a network-wide allocation takes: all feature maps at once, the most that comes and goes (maps
    on their way, gradients of maps), the largest workspace of the fastest convolutions, weights and their
    gradients. It is there all the time, so its average is the same.
Managed pool
    Device memory but for weights and their gradients, which vDNN does not move. The maps of the
    classifier's layers are in it, in the baseline as well; they are hundredths of it.
Average
    The mean over the time of the replayed step. vDNN joins compute and copy at the end of each layer, and
    frees X then (section 3.2); the replay, as our runtime, writes behind, and X stays until it is
    written. So the plan is replayed in the least device memory that it needs: there the next
    layer waits for the copies before it. The same in the whole card is beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from _papers_paper import GIB, Line, OnPaper, gib, percent, took

from penstock.plan import Machine, Profile
from penstock.plan.algorithms import fastest
from penstock.plan.assemble import assemble
from penstock.plan.case import Case
from penstock.plan.plan import Plan
from penstock.plan.policies.vdnn_all import every_map, offload_maps
from penstock.plan.policies.vdnn_conv import convolutions_maps

AVERAGES = {"alexnet": 0.89, "overfeat": 0.91, "googlenet": 0.95}
AVERAGES_BATCH = 128
POINTS = 0.03
NEED_BYTES = 28 * GIB
"""The paper's GB are those of its "12 GB" card."""
LOSS = 0.18
DEEP_BATCH = 32
DEEP = ("vgg116", "vgg216", "vgg316", "vgg416")
POLICIES = ("keep", "vdnn-all", "vdnn-conv", "vdnn-dyn", "flashneuron", "lifetime", "recompute")


def measure(*, quick: bool) -> dict[str, Any]:
    machine = Machine.preset("titan-x")
    names = ["alexnet"] if quick else list(AVERAGES)
    found: dict[str, Any] = {"averages": {name: averages(OnPaper(name, machine)) for name in names}}
    if not quick:
        with took("vgg16"):
            found["vgg16-256"] = vgg16(OnPaper("vgg16", machine), 256)
        found["deep"] = {}
        for name in DEEP:
            with took(name):
                found["deep"][name] = deep(OnPaper(name, machine))
    return found


# -- average memory -----------------------------------------------------------------------------------


def averages(paper: OnPaper) -> dict[str, Any]:
    profile = paper.profile(AVERAGES_BATCH)
    fixed = profile.fixed_bytes
    baseline = static_bytes(profile, paper.machine)
    rows = {}
    for name, whole_card, released in variants(paper, profile):
        run = paper.replayed(released, AVERAGES_BATCH)
        average = run["average_bytes"]
        behind = paper.replayed(whole_card, AVERAGES_BATCH)["average_bytes"]
        rows[name] = {
            **run,
            "device_budget_bytes": released.budgets.device_bytes,
            "managed_down": round(1 - (average - fixed) / (baseline - fixed), 4),
            "whole_down": round(1 - average / baseline, 4),
            "managed_down_in_12_gib": round(1 - (behind - fixed) / (baseline - fixed), 4),
        }
    best = max(rows, key=lambda name: rows[name]["managed_down"])
    return {
        "baseline_bytes": baseline,
        "fixed_bytes": fixed,
        "saved_bytes": profile.saved_bytes,
        "workspace_bytes": workspace_bytes(profile, paper.machine),
        "best": best,
        "policies": rows,
    }


def static_bytes(profile: Profile, machine: Machine) -> int:
    """The network-wide static allocation."""
    passing = max((one.nbytes for one in profile.transients), default=0)
    return profile.fixed_bytes + profile.saved_bytes + passing + workspace_bytes(profile, machine)


def workspace_bytes(profile: Profile, machine: Machine) -> int:
    """The largest of the fastest convolutions."""
    assert machine.compute is not None
    convolutions = (one for one in profile.operators if one.convolution is not None)
    return max(fastest(one, machine.compute).workspace_bytes for one in convolutions)


def variants(paper: OnPaper, profile: Profile) -> Iterator[tuple[str, Plan, Plan]]:
    """vDNN's static policies with memory-optimal (m) and performance-optimal (p) convolutions.

    Yields:
        Its name, its plan in the whole card, and the same in the least device memory that it needs.
    """
    whole = Case(profile, paper.machine, paper.budgets)
    for letter, lean in (("m", whole.leanest), ("p", ())):
        case = whole.leaning(lean)
        for name, wanted in (
            ("all", every_map(case.layers)),
            ("conv", convolutions_maps(case.layers)),
        ):
            choice = offload_maps(case, wanted)
            least = replace(paper.budgets, device_bytes=case.residency(choice).hard_bytes)
            tight = Case(profile, paper.machine, least, lean)
            policy = f"vdnn-{name} ({letter})"
            yield policy, assemble(policy, case, choice), assemble(policy, tight, choice)


# -- VGG-16 and its stretches -------------------------------------------------------------------------


def vgg16(paper: OnPaper, batch: int) -> dict[str, Any]:
    profile = paper.profile(batch)
    return {
        "baseline_bytes": static_bytes(profile, paper.machine),
        "without_workspace_bytes": static_bytes(profile, paper.machine)
        - workspace_bytes(profile, paper.machine),
        "workspace_bytes": workspace_bytes(profile, paper.machine),
        "policies": {name: paper.run(name, batch) for name in (*POLICIES, "auto")},
    }


def deep(paper: OnPaper) -> dict[str, Any]:
    profile = paper.profile(DEEP_BATCH)
    return {
        "batch": DEEP_BATCH,
        "baseline_bytes": static_bytes(profile, paper.machine),
        "policies": {name: paper.run(name, DEEP_BATCH) for name in (*POLICIES, "auto")},
    }


# -- beside the paper ---------------------------------------------------------------------------------


def lines(found: dict[str, Any]) -> Iterator[Line]:
    for name, row in found["averages"].items():
        best = row["policies"][row["best"]]
        yield Line(
            f"average memory of {name}, batch {AVERAGES_BATCH}, managed pool",
            f"-{AVERAGES[name]:.0%}",
            f"-{percent(best['managed_down'])} by {row['best']}"
            f" (whole network -{percent(best['whole_down'])}; freed late, in the whole card:"
            f" -{percent(best['managed_down_in_12_gib'])})",
            abs(best["managed_down"] - AVERAGES[name]) <= POINTS,
            "within 3 points",
        )
    if "vgg16-256" not in found:
        return
    row = found["vgg16-256"]
    yield Line(
        "VGG-16, batch 256: static need",
        "28 GB",
        f"{gib(row['baseline_bytes'])}, of it {gib(row['workspace_bytes'])} workspace",
        abs(row["baseline_bytes"] / NEED_BYTES - 1) <= 0.05,
        "within 5 %",
    )
    dyn, auto = (row["policies"][name] for name in ("vdnn-dyn", "auto"))
    yield Line(
        "VGG-16, batch 256, 12 GB: loss of vdnn-dyn",
        "18 %",
        percent(dyn["loss"]) if dyn["feasible"] else "does not fit",
        dyn["feasible"] and abs(dyn["loss"] - LOSS) <= 0.06,
        "within 6 points",
    )
    yield Line(
        "the same: loss of auto",
        "",
        percent(auto["loss"]) if auto["feasible"] else "does not fit",
        auto["feasible"] and auto["loss"] <= 0.05,
        "at most 5 %",
    )
    for name, one in found["deep"].items():
        fits = [policy for policy, run in one["policies"].items() if run["feasible"]]
        yield Line(
            f"{name}, batch {DEEP_BATCH}: who trains it in 12 GB",
            "vdnn",
            f"{', '.join(fits) or 'nobody'} (static need {gib(one['baseline_bytes'])})",
            "vdnn-dyn" in fits,
            "vdnn-dyn does",
        )
