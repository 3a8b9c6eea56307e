"""Embeddings of which a device needs few rows: those alone are read."""

import os
import threading

import pytest
import torch
from gpu_weights_rig import (
    DEVICE,
    FLOOR,
    LIMIT,
    WEIGHT_BYTES,
    WIDTH,
    TiedWords,
    bits,
    on_device_flash,
    state_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import weights
from penstock.core.errors import ChecksumError
from penstock.homed import home_of
from penstock.optim import FlashAdamW
from weights_rig import ScriptedEngine, assert_same, shared_engine_replaced

pytestmark = pytest.mark.gpu

WORDS = 4 * WIDTH
WORDS_BYTES = 4 * WEIGHT_BYTES
FEW = WORDS // 8 - 1
"""Most indices for which single rows are read."""


class Scaled(nn.Embedding):
    """Works with what it has looked up, as those of some transformers do."""

    def forward(self, words):
        return super().forward(words) * 3


class Words(nn.Module):
    """An embedding before a linear layer."""

    def __init__(self, kind=nn.Embedding, **options):
        super().__init__()
        self.embedding = kind(WORDS, WIDTH, **options)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, words):
        return F.gelu(self.linear(self.embedding(words)))


class Plainly(Words):
    """Looks words up by the function."""

    def forward(self, words):
        return F.gelu(self.linear(F.embedding(words, self.embedding.weight, padding_idx=2)))


class Tied(TiedWords):
    """The head's weight is the embedding's."""

    def __init__(self):
        super().__init__(WORDS, nn.Linear(WIDTH, WIDTH))

    def forward(self, words):
        return self.head(self.body(self.embedding(words)))


KINDS = {
    "plain": Words,
    "padded": lambda: Words(padding_idx=5),
    "sparse": lambda: Words(sparse=True),
    "by frequency": lambda: Words(scale_grad_by_freq=True),
    "scaled": lambda: Words(Scaled),
    "with a limit of norm": lambda: Words(max_norm=1.0),
    "by the function": Plainly,
    "tied": Tied,
}


def built(make, directory=None):
    """A model on the device, or on the host if it is to be loaded in place from ``directory``."""
    torch.manual_seed(0)
    model = make()
    if directory is None:
        return model.to(DEVICE)
    model.requires_grad_(False)
    if not directory.exists():
        weights.save(model, directory)
    weights.load(model, directory, in_place=True, floor=FLOOR)
    return model


def words(steps=3, count=FEW):
    """Indices of which some occur more than once."""
    random = torch.Generator().manual_seed(2)
    made = [torch.randint(WORDS // 8, (1, count), generator=random) for _ in range(steps)]
    return [each.to(DEVICE) for each in made]


def on_flash(model, directory, **options):
    return on_device_flash(model, directory, limit=LIMIT + 2 * WORDS_BYTES, **options)


def sgd(model, directory):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def flash_adamw(model, directory):
    settings = {"tile": 6144, "overlap": True, "gradient_memory": "64KiB"}
    return FlashAdamW(model.parameters(), lr=1e-2, flash=str(directory), **settings)


def trained(model, optimizer):
    seen = []
    for each in words():
        loss = model(each).square().mean()
        loss.backward()
        seen.append(bits(loss))
        if not isinstance(optimizer, FlashAdamW):  # which uses gradients up meanwhile
            seen.append(bits(model.embedding.weight.grad.to_dense()))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("make", [sgd, flash_adamw])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_plain_training_to_the_last_bit(kind, make, tmp_path):
    if (kind, make) == ("sparse", flash_adamw):
        pytest.skip("it takes no sparse gradients")
    if kind == "by frequency":
        torch.use_deterministic_algorithms(False)
    plain, model = built(KINDS[kind]), built(KINDS[kind])
    expected = trained(plain, make(plain, tmp_path))
    with on_flash(model, tmp_path) as session:
        optimizer = make(model, tmp_path)
        found = trained(model, optimizer)
        assert session._weights.forced == 0
        if make is flash_adamw:
            optimizer.close()
    assert_same([found, state_of(model)], [expected, state_of(plain)])


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("count", [1, FEW, FEW + 1])
def test_few_rows_are_read_alone(count, is_in_place, tmp_path):
    """Which the page cache does; all of a weight would be read by the engine."""
    saved = tmp_path / "saved" if is_in_place else None
    make = lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH))  # noqa: E731
    plain = built(make)
    with shared_engine_replaced(ScriptedEngine()) as engine:
        model = built(make, saved)
        with on_flash(model, tmp_path, device=DEVICE) as session, torch.inference_mode():
            begun = engine.read_bytes
            for each in words(2, count):
                assert_same(bits(model(each)), bits(plain(each)))
            is_read = engine.read_bytes - begun
            assert (session._weights.present_bytes > 0) == (is_read > 0) == (count > FEW)
            assert not session._weights.touches


