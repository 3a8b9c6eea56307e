"""Recurrent layers and cells compute the same with everything that they save on flash.

They come by several ways through torch: a fused kernel, or a loop over cells whose gates are parts of
one storage with version counters of their own (rule 32). Type, size, dtype, packing, projection,
direction and dropout decide which.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from grids import grid, pairwise
from operator_runs import all_equal

LAYERS = {
    "kind": (nn.RNN, nn.LSTM, nn.GRU),
    "hidden": (5, 64),
    "dtype": (torch.float32, torch.float64, torch.bfloat16),
    "packed": (False, True),
    "bidirectional": (False, True),
    "dropout": (0.0, 0.4),
    "projected": (False, True),
}
CELLS = {
    "kind": (nn.RNNCell, nn.LSTMCell, nn.GRUCell),
    "hidden": (5, 64, 300),
    "dtype": (torch.float32, torch.float64, torch.bfloat16),
    "bias": (False, True),
}

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")


@dataclass(frozen=True)
class Case:
    """One layer or cell."""

    kind: type
    hidden: int
    dtype: torch.dtype
    packed: bool = False
    bidirectional: bool = False
    dropout: float = 0.0
    projected: bool = False
    bias: bool = True


def rows_of(choices):
    """The grid; only an LSTM projects."""
    return grid(choices, lambda kind, projected=False, **_: not projected or kind is nn.LSTM)


def layer_loss(case):
    torch.manual_seed(3)
    more = {"proj_size": max(1, case.hidden // 2)} if case.projected else {}
    layer = case.kind(
        7,
        case.hidden,
        num_layers=2,
        dropout=case.dropout,
        bidirectional=case.bidirectional,
        dtype=case.dtype,
        **more,
    )
    x = torch.randn(6, 4, 7, dtype=case.dtype, requires_grad=True)
    inputs = x * 2
    if case.packed:
        inputs = pack_padded_sequence(inputs, torch.tensor([6, 5, 2, 1]))
    outputs, state = layer(inputs)
    if case.packed:
        outputs, _ = pad_packed_sequence(outputs)
    states = state if isinstance(state, tuple) else (state,)
    return sum((each * each).sum() for each in (outputs, *states)), [x, *layer.parameters()]


def cell_loss(case):
    torch.manual_seed(3)
    cell = case.kind(7, case.hidden, bias=case.bias, dtype=case.dtype)
    x = torch.randn(5, 4, 7, dtype=case.dtype, requires_grad=True)
    state = None
    for each in x * 2:
        state = cell(each, state)
    states = state if isinstance(state, tuple) else (state,)
    return sum((each * each).sum() for each in states), [x, *cell.parameters()]


def outcome(make, case, settle=lambda: None):
    """The loss and the gradients of one case."""
    loss, leaves = make(case)
    value = loss.detach().clone()
    settle()
    loss.backward()
    return [value], [each.grad for each in leaves]


def assert_same(everything, make, rows):
    for case in (Case(**row) for row in rows):
        with everything.session.paused():
            plain = outcome(make, case)
        before = everything.reads
        mine = outcome(make, case, everything.settle)
        assert all_equal(mine, plain), case
        assert everything.reads > before, case


@pytest.mark.parametrize(
    ("make", "choices"), [(layer_loss, LAYERS), (cell_loss, CELLS)], ids=["layers", "cells"]
)
def test_every_pair_of_choices(everything, make, choices):
    assert_same(everything, make, pairwise(rows_of(choices)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "choices"), [(layer_loss, LAYERS), (cell_loss, CELLS)], ids=["layers", "cells"]
)
def test_every_choice(everything, make, choices):
    assert_same(everything, make, rows_of(choices))
