"""The engines against a plain limit: read and overwrite, side by side in one run.

The limit is what one writes by hand if that is all one has to do: the same number of threads, each
with ``preadv`` or ``pwritev`` of the same pieces between the same buffers and the same file. Both
sides take turns, so that what else the machine does hits both. The figure that counts is the ratio;
beside it stands what a core does for each GiB, which training on the same cores has to do without.

    python benchmarks/micro/engine.py --dir /nvme/scratch
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _results
from penstock.cli.bandwidth import Course
from penstock.core.fs import filesystem_of
from penstock.core.units import GIB, MIB, parse_bytes
from penstock.io.aio import PIECES_TOGETHER, AioEngine
from penstock.io.engine import Priority, Request
from penstock.io.threads import ThreadEngine

TARGET = 0.95


class Bench:
    """One file, as long a buffer, one engine: the course of ``penstock bench io``."""

    def __init__(self, options, engine):
        self.engine = engine
        request = min(options.request, options.bytes)
        self.course = Course(
            [options.dir],
            options.bytes,
            self.engine,
            request_bytes=request,
            buffer_bytes=options.bytes // request * request,  # every request under way at once
        )
        self.file, self.nbytes, self.piece = (
            self.course.files[0],
            self.course.file_bytes,
            engine.spec.piece_bytes,
        )
        self.requests = {
            op: list(self.course.requests(kind, self.nbytes, 0))
            for op, kind in (("write", "overwrite"), ("read", "read"))
        }
        self.course.fill()  # a slab that was never written to is slower

    def by_engine(self, op):
        """Every request at once, as a tier submits them; bytes per second."""
        return self.nbytes / self.course.engine_pass(self.requests[op])

    def by_hand(self, op):
        """Threads that take pieces from one queue; bytes per second."""
        return self.nbytes / self.course.plain_pass(self.requests[op])

    def submit(self, op, offset, nbytes, priority=Priority.WRITE_BEHIND):
        return self.engine.submit(
            Request(
                op=op,
                file=self.file,
                offset_bytes=offset,
                address=self.course.address + offset,
                nbytes=nbytes,
                keep_alive=None,
                priority=priority,
            )
        )

    def demand_latency_ms(self, count):
        """How long one piece takes that somebody waits for: alone, and beside queued writes."""
        half = self.nbytes // 2

        def one():
            start = time.perf_counter()
            self.submit("read", half, self.piece, Priority.DEMAND).wait()
            return 1e3 * (time.perf_counter() - start)

        alone = [one() for _ in range(count)]
        beside = []
        writes = []
        for _ in range(count):
            if not writes or writes[-1].done:
                writes += [self.submit("write", 0, half) for _ in range(4)]
            beside.append(one())
        for transfer in writes:
            transfer.wait()
        return {"alone": _results.summary(alone), "beside_writes": _results.summary(beside)}


def measure(bench, rounds):
    """GB/s of both sides, turn about, and the ratio of each pair."""
    figures = {}
    for op, name in (("write", "overwrite"), ("read", "read")):
        engine, limit = [], []
        busy_ms = {id(engine): [], id(limit): []}
        sides = [(bench.by_engine, engine), (bench.by_hand, limit)]
        for index in range(rounds):
            for side, samples in sides[:: 1 if index % 2 else -1]:
                before = time.process_time()
                samples.append(side(op) / 1e9)
                used_ms = 1e3 * (time.process_time() - before)
                busy_ms[id(samples)].append(used_ms / bench.nbytes * GIB)
        ratios = [mine / plain for mine, plain in zip(engine, limit, strict=True)]
        figures[name] = {
            "engine_gb_per_s": _results.summary(engine),
            "limit_gb_per_s": _results.summary(limit),
            "ratio_of_medians": round(statistics.median(engine) / statistics.median(limit), 3),
            "ratio_of_pairs": _results.summary(ratios),
            "engine_cpu_ms_per_gib": _results.summary(busy_ms[id(engine)]),
            "limit_cpu_ms_per_gib": _results.summary(busy_ms[id(limit)]),
        }
    return figures


def by_fio(options):
    """The same transfers by fio, if it is installed. Its buffers are of 4 KiB pages."""
    if shutil.which("fio") is None:
        return None
    figures = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for op in ("write", "read"):
            command = [
                *("fio", "--name=limit", f"--filename={directory}/data", f"--rw={op}"),
                *(f"--size={options.bytes // options.threads}", f"--bs={options.piece}"),
                *("--direct=1", "--ioengine=psync", "--thread", f"--numjobs={options.threads}"),
                *("--offset_increment=" + str(options.bytes // options.threads), "--overwrite=1"),
                *("--group_reporting", "--output-format=json"),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            job = json.loads(done.stdout)["jobs"][0][op]
            name = "overwrite" if op == "write" else op
            figures[f"{name}_gb_per_s"] = round(job["bw_bytes"] / 1e9, 3)
    return figures


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the file goes")
    parser.add_argument("--quick", action="store_true", help="fewer rounds over a smaller file")
    parser.add_argument("--rounds", type=int, help="pairs of measurements (15; quick: 3)")
    parser.add_argument("--bytes", help="length of the file (1GiB; quick: 128MiB)")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--piece", default="4MiB", help="one system call")
    parser.add_argument("--request", default="32MiB", help="one request to the engine")
    parser.add_argument("--results", default=_results.RESULTS, help="where the result goes")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (3 if options.quick else 15)
    size = options.bytes or ("128MiB" if options.quick else "1GiB")
    options.bytes, options.piece, options.request = (
        parse_bytes(text) for text in (size, options.piece, options.request)
    )
    if filesystem_of(options.dir).is_memory:
        parser.error(f"{options.dir} is in memory; name a directory on a disk by --dir")
    return options


def main(arguments=None):
    options = parse(arguments)
    _results.warn_if_busy()
    engines = {"aio": AioEngine(options.threads, options.piece * PIECES_TOGETHER)}
    engines["threads"] = ThreadEngine(options.threads, options.piece)
    figures = {}
    for name, engine in engines.items():
        bench = Bench(options, engine)
        figures[name] = measure(bench, options.rounds)
        count = 20 if options.quick else 100
        figures[name]["demand_read_of_one_piece_ms"] = bench.demand_latency_ms(count)
        bench.course.close()
    figures["fio"] = by_fio(options)
    config = {
        "quick": options.quick,
        "rounds": options.rounds,
        "file_bytes": bench.nbytes,
        "threads": options.threads,
        "piece_bytes": {name: engine.spec.piece_bytes for name, engine in engines.items()},
        "request_bytes": options.request,
        "direct": bench.file.direct,
        "granule_bytes": bench.file.granule_bytes,
        "buffers": f"arena, {bench.nbytes // (2 * MIB)} pages of 2 MiB",
    }
    path = _results.write(
        Path(__file__).stem, figures, config, directory=options.dir, into=options.results
    )
    for engine, name in itertools.product(engines, ("overwrite", "read")):
        figure = figures[engine][name]
        print(
            f"{engine:8} {name:9} {figure['engine_gb_per_s']['median']:.2f} GB/s,"
            f" limit {figure['limit_gb_per_s']['median']:.2f} GB/s,"
            f" ratio {figure['ratio_of_medians']:.3f} (target {TARGET}),"
            f" {figure['engine_cpu_ms_per_gib']['median']:.0f} ms of a core for each GiB,"
            f" limit {figure['limit_cpu_ms_per_gib']['median']:.0f}"
        )
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