def test_what_is_in_memory_is_not_read(tmp_path):
    plain, model = built(Words), built(Words)
    with on_flash(model, tmp_path):
        for each in (plain, model):
            with torch.no_grad():
                each.embedding.weight.mul_(2)
        assert_same(bits(model(words()[0])), bits(plain(words()[0])))


def test_a_file_that_was_changed_is_an_error(tmp_path):
    model = built(Words, tmp_path / "saved")
    with on_flash(model, tmp_path, device=DEVICE):
        os.utime(tmp_path / "saved/model.safetensors", ns=(1, 1))
        with pytest.raises(ChecksumError, match=r"embedding\.weight rests in"):
            model(words()[0])


def test_whoever_needs_the_weight_meanwhile_waits_for_the_rows(tmp_path, monkeypatch):
    plain, model = built(Words), built(Words)
    with on_flash(model, tmp_path) as session:
        home, wake = home_of(model.embedding.weight), session._weights._table.wake
        met, seen = threading.Event(), []
        wait, look_up = wake.wait, type(home).values.fget

        def waiting(*args):
            met.set()
            return wait(*args)

        def needing():
            home.hold()
            seen.append(bits(model.embedding.weight))
            home.let_go(changed=False)
            met.set()

        other = threading.Thread(target=needing)

        def values(self):
            monkeypatch.setattr(wake, "wait", waiting)
            other.start()
            assert met.wait(60)
            return look_up(self)

        monkeypatch.setattr(type(home), "values", property(values))
        found = bits(model(words()[0]))
        other.join(60)
    assert_same([found, *seen], [bits(plain(words()[0])), bits(plain.embedding.weight)])


class Meanwhile(TorchDispatchMode):
    """Calls ``act`` once, before the device looks anything up."""

    def __init__(self, act):
        super().__init__()
        self._act = act

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.embedding.default and args[0].is_cuda and self._act is not None:
            act, self._act = self._act, None
            act()
        return func(*args, **(kwargs or {}))


def test_whoever_needs_the_weight_meanwhile_waits_until_the_device_has_its_command(
    tmp_path, monkeypatch
):
    """The parameter's memory is not exchanged while torch works with the parameter."""
    plain, model = built(Words), built(Words)
    with on_flash(model, tmp_path) as session:
        home, wake = home_of(model.embedding.weight), session._weights._table.wake
        waits, brought, wait = threading.Event(), [], wake.wait

        def waiting(*args):
            waits.set()
            return wait(*args)

        def needing():
            home.hold()
            brought.append(True)
            home.let_go(changed=False)
            waits.set()

        other = threading.Thread(target=needing)

        def act():
            monkeypatch.setattr(wake, "wait", waiting)
            other.start()
            assert waits.wait(60)
            assert not brought

        with Meanwhile(act):
            found = bits(model(words()[0]))
        other.join(60)
    assert_same([found, *brought], [bits(plain(words()[0])), True])


def test_a_hook_may_need_the_weight_whose_rows_are_looked_up(tmp_path):
    plain, model = built(Words), built(Words)
    seen = []
    with on_flash(model, tmp_path):
        state = model.state_dict()

        def pack(saved):
            if not seen:
                seen.append(bits(state["embedding.weight"].clone()))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            found = bits(model(words()[0]))
    assert_same([found, *seen], [bits(plain(words()[0])), bits(plain.embedding.weight)])


def test_rows_are_looked_up_by_vmap(tmp_path):
    plain, model = built(Words), built(Words)
    indices = words()[0].reshape(-1, 1)
    with on_flash(model, tmp_path):
        found, expected = (
            torch.func.vmap(lambda each, of=of: F.embedding(each, of.embedding.weight))(indices)
            for of in (model, plain)
        )
        assert_same(bits(found), bits(expected))
