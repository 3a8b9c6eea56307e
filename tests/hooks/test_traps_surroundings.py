"""Rules 10 to 16, 24 and 25: threads, checkpointing, compilers, subclasses, forks, transforms."""

import os
import signal
import threading
import traceback
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from offload_runs import (
    GatedTier,
    assert_nothing_held,
    assert_within_budget,
    gradients,
    read_bytes,
    same_bits,
    session_in,
    tiers,
    wait_for_writes,
    wait_until,
    written_bytes,
)
from penstock.core.errors import PenstockWarning
from penstock.core.units import MIB
from penstock.observe.recorder import Stage

LARGE = 4096


def leaf(*shape, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, **options).requires_grad_()


def flow_count(session, stage, tier="flash"):
    return session.recorder.snapshot().flow(stage, tier).count


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, features):
        return features + self.down(F.gelu(self.up(self.norm(features))))


def blocks(depth=4, dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Sequential(Block(), nn.Dropout(dropout)) for _ in range(depth)]
    return nn.ModuleList(layers)


def run_through(model, features, run=lambda block, features: block(features)):
    for block in model:
        features = run(block, features)
    return features.pow(2).mean()


def gradients_of(loss_of, model, features):
    torch.manual_seed(1)
    return gradients(loss_of, [features, *model.parameters()])


# -- 10: threads ----------------------------------------------------------------------------------


def in_thread(work, name="worker"):
    """Run ``work`` in another thread; its result, or its error."""
    outcome = []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001  (the caller raises it)
            outcome.append((None, error))

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the thread hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def test_trap_10_a_thread_that_is_missed_is_named(session_for):
    """Hooks are thread-local. A pipeline's stage thread, or DataParallel's, runs modules without them:
    right, but not offloaded. That is said once, with the thread's name.
    """
    model = blocks(2)
    features = leaf(256, 64)
    expected = gradients_of(lambda: run_through(model, features), model, features)
    with session_for(model) as session:

        def work():
            return gradients_of(lambda: run_through(model, features), model, features)

        with pytest.warns(PenstockWarning, match="'stage 7' runs modules outside"):
            found = in_thread(work, "stage 7")
        in_thread(work, "stage 7")  # a second warning would be an error
        assert flow_count(session, Stage.WRITE) == 0
        assert "stage 7" in str(session.summary())
    assert all(map(same_bits, found, expected))


def test_trap_10_a_thread_without_gradients_misses_nothing(session_for):
    """Evaluation in a thread saves nothing, so there is nothing to warn of."""
    model = blocks(1)
    with session_for(model):

        def work():
            with torch.no_grad():
                return run_through(model, torch.ones(4, 64))

        in_thread(work)


def test_trap_10_backward_may_run_in_another_thread(session_for):
    """As CUDA's backward always does."""
    model = blocks()
    features = leaf(256, 64)
    expected = gradients_of(lambda: run_through(model, features), model, features)
    with session_for(model, device_memory="2MiB") as session:
        for _ in range(2):
            loss = run_through(model, features)
            wait_for_writes(session)
            found = in_thread(partial(gradients_of, loss, model, features))
            assert all(map(same_bits, found, expected))
        assert read_bytes(session) > 0
        del loss
        assert_nothing_held(session)


