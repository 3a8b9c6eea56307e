"""Which modules and recipes can be recomputed in one plan.

[Note: what is not recomputed together]
    Modules of which one is inside another; a recipe and a module that calls one of the recipe's; and a
    recipe with whatever makes what it is called with, or needs what it makes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.plan.recipes import ancestors, recipe_members


@dataclass(frozen=True, slots=True)
class Module:
    """A module that can be run again, or a recipe."""

    path: str
    """Or the recipe's name."""
    groups: tuple[int, ...]
    """What it makes again, by index into the groups."""
    nbytes: int
    """Their slots' bytes, over all passes."""
    forward_ns: int
    """What running it again takes, over all passes."""
    reads: tuple[int, ...] = ()
    """The groups that it needs there, if they were not made by itself."""

    @property
    def members(self) -> tuple[str, ...]:
        """Paths of the modules that a recipe calls; none if it is a module."""
        return recipe_members(self.path)

    @property
    def worth(self) -> float:
        """Bytes freed for each nanosecond of running it again."""
        return self.nbytes / max(1, self.forward_ns)


class Together:
    """Modules and recipes that are recomputed; see [Note: what is not recomputed together]."""

    def __init__(self, taken: Iterable[Module] = ()) -> None:
        """Begin with these."""
        self._modules: set[str] = set()
        self._within: dict[str, set[str]] = {}
        self._makers: dict[int, set[str]] = {}
        self._readers: dict[int, set[str]] = {}
        self._recipes: set[str] = set()
        for one in taken:
            self.add(one)

    def add(self, one: Module) -> None:
        """Recompute it as well."""
        (self._recipes if one.members else self._modules).add(one.path)
        for path in one.members or (one.path,):
            for above in ancestors(path):
                self._within.setdefault(above, set()).add(one.path)
        for table, groups in ((self._makers, one.groups), (self._readers, one.reads)):
            for g in groups:
                table.setdefault(g, set()).add(one.path)

    def clashing(self, one: Module) -> set[str]:
        """Those that cannot be recomputed together with ``one``."""
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
