"""A job of a few lines that begins at once, and writes down what it does.

    python -S -E plain_job.py CHANNEL EVENTS NAME [STEPS]

It speaks to its manager by hand, for it imports nothing of what is tested. To EVENTS go ``begins NAME``,
``wakes NAME`` and ``rests NAME``, when it is about to hold memory and holds it no more.
"""

import json
import os
import struct
import sys
import time
import zlib

HALF_BYTES = 4096


def ticks():
    with open("/proc/self/stat", encoding="utf-8") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def main(channel, events, name, steps="12"):
    fd = os.open(channel, os.O_RDWR)
    written = os.open(events, os.O_WRONLY | os.O_APPEND)
    status = {"pid": os.getpid(), "start_ticks": ticks()}

    def tell(**changes):
        status.update(changes)
        text = json.dumps(status).encode()
        os.pwrite(fd, struct.pack("<II", len(text), zlib.crc32(text)) + text, HALF_BYTES)

    def order():
        size, checksum = struct.unpack("<II", os.pread(fd, 8, 0))
        text = os.pread(fd, size, 8)
        return json.loads(text) if size and zlib.crc32(text) == checksum else {}

    def note(what):
        os.write(written, f"{what} {name}\n".encode())

    note("begins")
    note("wakes")
    tell(state="awake")
    for step in range(int(steps)):
        time.sleep(0.01)
        wanted = order()
        tell(steps=step + 1, order=wanted.get("number", 0))
        if not wanted.get("sleep"):
            continue
        note("rests")
        tell(state="asleep", sleeps=status.get("sleeps", 0) + 1, flash_bytes=1)
        while (wanted := order()).get("sleep", True):
            time.sleep(0.005)
        note("wakes")
        tell(state="awake", order=wanted["number"], flash_bytes=0)
    note("rests")
    tell(state="over", code=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
