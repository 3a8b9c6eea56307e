"""Small data sets in every format, by hand or by the format's own package, and what is in them."""

import io
import json
import tarfile

import numpy as np

TEXTS = ["", "a", "grüße", "x" * 5000, "the end"]


def npy(folder):
    array = np.arange(23 * 7, dtype="<f4").reshape(23, 7)
    np.save(folder / "a.npy", array[:10])
    np.save(folder / "b.npy", array[10:])
    return list(array), {}


def tokens(folder):
    stream = np.arange(1000, dtype="<u2")
    stream.tofile(folder / "train.bin")
    expected = [stream[i : i + 65].astype(np.int64) for i in range(0, 1000 - 64, 64)]
    return expected, {"context": 64}


def webdataset(folder):
    expected = []
    for shard in range(2):
        with tarfile.open(folder / f"{shard:02}.tar", "w") as archive:
            for i, text in enumerate(TEXTS):
                sample = {"txt": text, "cls": 10 * shard + i, "meta.json": {"i": i}}
                if i == 2:
                    del sample["cls"]
                expected.append(sample)
                for name, value in sample.items():
                    data = (json.dumps(value) if name == "meta.json" else str(value)).encode()
                    member = tarfile.TarInfo(f"{'long/' * 30}part/{shard}-{i}.{name}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return expected, {}


def mds(folder):
    expected, shards = [], []
    columns = ["image", "label", "text"]
    for shard in range(2):
        samples = []
        for i, text in enumerate(TEXTS):
            pixels = np.arange(6, dtype="<u2").reshape(2, 3) + i
            expected.append({"image": pixels, "label": 100 * shard + i, "text": text})
            data = text.encode()
            size = len(data).to_bytes(4, "little")
            samples.append(size + pixels.tobytes() + (100 * shard + i).to_bytes(8, "little") + data)
        start = 4 + 4 * (len(samples) + 1)
        ends = start + np.cumsum([0] + [len(each) for each in samples])
        body = len(samples).to_bytes(4, "little") + ends.astype("<u4").tobytes()
        (folder / f"shard.{shard}.mds").write_bytes(body + b"".join(samples))
        shards.append(
            {
                "format": "mds",
                "column_names": columns,
                "column_encodings": ["ndarray:uint16:2,3", "int", "str"],
                "column_sizes": [12, 8, None],
                "samples": len(samples),
                "compression": None,
                "raw_data": {"basename": f"shard.{shard}.mds", "bytes": int(ends[-1])},
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return expected, {}


def safetensors(folder):
    x, y = np.arange(24, dtype="<f4").reshape(6, 4), np.arange(6, dtype="<i8")
    header = {
        "__metadata__": {"of": "a test"},
        "x": {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]},
        "y": {"dtype": "I64", "shape": [6], "data_offsets": [96, 144]},
    }
    text = json.dumps(header).encode()
    front = len(text).to_bytes(8, "little") + text
    (folder / "all.safetensors").write_bytes(front + x.tobytes() + y.tobytes())
    return [{"x": x[i], "y": y[i]} for i in range(6)], {}


def images(folder):
    from PIL import Image

    expected = []
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir()
        for i in range(3):
            pixels = np.full((4 + i, 5, 3), 40 * label + i, np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
            expected.append((pixels, label))
    return expected, {}


def arrow(folder):
    import pyarrow as pa

    values = {
        "id": list(range(9)),
        "score": [0.5 * i for i in range(9)],
        "text": [*TEXTS, None, "b", "c", "d"],
        "tokens": [[i] * (i + 1) for i in range(9)],
        "pair": [[i, i + 1] for i in range(9)],
        "image": [{"bytes": bytes([i] * i), "path": f"{i}.png"} for i in range(9)],
    }
    pair = pa.array(values["pair"], pa.list_(pa.int32(), 2))
    table = pa.table({**values, "pair": pair})
    for number, part in enumerate((table.slice(0, 4), table.slice(4))):
        with pa.OSFile(str(folder / f"data-{number}.arrow"), "wb") as file:
            make = pa.ipc.new_stream if number else pa.ipc.new_file
            with make(file, table.schema) as writer:
                writer.write_table(part, max_chunksize=3)
    expected = []
    for row in table.to_pylist():
        image = row.pop("image")
        expected.append({**row, "image.bytes": image["bytes"], "image.path": image["path"]})
    return expected, {}


def parquet(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"n": list(range(100)), "s": [str(i % 7) for i in range(100)]})
    pq.write_table(table, folder / "a.parquet", row_group_size=30)
    return [table.slice(start, 30) for start in range(0, 100, 30)], {}


FORMATS = {
    "npy": npy,
    "tokens": tokens,
    "webdataset": webdataset,
    "mds": mds,
    "safetensors": safetensors,
    "images": images,
    "arrow": arrow,
    "parquet": parquet,
}
NEEDS = {"arrow": "pyarrow", "parquet": "pyarrow", "images": "PIL"}


def same(found, expected):
    """Equal, where tensors, arrays and their lists stand for each other."""
    if hasattr(expected, "column_names"):
        return found.equals(expected)
    if isinstance(expected, dict):
        return set(found) == set(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, str | bytes) or expected is None:
        return found == expected
    return np.array_equal(np.asarray(found), np.asarray(expected))
