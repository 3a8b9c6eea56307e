"""Recipes: how one saved storage is recomputed from another that is saved anyway.

[Note: recipes]
    The output of a module is saved by the next one: that of an activation or a normalization by the
    convolution behind it. The module's own input is saved as well, for its own backward. So the output
    need not be held: one more call of the module recomputes it. An in-place activation has overwritten
    its input; then it and the module before it are called, one after the other. A recipe consists of
    these modules and the slot that the first of them is called with. It makes one slot, and nothing that
    autograd saves: it is run without gradients. (In-place activated BatchNorm, Rota Bulò et al., CVPR
    2018, section 3, saves the same storage by inverting the activation.)

    The input of a recipe must be on the device when it runs: kept, or read back. It must not be
    recomputed itself, or one recipe would need the one before it, and so on to the start.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from penstock.plan.operators import Operator

_ARROW: Final = "->"
_NEVER: Final = 1 << 200

Calls = Mapping[tuple[str, int], Sequence[tuple[int, int]]]
"""Calls as ``forward_calls`` returns them."""


def recipe_name(members: Sequence[str], number: int = 1) -> str:
    """Return a plan's name of a recipe: ``"bn1->relu->"`` is the output of ``relu`` behind ``bn1``.

    Args:
        members: Paths of its modules, in the order of their calls.
        number: Distinguishes recipes of the same modules, from 1.
    """
    return _ARROW.join(members) + _ARROW + (str(number) if number > 1 else "")


def recipe_members(name: str) -> tuple[str, ...]:
    """Return the paths of a recipe's modules; empty if ``name`` is a module's path."""
    return tuple(name.split(_ARROW)[:-1])


@lru_cache(maxsize=65536)
def ancestors(path: str) -> tuple[str, ...]:
    """Return a path and those that contain it, innermost first, the root last."""
    if not path:
        return ("",)
    return (path, *ancestors(path.rpartition(".")[0]))


def forward_calls(operators: Iterable[Operator]) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Return (start, end) of every uninterrupted forward of each module, by its path and pass."""
    forward = [one for one in operators if not one.backward]
    forward.sort(key=lambda one: (one.pass_index, one.start_ns))
    calls: dict[tuple[str, int], list[tuple[int, int]]] = {}
    last: dict[tuple[str, int], int] = {}
    for place, one in enumerate(forward):
        for path in ancestors(one.module):
            key = path, one.pass_index
            mine = calls.setdefault(key, [])
            if last.get(key) == place - 1:
                mine[-1] = (mine[-1][0], one.end_ns)
            else:
                mine.append((one.start_ns, one.end_ns))
            last[key] = place
    return calls


def recipe_calls(
    members: Sequence[str], pass_index: int, saved_at_ns: int, calls: Calls
) -> list[tuple[int, int]]:
    """Return (start, end) of the calls that made a slot saved at that time; empty if not known."""
    found: list[tuple[int, int]] = []
    before_ns = saved_at_ns
    for path in reversed(members):
        mine = calls.get((path, pass_index), ())
        place = bisect_right(mine, (before_ns, _NEVER)) - 1
        if place < 0:
            return []
        found.append(mine[place])
        before_ns = mine[place][0] - 1
    return found[::-1]
