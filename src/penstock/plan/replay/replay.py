"""``replay``: the cost of one step of a profile under a plan on a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.plan.convolution import with_algorithms
from penstock.plan.machine import Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.replay.lanes import ReplayLane
from penstock.plan.replay.moves import FLASH, HOST, Channels, Moves, channels_of, moves_of
from penstock.plan.replay.recompute import recomputed_segments
from penstock.plan.replay.result import Replayed, TierUse
from penstock.plan.replay.staged_walk import StagedWalk
from penstock.plan.replay.timeline import average_bytes, trace_of
from penstock.plan.replay.walk import Walk


def replay(profile: Profile, plan: Plan, machine: Machine, *, trace: bool = False) -> Replayed:
    """Simulate one step of a plan. Pure.

    Args:
        profile: The step; not necessarily the profile that the plan was made from.
        plan: The plan. Slots that it does not know are kept.
        machine: The channels' speeds.
        trace: Record memory and the use of channels over time as well.

    Raises:
        PlanError: The plan recomputes something for which the profile has no operators.
    """
    begin_ns, end_ns = with_algorithms(profile, machine, ()).axis_ns
    ideal_ns = end_ns - begin_ns
    profile = with_algorithms(profile, machine, plan.workspace_limits)
    moves = moves_of(profile, plan, machine)
    channels = channels_of(moves, machine, staging_bytes=plan.budgets.staging_bytes)
    segments = recomputed_segments(profile, plan, moves.action)
    walk = (Walk if channels.staged is None else StagedWalk)(
        profile, plan, moves, channels, segments, interference=machine.interference
    )
    walk.run()
    capacity = (plan.budgets.host_bytes, plan.budgets.flash_bytes)
    host, flash = (_tier_use(walk, moves, channels, tier) for tier in (HOST, FLASH))
    return Replayed(
        step_ns=walk.now_ns,
        ideal_ns=ideal_ns,
        lean_ns=walk.computed_ns - ideal_ns,
        recompute_ns=walk.recompute_ns,
        interference_ns=walk.interference_ns,
        budget_ns=walk.budget_ns,
        demand_ns=walk.demand_ns,
        late_ns=walk.late_ns,
        peak_bytes=walk.held.peak_bytes,
        average_bytes=average_bytes(profile, walk),
        host=host,
        flash=flash,
        link_out_ns=_busy_ns(channels.out.values(), moves.link_out_ns),
        link_in_ns=_busy_ns(channels.to_device.values(), moves.link_in_ns),
        flash_write_ns=_busy_ns(channels.to_tier.values(), moves.flash_out_ns),
        flash_read_ns=_busy_ns(channels.back.values(), moves.flash_in_ns),
        codec_ns=_busy_ns([channels.encode], moves.encode_ns)
        + _busy_ns([channels.decode], moves.decode_ns),
        forwarded_bytes=walk.forwarded_bytes,
        staging_peak_bytes=0 if channels.staged is None else channels.staged.room.peak_bytes,
        feasible=walk.held.peak_bytes <= plan.budgets.device_bytes
        and all(peak <= room for peak, room in zip(walk.promised_bytes, capacity, strict=True)),
        trace=trace_of(profile, walk, moves, channels) if trace else None,
    )


def _tier_use(walk: Walk, moves: Moves, channels: Channels, tier: int) -> TierUse:
    if tier not in channels.out:
        return TierUse()
    moved = moves.moved_bytes
    return TierUse(
        written_bytes=sum(moved[i] for _, i in channels.to_tier[tier].log),
        read_bytes=sum(moved[i] for _, i in channels.back[tier].log),
        peak_bytes=walk.held.tier_peak[tier],
    )


def _busy_ns(lanes: Iterable[ReplayLane | None], times: Sequence[int]) -> int:
    return sum(times[i] for lane in lanes if lane is not None for _, i in lane.log)
