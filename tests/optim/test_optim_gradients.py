"""Gradients beyond their budget wait on flash: the same bits, and no needless byte."""

import errno
import gc
import itertools
import os
import time
import weakref
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager, suppress

import numpy as np
import pytest
import torch
from optim_runs import assert_same
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import penstock
from penstock import ChecksumError, ClosedError, ConfigError, PenstockWarning, TransferError
from penstock.core.errors import SourceChangedError
from penstock.io.pages import forget_contents, is_untouched, whole_pages
from penstock.io.threads import Syscalls, ThreadEngine
from penstock.optim import FlashAdamW, FlashSGD, gradient_spill, gradients, on_flash
from penstock.optim.gradient_spill import GradientSpill, LeftMemory
from penstock.optim.offloaded_gradient import OffloadedGradient
from penstock.testing.faults import Fail, FaultySyscalls, GatedSyscalls
from penstock.testing.shared_engine import shared_engine_replaced


@pytest.fixture(autouse=True)
def none_is_too_short(monkeypatch):
    monkeypatch.setattr(gradients, "LEAST_BYTES", 0)


@pytest.fixture
def faulty():
    """System calls of the engine of the next optimizer; a test sets ``_every``."""
    calls = FaultySyscalls()
    with shared_engine_replaced(ThreadEngine(syscalls=calls)):
        yield calls


def network(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 130), nn.Tanh(), nn.Linear(130, 30), nn.Linear(30, 5))
    return model.to(dtype)


def backward(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(6, 20, generator=generator).to(dtype)
    (model(inputs).square().mean() * scale).backward()


def land(model):
    """Wait until no gradient is in memory any more that has left it."""
    for grad in (p.grad for p in model.parameters()):
        for ticket in list(grad.place.tickets):
            ticket.written.wait(10)


def held_bytes(model):
    """Bytes of gradients in memory."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(g.nbytes for g in grads if not isinstance(g, OffloadedGradient))


def comes_true(condition):
    """Soon: a thread of the engine may be about to let go of something."""
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
        gc.collect()
    return True


def kept(optimizer):
    return optimizer._penstock.gradients


def gradient_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def train(model, optimizer, *, steps=4, times=1, before_step=lambda _: None):
    for step in range(steps):
        for turn in range(times):
            backward(model, 10 * step + turn)
        before_step(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [0, 6000, "1GiB"])
def test_accumulated_gradients_come_back_to_the_bit(dtype, budget, small):
    ours, theirs = network(dtype), network(dtype)
    # on_flash: bfloat16 weights without a master, as in torch
    a = on_flash(torch.optim.AdamW(ours.parameters()), gradient_memory=budget, **small)
    b = torch.optim.AdamW(theirs.parameters())
    train(ours, a, times=3)
    train(theirs, b, times=3)
    assert_same(ours.parameters(), theirs.parameters())
    assert (kept(a).written > 0) == (budget != "1GiB")
    a.close()


@pytest.mark.parametrize("is_short", [False, True], ids=["enough memory", "little memory"])
def test_each_gradient_is_written_once_in_a_backward_and_read_once_in_a_step(
    small, faulty, monkeypatch, is_short
):
    if is_short:  # every other read ahead has none
        read_ahead, times = GradientSpill.begin_read_ahead, itertools.count()
        monkeypatch.setattr(
            GradientSpill,
            "begin_read_ahead",
            lambda *args: None if next(times) % 2 else read_ahead(*args),
        )
    model = network()
    a = FlashSGD(model.parameters(), lr=0.1, gradient_memory=0, **small)  # no states to move
    backward(model, 0)
    assert kept(a).written == gradient_bytes(model)
    assert all(isinstance(p.grad, OffloadedGradient) for p in model.parameters())
    land(model)
    assert not any(p.grad.is_pinned() for p in model.parameters())  # no need to read for that
    a.step()
    reads = [call for call in faulty.calls if call.op == "read"]
    tiles = a._penstock.tiles
    assert len(reads) == sum(len(tile.pieces) for tile in tiles)
    assert kept(a).written == gradient_bytes(model)
    a.close()


@pytest.mark.parametrize("kind", ["kept", "viewed", "of NumPy", "a storage"])
def test_memory_of_a_gradient_that_others_use_keeps_its_values(kind, small):
    weight = nn.Parameter(torch.zeros(300, 1000))
    values = torch.arange(300_000.0).reshape(300, 1000)
    theirs = []

    def keep(param):
        if kind == "a storage":
            theirs.append(param.grad.untyped_storage())
        else:
            theirs.append(param.grad if kind == "kept" else param.grad[1:])

    if kind == "of NumPy":
        array = np.zeros((300, 1000), np.float32)
        weight.grad = torch.from_numpy(array)
        theirs.append(array)
    else:
        weight.register_post_accumulate_grad_hook(keep)
    with closing(FlashAdamW([weight], gradient_memory=0, **small)):
        for _ in range(2):  # what a gradient has left is looked at again with the next one
            (weight * values).sum().backward()
        land(nn.ParameterList([weight]))
        assert torch.equal(weight.grad, 2 * values)
        first = theirs[0]
        if isinstance(first, torch.UntypedStorage):
            first = torch.empty(0).set_(first).view(300, 1000)
        first = torch.as_tensor(first)
        assert torch.equal(first, values[1:] if kind == "viewed" else values)


class GradientOfForward(torch.autograd.Function):
    """As losses that compute gradients in forward."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(2 * weight.detach())
        return (weight.detach() ** 2).sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0]


