"""A checkpoint that is encoded on request: fewer bytes, the same bits, and nothing believed."""

import json
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from checkpoint_runs import (
    BLOCK,
    Fuse,
    Stopped,
    assert_same,
    fused_store,
    is_same,
    no_space,
    small_store,
    state,
)

from penstock import (
    CheckpointError,
    ConfigError,
    DamagedError,
    NoSpaceError,
    PenstockWarning,
    checkpoint,
)
from penstock.checkpoint import Checkpointer
from penstock.checkpoint.disk import Disk
from penstock.checkpoint.manifest import CODECS, FRAME_BYTES, Manifest
from penstock.cli import main
from penstock.codec import registry
from penstock.codec.base import Fidelity, read_header
from penstock.core.units import MIB
from penstock.io.threads import ThreadEngine
from penstock.testing.faults import GatedSyscalls

STORE = small_store()
GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint"
SCHEMA = Path(__file__).parents[2] / "docs" / "checkpoint-manifest.schema.json"


def rich(seed=0):
    """Every form that a tensor has in a checkpoint, and some that become much shorter."""
    made = state(seed)
    made["untouched"] = torch.zeros(70_000)
    made["indices"] = torch.arange(50_000) % 9
    made["image"] = torch.randn(5, 3, 40, 17).to(memory_format=torch.channels_last)
    made["half"] = torch.randn(30_001).to(torch.bfloat16)
    made["complex"] = torch.randn(3000, dtype=torch.complex64)
    made["long"] = torch.randn(FRAME_BYTES // 4 + 1234)
    return made


def encoded_in(path):
    document = json.loads((path / "manifest.json").read_bytes())
    return document, {each["name"]: each for each in document["tensors"] if "codec" in each}


def seal(path, document):
    body = {key: value for key, value in document.items() if key != "sum"}
    data = json.dumps(body, separators=(",", ":")).encode()[:-1]
    data += b',"sum":"%s"}\n' % xxhash.xxh3_128_hexdigest(data).encode()
    (path / "manifest.json").write_bytes(data)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("block_bytes", [4096, 65536])
def test_every_bit_comes_back(codec, block_bytes, disk_path):
    store, saved = small_store(block_bytes=block_bytes), rich()
    plain = store.save(disk_path / "plain", saved)
    done = store.save(disk_path / "a", saved, codec=codec)
    assert done.nbytes == done.written_bytes < plain.nbytes
    assert done.nbytes == sum(f.stat().st_size for f in (disk_path / "a").glob("*.safetensors"))
    loaded = store.load(disk_path / "a")
    assert_same(loaded, saved)
    loaded["model"]["tied"][3, 2] = 7
    assert loaded["model"]["part"][0, 0] == 7
    assert loaded["image"].stride() == saved["image"].stride()
    into = rich(1)
    place = into["long"].data_ptr()
    store.load(disk_path / "a", into)
    assert_same(into, saved)
    assert into["long"].data_ptr() == place
    assert store.verify(disk_path / "a").ok


def test_all_of_them_are_lossless():
    assert all(registry.get(codec).fidelity is Fidelity.EXACT for codec in CODECS)


@pytest.mark.parametrize("codec", ["bfloat16", "positive", "zero-value+int8", "zip", ""])
def test_what_loses_something_is_refused(codec, disk_path):
    with pytest.raises(ConfigError, match="without loss, by one of exponent"):
        checkpoint.save(disk_path / "a", {"x": torch.ones(3)}, codec=codec)
    with pytest.raises(ConfigError, match="without loss"):
        Checkpointer(disk_path / "run", codec=codec)
    assert os.listdir(disk_path) == []


def test_the_data_files_are_what_the_specification_says(disk_path):
    saved = rich()
    STORE.save(disk_path / "a", saved, codec="exponent")
    document, encoded = encoded_in(disk_path / "a")
    assert document["penstock_checkpoint"] == 3
    assert {"long", "untouched", "half"} <= set(encoded)
    assert {"indices", "complex", "array"}.isdisjoint(encoded)
    found = {}
    for file in document["files"]:
        content = (disk_path / "a" / file["name"]).read_bytes()
        blocks = [content[at : at + BLOCK] for at in range(0, len(content), BLOCK)]
        assert [xxhash.xxh3_128_hexdigest(each) for each in blocks] == file["sums"]
        assert len(content) == file["nbytes"]
        length = int.from_bytes(content[:8], "little")
        end = 0
        for name, entry in json.loads(content[8 : 8 + length]).items():
            if name != "__metadata__":
                assert entry["data_offsets"][0] == end
                end = entry["data_offsets"][1]
                found[name] = entry, content[8 + length :][slice(*entry["data_offsets"])]
        assert 8 + length + end == len(content)
    assert found["indices"][1] == saved["indices"].numpy().tobytes()
    for name, each in encoded.items():
        entry, data = found[name]
        assert (entry["dtype"], entry["shape"]) == ("U8", [each["stored"]])
        assert each["codec"] == "exponent"
    data = np.frombuffer(found["long"][1], np.uint8)
    out = np.empty(FRAME_BYTES, np.uint8)
    registry.decode(data, out, dtype="float32")
    assert out.tobytes() == saved["long"].numpy().tobytes()[:FRAME_BYTES]
    second = data[64 + read_header(data).payload_bytes :]
    assert read_header(second).source_bytes == 4 * 1234
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    safetensors = pytest.importorskip("safetensors.torch")
    for path in (disk_path / "a").glob("*.safetensors"):
        for name, tensor in safetensors.load_file(path).items():
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == found[name][1]


def test_what_does_not_become_shorter_is_there_as_it_is(disk_path):
    noise = torch.randint(-(2**62), 2**62, (40_000,))
    STORE.save(disk_path / "a", {"noise": noise, "small": torch.zeros(9)}, codec="zero-value")
    document, encoded = encoded_in(disk_path / "a")
    assert not encoded
    assert document["penstock_checkpoint"] == 3
    assert_same(STORE.load(disk_path / "a"), {"noise": noise, "small": torch.zeros(9)})


def test_the_golden_checkpoint_loads():
    path = GOLDEN / "3"
    document, encoded = encoded_in(path)
    assert document["penstock_checkpoint"] == 3
    assert encoded
    assert checkpoint.verify(path).ok
    assert_same(checkpoint.load(path), golden_state())
    data = (path / "manifest.json").read_bytes()
    assert Manifest.decode(data).encode() == data


def golden_state():
    """By arithmetic alone, so that it is the same everywhere."""
    ramp = torch.arange(3000, dtype=torch.float32)
    return {
        "model": {"weight": (ramp / 7).reshape(60, 50), "view": (ramp / 7).reshape(60, 50)[2:4]},
        "moment": torch.where(ramp % 5 == 0, ramp, torch.zeros(())),
        "half": (ramp * 3).to(torch.bfloat16),
        "steps": [1, (2.5, None)],
        "order": np.arange(7, dtype=np.int16),
        "seen": {"a", 3},
        "shape": (frozenset({(1, 2)}), 1.5 - 2j),
        "data": Path("data") / "a b",
    }


@pytest.mark.parametrize("codec", ["exponent", "zero-value+exponent"])
def test_every_flipped_bit_and_every_cut_is_found(codec, disk_path):
    saved = {"a": torch.randn(20_000), "b": torch.zeros(9000), "c": torch.randn(300)}
    STORE.save(disk_path / "a", saved, codec=codec)
    for path in sorted((disk_path / "a").iterdir()):
        data = path.read_bytes()
        for at in {0, 9, len(data) // 2, len(data) - 1, *range(4096, len(data), BLOCK)}:
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            with pytest.raises(DamagedError, match=path.name):
                STORE.load(disk_path / "a")
            assert path.name in STORE.verify(disk_path / "a").damage[0]
        path.write_bytes(data[:-1])
        with pytest.raises(DamagedError, match=path.name):
            STORE.load(disk_path / "a")
        path.write_bytes(data)
    assert_same(STORE.load(disk_path / "a"), saved)


def small(seed):
    torch.manual_seed(seed)
    return {"a": torch.randn(9000 + seed), "b": torch.zeros(5000), "n": seed}


@pytest.mark.parametrize("how", ["killed", "full"])
def test_a_save_that_is_stopped_anywhere_leaves_the_old_one_or_the_new(how, disk_path):
    def save(fuse, path):
        fused_store(fuse).save(path, small(2), codec="exponent")

    STORE.save(disk_path / "count", small(1), codec="exponent")
    counted = Fuse()
    save(counted, disk_path / "count")
    kinds = [what for what, _ in counted.calls]
    assert {"create", "block", "write", "finish", "exchange"} <= set(kinds)
    swapped = kinds.index("exchange")
    # once that is waited for, the new one is complete: an old one that stays is no failure
    for at in range(len(kinds) if how == "killed" else swapped + 2):
        path = disk_path / f"c{at}"
        STORE.save(path, small(1), codec="exponent")
        with pytest.raises(Stopped if how == "killed" else NoSpaceError):
            save(Fuse(at, None if how == "killed" else no_space()), path)
        done = how == "killed" and at > swapped
        assert is_same(STORE.load(path), small(2 if done else 1)), counted.calls[at]
        if how == "full":
            assert not (disk_path / f".c{at}.saving").exists()
        shutil.rmtree(path)


def test_unchanged_files_are_linked_and_others_are_not(disk_path):
    saved = {"frozen": torch.randn(40_000), "trained": torch.randn(40_000)}
    store = small_store(file_bytes=1)
    store.save(disk_path / "a", saved, codec="exponent")
    saved["trained"] = saved["trained"] + 1
    done = store.save(disk_path / "b", saved, base=disk_path / "a", codec="exponent")
    assert 0 < done.written_bytes < 0.6 * done.nbytes
    assert_same(store.load(disk_path / "b"), saved)
    linked = [f.stat().st_nlink for f in sorted((disk_path / "b").glob("*.safetensors"))]
    assert sorted(linked) == [1, 2]
    plain = store.save(disk_path / "c", saved, base=disk_path / "b")
    assert plain.written_bytes == plain.nbytes
    there = store.unchanged(disk_path / "b", saved)
    assert {(each.name, each.codec) for each in there} == {(name, "exponent") for name in saved}
    saved["trained"][7] = 0
    assert [each.name for each in store.unchanged(disk_path / "b", saved)] == ["frozen"]
    saved["trained"] = store.load(disk_path / "b")["trained"]
    assert len(store.unchanged(disk_path / "c", saved)) == 2


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_was_compared_is_written_with_the_same_places(
    links, wait, disk_path, monkeypatch
):
    saved = {f"t{i}": torch.randn(1 << 19) for i in range(3)}
    with Checkpointer(disk_path, codec="exponent", incremental=True) as ours:
        ours.save(1, saved)
        if links:
            saved["t2"] = saved["t2"].clone()
            saved["t2"][-1] += 1  # the first blocks of the file are the same
        else:
            monkeypatch.setattr(Disk, "link", lambda *_: False)
        done = ours.save(2, saved, wait=wait)
        done = done if wait else done.wait()
        assert done.written_bytes == done.nbytes > 4 * MIB
        assert_same(ours.load(), saved)
        assert checkpoint.verify(done.path).ok


def test_in_the_background_it_is_of_one_moment(disk_path):
    gate = GatedSyscalls()
    weight = torch.nn.Parameter(torch.randn(600_000))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    store = small_store(make_engine=lambda: ThreadEngine(1, syscalls=gate))
    try:
        with Checkpointer(disk_path, store=store, codec="exponent") as ours:
            before = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
            saving = ours.save(1, {"weight": weight, "optimizer": optimizer}, wait=False)
            gate.wait_for_call()
            optimizer.step()
            assert saving.copied_bytes > 0
            gate.open()
            saved = saving.wait()
            assert saved.nbytes < 3 * weight.nbytes
            loaded = ours.load()
            assert torch.equal(loaded["weight"].detach(), before[0])
            assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], before[1])
    finally:
        gate.open()


