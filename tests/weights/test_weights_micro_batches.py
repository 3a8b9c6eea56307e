"""``micro_batched`` with weights on flash: their traffic is that of one pass, and the bits the loop's."""

from contextlib import nullcontext

import pytest
import torch
from test_weights_optim import Traffic

from penstock import micro_batched
from weights_rig import (
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    assert_same,
    bits,
    built,
    flash_adamw,
    on_flash,
    state_of,
)

DEPTH, LIMIT = 12, 3 * WEIGHT_BYTES
ALL_BYTES = DEPTH * WEIGHT_BYTES
ROWS, STEPS = 16, 3


def squared(x):
    return x.square().mean()


def batch_of(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def blocks_of(model):
    return [*(torch.nn.Sequential(each, torch.nn.GELU()) for each in model.layers), squared]


def vertical(model, batch, parts):
    loss = sum(micro_batched(blocks_of(model), batch, parts=parts)) / parts
    loss.backward()
    return loss


def loop(model, batch, parts):
    losses = []
    for part in batch.tensor_split(parts):
        losses.append(squared(model(part)))
        (losses[-1] / parts).backward()
    return sum(each.detach() for each in losses) / parts


def steps(run, directory, parts, *, is_on_flash):
    """Gradients of the weights in each step, the weights at last, and bytes of them read and written."""
    model = built(lambda: Chain(DEPTH))
    optimizer = flash_adamw(model, directory, overlap=True, accumulation=parts)
    seen, moved = [], (0, 0)
    session = on_flash(model, directory, limit=LIMIT) if is_on_flash else nullcontext()
    with session as opened:
        traffic = Traffic(opened._weights) if is_on_flash else None
        for step in range(STEPS):
            seen.append(run(model, batch_of(step), parts).detach())
            optimizer.step()
            optimizer.zero_grad()
        if traffic is not None:
            moved = traffic.read, traffic.written
    seen.append([bits(each) for each in model.parameters()])
    optimizer.close()
    return seen, moved


@pytest.mark.parametrize("parts", [1, 4, 16])
def test_training_has_the_bits_of_the_loop_in_memory(parts, disk_path, one_thread):
    found, _ = steps(vertical, disk_path, parts, is_on_flash=True)
    expected, _ = steps(loop, disk_path, parts, is_on_flash=False)
    assert_same(found, expected)


def test_gradients_are_those_of_the_loop_in_memory(disk_path, one_thread):
    found, expected = built(lambda: Chain(DEPTH)), built(lambda: Chain(DEPTH))
    loop(expected, batch_of(0), 8)
    with on_flash(found, disk_path, limit=LIMIT):
        vertical(found, batch_of(0), 8)
    assert_same(state_of(found), state_of(expected))


def test_bytes_of_weights_are_independent_of_the_number_of_micro_batches(disk_path, one_thread):
    """Each is read in forward and in backward, and written, once; but for those that stay in memory."""
    most, least = STEPS * ALL_BYTES, STEPS * (ALL_BYTES - LIMIT) - LIMIT
    for parts in (1, 4, 16):
        _, (read, written) = steps(vertical, disk_path, parts, is_on_flash=True)
        assert 2 * least <= read <= 2 * most, parts
        assert least <= written <= most, parts
    _, (read, _) = steps(loop, disk_path, 4, is_on_flash=True)
    assert read >= 4 * least * 2
