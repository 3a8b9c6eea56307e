"""Frozen weights that stay in their safetensors, and are worked with on a device."""

import os

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
    rested_bytes,
    state_of,
)
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from dispatched_rig import assert_clean, dispatched
from penstock import weights
from penstock.core.errors import ChecksumError, ConfigError, NoSpaceError
from penstock.homed import home_of
from penstock.observe.clients import WEIGHTS
from penstock.observe.events import Stage
from penstock.runtime.cuda.mover import CudaMover
from penstock.weights.host_places import HOST_WEIGHTS
from weights_rig import ScriptedEngine, assert_same, shared_engine_replaced

pytestmark = pytest.mark.gpu


class Adapted(nn.Module):
    """Frozen linear layers, each beside two small ones that learn."""

    def __init__(self):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(DEPTH))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(DEPTH))
        self.base.requires_grad_(False)

    def forward(self, x):
        for layer, down, up in zip(self.base, self.down, self.up, strict=True):
            x = F.gelu(layer(x) + up(down(x)))
        return x


def built(seed=0):
    torch.manual_seed(seed)
    return Adapted()


@pytest.fixture(params=["pages", "odd"])
def source(request, tmp_path):
    """A file of the weights, which must not change; in one of the two they begin between pages."""
    if request.param == "pages":
        weights.save(built(), tmp_path / "saved")
    else:
        (tmp_path / "saved").mkdir()
        state = {name: bits(each) for name, each in built().state_dict().items()}
        save_file(state, tmp_path / "saved/model.safetensors", metadata={"x": "odd" * 3})
    path = tmp_path / "saved/model.safetensors"
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before


def in_place(source, *, is_meta=False):
    with torch.device("meta" if is_meta else "cpu"):
        model = built(seed=5)
    weights.load(model, source, in_place=True, floor=FLOOR)
    assert all(is_in_place(model))
    return model


def is_in_place(model):
    homes = [home_of(layer.weight) for layer in model.base]
    return [getattr(home, "is_in_place", False) for home in homes]


def relocated(model, directory, **options):
    return on_device_flash(model, directory, device=DEVICE, **options)


def trained(model):
    """Losses and gradients of some steps, of what learns."""
    learning = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.05)
    seen = []
    for x in inputs():
        loss = model(x).square().mean()
        loss.backward()
        seen += [bits(loss), *(bits(each.grad) for each in learning)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def copied_bytes(session, place):
    """Bytes of weights that were read from files, or copied from host memory."""
    totals = session.recorder.snapshot()
    if place == "host":
        return totals.flow(Stage.COPY_IN, HOST_WEIGHTS).nbytes
    return totals.flow(Stage.READ, WEIGHTS).nbytes


def inferred(model):
    with torch.inference_mode():
        return [bits(model(x)) for x in inputs()]


@pytest.mark.parametrize("is_meta", [False, True])
@pytest.mark.parametrize("run", [trained, inferred])
def test_a_frozen_base_is_read_from_its_file_within_the_limit(run, is_meta, source, tmp_path):
    plain = built().to(DEVICE)
    expected = run(plain)
    with shared_engine_replaced(ScriptedEngine()) as engine:
        model = in_place(source, is_meta=is_meta)
        with relocated(model, tmp_path) as session:
            streamer, written, paths = session._weights, engine.written_bytes, set()
            engine.spoil = lambda request: paths.add(request.file.path)
            assert rested_bytes(model) == DEPTH * WEIGHT_BYTES
            found = run(model)
            assert streamer.account.peak_bytes <= LIMIT
            assert streamer.forced == 0
        assert engine.written_bytes == written
        assert paths == {str(source)}
    assert all(is_in_place(model))
    assert_same([found, state_of(model)], [expected, state_of(plain.to("cpu"))])


@pytest.mark.parametrize("source", ["odd"], indirect=True)
@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda weight: weight.mul_(2), "flash"),
        (lambda weight: weight.mul_(2), "host"),
        (lambda weight: weight.data.mul_(2), "flash"),
        (lambda weight: setattr(weight, "data", weight.data * 2), "flash"),
    ],
    ids=["in place", "in place, host", "by .data", "replaced"],
)
def test_a_weight_that_is_changed_leaves_the_file_as_it_is(change, place, source, tmp_path):
    plain, model = built().to(DEVICE), in_place(source)
    assert all(home_of(layer.weight).place.skew for layer in model.base)
    seen = []
    for each in (plain, model):
        each.base[2].requires_grad_(True)
    for _ in range(2):
        seen.append(trained(plain))
        with torch.no_grad():
            change(plain.base[0].weight)
    for expected in seen:
        with relocated(model, tmp_path, weights=place):
            assert_same(trained(model), expected)
            with torch.no_grad():
                change(model.base[0].weight)
        assert is_in_place(model) == [False, True, False, *[True] * (DEPTH - 3)]
    assert_same(state_of(model), state_of(plain.to("cpu")))


