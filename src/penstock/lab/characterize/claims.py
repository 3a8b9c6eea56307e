"""The poster's claims and one more, each with a verdict and a sentence that states the measured figures.

1. Checkpoints hold training up by less than 1 % of its time on BERT and 5 % on GPT-2.
2. Checkpoint and restore on flash are fast compared with training.
3. Co-located jobs compete for the processor, hardly for checkpoint I/O.
4. That checkpoints hold training up little stays so as models grow.
5. Not the poster's, which leaves different networks on one machine to be measured: a checkpoint then
   takes no larger part of training than alone.

Checkpoints are those of ``torch.save``, which the poster's authors had, except for the second claim,
which is judged with ours. The neighbour of the third writes through our engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

MAX_STALL_SHARES: Final = {"bert-base": 0.01, "bert-large": 0.01, "gpt2": 0.05}
"""Limit for a checkpoint's stall, as a share of the time of a hundred steps, by network."""
MAX_STALL_SHARE: Final = max(MAX_STALL_SHARES.values())
"""Limit for a network of which the poster gives no figure."""
FAMILIES: Final = (("bert-base", "bert-large"), ("resnet18", "resnet50"))
"""Networks of one kind, the smaller first."""
MAX_LATENCY_SHARE: Final = 0.05
"""Limit for a checkpoint and a restore together, as a share of the time of a hundred steps."""
MAX_IO_SHARE: Final = 0.5
"""Limit for the slowdown by an I/O-bound neighbour, as a share of that by a CPU-bound one."""
_NAMES: Final = {"torch_save": "torch.save", "sync": "ours", "async": "ours in the background"}

Record = Mapping[str, Any]


def claims(records: Sequence[Record], mix: Record) -> list[dict[str, Any]]:
    """Judge the claims: ``claim``, ``verdict`` (confirmed, contradicted, not measured), ``words``."""
    return [_stall(records), _latency(records), _colocation(records), _growth(records), _mix(mix)]


def _stall(records: Sequence[Record]) -> dict[str, Any]:
    claim = "checkpoints hold training up by less than 1 % on BERT and 5 % on GPT-2"
    if not records:
        return _not_measured(claim, "No network was trained alone.")
    shares = {way: _shares(records, way, "stall_s") for way in _NAMES}
    most = {"most": {way: max(found.values()) for way, found in shares.items()}}
    said = [f"{_NAMES[way]} {_range(found)}" for way, found in shares.items()]
    words = f"At a checkpoint every 100 steps training is held up by {'; '.join(said)}."
    judged = [each for each in records if each["name"] in MAX_STALL_SHARES]
    if not judged:
        return _not_measured(claim, words) | most
    limits = {title: MAX_STALL_SHARES[each["name"]] for each in judged for title, _ in rows([each])}
    above = {
        way: [title for title, limit in limits.items() if found[title] >= limit]
        for way, found in shares.items()
    }
    asked = ", ".join(f"{title} {limit:.0%}" for title, limit in limits.items())
    below = [
        f"{len(limits) - len(found)} of {len(limits)} with {_NAMES[way]}"
        for way, found in above.items()
    ]
    words += f" Below the poster's limits ({asked}) are {', '.join(below)}."
    is_whole = {"bert", "gpt2"} <= {each["name"].partition("-")[0] for each in judged}
    if above["torch_save"] or is_whole:
        return _claim(claim, not above["torch_save"], words) | most
    return _not_measured(claim, f"{words} Both BERT and GPT-2 are needed.") | most


def _growth(records: Sequence[Record]) -> dict[str, Any]:
    claim = "checkpoints hold training up little as models grow, too"
    found = {each["name"]: each for each in records}
    pairs = [(found[one], found[other]) for one, other in FAMILIES if {one, other} <= found.keys()]
    if not pairs:
        return _not_measured(claim, "No two networks of one kind were trained.")
    said, grown, above = [], {}, []
    for small, large in pairs:
        ends = " to ".join(
            f"{each['title']} ({each['parameters'] / 1e6:.3g} million parameters)"
            for each in (small, large)
        )
        shares = {way: [_last_share(each, way) for each in (small, large)] for way in _NAMES}
        changes = [
            f"{_NAMES[way]} {one:.2%} to {other:.2%}" for way, (one, other) in shares.items()
        ]
        limit = MAX_STALL_SHARES.get(large["name"], MAX_STALL_SHARE)
        said.append(f"from {ends}: {', '.join(changes)} (limit {limit:.0%})")
        title, share = large["title"], shares["torch_save"][1]
        grown[title] = share
        if share >= limit:
            above.append(title)
    words = (
        f"A checkpoint takes, of the time of 100 steps, {'; '.join(said)}."
        f" {_all_or(above, len(grown), 'stays', 'stay')} below its limit with torch.save"
    )
    return _claim(claim, not above, words + _except(above)) | {"most": grown}


def _latency(records: Sequence[Record]) -> dict[str, Any]:
    claim = "checkpoint and restore latency are small against training"
    if not records:
        return _not_measured(claim, "No network was trained alone.")
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
    return _claim(claim, not above, words + _except(above)) | {
        "most": {way: max(each.values()) for way, each in found.items()}
    }


def _colocation(records: Sequence[Record]) -> dict[str, Any]:
    claim = "co-located jobs are bound by the CPU, hardly by checkpoint I/O"
    beside = [each["colocation"] for each in records if each["colocation"]]
    if not beside:
        return _not_measured(claim, "Nothing ran beside the jobs.")
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
    return _claim(claim, confirmed, words) | {"most": mean}


def _mix(mix: Record) -> dict[str, Any]:
    claim = "among different networks a checkpoint takes no larger part of training than alone"
    if not mix:
        return _not_measured(claim, "No different networks were trained at the same time.")
    jobs = mix["networks"]
    step = statistics.geometric_mean(times(each["step_s"]) for each in jobs)
    stall = {
        way: statistics.geometric_mean(times(each["stall_s"][way]) for each in jobs)
        for way in _NAMES
    }
    said = [f"{stall[way]:.2f} times with {name}" for way, name in _NAMES.items()]
    words = (
        f"In a mix of {len(jobs)} networks, one job each, steps take {step:.2f} times as long as alone."
        f" One job's checkpoint, while the others train, holds it up for longer: {', '.join(said)}"
        f" (means). All together take {mix['all_slowdown']:.2f} times as long as one after the other."
    )
    return _claim(claim, stall["torch_save"] <= step, words) | {"most": {"step": step} | stall}


def times(pair: Record) -> float:
    """Return how many times as long something takes in a mix as alone."""
    return float(pair["beside"] / pair["alone"])


def _last_share(record: Record, way: str) -> float:
    """Return the share of a stall in the last stage of a network's training."""
    return list(_shares([record], way, "stall_s").values())[-1]


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


def _claim(claim: str, confirmed: bool, words: str) -> dict[str, Any]:
    verdict = "confirmed" if confirmed else "contradicted"
    return {"claim": claim, "verdict": verdict, "words": words}


def _not_measured(claim: str, words: str) -> dict[str, Any]:
    return {"claim": claim, "verdict": "not measured", "words": words, "most": {}}
