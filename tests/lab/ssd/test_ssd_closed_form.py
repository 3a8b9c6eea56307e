"""The weight update in closed form: the paper's figures, and what happens to them on other devices.

Anchors and tolerances are those that were set before this was written; docs/ssd.md tells them.
"""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.lab.ssd import Gradient, Placement, Update, load, presets, step, with_field
from penstock.lab.ssd.energy import Boundary
from penstock.lab.ssd.optimizers import OPTIMIZERS
from penstock.lab.ssd.wear import lambert_w0, write_amplification

DEVICE = load("optimstore")
GPT = 6_700_000_000
HOST, CONTROLLER, DIE, SPLIT = Placement
ADAM = Update(parameters=GPT, optimizer="adam")
UPDATE_SHARE = 0.93
"""Of an iteration of the 6.7 B model under offloading."""


def times(device=DEVICE, update=ADAM):
    return [step(device, update, each).time_s for each in (HOST, CONTROLLER, DIE)]


def other(path, value):
    return with_field(DEVICE, path, value)


def iteration_s(step_s, update=ADAM):
    """A step, and what an iteration has beside it."""
    rest = step(DEVICE, update, HOST).time_s * (1 / UPDATE_SHARE - 1)
    return step_s + rest


# -- the paper's anchors ------------------------------------------------------------------------


def test_speed_ups_and_the_step_of_a_67_b_model():
    host, controller, die = times()
    assert host / die == pytest.approx(2.8, rel=0.1)
    assert host / controller == pytest.approx(1.5, rel=0.1)
    assert controller / die == pytest.approx(1.9, rel=0.1)
    assert die == pytest.approx(13.5, rel=0.1)


def test_the_formulas_by_hand():
    x, erase = 16384 / 800e6, 3e-3 / 384
    units = GPT / 4096
    host = GPT * (16 + 12) / (0.85 * 6.4e9) + GPT / 1.5e9  # 8 channels are slower than the link
    controller = units * 6 * x / 8
    die = units * (30e-6 + 100e-6 + erase + 5 * x + 1.5 * x) / 4 / 8
    assert times() == pytest.approx([host, controller, die], rel=1e-12)


def test_dies_are_used_for_a_third_of_the_time_by_the_controller():
    assert step(DEVICE, ADAM, CONTROLLER).use("die") == pytest.approx(0.30, rel=0.1)


def test_end_to_end():
    host, _, die = times()
    assert iteration_s(host) / iteration_s(die) == pytest.approx(2.4, rel=0.1)
    transfers = (host - GPT / DEVICE.host.parameters_per_s) / iteration_s(host)
    assert transfers == pytest.approx(0.82, rel=0.1)


def test_energy_at_three_boundaries():
    host, controller, die = (step(DEVICE, ADAM, each).ledger for each in (HOST, CONTROLLER, DIE))

    def gain(boundary, of):
        return host.joules(boundary) / of.joules(boundary)

    assert gain(Boundary.SYSTEM, die) == pytest.approx(3.6, rel=0.1)
    assert gain(Boundary.SYSTEM, controller) == pytest.approx(2.0, rel=0.1)
    assert gain(Boundary.MOVEMENT, die) == pytest.approx(2.2, rel=0.1)


def test_power_of_the_drive_without_its_static_part():
    """With it the ratio is 1.4: not the paper's, and docs/ssd.md says so."""
    host, die = (step(DEVICE, ADAM, each).ledger for each in (HOST, DIE))
    assert die.ssd_dynamic_w / host.ssd_dynamic_w == pytest.approx(2.2, rel=0.3)
    assert die.ssd_w / host.ssd_w == pytest.approx(1.42, abs=0.05)


def test_twelve_bytes_are_written_for_each_parameter():
    for placement in Placement:
        assert step(DEVICE, ADAM, placement).wear.written_bytes == 12 * GPT
        assert step(DEVICE, ADAM, placement).moved.flash_written == 12 * GPT


