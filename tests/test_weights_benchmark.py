"""``benchmarks/macro/weights.py`` and its peers: one model in several formats, and its rows."""

import importlib
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def module():
    places = [str(BENCHMARKS / part) for part in ("macro", "peers", "")]
    sys.path[:0] = places
    try:
        yield importlib.import_module
    finally:
        del sys.path[: len(places)]


def test_adapters_are_of_queries_and_values_and_change_nothing_at_first(module):
    models = module("_weights_model")
    model = models.Decoder(models.Shape(16, 2, 2, 24, 32), torch.float32)
    ids = torch.arange(6)[None]
    before = model(ids)
    models.adapt(model)
    assert torch.equal(model(ids), before)
    models.loss_of(model, ids).backward()
    trained = {name for name, each in model.named_parameters() if each.grad is not None}
    assert trained == {
        f"blocks.{block}.qkv.{part}.{way}.weight"
        for block in range(2)
        for part in ("query", "value")
        for way in ("down", "up")
    }


def test_rows_of_queries_rotate_as_neighbours(module):
    peers, models = module("streamed_weights"), module("_weights_model")
    heads, half, width = 2, 3, 5
    weight, x = torch.randn(heads * 2 * half, width), torch.randn(4, width)
    angles = torch.arange(4)[:, None] * torch.rand(half)
    turns = angles.cos()[:, None], angles.sin()[:, None]
    ours = models.turned(functional.linear(x, weight).view(4, heads, 2 * half), turns)
    pairs = functional.linear(x, peers.paired(weight, heads)).view(4, heads, half, 2)
    one, two = pairs.unbind(-1)
    cos, sin = turns
    theirs = torch.stack((one * cos - two * sin, two * cos + one * sin), dim=-1)
    halves = torch.cat(theirs.unbind(-1), dim=-1)
    torch.testing.assert_close(halves, ours)


def side(times, outputs, **others):
    return {"times": times, "outputs": outputs, "step_s": sum(times[2:]) / len(times[2:]), **others}


def test_sides_are_compared_turn_by_turn(module):
    weights = module("weights")
    args = Namespace(mode="prefill", tokens=8, shape="25M", dtype="float32", format="int8")
    rounds = [
        {
            "flash": side([9.0, 9.0, flash, 1.0], [[1.0, 2.0]], read_bytes=58982400),
            "mapped": side([1.0, 1.0, 2.0, 2.0], [[1.0, 2.5]]),
            "raw": side([1.0, 1.0, 2.0, 2.0], []),
            "airllm": {"failed": "no memory"},
        }
        for flash in (1.0, 3.0, 2.0)
    ]
    found = weights.compared(args, rounds, {"step_s": 3.0, "read_bytes": 0})
    assert found["mapped"]["flash_ratio"] == 0.5
    assert found["mapped"]["flash_ratio_of_each_round"] == [0.5, 1.0, 0.75]
    assert found["mapped"]["largest_difference"] == 0.5
    assert found["raw"]["flash_ratio"] == 0.5
    assert "largest_difference" not in found["raw"]
    assert found["airllm"] == {"failed": "no memory"}
    assert found["plan"] == {"step_s": 3.0, "read_bytes": 0, "measured_of_step_s": 0.5}
    # four blocks of 512 by 512, and of 1376 by 512, and a head; the embedding is read by rows
    assert found["expected"]["read_bytes"] == 4 * (4 * (4 * 512**2 + 3 * 1376 * 512) + 4096 * 512)
    assert found["expected"]["measured_of_read_bytes"] == 1.0
    with pytest.raises(ValueError, match="shorter"):
        weights.largest_difference([[1.0]], [])


def test_a_row_of_a_later_result_is_left_out(module):
    page = module("_page")
    assert page.filled("| ?never_measured | {step_s} | | |") is None
    with pytest.raises(FileNotFoundError):
        page.filled("| never_measured | {step_s} | | |")


@pytest.mark.parametrize("name", ["25M", "gpt2-xl"])
def test_shapes_know_their_parameters(module, name):
    shape = module("_weights_model").SHAPES[name]
    with torch.device("meta"):
        model = shape.network(torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert sum(each.numel() for each in model.parameters()) == shape.parameters
    if name == "gpt2-xl":
        assert shape.parameters == 1_557_611_200
