"""Checkpoints of one training state: ours, the peers', and what the disk allows.

Each figure comes from a process of its own; the sides take turns, round by round, and ratios are of the
same round. The state has the shapes of BERT-Base with Adam's two moments: 597 float32 tensors, 1.31 GB
(``--layers`` makes it larger). What is measured:

* ``save``: from the call until every file and directory is fsynced, at the rate of the state's bytes;
* ``load``: with no page of the files in the page cache, until every byte is in the tensors' memory and
  compared with what was saved; ours into tensors that are there (``ours``) and anew (``ours_fresh``);
* ``stall_s``: until the call gives control back, and what the next step of the optimizer waits;
* ``extra_bytes``: the most anonymous memory beyond what the process had before the call;
  ``cache_left_bytes``: pages of the files that are left in the page cache, by mincore;
* ``one_flipped_bit``: whether a load notices one in the middle of the longest file.

``raw`` writes the same bytes from huge pages into one new preallocated file and fsyncs it, with the same
engine, and reads them back to huge pages that are resident; ``raw_small`` reads to resident pages of
4 KiB, which is what the memory of torch's tensors is. Peers that are not installed are left out.
``--parts`` gathers rounds over several sittings, each of them ended by ``--limit``.
"""

import argparse
import ctypes
import gc
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed.checkpoint as dcp

import _results
from penstock import checkpoint
from penstock.checkpoint import Checkpointer
from penstock.io.aio import default_engine
from penstock.io.engine import Request
from penstock.io.files import open_path
from penstock.io.mapping import Mapping

SAVES = (
    "raw",
    "ours",
    "ours_async",
    "torch_save",
    "safetensors",
    "dcp",
    "dcp_async",
    "torchsnapshot",
)
LOADS = ("raw", "raw_small", "ours", "ours_fresh", "torch_save", "safetensors", "runai", "dcp",
         "torchsnapshot")  # fmt: skip
NEEDS = {
    "safetensors": "safetensors",
    "torchsnapshot": "torchsnapshot",
    "runai": "runai-model-streamer",
}
SAVED_BY = {"raw_small": "raw", "ours_fresh": "ours", "runai": "safetensors"}
PIECE = 16 << 20


def shapes(layers):
    h, wide = 768, 3072
    found = {
        "embeddings.word": (30522, h),
        "embeddings.position": (512, h),
        "embeddings.type": (2, h),
    }
    for i in range(layers):
        for name in "qkvo":
            found[f"{i}.{name}.weight"], found[f"{i}.{name}.bias"] = (h, h), (h,)
        found |= {f"{i}.up.weight": (wide, h), f"{i}.up.bias": (wide,)}
        found |= {f"{i}.down.weight": (h, wide), f"{i}.down.bias": (h,)}
        found |= {f"{i}.norm{j}.{kind}": (h,) for j in (1, 2) for kind in ("weight", "bias")}
    found |= {"norm.weight": (h,), "norm.bias": (h,), "pooler.weight": (h, h), "pooler.bias": (h,)}
    parts = ("param", "exp_avg", "exp_avg_sq")
    return {f"{part}.{name}": each for part in parts for name, each in found.items()}


def build(layers, seed):
    made = {}
    for index, (name, shape) in enumerate(shapes(layers).items()):
        tensor = torch.empty(shape)
        words = tensor.view(-1).view(torch.int32)
        torch.arange(words.numel(), dtype=torch.int32, out=words)
        words.mul_(-1640531527).add_(seed * 7919 + index)
        made[name] = tensor
    return made


def is_same(found, layers, seed):
    wanted = build(layers, seed)
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name].view(-1).view(torch.int32), wanted[name].view(-1).view(torch.int32))
        for name in wanted
    )


def nbytes(state):
    return sum(each.nbytes for each in state.values())


class Raw:
    """One file, one piece of memory."""

    def __init__(self, huge):
        self.huge = huge

    def prepare(self, state):
        self.n = nbytes(state) // 4096 * 4096
        self.engine = default_engine()
        if self.huge:
            self.mapping = Mapping(self.n)
            self.address = self.mapping.address
        else:
            self.mapping = mmap.mmap(-1, self.n)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        ctypes.memset(self.address, 1, self.n)

    def _move(self, op, file):
        transfers = [
            self.engine.submit(Request(op=op, file=file, offset_bytes=at, address=self.address + at,
                                       nbytes=min(PIECE, self.n - at), keep_alive=None))
            for at in range(0, self.n, PIECE)
        ]  # fmt: skip
        for each in transfers:
            each.wait()

    def save(self, state, path):
        path.mkdir()
        file = open_path(path / "raw", "x+")
        file.preallocate(self.n)
        self._move("write", file)
        os.fsync(file.fd)
        file.close()

    def load(self, path, state):
        file = open_path(path / "raw", "r")
        self._move("read", file)
        file.close()


