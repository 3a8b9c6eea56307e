"""The planning problem, with everything derived from it computed once; and a policy's choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from penstock.plan.arrays import Integers
from penstock.plan.convolution import Limits, leanest, stepped_down, with_algorithms
from penstock.plan.encoding import best
from penstock.plan.groups import SlotGroup, need_order
from penstock.plan.layers import Layer, layers_of
from penstock.plan.machine import Budgets, Machine
from penstock.plan.placement import least_bytes, may_go
from penstock.plan.profile import CodecSample, Profile
from penstock.plan.recompute import RecomputeChoices
from penstock.plan.residency import RECOMPUTED, Mask, ResidencyModel, Segment, residency
from penstock.plan.slots import SlotKey


@dataclass(frozen=True)
class Choice:
    """Decision for each group of a planning problem."""

    tiers: tuple[str, ...]
    """Tier of each group: ``"host"``, ``"flash"``, or ``""`` if it is kept or recomputed."""
    recomputed: tuple[str, ...] = ()
    """Modules of the case's ``recomputing``, none inside another."""
    lean: Limits = ()
    """Convolutions that do not use their fastest algorithm."""
    samples: Mapping[int, CodecSample] | None = None
    """Codec sample by which each group is encoded; None: wherever it pays (``pipeline.choose``)."""
    prefetch: Mapping[int, int] = field(default_factory=dict)
    """``Decision.prefetch_at``, by group."""


