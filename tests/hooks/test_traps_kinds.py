"""Rules 13 to 16: tensors of other kinds and on other devices (of these, what needs no GPU)."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from trap_runs import LARGE, blocks, flow_count, gradients_of, leaf, run_through, taken_keys

from offload_runs import (
    GatedTier,
    assert_nothing_held,
    gradients,
    read_bytes,
    same_bits,
    wait_for_writes,
    written_bytes,
)
from penstock.core.errors import PenstockWarning
from penstock.core.units import MIB
from penstock.hooks import saved_tensors
from penstock.observe.recorder import Stage

# -- 13: tensors of other kinds --------------------------------------------------------------------


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
            assert local.isdisjoint(taken_keys(session)), "a weight was moved"
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


# -- 14 to 16: devices -----------------------------------------------------------------------------


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
        session.hooks._is_here = saved_tensors._is_on("cuda")
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
        orders = session.executor.orders
        to_host = replace(orders.default, tier="host")
        session.executor.follow(replace(orders, default=to_host))
        losses = [((weight * n) * (weight * n)).sum() for n in range(1, 4)]
        wait_for_writes(session)
        assert 0 < session.recorder.snapshot().memory["host"].peak_bytes <= 2 * MIB
        assert written_bytes(session, "flash") >= 4 * MIB
        for n, loss in enumerate(losses, start=1):
            weight.grad = None
            loss.backward()
            once = (weight * n).detach() * n
            assert same_bits(weight.grad, once + once)
