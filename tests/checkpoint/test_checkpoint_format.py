"""What a manifest may say, and that nothing worse comes of a hostile one than an error."""

import json
import math
import os
from pathlib import Path

import pytest
import xxhash
from checkpoint_runs import BLOCK, rewrite, sealed, small_store, state
from hypothesis import given
from hypothesis import strategies as st

from penstock import CheckpointError, DamagedError
from penstock.checkpoint.listing import info_of
from penstock.checkpoint.manifest import LEAST_PART, Manifest
from penstock.checkpoint.values import FormError

STORE = small_store()
SCHEMA = Path(__file__).parents[2] / "docs" / "checkpoint-manifest.schema.json"


@pytest.fixture
def saved(disk_path):
    STORE.save(disk_path / "a", state())
    return disk_path / "a"


def read(path):
    return json.loads((path / "manifest.json").read_bytes())


def test_a_manifest_is_as_the_specification_says(saved):
    data = (saved / "manifest.json").read_bytes()
    assert data[-43:-35] == b',"sum":"'
    assert data[-35:-3].decode() == xxhash.xxh3_128_hexdigest(data[:-43])
    document = json.loads(data)
    for file in document["files"]:
        content = (saved / file["name"]).read_bytes()
        assert len(content) == file["nbytes"]
        blocks = [content[at : at + BLOCK] for at in range(0, len(content), BLOCK)]
        assert [xxhash.xxh3_128_hexdigest(each) for each in blocks] == file["sums"]
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))


def test_the_schema_knows_every_member(saved):
    """Without the library: the names that are required are those that are there."""
    document, schema = read(saved), json.loads(SCHEMA.read_text())
    assert set(document) == set(schema["required"]) == set(schema["properties"])
    assert set(document["files"][0]) == set(schema["$defs"]["file"]["properties"])
    for tensor in document["tensors"]:
        kind = schema["$defs"]["view" if "owner" in tensor else "owner"]
        assert set(kind["required"]) <= set(tensor) <= set(kind["properties"])


def test_a_manifest_goes_through_its_file(saved):
    data = (saved / "manifest.json").read_bytes()
    assert Manifest.decode(data).encode() == data


