"""Recipes: how one saved storage is made again from another that is saved anyway.

[Note: recipes]
    What a module gives to the next one is saved by that: the output of an activation or a normalization
    by the convolution behind it. The module's own input is saved as well, for its own backward. So the
    output need not be held: one more call of the module makes it. An activation that works in place has
    overwritten its input; then it and the module before it are called, one after the other. A recipe is
    these modules, and the slot that the first of them is called with. It makes one slot, and nothing
    that autograd saves: it is run without gradients. (In-place activated BatchNorm, Rota Bulò et al.,
    CVPR 2018, section 3, saves the same storage by inverting the activation.)

    What a recipe is called with must be there when it runs: kept, or read back. It may not be made again
    itself, by whatever, or one recipe would need the one before it, and so on to the start.
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
"""What ``forward_calls`` says."""


def recipe_name(members: Sequence[str], number: int = 1) -> str:
    """What a plan calls a recipe: ``"bn1->relu->"`` is what comes out of ``relu`` behind ``bn1``.

    Args:
        members: Paths of its modules, in the order of their calls.
        number: Tells recipes of the same modules apart, from 1.
    """
    return _ARROW.join(members) + _ARROW + (str(number) if number > 1 else "")


def recipe_members(name: str) -> tuple[str, ...]:
    """The paths of a recipe's modules; empty if ``name`` is a module's path."""
    return tuple(name.split(_ARROW)[:-1])


@lru_cache(maxsize=65536)
def ancestors(path: str) -> tuple[str, ...]:
    """A path and those that contain it, innermost first, the root last."""
    if not path:
        return ("",)
    return (path, *ancestors(path.rpartition(".")[0]))


def forward_calls(operators: Iterable[Operator]) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """(start, end) of every uninterrupted forward of each module, by its path and pass."""
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
    """(start, end) of the calls that made a slot which was saved then; empty if they are not known."""
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
