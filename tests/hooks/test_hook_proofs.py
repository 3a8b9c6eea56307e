"""``penstock.hooks.proofs``: one bit per element is kept where that is proven to do, and nowhere else.

Each test trains the same network without and with a session that plans for very slow flash, so that the
codec of signs is chosen wherever it may be. Backward waits for all writes, and nobody else holds what is
saved, so that every gradient is made from what came back.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload_runs import SLOW_FLASH, counted, same_bits, wait_for_writes
from penstock.core.errors import InPlaceError
from test_codec_training import assert_only_scratch_held

PASSES = 7
"""One is planned raw, one sampled, the others are encoded."""
LATE = 4
"""From this pass on a plan with codecs is in force."""


def images(step):
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(step))


class Net(nn.Module):
    """A convolution, ``activation``, and a loss of what that gives."""

    def __init__(self, activation, loss=torch.mean):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.activation = activation
        self.tail = nn.Parameter(torch.randn(8, 1, 1))
        self.reduce = loss

    def forward(self, images, step):
        return self.reduce(self.activation(self.conv(images)))


def train(model, settle, passes=PASSES):
    """Losses and gradients of some passes of plain descent."""
    found = []
    for step in range(passes):
        loss = model(images(step), step).float()
        settle()
        loss.backward()
        found.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is None:
                    continue
                found.append(parameter.grad)
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        del loss
    return found


def signs_kept(session_for, build, *, passes=PASSES):
    """Bytes that the codec of signs encoded in a training that must not differ in any bit."""
    torch.manual_seed(0)
    expected = train(build(), lambda: None, passes)
    torch.manual_seed(0)
    model = build()
    with session_for(model, machine=SLOW_FLASH, device_memory="64MiB") as session:
        found = train(model, lambda: wait_for_writes(session), passes)
        assert [same_bits(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(
            found
        )
        assert_only_scratch_held(session)
        return counted(session, "encoded.source_bytes.positive")


# -- where it is proven ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation",
    [
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2)),
        nn.Sequential(nn.BatchNorm2d(8), nn.MaxPool2d(2)),
        nn.Sequential(nn.ReLU(), nn.ReLU()),
    ],
    ids=str,
)
def test_signs_are_enough_for_relu_and_max_pooling(session_for, activation):
    assert signs_kept(session_for, lambda: Net(deepcopy(activation))) > 100_000


def test_signs_are_enough_in_bfloat16_and_under_autocast(session_for):
    def half():
        return Cast(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))

    class Cast(Net):
        def forward(self, images, step):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(images, step)

    assert signs_kept(session_for, half) > 50_000


def test_a_nan_lets_the_gradient_pass_as_without_penstock(session_for):
    class Holes(nn.Module):
        def forward(self, x):
            return torch.where(x.detach() > 1, torch.nan, x)

    def loss(y):
        return y.nan_to_num().sum() * 1e-3

    activation = nn.Sequential(Holes(), nn.ReLU(), nn.MaxPool2d(2))
    assert signs_kept(session_for, lambda: Net(activation, loss)) > 100_000


def test_indices_that_max_pooling_returns_are_right(session_for):
    class Unpooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2, return_indices=True)

        def forward(self, x):
            pooled, indices = self.pool(self.relu(x))
            return F.max_unpool2d(pooled * 2, indices, 2)

    assert signs_kept(session_for, lambda: Net(Unpooled())) > 100_000


def test_a_graph_is_walked_twice(session_for):
    class Twice(Net):
        def forward(self, images, step):
            out = self.activation(self.conv(images))
            first, second = out.mean(), out.amax()
            (first + second).backward(retain_graph=True)
            return second

    activation = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    assert signs_kept(session_for, lambda: Twice(activation)) > 100_000


def test_relu_and_max_pooling_are_differentiated_twice(session_for):
    class Penalised(Net):
        def forward(self, images, step):
            images.requires_grad_()
            score = super().forward(images, step)
            (slope,) = torch.autograd.grad(score, images, create_graph=True)
            return score + slope.pow(2).sum()

    activation = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    assert signs_kept(session_for, lambda: Penalised(activation)) > 100_000


def test_hooks_of_the_users_on_a_relu_run_as_without(session_for):
    """A pre-hook computes with the input, a hook with the gradient."""

    def build():
        model = Net(nn.ReLU())
        model.activation.register_forward_pre_hook(lambda module, args: (args[0] * args[0] - 0.5,))
        model.activation.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
        return model

    assert signs_kept(session_for, build) > 100_000


# -- where it is not -------------------------------------------------------------------------------


def penalty_on_output():
    model = Net(nn.ReLU())
    seen = []
    model.activation.register_forward_hook(lambda module, args, out: seen.append(out.square()))
    model.reduce = lambda y: y.mean() + seen.pop().mean()
    return model


def kept_by_a_hook():
    """The hook keeps the output; the loss needs its values after all modules have run."""
    model = Net(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))
    seen = []
    model.activation[0].register_forward_hook(lambda module, args, out: seen.append(out))
    model.reduce = lambda y: y.mean() + seen.pop().square().mean()
    return model


class NamedReLU(nn.Module):
    """Stands in for a class of the user's whose name says nothing of what it does."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x):
        return self.run(x)


