"""Weights that rest in the safetensors that they came in."""

import errno
import os
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_weights_faults import failing
from torch import nn

import penstock
from penstock import weights
from penstock.homed import home_of
from penstock.weights.resting import RestingParameter
from weights_rig import (
    FLOOR,
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    assert_same,
    bits,
    built,
    inputs,
    on_flash,
    scripted,
    trained,
)

DEPTH = 6
LIMIT = 3 * WEIGHT_BYTES


class Adapted(nn.Module):
    """A frozen chain with a small trained layer after each of its own."""

    def __init__(self):
        super().__init__()
        self.base = Chain(DEPTH).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x):
        for layer, adapter in zip(self.base.layers, self.adapters, strict=True):
            x = layer(x) + 0.1 * adapter(x).tanh()
        return x


def source_of(model, folder, *, pages):
    """Save a model; ``pages``: its large tensors begin at pages, else after an odd header."""
    if pages:
        weights.save(model, folder)
    else:
        folder.mkdir()
        state = {name: bits(each) for name, each in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"x": "odd" * 3})
    return folder / "model.safetensors"


def reads_of(engine, path):
    """Lengths of the reads of a file that the engine does from now on."""
    reads = []

    def note(request):
        if request.file.path == str(path):
            reads.append(request.nbytes)

    engine.spoil = note
    return reads


def skews_of(model):
    return {home_of(each).place.skew for each in model.parameters() if home_of(each)}


@pytest.fixture(params=["pages", "odd"])
def source(request, disk_path):
    """A frozen chain in a file that must not change."""
    path = source_of(
        built(lambda: Chain(DEPTH)), disk_path / "saved", pages=request.param == "pages"
    )
    before, stat = path.read_bytes(), path.stat()
    yield path
    if path.exists():
        assert path.read_bytes() == before
        assert path.stat().st_mtime_ns == stat.st_mtime_ns


@contextmanager
def home_held(weight):
    """Bring a weight to memory, as optimizers do."""
    home = home_of(weight)
    home.hold()
    yield weight
    home.let_go(changed=True)


def in_place(source, make=lambda: Chain(DEPTH), *, meta=False):
    with torch.device("meta" if meta else "cpu"):
        model = built(make, seed=5).requires_grad_(False)
    weights.load(model, source, in_place=True, floor=FLOOR)
    return model


@pytest.mark.parametrize("meta", [False, True])
def test_weights_rest_in_their_file_and_read_as_those_that_were_loaded(disk_path, source, meta):
    expected = Chain(DEPTH).requires_grad_(False)
    weights.load(expected, source)
    data = inputs(3)
    outputs = [expected(x) for x in data]
    with scripted() as engine:
        model = in_place(source, meta=meta)
        assert engine.read_bytes == engine.written_bytes == 0
        reads = reads_of(engine, source)
        assert all(type(each) is RestingParameter for each in model.parameters())
        assert_same(dict(model.state_dict()), dict(expected.state_dict()))
        with on_flash(model, disk_path, limit=LIMIT), torch.no_grad():
            assert_same([model(x) for x in data], outputs)
            assert home_of(model.layers[0].weight).room.held_bytes == 0
        assert DEPTH <= len(reads) <= 4 * DEPTH
        assert_same([model(x) for x in data], outputs)
    assert all(type(each) is RestingParameter for each in model.parameters())


def test_a_frozen_base_is_read_twice_a_step_at_most_and_never_written(disk_path):
    """And the odd file has skews, or the test would show less than it says."""
    expected = built(Adapted)
    path = source_of(expected, disk_path / "saved", pages=False)
    before, stat = path.read_bytes(), path.stat()
    data = inputs(4)
    optimizer = torch.optim.SGD(expected.adapters.parameters(), lr=0.05)
    plain = trained(expected, optimizer, data)
    with scripted() as engine:
        model = Adapted()
        weights.load(model, path, in_place=True, floor=FLOOR)
        assert any(skew % 64 for skew in skews_of(model))
        frozen = {name for name, each in model.named_parameters() if home_of(each)}
        assert frozen == {name for name, each in model.named_parameters() if not each.requires_grad}
        with on_flash(model, disk_path, limit=LIMIT, floor=WEIGHT_BYTES):
            optimizer = torch.optim.SGD(model.adapters.parameters(), lr=0.05)
            reads = reads_of(engine, path)
            found = trained(model, optimizer, data)
            assert all(home_of(each.weight).is_in_place for each in model.base.layers)
    assert_same(found, plain)
    assert DEPTH * len(data) <= len(reads) <= 2 * DEPTH * (len(data) + 1)
    assert path.read_bytes() == before
    assert path.stat().st_mtime_ns == stat.st_mtime_ns


