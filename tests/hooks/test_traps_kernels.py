"""Rules 31 and 32: bytes that change after they were saved, and no version counter tells.

A disk that takes a tensor's bytes at the very moment at which it is given them (``PromptTier``) makes
what would be a race the same in every run.
"""

import mmap
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trap_runs import LARGE, SMALL, TINY, gated, leaf

from offload_runs import (
    GatedTier,
    assert_nothing_held,
    counted,
    gradients,
    kept_storages,
    movable,
    promote_kept,
    read_bytes,
    same_bits,
    wait_for_writes,
    wait_until,
    written_bytes,
)
from penstock.core.errors import InPlaceError, PenstockWarning
from penstock.observe.recorder import Stage
from penstock.runtime import transfers
from penstock.store.wrappers import WrapperTier
from recompute_plans import following, profiled, recomputing


class PromptTier(WrapperTier):
    """Writes what the memory holds when the write begins, however it changes meanwhile."""

    def _write(self, place, address, nbytes, keep_alive, priority):
        copy = mmap.mmap(-1, nbytes)
        memory = np.frombuffer(copy, np.uint8)
        source = (np.ctypeslib.ctypes.c_char * nbytes).from_address(address)
        memory[:] = np.frombuffer(source, np.uint8)
        owners = memory, keep_alive
        return self.inner._write(place, memory.ctypes.data, nbytes, owners, priority)


def rrelu_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.RReLU(), nn.Linear(64, 64))


def under_penstock(session_for, loss, inputs, **settings):
    """The gradients of a loss whose saved tensors all move, and the bytes that came back."""
    with session_for(**{"wrap_tier": PromptTier, "codec": "none"} | settings) as session:
        torch.manual_seed(7)
        result = loss()
        wait_for_writes(session)
        found = gradients(result, inputs)
        return found, read_bytes(session)


def assert_same_as_plain(session_for, loss, inputs, **settings):
    torch.manual_seed(7)
    expected = gradients(loss, inputs)
    found, moved = under_penstock(session_for, loss, inputs, **settings)
    for mine, plain in zip(found, expected, strict=True):
        assert same_bits(mine, plain)
    assert moved > 0


VERIFY = pytest.mark.parametrize("verify", ["off", "sampled", "full"])


# -- rule 31: a kernel fills what was saved before it ran -----------------------------------------


@VERIFY
def test_trap_31_noise_that_a_kernel_fills_after_it_was_saved(session_for, monkeypatch, verify):
    """``rrelu`` in training has its noise saved before its kernel fills it, and with no new version:
    what a pack hook is given holds whatever the memory held. Whoever begins to write it there gets
    wrong gradients in silence: a checksum made when the write is over fits what was read too late.
    """
    monkeypatch.setenv("PENSTOCK_VERIFY", verify)
    model, x = rrelu_net(), leaf(256, 64).detach()
    assert_same_as_plain(session_for, lambda: model(x).square().mean(), [*model.parameters()])


def test_trap_31_noise_that_is_saved_last(session_for):
    """Nothing is saved after it: it is complete when its module has returned."""
    x = leaf(256, 64)
    assert_same_as_plain(session_for, lambda: nn.RReLU()(x * 2).sum(), [x])


def test_trap_31_what_is_complete_goes_when_its_module_returns(session_for):
    """It does not wait for somebody to save something else."""
    x = leaf(256, 64)
    with session_for(codec="none") as session:
        result = nn.RReLU()(x * 2)
        both = 2 * x.nbytes  # the input, and the noise
        wait_until(lambda: written_bytes(session) >= both, "noise and input are on flash")
        result.sum().backward()


def test_trap_31_a_small_part_of_a_storage_that_a_kernel_fills(session_for):
    """A view under an eighth of its storage is copied out, and not before the kernel has filled it."""
    x = leaf(LARGE)

    def loss():
        noise = torch.zeros(16 * LARGE)[:LARGE]
        return torch.ops.aten.rrelu_with_noise(x * 2, noise, 0.1, 0.9, True).square().sum()

    assert_same_as_plain(session_for, loss, [x])


