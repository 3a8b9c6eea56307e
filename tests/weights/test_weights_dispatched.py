"""Models that accelerate has offloaded to disk, as its hooks and folders say."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock
from dispatched_rig import LayerwiseCastingHook, assert_clean, dispatched, write_as_accelerate
from penstock import weights
from penstock.homed import home_of
from penstock.runtime.storage import TensorRef
from penstock.weights.inplace import SourceHome
from weights_rig import (
    FLOOR,
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    assert_same,
    bits,
    built,
    homes_of,
    inputs,
    loss_of,
    on_flash,
    state_of,
)

LIMIT = 3 * WEIGHT_BYTES


class Mixed(Chain):
    """A chain with weights of several types and lengths, and buffers, of which one is not saved."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(WIDTH, 33, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("own", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.last((super().forward(x) * self.scale).bfloat16()).float()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_session_takes_the_model_over(is_frozen, disk_path):
    """What is not trained rests in accelerate's files; the rest is copied, and trained as plain."""
    plain = built(Mixed)
    model = dispatched(Mixed, disk_path / "offloaded")
    before = {each.name: each.stat() for each in os.scandir(disk_path / "offloaded")}
    for each in (model, plain):
        each.layers.requires_grad_(not is_frozen)
    with on_flash(model, disk_path, limit=LIMIT) as session:
        homes = homes_of(session)
        assert len(homes) == 7
        assert sum(isinstance(home, SourceHome) for home in homes.values()) == 6 * is_frozen
        for x in inputs(2):
            for each in (model, plain):
                loss_of(each, x).backward()
                torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1).step()
    assert_clean(model)
    assert_same(state_of(model), state_of(plain))
    after = {each.name: each.stat() for each in os.scandir(disk_path / "offloaded")}
    assert {n: (s.st_mtime_ns, s.st_size) for n, s in after.items()} == {
        n: (s.st_mtime_ns, s.st_size) for n, s in before.items()
    }


@pytest.mark.parametrize("is_in_place", [False, True])
def test_load_takes_the_model_over(is_in_place, disk_path):
    plain, folder = built(Mixed), disk_path / "offloaded"
    model = dispatched(Mixed, folder).requires_grad_(False)
    weights.load(model, folder, directory=disk_path, floor=FLOOR, in_place=is_in_place)
    assert_clean(model)
    assert isinstance(home_of(model.layers[0].weight), SourceHome) == is_in_place
    assert_same(state_of(model), state_of(plain))
    x = inputs(1)[0]
    assert torch.equal(model(x), plain(x))


def test_weights_in_safetensors_under_other_names(disk_path):
    """As transformers leaves weights where they were downloaded to."""
    plain, path = built(Chain), str(disk_path / "x.safetensors")
    save_file({f"old.{name}": each for name, each in plain.state_dict().items()}, path)
    index = {
        name: {"safetensors_file": path, "weight_name": f"old.{name}"}
        for name, _ in plain.named_parameters()
    }
    model = dispatched(Chain, disk_path, index=index).requires_grad_(False)
    with on_flash(model, disk_path, limit=LIMIT):
        x = inputs(1)[0]
        assert torch.equal(model(x), plain(x))


def test_only_some_modules_are_on_disk(disk_path):
    """The others, and their buffers, have their values in memory."""
    plain, folder = built(Mixed), disk_path / "offloaded"
    model = dispatched(Mixed, folder)
    model.last = built(Mixed).last
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(
        json.dumps({name: each for name, each in index.items() if name.startswith("layers")})
    )
    with pytest.raises(penstock.MismatchError, match="missing: scale"):
        weights.load(model, folder, directory=disk_path, floor=FLOOR)
    model.scale = built(Mixed).scale
    weights.load(model, folder, directory=disk_path, floor=FLOOR)
    assert_clean(model)
    assert_same(state_of(model), state_of(plain))


@pytest.mark.parametrize("in_memory", [(), ("layers.0",)])
def test_a_model_within_another_has_its_weights_in_the_files_by_shorter_names(in_memory, disk_path):
    plain = nn.Sequential(built(Mixed))
    model = nn.Sequential(dispatched(Mixed, disk_path / "offloaded", in_memory=in_memory))
    with on_flash(model, disk_path, limit=LIMIT):
        assert_same(bits(model(inputs(1)[0])), bits(plain(inputs(1)[0])))
    assert_same(state_of(model), state_of(plain))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_is_in_host_memory_is_taken_from_there(is_frozen, disk_path):
    """As accelerate keeps it for a device; it has no other memory, and moves to homes."""
    plain = built(Mixed)
    kept = ("layers.0", "layers.3", "scale")
    model = dispatched(Mixed, disk_path / "offloaded", in_memory=kept)
    loader = model._hf_hook.weights_map.dataset
    names = [name for name in plain.state_dict() if name.startswith(kept)]
    assert sorted(loader.state_dict) == sorted(names)
    memory = [TensorRef(loader.state_dict[f"layers.{i}.weight"].untyped_storage()) for i in (0, 3)]
    del loader
    for each in (model, plain):
        each.layers.requires_grad_(not is_frozen)
    with on_flash(model, disk_path, limit=LIMIT) as session:
        homes = homes_of(session)
        assert len(homes) == 7
        assert sum(isinstance(home, SourceHome) for home in homes.values()) == 4 * is_frozen
        assert [each() for each in memory] == [None, None]
        for x in inputs(2):
            for each in (model, plain):
                loss_of(each, x).backward()
                torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1).step()
    assert_clean(model)
    assert_same(state_of(model), state_of(plain))


