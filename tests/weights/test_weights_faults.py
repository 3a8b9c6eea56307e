"""What goes wrong with weights on flash is said with the weight, the file and the offset."""

import ctypes
import errno
import os
import threading
from contextlib import contextmanager

import pytest
import torch

import penstock
from penstock import PenstockWarning, weights
from penstock.core.errors import (
    BudgetError,
    ChecksumError,
    NoSpaceError,
    ShortTransferError,
    TransferError,
)
from penstock.io.engine import Transfer
from weights_rig import (
    FLOOR,
    WEIGHT_BYTES,
    Chain,
    assert_same,
    bits,
    built,
    failing,
    homes_of,
    inputs,
    on_flash,
    scripted,
    send_home,
    sgd,
    state_of,
    trained,
)

LIMIT = 3 * WEIGHT_BYTES


def place_of(session, message):
    """Name of the weight that a message names, and the offset of its home."""
    [name] = [each for each in homes_of(session) if f"weight {each} " in message]
    return name, homes_of(session)[name].place.offset_bytes


def nameless(where, directory):
    return f"{where} a file without a name in {str(directory)!r}"


def test_a_read_that_fails_names_the_weight_the_file_the_offset_and_what_to_do(disk_path):
    with scripted() as engine:
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT) as session:
            send_home(session._weights, homes_of(session)["layers.1.weight"])
            engine.fault = failing("read", 1)
            with pytest.raises(TransferError) as caught, torch.no_grad():
                model.layers[1](inputs(1)[0])
            name, offset = place_of(session, str(caught.value))
            assert (name, offset) == ("layers.1.weight", WEIGHT_BYTES)
            assert nameless("from", disk_path) in str(caught.value)
            assert f"read of {WEIGHT_BYTES} bytes at offset {offset} of" in str(caught.value)
            assert str(caught.value).endswith("stop using it, and load the weights again")
            assert (caught.value.errno, caught.value.offset_bytes) == (errno.EIO, offset)


def test_a_file_that_was_cut_short_is_said_with_the_weight_and_the_offset(disk_path):
    with scripted():
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT) as session:
            home = homes_of(session)["layers.2.weight"]
            send_home(session._weights, home)
            [file] = home.place.files
            os.ftruncate(file.fd, home.place.offset_bytes + 4096)
            with pytest.raises(ShortTransferError, match="truncated") as caught, torch.no_grad():
                model.layers[2](inputs(1)[0])
            assert place_of(session, str(caught.value)) == ("layers.2.weight", 2 * WEIGHT_BYTES)
            assert nameless("from", disk_path) in str(caught.value)
            assert f"at offset {2 * WEIGHT_BYTES} of" in str(caught.value)
            os.ftruncate(file.fd, 6 * WEIGHT_BYTES)


def test_a_read_that_fails_is_an_error_once(disk_path):
    expected = bits(built(Chain)(inputs(1)[0]))
    with scripted() as engine:
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT):
            engine.fault = failing("read", 1)
            with pytest.raises(TransferError, match=r"weight layers\.\d\.weight"), torch.no_grad():
                model(inputs(1)[0])
            assert_same(bits(model(inputs(1)[0])), expected)


def test_a_signal_handler_that_raises_amid_a_read_leaves_the_weight_right(disk_path, monkeypatch):
    """The program catches that and goes on: the memory was not filled yet, and is in use."""

    class StopError(Exception):
        pass

    may_read = threading.Event()
    wait = Transfer._wait

    def interrupted(transfer, timeout_s):
        if not may_read.is_set():
            raise StopError  # as of a handler, which runs in the thread that waits
        return wait(transfer, timeout_s)

    with scripted() as engine:
        model, x = built(Chain), inputs(1)[0]
        with on_flash(model, disk_path, limit=LIMIT) as session, torch.no_grad():
            expected = model.layers[1](x)
            send_home(session._weights, homes_of(session)["layers.1.weight"])
            engine.spoil = lambda _: may_read.wait(20)
            monkeypatch.setattr(Transfer, "_wait", interrupted)
            with pytest.raises(StopError):
                model.layers[1](x)
            may_read.set()
            assert torch.equal(model.layers[1](x), expected)