def test_trap_10_two_backwards_may_run_at_once(session_for):
    """Two graphs over different weights, walked by two threads while a third one's forward goes on."""
    models = [blocks(6) for _ in range(2)]
    features = [leaf(256, 64, seed=seed) for seed in range(2)]
    pairs = list(zip(models, features, strict=True))
    expected = [gradients_of(lambda m=m, f=f: run_through(m, f), m, f) for m, f in pairs]
    with session_for(device_memory="8MiB") as session:
        for _ in range(3):
            losses = [run_through(model, each) for model, each in pairs]
            for model, each in pairs:
                model.zero_grad()
                each.grad = None
            threads = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in threads:
                thread.start()
            run_through(models[0], features[0])
            for thread in threads:
                thread.join(60)
            for (model, each), gradient in zip(pairs, expected, strict=True):
                found = [each.grad, *(parameter.grad for parameter in model.parameters())]
                assert all(map(same_bits, found, gradient))
        assert_within_budget(session)
        del losses, threads
        assert_nothing_held(session)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_trap_10_no_wait_holds_the_gil(session_for, kind):
    """Backward waits for a read, or pack for a write, that ends only when another Python thread has
    opened the gate. If the wait held the GIL, that thread would never run.
    """
    made = []

    def wrap(tier):
        made.append(GatedTier(tier, kind))
        return made[0]

    weight = leaf(64 * LARGE)
    with session_for(wrap_tier=wrap, device_memory="5MiB") as session:

        def open_it():
            assert made[0].arrived[kind].wait(20)
            if kind == "write":
                wait_until(lambda: session.budget.free_bytes < MIB, "pack has to wait")
            made[0].open(kind)

        opener = threading.Thread(target=open_it)
        opener.start()
        loss = sum(((weight * n) * (weight * n)).sum() for n in range(1, 5))
        if kind == "read":
            wait_for_writes(session)
        loss.backward()
        opener.join()
    assert weight.grad is not None


# -- 11: checkpointing ----------------------------------------------------------------------------


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
            found = gradients_of(lambda: run_through(model, features, run), model, features)
            assert all(map(same_bits, found, expected))
        assert written_bytes(session) >= 3 * 3 * features.numel() * 4, "its inputs go to flash"
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
        assert session.executor._pass.index == 3


# -- 12: torch.compile ----------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    """Nothing compiled before or after; no C++ compiler is needed."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


EXTRA_HOOKS = pytest.mark.filterwarnings("ignore:.*when there are global hooks on modules")


@EXTRA_HOOKS
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


@EXTRA_HOOKS
def test_trap_12_compiled_inside_the_session_as_well(session_for, dynamo):
    """The first call, with all its tracing, falls into the session."""
    model = blocks(2)
    features = leaf(256, 64)
    expected = gradients_of(lambda: run_through(model, features), model, features)
    with session_for(model) as session:
        compiled = [torch.compile(block, backend="aot_eager", fullgraph=True) for block in model]
        for _ in range(2):
            found = gradients_of(lambda: run_through(compiled, features), model, features)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
        assert written_bytes(session) > 0
        assert_nothing_held(session)


# -- 13: tensors of other kinds -------------------------------------------------------------------


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_trap_13_dtensors_move_by_their_local_tensors(session_for, one_rank):
    """A DTensor reaches the hook as such, and to ask it for its address raises. What it wraps is a
    tensor like any other; its weights stay, like any other's.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    weights = [leaf(64, 64, seed=seed) for seed in (1, 2)]
    sharded = [
        distribute_tensor(weight.detach(), one_rank, [Shard(0)]).requires_grad_()
        for weight in weights
    ]
    features = leaf(256, 64)

    def loss(weights, features):
        hidden = F.gelu(features @ weights[0])
        return F.gelu(hidden @ weights[1]).pow(2).mean()

    expected = gradients(lambda: loss(weights, features), weights)
    with session_for() as session:
        batch = distribute_tensor(features.detach(), one_rank, [Shard(0)])
        for _ in range(2):
            result = loss(sharded, batch)
            wait_for_writes(session)
            local = {weight.to_local().untyped_storage()._cdata for weight in sharded}
            assert local.isdisjoint(session.executor._by_storage), "a weight was moved"
            found = gradients(result.to_local(), sharded)
            found = [gradient.to_local() for gradient in found]
            assert all(map(same_bits, found, expected))
        assert written_bytes(session) > 2 * 3 * features.numel() * 4
        assert read_bytes(session) > 0
        del result
        assert_nothing_held(session)


def test_trap_13_dtensor_edited_in_place_raises(session_for, one_rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(leaf(LARGE).detach(), one_rank, [Shard(0)]).requires_grad_()
    with session_for():
        activation = weight * 2
        square = activation * activation
        activation.add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            square.sum().backward()


def test_trap_13_fully_sharded_weights_are_not_moved(session_for, one_rank):
    """FSDP gathers a module's weights before it runs and frees them afterwards: the tensors that are
    saved are the gathered ones, in no set of parameters that was made beforehand.
    """
    from torch.distributed.fsdp import fully_shard

    plain, sharded = blocks(3), blocks(3)
    for block in sharded:
        fully_shard(block, mesh=one_rank)
    features = leaf(48, 64)
    expected = gradients_of(lambda: run_through(plain, features), plain, features)
    with session_for(sharded) as session:
        for _ in range(2):
            found = gradients_of(lambda: run_through(sharded, features), sharded, features)
            found = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
            assert all(map(same_bits, found, expected))
        sizes = {slot.key.nbytes for slot in session.profile.slots}
        assert sizes.isdisjoint({weight.numel() * 4 for weight in plain.parameters()})
        assert sizes
        assert_nothing_held(session)


def test_trap_13_fake_tensors_pass(session_for):
    """Shape propagation inside a session: there are no bytes to move."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with session_for() as session:
        with FakeTensorMode():
            weight = torch.empty(64, 64, requires_grad=True)
            (torch.empty(256, 64) @ weight).relu().sum().backward()
            assert weight.grad.shape == (64, 64)
        assert flow_count(session, Stage.WRITE) == 0