def test_a_saved_tensor_that_is_a_gradient_keeps_its_values(small, disk_path):
    """The session holds its storage, and no tensor does."""
    used, other = (nn.Parameter(torch.full((512, 1024), 3.0)) for _ in range(2))
    optimizer = FlashAdamW([used, other], gradient_memory=0, **small)
    session = penstock.offload(policy="all", device_memory="64MiB", flash=disk_path)
    with closing(optimizer), session:
        loss = GradientOfForward.apply(used) + 0
        loss.backward(retain_graph=True)
        (other * 2).sum().backward()
        loss.backward()
        assert torch.equal(used.grad, torch.full_like(used, 12))


def test_pages_of_a_gradient_are_freed_once_nothing_uses_them(monkeypatch):
    gradient = torch.ones(1 << 20)
    pages, part = whole_pages(gradient.data_ptr(), gradient.nbytes), gradient[:5]
    left = LeftMemory()
    left.add(gradient)
    del gradient
    left.free()
    assert part.sum() == 5
    assert not is_untouched(pages)
    weak = weakref.ref(part.untyped_storage())  # by which another thread might use it just then
    del part
    left.free()
    assert weak() is not None
    assert not is_untouched(pages)
    del weak
    found = []

    def forget(range_of_pages):
        forget_contents(range_of_pages)
        found.append(is_untouched(range_of_pages))  # before glibc uses it again

    monkeypatch.setattr(gradient_spill, "forget_contents", forget)
    left.free()
    assert found == [True]
    left.free()
    assert len(found) == 1


@pytest.mark.parametrize(
    "malloc", ["", "MALLOC_MMAP_THRESHOLD_=4294967296", "GLIBC_TUNABLES=glibc.malloc.mmap_max=0"]
)
def test_memory_that_glibc_maps_by_itself_is_not_held(malloc, monkeypatch):
    for name in gradient_spill._MALLOC_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if malloc:
        monkeypatch.setenv(*malloc.split("=", 1))
    gradient = torch.ones(1 << 23)  # 32 MiB
    left = LeftMemory()
    left.add(gradient)
    storage = weakref.ref(gradient.untyped_storage())
    del gradient
    assert (storage() is not None) == bool(malloc)
    left.drop()
    assert storage() is None


