"""Every format, as it is and packed: each sample has the value that was written, in any batch."""

import json
import os
import tarfile

import numpy as np
import pytest
from data_files import FORMATS, NEEDS, same

from penstock.core.errors import ChecksumError, ConfigError, DatasetError
from penstock.data import FlashDataset, open_index, pack


@pytest.fixture(params=FORMATS)
def made(request, disk_path):
    """(name, folder, expected samples, options)."""
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    folder = disk_path / "set"
    folder.mkdir()
    expected, options = FORMATS[request.param](folder)
    return request.param, folder, expected, options


def make(name, disk_path):
    folder = disk_path / "set"
    folder.mkdir()
    FORMATS[name](folder)
    return folder


def test_every_sample_is_what_was_written(made):
    name, folder, expected, options = made
    dataset = FlashDataset(folder, **options)
    assert dataset.index.format == name
    assert len(dataset) == len(expected)
    order = np.random.default_rng(0).permutation(len(expected)).tolist()
    for i, value in zip(order, dataset.__getitems__(order), strict=True):
        assert same(value, expected[i]), (i, value, expected[i])
    assert same(dataset[-1], expected[-1])
    with pytest.raises(IndexError):
        dataset[len(expected)]
    dataset.close()


def test_it_is_found_again_by_its_index(made):
    _, folder, expected, options = made
    first = open_index(folder, options=options)
    again = open_index(folder, options=options)
    assert (first.built, again.built) == (True, False)
    assert first.index_path == again.index_path
    every = np.arange(len(expected))
    before, now = first.index.locate(every), again.index.locate(every)
    for name in ("file", "offset", "nbytes"):
        assert np.array_equal(getattr(before, name), getattr(now, name))
    assert again.index.data_bytes == np.maximum(now.nbytes, 0).sum()
    longest, nbytes = again.index.longest()
    assert nbytes == np.maximum(now.nbytes, 0).sum(axis=1).max()
    assert np.maximum(now.nbytes[longest], 0).sum() == nbytes


@pytest.mark.parametrize("align", [None, 1, 4096])
def test_packed_it_is_the_same(made, align):
    name, folder, expected, options = made
    if name == "parquet":
        with pytest.raises(
            ConfigError, match="by the footer of its file, which a packed file has not"
        ):
            pack(open_index(folder), folder.parent / "all.pstk", align_bytes=align)
        assert not (folder.parent / "all.pstk").exists()
        return
    opened = open_index(folder, options=options)
    written = pack(opened, folder.parent / "all.pstk", align_bytes=align)
    assert written.records == len(expected)
    assert written.data_bytes == opened.index.data_bytes
    assert os.path.getsize(written.path) == written.file_bytes
    packed = FlashDataset(written.path)
    ranges = packed.index.locate(np.arange(len(expected)))
    assert (ranges.offset[:, 0] % written.align_bytes == 0).all()
    for i, value in enumerate(packed.__getitems__(range(len(expected)))):
        assert same(value, expected[i]), (i, value, expected[i])
    twice = pack(open_index(written.path), folder.parent / "twice.pstk", align_bytes=align)
    with open(written.path, "rb") as one, open(twice.path, "rb") as other:
        assert one.read() == other.read()
    with pytest.raises(ConfigError, match="not exist yet"):
        pack(opened, written.path)


def test_a_function_decodes(rows):
    path, array = rows(20)
    dataset = FlashDataset(
        path, decode=lambda sample: (sample.index, sample.row, bytes(sample.data))
    )
    assert dataset[7] == (7, 7, array[7].tobytes())
    assert np.array_equal(FlashDataset(path, decode="raw")[3], array[3])


def test_a_view_of_a_sample_that_is_kept_is_refused(rows):
    path, _ = rows(4)
    dataset = FlashDataset(path, decode=lambda sample: np.frombuffer(sample.data, np.uint8))
    with pytest.raises(DatasetError, match="return a copy"):
        dataset[0]


def test_tokens_of_several_files_and_a_header(disk_path):
    for i in range(2):
        np.arange(100 * i, 100 * i + 50, dtype="<i4").tofile(disk_path / f"{i}.bin")
    dataset = FlashDataset(
        disk_path, format="tokens", dtype="int32", context=8, stride=4, extra=0, header_bytes=40
    )
    assert len(dataset) == 18
    assert dataset[10].tolist() == list(range(114, 122))


def test_bfloat16_rows(disk_path):
    torch = pytest.importorskip("torch")
    values = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    header = json.dumps({"x": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}}).encode()
    body = values.view(torch.int16).numpy().tobytes()
    path = disk_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)
    found = FlashDataset(path)[2]
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [8, 9, 10, 11]


# -- what is refused ------------------------------------------------------------------------------


def cut(path, nbytes):
    if nbytes == "the end mark":
        with tarfile.open(path) as archive:
            archive.getmembers()
            nbytes = os.path.getsize(path) - archive.offset
    os.truncate(path, os.path.getsize(path) - nbytes)


@pytest.mark.parametrize(
    ("name", "file", "nbytes"),
    [
        ("npy", "b.npy", 1),
        ("webdataset", "01.tar", 20_000),
        ("webdataset", "01.tar", "the end mark"),
        ("mds", "shard.1.mds", 3),
        ("safetensors", "all.safetensors", 8),
        ("arrow", "data-1.arrow", 600),
        ("parquet", "a.parquet", 5),
    ],
)
def test_a_truncated_shard_is_named(disk_path, name, file, nbytes):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    folder = make(name, disk_path)
    cut(folder / file, nbytes)
    with pytest.raises(DatasetError, match=rf"{file}.*(truncated|damaged|copy it again)"):
        open_index(folder)


