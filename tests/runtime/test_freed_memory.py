"""Memory that the C library keeps is returned before the process runs short, and not before."""

import json
import subprocess
import sys

from penstock.runtime.freed_memory import trim_above

MIB = 1 << 20
SCRIPT = """
import ctypes, json, sys, time

from penstock.core.memory import ProcessMemory
from penstock.runtime.freed_memory import HeapTrimmer

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
ballast = bytearray(b"1") * int(sys.argv[3])
before = ProcessMemory().held_bytes()
blocks = []
for _ in range(4000):  # what is in use between them keeps them from being returned
    blocks.append(libc.malloc(65536))
    ctypes.memset(blocks[-1], 1, 65536)
    libc.malloc(2000)  # larger than the small blocks that are free already
for block in blocks:
    libc.free(block)
kept = ProcessMemory().held_bytes() - before
trimmer = HeapTrimmer(lambda held: before + int(sys.argv[1]))
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end and not trimmer.times:
    time.sleep(0.01)
trimmer.close()
left = ProcessMemory().held_bytes() - before
print(json.dumps({"kept": kept, "left": left, "times": trimmer.times, "says": str(trimmer)}))
"""


def watched(limit_bytes, seconds, ballast_bytes=0):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(limit_bytes), str(seconds), str(ballast_bytes)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kept_memory_is_returned_when_little_is_left():
    found = watched(200 * MIB, seconds=60)
    assert found["kept"] > 200 * MIB, "the C library kept nothing"
    assert found["left"] < 50 * MIB
    assert found["times"] >= 1
    assert f"({found['times']} times" in found["says"]


def test_of_much_usable_memory_no_more_is_left_unused_than_a_process_fills_meanwhile():
    found = watched(430 * MIB, seconds=1, ballast_bytes=1200 * MIB)
    assert found["kept"] < 430 * MIB - 128 * MIB  # an eighth of all would be more than is left
    assert found["times"] == 0
    assert watched(350 * MIB, seconds=60, ballast_bytes=1200 * MIB)["times"] >= 1


def test_after_a_trim_the_next_is_before_the_limit_whatever_its_size():
    for limit in (64 * MIB, 512 * MIB, 1 << 30, 8 << 30, 64 << 30, 1 << 40):
        left = limit - trim_above(limit, 0)
        assert 0 < left <= min(limit // 8, 128 * MIB)
        for free in (left // 16, left // 8, left // 2, left, 2 * left, limit // 2):
            assert limit - left <= trim_above(limit, limit - free) < limit
        assert trim_above(limit, limit) > limit  # and not all the time beyond it


def test_kept_memory_stays_where_enough_is_left():
    found = watched(1 << 40, seconds=1)
    assert found["left"] > 200 * MIB
    assert found["times"] == 0
