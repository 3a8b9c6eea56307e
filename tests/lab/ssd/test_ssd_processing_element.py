"""What a processing element computes, beside torch: no division, a fast inverse root, short states."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.lab.ssd.bit_flips import BitFlips, DieCheck
from penstock.lab.ssd.optimizers import OPTIMIZERS, PagePass
from penstock.lab.ssd.processing_element import (
    Element,
    Rounding,
    constants,
    inverse_root,
    to_bfloat16,
    to_fp32,
)

COUNT = 1000


def words(seed=1, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(COUNT)).astype(np.float32)


def gradients(steps):
    """As different in size as those of a network."""
    sizes = 10.0 ** np.random.default_rng(9).uniform(-3, 0, COUNT)
    return [words(100 + number) * sizes.astype(np.float32) for number in range(steps)]


def run(element, name, given_, *, scale=1.0, **settings):
    pages = element.programmed(name, words())
    for number, gradient in enumerate(given_, 1):
        told = constants(name, number, scale=scale, **settings)
        pages = element.step(name, pages, gradient * np.float32(scale), told)
    return [to_fp32(page) for page in pages]


TORCH = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.01}),
}


@pytest.mark.parametrize("name", TORCH)
def test_fifty_steps_are_torchs_but_for_the_last_bits(name):
    made, settings = TORCH[name]
    weight = torch.nn.Parameter(torch.from_numpy(words()))
    optimizer = made([weight], lr=1e-2, **settings)
    for gradient in gradients(50):
        weight.grad = torch.from_numpy(gradient)
        optimizer.step()
    decay = {"decay": 0.01} if name == "adamw" else {}
    ours, *_ = run(Element(newton_steps=3), name, gradients(50), rate=1e-2, **decay)
    moved = np.abs(weight.detach().numpy() - words()).max()
    assert moved > 0.05
    assert np.abs(ours - weight.detach().numpy()).max() < 5e-4 * moved


@pytest.mark.parametrize(("steps", "off"), [(0, 3.5e-2), (1, 1.8e-3), (2, 5e-6), (3, 3e-7)])
def test_each_newton_step_squares_what_the_inverse_root_is_off(steps, off):
    x = np.logspace(-30, 30, 100_001).astype(np.float32)
    error = np.abs(inverse_root(x, steps) * np.sqrt(x.astype(np.float64)) - 1)
    assert off / 4 < error.max() < off


@given(st.floats(2.0**-100, 0.125, width=32))
def test_a_variance_of_the_wrong_sign_makes_no_nan_but_a_word_that_stays(x):
    with np.errstate(all="ignore"):
        found = inverse_root(np.array([-x], np.float32))[0]
    assert 0 <= found < 1e-10


def test_the_element_multiplies_as_often_as_the_model_of_energy_counts():
    # two Newton steps of three products and a difference; the half is one less in the exponent
    assert (PagePass.INVERSE_ROOT.multiplications, PagePass.INVERSE_ROOT.additions) == (
        2 * 3,
        2 * 1,
    )
    for (
        name
    ) in TORCH:  # and with the passes that the model of time counts: the element checks itself
        assert len(run(Element(), name, gradients(1), rate=1e-3)) == len(OPTIMIZERS[name].states)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_the_scale_of_gradients_is_folded_into_constants(name):
    plain = run(Element(), name, gradients(10), rate=1e-2)
    scaled = run(Element(), name, gradients(10), rate=1e-2, scale=1024.0)
    for one, other in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-12)


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_short_states_are_torchs_bfloat16(values):
    page = np.array(values, np.float32)
    nearest = to_fp32(to_bfloat16(page, Rounding.NEAREST, np.random.default_rng(1)))
    expected = torch.from_numpy(page).bfloat16().float().numpy()
    np.testing.assert_array_equal(nearest, expected)
    toward = to_fp32(to_bfloat16(page, Rounding.ZERO, np.random.default_rng(1)))
    finite = np.isfinite(page)
    assert (np.abs(toward[finite]) <= np.abs(page[finite])).all()
    assert (np.isnan(toward) == np.isnan(page)).all()


def test_stochastic_rounding_is_right_on_average():
    page = np.full(200_000, 1 + 0.3 / 128, np.float32)  # 0.3 of the way to the next bfloat16
    found = to_fp32(to_bfloat16(page, Rounding.STOCHASTIC, np.random.default_rng(1)))
    assert set(found) == {np.float32(1), np.float32(1 + 1 / 128)}
    assert (found > 1).mean() == pytest.approx(0.3, abs=0.005)


def test_a_short_variance_stands_still_unless_it_is_rounded_at_random():
    """A thousandth of it is less than half of its last bit."""

    def variance(rounding):
        element = Element(state_bytes=(4, 2, 2), rounding=rounding)
        pages = element.programmed("adam", words())
        one = np.ones(COUNT, np.float32)
        for number in range(1, 1501):
            pages = element.step("adam", pages, one, constants("adam", number, rate=0.0))
        return to_fp32(pages[2]).mean()

    exact = 1 - 0.999**1500
    assert variance(Rounding.STOCHASTIC) == pytest.approx(exact, rel=0.02)
    assert variance(Rounding.NEAREST) < exact / 2
    assert variance(Rounding.ZERO) < exact / 2


def test_wrong_bits_meet_a_copy_and_a_check_mends_what_is_no_number():
    flips, look = BitFlips(0.01), BitFlips(0.0, check=DieCheck.NAN)
    element = Element(
        read=lambda page: flips(page.ctypes.data, page.nbytes),
        check=lambda read: look(read.ctypes.data, read.nbytes),
    )
    pages = element.programmed("adam", words())
    before = [page.copy() for page in pages]
    element.step("adam", pages, gradients(1)[0], constants("adam", 1, rate=1e-3))
    assert flips.bits == 3 * COUNT * 32
    assert flips.flipped == pytest.approx(0.01 * flips.bits, rel=0.2)
    for page, was in zip(pages, before, strict=True):
        np.testing.assert_array_equal(page, was)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: constants("rmsprop", 1, rate=1.0), "no program for rmsprop"),
        (lambda: constants("adam", 0, rate=1.0), "step 0"),
        (lambda: constants("adam", 1, rate=1.0, decay=0.1), "adamw has it in a constant"),
        (lambda: Element(newton_steps=-1), "newton_steps is -1"),
        (lambda: Element(state_bytes=(4, 1, 1)), "the element supports 4 and 2"),
        (lambda: Element(state_bytes=(4, 2)).programmed("adam", words()), "adam has 3 states"),
    ],
)
def test_what_the_element_cannot_do_is_refused(asked, says):
    with pytest.raises(ConfigError, match=says):
        asked()
