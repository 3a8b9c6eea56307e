"""FlashNeuron (FAST 2021) on its own machine, and in the setting of G10 (MICRO 2023), on paper.

The largest batch of a policy is searched with few profiles, for those of deep networks take a while: the
least device memory that it needs is nearly affine in the batch, so the next batch to look at is where a
line through one that fits and one that does not meets the budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from _papers_paper import Line, OnPaper, percent, took

import _results
from penstock.plan import Budgets, CodecSample, Machine
from penstock.plan.case import Case, Choice
from penstock.plan.policies.flashneuron import choose as flashneurons_choice

NETWORKS: dict[str, dict[str, Any]] = {
    "resnet1922": {},
    "densenet264": {},
    "bert-xlarge": {"sequence_length": 384},
    "bert-large": {"sequence_length": 384},
}
MEASURED = {
    "resnet1922": "resnet50",
    "densenet264": "densenet121",
    "bert-xlarge": "bert-base",
    "bert-large": "bert-base",
    "resnet18": "resnet18",
}
"""The network whose zeros were measured in training, for each: the like of it."""
QUICK: dict[str, dict[str, Any]] = {"resnet18": {}}
MULTIPLES = (12.4, 14.0)
AT_MULTIPLE = 13
"""Throughput is compared at so many times the memory-only batch: the middle of what the paper reached."""
GAIN = 0.303
BEST_GAIN = 0.378


@dataclass(frozen=True)
class Traced:
    """What G10's artifact holds of one network (its directories ``results`` and ``example_results``)."""

    batch: int
    share: float
    """What FlashNeuron reaches there of the ideal speed."""
    g10: float
    """What G10 does."""
    traced_s: float
    """The sum of the times of all kernels of a step, traced on an A100: its ideal."""
    footprint: float
    """Of all tensors, in that of the GPU's 40 GB."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """What its network has in place of the zoo's default."""


G10 = {
    "bert-base": Traced(256, 0.713, 0.997, 7.285, 3.701, {"sequence_length": 128}),
    "resnet152": Traced(1280, 0.642, 0.984, 112.589, 27.15),
    "senet154": Traced(1024, 0.533, 0.934, 132.870, 42.78),
}
G10_POLICIES = ("vdnn-dyn", "flashneuron", "lifetime", "recompute", "auto")
LEAST_SHARE, MOST_SHARE = 0.53, 0.715
FIRST = 8
GROWTH = 8
WITHIN = 0.02


def measure(*, quick: bool) -> dict[str, Any]:
    machine = Machine.preset("v100-nvme")
    networks = QUICK if quick else NETWORKS
    found: dict[str, Any] = {"networks": {}}
    for name, overrides in networks.items():
        with took(name):
            found["networks"][name] = flash_neuron(OnPaper(name, machine, overrides))
    if not quick:
        found["g10"] = {}
        for name in G10:
            with took(f"{name}, as in G10"):
                found["g10"][name] = in_g10s_setting(name)
    return found


def flash_neuron(paper: OnPaper) -> dict[str, Any]:
    alone = largest_batch(paper, lambda case: case.offload({}))
    most = largest_batch(paper, flashneurons_choice)
    at = min(most, AT_MULTIPLE * alone)
    return {
        "batch_memory_only": alone,
        "batch_flashneuron": most,
        "multiple": round(most / alone, 2),
        "memory_only": paper.run("keep", alone),
        "at_multiple": {name: paper.run(name, at) for name in ("flashneuron", "lifetime", "auto")},
        "at_largest": {name: paper.run(name, most) for name in ("flashneuron", "auto")},
        "compressed": compressed(paper, at),
    }


