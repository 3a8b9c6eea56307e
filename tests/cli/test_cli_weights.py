"""``penstock weights`` on files that others have written, whole and damaged."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.cli import main


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
