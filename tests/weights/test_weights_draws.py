"""Random numbers that several threads draw, while a model is built on flash."""

import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.weights import draws

PIECE = 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DRAWS = {
    torch.Tensor.uniform_: ({"a": -0.1, "b": 0.3}, lambda a, b: ((a, b), {})),
    torch.Tensor.normal_: ({"a": 0.1, "b": 0.02}, lambda a, b: ((), {"mean": a, "std": b})),
}
UNIFORM, NORMAL = DRAWS


@pytest.fixture(autouse=True)
def _by_pieces(monkeypatch):
    monkeypatch.setattr(draws, "_LEAST_BYTES", 1)
    monkeypatch.setattr(draws, "_PIECE", PIECE)
    monkeypatch.setattr(draws, "_PAYS_AFTER", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.fixture
def pieces(monkeypatch):
    """The lengths that were filled in each thread."""
    found = []
    plain = draws._fill

    def noted(tensor, draw, generator, piece, pool):
        def each(part, **named):
            found.append((part.numel(), threading.current_thread().name))
            return draw(part, **named)

        plain(tensor, each, generator, piece, pool)

    monkeypatch.setattr(draws, "_fill", noted)
    return found


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("drawn_before", [0, 1, 100, 624, 1000])
@pytest.mark.parametrize(
    "length", [16, PIECE, PIECE + 1, PIECE + 15, 3 * PIECE + 16, 7 * PIECE + 21]
)
def test_numbers_and_what_is_drawn_next_are_those_of_one_thread(dtype, draw, drawn_before, length):
    values, call = DRAWS[draw]
    args, named = call(**values)
    found = []
    for fill in draw, lambda *all_args, **all_named: draws.drawn(draw, *all_args, **all_named):
        torch.manual_seed(3)
        torch.rand(drawn_before)
        tensor = torch.zeros(length, dtype=dtype)
        assert fill(tensor, *args, **named) is tensor
        found.append((bits(tensor), torch.get_rng_state(), torch.randn(3)))
    assert all(map(torch.equal, *found))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.integers(0, 2000))
@settings(deadline=None, max_examples=50)
def test_states_after_many_numbers_are_those_of_a_generator_that_drew_them(steps, drawn_before):
    counts = np.cumsum(steps).tolist()
    generator = torch.Generator().manual_seed(7)
    torch.rand(drawn_before, generator=generator)
    states = list(draws._states(generator, counts))
    for step, state in zip(steps, states, strict=True):
        torch.rand(step, generator=generator)
        assert torch.equal(state, generator.get_state())


def test_a_model_that_is_built_on_flash_draws_by_pieces(tmp_path, pieces):
    def built():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 200), nn.Linear(200, 64))
        nn.init.trunc_normal_(model[2].weight, std=0.02)
        return model

    plain = built()
    assert not pieces
    with penstock.built_on_flash(tmp_path, floor=4096):
        model = built()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert {PIECE, 300 * 64 % PIECE or PIECE} <= {length for length, _ in pieces}
    assert any(name.startswith("penstock-draw") for _, name in pieces)
    assert not {"uniform_", "normal_"} & vars(torch.Tensor).keys()


def test_what_one_thread_alone_may_fill_is_left_to_it(pieces):
    transposed = torch.zeros(64, 64).t()
    double = torch.zeros(4096, dtype=torch.float64)
    with torch.inference_mode():
        of_inference = torch.zeros(4096)
        draws.drawn(UNIFORM, of_inference)
    for each in transposed, double, torch.zeros(4096, device="meta"):
        draws.drawn(UNIFORM, each)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        draws.drawn(UNIFORM, nn.Parameter(torch.zeros(4096)))
    assert not pieces
    torch.manual_seed(0)
    expected = torch.zeros(64, 64).t().uniform_()
    torch.manual_seed(0)
    assert torch.equal(draws.drawn(UNIFORM, transposed), expected)


def test_pieces_begin_when_they_pay(monkeypatch, pieces):
    draws.drawn(UNIFORM, torch.zeros(1))  # both ways are tried first
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(draws, "_seen", [0])
    monkeypatch.setattr(draws, "_PAYS_AFTER", 2 * PIECE)
    for is_late in (False, False, True, True):
        pieces.clear()
        draws.drawn(UNIFORM, torch.zeros(PIECE))
        assert bool(pieces) == is_late


def test_a_distribution_that_is_none_is_refused_and_nothing_is_drawn():
    before = torch.get_rng_state()
    for draw, args, words in (UNIFORM, (1.0, 0.0), "from"), (NORMAL, (0.0, -1.0), "std"):
        with pytest.raises(RuntimeError, match=words):
            draws.drawn(draw, torch.zeros(4096), *args)
    assert torch.equal(torch.get_rng_state(), before)


OTHER_STATE = np.dtype(
    {
        "names": ["left", "next", "words"],
        "formats": ["<i4", "<u8", "(624,)<u8"],
        "offsets": [16, 8, 24],
        "itemsize": draws._STATE.itemsize,
    }
)


@pytest.mark.parametrize(("name", "value"), [("_GROUP", 1), ("_STATE", OTHER_STATE)])
def test_a_torch_that_draws_otherwise_draws_alone(monkeypatch, name, value):
    assert draws._is_alike.__wrapped__(NORMAL, torch.float32)
    monkeypatch.setattr(draws, name, value)
    assert not draws._is_alike.__wrapped__(NORMAL, torch.float32)
