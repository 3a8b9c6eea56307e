"""Models on the host that a session trains on a device, where all of their weights need not fit."""

import errno
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
    bits,
    inputs,
    on_device_flash,
    state_of,
)
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.core.errors import ConfigError, NoSpaceError, PenstockWarning, TransferError
from penstock.homed import home_of
from penstock.optim import FlashAdamW
from penstock.runtime.cuda.mover import CudaMover
from weights_rig import ScriptedEngine, assert_same, shared_engine_replaced

pytestmark = pytest.mark.gpu


class Deep(nn.Module):
    """Linear layers of 64 KiB each, and a norm with small weights and buffers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.norm(x)


def built(on_flash=None):
    torch.manual_seed(0)
    if on_flash is None:
        return Deep()
    with penstock.built_on_flash(str(on_flash), floor=FLOOR):
        return Deep()


def trained(model, optimizer):
    seen = []
    for x in inputs():
        loss = model(x).square().mean()
        loss.backward()
        seen.append(bits(loss))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def flash_adamw(model, directory):
    settings = {"tile": 6144, "overlap": True, "gradient_memory": "64KiB"}
    return FlashAdamW(model.parameters(), lr=1e-2, flash=str(directory), **settings)


def momentum(model, directory):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def relocated(model, directory, **options):
    return on_device_flash(model, directory, device=DEVICE, **options)


def run(model, make, directory):
    optimizer = make(model, directory)
    seen = trained(model, optimizer)
    if make is flash_adamw:
        optimizer.close()
    return seen


def plainly_trained(make, directory):
    model = built().to(DEVICE)
    return [run(model, make, directory), state_of(model)]


@pytest.mark.parametrize(
    ("make", "is_built_on_flash", "place"),
    [
        *(
            (make, is_built, "flash")
            for make in (flash_adamw, momentum)
            for is_built in (True, False)
        ),
        (flash_adamw, True, "host"),
        (momentum, False, "host"),
        (momentum, False, "host, staged"),
    ],
)
def test_it_is_trained_there_and_on_the_host_again_afterwards(
    make, is_built_on_flash, place, tmp_path
):
    expected = plainly_trained(make, tmp_path)
    model = built(tmp_path if is_built_on_flash else None)
    kept = list(model.parameters())
    options = {"weights": place.partition(",")[0]}
    if place == "host, staged":  # there is no room for weights in pinned memory
        options["host_memory"] = "64MiB"
        before = [layer.weight.data_ptr() for layer in model.layers]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    with relocated(model, tmp_path, **options) as session:
        assert torch.cuda.memory_allocated() - allocated < WEIGHT_BYTES
        assert all(each.device.type == DEVICE for each in model.parameters())
        found = run(model, make, tmp_path)
        streamer = session._weights
        assert streamer.total_bytes == DEPTH * WEIGHT_BYTES
        assert streamer.account.peak_bytes <= LIMIT
        assert streamer.forced == 0
    gc.collect()
    assert streamer.account.used_bytes == 0
    for one, other in zip(model.parameters(), kept, strict=True):
        assert one is other
    for each in [*model.parameters(), *model.buffers()]:
        assert each.device.type == "cpu"
    if is_built_on_flash or place == "flash":
        assert all(home_of(layer.weight).is_mapped for layer in model.layers)
    else:
        assert all(type(each) is nn.Parameter for each in model.parameters())
    if place == "host, staged":  # nor was there a copy of any weight
        assert [layer.weight.data_ptr() for layer in model.layers] == before
    assert_same([found, state_of(model)], expected)


def test_sessions_on_the_device_and_on_the_host_follow_each_other(tmp_path):
    plain = built()
    plain.to(DEVICE)
    expected = run(plain, momentum, tmp_path)
    model = built(tmp_path)
    with relocated(model, tmp_path):
        found = run(model, momentum, tmp_path)
    with penstock.offload(
        model, weights="flash", weights_memory=LIMIT, device_memory="64MiB", flash=str(tmp_path)
    ):
        model.eval()
        on_host = bits(model(inputs(1)[0].cpu()))
    plain.to("cpu").eval()
    assert_same(on_host, bits(plain(inputs(1)[0].cpu())))
    plain.to(DEVICE).train()
    model.train()
    expected += run(plain, momentum, tmp_path)
    with relocated(model, tmp_path):
        found += run(model, momentum, tmp_path)
    assert_same([found, state_of(model)], [expected, state_of(plain)])


def test_gradients_go_with_their_weights(tmp_path):
    plain, model = built(), built(tmp_path)
    for each in (plain, model):
        each(inputs(1)[0].cpu()).square().mean().backward()
    plain.to(DEVICE)
    with relocated(model, tmp_path):
        for each in (plain, model):
            each(inputs(1)[0]).square().mean().backward()
    plain.to("cpu")
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad.device.type == "cpu"
        assert_same(bits(one.grad), bits(other.grad))


def failing_write(request):
    if request.op != "write":
        return None
    return TransferError(
        errno=errno.EIO,
        op="write",
        path=request.file.path,
        offset_bytes=request.offset_bytes,
        nbytes=request.nbytes,
    )


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("place", ["flash", "host"])
def test_what_cannot_be_written_home_is_in_host_memory_afterwards_and_named(place, count, tmp_path):
    with shared_engine_replaced(ScriptedEngine()) as engine:
        model = built(tmp_path)
        session = relocated(model, tmp_path, weights=place)
        with session:
            with torch.no_grad():
                for number in range(0, 2 * count, 2):
                    model.layers[number].weight.fill_(0.5)
            offsets = {
                name: home_of(each).host.place.offset_bytes
                for name, each in model.named_parameters()
                if home_of(each) is not None
            }
            engine.fault = failing_write
            with pytest.warns(PenstockWarning, match="cannot be written to") as warned:
                session.close()
        engine.fault = lambda request: None
        [message] = [str(each.message) for each in warned]
        [name] = [each for each in offsets if f"weight {each} " in message]
        assert f"in {str(tmp_path)!r}" in message
        assert f"at offset {offsets[name]} of" in message
        assert "It is an ordinary parameter in memory now, with all of its values" in message
        assert ("; so it is with 1 more" in message) == (count == 2)
        weight = model.layers[0].weight
        assert weight.device.type == "cpu"
        assert home_of(weight) is None
        assert (weight == 0.5).all()
        assert home_of(model.layers[1].weight) is not None


def places_of(model):
    return {each.device.type for each in (*model.parameters(), *model.buffers())}


def test_of_several_models_the_one_that_cannot_be_relocated_is_given_back_alone(
    tmp_path, monkeypatch
):
    first, second, x = built(), built(tmp_path), inputs(1)[0]
    state = state_of(second)
    with relocated(first, tmp_path, weights="host"):
        expected = bits(first(x))
        monkeypatch.setattr(CudaMover, "free_pinned_bytes", property(lambda _: 0))
        with pytest.raises(NoSpaceError, match="raise host_memory"):
            second(x)
        assert places_of(second) == {"cpu"}
        assert_same(state_of(second), state)
        assert places_of(first) == {DEVICE}
        assert_same(bits(first(x)), expected)
    assert places_of(first) == {"cpu"}


def test_a_weight_that_leaves_its_home_is_given_back_too(tmp_path):
    model = built(tmp_path)
    with relocated(model, tmp_path):
        model.layers[0].weight.data = torch.ones(WIDTH, WIDTH, device=DEVICE)
    weight = model.layers[0].weight
    assert weight.device.type == "cpu"
    assert (weight == 1).all()


def test_what_cannot_be_relocated_is_refused_and_nothing_is_moved(tmp_path):
    with pytest.raises(ConfigError, match="none of torch's"):
        penstock.offload(built(), weights="flash", device="gpu", memory="1GiB", flash=str(tmp_path))
    with pytest.raises(ConfigError, match="device is set"):
        penstock.offload(built(), device=DEVICE)


def test_a_model_that_rests_on_the_host_and_is_moved_for_good_is_warned_of(tmp_path):
    model, plain = built(tmp_path), built().to(DEVICE)
    with pytest.warns(
        PenstockWarning, match=r"weight Linear\.weight was moved to cuda:0"
    ) as warned:
        model.to(DEVICE)
    assert len(warned) == 1
    assert all(home_of(each) is None for each in model.parameters())
    assert_same(state_of(model), state_of(plain))
