"""What is saved comes back, bit for bit, or not at all."""

import json
import os
import struct
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from checkpoint_runs import BLOCK, assert_same, small_store, state
from hypothesis import given
from hypothesis import strategies as st

from penstock import (
    CheckpointError,
    ConfigError,
    DamagedError,
    MismatchError,
    TransferError,
    checkpoint,
)
from penstock.checkpoint import api, regions, tensors, values
from penstock.checkpoint.disk import Directory, Disk, lock
from penstock.checkpoint.values import DTYPES
from penstock.core.errors import BudgetError
from penstock.core.units import MIB
from penstock.io.prefault import Prefault
from penstock.store.account import host_account
from penstock.store.arena import Arena

STORE = small_store()


def files_of(path):
    return sorted(path.glob("*.safetensors"))


def test_devices_are_waited_for_before_other_threads_copy_from_them(disk_path, monkeypatch):
    """The streams of those threads come after nothing that the calling thread has told the device."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    devices = [torch.device("cpu"), *[torch.device("cuda", index) for index in (1, 0, 1)]]
    regions.await_devices(devices)
    assert sorted(waited, key=str) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    asked = []
    monkeypatch.setattr(tensors, "await_devices", asked.extend)
    STORE.save(disk_path / "a", {"x": torch.ones(8)})
    assert asked == [torch.device("cpu")]


def test_everything_comes_back_and_shared_memory_is_shared(disk_path):
    saved = state()
    done = STORE.save(disk_path / "a", saved, facts={"step": 3})
    loaded = STORE.load(disk_path / "a")
    assert_same(loaded, saved)
    assert done.written_bytes == done.nbytes
    assert len(files_of(disk_path / "a")) > 1
    model = loaded["model"]
    assert model["tied"] is model["again"]
    model["tied"][3, 2] = 7
    assert model["part"][0, 0] == 7
    stored = sum(each.stat().st_size for each in files_of(disk_path / "a"))
    assert stored < 5 * 9000 * 4  # the table is there once


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_comes_back(dtype, disk_path):
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (6, 16), dtype=torch.uint8)
    saved = {
        "x": raw.view(DTYPES[dtype].dtype),
        "odd": raw[0, :16].clone().view(DTYPES[dtype].dtype)[:1],
    }
    STORE.save(disk_path / "a", saved)
    assert_same(STORE.load(disk_path / "a"), saved)


def test_tensors_in_another_order_keep_their_values_and_strides(disk_path):
    image = torch.randn(5, 3, 40, 17).to(memory_format=torch.channels_last)
    sparse = torch.arange(60_000.0)[::7]
    flipped = torch.randn(70, 90).T
    saved = {"image": image, "sparse": sparse, "flipped": flipped}
    saved["one"] = torch.tensor(5, dtype=torch.int16)
    saved["conj"] = torch.randn(9, dtype=torch.complex64).conj()
    saved["grown"] = torch.randn(4, 1).expand(4, 6)
    STORE.save(disk_path / "a", saved)
    loaded = STORE.load(disk_path / "a")
    assert_same({**loaded, "conj": 0}, {**saved, "conj": 0})
    assert torch.equal(loaded["conj"], saved["conj"])
    assert loaded["image"].stride() == image.stride()
    assert loaded["flipped"].stride() == flipped.stride()
    into = {"image": torch.zeros_like(image), "sparse": torch.zeros(2 * 8572)[::2],
            "flipped": torch.zeros(70, 90).T, "one": torch.tensor(0, dtype=torch.int16),
            "conj": torch.zeros(9, dtype=torch.complex64), "grown": torch.zeros(4, 6)}  # fmt: skip
    STORE.load(disk_path / "a", into)
    assert_same({**into, "conj": 0}, {**saved, "conj": 0})


def test_loading_in_place_keeps_every_memory(disk_path):
    STORE.save(disk_path / "a", state(1))
    into = state(2)
    places = [into["model"][key].data_ptr() for key in ("weight", "tied", "part")]
    assert STORE.load(disk_path / "a", into) is into
    assert_same(into, state(1))
    assert [into["model"][key].data_ptr() for key in ("weight", "tied", "part")] == places


def test_numbers_are_as_many_as_they_were(disk_path):
    """A list of losses has grown by the time it is saved; what has tensors is as it is here."""
    saved = {"run": {"losses": [0.5, 0.25], "best": {3: 0.25}, "at": (1, 2, 3), "w": torch.ones(2)}}
    STORE.save(disk_path / "a", saved)
    into = {"run": {"losses": [], "best": {1: 2.0}, "at": (), "w": torch.zeros(2)}}
    losses, best = into["run"]["losses"], into["run"]["best"]
    assert_same(STORE.load(disk_path / "a", into), saved)
    assert into["run"]["losses"] is losses
    assert into["run"]["best"] is best
    for other in ({"losses": []}, {"w": []}, {"losses": [torch.ones(1)]}):
        with pytest.raises(MismatchError):
            STORE.load(disk_path / "a", {"run": other | {"w": torch.ones(2)} | other})


def model_and_optimizer(seed, width=40):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(30, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 30)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 2])
def test_modules_and_optimizers_are_loaded_into(steps, disk_path):
    model, optimizer = model_and_optimizer(0)
    train(model, optimizer, 3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3}
    STORE.save(disk_path / "a", saved)
    other, its = model_and_optimizer(1)
    train(other, its, steps)
    into = {"model": other, "optimizer": its, "step": 0,
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(its, 10)}  # fmt: skip
    held = {id(v) for s in its.state.values() for v in s.values()}
    STORE.load(disk_path / "a", into)
    assert into["step"] == 3
    for key in ("model", "optimizer", "scheduler"):
        assert_same(dict(into[key].state_dict()), dict(saved[key].state_dict()))
    if steps:
        assert held == {id(v) for s in its.state.values() for v in s.values()}
    torch.manual_seed(7)
    train(model, optimizer, 2)
    torch.manual_seed(7)
    train(other, its, 2)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_another_model_is_refused_and_nothing_changes(disk_path):
    model, optimizer = model_and_optimizer(0)
    train(model, optimizer)
    STORE.save(disk_path / "a", {"model": model, "optimizer": optimizer})
    wider, its = model_and_optimizer(1, width=41)
    train(wider, its)
    before = {key: value.clone() for key, value in wider.state_dict().items()}
    with pytest.raises(
        MismatchError, match=r"model.0.weight is float32 \(41, 30\) here, and float32 \(40, 30\)"
    ):
        STORE.load(disk_path / "a", {"model": wider, "optimizer": its})
    half, _ = model_and_optimizer(1)
    with pytest.raises(MismatchError, match=r"model.0.weight is float64 .* here, and float32"):
        STORE.load(disk_path / "a", {"model": half.double()}, partial=True)
    with pytest.raises(MismatchError, match="optimizer is in the checkpoint, and not here"):
        STORE.load(disk_path / "a", {"model": model})
    with pytest.raises(MismatchError, match="extra is here, and not in the checkpoint"):
        STORE.load(disk_path / "a", {"model": model, "extra": 1}, partial=True)
    fewer = torch.optim.AdamW([model[0].weight])
    with pytest.raises(MismatchError, match=r"groups of \[1\] parameters here, and \[6\]"):
        STORE.load(disk_path / "a", {"optimizer": fewer}, partial=True)
    assert_same(dict(wider.state_dict()), before)


@pytest.mark.parametrize(
    ("value", "what"),
    [(object(), "builtins.object"), ({object()}, "object in a set"), (print, "builtin_function"),
     (torch.qint8, "torch.dtype"), (np.datetime64("2020-01-01"), "datetime64")],
)  # fmt: skip
def test_what_has_no_form_is_refused_by_its_keys(value, what, disk_path):
    with pytest.raises(CheckpointError, match=rf"outer\.0\.inner: .*{what}"):
        STORE.save(disk_path / "a", {"outer": [{"inner": value}]})
    assert os.listdir(disk_path) == []


def test_tensors_without_a_form_are_refused_by_their_keys(disk_path):
    for tensor, what in [
        (torch.eye(3).to_sparse(), "layout"),
        (torch.empty(3, device="meta"), "meta"),
    ]:
        with pytest.raises(CheckpointError, match=f"a.b: .*{what}"):
            STORE.save(disk_path / "a", {"a": {"b": tensor}})
    deep = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(CheckpointError, match="deep"):
        STORE.save(disk_path / "a", deep)


def test_tensors_and_arrays_of_rare_kinds_are_refused_in_words(disk_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes, says torch
        rare = {
            "a quantized tensor of torch.qint8": torch.quantize_per_tensor(
                torch.ones(4), 0.1, 0, torch.qint8
            ),
            "a tensor of layout nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        }
    rare["an array of >f4 of the other byte order"] = np.arange(5, dtype=">f4")
    rare["np.array"] = np.ma.masked_array([1.0])
    for what, value in rare.items():
        with pytest.raises(CheckpointError, match=f"^a.b: .*{what}"):
            STORE.save(disk_path / "a", {"a": {"b": value}})


def test_arrays_of_all_shapes_are_saved_and_loaded_into(disk_path):
    saved = {"backwards": np.arange(10)[::-1], "empty": np.zeros((0, 3)), "no": np.zeros((3, 0, 2))}
    STORE.save(disk_path / "a", saved)
    loaded = STORE.load(disk_path / "a", {key: np.zeros_like(each) for key, each in saved.items()})
    assert_same(loaded, {key: each.copy() for key, each in saved.items()})
    for into in (np.arange(10)[::-1], np.frombuffer(bytes(80), np.int64)):
        with pytest.raises(MismatchError, match=r"backwards is an array .* cannot be loaded into"):
            STORE.load(disk_path / "a", {"backwards": into}, partial=True)


def test_what_has_no_memory_is_not_loaded_into(disk_path):
    """It would look as if it had worked."""
    STORE.save(disk_path / "a", {"model": torch.nn.Linear(3, 3), "x": torch.eye(3)})
    with torch.device("meta"):
        empty = torch.nn.Linear(3, 3)
    with pytest.raises(MismatchError, match=r"model\.weight is on the meta device.*model\.bias"):
        STORE.load(disk_path / "a", {"model": empty}, partial=True)
    with pytest.raises(MismatchError, match=r"x is of layout torch\.sparse_coo"):
        STORE.load(disk_path / "a", {"x": torch.eye(3).to_sparse()}, partial=True)
    with pytest.raises(CheckpointError, match=r"^m\.weight: a lazy module's parameter"):
        STORE.save(disk_path / "b", {"m": torch.nn.LazyLinear(3)})


def test_tied_weights_are_not_given_the_values_of_two(disk_path):
    untied = {"one": torch.ones(5), "other": torch.ones(5), "none": torch.empty(0)}
    weight = torch.nn.Parameter(torch.zeros(5))
    STORE.save(disk_path / "same", untied)
    STORE.load(disk_path / "same", {"one": weight, "other": weight, "none": torch.empty(0)})
    assert weight.sum() == 5
    untied["other"] = -torch.ones(5)
    STORE.save(disk_path / "differ", untied)
    with pytest.raises(CheckpointError, match=r"^one and other are one tensor here, and differ"):
        STORE.load(disk_path / "differ", {"one": weight, "other": weight}, partial=True)


def test_autograd_notices_a_load_between_forward_and_backward(disk_path):
    weight = torch.ones(3, requires_grad=True)
    STORE.save(disk_path / "a", {"w": weight * 2})
    loss = (weight**2).sum()
    STORE.load(disk_path / "a", {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_names_that_are_no_unicode_leave_the_files_readable(disk_path):
    saved = {"a\ud800": torch.ones(3), "a\\ud800": torch.zeros(2)}
    STORE.save(disk_path / "a", saved)
    assert_same(STORE.load(disk_path / "a"), saved)
    safetensors = pytest.importorskip("safetensors.torch")
    found = safetensors.load_file(*files_of(disk_path / "a"))
    assert sorted(found) == ["a\\ud800", "a\\ud800#2"]


def test_tensors_that_overlap_in_another_way_than_in_the_checkpoint_are_refused(disk_path):
    flat = torch.arange(30.0)
    STORE.save(disk_path / "a", {"flat": flat, "part": flat[10:20]})
    with pytest.raises(CheckpointError, match=r"part shares memory .* in another way"):
        STORE.load(disk_path / "a", {"flat": flat, "part": flat[12:22]})


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(plain)
def test_values_go_through_json_exactly(value):
    document = json.loads(json.dumps(values.encode(value, lambda *_: 0), allow_nan=False))
    assert_bits(values.decode(document, int, int), value)


def assert_bits(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, float):
        assert struct.pack(">d", ours) == struct.pack(">d", theirs)
    elif isinstance(ours, dict):
        for pair in zip(ours.items(), theirs.items(), strict=True):
            assert_bits(*pair)
    elif isinstance(ours, list | tuple):
        for pair in zip(ours, theirs, strict=True):
            assert_bits(*pair)
    else:
        assert ours == theirs


def test_numpy_and_torch_scalars_keep_their_kind(disk_path):
    saved = {"a": np.float32(1.5), "b": np.int64(-3), "c": torch.Size([2, 3]), "d": torch.bfloat16,
             "e": torch.device("cpu")}  # fmt: skip
    STORE.save(disk_path / "a", saved)
    assert_same(STORE.load(disk_path / "a"), saved)


@pytest.mark.parametrize("text", ["", "a", "a\0", "\ud800", "\U0001f600"])
def test_strings_of_numpy_keep_every_character(text, disk_path):
    saved = [np.str_(text), np.bytes_(text.encode("utf-8", "surrogatepass"))]
    STORE.save(disk_path / "a", saved)
    found = STORE.load(disk_path / "a")
    assert [type(each) for each in found] == [np.str_, np.bytes_]
    assert found == saved


def test_keys_nest_as_deep_as_values_do(disk_path):
    key = 1
    for _ in range(values.MAX_DEPTH - 1):
        key = (key,)
    STORE.save(disk_path / "a", {key: 1})
    assert STORE.load(disk_path / "a") == {key: 1}
    with pytest.raises(CheckpointError, match="nested more than"):
        STORE.save(disk_path / "b", {(key,): 1})


def test_a_checkpoint_is_replaced_and_nothing_else_is(disk_path):
    STORE.save(disk_path / "a", state(1))
    STORE.save(disk_path / "a", state(2))
    assert_same(STORE.load(disk_path / "a"), state(2))
    assert os.listdir(disk_path) == ["a"]
    (disk_path / "mine").mkdir()
    (disk_path / "mine" / "letters").write_text("dear")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        STORE.save(disk_path / "mine", state(1))
    (disk_path / "link").symlink_to("a")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        STORE.save(disk_path / "link", state(1))
    with pytest.raises(CheckpointError, match="make it first"):
        STORE.save(disk_path / "no" / "where", state(1))
    with pytest.raises(CheckpointError, match="missing"):
        STORE.load(disk_path / "b")


def test_an_empty_directory_gives_way_and_one_that_was_filled_meanwhile_does_not(
    disk_path, monkeypatch
):
    (disk_path / "a").mkdir()
    store = small_store()
    store.save(disk_path / "a", state(1))
    assert_same(store.load(disk_path / "a"), state(1))
    (disk_path / "b").mkdir()
    sync_file = Disk.sync_file

    def filled(disk, directory, name):
        (disk_path / "b" / "theirs").write_text("x")
        sync_file(disk, directory, name)

    monkeypatch.setattr(Disk, "sync_file", filled)
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        store.save(disk_path / "b", state(1))
    assert (disk_path / "b" / "theirs").read_text() == "x"
    assert sorted(os.listdir(disk_path)) == ["a", "b"]


def test_two_writers_are_refused_and_a_dead_ones_leftover_is_removed(disk_path):
    hidden = disk_path / ".a.saving"
    hidden.mkdir()
    (hidden / "data-00000.safetensors").write_bytes(b"half")
    with Directory(os.open(hidden, os.O_RDONLY), str(hidden)) as held:
        assert lock(held)
        with pytest.raises(ConfigError, match="is saving to"):
            STORE.save(disk_path / "a", state(1))
        assert (hidden / "data-00000.safetensors").read_bytes() == b"half"
    STORE.save(disk_path / "a", state(1))
    assert os.listdir(disk_path) == ["a"]
    assert_same(STORE.load(disk_path / "a"), state(1))


def test_a_writer_that_has_just_finished_makes_room(disk_path):
    """The hidden directory was there when this one wanted to make it, and then was gone."""

    class Late(Disk):
        def make_directory(self, parent, name):
            made = super().make_directory(parent, name)
            if len(seen) == 0:
                os.rmdir(disk_path / name)
            seen.append(made)
            return made

    seen = []
    (disk_path / ".a.saving").mkdir()
    small_store(disk=Late()).save(disk_path / "a", state(1))
    assert seen == [False, True]
    assert_same(STORE.load(disk_path / "a"), state(1))


def test_a_directory_that_got_its_name_just_before_it_was_locked_is_not_written_to(disk_path):
    """Its writer has finished: this one must not write into a checkpoint that is there."""

    class Late(Disk):
        def open_in(self, parent, name):
            opened = super().open_in(parent, name)
            if not seen:
                (disk_path / name).rename(disk_path / "theirs")
            seen.append(name)
            return opened

    seen = []
    (disk_path / ".a.saving").mkdir()
    small_store(disk=Late()).save(disk_path / "a", state(1))
    assert len(seen) > 1
    assert os.listdir(disk_path / "theirs") == []
    assert_same(STORE.load(disk_path / "a"), state(1))


def test_a_file_that_is_longer_than_it_was_written_is_damage(disk_path):
    STORE.save(disk_path / "a", state(1))
    path = files_of(disk_path / "a")[0]
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DamagedError, match="bytes long and was written with"):
        STORE.load(disk_path / "a")


def test_anyone_can_read_the_data_files(disk_path):
    """By the rules of the format, and with its own library where there is one."""
    saved = state(4)
    STORE.save(disk_path / "a", saved)
    found = {}
    for path in files_of(disk_path / "a"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        end = 0
        for name, entry in header.items():
            if name != "__metadata__":
                assert entry["data_offsets"][0] == end  # no gap
                end = entry["data_offsets"][1]
                found[name] = data[8 + length :][slice(*entry["data_offsets"])]
        assert 8 + length + end == len(data)
    assert found["model.weight"] == saved["model"]["weight"].numpy().tobytes()
    assert found["array"] == saved["array"].tobytes()
    safetensors = pytest.importorskip("safetensors.torch")
    for path in files_of(disk_path / "a"):
        for name, tensor in safetensors.load_file(path).items():
            assert bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) == found[name]


def test_every_flipped_bit_is_found_and_named(disk_path):
    STORE.save(disk_path / "a", state(5))
    assert STORE.verify(disk_path / "a").ok
    for path in sorted((disk_path / "a").iterdir()):
        data = path.read_bytes()
        for at in {0, 9, len(data) // 2, len(data) - 1, *range(4096, len(data), BLOCK)}:
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            with pytest.raises(DamagedError, match=path.name) as caught:
                STORE.load(disk_path / "a")
            assert caught.value.path == str(path)
            assert path.name in STORE.verify(disk_path / "a").damage[0]
        for cut in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:cut])
            with pytest.raises(DamagedError, match=path.name):
                STORE.load(disk_path / "a")
        path.unlink()
        with pytest.raises(DamagedError, match=path.name):
            STORE.load(disk_path / "a")
        path.write_bytes(data)
    assert STORE.verify(disk_path / "a").ok


def test_a_load_that_ends_in_the_middle_says_what_it_has_overwritten(disk_path):
    names = [f"t{index}" for index in range(6)]
    saved = {name: torch.full((BLOCK // 4,), 1.0) for name in names}
    small_store(file_bytes=8 * BLOCK).save(disk_path / "a", saved)
    (path,) = files_of(disk_path / "a")
    data = path.read_bytes()
    for at, count in ((len(data) - 1, 6), (3 * BLOCK + 99, 3), (99, 0)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        into = {name: torch.zeros(BLOCK // 4) for name in names}
        with pytest.raises(DamagedError) as caught:
            STORE.load(disk_path / "a", into)
        changed = [name for name in names if into[name].any()]
        assert list(caught.value.overwritten) == changed == names[:count]
        assert f"{count} tensors have been" in str(caught.value) or not count
        assert ("nothing was changed" in str(caught.value)) is (count == 0)
        with pytest.raises(DamagedError) as caught:
            STORE.load(disk_path / "a")
        assert "overwritten" not in str(caught.value)


def test_what_did_not_change_is_known_without_reading_it(disk_path):
    saved = state(6)
    STORE.save(disk_path / "a", saved)
    everything = {each.name for each in STORE.unchanged(disk_path / "a", saved)}
    assert {"model.weight", "optimizer.state.0.exp_avg", "model.tied"} <= everything
    saved["model"]["weight"][0] += 1
    names = {each.name for each in STORE.unchanged(disk_path / "a", saved)}
    assert "model.weight" not in names
    assert "optimizer.state.0.exp_avg" in names
    place = next(p for p in STORE.unchanged(disk_path / "a", saved) if p.name.endswith("exp_avg"))
    with open(place.path, "rb") as file:
        file.seek(place.offset_bytes)
        assert file.read(place.nbytes) == place.tensor.numpy().tobytes()


def test_the_front_door(disk_path):
    done = checkpoint.save(disk_path / "a", state(1))
    assert done.nbytes == checkpoint.verify(disk_path / "a").nbytes
    assert_same(checkpoint.load(disk_path / "a"), state(1))
    assert checkpoint.unchanged(disk_path / "a", state(1))


def test_many_small_parts_share_a_file_and_what_is_frozen_lies_apart(disk_path):
    layers = {f"layer{index}": torch.randn(1 << 19) for index in range(12)}  # 2 MiB each
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(900, 900), "head": torch.nn.Linear(9, 9)})
    model["base"].requires_grad_(False)
    checkpoint.save(disk_path / "flat", layers)
    checkpoint.save(disk_path / "tuned", {"model": model})
    assert len(list((disk_path / "flat").glob("*.safetensors"))) == 1
    assert len(list((disk_path / "tuned").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("codec", [None, "exponent"])
def test_where_new_memory_is_slow_the_blocks_that_there_are_go_round(codec, disk_path, monkeypatch):
    made = []
    allocate = Arena.allocate

    def slow(arena, nbytes):
        made.append(threading.current_thread().name)
        time.sleep(0.02)
        return allocate(arena, nbytes)

    saved = {"x": torch.randn(60 * BLOCK // 4), "y": torch.randn(3 * BLOCK)}
    monkeypatch.setattr(Arena, "allocate", slow)
    STORE.save(disk_path / "a", saved, codec=codec)
    assert made[0] == "MainThread"
    assert len(made) > 1
    assert all(name.startswith("penstock-buffers") for name in made[1:])
    made.clear()
    assert_same(STORE.load(disk_path / "a"), saved)
    assert made[0] == "MainThread"


def test_where_there_is_no_memory_for_another_block_it_is_said(disk_path, monkeypatch):
    allocate = Arena.allocate

    def full(arena, nbytes):
        time.sleep(0.02)
        if threading.current_thread() is not threading.main_thread():
            raise TransferError(errno=12, op="map", path="memory", offset_bytes=0, nbytes=nbytes)
        return allocate(arena, nbytes)

    monkeypatch.setattr(Arena, "allocate", full)
    with pytest.raises(TransferError):
        STORE.save(disk_path / "a", {"x": torch.randn(60 * BLOCK // 4)}, codec="exponent")
    assert os.listdir(disk_path) == []


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("codec", [None, "exponent"])
def test_buffers_are_fewer_where_the_process_has_no_memory_for_all(
    codec, is_slow, disk_path, monkeypatch
):
    memory = host_account()
    before = memory.used_bytes
    saved = {"x": torch.randn(10 * MIB), "y": torch.randn(100)}
    if is_slow:
        monkeypatch.setattr("penstock.checkpoint.streams._DEVICE_BYTES_PER_S", 1e18)
    monkeypatch.setattr(memory, "limit_bytes", before + 7 * MIB)
    blocks = small_store(block_bytes=2 * MIB, file_bytes=8 * MIB)
    blocks.save(disk_path / "a", saved, codec=codec)
    assert_same(blocks.load(disk_path / "a"), saved)
    assert memory.used_bytes == before
    monkeypatch.setattr(memory, "limit_bytes", before + 5 * MIB)
    with pytest.raises(BudgetError, match=r"of the 3 buffers .* memory budget"):
        blocks.save(disk_path / "b", saved, codec=codec)
    assert os.listdir(disk_path) == ["a"]
    with pytest.raises(BudgetError, match="of the 3 buffers that a checkpoint needs"):
        blocks.load(disk_path / "a")
    assert memory.used_bytes == before


def test_new_memory_is_asked_for_ahead_and_no_more_than_is_taken(disk_path, monkeypatch):
    asked = []

    class Noted(Prefault):
        def __init__(self, pages):
            asked.extend(pages)
            super().__init__(pages)

    monkeypatch.setattr(api, "Prefault", Noted)
    sizes = {"large": 65 * MIB, "next": 40 * MIB, "third": 30 * MIB, "small": 1000}
    old = {name: torch.full((size,), 7, dtype=torch.uint8) for name, size in sizes.items()}
    checkpoint.save(disk_path / "a", old)
    new = checkpoint.load(disk_path / "a")
    assert_same(new, old)
    for name in ("large", "next", "third"):
        begin, end = new[name].data_ptr(), new[name].data_ptr() + sizes[name]
        assert any(each.address <= begin and end <= each.address + each.nbytes for each in asked)
    assert sum(each.nbytes for each in asked) == 135 * MIB
    checkpoint.load(disk_path / "a", new)
    assert sum(each.nbytes for each in asked) == 135 * MIB