def test_a_truncated_packed_file(rows, disk_path):
    path, _ = rows(9)
    written = pack(open_index(path), disk_path / "a.pstk")
    cut(written.path, 4096)
    with pytest.raises(DatasetError, match=r"a.pstk' is truncated"):
        open_index(written.path)


@pytest.mark.parametrize(("offset", "what"), [(30, "header"), (-4000, "tables")])
def test_a_damaged_packed_file(rows, disk_path, offset, what):
    path, _ = rows(300)
    written = pack(open_index(path), disk_path / "a.pstk")
    with open(written.path, "r+b") as file:
        file.seek(offset, 0 if offset > 0 else 2)
        file.write(b"\xff\x00\xff")
    with pytest.raises(ChecksumError, match=what):
        open_index(written.path)


def test_compressed_shards_are_refused_with_advice(disk_path):
    folder = make("mds", disk_path)
    document = json.loads((folder / "index.json").read_text())
    document["shards"][0]["compression"] = "zstd"
    (folder / "index.json").write_text(json.dumps(document))
    with pytest.raises(DatasetError, match=r"is compressed.*without compression"):
        open_index(folder)
    gone = disk_path / "gz"
    gone.mkdir()
    with tarfile.open(gone / "a.tar", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("x"))
    with pytest.raises(DatasetError, match=r"decompress it"):
        open_index(gone)


def test_an_index_json_without_a_shard(disk_path):
    folder = make("mds", disk_path)
    (folder / "index.json").unlink()
    with pytest.raises(DatasetError, match=r"needs its index\.json"):
        open_index(folder)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda p: np.save(p, np.zeros((4, 3)).T), "Fortran order"),
        (lambda p: np.save(p, np.array([{}, {}]), allow_pickle=True), "no ranges of bytes"),
        (lambda p: p.write_bytes(b"not at all"), "no .npy file"),
        (lambda p: np.save(p, np.zeros((0, 3))), "has no sample"),
    ],
)
def test_arrays_that_cannot_be_read_so(disk_path, write, says):
    path = disk_path / "a.npy"
    write(path)
    with pytest.raises(DatasetError, match=says):
        open_index(path)


@pytest.mark.parametrize(
    ("paths", "more", "error", "says"),
    [
        ("missing", {}, DatasetError, "is missing"),
        (".", {}, DatasetError, "cannot be told by their names"),
        (".", {"format_name": "csv"}, ConfigError, "none of packed"),
        (".", {"format_name": "npy"}, DatasetError, "has no file of the format npy"),
        (["a.txt"], {"format_name": "tokens"}, ConfigError, "needs context="),
        (
            ["a.txt"],
            {"format_name": "tokens", "options": {"size": 1}},
            ConfigError,
            "no option 'size'",
        ),
        (
            ["a.txt"],
            {"format_name": "tokens", "options": {"context": 1, "dtype": "float32"}},
            ConfigError,
            "no integer",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(disk_path, monkeypatch, paths, more, error, says):  # noqa: PLR0917
    monkeypatch.chdir(disk_path)
    (disk_path / "a.txt").write_text("a")
    with pytest.raises(error, match=says):
        open_index(paths, **more)


# -- a data set that changed ----------------------------------------------------------------------


def overwrite(path):
    times = os.stat(path)
    data = bytearray(path.read_bytes())
    data[200] ^= 255
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: (f / "b.npy").unlink(), "b.npy' is missing now"),
        (
            lambda f: np.save(f / "c.npy", np.zeros((1, 512), np.uint8)),
            "c.npy' was not there before",
        ),
        (lambda f: cut(f / "a.npy", 1), r"a.npy' has \d+ bytes now, had \d+"),
        (lambda f: os.utime(f / "a.npy", ns=(1, 1)), "a.npy' was modified at 1 ns"),
        (lambda f: overwrite(f / "a.npy"), "a.npy' begins with other bytes"),
    ],
)
def test_a_changed_data_set_is_refused_with_what_changed(rows, change, says):
    for name in ("a.npy", "b.npy"):
        path, _ = rows(8, name=name)
    folder = path.parent
    open_index(folder)
    change(folder)
    with pytest.raises(DatasetError, match=says):
        open_index(folder)
    if "bytes now" not in says:
        assert open_index(folder, rebuild=True).built


def test_a_damaged_index_is_told_and_a_torn_one_never_seen(rows, monkeypatch):
    path, _ = rows(8)
    opened = open_index(path)
    with open(opened.index_path, "rb") as file:
        data = bytearray(file.read())
    for at in (40, len(data) - 3):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with open(opened.index_path, "wb") as file:
            file.write(damaged)
        with pytest.raises(ChecksumError, match="remove it"):
            open_index(path)
    with open(opened.index_path, "wb") as file:
        file.write(b"something else entirely")
    with pytest.raises(DatasetError, match="no index"):
        open_index(path)

    def killed(*_):
        raise KeyboardInterrupt

    os.unlink(opened.index_path)
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        open_index(path)
    monkeypatch.undo()
    assert not os.path.exists(opened.index_path)


def test_an_index_is_small(rows):
    path, _ = rows(5000)
    assert open_index(path).index.nbytes < 2000


def test_index_dir(rows, disk_path):
    path, _ = rows(5)
    opened = open_index(path, index_dir=disk_path / "mine" / "deep")
    assert os.path.dirname(opened.index_path) == str(disk_path / "mine" / "deep")
