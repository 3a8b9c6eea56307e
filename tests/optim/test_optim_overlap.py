"""Tiles updated while backward goes on: the same bits, and loud errors where that cannot be."""

import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from threading import get_ident, main_thread

import pytest
import torch
from optim_runs import assert_same
from torch import nn

from penstock import ClosedError, ConfigError
from penstock.optim import FlashAdamW
from penstock.optim.config import RING


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 130), nn.Tanh(), nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 5)
    )


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    loss = model(torch.randn(6, 20, generator=generator)).square().mean()
    loss.backward()
    return loss


@pytest.fixture
def both(small):
    """A model with overlap, the same without Penstock, and their optimizers."""
    made = []

    def make(**settings):
        ours, theirs = network(), network()
        a = FlashAdamW(ours.parameters(), lr=1e-2, overlap=True, **{**small, **settings})
        made.append(a)
        return ours, theirs, a, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("settings", [{}, {"host_memory": "1MiB"}, {"threads": 1}])
def test_the_bits_are_torchs_and_tiles_are_updated_before_step(settings, both):
    ours, theirs, a, b = both(**settings)
    for step in range(6):
        before = ours[4].weight.detach().clone()
        assert backward(ours, step) == backward(theirs, step)
        a._penstock.overlap.updates.wait()
        assert not torch.equal(before, ours[4].weight)
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())


def test_the_first_records_of_a_pass_are_read_before_their_gradients_come(both):
    """After a step the buffers hold what was visited last, and the next backward needs that last."""
    ours, _, a, _ = both(threads=1, tile=512)
    a._penstock.overlap.updates.takes_part = False  # or two threads change the order
    pipeline, visits, read = a._penstock.pipeline, [], []
    assert len(a._penstock.tiles) > 2 * pipeline.count
    acquire, start_read = pipeline.acquire, pipeline.store.start_read

    def visited(tile):
        visits.append(tile.index)
        return acquire(tile)

    def reading(tile, *where):
        read.append(tile.index)
        return start_read(tile, *where)

    pipeline.acquire, pipeline.store.start_read = visited, reading
    for step in range(4):
        backward(ours, step)
        first = visits[:RING]  # which other buffers are free by then varies
        a.step()
        a.zero_grad()
        pipeline._settle()
        if step > 1:
            assert set(first) <= {*pipeline._holding}
        visits.clear()
        read.clear()
    backward(ours, 4)
    a.step()
    assert len(read) == len(set(read))


@pytest.mark.parametrize("tile", [256, 512, 1024, 2048])
@pytest.mark.parametrize("host_memory", [0, "80KiB", "1MiB"])
def test_a_step_writes_what_is_told(both, tile, host_memory):
    """Tiles pass through a part of the buffers, and the rest stay."""
    ours, _, a, _ = both(threads=1, tile=tile, host_memory=host_memory)
    a._penstock.overlap.updates.takes_part = False  # or two threads change the order
    store = a._penstock.store
    for step in range(5):
        before = store.written, store.read
        backward(ours, step)
        a.step()
        a.zero_grad()
        a._penstock.pipeline._settle()
    assert store.written - before[0] == store.read - before[1] == a.wear().bytes_per_step


def test_gradients_are_accumulated_first(both):
    ours, theirs, a, b = both(accumulation=3)
    for step in range(3):
        for micro in range(3):
            assert backward(ours, 10 * step + micro) == backward(theirs, 10 * step + micro)
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())


def test_parts_of_the_network_that_took_no_part_are_left_alone(both):
    ours, theirs, a, b = both()
    for step in range(4):
        for model, optimizer in ((ours, a), (theirs, b)):
            x = model[0](torch.ones(1, 20))
            (x if step % 2 else model[1:](x)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())


def test_clipping_is_by_the_norm_of_the_step_before(both):
    ours, theirs, a, b = both(clip_norm=0.01)
    previous = None
    for step in range(4):
        backward(ours, step)
        backward(theirs, step)
        a.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
        torch.nn.utils.clip_grads_with_norm_(
            theirs.parameters(), 0.01, norm if previous is None else previous
        )
        b.step()
        previous = norm
        a.zero_grad()
        b.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())


def test_clipping_without_overlap_is_torchs(small):
    ours, theirs = network(), network()
    a = FlashAdamW(ours.parameters(), clip_norm=0.01, **small)
    b = torch.optim.AdamW(theirs.parameters(), fused=True)
    for step in range(3):
        backward(ours, step)
        backward(theirs, step)
        a.step()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
        b.step()
        a.zero_grad()
        b.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())
    a.close()


def test_a_second_backward_is_an_error_that_says_what_to_do(both):
    ours, _, _, _ = both()
    backward(ours, 0)
    with pytest.raises((ConfigError, RuntimeError), match="accumulation="):
        backward(ours, 1)


