"""Blocks that torch.compile has compiled, with their weights on flash."""

import os
import shutil
import sys
from importlib.util import find_spec

import pytest
import torch
from gpu_weights_rig import DEVICE, LIMIT, WEIGHT_BYTES, WIDTH, bits, inputs, on_device_flash
from torch import nn
from torch.nn import functional as F

import penstock
from tensor_parallel_rig import mesh_of_one, parallel
from weights_rig import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of what it does itself
    pytest.mark.filterwarnings("error::penstock.core.errors.PenstockWarning"),
]

BLOCKS = 4
needs_kernels = pytest.mark.skipif(
    "emulator" in sys.modules
    or find_spec("triton") is None
    or shutil.which(os.environ.get("CC", "gcc")) is None,
    reason="kernels of Triton need a device that is not emulated, and a compiler",
)
on_backends = pytest.mark.parametrize(
    "backend",
    [
        "eager",
        "aot_eager",
        pytest.param("inductor", marks=needs_kernels),
    ],
)


class Block(nn.Module):
    """As of a transformer: two linear layers, added to what they have got."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(x)))


def built():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).to(DEVICE)


def around(model, backend):
    """Modules around the blocks, which share their parameters."""
    return nn.Sequential(*(torch.compile(block, backend=backend) for block in model))


def in_place(model, backend):
    for block in model:
        block.compile(backend=backend)
    return model


def steps(model, compiled):
    """Losses and gradients of some steps, and what one without gradients gives."""
    seen = []
    for x in inputs():
        loss = compiled(x).square().mean()
        loss.backward()
        seen += [bits(loss), *(bits(each.grad) for each in model.parameters())]
        model.zero_grad()
    with torch.no_grad():
        seen.append(bits(compiled(x)))
    return seen


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@on_backends
@pytest.mark.parametrize("compile_blocks", [around, in_place])
def test_a_block_is_brought_as_one_within_the_limit(compile_blocks, backend, tmp_path):
    plain = built()
    expected = steps(plain, compile_blocks(plain, backend))
    model = built()
    compiled = compile_blocks(model, backend)
    with on_device_flash(model, tmp_path, limit=LIMIT + WEIGHT_BYTES) as session:
        found = steps(model, compiled)
        streamer = session._weights
        assert not streamer.touches
        assert streamer.forced == 0
        assert streamer.account.peak_bytes <= LIMIT + WEIGHT_BYTES < streamer.total_bytes
    assert_same([*found, *steps(model, compiled)], [*expected, *expected])


@on_backends
def test_blocks_that_are_compiled_in_the_session_are_right_and_slower(backend, tmp_path):
    """Their weights are touched one by one, since the session does not know of the calls.

    Each touch breaks the graph. ``inductor`` then joins other operators to a kernel than it does without
    breaks, and rounds differently: seen on an H100.
    """
    plain, model = built(), built()
    expected = steps(plain, in_place(plain, backend))
    compare = torch.testing.assert_close if backend == "inductor" else assert_same
    with on_device_flash(model, tmp_path, limit=LIMIT + WEIGHT_BYTES) as session:
        compare(steps(model, in_place(model, backend)), expected)
        assert len(session._weights.touches) == 2 * BLOCKS


def trained_steps(model):
    """Losses of some steps that change the weights, and the weights after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in inputs():
        loss = model(x[:, :64].contiguous()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bits(loss))
    return losses


def test_compiled_blocks_of_tensor_parallelism_train_to_the_same_bits(disk_path):
    limits = {"weights_memory": "64KiB", "device_memory": "64MiB", "host_memory": "64MiB"}
    with mesh_of_one(DEVICE) as mesh:
        plain, model = parallel(mesh), parallel(mesh)
        for layer in (*plain, *model):
            layer.compile(backend="aot_eager")
        expected = trained_steps(plain)
        with penstock.offload(
            model, weights="flash", flash=str(disk_path), floor="4KiB", **limits
        ) as session:
            found = trained_steps(model)
            weights = session._weights
            assert weights.total_bytes == 96 << 10
            assert weights.account.peak_bytes <= 64 << 10
        assert_same(found, expected)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor())
