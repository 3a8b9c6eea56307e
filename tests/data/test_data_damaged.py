"""Files that are not what they should be: an error of Penstock's or a valid data set, never another."""

import io
import json
import os
import stat
import tarfile

import numpy as np
import pytest
import torch
from data_files import FORMATS, NEEDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hanging import within_s
from penstock.core.errors import (
    ConfigError,
    DatasetError,
    PenstockError,
    PenstockWarning,
    TransferError,
)
from penstock.data import FlashDataset, FlashLoader
from penstock.data.build import open_index
from penstock.data.cache import check_owner
from penstock.data.packing import pack
from tries import tries


def read_all(dataset):
    return [dataset[i] for i in range(len(dataset))]


# -- what is no regular file ---------------------------------------------------------------------------


SUFFIXES = ("npy", "bin", "tar", "safetensors", "arrow", "parquet", "png", "pstk")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_pipe_in_a_data_set_is_refused(suffix, disk_path):
    (disk_path / "set").mkdir()
    os.mkfifo(disk_path / "set" / f"x.{suffix}")
    for path in (disk_path / "set", disk_path / "set" / f"x.{suffix}"):
        error = within_s(
            60,
            lambda path=path: (
                FlashDataset(path, context=4) if suffix == "bin" else FlashDataset(path)
            ),
        )
        assert isinstance(error, PenstockError)
        assert "pipe" in str(error) or "missing" in str(error)


def test_a_pipe_that_takes_the_place_of_a_file_is_refused_when_it_is_read(rows):
    path, _ = rows(8)
    dataset = FlashDataset(path)
    path.unlink()
    os.mkfifo(path)
    assert isinstance(within_s(60, lambda: dataset[0]), TransferError)


# -- samples without bytes -----------------------------------------------------------------------------


def tar_of(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def npy_of(folder):
    np.save(folder / "a.npy", np.zeros((5, 0), np.float32))
    return [np.zeros(0, np.float32)] * 5


def webdataset_of(folder):
    tar_of(folder / "a.tar", {f"{i}.txt": b"" for i in range(5)})
    return [{"txt": ""}] * 5


def safetensors_of(folder):
    text = json.dumps({"x": {"dtype": "F32", "shape": [5, 0], "data_offsets": [0, 0]}}).encode()
    (folder / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return [np.zeros(0, np.float32)] * 5


def mds_of(folder):
    (folder / "shard.0.mds").write_bytes(b"".join(n.to_bytes(4, "little") for n in (5, *[28] * 6)))
    shard = {
        "column_names": ["raw"],
        "column_encodings": ["bytes"],
        "column_sizes": [0],
        "samples": 5,
        "raw_data": {"basename": "shard.0.mds", "bytes": 28},
    }
    (folder / "index.json").write_text(json.dumps({"shards": [shard]}))
    return [{"raw": b""}] * 5


def arrow_of(folder):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": [""] * 5})
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as out,
    ):
        out.write_table(table)
    return [""] * 5


EMPTY = {
    "npy": npy_of,
    "webdataset": webdataset_of,
    "safetensors": safetensors_of,
    "mds": mds_of,
    "arrow": arrow_of,
}


def plain(value):
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", EMPTY)
def test_samples_without_bytes_are_samples(kind, packed, disk_path):
    folder = disk_path / "set"
    folder.mkdir()
    expected = [plain(each) for each in EMPTY[kind](folder)]
    path = folder
    if packed:
        path = disk_path / "set.pstk"
        pack(open_index(folder), path)
    dataset = FlashDataset(path)
    assert [plain(each) for each in read_all(dataset)] == expected
    loaded = torch.utils.data.DataLoader(dataset, batch_size=2, collate_fn=list)
    assert [plain(each) for batch in loaded for each in batch] == expected
    dataset.close()
    with FlashLoader(FlashDataset(path), batch_size=2, seed=0, collate_fn=list) as loader:
        for _ in range(2):
            assert sum(1 for _ in loader) == 3


def test_an_empty_caption_beside_others(disk_path):
    tar_of(disk_path / "a.tar", {"1.txt": b"one", "2.txt": b"", "3.txt": b"three"})
    dataset = FlashDataset(disk_path / "a.tar")
    assert read_all(dataset) == [{"txt": "one"}, {"txt": ""}, {"txt": "three"}]
    assert dataset[1] == {"txt": ""}


# -- numbers that do not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<u8", ">u8"])
def test_tokens_that_do_not_fit_int64_are_refused(dtype, disk_path):
    np.array([1, 2, 3, 4, 2**63, 2**64 - 1, 7, 8, 9], dtype).tofile(disk_path / "a.bin")
    dataset = FlashDataset(disk_path / "a.bin", context=3, stride=3, extra=0, dtype=dtype)
    assert dataset[0].tolist() == [1, 2, 3]
    with pytest.raises(DatasetError, match=r"'tokens' has a number from 2\^63 on"):
        dataset[1]
    loader = FlashLoader(dataset, batch_size=3, order="sequential")
    with loader, pytest.raises(DatasetError, match="does not fit int64"):
        list(loader)
    raw = FlashDataset(disk_path / "a.bin", context=3, stride=3, extra=0, dtype=dtype, decode="raw")
    assert raw[1].numpy().view(dtype)[2] == 2**64 - 1


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 10**30},
        {"context": 10**30},
        {"extra": 10**30},
        {"extra": -1},
        {"header_bytes": -2},
        {"header_bytes": "2"},
        {"stride": 1.5},
        {"context": True},
        {"dtype": "("},
        {"dtype": "9999999999999999999u8"},
    ],
)
def test_options_of_tokens_that_make_no_sense(options, disk_path):
    np.arange(100, dtype="<u2").tofile(disk_path / "a.bin")
    with pytest.raises(ConfigError, match="token"):
        FlashDataset(disk_path / "a.bin", **{"context": 3, **options})


