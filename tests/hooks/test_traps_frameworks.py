"""Rules 11, 12 and 25: checkpoints, compilers and transforms have ways of their own with graphs."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook, register_module_forward_hook
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from trap_runs import LARGE, blocks, flow_count, gradients_of, leaf, run_through

from offload_runs import (
    assert_nothing_held,
    assert_within_budget,
    gradients,
    read_bytes,
    same_bits,
    session_in,
    wait_for_writes,
    written_bytes,
)
from penstock.core.errors import BudgetError
from penstock.observe.recorder import Stage

# -- 11: checkpointing -----------------------------------------------------------------------------


def flat(block, features, **options):
    return checkpoint(block, features, **options)


def nested(block, features, use_reentrant):
    """A checkpoint around two, one of them around a third."""

    def inner(features):
        return flat(block, block(features), use_reentrant=use_reentrant)

    def outer(features):
        return flat(inner, flat(block, features, use_reentrant=use_reentrant), use_reentrant=False)

    return flat(outer, features, use_reentrant=False)


def selective(block, features):
    def policy(ctx, op, *args, **kwargs):
        must = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if must else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, features, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(partial(flat, use_reentrant=False), id="non-reentrant"),
        pytest.param(partial(flat, use_reentrant=True), id="reentrant"),
        pytest.param(partial(nested, use_reentrant=False), id="nested"),
        pytest.param(partial(nested, use_reentrant=True), id="nested reentrant"),
        pytest.param(selective, id="selective"),
    ],
)
def test_trap_11_checkpointing_inside_a_session(session_for, run):
    """A checkpoint has hooks of its own, and they lie over ours: we see its inputs, and what the
    recomputation saves while it is at it. With dropout, whose masks must be the same again.
    """
    model = blocks(4, dropout=0.25)
    features = leaf(256, 64)
    expected = gradients_of(lambda: run_through(model, features, run), model, features)
    with session_for(device_memory="3MiB") as session:
        for _ in range(3):
            torch.manual_seed(1)  # as ``gradients_of`` does, for what it is given ready-made
            loss = run_through(model, features, run)
            wait_for_writes(session)
            found = gradients(loss, [features, *model.parameters()])
            assert all(map(same_bits, found, expected))
        assert written_bytes(session) >= 3 * 3 * features.numel() * 4, "its inputs go to flash"
        del loss
        assert_within_budget(session)
        assert_nothing_held(session)


def test_trap_11_reentrant_checkpoints_do_not_end_the_pass(session_for):
    """Each runs a backward inside the backward. The step is over when the outermost one is."""
    model = blocks(4)
    features = leaf(256, 64)
    run = partial(flat, use_reentrant=True)
    with session_for() as session:
        for _ in range(3):
            gradients_of(lambda: run_through(model, features, run), model, features)
        assert session.inspect().device.pass_index == 3


# -- 12: torch.compile -----------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    """Nothing compiled before or after; no C++ compiler is needed."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["each block", "whole model"])
def test_trap_12_compiled_models_train_inside_a_session(session_for, dynamo, backend, what):
    """With the context outside, hooks run after the whole compiled region, on all that it saves.
    Compiled block by block, a block's tensors leave as soon as it is done.
    """
    model = blocks(3)
    features = leaf(256, 64)
    if what == "each block":
        compiled = [torch.compile(block, backend=backend, fullgraph=True) for block in model]
        loss = partial(run_through, compiled, features)
    else:
        loss = torch.compile(partial(run_through, model, features), backend=backend, fullgraph=True)
    expected = gradients_of(loss, model, features)
    with session_for(model) as session:
        for _ in range(2):
            result = loss()
            wait_for_writes(session)
            found = gradients_of(result, model, features)
            assert all(map(same_bits, found, expected))
        assert written_bytes(session) >= 2 * 3 * features.numel() * 4
        assert read_bytes(session) > 0
        keys = {decision.key.module for decision in session.plan.decisions}
        del result
        assert_nothing_held(session)
    assert keys


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_trap_12_single_layers_that_are_compiled(session_for, dynamo, backend):
    """Where the compiler breaks a graph, it begins to trace whatever Python runs: not our hooks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    features = leaf(256, 64)
    for layer in model:
        layer.compile(backend=backend)
    expected = gradients_of(lambda: model(features).square().sum(), model, features)
    with session_for(model):
        for _ in range(2):
            found = gradients_of(lambda: model(features).square().sum(), model, features)
            assert all(map(same_bits, found, expected))


def test_trap_12_compiled_inside_the_session_as_well(session_for, dynamo):
    """The first call, with all its tracing, falls into the session."""
    model = blocks(2)
    features = leaf(256, 64)
    expected = gradients_of(lambda: run_through(model, features), model, features)
    with session_for(model) as session:
        compiled = [torch.compile(block, backend="aot_eager", fullgraph=True) for block in model]
        for _ in range(2):
            loss = run_through(compiled, features)
            wait_for_writes(session)
            found = gradients_of(loss, model, features)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
        assert written_bytes(session) > 0
        del loss
        assert_nothing_held(session)


def test_trap_12_a_budget_too_small_for_a_whole_model_says_to_compile_blocks(session_for, dynamo):
    model = torch.compile(nn.Sequential(*blocks(2)), backend="eager")
    with (
        session_for(model, device_memory="16KiB"),
        pytest.raises(BudgetError, match=r"block\.compile\(\)"),
    ):
        model(leaf(256, 64)).sum().backward()


def test_trap_12_after_a_session_nothing_is_said_of_hooks(session_for, dynamo):
    """Torch warned of global hooks on modules, in a session and ever after, though nobody had any."""
    (model,) = blocks(1)
    filters = list(warnings.filters)
    with session_for(model):
        model(leaf(256, 64)).sum().backward()
    assert not _has_any_global_hook()
    assert warnings.filters == filters
    torch.compile(model, backend="eager")(leaf(256, 64))


def test_trap_12_who_has_global_hooks_is_told_that_they_are_called_twice(session_for, dynamo):
    (model,) = blocks(1)
    hook = register_module_forward_hook(lambda module, args, output: None)
    try:
        with session_for(model):
            compiled = torch.compile(model, backend="eager")
            with pytest.warns(UserWarning, match="global hooks on modules"):
                compiled(leaf(256, 64))
    finally:
        hook.remove()


# -- 25: torch.func --------------------------------------------------------------------------------

NO_JIT_WARNING = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def transforms(weight):
    """What each transform makes of the same function."""

    def f(x):
        return (x * x).sin().sum()

    def g(x):
        return (x * x).sin()

    yield torch.func.grad(f)(weight.detach())
    yield torch.func.vmap(torch.func.grad(f))(weight.detach().view(4, -1))
    yield torch.func.jacrev(g)(weight.detach()[:8])
    yield torch.func.jvp(g, (weight.detach(),), (torch.ones_like(weight),))[1]
    yield torch.func.hessian(f)(weight.detach()[:4])
    yield torch.func.vjp(g, weight.detach())[1](torch.ones_like(weight))[0]


@NO_JIT_WARNING
def test_trap_25_transforms_work_inside_a_session(session_for):
    """``torch.func`` refuses to run under saved-tensor hooks. We step aside for it: what runs inside
    is not offloaded, and afterwards the hooks are back.
    """
    weight = leaf(LARGE)
    expected = list(transforms(weight))
    with session_for() as session:
        assert all(map(same_bits, transforms(weight), expected))
        assert flow_count(session, Stage.WRITE) == 0
        loss = (weight * 2).pow(2).sum()
        wait_for_writes(session)
        assert flow_count(session, Stage.WRITE) == 1, "the hooks are back"
        loss.backward()
    assert same_bits(weight.grad, 8 * weight.detach())


def test_trap_25_a_transform_in_the_middle_of_a_graph(session_for):
    """A physics-informed loss: the derivative by ``torch.func`` takes part in the training graph."""
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    points = torch.linspace(0, 1, 128)

    def loss():
        slope = torch.func.vmap(torch.func.grad(lambda x: model(x.view(1))[0]))(points)
        values = model(points.view(-1, 1))
        return (slope.pow(2) + values.pow(2).squeeze()).mean()

    leaves = list(model.parameters())
    expected = gradients(loss, leaves)
    with session_for(model) as session:
        for _ in range(2):
            result = loss()
            wait_for_writes(session)
            assert all(map(same_bits, gradients(result, leaves), expected))
        assert written_bytes(session) > 0
        del result
        assert_nothing_held(session)


def test_trap_25_hooks_of_others_still_make_transforms_raise(session_for):
    """We take only our own hooks off. Somebody else's inside ours are theirs to remove."""
    weight = leaf(LARGE)
    with (
        session_for(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        pytest.raises(RuntimeError, match="saved tensor hooks"),
    ):
        torch.func.grad(lambda x: (x * x).sum())(weight.detach())


def test_trap_25_after_the_session_torch_is_as_before(disk_path):
    original = torch.autograd.graph.disable_saved_tensors_hooks
    with session_in(disk_path):
        assert torch.autograd.graph.disable_saved_tensors_hooks is not original
    assert torch.autograd.graph.disable_saved_tensors_hooks is original


@NO_JIT_WARNING
def test_trap_25_that_we_stepped_aside_is_said(session_for):
    """In words, where the user looks. A pause that the user asked for need not be told."""
    weight = leaf(LARGE)
    with session_for() as session:
        with session.paused():
            (weight * 2).pow(2).sum().backward()
        assert "torch.func" not in str(session.summary())
        list(transforms(weight))
        assert "torch.func, which refuses saved-tensor hooks, ran" in str(session.summary())
