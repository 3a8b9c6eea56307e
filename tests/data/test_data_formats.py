"""Every format, as it is and packed: each sample has the value that was written, in any batch."""

import io
import json
import os
import tarfile
from decimal import Decimal

import numpy as np
import pytest
from data_files import FORMATS, NEEDS, same

from penstock.cli import main
from penstock.core.errors import ChecksumError, ConfigError, DatasetError, PenstockWarning
from penstock.data import FlashDataset, FlashLoader, open_index, pack


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


def tar_of(path, *members, sparse=()):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in members:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            if name in sparse:
                member.pax_headers = {"GNU.sparse.map": f"0,{len(name)}", "GNU.sparse.size": "4096"}
            archive.addfile(member, io.BytesIO(name.encode()))


def test_tars_as_people_make_them(disk_path):
    """As WebDataset has it: extensions in any case; what has no key or no extension is no sample."""
    names = (
        "./a/1.JPG",
        "./a/1.Seg.PNG",
        "./a/._1.JPG",
        "./README",
        "./a/2.jpg",
        "__notes__/x.json",
    )
    tar_of(disk_path / "a.tar", *names)
    dataset = FlashDataset(
        disk_path, decode=lambda s: {k: bytes(v) for k, v in s.fields.items() if v}
    )
    assert list(dataset.__getitems__([0, 1])) == [
        {"jpg": b"./a/1.JPG", "seg.png": b"./a/1.Seg.PNG"},
        {"jpg": b"./a/2.jpg"},
    ]
    assert len(dataset) == 2
    dataset.close()


def mds_of(folder, encoding, *values):
    """A shard of one column of any length."""
    samples = [len(each).to_bytes(4, "little") + each for each in values]
    ends = 4 + 4 * (len(samples) + 1) + np.cumsum([0] + [len(each) for each in samples])
    data = len(samples).to_bytes(4, "little") + ends.astype("<u4").tobytes() + b"".join(samples)
    (folder / "0.mds").write_bytes(data)
    columns = {"column_names": ["x"], "column_encodings": [encoding], "column_sizes": [None]}
    raw = {"basename": "0.mds", "bytes": len(data)}
    shard = {**columns, "samples": len(samples), "compression": None, "raw_data": raw}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


CUBE = np.arange(12, dtype="<i2").reshape(2, 3, 2)


@pytest.mark.parametrize(
    ("encoding", "data", "expected"),
    [
        ("ndarray:int16", bytes([3 << 2, 2, 3, 2]) + CUBE.tobytes(), CUBE),
        ("ndarray", bytes([17, 3 << 2 | 1, 2, 0, 3, 0, 2, 0]) + CUBE.tobytes(), CUBE),
        ("ndarray", bytes([66, 1 << 2, 2]) + np.array([0.5, -1]).tobytes(), np.array([0.5, -1])),
        ("float16", np.float16(1.5).tobytes(), 1.5),
        ("uint64", b"\xff" * 8, 2**64 - 1),
        ("str_int", b"-1" + b"0" * 30, -(10**30)),
        ("str_float", b"0.25", 0.25),
        ("str_decimal", b"1.10", Decimal("1.10")),
        ("pil", np.array([1, 2, 1], "<u4").tobytes() + b"Lab", [[[97] * 3], [[98] * 3]]),
    ],
)
def test_encodings_of_mds(disk_path, encoding, data, expected):
    if encoding == "pil":
        pytest.importorskip("PIL")
    mds_of(disk_path, encoding, data)
    dataset = FlashDataset(disk_path)
    found = dataset[0]["x"]
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    assert getattr(expected, "dtype", None) in (None, np.asarray(found).dtype)
    dataset.close()


def test_encodings_of_mds_that_are_not_known_are_told_at_once(disk_path):
    mds_of(disk_path, "pkl", b"N.")
    with pytest.raises(
        ConfigError, match=r"'pkl' of the column 'x' is not known here: pass decode="
    ):
        FlashDataset(disk_path)
    dataset = FlashDataset(disk_path, decode=lambda sample: bytes(sample.data[4:]))
    assert dataset[0] == b"N."
    dataset.close()


def test_links_to_folders_are_followed(disk_path):
    """As torchvision's ImageFolder does; one that leads back does not lead round for ever."""
    for name in ("elsewhere", "set/cat"):
        (disk_path / name).mkdir(parents=True)
        (disk_path / name / "1.png").write_bytes(b"1")
    (disk_path / "set" / "dog").symlink_to(disk_path / "elsewhere")
    (disk_path / "elsewhere" / "up").symlink_to(disk_path / "elsewhere")
    (disk_path / "set" / "cat" / "all").symlink_to(disk_path / "set")
    opened = open_index(disk_path / "set")
    assert opened.index.meta["classes"] == ["cat", "dog"]
    assert opened.index.labels.tolist() == [0, 1]


@pytest.mark.parametrize("rows", [1, 5])
def test_arrays_of_the_other_byte_order(disk_path, rows):
    values = np.linspace(0, 1, 7 * rows).reshape(rows, 7)
    np.save(disk_path / "a.npy", values.astype(">f4"))
    with FlashLoader(FlashDataset(disk_path), rows, order="sequential") as loader:
        (batch,) = loader
    assert np.array_equal(batch.numpy(), values.astype("<f4"))
    assert np.array_equal(loader.dataset[0].numpy(), values[0].astype("<f4"))
    loader.dataset.close()


