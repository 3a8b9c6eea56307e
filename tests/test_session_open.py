"""Sessions without a ``with`` block, as in notebooks: cells run again, lost names, backward too late."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

import penstock
from offload_runs import (
    gradients,
    read_bytes,
    same_bits,
    session_in,
    wait_for_writes,
    written_bytes,
)
from penstock.io.engine import Transfer
from penstock.observe.recorder import Recorder
from penstock.observe.records import read_log
from penstock.runtime.probe import measure
from penstock.store.engine import shared_engine
from penstock.store.flash import FlashTier
from penstock.store.pool import Block


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(256, 256), nn.ReLU())))


def loss_of(net):
    return net(torch.ones(64, 256)).square().mean()


def gradients_of(net):
    return gradients(lambda: loss_of(net), net.parameters())


def offloads(session, net):
    """Whether something of a forward goes to the session's flash."""
    before = written_bytes(session)
    loss = loss_of(net)
    wait_for_writes(session)
    loss.backward()
    return written_bytes(session) > before


@pytest.fixture(autouse=True)
def nothing_left_open():
    yield
    penstock.close()


def test_a_session_is_opened_and_closed_without_a_block(session_for):
    net = network()
    expected = gradients_of(net)
    session = session_for(net).open()
    assert session.open() is session  # the cell that says so, once more
    assert all(map(same_bits, gradients_of(net), expected))
    assert offloads(session, net)
    session.close()
    assert not offloads(session, net)
    with pytest.raises(
        penstock.ClosedError, match=r"cannot be opened again; call penstock\.offload"
    ):
        session.open()


def test_a_cell_that_opens_a_session_can_be_run_again(session_for, tmp_path):
    net = network()
    expected = gradients_of(net)
    sessions = []
    for _ in range(3):
        session = session_for(net, event_log=tmp_path / "events.jsonl")
        sessions.append(session.open())
        assert all(map(same_bits, gradients_of(net), expected))
        session.step()
    assert [offloads(each, net) for each in sessions] == [False, False, True]
    session.close()
    # one log, of the last session alone, though the one before was open when that was made
    kinds = [record["kind"] for record in read_log(tmp_path / "events.jsonl")]
    assert (kinds.count("header"), kinds.count("summary"), kinds[-1]) == (1, 1, "end")


def test_a_session_that_is_not_opened_touches_nothing(session_for, tmp_path):
    log = tmp_path / "events.jsonl"
    log.write_text("of the run before")
    session_for(network(), event_log=log)
    assert log.read_text() == "of the run before"


def test_a_lost_session_stays_open_until_penstock_close(disk_path, small_knobs):
    net = network()
    recorder = session_in(disk_path, net).open().recorder
    gc.collect()
    gradients_of(net)
    packed = recorder.snapshot().flow("pack").count
    assert packed > 0
    penstock.close()
    gradients_of(net)
    assert recorder.snapshot().flow("pack").count == packed
    penstock.close()  # there is none: nothing happens
    with session_in(disk_path, net) as another:
        assert offloads(another, net)


def test_a_block_is_not_replaced_and_replaces_nothing(session_for):
    net = network()
    with session_for(net) as outer:
        with pytest.raises(penstock.HookError, match=r"already open.*or call penstock\.close\(\)"):
            session_for(net).open()
        assert offloads(outer, net)
    opened = session_for(net).open()
    with pytest.raises(penstock.HookError, match=r"already open.*or call penstock\.close\(\)"):
        session_for(net).__enter__()
    assert offloads(opened, net)
    with opened, pytest.raises(penstock.HookError, match="already open"):
        session_for(net).open()  # it is a block like any other by now
    with session_for(net):  # which has closed it
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_block_that_is_interrupted_closes(session_for, error):
    net = network()

    def interrupted():
        loss_of(net)
        raise error

    with pytest.raises(error), session_for(net) as session:
        interrupted()
    with session_for(net) as another:
        assert offloads(another, net)
    assert session.summary().steps == 0


