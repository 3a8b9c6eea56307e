"""The poster's three claims, each with a verdict and a sentence that states the measured figures.

1. Checkpoints stall training by one to five per cent of its time: under 1 % on BERT, 5 % on GPT-2.
2. Checkpoint and restore on flash are fast compared with training.
3. Co-located jobs compete for the processor, hardly for checkpoint I/O.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

MAX_STALL_SHARE: Final = 0.05
MAX_LATENCY_SHARE: Final = 0.05
"""Limit for a checkpoint and a restore together, as a share of the time of a hundred steps."""
MAX_IO_SHARE: Final = 0.5
"""Limit for the slowdown by an I/O-bound neighbour, as a share of that by a CPU-bound one."""
_NAMES: Final = {"torch_save": "torch.save", "sync": "ours", "async": "ours in the background"}

Record = Mapping[str, Any]


def claims(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Judge the claims: ``claim``, ``verdict`` (confirmed, contradicted, not measured), ``words``."""
    return [_stall(records), _latency(records), _colocation(records)]


def _stall(records: Sequence[Record]) -> dict[str, Any]:
    shares = {way: _shares(records, way, "stall_s") for way in _NAMES}
    usual = shares["torch_save"]
    worst = max(usual, key=lambda each: usual[each])
    verdict = "confirmed" if usual[worst] <= MAX_STALL_SHARE else "contradicted"
    said = [f"{_NAMES[way]} {_range(found)}" for way, found in shares.items()]
    above = [title for title, share in usual.items() if share > MAX_STALL_SHARE]
    words = (
        f"At a checkpoint every 100 steps training is held up by {'; '.join(said)}."
        f" {_all_or(above, len(usual), 'stays', 'stay')} within {MAX_STALL_SHARE:.0%} with torch.save"
    )
    return _claim(
        "checkpoints stall training by 1-5 % of its time", verdict, words + _except(above)
    ) | {"most": {way: max(found.values()) for way, found in shares.items()}}


def _latency(records: Sequence[Record]) -> dict[str, Any]:
    found: dict[str, dict[str, float]] = {}
    for way in ("torch_save", "sync"):
        saved, restored = (_shares(records, way, name) for name in ("latency_s", "restore_s"))
        found[way] = {title: saved[title] + restored[title] for title in saved}
    ours = found["sync"]
    above = [title for title, share in ours.items() if share > MAX_LATENCY_SHARE]
    words = (
        "A checkpoint until it is durable and a restore from a cold cache take, together, of the time of"
        f" 100 steps: ours {_range(ours)}, torch.save {_range(found['torch_save'])}."
        f" {_all_or(above, len(ours), 'stays', 'stay')} within {MAX_LATENCY_SHARE:.0%} with ours"
    )
    return _claim(
        "checkpoint and restore latency are small against training",
        "contradicted" if above else "confirmed",
        words + _except(above),
    ) | {"most": {way: max(each.values()) for way, each in found.items()}}


def _colocation(records: Sequence[Record]) -> dict[str, Any]:
    claim = "co-located jobs are bound by the CPU, hardly by checkpoint I/O"
    beside = [each["colocation"] for each in records if each["colocation"]]
    if not beside:
        return _claim(claim, "not measured", "Nothing ran beside the jobs.") | {"most": {}}
    mean = {
        kind: statistics.geometric_mean(each[kind]["slowdown"] for each in beside)
        for kind in ("copies", "cpu", "memory", "io")
    }
    cpu, io = mean["cpu"] - 1, mean["io"] - 1
    confirmed = cpu > 0 and io <= MAX_IO_SHARE * cpu
    words = (
        f"Steps take {mean['copies']:.2f} times as long beside copies of the job,"
        f" {mean['cpu']:.2f} beside what is bound by its core, {mean['memory']:.2f} by memory"
        f" bandwidth, and {mean['io']:.2f} beside what only writes checkpoints (means over"
        f" {len(beside)} networks): the I/O adds {_ratio(io, cpu)} of what computing adds."
    )
    return _claim(claim, "confirmed" if confirmed else "contradicted", words) | {"most": mean}


def _shares(records: Sequence[Record], way: str, name: str) -> dict[str, float]:
    """Return seconds over the time of a hundred steps, by network and stage."""
    return {
        title: stage["checkpoint"][way][name] / (100 * stage["step_s"]["median"])
        for title, stage in rows(records)
    }


def rows(records: Iterable[Record]) -> list[tuple[str, Record]]:
    """Return (title, stage) pairs; a network that is trained in two stages has two."""
    return [
        (f"{each['title']}, {stage['stage']}" if len(each["stages"]) > 1 else each["title"], stage)
        for each in records
        for stage in each["stages"]
    ]


def _range(found: Mapping[str, float]) -> str:
    low, high = (_pick(found, each) for each in (min, max))
    return f"{found[low]:.2%} ({low}) to {found[high]:.2%} ({high})"


def _pick(found: Mapping[str, float], which: Callable[..., Any]) -> str:
    name: str = which(found, key=lambda each: found[each])
    return name


def _all_or(above: Sequence[str], count: int, one: str, many: str) -> str:
    within = count - len(above)
    if not above:
        return f"Every one {one}" if count > 1 else f"It {one}"
    return f"{within or 'None'} of {count} {one if within == 1 else many}"


def _except(above: Sequence[str]) -> str:
    return f"; {', '.join(above)} {'does' if len(above) == 1 else 'do'} not." if above else "."


def _ratio(part: float, whole: float) -> str:
    return f"{max(0.0, part) / whole:.0%}" if whole > 0 else "all"


def _claim(claim: str, verdict: str, words: str) -> dict[str, Any]:
    return {"claim": claim, "verdict": verdict, "words": words}