@pytest.mark.parametrize("in_session", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.detach().numpy().__imul__(2),
        lambda weight: setattr(weight, "data", bits(weight) * 2),
        lambda weight: setattr(weight, "data", bits(weight).double().t().contiguous() * 2),
    ],
    ids=["in place", "by .data", "by NumPy", "replaced", "other shape and type"],
)
def test_a_weight_that_is_changed_leaves_the_file_as_it_is(disk_path, source, change, in_session):
    expected, x = built(lambda: Chain(DEPTH)).requires_grad_(False), inputs(1)[0]
    model = in_place(source)
    if in_session:
        with on_flash(model, disk_path, limit=LIMIT), torch.no_grad():
            model(x)
            for each in (expected, model):
                change(each.layers[0].weight)
            for _ in range(2):
                for one, other in zip(model.layers[1:], expected.layers[1:], strict=True):
                    assert torch.equal(one(x), other(x))
            assert_same(bits(model.layers[0].weight), bits(expected.layers[0].weight))
            if expected.layers[0].weight.dtype == x.dtype:
                assert torch.equal(model(x), expected(x))
    else:
        for each in (expected, model):
            change(each.layers[0].weight)
    assert_same(bits(model.layers[0].weight), bits(expected.layers[0].weight))
    with on_flash(model, disk_path, limit=LIMIT), torch.no_grad():
        if expected.layers[0].weight.dtype == x.dtype:
            assert torch.equal(model(x), expected(x))
            assert torch.equal(model(x), expected(x))
        assert_same(bits(model.layers[0].weight), bits(expected.layers[0].weight))
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))


def test_a_weight_that_is_only_looked_at_stays_in_its_file(disk_path, source):
    model = in_place(source)
    with on_flash(model, disk_path, limit=LIMIT), torch.no_grad():
        for _ in range(3):
            for each in model.parameters():
                each.data.sum()
            model(inputs(1)[0])
        assert home_of(model.layers[0].weight).room.held_bytes == 0
    assert all(home_of(each).is_in_place for each in model.parameters())


def test_weights_that_are_trained_after_all_get_homes_of_their_own(disk_path, source):
    data, expected = inputs(3), built(lambda: Chain(DEPTH))
    plain = trained(expected, torch.optim.SGD(expected.parameters(), lr=0.05), data)
    model = in_place(source)
    model.requires_grad_(True)
    with on_flash(model, disk_path, limit=LIMIT):
        found = trained(model, torch.optim.SGD(model.parameters(), lr=0.05), data)
    assert_same(found, plain)
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))


def test_weights_that_find_no_room_when_they_change_stay_in_memory(disk_path, source, monkeypatch):
    model = in_place(source)
    other, x = built(lambda: Chain(DEPTH)).requires_grad_(False), inputs(1)[0]
    other.layers[0].weight.mul_(2)
    expected = other(x)
    with on_flash(model, disk_path, limit=LIMIT) as session, torch.no_grad():
        model(x)
        full = penstock.TransferError(
            errno=errno.ENOSPC, op="allocate", path="here", offset_bytes=0, nbytes=1
        )
        reserve = Mock(side_effect=full)
        monkeypatch.setattr(home_of(model.layers[0].weight).room, "reserve", reserve)
        with home_held(model.layers[0].weight) as weight:
            weight.mul_(2)
        assert torch.equal(model(x), expected)
        with pytest.warns(penstock.PenstockWarning, match="No space left"):
            session._weights.end_step()
        assert reserve.called
        monkeypatch.undo()
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


