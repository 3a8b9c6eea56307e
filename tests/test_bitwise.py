"""The acceptance test of the whole: training with Penstock and without is the same to the last bit.

Every loss, every gradient and every weight of every step is compared, and in the same run: that bytes
really went to flash, that the budget was never exceeded by a byte, and that nothing is left behind.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload_runs import (
    Trace,
    assert_nothing_held,
    assert_within_budget,
    read_bytes,
    written_bytes,
)
from penstock.core.units import MIB
from penstock.lab import zoo
from penstock.plan import Action

LANGUAGE = ("bert-base", "gpt2", "gpt-neo-125m")


# -- every network of the zoo ---------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How large a run of a family is."""

    batch: int
    budget_mib: int
    """Enough for the largest single working set, and far less than what is saved."""
    share: float
    """How many times the budget is saved at least."""


SIZES = {
    "alexnet": Size(120, 8, 1.2),
    "overfeat": Size(120, 9, 1.2),
    "vgg16": Size(48, 7, 1.7),
    "vgg116": Size(32, 5, 3.0),
    "googlenet": Size(26, 4, 3.0),
    "resnet18": Size(200, 4, 3.0),
    "resnet50": Size(200, 4, 3.5),
    "resnet272": Size(32, 3, 5.0),
    "resnet1202": Size(100, 3, 5.0),
    "senet154": Size(60, 6, 1.2),
    "densenet121": Size(51, 4, 3.0),
    "densenet-bc-100-12": Size(24, 3, 5.0),
    "bert-base": Size(16, 4, 3.0),
    "gpt2": Size(16, 5, 3.0),
    "gpt-neo-125m": Size(16, 4, 2.0),
}
FAST_STEPS, ALL_STEPS = 3, 10
SCRIPT_STEPS = 5


def test_every_family_has_a_size():
    assert set(SIZES) == set(zoo.families())


def optimizer_for(family, model):
    if family in LANGUAGE:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def prepare(family):
    torch.manual_seed(0)
    model = zoo.build(family, size="tiny")
    return model, optimizer_for(family, model)


def train(model, optimizer, batch_size, *, steps, dtype):
    """Train on other numbers each step; dropout and masks are drawn from the global generator."""
    trace = Trace()
    for step in range(steps):
        inputs, targets = zoo.example_batch(model, batch_size, seed=step)
        torch.manual_seed(1000 + step)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        trace.note(f"step {step}, loss", loss)
        trace.note_gradients(step, model)
        optimizer.step()
        trace.note_weights(step, model)
    return trace


def batch_size_of(family, dtype):
    """A batch for runs without a budget: small where many processors are slow."""
    batch = SIZES[family].batch
    return batch if dtype is torch.float32 else batch // 6


@lru_cache(maxsize=2)
def without_penstock(family, *, steps, dtype, batch=None):
    model, optimizer = prepare(family)
    return train(model, optimizer, batch or SIZES[family].batch, steps=steps, dtype=dtype)


def check_family(session_for, family, policy, *, steps, dtype=torch.float32):
    size = SIZES[family]
    expected = without_penstock(family, steps=steps, dtype=dtype)
    model, optimizer = prepare(family)
    budget = None if policy == "keep" else size.budget_mib * MIB
    with session_for(model, optimizer, policy=policy, device_memory=budget) as session:
        found = train(model, optimizer, size.batch, steps=steps, dtype=dtype)
        found.assert_same_bits(expected)
        saved = session.profile.saved_bytes
        if policy == "keep":
            assert written_bytes(session) == 0
        else:
            assert saved >= size.share * session.budget.limit_bytes * (
                1 if dtype is torch.float32 else 0.5
            )
            assert written_bytes(session) >= steps * (saved - session.budget.limit_bytes)
            assert read_bytes(session) > 0
            assert_within_budget(session)
        if policy == "all":
            assert all(each.action is Action.OFFLOAD for each in session.plan.decisions)
        assert_nothing_held(session)


@pytest.mark.parametrize("family", zoo.families())
def test_every_family_trains_bit_for_bit(session_for, family):
    check_family(session_for, family, "auto", steps=FAST_STEPS)


@pytest.mark.parametrize("family", ["vgg16", "resnet18", "densenet121", "gpt2"])
def test_everything_offloaded_trains_bit_for_bit(session_for, family):
    check_family(session_for, family, "all", steps=FAST_STEPS)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("resnet272", marks=pytest.mark.slow)])
def test_several_threads_train_bit_for_bit(session_for, family):
    """Kernels cut their work by the number of threads, and partial sums with it."""
    torch.set_num_threads(2)
    without_penstock.cache_clear()
    check_family(session_for, family, "auto", steps=2)
    without_penstock.cache_clear()


@pytest.mark.parametrize("family", ["resnet272", "bert-base", "gpt2"])
def test_bfloat16_autocast_trains_bit_for_bit(session_for, family):
    check_family(session_for, family, "auto", steps=FAST_STEPS, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.families())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["keep", "all", "auto"])
