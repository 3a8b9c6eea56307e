"""Traces as requests: MQSim, DiskSim, fio's iolog, blkparse's text, MSR Cambridge's CSV, Penstock's log.

Every reader goes line by line and keeps nothing. A bad line is an error with its number and the expected
format. Addresses beyond the drive's end are folded back, as in MQSim; lines that are not reads or writes
(opens, syncs, trims, other actions of blktrace) are skipped.
"""

from __future__ import annotations

import enum
import heapq
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from penstock.core.errors import ConfigError
from penstock.core.files import open_regular, parse_json
from penstock.lab.ssd.cells import SECTOR_BYTES
from penstock.lab.ssd.requests import HostRequest
from penstock.observe.records import log_files

_PS: Final = {"s": 10**12, "ms": 10**9, "us": 10**6, "100ns": 10**5, "ns": 10**3}
_FIO: Final = re.compile(r"fio version (\d+) iolog")
_BLKPARSE: Final = re.compile(r"\s*\d+,\d+\s")
_REQUESTS: Final = ("read", "write")
_WINDOW: Final = 4096
"""Number of spans kept to sort them."""
_ALIGN: Final = 4096
_MAX_REQUEST_BYTES: Final = 128 * 1024
"""Largest request: the limit of many drives (NVMe's MDTS)."""
_PASSED: Final = ("add", "open", "close", "sync", "datasync", "trim")


class TraceFormat(enum.StrEnum):
    """Format of a trace."""

    MQSIM = "mqsim"
    """``arrival_ns device sector sectors type``, type 1 for a read, 0 for a write."""
    DISKSIM = "disksim"
    """``arrival_ms device block blocks flags``, bit 0 of the flags for a read; blocks of 512 bytes."""
    FIO = "fio"
    """fio's iolog, version 2 (no times but ``wait``, in µs) or 3 (a time in µs before each action)."""
    BLKPARSE = "blkparse"
    """blkparse's default text; requests are its actions Q."""
    MSR = "msr"
    """``Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime``, in 100 ns and bytes."""
    PENSTOCK = "penstock"
    """Penstock's own event log (``event_log=``): what a run wrote to its flash tier, and read back."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One line, with its place for errors."""

    path: str
    number: int
    text: str

    def bad(self, expected: str) -> ConfigError:
        """Return an error that names the expected format."""
        return ConfigError(
            f"{self.path}, line {self.number}: expected {expected}, found {self.text!r}"
        )

    def whole(self, word: str, expected: str) -> int:
        """Return a whole number, zero or more."""
        if not word.isascii() or not word.isdigit():
            raise self.bad(expected)
        return int(word)

    def time_ps(self, word: str, unit: str, expected: str) -> int:
        """Return a time exactly, from digits, and digits after a point."""
        match = re.fullmatch(r"(\d+)(?:\.(\d+))?", word, re.ASCII)
        if match is None:
            raise self.bad(expected)
        fraction = match[2] or ""
        scaled: int = int(match[1] + fraction) * _PS[unit]
        return scaled // int("1" + "0" * len(fraction))


Parsed = tuple[int | None, bool, int, int]
"""(arrival in ps or None, True for a read, offset, bytes)."""


def read_trace(
    path: str | Path, user_bytes: int, *, kind: TraceFormat | None = None
) -> Iterator[HostRequest]:
    """Read a trace as requests for a drive with ``user_bytes`` that the host can address.

    Args:
        path: The file.
        user_bytes: Size of the drive; addresses beyond it are folded back. Times begin with the first
            request.
        kind: Format of the trace; None to guess it from the first line.

    Raises:
        ConfigError: The file cannot be read or has a bad line; partly raised while requests are taken.
    """
    return _folded(str(path), parsed(path, kind), user_bytes)


