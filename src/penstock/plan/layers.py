"""Layers of a network as vDNN defines them: the slots that each reads back in its backward, in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.plan.groups import SlotGroup
from penstock.plan.operators import Operator
from penstock.plan.profile import Profile, SlotProfile


@dataclass(frozen=True, slots=True)
class Layer:
    """One module whose backward reads saved slots. Its groups are its input feature maps, X."""

    module: str
    convolution: bool
    place: int
    """Index in the order of need at which its backward begins."""
    groups: tuple[int, ...]


def layers_of(
    profile: Profile,
    groups: Sequence[SlotGroup],
    places: Sequence[int | None],
    consumers: Sequence[Operator | None],
) -> list[Layer]:
    """Return the layers in the order of forward, without those that read nothing back, as in-place ones.

    A feature map belongs to the layer that first asks for it or, if the profile has no operators, to the
    layer that saved it.

    Args:
        profile: The step.
        groups: Its slots by decision.
        places: Index of each group in the order of need; None if it is never asked for.
        consumers: The operator of backward that first asks for each slot, if that is known.
    """
    found: dict[str, tuple[int, bool, list[int]]] = {}
    for place, g in sorted((place, g) for g, place in enumerate(places) if place is not None):
        i = next(i for i in groups[g].indices if profile.slots[i].needed_at_ns is not None)
        module, convolution = _asking(profile.slots[i], consumers[i])
        first, before, mine = found.get(module, (place, False, []))
        found[module] = first, before or convolution, [*mine, g]
    layers = (Layer(name, one[1], one[0], tuple(one[2])) for name, one in found.items())
    return sorted(layers, key=lambda layer: -layer.place)


def _asking(slot: SlotProfile, consumer: Operator | None) -> tuple[str, bool]:
    """Return the module that first asks for a slot in backward, and True if it is a convolution."""
    if consumer is None:
        return slot.key.module, slot.kind.startswith("Conv")
    return consumer.module, consumer.convolution is not None or consumer.name.startswith("Conv")


def prefetch_search(layers: list[Layer], offloaded: Collection[int]) -> Mapping[int, int]:
    """Return when each offloaded group is read back: vDNN's search (MICRO 2016, section 3.3, figure 10).

    When the backward of a layer begins, the layers before it are searched, nearest first, and the first
    that was offloaded and not yet prefetched is prefetched. The search ends at a convolution, so that
    nothing comes back too early. A group that no search has found is read when its own layer asks for it.

    Returns:
        An index in the order of need for each group.
    """
    maps = [[g for g in layer.groups if g in offloaded] for layer in layers]
    waiting = [j for j, mine in enumerate(maps) if mine]  # the nearest last
    found: dict[int, int] = {}
    ends = _search_ends(layers)
    for current in reversed(range(len(layers))):
        place = layers[current].place
        if waiting and waiting[-1] == current:
            found.update(dict.fromkeys(maps[waiting.pop()], place))
        if waiting and waiting[-1] >= ends[current]:
            found.update(dict.fromkeys(maps[waiting.pop()], place))
    return found


def _search_ends(layers: list[Layer]) -> list[int]:
    """Return for each layer the end of its search: the nearest convolution before it."""
    ends, end = [], 0
    for j, layer in enumerate(layers):
        ends.append(end)
        if layer.convolution:
            end = j
    return ends