@pytest.fixture
def saved(disk_path):
    STORE.save(disk_path / "a", {"x": torch.randn(40_000), "y": torch.zeros(9)}, codec="exponent")
    return disk_path / "a"


HOSTILE = {
    "a lossy codec": lambda d, x: x.update(codec="bfloat16"),
    "an unknown codec": lambda d, x: x.update(codec="../codec"),
    "no codec": lambda d, x: x.update(codec=""),
    "a codec that is a number": lambda d, x: x.update(codec=5),
    "another codec": lambda d, x: x.update(codec="zero-value"),
    "another dtype": lambda d, x: x.update(dtype="bfloat16", shape=[80_000]),
    "a type that it does not take": lambda d, x: x.update(dtype="int32"),
    "no length": lambda d, x: x.pop("stored"),
    "a negative length": lambda d, x: x.update(stored=-1),
    "beyond the file": lambda d, x: x.update(stored=x["stored"] + 10**6),
    "over its neighbour": lambda d, x: x.update(stored=x["stored"] + 16),
    "shorter frames": lambda d, x: x.update(stored=x["stored"] - 64),
    "more than can be in it": lambda d, x: x.update(shape=[x["stored"] * 8 + 1]),
    "as much as could be": lambda d, x: x.update(shape=[x["stored"] * 8]),
    "a little more": lambda d, x: x.update(shape=[40_001]),
    "less": lambda d, x: x.update(shape=[39_000]),
    "nothing": lambda d, x: x.update(shape=[0]),
    "an older version": lambda d, x: d.update(penstock_checkpoint=2),
    "a view": lambda d, x: d["tensors"].append(
        {"name": "v", "dtype": "float32", "shape": [1], "owner": 0, "skip": 0,
         "codec": "exponent", "stored": 64}),
}  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_manifest_is_refused(how, saved):
    document, encoded = encoded_in(saved)
    HOSTILE[how](document, encoded["x"])
    seal(saved, document)
    tracemalloc.start()
    try:
        if how == "nothing":  # whose bytes nobody wants
            assert STORE.load(saved)["x"].numel() == 0
            return
        with pytest.raises(CheckpointError):
            STORE.load(saved)
        assert tracemalloc.get_traced_memory()[1] < 32 * 140_000 + 4 * FRAME_BYTES
    finally:
        tracemalloc.stop()


