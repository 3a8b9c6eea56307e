"""FlashNeuron (FAST 2021) on its own machine, on paper.

Its authors' public code (github.com/SNU-ARC/flashneuron, commit a5b578fd) says what the abstract does
not:

* What an operator saves of its inputs is moved, and the output of a ReLU in place, but nothing else that
  is saved of outputs (``gen_variable_type.py``): probabilities of a softmax, masks of dropout, and
  indices of pooling stay.
* Of outputs of ReLU the elements that are not zero are moved, cast to 16 bits; what else is float32 is
  cast. A bitmap of a sparse tensor and counts stay in device memory until it is fetched (``Copy.cu``,
  ``saved_variable.cpp``).
* It addresses two SSDs on the Tesla (``flashneuron.cu``).

The largest batch of a policy is searched with few profiles, for those of deep networks take a while: the
least device memory that it needs is nearly affine in the batch, so the next batch to look at is where a
line through one that fits and one that does not meets the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from _papers_paper import Line, OnPaper, percent, took

import _results
from penstock.plan import Budgets, CodecSample, Machine, Profile, SlotProfile
from penstock.plan.policies.flashneuron import choose as flashneurons_choice
from penstock.plan.problem import Choice, PlanningProblem

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
MACHINES = {"one SSD": "v100-nvme", "two SSDs": "v100-two-nvme"}

MULTIPLES = (12.4, 14.0)
MULTIPLES_AIM = (2 * 12.4 - 14.0, 2 * 14.0 - 12.4)
"""The paper's range, and as much again on either side: our networks are not exactly its own."""
AT_MULTIPLE = 13
"""The middle of that range, for comparison: the paper does not say at which batch it is quickest."""
GAIN = 0.303
BEST_GAIN = 0.378
LEAST_GAIN = 4 * GAIN - 3 * BEST_GAIN
"""Of four networks with that mean, none of which gains more than the best, none gains less."""
NO_MORE = 0.01
"""The share of a step that may be waiting where it is said to take no more time."""
SHARES_LOOKED_AT = (0.75, 0.9, 1)
"""Of the largest batch of memory only, which is not always its quickest: workspaces must fit as well."""
MULTIPLES_LOOKED_AT = (1, 1.25, 1.5, 2, 2.5, 3, 4, 6, AT_MULTIPLE)

OUTPUTS = frozenset({"aten._softmax", "aten._log_softmax"})
"""Operators that save what they return. (Out of place, a ReLU does as well: the zoo's are in place.)"""
FIRST = 8
GROWTH = 8
WITHIN = 0.02


def measure(*, quick: bool) -> dict[str, Any]:
    found = {}
    for name, overrides in (QUICK if quick else NETWORKS).items():
        with took(name):
            found[name] = flash_neuron(name, overrides)
    return {"networks": found}


