"""Times from shapes: the roofline, and profiles timed anew for another machine."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, PlanError
from penstock.lab.dry.roofline import compute_of, is_dense, operator_ns, retimed
from penstock.plan import (
    Compute,
    Machine,
    Operator,
    PassProfile,
    Profile,
    SlotKey,
    SlotProfile,
    Transient,
)
from penstock.plan.operators import Product

COMPUTE = Compute(
    float32_flops_per_s=10e12,
    half_flops_per_s=80e12,
    efficiency=0.5,
    memory_bytes_per_s=400e9,
    operator_s=5e-6,
)


def machine(compute=COMPUTE):
    return Machine(
        name="on paper",
        flash_write_bytes_per_s=1e9,
        flash_read_bytes_per_s=1e9,
        flash_latency_s=1e-4,
        host_write_bytes_per_s=1e9,
        host_read_bytes_per_s=1e9,
        compute=compute,
    )


def took(flops=0, moved_bytes=0, *, half=False, dense=True, compute=COMPUTE):
    return operator_ns(compute, flops=flops, moved_bytes=moved_bytes, half=half, dense=dense)


def test_the_longest_of_arithmetic_traffic_and_launch():
    assert took(10**12) == 200_000_000
    assert took(10**12, dense=False) == 100_000_000
    assert took(10**12, half=True) == 25_000_000
    assert took(10**12, half=True, dense=False) == 12_500_000
    assert took(0, 4 * 10**9) == 10_000_000
    assert took(10**12, 4 * 10**9) == 200_000_000
    assert took(10, 10) == 5_000


def test_a_product_that_does_not_fill_the_device_takes_as_long_as_one_that_does():
    card = replace(COMPUTE, processors=80)

    def product(rows, columns, depth, count=1, compute=card):
        return operator_ns(
            compute,
            flops=2 * count * rows * columns * depth,
            moved_bytes=0,
            half=False,
            dense=True,
            product=Product(count, rows, columns, depth),
        )

    # of tiles of 128 by 128 these are 6 by 16 in two waves, and 10 by 16 in two waves
    assert product(768, 2048, 2048) == product(1280, 2048, 2048)
    assert product(768, 2048, 2048, compute=COMPUTE) < 0.61 * product(768, 2048, 2048)
    assert product(2048, 768, 2048) == product(768, 2048, 2048)
    # many at once fill it; so does one whose depth is larger than both of its sides
    assert product(384, 384, 64, count=80) == product(384, 384, 64, 80, COMPUTE)
    assert product(768, 2048, 2049) == product(768, 2048, 2049, compute=COMPUTE)


MEASURED = replace(
    COMPUTE, product_efficiency=(0.01, 0.04, 0.1, 0.4, 0.8, 0.9, 0.9), operator_s=0.0, processors=80
)
sides = st.integers(min_value=1, max_value=9000)


def product_ns(rows, columns, depth, compute=MEASURED, *, half=False):
    return operator_ns(
        compute,
        flops=2 * rows * columns * depth,
        moved_bytes=0,
        half=half,
        dense=True,
        product=Product(1, rows, columns, depth),
    )


def test_a_measured_product_is_as_fast_as_its_shortest_side():
    flops = 2 * 64 * 2048 * 4096
    assert product_ns(64, 2048, 4096) == math.ceil(flops / (10e12 * 0.4) * 1e9)
    assert product_ns(64, 2048, 4096) == product_ns(4096, 64, 2048) == product_ns(2048, 4096, 64)
    # half-way between 64 and 256 on a logarithmic axis
    assert product_ns(128, 4096, 4096) == math.ceil(
        2 * 128 * 4096**2 / (10e12 * math.sqrt(0.4 * 0.8)) * 1e9
    )
    assert product_ns(8192, 8192, 8192) == math.ceil(2 * 8192**3 / (10e12 * 0.9) * 1e9)
    # convolutions and attention go on as before
    assert took(10**12, compute=MEASURED) == took(10**12)


def test_shares_that_were_measured_in_32_bits_do_not_tell_of_16():
    unmeasured = replace(MEASURED, product_efficiency=())
    for sizes in (4, 2048, 4096), (768, 2048, 2048):
        assert product_ns(*sizes, half=True) == product_ns(*sizes, unmeasured, half=True)
        assert product_ns(*sizes) != product_ns(*sizes, unmeasured)


@st.composite
def measured(draw):
    """Shares that do not fall, and grow no faster than the side, which is four times the one before."""
    shares = [draw(st.floats(1e-4, 1))]
    for growth in draw(st.lists(st.floats(1, 4), min_size=6, max_size=6)):
        shares.append(min(1.0, shares[-1] * growth))
    return replace(MEASURED, product_efficiency=tuple(shares))


@given(compute=measured(), rows=sides, more=st.integers(1, 500), columns=sides, depth=sides)
def test_more_rows_never_take_less(compute, rows, more, columns, depth):
    fewer = product_ns(rows, columns, depth, compute)
    assert product_ns(rows + more, columns, depth, compute) >= fewer * (1 - 1e-12) - 1


def test_part_of_a_nanosecond_counts_as_one_and_no_work_takes_one():
    free = replace(COMPUTE, operator_s=0.0)
    assert took(0, 401, compute=free) == 2
    assert took(compute=free) == 1


rates = st.floats(min_value=1e6, max_value=1e16)
computes = st.builds(
    Compute,
    float32_flops_per_s=rates,
    half_flops_per_s=rates,
    efficiency=st.floats(min_value=0.01, max_value=1),
    memory_bytes_per_s=rates,
    operator_s=st.floats(min_value=0, max_value=1e-3),
)
counts = st.integers(min_value=0, max_value=10**18)


@given(compute=computes, flops=counts, moved=counts, more=counts, half=st.booleans())
def test_more_work_never_takes_less_and_it_is_exact(compute, flops, moved, more, half):
    ns = took(flops, moved, half=half, compute=compute)
    assert isinstance(ns, int)
    assert ns >= 1
    assert took(flops + more, moved, half=half, compute=compute) >= ns
    assert took(flops, moved + more, half=half, compute=compute) >= ns
    assert took(flops, moved, half=half, dense=False, compute=compute) <= ns
    peak = compute.half_flops_per_s if half else compute.float32_flops_per_s
    exact = [
        Fraction(flops) / Fraction(peak * compute.efficiency),
        Fraction(moved) / Fraction(compute.memory_bytes_per_s),
    ]
    launch = round(compute.operator_s * 1e9)
    assert ns == max(1, launch, *(math.ceil(one * 10**9) for one in exact))


def test_what_is_dense():
    assert is_dense("aten.convolution")
    assert is_dense("aten._scaled_dot_product_flash_attention_backward")
    assert not is_dense("aten.native_batch_norm")


# -- timed anew -----------------------------------------------------------------------------------


@st.composite
def profiles(draw):
    """Operators with gaps between them; slots, transients and passes at any moments."""
    operators, now = [], draw(st.integers(0, 5))
    for i in range(draw(st.integers(1, 8))):
        start = now + draw(st.integers(0, 3))
        now = start + draw(st.integers(1, 50))
        operators.append(
            Operator(
                name=draw(st.sampled_from(["aten.mm", "aten.relu"])),
                module=f"net.{i}",
                pass_index=1,
                backward=i > 3,
                start_ns=start,
                end_ns=now,
                flops=draw(st.integers(1, 10**9)),
                moved_bytes=draw(st.integers(1, 10**6)),
                half=draw(st.booleans()),
            )
        )
    moments = st.integers(0, now + 9)
    slots = []
    for i in range(draw(st.integers(0, 4))):
        saved, needed = sorted([draw(moments), draw(moments)])
        needed = draw(st.sampled_from([needed, None]))
        slots.append(
            SlotProfile(SlotKey("net", i, 100), 1, saved, needed, "Linear", False, "float32")
        )
    return Profile(
        device="cpu",
        slots=tuple(slots),
        passes=(PassProfile(1, *sorted(draw(moments) for _ in range(3))),),
        operators=tuple(operators),
        transients=tuple(Transient(at, at) for at in sorted(draw(st.sets(moments, max_size=4)))),
    )


def moments(profile):
    (one,) = profile.passes
    found = [one.start_ns, one.backward_start_ns, one.end_ns]
    for slot in profile.slots:
        found += [slot.saved_at_ns, -1 if slot.needed_at_ns is None else slot.needed_at_ns]
    found += [transient.at_ns for transient in profile.transients]
    return found + [at for op in profile.operators for at in (op.start_ns, op.end_ns)]


@given(profile=profiles(), compute=computes)
def test_every_operator_gets_its_time_and_every_moment_keeps_its_place(profile, compute):
    there = retimed(profile, machine(compute))
    for old, new in zip(profile.operators, there.operators, strict=True):
        assert new.took_ns == took(
            old.flops, old.moved_bytes, half=old.half, dense=old.name == "aten.mm", compute=compute
        )
    pairs = sorted(zip(moments(profile), moments(there), strict=True))
    news = [new for _, new in pairs]
    assert news == sorted(news)
    olds = [(op.start_ns, op.end_ns) for op in profile.operators]
    for (_, end), (start, _) in pairwise(olds):
        assert dict(pairs)[start] - dict(pairs)[end] == start - end
    assert [slot.key for slot in there.slots] == [slot.key for slot in profile.slots]
    assert retimed(there, machine(compute)) == there


@given(profile=profiles(), one=computes, other=computes)
def test_where_it_was_timed_before_makes_no_difference_between_operators(profile, one, other):
    bare = replace(profile, slots=(), transients=())
    direct = retimed(bare, machine(other))
    by_way = retimed(retimed(bare, machine(one)), machine(other))
    assert by_way.operators == direct.operators


def test_a_moment_within_an_operator_keeps_its_share_of_it():
    operator = Operator("aten.relu", "net", 1, False, 10, 30, flops=1, moved_bytes=40_000_000)
    slot = SlotProfile(SlotKey("net", 0, 8), 1, 15, 30, "ReLU", False, "float32")
    profile = Profile(
        "cpu", (slot,), (PassProfile(1, 0, 10, 37),), operators=(operator,), transients=()
    )
    there = retimed(profile, machine())
    assert there.operators[0].took_ns == 100_000
    assert (there.slots[0].saved_at_ns, there.slots[0].needed_at_ns) == (10 + 25_000, 10 + 100_000)
    assert there.passes[0] == PassProfile(1, 0, 10, 10 + 100_000 + 7)


def test_what_cannot_be_timed_is_refused():
    measured = Operator("Linear", "net.1", 1, False, 0, 30)
    counted = replace(measured, name="aten.mm", flops=8)
    empty = Profile("cpu", (), (PassProfile(1, 0, 10, 40),))
    with pytest.raises(PlanError, match=r"it has no operators.*use a dry profile"):
        retimed(empty, machine())
    with pytest.raises(PlanError, match=r"'Linear' of 'net.1' has neither flops nor.*was measured"):
        retimed(replace(empty, operators=(counted, replace(measured, start_ns=30))), machine())
    late = replace(empty, operators=(counted, replace(counted, start_ns=20)))
    with pytest.raises(PlanError, match=r"starts at 20 ns, before 'aten.mm' has ended at 30 ns"):
        retimed(late, machine())
    with pytest.raises(ConfigError, match="machine 'on paper': its field 'compute' is missing"):
        retimed(replace(empty, operators=(counted,)), machine(None))
    assert compute_of(machine()) is COMPUTE