FRAMES = {
    "a payload of everything": (16, (2**63).to_bytes(8, "little")),
    "a longer payload": (16, (140_000).to_bytes(8, "little")),
    "no payload": (16, bytes(8)),
    "another source": (8, (2**40).to_bytes(8, "little")),
    "another codec": (5, b"\x01"),
    "another type": (6, b"\x07"),
    "a stored source": (7, b"\x01"),
    "a version to come": (4, b"\x09"),
    "no frame": (0, b"PNSX"),
    "another kind of block": (64, b"\x07"),
}


@pytest.mark.parametrize("how", FRAMES)
def test_a_hostile_frame_is_refused_and_verify_says_so(how, saved):
    """Its checksum is right: it was written so."""
    document, encoded = encoded_in(saved)
    x = encoded["x"]
    entry = document["files"][x["file"]]
    path = saved / entry["name"]
    data = bytearray(path.read_bytes())
    at, new = FRAMES[how]
    data[x["offset"] + at : x["offset"] + at + len(new)] = new
    path.write_bytes(data)
    entry["sums"] = [
        xxhash.xxh3_128_hexdigest(bytes(data[begin : begin + BLOCK]))
        for begin in range(0, len(data), BLOCK)
    ]
    seal(saved, document)
    with pytest.raises(DamagedError, match=rf"{path.name}.*\(x"):
        STORE.load(saved)
    assert not STORE.verify(saved).ok


def test_the_command_line_says_what_is_encoded(saved, capsys):
    assert main(["checkpoint", "info", str(saved), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["parts"]["x"]["codecs"] == ["exponent"]
    assert document["parts"]["x"]["stored_bytes"] < document["parts"]["x"]["nbytes"] == 160_000
    assert document["parts"]["y"] == {
        "tensors": 1, "nbytes": 36, "stored_bytes": 36, "codecs": [],
    }  # fmt: skip
    assert main(["checkpoint", "info", str(saved)]) == 0
    assert "exponent" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(saved)]) == 0


def test_a_damaged_one_is_passed_over_and_all_of_the_one_before_is_loaded(disk_path):
    with Checkpointer(disk_path, store=STORE, codec="zero-value+exponent", keep=2) as ours:
        for seed in (1, 2):
            ours.save(seed, rich(seed))
        last = sorted((disk_path / "step-000000000002").glob("*.safetensors"))[-1]
        data = bytearray(last.read_bytes())
        data[-1] ^= 1
        last.write_bytes(data)
        into = rich(3)
        with pytest.warns(PenstockWarning, match="have been overwritten already"):
            ours.load(into)
        assert_same(into, rich(1))
