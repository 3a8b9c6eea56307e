"""Bandwidth of directories, through Penstock's engine and through plain system calls.

Both sides move the same ranges of the same files to and from the same memory, alternately and in
changing order, so that the result is a ratio of measurements close in time. The plain side uses threads,
``preadv`` and ``pwritev``, and nothing of Penstock.

1. :class:`Course` makes unlinked files, fills them once, and allocates a buffer from an arena.
2. :func:`measure` runs pairs of passes over it and returns a :class:`Measurement`.
"""

from __future__ import annotations

import errno
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, Self

import numpy as np

from penstock.core.errors import ConfigError, transfer_error
from penstock.core.fs import check_space
from penstock.core.units import GIB, MIB, format_bytes, round_down, round_up
from penstock.io.aio import default_engine
from penstock.io.engine import Engine, Op, Priority, Request, Transfer
from penstock.io.files import DirectFile, open_unlinked
from penstock.store.arena import Arena

Kind = Literal["read", "overwrite", "mixed"]

KINDS: Final[tuple[Kind, ...]] = ("read", "overwrite", "mixed")
REQUEST_BYTES: Final = 16 * MIB
"""Size of a request to the engine, as large as a typical activation, and of a stripe."""
BUFFER_BYTES: Final = 4 * REQUEST_BYTES
"""Total size of simultaneous requests."""
FILE_BYTES: Final = GIB
LEAST_ROUNDS: Final = 3
_ROUNDS: Final = 5
_LATENCY_READS: Final = 64
_LATENCY_BYTES: Final = 4096