def test_life_of_a_10_b_model_whose_wear_is_levelled_within_the_die():
    update = Update(parameters=10_300_000_000, optimizer="adam")
    one = step(other("ftl.levels_planes", True), update, DIE)
    assert one.wear.steps_credited == pytest.approx(12.4e6, rel=0.1)
    years = one.wear.steps_credited * iteration_s(one.time_s, update) / (365.25 * 86400)
    assert years == pytest.approx(9.4, rel=0.1)
    assert one.wear.steps_rated * 50 == pytest.approx(one.wear.steps_credited)


@pytest.mark.parametrize(
    ("optimizer", "used"),
    [("adam", 3 / 4), ("momentum", 1 / 2), ("rmsprop", 1 / 2), ("sgd", 1 / 4)],
)
def test_the_gradients_plane_and_idle_ones_do_not_wear_so_life_is_shorter_on_the_die(
    optimizer, used
):
    update = dataclasses.replace(ADAM, optimizer=optimizer)
    host, controller, die = (step(DEVICE, update, each).wear for each in (HOST, CONTROLLER, DIE))
    assert host.written_bytes == controller.written_bytes == die.written_bytes
    assert (host.evenness, controller.evenness, die.evenness) == (1, 1, pytest.approx(used))
    assert die.steps_rated == pytest.approx(used * host.steps_rated)
    # four bytes go to each block of a state's plane, a quarter of the drive
    assert die.steps_rated == pytest.approx(30_000 * 1e12 / 4 / (4 * GPT))
    assert die.days_rated == pytest.approx(
        die.steps_rated * step(DEVICE, update, DIE).time_s / 86400
    )


def test_levelling_within_the_die_gives_the_life_back_for_its_time():
    level = other("ftl.levels_planes", True)
    plain, levelled = step(DEVICE, ADAM, DIE), step(level, ADAM, DIE)
    assert levelled.time_s == pytest.approx(1.026 * plain.time_s)
    assert levelled.wear.steps_rated == pytest.approx(plain.wear.steps_rated * 4 / 3)
    for placement in (HOST, CONTROLLER):
        assert step(level, ADAM, placement) == step(DEVICE, ADAM, placement)
    half = (
        step(level, ADAM, SPLIT, on_die=0.5).time_s / step(DEVICE, ADAM, SPLIT, on_die=0.5).time_s
    )
    assert half == pytest.approx(1.013)


def test_a_gradient_that_is_programmed_wears_its_plane_too():
    update = dataclasses.replace(ADAM, gradient=Gradient.PROGRAMMED)
    kept, programmed = step(DEVICE, ADAM, DIE).wear, step(DEVICE, update, DIE).wear
    assert programmed.evenness == 1
    assert programmed.steps_rated == pytest.approx(kept.steps_rated)  # it fills what lay idle


def test_the_widest_state_and_the_fewest_planes_set_the_life():
    short = dataclasses.replace(ADAM, state_bytes=(4, 2, 2))
    assert step(DEVICE, short, DIE).wear.evenness == pytest.approx(8 / 16)
    two = other("geometry.planes_per_die", 2)  # all states in one plane, the gradient in the other
    assert step(two, ADAM, DIE).wear.evenness == pytest.approx(1 / 2)
    one = other("geometry.planes_per_die", 1)
    assert step(one, ADAM, DIE).wear.evenness == 1


def test_steps_on_a_consumer_drive():
    wear = step(load("consumer-tlc"), ADAM, HOST).wear
    assert wear.steps_until_tbw == pytest.approx(14_900, rel=0.01)
    assert step(DEVICE, ADAM, HOST).wear.steps_until_tbw is None


def gains():
    """Die over host, by optimizer."""
    made = {name: dataclasses.replace(ADAM, optimizer=name) for name in OPTIMIZERS}
    return {
        name: step(DEVICE, u, HOST).time_s / step(DEVICE, u, DIE).time_s for name, u in made.items()
    }


def test_momentum_on_the_die_is_within_its_wide_tolerance():
    assert gains()["momentum"] == pytest.approx(3.2, rel=0.2)


def test_adam_gains_most_where_the_paper_has_momentum_first_and_adam_last():
    """The verdict "no" of benchmarks/results/optimstore.json; if this order turns, so does that."""
    found = gains()
    assert found["sgd"] < found["rmsprop"] < found["momentum"] < found["adam"]


