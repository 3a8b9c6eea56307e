"""A job is suspended and resumed in its process: how long, at what share of flash, and what RAM is back.

A child trains a stack of layers with AdamW, large ones and small ones. Between two steps it is
suspended and resumed, as often as there are rounds, each time first into new files and then into those
that it has; first it is resumed at once, and then after some seconds, as a job that had to wait for
another. Its resident memory is read from outside. In the same rounds, in turn with it, a plain limit:
as many bytes, from huge pages, by threads with ``pwritev`` into a new file, into the very places that
the child has written (what can be had of a device depends on the place), once and once more, and back
by ``preadv``, at once and after as long, from and to memory that was away as the child's was. And in
the child itself, in turn with its suspends and resumes, the same bytes by hand from where they are to
where they were written, and back: its own memory is not in one piece, and how soon a virtual machine's
host supplies what was given back depends on which memory it was. Beside that stands what people do
today: a checkpoint by ``torch.save``, the end of the process, and a new one that loads it.

    python benchmarks/macro/suspend.py --dir /nvme/scratch
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _memory

if __name__ == "__main__":
    _memory.keep_what_is_freed()

import torch

import _results
import penstock
from penstock.cli.bandwidth import Course
from penstock.core.units import GIB, MIB, round_up
from penstock.io import pages
from penstock.io.aio import default_engine
from penstock.io.engine import Request
from penstock.io.files import open_path

WIDTH, SMALL_WIDTH = 2048, 256
"""Of square layers: tensors of 16 MiB, and of 256 KiB."""
PAIRS = 2
"""In each round: a plain write from the job's own memory, and a suspend."""
SLEEP_S = 5.0
"""For so long memory is away, a slice of another job: a virtual machine may have given it to its host."""
RAM_TARGET, RATE_TARGET = 0.95, 0.9
SHARES = (
    ("first_suspend", "write"),
    ("suspend", "overwrite"),
    ("suspend", "overwrite_again"),
    ("resume_at_once", "read_at_once"),
    ("resume", "read"),
)
"""What is compared with which limit."""
OWN_SHARES = (
    ("suspend", "own_memory"),
    ("resume_at_once", "own_memory_at_once"),
    ("resume", "own_memory_back"),
)
"""What is compared with which pairs of seconds."""