@pytest.mark.parametrize("size", [SMALL, TINY])
def test_trap_31_a_smaller_part_that_stays(session_for, size):
    """The same below the floor, where the copy stays in memory."""
    x = leaf(size)

    def loss():
        noise = torch.zeros(16 * LARGE)[:size]
        y = torch.ops.aten.rrelu_with_noise(x * 2, noise, 0.1, 0.9, True)
        big = leaf(LARGE) * 2
        return y.square().sum() + big.square().sum()

    assert_same_as_plain(session_for, loss, [x])


def test_trap_31_running_statistics_that_a_kernel_updates(session_for):
    """``instance_norm`` saves copies of running statistics that its kernel then updates."""
    x = leaf(2, LARGE, 4)
    mean, var = torch.zeros(LARGE), torch.ones(LARGE)

    def loss():
        return F.instance_norm(x, mean.clone(), var.clone(), use_input_stats=True).square().sum()

    assert_same_as_plain(session_for, loss, [x])


def test_trap_31_room_is_not_made_by_what_is_being_filled(session_for):
    """An operator that saves two tensors may need room for the second: the first does not go yet."""
    x = leaf(64, LARGE)
    nbytes = x.nbytes
    settings = {"device_memory": 5 * nbytes, "policy": "keep", "flash_capacity": "64MiB"}

    def loss():
        total = 0
        for _ in range(6):
            total = total + F.rrelu(x * 2, training=True).square().sum()
        return total

    assert_same_as_plain(session_for, loss, [x], **settings)


class Noisy(nn.Module):
    """A block that saves noise, in its middle or as the last that it does."""

    def __init__(self, *, last):
        super().__init__()
        after = () if last else (nn.Linear(64, 64), nn.GELU())
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.RReLU(), *after)

    def forward(self, features):
        return self.layers(features)


@pytest.mark.parametrize("last", [False, True])
def test_trap_31_a_block_that_is_recomputed(session_for, disk_path, last):
    """What is computed a second time is compared with what was dropped, and not with unfilled memory.
    Nor does it end in the hook that packs the last tensor, before the kernel has filled that: torch's
    own ``checkpoint`` does, and its gradients are wrong there without us, too.
    """

    def build():
        torch.manual_seed(0)
        return nn.Sequential(Noisy(last=last), Noisy(last=last), nn.Linear(64, 64))

    def train(model):
        torch.manual_seed(7)
        x, found = torch.randn(256, 64), []
        for n in range(3):
            junk = [torch.full((256, 64), 1e30 + n) for _ in range(4)]
            del junk
            found += gradients(model(x).square().mean(), [*model.parameters()])
        return found

    expected = train(build())
    model = build()
    plan, profile = profiled(session_for, model, lambda: train(model))
    model = build()
    plan = recomputing(plan, profile, "Sequential.1")
    with following(disk_path, plan, model) as session:
        found = train(model)
        assert session.recorder.snapshot().flow(Stage.RECOMPUTE, "").count > 0
    for mine, plain in zip(found, expected, strict=True):
        assert same_bits(mine, plain)


# -- rule 32: parts of a storage with version counters of their own -------------------------------


def chunks_loss(weight, dim):
    total = 0
    for i in range(4):
        a, b, c, d = (weight * (0.1 + i / 10)).unsafe_chunk(4, dim)
        a, b, c, d = a.sigmoid_(), b.sigmoid_(), c.tanh_(), d.sigmoid_()
        total = total + (a * b).sum() + (c * d).sum()
    return total