def test_a_gradient_that_only_wraps_another_has_no_pages_of_its_own(monkeypatch):
    """A redistributed DTensor's may be one; the address of its storage cannot be had."""
    freed = []
    monkeypatch.setattr(gradient_spill, "forget_contents", freed.append)
    gradient = AsyncCollectiveTensor(torch.ones(1 << 20))
    left = LeftMemory()
    left.add(gradient)
    del gradient
    left.free()
    assert not freed


def test_what_fits_is_not_written_and_takes_no_space(small):
    model = network()
    a = FlashAdamW(model.parameters(), gradient_memory=gradient_bytes(model), **small)
    train(model, a, times=2)
    assert not kept(a).written
    assert kept(a)._spill._tier is None
    a.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("least", [0, 1 << 16])
@pytest.mark.parametrize("memory", [1200, "1MiB"])
def test_gradients_that_wait_are_counted_without_a_look_at_all_others(
    small, monkeypatch, overlap, least, memory
):
    """With 580 parameters that took a sixth of a step."""
    looked = []
    look = gradients.gradient_here
    monkeypatch.setattr(gradients, "gradient_here", lambda p: looked.append(p) or look(p))
    monkeypatch.setattr(gradients, "LEAST_BYTES", least)
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(40)))
    a = FlashAdamW(model.parameters(), gradient_memory=memory, overlap=overlap, **small)
    with closing(a):
        for step in range(3):
            looked.clear()
            backward(model, step)
            a.step()
            a.zero_grad()
            assert bool(kept(a).written) == (memory == 1200 and not least and not overlap)
    assert len(looked) < 20 * 80


def test_gradients_that_were_set_by_hand_count(small):
    model = network()
    a = FlashAdamW(model.parameters(), gradient_memory=gradient_bytes(model) // 2, **small)
    with closing(a):
        for _ in range(2):  # the second step has looked before
            for param in model[0].parameters():
                param.grad = torch.ones_like(param)
            model[0].requires_grad_(False)
            backward(model, 0)
            model[0].requires_grad_(True)
            assert isinstance(model[2].weight.grad, OffloadedGradient)
            a.step()
            a.zero_grad()


def test_the_budget_is_kept_to_and_the_first_gradients_of_a_backward_stay(small):
    model = network()
    budget = 3 * gradient_bytes(model) // 5
    a = FlashAdamW(model.parameters(), gradient_memory=budget, **small)
    backward(model, 0)
    assert 0 < held_bytes(model) <= budget
    written = kept(a).written
    assert not isinstance(model[3].weight.grad, OffloadedGradient)
    backward(model, 1)
    assert kept(a).written == 2 * written
    a.close()


def test_writes_in_flight_stay_within_their_limit(small, monkeypatch):
    """A gradient that is longer than the limit is written alone."""

    class Slow(Syscalls):
        def write(self, *args):
            time.sleep(0.02)
            return super().write(*args)

    limit, tickets, found = 8000, [], []
    monkeypatch.setattr(gradients, "FLYING_BYTES", limit)
    with shared_engine_replaced(ThreadEngine(syscalls=Slow())):
        model = network()
        a = FlashSGD(model.parameters(), lr=0.1, gradient_memory=0, **small)
        write = kept(a)._spill.write

        def noted(param, flat):
            in_flight = sum(each.nbytes for each in tickets if not each.written.done)
            found.append((in_flight + flat.nbytes, flat.nbytes))
            written = write(param, flat)
            tickets.extend(written)
            return written

        monkeypatch.setattr(kept(a)._spill, "write", noted)
        backward(model, 0)
        a.close()
    assert len(found) == 6
    assert all(in_flight <= max(limit, nbytes) for in_flight, nbytes in found)


def test_clipping_needs_no_second_pass_over_flash(small, faulty):
    ours, theirs = network(), network()
    a = FlashSGD(ours.parameters(), lr=0.1, clip_norm=0.02, gradient_memory=0, **small)
    b = torch.optim.SGD(theirs.parameters(), lr=0.1, fused=True)
    for step in range(4):
        backward(ours, step)
        backward(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.02)
        land(ours)
        before = len(faulty.calls)
        a.step()
        pieces = sum(len(tile.pieces) for tile in a._penstock.tiles)
        assert len(faulty.calls) - before == pieces
        b.step()
        assert torch.equal(a._penstock.last_norm, norm)
        a.zero_grad()
        b.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())
    a.close()