def test_ten_steps_of_every_family(session_for, family, dtype, policy):
    check_family(session_for, family, policy, steps=ALL_STEPS, dtype=dtype)


# -- what training scripts do ---------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width=64, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features):
        return features + self.dropout(self.down(F.gelu(self.up(self.norm(features)))))


def blocks(depth=4, **options):
    return nn.Sequential(*(Block(**options) for _ in range(depth)))


def batch_of(step, rows=512, width=64):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, width, generator=generator)


ADAM = partial(torch.optim.AdamW, lr=1e-3)


class Recipe:
    """A training script that writes down all that it makes."""

    def __init__(self, *models, steps=SCRIPT_STEPS, make=ADAM):
        self.trace = Trace()
        self.model = nn.ModuleList(models)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = make(trained)
        self.steps = steps

    def step(self, step, loss):
        """The end of a step: everything is written down before and after the optimizer."""
        self.trace.note(f"step {step}, loss", loss)
        self.trace.note_gradients(step, self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.trace.note_weights(step, self.model)


def plain():
    recipe = Recipe(model := blocks())
    for step in range(recipe.steps):
        loss = model(batch_of(step)).pow(2).mean()
        loss.backward()
        recipe.step(step, loss)
    return recipe.trace


def accumulation():
    """Four micro-batches a step: forward and backward in turn, then all forwards before the backwards."""
    recipe = Recipe(model := blocks())
    for step in range(recipe.steps):
        losses = []
        for micro in range(4):
            losses.append(model(batch_of(4 * step + micro, rows=256)).pow(2).mean() / 4)
            if step % 2 == 0:
                losses[-1].backward()
        for each in losses if step % 2 else ():
            each.backward()
        recipe.step(step, sum(loss.detach() for loss in losses))
        losses.clear()
        each = None
    return recipe.trace


def retained_graph():
    recipe = Recipe(model := blocks())
    for step in range(recipe.steps):
        hidden = model(batch_of(step))
        first, second = hidden.pow(2).mean(), hidden.abs().mean()
        first.backward(retain_graph=True)
        second.backward(retain_graph=True)
        first.backward()
        recipe.step(step, first)
    return recipe.trace


def nested_checkpoints():
    """Checkpoints within checkpoints, of both kinds, with dropout in all of them."""
    recipe = Recipe(model := blocks(6, dropout=0.2))

    def pair(features, at):
        inner = checkpoint(model[at], features, use_reentrant=False)
        return checkpoint(model[at + 1], inner, use_reentrant=True)

    for step in range(recipe.steps):
        features = batch_of(step, rows=2048).requires_grad_()
        features = checkpoint(pair, features, 0, use_reentrant=False)
        features = pair(features, 2)
        features = checkpoint(pair, model[4](features), 4, use_reentrant=False)
        loss = features.pow(2).mean()
        loss.backward()
        recipe.step(step, loss)
    return recipe.trace


def frozen_backbone():
    """The first half is frozen, and one block in the middle of the trained half."""
    recipe = Recipe(frozen := blocks(2).requires_grad_(False).eval(), model := blocks(5))
    model[2].requires_grad_(False)
    for step in range(recipe.steps):
        loss = model(frozen(batch_of(step))).pow(2).mean()
        loss.backward()
        recipe.step(step, loss)
    return recipe.trace


def tied_weights():
    """One table is the embedding and the output; one block is run twice."""
    recipe = Recipe(table := nn.Embedding(128, 64), model := blocks(3))
    head = nn.Linear(64, 128, bias=False)
    head.weight = table.weight
    for step in range(recipe.steps):
        tokens = torch.randint(128, (8, 64), generator=torch.Generator().manual_seed(step))
        hidden = model(model(table(tokens)))
        loss = F.cross_entropy(head(hidden).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        recipe.step(step, loss)
    return recipe.trace


def dropout():
    recipe = Recipe(model := blocks(dropout=0.3))
    for step in range(recipe.steps):
        loss = model(batch_of(step)).pow(2).mean()
        loss.backward()
        recipe.step(step, loss)
    return recipe.trace


def adversaries():
    """Two networks, two optimizers, three backwards a step, and a detached sample between them."""
    generator, critic = blocks(3), nn.Sequential(blocks(3), nn.Linear(64, 1))
    recipe = Recipe(generator, make=partial(torch.optim.SGD, lr=0.01, momentum=0.9))
    other = Recipe(critic, make=partial(torch.optim.Adam, lr=1e-3))
    for step in range(recipe.steps):
        fake = generator(batch_of(2 * step))
        real_loss = F.softplus(-critic(batch_of(2 * step + 1))).mean()
        fake_loss = F.softplus(critic(fake.detach())).mean()
        real_loss.backward()
        fake_loss.backward()
        other.step(step, real_loss + fake_loss)
        loss = F.softplus(-critic(fake)).mean()
        loss.backward()
        other.optimizer.zero_grad()
        recipe.step(step, loss)
        del fake
    recipe.trace.names += other.trace.names
    recipe.trace.tensors += other.trace.tensors
    return recipe.trace


def double_backward():
    """A gradient penalty: what the first backward computes is itself differentiated."""
    recipe = Recipe(model := blocks(3))
    for step in range(recipe.steps):
        features = batch_of(step).requires_grad_()
        score = model(features).pow(2).mean()
        (slope,) = torch.autograd.grad(score, features, create_graph=True)
        loss = score + (slope.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        recipe.trace.note(f"step {step}, gradient of the input", features.grad)
        recipe.step(step, loss)
        del slope, features, score
    return recipe.trace


def several_losses():
    """Two heads on one trunk, gradients asked for one by one, clipped, and hooked."""
    recipe = Recipe(trunk := blocks(3), heads := nn.ModuleList([blocks(1), blocks(1)]))
    for step in range(recipe.steps):
        hidden = trunk(batch_of(step))
        hidden.register_hook(lambda gradient: gradient * 0.5)
        losses = [head(hidden).pow(2).mean() for head in heads]
        (seen,) = torch.autograd.grad(losses[0], hidden, retain_graph=True)
        recipe.trace.note(f"step {step}, gradient of the trunk", seen)
        torch.autograd.backward(losses)
        nn.utils.clip_grad_norm_(trunk.parameters(), 0.1)
        recipe.step(step, sum(losses))
        del hidden, losses, seen
    return recipe.trace


def closure():
    """L-BFGS calls forward and backward several times within one optimizer step."""
    recipe = Recipe(model := blocks(3), steps=4, make=partial(torch.optim.LBFGS, max_iter=4))
    for step in range(recipe.steps):

        def loss(step=step):
            recipe.optimizer.zero_grad()
            value = model(batch_of(step)).pow(2).mean()
            value.backward()
            return value

        recipe.trace.note(f"step {step}, loss", recipe.optimizer.step(loss))
        recipe.trace.note_weights(step, recipe.model)
    return recipe.trace


class Zoo(nn.Module):
    """Layers whose backward keeps something out of the ordinary."""

    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 16, 3, padding=1))
        self.batch_norm = nn.BatchNorm2d(16)
        self.group_norm = nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.recurrent = nn.LSTM(8 * 16, 32, num_layers=2, dropout=0.1, bidirectional=True)
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
        self.prelu = nn.PReLU()

    def forward(self, images):
        x = F.relu(self.batch_norm(self.conv(images)), inplace=True)
        x = self.prelu(self.group_norm(F.max_pool2d(x, 2)))
        x = F.interpolate(F.leaky_relu_(self.up(x), 0.1), size=(16, 16), mode="bilinear")
        x = F.softmax(x, dim=1) * F.silu(x) + F.avg_pool2d(x, 3, 1, 1).clamp(min=-1)
        x, _ = self.recurrent(x.permute(3, 0, 1, 2).flatten(2))
        x, _ = self.attention(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))
        x = torch.cumsum(x, 1).sort(dim=1).values
        return x.logsumexp(-1) * torch.where(x.amax(-1) > 0, x.std(-1), x.prod(-1))