def test_a_file_that_was_changed_is_an_error_that_names_weight_and_file(disk_path):
    path = source_of(built(lambda: Chain(DEPTH)), disk_path / "saved", pages=True)
    model, x = in_place(path), inputs(1)[0]
    with on_flash(model, disk_path, limit=LIMIT), torch.no_grad():
        model(x)
        os.utime(path, ns=(1, 1))
        with pytest.raises(
            penstock.ChecksumError, match=r"layers\.\d\.weight rests in .*model\.safe"
        ):
            model(x)
    with pytest.raises(penstock.ChecksumError, match="changed since"):
        model(x)


@pytest.mark.parametrize("in_session", [False, True])
def test_a_file_that_was_cut_short_is_an_error_that_names_weight_file_and_offset(
    disk_path, in_session
):
    path = source_of(built(lambda: Chain(DEPTH)), disk_path / "saved", pages=True)
    model, x = in_place(path), inputs(1)[0]
    begin = home_of(model.layers[3].weight).place.begin
    with on_flash(model, disk_path, limit=LIMIT) if in_session else nullcontext(), torch.no_grad():
        os.truncate(path, begin + 100)
        with pytest.raises(penstock.ChecksumError) as caught:
            model.layers[3](x)
    message = str(caught.value)
    assert f"layers.3.weight rests in {str(path)!r}, at offset {begin}, and that" in message
    assert f"and has {begin + 100}" in message
    assert "Load the weights again" in message


def test_a_read_of_a_file_that_fails_names_weight_file_and_offset(disk_path):
    path = source_of(built(lambda: Chain(DEPTH)), disk_path / "saved", pages=True)
    with scripted() as engine:
        model = in_place(path)
        place = home_of(model.layers[3].weight).place
        with on_flash(model, disk_path, limit=LIMIT), torch.no_grad():
            engine.fault = failing("read", 1)
            with pytest.raises(penstock.TransferError) as caught:
                model.layers[3](inputs(1)[0])
            message = str(caught.value)
            assert f"weight layers.3.weight cannot be read from {str(path)!r}: read of" in message
            assert f"at offset {place.start} of" in message
            assert message.endswith("stop using it, and load a copy of the file from another one")


def test_a_file_that_was_deleted_or_replaced_can_still_be_read(disk_path, source):
    expected, x = built(lambda: Chain(DEPTH))(inputs(1)[0]), inputs(1)[0]
    model = in_place(source)
    source.unlink()
    source.write_bytes(b"other")
    with on_flash(model, disk_path, limit=LIMIT), torch.no_grad():
        assert torch.equal(model(x), expected)
    source.unlink()


def test_what_cannot_rest_in_place_is_loaded_as_ever(disk_path):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.trained = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
            self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
            self.views = [self.shared.data]
            self.odd = nn.Parameter(torch.ones(20001, dtype=torch.uint8), requires_grad=False)
            self.small = nn.Parameter(torch.randn(3), requires_grad=False)
            self.register_buffer("buffer", torch.randn(WIDTH, WIDTH))

    expected = built(Mixed)
    path = disk_path / "one.safetensors"
    save_file({name: bits(each) for name, each in expected.state_dict().items()}, path)
    model = built(Mixed, seed=3)
    weights.load(model, path, in_place=True, floor=FLOOR)
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    assert torch.equal(model.views[0], expected.shared)
    assert [name for name, each in model.named_parameters() if home_of(each)] == ["frozen", "odd"]
    with torch.device("meta"):
        model = built(Mixed)
    with pytest.raises(penstock.ConfigError, match="trained is on meta"):
        weights.load(model, path, in_place=True, floor=FLOOR)
    weights.load(model, path, in_place=True, floor=FLOOR, directory=disk_path)
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))


def test_weights_in_place_are_saved_and_loaded_over(disk_path, source):
    expected = built(lambda: Chain(DEPTH))
    model = in_place(source)
    weights.save(model, disk_path / "again")
    assert_same(load_file(disk_path / "again" / "model.safetensors"), dict(expected.state_dict()))
    other = built(lambda: Chain(DEPTH), seed=9)
    weights.save(other, disk_path / "other")
    weights.load(model, disk_path / "other")
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
