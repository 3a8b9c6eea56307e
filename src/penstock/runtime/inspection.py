"""Values of ``Session.inspect()``: everything that a session holds and moves, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from penstock.plan.slots import SlotKey
from penstock.runtime.orders import Orders
from penstock.runtime.storage import Pass, Residency, SavedStorage
from penstock.store.base import Tier

SlotState: TypeAlias = Literal[
    "kept", "resident", "writing", "spilled", "dropped", "reading", "restored"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlot:
    """A storage that autograd has saved, and that is not dead."""

    key: SlotKey
    """Name and size of its slot."""
    state: SlotState
    """``kept``: in memory, and only counted, because the plan keeps it. ``resident``: in memory.
    ``writing``: in memory, and on its way to a tier. ``spilled``: only in a tier. ``dropped``: nowhere,
    it will be recomputed. ``reading``: on its way back. ``restored``: in memory again and in the tier."""
    tier: str = ""
    """Name of the tier that has its bytes, or gets them; ``""`` if none does."""
    codec: str = ""
    """Codec of the bytes in the tier; ``""``: they are as they were."""
    handles: int = 1
    """Saved tensors that are views of it."""
    pending: int = 0
    """Handles that backward has not asked for yet."""
    pass_index: int = 0
    """Number of the pass that has saved it, from 1."""
    storage_key: int = 0
    """Address of torch's object of the storage (``storage._cdata``); it may be used again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """State of one device: what is held and moved."""

    device: str
    """Name of the device, as ``"cuda:0"``."""
    limit_bytes: int
    """Budget of the device's memory."""
    used_bytes: int
    """Bytes charged to the budget now."""
    peak_bytes: int
    """Most bytes ever charged at once."""
    holdings: Mapping[str, int]
    """Bytes charged, by owner; owners that hold nothing are left out."""
    slots: tuple[HeldSlot, ...]
    """Storages from the floor upwards, in the order of saving."""
    small_count: int
    """Number of storages below the floor."""
    small_bytes: int
    """Bytes of storages below the floor."""
    restored_bytes: int
    """Bytes of memory in use for restored storages, also those that only the program still holds."""
    writes: int
    """Writes of storages in flight."""
    writing_bytes: int
    """Bytes of the storages that these writes free."""
    reads: int
    """Reads of storages in flight."""
    pass_index: int
    """Number of the running pass, or of the last one."""
    orders: Orders
    """Orders in force; ``orders.plan`` is the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    """How full a tier is."""

    name: str
    """Name, as in plans, such as ``"flash"`` or ``"host"``."""
    capacity_bytes: int
    """Most bytes that it may hold."""
    held_bytes: int
    """Bytes that it holds, or that are on their way in."""
    taken_bytes: int
    """Bytes of the capacity in use, in whole units of the tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """A session at one moment."""

    steps: int
    """Number of finished steps."""
    suspended: bool
    """True if its memory is on flash; see ``penstock.suspend``."""
    devices: Mapping[str, DeviceState]
    """States of the devices by name; the session's own device comes first."""
    tiers: Mapping[str, TierState]
    """Levels of tiers, by name."""

    @property
    def device(self) -> DeviceState:
        """State of the session's own device."""
        return next(iter(self.devices.values()))


def held_slots(passes: list[Pass]) -> tuple[HeldSlot, ...]:
    """Return the slots of some passes, in the order of saving. Call it under the runtime's lock."""
    ordered = sorted(passes, key=lambda each: each.index)
    return tuple(_held_slot(each.live[index]) for each in ordered for index in sorted(each.live))


def tier_state(name: str, tier: Tier) -> TierState:
    """Return the level of a tier."""
    return TierState(
        name=name,
        capacity_bytes=tier.spec.capacity_bytes,
        held_bytes=tier.held_bytes,
        taken_bytes=tier.taken_bytes,
    )


def _held_slot(saved: SavedStorage) -> HeldSlot:
    tier = codec = ""
    if saved.state is Residency.KEPT:
        views = [view for ref in saved.views or () if (view := ref()) is not None]
        state, pending = "kept", sum(not view.unpacked for view in views)
    else:
        is_dropped = saved.recipe is not None and saved.state is Residency.SPILLED
        state, pending = "dropped" if is_dropped else saved.state.value, max(0, saved.pending)
        if saved.tier is not None and (saved.ticket is not None or saved.writing):
            tier = saved.tier.spec.name
            codec = "" if saved.encoding is None else saved.encoding.codec
    return HeldSlot(
        key=saved.key,
        state=cast(SlotState, state),
        tier=tier,
        codec=codec,
        handles=saved.handles,
        pending=pending,
        pass_index=saved.of_pass.index,
        storage_key=saved.cdata,
    )
