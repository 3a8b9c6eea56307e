"""What goes wrong with weights on flash is said with the weight, the file and the offset."""

import ctypes
import errno

import pytest
import torch

from penstock.core.errors import BudgetError, ChecksumError, NoSpaceError, TransferError
from weights_rig import (
    WEIGHT_BYTES,
    Chain,
    assert_same,
    bits,
    built,
    inputs,
    on_flash,
    scripted,
    sgd,
    state_of,
    trained,
)

LIMIT = 3 * WEIGHT_BYTES


def failing(op, times):
    left = [times]

    def fault(request):
        if request.op != op or not left[0]:
            return None
        left[0] -= 1
        return TransferError(
            errno=errno.EIO,
            op=op,
            path=request.file.path,
            offset_bytes=request.offset_bytes,
            nbytes=request.nbytes,
        )

    return fault


def test_a_read_that_fails_is_an_error_once(disk_path):
    expected = bits(built(Chain)(inputs(1)[0]))
    with scripted() as engine:
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT):
            engine.fault = failing("read", 1)
            with pytest.raises(TransferError, match=r"offset \d+"), torch.no_grad():
                model(inputs(1)[0])
            assert_same(bits(model(inputs(1)[0])), expected)


def test_flipped_bits_name_the_weight_the_file_and_the_offset(disk_path):
    with scripted() as engine:
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT):
            engine.spoil = lambda request: ctypes.memset(request.address, 7, 1)
            with pytest.raises(ChecksumError, match=r"layers\.0\.weight.*offset 0 of"):
                model(inputs(1)[0])


@pytest.mark.filterwarnings("ignore:weights could not be written home")
def test_weights_that_cannot_be_written_are_in_memory_after_the_session(disk_path):
    plain = built(Chain)
    expected = trained(plain, sgd(plain), inputs(3))
    with scripted() as engine:
        model = built(Chain)
        context = on_flash(model, disk_path, limit=LIMIT)
        context.__enter__()
        engine.fault = failing("write", 1000)
        assert_same(trained(model, sgd(model), inputs(3)), expected)
        with pytest.raises(TransferError, match="write"):
            context.__exit__(None, None, None)
        assert_same(state_of(model), state_of(plain))


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