@pytest.mark.parametrize("foreach", [None, False])
def test_who_clips_or_looks_at_a_gradient_need_not_know_where_it_is(small, foreach):
    ours, theirs = network(), network()
    a = FlashAdamW(ours.parameters(), gradient_memory=0, **small)
    b = torch.optim.AdamW(theirs.parameters(), fused=True)

    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.02, foreach=foreach)
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)

    train(ours, a, times=2, before_step=clip)
    train(theirs, b, times=2, before_step=clip)
    assert_same(ours.parameters(), theirs.parameters())
    backward(ours, 0)
    backward(theirs, 0)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad + 0, other.grad)
        assert "gradient of parameter" in repr(mine.grad)
    a.zero_grad(set_to_none=False)
    assert not any(p.grad.count_nonzero() for p in ours.parameters())
    a.close()


def test_a_view_of_a_gradient_is_one(small):
    model = network()
    a = FlashAdamW(model.parameters(), gradient_memory=0, **small)
    backward(model, 0)
    grad = model[0].weight.grad
    grad.view(-1)[3] = 7.0
    assert grad[0, 3] == 7.0
    assert grad.norm() == grad.clone().norm()
    backward(model, 1)  # it stays, since that view may be in use
    assert grad.place.real is not None
    a.close()


def test_a_grad_scaler_unscales_what_is_on_flash(small):
    ours, theirs = network(), network()
    a = FlashAdamW(ours.parameters(), gradient_memory=0, **small)
    b = torch.optim.AdamW(theirs.parameters(), fused=True)
    for model, optimizer in ((ours, a), (theirs, b)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            scale = float("inf") if step == 2 else float(scaler.scale(torch.ones(1)))
            backward(model, step, scale)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())
    a.close()


@contextmanager
def half_of_what_is_being_written(small):
    """Yield a model, its optimizer, and what lets the writes of its gradients go on.

    In the block those gradients are halved; then the step must be that of halved ones in memory.
    """
    gate = GatedSyscalls()
    with shared_engine_replaced(ThreadEngine(syscalls=gate)):
        ours, theirs = network(), network()
        a = FlashAdamW(ours.parameters(), gradient_memory=0, **small)
        b = torch.optim.AdamW(theirs.parameters(), fused=True)
        backward(ours, 0)
        gate.wait_for_call()
        yield ours, a, gate.open
        backward(theirs, 0)
        for p in theirs.parameters():
            p.grad.mul_(0.5)
        a.step()  # a warning is an error
        b.step()
        assert_same(ours.parameters(), theirs.parameters())
        a.close()


def wait_for(tickets):
    """Wait until what was written is there, or was found to have changed."""
    for ticket in [*tickets]:
        with suppress(SourceChangedError, CancelledError):
            ticket.written.wait(10)


def test_an_operator_that_has_changed_a_gradient_but_not_returned_harms_no_write(small):
    """What an operator is changing in place is compared, after its write, with what it was before."""
    with half_of_what_is_being_written(small) as (model, _, go_on):
        for p in model.parameters():  # as an operator does before it returns
            p.grad.place.real.mul_(0.5)
        go_on()
        wait_for(each for p in model.parameters() for each in p.grad.place.tickets)


def test_gradients_are_scaled_in_place_while_as_much_as_may_be_is_being_written(small, monkeypatch):
    """So a pipeline's stage does when its last backward has ended."""
    with half_of_what_is_being_written(small) as (model, optimizer, go_on):
        source = kept(optimizer)
        source._writes._limit_bytes = 1
        changed = source.changed

        def written_by_now(place, real):
            go_on()
            wait_for(place.tickets)
            changed(place, real)

        monkeypatch.setattr(source, "changed", written_by_now)
        for p in model.parameters():
            p.grad.mul_(0.5)