def test_a_manifest_that_is_not_what_was_written_is_refused(saved):
    """One digit of it is another: it would be a manifest of this format, of another state."""
    path = saved / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"facts":{', b'"facts":{"a":1,', 1).replace(b",}", b"}", 1))
    json.loads(path.read_bytes())
    with pytest.raises(DamagedError, match="its checksum is not that of its bytes"):
        STORE.load(saved)


HOSTILE = {
    "a path up": lambda d: d["files"][0].update(name="../a/data-00000.safetensors"),
    "a path away": lambda d: d["files"][0].update(name="/etc/passwd"),
    "a hidden name": lambda d: d["files"][0].update(name=".hidden"),
    "the manifest itself": lambda d: d["files"][0].update(name="manifest.json"),
    "a name twice": lambda d: d["files"][1].update(name=d["files"][0]["name"].upper()),
    "a longer file": lambda d: d["files"][0].update(nbytes=2**62),
    "a negative length": lambda d: d["files"][0].update(nbytes=-1),
    "no checksums": lambda d: d["files"][0].update(sums=[]),
    "a false checksum": lambda d: d["files"][0]["sums"].__setitem__(0, "x" * 32),
    "blocks of nothing": lambda d: d.update(block_bytes=0),
    "blocks of everything": lambda d: d.update(block_bytes=2**40),
    "a huge shape": lambda d: d["tensors"][0].update(shape=[2**40, 2**40]),
    "a negative shape": lambda d: d["tensors"][0].update(shape=[-5]),
    "a true shape": lambda d: d["tensors"][0].update(shape=[True]),
    "many dimensions": lambda d: d["tensors"][0].update(shape=[1] * 65),
    "an unknown dtype": lambda d: d["tensors"][0].update(dtype="object"),
    "an unknown file": lambda d: d["tensors"][0].update(file=99),
    "beyond the file": lambda d: d["tensors"][0].update(offset=d["files"][0]["nbytes"] - 4),
    "overlapping owners": lambda d: d["tensors"].append(dict(d["tensors"][0])),
    "strides with overlaps": lambda d: d["tensors"][0].update(shape=[90, 100], strides=[0, 1]),
    "a view of a view": lambda d: d["tensors"].append(
        {"name": "v", "dtype": "uint8", "shape": [1], "owner": len(d["tensors"]), "skip": 0}),
    "a view beyond": lambda d: d["tensors"].append(
        {"name": "v", "dtype": "float32", "shape": [2], "strides": [2**50], "owner": 0, "skip": 0}),
    "a view askew": lambda d: d["tensors"].append(
        {"name": "v", "dtype": "float32", "shape": [2], "owner": 0, "skip": 3}),
    "another version": lambda d: d.update(penstock_checkpoint=4),
    "an older version": lambda d: d.update(penstock_checkpoint=2),
    "a set with a list": lambda d: d.update(state={"$set": [[1]]}),
    "a set with a tensor": lambda d: d.update(state={"$set": [{"$tensor": 0}]}),
    "a set of no array": lambda d: d.update(state={"$frozenset": 3}),
    "half a number": lambda d: d.update(state={"$complex": [1.0]}),
    "a number of words": lambda d: d.update(state={"$complex": [1.0, "2"]}),
    "a path that ends early": lambda d: d.update(state={"$path": "a\0b"}),
    "another checksum": lambda d: d.update(checksum="crc32"),
    "no facts": lambda d: d.update(facts=3),
    "no list": lambda d: d.update(tensors={"a": 1}),
    "an unknown tensor": lambda d: d.update(state={"$tensor": 99}),
    "a negative tensor": lambda d: d.update(state={"$tensor": -1}),
    "a class": lambda d: d.update(state={"$class": "os.system"}),
    "a tag beside others": lambda d: d.update(state={"$tuple": [], "a": 1}),
    "a key that is a list": lambda d: d.update(state={"$dict": [[[1], 2]]}),
    "an odd pair": lambda d: d.update(state={"$dict": [[1, 2, 3]]}),
    "no base64": lambda d: d.update(state={"$bytes": "!"}),
    "an object scalar": lambda d: d.update(state={"$scalar": ["|O", "AAAAAAAAAAA="]}),
    "a torch function": lambda d: d.update(state={"$dtype": "load"}),
    "a device of its own": lambda d: d.update(state={"$device": "no such"}),
    "a length of words": lambda d: d.update(state={"$size": ["3"]}),
    "a length beyond all": lambda d: d.update(state={"$size": [2**70]}),
    "an empty tensor of overflowing lengths": lambda d: (
        d["tensors"][0].update(shape=[2**62, 2**62, 0]), d.update(state={"$tensor": 0})),
    "a float of seven bytes": lambda d: d.update(state={"$float": "7ff00000000000  "}),
    "a number with spaces": lambda d: d.update(state={"$int": " 1_0"}),
    "a number in other digits": lambda d: d.update(state={"$int": "\u0661"}),
    "a scalar that is no Python": lambda d: d.update(state={"$scalar": ["(1,f4", "AAAAAAAAAAA="]}),
    "a scalar of a structure": lambda d: d.update(state={"$scalar": ["f4,i4", "AAAAAAAAAAA="]}),
    "a scalar of too few bytes": lambda d: d.update(state={"$scalar": ["<f8", "AAAA"]}),
    "a key twice": lambda d: d.update(state={"$dict": [[1, 2], [1, 3]]}),
    "an array of what NumPy has not": lambda d: (
        d["tensors"][0].update(dtype="bfloat16"), d.update(state={"$array": 0})),
}  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_manifest_is_refused(how, saved):
    document = read(saved)
    HOSTILE[how](document)
    (saved / "manifest.json").write_bytes(sealed(document))
    with pytest.raises(CheckpointError):
        STORE.load(saved)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[1]", b'{"a":NaN', b'{"a":1,"a":2', b"[" * 100_000, b'{"a":' * 5000,
        b'{"a":' + b"9" * 5000, b"\xff\xfe", b'{"state":' + b"[" * 200 + b"]" * 200,
    ],
    ids=range(10),
)  # fmt: skip
def test_hostile_json_is_refused(data, saved):
    for text in (data, sealed(data)):
        (saved / "manifest.json").write_bytes(text)
        with pytest.raises(DamagedError, match=r"manifest\.json"):
            STORE.load(saved)


def test_a_state_that_is_too_deep_is_refused(saved):
    document = read(saved)
    for _ in range(80):
        document["state"] = [document["state"]]
    (saved / "manifest.json").write_bytes(sealed(document))
    with pytest.raises(CheckpointError, match="deep"):
        STORE.load(saved)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (b'"x":NaN,', "NaN"), (b'"x":-Infinity,', "Infinity"), (b'"x":1e999,', "1e999"),
        (b'"x":1,"x":1,', "two members of one name"),
    ],
)  # fmt: skip
def test_what_parsers_of_json_let_through_is_refused(more, why, saved):
    file = saved / "manifest.json"
    whole = file.read_bytes()
    file.write_bytes(sealed(whole[:-43].replace(b'"facts":{', b'"facts":{' + more)))
    with pytest.raises(DamagedError, match=why):
        STORE.load(saved)


