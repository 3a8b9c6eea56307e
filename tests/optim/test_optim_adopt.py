"""A script that knows nothing of Penstock gets its optimizer's states on flash."""

import pytest
import torch
from optim_runs import assert_same, parameters, train

from penstock import PenstockWarning
from penstock.optim import FlashAdamW, OnFlash
from penstock.optim.adopt import Adoption

LARGE = [(400, 1000), (257,)]


@pytest.fixture
def adoption(small):
    told = []
    made = Adoption({**small, "tile": 1 << 16}, tell=told.append)
    made.told = told
    yield made
    made.end()
    for optimizer in made.adopted:
        optimizer.close()


def test_known_optimizers_are_adopted_when_they_are_made(adoption):
    ours, theirs = parameters(sizes=LARGE), parameters(sizes=LARGE)
    a = torch.optim.AdamW(ours)
    adoption.end()
    b = torch.optim.AdamW(theirs)
    assert isinstance(a, OnFlash)
    assert isinstance(a, torch.optim.AdamW)
    assert not isinstance(b, OnFlash)
    for optimizer, params in ((a, ours), (b, theirs)):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            train(optimizer, params, steps=1, first=step)
            scheduler.step()
    assert_same(ours, theirs)
    assert adoption.told
    assert "AdamW: optimizer states" in adoption.told[0]


def test_small_ones_and_those_that_ask_for_flash_themselves_are_left_alone(adoption, small):
    for _ in range(2):
        assert not isinstance(torch.optim.SGD(parameters(), lr=0.1), OnFlash)
    (told,) = adoption.told
    assert told.startswith("SGD: optimizer states stay in memory")
    own = FlashAdamW(parameters(sizes=LARGE), **small)
    assert adoption.adopted == []
    own.close()


def test_the_floor_may_be_given(small):
    adoption = Adoption({**small, "tile": 1 << 16}, floor_bytes=4096)
    try:
        assert isinstance(torch.optim.SGD(parameters(sizes=[(1024,)]), lr=0.1), OnFlash)
        assert not isinstance(torch.optim.SGD(parameters(sizes=[(1023,)]), lr=0.1), OnFlash)
    finally:
        adoption.end()
        for optimizer in adoption.adopted:
            optimizer.close()


def test_one_that_cannot_be_on_flash_stays_in_memory_and_says_why(adoption):
    with pytest.warns(PenstockWarning, match="stay in memory.*capturable"):
        made = torch.optim.Adam(parameters(sizes=LARGE), capturable=True)
    assert not isinstance(made, OnFlash)