def parsed(path: str | Path, kind: TraceFormat | None = None) -> Iterator[Parsed]:
    """Yield (arrival in ps or None, True for a read, offset, bytes) for each request of a trace.

    Raises:
        ConfigError: The file cannot be read or has a bad line; partly raised while requests are taken.
    """
    name = str(path)
    first = next(_lines(name), None)
    if first is None:
        raise ConfigError(f"trace {name!r} is empty")
    kind = kind or guess(first.text)
    names = log_files(name) if kind is TraceFormat.PENSTOCK else [name]
    return _PARSERS[kind](chain.from_iterable(map(_lines, names)))


def guess(line: str) -> TraceFormat:
    """Guess the format of a trace from its first line."""
    if line.startswith("fio version"):
        return TraceFormat.FIO
    if _BLKPARSE.match(line):
        return TraceFormat.BLKPARSE
    if line.startswith("{"):
        return TraceFormat.PENSTOCK
    if line.count(",") >= 5:
        return TraceFormat.MSR
    return TraceFormat.DISKSIM if "." in line.split(maxsplit=1)[0] else TraceFormat.MQSIM


def _lines(name: str) -> Iterator[_Line]:
    try:
        with open(name, encoding="utf-8", opener=open_regular) as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield _Line(name, number, text.rstrip("\n"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the trace {name!r}: {error}") from error


def _folded(name: str, found: Iterator[Parsed], user_bytes: int) -> Iterator[HostRequest]:
    begin: int | None = None
    for arrival, is_read, offset, nbytes in found:
        when = arrival
        if arrival is not None:
            begin = arrival if begin is None else begin
            when = max(0, arrival - begin)
        if nbytes > user_bytes:
            raise ConfigError(
                f"trace {name!r}: a request of {nbytes} bytes is larger than the drive"
            )
        beyond = offset + nbytes > user_bytes
        place = offset % (user_bytes - nbytes + 1) if beyond else offset
        yield HostRequest(is_read, place, nbytes, when)


def _ascii(lines: Iterator[_Line], unit: str) -> Iterator[Parsed]:
    whole = unit == "ns"
    expected = (
        "'arrival_ns device sector sectors type', as '1000 0 4096 8 1'"
        if whole
        else "'arrival_ms device block blocks flags', as '0.5 0 4096 8 1'"
    )
    for line in lines:
        words = line.text.split()
        if len(words) != 5:
            raise line.bad(expected)
        arrival = line.time_ps(words[0], unit, expected)
        sector, sectors, flags = (line.whole(word, expected) for word in words[2:])
        if not sectors or (whole and flags > 1):
            raise line.bad(expected)
        yield arrival, bool(flags & 1), sector * SECTOR_BYTES, sectors * SECTOR_BYTES


def _mqsim(lines: Iterator[_Line]) -> Iterator[Parsed]:
    return _ascii(lines, "ns")


def _disksim(lines: Iterator[_Line]) -> Iterator[Parsed]:
    return _ascii(lines, "ms")


def _fio(lines: Iterator[_Line]) -> Iterator[Parsed]:
    head = next(lines)
    match = _FIO.fullmatch(head.text.strip())
    if match is None or match[1] not in ("2", "3"):
        raise head.bad("'fio version 2 iolog' or 'fio version 3 iolog'")
    timed = match[1] == "3"
    expected = "'[timestamp] file read|write offset bytes', the timestamp in version 3 only"
    waited_ps: int | None = None
    for line in lines:
        words = line.text.split()
        when = line.time_ps(words.pop(0), "us", expected) if timed else waited_ps
        if len(words) < 2:
            raise line.bad(expected)
        action = words[1]
        if action == "wait" and not timed and len(words) >= 3:
            waited_ps = (waited_ps or 0) + line.time_ps(words[2], "us", "'file wait microseconds'")
        elif action in _REQUESTS and len(words) == 4:
            offset, nbytes = line.whole(words[2], expected), line.whole(words[3], expected)
            if not nbytes:
                raise line.bad(expected)
            yield when, action == "read", offset, nbytes
        elif action not in _PASSED:
            raise line.bad(expected)


def _blkparse(lines: Iterator[_Line]) -> Iterator[Parsed]:
    expected = "'major,minor cpu sequence seconds pid action RWBS sector + sectors [process]'"
    for line in lines:
        words = line.text.split()
        if not _BLKPARSE.match(line.text):
            if words[0].startswith(("CPU", "Total", "Reads", "Writes", "Read", "IO", "Throughput")):
                return  # the summary at its end
            raise line.bad(expected)
        if len(words) < 7:
            raise line.bad(expected)
        kind = words[6]
        if words[5] != "Q" or not ("R" in kind or "W" in kind) or "D" in kind:
            continue
        if len(words) < 10 or words[8] != "+":
            if len(words) < 9:
                continue  # a flush, which has no address
            raise line.bad(expected)
        when = line.time_ps(words[3], "s", expected)
        sector, sectors = line.whole(words[7], expected), line.whole(words[9], expected)
        if sectors:
            yield when, "R" in kind, sector * SECTOR_BYTES, sectors * SECTOR_BYTES


def _msr(lines: Iterator[_Line]) -> Iterator[Parsed]:
    expected = "'Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime'"
    for line in lines:
        words = [word.strip() for word in line.text.split(",")]
        if line.number == 1 and words[0] == "Timestamp":
            continue
        if len(words) not in (6, 7) or words[3].lower() not in _REQUESTS:
            raise line.bad(expected)
        offset, nbytes = line.whole(words[4], expected), line.whole(words[5], expected)
        if not nbytes:
            raise line.bad(expected)
        when = line.time_ps(words[0], "100ns", expected)
        yield when, words[3].lower() == "read", offset, nbytes


def _penstock(lines: Iterator[_Line]) -> Iterator[Parsed]:
    """Yield spans of the flash tier, in the order in which they began.

    A log has no offsets. A slot gets a place when it is first written, and keeps it while it fits, as
    in a tier's slabs. A line is written when a span ends, so spans wait for those that began earlier. A
    killed process leaves a torn line at the end, which is skipped.
    """
    expected = "a line of an event log: a JSON object"
    places = _Places()
    began: list[tuple[int, int, bool, str, int]] = []
    last_ns, torn = 0, None
    for line in lines:
        if torn is not None:
            raise torn
        try:
            record = parse_json(line.text)
            span = record["kind"] == "span" and record["tier"] == "flash" and record["stage"]
            if span not in _REQUESTS or record["nbytes"] == 0:
                continue
            found = (int(record["t_ns"]), span == "read", record["slot"], int(record["nbytes"]))
        except (ValueError, KeyError, TypeError):
            torn = line.bad(expected)
            continue
        heapq.heappush(began, (found[0], line.number, *found[1:]))
        if len(began) > _WINDOW:
            last_ns = max(last_ns, began[0][0])
            yield from places.pieces(last_ns, *heapq.heappop(began)[2:])
    while began:
        last_ns = max(last_ns, began[0][0])
        yield from places.pieces(last_ns, *heapq.heappop(began)[2:])


class _Places:
    """Places of slots, for a log without offsets."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, int]] = {}  # slot: (offset, bytes)
        self._end = 0

    def pieces(self, t_ns: int, is_read: bool, slot: str, nbytes: int) -> Iterator[Parsed]:
        """Yield a span as requests no larger than a drive takes."""
        offset, room = self._of.get(slot, (0, 0))
        if room < nbytes:
            offset = self._end
            self._end += -(-nbytes // _ALIGN) * _ALIGN
            self._of[slot] = (offset, self._end - offset)
        for begin in range(0, nbytes, _MAX_REQUEST_BYTES):
            piece = min(_MAX_REQUEST_BYTES, nbytes - begin)
            piece = -(-piece // SECTOR_BYTES) * SECTOR_BYTES
            yield t_ns * _PS["ns"], is_read, offset + begin, piece


_PARSERS: Final[dict[TraceFormat, Callable[[Iterator[_Line]], Iterator[Parsed]]]] = {
    TraceFormat.MQSIM: _mqsim,
    TraceFormat.DISKSIM: _disksim,
    TraceFormat.FIO: _fio,
    TraceFormat.BLKPARSE: _blkparse,
    TraceFormat.MSR: _msr,
    TraceFormat.PENSTOCK: _penstock,
}
