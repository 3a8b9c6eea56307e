"""Local search: candidate choices are replayed, and the best are changed as long as that helps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from penstock.plan.assembly import draft
from penstock.plan.choice_bound import min_step_ns
from penstock.plan.placement import rooms_for
from penstock.plan.problem import Choice, PlanningProblem
from penstock.plan.replay import replay

WORK_SLOTS: Final = 40_000
"""Limit of the slots replayed in all: less than a second."""
_SETUP_REPLAYS: Final = 2
"""Cost of a planning problem and its plan outside of the search, in replays."""
_CASE_REPLAYS: Final = 1
"""Cost of each further planning problem with other algorithms, in replays."""
_MIN_REPLAYS_FOR_TWO_CASES: Final = 6
"""Work, in replays, needed for a second planning problem and its choices and as many for the first."""
_MIN_SLOTS_FOR_BOUND: Final = 100
"""Number of slots from which it is quicker to compute a bound first than to replay at once; except where
something may be encoded, because bounds are then weak and take longer."""
_REPLAY_OVERHEAD_SLOTS: Final = 40
"""Fixed cost of a replay, in slots."""
_ENCODED_REPLAY_FACTOR: Final = 3
"""Cost of a replay with encoded slots relative to one without."""
_STAGED_REPLAY_FACTOR: Final = 2
"""Cost of a replay with staging memory relative to one without."""
_BOUNDS_PER_REPLAY: Final = 16
"""Number of choices that can be rejected without a replay in the time of one replay."""
_CHOICES_PER_REPLAY: Final = 4
"""Number of candidate choices that can be made in the time of one replay."""
_SWAP_NEIGHBOURS: Final = 8
"""Number of next smaller slots with which a slot is swapped."""
_MAX_DESCENTS: Final = 16
"""Number of candidate choices from which the search descends."""

_UNKNOWN_BYTES: Final = 1 << 200
"""Placeholder for the moved bytes of a choice that cannot beat the best; larger than any real value."""

Score: TypeAlias = tuple[bool, int, int]
"""(does not fit, step time in ns or bytes needed, bytes moved); smaller is better."""
Move: TypeAlias = Callable[[PlanningProblem, Choice], Choice | None]
"""Function from a choice to a slightly different one; None: not applicable."""


class Search:
    """Local search that remembers the best choice it has seen."""

    def __init__(self, case: PlanningProblem) -> None:
        self._case = case
        self._scores: dict[object, Score] = {}
        self._made = case.made
        self._starts: list[tuple[Score, int, Choice]] = []
        self._size = len(case.groups) + _REPLAY_OVERHEAD_SLOTS
        self._work = max(WORK_SLOTS - _SETUP_REPLAYS * self._size, WORK_SLOTS // 4)
        self._all_work = self._work
        coded = any(group.codecs for group in case.groups)
        self._bounded = len(case.profile.slots) >= _MIN_SLOTS_FOR_BOUND and not coded
        begin_ns, end_ns = case.with_limits(()).profile.axis_ns
        self._ideal_ns = end_ns - begin_ns
        self._best: tuple[Score, Choice] | None = None

    @property
    def best(self) -> Choice:
        """Best choice so far. At least one choice must have been tried."""
        assert self._best is not None
        return self._best[1]

    @property
    def best_wait_ns(self) -> float:
        """Time of the best step beyond plain compute; infinite if it does not fit."""
        if self._best is None or self._best[0][0]:
            return float("inf")
        return self._best[0][1] - self._ideal_ns

    @property
    def done(self) -> bool:
        """True if nothing can beat the best, or if it fits and the work is spent."""
        if self._best is None or self._best[0][0]:
            return False
        return self._work <= 0 or self._best[0][1] == self._ideal_ns

    def spent(self, share: float) -> bool:
        """Return True if this fraction of the work has been spent."""
        return self._work <= (1 - share) * self._all_work

    @property
    def can_try_two_cases(self) -> bool:
        """True if enough work is left for a second planning problem with other algorithms."""
        return self._work > _MIN_REPLAYS_FOR_TWO_CASES * self._size

    def try_by_bound(self, choices: Iterable[Choice]) -> None:
        """Try these choices, those with the lowest bound first, until ``done``."""
        if not self._bounded:
            return self.try_all(choices)
        waiting: list[tuple[int, int, Choice]] = []
        for choice in choices:
            least_ns = min_step_ns(self._case, choice)
            if least_ns == self._ideal_ns:
                self.try_all([choice])
                if self.done:
                    return None
            waiting.append((least_ns, len(waiting), choice))
        return self.try_all(choice for _, _, choice in sorted(waiting, key=lambda each: each[:2]))

    def try_all(self, choices: Iterable[Choice]) -> None:
        """Try these choices until ``done``."""
        for choice in choices:
            self._try(choice)
            if self.done:
                return

    def try_while_affordable(self, choices: Iterable[Choice]) -> None:
        """Try these choices until ``done`` or the work is spent."""
        for choice in choices:
            self._try(choice)
            if self.done or self._work <= 0:
                return

    def _try(self, choice: Choice) -> None:
        made, self._made = self._made, self._case.made
        self._work -= self._size // _CHOICES_PER_REPLAY
        self._work -= _CASE_REPLAYS * self._size * (self._made - made)
        score = self._score(choice)
        heapq.heappush(self._starts, (score, len(self._starts), choice))

    def descend(self) -> None:
        """Improve the choices that were tried, best first, move by move, until ``done``."""
        for _ in range(min(_MAX_DESCENTS, len(self._starts))):
            score, _, choice = heapq.heappop(self._starts)
            self._descend(score, choice)
            if self.done:
                return

    def _descend(self, score: Score, choice: Choice) -> None:
        moves = list(_moves(self._case))
        futile = place = 0
        while futile < len(moves) and not self.done and self._work > 0:
            changed = moves[place](self._case.with_limits(choice.lean), choice)
            place, futile = (place + 1) % len(moves), futile + 1
            if changed is not None and (better := self._score(changed)) < score:
                score, choice, futile = better, changed, 0

    def _score(self, choice: Choice) -> Score:
        """Return the score of a choice; cached."""
        key = (choice.tiers, choice.recomputed, choice.lean, *_extras(choice))
        score = self._scores.get(key)
        if score is None:
            score = self._scores[key] = self._play(choice)
            if self._best is None or score < self._best[0]:
                self._best = score, choice
        return score

    def _play(self, choice: Choice) -> Score:
        case = self._case.with_limits(choice.lean)
        moved = sum(g.key.nbytes for g, t in zip(case.groups, choice.tiers, strict=True) if t)
        hard_bytes = case.residency(choice).hard_bytes
        if hard_bytes > case.budgets.device_bytes:
            self._work -= self._size // _BOUNDS_PER_REPLAY
            return True, hard_bytes, moved
        if self._bounded and self._best is not None and not self._best[0][0]:
            self._work -= self._size // _BOUNDS_PER_REPLAY
            least_ns = min_step_ns(case, choice)
            if least_ns >= self._best[0][1]:
                return False, least_ns, _UNKNOWN_BYTES
        plan = draft(case, choice)
        found = replay(case.given, plan, case.machine)
        encoded = plan.encoded_bytes != plan.offloaded_bytes
        cost = self._size * (_ENCODED_REPLAY_FACTOR if encoded else 1)
        self._work -= cost * (_STAGED_REPLAY_FACTOR if case.budgets.staging_bytes else 1)
        return (False, found.step_ns, moved) if found.feasible else (True, hard_bytes, moved)


def _extras(choice: Choice) -> tuple[object, object]:
    samples = None if choice.samples is None else frozenset(choice.samples.items())
    return samples, frozenset(choice.prefetch.items())


def _moves(case: PlanningProblem) -> Iterator[Move]:
    """Yield all single changes, and swaps of two slots; the largest slots first."""
    yield _with_default_codecs
    yield _without_codecs
    yield _with_larger_workspaces
    order = sorted(case.movable, key=lambda g: (-case.groups[g].key.nbytes, g))
    for g in order:
        for tier in ("", "host", "flash"):
            yield partial(_put, g=g, tier=tier)
    for module in sorted(case.recomputing.modules.values(), key=lambda one: -one.worth):
        yield partial(_toggle, path=module.path)
    for k, g in enumerate(order):
        for h in order[k + 1 : k + 1 + _SWAP_NEIGHBOURS]:
            yield partial(_swap, g=g, h=h)


def _with_default_codecs(case: PlanningProblem, choice: Choice) -> Choice:
    """Encode wherever it pays, and read as soon as there is room."""
    return replace(choice, samples=None, prefetch={})


def _without_codecs(case: PlanningProblem, choice: Choice) -> Choice:
    """Encode nothing."""
    return replace(choice, samples={})


def _with_larger_workspaces(case: PlanningProblem, choice: Choice) -> Choice:
    """Limit only those workspaces that do not fit with these offloads."""
    fastest = case.with_limits(())
    return choice if choice.recomputed else replace(choice, lean=fastest.fitted(choice.tiers).lean)


def _put(case: PlanningProblem, choice: Choice, *, g: int, tier: str) -> Choice | None:
    return _placed(case, choice, {g: tier})


def _swap(case: PlanningProblem, choice: Choice, *, g: int, h: int) -> Choice | None:
    return _placed(case, choice, {g: choice.tiers[h], h: choice.tiers[g]})


def _placed(case: PlanningProblem, choice: Choice, changes: dict[int, str]) -> Choice | None:
    """Move groups to other tiers, if those have room. Groups that were encoded may no longer be."""
    tiers = list(choice.tiers)
    if not all(case.may_go(g, tier) for g, tier in changes.items()):
        return None
    for g, tier in changes.items():
        tiers[g] = tier
    if tuple(tiers) == choice.tiers or case.dropped(choice).intersection(changes):
        return None
    if not rooms_for(
        tiers, case.budgets, sizes=case.sizes, least=case.least, instead_of=choice.tiers
    ):
        return None
    return replace(choice, tiers=tuple(tiers), samples=choice.samples and None, prefetch={})


def _toggle(case: PlanningProblem, choice: Choice, *, path: str) -> Choice | None:
    """Remove a recomputed module, or add it in place of those that contain it or that it contains."""
    others = [one for one in choice.recomputed if one != path]
    if len(others) == len(choice.recomputed):
        recomputing = case.recomputing
        conflicts = recomputing.conflict_set(others).conflicts_with(recomputing.modules[path])
        others = [one for one in others if one not in conflicts]
        others.append(path)
    changed = case.offload(dict(enumerate(choice.tiers)), sorted(others))
    return replace(changed, samples=choice.samples and None)