class Ours:
    def __init__(self, fresh=False):
        self.fresh = fresh

    def prepare(self, state):
        self.api = checkpoint

    def save(self, state, path):
        self.api.save(path, state)

    def load(self, path, state):
        return self.api.load(path) if self.fresh else self.api.load(path, state)


class OursAsync:
    """The tensors are parameters; the next step of the optimizer comes at once, its worst moment."""

    def prepare(self, state):
        self.optimizer = torch.optim.SGD([each.requires_grad_() for each in state.values()], lr=0.0)
        self.maker = Checkpointer

    def save(self, state, path):
        with self.maker(path) as checkpoints:
            saving = checkpoints.save(1, {"model": state, "optimizer": self.optimizer}, wait=False)
            self.stall_s = saving.stall_s
            time.sleep(0.5)  # a forward and a backward pass
            saving.before_update()
            self.stall_s = saving.stall_s


class TorchSave:
    def prepare(self, state):
        self.torch = torch

    def save(self, state, path):
        path.mkdir()
        self.torch.save(state, path / "state.pt")

    def load(self, path, state):
        return self.torch.load(path / "state.pt", weights_only=True)


class Safetensors:
    def prepare(self, state):
        import safetensors.torch as library  # noqa: PLC0415

        self.library = library

    def save(self, state, path):
        path.mkdir()
        self.library.save_file(state, path / "state.safetensors")

    def load(self, path, state):
        return self.library.load_file(path / "state.safetensors")


class Runai:
    def prepare(self, state):
        from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

        self.streamer = SafetensorsStreamer

    def load(self, path, state):
        with self.streamer() as streamer:
            streamer.stream_file(str(path / "state.safetensors"))
            return dict(streamer.get_tensors())


class Dcp:
    def __init__(self, later=False):
        self.later = later

    def prepare(self, state):
        self.dcp = dcp

    def save(self, state, path):
        writer = self.dcp.FileSystemWriter(path, sync_files=True)
        if not self.later:
            self.dcp.save(state, storage_writer=writer, no_dist=True)
            return
        start = time.perf_counter()
        future = self.dcp.async_save(state, storage_writer=writer, no_dist=True)
        self.stall_s = time.perf_counter() - start
        getattr(future, "upload_completion", future).result()

    def load(self, path, state):
        self.dcp.load(state, checkpoint_id=path, no_dist=True)
        return state


class TorchSnapshot:
    def prepare(self, state):
        import torchsnapshot  # noqa: PLC0415

        self.library = torchsnapshot

    def save(self, state, path):
        self.library.Snapshot.take(str(path), {"s": self.library.StateDict(**state)})

    def load(self, path, state):
        held = self.library.StateDict(**state)
        self.library.Snapshot(str(path)).restore({"s": held})
        return dict(held)


SIDES = {
    "raw": lambda: Raw(True),
    "raw_small": lambda: Raw(False),
    "ours": Ours,
    "ours_fresh": lambda: Ours(True),
    "ours_async": OursAsync,
    "torch_save": TorchSave,
    "safetensors": Safetensors,
    "runai": Runai,
    "dcp": Dcp,
    "dcp_async": lambda: Dcp(True),
    "torchsnapshot": TorchSnapshot,
}


def files_of(path):
    return [each for each in path.rglob("*") if each.is_file()]


def sync(path):
    for each in [path, *path.rglob("*"), path.parent]:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def cached_bytes(path):
    """Pages of the files that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = 0
    for each in files_of(path):
        size = each.stat().st_size
        if not size:
            continue
        with each.open("rb") as file:
            mapped = mmap.mmap(
                file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        start = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * (-(-size // 4096)))()
        libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages)
        found += 4096 * sum(each & 1 for each in bytes(pages))
        del start
        mapped.close()
    return found


def anonymous_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


class Peak:
    """The most anonymous memory while it is entered, looked at every two milliseconds."""

    def __enter__(self):
        self.over, self.before = threading.Event(), anonymous_bytes()
        self.most = self.before
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def _look(self):
        while not self.over.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.extra = max(self.most, anonymous_bytes()) - self.before


def prewarm(count):
    """A virtual machine's host may have taken what is free: have it back before the clock runs."""
    memory = mmap.mmap(-1, count)
    start = ctypes.c_char.from_buffer(memory)
    ctypes.memset(ctypes.addressof(start), 1, count)
    del start
    memory.close()