def small(**changes):
    """A manifest of two owners and a view, which fill their file; lengths are exact."""
    made = {
        "penstock_checkpoint": 3, "block_bytes": 4096, "checksum": "xxh3-128", "facts": {}, "state": {},
        "files": [{"name": "a", "nbytes": 72, "sums": ["0" * 32]}],
        "tensors": [
            {"name": "x", "dtype": "uint8", "shape": [32], "file": 0, "offset": 8},
            {"name": "y", "dtype": "uint8", "shape": [1024], "file": 0, "offset": 40,
             "codec": "narrow", "stored": 32},
            {"name": "v", "dtype": "uint8", "shape": [4, 4], "strides": [8, 1], "owner": 0, "skip": 4},
        ],
    }  # fmt: skip
    for place, value in changes.items():
        *way, last = place.split("__")
        inner = made
        for key in way:
            inner = inner[int(key) if key.isdecimal() else key]
        inner[int(last) if last.isdecimal() else last] = value
    return sealed(made)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tensors__1__offset": 39}, "overlap"),
        ({"tensors__1__offset": 41}, "longer than its file"),
        ({"tensors__1__shape": [1025]}, "cannot stand for"),
        ({"tensors__2__skip": 5}, "does not lie within"),
        ({"tensors__0__strides": [1]}, "view of no owner"),
        ({"penstock_checkpoint": 2}, "version is 2; this Penstock reads 3"),
        ({"files": [{"name": "a", "nbytes": 72, "sums": ["0" * 32]},
                    {"name": "A", "nbytes": 0, "sums": []}]}, "the same name"),
        ({"files__0__nbytes": 4097}, "has 1 checksums"),
        ({"block_bytes": 4097}, "none of this format"),
    ],
)  # fmt: skip
def test_every_bound_is_exact(changes, why):
    """What breaks a rule by one is refused for that, and what keeps it is not."""
    Manifest.decode(small())
    with pytest.raises(FormError, match=why):
        Manifest.decode(small(**changes))


@pytest.mark.parametrize("what", ["state", "facts"])
def test_nothing_walks_what_is_deeper_than_any_value(what, saved):
    """asdict, for one, calls itself three times a level."""
    document = read(saved)
    document["facts"]["x"] = document["state"]["x"] = 1
    for _ in range(300):
        document[what]["x"] = [document[what]["x"]]
    (saved / "manifest.json").write_bytes(sealed(document))
    with pytest.raises(DamagedError, match="nested"):
        STORE.load(saved, into={"x": 1}, partial=True)
    assert "nested" in info_of(0, str(saved)).damage


@pytest.mark.parametrize("name", ["manifest.json", "data-00000.safetensors"])
def test_what_is_no_regular_file_is_refused(name, saved, disk_path):
    kept = disk_path / "kept"
    os.rename(saved / name, kept)
    (saved / name).symlink_to(kept)
    with pytest.raises(CheckpointError):
        STORE.load(saved)
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(CheckpointError):
        STORE.load(saved)
    (saved / name).unlink()
    (saved / name).mkdir()
    nbytes = (saved / name).stat().st_size  # as long as it says, and there are not that many bytes
    if name != "manifest.json":
        rewrite(saved, lambda made: made.update(files=[{"name": name, "nbytes": nbytes, "sums": [
            "0" * 32]}], tensors=[], state={}))  # fmt: skip
    with pytest.raises(DamagedError, match=r"regular file|cannot be opened"):
        STORE.load(saved)


@given(st.data())
def test_a_manifest_with_random_changes_is_refused_or_within_bounds(data):
    """Whatever is believed allocates no more than the files are long."""
    size = 1000
    base = {
        "penstock_checkpoint": 3, "block_bytes": 4096, "checksum": "xxh3-128", "facts": {},
        "files": [{"name": "a", "nbytes": size, "sums": ["0" * 32]}],
        "tensors": [{"name": "x", "dtype": "float32", "shape": [10], "file": 0, "offset": 8},
                    {"name": "y", "dtype": "uint8", "shape": [5, 8], "file": 0, "offset": 100},
                    {"name": "z", "dtype": "uint8", "shape": [5], "owner": 0, "skip": 2},
                    {"name": "e", "dtype": "float32", "shape": [99], "file": 0, "offset": 200,
                     "codec": "exponent", "stored": 64}],
        "state": None,
    }  # fmt: skip
    numbers = st.one_of(
        st.integers(-1, 300), st.sampled_from([2**31, 2**63, 2**64, True, 1.0, "a", None])
    )
    for _ in range(data.draw(st.integers(1, 3))):
        tensor = data.draw(st.sampled_from(base["tensors"]))
        key = data.draw(
            st.sampled_from(
                ["shape", "strides", "offset", "owner", "skip", "file", "stored", "codec"]
            )
        )
        tensor[key] = data.draw(
            st.lists(numbers, max_size=3) if key[-1] in "es" and key[0] == "s" else numbers
        )
    try:
        manifest = Manifest.decode(sealed(base))
    except FormError:
        return
    owners = [each for each in manifest.tensors if each.owner < 0]
    assert sum(each.file_bytes for each in owners) <= size
    assert sum(each.nbytes for each in owners) <= size * LEAST_PART
    assert sum(each.nbytes for each in owners if not each.codec) <= size
    for each in manifest.tensors:
        assert each.nbytes == math.prod(each.shape) * (4 if each.dtype == "float32" else 1)
        if each.owner >= 0:
            assert each.skip_bytes + each.extent_bytes <= manifest.tensors[each.owner].nbytes