def test_gradients_that_are_changed_after_use_are_an_error(both):
    ours, _, a, _ = both()
    backward(ours, 0)
    torch.nn.utils.clip_grad_norm_(ours.parameters(), 1e-3)
    with pytest.raises(ConfigError, match="use clip_norm="):
        a.step()
    with pytest.raises(ClosedError, match="failed in the middle"):
        a.step()


def test_an_option_that_is_changed_after_use_is_an_error(both):
    ours, _, a, _ = both()
    backward(ours, 0)
    a.param_groups[0]["lr"] = 1.0
    with pytest.raises(ConfigError, match="change it after step"):
        a.step()


def test_a_grad_scaler_is_refused(both):
    ours, _, a, _ = both()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ours(torch.ones(1, 20)).sum()).backward()
    with pytest.raises(ConfigError, match="GradScaler"):
        scaler.step(a)


def test_a_grad_scaler_works_without_overlap(small):
    ours, theirs = network(), network()
    a = FlashAdamW(ours.parameters(), **small)
    b = torch.optim.AdamW(theirs.parameters(), fused=True)
    for model, optimizer in ((ours, a), (theirs, b)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            x = torch.full((1, 20), float("inf") if step == 1 else 1.0)
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())
    a.close()


@contextmanager
def busy(optimizer):
    """Keep the only thread that updates tiles from updating any."""
    gate, begun = threading.Event(), threading.Event()
    optimizer._penstock.pool.submit(lambda: begun.set() or gate.wait())
    assert begun.wait(10)
    try:
        yield gate
    finally:
        gate.set()


def test_who_waits_for_updates_makes_them(both):
    ours, theirs, a, b = both(threads=1, tile=512, gradient_memory=0)
    for step in range(3):
        with busy(a):
            assert backward(ours, step) == backward(theirs, step)
            assert not a._penstock.gradients.written
            a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())


def test_an_update_that_fails_in_the_thread_that_waits_is_an_error_of_the_step(both, monkeypatch):
    ours, _, a, _ = both(threads=1, tile=512, gradient_memory=0)

    def fail(tile, step):
        raise OSError("as if")

    monkeypatch.setattr(a._penstock, "update", fail)
    with busy(a):
        backward(ours, 0)
        with pytest.raises(OSError, match="as if"):
            a.step()
        with pytest.raises(ClosedError, match="failed in the middle"):
            a.step()


@pytest.mark.parametrize("moment", ["queued", "update", "done"])
@pytest.mark.parametrize("in_step", [False, True])
def test_after_an_interrupt_of_an_update_the_states_can_be_loaded(
    both, monkeypatch, moment, in_step
):
    settings = {} if in_step else {"gradient_memory": 0}
    ours, theirs, a, b = both(threads=1, tile=512, **settings)
    for model, optimizer in ((ours, a), (theirs, b)):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
    saved = {key: value.clone() for key, value in ours.state_dict().items()}, a.state_dict()
    place, name = {
        "queued": (Future, "cancel"),
        "update": (a._penstock, "update"),
        "done": (Future, "set_result"),
    }[moment]
    function = getattr(place, name)

    with monkeypatch.context() as patched, busy(a) as gate:

        def interrupted(*args):
            found = function(*args)
            if get_ident() == main_thread().ident and not gate.is_set():
                gate.set()  # which the pool's thread waits for
                raise KeyboardInterrupt
            return found

        if in_step:
            backward(ours, 1)
        patched.setattr(place, name, interrupted)
        go_on = a.step if in_step else lambda: backward(ours, 1)
        with pytest.raises(KeyboardInterrupt):
            go_on()
    with pytest.raises(ClosedError, match="failed in the middle"):
        a.step()
    ours.load_state_dict(saved[0])
    a.load_state_dict(saved[1])
    a.zero_grad()
    for step in range(2, 4):
        for model, optimizer in ((ours, a), (theirs, b)):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours.parameters(), theirs.parameters())


def test_closing_waits_for_an_update_in_the_thread_that_waits(both, monkeypatch):
    ours, _, a, _ = both(threads=1, tile=512, gradient_memory=0)
    states, order = a._penstock, []
    begun = threading.Event()
    update, close = states.update, states.store.close

    def slowly(tile, step):
        begun.set()
        closing.join(0.8)
        update(tile, step)
        order.append("updated")

    def closes():
        assert begun.wait(10)
        a.close()

    monkeypatch.setattr(states, "update", slowly)
    monkeypatch.setattr(states.store, "close", lambda: order.append("closed") or close())
    closing = threading.Thread(target=closes)
    closing.start()
    with busy(a) as gate, suppress(ClosedError):
        threading.Timer(0.2, gate.set).start()
        backward(ours, 0)
    closing.join(10)
    assert order[0] == "updated"
    assert order.count("closed") == 1 == len(order) - order.index("closed")