def compressed(paper: OnPaper, batch: int) -> dict[str, Any]:
    """FlashNeuron with its compression, as far as it can be assumed: outputs of ReLU without their zeros,
    and all that is float32 cast to 16 bits, which loses bits. It is done on the GPU, at a third of its
    memory's bandwidth (read, write, count)."""
    compute = paper.machine.compute
    assert compute is not None
    ratio = cast_ratio(MEASURED[paper.network])
    speed = compute.memory_bytes_per_s / 3
    sparse, cast = (
        CodecSample("zero-value+float16", ratio, speed, speed),
        CodecSample("float16", 0.5, speed, speed),
    )
    profile = paper.profile(batch)
    slots = (
        replace(slot, codecs=(sparse if slot.kind == "ReLU" else cast,))
        if slot.dtype == "float32"
        else slot
        for slot in profile.slots
    )
    changed = OnPaper(paper.network, paper.machine, paper.overrides)
    changed.known[batch] = replace(profile, slots=tuple(slots))
    return {"relu_ratio": round(ratio, 3), "flashneuron": changed.run("flashneuron", batch)}


def cast_ratio(network: str) -> float:
    """Of an output of ReLU: a bit for each element, and two bytes for those that are not zero.

    How many are not is from what our codecs made of the like in training (``codec_bytes.py``): of
    ``zero-value+byteplane``, less what ``byteplane`` alone saves of values that are not zero.
    """
    known = json.loads((_results.RESULTS / "codec_bytes.json").read_text(encoding="utf-8"))
    codecs = known["figures"][network]["steps"]["step_23"]["codecs"]
    sparse, dense = (
        codecs[name]["frame_bytes"] / codecs[name]["source_bytes"]
        for name in ("zero-value+byteplane", "byteplane")
    )
    not_zero = min(1.0, (sparse - 1 / 32) / dense)
    return 1 / 32 + not_zero / 2


