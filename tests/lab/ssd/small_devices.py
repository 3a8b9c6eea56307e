"""Devices small enough to be filled in a test."""

import dataclasses

from hypothesis import strategies as st

from penstock.lab.ssd import load, with_field
from penstock.lab.ssd.control import ALLOCATIONS


def device(base="mqsim-default", **fields):
    """``device(geometry__channels=2)``: a preset with other fields."""
    made = load(base)
    for name, value in fields.items():
        made = with_field(made, name.replace("__", "."), value)
    return made


def tiny(**fields):
    """Two channels of two chips, 24 blocks of 16 pages in a plane."""
    small = {
        "geometry__channels": 2,
        "geometry__chips_per_channel": 2,
        "geometry__dies_per_chip": 1,
        "geometry__planes_per_die": 2,
        "geometry__blocks_per_plane": 24,
        "geometry__pages_per_block": 16,
        "ftl__gc_least_blocks": 3,
        "ftl__gc_victims": 1,
        "ftl__gc_when_filled": False,
        "ftl__overprovisioning": 0.25,
        "ftl__victim": "greedy",
    }
    return device(**{**small, **fields})


@st.composite
def random_devices(draw):
    """Any arrangement of a few planes, with any of the switches."""
    made = tiny(
        geometry__channels=draw(st.integers(1, 3)),
        geometry__chips_per_channel=draw(st.integers(1, 3)),
        geometry__dies_per_chip=draw(st.integers(1, 2)),
        geometry__planes_per_die=draw(st.integers(1, 4)),
        ftl__allocation=draw(st.sampled_from(ALLOCATIONS)),
        ftl__victim=draw(st.sampled_from(["greedy", "random-greedy", "fifo", "cost-benefit"])),
        link__fetch_depth=draw(st.sampled_from([1, 3, 64])),
    )
    switches = {
        name: draw(st.booleans())
        for name in ("dies_in_parallel", "multi_plane", "cache_read", "cache_program", "send_spare")
    }
    switches["independent_plane_reads"] = switches["multi_plane"] and draw(st.booleans())
    return dataclasses.replace(made, channel=dataclasses.replace(made.channel, **switches))