def test_load_prefers_what_the_folder_has_to_what_is_in_memory(disk_path):
    plain, folder = built(Mixed), disk_path / "offloaded"
    model = dispatched(Mixed, folder, in_memory=("layers.0.", "layers.1."))
    values = model._hf_hook.weights_map.dataset.state_dict
    values["layers.2.weight"] = torch.zeros(WIDTH, WIDTH)
    weights.load(model, folder, directory=disk_path, floor=FLOOR)
    assert_clean(model)
    assert_same(state_of(model), state_of(plain))


def test_values_in_memory_of_another_length_are_told(disk_path):
    model = dispatched(Mixed, disk_path / "offloaded", in_memory=("layers.0",))
    values = model._hf_hook.weights_map.dataset.state_dict
    values["layers.0.weight"] = torch.zeros(2, WIDTH)
    with (
        pytest.raises(penstock.MismatchError, match=r"in memory: layers\.0\.weight"),
        on_flash(model, disk_path, limit=LIMIT),
    ):
        pass
    assert all("_hf_hook" in module.__dict__ for module in model.modules())
    assert model.layers[0].weight.is_meta


def test_what_was_changed_on_a_device_is_not_read_from_an_older_file(disk_path):
    """The folder may have more than is on disk by the map of devices."""
    plain, folder = built(Mixed), disk_path / "offloaded"
    model = dispatched(Mixed, folder)
    model.last = built(Mixed).last
    for each in (model, plain):
        with torch.no_grad():
            each.last.weight.mul_(2)
    with on_flash(model, disk_path, limit=LIMIT):
        pass
    assert_same(state_of(model), state_of(plain))


class Tied(Mixed):
    """The last weight of the chain is its first one, as a head may be its embedding."""

    def __init__(self):
        super().__init__()
        self.tie_weights()

    def tie_weights(self):
        self.layers[-1].weight = self.layers[0].weight


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_was_tied_is_tied_again(is_frozen, disk_path):
    """Accelerate unties it, and its files have it twice; the model can tie it."""
    plain, model = built(Tied), dispatched(Tied, disk_path / "offloaded")
    assert model.layers[-1].weight is not model.layers[0].weight
    for each in (model, plain):
        each.layers.requires_grad_(not is_frozen)
    with on_flash(model, disk_path, limit=LIMIT) as session:
        assert model.layers[-1].weight is model.layers[0].weight
        assert len(homes_of(session)) == 6
        for x in inputs(2):
            for each in (model, plain):
                loss_of(each, x).backward()
                torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1).step()
    assert_same(state_of(model), state_of(plain))


def test_hooks_that_do_more_are_not_removed(disk_path):
    model = dispatched(Chain, disk_path / "offloaded", hook=LayerwiseCastingHook)
    with pytest.raises(penstock.ConfigError, match="the model has a LayerwiseCastingHook"):
        weights.load(model, disk_path / "offloaded", directory=disk_path)
    assert all("_hf_hook" in module.__dict__ for module in model.modules())
    assert all(each.is_meta for each in model.parameters())


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"dtype": "float12"}, penstock.ConfigError, "type 'float12'"),
    ({"shape": [2, 3]}, penstock.DamagedError, "by the index 24"),
    ({"shape": [-1, 64]}, penstock.DamagedError, "has shape"),
    (None, penstock.DamagedError, "has shape None"),
], ids=["type", "length", "shape", "nothing"])  # fmt: skip
def test_an_index_that_lies_is_told(change, error, message, disk_path):
    folder = disk_path / "offloaded"
    write_as_accelerate(built(Chain).state_dict(), folder)
    index = json.loads((folder / "index.json").read_text())
    index["layers.0.weight"] = change and index["layers.0.weight"] | change
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(error, match=message):
        weights.load(built(Chain), folder)
    (folder / "index.json").write_text(json.dumps({"../x": {"dtype": "int8", "shape": [1]}}))
    with pytest.raises(penstock.DamagedError, match="elsewhere"):
        weights.load(built(Chain), folder)


@pytest.mark.filterwarnings("ignore:The following device_map keys")
@pytest.mark.parametrize("way", ["disk_offload", "cpu_offload", "dispatch_model"])
def test_what_accelerate_itself_has_offloaded(way, disk_path):
    accelerate = pytest.importorskip("accelerate")
    plain, model, folder = built(Mixed), built(Mixed), str(disk_path / "offloaded")
    if way == "disk_offload":
        accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    elif way == "cpu_offload":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert all(each.is_meta for each in model.parameters())
    else:
        places = {name: "disk" for name, _ in model.named_children()}
        places |= dict.fromkeys(("scale", "steps", "own"), "cpu")
        accelerate.dispatch_model(
            model, places, main_device="cpu", offload_dir=folder, force_hooks=True
        )
    x = inputs(1)[0]
    loss_of(plain, x).backward()
    expected = plain(x).detach()
    assert torch.equal(model(x), expected)
    with on_flash(model, disk_path, limit=LIMIT):
        assert torch.equal(model(x), expected)
        loss_of(model, x).backward()
    assert_clean(model)
    assert_same(state_of(model), state_of(plain))
