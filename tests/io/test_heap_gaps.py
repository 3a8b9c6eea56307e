"""Gaps that freed blocks leave in the heap of the C library are not filled by large blocks once taken."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or newer"
)

PROGRAM = """
import ctypes, json, sys
from penstock.io import pages

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
MIB = 1 << 20


def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024


def touched(nbytes):
    block = libc.malloc(nbytes)
    ctypes.memset(block, 1, nbytes)
    return block


start = anonymous()
libc.free(libc.malloc(31 * MIB))  # from now on, blocks of up to 31 MiB are in the heap
blocks = [touched(4 * MIB) for _ in range(40)]
fences = touched(MIB // 2)  # the heap cannot end before it
for block in blocks:
    libc.free(block)
pages.return_freed_blocks()
pages.trim_heap()
gaps = pages.HeapGaps() if sys.argv[1] == "taken" else None
for block in [touched(4 * MIB) for _ in range(20)]:
    libc.free(block)
stays = anonymous() - start
if gaps is not None:
    gaps.close()
    gaps.close()
print(json.dumps({"stays": stays, "free": pages.free_heap_bytes()}))
"""


def test_a_heap_that_grows_for_large_blocks_has_no_end():
    """As the user can have it, by the threshold from which on blocks are mapped."""
    program = "from penstock.io.pages import HeapGaps; print(len(HeapGaps()._blocks))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 31)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100


@pytest.mark.parametrize(("way", "is_returned"), [("taken", True), ("left", False)])
def test_large_blocks_are_returned_though_the_heap_had_gaps(way, is_returned):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["stays"] < 8 << 20) is is_returned
    assert found["free"] > 100 << 20  # the gaps are there again