def test_an_image_beyond_the_limit_of_pillow_is_refused(disk_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (64, 64)).save(disk_path / "a.png")
    dataset = FlashDataset(disk_path / "a.png")
    assert dataset[0].shape == (64, 64, 3)
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DatasetError, match="DecompressionBombError"):
        dataset[0]


# -- headers ---------------------------------------------------------------------------------------------


def header_of(text):
    data = text.encode().ljust(118)
    return b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data


@pytest.mark.parametrize(
    "shape",
    [
        "(-1, 4)",
        "(4, -1)",
        "(10**30,)",
        "(1" + "0" * 30 + ",)",
        "(2, 4",
        "(" * 90,
        "(0, 9" + "9" * 30 + ")",
    ],
)
def test_the_header_of_an_array_that_makes_no_sense(shape, disk_path):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    (disk_path / "a.npy").write_bytes(header_of(text) + bytes(64))
    with pytest.raises(DatasetError, match=r"a\.npy"):
        FlashDataset(disk_path / "a.npy")
    tar_of(disk_path / "a.tar", {"1.npy": header_of(text) + bytes(64)})
    with pytest.raises(DatasetError, match=r"sample 0 of .* is damaged"):
        FlashDataset(disk_path / "a.tar")[0]


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "facts",
    [
        *({k: v for k, v in GOOD.items() if k != name} for name in GOOD),
        *(
            {**GOOD, name: bad}
            for name in GOOD
            for bad in (None, "x", [-1, 2], [1e9], {}, [], 10**30)
        ),
        {**GOOD, "shape": [10**30, 2]},
        None,
        [],
        "x",
    ],
)
def test_the_header_of_safetensors_that_makes_no_sense(facts, disk_path):
    text = json.dumps({"x": facts}).encode()
    path = disk_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(DatasetError, match=r"a\.safetensors"):
        FlashDataset(path)


@pytest.mark.parametrize("header", [b"[]", b"7", b"[" * 100000, b'{"x": ' * 50000])
def test_a_header_of_safetensors_that_is_no_table(header, disk_path):
    path = disk_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(DatasetError, match=r"a\.safetensors"):
        FlashDataset(path)


# -- any bytes -------------------------------------------------------------------------------------------


