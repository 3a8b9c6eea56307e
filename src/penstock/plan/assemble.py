"""From the groups that a policy chose to a plan: tiers, reasons, the read window, and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.core.units import format_bytes, format_duration
from penstock.plan.groups import Group, groups_of, need_order
from penstock.plan.machine import Budgets, Machine
from penstock.plan.placement import place
from penstock.plan.plan import INFEASIBLE, Action, Decision, Plan
from penstock.plan.profile import Profile
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
        machine: For reasons and notes only.
        budgets: The device budget bounds the window, the others what goes where.
        chosen: Groups to offload; the first have precedence where a tier fills up.
        why_kept: The reason that is written beside a group that was not chosen.
    """
    tiers = dict(zip((g.key for g in chosen), place(chosen, budgets), strict=True))
    decisions = []
    for group in groups_of(profile):
        tier = tiers.get(group.key)
        if tier:
            reason = _why_offloaded(group, machine, tier)
            decisions.append(Decision(group.key, Action.OFFLOAD, tier, reason))
        else:
            reason = why_kept(group) if tier is None else _why_no_room(budgets)
            decisions.append(Decision(group.key, Action.KEEP, "", reason))
    mask = mask_of(profile, (group for group in chosen if tiers[group.key]))
    need = residency(profile, mask)
    on_flash = mask_of(profile, (group for group in chosen if tiers[group.key] == "flash"))
    return Plan(
        policy=policy,
        budgets=budgets,
        decisions=tuple(decisions),
        need_order=need_order(profile),
        window_bytes=window_bytes(profile, mask, machine, budgets.device_bytes, need),
        notes=(
            *_shortages(profile, budgets, mask, need),
            *_waits(profile, machine, on_flash),
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


def _waits(profile: Profile, machine: Machine, on_flash: Mask) -> list[str]:
    """Passes in which flash alone takes longer than the network, the worst of each direction."""
    worst = {"write": (0.0, ""), "read": (0.0, "")}
    for one in profile.passes:
        out = [
            s
            for s, m in zip(profile.slots, on_flash, strict=True)
            if m and s.pass_index == one.index
        ]
        back = [s for s in out if s.needed_at_ns is not None]
        if not out:
            continue
        forward_s = (one.backward_start_ns - min(s.saved_at_ns for s in out)) / 1e9
        backward_s = (one.end_ns - one.backward_start_ns) / 1e9
        nbytes = sum(s.key.nbytes for s in out)
        for op, took_s, network_s, phase in (
            ("write", nbytes / machine.flash_write_bytes_per_s, forward_s, "forward"),
            (
                "read",
                sum(s.key.nbytes for s in back) / machine.flash_read_bytes_per_s,
                backward_s,
                "backward",
            ),
        ):
            text = (
                f"flash is slower than {phase}: it takes {format_duration(took_s)} to {op} what"
                f" {phase} has {format_duration(max(0.0, network_s))} for"
            )
            worst[op] = max(worst[op], (took_s - network_s, text))
    return [text for late_s, text in worst.values() if late_s > 0]


def _why_offloaded(group: Group, machine: Machine, tier: str) -> str:
    written = f"written in {format_duration(machine.write_s(group.key.nbytes, tier))}"
    if group.idle_ns is None:
        return f"not needed in the profiled step; {written}"
    read = f"read in {format_duration(machine.read_s(group.key.nbytes, tier))}"
    return f"long idle; {format_duration(group.idle_ns / 1e9)}, {written}, {read}"


def _why_no_room(budgets: Budgets) -> str:
    return (
        f"no room: host tier {format_bytes(budgets.host_bytes)}, flash tier"
        f" {format_bytes(budgets.flash_bytes)}"
    )