class Chunks(nn.Module):
    """The parts are gone when it returns, and so somebody can tell that nothing changes them."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, weight):
        return chunks_loss(weight, self.dim)


@VERIFY
@pytest.mark.parametrize("dim", [0, 1])
def test_trap_32_parts_with_counters_of_their_own(session_for, monkeypatch, verify, dim):
    """``unsafe_chunk`` gives parts that share a storage and not a version counter. One is saved, its
    neighbour is changed in place, and no counter of the saved one says so.
    """
    monkeypatch.setenv("PENSTOCK_VERIFY", verify)
    weight = leaf(256, 256)
    assert_same_as_plain(session_for, lambda: Chunks(dim)(weight), [weight])


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("codec", ["none", "auto"])
def test_trap_32_recurrent_cells(session_for, kind, codec):
    """They split their gates by ``unsafe_chunk``, and work in place in each."""
    torch.manual_seed(0)
    cell, x = kind(64, 64), leaf(6, 128, 64).detach()

    def loss():
        state = None
        for each in x:
            state = cell(each, state)
        return (state[0] if isinstance(state, tuple) else state).square().mean()

    assert_same_as_plain(session_for, loss, [*cell.parameters()], codec=codec)


def test_trap_32_a_storage_is_counted_and_written_once(session_for):
    """Four parts of one storage are four handles to it, and not four storages."""
    weight = leaf(256, 256)
    with session_for(wrap_tier=PromptTier, codec="none") as session:
        loss = Chunks(1)(weight)
        wait_for_writes(session)
        assert written_bytes(session) <= 4 * 1.01 * weight.nbytes  # one for each of four turns
        loss.backward()


def test_trap_32_a_part_that_is_changed_after_it_was_saved_raises(session_for):
    """Its own counter is watched, as ever."""
    weight = leaf(256, 256)
    with session_for(codec="none"):
        a, b = (weight * 2).unsafe_chunk(2, 1)
        total = (a * a).sum() + (b * b).sum()
        b.add_(1)
        with pytest.raises(InPlaceError):
            total.backward()


def test_trap_32_a_part_changed_through_what_backward_handed_out(session_for):
    """A later save of the same memory does not make do with bytes that a tier has of before."""
    weight = leaf(256, 256)

    def loss():
        a, b = (weight * 2).unsafe_chunk(2, 1)
        kept = a.exp() * b.exp()
        return kept.sum() * 2 + (a * b).sum()

    assert_same_as_plain(session_for, loss, [weight])


# -- what changes behind autograd's back while it is written --------------------------------------


def settle(session, gate):
    gate.open("write")
    wait_for_writes(session)


def test_memory_that_changes_while_it_is_written_is_no_fault_of_the_device(session_for):
    """A program may change memory through ``.data``, of which no version tells. If that happens during
    the write the tensor stays in memory, with a warning that says so: nobody is sent after sound
    hardware, and backward uses what plain PyTorch uses.
    """
    gates = []

    def gated(tier):
        gates.append(GatedTier(tier, "write"))
        return gates[0]

    weight = leaf(LARGE)
    with session_for(wrap_tier=gated, codec="none") as session:
        y = weight * 2
        loss = (y * y).sum()
        y.data.add_(1)
        del y
        with pytest.warns(PenstockWarning, match="changed while it was written"):
            settle(session, gates[0])
        (found,) = gradients(loss, [weight])
    assert same_bits(found, 2 * 2 * (weight.detach() * 2 + 1))


class UsesUp(torch.autograd.Function):
    """Its backward writes to what it has saved, as oneDNN's LSTM does to its workspace."""

    @staticmethod
    def forward(ctx, x):
        workspace = x * 2
        ctx.save_for_backward(workspace)
        return workspace.sum()

    @staticmethod
    def backward(ctx, grad):
        (workspace,) = ctx.saved_tensors
        result = workspace * grad
        workspace.data.zero_()
        return result


def test_trap_38_memory_that_its_own_backward_changes_during_the_write_is_nobodys_fault(
    session_for,
):
    """The write comes to nothing, without a word: backward had the tensor before it changed."""
    gates = []

    def gated(tier):
        gates.append(GatedTier(tier, "write"))
        return gates[0]

    weight = leaf(LARGE)
    with session_for(wrap_tier=gated, codec="none") as session:
        total = UsesUp.apply(weight)
        (found,) = torch.autograd.grad(total, [weight], retain_graph=True)
        settle(session, gates[0])
        del total
        assert_nothing_held(session)
        assert counted(session, "spill.source_changed") == 0
    assert same_bits(found, weight.detach() * 2)