def test_flipped_bits_name_the_weight_the_file_and_the_offset(disk_path):
    with scripted() as engine:
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT):
            engine.spoil = lambda request: ctypes.memset(request.address, 7, 1)
            with pytest.raises(ChecksumError) as caught:
                model(inputs(1)[0])
            message = str(caught.value)
            assert message.startswith("layers.0.weight: ")
            assert f"offset 0 of a file without a name in {str(disk_path)!r}" in message
            assert message.endswith("stop using it, and load the weights again")


def changed(first, nbytes=1):
    """Change bytes of a read, each by its lowest bit."""

    def spoil(request):
        for offset in range(first, first + nbytes):
            ctypes.c_ubyte.from_address(request.address + offset).value ^= 1

    return spoil


@contextmanager
def long_weight_away(directory):
    """A session that has to read a weight of 1 MiB next; its engine and model."""
    width = 512
    with scripted() as engine:
        model = built(lambda: Chain(2, width))
        with on_flash(model, directory, limit="2MiB") as session, torch.no_grad():
            send_home(session._weights, homes_of(session)["layers.1.weight"])
            yield engine, model.layers[1], torch.ones(2, width)


@pytest.mark.parametrize(
    ("verify", "first", "nbytes"),
    [
        *(("full", first, 1) for first in (0, 100, 500_001, 2**20 - 1)),
        *(("sampled", first, 4096) for first in (0, 8192, 123_456, 2**20 - 4096)),
        *(("sampled", first, 1) for first in (0, 4032, 2**20 - 1)),
    ],
)
def test_what_differs_in_a_long_weight_is_found(disk_path, monkeypatch, verify, first, nbytes):
    """By default 4 KiB that differ, wherever they begin; each bit if everything is verified."""
    if verify == "full":
        monkeypatch.setenv("PENSTOCK_VERIFY", "full")
    with long_weight_away(disk_path) as (engine, layer, x):
        engine.spoil = changed(first, nbytes)
        with pytest.raises(ChecksumError, match=r"layers\.1\.weight: 1048576 bytes"):
            layer(x)


def test_a_lone_bit_of_a_long_weight_is_not_found_by_default(disk_path):
    """As the page says: whoever wants that verifies everything."""
    with long_weight_away(disk_path) as (engine, layer, x):
        engine.spoil = changed(100)
        layer(x)


@pytest.mark.parametrize(
    "touch",
    [
        lambda model: model.state_dict(),
        lambda model: model.layers[1].weight.data.sum(),
        lambda model: model.layers[1].weight.detach().numpy(),
    ],
    ids=["state_dict", "data", "numpy"],
)
def test_a_weight_whose_memory_was_lent_is_verified_again(disk_path, touch):
    with scripted() as engine:
        model, x = built(Chain).requires_grad_(False), inputs(1)[0]
        with on_flash(model, disk_path, limit=LIMIT) as session:
            home = homes_of(session)["layers.1.weight"]
            before = home.ticket.checksum
            send_home(session._weights, home)
            kept = touch(model)
            assert home.ticket.checksum is None
            layer = model.layers[1]
            layer(x)  # where it is mapped, if that is lent
            del kept
            send_home(session._weights, home)
            expected = layer(x)
            assert home.ticket.checksum == before
            send_home(session._weights, home)
            engine.spoil = changed(100)
            with pytest.raises(ChecksumError, match=r"layers\.1\.weight"):
                layer(x)
            engine.spoil = lambda request: None
            assert torch.equal(layer(x), expected)


