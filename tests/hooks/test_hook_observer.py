"""``penstock.hooks.observer``: who made each slot, and what ran when; never a guess."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.core.units import KIB

WIDTH = 64
ROWS = 256


@pytest.fixture
def profile_of(session_for):
    """``profile_of(model, run)``: the profile of one run, in which everything stays."""

    def measure(model, run=lambda model: model(features()).square().mean()):
        with session_for(model, policy="keep") as session:
            run(model).backward()
            assert not session.executor.active.observing
            assert session._attachment.modules.observer is None
            return session.profile

    return measure


def features(rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def producers(profile):
    return {(slot.key.module, slot.key.ordinal): slot.producer for slot in profile.slots}


class Pair(nn.Module):
    """Saves: the input of ``first``, that of the activation, its result (by ``second``), and more."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def test_producers_contain_the_making_and_every_saving(profile_of):
    found = producers(profile_of(nn.Sequential(Pair(), nn.Sigmoid(), Pair())))
    assert found == {
        ("Sequential.0.first", 0): None,  # made before the network was called
        ("Sequential.0.act", 0): "Sequential.0",  # by act, and saved by second as well
        ("Sequential.1", 0): "Sequential",  # made and saved by the sigmoid, saved by the next pair
        ("Sequential.2.act", 0): "Sequential.2",
        ("", 0): None,  # the loss saves what the root has made
    }


def test_what_is_given_is_not_made_however_it_is_given(profile_of):
    class Inner(nn.Module):
        def forward(self, *, pair):
            return torch.tanh(pair["left"] * pair["right"])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.inner = Inner()

        def forward(self, x):
            left = self.linear(x)
            return self.inner(pair={"left": left, "right": left + 1}).sigmoid()

    found = producers(profile_of(Outer()))
    assert found["Outer.inner", 0] == "Outer"  # left: by keyword, in a dictionary, from linear
    assert found["Outer.inner", 1] == "Outer"  # right: from the outer module's own code
    assert found["Outer.inner", 2] == "Outer.inner"  # the result of tanh; the sigmoid saves its own
    assert found["Outer", 0] is None


def test_another_call_of_the_same_module_is_another_maker(profile_of):
    class Rolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Pair()

        def forward(self, x):
            return self.cell(self.cell(x))

    found = producers(profile_of(Rolled()))
    assert found["Rolled.cell.act", 0] == found["Rolled.cell.act", 1] == "Rolled.cell"
    assert found["Rolled.cell.first", 1] == "Rolled", "made in the first call, saved in the second"


def test_what_was_there_before_is_nobodys_make(profile_of):
    table = features()

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.kept = [table]

        def forward(self, x):
            return self.linear(x) * self.kept[0] * table.view(ROWS, WIDTH)

    found = producers(profile_of(Cached()))
    assert found["Cached", 0] is None


def test_what_a_closure_smuggles_in_is_told_by_its_node(profile_of):
    smuggled = []

    class Sink(nn.Module):
        def forward(self, x):
            return x * smuggled[0]

    class Source(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.sink = Sink()

        def forward(self, x):
            smuggled[:] = [torch.exp(x * self.linear.weight.sum()).neg()]
            return self.sink(self.linear(x))

    found = producers(profile_of(Source()))
    assert found["Source.sink", 0] == "Source"
    smuggled.clear()


def test_in_place_results_belong_to_who_made_the_storage(profile_of):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            return self.relu(self.norm(x)) + 1

    profile = profile_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), Norm()))
    assert producers(profile)["Sequential.1.relu", 0] == "Sequential.1"
    assert profile.unrepeatable == ("Sequential.1.relu",)


