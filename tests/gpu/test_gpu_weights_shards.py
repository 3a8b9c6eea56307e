"""Weights on a device that are spread over ranks without FSDP2, as tensor parallelism makes them."""

import copy
import gc
import io
from contextlib import nullcontext

import pytest
import torch
from gpu_weights_rig import DEVICE, bits, on_device_flash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from penstock.core.errors import ClosedError, ConfigError, InPlaceError
from penstock.homed import home_of
from penstock.observe.clients import WEIGHTS
from penstock.observe.events import Stage
from penstock.optim import FlashAdamW
from penstock.runtime.cuda.link import CudaLink
from penstock.weights import homes
from penstock.weights.host_places import HOST_WEIGHTS
from tensor_parallel_rig import CHANGES, mesh_of_one, parallel
from weights_rig import assert_same

pytestmark = pytest.mark.gpu
WEIGHT_BYTES = 64 * 64 * 4
LIMIT = 3 * WEIGHT_BYTES


@pytest.fixture
def mesh():
    with mesh_of_one(DEVICE) as made:
        yield made


def session_of(model, directory, weights="flash", **options):
    options = {"limit": LIMIT, "floor": "4KiB", **options}
    return on_device_flash(model, directory, weights=weights, **options)


def local(tensor):
    return bits(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def inputs(count):
    random = torch.Generator().manual_seed(1)
    return [torch.randn(4, 64, generator=random).to(DEVICE) for _ in range(count)]


def brought_bytes(session):
    """Bytes of weights that were read from flash, or copied from host memory."""
    totals = session.recorder.snapshot()
    from_flash = totals.flow(Stage.READ, WEIGHTS).nbytes
    return from_flash, totals.flow(Stage.COPY_IN, HOST_WEIGHTS).nbytes


class Words(nn.Module):
    """An embedding of many words, of which few are looked up, and two layers."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(512, 64)
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.down(self.up(self.words(x)).relu())


def words(mesh):
    torch.manual_seed(0)
    ways = {"words": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Words().to(DEVICE), mesh, ways)


@pytest.mark.parametrize("weights", ["flash", "host"])
@pytest.mark.parametrize("way", ["sgd", "foreach", "states"])
def test_training_has_the_same_bits_within_the_limit(mesh, way, weights, tmp_path):
    results = []
    for rests in (False, True):
        model = parallel(mesh)
        if way == "states":
            optimizer = FlashAdamW(
                model.parameters(), lr=1e-2, flash=str(tmp_path), tile=1024, overlap=True
            )
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=way == "foreach")
        with session_of(model, tmp_path, weights) if rests else nullcontext() as session:
            found = []
            for x in inputs(4):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(bits(loss))
            if session is not None:
                streamer = session._weights
                assert streamer.total_bytes == 6 * WEIGHT_BYTES
                assert all(home_of(each) is not None for each in model.parameters())
                brought = brought_bytes(session)[weights == "host"]
                assert brought >= 4 * (6 * WEIGHT_BYTES - LIMIT)
                if way != "foreach":  # which works with all at once
                    assert not streamer.forced
                    assert 0 < streamer.account.peak_bytes <= LIMIT
        if session is not None:
            gc.collect()
            assert not session._mover.lent_bytes
        assert all(home_of(each) is None for each in model.parameters())
        assert {type(each) for each in model.parameters()} == {DTensor}
        assert {type(each._local_tensor) for each in model.parameters()} == {torch.Tensor}
        found.append(bits(model(inputs(1)[0])))
        getattr(optimizer, "close", lambda: None)()
        results.append([*found, *map(local, model.parameters())])
    assert_same(*results)


@pytest.mark.parametrize("weights", ["flash", "host"])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_shard_is_noticed(mesh, tmp_path, change, weights):
    """Weights that do not fit leave device memory after each change, and come back with it."""
    plain, model = parallel(mesh), parallel(mesh)
    with session_of(model, tmp_path, weights):
        for x in inputs(2):
            for one in (plain, model):
                one(x).square().mean().backward()
                with torch.no_grad():
                    for layer in one:
                        change(layer.weight)
        after = [bits(each.full_tensor()) for each in model.parameters()]
    assert_same(after, [bits(each.full_tensor()) for each in plain.parameters()])
    assert_same(list(map(local, model.parameters())), list(map(local, plain.parameters())))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert_same(local(one.grad), local(other.grad))


@pytest.mark.parametrize("weights", ["flash", "host"])
def test_rows_of_an_embedding_come_with_the_whole_part(mesh, tmp_path, weights):
    """Of a few rows a whole embedding is read from its home, but not of a part of one."""
    results = []
    for rests in (False, True):
        model = words(mesh)
        with (
            session_of(model, tmp_path, weights, limit="192KiB") if rests else nullcontext()
        ) as session:
            found = []
            for step in range(3):
                x = torch.tensor([[step, 7, 509]], device=DEVICE)
                loss = model(x).square().mean()
                loss.backward()
                found.append(bits(loss))
            if session is not None:
                assert brought_bytes(session)[weights == "host"] >= 512 * 64 * 4
                assert not session._weights.touches
        results.append([*found, *(local(each.grad) for each in model.parameters())])
    assert_same(*results)


def test_states_and_copies_are_dtensors_with_the_values(mesh, tmp_path):
    model = parallel(mesh)
    expected = [local(each) for each in model.parameters()]
    with session_of(model, tmp_path):
        state = {name: each.cpu() for name, each in model.state_dict().items()}
        copies = copy.deepcopy([*model.parameters()])
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        model[0].load_state_dict({"weight": copies[1].detach()})
        changed = local(model[0].weight)
    file.seek(0)
    loaded = torch.load(file, weights_only=False).values()
    for one, other, saved, wanted in zip(copies, loaded, state.values(), expected, strict=True):
        assert type(one) is type(other) is type(saved) is DTensor
        assert home_of(one) is None
        assert_same([local(each) for each in (one, other, saved)], [wanted] * 3)
    assert_same([changed, local(model[0].weight)], [expected[1]] * 2)


def test_what_somebody_holds_is_not_read_again(mesh, tmp_path):
    model = parallel(mesh)
    with session_of(model, tmp_path):
        held = model[0].weight.to_local()
        before = bits(held)
        for x in inputs(2):
            model(x).square().mean().backward()
        assert_same(bits(held), before)
        with torch.no_grad():
            held.add_(1)
        assert_same(local(model[0].weight), before + 1)
        del held
        for x in inputs(2):
            model(x).square().mean().backward()
        assert_same(bits(model[0].weight.full_tensor()), before + 1)


def test_a_change_before_backward_is_the_error_of_autograd(mesh, tmp_path):
    model = parallel(mesh)
    with session_of(model, tmp_path):
        loss = model(inputs(1)[0]).square().mean()
        with torch.no_grad():
            model[3].weight.add_(1)
        with pytest.raises((InPlaceError, SystemError), match=r"modified by an inplace|NULL"):
            loss.backward()


def test_what_does_not_fit_in_the_end_is_told_and_taken_by_another_session(
    mesh, tmp_path, monkeypatch
):
    model, x = parallel(mesh), inputs(1)[0]
    expected = bits(parallel(mesh)(x))
    session = session_of(model, tmp_path).open()
    with monkeypatch.context() as full:

        def refused(*_):
            raise torch.OutOfMemoryError("full")

        full.setattr(CudaLink, "empty_target", refused)
        with pytest.raises(torch.OutOfMemoryError):
            session.close()
    for touch in (model, lambda _: model.state_dict(), lambda _: model[0].weight.full_tensor()):
        with pytest.raises(ClosedError, match="rests on flash"):
            touch(x)
    with session_of(model, tmp_path):
        assert_same(bits(model(x)), expected)


def test_a_model_on_the_host_is_sharded_on_the_device_before(tmp_path):
    with mesh_of_one("cpu") as mesh:
        model = parallel(mesh)
        with (
            pytest.raises(ConfigError, match=r"parallelize_module.*leave out device="),
            session_of(model, tmp_path, device=DEVICE),
        ):
            pass
        assert all(home_of(each) is None for each in model.parameters())


def test_no_thread_sees_other_strides_than_those_of_the_values(mesh, tmp_path, monkeypatch):
    """An optimizer compares them while another thread may send the weight home."""
    model = words(mesh)
    part, seen, exchange = model.up.weight._local_tensor, [], homes.show
    strides = part.stride()

    def show(parameter, data, kind):
        exchange(parameter, data, kind)
        if parameter is model.up.weight:
            seen.append(part.stride())

    monkeypatch.setattr(homes, "show", show)
    with session_of(model, tmp_path, limit=10 * WEIGHT_BYTES), torch.no_grad():
        for _ in range(2):  # words and the other layer take its room
            model(torch.tensor([1, 2], device=DEVICE))
    assert len(seen) > 2
    assert set(seen) == {strides}
