"""``penstock.hooks.recompute``: a module that is run again gives the same bits, and leaves no trace.

Every test trains without Penstock, measures a profile, makes a plan that runs modules again, and trains
by that: losses, gradients, weights and buffers must be the same, and every slot must have been called
what it is called in the plan.
"""

import copy
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trap_runs import flush_engine

from offload_runs import Trace, assert_nothing_held, assert_within_budget, read_bytes
from penstock.core.errors import BudgetError, HookError, InPlaceError
from penstock.core.units import KIB
from penstock.runtime import digests
from penstock.runtime.recompute import RECOMPUTED
from penstock.store import checksums
from recompute_plans import (
    FLASH,
    HOST,
    Block,
    assert_nothing_unknown,
    following,
    profiled,
    recomputing,
    runs_again,
)

WIDTH = 64
ROWS = 256


@pytest.fixture
def disk(disk_path, small_knobs, one_thread):
    return disk_path


def batch(step, rows=ROWS, width=WIDTH):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


class Stack(nn.Module):
    """A stem, what is run again, and a head."""

    def __init__(self, block, width=WIDTH):
        super().__init__()
        self.stem = nn.Linear(WIDTH, width)
        self.block = block
        self.head = nn.Linear(width, 8)

    def forward(self, features):
        return self.head(self.block(F.gelu(self.stem(features))))


def once(model, step):
    loss = model(batch(step)).square().mean()
    loss.backward()
    return loss


def train(model, run=once, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trace = Trace()
    for step in range(steps):
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)
        loss = run(model, step)
        trace.note(f"step {step}, loss", loss)
        trace.note_gradients(step, model)
        optimizer.step()
        optimizer.zero_grad()
        trace.note_weights(step, model)
    return trace


def built(make):
    torch.manual_seed(0)
    return make()


def plan_for(session_for, make, *paths, run=once, tier_of=lambda number: ""):
    model = built(make)
    plan, profile = profiled(session_for, model, lambda: train(model, run, steps=1))
    assert not set(paths) & set(profile.unrepeatable)
    return recomputing(plan, profile, *paths, tier_of=tier_of)


def check(
    session_for, disk, make, *paths, run=once, times=1, tier_of=lambda number: "", **settings
):
    """Train both ways; returns the model that was trained with modules run again, and the session."""
    expected = train(built(make), run)
    plan = plan_for(session_for, make, *paths, run=run, tier_of=tier_of)
    model = built(make)
    with following(disk, plan, model, **settings) as session:
        train(model, run).assert_same_bits(expected)
        assert runs_again(session) == 3 * times
        assert_nothing_unknown(session)
        assert_nothing_held(session)
        assert session.budget.used_by(RECOMPUTED) == 0
    assert all("_compiled_call_impl" not in each.__dict__ for each in model.modules())
    return model, session


BLOCK = ("Stack.block",)


def test_one_module_is_run_again(session_for, disk):
    check(session_for, disk, lambda: Stack(Block()), *BLOCK)


# -- what a forward changes -----------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_statistics_count_each_batch_once(session_for, disk, momentum):
    """Running statistics are in the trace; momentum=None turns on ``num_batches_tracked``."""

    def block():
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=momentum), nn.GELU()
        )

    model, _ = check(session_for, disk, lambda: Stack(block()), *BLOCK)
    assert model.block[1].num_batches_tracked == 3


def test_no_version_counter_of_a_buffer_moves_when_it_is_run_again(session_for, disk):
    make = lambda: Stack(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()))  # noqa: E731
    plan = plan_for(session_for, make, *BLOCK)
    model = built(make)
    with following(disk, plan, model) as session:
        loss = model(batch(0)).square().mean()
        buffers = dict(model.named_buffers())
        before = {name: (id(each), each._version) for name, each in buffers.items()}
        loss.backward()
        assert runs_again(session) == 1
        after = {name: (id(each), each._version) for name, each in model.named_buffers()}
    assert after == before