@pytest.mark.parametrize("source", ["odd"], indirect=True)
@pytest.mark.parametrize("place", ["flash", "host"])
def test_what_was_changed_before_the_session_goes_to_the_device(place, source, tmp_path):
    """Somebody still shares the memory of one, in which the change is; the file has not seen it."""
    plain, model = built(), in_place(source)
    for each in (plain, model):
        each.base[1].weight.data.mul_(2)
    shared = model.base[0].weight.detach()
    shared.mul_(2)
    plain.base[0].weight.data.mul_(2)
    expected = inferred(plain.to(DEVICE))
    with relocated(model, tmp_path, weights=place):
        assert_same(inferred(model), expected)
    assert is_in_place(model) == [False, False, *[True] * (DEPTH - 2)]
    assert_same(state_of(model), state_of(plain.to("cpu")))


@pytest.mark.parametrize("source", ["pages"], indirect=True)
def test_a_file_that_was_changed_is_an_error_that_names_weight_and_file(source, tmp_path):
    model = in_place(source)
    with relocated(model, tmp_path), torch.no_grad():
        model(inputs(1)[0])
        os.utime(source, ns=(1, 1))
        with pytest.raises(ChecksumError, match=r"base\.\d\.weight rests in .*model\.safe"):
            model(inputs(1)[0])


def test_a_model_that_accelerate_has_offloaded_is_taken_over(tmp_path):
    """Its index says where in which safetensors each weight is."""
    plain, path = built(), tmp_path / "odd.safetensors"
    state = {name: bits(each) for name, each in plain.state_dict().items()}
    save_file(state, path, metadata={"x": "odd" * 3})
    before = path.read_bytes()
    index = {name: {"safetensors_file": str(path), "weight_name": name} for name in state}
    model = dispatched(built, tmp_path, index=index)
    with relocated(model, tmp_path):
        assert_clean(model)
        assert_same(trained(model), trained(plain.to(DEVICE)))
    assert all(is_in_place(model))
    assert_same(state_of(model), state_of(plain.to("cpu")))
    assert path.read_bytes() == before


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("place", ["flash", "host"])
def test_what_accelerate_has_spread_over_device_memory_and_disk_is_taken_over(
    place, is_frozen, tmp_path
):
    """As ``device_map="auto"`` does; afterwards each weight is on the device or the host, as before."""
    plain = built().to(DEVICE)
    model = dispatched(
        built,
        tmp_path / "offloaded",
        in_memory=("base.2", "base.3", "up"),
        on_device=("base.0", "base.1", "down.0"),
    )
    for each in (model, plain):
        each.base.requires_grad_(not is_frozen)
    with relocated(model, tmp_path, weights=place) as session:
        assert_clean(model)
        assert {each.device.type for each in model.parameters()} == {DEVICE}
        assert rested_bytes(model) == DEPTH * WEIGHT_BYTES
        before = copied_bytes(session, place)
        assert_same(trained(model), trained(plain))
        assert copied_bytes(session, place) - before >= 3 * (DEPTH * WEIGHT_BYTES - LIMIT)
        assert not session._weights.forced
        assert session._weights.account.peak_bytes <= LIMIT
    assert [each.weight.device.type for each in model.base] == [DEVICE] * 2 + ["cpu"] * 4
    assert is_in_place(model)[4:] == [is_frozen] * 2
    assert_same(state_of(model), state_of(plain))


