"""Weights whose place is on flash: what each module's are, when they are used, and bytes of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeVar

from penstock.core.errors import PlanError
from penstock.core.units import MIB, round_up
from penstock.plan.groups import PAGE_BYTES
from penstock.plan.operators import Operator

Name = TypeVar("Name", bound=Hashable)
SMALL_BYTES: Final = MIB
"""Weights below this size are always kept, as sessions do by default."""
IN_BACKWARD: Final = "backward"
"""Weights are updated as soon as their gradients are final, as by a flash optimizer with ``overlap``."""
IN_STEP: Final = "step"
"""Weights are updated in ``step()``, after backward."""
LEAST_SPILLED_BYTES: Final = 1 << 16
"""Gradients up to this size wait in memory, as those of flash optimizers do."""


@dataclass(frozen=True, slots=True)
class WeightUse:
    """Operators of a profile that use a module's weights one after the other."""

    first: int
    """Index of the first operator."""
    last: int
    """Index of the last operator."""
    backward: bool
    of_update: bool = False
    """True if only the update needs the weights then. Where that is in ``step()``, after all operators,
    the indices go on from theirs, one for each update in their order."""


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """Parameters that one module owns itself, without those of modules inside it.

    Raises:
        PlanError: A count is negative, more is trained than there is, operators are not in order, or no
            use ends with the gradient.
    """

    module: str
    """Path of the module; ``""`` is the root."""
    nbytes: int
    """Bytes of its parameters, without ``small_bytes``. Those that share a storage count where they are
    found first."""
    trained_bytes: int = 0
    """Bytes of those of them that are trained; their gradients have as many."""
    trained: int = 0
    """Number of trained parameters (elements), small ones too."""
    dtype: str = "float32"
    """Type of its parameters."""
    uses: tuple[WeightUse, ...] = ()
    """Uses in one step, in order. Each needs the weights in memory."""
    gradient: WeightUse | None = None
    """Operators from the first that makes its gradient until it is final; None: it gets none."""
    record_bytes: int = 0
    """Bytes of the optimizer's records for it, which an update reads and writes once."""
    update_ns: int = 0
    """Time of the arithmetic of its update, where it was measured; 0: derived from memory traffic."""
    shards: int = 1
    """Parts into which ranks divide it (FSDP2). Each rank reads, updates and writes its own, and all
    parts are gathered for each use. 1: the whole is on every rank."""
    small_bytes: int = 0
    """Bytes of parameters smaller than ``SMALL_BYTES`` beside larger ones: they stay in memory."""
    is_small: bool = False
    """True if all of its parameters are so small."""
    on_host: bool = False
    """True if they rest in host memory, so that they pass the link to a device alone, and not flash."""
    gathered_bytes: int = 0
    """Bytes that come from other ranks for each use; the next come while its gradient is reduced."""
    reduced_bytes: int = 0
    made: tuple[WeightUse, ...] = ()
    """Operators of each backward that makes its gradient or adds to it. If ``step()`` updates it,
    ``gradient`` and ``uses`` end later, with the update. (): uses in backward tell."""

    def __post_init__(self) -> None:
        counts = (
            *(self.nbytes, self.trained_bytes, self.trained, self.record_bytes, self.update_ns),
            *(self.shards - 1, self.gathered_bytes, self.reduced_bytes),
        )
        if min(counts) < 0:
            raise PlanError(f"weights of {self.module!r}: a count is negative: {self}")
        if self.trained_bytes > self.nbytes:
            raise PlanError(
                f"weights of {self.module!r}: {self.trained_bytes} bytes are trained, of {self.nbytes}"
            )
        for use in (*self.uses, *([] if self.gradient is None else [self.gradient])):
            if not 0 <= use.first <= use.last:
                raise PlanError(f"weights of {self.module!r}: operators of {use} are not in order")
        if self.gradient is not None and self.gradient.last not in {use.last for use in self.uses}:
            raise PlanError(
                f"weights of {self.module!r}: no use ends with its gradient, at operator"
                f" {self.gradient.last}, but the update needs them then"
            )

    @property
    def updated(self) -> bool:
        """True if a step changes it."""
        return self.gradient is not None and self.trained > 0

    @property
    def is_updated_in_step(self) -> bool:
        """True if ``step()`` updates it, after all backwards."""
        made, gradient = self.made, self.gradient
        return (
            gradient is not None and self.updated and bool(made) and gradient.last > made[-1].last
        )

    @property
    def backwards(self) -> tuple[WeightUse, ...]:
        """Operators of each backward that makes its gradient or adds to it, in order.

        The module runs forward between two backwards.
        """
        if self.gradient is None or self.made:
            return self.made
        found: list[WeightUse] = []
        is_forward = True
        for use in self.uses:
            if not self.gradient.first <= use.last <= self.gradient.last:
                continue
            if use.backward:
                first = use.first if is_forward or not found else found.pop().first
                found.append(replace(use, first=max(first, self.gradient.first)))
            is_forward = not use.backward
        return tuple(found) or (self.gradient,)

    @property
    def waits(self) -> bool:
        """True if its gradient waits, for an update in ``step()`` or for what other backwards add."""
        return self.updated and (self.is_updated_in_step or len(self.backwards) > 1)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its gradient on flash, in whole pages."""
        return round_up(self.trained_bytes, PAGE_BYTES)

    @property
    def gradient_writes(self) -> int:
        """Times that its gradient is written in a step if it waits on flash, and read.

        After each backward, except one that is followed by the update.
        """
        return len(self.backwards) - (not self.is_updated_in_step)

    @property
    def can_rest(self) -> bool:
        """True if it is large enough not to be always in memory."""
        return not self.is_small and self.nbytes >= SMALL_BYTES

    @property
    def loads(self) -> int:
        """Number of reads in a step, if its weights are on flash."""
        return len(self.uses)

    @property
    def read_bytes(self) -> int:
        """Bytes of one read, in whole pages: this rank's part."""
        return round_up(self.part_of(self.nbytes), PAGE_BYTES)

    @property
    def written_bytes(self) -> int:
        """Bytes that a step writes home, in whole pages: those of trained parameters."""
        return round_up(self.part_of(self.trained_bytes), PAGE_BYTES) if self.updated else 0

    @property
    def gathered(self) -> bool:
        """True if other ranks have parts of it, which each use needs."""
        return self.shards > 1

    def held_bytes(self, *, kept: bool) -> int:
        """Return the bytes in memory during a use, beside those that are ``kept`` there anyway.

        If it is gathered, that is the whole, and the part that was read for it.
        """
        part = 0 if kept else self.read_bytes
        return part + round_up(self.nbytes, PAGE_BYTES) if self.gathered else part

    def part_of(self, count: int) -> int:
        """Return this rank's part of bytes or elements, rounded up."""
        return -(-count // self.shards)

    @property
    def state_bytes(self) -> int:
        """Bytes of its records that a step reads, and writes."""
        return self.record_bytes if self.updated else 0


class OperatorRuns:
    """Runs of operators of one module and direction, one after the other; each uses weights once."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        """Divide the operators of a profile into runs."""
        self._uses = list(_runs(operators))
        self._of = [
            place for place, use in enumerate(self._uses) for _ in range(use.first, use.last + 1)
        ]

    def uses_of(
        self, used: Iterable[int], final: int | None
    ) -> tuple[tuple[WeightUse, ...], WeightUse | None]:
        """Return the uses of one module's weights, and the operators that make its gradient.

        Args:
            used: Indices of the operators that use the weights.
            final: Index of the operator after which the gradient is final; None: there is no gradient.
                It is there from the first operator of backward that uses the weights, or of the run in
                which it is final.
        """
        places = {self._of[index] for index in used}
        gradient, alone = None, -1
        if final is not None:
            end = self._of[final]
            alone = -1 if end in places else end
            places.add(end)  # the update needs the weights
            begin = min(place for place in places if place == end or self._uses[place].backward)
            gradient = WeightUse(self._uses[begin].first, self._uses[end].last, backward=True)
        uses = (replace(self._uses[i], of_update=i == alone) for i in sorted(places))
        return tuple(uses), gradient


def _runs(operators: Sequence[Operator]) -> Iterator[WeightUse]:
    if not operators:
        return
    first = 0
    for index, (one, other) in enumerate(pairwise(operators)):
        if (one.module, one.backward) != (other.module, other.backward):
            yield WeightUse(first, index, one.backward)
            first = index + 1
    yield WeightUse(first, len(operators) - 1, operators[-1].backward)


def with_records(
    weights: Iterable[ModuleWeights],
    record_bytes: Callable[[int, str], int],
    update_s: float = 0.0,
) -> tuple[ModuleWeights, ...]:
    """Return the weights with records of ``record_bytes(trained elements, dtype)`` bytes.

    ``update_s`` is the time of the update of one parameter; 0: not known.
    """
    return tuple(
        replace(
            one,
            record_bytes=record_bytes(one.part_of(one.trained), one.dtype) if one.trained else 0,
            update_ns=round(one.part_of(one.trained) * update_s * 1e9),
        )
        for one in weights
    )


def forward_only(weights: Iterable[ModuleWeights]) -> tuple[ModuleWeights, ...]:
    """Return the weights as inference uses them: no backward, no gradient, no update."""
    return tuple(
        replace(
            one,
            uses=tuple(use for use in one.uses if not use.backward),
            gradient=None,
            record_bytes=0,
            update_ns=0,
            reduced_bytes=0,
        )
        for one in weights
    )


def updated_in_step(weights: Sequence[ModuleWeights], operators: int) -> tuple[ModuleWeights, ...]:
    """Return the weights with updates in ``step()``, as of a flash optimizer without ``overlap``.

    It updates the last of them first. Each weight is used once more for that, and its gradient lasts
    until then.

    Args:
        weights: All weights, in the order of the optimizer's parameters.
        operators: Number of operators of the step.
    """
    updated = [one.module for one in weights if one.updated]
    turns = {module: operators + turn for turn, module in enumerate(reversed(updated))}
    return tuple(
        _updated_at(one, turns[one.module]) if one.module in turns else one for one in weights
    )


def _updated_at(one: ModuleWeights, turn: int) -> ModuleWeights:
    assert one.gradient is not None
    uses = [use for use in one.uses if not use.of_update]
    uses.append(WeightUse(turn, turn, backward=True, of_update=True))
    gradient = replace(one.gradient, last=turn)
    return replace(one, uses=tuple(uses), gradient=gradient, made=one.backwards)


def spilled_gradients(weights: Iterable[ModuleWeights], memory_bytes: int) -> frozenset[str]:
    """Return the modules whose gradients wait on flash, as an optimizer chooses them.

    A gradient that comes when those that wait in memory, with it, exceed ``memory_bytes`` is written to
    flash. Backward makes gradients in the same order each time, so the first ones stay.
    """
    waiting = sorted((one for one in weights if one.waits), key=lambda one: one.backwards[0].last)
    spilled: set[str] = set()
    held_bytes = 0
    for one in waiting:
        if one.trained_bytes > LEAST_SPILLED_BYTES and (
            held_bytes + one.trained_bytes > memory_bytes
        ):
            spilled.add(one.module)
        else:
            held_bytes += one.trained_bytes
    return frozenset(spilled)


def waiting_bytes(weights: Iterable[ModuleWeights], choice: WeightsChoice) -> int:
    """Return the bytes of gradients that wait in memory."""
    return sum(
        one.trained_bytes for one in weights if one.waits and one.module not in choice.spilled
    )


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that a step of one rank moves for weights and their update, to and from flash."""

    weights_read: int = 0
    weights_written: int = 0
    records_read: int = 0
    records_written: int = 0
    network: int = 0
    """Bytes that come over the network, from other ranks."""
    gradients_read: int = 0
    """Bytes of gradients that wait; the next are those that are written."""
    gradients_written: int = 0
    host_read: int = 0
    """Bytes of weights that come from host memory, over the link; the next go there."""
    host_written: int = 0

    @property
    def read(self) -> int:
        """Bytes read in all."""
        return self.weights_read + self.records_read + self.gradients_read

    @property
    def written(self) -> int:
        """Bytes written in all."""
        return self.weights_written + self.records_written + self.gradients_written


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """Weights and records that stay in memory, and the memory for those that come and go."""

    kept: frozenset[str] = frozenset()
    """Modules whose weights stay always."""
    cached: frozenset[str] = frozenset()
    """Modules whose optimizer records stay."""
    window_bytes: int = 0
    """Most bytes of weights that are read, their gradients, and updates on their way to flash."""
    stays: frozenset[tuple[str, int]] = frozenset()
    """Modules, and the numbers of their uses, after which weights that are not kept stay until the next
    one: after the last comes the first of the next step."""
    spilled: frozenset[str] = frozenset()
    """Modules whose gradients wait on flash."""
    clips: bool = False
    """True if the program clips gradients before ``step()``: those on flash are read for the norm, and
    read and written to be scaled."""

    def loads_of(self, one: ModuleWeights) -> list[WeightUse]:
        """Return the spans of operators for which a module's weights are read in a step.

        Uses between which they stay are one span, unless each gathers them from other ranks.
        """
        if one.module in self.kept:
            return []
        found: list[WeightUse] = []
        for number, use in enumerate(one.uses):
            if (one.module, (number or len(one.uses)) - 1) not in self.stays:
                found.append(use)
            elif number and found and not one.gathered:
                found[-1] = replace(found[-1], last=use.last, backward=use.backward)
        return found


def step_bytes(weights: Iterable[ModuleWeights], choice: WeightsChoice) -> StepBytes:
    """Count the bytes of a step, to the page.

    Args:
        weights: All weights.
        choice: What stays in memory.
    """
    weights = tuple(weights)
    streamed = [one for one in weights if one.module not in choice.kept]
    on_flash = [one for one in streamed if not one.on_host]
    on_host = [one for one in streamed if one.on_host]
    states = sum(one.state_bytes for one in weights if one.module not in choice.cached)
    spilled = [one for one in weights if one.module in choice.spilled and one.gradient_writes]
    waiting = sum(one.gradient_writes * one.gradient_bytes for one in spilled)
    clipped = sum(one.gradient_bytes for one in spilled) if choice.clips else 0
    return StepBytes(
        weights_read=_read_bytes(on_flash, choice),
        weights_written=sum(one.written_bytes for one in on_flash),
        host_read=_read_bytes(on_host, choice),
        host_written=sum(one.written_bytes for one in on_host),
        records_read=states,
        records_written=states,
        network=sum(
            one.loads * one.gathered_bytes + one.reduced_bytes * one.updated for one in weights
        ),
        gradients_read=waiting + 2 * clipped,
        gradients_written=waiting + clipped,
    )


def moved_in_step(weights: Iterable[ModuleWeights], choice: WeightsChoice) -> tuple[int, int]:
    """Return the bytes that ``step()``, and clips before it, read from flash, and those they write."""
    read = written = 0
    for one in weights:
        if not one.is_updated_in_step:
            continue
        states = one.state_bytes * (one.module not in choice.cached)
        gradient = one.gradient_bytes * (one.module in choice.spilled)
        clipped = gradient * choice.clips
        loads = choice.loads_of(one)
        comes = bool(loads) and loads[-1].first == one.uses[-1].first and not one.on_host
        goes = one.module not in choice.kept and not one.on_host
        read += states + gradient + 2 * clipped + one.read_bytes * comes
        written += states + clipped + one.written_bytes * goes
    return read, written


def _read_bytes(weights: Iterable[ModuleWeights], choice: WeightsChoice) -> int:
    return sum(len(choice.loads_of(one)) * one.read_bytes for one in weights)


def resting_on_host(
    weights: Sequence[ModuleWeights], host_bytes: int
) -> tuple[tuple[ModuleWeights, ...], int]:
    """Let as many weights rest in host memory as fit, spread over all, as a session does.

    Returns:
        The weights, and the bytes of host memory that are left.
    """
    sizes = [(one.module, one.read_bytes) for one in weights if one.can_rest]
    chosen = share_of(sizes, host_bytes / max(1, sum(nbytes for _, nbytes in sizes)))
    left = host_bytes - sum(nbytes for module, nbytes in sizes if module in chosen)
    return tuple(replace(one, on_host=one.module in chosen) for one in weights), left


def share_of(
    sizes: Sequence[tuple[Name, int]], share: float, *, always_bytes: int = 0
) -> frozenset[Name]:
    """Choose names whose sizes are at most a share of all bytes, spread evenly over the order.

    Evenly, because flash then has something to read all the time. Those below ``always_bytes`` are always
    chosen, and count for nothing.
    """
    if share >= 1:
        return frozenset(name for name, _ in sizes)
    chosen: set[Name] = set()
    seen_bytes = taken_bytes = 0
    for name, nbytes in sizes:
        if nbytes < always_bytes:
            chosen.add(name)
            continue
        seen_bytes += nbytes
        if taken_bytes + nbytes <= share * seen_bytes:
            chosen.add(name)
            taken_bytes += nbytes
    return frozenset(chosen)
