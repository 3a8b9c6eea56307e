"""Text of a plan: reasons of its decisions, and notes on budgets and waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from penstock.core.units import format_bytes, format_duration
from penstock.plan.encoding import SlotCodecs
from penstock.plan.groups import SlotGroup
from penstock.plan.machine import Machine
from penstock.plan.pipeline import windows_s
from penstock.plan.placement import packed_bytes
from penstock.plan.plan import INFEASIBLE, TIGHT
from penstock.plan.problem import PlanningProblem
from penstock.plan.profile import CodecSample, Profile
from penstock.plan.recompute_sets import RecomputableModule
from penstock.plan.residency import Mask, ResidencyModel, Segment, resident_at_worst
from penstock.plan.window import least_window, returning

MAX_NAMED_SLOTS: Final = 3
"""Number of slots that a note on a budget that is too small names."""


def why_kept(group: SlotGroup) -> str:
    """Return the reason for keeping a group that a policy could have offloaded."""
    if group.held_elsewhere:
        return "held elsewhere: offload frees nothing"
    if group.idle_ns is None:
        return "not needed in the profiled step"
    return f"tail of forward; needed {format_duration(group.idle_ns / 1e9)} after it was saved"


def why_not_staged(case: PlanningProblem) -> str:
    """Return the reason for keeping a group that is too long to go to flash."""
    return f"longer than the staging memory of {format_bytes(case.budgets.staging_bytes)}"


def why_no_room(case: PlanningProblem) -> str:
    """Return the reason for keeping a group that no tier has room for."""
    return (
        f"no room: host tier {format_bytes(case.budgets.host_bytes)}, flash tier"
        f" {format_bytes(case.budgets.flash_bytes)}"
    )


def why_offloaded(group: SlotGroup, machine: Machine, tier: str, sample: CodecSample | None) -> str:
    """Return the reason for offloading a group to a tier."""
    nbytes = moved = group.key.nbytes
    encoded = decoded = ""
    if sample is not None:
        moved = sample.encoded_bytes(nbytes)
        encoded = (
            f"{sample.codec}: {sample.ratio:.2f} of the bytes, encoded in"
            f" {format_duration(sample.encode_s(nbytes))}, "
        )
        decoded = f", decoded in {format_duration(sample.decode_s(nbytes))}"
    written = f"{encoded}written in {format_duration(machine.write_s(moved, tier))}"
    if group.idle_ns is None:
        return f"not needed in the profiled step; {written}"
    read = f"read in {format_duration(machine.read_s(moved, tier))}{decoded}"
    return f"long idle; {format_duration(group.idle_ns / 1e9)}, {written}, {read}"


def why_recomputed(module: RecomputableModule) -> str:
    """Return the reason for recomputing a group."""
    return (
        f"recomputed by {module.path}; {format_bytes(module.nbytes)} in"
        f" {format_duration(module.forward_ns / 1e9)}"
    )


def notes_on_compression(
    case: PlanningProblem, tiers: Sequence[str], samples: Mapping[int, CodecSample]
) -> list[str]:
    """Return notes on tiers whose slots fit only because they are encoded."""
    notes = []
    for name, room in (("host", case.budgets.host_bytes), ("flash", case.budgets.flash_bytes)):
        mine = [g for g, tier in enumerate(tiers) if tier == name]
        raw = sum(case.groups[g].nbytes for g in mine)
        if raw > room:
            taken = sum(
                case.groups[g].nbytes
                if g not in samples
                else packed_bytes(case.groups[g], samples[g])
                for g in mine
            )
            notes.append(
                f"the {name} tier ({format_bytes(room)}) receives {format_bytes(raw)}, which take"
                f" {format_bytes(taken)} of it encoded, margin included; if they compress less later,"
                " slots without room stay on the device until the next plan"
            )
    return notes


def notes_on_budget(
    case: PlanningProblem, mask: Mask, segments: tuple[Segment, ...], need: ResidencyModel
) -> list[str]:
    """Return notes on a budget that is too small, or only just enough."""
    device_bytes = case.budgets.device_bytes
    if need.hard_bytes > device_bytes:
        at = case.profile.slots[need.worst].key if need.worst >= 0 else "none"
        return [
            f"{INFEASIBLE}kept and used slots reach {format_bytes(need.hard_bytes)}"
            f" ({need.hard_bytes} bytes) at slot {at}, the device budget is"
            f" {format_bytes(device_bytes)} ({device_bytes} bytes); give at least"
            f" {need.hard_bytes} bytes{_resident_text(case, mask, segments, need)}"
        ]
    room = device_bytes - need.kept_bytes
    if room < least_window(returning(case.profile, mask), need.working_bytes):
        return [
            f"{TIGHT}{format_bytes(room)} of the budget are left beside kept slots, too little to"
            " prefetch: backward waits for the first reads"
        ]
    return []


def _resident_text(
    case: PlanningProblem, mask: Mask, segments: tuple[Segment, ...], need: ResidencyModel
) -> str:
    """List the device's contents at the peak: the largest slots, and bytes outside of slots."""
    slots = case.profile.slots
    resident = resident_at_worst(case.profile, mask, segments)
    resident.sort(key=lambda i: (-slots[i].key.nbytes, i))
    named = [str(slots[i].key) for i in resident[:MAX_NAMED_SLOTS]]
    rest = need.hard_bytes - sum(slots[i].key.nbytes for i in resident)
    if len(resident) > MAX_NAMED_SLOTS:
        more_bytes = sum(slots[i].key.nbytes for i in resident[MAX_NAMED_SLOTS:])
        named.append(f"{len(resident) - MAX_NAMED_SLOTS} more slots ({format_bytes(more_bytes)})")
    if rest:
        named.append(f"{format_bytes(rest)} outside of slots")
    return f"; resident then: {', '.join(named)}" if named else ""


