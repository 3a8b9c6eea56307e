"""Casts of weights that autocast makes."""

import gc

import pytest
import torch

from weights_rig import (
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    assert_same,
    bits,
    built,
    inputs,
    on_flash,
    scripted,
    state_of,
)

LIMIT = 3 * WEIGHT_BYTES


def casts_in_memory():
    """Tensors in memory that have the type of casts and the shape of weights."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return [each for each in found if each.dtype == torch.bfloat16 and each.numel() == WIDTH**2]


@pytest.mark.parametrize("cached", [False, True])
def test_no_cast_of_a_weight_is_kept_from_forward_to_backward(cached, disk_path):
    """It is cast again in backward; autocast's own cache lives as long as its region."""
    plain, [x] = built(Chain), inputs(1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x).float().square().mean()
    expected.backward()
    model = built(Chain)
    with scripted() as engine, on_flash(model, disk_path, limit=LIMIT) as session:
        before = len(casts_in_memory())
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            loss = model(x).float().square().mean()
        assert len(casts_in_memory()) == before
        read = engine.read_bytes
        loss.backward()
        assert engine.read_bytes > read
        assert ("cache_enabled=False" in session._weights.note()) == cached
    assert_same([bits(loss), state_of(model)], [bits(expected), state_of(plain)])