ReLU = type("ReLU", (NamedReLU,), {})
MaxPool2d = type("MaxPool2d", (NamedReLU,), {})


def gathers(x):
    """Saves a float and an int64 tensor, as max-pooling does, but needs the floats."""
    pooled, indices = F.max_pool2d(x.detach(), 2, return_indices=True)
    return x.flatten(2).gather(2, indices.flatten(2)).square() + pooled.flatten(2)


NOT_PROVEN = {
    "functional": lambda: Net(F.relu),
    "functional pool": lambda: Net(lambda x: F.max_pool2d(F.relu(x), 2)),
    "convolution behind": lambda: Net(nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3))),
    "convolution behind in place": lambda: Net(nn.Sequential(nn.ReLU(True), nn.Conv2d(8, 8, 3))),
    "square behind": lambda: Net(nn.ReLU(), lambda y: y.square().mean()),
    "product behind": lambda: Net(nn.ReLU(), lambda y: (y * y.roll(1, 0)).mean()),
    "view behind": lambda: Net(nn.ReLU(), lambda y: y.view(4, -1).square().mean()),
    "forward hook": penalty_on_output,
    "kept by a hook": kept_by_a_hook,
    "other types": lambda: Net(nn.Sequential(nn.ReLU6(), nn.LeakyReLU(), nn.AvgPool2d(2))),
    "exp named ReLU": lambda: Net(ReLU(torch.exp)),
    "square named MaxPool2d": lambda: Net(MaxPool2d(torch.square)),
    "gather named MaxPool2d": lambda: Net(MaxPool2d(gathers)),
    "product named ReLU": lambda: Net(ReLU(lambda x: F.relu(x) * F.relu(x + 1))),
}


@pytest.mark.parametrize("build", NOT_PROVEN.values(), ids=NOT_PROVEN)
def test_values_are_kept_where_they_are_needed(session_for, build):
    assert signs_kept(session_for, build) == 0


def test_a_module_is_not_believed_because_of_what_it_returns(session_for):
    """It returns what a real ReLU made, unchanged, and has squared it aside: that needs the values."""

    class Penalised(Net):
        def __init__(self):
            super().__init__(nn.Sequential(nn.ReLU(), ReLU(self.aside)))

        def aside(self, x):
            self.penalty = x.square().mean()
            return x

        def forward(self, images, step):
            return super().forward(images, step) + self.penalty

    assert signs_kept(session_for, Penalised) == 0


def test_what_a_module_packs_before_another_within_it_is_not_forgotten(session_for):
    """It is named as a max-pooling, squares what a ReLU has proven, then calls another module."""

    class Late(Net):
        def __init__(self):
            super().__init__(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))
            self.inner = nn.Identity()
            self.late = MaxPool2d(lambda x: self.inner(F.max_pool2d(x.square(), 2)))

        def forward(self, images, step):
            if step == LATE:
                self.activation[1] = self.late
            return super().forward(images, step)

    assert signs_kept(session_for, Late) > 100_000


@pytest.mark.parametrize("how", ["value", "module", "alias"])
def test_a_use_that_no_pass_before_had_gets_its_values(session_for, how):
    """From one pass on, long after signs were planned, the values are needed, too."""

    class Late(Net):
        def __init__(self):
            super().__init__(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))
            self.mix = nn.Linear(32, 32)

        def forward(self, images, step):
            kept = self.activation[0](self.conv(images))
            loss = self.activation[1](kept).mean()
            if step < LATE:
                return loss
            if how == "value":
                return loss + kept.square().mean()
            if how == "module":
                return loss + self.mix(kept).mean()
            return loss + kept.view(4, -1).transpose(0, 1).exp().mean() + (kept * kept).mean()

    assert signs_kept(session_for, Late) > 100_000


