"""From good choices to a better one: each is replayed, and the best changed while that helps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from penstock.plan.assemble import draft
from penstock.plan.case import Case, Choice
from penstock.plan.choice_bound import least_step_ns
from penstock.plan.layers import prefetch_search
from penstock.plan.placement import rooms_for
from penstock.plan.replay import replay

WORK: Final = 40_000
"""How many slots may be replayed in all: less than a second."""
_SETUP: Final = 2
"""What a case and its plan take beside the search, in replays."""
_CASE: Final = 1
"""And what each further case takes, of other algorithms."""
_AMPLE: Final = 6
"""So many replays: what a second case and its choices take, and as many for the first."""
_MANY: Final = 100
"""With so many slots it is quicker to ask for a bound first than to replay at once; but not where
something may be encoded, for then bounds are far off, and take longer."""
_OVERHEAD: Final = 40
"""What a replay takes besides, in slots."""
_CODED: Final = 3
"""How many times longer it takes where something is encoded."""
_UNPLAYED: Final = 16
"""How many choices that are seen not to fit take as long as one replay."""
_MAKING: Final = 4
"""How many good choices are made in the time of one replay."""
_SPAN: Final = 8
"""A slot is exchanged with this many others, of the next smaller sizes."""
_STARTS: Final = 16
"""From how many of the choices that were looked at the search goes down."""

_UNKNOWN: Final = 1 << 200
"""In place of the bytes moved, of a choice that cannot be better than the best: no score is as bad."""

Score: TypeAlias = tuple[bool, int, int]
"""The less the better: (does not fit, step time in ns or bytes that would be needed, bytes moved)."""
Move: TypeAlias = Callable[[Case, Choice], Choice | None]
"""From a choice to one that differs in little; None: there is none."""


class Search:
    """Keeps the best of the choices that it has seen."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._scores: dict[object, Score] = {}
        self._made = case.made
        self._starts: list[tuple[Score, int, Choice]] = []
        self._size = len(case.groups) + _OVERHEAD
        self._work = self._all_work = max(WORK - _SETUP * self._size, WORK // 4)
        coded = any(group.codecs for group in case.groups)
        self._bounded = len(case.profile.slots) >= _MANY and not coded
        begin_ns, end_ns = case.leaning(()).profile.axis_ns
        self._ideal_ns = end_ns - begin_ns
        self._best: tuple[Score, Choice] | None = None

    @property
    def best(self) -> Choice:
        """The best so far; there is one once something was looked at."""
        assert self._best is not None
        return self._best[1]

    @property
    def best_wait_ns(self) -> float:
        """How much longer than computing alone the best step takes; without end, if it does not fit."""
        if self._best is None or self._best[0][0]:
            return float("inf")
        return self._best[0][1] - self._ideal_ns

    @property
    def done(self) -> bool:
        """Whether nothing can be better than the best, or it fits and there has been work enough."""
        if self._best is None or self._best[0][0]:
            return False
        return self._work <= 0 or self._best[0][1] == self._ideal_ns

    def spent(self, share: float) -> bool:
        """Whether so much of the work has been done."""
        return self._work <= (1 - share) * self._all_work

    @property
    def ample(self) -> bool:
        """Whether there is work enough to look at a second case as well, of other algorithms."""
        return self._work > _AMPLE * self._size

    def look_first(self, choices: Iterable[Choice]) -> None:
        """Look at these, those that promise most first, until ``done``."""
        if not self._bounded:
            return self.look(choices)
        waiting: list[tuple[int, int, Choice]] = []
        for choice in choices:
            least_ns = least_step_ns(self._case, choice)
            if least_ns == self._ideal_ns:
                self.look([choice])
                if self.done:
                    return None
            waiting.append((least_ns, len(waiting), choice))
        return self.look(choice for _, _, choice in sorted(waiting, key=lambda each: each[:2]))

    def look(self, choices: Iterable[Choice]) -> None:
        """Look at these, until ``done``."""
        for choice in choices:
            self._look(choice)
            if self.done:
                return

    def explore(self, choices: Iterable[Choice]) -> None:
        """Look at these, until ``done`` or there has been work enough."""
        for choice in choices:
            self._look(choice)
            if self.done or self._work <= 0:
                return

    def _look(self, choice: Choice) -> None:
        made, self._made = self._made, self._case.made
        self._work -= self._size // _MAKING + _CASE * self._size * (self._made - made)
        score = self._score(choice)
        heapq.heappush(self._starts, (score, len(self._starts), choice))

    def descend(self) -> None:
        """Change what was looked at, the best first, move by move, while that helps, until ``done``."""
        for _ in range(min(_STARTS, len(self._starts))):
            score, _, choice = heapq.heappop(self._starts)
            self._descend(score, choice)
            if self.done:
                return

    def _descend(self, score: Score, choice: Choice) -> None:
        moves = list(_moves(self._case))
        futile = place = 0
        while futile < len(moves) and not self.done and self._work > 0:
            changed = moves[place](self._case.leaning(choice.lean), choice)
            place, futile = (place + 1) % len(moves), futile + 1
            if changed is not None and (better := self._score(changed)) < score:
                score, choice, futile = better, changed, 0

    def _score(self, choice: Choice) -> Score:
        """How good a choice is; one that was seen is known."""
        key = (choice.tiers, choice.recomputed, choice.lean, *_extras(choice))
        score = self._scores.get(key)
        if score is None:
            score = self._scores[key] = self._play(choice)
            if self._best is None or score < self._best[0]:
                self._best = score, choice
        return score

    def _play(self, choice: Choice) -> Score:
        case = self._case.leaning(choice.lean)
        moved = sum(g.key.nbytes for g, t in zip(case.groups, choice.tiers, strict=True) if t)
        hard_bytes = case.residency(choice).hard_bytes
        if hard_bytes > case.budgets.device_bytes:
            self._work -= self._size // _UNPLAYED
            return True, hard_bytes, moved
        if self._bounded and self._best is not None and not self._best[0][0]:
            self._work -= self._size // _UNPLAYED
            least_ns = least_step_ns(case, choice)
            if least_ns >= self._best[0][1]:
                return False, least_ns, _UNKNOWN
        plan = draft(case, choice)
        found = replay(case.given, plan, case.machine)
        self._work -= self._size * (_CODED if plan.encoded_bytes != plan.offloaded_bytes else 1)
        return (False, found.step_ns, moved) if found.feasible else (True, hard_bytes, moved)


def _extras(choice: Choice) -> tuple[object, object]:
    samples = None if choice.samples is None else frozenset(choice.samples.items())
    return samples, frozenset(choice.prefetch.items())


def _moves(case: Case) -> Iterator[Move]:
    """Every change of one thing, and exchanges of two; the largest slots first."""
    yield _plain
    yield _raw
    yield _late
    yield _less_lean
    order = sorted(case.movable, key=lambda g: (-case.groups[g].key.nbytes, g))
    for g in order:
        for tier in ("", "host", "flash"):
            yield partial(_put, g=g, tier=tier)
    for module in sorted(case.recomputing.modules.values(), key=lambda one: -one.worth):
        yield partial(_toggle, path=module.path)
    for k, g in enumerate(order):
        for h in order[k + 1 : k + 1 + _SPAN]:
            yield partial(_swap, g=g, h=h)


def _plain(case: Case, choice: Choice) -> Choice:
    """Encoded where that pays, read as soon as there is room."""
    return replace(choice, samples=None, prefetch={})


def _raw(case: Case, choice: Choice) -> Choice:
    """Nothing encoded."""
    return replace(choice, samples={})


def _late(case: Case, choice: Choice) -> Choice:
    """Read back by vDNN's search: no layer sooner than it must."""
    gone = {g for g, tier in enumerate(choice.tiers) if tier}
    if choice.recomputed:
        return choice
    return replace(choice, prefetch=prefetch_search(case.layers, gone))


def _less_lean(case: Case, choice: Choice) -> Choice:
    """No convolution lean that need not be, if nothing more were offloaded."""
    fastest = case.leaning(())
    return choice if choice.recomputed else replace(choice, lean=fastest.fitted(choice.tiers).lean)


def _put(case: Case, choice: Choice, *, g: int, tier: str) -> Choice | None:
    if choice.tiers[g] == tier or g in case.dropped(choice):
        return None
    return _placed(case, choice, {g: tier})


def _swap(case: Case, choice: Choice, *, g: int, h: int) -> Choice | None:
    if choice.tiers[g] == choice.tiers[h] or case.dropped(choice).intersection((g, h)):
        return None
    return _placed(case, choice, {g: choice.tiers[h], h: choice.tiers[g]})


def _placed(case: Case, choice: Choice, changes: dict[int, str]) -> Choice | None:
    """With other tiers for these groups, if those have room. What was encoded may not be any more."""
    tiers = list(choice.tiers)
    for g, tier in changes.items():
        tiers[g] = tier
    if not rooms_for(
        tiers, case.budgets, sizes=case.sizes, least=case.least, instead_of=choice.tiers
    ):
        return None
    return replace(choice, tiers=tuple(tiers), samples=choice.samples and None, prefetch={})


def _toggle(case: Case, choice: Choice, *, path: str) -> Choice | None:
    """One recomputed module less; or one more, in place of those that it is in or that are in it."""
    others = [one for one in choice.recomputed if one != path]
    if len(others) == len(choice.recomputed):
        recomputing = case.recomputing
        clashing = recomputing.together(others).clashing(recomputing.modules[path])
        others = [one for one in others if one not in clashing]
        others.append(path)
    changed = case.offload(dict(enumerate(choice.tiers)), sorted(others))
    return replace(changed, samples=choice.samples and None)
