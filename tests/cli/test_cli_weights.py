"""``penstock weights`` on files that others have written, whole and damaged."""

import json
import os

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

from penstock.cli import main
from penstock.io.mapping import memory_at
from penstock.io.threads import ThreadEngine
from penstock.testing.shared_engine import shared_engine_replaced
from penstock.weights import conversion, pieces
from penstock.weights.safetensors import open_source


@pytest.fixture
def folder(disk_path):
    save_file(
        {"a.weight": np.ones((64, 65), np.float32), "a.bias": np.ones(3, np.float16)},
        disk_path / "one.safetensors",
    )
    save_file({"b": np.arange(5000)}, disk_path / "two.safetensors")
    return disk_path


def outcome(capsys, *argv):
    code = main(["weights", *map(str, argv)])
    return code, capsys.readouterr()


def test_info_names_types_and_the_largest(folder, capsys):
    code, text = outcome(capsys, "info", folder)
    assert code == 0
    assert "F16, F32" in text.out
    assert "a.weight (16.25 KiB)" in text.out
    code, text = outcome(capsys, "info", folder / "two.safetensors", "--json")
    (found,) = json.loads(text.out)["files"]
    assert found["tensors"] == 1
    assert found["types"] == ["I64"]
    assert found["largest_bytes"] == 40_000


def test_verify_reads_all_and_says_that_there_are_no_checksums(folder, capsys):
    code, text = outcome(capsys, "verify", folder)
    assert code == 0
    assert text.out.count("no checksums") == 2
    code, text = outcome(capsys, "verify", folder, "--json")
    found = json.loads(text.out)
    assert (found["ok"], found["checksums"], len(found["files"])) == (True, False, 2)


def test_verify_finds_a_short_file(folder, capsys):
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, text = outcome(capsys, "verify", folder, "--json")
    assert code == 1
    (found,) = json.loads(text.out)["files"]
    assert "its values end at" in found["damage"]
    code, text = outcome(capsys, "verify", path)
    assert code == 1
    assert "no intact safetensors file" in " ".join(text.out.split())


def test_a_folder_without_weights_is_a_wrong_argument(disk_path, capsys):
    code, text = outcome(capsys, "verify", disk_path)
    assert code == 2
    assert "has no model.safetensors" in text.err


def test_a_path_that_is_missing_is_a_wrong_argument(disk_path, capsys):
    code, text = outcome(capsys, "verify", disk_path / "none.safetensors")
    assert (code, text.out) == (2, "")
    assert "does not exist" in text.err


def tensors_of(path):
    found = {}
    for name in sorted(os.listdir(path)):
        if name.endswith(".safetensors"):
            found |= safetensors.torch.load_file(path / name)
    return found


@pytest.fixture
def strangers(disk_path, monkeypatch):
    """Files as others write them: tensors begin anywhere, and some have odd lengths."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 8192)
    monkeypatch.setattr(conversion, "_CAST_ELEMENTS", 1000)
    random = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(64, 64, generator=random),
        "b": torch.randn(77, generator=random),
        "c": torch.arange(5000),
        "d": torch.randn(301, 33, generator=random).double(),
        "e": torch.randn(128, 128, generator=random).half(),
        "f": torch.empty(0, 3),
        "g": torch.tensor(1e30),
    }
    folder = disk_path / "source"
    folder.mkdir()
    for number in range(2):
        those = dict(list(tensors.items())[number::2])
        safetensors.torch.save_file(those, folder / f"{number}.safetensors", {"x": "odd"})
    return folder, tensors


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_import_writes_aligned_files_of_any_type_and_size(
    strangers, disk_path, capsys, dtype, shard
):
    folder, tensors = strangers
    assert any(each.begin % 4096 for file in open_source(folder) for each in file.tensors)
    target = disk_path / "target"
    arguments = ["--type", dtype] if dtype else []
    code, text = outcome(capsys, "import", folder, target, "--shard", shard, *arguments)
    assert code == 0
    assert "model" in text.out.replace("\n", "")  # long paths are wrapped
    found = tensors_of(target)
    assert found.keys() == tensors.keys()
    for name, each in tensors.items():
        expected = each.to(getattr(torch, dtype)) if dtype and each.is_floating_point() else each
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected), name
    files = open_source(target)
    assert (len(files) == 1) == (shard == "5GB")
    whole = [
        each for file in files for each in file.tensors if each.nbytes % 4096 == 0 < each.nbytes
    ]
    assert whole
    assert all(each.begin % 4096 == 0 for each in whole)
    code, text = outcome(capsys, "import", folder, target)
    assert code == 2
    assert "already" in text.err


class Forgetful(ThreadEngine):
    """Changes a bit of what is written to a path."""

    def submit(self, request):
        if request.op == "write" and request.file.path.endswith(".part"):
            memory_at(request.address, 1)[0] ^= 1
        return super().submit(request)


@pytest.mark.parametrize("arguments", [[], ["--no-verify"]])
def test_import_finds_a_file_that_is_not_what_was_written(strangers, disk_path, capsys, arguments):
    folder, _ = strangers
    with shared_engine_replaced(Forgetful(threads=2)):
        code, text = outcome(capsys, "import", folder, disk_path / "target", *arguments)
    assert code != 0
    if not arguments:
        assert "does not read as it was written" in " ".join(text.err.split())
        assert os.listdir(disk_path / "target") == []
    else:  # the header is damaged, so that looking at it tells
        assert "no intact safetensors file" in " ".join(text.err.split())
