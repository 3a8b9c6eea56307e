"""vDNN (MICRO 2016) on paper: average memory, VGG-16 at batch 256, and VGGs of up to 416 layers.

Static baseline
    What a network-wide allocation takes: all feature maps at once, the most that comes and goes (maps
    on their way, gradients of maps), the largest workspace of the fastest convolutions, weights and their
    gradients. It is there all the time, so its average is the same.
Managed pool
    Device memory but for weights and their gradients, which vDNN does not move. The maps of the
    classifier's layers are in it, in the baseline as well; they are hundredths of it.
Average
    By layer: the mean of one reading for each layer and direction, as vDNN's authors took them
    (``_papers_layers``); it is judged. By time: the mean over the time of the replayed step. By change:
    the mean of the levels, each counted once however long it lasted.
Joined
    As in vDNN, compute and copy are joined at the end of each layer of forward, X is free then (section
    3.2), and reads begin where its search says (``Plan.joined``). The same written behind, as our runtime
    does while there is room, stands beside it.
Pooling
    As cuDNN's: backward finds the maxima again from pooling's input and output, which are maps already.
    PyTorch's keeps indices of 64 bits besides; where they are counted, the line says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean
from typing import Any

import _papers_alexnet
from _papers_layers import Layer, by_layer
from _papers_paper import GIB, Line, OnPaper, figures, gib, percent, took

from penstock.plan import Machine, Profile
from penstock.plan.algorithms import fastest
from penstock.plan.assembly import assemble
from penstock.plan.convolution import with_algorithms
from penstock.plan.plan import Plan
from penstock.plan.policies.vdnn_all import every_map, offload_maps
from penstock.plan.policies.vdnn_conv import convolutions_maps
from penstock.plan.problem import PlanningProblem
from penstock.plan.profile import Event
from penstock.plan.replay import Replayed, replay

AVERAGES = {"alexnet": 0.89, "overfeat": 0.91, "googlenet": 0.95}
AVERAGES_BATCH = 128
POINTS = 0.03
NEED_BYTES = 28 * GIB
"""The paper's GB are those of its "12 GB" card."""
LOSS = 0.18
LOSS_POINTS = 0.06
LOSSES = {
    "vdnn-all (m)": "about 58 % on average (recalled)",
    "vdnn-conv (m)": "about 55 % on average (recalled)",
    "vdnn-all (p)": "",
    "vdnn-conv (p)": "",
    "vdnn-dyn": "",
}
VGG16_BATCHES = (64, 128, 256)
DEEP_BATCH = 32
DEEP = ("vgg116", "vgg216", "vgg316", "vgg416")
POLICIES = ("keep", "vdnn-all", "vdnn-conv", "vdnn-dyn", "flashneuron", "lifetime", "recompute")


def measure(*, quick: bool) -> dict[str, Any]:
    machine = Machine.preset("titan-x")
    names = ["alexnet"] if quick else list(AVERAGES)
    papers = {name: OnPaper(name, machine, adapted=with_cudnns_pooling) for name in names}
    found: dict[str, Any] = {
        "averages": {name: averages(paper) for name, paper in papers.items()},
        "alexnet of 2012": averages(of_2012(machine)),
        "losses": {
            f"{name}, {AVERAGES_BATCH}": losses(paper, AVERAGES_BATCH)
            for name, paper in papers.items()
        },
    }
    if not quick:
        with took("vgg16"):
            deepest = OnPaper("vgg16", machine, adapted=with_cudnns_pooling)
            found["losses"] |= {
                f"vgg16, {batch}": losses(deepest, batch) for batch in VGG16_BATCHES
            }
            found["vgg16-256"] = vgg16(deepest, 256)
        found["deep"] = {}
        for name in DEEP:
            with took(name):
                found["deep"][name] = deep(OnPaper(name, machine, adapted=with_cudnns_pooling))
    return found


# -- average memory -----------------------------------------------------------------------------------


def of_2012(machine: Machine) -> OnPaper:
    """AlexNet with its paper's widths and normalizations."""
    profile = with_cudnns_pooling(_papers_alexnet.profile(AVERAGES_BATCH, machine))
    return OnPaper("alexnet", machine, known={AVERAGES_BATCH: profile})


def static_bytes(profile: Profile, machine: Machine) -> int:
    """The static baseline's memory, with the fastest convolutions."""
    fast = with_algorithms(profile, machine, ())
    if not fast.transients:
        return fast.saved_bytes + fast.small_bytes
    passing = max(one.nbytes for one in profile.transients)
    return fast.fixed_bytes + fast.saved_bytes + passing + workspace_bytes(profile, machine)


def workspace_bytes(profile: Profile, machine: Machine) -> int:
    """The largest workspace of the fastest convolutions."""
    if machine.compute is None:
        return 0
    found = (fastest(one, machine.compute) for one in profile.operators if one.convolution)
    return max((one.workspace_bytes for one in found), default=0)


