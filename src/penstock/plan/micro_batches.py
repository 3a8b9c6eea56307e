"""Steps of several micro-batches, made from the profile of one: in a loop, or block by block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.plan.operators import Operator
from penstock.plan.profile import PassProfile, Profile, SlotProfile, Transient
from penstock.plan.weights import ModuleWeights, WeightUse


@dataclass(frozen=True)
class BatchedStep:
    """A step of several micro-batches."""

    profile: Profile
    weights: tuple[ModuleWeights, ...]
    """Weights of each module, and the operators of ``profile`` that use them."""
    tokens: int
    """Tokens of all micro-batches; 0 if their inputs are no tokens."""


def accumulated(
    profile: Profile, weights: Sequence[ModuleWeights], count: int
) -> tuple[Profile, tuple[ModuleWeights, ...]]:
    """Return a step of ``count`` forwards and backwards, each like the one that is given."""
    begin, end = profile.axis_ns
    operators, slots = len(profile.operators), len(profile.slots)
    first = max((one.index for one in profile.passes), default=0) + 1
    starts = [copy * (end - begin) for copy in range(count)]
    whole = replace(
        profile,
        operators=tuple(
            replace(
                one.moved(one.start_ns + delta, one.end_ns + delta),
                pass_index=one.pass_index + copy * first,
            )
            for copy, delta in enumerate(starts)
            for one in profile.operators
        ),
        passes=tuple(
            PassProfile(
                one.index + copy * first,
                one.start_ns + delta,
                one.backward_start_ns + delta,
                one.end_ns + delta,
            )
            for copy, delta in enumerate(starts)
            for one in profile.passes
        ),
        slots=tuple(
            replace(
                slot,
                pass_index=slot.pass_index + copy * first,
                saved_at_ns=slot.saved_at_ns + delta,
                needed_at_ns=None if slot.needed_at_ns is None else slot.needed_at_ns + delta,
                source=None if slot.source is None else slot.source + copy * slots,
            )
            for copy, delta in enumerate(starts)
            for slot in profile.slots
        ),
        transients=tuple(
            Transient(one.at_ns + delta, one.nbytes)
            for delta in starts
            for one in profile.transients
        ),
        small_count=count * profile.small_count,
        protected_bytes=count * profile.protected_bytes,
    )

    def moved(use: WeightUse, copy: int) -> WeightUse:
        shift = copy * operators
        return replace(use, first=use.first + shift, last=use.last + shift)

    return whole, tuple(_used_by(one, count, moved) for one in weights)


def micro_batched(
    profile: Profile, weights: Sequence[ModuleWeights], parts: int
) -> tuple[Profile, tuple[ModuleWeights, ...]]:
    """Return a step of ``parts`` micro-batches, each like the one given, as ``penstock.micro_batched``.

    A block is what has the same path up to its first number, as ``blocks.3`` of ``blocks.3.mlp.1``. Each
    block computes all micro-batches before the next does, forward and backward. Nothing is recomputed.
    """
    if not profile.operators:
        return profile, tuple(weights)
    blocks = _Blocks(profile, parts)
    whole = replace(
        profile,
        operators=tuple(blocks.operators()),
        passes=tuple(
            replace(
                one,
                start_ns=blocks.time(one.start_ns, 0),
                backward_start_ns=blocks.time(one.backward_start_ns, parts - 1, is_end=True),
                end_ns=blocks.time(one.end_ns, parts - 1, is_end=True),
            )
            for one in profile.passes
        ),
        slots=tuple(blocks.slots()),
        transients=tuple(blocks.transients()),
        small_count=parts * profile.small_count,
        protected_bytes=parts * profile.protected_bytes,
    )
    used = (_used_by(one, parts, blocks.use) for one in weights)
    return whole, tuple(replace(one, made=_joined(one.made, parts)) for one in used)


def _used_by(
    one: ModuleWeights, count: int, moved: Callable[[WeightUse, int], WeightUse]
) -> ModuleWeights:
    """Return weights as ``count`` micro-batches use them; ``moved`` gives a use by one of these."""
    uses = [
        moved(use, copy)
        for copy in range(count)
        for use in one.uses
        if copy == count - 1 or not use.of_update
    ]
    uses.sort(key=lambda use: use.first)
    if one.gradient is None:
        return replace(one, uses=tuple(_merged(uses)))
    made = tuple(moved(use, copy) for copy in range(count) for use in one.backwards)
    gradient = replace(one.gradient, first=made[0].first, last=made[-1].last)
    return replace(one, uses=tuple(_merged(uses)), gradient=gradient, made=made)


def _merged(uses: Sequence[WeightUse]) -> list[WeightUse]:
    """Return uses with those joined that follow one another at once."""
    found: list[WeightUse] = []
    for use in uses:
        before = found[-1] if found else None
        if before is None or (before.last + 1, before.backward) != (use.first, use.backward):
            found.append(use)
            continue
        of_update = before.of_update and use.of_update
        found[-1] = replace(before, last=use.last, of_update=of_update)
    return found


def _joined(made: Sequence[WeightUse], parts: int) -> tuple[WeightUse, ...]:
    """Return the backwards of all micro-batches, where each has one of several, or the only one."""
    each = len(made) // parts
    return tuple(
        replace(made[place], last=made[(parts - 1) * each + place].last) for place in range(each)
    )


def _block_of(one: Operator) -> tuple[str, bool]:
    """Return the path of the block of an operator, and whether it is of backward."""
    parts = one.module.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1]), one.backward


class _Blocks:
    """Blocks of a profile, one after the other, each of which all micro-batches pass in turn."""

    def __init__(self, profile: Profile, parts: int) -> None:
        self._profile = profile
        self._parts = parts
        operators = profile.operators
        begin, end = profile.axis_ns
        turns = [
            place
            for place, (one, other) in enumerate(pairwise(operators), start=1)
            if _block_of(one) != _block_of(other)
        ]
        self._first = [0, *turns, len(operators)]
        """Index of the first operator of each block; then the number of all."""
        self._begin = [begin, *(operators[place].start_ns for place in turns), end]

    def _place(self, index: int, copy: int) -> int:
        """Return the index of an operator of a micro-batch."""
        block = bisect_right(self._first, index) - 1
        first, following = self._first[block : block + 2]
        return self._parts * first + copy * (following - first) + index - first

    def time(self, at_ns: int, copy: int, *, is_end: bool = False) -> int:
        """Return a time of a micro-batch; ``is_end`` if what it ends belongs to the block before it."""
        find = bisect_left if is_end else bisect_right
        block = min(max(find(self._begin, at_ns) - 1, 0), len(self._begin) - 2)
        begin, end = self._begin[block : block + 2]
        return (
            self._begin[0]
            + self._parts * (begin - self._begin[0])
            + (copy * (end - begin) + at_ns - begin)
        )

    def use(self, use: WeightUse, copy: int) -> WeightUse:
        """Return a use by a micro-batch."""
        return replace(use, first=self._place(use.first, copy), last=self._place(use.last, copy))

    def operators(self) -> Iterator[Operator]:
        """Yield the operators of all micro-batches in order."""
        operators = self._profile.operators
        for first, following in pairwise(self._first):
            for copy in range(self._parts):
                for one in operators[first:following]:
                    begin_ns = self.time(one.start_ns, copy)
                    yield one.moved(begin_ns, begin_ns + one.end_ns - one.start_ns)

    def slots(self) -> list[SlotProfile]:
        """Return the slots of all micro-batches in the order of saving."""
        counts = Counter(slot.key.module for slot in self._profile.slots)
        found = []
        for copy in range(self._parts):
            for slot in self._profile.slots:
                ordinal = slot.key.ordinal + copy * counts[slot.key.module]
                needed_ns = slot.needed_at_ns
                found.append(
                    replace(
                        slot,
                        key=replace(slot.key, ordinal=ordinal),
                        saved_at_ns=self.time(slot.saved_at_ns, copy, is_end=True),
                        needed_at_ns=None if needed_ns is None else self.time(needed_ns, copy),
                        producer=None,
                        recipe=(),
                        source=None,
                    )
                )
        return sorted(found, key=lambda slot: slot.saved_at_ns)

    def transients(self) -> Iterator[Transient]:
        """Yield the other memory of a device, of one micro-batch after the other in each block."""
        times = [one.at_ns for one in self._profile.transients]
        for begin, end in pairwise(self._begin):
            place, last = bisect_right(times, begin) - 1, bisect_left(times, end)
            for copy in range(self._parts):
                for one in self._profile.transients[max(place, 0) : last]:
                    at_ns = max(one.at_ns, begin)
                    yield Transient(self.time(at_ns, copy), one.nbytes)