def test_the_array_takes_as_long_for_two_states_as_for_three_which_is_why():
    array, x, units = 30e-6 + 100e-6 + 3e-3 / 384, 20.48e-6, GPT / 4096 / 32

    def gain(states, passes, array):
        host = GPT * (8 * states + 4) / (0.85 * 6.4e9) + GPT / 1.5e9
        return host / (units * (array + passes * x + 1.5 * x))

    adam, momentum = gain(3, 5, array), gain(2, 2, array)
    assert (adam, momentum) == pytest.approx((gains()["adam"], gains()["momentum"]))
    assert momentum < adam
    # with a time of the array that follows the states the paper's order comes out
    assert gain(2, 2, array * 2 / 3) > 1.2 * adam


# -- they break in the direction that is predicted -------------------------------------------------


def test_twice_the_dies_double_what_the_die_gains_and_nothing_else():
    host, controller, die = times(other("geometry.chips_per_channel", 8))
    assert times()[2] / die == pytest.approx(2)
    assert [host, controller] == times()[:2]


def test_slow_programs_take_the_gain_of_the_die_away():
    _, controller, die = times(other("cell.program_ns", [400_000]))
    assert die == pytest.approx(controller, rel=0.1)


def test_a_processing_element_at_full_rate():
    host, _, die = times(other("unit.divider", 1))
    assert host / die == pytest.approx(3.9, rel=0.02)


def test_faster_channels_help_the_controller_most():
    before, after = times(), times(other("channel.bytes_per_s", 1_200_000_000))
    host, controller, die = (a / b for a, b in zip(before, after, strict=True))
    assert controller == pytest.approx(1.5)
    assert 1 < host < controller
    assert 1 < die < controller


def test_the_die_is_bound_by_the_bus_beyond_the_crossover():
    x, d = 20.48e-6, 30e-6 + 100e-6 + 3e-3 / 384 + 5 * 20.48e-6
    crossover = 1 + d / (1.5 * x)
    for dies, bound in ((math.floor(crossover), "die"), (math.ceil(crossover), "channel")):
        one = step(other("geometry.chips_per_channel", dies), ADAM, DIE)
        assert (one.use("channel") == pytest.approx(1)) == (bound == "channel")


def test_registers_and_overlap_do_what_they_say():
    bus, array, compute = 30.72e-6, 30e-6 + 100e-6 + 3e-3 / 384, 102.4e-6
    units = GPT / 4096 / 32
    double = other("unit.double_buffered", True)
    assert step(double, ADAM, DIE).time_s == pytest.approx(units * (array + compute))
    both = with_field(double, "unit.overlaps_array", True)
    assert step(both, ADAM, DIE).time_s == pytest.approx(units * array)
    one = step(other("unit.overlaps_array", True), ADAM, DIE)
    assert one.time_s == pytest.approx(units * (array + bus))


def test_a_gradient_that_is_programmed_costs_time_and_wear():
    update = Update(parameters=GPT, optimizer="adam", gradient=Gradient.PROGRAMMED)
    kept, programmed = step(DEVICE, ADAM, DIE), step(DEVICE, update, DIE)
    assert programmed.time_s - kept.time_s == pytest.approx(GPT / 4096 / 32 * (100e-6 + 3e-3 / 384))
    assert programmed.wear.written_bytes == 16 * GPT


def test_a_host_that_overlaps_waits_for_the_slowest_only():
    one = step(other("host.overlap", True), ADAM, HOST)
    assert one.time_s == pytest.approx(28 * GPT / 6.4e9 / 0.85)


def test_planes_that_are_too_few_take_turns():
    two = other("geometry.planes_per_die", 2)  # one is the gradient's: three states in turn
    more = 2 * (30e-6 + 100e-6 + 3e-3 / 384) * GPT / 4096 / 32
    assert step(two, ADAM, DIE).time_s - times()[2] == pytest.approx(more)


# -- laws -----------------------------------------------------------------------------------------