def averages(paper: OnPaper) -> dict[str, Any]:
    profile = paper.profile(AVERAGES_BATCH)
    fixed = profile.fixed_bytes
    baseline = static_bytes(profile, paper.machine)

    def down(average: float) -> float:
        return round(1 - (average - fixed) / (baseline - fixed), 4)

    rows = {}
    for plan in variants(paper, profile):
        run, layers = read_by_layer(paper, replace(plan, joined=True), AVERAGES_BATCH)
        assert run.trace is not None
        rows[plan.policy] = {
            **figures(plan, run, AVERAGES_BATCH),
            "layers": len(layers),
            "managed_down_by_layer": down(mean(layers.values())),
            "managed_down_by_time": down(run.average_bytes),
            "managed_down_by_change": down(mean(level for _, level in run.trace.memory["device"])),
            "whole_down_by_time": round(1 - run.average_bytes / baseline, 4),
            "managed_down_by_time_written_behind": down(
                paper.replayed(plan, AVERAGES_BATCH)["average_bytes"]
            ),
        }
    best = max(rows, key=lambda name: rows[name]["managed_down_by_layer"])
    return {
        "baseline_bytes": baseline,
        "fixed_bytes": fixed,
        "saved_bytes": profile.saved_bytes,
        "workspace_bytes": workspace_bytes(profile, paper.machine),
        "best": best,
        "policies": rows,
    }


def read_by_layer(paper: OnPaper, plan: Plan, batch: int) -> tuple[Replayed, dict[Layer, int]]:
    """A replay, and the bytes in use layer by layer."""
    profile = paper.profile(batch)
    run = replay(profile, plan, paper.machine, trace=True)
    assert run.trace is not None
    computed = with_algorithms(profile, paper.machine, plan.workspace_limits)
    return run, by_layer(computed, run.trace)


def with_cudnns_pooling(profile: Profile) -> Profile:
    """The profile without the indices of pooling. What was beside them is beside the slot before them."""
    gone = {
        i
        for i, slot in enumerate(profile.slots)
        if slot.kind.startswith("MaxPool") and slot.dtype == "int64"
    }
    beside = {Event.SAVE: list(profile.small_beside), Event.USE: list(profile.small_at_need)}
    before = None
    for _, event, i in profile.steps:
        if event is Event.FREE:
            continue
        if i not in gone:
            before = event, i
        elif before is not None:
            of, j = before
            beside[of][j] = max(beside[of][j], beside[event][i])
    left = {
        i: place for place, i in enumerate(i for i in range(len(profile.slots)) if i not in gone)
    }
    slots = (
        replace(
            slot,
            small_bytes=beside[Event.SAVE][i],
            small_bytes_at_need=beside[Event.USE][i],
            recipe=slot.recipe if slot.source in left else (),
            source=None if slot.source is None else left.get(slot.source),
        )
        for i, slot in enumerate(profile.slots)
        if i not in gone
    )
    return replace(profile, slots=tuple(slots))


def variants(paper: OnPaper, profile: Profile) -> Iterator[Plan]:
    """vDNN's static policies with memory-optimal (m) and performance-optimal (p) convolutions."""
    whole = PlanningProblem(profile, paper.machine, paper.budgets)
    for letter, lean in (("m", whole.leanest), ("p", ())):
        case = whole.with_limits(lean)
        for name, wanted in (
            ("all", every_map(case.layers)),
            ("conv", convolutions_maps(case.layers)),
        ):
            yield assemble(f"vdnn-{name} ({letter})", case, offload_maps(case, wanted))


# -- loss ---------------------------------------------------------------------------------------------


def losses(paper: OnPaper, batch: int) -> dict[str, float | None]:
    """Against the oracle, by policy, joined as in vDNN; None: it does not fit."""
    plans = [*variants(paper, paper.profile(batch)), paper.plan("vdnn-dyn", batch)]
    runs = {plan.policy: paper.replayed(replace(plan, joined=True), batch) for plan in plans}
    return {name: run["loss"] if run["feasible"] else None for name, run in runs.items()}


# -- VGG-16 and its stretches -------------------------------------------------------------------------


def vgg16(paper: OnPaper, batch: int) -> dict[str, Any]:
    machine, profile = paper.machine, paper.profile(batch)
    with_indices = OnPaper("vgg16", machine)
    joined = {
        "vdnn-dyn, joined": paper.plan("vdnn-dyn", batch),
        "vdnn-conv, stepped down, joined": stepped_down(paper, profile),
    }
    runs = {name: paper.run(name, batch) for name in (*POLICIES, "auto")}
    return {
        "baseline_bytes": static_bytes(profile, machine),
        "workspace_bytes": workspace_bytes(profile, machine),
        "baseline_with_indices_bytes": static_bytes(with_indices.profile(batch), machine),
        "policies": runs
        | {
            name: paper.replayed(replace(plan, joined=True), batch) for name, plan in joined.items()
        },
        "at_launch_bytes": {
            plan.policy: at_launch_bytes(paper, plan, batch)
            for plan in (*variants(paper, profile), *joined.values())
        },
        "most_share": paper.most_share(batch),
        "auto_with_indices": with_indices.run("auto", batch),
    }


