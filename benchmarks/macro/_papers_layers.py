"""Device memory layer by layer: one reading for each layer and direction, as vDNN's authors took it.

A file that appears to be theirs (``vdnn.cu`` in github.com/yskimno1/project_lazybatching at 0aeba7e3; its
comments carry the first author's initials) reads the memory in use once in the forward of each layer,
before its kernel and with its output and workspace allocated; and twice in the backward of a convolution,
of which the larger counts. Gradients of activations take the place of what they are made from; PyTorch
makes another map, which is left out here. How the readings are averaged is not in that file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TypeAlias

from penstock.plan import Profile
from penstock.plan.replay import Trace

KINDS = (
    "aten.convolution",
    "aten.relu",
    "aten.threshold_backward",
    "aten.max_pool2d",
    "aten.addmm",
    "aten.mm",
    "aten.cat",
)
"""The layers of that file, as beginnings of our operators' names: convolution, activation, pooling, fully
connected, concatenation. It has no dropout, no normalization and no loss."""
GRADIENT, MAPS = "aten.threshold_backward", 3
"""Of ReLU: it reads two maps, and PyTorch's writes a third one that is as large."""
Layer: TypeAlias = tuple[str, str, bool]
"""Module, operator, and whether in backward."""


def by_layer(profile: Profile, trace: Trace) -> dict[Layer, int]:
    """Most bytes in use while each layer computes.

    Args:
        profile: The profile with the algorithms of the plan that was replayed.
        trace: The replay of the plan. Nothing may slow computing but waits.
    """
    begin_ns, _ = profile.axis_ns
    begins = [start for start, _ in trace.busy["compute"]]
    computed = [0, *accumulate(end - start for start, end in trace.busy["compute"])]
    whens = [when for when, _ in trace.memory["device"]]
    levels = [level for _, level in trace.memory["device"]]
    most: dict[Layer, int] = {}
    for one in profile.operators:
        if not one.name.startswith(KINDS):
            continue
        after, before = one.start_ns - begin_ns, one.end_ns - begin_ns
        place = (
            min(bisect_right(computed, after), len(begins)) - 1
        )  # what is waited for comes first
        first = bisect_right(whens, begins[place] + after - computed[place]) - 1
        place = max(bisect_left(computed, before) - 1, 0)
        last = bisect_left(whens, begins[place] + before - computed[place])
        layer = one.module, one.name, one.backward
        beside = one.moved_bytes // MAPS if one.name == GRADIENT else 0
        used = max(levels[first : max(last, first + 1)]) - beside
        most[layer] = max(most.get(layer, 0), used)
    return most