def test_a_gradient_that_is_given_up_gives_its_place_up(small):
    model = network()
    a = FlashAdamW(model.parameters(), gradient_memory=0, **small)
    train(model, a, steps=2, times=3)
    assert comes_true(lambda: not kept(a)._spill.held_bytes)
    backward(model, 0)
    assert kept(a)._spill.held_bytes >= gradient_bytes(model)
    land(model)
    model.zero_grad()
    assert not kept(a)._spill.held_bytes
    a.close()


def test_parameters_that_are_thawed_or_added_later(small):
    ours, theirs = network(), network()
    for model in (ours, theirs):
        model[0].weight.requires_grad_(False)
    a = FlashAdamW(list(ours.parameters())[:4], gradient_memory=0, **small)
    b = torch.optim.AdamW(list(theirs.parameters())[:4], fused=True)
    for model, optimizer in ((ours, a), (theirs, b)):
        train(model, optimizer, steps=2)
        optimizer.add_param_group({"params": list(model.parameters())[4:]})
        model[0].weight.requires_grad_(True)
        train(model, optimizer, steps=3, times=2)
    assert_same(ours.parameters(), theirs.parameters())
    a.close()


@pytest.mark.parametrize("settings", [{}, {"accumulation": 3}, {"accumulation": 2, "threads": 2}])
def test_update_in_backward_uses_gradients_up(settings, small):
    ours, theirs = network(), network()
    a = FlashAdamW(
        ours.parameters(), gradient_memory=0, overlap=True, **{**small, "threads": 1, **settings}
    )
    b = torch.optim.AdamW(theirs.parameters(), fused=True)
    times = settings.get("accumulation", 1)
    for step in range(4):
        for turn in range(times):
            backward(ours, 10 * step + turn)
            backward(theirs, 10 * step + turn)
        a._penstock.overlap.updates.wait()
        assert held_bytes(ours) == 0
        with pytest.raises(ConfigError, match=r"is gone: overlap=True.*clip_norm"):
            torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        a.step()
        assert all(p.grad is None for p in ours.parameters())
        b.step()
        b.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())
    assert kept(a).written == 4 * (times - 1) * gradient_bytes(ours)  # never the last sum
    a.close()