def test_spectral_normalization_goes_one_step(session_for, disk):
    """Its forward computes with vectors that the same forward has just improved."""

    def block():
        spectral = torch.nn.utils.parametrizations.spectral_norm
        return nn.Sequential(spectral(nn.Linear(WIDTH, WIDTH)), nn.GELU())

    check(session_for, disk, lambda: Stack(block()), *BLOCK)


class Forgetful(nn.Module):
    """Counts its calls in an attribute and a buffer that it replaces, and computes with both."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        self.calls += 1
        self.seen = self.seen + features.detach().mean(0)
        return F.gelu(self.linear(features) + self.seen) * self.calls


def test_attributes_and_replaced_buffers_are_as_they_were(session_for, disk):
    model, _ = check(session_for, disk, lambda: Stack(Forgetful()), *BLOCK)
    assert model.block.calls == 3


class Swapping(nn.Module):
    """Computes with one of two attributes, whose values and places in its dictionary it exchanges."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.near, self.far = 1.5, 0.25

    def forward(self, features):
        used = self.near
        first, second = (name for name in self.__dict__ if name in ("near", "far"))
        one, other = getattr(self, first), getattr(self, second)
        del self.near, self.far
        setattr(self, second, one)  # the values come in the order of before, and the names do not
        setattr(self, first, other)
        return F.gelu(self.linear(features)) * used


def test_attributes_that_change_places_are_as_they_were(session_for, disk):
    check(session_for, disk, lambda: Stack(Swapping()), *BLOCK)


class Lottery(nn.Module):
    """Skips layers as the generators of Python, NumPy and torch say."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, features):
        for number, layer in enumerate(self.layers):
            drawn = (random.random, np.random.random, lambda: torch.rand(()).item())[number % 3]()
            features = F.gelu(layer(features)) * (0.5 + drawn)
        return F.dropout(features, 0.3, training=self.training)


def test_random_numbers_of_torch_python_and_numpy_are_the_same(session_for, disk):
    check(session_for, disk, lambda: Stack(Lottery()), *BLOCK)


# -- how modules are called -----------------------------------------------------------------------


class Twice(nn.Module):
    """One block is called three times in a pass; what it makes is its own input the next time."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, features):
        return self.head(self.block(self.block(F.gelu(self.block(features)))))


def test_a_module_called_several_times(session_for, disk):
    check(session_for, disk, Twice, "Twice.block", times=3)


class Picky(nn.Module):
    """Wants keywords, a nested container, numbers, and a mask that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair, *, scale, options, mask=None):
        left, (right, power) = pair
        mixed = self.first(left) * scale + self.second(right) ** power
        return {"out": F.gelu(mixed.masked_fill(mask, options["fill"])), "power": power}


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.block = Picky()

    def forward(self, features):
        stem = F.gelu(self.stem(features))
        mask = features > 1
        found = self.block((stem, [stem.sin(), 2]), scale=0.5, options={"fill": 0.25}, mask=mask)
        return found["out"] * found["power"]


def test_keywords_nested_inputs_and_inputs_without_gradients(session_for, disk):
    check(session_for, disk, Asking, "Asking.block")


class Tied(nn.Module):
    """The table is the embedding, inside what is run again, and the output, outside of it."""

    def __init__(self):
        super().__init__()
        table = nn.Embedding(96, WIDTH)
        self.block = nn.Sequential(table, nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, 96, bias=False)
        self.head.weight = table.weight

    def forward(self, tokens):
        return self.head(self.block(tokens))


def test_tied_weights(session_for, disk):
    def run(model, step):
        tokens = torch.randint(96, (ROWS,), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(tokens), tokens)
        loss.backward()
        return loss

    check(session_for, disk, Tied, "Tied.block", run=run)


def test_a_recurrent_network(session_for, disk):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2)

        def forward(self, features):
            return self.lstm(features.view(-1, 32, WIDTH))[0]

    check(session_for, disk, lambda: Stack(Recurrent()), *BLOCK)


# -- graphs ---------------------------------------------------------------------------------------


def test_a_graph_that_is_walked_again(session_for, disk):
    def run(model, step):
        out = model(batch(step))
        out.square().mean().backward(retain_graph=True)
        loss = out.abs().mean()
        loss.backward(retain_graph=True)
        (out.mean() * 2).backward()
        return loss

    check(session_for, disk, lambda: Stack(Block()), *BLOCK, run=run, times=3)


def test_several_forwards_before_their_backwards(session_for, disk):
    def run(model, step):
        losses = [model(batch(4 * step + micro)).square().mean() for micro in range(4)]
        for loss in losses:
            loss.backward()
        return losses[-1]

    check(session_for, disk, lambda: Stack(Block()), *BLOCK, run=run, times=4)


def test_double_backward(session_for, disk):
    def run(model, step):
        features = batch(step).requires_grad_()
        score = model(features).square().mean()
        (slope,) = torch.autograd.grad(score, features, create_graph=True)
        loss = score + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss

    check(session_for, disk, lambda: Stack(Block()), *BLOCK, run=run, times=2)


def test_a_graph_that_is_dropped(session_for, disk):
    def run(model, step):
        model(batch(step + 100)).square().mean()
        return once(model, step)

    check(session_for, disk, lambda: Stack(Block()), *BLOCK, run=run)


class Checkpointing(nn.Module):
    """Uses checkpoints of both kinds itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        )

    def forward(self, features):
        features = checkpoint(self.layers[0], features, use_reentrant=False)
        features = checkpoint(self.layers[1], features, use_reentrant=True)
        return self.layers[2](features).sin() * 2


