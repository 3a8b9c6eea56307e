"""The life of each slot in one pass: when its bytes were in memory, on their way, and away.

Slots that moved have spans of their stages. A slot that stayed has none: its life is that of the profiled
pass, fitted to this one's forward and backward.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.observe.events import Stage
from penstock.report.run_events import PassEvents, RunEvents, SlotSpan

MOST_SLOTS: Final = 300
"""Maximum number of slots that are drawn: the largest."""
MOST_LEVELS: Final = 1200
"""Approximate maximum number of levels of memory in the pass."""
HELD: Final = "held"
AWAY: Final = "away"
_OUT: Final = (Stage.COPY_OUT, Stage.WRITE)
_BACK: Final = (Stage.READ, Stage.COPY_IN)

_Part = tuple[str, float, float]


def pass_bars(events: RunEvents) -> dict[str, Any] | None:
    """Return the slots of the latest pass, in the order of saving; None if no pass has ended.

    Times are seconds from the beginning of the pass.
    """
    one = events.last_pass
    if one is None:
        return None
    plan = _planned(events)
    spans: dict[str, list[SlotSpan]] = {}
    for span in one.spans:
        spans.setdefault(span.slot, []).append(span)
    passes = {each["pass"] for slot, each in plan.items() if slot in spans}
    if not passes:  # nothing moved: the slots of all passes of the profile
        passes = {each["pass"] for each in plan.values()}
    stayed = [each for slot, each in plan.items() if slot not in spans and each["pass"] in passes]
    rows = [_moved_row(one, slot, mine, plan.get(slot)) for slot, mine in spans.items()]
    rows += [_stayed_row(one, each) for each in stayed]
    largest = sorted(rows, key=lambda row: -row["nbytes"])[:MOST_SLOTS]
    return {
        "name": one.name,
        "at_s": (one.start_ns - events.start_ns) / 1e9,
        "length_s": (one.end_ns - one.start_ns) / 1e9,
        "forward_s": (one.backward_ns - one.start_ns) / 1e9,
        "left_out": len(rows)
        - len(largest)
        + sum(each["left_out"] for each in events.plans.values()),
        "slots": sorted(largest, key=lambda row: row["parts"][0][1]),
        "levels": _levels(events, one),
    }


def _planned(events: RunEvents) -> dict[str, dict[str, Any]]:
    """Return what the plans say of each slot, with the times of its pass."""
    found: dict[str, dict[str, Any]] = {}
    for plan in events.plans.values():
        passes = {each["index"]: each for each in plan["passes"]}
        for slot in plan["slots"]:
            found.setdefault(slot["slot"], {**slot, "times": passes[slot["pass"]]})
    return found


def _moved_row(
    one: PassEvents, slot: str, spans: list[SlotSpan], planned: dict[str, Any] | None
) -> dict[str, Any]:
    start_s = min(span.start_ns for span in spans)
    out = [span for span in spans if span.stage in _OUT]
    back = [span for span in spans if span.stage in _BACK]
    left_ns = max((span.end_ns for span in out), default=None)
    back_ns = min((span.start_ns for span in back), default=None)
    last_ns = max(span.end_ns for span in spans)
    needed_ns = None if planned is None else _fitted(one, planned, planned["needed_ns"])
    end_ns = max(last_ns, needed_ns or last_ns) if back or left_ns is None else last_ns
    parts: list[tuple[str, int, int]] = []
    if left_ns is None:
        parts.append((HELD, start_s, end_ns))
    else:
        parts.append((HELD, start_s, left_ns))
        parts += [(str(span.stage), span.start_ns, span.end_ns) for span in out]
        if back_ns is None:
            parts.append((AWAY, left_ns, one.end_ns))
        else:
            parts.append((AWAY, left_ns, max(left_ns, back_ns)))
            parts.append((HELD, back_ns, end_ns))
    parts += [(str(span.stage), span.start_ns, span.end_ns) for span in back]
    parts += [
        (str(span.stage), span.start_ns, span.end_ns)
        for span in spans
        if span.stage == Stage.RECOMPUTE
    ]
    nbytes = planned["nbytes"] if planned is not None else max(span.nbytes for span in spans)
    return _row(slot, nbytes, _seconds(one, parts), planned, measured=True)


def _stayed_row(one: PassEvents, planned: dict[str, Any]) -> dict[str, Any]:
    start_ns = _fitted(one, planned, planned["saved_ns"])
    needed_ns = _fitted(one, planned, planned["needed_ns"])
    assert start_ns is not None
    parts = [(HELD, start_ns, one.end_ns if needed_ns is None else needed_ns)]
    return _row(planned["slot"], planned["nbytes"], _seconds(one, parts), planned, measured=False)


def _row(
    slot: str,
    nbytes: int,
    parts: list[_Part],
    planned: dict[str, Any] | None,
    *,
    measured: bool,
) -> dict[str, Any]:
    known = planned or {}
    return {
        "slot": slot,
        "nbytes": nbytes,
        "module_kind": known.get("module_kind", ""),
        "dtype": known.get("dtype", ""),
        "action": known.get("action", ""),
        "tier": known.get("tier", ""),
        "codec": known.get("codec", ""),
        "reason": known.get("reason", "the log has no plan for it"),
        "measured": measured,
        "parts": parts,
    }


def _fitted(one: PassEvents, planned: dict[str, Any], at_ns: int | None) -> int | None:
    """Return the time in this pass that corresponds to one of the profiled pass."""
    if at_ns is None:
        return None
    forward_ns, backward_ns = planned["times"]["forward_ns"], planned["times"]["backward_ns"]
    if at_ns <= forward_ns:
        share = at_ns / forward_ns if forward_ns else 0.0
        return one.start_ns + int(share * (one.backward_ns - one.start_ns))
    share = min(1.0, (at_ns - forward_ns) / backward_ns) if backward_ns else 1.0
    return one.backward_ns + int(share * (one.end_ns - one.backward_ns))


def _seconds(one: PassEvents, parts: list[tuple[str, int, int]]) -> list[_Part]:
    return [
        (
            stage,
            round((start_ns - one.start_ns) / 1e9, 7),
            round((max(start_ns, end_ns) - one.start_ns) / 1e9, 7),
        )
        for stage, start_ns, end_ns in parts
    ]


def _levels(events: RunEvents, one: PassEvents) -> dict[str, Any]:
    """Return the levels of the device's memory in the pass; of many, the highest of neighbours."""
    samples = events.levels.get("device")
    if samples is None:
        return {"t_s": [], "nbytes": []}
    held, found = 0, []
    for t_ns, nbytes in zip(samples.t_ns, samples.nbytes, strict=True):
        if t_ns < one.start_ns:
            held = nbytes
        elif t_ns <= one.end_ns:
            found.append((t_ns, nbytes))
    found.insert(0, (one.start_ns, held))
    group = max(1, -(-len(found) // MOST_LEVELS))
    highest = [
        max(found[begin : begin + group], key=lambda level: level[1])
        for begin in range(0, len(found), group)
    ]
    return {
        "t_s": [round((t_ns - one.start_ns) / 1e9, 7) for t_ns, _ in highest],
        "nbytes": [nbytes for _, nbytes in highest],
    }