def main() -> None:
    options = parse()
    if options.child:
        job(options.child, options.depth, options.width, options.dir, options.load)
        return
    _results.warn_if_busy()
    figures = {}
    sizes = [(each, WIDTH) for each in options.bytes] + [(options.bytes[0], SMALL_WIDTH)]
    for nbytes, width in sizes:
        depth = max(1, round(nbytes / layer_bytes(width)))
        name = (
            f"{depth * layer_bytes(width) / GIB:.2f} GiB, tensors of {4 * width * width >> 10} KiB"
        )
        figures[name] = one = compare(depth, width, options)
        show(name, one)
    if not options.quick:
        config = {"rounds": options.rounds, "targets": [RAM_TARGET, RATE_TARGET]}
        path = _results.write(Path(__file__).stem, figures, config, directory=options.dir)
        print(f"wrote {path.name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=float, nargs="*", default=[1.31e9, 5.4e9])
    parser.add_argument("--quick", action="store_true", help="two rounds, small; no result file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.bytes = 2, options.bytes[:1]
    return options


def layer_bytes(width: int) -> int:
    """Weights, gradients and two moments of a layer, in float32."""
    return 16 * width * width


# -- the child ----------------------------------------------------------------------------------------


def job(kind: str, depth: int, width: int, directory: str, load: str | None) -> None:
    """Trains a step for each line that it is sent, or does what the line says; answers with one."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    features = torch.randn(8, width)
    if load:
        state = torch.load(load, mmap=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    with penstock.offload(model, optimizer, flash=directory) as session:
        step(model, optimizer, features)
        answer(seconds=time.perf_counter() - begun)
        for line in sys.stdin:
            begun = time.perf_counter()
            seconds, nbytes, places = 0.0, 0, []
            match line.strip():
                case "step":
                    step(model, optimizer, features)
                case "suspend":
                    nbytes = penstock.suspend(session).nbytes
                case "places":
                    places = places_of(session)
                case "own":
                    seconds = write_own(session)
                case "own read":
                    seconds = read_own(session)
                case "resume":
                    penstock.resume(session)
                case "forget":  # the files of the times before
                    session.space.close()
                    session.space = None
                    os.sync()  # the file system tells the device now what is free, and not later
                case "save":
                    path = Path(directory) / "checkpoint.pt"
                    torch.save(
                        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path
                    )
            seconds = seconds or time.perf_counter() - begun
            answer(seconds=seconds, nbytes=nbytes, weight=checksum(model, line), places=places)


def places_of(session: Any) -> list[tuple[int, int, int]]:
    """Where a suspended job is: descriptors, offsets and lengths."""
    pieces = [piece for each in session.suspended._batches for piece in each.ticket.place.pieces]
    return [(each.file.fd, each.offset_bytes, each.nbytes) for each in pieces]


def write_own(session: Any) -> float:
    """Suspend, resume, then write the same memory by hand to the same places; seconds of that alone."""
    penstock.suspend(session)
    own, places = own_pages(session), places_of(session)
    penstock.resume(session)
    return by_hand(os.pwritev, own, places)


def read_own(session: Any) -> float:
    """Open a suspended job's memory and read by hand from its places, then resume; seconds of the former.

    What is read is not where it belongs: the resume puts it there, and checks it.
    """
    own, places = own_pages(session), places_of(session)
    begun = time.perf_counter()
    for each in own:
        pages.unprotect_for_refill(each)
    opened = time.perf_counter() - begun
    seconds = opened + by_hand(os.preadv, own, places)
    penstock.resume(session)
    return seconds


def own_pages(session: Any) -> list[pages.PageRange]:
    """The memory of a suspended job."""
    return [each.held.pages for each in session.suspended._storages]


def by_hand(
    move: Callable[[int, list[memoryview], int], int],
    own: Iterable[pages.PageRange],
    places: Iterable[tuple[int, int, int]],
) -> float:
    """Seconds to move so much memory, piece by piece, with as many threads as the engine has."""
    own, places = deque(tuple(each) for each in own), deque(places)
    engine = default_engine()
    piece_bytes, workers = engine.spec.piece_bytes, engine.spec.workers
    engine.close()
    pieces = deque[tuple[int, memoryview, int]]()
    while own and places:
        (address, has), (fd, offset, room) = own.popleft(), places.popleft()
        length = min(has, room, piece_bytes)
        pieces.append((fd, memoryview((ctypes.c_char * length).from_address(address)), offset))
        if has > length:
            own.appendleft((address + length, has - length))
        if room > length:
            places.appendleft((fd, offset + length, room - length))
    assert not own, "what was suspended has less room than it has bytes"

    def work() -> None:
        while True:
            try:
                fd, memory, offset = pieces.popleft()
            except IndexError:
                return
            assert move(fd, [memory], offset) == memory.nbytes

    with ThreadPoolExecutor(workers) as crew:
        begun = time.perf_counter()
        for each in [crew.submit(work) for _ in range(workers)]:
            each.result()
        return time.perf_counter() - begun


def step(model: Any, optimizer: Any, features: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(features).square().mean().backward()
    optimizer.step()


def checksum(model: Any, line: str) -> float:
    """Of all weights, where they may be looked at."""
    if line.strip() not in ("step", "resume", "weigh"):
        return 0.0
    return float(sum(each.detach().double().sum() for each in model.parameters()))


def answer(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Child:
    """A process that trains, and its resident memory as seen from outside."""

    def __init__(self, depth: int, width: int, directory: str, load: Path | None = None) -> None:
        command = [sys.executable, __file__, "--child", "job", "--depth", str(depth)]
        command += [
            "--width",
            str(width),
            "--dir",
            directory,
            *(["--load", str(load)] if load else []),
        ]
        begun = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read()
        self.started_s = time.perf_counter() - begun

    def read(self) -> dict[str, Any]:
        return json.loads(self.process.stdout.readline())

    def ask(self, what: str) -> dict[str, Any]:
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.read()

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf-8").split()[1]
        return int(pages) * 4096

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


# -- the parent ---------------------------------------------------------------------------------------


def compare(depth: int, width: int, options: argparse.Namespace) -> dict[str, Any]:
    bare = Child(1, width, options.dir)
    bare.ask("step")
    bare_bytes = bare.resident_bytes - layer_bytes(width)
    bare.end()
    child = Child(depth, width, options.dir)
    child.ask("step")
    child.ask("suspend")
    child.ask("resume")
    rounds = []
    for number in range(options.rounds + 1):  # the first does not count
        child.ask("forget")
        first = child.ask("suspend")
        at_once = child.ask("resume")
        weight = child.ask("step")["weight"]
        before = child.resident_bytes
        out = child.ask("suspend")
        during = child.resident_bytes
        time.sleep(SLEEP_S)
        places = child.ask("places")["places"]
        back = child.ask("resume")
        limit = plain_limit(options.dir, child, places)
        own = [(child.ask("own")["seconds"], suspend_and_resume(child)) for _ in range(PAIRS)]
        own_read = {away_s: [read_and_resume(child, away_s, number)] for away_s in (0.0, SLEEP_S)}
        weights = [back["weight"], child.ask("weigh")["weight"]]
        assert weights == [weight, weight], "weights have changed"
        held = before - bare_bytes
        rounds.append(
            {
                "first_suspend_s": first["seconds"],
                "suspend_s": out["seconds"],
                "resume_at_once_s": at_once["seconds"],
                "resume_s": back["seconds"],
                "returned_share": (before - during) / held,
                "held_bytes": held,
                "moved_bytes": out["nbytes"],
                "own_memory": own,
                "own_memory_at_once": own_read[0.0],
                "own_memory_back": own_read[SLEEP_S],
                **limit,
            }
        )
    today = by_checkpoint(child, depth, width, options.dir)
    figures: dict[str, Any] = {"rounds": rounds[1:], "by_checkpoint": today}
    for what, of in SHARES:
        ratios = [one[f"limit_{of}_s"] / one[f"{what}_s"] for one in rounds[1:]]
        figures[f"{what}_share_of_{of}"] = _results.summary(ratios)
        rates = [one["moved_bytes"] / one[f"{what}_s"] / 1e9 for one in rounds[1:]]
        figures[f"{what}_gb_per_s"] = _results.summary(rates)
        figures[f"{what}_s"] = _results.summary([one[f"{what}_s"] for one in rounds[1:]])
    for what, pairs in OWN_SHARES:
        figures[f"{what}_share_of_own_memory"] = _results.summary(
            [plain / ours for one in rounds[1:] for plain, ours in one[pairs]]
        )
    figures["returned_share"] = min(one["returned_share"] for one in rounds[1:])
    return figures


def suspend_and_resume(child: Child) -> float:
    """Once for the memory to be as it is in ``write_own``, then seconds to suspend it."""
    for _ in range(2):
        took = child.ask("suspend")["seconds"]
        child.ask("resume")
    return float(took)


def read_and_resume(child: Child, away_s: float, number: int) -> tuple[float, float]:
    """Seconds to have the child's memory back by hand, and by itself, each after it was away so long.

    Now the one comes first, and now the other.
    """
    took = {}
    for how in ("own read", "resume") if number % 2 else ("resume", "own read"):
        child.ask("suspend")
        time.sleep(away_s)
        took[how] = float(child.ask(how)["seconds"])
    return took["own read"], took["resume"]


def plain_limit(directory: str, child: Child, places: list[list[int]]) -> dict[str, float]:
    """Seconds to write so much into a new file, and where the child has it, and to read that, by hand.

    The child is resumed, and needs what is there no more. What is read into was away as its memory was,
    and so was what is first written from: a virtual machine's host is slower with memory that is new to
    it. Written once more it is not, and nearest to what the device itself can do.
    """
    nbytes = sum(length for _, _, length in places)
    whole = round_up(nbytes, 64 * MIB)
    with (
        ExitStack() as opened,
        Course([directory], whole, default_engine(), buffer_bytes=whole) as course,
    ):
        files = {}
        for fd in {fd for fd, _, _ in places}:
            files[fd] = open_path(f"/proc/{child.process.pid}/fd/{fd}", "r+")
            opened.callback(files[fd].close)
        new = list(course.requests("overwrite", whole, 0))
        took = {"limit_write_s": course.plain_pass(new) * nbytes / whole}
        writes = requests_of("write", course, files, places)
        reads = requests_of("read", course, files, places)
        memory = pages.PageRange(course.address, whole)
        for what, away_s in (("read_at_once", 0.0), ("read", SLEEP_S)):
            pages.free_pages(memory)
            time.sleep(away_s)
            pages.unprotect(memory)
            took[f"limit_{what}_s"] = course.plain_pass(reads)
            if not away_s:  # from memory that has just come back at once, as the child's had
                took["limit_overwrite_s"] = course.plain_pass(writes)
                took["limit_overwrite_again_s"] = course.plain_pass(writes)
    return took


def requests_of(op: str, course: Course, files: Any, places: list[list[int]]) -> list[Request]:
    made, address = [], course.address
    for fd, offset, length in places:
        made.append(
            Request(
                op=op,
                file=files[fd],
                offset_bytes=offset,
                address=address,
                nbytes=length,
                keep_alive=None,
            )
        )
        address += length
    return made


def by_checkpoint(child: Child, depth: int, width: int, directory: str) -> dict[str, float]:
    """Save, end the process, start another that loads it and has made a step."""
    path = Path(directory) / "checkpoint.pt"
    try:
        saved = child.ask("save")["seconds"]
        begun = time.perf_counter()
        child.end()
        ended = time.perf_counter() - begun
        other = Child(depth, width, directory, load=path)
        other.end()
    finally:
        path.unlink(missing_ok=True)
    return {"save_and_end_s": saved + ended, "start_and_load_s": other.started_s}


def show(name: str, one: dict[str, Any]) -> None:
    held = statistics.median(each["held_bytes"] for each in one["rounds"])
    print(
        f"{name}, {held / GIB:.2f} GiB held: suspended into new files in"
        f" {one['first_suspend_s']['median']:.2f} s ({one['first_suspend_gb_per_s']['median']:.2f} GB/s,"
        f" {one['first_suspend_share_of_write']['median']:.2f} of a plain write into a new file), once"
        f" more in {one['suspend_s']['median']:.2f} s ({one['suspend_gb_per_s']['median']:.2f} GB/s,"
        f" {one['suspend_share_of_overwrite']['median']:.2f} of overwriting,"
        f" {one['suspend_share_of_overwrite_again']['median']:.2f} of doing so again,"
        f" {one['suspend_share_of_own_memory']['median']:.2f} of doing so from its own memory; wanted"
        f" {RATE_TARGET}),"
        f" {one['returned_share']:.1%} of the memory is back (wanted {RAM_TARGET:.0%});"
        f" resumed at once in {one['resume_at_once_s']['median']:.2f} s"
        f" ({one['resume_at_once_gb_per_s']['median']:.2f} GB/s,"
        f" {one['resume_at_once_share_of_read_at_once']['median']:.2f} of a plain read,"
        f" {one['resume_at_once_share_of_own_memory']['median']:.2f} of one to its own memory), after"
        f" {SLEEP_S:.0f} s in {one['resume_s']['median']:.2f} s"
        f" ({one['resume_gb_per_s']['median']:.2f} GB/s,"
        f" {one['resume_share_of_read']['median']:.2f} of a plain read,"
        f" {one['resume_share_of_own_memory']['median']:.2f} of one to its own memory);"
        " by torch.save and a restart"
        f" {one['by_checkpoint']['save_and_end_s']:.1f} s and"
        f" {one['by_checkpoint']['start_and_load_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
