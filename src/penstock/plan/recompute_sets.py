"""Sets of modules and recipes that can be recomputed in one plan.

[Note: recomputation conflicts]
    Two modules conflict if one is inside the other; a recipe and a module, if the module calls one of the
    recipe's modules; a recipe and anything that recomputes the recipe's input or needs its output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.plan.recipes import ancestors, recipe_members


@dataclass(frozen=True, slots=True)
class RecomputableModule:
    """A module that can be recomputed, or a recipe."""

    path: str
    """Path of the module, or name of the recipe."""
    groups: tuple[int, ...]
    """Indices of the groups that it recomputes."""
    nbytes: int
    """Bytes of their slots, over all passes."""
    forward_ns: int
    """Time to recompute it, over all passes."""
    reads: tuple[int, ...] = ()
    """Indices of the groups that it needs on the device and does not make itself."""

    @property
    def members(self) -> tuple[str, ...]:
        """Paths of the modules that a recipe calls; none if it is a module."""
        return recipe_members(self.path)

    @property
    def worth(self) -> float:
        """Bytes freed per nanosecond of recomputation."""
        return self.nbytes / max(1, self.forward_ns)


class RecomputeSets:
    """Modules and recipes that are recomputed together; see [Note: recomputation conflicts]."""

    def __init__(self, taken: Iterable[RecomputableModule] = ()) -> None:
        """Start with these modules and recipes."""
        self._modules: set[str] = set()
        self._within: dict[str, set[str]] = {}
        self._makers: dict[int, set[str]] = {}
        self._readers: dict[int, set[str]] = {}
        self._recipes: set[str] = set()
        for one in taken:
            self.add(one)

    def add(self, one: RecomputableModule) -> None:
        """Add a module or recipe."""
        (self._recipes if one.members else self._modules).add(one.path)
        for path in one.members or (one.path,):
            for above in ancestors(path):
                self._within.setdefault(above, set()).add(one.path)
        for table, groups in ((self._makers, one.groups), (self._readers, one.reads)):
            for g in groups:
                table.setdefault(g, set()).add(one.path)

    def conflicts_with(self, one: RecomputableModule) -> set[str]:
        """Return the paths of those that cannot be recomputed together with ``one``."""
        found: set[str] = set()
        for path in one.members or (one.path,):
            found.update(self._modules.intersection(ancestors(path)))
        if not one.members:
            found.update(self._within.get(one.path, ()))
        others: set[str] = set()
        for g in one.groups:
            others.update(self._makers.get(g, ()), self._readers.get(g, ()))
        for g in one.reads:
            others.update(self._makers.get(g, ()))
        return found | (others if one.members else others & self._recipes)