Progress = Callable[[float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Result of the passes of one kind: medians over rounds."""

    kind: Kind
    engine_bytes_per_s: float
    plain_bytes_per_s: float
    ratio: float
    """Ratio of engine to plain, the median over rounds."""
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Result of :func:`measure`."""

    directories: tuple[str, ...]
    direct: bool
    """True if all files are open with O_DIRECT."""
    granule_bytes: int
    threads: int
    piece_bytes: int
    """Maximum size of a system call, on both sides."""
    file_bytes: int
    """Size of all files together."""
    pass_bytes: int
    """Bytes moved by one side in one pass."""
    latency_s: float
    """Median time of a read of 4 KiB by the engine."""
    rates: tuple[Rate, ...]

    def rate(self, kind: Kind) -> Rate:
        """Return the rate of one kind of pass."""
        return next(rate for rate in self.rates if rate.kind == kind)


def measure(
    directories: Sequence[str | os.PathLike[str]],
    *,
    file_bytes: int = FILE_BYTES,
    seconds: float = 10.0,
    threads: int | None = None,
    piece_bytes: int | None = None,
    progress: Progress = lambda _: None,
) -> Measurement:
    """Measure directories, several of them together, as a striped tier uses them.

    Args:
        directories: Directories to measure; each gets an unnamed file.
        file_bytes: Size of all files together.
        seconds: Duration; at least three rounds are made.
        threads: Number of threads on both sides; ``PENSTOCK_IO_THREADS`` if ``None``.
        piece_bytes: Size of a system call on both sides; ``PENSTOCK_IO_PIECE`` if ``None``.
        progress: Function that receives the finished share, 0 to 1, in this thread.

    Raises:
        ConfigError: The size is too small, or the time is not positive.
        TransferError: A directory cannot be written to, or is full.
    """
    if not seconds > 0:
        raise ConfigError(f"the time to measure is {seconds} s, but must be more than 0")
    with Course(directories, file_bytes, default_engine(threads, piece_bytes)) as course:
        wish = course.fill() * seconds / (2 * len(KINDS) * _ROUNDS)
        pass_bytes = min(round_up(int(wish), BUFFER_BYTES), course.file_bytes)
        rounds = _rounds(course, pass_bytes, seconds, progress)
        return Measurement(
            directories=tuple(os.fspath(each) for each in directories),
            direct=all(file.direct for file in course.files),
            granule_bytes=max(file.granule_bytes for file in course.files),
            threads=course.engine.spec.workers,
            piece_bytes=course.engine.spec.piece_bytes,
            file_bytes=course.file_bytes,
            pass_bytes=pass_bytes,
            latency_s=course.latency_s(),
            rates=tuple(_rate(kind, rounds[kind], pass_bytes) for kind in KINDS),
        )


class Course:
    """Files, a buffer and an engine for the passes. Leaving the ``with`` block closes them.

    Attributes:
        engine: Measured engine.
        files: Files, one in each directory.
        file_bytes: Size of all files together.
        address: Address of the buffer.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        file_bytes: int,
        engine: Engine,
        *,
        request_bytes: int = REQUEST_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Create the files and the buffer; the engine is closed with the course.

        Args:
            directories: Directories, each of which gets a file.
            file_bytes: Size of all files together; rounded down to whole requests in each.
            engine: Engine to measure.
            request_bytes: Size of a request to it, and of a stripe.
            buffer_bytes: Size of the buffer, a multiple of that: the total of simultaneous requests.

        Raises:
            ConfigError: The size of a file would be less than one request.
            TransferError: A directory cannot be written to, or is full.
        """
        each_bytes = round_down(file_bytes // max(len(directories), 1), request_bytes)
        if not directories or not each_bytes:
            raise ConfigError(
                f"{format_bytes(file_bytes)} in {len(directories)} directories cannot be measured;"
                f" each directory needs at least {format_bytes(request_bytes)}"
            )
        self.engine = engine
        self.request_bytes = request_bytes
        self.buffer_bytes = buffer_bytes
        self.file_bytes = each_bytes * len(directories)
        self.files: list[DirectFile] = []
        self._arena = Arena(buffer_bytes)
        try:
            self.files += [open_unlinked(each) for each in directories]
            check_space(
                [(os.fspath(each), each_bytes) for each in directories],
                "measure with smaller files, or name another directory",
            )
            for file in self.files:
                file.preallocate(each_bytes)
        except BaseException:
            self.close()
            raise
        block = self._arena.allocate(buffer_bytes)
        assert block is not None  # an arena of that size, and nothing else in it
        self.address = block.address
        self._memory = block.lend(0, buffer_bytes)
        some = np.frombuffer(np.random.default_rng(0).bytes(MIB), np.uint8)  # compresses badly
        self._memory[:] = np.resize(some, buffer_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close everything, which removes the files."""
        self.engine.close()
        for file in self.files:
            file.close()
        self._arena.close()

    def fill(self) -> float:
        """Write every byte once, because reads of unwritten ranges do not reach the device.

        Returns:
            Bytes per second for newly allocated space.
        """
        requests = list(self.requests("overwrite", self.file_bytes, 0))
        return self.file_bytes / self.engine_pass(requests)

    def requests(self, kind: Kind, nbytes: int, start_bytes: int) -> Iterator[Request]:
        """Yield the requests of a pass of ``nbytes`` from ``start_bytes`` on, wrapping around.

        A mixed pass alternates between reading and overwriting with every piece.
        """
        length, piece = self.request_bytes, self.engine.spec.piece_bytes
        if kind == "mixed" and length % piece == 0:
            length = piece
        for index in range(nbytes // length):
            position = (start_bytes + index * length) % self.file_bytes
            stripe, within = divmod(position, self.request_bytes)
            op: Op = "read" if kind == "read" or (kind == "mixed" and index % 2) else "write"
            yield Request(
                op=op,
                file=self.files[stripe % len(self.files)],
                offset_bytes=stripe // len(self.files) * self.request_bytes + within,
                address=self.address + index * length % self.buffer_bytes,
                nbytes=length,
                keep_alive=None,
            )

    def engine_pass(self, requests: Sequence[Request]) -> float:
        """Execute requests with the engine, as many at once as the buffer holds; return seconds."""
        window = self.buffer_bytes // requests[0].nbytes
        in_flight: deque[Transfer] = deque()
        start = time.perf_counter()
        for request in requests:
            if len(in_flight) == window:
                in_flight.popleft().wait()
            in_flight.append(self.engine.submit(request))
        for transfer in in_flight:
            transfer.wait()
        return time.perf_counter() - start

    def plain_pass(self, requests: Sequence[Request]) -> float:
        """Execute requests with threads and system calls alone; return seconds."""
        pieces = deque(self._pieces(requests))
        threads = self.engine.spec.workers
        failures: list[OSError] = []
        gate = threading.Barrier(threads + 1)
        workers = [
            threading.Thread(target=_work, args=(pieces, gate, failures)) for _ in range(threads)
        ]
        try:
            for thread in workers:
                thread.start()
            gate.wait()
            start = time.perf_counter()
            for thread in workers:
                thread.join()
        finally:  # after an interrupt no thread waits at the gate, nor uses the files and the buffer
            pieces.clear()
            gate.abort()
            for thread in workers:
                if thread.is_alive():
                    thread.join()
        for file in self.files:
            if not file.direct:
                os.fdatasync(file.fd)
        took = time.perf_counter() - start
        for failure in failures:
            raise transfer_error(
                errno=failure.errno or errno.EIO,
                op="plain pass",
                path=self.files[0].path,
                offset_bytes=0,
                nbytes=len(requests) * requests[0].nbytes,
            ) from failure
        self._drop_page_cache()
        return took

    def latency_s(self) -> float:
        """Return the median time of a small read by the otherwise idle engine."""
        times = []
        stride = round_down(self.file_bytes // len(self.files) // _LATENCY_READS, _LATENCY_BYTES)
        for index in range(_LATENCY_READS):
            start = time.perf_counter()
            request = Request(
                op="read",
                file=self.files[0],
                offset_bytes=index * stride,
                address=self.address,
                nbytes=_LATENCY_BYTES,
                keep_alive=None,
                priority=Priority.DEMAND,
            )
            self.engine.submit(request).wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _pieces(self, requests: Sequence[Request]) -> Iterator[_Piece]:
        longest = self.engine.spec.piece_bytes
        for request in requests:
            at = request.address - self.address
            for done in range(0, request.nbytes, longest):
                length = min(longest, request.nbytes - done)
                call = os.preadv if request.op == "read" else os.pwritev
                memory = self._memory.data[at + done : at + done + length]
                yield call, request.file.fd, memory, request.offset_bytes + done

    def _drop_page_cache(self) -> None:
        """Drop buffered files from the page cache, so that the next pass reaches the device."""
        for file in self.files:
            if not file.direct:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


_Piece = tuple[Callable[[int, list[memoryview], int], int], int, memoryview, int]


def _work(pieces: deque[_Piece], gate: threading.Barrier, failures: list[OSError]) -> None:
    with suppress(threading.BrokenBarrierError):  # there are no pieces then
        gate.wait()
    while not failures:
        try:
            call, fd, memory, offset = pieces.popleft()
        except IndexError:
            return
        try:
            if call(fd, [memory], offset) != len(memory):
                raise OSError(errno.EIO, "a short transfer")
        except OSError as error:
            failures.append(error)


_Pair = tuple[float, float]
"""Seconds of the engine, and of the plain side."""


def _rounds(
    course: Course, pass_bytes: int, seconds: float, progress: Progress
) -> dict[Kind, list[_Pair]]:
    """Run pairs of passes until the time is up; the order alternates between rounds."""
    pairs: dict[Kind, list[_Pair]] = {kind: [] for kind in KINDS}
    begun = time.perf_counter()
    number = 0
    while True:
        for kind in KINDS:
            requests = list(course.requests(kind, pass_bytes, number * pass_bytes))
            if number % 2:
                plain = course.plain_pass(requests)
                engine = course.engine_pass(requests)
            else:
                engine = course.engine_pass(requests)
                plain = course.plain_pass(requests)
            pairs[kind].append((engine, plain))
            passed = (time.perf_counter() - begun) / seconds
            progress(min(passed, (number + 1) / LEAST_ROUNDS, 1.0))
        number += 1
        if number >= LEAST_ROUNDS and time.perf_counter() - begun >= seconds:
            return pairs


def _rate(kind: Kind, pairs: Sequence[_Pair], pass_bytes: int) -> Rate:
    return Rate(
        kind=kind,
        engine_bytes_per_s=pass_bytes / statistics.median(engine for engine, _ in pairs),
        plain_bytes_per_s=pass_bytes / statistics.median(plain for _, plain in pairs),
        ratio=statistics.median(plain / engine for engine, plain in pairs),
        rounds=len(pairs),
    )