def child(options):
    torch.set_num_threads(1)
    side = SIDES[options.side]()
    path = Path(options.path)
    state = build(options.layers, 1 if options.what == "save" else 2)
    side.prepare(state)
    total = nbytes(state)
    gc.collect()
    if options.what != "save":
        sync(path)
        for each in files_of(path):
            fd = os.open(each, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    prewarm(total + (256 << 20))
    with Peak() as peak:
        start = time.perf_counter()
        if options.what == "save":
            side.save(state, path)
            sync(path)
            loaded = None
        else:
            loaded = side.load(path, state)
            if loaded is not None:  # what is mapped is not there yet
                for each in loaded.values():
                    each.view(-1).view(torch.uint8)[::4096].sum()
        seconds = time.perf_counter() - start
    told = {"seconds": seconds, "bytes": total, "extra": peak.extra, "cache": cached_bytes(path)}
    if options.what == "save" and hasattr(side, "stall_s"):
        told["stall_s"] = side.stall_s
    if options.what != "save":
        told["same"] = loaded is None or is_same(loaded, options.layers, 1)
    sys.stdout.write("RESULT " + json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


def run(options, side, what, path):
    command = [sys.executable, "-W", "ignore", __file__, "--side", side, "--what", what, "--path",
    str(path),
               "--layers", str(options.layers)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not told:
        return {"error": (done.stderr.strip().splitlines() or ["died"])[-1][:200]}
    return json.loads(told[0].removeprefix("RESULT "))


def flip(path):
    """One bit in the middle of the longest file."""
    longest = max(files_of(path), key=lambda each: each.stat().st_size)
    with longest.open("r+b") as file:
        file.seek(longest.stat().st_size // 2 + 12345)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())


def installed(side):
    try:
        version(NEEDS.get(side, "torch"))
    except PackageNotFoundError:
        return False
    return True


def measure(options, directory, gathered, side, number):
    """A save of one side, and the loads of what it has saved."""
    path = directory / side
    gathered.setdefault(f"{side} save", []).append(run(options, side, "save", path))
    for loader in LOADS:
        if SAVED_BY.get(loader, loader) == side and installed(loader):
            gathered.setdefault(f"{loader} load", []).append(run(options, loader, "load", path))
    if number == 0 and side in LOADS and side != "raw":
        flip(path)
        told = run(options, side, "load", path)
        verdict = "noticed" if "error" in told else "not hit" if told["same"] else "silently wrong"
        gathered[f"{side} flip"] = [verdict]
    shutil.rmtree(path, ignore_errors=True)


def all_measurements(options, parts, gathered):
    """Those that are missing; false: time was up before the last."""
    start = time.monotonic()
    saves = [each for each in SAVES if installed(each)]
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for number in range(options.rounds):
            turn = number % len(saves)
            for side in saves[turn:] + saves[:turn]:
                if len(gathered.get(f"{side} save", [])) > number:
                    continue
                if time.monotonic() - start > options.limit:
                    return False
                measure(options, Path(directory), gathered, side, number)
                if parts:
                    parts.write_text(json.dumps(gathered))
    return True


def figures(gathered):
    """Medians, and ratios of the same round."""
    made = {}
    for key, rounds in gathered.items():
        side, what = key.split()
        if what == "flip":
            made.setdefault(side, {})["one_flipped_bit"] = rounds[0]
            continue
        errors = [each["error"] for each in rounds if "error" in each]
        if errors:
            made.setdefault(side, {})[f"{what}_error"] = errors[0]
            continue
        rates = [each["bytes"] / each["seconds"] for each in rounds]
        limits = [
            each["bytes"] / each["seconds"]
            for each in gathered[f"raw {what}"]
            if "error" not in each
        ]
        told = {
            "bytes_per_s": round(statistics.median(rates)),
            "least_bytes_per_s": round(min(rates)),
            "most_bytes_per_s": round(max(rates)),
            "of_raw": round(
                statistics.median(a / b for a, b in zip(rates, limits, strict=False)), 3
            ),
            "extra_bytes": max(each["extra"] for each in rounds),
            "cache_left_bytes": max(each["cache"] for each in rounds),
        }
        if "stall_s" in rounds[0]:
            told["stall_s"] = round(statistics.median(each["stall_s"] for each in rounds), 4)
        if what == "load":
            told["same"] = all(each["same"] for each in rounds)
        made.setdefault(side, {})[what] = told
    return made


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="a directory on the device to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--parts", help="a file with the rounds of earlier sittings; they are added to"
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds of this sitting")
    parser.add_argument("--into", default=str(_results.RESULTS))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = arguments()
    if options.side:
        child(options)
    parts = Path(options.parts) if options.parts else None
    gathered = json.loads(parts.read_text()) if parts and parts.exists() else {}
    if not all_measurements(options, parts, gathered):
        return
    total = gathered["raw save"][0]["bytes"]
    config = {"rounds": len(gathered["raw save"]), "layers": options.layers, "state_bytes": total}
    config |= {f"{side}_version": version(NEEDS[side]) for side in NEEDS if installed(side)}
    made = figures(gathered)
    ours = {"raw", "ours", "ours_async"}
    peers = [made[side]["save"]["bytes_per_s"] for side in SAVES
             if side not in ours and "save" in made.get(side, {})]  # fmt: skip
    best = made["ours"]["save"]["bytes_per_s"] / max(peers)
    made["ours"]["save"]["of_best_peer"] = round(best, 3)
    _results.write(Path(__file__).stem, made, config, directory=options.dir, into=options.into)
    sys.stdout.write(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