def test_checkpoints_inside_what_is_run_again(session_for, disk):
    check(session_for, disk, lambda: Stack(Checkpointing()), *BLOCK)


def test_within_a_checkpoint_of_the_script_nothing_is_run_again_by_us(session_for, disk):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Stack(Block())

        def forward(self, features):
            return checkpoint(self.block, features, use_reentrant=False)

    def run(model, step):
        loss = (model.block(batch(step)) if step == 0 else model(batch(step))).square().mean()
        loss.backward()
        return loss

    expected = train(built(Outer), run)
    plan = plan_for(session_for, Outer, "Outer.block.block", run=lambda m, s: run(m, 0))
    model = built(Outer)
    with following(disk, plan, model) as session:
        train(model, run).assert_same_bits(expected)
        assert runs_again(session) == 1, "the first step had no checkpoint of its own"


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_and_its_cache_of_weights(session_for, disk, backward_inside):
    def run(model, step):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(step)).float().square().mean()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return loss

    check(session_for, disk, Twice, "Twice.block", run=run, times=3)


# -- hooks of the script --------------------------------------------------------------------------


def test_hooks_on_the_module_run_once_and_those_inside_twice(session_for, disk):
    plan = plan_for(session_for, lambda: Stack(Block()), *BLOCK)
    model = built(lambda: Stack(Block()))
    seen = []
    for name, module in (("outside", model.block), ("inside", model.block.up)):
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(f"{name} before"))
        module.register_forward_hook(lambda *_, name=name: seen.append(f"{name} after"))
        module.register_full_backward_hook(lambda *_, name=name: seen.append(f"{name} backward"))
    with following(disk, plan, model) as session:
        once(model, 0)
        assert runs_again(session) == 1
    forward = ["outside before", "inside before", "inside after", "outside after"]
    backward = ["inside before", "inside after", "inside backward", "outside backward"]
    assert seen == forward + backward


def test_a_hook_that_raises_leaves_the_module_as_it_was(session_for, disk):
    plan = plan_for(session_for, lambda: Stack(Block()), *BLOCK)
    model = built(lambda: Stack(Block()))

    def refuse(module, args):
        raise ValueError("no")

    with following(disk, plan, model) as session:
        handle = model.block.register_forward_pre_hook(refuse)
        with pytest.raises(ValueError, match="no"):
            once(model, 0)
        handle.remove()
        assert "forward" not in model.block.__dict__
        once(model, 0)
        assert runs_again(session) == 1


def test_copies_and_pickles_do_without_it(session_for, disk):
    plan = plan_for(session_for, lambda: Stack(Block()), *BLOCK)
    model = built(lambda: Stack(Block()))
    with following(disk, plan, model) as session:
        once(model, 0)
        assert runs_again(session) == 1
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all("_compiled_call_impl" not in each.__dict__ for each in other.modules())
        assert "_compiled_call_impl" not in copy.copy(model.block).__dict__