def at_launch_bytes(paper: OnPaper, plan: Plan, batch: int) -> int:
    """Most bytes at once if nothing ever waits for room: what vDNN's profiling pass has to allocate."""
    endless = replace(plan.budgets, device_bytes=1024 * GIB)
    _, layers = read_by_layer(paper, replace(plan, budgets=endless, joined=True), batch)
    return max(layers.values())


def stepped_down(paper: OnPaper, profile: Profile) -> Plan:
    """What ``vdnn-dyn`` tries next where ``all`` does not fit with the fastest convolutions.

    The X of convolutions are offloaded; where a workspace does not fit, a slower algorithm is taken.
    """
    case = PlanningProblem(profile, paper.machine, paper.budgets)
    wanted = convolutions_maps(case.layers)
    tiers = offload_maps(case.with_limits(case.leanest), wanted).tiers
    fitted = case.fitted(tiers)
    return assemble("vdnn-conv, stepped down", fitted, offload_maps(fitted, wanted))


def deep(paper: OnPaper) -> dict[str, Any]:
    profile = paper.profile(DEEP_BATCH)
    return {
        "batch": DEEP_BATCH,
        "baseline_bytes": static_bytes(profile, paper.machine),
        "policies": {name: paper.run(name, DEEP_BATCH) for name in (*POLICIES, "auto")},
    }


# -- beside the paper ---------------------------------------------------------------------------------


def best_of(row: dict[str, Any]) -> dict[str, Any]:
    best: dict[str, Any] = row["policies"][row["best"]]
    return best


def down(row: dict[str, Any]) -> str:
    best = best_of(row)
    return (
        f"-{percent(best['managed_down_by_layer'])} by layer, by {row['best']}"
        f" (by time -{percent(best['managed_down_by_time'])}, by change"
        f" -{percent(best['managed_down_by_change'])}; by time the whole network"
        f" -{percent(best['whole_down_by_time'])}, and written behind"
        f" -{percent(best['managed_down_by_time_written_behind'])})"
    )


def loss_of(run: dict[str, Any]) -> str:
    return percent(run["loss"]) if run["feasible"] else "does not fit"


def loss_lines(found: dict[str, Any]) -> Iterator[Line]:
    networks = found["losses"]
    for policy, paper in LOSSES.items():
        by_network = {name: row[policy] for name, row in networks.items()}
        fitting = [loss for loss in by_network.values() if loss is not None]
        listed = ", ".join(
            f"{name}: {'does not fit' if loss is None else percent(loss)}"
            for name, loss in by_network.items()
        )
        over = "" if len(fitting) == len(by_network) else " over those that fit"
        yield Line(
            f"loss of {policy} in 12 GB, layers joined, by network and batch",
            paper,
            f"{percent(mean(fitting))} on average{over} ({listed})",
            None,
        )


def lines(found: dict[str, Any]) -> Iterator[Line]:
    for name, row in found["averages"].items():
        yield Line(
            f"average memory of {name}, batch {AVERAGES_BATCH}, managed pool",
            f"-{AVERAGES[name]:.0%}",
            down(row),
            abs(best_of(row)["managed_down_by_layer"] - AVERAGES[name]) <= POINTS,
            "by layer within 3 points",
        )
    yield Line(
        "the same of alexnet with the widths and normalizations of 2012",
        f"-{AVERAGES['alexnet']:.0%}",
        down(found["alexnet of 2012"]),
        None,
    )
    yield from loss_lines(found)
    if "vgg16-256" not in found:
        return
    row = found["vgg16-256"]
    yield Line(
        "VGG-16, batch 256: static need",
        "28 GB",
        f"{gib(row['baseline_bytes'])}, of it {gib(row['workspace_bytes'])} workspace (with PyTorch's"
        f" indices of pooling {gib(row['baseline_with_indices_bytes'])})",
        abs(row["baseline_bytes"] / NEED_BYTES - 1) <= 0.05,
        "within 5 %",
    )
    runs = row["policies"]
    first, following = runs["vdnn-dyn, joined"], runs["vdnn-conv, stepped down, joined"]
    ends = (following, first)
    yield Line(
        "VGG-16, batch 256, 12 GB: loss of vdnn-dyn's first two configurations, layers joined as in the"
        " paper",
        f"{LOSS:.0%}",
        f"{loss_of(first)} (every map), {loss_of(following)} (only the maps of convolutions)",
        all(one["feasible"] and abs(one["loss"] - LOSS) <= LOSS_POINTS for one in ends)
        and following["loss"] <= LOSS <= first["loss"],
        "18 % in between, neither more than 6 points away",
    )
    yield Line(
        "the same, written behind as our runtime does: not vDNN's rule",
        f"{LOSS:.0%}",
        loss_of(runs["vdnn-dyn"]),
        None,
    )
    auto = runs["auto"]
    yield Line(
        "the same: loss of auto",
        "",
        f"{percent(auto['loss'])}; no plan has less than {percent(1 - row['most_share'])} (with"
        f" PyTorch's indices of pooling {percent(row['auto_with_indices']['loss'])})",
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