@pytest.mark.parametrize(
    "place",
    [
        "penstock.hooks.modules.register_module_forward_hook",
        "penstock.hooks.observer._tensors_alive",
        "penstock.hooks.attachment.Boundaries.attach",
        "penstock.hooks.attachment.FunctorchGuard.attach",
    ],
)
def test_an_opening_that_is_interrupted_leaves_no_hook(session_for, monkeypatch, place):
    """Its hooks stayed, and took charge of the weights of the next session's model."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    hooks = dict(modules._global_forward_pre_hooks)
    settings = {"weights": "flash", "weights_memory": "2MiB"}
    with monkeypatch.context() as patch:
        patch.setattr(place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            session_for(network(), **settings).open()
    assert modules._global_forward_pre_hooks == hooks
    net = network()
    expected = gradients_of(network())
    with session_for(net, **settings):
        assert all(map(same_bits, gradients_of(net), expected))


def test_only_its_own_thread_closes_a_session(session_for):
    net = network()
    session = session_for(net).open()
    refused = []

    def close_it():
        try:
            penstock.close()
        except penstock.HookError as error:
            refused.append(str(error))

    run_in_thread(close_it)
    assert "opened in thread 'MainThread'" in refused[0]
    assert offloads(session, net)
    session.close()


def test_the_session_of_a_thread_that_has_ended_can_be_closed(session_for):
    net = network()
    run_in_thread(lambda: session_for(net).open())
    penstock.close()
    with session_for(net) as session:
        assert offloads(session, net)


def run_in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


# -- backward after the close ------------------------------------------------------------------------

TOO_LATE = (
    r"cannot restore {} \(64\.00 KiB\) for its backward: the session of this graph is closed.*"
    r"finish backward inside the `with` block, or before close\(\)"
)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="flash"),
        pytest.param({"flash": (), "flash_capacity": None, "host_memory": "16MiB"}, id="host"),
        pytest.param({"codec": "exponent"}, id="encoded"),
        pytest.param({"device_memory": "8MiB"}, id="budget"),
    ],
)
def test_backward_after_the_close_says_what_to_do(session_for, settings):
    net = network()
    session = session_for(net, **settings).open()
    loss = loss_of(net)
    wait_for_writes(session)
    penstock.close()
    with pytest.raises(penstock.ClosedError, match=TOO_LATE.format(r"Sequential\.\d+#0")):
        loss.backward()


def test_backward_after_the_close_of_what_was_kept_is_right(session_for):
    net = network()
    expected = gradients_of(net)
    with session_for(net, policy="keep"):
        loss = loss_of(net)
    assert all(map(same_bits, gradients(loss, net.parameters()), expected))


def test_backward_after_the_close_of_what_was_restored_is_right(session_for):
    weight = torch.arange(16384.0).requires_grad_()
    with session_for() as session:
        loss = (weight * 2).square().sum()
        wait_for_writes(session)
        restored = loss.grad_fn.next_functions[0][0]._saved_self  # its user, who has it still
        assert read_bytes(session) > 0
    loss.backward()
    assert torch.equal(weight.grad, 8 * weight.detach())
    assert torch.equal(restored, 2 * weight)


def test_kept_tensors_read_nothing_ahead_after_the_close(session_for):
    """A backward that begins with what the plan keeps fails at the first one that is gone, by name."""
    net = network()
    with session_for(net, device_memory="160KiB", policy="auto") as session:
        for _ in range(3):
            gradients_of(net)
        assert {decision.action for decision in session.plan.decisions} >= {"keep", "offload"}
        loss = loss_of(net)
        wait_for_writes(session)
        kept = session.plan.need_order[0]
        assert session.plan.lookup(kept).action == "keep"
    with pytest.raises(penstock.ClosedError, match=TOO_LATE.format(r"Sequential\.\d+#0")):
        loss.backward()
    assert net[-2].weight.grad is not None


def test_backward_after_the_close_of_what_is_recomputed_is_right(session_for):
    torch.manual_seed(0)
    net = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(256, 256), nn.GELU())))
    with session_for(net, device_memory="640KiB", policy="recompute") as session:
        expected = [gradients_of(net) for _ in range(4)][-1]
        assert session.summary().recomputed.count > 0
        loss = loss_of(net)
    assert all(map(same_bits, gradients(loss, net.parameters()), expected))


def test_a_measurement_that_is_interrupted_ends_its_transfers_first(disk_path, monkeypatch):
    """Ctrl-C in the opening of a session freed memory that was being moved, and the process crashed."""
    tier = FlashTier(
        [disk_path], capacity_bytes=64 << 20, engine=shared_engine(), recorder=Recorder()
    )
    in_flight = []

    def free(block):
        in_flight.append(len(tier._in_flight))
        freed(block)

    def interrupted(transfer, timeout_s=None):
        raise KeyboardInterrupt

    freed = Block.free
    with monkeypatch.context() as patch:
        patch.setattr(Block, "free", free)
        patch.setattr(Transfer, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure({"flash": tier})
    tier.close()
    assert in_flight == [0]