# -- left alone -----------------------------------------------------------------------------------


def left_alone(session_for, disk, act):
    plan = plan_for(session_for, lambda: Stack(Block()), *BLOCK)
    model = built(lambda: Stack(Block()))
    with following(disk, plan, model) as session:
        act(model, session)
        assert runs_again(session) == 0


def test_eval_mode_is_left_alone(session_for, disk):
    left_alone(session_for, disk, lambda model, session: once(model.eval(), 0))


def test_without_gradients_it_is_left_alone(session_for, disk):
    def act(model, session):
        with torch.no_grad():
            model(batch(0))

    left_alone(session_for, disk, act)


def test_a_paused_session_leaves_it_alone(session_for, disk):
    def act(model, session):
        with session.paused():
            once(model, 0)

    left_alone(session_for, disk, act)


def test_compiled_scripted_and_parallel_modules_are_left_alone():
    from penstock.hooks.recompute import not_recomputable

    def known(**modules):
        return {path.replace("_", "."): [module] for path, module in modules.items()}

    plain = nn.Linear(2, 2)
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    found = not_recomputable(
        known(
            a=nn.ReLU(), a_b=compiled, a_b_c=nn.ReLU(), d=plain, e=nn.DataParallel(plain), e_f=plain
        )
    )
    assert found == {"a", "a.b", "a.b.c", "e", "e.f"}
    assert not_recomputable(known(x=torch.compile(plain, backend="eager"))) == {"x"}
    assert not_recomputable({"a.<Linear>": [plain], "b": [plain, nn.ReLU()], "c": [plain]}) == {
        "a.<Linear>",
        "b",
    }


# -- what cannot be run again ---------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wild = False

    def forward(self, features):
        if self.wild:
            features.mul_(2)
        return F.gelu(self.linear(features))


class Before(nn.Module):
    """Hands on a tensor that nobody has saved."""

    def forward(self, features):
        return features + 1


def test_a_module_that_changes_its_input_is_known_after_one_step(session_for):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Before(), InPlace(), nn.Linear(WIDTH, 8))
    model[2].wild = True
    _, profile = profiled(session_for, model, lambda: once(model, 0))
    assert "Sequential.2" in profile.unrepeatable
    assert not {"Sequential", "Sequential.0", "Sequential.1"} & set(profile.unrepeatable)


def test_one_that_does_so_later_is_told_where_and_what_to_do(session_for, disk):
    make = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Before(), InPlace())  # noqa: E731
    plan = plan_for(session_for, make, "Sequential.2")
    model = built(make)
    with following(disk, plan, model):
        model[2].wild = True
        with pytest.raises(
            HookError, match=r"recomputes Sequential\.2.*has changed its input.*recompute=False"
        ):
            model(batch(0))


def test_an_input_that_is_changed_afterwards_is_noticed(session_for, disk):
    make = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Before(), InPlace())  # noqa: E731
    plan = plan_for(session_for, make, "Sequential.2")
    model = built(make)
    with following(disk, plan, model):
        hidden = model[1](model[0](batch(0)))
        loss = model[2](hidden).square().mean()
        with torch.no_grad():
            hidden.add_(1)
        with pytest.raises(InPlaceError, match=r"cannot recompute Sequential\.2 for"):
            loss.backward()
        flush_engine()


def test_a_parameter_that_is_changed_before_backward_is_noticed(session_for, disk):
    plan = plan_for(session_for, lambda: Stack(Block()), *BLOCK)
    model = built(lambda: Stack(Block()))
    with following(disk, plan, model):
        loss = model(batch(0)).square().mean()
        with torch.no_grad():
            model.block.up.bias.add_(1)  # autograd does not save a bias, but it computes with it
        with pytest.raises(InPlaceError, match=r"cannot recompute Stack\.block.*parameter"):
            loss.backward()
        flush_engine()


