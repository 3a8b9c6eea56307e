"""The sides of ``dataset.py``: one epoch, or some seconds of it, by one loader, in a process of its own.

Samples are rows whose first 8 bytes are their number. A side yields batches as arrays ``[batch, bytes]``.
"""
# ruff: noqa: PLC0415  (each side imports what it measures, and nothing of the others)

import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np

BATCH_BYTES = 1 << 20
MOST_BYTES_PER_S = 1.6e10
"""That any side may deliver."""
PEER = json.loads(sys.argv[1])["side"] if len(sys.argv) > 1 else ""
"""The folder of this side's own form."""


def batch_of(size):
    return max(4, min(64, BATCH_BYTES // size))


def memmap(folder, size, seed):
    rows = np.memmap(folder / "rows.bin", np.uint8, "r").reshape(-1, size)
    order, batch = np.random.default_rng(seed).permutation(len(rows)), batch_of(size)
    for start in range(0, len(rows) - batch + 1, batch):
        yield rows[np.sort(order[start : start + batch])]


def make_webdataset(folder, size):
    import webdataset

    (folder / PEER).mkdir()
    name = str(folder / PEER / "%05d.tar")
    with webdataset.ShardWriter(name, maxsize=1 << 26, maxcount=10**9, verbose=0) as writer:
        for number, row in enumerate(
            np.memmap(folder / "rows.bin", np.uint8, "r").reshape(-1, size)
        ):
            writer.write({"__key__": f"{number:09d}", "x.bin": row.tobytes()})


def webdataset(folder, size, seed):
    import random

    import webdataset

    shards = sorted(map(str, (folder / PEER).iterdir()))
    held = max(16, (20 << 20) // size)  # 5000 samples of 4 KiB, as its manual has it
    rows = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=seed, empty_check=False)
    yield from batches((s["x.bin"] for s in rows.shuffle(held, rng=random.Random(seed))), size)


def make_mosaicml(folder, size):
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / PEER), columns={"x": "bytes"}, size_limit=1 << 26) as writer:
        for row in np.memmap(folder / "rows.bin", np.uint8, "r").reshape(-1, size):
            writer.write({"x": row.tobytes()})


def mosaicml(folder, size, seed):
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    rows = StreamingDataset(
        local=str(folder / PEER), shuffle=True, shuffle_seed=seed, batch_size=batch_of(size)
    )
    yield from batches((row["x"] for row in rows), size)


def make_litdata(folder, size):
    from litdata.streaming import Cache

    cache = Cache(str(folder / PEER), chunk_bytes=1 << 26)
    for number, row in enumerate(np.memmap(folder / "rows.bin", np.uint8, "r").reshape(-1, size)):
        cache[number] = row.tobytes()
    cache.done()
    cache.merge()


def litdata(folder, size, seed):
    from litdata import StreamingDataset

    rows = StreamingDataset(str(folder / PEER), shuffle=True, seed=seed)
    yield from batches(rows, size)