class PlanningProblem:
    """A profile, a machine and budgets, with the convolution algorithms within ``lean``.

    Attributes:
        given: The profile as it was passed in.
        profile: The same with the times and workspaces of those algorithms.
        machine: The machine that it runs on.
        budgets: The memory that a plan may use.
        lean: The limits of convolutions' workspaces.
        split: Whether convolutions may be computed in parts of their batch.
        encodings: Cache of the encodings that pay, by the tiers of the groups.
    """

    def __init__(
        self,
        profile: Profile,
        machine: Machine,
        budgets: Budgets,
        lean: Limits = (),
        *,
        split: bool = False,
    ) -> None:
        self.given = profile
        self.profile = with_algorithms(profile, machine, lean)
        self.machine = machine
        self.budgets = budgets
        self.lean = lean
        self.split = split
        self.encodings: dict[tuple[str, ...], Mapping[int, CodecSample]] = {}
        self._residencies: dict[object, ResidencyModel] = {}
        self._others: dict[Limits, PlanningProblem] = {lean: self}

    def with_limits(self, lean: Limits) -> PlanningProblem:
        """Return the same problem with other limits for convolutions; cached."""
        if lean is self.lean:  # hashing is slow
            return self
        if lean not in self._others:
            case = PlanningProblem(self.given, self.machine, self.budgets, lean, split=self.split)
            case._others = self._others
            self._others[lean] = case
        return self._others[lean]

    @property
    def made(self) -> int:
        """Number of problems made for different limits."""
        return len(self._others)

    def fitted(self, tiers: Sequence[str] | None = None) -> PlanningProblem:
        """Return the problem with limits where a workspace would not fit beside the resident bytes.

        Args:
            tiers: The tier of each group; None: everything is offloaded that can be.
        """
        if not self.leanest:
            return self
        choice = self.offloaded(self.movable) if tiers is None else Choice(tuple(tiers))
        if self.residency(choice).hard_bytes <= self.budgets.device_bytes:
            return self
        limits = stepped_down(
            self.given,
            self.machine,
            self.mask(choice),
            self.budgets.device_bytes,
            split=self.split,
        )
        return self.with_limits(limits)

    @cached_property
    def groups(self) -> tuple[SlotGroup, ...]:
        """Groups of slots that share a decision, in the order of saving."""
        return self.recomputing.groups

    @property
    def indices(self) -> range:
        """Indices of the groups."""
        return range(len(self.groups))

    @cached_property
    def movable(self) -> frozenset[int]:
        """Groups that can be moved, and that nothing else keeps alive, so that offloading frees them."""
        return frozenset(
            g
            for g, group in enumerate(self.groups)
            if not group.held_elsewhere and g not in self.too_long
        )

    @cached_property
    def too_long(self) -> frozenset[int]:
        """Groups that cannot be staged on their way to flash, nor be in host memory."""
        host_bytes = self.budgets.host_bytes
        return frozenset(
            g
            for g, group in enumerate(self.groups)
            if not self.may_go(g, "flash") and group.nbytes > host_bytes
        )

    def may_go(self, g: int, tier: str) -> bool:
        """Return True unless the slots of a group are too long to be staged on their way to a tier."""
        return may_go(self.groups[g], tier, self.budgets)

    @property
    def main_tier(self) -> str:
        """Flash if it has a budget, else host memory."""
        return "flash" if self.budgets.flash_bytes else "host"

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that each group takes in a tier without a codec."""
        return tuple(group.nbytes for group in self.groups)

    @cached_property
    def least(self) -> tuple[int, ...]:
        """Bytes that each group is charged in a tier with the codec that makes it smallest."""
        return tuple(map(least_bytes, self.groups))

    @cached_property
    def best_samples(self) -> tuple[CodecSample | None, ...]:
        """Codec sample with the quickest round trip to the main tier, per group; None: no codec."""
        tier = self.main_tier
        return tuple(
            best(group.codecs, self.machine, tier) if group.codecs else None
            for group in self.groups
        )

    @cached_property
    def leanest(self) -> Limits:
        """Limits that leave no workspace to any convolution with a choice of algorithms."""
        return leanest(self.given, self.machine)

    @cached_property
    def recomputing(self) -> RecomputeChoices:
        """Modules and recipes that can be recomputed."""
        return RecomputeChoices.of(self.profile)

    @cached_property
    def need_order(self) -> tuple[SlotKey, ...]:
        """Keys in the order in which backward first asks for them, if nothing is recomputed."""
        return need_order(self.profile)

    @cached_property
    def places(self) -> tuple[int | None, ...]:
        """Index in ``need_order`` of each group; None: backward never asks for it."""
        ranks = {key.match_key: rank for rank, key in enumerate(self.need_order)}
        return tuple(ranks.get(group.key.match_key) for group in self.groups)

    @cached_property
    def layers(self) -> list[Layer]:
        """Layers of the network, as vDNN defines them."""
        return layers_of(self.profile, self.groups, self.places, self.recomputing.consumers)

    def dropped(self, choice: Choice) -> frozenset[int]:
        """The groups that are recomputed."""
        modules = self.recomputing.modules if choice.recomputed else {}
        return frozenset(g for path in choice.recomputed for g in modules[path].groups)

    def mask(self, choice: Choice) -> Mask:
        """Return the decision for each slot of the profile."""
        fates = np.fromiter(map(bool, choice.tiers), np.uint8, len(self.groups))  # OFFLOADED is 1
        fates[list(self.dropped(choice))] = RECOMPUTED
        return bytearray(fates[self.group_of].tobytes())

    @cached_property
    def group_of(self) -> Integers:
        """Index of the group of each slot."""
        found = np.empty(len(self.profile.slots), np.int64)
        counts = [len(group.indices) for group in self.groups]
        found[[i for group in self.groups for i in group.indices]] = np.repeat(self.indices, counts)
        return found

    def segments(self, choice: Choice) -> tuple[Segment, ...]:
        """Return the segments that are recomputed."""
        return self.recomputing.segments(choice.recomputed) if choice.recomputed else ()

    def residency(self, choice: Choice) -> ResidencyModel:
        """Return the bytes that the choice needs; cached."""
        key = tuple(map(bool, choice.tiers)), choice.recomputed
        known = self._residencies.get(key)
        if known is None:
            known = residency(self.profile, self.mask(choice), self.segments(choice))
            self._residencies[key] = known
        return known

    def fits(self, choice: Choice) -> bool:
        """Return True if the device budget can be kept."""
        if not choice.recomputed:
            gone = np.fromiter(map(bool, choice.tiers), np.bool_, len(self.groups))
            if self._still_lacks(int(self._saved_bytes[gone].sum())):
                return False
        return self.residency(choice).hard_bytes <= self.budgets.device_bytes

    def lacks(self, chosen: Iterable[int]) -> bool:
        """Return True if offloading all bytes of these groups cannot be enough. Quick to check."""
        return self._still_lacks(int(self._saved_bytes[list(chosen)].sum()))

    def _still_lacks(self, gone_bytes: int) -> bool:
        return self.profile.peak_saved_bytes - gone_bytes > self.budgets.device_bytes

    @cached_property
    def _saved_bytes(self) -> Integers:
        """Bytes of all slots of each group."""
        found = np.zeros(len(self.groups), np.int64)
        np.add.at(found, self.group_of, self.profile.arrays.sizes)
        return found

    def offloaded(self, chosen: Iterable[int], recomputed: Iterable[str] = ()) -> Choice:
        """Return a choice that offloads these groups to any tier, for counting device memory."""
        return self.offload(dict.fromkeys(chosen, "flash"), recomputed)

    def offload(self, tiers: Mapping[int, str], recomputed: Iterable[str] = ()) -> Choice:
        """Return the choice that offloads these groups to these tiers, except recomputed ones."""
        placed = [""] * len(self.groups)
        for g, tier in tiers.items():
            placed[g] = tier
        choice = Choice(tuple(placed), tuple(recomputed), self.lean)
        dropped = self.dropped(choice)
        if any(placed[g] for g in dropped):
            kept = ("" if g in dropped else tier for g, tier in enumerate(placed))
            return replace(choice, tiers=tuple(kept))
        return choice