@pytest.mark.parametrize("place", ["flash", "host"])
def test_what_accelerate_itself_has_spread_is_taken_over(place, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    plain, model = built().to(DEVICE), built()
    rows = dict(enumerate((0, 0, "cpu", "cpu", "disk", "disk")))
    places = {f"{kind}.{i}": row for kind in ("base", "down", "up") for i, row in rows.items()}
    accelerate.dispatch_model(model, places, main_device=0, offload_dir=str(tmp_path / "offloaded"))
    assert [each.weight.is_meta for each in model.base] == [False] * 2 + [True] * 4
    x = inputs(1)[0]
    with torch.no_grad():
        assert_same(bits(model(x)), bits(plain(x)))
    with relocated(model, tmp_path, weights=place) as session:
        assert_clean(model)
        assert rested_bytes(model) == DEPTH * WEIGHT_BYTES
        assert_same(trained(model), trained(plain))
        assert copied_bytes(session, place) > 0
    assert [each.weight.device.type for each in model.base] == [DEVICE] * 2 + ["cpu"] * 4
    assert_same(state_of(model), state_of(plain))


def test_a_model_that_accelerate_has_offloaded_rests_in_host_memory(tmp_path):
    """What is trained is read to memory, what is not stays in its files, too; both are pinned."""
    plain, model = built().to(DEVICE), dispatched(built, tmp_path / "offloaded")
    for each in (model, plain):
        each.base[:2].requires_grad_(True)
    with relocated(model, tmp_path, weights="host") as session:
        assert all(home_of(layer.weight).is_in_memory for layer in model.base)
        read = copied_bytes(session, "flash")
        assert_same(trained(model), trained(plain))
        assert copied_bytes(session, "flash") == read
        assert copied_bytes(session, "host") > 0
    assert is_in_place(model) == [False, False, *[True] * (DEPTH - 2)]
    assert_same(state_of(model), state_of(plain))


@pytest.mark.parametrize(
    "elsewhere", [{"in_memory": ("base.0",)}, {"on_device": ("base.0", "base.1")}]
)
def test_where_it_does_not_fit_in_host_memory_nothing_was_taken_over(
    elsewhere, tmp_path, monkeypatch
):
    monkeypatch.setattr(CudaMover, "free_pinned_bytes", property(lambda _: 3 * WEIGHT_BYTES))
    model = dispatched(built, tmp_path / "offloaded", **elsewhere)
    needed = DEPTH * WEIGHT_BYTES
    with pytest.raises(NoSpaceError, match=rf"{needed} bytes\).*by at least {needed // 2} bytes"):
        relocated(model, tmp_path, weights="host").open()
    assert all("_hf_hook" in module.__dict__ for module in model.modules())
    on_device = elsewhere.get("on_device", ())
    kept = [name for name, each in model.named_parameters() if not each.is_meta]
    assert all(name.startswith(on_device) for name in kept)
    assert bool(kept) == bool(on_device)


@pytest.mark.parametrize("place", ["flash", "host"])
def test_without_device_the_error_says_to_give_it(place, tmp_path):
    model = dispatched(built, tmp_path / "offloaded", on_device=("base.0",))
    with (
        pytest.raises(ConfigError, match=r"accelerate has offloaded.*device='cuda:0'"),
        on_device_flash(model, tmp_path, weights=place),
    ):
        pass
    assert all("_hf_hook" in module.__dict__ for module in model.modules())


def test_weights_of_types_that_cannot_rest_there_stay_in_device_memory(tmp_path):
    class Scaled(nn.Module):
        """A weight of whole numbers, as of a quantised layer."""

        def __init__(self):
            super().__init__()
            values = torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8)
            self.weight = nn.Parameter(values, requires_grad=False)
            self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x):
            return self.linear(x) @ self.weight.float()

    def made():
        torch.manual_seed(0)
        return Scaled()

    weights.save(made(), tmp_path / "saved")
    model, plain = made(), made().to(DEVICE)
    model.weight.zero_()
    weights.load(model, tmp_path / "saved", in_place=True, floor=8192)
    assert home_of(model.weight) is not None
    with relocated(model, tmp_path):
        assert rested_bytes(model) == WEIGHT_BYTES
        assert model.weight.device.type == DEVICE
        assert_same(inferred(model), inferred(plain))
    assert_same(state_of(model), state_of(plain.to("cpu")))