def make_huggingface(folder, size):
    import pyarrow as pa

    (folder / PEER).mkdir()
    schema = pa.schema([("x", pa.large_binary())])
    rows = np.memmap(folder / "rows.bin", np.uint8, "r").reshape(-1, size)
    each = max(1, (16 << 20) // size)
    with (
        pa.OSFile(str(folder / PEER / "data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, schema) as writer,
    ):
        for start in range(0, len(rows), each):
            part = [row.tobytes() for row in rows[start : start + each]]
            writer.write_batch(pa.record_batch([pa.array(part, pa.large_binary())], schema))


def huggingface(folder, size, seed):
    import datasets

    rows = datasets.Dataset.from_file(str(folder / PEER / "data.arrow"))
    order, batch = np.random.default_rng(seed).permutation(len(rows)), batch_of(size)
    for start in range(0, len(rows) - batch + 1, batch):
        yield from batches(rows[order[start : start + batch].tolist()]["x"], size)


def batches(rows, size):
    held = []
    for row in rows:
        held.append(np.frombuffer(row, np.uint8))
        if len(held) == batch_of(size):
            yield np.stack(held)
            held = []


class Ours:
    def __init__(self, folder, size, seed, order, memory):
        from penstock.data import FlashDataset, FlashLoader

        rows = {"context": size, "dtype": "uint8", "extra": 0}
        dataset = FlashDataset(
            folder / "rows.bin",
            format="tokens",
            decode="raw",
            memory=memory,
            index_dir=folder,
            **rows,
        )
        self.loader = FlashLoader(dataset, batch_of(size), order=order, seed=seed)

    def __iter__(self):
        for batch in self.loader:
            yield batch.numpy()


PEERS = {
    "memmap": memmap,
    "webdataset": webdataset,
    "mosaicml-streaming": mosaicml,
    "litdata": litdata,
    "datasets": huggingface,
}
MAKERS = {
    "webdataset": make_webdataset,
    "mosaicml-streaming": make_mosaicml,
    "litdata": make_litdata,
    "datasets": make_huggingface,
}


def anonymous_bytes():
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    return sum(1024 * int(found[name].split()[0]) for name in ("RssAnon", "RssShmem"))


class Memory:
    """The most anonymous memory, sampled."""

    def __enter__(self):
        self.before, self.most, self._over = anonymous_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()

    def _watch(self):
        while not self._over.wait(0.01):
            self.most = max(self.most, anonymous_bytes() - self.before)


def cached_bytes(files):
    """What the page cache has of some files."""
    import ctypes
    import mmap

    libc, total = ctypes.CDLL(None), 0
    for file in files:
        with open(file, "rb") as opened:
            nbytes = os.fstat(opened.fileno()).st_size
            if not nbytes:
                continue
            mapped = mmap.mmap(opened.fileno(), nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-nbytes // 4096), np.uint8)
        libc.mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(nbytes),
            pages.ctypes.data_as(ctypes.c_void_p),
        )
        total += int((pages & 1).sum()) * 4096
    return total


class Notes:
    """Which samples were delivered, in memory that is there before any is measured."""

    def __init__(self, seconds, size):
        self._all = np.full(int(seconds * MOST_BYTES_PER_S / size), -1, np.int32)
        self._count, self._begins = 0, []

    def begin_epoch(self):
        self._begins.append(self._count)

    def add(self, batch):
        after = self._count + len(batch)
        self._all[self._count : after] = batch[:, :8].copy().view(np.int64)[:, 0]
        self._count = after

    def epochs(self):
        return np.split(self._all[: self._count], self._begins[1:])


def measure(folder, side, size, seconds, memory):
    import torch  # noqa: F401  (in every process, so that none has an advantage)

    if side.startswith("ours"):
        import penstock.data.loader  # noqa: F401  (code is not what a loader holds)

    files = [folder / "rows.bin", *(each for each in (folder / PEER).rglob("*") if each.is_file())]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    name, _, order = side.partition(":")
    notes, epochs, first_s = Notes(seconds, size), [], 0.0
    with Memory() as held:
        started = time.perf_counter()
        ours = Ours(folder, size, 7, order, memory) if order else None
        while sum(epoch["took_s"] for epoch in epochs) < seconds:
            made = PEERS[name](folder, size, 7 + len(epochs)) if ours is None else ours
            notes.begin_epoch()
            epoch_samples = 0
            begun = time.perf_counter()
            for count, batch in enumerate(made):
                now = time.perf_counter()
                first_s = first_s or now - started
                if not count:
                    first, begun_after = len(batch), now
                notes.add(batch)
                epoch_samples += len(batch)
                if now - started > seconds:
                    break
            ended = time.perf_counter()
            rest = {"samples": epoch_samples - first, "rest_s": ended - begun_after}
            epochs.append({"took_s": ended - begun, **rest})
        took = time.perf_counter() - started
        cached = cached_bytes(files)
    numbers = notes.epochs()
    delivered = numbers[0]
    samples, rest_s = (sum(epoch[name] for epoch in epochs) for name in ("samples", "rest_s"))
    every = sum(map(len, numbers))
    total = (folder / "rows.bin").stat().st_size // size
    result = {
        "samples_per_s": round(every / took),
        "gb_per_s": round(every * size / took / 1e9, 4),
        "steady_gb_per_s": round(samples * size / max(rest_s, 1e-9) / 1e9, 3) if samples else 0.0,
        "epochs": len(epochs),
        "delivered_bytes": every * size,
        "first_batch_s": round(first_s, 3),
        "anonymous_mib": round(held.most / 2**20, 1),
        "page_cache_mib": round(cached / 2**20, 1),
        "delivered_share": round(len(delivered) / total, 3),
        "each_once": all(len(np.unique(each)) == len(each) for each in numbers),
        "spread": round(spread(delivered, total, batch_of(size)), 3),
    }
    if order:
        result["stated_mib"] = round(made.loader.held_bytes / 2**20, 1)
        result["order"] = made.loader.order.to_json()
        made.loader.close()
    return result


def spread(samples, total, batch):
    """Of 1000 regions of the set, how many a batch touches, over what is expected."""
    regions = min(1000, total)
    rows = np.sort(samples[: len(samples) // batch * batch].reshape(-1, batch) * regions // total)
    touched = 1 + (np.diff(rows, axis=1) != 0).sum(axis=1)
    return float(touched.mean() / (regions * (1 - (1 - 1 / regions) ** batch)))


def device(folder, size, seconds, sequential):
    """What the kernel delivers to one thread, in whole epochs, as ``measure`` has them from a loader.

    The queue is as deep as that of the engine, which has as many bytes, or reads, in flight. It is
    empty when an epoch begins, and empties at its end. Both rates are without the time to the first batch
    of an epoch, whose bytes are not counted either.
    """
    from penstock.core import knobs
    from penstock.io.batch import _EVENT, _IOCB, SLICE_BYTES, SLICE_ENTRIES
    from penstock.io.context import Context
    from penstock.io.mapping import Mapping

    length = min(size, 1 << 20) if not sequential else 1 << 20
    depth = knobs.io_threads() * min(SLICE_ENTRIES, max(1, SLICE_BYTES // length))
    descriptor = os.open(folder / "rows.bin", os.O_RDONLY | os.O_DIRECT)
    places = os.fstat(descriptor).st_size // length
    length_read = -(-length // 4096) * 4096
    order = np.arange(places) if sequential else np.random.default_rng(1).permutation(places)
    memory, context = Mapping(-(-depth * length_read // (2 << 20)) * (2 << 20)), Context(depth)
    memory.populate(0, memory.nbytes)
    blocks, events = np.zeros(depth, _IOCB), np.zeros(depth, _EVENT)
    blocks["token"], blocks["file"], blocks["nbytes"] = np.arange(depth), descriptor, length_read
    blocks["address"] = memory.address + np.arange(depth) * length_read
    pointers = blocks.ctypes.data + np.arange(depth, dtype=np.uint64) * np.uint64(64)
    first_bytes = batch_of(size) * size

    def epoch(until):
        """Read every place once; (bytes after the first batch, seconds after it, seconds)."""
        free, position, done, end = np.arange(depth), 0, 0, places
        counted_from = done_by_then = 0
        begun = time.perf_counter()
        while done < end:
            now = time.perf_counter()
            if not counted_from and done * length >= first_bytes:
                counted_from, done_by_then = now, done
            if now > until:
                end = position
            free = free[: end - position]
            blocks["offset"][free] = order[position : position + len(free)] * length // 4096 * 4096
            handed = np.ascontiguousarray(pointers[free])
            sent = 0
            while sent < len(free):
                taken = context.submit(len(free) - sent, handed[sent:].ctypes.data)
                assert taken > 0, "the kernel does not take a read"
                sent += taken
            position += sent
            least = min(max(1, depth // 8), position - done)
            found = context.events(least, depth, events.ctypes.data, None)
            free, done = events["token"][:found].astype(np.int64), done + found
        ended = time.perf_counter()
        return (done - done_by_then) * length, ended - (counted_from or begun), ended - begun

    epochs = []
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        epochs.append(epoch(started + seconds))
    context.close()
    os.close(descriptor)
    counted, counted_s, _ = map(sum, zip(*epochs, strict=True))
    return {
        "gb_per_s": round(counted / counted_s / 1e9, 3),
        "requests_per_s": round(counted / length / counted_s),
        "epochs": len(epochs),
        "depth": depth,
    }


def main():
    job = json.loads(sys.argv[1])
    folder, size = Path(job["folder"]), job["size"]
    if job.get("cgroup"):
        Path(job["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    if job["op"] == "make":
        if job["side"] in MAKERS:
            MAKERS[job["side"]](folder, size)
        result = {}
    elif job["op"] == "device":
        result = device(folder, size, job["seconds"], job["side"] == "sequential")
    else:
        result = measure(folder, job["side"], size, job["seconds"], job["memory"])
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # some peers leave threads behind that never end


if __name__ == "__main__":
    main()
