"""What the processes of ``integrity.py`` do, by whichever interpreter has the way.

One imports what the way needs, and forks for each thing that it is told to do: importing takes longer
than a save. A fork tells its results line by line, so that those before a crash are known, and what it
was at.
"""

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from bisect import bisect_right
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _integrity_ways import WAYS, build, is_same

SEEDS = (1, 2, 3, 4)
ANYWHERE = 64
AT_AN_END, END_BYTES = 3, 512
MOST_FILES = 24
"""Of which the ends are tried."""
LOAD_S = 60
MEMORY_BYTES = 12 << 30
"""A damaged length may not have a loader take all there is."""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way")
    parser.add_argument("--bytes", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    make = WAYS[options.way].find()
    states(make, options.bytes, *SEEDS)
    for line in sys.stdin:
        wanted = json.loads(line)
        pid = os.fork()
        if not pid:
            one(make, options, wanted)
        tell(over=os.waitpid(pid, 0)[1])


def one(make, options, wanted):
    try:
        os.setsid()
        path = Path(wanted["path"])
        temporary_files(path.parent)
        {"save": save_twice, "flips": flips, "outcomes": outcomes}[wanted["what"]](
            make(), path, options.bytes, wanted["first"]
        )
        tell(done=True)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    os._exit(0)


def temporary_files(folder):
    """Those of a way are beside what it saves."""
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None


def tell(**what):
    os.write(1, f"TOLD {json.dumps(what)}\n".encode())  # whole, or not at all


def states(way, nbytes, *seeds):
    """Made before the first fork, each of which has its own copy of what it changes."""
    return [made(seed, nbytes, getattr(way, "frozen", 0)) for seed in seeds]


made = cache(build)


def save_twice(way, path, nbytes, _):
    """Saves the first state, then the second over it; says when that begins."""
    first, second = states(way, nbytes, 1, 2)
    way.save(first, path)
    for each in [*path.rglob("*"), path]:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    tell(go=os.getpid())
    start = time.perf_counter()
    way.save(second, path)
    tell(seconds=time.perf_counter() - start)


def load(way, path, into):
    """What a load gives, or how it refuses."""
    for each in into.values():
        each.zero_()
    signal.alarm(LOAD_S)
    try:
        return way.load(path, into), ""
    except BaseException as error:  # noqa: BLE001  (DCP's are no Exceptions; whatever it is, it noticed)
        return None, said(error, path)
    finally:
        signal.alarm(0)


def said(error, path):
    """The first line, and of what; DCP's hides the error that there was."""
    for failure in getattr(error, "failures", {}).values():
        error = failure[0]
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}".replace(f"{path}/", "").replace(str(path), ".")[:160]


def flips(way, path, nbytes, begin):
    right, into = states(way, nbytes, 1, 3)
    if not path.exists():
        way.save(right, path)
        if hasattr(way, "close"):
            way.close()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for number, (kind, file, place, bit) in enumerate(places(path)):
        if number < begin:
            continue
        size = file.stat().st_size
        tell(
            begin=number,
            file=str(file.relative_to(path)),
            of=size,
            offset=place,
            bit=bit,
            kind=kind,
        )
        flip(file, place, bit)
        found, error = load(way, path, into)
        verdict = "noticed"
        if found is not None:  # what is mapped is read only now
            verdict = "harmless" if is_same(found, right) else "silently wrong"
        flip(file, place, bit)
        tell(end=number, verdict=verdict, error=error)
        del found
    found, error = load(way, path, into)
    assert found is not None, f"the bits were flipped back: {error}"
    assert is_same(found, right), "the bits were flipped back"


def places(path):
    """Of the whole checkpoint's bits some, each as likely as any; and some near the ends of each file."""
    chance = random.Random(7)
    files = [each for each in sorted(path.rglob("*")) if each.is_file() and each.stat().st_size]
    sizes = [each.stat().st_size for each in files]
    found = []
    ends = list(accumulate(sizes))
    for _ in range(ANYWHERE):
        place = chance.randrange(ends[-1])
        at = bisect_right(ends, place)
        place -= ends[at] - sizes[at]
        found.append(("anywhere", files[at], place, chance.randrange(8)))
    for file, size in list(zip(files, sizes, strict=True))[:MOST_FILES]:
        near = min(END_BYTES, size)
        picked = chance.sample(range(near), min(AT_AN_END, near))
        picked += [size - 1 - each for each in chance.sample(range(near), min(AT_AN_END, near))]
        found += [("end", file, place, chance.randrange(8)) for place in sorted(set(picked))]
    return found


def flip(file, place, bit):
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1 << bit]))


def outcomes(way, path, nbytes, begin):
    """What loads at each of several paths, and whether the next save there is whole."""
    previous, new, into, third = states(way, nbytes, *SEEDS)
    for number, folder in enumerate(sorted(path.iterdir())):
        if number < begin:
            continue
        tell(begin=number, point=folder.name)
        temporary_files(folder)
        found, error = load(way, folder / "state", into)
        verdict = "lost"
        if found is not None:
            verdict = (
                "previous"
                if is_same(found, previous)
                else "new"
                if is_same(found, new)
                else "mixed"
            )
        del found
        tell(end=number, verdict=verdict, error=error, next_save=again(way, folder, third, into))


def again(way, folder, state, into):
    """A save after a killed one, by the way as it begins anew."""
    way = type(way)()
    try:
        way.save(state, folder / "state")
        if hasattr(way, "close"):
            way.close()
    except BaseException as error:  # noqa: BLE001
        return said(error, folder / "state")
    found, error = load(way, folder / "state", into)
    return error if found is None else "whole" if is_same(found, state) else "silently wrong"


if __name__ == "__main__":
    main()
