"""Weights from safetensors into models, and from models to safetensors."""

import errno
import json
import os

import pytest
import safetensors
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import penstock
from penstock import weights
from penstock.homed import home_of
from penstock.io.threads import ThreadEngine
from penstock.observe.clients import WEIGHTS
from penstock.observe.events import Stage
from penstock.testing.shared_engine import shared_engine_replaced
from penstock.weights import pieces
from penstock.weights.resting import RestingParameter
from penstock.weights.safetensors import header_of, open_source, read_header

FLOOR = 4096


class Net(nn.Module):
    """Weights of odd lengths and several types, tied ones, and buffers."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(301, 33)
        self.layers = nn.ModuleList(nn.Linear(33, 47) for _ in range(3))
        self.conv = nn.Conv2d(8, 24, 3).to(memory_format=torch.channels_last)
        self.large = nn.Linear(128, 64, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.arange(2048), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(3.5))
        self.nothing = nn.Parameter(torch.empty(0, 5))
        self.head = nn.Linear(33, 301, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor([True, False]))
        self.register_buffer("own", torch.ones(3), persistent=False)


@pytest.fixture(autouse=True, params=["long pieces", "short pieces"])
def piece_length(request, monkeypatch):
    if request.param == "short pieces":
        monkeypatch.setattr(pieces, "PIECE_BYTES", 8192)


def source_of(model, path, files):
    """Save a model as others do: in one file, or in several with an index."""
    state = {name: each.detach().contiguous() for name, each in model.state_dict().items()}
    del state["head.weight"]
    if files == 1:
        save_file(state, path / "model.safetensors", metadata={"x": "odd"})
        return path / "model.safetensors"
    names = list(state)
    index = {}
    for number in range(files):
        those = names[number::files]
        save_file({name: state[name] for name in those}, path / f"model-{number}.safetensors")
        index |= dict.fromkeys(those, f"model-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def check_equal(model, expected):
    assert model.state_dict().keys() == expected.state_dict().keys()
    for (name, one), other in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name


@pytest.mark.parametrize("where", ["memory", "home", "meta", "block"])
@pytest.mark.parametrize("files", [1, 3])
def test_weights_are_loaded_wherever_the_model_is(disk_path, where, files):
    expected = Net(1)
    source = source_of(expected, disk_path, files)
    if where == "memory":
        model = Net(2)
        weights.load(model, source)
    elif where == "meta":
        with torch.device("meta"):
            model = Net(2)
        model.own = torch.ones(3)
        weights.load(model, source, directory=disk_path, floor=FLOOR)
    else:
        with penstock.built_on_flash(disk_path, floor=FLOOR):
            model = Net(2)
            if where == "block":
                weights.load(model, source)
        if where == "home":
            weights.load(model, source)
    check_equal(model, expected)
    assert model.head.weight is model.embed.weight
    assert not model.frozen.requires_grad
    large = [each for each in expected.parameters() if each.nbytes >= FLOOR]
    resting = [each for each in model.parameters() if type(each) is RestingParameter]
    assert len(resting) == (0 if where == "memory" else len(large))


@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "40KB", 1])
def test_what_is_saved_is_read_by_the_format_s_own_library_and_here(disk_path, at_home, shard):
    if at_home:
        with penstock.built_on_flash(disk_path, floor=FLOOR):
            model = Net(1)
    else:
        model = Net(1)
    folder = disk_path / "saved"
    weights.save(model, folder, shard=shard)
    names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (shard != "5GB")
    assert len(os.listdir(folder)) == len(names) + index.exists()
    found = {}
    for name in names:
        found |= load_file(folder / name)
        with safetensors.safe_open(folder / name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    expected = {name: each for name, each in model.state_dict().items() if name != "head.weight"}
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype
        assert torch.equal(found[name], each), name
    if index.exists():
        placed = json.loads(index.read_text())["weight_map"]
        assert placed.keys() == expected.keys()
    other = Net(2)
    weights.load(other, folder)
    check_equal(other, model)
    with pytest.raises(penstock.ConfigError, match="already"):
        weights.save(model, folder)


def test_a_model_is_saved_while_a_session_streams_it(disk_path):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with penstock.offload(
        model,
        weights="flash",
        weights_memory="64KiB",
        floor=FLOOR,
        flash=disk_path,
        device_memory="64MiB",
    ):
        model(torch.ones(4, 64)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        weights.save(model, disk_path / "saved")
    check_equal(model, _loaded(disk_path / "saved", model))


def _loaded(folder, like):
    other = nn.Sequential(*(nn.Linear(64, 64) for _ in range(len(like))))
    weights.load(other, folder)
    return other


def test_large_weights_of_whole_pages_begin_at_pages(disk_path):
    weights.save(Net(), disk_path / "saved")
    (file,) = open_source(disk_path / "saved")
    whole = [each for each in file.tensors if each.nbytes and each.nbytes % 4096 == 0]
    assert whole
    assert all(each.begin % 4096 == 0 for each in whole)


def test_other_names_shapes_and_types_are_told_before_anything_is_read(disk_path):
    source = source_of(Net(1), disk_path, 1)
    model = Net(2)
    before = model.embed.weight.clone()
    model.extra = nn.Parameter(torch.ones(2))
    del model.scalar
    model.large = nn.Linear(128, 64)
    model.frozen = nn.Parameter(torch.arange(7), requires_grad=False)
    with pytest.raises(penstock.MismatchError) as caught:
        weights.load(model, source)
    message = str(caught.value)
    assert "missing: extra" in message
    assert "unexpected: scalar" in message
    assert "large.weight (BF16 (64, 128), in the model F32 (64, 128))" in message
    assert "frozen (I64 (2048,), in the model I64 (7,))" in message
    assert torch.equal(model.embed.weight, before)


def test_a_model_on_meta_needs_a_directory_and_its_own_buffers(disk_path):
    source = source_of(Net(1), disk_path, 1)
    with torch.device("meta"):
        model = Net()
    with pytest.raises(penstock.ConfigError, match="buffer own of a Net is on meta"):
        weights.load(model, source, directory=disk_path)
    model.own = torch.ones(3)
    with pytest.raises(penstock.ConfigError, match="frozen is on meta: give the directory"):
        weights.load(model, source, floor=FLOOR)
    weights.load(model, source)  # nothing is as large as the floor
    check_equal(model, Net(1))


class FaultyEngine(ThreadEngine):
    """Fails reads or writes after so many bytes, or flips a bit of what it reads."""

    def __init__(self, op, after=0):
        super().__init__(threads=2)
        self.op = op
        self.left = after

    def submit(self, request):
        if request.op == self.op:
            self.left -= request.nbytes
            if self.left < 0:
                raise penstock.TransferError(
                    errno=errno.EIO, op=self.op, path="x", offset_bytes=0, nbytes=1
                )
        return super().submit(request)


def test_after_a_failure_a_model_on_meta_is_as_it_was(disk_path):
    source = source_of(Net(1), disk_path, 1)
    with torch.device("meta"):
        model = Net()
    model.own = torch.ones(3)
    with (
        shared_engine_replaced(FaultyEngine("read")),
        pytest.raises(penstock.TransferError, match="read"),
    ):
        weights.load(model, source, directory=disk_path, floor=FLOOR)
    assert all(each.is_meta for each in model.parameters())


def test_a_source_that_cannot_be_read_is_said_with_the_weight_and_the_file(disk_path):
    source = source_of(Net(1), disk_path, 1)
    with (
        shared_engine_replaced(FaultyEngine("read")),
        pytest.raises(penstock.TransferError, match=r"weight frozen cannot be read from .*copy"),
    ):
        weights.load(Net(2), source)
    with (
        shared_engine_replaced(FaultyEngine("read")),
        pytest.raises(penstock.TransferError, match=r"weight frozen cannot be read from .*copy"),
    ):
        weights.convert(source, disk_path / "converted")
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        model = Net(1)
    with (
        shared_engine_replaced(FaultyEngine("read")),
        pytest.raises(penstock.TransferError, match=r"weight .* cannot be read from .*again"),
    ):
        weights.save(model, disk_path / "saved")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_load_without_room_is_refused_before_anything_is_read(disk_path, monkeypatch, in_place):
    source = source_of(Net(1), disk_path, 1)
    with torch.device("meta"):
        model = Net()
    model.own = torch.ones(3)
    model.embed.requires_grad_(False)
    large = [each for each in model.parameters() if each.nbytes >= FLOOR]
    if in_place:  # those of which the values begin at a multiple of their type's size
        large = [each for each in large if each.requires_grad or each.nbytes < 8192]
    needed = sum(-(-each.nbytes // 4096) * 4096 for each in large)
    arguments = {"directory": disk_path, "floor": FLOOR, "in_place": in_place}
    monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda _: needed - 1)
    with shared_engine_replaced(FaultyEngine("read")) as engine:
        with pytest.raises(penstock.NoSpaceError) as caught:
            weights.load(model, source, **arguments)
        assert engine.left == 0
    assert f"{needed} bytes" in str(caught.value)
    assert str(disk_path) in str(caught.value)
    assert caught.value.free_bytes == needed - 1
    assert "free some space" in str(caught.value)
    assert all(each.is_meta for each in model.parameters())
    monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda _: needed)
    weights.load(model, source, **arguments)
    check_equal(model, Net(1))


def test_a_save_that_fails_leaves_nothing(disk_path):
    with (
        shared_engine_replaced(FaultyEngine("write", 20_000)),
        pytest.raises(penstock.TransferError, match="write"),
    ):
        weights.save(Net(), disk_path / "saved", shard="20KB")
    assert os.listdir(disk_path / "saved") == []


def test_a_save_without_room_is_refused_before_it_begins(disk_path, monkeypatch):
    monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda _: 10_000)
    with pytest.raises(penstock.NoSpaceError, match="are needed there"):
        weights.save(Net(), disk_path / "saved")
    assert os.listdir(disk_path / "saved") == []


def test_a_bit_that_flipped_at_home_is_found_by_a_save(disk_path):
    with penstock.built_on_flash(disk_path, floor=FLOOR):
        model = Net(1)
    home = home_of(model.large.weight)
    ((file, offset, _),) = home.place.ranges(home.nbytes)
    page = bytearray(os.pread(file.fd, 0, offset))
    memory = home.resting.view(torch.uint8)
    memory[0, 0] ^= 4  # behind the back of the home
    del page
    with pytest.raises(penstock.ChecksumError, match=r"large\.weight|Linear\.weight"):
        weights.save(model, disk_path / "saved")


@pytest.mark.parametrize("cut", [1, 4000])
def test_a_short_file_is_damaged(disk_path, cut):
    source = source_of(Net(1), disk_path, 1)
    os.truncate(source, source.stat().st_size - cut)
    with pytest.raises(penstock.DamagedError, match="values end at"):
        weights.load(Net(2), source)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_an_index_may_have_any_encoding_that_json_has(disk_path, encoding):
    folder = source_of(Net(1), disk_path, 3)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text(encoding="utf-8"), encoding=encoding)
    weights.load(net := Net(2), folder)
    assert torch.equal(net.embed.weight, Net(1).embed.weight)


def test_a_folder_that_is_not_whole_is_damaged(disk_path):
    folder = source_of(Net(1), disk_path, 3)
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["frozen"] = "model-1.safetensors"
    index.write_text(json.dumps(found))
    with pytest.raises(penstock.DamagedError, match="'frozen' is in 'model-1"):
        weights.load(Net(2), folder)
    found["weight_map"]["embed.weight"] = "../model-1.safetensors"
    index.write_text(json.dumps(found))
    with pytest.raises(penstock.DamagedError, match="not one of its folder"):
        weights.load(Net(2), folder)
    found["weight_map"] = {"embed.weight": "model-7.safetensors"}
    index.write_text(json.dumps(found))
    with pytest.raises(penstock.DamagedError, match=r"has no 'model-7.*the folder is incomplete"):
        weights.load(Net(2), folder)
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(penstock.TransferError, match="it is a pipe"):
        weights.load(Net(2), folder)
    (folder / "empty").mkdir()
    with pytest.raises(penstock.ConfigError, match=r"has no model\.safetensors"):
        weights.load(Net(2), folder / "empty")
    with pytest.raises(penstock.ConfigError, match=r"is in .* and in"):
        weights.load(Net(2), [folder / "model-0.safetensors"] * 2)
    with pytest.raises(penstock.TransferError, match=r"No such file or directory$"):
        weights.load(Net(2), folder / "missing" / "missing.safetensors")


@pytest.mark.parametrize("character", ["\0", "\ud800"])
def test_an_index_that_names_what_no_file_can_be_called_is_refused(disk_path, character):
    (disk_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": f"{character}.safetensors"}})
    )
    with pytest.raises(penstock.DamagedError, match="which its index names"):
        weights.load(Net(1), disk_path)
    (disk_path / "offloaded").mkdir()
    (disk_path / "offloaded" / "index.json").write_text(
        json.dumps({character: {"dtype": "float32", "shape": [1]}})
    )
    with pytest.raises(penstock.TransferError, match="no path can have"):
        weights.load(Net(1), disk_path / "offloaded")


VALID = header_of([("a", "F32", (2, 3)), ("b", "U8", (5,))]).rstrip()[8:] + b" "
NUMBERS = st.integers(-1, 40) | st.sampled_from([2**63, 2**64, 10**30])
FACTS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "BF16", "F4", None, 3]),
        "shape": st.lists(NUMBERS, max_size=3) | st.none(),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3) | st.text(max_size=3),
    },
)
HEADERS = (
    st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), FACTS, max_size=3).map(
        lambda made: json.dumps(made).encode()
    )
    | st.binary(max_size=60)
    | st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)).map(
        lambda change: VALID[: change[0]] + bytes([change[1]]) + VALID[change[0] + 1 :]
    )
)


@example(header=b'{"__metadata__": {"shape": null}}', length=None, nbytes=0)
@example(header=b'{"__metadata__": []}', length=None, nbytes=0)
@given(
    header=HEADERS,
    length=st.none() | st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    nbytes=st.integers(0, 40) | st.just(29),
)
def test_a_header_is_read_as_the_format_s_own_library_does_or_refused(
    tmp_path_factory, header, length, nbytes
):
    path = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    announced = len(header) if length is None else length
    path.write_bytes(announced.to_bytes(8, "little") + header + bytes(nbytes))
    try:
        found = read_header(str(path))
    except (penstock.DamagedError, penstock.ConfigError):
        return
    with safetensors.safe_open(path, "np") as opened:  # it is as strict
        assert set(opened.keys()) == {each.name for each in found.tensors}
        for each in found.tensors:
            assert tuple(opened.get_slice(each.name).get_shape()) == each.shape
            assert each.begin + each.nbytes <= found.size_bytes


@given(
    tensors=st.dictionaries(
        st.text(max_size=4).filter(lambda name: name != "__metadata__"),
        st.lists(st.integers(0, 3), max_size=3),
        max_size=4,
    )
)
def test_a_header_that_was_made_here_is_read_by_both(tmp_path_factory, tensors):
    path = tmp_path_factory.getbasetemp() / "made.safetensors"
    try:
        header = header_of((name, "I16", shape) for name, shape in tensors.items())
    except UnicodeEncodeError:
        return
    size = sum(2 * torch.Size(shape).numel() for shape in tensors.values())
    path.write_bytes(header + bytes(size))
    found = {each.name: each.shape for each in read_header(str(path)).tensors}
    assert found == {name: tuple(shape) for name, shape in tensors.items()}
    with safetensors.safe_open(path, "np") as opened:
        assert set(opened.keys()) == set(tensors)


def test_what_is_saved_and_loaded_counts_in_the_open_session_s_traffic(disk_path):
    model = nn.Linear(512, 512)
    with penstock.offload(model, device_memory="1GiB", flash=str(disk_path)) as session:
        weights.save(model, disk_path / "saved")
        written = session.recorder.snapshot().flow(Stage.WRITE, WEIGHTS).nbytes
        weights.load(model, disk_path / "saved")
        read = session.recorder.snapshot().flow(Stage.READ, WEIGHTS).nbytes
    size = sum(each.stat().st_size for each in (disk_path / "saved").glob("*.safetensors"))
    assert size <= written < size + 16384
    assert read >= model.weight.nbytes
