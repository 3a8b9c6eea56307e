"""Plan of a whole training step: saved tensors, weights on flash, gradients and the optimizer's update.

Memory is one number. What must be there comes first: the window for weights that come and go, with the
gradient that is being made, the buffers of transfers, and the least that saved tensors need. What is left
goes to weights, which save up to three transfers a step, and then to records and saved tensors, which
save two. Plans for some shares of each are replayed, and the one with the shortest step is taken.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from penstock.core.errors import BudgetError, NoSpaceError, PlanError
from penstock.core.units import MIB, format_bytes, round_up
from penstock.plan.convolution import with_algorithms
from penstock.plan.groups import PAGE_BYTES
from penstock.plan.machine import Budgets, Machine
from penstock.plan.min_budget import min_budget
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.replay.step_moves import MOST_PIECES, step_slots, update_ns
from penstock.plan.replay.step_walk import ReplayedStep, replay_step
from penstock.plan.step_plan import StepBounds, StepMemory, StepPlan, hidden_factor
from penstock.plan.step_profile import without_weights
from penstock.plan.weight_stays import order_of_uses, weight_stays
from penstock.plan.weights import (
    IN_BACKWARD,
    IN_STEP,
    SMALL_BYTES,
    ModuleWeights,
    StepBytes,
    WeightsChoice,
    moved_in_step,
    share_of,
    spilled_gradients,
    step_bytes,
    updated_in_step,
    waiting_bytes,
)

Policy = Callable[[Profile, Machine, Budgets], Plan]
ENGINE_BYTES: Final = 48 * MIB
"""Host memory of the buffers that reads and writes of weights pass through."""
_SHARES: Final = 16
"""Shares of all weights that memory for weights is tried to have."""
_RECORD_SHARES: Final = 4
"""Shares of records that are tried."""
_AMPLE_BYTES: Final = 1 << 60
_FEW_LARGEST: Final = (2, 4, 10)
"""Largest modules that memory for weights is tried to hold, beside its shares of all."""
_AHEAD: Final = (0, 2, 8)
"""Largest modules for which the window is tried to have room beyond the least, where each use gathers
weights."""
_ALIKE: Final = 1.02
"""Steps whose times differ by a smaller factor are as long for a session."""
_FEW: Final = 6
"""Plans that are replayed at most for a session."""
_SAVED: Final = (0.0, 0.5, 1.0)
"""Budgets of saved tensors that are tried, between the least and all of them."""
_WAITING: Final = (0.0, 0.5, 1.0)
"""Shares of the gradients that wait for which memory is tried."""
FLYING_BYTES: Final = 64 * MIB
"""Most bytes of gradients on their way to flash at once, beside those that wait in memory."""


def least_window(profile: Profile, weights: Sequence[ModuleWeights], choice: WeightsChoice) -> int:
    """Return the least window: what is needed at once, and the module that is read next beside it.

    Needed at once are the weights in use, or kept from one use to the next, and gradients that are made.
    """
    slots = step_slots(profile, _ANY, weights, choice)
    needed = slots.needed()
    most = following = 0
    for _, level, load in reversed(needed):
        most = max(most, level + following)
        if load >= 0:
            following = slots.loads[load].nbytes
    return most


_ANY: Final = Machine("any", 1.0, 1.0, 0.0, 1.0, 1.0)


def gradient_bytes(weights: Iterable[ModuleWeights]) -> int:
    """Return the bytes of gradients at once: one is made while another one is used for an update."""
    return 2 * max((one.trained_bytes * one.updated for one in weights), default=0)


@dataclass(frozen=True, slots=True)
class _Candidate:
    choice: WeightsChoice
    memory: StepMemory
    saved: Plan


class StepPlanner:
    """Search for the plan of a whole step.

    Plans do not depend on the memory: it only decides which of them may be taken. So more memory never
    makes a step longer.
    """

    def __init__(
        self,
        profile: Profile,
        weights: Sequence[ModuleWeights],
        machine: Machine,
        *,
        policy: Policy,
        least_policy: Policy | None = None,
        ring_bytes: int = 0,
        host_bytes: int = 0,
        flash_bytes: int | None = None,
        weights_stay: bool = False,
        most_saved_bytes: int = _AMPLE_BYTES,
        weights_bytes: int | None = None,
        saved_bytes: int | None = None,
        update: str = IN_BACKWARD,
        gradient_memory: int | None = None,
        gradients_last: bool = False,
        clips: bool = False,
    ) -> None:
        """Prepare.

        Args:
            profile: One step, with operators.
            weights: Its weights, whose uses refer to these operators.
            machine: The machine.
            policy: Policy for saved tensors.
            least_policy: A policy that needs no more memory and is quicker, to find the least budget of
                saved tensors; None: ``policy``.
            ring_bytes: Memory of the buffers that weights and records pass through (``ENGINE_BYTES``, and
                the optimizer's ring).
            host_bytes: Host memory for saved tensors, beyond ``device_bytes`` and the weights that rest
                there; 0 on a CPU.
            flash_bytes: Room on flash for everything; None: as much as is needed.
            weights_stay: True if weights never leave memory; only records rest on flash.
            most_saved_bytes: Larger budgets of saved tensors are not tried, unless the least one is.
            weights_bytes: Memory of weights, but for small ones; None: what makes the step shortest.
            saved_bytes: Budget of saved tensors; None: the same.
            update: ``IN_BACKWARD`` or ``IN_STEP``; with the second ranks must not divide weights.
            gradient_memory: Memory of gradients that wait for other backwards, or for ``step()``; the
                others wait on flash. None: what makes the step shortest.
            gradients_last: True if they have only what weights do not need, as in a session: none of them
                waits in memory unless all weights stay there.
            clips: True if the program clips gradients between backward and ``step()``.

        Raises:
            NoSpaceError: Flash has no room for weights and records.
            PlanError: The profile has no operators, or weights refer to operators that it does not have.
        """
        last = max((use.last for one in weights for use in one.uses), default=-1)
        if last >= len(profile.operators):
            raise PlanError(
                f"profile: weights refer to operator {last}, but it has {len(profile.operators)};"
                " make it from shapes, with its weights"
            )
        self._profile = without_weights(profile, weights)
        self.weights = tuple(weights)
        if update == IN_STEP:
            self.weights = updated_in_step(self.weights, len(profile.operators))
        self._gradient_memory = gradient_memory
        self._gradients_last = gradients_last
        self._clips = clips
        self._machine = machine
        self._policy = policy
        self._least_policy = least_policy or policy
        self._rings = ring_bytes
        self._most_saved_bytes = most_saved_bytes
        self._weights_stay = weights_stay
        self._weights_limit = weights_bytes
        self._saved_limit = saved_bytes
        has_host = any(one.on_host for one in weights)
        on_flash = [one for one in weights if not (one.on_host or (has_host and not one.can_rest))]
        self.home_bytes = 0 if weights_stay else sum(one.read_bytes for one in on_flash)
        self.record_bytes = sum(one.state_bytes for one in weights)
        self._room_bytes = self._check_room(flash_bytes)
        self._host_bytes = host_bytes

    def _check_room(self, flash_bytes: int | None) -> int:
        """Return the room on flash that is left for saved tensors."""
        homes = self.home_bytes + self.record_bytes
        if flash_bytes is None:
            return _AMPLE_BYTES
        if homes > flash_bytes:
            count = sum(w.trained or w.nbytes // 4 for w in self.weights)
            largest = flash_bytes * count // homes
            raise NoSpaceError(
                errno=errno.ENOSPC,
                op="plan of weights",
                path="flash",
                offset_bytes=0,
                nbytes=0,
                free_bytes=flash_bytes,
                advice=f"weights take {format_bytes(self.home_bytes)} and optimizer records"
                f" {format_bytes(self.record_bytes)}, {homes} bytes in all, and {flash_bytes} are free;"
                f" the largest model of this kind that fits has {largest / 1e6:.4g} M parameters; free"
                " space, or choose a smaller format of the optimizer's state",
            )
        return flash_bytes - homes

    @cached_property
    def candidates(self) -> tuple[_Candidate, ...]:
        """All plans that are considered, whatever the memory."""
        return tuple(self._candidates())

    @cached_property
    def least(self) -> StepMemory:
        """Memory of the plan that needs least.

        Raises:
            PlanError: No plan keeps its own budget, or the tiers have no room for saved tensors.
        """
        for one in sorted(self.candidates, key=lambda one: one.memory.total):
            if self._fits(one, self.replay(one)):
                return one.memory
        if self._saved_limit is not None:
            raise PlanError(
                "no plan was found that keeps the saved tensors of this step within"
                f" {format_bytes(self._saved_limit)}; give them more, or a smaller batch"
            )
        raise PlanError(
            "no plan was found for the saved tensors of this step, with"
            f" {format_bytes(self._host_bytes)} of host memory and {format_bytes(self._room_bytes)} of"
            " flash left for them; give more of these, or a smaller batch"
        )

    @property
    def _saved_plans(self) -> tuple[tuple[int, Plan], ...]:
        """Budgets of saved tensors with a plan that keeps them; cached in the profile."""
        most = self._most_saved_bytes
        key = (
            *("saved plans", self._policy, self._machine, self._host_bytes, most),
            self._saved_limit,
        )
        known: tuple[tuple[int, Plan], ...] | None = self._profile.derived.get(key)
        if known is None:
            known = self._profile.derived[key] = tuple(self._find_saved_plans())
        return known

    def _find_saved_plans(self) -> Iterator[tuple[int, Plan]]:
        profile, machine = self._profile, self._machine
        tiers = Budgets(1, self._host_bytes, _AMPLE_BYTES)
        if self._saved_limit is not None:
            given = replace(tiers, device_bytes=self._saved_limit)
            plan = self._policy(profile, machine, given)
            if plan.feasible:
                yield self._saved_limit, plan
            return
        whole = profile.peak_saved_bytes
        least = min_budget(profile, machine, tiers, self._least_policy)
        least = whole if least is None else least
        span = max(0, whole - least)
        budgets = {least, *(round_up(int(least + span * share), PAGE_BYTES) for share in _SAVED)}
        for nbytes in sorted(budgets):
            if nbytes > max(least, self._most_saved_bytes):
                break
            plan = self._policy(profile, machine, replace(tiers, device_bytes=nbytes))
            if plan.feasible:
                yield nbytes, plan

    def _candidates(self) -> Iterator[_Candidate]:
        largest = max(
            (one.held_bytes(kept=True) for one in self.weights if one.gathered), default=0
        )
        gathers = _AHEAD if largest else _AHEAD[:1]
        for choice in self._choices():
            kept, cached = self._sizes(choice)
            waiting = waiting_bytes(self.weights, choice)
            for window in [choice.window_bytes + ahead * largest for ahead in gathers]:
                for nbytes, plan in self._saved_plans:
                    memory = StepMemory(
                        kept, cached, window - waiting, self._rings, nbytes, waiting
                    )
                    yield _Candidate(replace(choice, window_bytes=window), memory, plan)

    def _choices(self) -> Iterator[WeightsChoice]:
        """Yield choices that keep more and more: weights first, then records."""
        used = sorted((one for one in self.weights if one.uses), key=lambda one: one.uses[0].first)
        every = frozenset(one.module for one in used)
        streamed = [
            one
            for one in used
            if not (self._weights_stay or one.is_small or one.nbytes < SMALL_BYTES)
        ]
        small = every - {one.module for one in streamed}
        total = _bytes_of(streamed)
        for limit in self._limits([one.part_of(one.nbytes) for one in streamed]):
            yield from self._with_gradients(self._choice(streamed, small, limit), streamed, limit)
        if self._weights_limit is not None and self._weights_limit < total:
            return
        records = [(one.module, one.state_bytes) for one in used if one.state_bytes]
        whole = list(self._with_gradients(self._choice(streamed, small, total), streamed, total))
        for part in range(1, _RECORD_SHARES + 1):
            cached = share_of(records, part / _RECORD_SHARES)
            for one in whole if cached else ():
                yield replace(one, cached=cached)

    def _with_gradients(
        self, choice: WeightsChoice, streamed: Sequence[ModuleWeights], limit: int
    ) -> Iterator[WeightsChoice]:
        """Yield a choice with more and more gradients in memory, and the window for each."""
        total = sum(one.trained_bytes for one in self.weights if one.waits)
        given = self._gradient_memory
        if given is None and self._gradients_last and limit < _bytes_of(streamed):
            given = 0
        memories = [int(total * share) for share in _WAITING] if given is None else [given]
        kept = sum(one.part_of(one.nbytes) for one in streamed if one.module in choice.kept)
        for spilled in dict.fromkeys(spilled_gradients(self.weights, each) for each in memories):
            made = replace(choice, spilled=spilled, clips=self._clips)
            window = least_window(self._profile, self.weights, made)
            if limit:
                left = max(0, limit - kept) + waiting_bytes(self.weights, made)
                window = max(window, left + gradient_bytes(self.weights))
            if self._clips:
                largest = max(
                    (w.trained_bytes for w in self.weights if w.module in spilled), default=0
                )
                window = max(window, waiting_bytes(self.weights, made) + largest)
            if self._profile.device == "cpu":  # they leave a device before they are written
                flying = sum(one.trained_bytes for one in self.weights if one.module in spilled)
                window += min(FLYING_BYTES, flying)
            yield replace(made, window_bytes=window)

    def _limits(self, sizes: Sequence[int]) -> list[int]:
        """Return the limits of memory for weights that are tried; 0 stands for the least.

        Raises:
            BudgetError: The limit that is given is below the two longest weights.
        """
        total, largest = sum(sizes), max(sizes, default=0)
        if self._weights_limit is not None:
            least = sum(sorted(sizes)[-2:])
            if self._weights_limit < least:
                raise BudgetError(
                    f"weights in memory are limited to {format_bytes(self._weights_limit)}, and the two"
                    f" longest need {least} bytes, {format_bytes(least)}: give them that at least",
                    slot="weights",
                    limit_bytes=self._weights_limit,
                    least_bytes=least,
                )
            return [min(self._weights_limit, total)]
        shares = (round_up(total * part // _SHARES, PAGE_BYTES) for part in range(1, _SHARES))
        few = (count * largest for count in _FEW_LARGEST)
        between = {each for each in (*shares, *few) if _FEW_LARGEST[0] * largest <= each < total}
        return [0, *sorted(between), *([total] if total else [])]

    def _choice(
        self, streamed: Sequence[ModuleWeights], small: frozenset[str], limit: int
    ) -> WeightsChoice:
        """Return what a session keeps whose weights, but for small ones, have ``limit`` bytes.

        Without a window yet.
        """
        sizes = [one.part_of(one.nbytes) for one in streamed]
        uses = order_of_uses(streamed)
        order = [place for place, _ in uses]
        found = weight_stays(order, sizes, [one.updated for one in streamed], limit)
        kept = {streamed[place].module for place in found.kept}
        # of a use and a late update after it, the update is the later item, which counts
        until_next = dict(zip(uses, found.until_next, strict=True))
        stays = {
            (streamed[place].module, number)
            for (place, number), stays in until_next.items()
            if stays and place not in found.kept
        }
        return WeightsChoice(small | kept, stays=frozenset(stays))

    def _sizes(self, choice: WeightsChoice) -> tuple[int, int]:
        kept = sum(one.part_of(one.small_bytes) for one in self.weights) + sum(
            one.read_bytes
            for one in self.weights
            if self._weights_stay or one.module in choice.kept
        )
        cached = sum(one.state_bytes for one in self.weights if one.module in choice.cached)
        return kept, cached

    def plan(self, memory_bytes: int) -> StepPlan:
        """Return the plan with the shortest step within ``memory_bytes``.

        Of two with equal steps it is the one that writes less, then that which takes less memory.

        Raises:
            BudgetError: The memory is below the least.
        """
        if memory_bytes < self.least.total:
            raise self._too_little(memory_bytes)
        fitting = [one for one in self.candidates if one.memory.total <= memory_bytes]
        bounds = [(self._bound(one), place) for place, one in enumerate(fitting)]
        best: tuple[tuple[int, int, int, int], _Candidate, ReplayedStep] | None = None
        for bound, place in sorted(bounds):
            if best is not None and bound > best[0][:2]:
                break
            one = fitting[place]
            found = self.replay(one)
            if not self._fits(one, found):
                continue
            written = found.moved.written + found.activations_written
            rank = (found.step_ns, written, one.memory.total, place)
            if best is None or rank < best[0]:
                best = rank, one, found
        assert best is not None  # the least fits
        return self._made(best[1], best[2], memory_bytes)

    def saved_bytes(self, memory_bytes: int) -> int | None:
        """Return what saved tensors get in a step that moves few bytes and is as short as any, or nearly.

        For sessions, which keep all other memory for weights, and what these do not need for gradients
        that wait and for records. It replays few plans: those that move the fewest bytes, until one takes
        hardly longer than any can.

        Returns:
            Bytes; None if no plan has room.
        """
        fitting = [
            one
            for one in self.candidates
            if one.memory.total <= memory_bytes and not one.choice.cached
        ]
        shortest_ns = min((self._bound(one)[0] for one in fitting), default=0)
        best: tuple[int, int] | None = None
        for one in sorted(fitting, key=self._moved_bytes)[:_FEW]:
            found = self.replay(one)
            if not self._fits(one, found):
                continue
            if best is None or found.step_ns * _ALIKE < best[0]:
                best = found.step_ns, one.memory.saved
            if found.step_ns < shortest_ns * _ALIKE:
                break
        return None if best is None else best[1]

    def _moved_bytes(self, one: _Candidate) -> tuple[int, int]:
        """Return the bytes that a candidate moves, and those of saved tensors in memory."""
        moved = step_bytes(self.weights, one.choice)
        weights = moved.read + moved.written + moved.host_read + moved.host_written
        return weights + 2 * one.saved.offloaded_bytes, one.memory.saved

    def replay(self, one: _Candidate) -> ReplayedStep:
        """Replay a candidate; cached."""
        return self._settled(one)[1]

    def _settled(self, one: _Candidate) -> tuple[Machine, ReplayedStep]:
        """Replay a candidate on a machine whose flash is as fast as in a step that computes so much.

        Flash may be slower while the processor computes, and a step that waits for flash most of the
        time does not compute then.
        """
        known = self._replayed.get(id(one))
        if known is None:
            known = self._replayed[id(one)] = self._settle(one)
        return known

    def _settle(self, one: _Candidate) -> tuple[Machine, ReplayedStep]:
        """Replay with flash as beside computing, and as fast as that leaves it; then between the two.

        The slower flash is, the smaller is the share of the step in which the processor computes. That
        share is taken to fall in proportion, to find the one that makes a step in which it is as large.
        """
        slow = self._replay_on(self._machine, one)
        first = self._computing_share(slow)
        machine = self._machine.computing_for(first)
        if machine == self._machine:
            return machine, slow
        second = self._computing_share(self._replay_on(machine, one))
        slope = (second - first) / (first - 1.0)
        machine = self._machine.computing_for((first - slope) / (1.0 - slope))
        return machine, self._replay_on(machine, one)

    def _computing_share(self, found: ReplayedStep) -> float:
        return min(1.0, self._busy_ns(found) / max(1, found.step_ns))

    def _replay_on(self, machine: Machine, one: _Candidate) -> ReplayedStep:
        return replay_step(self._profile, one.saved, machine, self.weights, one.choice)

    def _busy_ns(self, found: ReplayedStep) -> int:
        """Return the time in which the processor computes."""
        return found.compute_ns + (found.update_ns if self._profile.device == "cpu" else 0)

    def _spilled_bytes(self, choice: WeightsChoice) -> int:
        """Return the bytes on flash of gradients that wait there."""
        return sum(w.gradient_bytes for w in self.weights if w.module in choice.spilled)

    def _fits(self, one: _Candidate, found: ReplayedStep) -> bool:
        """Return True if memory was kept, and the tiers have room for saved tensors and gradients."""
        host, flash = found.tier_peak_bytes
        flash += self._spilled_bytes(one.choice)
        return found.feasible and host <= self._host_bytes and flash <= self._room_bytes

    @cached_property
    def _replayed(self) -> dict[int, tuple[Machine, ReplayedStep]]:
        return {}

    def _bound(self, one: _Candidate) -> tuple[int, int]:
        """Return a time that no replay of a candidate is shorter than, and least bytes written."""
        moved = step_bytes(self.weights, one.choice)
        transfers = sum(  # all rounded
            2 * (each.loads + each.gradient_writes) + 4 + 3 * MOST_PIECES for each in self.weights
        )
        return self._bounds(moved, one.saved).step - transfers, moved.written

    def _bounds(self, moved: StepBytes, saved: Plan) -> StepBounds:
        """Return bounds from weights, records and compute alone."""
        machine = self._machine
        profile = with_algorithms(self._profile, machine, saved.workspace_limits)
        begin, end = profile.axis_ns
        updates = sum(update_ns(one, machine) for one in self.weights)
        own = updates if profile.device == "cpu" else 0
        from_flash, to_flash = (moved.read, moved.written) if machine.flash_over_link else (0, 0)
        linked_in, linked_out = moved.host_read + from_flash, moved.host_written + to_flash
        link = (
            round(linked_in / machine.host_read_bytes_per_s * 1e9) if linked_in else 0,
            round(linked_out / machine.host_write_bytes_per_s * 1e9) if linked_out else 0,
        )
        reads, writes = self._flash_ns(moved)
        return StepBounds(
            compute=end - begin + own,
            reads=reads,
            writes=writes,
            shared=machine.flash_shared,
            update=updates,
            link=max(link),
            network=machine.network_ns(moved.network),
        )

    def _flash_ns(self, moved: StepBytes) -> tuple[int, int]:
        """Return the time of reads and writes at full bandwidth, while nothing computes."""
        machine = self._machine.computing_for(0.0)
        if machine.flash_service is not None:  # its times depend on sizes: count none here
            return 0, 0
        return (
            int(moved.read / machine.flash_read_bytes_per_s * 1e9),
            int(moved.written / machine.flash_write_bytes_per_s * 1e9),
        )

    def _made(self, one: _Candidate, found: ReplayedStep, memory_bytes: int) -> StepPlan:
        machine = self._machine
        profile = with_algorithms(self._profile, machine, one.saved.workspace_limits)
        always = found if self._settled(one)[0] == machine else self._replay_on(machine, one)
        bounds = StepBounds(
            compute=self._busy_ns(found),
            reads=found.read_ns,
            writes=found.write_ns,
            shared=machine.flash_shared,
            update=found.update_ns,
            link=found.link_ns,
            network=found.network_ns,
        )
        slots = step_slots(profile, machine, self.weights, one.choice)
        names = [w.module for w in self.weights]
        return StepPlan(
            machine=machine.name,
            saved=one.saved,
            kept=tuple(name for name in names if name in one.choice.kept),
            cached=tuple(name for name in names if name in one.choice.cached),
            choice=one.choice,
            order=tuple(load.weights.module for load in slots.loads),
            memory=one.memory,
            memory_bytes=memory_bytes,
            least_bytes=self.least.total,
            disk_bytes=self.home_bytes
            + self.record_bytes
            + found.tier_peak_bytes[1]
            + self._spilled_bytes(one.choice),
            parameters=sum(w.trained for w in self.weights if w.updated),
            weights_stay=self._weights_stay,
            in_step=any(w.is_updated_in_step for w in self.weights),
            weight_bytes=sum(w.nbytes + w.small_bytes for w in self.weights),
            host_weight_bytes=sum(w.read_bytes for w in self.weights if w.on_host),
            home_bytes=self.home_bytes,
            bounds=bounds,
            replayed=found,
            # flash is hidden: it always computes
            hidden_factor=hidden_factor(always, machine, moved_in_step(self.weights, one.choice)),
            network_factor=found.network_ns / max(1, found.compute_ns),
        )

    def _too_little(self, memory_bytes: int) -> BudgetError:
        least = self.least
        largest = max(self.weights, key=lambda one: one.nbytes + one.trained_bytes * one.updated)
        waiting = (
            f" {format_bytes(least.gradients)} of gradients that wait," if least.gradients else ""
        )
        return BudgetError(
            f"memory of {format_bytes(memory_bytes)} ({memory_bytes} bytes) is too little for this step:"
            f" it needs {least.total} bytes, {format_bytes(least.total)}: a window of"
            f" {format_bytes(least.window)} for weights and gradients, of which the largest module is"
            f" {largest.module or '<root>'!r} with {format_bytes(largest.nbytes)},{waiting}"
            f" {format_bytes(least.rings)} of buffers, {format_bytes(least.kept)} of weights that stay"
            f" and {format_bytes(least.saved)} of saved tensors; give at least that, or a smaller batch",
            slot=largest.module,
            limit_bytes=memory_bytes,
            least_bytes=least.total,
        )


def _bytes_of(streamed: Iterable[ModuleWeights]) -> int:
    """Return the memory in which all of these weights stay, for a rank that has its part of them."""
    return sum(one.part_of(one.nbytes) for one in streamed)
