"""Memory that the C library keeps is returned before the process runs short, and not before."""

import json
import subprocess
import sys

MIB = 1 << 20
SCRIPT = """
import ctypes, json, sys, time

from penstock.core.memory import ProcessMemory
from penstock.runtime.freed_memory import HeapTrimmer

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
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


def watched(limit_bytes, seconds):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(limit_bytes), str(seconds)],
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


def test_kept_memory_stays_where_enough_is_left():
    found = watched(1 << 40, seconds=1)
    assert found["left"] > 200 * MIB
    assert found["times"] == 0
