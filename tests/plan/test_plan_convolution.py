"""Convolution algorithms: their time and workspace by hand, and what they do to a profile."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import COMPUTE, MACHINE, MB, MS, SHAPE, network, networks

from penstock.core.errors import PlanError
from penstock.plan import (
    Budgets,
    Convolution,
    Operator,
    Plan,
    Transient,
    WorkspaceLimit,
    algorithms,
    policies,
)
from penstock.plan.algorithms import INDEXING_SHARE, fastest
from penstock.plan.convolution import frugal, leanest, stepped_down, with_algorithms
from penstock.plan.problem import PlanningProblem
from penstock.plan.replay import replay
from tries import tries

AMPLE = 10**12
CARD = replace(MACHINE, compute=COMPUTE)
RECENT = replace(COMPUTE, cudnn=6)
"""The same with a library that has every algorithm for every pass."""
MODERN = replace(MACHINE, compute=RECENT)
RATE = COMPUTE.float32_flops_per_s * COMPUTE.efficiency
FLOPS = 2 * 8 * 64 * 64 * 9 * 56 * 56
"""Of SHAPE, computed directly."""
MOVED = 4 * (2 * 8 * 64 * 56 * 56 + 64 * 64 * 9)


def operator(shape=SHAPE, **fields):
    fields = {"flops": FLOPS, "moved_bytes": MOVED, "backward": False, **fields}
    times = {"start_ns": 0, "end_ns": 10 * MS}
    return Operator("aten.convolution", "c", 0, convolution=shape, **times, **fields)


def lean_algorithm(one, compute):
    return fastest(one, compute, limit_bytes=0)


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
    assert found.workspace_bytes == 8 * 32 * 17 * (2 * 128 + 64 * 64)  # one tile of each image
    tiles = 14 * 14  # of 22 by 22 outputs
    spectra_bytes = 8 * 32 * 17 * (2 * tiles * 128 + 64 * 64)
    product_s = 8 * 32 * 17 * 2 * tiles * 64 * 64 / RATE
    moved_s = (10**6 + 3 * spectra_bytes) / COMPUTE.memory_bytes_per_s
    assert found.took_ns == pytest.approx(1e9 * (product_s + moved_s), rel=1e-6)


def test_spectra_are_those_that_others_have_seen():
    """AlexNet's second convolution in μ-cuDNN (2018), one of two groups; and mnistCUDNN's two layers."""
    alexnet = Convolution(256, 48, 128, 1, (27, 27), (5, 5), (27, 27), (1, 1), 4)
    sizes = {batch: workspaces(replace(alexnet, batch=batch))["FFT"] / 2**20 for batch in (256, 32)}
    assert sizes == {256: pytest.approx(213, rel=0.01), 32: pytest.approx(48.9, rel=0.01)}
    first = Convolution(1, 1, 20, 1, (28, 28), (5, 5), (24, 24), (1, 1), 4)
    second = Convolution(1, 20, 50, 1, (12, 12), (5, 5), (8, 8), (1, 1), 4)
    assert [workspaces(one)["tiled FFT"] for one in (first, second)] == [178_432, 4_656_640]


def test_winograd_multiplies_a_quarter_and_came_with_cudnn_5():
    card = replace(COMPUTE, cudnn=5, memory_bytes_per_s=1e15)
    one = operator()
    found = fastest(one, card)
    assert found.name == "Winograd"
    tiles = 8 * 14 * 14
    assert found.workspace_bytes == 4 * 36 * (tiles * 128 + 64 * 64)
    transforms = 144 * (tiles * 128 + 64 * 64)
    assert found.took_ns == pytest.approx(1e9 * (FLOPS / 4 + transforms) / RATE, abs=1)
    assert fastest(one, replace(card, cudnn=4)).name != "Winograd"
    for other in (replace(SHAPE, kernel_size=(5, 5)), replace(SHAPE, stride=(2, 2))):
        assert fastest(operator(other), card).name != "Winograd"


def test_small_products_do_not_fill_the_device():
    card = replace(COMPUTE, processors=80)
    deep = replace(SHAPE, channels_in=256, channels_out=256, kernel_size=(1, 1), batch=6)
    deep = replace(deep, input_size=(14, 14), output_size=(14, 14))

    def took(batch, compute=card, **fields):
        one = operator(replace(deep, batch=batch), flops=0, moved_bytes=1, **fields)
        return fastest(one, compute).took_ns

    # 1176 by 256 outputs are 10 by 2 tiles, for 80 processors: as long as 4 times as many take
    assert took(6) == took(24) == pytest.approx(128 * 128 * 80 * 256 * 2 / RATE * 1e9, abs=1)
    assert took(6, COMPUTE) == pytest.approx(1176 * 256 * 256 * 2 / RATE * 1e9, abs=1)
    assert took(1000) == pytest.approx(took(1000, COMPUTE), rel=0.02)
    # of backward, the gradient of the input is as slow, that of the filters fills it
    both = 2 * 2 * 1176 * 256 * 256
    one = operator(deep, flops=both, moved_bytes=1, backward=True)
    assert fastest(one, card).took_ns == pytest.approx(took(6) + took(6, COMPUTE), abs=2)
    one = replace(one, flops=both // 2)
    assert fastest(one, card).took_ns == took(6, COMPUTE)
    # as many products as there are points fill it
    many = operator(replace(SHAPE, batch=8), flops=0)
    wide = replace(card, cudnn=5)
    assert fastest(many, wide).took_ns < 1.3 * fastest(many, replace(wide, processors=0)).took_ns


def test_the_gradient_of_filters_had_its_tiles_from_cudnn_6_on():
    one = operator(WIDE, flops=0, moved_bytes=1, backward=True)
    old, new = (fastest(one, replace(COMPUTE, cudnn=cudnn)) for cudnn in (4, 6))
    assert old.name == "tiled FFT and FFT"
    assert new.name == "Winograd"
    forward = fastest(operator(WIDE, flops=0, moved_bytes=1), COMPUTE)
    assert old.workspace_bytes > forward.workspace_bytes  # of one pass after the other
    assert old.took_ns > 2 * forward.took_ns


def test_a_depthwise_convolution_is_no_product():
    shape = replace(SHAPE, groups=64)
    one = operator(shape, flops=0, moved_bytes=1)
    assert fastest(one, replace(COMPUTE, processors=80)) == fastest(one, COMPUTE)


def workspaces(shape):
    (one,) = algorithms._passes(operator(shape, flops=0))
    found = algorithms._by_speed(one, COMPUTE)
    # of a single tile FFT and tiled FFT are one: cuDNN may take smaller ones for FFT
    return {name: one.workspace_bytes for one in found for name in (one.name, "tiled " + one.name)}


@given(st.integers(0, 2**31), st.integers(1, 64), st.integers(4, 6))
def test_the_fastest_within_a_limit_is_within_it_and_a_wider_one_is_no_slower(limit, parts, cudnn):
    compute = replace(COMPUTE, cudnn=cudnn)
    one = operator(replace(SHAPE, batch=32), flops=0)
    found = fastest(one, compute, limit, parts)
    assert found.workspace_bytes <= limit
    assert found.parts <= parts
    assert fastest(one, compute, 2 * limit, parts).took_ns <= found.took_ns + parts
    assert fastest(one, compute, limit, 2 * parts).took_ns <= found.took_ns
    assert fastest(one, compute, limit).took_ns >= found.took_ns
    assert fastest(one, compute, found.workspace_bytes, found.parts) == found


def test_a_part_has_its_share_of_the_maps_and_all_filters():
    shape = replace(
        SHAPE, batch=64, kernel_size=(11, 11), input_size=(24, 24), output_size=(22, 22)
    )
    maps, filters = 4 * 64 * 64 * (24 * 24 + 22 * 22), 4 * 64 * 64 * 121
    one = operator(shape, flops=0, moved_bytes=maps + filters)
    whole = fastest(one, COMPUTE)
    found = fastest(one, COMPUTE, whole.workspace_bytes // 2, 64)
    assert found.name == whole.name == "FFT"
    assert found.parts == 4
    part = fastest(
        operator(replace(shape, batch=16), flops=0, moved_bytes=maps // 4 + filters), COMPUTE
    )
    assert found.took_ns == 4 * part.took_ns > whole.took_ns
    assert found.workspace_bytes == part.workspace_bytes


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
    twice = replace(twice, backward=True)
    first, second = fastest(once, RECENT), fastest(twice, RECENT)
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


WIDE = replace(SHAPE, batch=256)
"""Winograd is the fastest, then tiled FFT, of 160 MB of spectra."""


def whole(shape=SHAPE):
    return network([40] * 4, convolution=shape, whole=MB, transient_mb=5, step_ms=4)


def test_a_machine_that_does_not_say_what_it_computes_with_changes_nothing():
    profile = whole()
    assert with_algorithms(profile, MACHINE, ()) is profile
    assert leanest(profile, MACHINE) == ()
    assert with_algorithms(network([10] * 3), CARD, ()) == network([10] * 3)


def test_times_move_and_what_lies_between_keeps_its_length():
    profile = whole()
    assert tuple(dict.fromkeys(one.module for one in leanest(profile, CARD))) == (
        "block.0.0",
        "block.1.0",
    )
    fast, slow = (
        with_algorithms(profile, CARD, ()),
        with_algorithms(profile, CARD, leanest(profile, CARD)),
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
    limits = tuple(WorkspaceLimit("block.0.0", backward, 0) for backward in (False, True))
    fast = with_algorithms(profile, CARD, limits)
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
    for beside in ("small_bytes", "small_bytes_at_need"):
        assert [getattr(slot, beside) - 6 * MB for slot in fast.slots] == [0, 0, workspace, 0]
    assert fast.small_bytes == 6 * MB + workspace
    lean = with_algorithms(profile, CARD, leanest(profile, CARD))
    assert lean.small_bytes == 6 * MB
    assert lean.transients == (Transient(0, 5 * MB),)


def test_budgets_of_saved_slots_only_count_no_workspace():
    profile = network([40] * 4, convolution=SHAPE)
    fast = with_algorithms(profile, CARD, ())
    assert fast.small_bytes == 0
    assert fast.transients == ()
    assert stepped_down(profile, CARD, bytearray(4), 1) == ()


def test_what_does_not_fit_beside_what_is_resident_steps_down():
    profile = whole(WIDE)
    workspace = fastest(profile.operators[0], RECENT).workspace_bytes
    gone = bytearray(b"\x01" * 4)

    def limited(mask, device_bytes):
        return [
            (one.module, one.backward, one.nbytes, one.parts)
            for one in stepped_down(profile, MODERN, mask, device_bytes)
        ]

    # everything is offloaded: beside a convolution there are its own map and 6 MB
    tiled = fastest(profile.operators[0], RECENT, workspace - 1).workspace_bytes
    assert 0 < tiled < workspace
    everything = [
        (module, backward, tiled, 1)
        for module, backward in (
            ("block.0.0", False),
            ("block.1.0", False),
            ("block.1.0", True),
            ("block.0.0", True),
        )
    ]
    assert limited(gone, 46 * MB + workspace) == []
    assert limited(gone, 46 * MB + workspace - 1) == everything
    assert limited(gone, 46 * MB) == [(*one[:2], 0, 1) for one in everything]
    # everything stays: beside the second there are three maps, beside the first one, and one again
    assert limited(bytearray(4), 86 * MB + workspace) == everything[1:3]


def test_in_parts_of_the_batch_a_convolution_is_nearly_as_fast():
    profile = whole(WIDE)
    fast = fastest(profile.operators[0], RECENT)
    room = 46 * MB + fast.workspace_bytes * 3 // 4
    gone = bytearray(b"\x01" * 4)
    whole_batch = stepped_down(profile, MODERN, gone, room)
    split = stepped_down(profile, MODERN, gone, room, split=True)
    assert {one.parts for one in whole_batch} == {1}
    assert {one.parts for one in split} == {2}
    took = [
        with_algorithms(profile, MODERN, limits).passes[0].end_ns
        for limits in ((), split, whole_batch)
    ]
    assert took[0] < took[1] < took[2]


def test_little_workspace_for_little_time():
    one = operator(WIDE, flops=0)
    whole_batch = fastest(one, RECENT)
    found = algorithms.least_for_time(one, RECENT, 1 / 32)
    assert found.workspace_bytes < whole_batch.workspace_bytes / 8
    assert whole_batch.took_ns <= found.took_ns <= whole_batch.took_ns * 33 / 32
    less = fastest(one, RECENT, found.workspace_bytes - 1, 64)
    assert less.took_ns > whole_batch.took_ns * 33 / 32 or not found.workspace_bytes
    profile = whole(WIDE)
    limits = frugal(profile, MODERN)
    assert len(limits) == 4
    took = [with_algorithms(profile, MODERN, one).passes[0].end_ns for one in ((), limits)]
    assert took[0] <= took[1] <= took[0] * 33 / 32


@settings(max_examples=tries(60))
@given(networks(), st.floats(0.2, 1.2), st.booleans())
def test_limits_are_enough_and_none_is_for_nothing(profile, share, split):
    budgets = Budgets(int(share * profile.peak_saved_bytes), 0, AMPLE)
    case = PlanningProblem(profile, CARD, budgets, split=split)
    everything = case.with_limits(case.leanest)
    choice = case.offloaded(case.movable)
    fitted = case.fitted()
    assert fitted.fits(choice) == everything.fits(choice)
    for limit in fitted.lean if fitted.fits(choice) else ():
        without = tuple(one for one in fitted.lean if one != limit)
        assert not case.with_limits(without).fits(choice)


def test_a_plan_with_lean_convolutions_takes_their_time_and_says_so():
    profile = whole(WIDE)
    plan = policies.get("keep")(profile, CARD, Budgets(AMPLE))
    lean = replace(plan, workspace_limits=leanest(profile, CARD))
    assert lean.lean_convolutions == tuple(
        dict.fromkeys(one.module for one in leanest(profile, CARD))
    )
    more = replay(profile, lean, CARD).step_ns - replay(profile, plan, CARD).step_ns
    expected = sum(
        lean_algorithm(one, COMPUTE).took_ns - fastest(one, COMPUTE).took_ns
        for one in profile.operators
        if one.convolution
    )
    assert more == expected > 0
    tight = policies.get("vdnn-dyn")(profile, CARD, Budgets(47 * MB, AMPLE))
    assert tight.lean_convolutions
    assert any("PyTorch chooses the" in note for note in tight.notes)
    assert Plan.from_json(tight.to_json()) == tight


def test_plans_of_old_files_are_refused_by_their_version():
    old = policies.get("keep")(whole(WIDE), CARD, Budgets(AMPLE)).to_json()
    old = old.replace('"version": 5', '"version": 4')
    with pytest.raises(PlanError, match="field 'version' is 4, this Penstock reads 5"):
        Plan.from_json(old)
