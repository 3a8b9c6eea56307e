"""A second reader, written from docs/checkpoint-format.md alone, reads what ours writes."""

import base64
import itertools
import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from checkpoint_runs import assert_same, small_store, state
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from safetensors import safe_open

from penstock.checkpoint.values import DTYPES

RAW = {
    "bfloat16": ("<u2", 2),
    "bool": ("?", 1),
    "complex64": ("<c8", 8),
    "complex128": ("<c16", 16),
}
"""Of those that NumPy has under another name, or not at all; floats of eight bits are one byte."""
CODES = {"complex64": "F32", "complex128": "F64", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}


class Reader:
    """No object of ours, nothing of torch but names of dtypes."""

    def __init__(self, path):
        self._path = path
        data = (path / "manifest.json").read_bytes()
        assert len(data) <= 64 << 20
        tail = re.fullmatch(rb',"sum":"([0-9a-f]{32})"\}\n', data[-43:])
        assert tail[1].decode() == xxhash.xxh3_128_hexdigest(data[:-43])
        assert data.isascii()
        self.manifest = json.loads(data, object_pairs_hook=once, parse_constant=refused)
        assert self.manifest["penstock_checkpoint"] == 3
        assert self.manifest["checksum"] == "xxh3-128"
        size = self.manifest["block_bytes"]
        assert 4096 <= size <= 16777216
        assert size.bit_count() == 1
        self._files = [self._proven(each, size) for each in self.manifest["files"]]
        self.tensors = [self._tensor(each) for each in self.manifest["tensors"]]
        self._check_owners()
        self.state = self._value(self.manifest["state"], 0)

    def _proven(self, file, size):
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", file["name"])
        path = self._path / file["name"]
        assert path.is_file()
        assert not path.is_symlink()
        data = path.read_bytes()
        assert len(data) == file["nbytes"]
        blocks = [data[at : at + size] for at in range(0, len(data), size)]
        assert [xxhash.xxh3_128_hexdigest(each) for each in blocks] == file["sums"]
        return data

    def _tensor(self, entry):
        """Its values, as NumPy has them, and where in its owner's file they are."""
        if "owner" in entry:
            assert not {"file", "offset"} & entry.keys()
            owner = self.manifest["tensors"][entry["owner"]]
            assert not {"owner", "strides"} & owner.keys()
            return self._elements(entry, owner, owner["offset"] + entry["skip"])
        found = self._elements({**entry, "strides": None}, entry, entry["offset"])
        assert math.prod(entry["shape"]) == found.size
        return found

    def _elements(self, entry, owner, begin):
        name, shape = entry["dtype"], entry["shape"]
        code, itemsize = RAW.get(name, (None, None))
        if code is None and "float8" in name:
            code, itemsize = "u1", 1
        elif code is None:
            code, itemsize = f"<{np.dtype(name).str[1:]}", np.dtype(name).itemsize
        strides = entry.get("strides") or contiguous(shape)
        reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        count = 0 if 0 in shape else reach + 1
        end = owner["offset"] + math.prod(owner["shape"]) * width(owner["dtype"])
        assert begin + count * itemsize <= end <= len(self._files[owner["file"]])
        flat = np.frombuffer(self._files[owner["file"]], code, count, begin)
        return as_strided(flat, shape, [step * itemsize for step in strides]).copy()

    def _check_owners(self):
        """They do not overlap, and are under their names in the headers of their files."""
        owners = [each for each in self.manifest["tensors"] if "file" in each]
        for number, file in enumerate(self.manifest["files"]):
            with safe_open(self._path / file["name"], "np") as opened:
                names = set(opened.keys())
            data = self._files[number]
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            mine = [each for each in owners if each["file"] == number]
            assert {each["name"] for each in mine} == names
            for each in mine:
                said = header[each["name"]]
                assert 8 + length + said["data_offsets"][0] == each["offset"]
                parts = [2] if "complex" in each["dtype"] else []
                assert said["shape"] == each["shape"] + parts
                if each["dtype"] in CODES:
                    assert said["dtype"] == CODES[each["dtype"]]
            spans = sorted((e["offset"], e["offset"] + math.prod(e["shape"]) * width(e["dtype"]))
                           for e in mine if math.prod(e["shape"]))  # fmt: skip
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))

    def _value(self, document, depth):
        assert depth <= 64
        if isinstance(document, list):
            return [self._value(each, depth + 1) for each in document]
        if not isinstance(document, dict):
            assert type(document) is not int or abs(document) < 2**53
            return document
        tags = [key for key in document if key.startswith("$")]
        if not tags:
            return {key: self._value(each, depth + 1) for key, each in document.items()}
        ((tag, body),) = document.items()
        return self._tagged(tag, body, depth)

    def _tagged(self, tag, body, depth):
        def within(document):
            return self._value(document, depth + 1)

        known = {
            "$tensor": lambda: ("tensor", self._dtype(body), self.tensors[body]),
            "$array": lambda: ("array", self._dtype(body), self.tensors[body]),
            "$tuple": lambda: tuple(within(each) for each in body),
            "$dict": lambda: {within(key): within(each) for key, each in body},
            "$int": lambda: int(re.fullmatch(r"-?[0-9]{1,4000}", body)[0]),
            "$float": lambda: struct.unpack(">d", bytes.fromhex(body))[0],
            "$scalar": lambda: np.frombuffer(base64.b64decode(body[1]), body[0])[0],
            "$bytes": lambda: base64.b64decode(body),
            "$size": lambda: torch.Size(body),
            "$device": lambda: torch.device(body),
            "$dtype": lambda: getattr(torch, body),
            "$set": lambda: set(map(within, body)),
            "$frozenset": lambda: frozenset(map(within, body)),
            "$complex": lambda: complex(*map(within, body)),
            "$path": lambda: Path(body),
        }
        return known[tag]()

    def _dtype(self, number):
        return self.manifest["tensors"][number]["dtype"]


