"""Optimizers with states on flash, of a model whose weights are at home there: what they hold."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from penstock import ChecksumError, ClosedError, ConfigError
from penstock.core.units import KIB
from penstock.homed import home_of
from penstock.optim import FlashAdamW, FlashSGD, on_flash
from penstock.optim.offloaded_gradient import OffloadedGradient
from weights_rig import Traffic, send_home, settle

STEPS = 4
VOCABULARY, WIDTH = 512, 64
LIMIT_BYTES = 320 * KIB
"""Of weights in memory; all of them are nearly three times as much, and the longest is 128 KiB."""


class LittleModel(nn.Module):
    """An embedding, layers of several sizes, and a head, which may be the embedding."""

    def __init__(self, *, is_tied=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = []
        for _ in range(5):
            layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
            layers += [nn.LayerNorm(WIDTH)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


def little_model(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    return LittleModel(**settings).to(dtype)


def train(model, optimizer, *, steps=STEPS, first=0, micro=1, after_step=lambda: None):
    """Losses of so many steps."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for _ in range(micro):
            tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
            loss = nn.functional.cross_entropy(
                model(tokens).flatten(0, 1).float(), tokens.flatten()
            )
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return losses


@pytest.fixture
def flash(session_for):
    """``flash(model)``: a session in which its large weights are at home; yields the streamer."""

    @contextmanager
    def opened(model, **settings):
        fields = {"weights": "flash", "weights_memory": LIMIT_BYTES, "device_memory": "64MiB"}
        with session_for(model, **(fields | settings)) as session:
            yield session._weights

    return opened


@pytest.fixture
def small(disk_path):
    """Settings of small tiles, so that a weight has several and a tile parts of several weights."""
    return {"flash": disk_path, "tile": 6144}


def assert_same(ours, theirs):
    for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.detach(), its.detach()), name


def assert_untouched(model, streamer, *, in_pieces=False):
    """Every large weight has a home, and nobody has used it there.

    Where a second thread uses weights, which one it holds while another is read depends on the time. So
    few pages may then be free ``in_pieces`` that are too short for a weight.
    """
    assert streamer.total_bytes > 2 * streamer.account.limit_bytes
    assert not streamer.touches
    assert in_pieces or not streamer.forced
    assert streamer.present_bytes <= streamer.account.limit_bytes


FORMATS = [
    ("exact", torch.float32), ("bf16", torch.float32), ("int8", torch.float32),
    ("exact", torch.bfloat16), ("split", torch.bfloat16), ("bf16", torch.bfloat16),
    ("int8", torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"overlap": True, "gradient_memory": "64KiB"}],
                         ids=["step", "overlap"])  # fmt: skip
@pytest.mark.parametrize(("format_name", "dtype"), FORMATS)
def test_the_bits_are_those_of_weights_in_memory(format_name, dtype, settings, small, flash):
    settings = {**small, **settings, "format": format_name}
    limit = LIMIT_BYTES * dtype.itemsize // 4
    ours, theirs = little_model(dtype), little_model(dtype)
    a, b = (FlashAdamW(m.parameters(), lr=1e-2, **settings) for m in (ours, theirs))
    with flash(ours, weights_memory=limit) as streamer:
        losses = train(ours, a)
        assert_untouched(ours, streamer, in_pieces="overlap" in settings)
    assert losses == train(theirs, b)
    assert_same(ours, theirs)
    a.close()
    b.close()


def test_the_bits_are_torchs(small, flash):
    ours, theirs = little_model(is_tied=True), little_model(is_tied=True)
    a = FlashAdamW(ours.parameters(), lr=1e-2, overlap=True, gradient_memory="64KiB", **small)
    with flash(ours) as streamer:
        losses = train(ours, a)
        assert_untouched(ours, streamer, in_pieces=True)
    a.close()
    assert losses == train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True))
    assert_same(ours, theirs)