def notes_on_workspaces(case: PlanningProblem) -> list[str]:
    """Return a note on convolutions for which the plan assumes another algorithm than PyTorch's."""
    if not case.lean:
        return []
    parts = sum(one.parts > 1 for one in case.lean)
    cut = f", {parts} of them in parts of the batch" if parts else ""
    most = max(case.lean, key=lambda one: one.nbytes)
    return [
        f"on paper only: {len(case.lean)} convolutions have a limit for their workspace (the largest"
        f" is {format_bytes(most.nbytes)}, of {most.module}){cut}; in a real run PyTorch chooses the"
        " algorithms"
    ]


def notes_on_waits(case: PlanningProblem, on_flash: Mask, codecs: SlotCodecs) -> list[str]:
    """Return notes on passes in which flash takes longer than the network, the worst per direction.

    What staging memory may hold at the end of forward need not pass flash.
    """
    profile, staged_bytes = case.profile, case.budgets.staging_bytes
    worst = {"write": (0.0, ""), "read": (0.0, "")}
    for one in profile.passes:
        out = [
            i
            for i, (slot, m) in enumerate(zip(profile.slots, on_flash, strict=True))
            if m and slot.pass_index == one.index
        ]
        back = [i for i in out if profile.slots[i].needed_at_ns is not None]
        if not out:
            continue
        forward_s, backward_s = windows_s(one, min(profile.slots[i].saved_at_ns for i in out))
        write, read = case.machine.bytes_per_s("flash")
        for op, moved, bytes_per_s, network_s, phase in (
            ("write", _moved_bytes(profile, out, codecs), write, forward_s, "forward"),
            ("read", _moved_bytes(profile, back, codecs), read, backward_s, "backward"),
        ):
            took_s = max(0, moved - staged_bytes) / bytes_per_s
            text = (
                f"flash is slower than {phase}: it takes {format_duration(took_s)} to {op} what"
                f" {phase} has {format_duration(network_s)} for"
            )
            worst[op] = max(worst[op], (took_s - network_s, text))
    return [text for late_s, text in worst.values() if late_s > 0]


def _moved_bytes(profile: Profile, indices: Iterable[int], codecs: SlotCodecs) -> int:
    """Return the bytes that the transfers of these slots move one way."""
    return sum(
        codecs[i].encoded_bytes(profile.slots[i].key.nbytes)
        if i in codecs
        else profile.slots[i].key.nbytes
        for i in indices
    )