def sparse_loss(weight):
    matrix = torch.eye(64).to_sparse() * 2
    return torch.sparse.mm(matrix, weight.view(64, 64) * 2).pow(2).sum()


def csr_loss(weight):
    matrix = torch.eye(64).to_sparse_csr()
    return torch.mm(matrix, weight.view(64, 64) * 2).pow(2).sum()


def jagged_loss(weight):
    parts = [(weight[:1024] * 2).view(16, 64), (weight[1024:] * 3).view(48, 64)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return (nested.sin() * nested).values().sum()


def conjugate_loss(weight):
    signal = torch.fft.fft(weight * 2)
    return (signal.conj() * signal).real.sum() + (signal.conj().imag * 2).exp().mean()


class Labelled(torch.Tensor):
    """A subclass of the simple kind: a tensor with another type."""


def labelled_loss(weight):
    labelled = (weight * 2).as_subclass(Labelled)
    result = (labelled * labelled).sum()
    assert type(result) is Labelled
    return result.as_subclass(torch.Tensor)


class Wrapper(torch.Tensor):
    """A subclass of the difficult kind: it has no storage, its bytes are in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(
            Wrapper, lambda each: each.inner, (args, kwargs or {})
        )
        wrap = partial(torch.utils._pytree.tree_map_only, torch.Tensor, Wrapper)
        return wrap(function(*args, **kwargs))


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return Wrapper(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.inner if isinstance(gradient, Wrapper) else gradient


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, wrapper):
        return wrapper.inner

    @staticmethod
    def backward(ctx, gradient):
        return Wrapper(gradient)


def wrapper_loss(weight):
    wrapped = Wrap.apply(weight * 2)
    return Unwrap.apply((wrapped * wrapped).sin()).sum()


def quantized_loss(weight):
    class Dequantize(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            quantized = torch.quantize_per_tensor(tensor.detach(), 0.1, 0, torch.qint8)
            ctx.save_for_backward(quantized)
            return quantized.dequantize()

        @staticmethod
        def backward(ctx, gradient):
            (quantized,) = ctx.saved_tensors
            return gradient * quantized.dequantize()

    return Dequantize.apply(weight * 2).sum()


@pytest.mark.parametrize(
    "loss",
    [
        sparse_loss,
        csr_loss,
        jagged_loss,
        conjugate_loss,
        labelled_loss,
        wrapper_loss,
        quantized_loss,
    ],
)
@pytest.mark.filterwarnings("ignore:.*(beta state|torch.quantize|torch.ao|deprecat|prototype)")
def test_trap_13_other_kinds_of_tensors_pass(session_for, loss):
    """Sparse, nested, conjugated, quantized, subclasses of both kinds: what we do not know we do not
    touch, and its neighbours move as ever.
    """
    weight = leaf(LARGE)
    expected = gradients(lambda: loss(weight), [weight])
    with session_for() as session:
        for _ in range(2):
            result = loss(weight)
            wait_for_writes(session)
            assert same_bits(gradients(result, [weight])[0], expected[0])
        del result
        assert_nothing_held(session)


# -- 14 to 16: devices (what of them a machine without a GPU can show) ----------------------------


def test_trap_14_a_tensor_of_another_device_stays_there(session_for):
    """Seeds, indices and masks on the CPU, saved by a graph on the GPU, came back on the GPU in a
    public offloader. Here the CPU is the device and ``meta`` the other one.
    """
    weight = torch.empty(LARGE, device="meta", requires_grad=True)
    with session_for() as session:
        (weight * 2).pow(2).sum().backward()
        assert weight.grad.device.type == "meta"
        assert flow_count(session, Stage.WRITE) == 0


def test_trap_14_cpu_tensors_stay_when_the_device_is_another(session_for):
    """The decision itself, as a session on a GPU makes it."""
    with session_for() as session:
        session.hooks._device_type = "cuda"
        activation = leaf(LARGE) * 2
        packed = session.hooks.pack(activation)
        back = session.hooks.unpack(packed)
        assert back.device.type == "cpu"
        assert back.data_ptr() == activation.data_ptr()
        assert session.budget.used_bytes == 0


def test_trap_15_a_reload_waits_for_its_own_write(session_for):
    """Streams are the largest class of bugs in public offloaders, among them a reload that did not
    wait for its own copy-out. Here a tensor whose write has not ended is never read: it is forwarded,
    and if backward comes again after the write, that is read.
    """
    made = []

    def wrap(tier):
        made.append(GatedTier(tier, "write"))
        return made[0]

    weight = leaf(LARGE)
    with session_for(wrap_tier=wrap) as session:
        loss = (weight * 2).pow(2).sum()
        loss.backward(retain_graph=True)
        assert not made[0].arrived["read"].is_set()
        assert flow_count(session, Stage.READ) == 0
        made[0].open("write")
        wait_for_writes(session)
        weight.grad = None
        loss.backward()
        assert same_bits(weight.grad, 8 * weight.detach())


def test_trap_16_host_memory_is_one_capped_slab(session_for):
    """Pinning costs 3 ms a call and rounds to powers of two, so what tensors are staged in or spilled
    to is one slab with a cap, and what does not fit goes elsewhere. (Pinning itself: tests/gpu.)
    """
    weight = leaf(64 * LARGE)
    session = session_for(host_memory="2MiB")
    with session, warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        session.planner._budgets = session.planner._budgets.__class__(
            device_bytes=session.budget.limit_bytes, host_bytes=2 * MIB, flash_bytes=0
        )
        losses = [((weight * n) * (weight * n)).sum() for n in range(1, 4)]
        wait_for_writes(session)
        assert 0 < session.recorder.snapshot().memory["host"].peak_bytes <= 2 * MIB
        assert written_bytes(session, "flash") >= 4 * MIB
        for n, loss in enumerate(losses, start=1):
            weight.grad = None
            loss.backward()
            once = (weight * n).detach() * n
            assert same_bits(weight.grad, once + once)


# -- 24: fork -------------------------------------------------------------------------------------


CHILD_TIMEOUT_S = 20


def in_child(work):
    """Run ``work`` in a forked child: ``"done"``, or what it raised, or ``""`` if it hung."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forking beside threads, from 3.12 on
        pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_TIMEOUT_S)  # also where it waits for a lock: SIGALRM ends it
        try:
            torch.set_num_threads(1)
            work()
            report = "done"
        except BaseException:  # noqa: BLE001  (the parent wants to see it)
            report = traceback.format_exc()
        os.write(writable, report.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        report = pipe.read()
    os.waitpid(pid, 0)
    return report


@contextmanager
def held(*locks):
    """Within, another thread holds the locks, as a worker may at the moment of a fork."""
    taken, release = threading.Event(), threading.Event()

    def hold():
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        release.set()
        thread.join()


def test_trap_24_a_forked_child_trains_without_the_parents_engine(session_for):
    """Data-loader workers inherit threads that do not run and files that are not theirs. In the child
    the session is out of action: tensors stay, gradients are right, and the parent does not notice.
    """
    model = blocks(2)
    features = leaf(256, 64)
    expected = gradients_of(lambda: run_through(model, features), model, features)
    with session_for(model) as session:
        loss = run_through(model, features)
        wait_for_writes(session)
        held = tiers(session)["flash"].held_bytes

        def work():
            small = leaf(16, 64)
            weight = leaf(LARGE)
            run_through(model, small).backward()
            (weight * 2).pow(2).sum().backward()
            assert same_bits(weight.grad, 8 * weight.detach())
            assert tiers(session)["flash"].held_bytes == held

        assert in_child(work) == "done"
        found = gradients_of(loss, model, features)
        assert all(map(same_bits, found, expected))
        del loss
        assert_nothing_held(session)


def test_trap_24_a_child_waits_for_no_lock_of_its_parent(session_for):
    """A lock that a worker held at the fork is held for ever in the child, and nobody there lets go."""
    weight = leaf(LARGE)
    small = leaf(1536)
    optimizer = torch.optim.SGD([weight, small], lr=0.1)
    with session_for(policy="keep", device_memory="8MiB") as session:
        losses = [(weight * 2).pow(2).sum(), (small * 2).pow(2).sum(), (weight * 3).pow(2).sum()]

        def work():
            losses.pop()
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            nn.Linear(64, 64)(leaf(256, 64)).pow(2).sum().backward()
            losses.clear()
            session.close()

        locks = (session.executor._lock, session.budget.changed, session.recorder._lock)
        with held(*locks):
            assert in_child(work) == "done"
        losses[0].backward()
        assert same_bits(weight.grad, 8 * weight.detach())


def test_trap_24_a_child_may_drop_and_close_what_it_inherited(session_for):
    """A worker that ends runs finalizers and ``with`` blocks of its parent."""
    weight = leaf(LARGE)
    with session_for() as session:
        losses = [(weight * 2).pow(2).sum()]
        wait_for_writes(session)

        def work():
            losses.clear()
            session.close()

        assert in_child(work) == "done"
        losses[0].backward()
        assert same_bits(weight.grad, 8 * weight.detach())


def test_trap_24_a_child_is_told_that_it_cannot_restore(session_for):
    """What the parent has spilled the child cannot read; it must not hang over that."""
    weight = leaf(LARGE)
    with session_for() as session:
        loss = (weight * 2).pow(2).sum()
        wait_for_writes(session)
        report = in_child(loss.backward)
        assert "RestoreError" in report
        assert f"spilled by process {os.getpid()}" in report


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        features = torch.full((64,), float(index)).requires_grad_()
        (features * features).sum().backward()
        return features.grad


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_trap_24_data_loader_workers_inside_a_session(session_for):
    """The usual case: workers are forked in the middle of training."""
    model = blocks(1)
    with session_for(model, device_memory="2MiB") as session:
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
        seen = []
        for batch in loader:
            run_through(model, batch.repeat(128, 1)).backward()
            seen += batch[:, 0].tolist()
        assert seen == [0, 2, 4, 6, 8, 10]
        assert written_bytes(session) > 0
        del batch, loader
        assert_nothing_held(session)


# -- 25: torch.func -------------------------------------------------------------------------------


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
            assert all(map(same_bits, gradients(loss, leaves), expected))
        assert written_bytes(session) > 0
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