def in_g10s_setting(name: str) -> dict[str, Any]:
    """With our roofline for the GPU; and once more as slow as its kernels were traced by G10."""
    machine, known = Machine.preset("a100-g10"), G10[name]
    paper = OnPaper(name, machine)
    same = OnPaper(name, machine, known.overrides)
    ideal_s = same.run("keep", known.batch)["ideal_s"]
    slower = known.traced_s / ideal_s
    traced = OnPaper(name, slowed(machine, slower))
    return {
        "saved_bytes": paper.profile(known.batch).saved_bytes,
        "traced_s": known.traced_s,
        "roofline_s": ideal_s,
        "slower": round(slower, 2),
        "policies": {one: paper.run(one, known.batch) for one in G10_POLICIES},
        "most_share": paper.most_share(known.batch),
        "policies_traced": {one: traced.run(one, known.batch) for one in G10_POLICIES},
        "most_share_traced": traced.most_share(known.batch),
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


def largest_batch(paper: OnPaper, choose: Callable[[Case], Choice]) -> int:
    """The largest that fits with the choice that needs least, to within ``WITHIN``.

    Raises:
        SystemExit: Not even one sample fits.
    """
    limit = paper.machine.device_bytes
    needs = {batch: least_bytes(paper, batch, choose) for batch in (*paper.known, FIRST)}
    while True:
        fits = max((batch for batch, need in needs.items() if need <= limit), default=0)
        over = min((batch for batch, need in needs.items() if need > limit), default=None)
        if over is not None and over - fits <= max(1, WITHIN * fits):
            break
        guess = _guess(needs, fits, over, limit)
        needs[guess] = least_bytes(paper, guess, choose)
    if not fits:
        raise SystemExit(f"{paper.network}: not one sample fits {limit} bytes")
    return fits


def _guess(needs: dict[int, int], fits: int, over: int | None, limit: int) -> int:
    """Where the line through the last batch that fits and the next known one meets the limit.

    Where nothing larger is known the line is from the batch before, and the guess not too far away.
    """
    if over is None:
        before = max((batch for batch in needs if batch < fits), default=fits // 2)
        slope = (needs[fits] - needs.get(before, needs[fits] // 2)) / (fits - before)
        return fits + max(1, min(int((limit - needs[fits]) / max(slope, 1)), GROWTH * fits))
    if not fits:
        return max(1, over // 2)
    share = (limit - needs[fits]) / (needs[over] - needs[fits])
    return min(max(fits + int(share * (over - fits)), fits + 1), over - 1)


def least_bytes(paper: OnPaper, batch: int, choose: Callable[[Case], Choice]) -> int:
    """The device memory without which a choice does not do, with convolutions as lean as need be."""
    budgets = Budgets(0, paper.machine.host_bytes, paper.machine.flash_bytes)
    case = Case(paper.profile(batch), paper.machine, budgets)
    case = case.leaning(case.leanest)
    return case.residency(choose(case)).hard_bytes


# -- beside the papers --------------------------------------------------------------------------------


def lines(found: dict[str, Any]) -> Iterator[Line]:
    gains: list[float] = []
    cast_gains: list[float] = []
    for name, row in found["networks"].items():
        alone = row["memory_only"]["samples_per_s"]
        at = row["at_multiple"]
        theirs, auto = at["flashneuron"], at["auto"]
        cast = row["compressed"]["flashneuron"]
        cast_gains.append(cast["samples_per_s"] / alone - 1)
        gains.append(theirs["samples_per_s"] / alone - 1)
        yield Line(
            f"{name}: largest batch of flashneuron",
            "12.4x to 14.0x",
            f"{row['multiple']:.1f}x ({row['batch_flashneuron']} for {row['batch_memory_only']})",
            row["multiple"] >= MULTIPLES[0],
            "at least 12.4x",
        )
        yield Line(
            f"{name}, batch {theirs['batch']}: throughput of flashneuron over memory only",
            "up to +37.8 %",
            f"{100 * gains[-1]:+.1f} %",
            gains[-1] > 0,
            "above 0",
        )
        yield Line(
            "the same, cast to 16 bits and without zeros (assumed:"
            f" {percent(row['compressed']['relu_ratio'])} of an output of ReLU, else a half)",
            "up to +37.8 %",
            f"{100 * cast_gains[-1]:+.1f} %",
            cast_gains[-1] > 0,
            "above 0",
        )
        yield Line(
            f"{name}, batch {theirs['batch']}: throughput of auto over flashneuron",
            "",
            f"{auto['samples_per_s'] / theirs['samples_per_s']:.2f}x",
            auto["samples_per_s"] >= 1.25 * theirs["samples_per_s"],
            "at least 1.25x",
        )
    yield Line(
        "the mean of these gains of flashneuron",
        f"+{percent(GAIN)}",
        f"{100 * sum(gains) / len(gains):+.1f} %; cast and without zeros"
        f" {100 * sum(cast_gains) / len(cast_gains):+.1f} %",
        None,
    )
    for name, row in found.get("g10", {}).items():
        for which, how in (("", ""), ("_traced", ", kernels as traced")):
            yield from _g10_lines(name, row[f"policies{which}"], row[f"most_share{which}"], how)


def _g10_lines(name: str, runs: dict[str, Any], most_share: float, how: str) -> Iterator[Line]:
    known = G10[name]
    theirs, auto = runs["flashneuron"], runs["auto"]
    yield Line(
        f"{name}, batch {known.batch}{how}: flashneuron's share of ideal",
        f"{known.share:.0%}",
        percent(theirs["share_of_ideal"]) if theirs["feasible"] else "does not fit",
        theirs["feasible"] and LEAST_SHARE <= theirs["share_of_ideal"] <= MOST_SHARE,
        "53 to 71 %",
    )
    yield Line(
        f"{name}, batch {known.batch}{how}: auto's share of ideal",
        f"{percent(known.g10)} by G10",
        f"{percent(auto['share_of_ideal'])}; no plan reaches more than {percent(most_share)}"
        if auto["feasible"]
        else "does not fit",
        auto["feasible"] and auto["share_of_ideal"] >= 0.95,
        "at least 95 %",
    )