def once(pairs):
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def refused(text):
    raise AssertionError(text)


def contiguous(shape):
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


def width(dtype):
    return getattr(torch, dtype).itemsize


def as_ours(value):
    """What the second reader has, as what was saved is."""
    if isinstance(value, tuple) and len(value) == 3 and value[0] in ("tensor", "array"):
        kind, dtype, found = value
        if kind == "array":
            return found
        raw = torch.from_numpy(found.reshape(-1).view(np.uint8)) if found.size else torch.empty(0)
        shape = tuple(found.shape)
        return raw.view(getattr(torch, dtype)).view(shape) if found.size else torch.empty(
            shape, dtype=getattr(torch, dtype))  # fmt: skip
    if isinstance(value, dict):
        return {key: as_ours(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(as_ours, value))
    return value


def test_a_state_is_read(disk_path):
    small_store().save(disk_path / "a", state(4))
    assert_same(as_ours(Reader(disk_path / "a").state), state(4))


def test_every_dtype_and_every_order_is_read(disk_path):
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    saved = {name: torch.arange(24).to(kind.dtype).reshape(4, 6).T for name, kind in DTYPES.items()}
    saved |= {
        "base": base,
        "view": base[:, 1:, ::2],
        "expanded": torch.ones(3).expand(2, 3),
        "last": base.permute(3, 1, 0, 2),
        "dense": torch.randn(3, 4, 5).permute(2, 0, 1),
        "none": torch.empty(3, 0),
        "one": torch.tensor(7),
        "conj": torch.tensor([1 + 2j, 3 + 3j]).conj(),
    }
    small_store().save(disk_path / "a", saved)
    saved["conj"] = torch.tensor([1 - 2j, 3 - 3j])
    assert_same(as_ours(Reader(disk_path / "a").state), saved)


keys = st.text(max_size=3) | st.integers() | st.tuples(st.floats(allow_nan=False))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9)
    | st.complex_numbers(allow_nan=False) | st.sets(keys, max_size=3) | st.frozensets(keys, max_size=3)
    | st.sampled_from([np.float32(1.5), np.int64(-3), np.str_("a"), torch.Size([2]), torch.bool,
                       Path("/a/b"), Path("c")]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)  # fmt: skip
"""What is not a number is equal to nothing: among keys it could not be compared."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("second")


@given(value=plain)
def test_values_are_read(value, place):
    small_store().save(place / "a", {"x": value})
    found = as_ours(Reader(place / "a").state)["x"]
    assert_same(found, value)
