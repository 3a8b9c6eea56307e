"""``penstock.hooks.modules``: the path of the running module, in every thread."""

import threading

import pytest
import torch
from torch import nn

from penstock.hooks.modules import OUTSIDE, ModuleTracker, SavingPlace


class Probe(nn.Module):
    """Writes down where it is run."""

    def __init__(self, tracker, seen):
        super().__init__()
        self.tracker, self.seen = tracker, seen

    def forward(self, features):
        self.seen.append(self.tracker.here)
        return features


@pytest.fixture
def tracking():
    """(tracker, roots that it met, threads that it missed, places that probes saw)"""
    roots, missed, seen = [], [], []
    tracker = ModuleTracker(on_root=roots.append, on_missed_thread=missed.append)
    tracker.attach()
    yield tracker, roots, missed, seen
    tracker.detach()


def test_a_registered_module_has_the_path_that_its_owner_would_print(tracking):
    tracker, roots, _, seen = tracking
    model = nn.Sequential(nn.Identity(), nn.Sequential(Probe(tracker, seen)))
    tracker.register(model)
    model(torch.ones(1))
    model[1](torch.ones(1))
    assert seen == [SavingPlace("Sequential.1.0", "Probe")] * 2
    assert roots == [model]
    assert tracker.here == OUTSIDE


def test_an_unknown_root_is_met_once(tracking):
    tracker, roots, _, seen = tracking
    first, second = (nn.Sequential(Probe(tracker, seen)) for _ in range(2))
    for model in (first, second, first):
        model(torch.ones(1))
    assert [place.path for place in seen] == ["Sequential.0", "Sequential-2.0", "Sequential.0"]
    assert roots == [first, second]


def test_a_module_made_later_is_named_under_the_one_that_runs_it(tracking):
    tracker, roots, _, seen = tracking

    class Maker(nn.Module):
        def forward(self, features):
            return Probe(tracker, seen)(features)

    model = nn.Sequential(Maker())
    model(torch.ones(1))
    assert seen == [SavingPlace("Sequential.0.<Probe>", "Probe")]
    assert roots == [model]


def test_after_an_exception_the_stack_is_empty(tracking):
    tracker, _, _, _ = tracking

    class Failing(nn.Module):
        def forward(self, features):
            raise ZeroDivisionError

    model = nn.Sequential(nn.Sequential(Failing()))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1))
        assert tracker.here == OUTSIDE


def test_every_thread_has_a_stack_of_its_own(tracking):
    tracker, _, _, seen = tracking
    inside, leave = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, features):
            inside.set()
            assert leave.wait(10)
            return features

    with torch.no_grad():
        thread = threading.Thread(target=lambda: Waiting()(torch.ones(1)))
        thread.start()
        assert inside.wait(10)
        assert tracker.here == OUTSIDE
        nn.Sequential(Probe(tracker, seen))(torch.ones(1))
        leave.set()
        thread.join()
    assert seen[0].path == "Sequential.0"


def test_a_thread_without_hooks_is_reported_by_its_name(tracking):
    _, _, missed, _ = tracking
    model = nn.Linear(2, 2)
    thread = threading.Thread(target=model, args=(torch.ones(1, 2),), name="stage 3")
    thread.start()
    thread.join()
    model(torch.ones(1, 2))
    assert missed == ["stage 3"]


def test_detached_it_sees_nothing(tracking):
    tracker, roots, _, seen = tracking
    tracker.detach()
    nn.Sequential(Probe(tracker, seen))(torch.ones(1))
    assert seen == [OUTSIDE]
    assert not roots


def test_it_keeps_no_module_alive(tracking):
    tracker, roots, _, _ = tracking
    model = nn.Sequential(nn.Identity())
    model(torch.ones(1))
    roots.clear()
    assert len(tracker._places) == 2
    del model
    assert len(tracker._places) == 0