@st.composite
def edits(draw):
    """A function that changes some bytes."""
    at, cut = draw(st.floats(0, 1)), draw(st.integers(0, 3))
    put = draw(
        st.one_of(
            st.binary(max_size=4), st.sampled_from([b"-1", b"1e999", b"[" * 3000, b"\xff" * 8])
        )
    )

    def edit(data):
        place = int(at * len(data))
        return data[:place] + put + data[place + cut :] if cut else data[:place]

    return edit


ALL = [*FORMATS, "packed"]


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """``valid(name)``: the files of a small data set, and its options."""
    known = {}

    def make(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(f"valid-{name}")
            _, options = FORMATS["webdataset" if name == "packed" else name](folder)
            if name == "packed":
                out = tmp_path_factory.mktemp("packed") / "a.pstk"
                pack(open_index(folder, index_dir=out.parent / "index"), out)
                folder = out.parent
            paths = [
                each for each in folder.rglob("*") if each.is_file() and each.suffix != ".index"
            ]
            known[name] = {each.relative_to(folder): each.read_bytes() for each in paths}, options
        return known[name]

    return make


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=tries(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edit=edits(), which=st.integers(0, 9))
def test_damaged_files_give_a_clear_error_or_samples(name, valid, edit, which, tmp_path_factory):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    files, options = valid(name)
    folder = tmp_path_factory.mktemp("set")
    for number, (path, data) in enumerate(sorted(files.items())):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(edit(data) if number == which % len(files) else data)
    try:
        dataset = FlashDataset(folder, format=name, index_dir=folder / "index", **options)
        read_all(dataset)
        dataset.close()
    except PenstockError:
        pass


# -- the cache of indexes --------------------------------------------------------------------------------


def test_an_index_that_is_a_directory_is_left_alone(rows):
    path, array = rows(8)
    where = open_index(path).index_path
    os.unlink(where)
    os.mkdir(where)
    with pytest.warns(PenstockWarning, match="stays in memory"):
        opened = open_index(path)
    assert opened.built
    assert opened.index_path is None
    assert os.path.isdir(where)
    with pytest.warns(PenstockWarning, match="stays in memory"):
        dataset = FlashDataset(path)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=8, num_workers=1, multiprocessing_context="spawn"
    )
    assert torch.equal(next(iter(loader)), torch.from_numpy(array))


def test_an_index_that_is_a_pipe_is_left_alone(rows):
    path, _ = rows(8)
    where = open_index(path).index_path
    os.unlink(where)
    os.mkfifo(where)
    assert isinstance(within_s(60, lambda: open_index(path)), PenstockWarning)


def test_a_cache_that_others_may_write_to_is_not_believed(rows):
    path, _ = rows(8)
    where = open_index(path).index_path
    os.chmod(where, 0o666)
    with pytest.warns(PenstockWarning, match="may be written by every user"):
        assert (
            open_index(path).index_path == where
        )  # it is built anew, and kept in place of the other
    assert not stat.S_IMODE(os.stat(where).st_mode) & 0o022
    assert not open_index(path).built
    os.chmod(os.path.dirname(where), 0o777)
    with pytest.warns(PenstockWarning, match="stays in memory"):
        opened = open_index(path)
    assert opened.built
    assert opened.index_path is None
    os.chmod(os.path.dirname(where), 0o1777)
    assert not open_index(path).built


def test_who_may_have_written_what_is_believed():
    def facts(uid, mode):
        return os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))

    own = os.geteuid()
    for uid, mode in ((own, 0o100644), (0, 0o100644), (0, 0o41777), (own, 0o40755)):
        check_owner("/x", facts(uid, mode))
    for uid, mode in ((own + 1, 0o100644), (own, 0o100646), (own, 0o40777), (own + 1, 0o41777)):
        with pytest.raises(DatasetError, match=r"'/x' .* not trusted"):
            check_owner("/x", facts(uid, mode))


def test_a_cache_is_ours_whatever_the_umask(rows, tmp_path):
    path, _ = rows(8)
    before = os.umask(0)
    try:
        where = open_index(path, index_dir=tmp_path / "new").index_path
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(where).st_mode) == 0o644
    assert not open_index(path, index_dir=tmp_path / "new").built
