"""Assembly of a plan from a policy's choice: codecs, order of need, read window, reasons and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.plan import explanation
from penstock.plan.encoding import SlotCodecs
from penstock.plan.groups import SlotGroup, need_order
from penstock.plan.machine import Budgets, Machine
from penstock.plan.pipeline import choose
from penstock.plan.placement import packed
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.problem import Choice, PlanningProblem
from penstock.plan.profile import CodecSample, Profile
from penstock.plan.residency import OFFLOADED, Mask, Segment
from penstock.plan.slots import SlotKey
from penstock.plan.window import windows


def assemble(
    policy: str,
    case: PlanningProblem,
    choice: Choice,
    why_kept: Callable[[SlotGroup], str] = explanation.why_kept,
    *,
    notes: Iterable[str] = (),
) -> Plan:
    """Write a choice out as a plan, with its reasons.

    Args:
        policy: The policy's name.
        case: The planning problem; the choice's ``lean`` may differ from the problem's.
        choice: The decision for each group.
        why_kept: Returns the reason for keeping a group.
        notes: Notes that precede those made here.
    """
    case = case.with_limits(choice.lean)
    samples = samples_of(case, choice)
    modules = {path: case.recomputing.modules[path] for path in choice.recomputed}
    makers = {g: module for module in modules.values() for g in module.groups}
    reasons = []
    for g, (group, tier) in enumerate(zip(case.groups, choice.tiers, strict=True)):
        if tier:
            reasons.append(explanation.why_offloaded(group, case.machine, tier, samples.get(g)))
        else:
            reasons.append(
                explanation.why_recomputed(makers[g])
                if g in makers
                else explanation.why_not_staged(case)
                if g in case.too_long and case.lacks([])
                else why_kept(group)
            )
    mask, segments, need = case.mask(choice), case.segments(choice), case.residency(choice)
    on_flash = [g for g, tier in zip(case.groups, choice.tiers, strict=True) if tier == "flash"]
    return replace(
        _plan(case, choice, samples, reasons),
        policy=policy,
        notes=(
            *notes,
            *explanation.notes_on_budget(case, mask, segments, need),
            *explanation.notes_on_compression(case, choice.tiers, samples),
            *explanation.notes_on_workspaces(case),
            *explanation.notes_on_waits(
                case,
                mask_of(case.profile, on_flash),
                _by_slot(case, samples),
            ),
        ),
    )


def policy_of(
    name: str,
    choose: Callable[[PlanningProblem], Choice],
    notes: Callable[[PlanningProblem], Iterable[str]] = lambda _: (),
) -> Callable[[Profile, Machine, Budgets], Plan]:
    """Return the policy that plans by ``choose``, with further notes on the problem."""

    def policy(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
        case = PlanningProblem(profile, machine, budgets)
        return assemble(name, case, choose(case), notes=notes(case))

    return policy


def draft(case: PlanningProblem, choice: Choice) -> Plan:
    """Make the choice's plan without reasons and notes: quickly, to be replayed."""
    case = case.with_limits(choice.lean)
    samples = samples_of(case, choice)
    return _plan(case, choice, samples, [""] * len(case.groups))


def mask_of(profile: Profile, chosen: Iterable[SlotGroup]) -> Mask:
    """Return the mask of the profile's slots with those in ``chosen`` offloaded."""
    mask = bytearray(len(profile.slots))
    for group in chosen:
        for i in group.indices:
            mask[i] = OFFLOADED
    return mask


def _plan(
    case: PlanningProblem,
    choice: Choice,
    samples: Mapping[int, CodecSample],
    reasons: Sequence[str],
) -> Plan:
    segments = case.segments(choice)
    window_bytes, widest_bytes = windows(
        case.profile,
        case.mask(choice),
        case.machine,
        case.budgets.device_bytes,
        case.residency(choice),
        codecs=_by_slot(case, samples),
        segments=segments,
    )
    return Plan(
        policy="",
        budgets=case.budgets,
        decisions=_decisions(case, choice, samples, reasons),
        need_order=_need_order(case, segments),
        window_bytes=window_bytes,
        widest_bytes=widest_bytes,
        recomputed=choice.recomputed,
        workspace_limits=choice.lean,
    )


def _decisions(
    case: PlanningProblem,
    choice: Choice,
    samples: Mapping[int, CodecSample],
    reasons: Sequence[str],
) -> tuple[Decision, ...]:
    dropped = case.dropped(choice)
    modules = case.recomputing.modules if dropped else {}
    recipes = {
        g: path for path in choice.recomputed if modules[path].members for g in modules[path].groups
    }
    found = []
    for g, (group, tier, why) in enumerate(zip(case.groups, choice.tiers, reasons, strict=True)):
        if tier:
            sample = samples.get(g)
            codec, ratio = ("", 1.0) if sample is None else (sample.codec, sample.ratio)
            place = choice.prefetch.get(g)
            found.append(Decision(group.key, Action.OFFLOAD, tier, why, codec, ratio, place))
        else:
            action = Action.RECOMPUTE if g in dropped else Action.KEEP
            found.append(Decision(group.key, action, "", why, recipe=recipes.get(g, "")))
    return tuple(found)


def samples_of(case: PlanningProblem, choice: Choice) -> Mapping[int, CodecSample]:
    """Return the codec sample by which each group is encoded, by group index."""
    if choice.samples is not None:
        return packed(case.groups, choice.tiers, choice.samples, case.budgets)
    known = case.encodings.get(choice.tiers)
    if known is None:
        gone = [g for g, tier in enumerate(choice.tiers) if tier]
        placed = [(case.groups[g], choice.tiers[g]) for g in gone]
        best = choose(case.profile, case.machine, placed, case.budgets.staging_bytes)
        chosen = zip(gone, best, strict=True)
        quick = {g: sample for g, sample in chosen if sample is not None}
        known = packed(case.groups, choice.tiers, quick, case.budgets)
        case.encodings[choice.tiers] = known
    return known


def _by_slot(case: PlanningProblem, samples: Mapping[int, CodecSample]) -> SlotCodecs:
    return {i: sample for g, sample in samples.items() for i in case.groups[g].indices}


def _need_order(case: PlanningProblem, segments: tuple[Segment, ...]) -> tuple[SlotKey, ...]:
    """Return the order of need, with the inputs of a recomputed module before the slots that it makes."""
    if not segments:
        return case.need_order
    segment_of = {i: one for one in segments for i in one.slots}
    needs: list[int] = []
    for i in case.profile.needs:
        if i in segment_of:
            needs.extend(
                j for j in segment_of[i].inputs if case.profile.slots[j].needed_at_ns is not None
            )
        needs.append(i)
    return need_order(case.profile, list(dict.fromkeys(needs)))
