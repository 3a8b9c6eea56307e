"""Weights of models on a device rest in host memory: what moves, and what happens where room is short."""

import gc

import pytest
import torch
from gpu_weights_rig import (
    DEPTH,
    DEVICE,
    FLOOR,
    LIMIT,
    WEIGHT_BYTES,
    WIDTH,
    Blocks,
    bits,
    inputs,
    on_device_flash,
    rested_bytes,
    state_of,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import penstock
from penstock.core.errors import ClosedError, NoSpaceError, PenstockWarning
from penstock.core.units import MIB
from penstock.homed import home_of
from penstock.observe.clients import WEIGHTS
from penstock.observe.events import Stage
from penstock.runtime.cuda.link import CudaLink
from penstock.runtime.cuda.mover import CudaMover
from penstock.weights import on_host
from penstock.weights.host_places import HOST_WEIGHTS
from weights_rig import ScriptedEngine, assert_same, shared_engine_replaced

pytestmark = pytest.mark.gpu


class Deep(Blocks):
    """Linear layers of 64 KiB each."""

    def __init__(self):
        super().__init__(lambda: nn.Linear(WIDTH, WIDTH))


def built(device=DEVICE):
    torch.manual_seed(0)
    return Deep().to(device)


def trained(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    seen = []
    for x in inputs(steps):
        loss = model(x).square().mean()
        loss.backward()
        seen.append(bits(loss))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def copied(session, stage, tier=HOST_WEIGHTS):
    """Bytes of weights that were copied between host memory and the device, or moved to a tier."""
    flows = session.summary().flows
    return sum(line.nbytes for line in flows if (line.stage, line.tier) == (stage, tier))


def in_memory(model):
    return [home_of(block.weight).is_in_memory for block in model.blocks]


def test_weights_pass_the_link_alone(tmp_path):
    steps, total = 4, DEPTH * WEIGHT_BYTES
    with shared_engine_replaced(ScriptedEngine()) as engine:
        plain, model = built(), built()
        expected = trained(plain, steps)
        with on_device_flash(model, tmp_path, weights="host") as session:
            assert rested_bytes(model) == total
            found = trained(model, steps)
            assert session._weights.forced == 0
            assert session._weights.account.peak_bytes <= LIMIT
            assert steps * (total - LIMIT) <= copied(session, Stage.COPY_IN) <= 3 * steps * total
            assert (steps - 1) * (total - LIMIT) <= copied(session, Stage.COPY_OUT)
            assert copied(session, Stage.COPY_OUT) <= 2 * steps * total
            assert "rest in host memory" in session._weights.note()
            saved_bytes = session.planner._budgets.host_bytes
            assert saved_bytes == session._stores.capacity_bytes("host") - total
        gc.collect()
        assert not session._mover.lent_bytes
        assert engine.written_bytes == engine.read_bytes == 0
    assert_same([found, state_of(model)], [expected, state_of(plain)])


@pytest.mark.parametrize("flash", [False, True])
def test_auto_lets_them_rest_where_there_is_a_place(flash, tmp_path):
    plain, model = built(), built()
    directory = {"flash": str(tmp_path)} if flash else {}
    with on_device_flash(model, tmp_path, weights="auto", **directory) as session:
        assert session.config.weights == ("flash" if flash else "host")
        assert rested_bytes(model) == DEPTH * WEIGHT_BYTES
        assert_same([trained(model)], [trained(plain)])


def test_what_rests_in_pinned_memory_has_no_other(tmp_path):
    plain, model = built("cpu"), built("cpu")
    own = [StorageWeakRef(block.weight.untyped_storage()) for block in model.blocks]
    with on_device_flash(model, tmp_path, weights="host", device=DEVICE):
        gc.collect()
        assert all(each.expired() for each in own)
        assert_same([trained(model)], [trained(plain.to(DEVICE))])
    assert all(each.is_cpu for each in model.parameters())
    assert_same(state_of(model), state_of(plain))


@pytest.mark.parametrize("is_built_on_flash", [False, True])
def test_where_not_all_fit_nothing_is_moved_and_the_error_says_what_is_needed(
    is_built_on_flash, tmp_path, monkeypatch
):
    monkeypatch.setattr(CudaMover, "free_pinned_bytes", property(lambda _: 3 * WEIGHT_BYTES))
    if is_built_on_flash:
        with penstock.built_on_flash(str(tmp_path), floor=FLOOR):
            model = built("cpu")
    else:
        model = built()
    homes = [home_of(each) for each in model.parameters()]
    needed = DEPTH * WEIGHT_BYTES
    with pytest.raises(NoSpaceError, match=rf"{needed} bytes\).*by at least {needed // 2} bytes"):
        on_device_flash(model, tmp_path, weights="host", device=DEVICE).open()
    assert [home_of(each) for each in model.parameters()] == homes
    assert {each.is_cpu for each in model.parameters()} == {is_built_on_flash}
    assert_same(state_of(model), state_of(built()))


@pytest.mark.parametrize("device", [DEVICE, "cpu"])
def test_those_that_fit_rest_there_and_flash_has_the_others(device, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.runtime.cuda.accelerator.ALL_STAGING_BYTES", 64 * MIB)
    lent = []

    def free(mover):
        return 3 * WEIGHT_BYTES - mover.lent_bytes

    monkeypatch.setattr(CudaMover, "free_pinned_bytes", property(free))
    plain, model = built(), built(device)
    expected = trained(plain)
    options = {"host_memory": "128MiB"} | ({"device": DEVICE} if device == "cpu" else {})
    with (
        shared_engine_replaced(ScriptedEngine()) as engine,
        on_device_flash(model, tmp_path, **options) as session,
    ):
        assert in_memory(model) == [False, True] * 3
        lent.append(session._mover.lent_bytes)
        assert copied(session, Stage.WRITE, WEIGHTS) == 3 * WEIGHT_BYTES
        read = engine.read_bytes
        found = trained(model)
        assert engine.read_bytes > read
        assert copied(session, Stage.COPY_IN) > 0
        assert "192.00 KiB of them in host memory, the others on flash" in session._weights.note()
    assert lent == [3 * WEIGHT_BYTES]
    assert_same([found, state_of(model)], [expected, state_of(plain)])
    assert {each.device.type for each in model.parameters()} == {torch.device(device).type}


def test_a_weight_that_cannot_be_copied_home_stays_and_is_copied_later(tmp_path, monkeypatch):
    copy_out = CudaLink.copy_out
    faults = []

    def failing(*arguments):
        if faults:
            raise faults.pop()
        copy_out(*arguments)

    monkeypatch.setattr(CudaLink, "copy_out", failing)
    model, plain = built(), built()
    for each in (model, plain):
        each.requires_grad_(False)
    with on_device_flash(model, tmp_path, weights="host") as session, torch.no_grad():
        faults.append(RuntimeError("no copy"))
        for block in (*model.blocks, *plain.blocks):
            block.weight.mul_(2)
        assert not faults
        with pytest.warns(PenstockWarning, match="could not be written home.*no copy"):
            session.step()
        assert_same(bits(model(inputs(1)[0])), bits(plain(inputs(1)[0])))
    assert_same(state_of(model), state_of(plain))


def test_what_does_not_fit_the_device_in_the_end_is_taken_by_another_session(tmp_path, monkeypatch):
    model, x = built(), inputs(1)[0]
    expected = [bits(built()(x)), state_of(model)]
    session = on_device_flash(model, tmp_path, weights="host").open()
    with monkeypatch.context() as full:

        def refused(*_):
            raise torch.OutOfMemoryError("full")

        full.setattr(CudaLink, "empty_target", refused)
        with pytest.raises(torch.OutOfMemoryError):
            session.close()
    with pytest.raises(ClosedError, match=r"rests in host memory.*weights='host'"):
        model(x)
    with on_device_flash(model, tmp_path, weights="host"):
        found = bits(model(x))
    assert_same([found, state_of(model)], expected)


def test_what_was_exported_stays_when_the_session_is_over(tmp_path):
    model = built()
    with on_device_flash(model, tmp_path, weights="host"):
        state = on_host(model.state_dict())
    gc.collect()
    assert_same(dict(state), state_of(model))
