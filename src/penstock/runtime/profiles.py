"""From the passes that a session has seen to the profile that plans are made from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from penstock.plan.profile import CodecSample, PassProfile, Profile, SlotProfile
from penstock.plan.slots import MatchKey
from penstock.runtime.sampling import POSITIVE
from penstock.runtime.storage import Pass, SlotRecord


def profile_of(
    kinds: Sequence[Pass],
    *,
    device: str,
    held: Collection[MatchKey],
    unrepeatable: Collection[str],
) -> Profile:
    """The profile of a step that has one pass of each kind.

    Args:
        kinds: Finished passes.
        device: What they ran on.
        held: Slots that something else was found to keep alive, in any pass.
        unrepeatable: Paths of the modules that cannot be run again.
    """
    passes = sorted(kinds, key=lambda one: one.index)
    records = (record for one in passes for record in one.records)
    places = {id(record): i for i, record in enumerate(records)}
    operators = (replace(each, pass_index=one.index) for one in passes for each in one.operators)
    return Profile(
        device=device,
        slots=tuple(slot for one in passes for slot in _slots(one, held, places)),
        passes=tuple(_pass(one) for one in passes),
        small_bytes=max((one.small_bytes for one in passes), default=0),
        small_count=sum(one.small_count for one in passes),
        operators=tuple(operators),
        unrepeatable=tuple(sorted(unrepeatable)),
    )


def _pass(one: Pass) -> PassProfile:
    # another thread's stall, once over, takes this one's time back to before it
    backward_ns = max(one.backward_start_ns or one.end_ns or 0, one.start_ns)
    return PassProfile(one.index, one.start_ns, backward_ns, max(one.end_ns or 0, backward_ns))


def _slots(one: Pass, held: Collection[MatchKey], places: Mapping[int, int]) -> list[SlotProfile]:
    """All of a pass. What is small and saved after the last of them is there when backward begins.

    How much of it is left when each of them is needed is not known; most of it, if it was saved last, is
    let go of first. So it counts beside the first one that is needed, and beside no other.
    """
    slots = [_slot(one, record, held, places) for record in one.records]
    needed = [
        (slot.needed_at_ns, -i) for i, slot in enumerate(slots) if slot.needed_at_ns is not None
    ]
    if needed:
        first = -min(needed)[1]
        at_need = max(one.small_bytes, slots[first].small_bytes or 0)
        slots[first] = replace(slots[first], small_bytes_at_need=at_need)
    return slots


def _slot(
    one: Pass, record: SlotRecord, held: Collection[MatchKey], places: Mapping[int, int]
) -> SlotProfile:
    source = None if record.source is None else places.get(id(record.source))
    needed_ns = record.needed_at_ns
    return SlotProfile(
        key=record.key,
        pass_index=one.index,
        saved_at_ns=record.saved_at_ns,
        needed_at_ns=needed_ns and max(needed_ns, record.saved_at_ns),
        kind=record.origin.kind,
        held_elsewhere=record.held_elsewhere or record.key.match_key in held,
        dtype=record.origin.dtype,
        small_bytes=record.small_bytes,
        codecs=_usable(record),
        producer=record.producer,
        recipe=() if source is None else record.recipe,
        source=source,
    )


def _usable(record: SlotRecord) -> tuple[CodecSample, ...]:
    """Samples of a record, without the codec of signs where they are not proven to be enough."""
    if record.sign_only_handles == record.handles:
        return record.codecs
    return tuple(sample for sample in record.codecs if sample.codec != POSITIVE)
