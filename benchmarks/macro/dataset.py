"""Data sets on flash: ours beside the loaders that people use, and the device, under a limit on DRAM.

Each side runs in a process of its own, in a cgroup whose limit on memory is less than half of the data
(where one
can be made), page cache included; files are cold. Ours is given 64 MiB. Every side delivers batches of
rows as arrays, of a shuffled epoch (ours also in sequence), one process, no workers.

    python benchmarks/macro/dataset.py --dir /nvme/scratch --peers-python peers/bin/python
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import _results
from penstock.core.units import parse_bytes

SIDES = Path(__file__).with_name("_dataset_sides.py")
OURS = ("ours:sequential", "ours:window", "ours:full")
PEERS = ("memmap", "webdataset", "mosaicml-streaming", "litdata", "datasets")
CGROUP = Path("/sys/fs/cgroup/memory/penstock-dataset")


def make_rows(path, nbytes, size):
    """Rows of random bytes that begin with their number; the same for every run."""
    random = np.random.default_rng(0)
    count, each = nbytes // size, max(1, (64 << 20) // size)
    with open(path, "wb") as file:
        for start in range(0, count, each):
            rows = random.integers(0, 256, (min(each, count - start), size), np.uint8)
            rows[:, :8] = np.arange(start, start + len(rows))[:, None].view(np.uint8)
            file.write(rows.data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def limit_memory(limit_bytes):
    """A cgroup with a limit (version 1), or None."""
    try:
        CGROUP.mkdir(exist_ok=True)
        (CGROUP / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError:
        return None
    return str(CGROUP)


def run(options, folder, size, op, side, cgroup):  # noqa: PLR0917
    """One job in a process of its own; its result, or why there is none."""
    job = {"folder": str(folder), "size": size, "op": op, "side": side, "cgroup": cgroup}
    job |= {"seconds": options.seconds, "memory": options.memory}
    python = options.peers_python if side in PEERS else sys.executable
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [python, str(SIDES), json.dumps(job)],
            capture_output=True, text=True, timeout=options.patience, check=False, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {options.patience} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"error": f"exit {done.returncode}: {last[:160]}".replace(str(folder), "DIR")}


def prepare(options, root, size):
    """The rows in every side's own form; why not, where that failed."""
    folder = Path(root) / str(size)
    folder.mkdir()
    make_rows(folder / "rows.bin", options.bytes, size)
    return {side: run(options, folder, size, "make", side, None) for side in PEERS}


def of_size(options, root, size, made, cgroup):
    folder = Path(root) / str(size)
    found = {}
    sides = ("device:sequential", OURS[0], "device:sequential:after", OURS[1])
    for side in (*sides, "device:random", OURS[2], "device:random:after", *PEERS):
        op, how = ("device", side.split(":")[1]) if "device" in side else ("measure", side)
        limit = None if op == "device" else cgroup
        found[side] = made.get(side) or run(options, folder, size, op, how, limit)
        tell(size, side, found)
    shutil.rmtree(folder)
    return found | {"ratios": ratios(found)}


@contextlib.contextmanager
def alone(path):
    """Nobody else who locks this file measures meanwhile."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ratios(found):
    """The figures that count."""
    rate = {
        side: each.get("steady_gb_per_s", each.get("gb_per_s", 0.0)) for side, each in found.items()
    }
    for kind in ("sequential", "random"):  # the device of a virtual machine changes by the second
        rate[f"device:{kind}"] = (rate[f"device:{kind}"] + rate[f"device:{kind}:after"]) / 2
    best = max(PEERS, key=rate.__getitem__)
    shuffled = max(rate["ours:window"], rate["ours:full"])
    return {
        "sequential_of_device": round(rate["ours:sequential"] / rate["device:sequential"], 3),
        "random_of_device": round(rate["ours:full"] / rate["device:random"], 3),
        "best_peer": best,
        "shuffled_of_best_peer": round(shuffled / max(rate[best], 1e-9), 2),
        "full_shuffle_of_best_peer": round(rate["ours:full"] / max(rate[best], 1e-9), 2),
    }


def tell(size, side, found):
    print(f"{size:8} {side:20} {json.dumps(found[side])}", flush=True)


def versions(python):
    code = (
        "import importlib.metadata as m, json\n"
        "def of(n):\n"
        "    try: return m.version(n)\n"
        "    except m.PackageNotFoundError: return None\n"
        "print(json.dumps({n: of(n) for n in ('numpy', 'torch', 'webdataset', 'mosaicml-streaming',"
        " 'litdata', 'datasets', 'pyarrow')}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the data go")
    parser.add_argument("--quick", action="store_true", help="less data, 4 KiB samples only")
    parser.add_argument("--bytes", help="of data (1GiB; quick: 512MiB)")
    parser.add_argument("--sizes", default="4096,102400,1048576", help="of samples")
    parser.add_argument("--memory", default="64MiB", help="that ours is given")
    parser.add_argument("--seconds", type=float, help="of each side (3; quick: 1)")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for a side")
    parser.add_argument("--limit", default="384MiB", help="on DRAM, page cache included")
    parser.add_argument("--alone", metavar="FILE", help="to be locked while measuring")
    parser.add_argument("--peers-python", default=sys.executable, help="that has the peers")
    parser.add_argument("--results", default=_results.RESULTS, help="where the result goes")
    options = parser.parse_args(arguments)
    options.bytes = parse_bytes(options.bytes or ("512MiB" if options.quick else "1GiB"))
    options.seconds = options.seconds or (1.0 if options.quick else 3.0)
    sizes = [4096] if options.quick else [int(text) for text in options.sizes.split(",")]
    options.sizes = sizes
    return options


def main(arguments=None):
    options = parse(arguments)
    limit_bytes = parse_bytes(options.limit)
    cgroup = limit_memory(limit_bytes)
    figures = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as root:
        made = {size: prepare(options, root, size) for size in options.sizes}
        with alone(options.alone):
            for size in options.sizes:
                figures[f"{size}_bytes"] = of_size(options, root, size, made[size], cgroup)
    config = {
        "quick": options.quick,
        "data_bytes": options.bytes,
        "steady": "without the time to each epoch's first batch",
        "dram_limit_bytes": limit_bytes if cgroup else None,
        "memory_of_ours": options.memory,
        "seconds": options.seconds,
        "peers": versions(options.peers_python),
    }
    _results.write(
        Path(__file__).stem, figures, config, directory=options.dir, into=options.results
    )
    if cgroup:
        CGROUP.rmdir()


if __name__ == "__main__":
    main()
