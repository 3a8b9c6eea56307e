"""Random little graphs under random settings: gradients are the same to the last bit.

A graph is a list of operations on a growing list of tensors ``[rows, 64]``. The operations are those
that share storages, edit in place, gather, or save their outputs; each is chosen with the tensors that
it works on. Shrinking leaves the fewest operations that still differ.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload_runs import assert_nothing_held, assert_within_budget, same_bits
from penstock.core.units import KIB, MIB
from tries import tries

WIDTH = 64


class Parts(nn.Module):
    """The weights that operations may use, some of them frozen."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.vector = nn.Parameter(torch.randn(WIDTH))


def fused(parts, x, _):
    query, key, value = parts.wide(x).chunk(3, dim=-1)
    return torch.sigmoid(query * key) * value


def edited_in_place(parts, x, _):
    return F.relu(x * 1.5, inplace=True).mul(2)


def inplace_on_a_view(parts, x, _):
    y = x.clone()
    y[:, ::2].mul_(0.5)
    return y.tanh_()


def matrix_times_vector(parts, x, _):
    """gemv, which rounds by alignment, on a view that begins anywhere."""
    return x + (x[1:, 3:40] @ parts.vector[3:40]).mean() * 0.1


def small_view(parts, x, _):
    part = x[3:20, 5:37]
    return x + (part * part).sum() * 1e-3


def checkpointed(parts, x, y):
    def inner(x):
        return F.gelu(parts.linear(x)) * y.mean()

    return checkpoint(inner, x, use_reentrant=False)


def reentrant(parts, x, _):
    return checkpoint(lambda x: parts.linear(x).sin(), x, use_reentrant=True)


OPERATIONS = {
    "linear": lambda parts, x, _: parts.linear(x),
    "frozen": lambda parts, x, _: parts.frozen(x).tanh(),
    "fused": fused,
    "relu": edited_in_place,
    "view edit": inplace_on_a_view,
    "square": lambda parts, x, _: x * x,
    "product": lambda parts, x, y: x * y,
    "exp": lambda parts, x, _: (-x.abs()).exp(),
    "softmax": lambda parts, x, _: x.softmax(-1),
    "reshape": lambda parts, x, _: x.view(-1, 8, 8).transpose(1, 2).reshape(-1, WIDTH),
    "flip": lambda parts, x, _: x.flip(0).t().contiguous().t() * 0.5,
    "split": lambda parts, x, _: torch.cat([p * (p + 1) for p in x.split(24, dim=1)], dim=1),
    "expand": lambda parts, x, _: x[:, :1].expand_as(x) * x,
    "cat": lambda parts, x, y: torch.cat([x[:, ::2], y[:, 1::2]], 1).sigmoid(),
    "batchnorm": lambda parts, x, _: parts.norm(x),
    "dropout": lambda parts, x, _: F.dropout(x, 0.3),
    "gemv": matrix_times_vector,
    "small view": small_view,
    "gather": lambda parts, x, _: x.gather(1, x.argsort(1)),
    "pool": lambda parts, x, _: F.max_pool1d(x[None], 3, 1, 1)[0],
    "bfloat16": lambda parts, x, _: (x.bfloat16() * x.bfloat16()).float(),
    "checkpoint": checkpointed,
    "reentrant": reentrant,
    "detached": lambda parts, x, y: x * y.detach(),
}

steps = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 31), st.integers(0, 31)),
    min_size=1,
    max_size=14,
)
sessions = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["all", "all", "auto", "keep"]),
        # what is restored is charged by whole pages of 2 MiB, each of which one small tensor may hold
        "device_memory": st.sampled_from([8 * MIB, 9 * MIB, 16 * MIB]),
        "floor": st.sampled_from([1, 5 * KIB, 8 * KIB, 200 * KIB]),
        "host_memory": st.sampled_from([0, 0, 256 * KIB, 4 * MIB]),
    }
)


def build(graph, parts, features):
    """The loss of a graph: every tensor that was made takes part."""
    made = [features]
    for name, first, second in graph:
        made.append(
            OPERATIONS[name](parts, made[first % len(made)], made[second % len(made)]).clamp(-9, 9)
        )
    return sum(each.float().mean() for each in made[1:])


def train(graph, rows, passes):
    """Gradients of some iterations, the last one over a retained graph as well."""
    torch.manual_seed(0)
    parts = Parts()
    found = []
    for turn in range(passes):
        features = torch.randn(rows, WIDTH).requires_grad_()
        loss = build(graph, parts, features)
        if turn == passes - 1:
            loss.backward(retain_graph=True)
        loss.backward()
        found += [loss.detach(), features.grad]
        found += [None if p.grad is None else p.grad.clone() for p in parts.parameters()]
    return found


def check(session_for, graph, rows, passes, options):
    expected = train(graph, rows, passes)
    with session_for(**options) as session:
        found = train(graph, rows, passes)
        assert [same_bits(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(
            found
        )
        if session.budget.peak_bytes:
            assert_within_budget(session)
        assert_nothing_held(session)


arguments = given(
    graph=steps, rows=st.sampled_from([33, 256, 1000]), passes=st.integers(1, 4), options=sessions
)
UNHEALTHY = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=tries(25), suppress_health_check=UNHEALTHY)
@arguments
def test_random_graphs_are_the_same_to_the_last_bit(session_for, graph, rows, passes, options):
    check(session_for, graph, rows, passes, options)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=tries(300), suppress_health_check=UNHEALTHY)
@arguments
def test_many_random_graphs(session_for, graph, rows, passes, options):
    check(session_for, graph, rows, passes, options)