def many_layers():
    recipe = Recipe(model := Zoo())
    for step in range(recipe.steps):
        loss = model(batch_of(step, rows=24 * 3 * 16, width=16).view(24, 3, 16, 16)).pow(2).mean()
        loss.backward()
        recipe.step(step, loss)
    return recipe.trace


OLD_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)
RECIPES = {
    plain: 2,
    accumulation: 2,
    retained_graph: 3,
    nested_checkpoints: 5,
    frozen_backbone: 2,
    tied_weights: 3,
    dropout: 2,
    adversaries: 3,
    double_backward: 5,
    several_losses: 3,
    closure: 2,
    many_layers: 9 if OLD_TORCH else 7,
}
"""Each with its budget in MiB."""


def run(recipe):
    torch.manual_seed(0)
    return recipe()


@lru_cache(maxsize=1)
def expected_of(recipe):
    return run(recipe)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # LBFGS's
@pytest.mark.parametrize("policy", ["keep", "all", "auto"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_what_scripts_do_is_the_same_to_the_last_bit(session_for, recipe, policy):
    """Under ``keep`` as well the budget is kept: what does not fit is evicted."""
    expected = expected_of(recipe)
    with session_for(policy=policy, device_memory=RECIPES[recipe] * MIB) as session:
        run(recipe).assert_same_bits(expected)
        assert written_bytes(session) > 2 * MIB
        assert read_bytes(session) > MIB
        assert_within_budget(session)
        assert_nothing_held(session)


def test_the_comparison_can_fail(session_for):
    """A gradient that is off by one in its last bit is found."""
    expected = expected_of(plain)
    for trace in (run(plain), run(plain)):
        trace.assert_same_bits(expected)
        name = trace.names.index("step 3, gradient of 0.2.up.weight")
        trace.tensors[name].view(torch.int32)[0, 0] ^= 1
        with pytest.raises(AssertionError, match=r"differs: step 3, gradient of 0\.2\.up\.weight"):
            trace.assert_same_bits(expected)
