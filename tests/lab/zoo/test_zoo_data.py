"""Real inputs: where they are from, that they are the same every time, that one can learn them."""

import sys

import pytest
import torch

from penstock.core.errors import ConfigError, SizeError
from penstock.lab import zoo
from penstock.lab.zoo.data import _photographs


@pytest.fixture(scope="module")
def text():
    return zoo.stdlib_text_bytes("1MiB")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_text_is_the_standard_library_in_order(text):
    assert len(text.tokens) == text.source.nbytes == 2**20
    assert text.tokens.dtype == torch.uint8
    with open(sys.modules["__future__"].__file__, "rb") as file:  # sorts first
        start = file.read()
    assert bytes(text.tokens[: len(start)].tolist()) == start
    assert "site-packages" not in text.source.content
    assert f"Python {sys.version.split()[0]}" in text.source.content
    assert text.source.licence == "PSF-2.0"


def test_text_is_the_same_every_time_and_a_prefix_of_more(text):
    more = zoo.stdlib_text_bytes(2**20 + 5)
    assert torch.equal(more.tokens[: 2**20], text.tokens)


@pytest.mark.parametrize(("limit", "error"), [("1M", SizeError), (-1, SizeError), (0, ConfigError)])
def test_a_limit_that_makes_no_sense_is_refused(limit, error):
    with pytest.raises(error):
        zoo.stdlib_text_bytes(limit)


def test_a_python_without_sources_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"no text: 0 \.py files under"):
        zoo.stdlib_text_bytes()


def test_windows_of_text_suit_the_objective(text):
    causal = zoo.config("gpt2", size="tiny")
    batch = text.batch(causal, 3, generator=generator())
    assert batch.inputs.dtype == torch.int64
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert bytes(batch.inputs[0].tolist()) in bytes(text.tokens.tolist())
    masked = zoo.config("bert-base", size="tiny")
    batch = text.batch(masked, 3, generator=generator())
    assert (batch.targets != zoo.IGNORE).sum() == 3 * 10
    assert (batch.inputs == masked.vocab_size - 1).any()
    assert torch.equal(batch.inputs, text.batch(masked, 3, generator=generator()).inputs)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("alexnet", {}, "is text, AlexNetConfig needs images"),
        ("gpt2", {"vocab_size": 255}, "needs vocab_size=256 at least; GPT2Config has 255"),
        ("bert-base", {"vocab_size": 256}, "needs vocab_size=257 at least"),
        (
            "gpt2",
            {"sequence_length": 2**20},
            "1048576 bytes are fewer than the 1048577 of a sequence",
        ),
    ],
)
def test_text_that_does_not_suit_a_network_is_refused(text, name, overrides, message):
    config = zoo.config(name, size="tiny", **overrides)
    with pytest.raises(ConfigError, match=message):
        text.batch(config, 1, generator=generator())


def test_digits():
    images = zoo.digits()
    assert images.pixels.shape == (1797, 1, 8, 8)
    assert images.source.nbytes == images.pixels.nbytes == 1797 * 64
    assert images.pixels.max() == 16
    config = zoo.config("resnet18", size="tiny", image_size=24)
    batch = images.batch(config, 512, generator=generator())
    assert batch.inputs.shape == (512, 3, 24, 24)
    assert torch.equal(batch.inputs[:, 0], batch.inputs[:, 2])
    assert batch.inputs.mean().abs() < 0.1
    assert set(batch.targets.tolist()) == set(range(10))


def test_crops_of_photographs_come_from_where_their_label_says():
    images = zoo.photograph_crops(image_size=32, count=40, grid=(2, 3), seed=3)
    photos = _photographs()
    rooms = (427 - 31, 640 - 31)
    assert images.pixels.shape == (40, 3, 32, 32)
    assert len(images.classes) == 12
    for crop, label in zip(images.pixels[:6], images.labels[:6].tolist(), strict=True):
        corner = (photos[:, :, : rooms[0], : rooms[1]] == crop[:, :1, :1]).all(1)
        places = [
            (p, y, x)
            for p, y, x in corner.nonzero().tolist()
            if torch.equal(photos[p, :, y : y + 32, x : x + 32], crop)
        ]
        names = {
            f"{('china', 'flower')[p]} row {y * 2 // rooms[0]} column {x * 3 // rooms[1]}"
            for p, y, x in places
        }
        assert images.classes[label] in names


def test_crops_are_the_same_for_the_same_seed():
    one, same, other = (zoo.photograph_crops(image_size=16, count=64, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.pixels, same.pixels)
    assert torch.equal(one.labels, same.labels)
    assert not torch.equal(one.pixels, other.pixels)
    assert "CC BY 2.0" in one.source.licence
    assert set(one.labels.tolist()) == set(range(8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 428}, "not between 1 and 427"),
        ({"count": 0}, "count=0"),
        ({"grid": (0, 1)}, r"grid=\(0, 1\)"),
    ],
)
def test_crops_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        zoo.photograph_crops(**settings)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gpt2", {}, "is images, GPT2Config needs tokens"),
        ("alexnet", {"in_channels": 1}, "has 3 channels, AlexNetConfig needs 1"),
        ("alexnet", {"num_classes": 7}, "has 8 classes, AlexNetConfig has 7"),
    ],
)
def test_images_that_do_not_suit_a_network_are_refused(name, overrides, message):
    images = zoo.photograph_crops(image_size=16, count=4)
    with pytest.raises(ConfigError, match=message):
        images.batch(zoo.config(name, size="tiny", **overrides), 1, generator=generator())


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[data\]'"):
        zoo.digits()


def test_without_pillow_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match="pip install pillow"):
        zoo.photograph_crops()


def train(network, data, batch_size, steps):
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    draws = generator()
    losses = []
    for _ in range(steps):
        loss = network(*data.batch(network.config, batch_size, generator=draws))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[:3]) / 3, sum(losses[-3:]) / 3


@pytest.mark.parametrize("name", ["gpt2", "gpt-neo-125m"])
def test_a_tiny_language_model_learns_the_text(text, name):
    torch.manual_seed(0)
    first, last = train(zoo.build(name, size="tiny"), text, batch_size=8, steps=30)
    assert last < first - 1.5


@pytest.mark.parametrize("name", ["googlenet", "resnet18", "resnet272", "densenet121"])
def test_a_tiny_image_model_learns_the_digits(name):
    torch.manual_seed(0)
    network = zoo.build(name, size="tiny", in_channels=1)
    first, last = train(network, zoo.digits(), batch_size=32, steps=30)
    assert last < first - 0.5