UPDATES = st.builds(
    Update,
    parameters=st.integers(1, 10**11),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    weight_bytes=st.sampled_from([2, 4]),
    gradient_bytes=st.sampled_from([2, 4]),
    gradient=st.sampled_from(Gradient),
    write_amplification=st.floats(1, 5),
)


@given(st.sampled_from(presets()), UPDATES, st.sampled_from(Placement))
def test_nothing_works_longer_than_the_step_and_energy_is_the_sum_of_its_parts(
    name, update, placement
):
    one = step(load(name), update, placement)
    assert all(0 <= busy <= one.time_s * (1 + 1e-9) for _, busy in one.busy_s)
    for boundary in Boundary:
        parts = one.ledger.within(boundary)
        assert one.ledger.joules(boundary) == pytest.approx(math.fsum(parts.values()), rel=1e-12)
    total = math.fsum(entry.joules for entry in one.ledger.entries)
    assert total >= one.ledger.joules(Boundary.SYSTEM) >= one.ledger.joules(Boundary.SSD)


@given(st.sampled_from(presets()), UPDATES)
def test_split_is_no_slower_than_die_or_controller(name, update):
    device = load(name)
    both = min(step(device, update, each).time_s for each in (CONTROLLER, DIE))
    assert step(device, update, SPLIT).time_s <= both * (1 + 1e-9)


@given(UPDATES, st.sampled_from(Placement))
def test_time_and_bytes_grow_with_the_parameters(update, placement):
    # many, so that bytes are whole: write amplification makes parts of them
    update = dataclasses.replace(update, parameters=10**6 * update.parameters)
    twice = dataclasses.replace(update, parameters=2 * update.parameters)
    one, two = step(DEVICE, update, placement), step(DEVICE, twice, placement)
    assert two.time_s == pytest.approx(2 * one.time_s)
    assert two.moved.channel == pytest.approx(2 * one.moved.channel, abs=4)


def test_states_and_passes_of_the_optimizers():
    told = {name: (len(one.states), len(one.passes)) for name, one in OPTIMIZERS.items()}
    assert told == {
        "sgd": (1, 1),
        "momentum": (2, 2),
        "adagrad": (2, 4),
        "rmsprop": (2, 4),
        "adam": (3, 5),
        "adamw": (3, 5),
    }


def test_half_the_bytes_of_a_state_halve_its_traffic():
    half = Update(parameters=GPT, optimizer="adam", state_bytes=(2, 2, 2))
    assert step(DEVICE, half, CONTROLLER).time_s == pytest.approx(times()[1] / 2)
    assert step(DEVICE, half, CONTROLLER).wear.written_bytes == 6 * GPT


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"parameters": 0}, "parameters is 0"),
        ({"optimizer": "adamm"}, "did you mean 'adam'"),
        ({"state_bytes": (4, 4)}, "adam has 3 states: weight, momentum, variance"),
        ({"state_bytes": (4, 4, 3)}, r"state_bytes is \(4, 4, 3\)"),
        ({"weight_bytes": 3}, "weight_bytes is 3"),
        ({"write_amplification": 0.5}, "at least 1"),
    ],
)
def test_updates_that_make_no_sense_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Update(**{"parameters": 1, "optimizer": "adam", **settings})


# -- write amplification --------------------------------------------------------------------------


@pytest.mark.parametrize(("used", "expected"), [(0.7, 1.88), (0.8, 2.69), (0.9, 5.18)])
def test_write_amplification_of_random_overwrites(used, expected):
    assert write_amplification(used) == pytest.approx(expected, abs=0.005)


@given(st.floats(-1 / math.e, 1e6))
def test_lambert_w_solves_its_equation(x):
    w = lambert_w0(x)
    assert w >= -1
    assert w * math.exp(w) == pytest.approx(x, rel=1e-9, abs=1e-12)


def test_there_is_no_write_amplification_of_a_full_drive():
    for used in (0, 1):
        with pytest.raises(ConfigError):
            write_amplification(used)
    with pytest.raises(ConfigError, match="-1/e"):
        lambert_w0(-0.4)
