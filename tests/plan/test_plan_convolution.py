"""Convolution algorithms: their time and workspace by hand, and what they do to a profile."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import COMPUTE, MACHINE, MB, MS, SHAPE, network, networks

from penstock.plan import Budgets, Convolution, Operator, Transient, policies
from penstock.plan.algorithms import INDEXING_SHARE, fastest, lean_algorithm
from penstock.plan.case import Case
from penstock.plan.convolution import convolutions, least_lean, with_algorithms
from penstock.plan.replay import replay

AMPLE = 10**12
CARD = replace(MACHINE, compute=COMPUTE)
RATE = COMPUTE.float32_flops_per_s * COMPUTE.efficiency
FLOPS = 2 * 8 * 64 * 64 * 9 * 56 * 56
"""Of SHAPE, computed directly."""
MOVED = 4 * (2 * 8 * 64 * 56 * 56 + 64 * 64 * 9)


def operator(shape=SHAPE, **fields):
    fields = {"flops": FLOPS, "moved_bytes": MOVED, **fields}
    return Operator("aten.convolution", "c", 0, False, 0, 10 * MS, convolution=shape, **fields)


def test_the_lean_algorithm_is_a_matrix_product_that_works_out_its_indices():
    found = lean_algorithm(operator(), COMPUTE)
    assert found.workspace_bytes == 0
    assert found.took_ns == pytest.approx(FLOPS / RATE / INDEXING_SHARE * 1e9, abs=1)


def test_what_moves_more_than_it_computes_takes_the_time_of_its_bytes():
    thin = replace(SHAPE, channels_in=1, channels_out=1, kernel_size=(1, 1))
    found = lean_algorithm(operator(thin, flops=10, moved_bytes=3 * 10**8), COMPUTE)
    assert found.took_ns == MS  # 300 GB/s
    assert (
        lean_algorithm(operator(thin, flops=10, moved_bytes=1), COMPUTE).took_ns == 5000
    )  # a launch


def test_spectra_are_moved_by_two_passes_a_transposition_and_the_product():
    shape = replace(SHAPE, kernel_size=(31, 31), channels_in=256, channels_out=256)
    found = fastest(operator(shape, flops=0), COMPUTE)
    assert found.name == "FFT"  # of 128 by 128 points, as 86 are needed
    maps, filters = 8 * 512, 256 * 256
    assert found.workspace_bytes == 8 * 128 * 65 * (maps + filters)
    traffic_s = (MOVED + 5 * found.workspace_bytes) / COMPUTE.memory_bytes_per_s
    arithmetic_s = 2.5 * 128 * 128 * 14 * (maps + filters) / RATE
    product_s = max(
        8 * 8 * filters * 128 * 65 / RATE, found.workspace_bytes / COMPUTE.memory_bytes_per_s
    )
    expected_s = max(traffic_s, arithmetic_s) + product_s
    assert found.took_ns == pytest.approx(1e9 * expected_s, rel=1e-6)


def test_fft_holds_its_spectra():
    shape = replace(SHAPE, kernel_size=(11, 11), input_size=(24, 24), output_size=(22, 22))
    found = fastest(operator(shape, flops=0, moved_bytes=10**6), COMPUTE)
    assert found.name == "FFT"  # sides of 32, which is one tile as well
    assert found.workspace_bytes == 8 * 32 * 17 * (8 * 64 + 8 * 64 + 64 * 64)


def test_large_maps_are_transformed_in_tiles():
    shape = replace(
        SHAPE, batch=2, kernel_size=(11, 11), input_size=(300, 300), output_size=(300, 300)
    )
    found = fastest(operator(shape, flops=0, moved_bytes=10**6), COMPUTE)
    assert found.name == "tiled FFT"
    assert found.workspace_bytes == 8 * 32 * 17 * (
        2 * 14 * 14 * 128 + 64 * 64
    )  # of 22 by 22 outputs


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, stride=(2, 2)),
        replace(SHAPE, groups=64),
        replace(SHAPE, kernel_size=(1, 1)),
        Convolution(8, 64, 64, 1, (9, 9, 9), (3, 3, 3), (9, 9, 9), (1, 1, 1), 4),
    ],
    ids=["strided", "depthwise", "pointwise", "of three dimensions"],
)
def test_others_are_matrix_products_with_their_indices(shape):
    found = fastest(operator(shape, flops=0, moved_bytes=1), COMPUTE)
    assert found.name == "precomputed GEMM"
    assert 0 < found.workspace_bytes < 10**5


def test_sixteen_bits_are_multiplied_as_matrices():
    found = fastest(operator(half=True), COMPUTE)
    assert found.name == "precomputed GEMM"
    assert found.took_ns == pytest.approx(FLOPS / RATE / 2 * 1e9, rel=0.01)


def test_a_backward_of_both_gradients_takes_twice_as_long():
    once, twice = operator(), operator(flops=2 * FLOPS, moved_bytes=2 * MOVED)
    first, second = fastest(once, COMPUTE), fastest(twice, COMPUTE)
    assert second.took_ns == pytest.approx(2 * first.took_ns, rel=1e-6)
    assert second.workspace_bytes == first.workspace_bytes


shapes = st.builds(
    lambda n, c, k, hw, r, s: replace(
        SHAPE,
        batch=n,
        channels_in=c,
        channels_out=k,
        input_size=(hw, hw),
        output_size=(hw, hw),
        kernel_size=(r, r),
        stride=(s, s),
    ),
    st.integers(1, 64),
    st.integers(1, 256),
    st.integers(1, 256),
    st.integers(1, 300),
    st.integers(1, 11),
    st.integers(1, 2),
)


@given(shapes, st.booleans())
def test_the_fastest_is_never_slower_than_the_lean_one(shape, half):
    one = operator(shape, flops=0, half=half)
    quick, lean = fastest(one, COMPUTE), lean_algorithm(one, COMPUTE)
    assert quick.took_ns <= lean.took_ns
    assert lean.workspace_bytes == 0
    assert quick.took_ns >= 5000


# -- in a profile -------------------------------------------------------------------------------------


def whole(**fields):
    return network([40] * 4, convolution=SHAPE, whole=MB, transient_mb=5, step_ms=4, **fields)


def test_a_machine_that_does_not_say_what_it_computes_with_changes_nothing():
    profile = whole()
    assert with_algorithms(profile, MACHINE, ()) is profile
    assert convolutions(profile, MACHINE) == ()
    assert with_algorithms(network([10] * 3), CARD, ()) == network([10] * 3)


def test_times_move_and_what_lies_between_keeps_its_length():
    profile = whole()
    assert convolutions(profile, CARD) == ("block.0.0", "block.1.0")
    fast, slow = (
        with_algorithms(profile, CARD, ()),
        with_algorithms(profile, CARD, convolutions(profile, CARD)),
    )
    for found, choose in ((fast, fastest), (slow, lean_algorithm)):
        for before, after in zip(profile.operators, found.operators, strict=True):
            expected = before.took_ns
            if before.convolution:
                expected = choose(before, COMPUTE).took_ns
            assert after.took_ns == expected
        for one, following in zip(found.operators, found.operators[1:], strict=False):
            assert one.end_ns == following.start_ns
        starts = {(one.module, one.backward): one.start_ns for one in found.operators}
        for slot in found.slots:
            assert slot.saved_at_ns == starts[slot.key.module, False]
            assert slot.needed_at_ns == starts[slot.key.module, True]
        assert found.passes[0].end_ns == found.operators[-1].end_ns
    assert fast.passes[0].end_ns < slow.passes[0].end_ns


def test_workspaces_are_in_the_transients_and_beside_the_slots():
    profile = whole()
    fast = with_algorithms(profile, CARD, ("block.0.0",))
    workspace = fastest(profile.operators[2], COMPUTE).workspace_bytes
    begin, end = fast.operators[2].start_ns, fast.operators[2].end_ns
    back = next(one for one in fast.operators if one.backward and one.module == "block.1.0")
    assert fast.transients == (
        Transient(0, 5 * MB),
        Transient(begin, 5 * MB + workspace),
        Transient(end, 5 * MB),
        Transient(back.start_ns, 5 * MB + workspace),
        Transient(back.end_ns, 5 * MB),
    )
    assert [slot.small_bytes - 6 * MB for slot in fast.slots] == [0, 0, workspace, 0]
    assert fast.small_bytes == 6 * MB + workspace
    lean = with_algorithms(profile, CARD, convolutions(profile, CARD))
    assert lean.small_bytes == 6 * MB
    assert lean.transients == (Transient(0, 5 * MB),)


def test_budgets_of_saved_slots_only_count_no_workspace():
    profile = network([40] * 4, convolution=SHAPE)
    fast = with_algorithms(profile, CARD, ())
    assert fast.small_bytes == 0
    assert fast.transients == ()
    assert least_lean(profile, CARD, bytearray(4), 1) == ()


def test_what_does_not_fit_beside_what_is_resident_is_lean():
    profile = whole()
    workspace = fastest(profile.operators[0], COMPUTE).workspace_bytes
    gone = bytearray(b"\x01" * 4)
    # everything is offloaded: beside a convolution there are its own map and 6 MB
    assert least_lean(profile, CARD, gone, 46 * MB + workspace) == ()
    assert least_lean(profile, CARD, gone, 46 * MB + workspace - 1) == ("block.0.0", "block.1.0")
    # everything stays: beside the second there are three maps, beside the first one, and one again
    assert least_lean(profile, CARD, bytearray(4), 86 * MB + workspace) == ("block.1.0",)


@settings(max_examples=60)
@given(networks(), st.floats(0.2, 1.2))
def test_the_least_that_must_be_lean_is_enough_and_not_too_much(profile, share):
    case = Case(profile, CARD, Budgets(int(share * profile.peak_saved_bytes), 0, AMPLE))
    everything = case.leaning(case.convolutions)
    choice = case.offloaded(case.movable)
    fitted = case.fitted()
    assert fitted.fits(choice) == everything.fits(choice)
    for path in fitted.lean if fitted.fits(choice) else ():
        without = tuple(one for one in fitted.lean if one != path)
        assert not case.leaning(without).fits(choice)


def test_a_plan_with_lean_convolutions_takes_their_time():
    profile = whole()
    plan = policies.get("keep")(profile, CARD, Budgets(AMPLE))
    lean = replace(plan, lean_convolutions=convolutions(profile, CARD))
    more = replay(profile, lean, CARD).step_ns - replay(profile, plan, CARD).step_ns
    expected = sum(
        lean_algorithm(one, COMPUTE).took_ns - fastest(one, COMPUTE).took_ns
        for one in profile.operators
        if one.convolution
    )
    assert more == expected > 0