def test_a_weight_whose_address_is_known_may_change_there(disk_path):
    with scripted():
        model, x = built(Chain).requires_grad_(False), inputs(1)[0]
        with on_flash(model, disk_path, limit=LIMIT) as session:
            home = homes_of(session)["layers.1.weight"]
            layer = model.layers[1]
            send_home(session._weights, home)
            address = layer.weight.data_ptr()
            layer(x)
            send_home(session._weights, home)
            ctypes.c_float.from_address(address).value = 7.0
            layer(x)
            assert layer.weight[0, 0] == 7.0


def test_weights_that_cannot_be_written_are_named_and_in_memory_after_the_session(disk_path):
    plain = built(Chain)
    expected = trained(plain, sgd(plain), inputs(3))
    with scripted() as engine:
        model = built(Chain)
        context = on_flash(model, disk_path, limit=LIMIT)
        session = context.__enter__()
        engine.fault = failing("write", 1000)
        with pytest.warns(PenstockWarning, match="could not be written home") as warned:
            assert_same(trained(model, sgd(model), inputs(3)), expected)
        message = str(warned[0].message)
        _, offset = place_of(session, message)
        assert nameless("to", disk_path) in message
        assert f"write of {WEIGHT_BYTES} bytes at offset {offset} of" in message
        assert message.endswith("save the model and use another directory")
        offsets = {name: home.place.offset_bytes for name, home in homes_of(session).items()}
        with pytest.raises(TransferError) as caught:
            context.__exit__(None, None, None)
        [name] = [each for each in offsets if f"weight {each} " in str(caught.value)]
        assert caught.value.offset_bytes == offsets[name]
        assert "It is an ordinary parameter in memory now" in str(caught.value)
        assert_same(state_of(model), state_of(plain))


def rest_in_session(model, directory, engine):
    fault = failing("write", 1)
    engine.fault = lambda request: fault(request) if request.nbytes == WEIGHT_BYTES else None
    with on_flash(model, directory, limit=LIMIT):
        pass


def build(model, directory, engine):
    engine.fault = failing("write", 1)
    with penstock.built_on_flash(directory, floor=FLOOR):
        _made = Chain()


def load(model, directory, engine):
    weights.save(model, directory / "saved")
    engine.fault = failing("write", 1)
    with torch.device("meta"):
        model = Chain()
    weights.load(model, directory / "saved", directory=directory, floor=FLOOR)


def save(model, directory, engine):
    engine.fault = failing("write", 1)
    weights.save(model, directory / "saved")


@pytest.mark.parametrize(
    ("write", "name", "advice"),
    [
        (rest_in_session, "layers.0.weight", "name another directory"),
        (build, "Linear.weight", "build the model again"),
        (load, "layers.0.weight", "load the weights again"),
        (save, "layers.0.weight and 5 more", "save to another directory"),
    ],
)
def test_each_write_that_fails_names_the_weight(disk_path, write, name, advice):
    with scripted() as engine:
        model = built(Chain)
        with pytest.raises(TransferError, match="bytes at offset 0 of") as caught:
            write(model, disk_path, engine)
        assert str(caught.value).startswith(f"weight {name} cannot be written to ")
        assert advice in str(caught.value)
        assert (caught.value.op, caught.value.errno) == ("write", errno.EIO)
        engine.fault = lambda request: None
        assert_same(state_of(model), state_of(built(Chain)))


def test_a_limit_that_is_too_small_names_the_least(disk_path):
    model = built(Chain)
    with (
        pytest.raises(BudgetError, match=str(2 * WEIGHT_BYTES)),
        on_flash(model, disk_path, limit=WEIGHT_BYTES),
    ):
        pass


def test_no_space_is_said_before_anything_moves(disk_path, monkeypatch):
    def full(directories, advice):
        raise NoSpaceError(errno=errno.ENOSPC, op="write", path="x", offset_bytes=0, nbytes=1)

    monkeypatch.setattr("penstock.store.blob.check_space", full)
    model = built(Chain)
    with pytest.raises(NoSpaceError), on_flash(model, disk_path, limit=LIMIT):
        pass
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    assert_same(state_of(model), state_of(built(Chain)))