def test_trap_01_a_write_ends_while_an_operator_is_changing_its_source(session_for, monkeypatch):
    """The bytes differ already, and the new version comes with the operator's end: no fault to report."""
    monkeypatch.setattr(transfers, "EDIT_PATIENCE_S", 60)
    session, gates = gated(session_for, "write", codec="none")
    with session:
        y = leaf(LARGE) * 2
        loss = (y * y).sum()
        assert gates[0].arrived["write"].wait(60)
        y.data.add_(1)  # what the kernel of y.add_(1) does
        opener = threading.Thread(target=gates[0].open, args=("write",))
        opener.start()
        opener.join(0.05)
        torch.autograd.graph.increment_version(y)  # and what follows it
        opener.join()
        wait_until(lambda: not session.inspect().device.writing_bytes, "no write is under way")
        with pytest.raises(InPlaceError):
            loss.backward()
        del loss
        assert counted(session, "spill.source_changed") == 0


@pytest.mark.parametrize("edit", ["data", "numpy"])
@pytest.mark.parametrize(
    ("policy", "held", "seen"),
    [
        ("keep", False, "new"),
        ("keep", True, "new"),
        ("all", True, "new"),
        ("all", False, "saved"),
    ],
)
def test_memory_that_changes_after_it_was_written(session_for, edit, policy, held, seen):
    """The table of docs/faults.md: while the tensor is in memory, whoever holds it, backward uses the
    new values, as plain PyTorch does; once only the tier has it, those that were saved.
    """
    weight = leaf(LARGE)
    with session_for(policy=policy, codec="none") as session:
        y = weight * 2
        loss = (y * y).sum()
        wait_for_writes(session)
        if edit == "data":
            y.data.add_(1)
        else:
            array = y.detach().numpy()
            array += 1
            del array
        if not held:
            del y
        (found,) = gradients(loss, [weight])
    values = weight.detach() * 2 + (1 if seen == "new" else 0)
    assert same_bits(found, 2 * 2 * values)


def test_trap_31_what_the_plan_keeps_is_not_spilled_while_it_is_filled(session_for):
    """Room may have to be made of it after all: it is complete when its operator has returned."""
    x = leaf(256, 64)
    with session_for(policy="keep", device_memory="64MiB") as session:
        for _ in range(3):  # the first one is profiled
            result = F.rrelu(x * 2, training=True).sum()
            kept = kept_storages(session)
            result.backward()
        assert kept, "the plan keeps nothing"
        result = F.rrelu(x * 2, training=True)
        promote_kept(session)
        saved = list(movable(session).values())
        assert [each.complete for each in saved].count(False) == 1, "the noise, and not the input"
        session.hooks.operators_returned()
        assert all(each.complete for each in saved)
        del result


def test_trap_32_a_part_whose_neighbour_changed_after_the_write_is_saved_anew(session_for):
    """What a tier has of a storage is as old as its write, and no version says so."""
    gates = []

    def gated(tier):
        gates.append(GatedTier(tier, "write"))
        return gates[0]

    with session_for(wrap_tier=gated, codec="none") as session:
        first, _ = torch.arange(2.0 * LARGE).unsafe_chunk(2)
        packed = session.hooks.pack(first)
        del first, _
        session.hooks.operators_returned()
        back = session.hooks.unpack(packed)  # while it is written, so that memory and tier have it
        settle(session, gates[0])
        neighbour = torch.empty(0).set_(back.untyped_storage(), LARGE, (LARGE,))
        neighbour.fill_(7)
        again = session.hooks.pack(neighbour)
        del neighbour, back
        wait_for_writes(session)
        assert same_bits(session.hooks.unpack(again), torch.full((LARGE,), 7.0))
        assert again.saved is not packed.saved
        assert same_bits(session.hooks.unpack(packed), torch.arange(1.0 * LARGE))
