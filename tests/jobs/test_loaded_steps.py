"""Ranks that resume compare the steps of the checkpoints that they have loaded."""

import pytest
import torch.distributed as dist

from penstock.core.errors import SuspendError
from penstock.runtime.rank_store import RankStore
from penstock.swap.loaded_steps import LoadedSteps


@pytest.fixture
def loaded():
    """Two ranks, and what they tell."""
    store, found = dist.HashStore(), []
    for number in range(2):
        ranks = RankStore(store, number, 2, session=0)
        each = LoadedSteps(tell=found.append)
        each.ranks = lambda ranks=ranks: ranks
        found.append(each)
    return found


def test_the_step_that_all_have_loaded_is_known_to_those_without_a_checkpointer(loaded):
    first, second = loaded
    assert first.common() is second.common() is None
    first.note(None)
    assert first.common() is second.common() is None
    first.note(3)
    assert first.common() == second.common() == 3
    second.note(3)
    second.note(None)  # of another Checkpointer
    assert first.common() == second.common() == 3


@pytest.mark.parametrize(("step", "told"), [(5, "rank 1: step 5"), (None, "rank 1: nothing")])
def test_different_steps_are_refused_on_all_ranks(loaded, step, told):
    first, second = loaded
    first.note(3)
    second.note(step)
    for each in loaded:
        with pytest.raises(SuspendError, match=rf"\(rank 0: step 3, {told}\)"):
            each.common()


def test_a_store_that_is_found_late_is_told_what_was_loaded_before(loaded):
    first, second = loaded
    ranks, first.ranks = first.ranks, lambda: None
    first.note(3)
    assert second.common() is None
    first.ranks = ranks
    assert first.common() == second.common() == 3


def test_without_a_store_a_warning_says_once_that_nothing_was_compared(monkeypatch):
    told = []
    alone = LoadedSteps(tell=told.append)
    alone.note(3)
    assert alone.common() is None
    assert told == []  # the only process
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert alone.common() is alone.common() is None
    (warning,) = told
    assert "it is unknown whether all ranks have loaded the same step" in warning
