"""Wear levelling: blocks wear alike, however unevenly they are written, and nothing is lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_devices import tiny

from penstock.core.errors import ConfigError
from penstock.lab.ssd.aging import clean_now, fill
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.ftl import EMPTY, Ftl
from penstock.lab.ssd.requests import Workload
from tries import tries

PAGE = 8192


def worn(count=30_000, hot=0.1, **settings_):
    """A drive whose first pages are all that is written over, again and again."""
    ftl = Ftl(tiny(geometry__channels=1, geometry__chips_per_channel=1, **settings_))
    fill(ftl, ftl.user_pages)
    chance = random.Random(1)
    for _ in range(count):
        lpn = int(chance.random() * hot * ftl.user_pages)
        ftl.place(lpn)
        clean_now(ftl, ftl.plane_of(lpn))
    return ftl


def spread(ftl):
    erases = ftl.erases()
    return max(erases) - min(erases)


def test_cold_blocks_never_wear_by_themselves():
    ftl = worn()
    assert min(ftl.erases()) == 0
    assert spread(ftl) > 60


def test_static_levelling_keeps_blocks_within_its_gap_and_a_wider_one_costs_less():
    plain, wide, narrow = worn(), worn(ftl__wear_gap=32), worn(ftl__wear_gap=8)
    # what is cleaned in between may go some erases further
    assert spread(narrow) <= 8 + 12 < spread(wide) <= 32 + 12 < spread(plain)
    assert max(wide.erases()) < max(plain.erases())
    costs = [each.write_amplification for each in (plain, wide, narrow)]
    assert costs == sorted(costs)


def test_dynamic_levelling_alone_levels_what_is_hot():
    plain, levelled = worn(), worn(ftl__least_worn_first=True)
    assert levelled.write_amplification == pytest.approx(plain.write_amplification, rel=0.05)
    assert max(levelled.erases()) <= max(plain.erases())
    assert min(levelled.erases()) == 0  # cold data stays where it is


@settings(max_examples=tries(25))
@given(st.integers(1, 12), st.booleans(), st.sampled_from(["greedy", "fifo", "random-greedy"]))
def test_levelling_loses_no_page(gap, dynamic, victim):
    ftl = worn(3000, ftl__wear_gap=gap, ftl__least_worn_first=dynamic, ftl__victim=victim)
    for lpn in range(ftl.user_pages):
        block, page = ftl.find(lpn)
        assert block.lpns[page] == lpn
    held = [lpn for plane in ftl.planes for block in plane.blocks() for lpn in block.lpns]
    assert sorted(lpn for lpn in held if lpn != EMPTY) == list(range(ftl.user_pages))


def test_levelling_in_time_finishes_too():
    made = tiny(ftl__wear_gap=4, ftl__least_worn_first=True)
    one = Drive(made).run(
        Workload(
            requests=6000, read_share=0.1, request_bytes=PAGE, queue_depth=16, working_set=0.2,
            filled=1.0,
        )
    )  # fmt: skip
    assert one.requests == 6000
    assert one.most_erases - one.mean_erases < 12
    with pytest.raises(ConfigError, match=r"ftl\.wear_gap is -1"):
        tiny(ftl__wear_gap=-1)