class Overwriting(nn.Module):
    """Autograd refuses its backward: what it saved is modified."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.careless = False

    def forward(self, features):
        first = torch.sigmoid(self.linear(features))
        second = first * 2
        if self.careless:
            first.add_(1)
        return torch.sigmoid(torch.sigmoid(second) * 3)


def test_what_autograd_refuses_is_refused(session_for, disk):
    plan = plan_for(session_for, lambda: Stack(Overwriting()), *BLOCK)
    model = built(lambda: Stack(Overwriting()))
    model.block.careless = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        once(model, 0)
    with following(disk, plan, model):
        with pytest.raises(InPlaceError, match="modified by an inplace operation"):
            once(model, 0)
        flush_engine()


@pytest.fixture(params=["host", "device"])
def proven_by(request, monkeypatch):
    """Who makes the digests of what is run again, and compares them; how many there were, in a list."""
    made = []
    if request.param == "device":
        monkeypatch.setattr(digests, "is_behind", lambda device: True)
        counted = digests.digest_of
        monkeypatch.setattr(digests, "digest_of", lambda data: made.append(1) or counted(data))
    else:
        counted_on_host = checksums.full
        monkeypatch.setattr(
            checksums, "full", lambda *where: made.append(1) or counted_on_host(*where)
        )
    monkeypatch.setenv("PENSTOCK_VERIFY", "off")  # no checksums of what is spilled
    return made


def test_the_first_time_is_compared_and_then_no_more(session_for, disk, proven_by):
    counts = []

    def run(model, step):
        counts.append(len(proven_by))
        return once(model, step)

    check(session_for, disk, lambda: Stack(Block()), *BLOCK, run=run)
    before_first, before_second, before_third = counts[-3:]
    assert before_second - before_first >= 4  # twice for each of two that are dropped, at the least
    assert before_second == before_third == len(proven_by)


def test_what_computes_something_else_is_noticed_the_first_time(session_for, disk, proven_by):
    state = {"calls": 0}

    class Unsteady(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, features):
            state["calls"] += 1
            return F.gelu(self.linear(features) * state["calls"])

    plan = plan_for(session_for, lambda: Stack(Unsteady()), *BLOCK)
    model = built(lambda: Stack(Unsteady()))
    with following(disk, plan, model):
        with pytest.raises(HookError, match=r"recomputing Stack\.block gave a different"):
            once(model, 0)
        flush_engine()


class Functional(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = act

    def forward(self, features):
        return self.act(self.linear(features))


def slope_by_func(hidden):
    slope = torch.func.grad(lambda x: x.square().sum())(hidden.detach())
    return F.gelu(hidden) * slope


def slope_by_autograd(hidden):
    (slope,) = torch.autograd.grad(hidden.square().sum(), hidden, create_graph=True)
    return slope.sigmoid()


@pytest.mark.parametrize("act", [slope_by_func, slope_by_autograd])
def test_modules_that_differentiate_by_themselves_are_not_run_again(session_for, act):
    model = built(lambda: Stack(Functional(act)))
    _, profile = profiled(session_for, model, lambda: once(model, 0))
    assert {"Stack.block", "Stack"} <= set(profile.unrepeatable)
    assert "Stack.stem" not in profile.unrepeatable


# -- memory ---------------------------------------------------------------------------------------


def test_inputs_are_spilled_and_come_back(session_for, disk):
    """Nothing but recompute and tiers: what is not made again goes to one or the other."""
    tier_of = lambda number: (FLASH, HOST)[number % 2]  # noqa: E731
    make = lambda: nn.Sequential(*(Block() for _ in range(4)))  # noqa: E731
    paths = [f"Sequential.{n}" for n in range(4)]
    _, session = check(session_for, disk, make, *paths, times=4, tier_of=tier_of)
    for tier in session.inspect().tiers:
        assert read_bytes(session, tier) > 0


def test_the_memory_of_what_is_made_again_is_in_the_budget(session_for, disk):
    """The peak is that of one block beside the inputs of all: far less than what is saved."""
    make = lambda: nn.Sequential(*(Block() for _ in range(8)))  # noqa: E731
    paths = [f"Sequential.{n}" for n in range(8)]
    plan = plan_for(session_for, make, *paths)
    again = plan.recomputed_bytes // 8
    _, session = check(session_for, disk, make, *paths, times=8)
    assert plan.kept_bytes < session.budget.peak_bytes
    assert session.budget.peak_bytes <= plan.kept_bytes + again + 64 * KIB
    assert session.budget.peak_bytes < 0.4 * (plan.kept_bytes + plan.recomputed_bytes)


def test_room_is_made_before_a_module_is_run_again(session_for, disk):
    """What is kept for the blocks before gives way to what is made again."""

    def run(model, step):
        loss = model(batch(step, rows=4096)).square().mean()
        loss.backward()
        return loss

    make = lambda: nn.Sequential(*(Block() for _ in range(8)))  # noqa: E731
    paths = [f"Sequential.{n}" for n in range(8)]
    plan = plan_for(session_for, make, *paths, run=run)
    again = plan.recomputed_bytes // 8
    limit = again + plan.kept_bytes // 2
    _, session = check(session_for, disk, make, *paths, run=run, times=8, device_memory=limit)
    assert_within_budget(session)
    assert session.recorder.snapshot().counted("evicted") > 0


def test_a_budget_too_small_for_one_module_names_it(session_for, disk):
    plan = plan_for(session_for, lambda: Stack(Block()), *BLOCK)
    model = built(lambda: Stack(Block()))
    limit = plan.recomputed_bytes // 2
    with following(disk, plan, model, device_memory=limit):
        with pytest.raises(BudgetError, match=r"too small for what Stack\.block recomputes"):
            once(model, 0)
        flush_engine()


def test_what_is_dropped_is_free_until_it_is_made_again(session_for, disk):
    plan = plan_for(session_for, lambda: Stack(Block()), *BLOCK)
    model = built(lambda: Stack(Block()))
    dropped = []
    model.block.up.register_forward_hook(
        lambda module, args, out: dropped.append(weakref.ref(out.untyped_storage()))
    )
    with following(disk, plan, model) as session:
        loss = model(batch(0)).square().mean()
        assert dropped[0]() is None
        assert session.budget.used_bytes <= plan.kept_bytes + 64 * KIB
        loss.backward()
        del loss
        assert len(dropped) == 2
        assert dropped[1]() is None
        assert_nothing_held(session)


# -- sessions and plans ---------------------------------------------------------------------------


def test_a_new_plan_runs_others_again(session_for, disk):
    make = lambda: nn.Sequential(*(Block() for _ in range(3)))  # noqa: E731
    plan = plan_for(session_for, make, "Sequential.0", "Sequential.1")
    model = built(make)
    with following(disk, plan, model) as session:
        once(model, 0)
        assert runs_again(session) == 2
        session._attachment._recompute.follow(("Sequential.1", "Sequential.2"))
        wrapped = [each for each in model if "_compiled_call_impl" in each.__dict__]
        assert wrapped == [model[1], model[2]]
    assert not [each for each in model if "_compiled_call_impl" in each.__dict__]


def test_a_module_that_is_compiled_meanwhile_is_not_undone(session_for, disk):
    plan = plan_for(session_for, lambda: Stack(Block()), *BLOCK)
    model = built(lambda: Stack(Block()))
    mine = model.block._call_impl
    with following(disk, plan, model):
        model.block._compiled_call_impl = mine
    assert model.block._compiled_call_impl == mine


def test_a_script_that_names_no_model(session_for, disk):
    expected = train(built(lambda: Stack(Block())))
    plan = plan_for(session_for, lambda: Stack(Block()), *BLOCK)
    with following(disk, plan, None) as session:
        train(built(lambda: Stack(Block()))).assert_same_bits(expected)
        assert runs_again(session) == 3


def test_passes_and_steps_are_counted_as_without(session_for, disk):
    plan = plan_for(session_for, lambda: Stack(Block()), *BLOCK)
    model = built(lambda: Stack(Block()))
    with following(disk, plan, model) as session:
        train(model, steps=4)
        assert session.inspect().device.pass_index == 4
        assert session.summary().steps == 4
        names = {record.key.module for record in session.executor._pass.records}
        assert not any("<input>" in name for name in names)
