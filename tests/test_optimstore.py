"""``benchmarks/macro/optimstore.py``: its networks, its iterations and what it calls the paper's."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from penstock.lab.ssd import Placement, Update, load, step
from penstock.plan import Budgets, Machine, policies
from penstock.plan.replay import replay

MACRO = Path(__file__).parents[1] / "benchmarks" / "macro"


@pytest.fixture(scope="module")
def models():
    sys.path[:0] = [str(MACRO), str(MACRO.parent)]
    try:
        yield importlib.import_module("_optimstore_models")
    finally:
        del sys.path[:2]


@pytest.mark.parametrize(
    ("name", "published"),
    [("T5-Large", 737_668_096), ("T5-3B", 2_851_598_336), ("T5-11B", 11_307_321_344)],
)
def test_t5_has_the_published_number_of_parameters(models, name, published):
    (network,) = (one for one in models.networks() if one.name == name)
    with torch.device("meta"):
        built = models.T5(network.built)
    assert sum(one.numel() for one in built.parameters()) == published


def tiny(models):
    settings = {"size": "tiny", "depth": 2, "width": 64, "heads": 4}
    return models.Network("tiny", ("gpt2", settings))


def test_the_batch_is_the_largest_power_of_two_that_fits(models, monkeypatch):
    monkeypatch.setattr(models, "MOST_BATCH", 64)
    network = tiny(models)
    whole = models.forward_and_backward(network, "rtx-3090")
    assert whole.batch == 64
    card = Machine.preset("rtx-3090")
    profile = network.profile(8)
    budgets = Budgets(card.device_bytes, 0, 0)
    peak = replay(profile, policies.get("keep")(profile, card, budgets), card).peak_bytes
    small = models.replace(card, device_bytes=peak - 2 * network.parameters)
    monkeypatch.setattr(Machine, "preset", lambda _: small)
    part = models.forward_and_backward(network, "rtx-3090")
    assert part.batch == 8
    assert part.backward_s > part.forward_s
    monkeypatch.setattr(Machine, "preset", lambda _: models.replace(card, device_bytes=1))
    assert models.forward_and_backward(network, "rtx-3090") is None


def test_an_iteration_by_hand(models):
    took = models.Updates(host=40.0, controller=25.0, die=14.0, gradient_write=5.0, transfers=36.0)
    # gradients are still on their way to flash when backward is over; within the drive they are not
    told = models.iteration(models.Pass(batch=1, forward_s=1.0, backward_s=2.0), took)
    assert told == {"host": 46.0, "controller": 28.0, "die": 17.0}
    told = models.iteration(models.Pass(batch=1, forward_s=1.0, backward_s=8.0), took)
    assert told == {"host": 49.0, "controller": 34.0, "die": 23.0}


def test_updates_are_those_of_the_simulator(models):
    device, update = load("optimstore"), Update(parameters=100_000_000, optimizer="adam")
    took = models.updates(device, update)
    formula = step(device, update, Placement.HOST)
    assert took.host == pytest.approx(formula.time_s, rel=0.03)
    writing = dict(formula.busy_s)["write"]
    assert took.gradient_write == pytest.approx(writing * 4 / 12, rel=0.03)
    assert took.transfers == pytest.approx(took.host - 100_000_000 / 1.5e9)


def row(parameters, *gains):
    cards = ("a100-g10", "rtx-3090", "v100-nvme")
    told = dict(zip(cards, gains, strict=True))
    return {"parameters": parameters, "cards": {c: g and {"die": g} for c, g in told.items()}}


def test_a_network_is_the_papers_only_if_it_is_on_every_card_and_from_both_sides(models):
    told = models.lines(
        {
            "right": row(1, 2.2, 2.3, 2.16),
            "slow": row(2, 2.4, 2.1, 2.4),
            "quick": row(3, 2.5, 2.5, 2.6),
            "one card": row(4, 2.54, None, None),
        }
    )
    verdicts = {name.removeprefix("end to end, "): one["within"] for name, one in told.items()}
    assert verdicts == {
        "right": True,
        "slow": False,
        "quick": False,
        "one card": True,
        "mean over networks": True,
        "more for the largest than for the smallest": True,
    }
    far = models.lines({"a": row(1, 2.7, 2.7, 2.4), "b": row(2, 2.6, 2.7, 2.4)})
    assert not far["end to end, mean over networks"]["within"]
    assert not far["end to end, more for the largest than for the smallest"]["within"]