def test_an_optimizer_that_is_closed_takes_along_what_stands_for_gradients(small):
    model = network()
    a = FlashAdamW(model.parameters(), gradient_memory=0, overlap=True, **small)
    backward(model, 0)
    a._penstock.overlap.updates.wait()
    other = FlashAdamW(model.parameters(), gradient_memory=0, **small)
    with closing(other), pytest.raises(ConfigError, match="is gone: overlap=True"):
        other.step()
    a.close()
    assert all(p.grad is None for p in model.parameters())
    backward(model, 1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_update_in_backward_clips_by_the_norm_before_though_gradients_are_gone(small):
    ours, theirs = network(), network()
    a = FlashAdamW(ours.parameters(), gradient_memory=0, overlap=True, clip_norm=0.02, **small)
    b = FlashAdamW(theirs.parameters(), overlap=True, clip_norm=0.02, **small)
    for step in range(5):
        for model, optimizer in ((ours, a), (theirs, b)):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(a._penstock.last_norm, b._penstock.last_norm)
    assert_same(ours.parameters(), theirs.parameters())
    a.close()
    b.close()


def test_wear_counts_gradients_before_the_first_step_and_after(small, caplog):
    model = network()
    budget = 3 * gradient_bytes(model) // 5
    settings = {**small, "host_memory": "1GiB", "gradient_memory": budget}
    a = FlashSGD(model.parameters(), lr=0.1, tbw="1GB", planned_steps=10**6, **settings)
    expected = a.wear()
    assert (expected.state_bytes_per_step, expected.gradient_bytes_per_step > 0) == (0, True)
    assert expected.is_beyond
    backward(model, 0)
    assert kept(a).written == expected.gradient_bytes_per_step
    assert a.wear() == expected
    with caplog.at_level("INFO", "penstock.optim"), pytest.warns(PenstockWarning, match="planned"):
        a.step()
    assert "of gradients written in a step" in caplog.text
    a.zero_grad()
    backward(model, 1)
    backward(model, 2)  # accumulated
    a.step()
    assert a.wear().gradient_bytes_per_step == 2 * expected.gradient_bytes_per_step
    a.close()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_wear_with_overlap_counts_the_sums_that_are_not_final(accumulation, small):
    model = network()
    settings = {**small, "gradient_memory": 0, "overlap": True, "accumulation": accumulation}
    a = FlashSGD(model.parameters(), lr=0.1, **settings)
    expected = (accumulation - 1) * gradient_bytes(model)
    assert a.wear().gradient_bytes_per_step == expected
    for turn in range(accumulation):
        backward(model, turn)
    a.step()
    assert a.wear().gradient_bytes_per_step == expected
    a.close()


# -- faults ---------------------------------------------------------------------------------------


def test_a_full_disk_leaves_gradients_in_memory_with_one_warning(small, faulty):
    ours, theirs = network(), network()
    a = FlashSGD(ours.parameters(), lr=0.1, gradient_memory=0, **small)
    b = torch.optim.SGD(theirs.parameters(), lr=0.1, fused=True)
    faulty._every = Fail(errno.ENOSPC)
    with pytest.warns(PenstockWarning, match="wait on flash cannot be written") as told:
        train(ours, a, steps=2, times=2)
    assert len(told) == 1
    faulty._every = None
    train(theirs, b, steps=2, times=2)
    written = kept(a).written
    train(ours, a, steps=2, times=2)  # it is tried again
    train(theirs, b, steps=2, times=2)
    assert kept(a).written > written
    assert_same(ours.parameters(), theirs.parameters())
    a.close()


def test_no_room_for_all_gradients_is_no_error_either(small, monkeypatch):
    model = network()
    a = FlashSGD(model.parameters(), lr=0.1, gradient_memory=0, **small)
    monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda _: 4096)
    with pytest.warns(PenstockWarning, match="stay in memory"):
        backward(model, 0)
    assert not any(isinstance(p.grad, OffloadedGradient) for p in model.parameters())
    a.step()
    a.close()


def test_a_gradient_that_cannot_be_read_is_named_in_step_and_in_backward(small, faulty):
    model = network()
    a = FlashSGD(model.parameters(), lr=0.1, gradient_memory=0, **small)
    backward(model, 0)
    land(model)
    faulty._every = Fail(errno.EIO)
    named = r"read of .* elements \d+ to \d+ of the gradient of parameter \d of group 0"
    with pytest.raises(TransferError, match=named):
        backward(model, 1)
    with pytest.raises(TransferError, match=named):
        a.step()
    with pytest.raises(ClosedError, match="failed in the middle"):
        a.step()
    a.close()


def test_a_gradient_that_changed_on_flash_is_found(small, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VERIFY", "full")
    model = network()
    a = FlashSGD(model.parameters(), lr=0.1, gradient_memory=0, **small)
    backward(model, 0)
    land(model)
    place = model[0].weight.grad.place.tickets[0].place
    piece = place.pieces[0]
    descriptor = os.open(f"/proc/self/fd/{piece.file.fd}", os.O_WRONLY)
    os.pwrite(descriptor, b"?" * 4096, piece.offset_bytes)
    os.close(descriptor)
    with pytest.raises(ChecksumError, match="gradient of parameter"):
        a.step()
    a.close()


def test_an_optimizer_that_is_dropped_takes_its_gradients_along(small):
    model = network()
    a = FlashSGD(model.parameters(), lr=0.1, gradient_memory=0, **small)
    backward(model, 0)
    land(model)
    gone = weakref.ref(kept(a))
    del a
    assert comes_true(lambda: gone() is None)
    with pytest.raises(ClosedError, match="its optimizer is gone"):
        model[0].weight.grad.norm()
    model.zero_grad()
    backward(model, 0)
    assert not isinstance(model[0].weight.grad, OffloadedGradient)
