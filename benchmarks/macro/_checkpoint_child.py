"""One save or load of a side of ``checkpoint.py``, in this process, by whichever interpreter has it."""

import argparse
import ctypes
import gc
import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _checkpoint_sides import SIDES, build, is_same, limit_s, nbytes


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
    if options.what == "save" and hasattr(side, "before"):
        side.before(state, path)
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
    if options.what in getattr(side, "limits", ()):
        told["limit_s"] = limit_s(path, options.what)
    sys.stdout.write("RESULT " + json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--what", choices=("save", "load"))
    parser.add_argument("--path")
    parser.add_argument("--layers", type=int)
    child(parser.parse_args())


if __name__ == "__main__":
    main()