def test_what_backward_saves_is_nobodys_make(profile_of):
    """A reentrant checkpoint runs a module within backward."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Pair())

    def run(model):
        hidden = checkpoint(model[1], model[0](features()), use_reentrant=True)
        return hidden.square().mean()

    profile = profile_of(model, run)
    within = {key: made for key, made in producers(profile).items() if "Sequential.1." in key[0]}
    assert within
    assert set(within.values()) == {None}


def test_modules_in_eval_mode_and_of_equal_names_are_not_run_again(profile_of):
    class Making(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return nn.Tanh()(self.linear(x))

    model = nn.Sequential(Pair(), Making(), Pair())
    model[2].eval()
    profile = profile_of(model)
    assert "Sequential.1.<Tanh>" in profile.unrepeatable
    below = {"Sequential.2", *(f"Sequential.2.{name}" for name in ("first", "act", "second"))}
    assert set(profile.unrepeatable) == below | {"Sequential.1.<Tanh>"}


# -- operators ------------------------------------------------------------------------------------


def test_operators_are_the_runs_of_each_modules_own_code(profile_of):
    profile = profile_of(nn.Sequential(Pair(), nn.Sigmoid()))
    forward = [each for each in profile.operators if not each.backward]
    own = [each.module for each in forward]
    # a pass begins with its first save, so that what both do before their first module is not in it
    assert own.count("Sequential") == 2
    assert own.count("Sequential.0") == 3
    assert [m for m in own if m not in ("Sequential", "Sequential.0")] == [
        "Sequential.0.first",
        "Sequential.0.act",
        "Sequential.0.second",
        "Sequential.1",
    ]
    assert {each.name for each in forward} == {"Sequential", "Pair", "Linear", "Tanh", "Sigmoid"}
    for before, after in pairwise(forward):
        assert before.end_ns == after.start_ns, "the runs follow each other without a gap"
    (only,) = profile.passes
    assert {each.pass_index for each in profile.operators} == {only.index}
    assert forward[-1].end_ns <= only.backward_start_ns <= only.end_ns


def test_backward_is_told_by_the_module_whose_node_asks(profile_of):
    profile = profile_of(nn.Sequential(Pair(), nn.Sigmoid()))
    backward = [each.module for each in profile.operators if each.backward]
    assert backward == [
        "",  # the loss, which is nobody's
        "Sequential.1",
        "Sequential.0.second",
        "Sequential.0.act",
        "Sequential.0.first",
    ]
    starts = {each.module: each.start_ns for each in profile.operators if each.backward}
    needed = {slot.key.module: slot.needed_at_ns for slot in profile.slots}
    assert (
        starts[""] <= needed["Sequential.1"] < starts["Sequential.1"]
    )  # the loss reads its result
    assert starts["Sequential.0.second"] <= needed["Sequential.0.act"] < starts["Sequential.0.act"]


def test_a_slow_module_takes_its_time_and_no_other(profile_of):
    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            for _ in range(60):
                x = torch.sin(x)
            return self.linear(x)

    profile = profile_of(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Slow()),
        lambda model: model(features(8192)).square().mean(),
    )
    took = {}
    for each in profile.operators:
        if not each.backward:
            took[each.module] = took.get(each.module, 0) + each.took_ns
    assert took["Sequential.1"] > 3 * took["Sequential.1.linear"]
    assert sum(took.values()) <= profile.passes[0].backward_start_ns - min(
        each.start_ns for each in profile.operators
    )


def test_only_the_first_pass_is_observed_where_nothing_changes(session_for):
    model = nn.Sequential(Pair(), nn.Sigmoid())
    with session_for(model, policy="auto", device_memory="1MiB") as session:
        observed = []
        for _ in range(4):
            observed.append(session._attachment.modules.observer is not None)
            model(features()).square().mean().backward()
        assert observed == [True, False, False, False]
        assert session.executor._pass.operators == ()


def test_a_program_that_saves_nothing_above_the_floor_is_not_observed_for_ever(session_for):
    model = Pair()
    with session_for(model, policy="keep", floor=512 * KIB) as session:
        for _ in range(2):
            model(features()).square().mean().backward()
        assert session._attachment.modules.observer is None
        F.gelu(model(features(8192))).square().mean().backward()
        assert session.profile is not None
        assert session.profile.operators == ()