def test_a_slot_that_was_proven_need_not_be_so_for_ever(session_for):
    """The same slot of the same module, a ReLU at first, holds values that are needed later."""

    class Changing(Net):
        def __init__(self):
            super().__init__(ReLU(self.change))
            self.step = 0

        def change(self, x):
            return F.relu(x) if self.step < LATE else x.exp()

        def forward(self, images, step):
            self.step = step
            return super().forward(images, step)

    assert signs_kept(session_for, Changing) > 50_000


def test_a_copy_of_a_small_view_never_keeps_signs_alone(session_for):
    """A view of little of a large storage is copied out; its slot may be one that held signs before."""

    class Changing(Net):
        def __init__(self):
            super().__init__(ReLU(self.change))
            self.step = 0

        def change(self, x):
            if self.step < LATE:
                return F.relu(x)
            large = x.repeat(16, 1, 1, 1)
            return large[: x.shape[0]].square()

        def forward(self, images, step):
            self.step = step
            return super().forward(images, step)

    assert signs_kept(session_for, Changing) > 50_000


def test_a_module_that_raises_leaves_all_as_it_should_be(session_for):
    """Some of what it packed was packed before; the user goes on without it."""

    class Raising(Net):
        def __init__(self):
            super().__init__(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))
            self.broken = MaxPool2d(self.fail)

        def fail(self, x):
            self.made = x.square()
            raise ValueError("on purpose")

        def forward(self, images, step):
            kept = self.activation[0](self.conv(images))
            loss = self.activation[1](kept).mean()
            if step >= LATE:
                with pytest.raises(ValueError, match="on purpose"):
                    self.broken(kept)
                loss = loss + self.made.mean()
                del self.made
            return loss

    assert signs_kept(session_for, Raising) > 100_000


def test_ctrl_c_within_a_module_costs_no_gradient_later(session_for):
    """The module's hooks never run, so nothing says that it has ended."""

    class Interrupted(Net):
        def __init__(self):
            super().__init__(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))
            self.broken = MaxPool2d(self.fail)

        def fail(self, x):
            raise KeyboardInterrupt

        def forward(self, images, step):
            kept = self.activation[0](self.conv(images))
            loss = self.activation[1](kept).mean()
            if step >= LATE:
                with pytest.raises(KeyboardInterrupt):
                    self.broken(kept)
                loss = loss + kept.square().mean()
            return loss

    assert signs_kept(session_for, Interrupted) > 100_000


def test_ctrl_c_out_of_a_network_leaves_nothing_watched(session_for):
    """What is saved outside of all modules after that belongs to none, and is let go of."""

    class Interrupted(Net):
        interrupt = False

        def forward(self, images, step):
            return self.activation(self.conv(images))

    torch.manual_seed(0)
    model = Interrupted(nn.Sequential(nn.ReLU(), MaxPool2d(lambda x: interrupt() or x * 2)))

    def interrupt():
        if model.interrupt:
            raise KeyboardInterrupt

    with session_for(model, machine=SLOW_FLASH, device_memory="64MiB") as session:
        for step in range(PASSES):
            model.interrupt = step == LATE
            if model.interrupt:
                with pytest.raises(KeyboardInterrupt):
                    model(images(step), step)
            else:
                model(images(step), step).square().mean().backward()
        assert_only_scratch_held(session)


def test_the_output_of_a_relu_is_the_users_to_keep(session_for):
    """It is returned and kept beyond the backward; it is never touched."""
    torch.manual_seed(0)
    model = Net(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))
    outputs = []
    with session_for(model, machine=SLOW_FLASH, device_memory="64MiB") as session:
        for step in range(PASSES):
            kept = model.activation[0](model.conv(images(step)))
            expected = F.relu(model.conv(images(step))).detach()
            loss = model.activation[1](kept).mean()
            wait_for_writes(session)
            loss.backward()
            outputs.append((kept.detach(), expected))
            del loss, kept
        assert all(same_bits(*pair) for pair in outputs)
        outputs.clear()
        assert_only_scratch_held(session)


@pytest.mark.parametrize("step", [0, LATE + 1])
def test_an_output_that_is_modified_in_place_is_an_error_as_without(session_for, step):
    def run(model, settle=lambda: None, passes=step + 1):
        for number in range(passes):
            kept = model.activation(model.conv(images(number)))
            loss = kept.mean()
            settle()
            if number == step:
                kept.add_(1)
            del kept
            loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(Net(nn.ReLU()))
    model = Net(nn.ReLU())
    with (
        session_for(model, machine=SLOW_FLASH, device_memory="64MiB") as session,
        pytest.raises(InPlaceError, match="modified by an inplace operation"),
    ):
        run(model, lambda: wait_for_writes(session))
