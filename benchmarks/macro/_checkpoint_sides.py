"""The sides of ``checkpoint.py``.

What a side needs is imported by it alone: an interpreter that has a peer need not have Penstock.
"""

import ctypes
import mmap
import os
import time

import torch

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


class Plain:
    """The engine alone, and one piece of memory, in huge pages or in those of 4 KiB."""

    def __init__(self, nbytes, huge=True):
        from penstock.io.aio import default_engine  # noqa: PLC0415
        from penstock.io.engine import Request  # noqa: PLC0415
        from penstock.io.mapping import Mapping  # noqa: PLC0415

        self.request, self.n = Request, nbytes // 4096 * 4096
        self.engine = default_engine()
        if huge:
            self.mapping = Mapping(self.n)
            self.address = self.mapping.address
        else:
            self.mapping = mmap.mmap(-1, self.n)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        ctypes.memset(self.address, 1, self.n)

    def move(self, op, places):
        """All of the memory to or from some files, each with how much of it."""
        transfers, start = [], 0
        for file, nbytes in places:
            for at in range(0, nbytes, PIECE):
                length = min(PIECE, nbytes - at)
                request = self.request(op=op, file=file, offset_bytes=at, address=self.address + start,
                                       nbytes=length, keep_alive=None)  # fmt: skip
                transfers.append(self.engine.submit(request))
                start += length
        for each in transfers:
            each.wait()


class Raw:
    """One file, one piece of memory."""

    def __init__(self, huge, reused=False):
        self.huge, self.reused = huge, reused

    def prepare(self, state):
        from penstock.io.files import open_path  # noqa: PLC0415

        self.open = open_path
        self.plain = Plain(nbytes(state), self.huge)

    def before(self, state, path):
        if self.reused:
            path.mkdir()
            self._write(path, "x+")

    def _write(self, path, mode):
        file = self.open(path / "raw", mode)
        if mode == "x+":
            file.preallocate(self.plain.n)
        self.plain.move("write", [(file, self.plain.n)])
        os.fsync(file.fd)
        file.close()

    def save(self, state, path):
        if self.reused:
            self._write(path, "r+")
            return
        path.mkdir()
        self._write(path, "x+")

    def load(self, path, state):
        file = self.open(path / "raw", "r")
        self.plain.move("read", [(file, self.plain.n)])
        file.close()


def limit_s(path, what):
    """Seconds of the engine alone for the very files of a checkpoint; a save leaves them spoiled."""
    from penstock.io.files import open_path  # noqa: PLC0415

    op, mode = ("write", "r+") if what == "save" else ("read", "r")
    newest = max(path.rglob("manifest.json"), key=lambda each: each.stat().st_mtime).parent
    found = sorted(newest.glob("*.safetensors"))
    files = [(open_path(each, mode), each.stat().st_size // 4096 * 4096) for each in found]
    plain = Plain(sum(each for _, each in files))
    start = time.perf_counter()
    plain.move(op, files)
    if what == "save":
        for file, _ in files:
            os.fsync(file.fd)
    seconds = time.perf_counter() - start
    for file, _ in files:
        file.close()
    return seconds


class Ours:
    limits = ("load",)

    def __init__(self, fresh=False):
        self.fresh = fresh

    def prepare(self, state):
        from penstock import checkpoint  # noqa: PLC0415

        self.api = checkpoint

    def save(self, state, path):
        self.api.save(path, state)

    def load(self, path, state):
        return self.api.load(path) if self.fresh else self.api.load(path, state)


class OursRetired:
    """A directory that keeps one checkpoint, and has the files of the one before that for the next."""

    limits = ("save",)

    def prepare(self, state):
        from penstock.checkpoint import Checkpointer  # noqa: PLC0415

        self.maker = Checkpointer

    def before(self, state, path):
        self.checkpoints = self.maker(path, keep=1)
        for step in (1, 2):
            self.checkpoints.save(step, state)

    def save(self, state, path):
        saved = self.checkpoints.save(3, state)
        assert saved.reused_bytes == saved.nbytes


class OursAsync:
    """The tensors are parameters; the next step of the optimizer comes at once, its worst moment."""

    def __init__(self, reused=False):
        self.reused = reused

    def prepare(self, state):
        from penstock.checkpoint import Checkpointer  # noqa: PLC0415

        self.optimizer = torch.optim.SGD([each.requires_grad_() for each in state.values()], lr=0.0)
        self.maker = Checkpointer

    def before(self, state, path):
        self.checkpoints = self.maker(path, keep=1)
        for step in (1, 2) if self.reused else ():
            self.checkpoints.save(step, {"model": state, "optimizer": self.optimizer})

    def save(self, state, path):
        parts = {"model": state, "optimizer": self.optimizer}
        saving = self.checkpoints.save(3, parts, wait=False)
        self.stall_s = saving.stall_s
        time.sleep(0.5)  # a forward and a backward pass
        saving.before_update()
        self.stall_s = saving.stall_s
        self.checkpoints.wait()


class TorchSave:
    def prepare(self, state):
        pass

    def save(self, state, path):
        path.mkdir()
        torch.save(state, path / "state.pt")

    def load(self, path, state):
        return torch.load(path / "state.pt", weights_only=True)


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
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415

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


class FastPersist:
    """DeepSpeed's writer: libaio, O_DIRECT, two halves of a pinned buffer; torch loads."""

    def prepare(self, state):
        import _fastpersist  # noqa: PLC0415

        self.writer = _fastpersist.writer_maker()

    def save(self, state, path):
        path.mkdir()
        writer = self.writer(path / "state.pt")
        torch.save(obj=state, f=writer, _use_new_zipfile_serialization=False)
        writer.close()

    def load(self, path, state):
        return torch.load(path / "state.pt", weights_only=True)


SIDES = {
    "raw": lambda: Raw(True),
    "raw_reused": lambda: Raw(True, reused=True),
    "raw_small": lambda: Raw(False),
    "ours": Ours,
    "ours_fresh": lambda: Ours(True),
    "ours_reused": OursRetired,
    "ours_async": OursAsync,
    "ours_async_reused": lambda: OursAsync(True),
    "torch_save": TorchSave,
    "safetensors": Safetensors,
    "runai": Runai,
    "dcp": Dcp,
    "dcp_async": lambda: Dcp(True),
    "fastpersist": FastPersist,
    "torchsnapshot": TorchSnapshot,
}
