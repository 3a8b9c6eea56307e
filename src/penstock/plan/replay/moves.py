"""Actions of a plan for each slot of a profile, and their times on each channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.core.units import round_up
from penstock.plan.groups import PAGE_BYTES
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import CodecSample, Profile, SlotProfile
from penstock.plan.replay.lanes import (
    DECODE,
    ENCODE,
    NOT_YET,
    READ,
    WRITE,
    ReplayChannel,
    ReplayLane,
    ReplayLanes,
)
from penstock.plan.replay.staging import StagedLanes, staged_lanes
from penstock.plan.residency import OFFLOADED, RECOMPUTED

HOST: Final = 0
FLASH: Final = 1
NETWORK: Final = 2
"""Other ranks: weights of which each has a part come from there, and gradients are reduced there."""
TIERS: Final = {"host": HOST, "flash": FLASH}


@dataclass(slots=True)
class Moves:
    """Action, bytes and times per slot of the profile; 0 where nothing moves."""

    action: bytearray
    """KEPT, OFFLOADED or RECOMPUTED. What cannot be staged is kept."""
    tier: bytearray
    """HOST or FLASH for offloaded slots; NETWORK for weights in memory whose other parts are gathered."""
    not_before: dict[int, int]
    """``prefetch_at`` of the slots that have one."""
    moved_bytes: list[int]
    """Encoded bytes that move each way."""
    held_bytes: list[int]
    """Encoded bytes in whole pages, as a tier holds them."""
    link_out_ns: list[int]
    link_in_ns: list[int]
    flash_out_ns: list[int]
    flash_in_ns: list[int]
    encode_ns: list[int]
    decode_ns: list[int]
    write_work_ns: list[int]
    """Compute time lost to writing each slot."""
    read_work_ns: list[int]
    network_ns: dict[int, int] = field(default_factory=dict, kw_only=True)
    """Time on the network of the slots that other ranks have a part in."""

    @property
    def used_tiers(self) -> set[int]:
        """Tiers that the plan uses."""
        return {t for t, a in zip(self.tier, self.action, strict=True) if a == OFFLOADED}


def moves_of(profile: Profile, plan: Plan, machine: Machine) -> Moves:
    """Look every slot up in the plan. Slots that it does not know are kept."""
    count = len(profile.slots)
    moves = Moves(bytearray(count), bytearray(count), {}, *([0] * count for _ in range(10)))
    find = plan.lookup_match
    for i, match in enumerate(profile.match_keys):
        decision = find(match)
        if decision is None or decision.action is Action.KEEP:
            continue
        if decision.action is Action.RECOMPUTE:
            moves.action[i] = RECOMPUTED
        else:
            _offload(moves, i, profile.slots[i], decision, machine, budgets=plan.budgets)
    return moves


def _offload(
    moves: Moves,
    i: int,
    slot: SlotProfile,
    decision: Decision,
    machine: Machine,
    *,
    budgets: Budgets,
) -> None:
    nbytes = slot.key.nbytes
    sample = _sample(slot, decision)
    moved = nbytes if sample is None else sample.encoded_bytes(nbytes)
    tier = TIERS[decision.tier]
    held = round_up(moved, PAGE_BYTES)
    if tier == FLASH and not budgets.stages(held):
        return  # the runtime keeps it
    if sample is not None:
        moves.encode_ns[i] = round(sample.encode_s(nbytes) * 1e9)
        moves.decode_ns[i] = round(sample.decode_s(nbytes) * 1e9)
    moves.action[i] = OFFLOADED
    moves.tier[i] = tier
    moves.moved_bytes[i] = moved
    moves.held_bytes[i] = held
    moves.write_work_ns[i] = machine.write_work_ns(moved)
    moves.read_work_ns[i] = machine.read_work_ns(moved)
    if tier == FLASH:
        moves.flash_out_ns[i] = round(machine.flash_busy_s(moved, writing=True) * 1e9)
        moves.flash_in_ns[i] = round(machine.flash_busy_s(moved, writing=False) * 1e9)
    if tier == HOST or machine.flash_over_link or budgets.staging_bytes:
        moves.link_out_ns[i] = round(moved / machine.host_write_bytes_per_s * 1e9)
        moves.link_in_ns[i] = round(moved / machine.host_read_bytes_per_s * 1e9)
    if decision.prefetch_at is not None:
        moves.not_before[i] = decision.prefetch_at


def _sample(slot: SlotProfile, decision: Decision) -> CodecSample | None:
    if not decision.codec:
        return None
    return next((sample for sample in slot.codecs if sample.codec == decision.codec), None)


@dataclass(slots=True)
class Channels:
    """Lanes of a machine that a plan uses."""

    lanes: ReplayLanes
    out: dict[int, ReplayLane]
    """Write lanes by tier; memory is free at the ends of their jobs. A slot that is encoded goes to
    ``encode`` first."""
    back: dict[int, ReplayLane]
    encode: ReplayLane | None
    decode: ReplayLane | None
    written: list[int]
    """End of the write, or of the copy to staging memory, by slot; NOT_YET or CANCELLED before it has
    begun."""
    arrived: list[int]
    """End of the last read and its decoding, by slot; NOT_YET before."""
    update_in: ReplayLane | None = None
    """Reads of an update: then comes its arithmetic, then its write; all ends are in ``written``."""
    update: ReplayLane | None = None
    reduce: ReplayLane | None = None
    """Gradients on the network, before their update; those that are divided among ranks end there."""
    staged: StagedLanes | None = None
    """Lanes between device and flash if there is staging memory, ``out`` and ``back`` among them."""

    @property
    def to_tier(self) -> dict[int, ReplayLane]:
        """Lanes that end in each tier."""
        return self.out if self.staged is None else {**self.out, FLASH: self.staged.to_flash}

    @property
    def to_device(self) -> dict[int, ReplayLane]:
        """Lanes that end on the device, by tier, decoding aside."""
        return self.back if self.staged is None else {**self.back, FLASH: self.staged.to_device}


def channels_of(
    moves: Moves,
    machine: Machine,
    *,
    staging_bytes: int = 0,
    update_ns: Sequence[int] | None = None,
) -> Channels:
    """Create the lanes that the moves need, all of them idle.

    Args:
        moves: The moves.
        machine: The channels' speeds.
        staging_bytes: Memory through which everything to and from flash passes; 0: nothing is staged.
        update_ns: Time of an optimizer's arithmetic, by slot; None: nothing is updated. What is updated
            is read from and written to flash as ``moves`` says.
    """
    count = len(moves.action)
    written, arrived = [NOT_YET] * count, [NOT_YET] * count
    tiers = (moves.used_tiers | ({FLASH} if update_ns is not None else set())) - {NETWORK}
    coded = any(moves.encode_ns) or any(moves.decode_ns)
    codec, link_out, link_in, flash_out = (ReplayChannel() for _ in range(4))
    flash_in = flash_out if machine.flash_shared else ReplayChannel()
    stages = FLASH in tiers and staging_bytes > 0
    together = coded or stages or update_ns is not None or (FLASH in tiers and machine.flash_shared)
    together = together or (len(tiers) == 2 and machine.flash_over_link)
    out: dict[int, ReplayLane] = {}
    back: dict[int, ReplayLane] = {}
    staged: StagedLanes | None = None
    decode = (
        ReplayLane((codec, moves.decode_ns), precedence=DECODE, done=arrived) if coded else None
    )
    to_next: list[ReplayLane | None] | None = None
    update_uses: list[tuple[ReplayChannel, list[int]]] = []
    reduce = None
    if moves.network_ns:
        back[NETWORK], reduce, out[NETWORK] = _network_lanes(moves, written, arrived)
    if coded or moves.network_ns:
        to_next = [
            back[NETWORK] if i in moves.network_ns else decode if took else None
            for i, took in enumerate(moves.decode_ns)
        ]
    for tier in sorted(tiers):
        out_uses, in_uses = [(link_out, moves.link_out_ns)], [(link_in, moves.link_in_ns)]
        latency_ns = 0
        if tier == FLASH:
            latency_ns = round(machine.flash_latency_s * 1e9)
            out_uses.append((flash_out, moves.flash_out_ns))
            in_uses.append((flash_in, moves.flash_in_ns))
            if not machine.flash_over_link:
                del out_uses[0], in_uses[0]
            update_uses = [*in_uses]
        if tier == FLASH and stages:
            staged = staged_lanes(
                staging_bytes,
                moves.held_bytes,
                link_out=(link_out, moves.link_out_ns),
                link_in=(link_in, moves.link_in_ns),
                flash_out=(flash_out, moves.flash_out_ns),
                flash_in=(flash_in, moves.flash_in_ns),
                written=written,
                arrived=arrived,
                latency_ns=latency_ns,
                to_decode=to_next,
            )
            out[tier], back[tier] = staged.out, staged.back
            continue
        if not together:
            out_uses, in_uses = _merged(out_uses), _merged(in_uses)
        out[tier] = ReplayLane(*out_uses, precedence=WRITE, done=written, latency_ns=latency_ns)
        back[tier] = ReplayLane(
            *in_uses, precedence=READ, done=arrived, latency_ns=latency_ns, then=to_next
        )
    encode = None
    if coded:
        to_tier: list[ReplayLane | None] = [out.get(tier) for tier in moves.tier]
        encode = ReplayLane((codec, moves.encode_ns), precedence=ENCODE, done=written, then=to_tier)
    update_in = update = None
    if update_ns is not None:
        update_in, update = _update_lanes(
            *(moves, update_ns, update_uses, round(machine.flash_latency_s * 1e9)),
            written=written,
            out=out,
            reduce=reduce,
        )
    beyond = () if staged is None else (staged.to_device, staged.to_flash)
    ordered = (decode, update, *back.values(), reduce, update_in, *beyond, *out.values(), encode)
    lanes = ReplayLanes([lane for lane in ordered if lane is not None], together=together)
    if staged is not None:
        staged.back.lanes = lanes
    return Channels(
        *(lanes, out, back, encode, decode, written, arrived), update_in, update, reduce, staged
    )


def _update_lanes(
    moves: Moves,
    update_ns: Sequence[int],
    uses: Sequence[tuple[ReplayChannel, Sequence[int]]],
    latency_ns: int,
    *,
    written: list[int],
    out: dict[int, ReplayLane],
    reduce: ReplayLane | None,
) -> tuple[ReplayLane, ReplayLane]:
    """Return the lanes of an update's reads and of its arithmetic; then come the writes, if any.

    What is reduced first goes on to them from there.
    """
    last = out.get(NETWORK, out[FLASH])
    host = out.get(HOST, last)
    update = ReplayLane(
        (ReplayChannel(), update_ns),
        precedence=DECODE,
        done=written,
        then=[
            out[FLASH] if took else host if linked else last
            for took, linked in zip(moves.flash_out_ns, moves.link_out_ns, strict=True)
        ],
    )
    reads = ReplayLane(
        *uses,
        precedence=WRITE,
        done=written,
        latency_ns=latency_ns,
        then=[update] * len(moves.action),
    )
    if reduce is not None:
        reduce.then = [
            last if tier == NETWORK else reads if took else update
            for tier, took in zip(moves.tier, moves.flash_in_ns, strict=True)
        ]
    return reads, update


def _network_lanes(
    moves: Moves, written: list[int], arrived: list[int]
) -> tuple[ReplayLane, ReplayLane, ReplayLane]:
    """Return the lanes of what is gathered and of what is reduced, and of what ends there, in no time."""
    count = len(moves.action)
    network, times = ReplayChannel(), [moves.network_ns.get(i, 0) for i in range(count)]
    return (
        ReplayLane((network, times), precedence=READ, done=arrived),
        ReplayLane((network, times), precedence=WRITE, done=written),
        ReplayLane((ReplayChannel(), [0] * count), precedence=WRITE, done=written),
    )


def _merged(uses: list[tuple[ReplayChannel, list[int]]]) -> list[tuple[ReplayChannel, list[int]]]:
    """Merge channels that no other lane uses into one that is busy as long as the busiest of them."""
    if len(uses) == 1:
        return uses
    return [(ReplayChannel(), list(map(max, *(times for _, times in uses))))]