@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
def test_bytes_of_a_step(is_tied, small, flash):
    """Each weight is read for forward and for backward, where it is updated, and written once."""
    model = little_model(is_tied=is_tied)
    optimizer = FlashAdamW(
        model.parameters(), overlap=True, gradient_memory="64KiB", format="int8", **small
    )
    with flash(model) as streamer:
        train(model, optimizer, steps=3)  # two show the order
        settle(streamer)
        traffic = Traffic(streamer)
        train(model, optimizer)
        settle(streamer)
        read, written = traffic.read, traffic.written
        assert written <= STEPS * traffic.weights
        assert read <= 2 * STEPS * traffic.weights
        assert read >= STEPS * (traffic.weights - LIMIT_BYTES)  # they do not fit
        assert written >= STEPS * (traffic.weights - LIMIT_BYTES)
        assert_untouched(model, streamer, in_pieces=True)
    optimizer.close()


@pytest.mark.parametrize("settings", [
    {"clip_norm": 0.1},
    {"clip_norm": 0.1, "gradient_memory": 0},
    {"clip_norm": 0.1, "overlap": True},
    {"clip_norm": 0.1, "gradient_memory": "64KiB", "overlap": True},
    {"accumulation": 3, "overlap": True},
    {"accumulation": 3, "overlap": True, "gradient_memory": "64KiB"},
    {"host_memory": "1MiB"},
    {"threads": 3},
], ids=str)  # fmt: skip
def test_gradients_that_are_clipped_or_accumulated(settings, small, flash):
    ours, theirs = little_model(), little_model()
    settings = {**small, **settings}
    micro = settings.get("accumulation", 1 if "overlap" in settings else 2)
    a, b = (FlashAdamW(m.parameters(), lr=1e-2, **settings) for m in (ours, theirs))
    with flash(ours) as streamer:
        losses = train(ours, a, micro=micro)
        assert_untouched(ours, streamer, in_pieces=bool({"threads", "overlap"} & set(settings)))
    assert losses == train(theirs, b, micro=micro)
    assert_same(ours, theirs)
    a.close()
    b.close()