def flash_neuron(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    first, *others = (Machine.preset(machine) for machine in MACHINES.values())
    plain = OnPaper(name, first, overrides)
    filled = not_zero(MEASURED[name])
    alone = largest_batch(plain, lambda case: case.offload({}))
    memory_only = {round(share * alone) for share in SHARES_LOOKED_AT}
    as_it_is = [plain, *(OnPaper(name, other, of=plain) for other in others)]
    theirs = [
        OnPaper(name, one.machine, of=one, adapted=partial(as_theirs, one.machine, filled))
        for one in as_it_is
    ]
    in_32_bits, compressed = ([Batches(one, alone) for one in each] for each in (as_it_is, theirs))
    most = largest_batch(theirs[0], flashneurons_choice, tuple(plain.known))
    for one in compressed:
        one.look_at(most)
    at = in_32_bits[0].last
    return {
        "batch_memory_only": alone,
        "batch_flashneuron": most,
        "multiple": round(most / alone, 2),
        "not_zero": round(filled, 3),
        "memory_only": quickest(run(plain, "keep", batch) for batch in memory_only),
        "at_multiple": {
            policy: run(plain, policy, at) for policy in ("flashneuron", "lifetime", "auto")
        },
        "by_machine": {
            which: {"compressed": one.as_json(), "32 bits": other.as_json()}
            for which, one, other in zip(MACHINES, compressed, in_32_bits, strict=True)
        },
    }


def quickest(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The most samples a second, of what fits."""
    return max((one for one in runs if one["feasible"]), key=lambda one: one["samples_per_s"])


def run(paper: OnPaper, policy: str, batch: int) -> dict[str, Any]:
    """A replay, and then the update: weights and gradients are read, and weights written."""
    compute = paper.machine.compute
    assert compute is not None
    found = paper.run(policy, batch)
    found["update_s"] = 1.5 * paper.profile(batch).fixed_bytes / compute.memory_bytes_per_s
    found["samples_per_s"] = round(batch / (found["step_s"] + found["update_s"]), 3)
    return found


class Batches:
    """``flashneuron`` at batches from that of memory only upward, as far as they fit."""

    def __init__(self, paper: OnPaper, alone: int) -> None:
        self._paper = paper
        self._multiple = AT_MULTIPLE * alone
        self._known: dict[int, dict[str, Any]] = {}
        self._fit: list[int] = []
        for multiple in MULTIPLES_LOOKED_AT:
            if not self.look_at(round(multiple * alone)):
                break

    @property
    def last(self) -> int:
        """The largest batch looked at that fits."""
        return self._fit[-1]

    def look_at(self, batch: int) -> bool:
        """Whether it fits."""
        fits: bool = self._at(batch)["feasible"]
        if fits:
            self._fit = sorted({*self._fit, batch})
        return fits

    def as_json(self) -> dict[str, Any]:
        runs = [self._at(batch) for batch in self._fit]
        return {
            "best": quickest(runs),
            "at_multiple": self._at(self._multiple) if self._multiple in self._fit else None,
            "no_more_time": self._without_waits(),
            "samples_per_s": {one["batch"]: one["samples_per_s"] for one in runs},
        }

    def _at(self, batch: int) -> dict[str, Any]:
        if batch not in self._known:
            self._known[batch] = run(self._paper, "flashneuron", batch)
        return self._known[batch]

    def _without_waits(self) -> int:
        """The largest batch whose step waits for nothing, to within a twentieth.

        Of batches looked at the largest is taken, though a smaller one may wait: kernels that do not fill
        the GPU take no longer for more samples, up to a point.
        """
        fits = max(batch for batch in self._fit if self._holds(batch))
        over = next((batch for batch in self._fit if batch > fits), fits)
        while over - fits > max(1, fits // 20):
            middle = (fits + over) // 2
            fits, over = (middle, over) if self._holds(middle) else (fits, middle)
        return fits

    def _holds(self, batch: int) -> bool:
        one = self._at(batch)
        waits_s: float = one["waits_s"]
        return bool(one["feasible"]) and waits_s <= NO_MORE * one["step_s"]


# -- what its authors' code moves ---------------------------------------------------------------------


def as_theirs(machine: Machine, filled: float, profile: Profile) -> Profile:
    """The profile with what FlashNeuron leaves on the device, and with its compression.

    That is done on the GPU, at a third of its memory's bandwidth (read, write, count).

    Args:
        machine: Whose GPU compresses.
        filled: The share of elements that a ReLU does not make zero.
        profile: Of a whole device, with operators.
    """
    assert machine.compute is not None
    speed = machine.compute.memory_bytes_per_s / 3
    cast = CodecSample("float16", 0.5, speed, speed)
    last = {one.end_ns: one.name for one in profile.operators if not one.backward}
    slots: list[SlotProfile] = []
    for known in profile.slots:
        slot = replace(known, recipe=(), source=None, producer=None)
        if slot.dtype != "float32" or last.get(slot.saved_at_ns) in OUTPUTS:
            slots.append(replace(slot, held_elsewhere=True))
        elif slot.kind != "ReLU":
            slots.append(replace(slot, codecs=(cast,)))
        else:
            elements = slot.key.nbytes // 4
            left = left_bytes(elements)
            moved = replace(slot.key, nbytes=slot.key.nbytes - left)
            sparse = CodecSample(
                "zero-value+float16", 2 * filled * elements / moved.nbytes, speed, speed
            )
            there = replace(slot.key, module=f"{slot.key.module} (bitmap)", nbytes=left)
            slots.append(replace(slot, key=moved, codecs=(sparse,)))
            slots.append(replace(slot, key=there, held_elsewhere=True))
    return replace(profile, slots=tuple(slots))


def left_bytes(elements: int) -> int:
    """What stays of a sparse tensor: a bitmap, and counts of whose elements there is a power of two."""
    bitmap_bytes = 128 * -(-elements // 1024)
    return bitmap_bytes + (4 << (-(-elements // 32)).bit_length())


def not_zero(network: str) -> float:
    """The share of elements that are not zero in outputs of ReLU, or of what stands in their place.

    From what our codecs made of the like in training (``codec_bytes.py``): of ``zero-value+byteplane``,
    less what ``byteplane`` alone saves of values that are not zero.
    """
    codecs = _results.earlier("codec_bytes")[network]["steps"]["step_23"]["codecs"]
    sparse, dense = (
        codecs[name]["frame_bytes"] / codecs[name]["source_bytes"]
        for name in ("zero-value+byteplane", "byteplane")
    )
    return float(min(1.0, (sparse - 1 / 32) / dense))


# -- the largest batch --------------------------------------------------------------------------------


def largest_batch(
    paper: OnPaper,
    choose: Callable[[PlanningProblem], Choice],
    looked_at: tuple[int, ...] = (FIRST,),
) -> int:
    """The largest that fits with the choice that needs least, to within ``WITHIN``.

    Args:
        paper: The network, and the machine that it must fit.
        choose: What stays and what goes.
        looked_at: Batches to begin with: those whose profiles are known.

    Raises:
        SystemExit: Not even one sample fits.
    """
    limit = paper.machine.device_bytes
    needs = {batch: least_bytes(paper, batch, choose) for batch in looked_at}
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


def least_bytes(paper: OnPaper, batch: int, choose: Callable[[PlanningProblem], Choice]) -> int:
    """The device memory without which a choice does not do, with convolutions as lean as need be."""
    budgets = Budgets(0, paper.machine.host_bytes, paper.machine.flash_bytes)
    case = PlanningProblem(paper.profile(batch), paper.machine, budgets)
    case = case.with_limits(case.leanest)
    return case.residency(choose(case)).hard_bytes


# -- beside the paper ---------------------------------------------------------------------------------


def lines(found: dict[str, Any]) -> Iterator[Line]:
    gains: dict[str, list[float]] = {which: [] for which in MACHINES}
    for name, row in found["networks"].items():
        least, most = MULTIPLES_AIM
        yield Line(
            f"{name}: largest batch of flashneuron, with what FlashNeuron leaves on the device",
            "12.4x to 14.0x",
            f"{row['multiple']:.1f}x ({row['batch_flashneuron']} for {row['batch_memory_only']})",
            least <= row["multiple"] <= most,
            f"{least:.1f}x to {most:.1f}x",
        )
        for which, by_form in row["by_machine"].items():
            best = by_form["compressed"]["best"]
            gains[which].append(_gain(row, best))
            yield Line(
                f"{name}, {which}: throughput of flashneuron, compressed, at its best batch,"
                " over memory only",
                f"up to +{percent(BEST_GAIN)}",
                f"{_at_best(row, by_form['compressed'])}; in 32 bits {_at_best(row, by_form['32 bits'])}",
                LEAST_GAIN <= gains[which][-1] <= BEST_GAIN,
                f"+{100 * LEAST_GAIN:.1f} to +{percent(BEST_GAIN)}",
            )
            batch = by_form["compressed"]["no_more_time"]
            yield Line(
                f"{name}, {which}: largest batch at which its transfers add nothing to the step",
                "no increase in time",
                f"{batch / row['batch_memory_only']:.1f}x ({batch})",
                batch >= MULTIPLES[0] * row["batch_memory_only"],
                "at least 12.4x",
            )
        at = row["at_multiple"]
        theirs, auto = at["flashneuron"], at["auto"]
        yield Line(
            f"{name}, batch {theirs['batch']}: throughput of auto over flashneuron in 32 bits",
            "",
            f"{auto['samples_per_s'] / theirs['samples_per_s']:.2f}x",
            auto["samples_per_s"] >= 1.25 * theirs["samples_per_s"],
            "at least 1.25x",
        )
    for which, each in gains.items():
        mean = sum(each) / len(each)
        yield Line(
            f"the mean of these gains, {which}",
            f"+{percent(GAIN)}",
            f"{100 * mean:+.1f} %",
            abs(mean - GAIN) <= BEST_GAIN - GAIN,
            f"within {100 * (BEST_GAIN - GAIN):.1f} points",
        )


def _gain(row: dict[str, Any], run: dict[str, Any]) -> float:
    gain: float = run["samples_per_s"] / row["memory_only"]["samples_per_s"] - 1
    return gain


def _at_best(row: dict[str, Any], found: dict[str, Any]) -> str:
    """The gain at the best batch, and at 13 times that of memory only."""
    best, at = found["best"], found["at_multiple"]
    multiple = best["batch"] / row["batch_memory_only"]
    text = f"{100 * _gain(row, best):+.1f} % at batch {best['batch']} ({multiple:.1f}x)"
    if at is None or not at["feasible"]:
        return f"{text}, {AT_MULTIPLE}x does not fit"
    return f"{text}, {100 * _gain(row, at):+.1f} % at {AT_MULTIPLE}x"