@pytest.mark.parametrize("dtype", [[("x", "<f4"), ("y", "<i8")], "<U3", "<M8[s]"])
def test_arrays_that_make_no_tensor_are_refused_at_once(disk_path, dtype):
    np.save(disk_path / "a.npy", np.zeros(3, dtype))
    with pytest.raises(ConfigError, match="makes no tensor: pass decode="):
        FlashDataset(disk_path)
    dataset = FlashDataset(disk_path, decode=lambda sample: len(sample.data))
    assert dataset[2] == np.dtype(dtype).itemsize
    dataset.close()


def arrow_of(path, **columns):
    pa = pytest.importorskip("pyarrow")
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def test_columns_that_are_left_out_are_told(disk_path, capsys):
    arrow_of(disk_path / "a.arrow", n=[1, 2], flag=[True, False], when=[None, None])
    with pytest.warns(PenstockWarning, match=r"left out: flag: bool, when: null"):
        dataset = FlashDataset(disk_path)
    assert same(dataset[1], 2)
    dataset.close()
    assert main(["data", "info", str(disk_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["flag: bool", "when: null"]


def test_columns_and_batches_without_a_value(disk_path):
    """Their buffers are empty, and lie nowhere: a file is not taken for a compressed one."""
    pa = pytest.importorskip("pyarrow")
    text, lists = pa.array([None, None], pa.string()), pa.array([[], None], pa.list_(pa.int32()))
    table = pa.table({"n": [1, 2], "text": text, "lists": lists})
    with (
        pa.OSFile(str(disk_path / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        for part in (table.slice(0, 0), table, table.slice(1)):
            writer.write_table(part)
    dataset = FlashDataset(disk_path)
    expected = table.to_pylist()
    assert all(map(same, dataset.__getitems__([0, 1, 2]), [*expected, expected[1]]))
    dataset.close()


def test_a_column_named_as_a_field_of_another(disk_path):
    arrow_of(disk_path / "a.arrow", **{"a": [1, 2], "a.b": [3, 4]})
    dataset = FlashDataset(disk_path)
    assert same(dataset[1], {"a": 2, "a.b": 4})
    dataset.close()


def test_lists_with_items_that_are_null_are_refused(disk_path):
    """There is some number in the place of a null."""
    arrow_of(disk_path / "a.arrow", t=[[1, 2], None, [3]])
    FlashDataset(disk_path).close()
    arrow_of(disk_path / "a.arrow", t=[[1, 2], None, [3, None]])
    with pytest.raises(DatasetError, match=r"column 't' have items that are null"):
        FlashDataset(disk_path, rebuild=True)


def test_what_a_function_raises_names_the_sample(rows):
    path, _ = rows(4)
    dataset = FlashDataset(path, decode=lambda sample: int(bytes(sample.data[:4])))
    with pytest.raises(ValueError, match="invalid literal") as told:
        dataset[2]
    assert f"decoding sample 2 of '{path}'" in told.value.__notes__
    dataset.close()


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


def test_a_shard_that_is_listed_and_missing(disk_path):
    """It would be samples that nobody misses; but who names files has them."""
    folder = make("mds", disk_path)
    (folder / "shard.1.mds").unlink()
    with pytest.raises(
        DatasetError, match=r"shard\.1\.mds' is missing: the index\.json .*1 of 2 files"
    ):
        open_index(folder)
    assert open_index(folder / "shard.0.mds").index.samples == 5


def test_what_datasets_saved_and_part_of_it_is_missing(disk_path):
    for number in range(2):
        arrow_of(disk_path / f"data-0000{number}-of-00002.arrow", n=[number])
    listed = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (disk_path / "state.json").write_text(json.dumps({"_data_files": listed}))
    assert open_index(disk_path).index.samples == 2
    (disk_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        DatasetError, match=r"data-00001-of-00002\.arrow' is missing: the state\.json"
    ):
        open_index(disk_path, rebuild=True)
    (disk_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DatasetError, match="has several splits"):
        open_index(disk_path, rebuild=True)


@pytest.mark.parametrize(
    ("members", "sparse", "says"),
    [
        (("1.jpg", "1.txt", "1.jpg"), (), r"two members '1' with the extension 'jpg'"),
        (("1.jpg", "2.jpg"), ("2.jpg",), r"'2.jpg' is a sparse file"),
    ],
)
def test_tars_that_cannot_be_read_so(disk_path, members, sparse, says):
    tar_of(disk_path / "a.tar", *members, sparse=sparse)
    with pytest.raises(DatasetError, match=says):
        open_index(disk_path)


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
        (".", {}, DatasetError, "cannot be told from names"),
        (["a.txt"], {}, DatasetError, "the format of '[^']*/a.txt' cannot be told"),
        (".", {"format_name": "csv"}, ConfigError, "none of packed"),
        (".", {"format_name": "npy"}, DatasetError, "has no file of the format npy"),
        (["a.txt"], {"format_name": "tokens"}, ConfigError, "needs the option context="),
        (
            ["a.txt"],
            {"format_name": "tokens", "options": {"context": "x"}},
            ConfigError,
            "option context of a token file is 'x'",
        ),
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


def test_a_damaged_index_is_built_anew_and_a_torn_one_never_seen(rows, monkeypatch):
    path, _ = rows(8)
    opened = open_index(path)
    with open(opened.index_path, "rb") as file:
        data = bytearray(file.read())
    for at in (40, len(data) - 3):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with open(opened.index_path, "wb") as file:
            file.write(damaged)
        with pytest.warns(PenstockWarning, match="damaged"):
            assert open_index(path).built
        assert not open_index(path).built
    with open(opened.index_path, "wb") as file:
        file.write(b"something else entirely")
    with pytest.warns(PenstockWarning, match="no index"):
        assert open_index(path).built

    def killed(*_, **__):
        raise KeyboardInterrupt

    os.unlink(opened.index_path)
    monkeypatch.setattr(os, "rename", killed)
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