def test_an_update_in_backward_frees_the_gradient_of_a_weight_at_home(small, flash):
    model = little_model()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, overlap=True, **small)
    with flash(model) as streamer:
        nn.functional.cross_entropy(model(torch.arange(8)), torch.arange(8)).backward()
        optimizer._penstock.overlap.updates.wait()
        for parameter in model.parameters():
            kind = torch.Tensor if home_of(parameter) is None else OffloadedGradient
            assert type(parameter.grad) is kind
        with pytest.raises(ConfigError, match=r"\(512, 64\) is gone: overlap=True.*clip_norm"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert all((p.grad is None) == (home_of(p) is not None) for p in model.parameters())
        optimizer.zero_grad()
        assert_untouched(model, streamer, in_pieces=True)
    optimizer.close()


def test_a_norm_is_right_if_a_weight_gets_its_home_between_backward_and_step(small, flash):
    """What is freed is decided when backward reports it: the norm is taken then."""
    settings = {**small, "overlap": True, "clip_norm": 0.02, "tile": 1 << 20, "format": "int8"}

    def backward(model):
        tokens = torch.arange(8)
        nn.functional.cross_entropy(model(tokens), tokens).backward()

    models, optimizers = (little_model(), little_model()), []
    for model in models:
        model.unused = nn.Parameter(torch.zeros(10))  # so the only tile waits for the step
        optimizers.append(FlashAdamW(model.parameters(), **settings))
        for _ in range(2):
            backward(model)
            optimizers[-1].step()
            optimizers[-1].zero_grad()
        backward(model)
    with flash(models[0]):
        optimizers[0].step()
    optimizers[1].step()
    assert torch.equal(*(each._penstock.last_norm for each in optimizers))
    assert_same(*models)
    for each in optimizers:
        each.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_frozen_weights_rest(overlap, small, flash):
    """A frozen base is only read; adapters, which are little, are trained in memory."""

    def adapted():
        model = little_model()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for index, each in enumerate(model.layers):
            if isinstance(each, nn.Linear):
                model.layers[index] = Adapted(each)
        return model

    ours, theirs = adapted(), adapted()
    a, b = (FlashAdamW(m.parameters(), lr=1e-2, overlap=overlap, **small) for m in (ours, theirs))
    with flash(ours) as streamer:
        traffic = Traffic(streamer)
        losses = train(ours, a)
        assert traffic.written == 0
        assert_untouched(ours, streamer)
    assert losses == train(theirs, b)
    assert_same(ours, theirs)
    a.close()
    b.close()


class Adapted(nn.Module):
    """A frozen layer and a product of two little matrices beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_weights_laid_channels_last(small, flash):
    def convolutions():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 32, 3))
        return model.to(memory_format=torch.channels_last)

    ours, theirs = convolutions(), convolutions()
    a = FlashAdamW(ours.parameters(), lr=1e-2, gradient_memory=0, **small)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)

    def steps(model, optimizer):
        for step in range(STEPS):
            images = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(step))
            model(images).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with flash(ours, weights_memory="110KiB") as streamer:
        steps(ours, a)
        assert not streamer.touches
        assert home_of(ours[2].weight) is not None
    steps(theirs, b)
    assert_same(ours, theirs)
    a.close()


@pytest.mark.parametrize("format_name", ["exact", "split", "int8"])
def test_a_state_dict_goes_on(format_name, small, flash):
    settings = {**small, "format": format_name}
    ours, theirs = little_model(torch.bfloat16), little_model(torch.bfloat16)
    a, b = (FlashAdamW(m.parameters(), lr=1e-2, **settings) for m in (ours, theirs))
    with flash(ours, weights_memory=LIMIT_BYTES // 2):
        train(ours, a, steps=2)
        weights = {name: each.clone() for name, each in ours.state_dict().items()}
        saved = a.state_dict()
    a.close()
    train(theirs, b, steps=2)
    for number, state in b.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(saved["state"][number][name], value), (number, name)
    other = LittleModel().to(torch.bfloat16)
    c = FlashAdamW(other.parameters(), lr=1e-2, **settings)
    with flash(other, weights_memory=LIMIT_BYTES // 2):
        other.load_state_dict(weights)
        c.load_state_dict(saved)
        assert train(other, c, first=2) == train(theirs, b, first=2)
    b.close()
    c.close()


def test_groups_that_come_later(small, flash):
    ours, theirs = little_model(), little_model()
    settings = {"lr": 1e-2, "momentum": 0.9, **small}
    made = [FlashSGD(model.layers.parameters(), **settings) for model in (ours, theirs)]
    with flash(ours) as streamer:
        losses = train(ours, made[0], steps=1)
        made[0].add_param_group({"params": [ours.head.weight], "lr": 0.1})
        losses += train(ours, made[0], first=1)
        assert_untouched(ours, streamer)
    expected = train(theirs, made[1], steps=1)
    made[1].add_param_group({"params": [theirs.head.weight], "lr": 0.1})
    assert losses == expected + train(theirs, made[1], first=1)
    assert_same(ours, theirs)
    for each in made:
        each.close()


def test_an_optimizer_that_is_made_in_the_session(small, flash):
    ours, theirs = little_model(), little_model()
    with flash(ours) as streamer:
        a = on_flash(torch.optim.RMSprop(ours.parameters(), lr=1e-3), **small)
        losses = train(ours, a)
        assert_untouched(ours, streamer)
    a.close()
    assert losses == train(theirs, torch.optim.RMSprop(theirs.parameters(), lr=1e-3))
    assert_same(ours, theirs)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tile_with_more_weights_than_fit(overlap, small, flash):
    """It is updated in parts, so that the limit holds."""
    ours, theirs = little_model(), little_model()
    settings = {**small, "lr": 1e-2, "tile": 1 << 20, "overlap": overlap, "format": "int8"}
    a, b = (FlashAdamW(m.parameters(), **settings) for m in (ours, theirs))
    assert len(a._penstock.tiles) == 1
    with flash(ours) as streamer:
        losses = train(ours, a)
        assert_untouched(ours, streamer)
        saved = a.state_dict()  # of float32 weights it needs none
        a.load_state_dict(saved)
        assert_untouched(ours, streamer)
    assert losses == train(theirs, b)
    assert_same(ours, theirs)
    a.close()
    b.close()


def test_sessions_come_and_go(small, flash):
    ours, theirs = little_model(torch.bfloat16), little_model(torch.bfloat16)
    a, b = (FlashAdamW(m.parameters(), lr=1e-2, **small) for m in (ours, theirs))
    for first in range(0, 6, 2):
        train(ours, a, first=first, steps=1)
        with flash(ours, weights_memory=LIMIT_BYTES // 2):
            train(ours, a, first=first + 1, steps=1)
    train(theirs, b, steps=6)
    assert_same(ours, theirs)
    a.close()
    b.close()


def test_sessions_begin_and_end_between_backward_and_step(small, flash):
    """While threads update tiles: none of the updates is lost on the way home, or from there."""
    ours, theirs = little_model(), little_model()
    settings = {"lr": 1e-2, "overlap": True, "accumulation": 2, **small}
    a, b = (FlashAdamW(m.parameters(), **settings) for m in (ours, theirs))

    def backward(model, seed):
        tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    for step in range(4):
        with flash(ours):  # beginning in the middle of a step, but for the first one
            if step:
                a.step()
                a.zero_grad()
            backward(ours, 2 * step)
            backward(ours, 2 * step + 1)
        assert home_of(ours.head.weight) is not None
        if step % 2:
            a.step()
            a.zero_grad()
            backward(ours, 100)
            backward(ours, 101)
    a.step()
    for step in range(4):
        backward(theirs, 2 * step)
        backward(theirs, 2 * step + 1)
        b.step()
        b.zero_grad()
        if step % 2:
            backward(theirs, 100)
            backward(theirs, 101)
            b.step()
            b.zero_grad()
    assert_same(ours, theirs)
    a.close()
    b.close()


def damage(streamer, home):
    """Send a weight home, where other bytes than were written are found from now on."""
    send_home(streamer, home)
    kind, number = home.ticket.checksum
    home.ticket.checksum = kind, number ^ 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_weight_that_cannot_be_read_ends_the_step(overlap, small, flash):
    """The error names it; nothing stays held; what was updated is not updated again."""
    model = little_model()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, overlap=overlap, **small)
    with flash(model) as streamer:
        train(model, optimizer, steps=1)
        damage(streamer, home_of(model.embedding.weight))
        with pytest.raises(ChecksumError, match=r"embedding\.weight"):
            train(model, optimizer, first=1)
        if overlap:  # backward has raised it; step tries once more
            with pytest.raises(ChecksumError, match=r"embedding\.weight"):
                optimizer.step()
        with pytest.raises(ClosedError, match="failed in the middle"):
            optimizer.step()
        assert not any(stay.pins for stay in streamer._table.stays)
    optimizer.close()


def test_durable_steps_hold_the_weights(small, flash):
    """The record of a step has the masters, of which the homes are made again."""
    settings = {**small, "durable": True, "lr": 1e-2}
    ours = little_model(torch.bfloat16)
    a = FlashAdamW(ours.parameters(), **settings)
    with flash(ours, weights_memory=LIMIT_BYTES // 2) as streamer:
        train(ours, a, steps=2)
        assert not streamer.touches
    a.close()
    again, theirs = little_model(torch.bfloat16), little_model(torch.bfloat16)
    c = FlashAdamW(again.parameters(), **settings)
    with flash(again, weights_memory=LIMIT_BYTES // 2) as streamer:
        assert c.resume() == 2
        assert_same(again, ours)
        losses = train(again, c, first=2)
    c.close()
    b = FlashAdamW(theirs.parameters(), **{**settings, "durable": False})
    train(theirs, b, steps=2)
    assert losses == train(theirs, b, first=2)
    assert_same(again, theirs)
    b.close()


@pytest.mark.parametrize("make", [
    lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    lambda params: torch.optim.AdamW(params, lr=1e-2),
    lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
], ids=["sgd", "adamw", "foreach", "fused"])  # fmt: skip
def test_an_optimizer_of_torch_works_at_home(make, flash):
    ours, theirs = little_model(), little_model()
    with flash(ours) as streamer:
        losses = train(ours, make(ours.parameters()))
        assert streamer.touches
    assert losses == train(theirs, make(theirs.parameters()))
    assert_same(ours, theirs)
