"""From the groups that a policy chose to a plan: tiers, codecs, reasons, the read window, and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.core.units import format_bytes, format_duration
from penstock.plan.encoding import SlotCodecs
from penstock.plan.groups import Group, groups_of, need_order
from penstock.plan.machine import Budgets, Machine
from penstock.plan.pipeline import choose, windows_s
from penstock.plan.placement import place
from penstock.plan.plan import INFEASIBLE, Action, Decision, Plan
from penstock.plan.profile import CodecSample, Profile
from penstock.plan.residency import Mask, Residency, residency
from penstock.plan.window import least_window, returning, window_bytes


def assemble(
    policy: str,
    profile: Profile,
    machine: Machine,
    budgets: Budgets,
    *,
    chosen: list[Group],
    why_kept: Callable[[Group], str],
) -> Plan:
    """Make a plan that offloads ``chosen`` as far as the tiers have room, and keeps the rest.

    Args:
        policy: The policy's name.
        profile: What the step saved.
        machine: Chooses codecs and the window, and is told of in reasons and notes.
        budgets: The device budget bounds the window, the others what goes where.
        chosen: Groups to offload; the first have precedence where a tier fills up.
        why_kept: The reason that is written beside a group that was not chosen.
    """
    tiers = dict(zip((g.key for g in chosen), place(chosen, budgets), strict=True))
    placed = [(group, tiers[group.key]) for group in chosen if tiers[group.key]]
    samples = choose(profile, machine, placed)
    codecs = dict(zip((group.key for group, _ in placed), samples, strict=True))
    by_slot = {
        i: sample
        for (group, _), sample in zip(placed, samples, strict=True)
        if sample is not None
        for i in group.indices
    }
    decisions = []
    for group in groups_of(profile):
        tier = tiers.get(group.key)
        if tier:
            decisions.append(_offload(group, machine, tier, codecs[group.key]))
        else:
            reason = why_kept(group) if tier is None else _why_no_room(budgets)
            decisions.append(Decision(group.key, Action.KEEP, "", reason))
    mask = mask_of(profile, (group for group, _ in placed))
    need = residency(profile, mask)
    on_flash = mask_of(profile, (group for group, tier in placed if tier == "flash"))
    return Plan(
        policy=policy,
        budgets=budgets,
        decisions=tuple(decisions),
        need_order=need_order(profile),
        window_bytes=window_bytes(
            profile, mask, machine, budgets.device_bytes, need, codecs=by_slot
        ),
        notes=(
            *_shortages(profile, budgets, mask, need),
            *_waits(profile, machine, on_flash, by_slot),
        ),
    )


def mask_of(profile: Profile, chosen: Iterable[Group]) -> Mask:
    """The mask of the profile's slots that are in ``chosen``."""
    mask = bytearray(len(profile.slots))
    for group in chosen:
        for i in group.indices:
            mask[i] = 1
    return mask


def _shortages(profile: Profile, budgets: Budgets, mask: Mask, need: Residency) -> list[str]:
    """Notes on a budget that is too small, or only just enough."""
    if need.hard_bytes > budgets.device_bytes:
        at = profile.slots[need.worst].key if need.worst >= 0 else "none"
        return [
            f"{INFEASIBLE}what is kept or in use reaches {format_bytes(need.hard_bytes)}"
            f" ({need.hard_bytes} bytes) at slot {at}, the device budget is"
            f" {format_bytes(budgets.device_bytes)} ({budgets.device_bytes} bytes)"
        ]
    room = budgets.device_bytes - need.kept_bytes
    if room < least_window(returning(profile, mask), need.working_bytes):
        return [f"reads cannot run ahead at first: {format_bytes(room)} are not kept"]
    return []


def _waits(profile: Profile, machine: Machine, on_flash: Mask, codecs: SlotCodecs) -> list[str]:
    """Passes in which flash alone takes longer than the network, the worst of each direction."""
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
        write, read = machine.bytes_per_s("flash")
        for op, took_s, network_s, phase in (
            ("write", _moved_bytes(profile, out, codecs) / write, forward_s, "forward"),
            ("read", _moved_bytes(profile, back, codecs) / read, backward_s, "backward"),
        ):
            text = (
                f"flash is slower than {phase}: it takes {format_duration(took_s)} to {op} what"
                f" {phase} has {format_duration(network_s)} for"
            )
            worst[op] = max(worst[op], (took_s - network_s, text))
    return [text for late_s, text in worst.values() if late_s > 0]


def _moved_bytes(profile: Profile, indices: Iterable[int], codecs: SlotCodecs) -> int:
    """What the transfers of these slots move one way."""
    return sum(
        codecs[i].encoded_bytes(profile.slots[i].key.nbytes)
        if i in codecs
        else profile.slots[i].key.nbytes
        for i in indices
    )


def _offload(group: Group, machine: Machine, tier: str, sample: CodecSample | None) -> Decision:
    reason = _why_offloaded(group, machine, tier, sample)
    if sample is None:
        return Decision(group.key, Action.OFFLOAD, tier, reason)
    return Decision(group.key, Action.OFFLOAD, tier, reason, sample.codec, sample.ratio)


def _why_offloaded(group: Group, machine: Machine, tier: str, sample: CodecSample | None) -> str:
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


def _why_no_room(budgets: Budgets) -> str:
    return (
        f"no room: host tier {format_bytes(budgets.host_bytes)}, flash tier"
        f" {format_bytes(budgets.flash_bytes)}"
    )
