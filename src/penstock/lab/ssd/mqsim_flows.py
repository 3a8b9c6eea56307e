"""Workloads of MQSim's XML: synthetic flows, and traces.

Synthetic flows have MQSim's own addresses, from the same seeds (:mod:`.mqsim_random`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from penstock.core.errors import ConfigError
from penstock.lab.ssd.cells import SECTOR_BYTES
from penstock.lab.ssd.device import PS_PER_NS, Device
from penstock.lab.ssd.events import Events
from penstock.lab.ssd.mqsim_random import MqsimRandom
from penstock.lab.ssd.mqsim_xml import Ignored, Keys, parse
from penstock.lab.ssd.requests import HostRequest
from penstock.lab.ssd.traces import TraceFormat, parsed

_WORKLOAD: Final = "MQSim_IO_Scenarios"
_SYNTHETIC: Final = "IO_Flow_Parameter_Set_Synthetic"
_ADDRESSES: Final = ("RANDOM_UNIFORM", "RANDOM_HOTCOLD", "STREAMING")
_NS_PER_S: Final = 10**9
_TRACE: Final = "IO_Flow_Parameter_Set_Trace_Based"


@dataclass(frozen=True, slots=True)
class RequestFlow:
    """One stream of requests of a scenario."""

    queue_depth: int
    share: tuple[int, int]
    """(index, count): its part of the drive's addresses, which are divided evenly."""
    requests: Callable[[int, int], Iterator[HostRequest]]
    """Function that makes its requests from its first sector and its number of sectors."""
    stop_ps: int = 0
    """Time at which it stops; 0 if it stops when its requests are used up."""
    cached: bool = True
    """True if the write cache serves its writes and reads, if the drive has one."""

    def stream(self, device: Device, clock: Events | None = None) -> Iterator[HostRequest]:
        """Return its requests, within its part of the drive's addresses.

        Args:
            device: The drive.
            clock: The drive's time, for a flow that stops at a given time.

        Raises:
            ConfigError: The flow stops at a given time, and there is no clock.
        """
        geometry = device.geometry
        number, count = self.share
        room = geometry.pages_per_plane * (geometry.page_bytes // SECTOR_BYTES)
        sectors = geometry.planes * int(room * (1.0 - device.ftl.overprovisioning) / count)
        first = number * sectors
        requests = self.requests(first, sectors)
        # MQSim counts a flow's pages from the first of its part, which therefore is on the first plane
        moved = first % (geometry.planes * (geometry.page_bytes // SECTOR_BYTES))
        if moved:
            requests = _moved(requests, moved * SECTOR_BYTES)
        if not self.cached:
            requests = _past_the_cache(requests)
        if not self.stop_ps:
            return requests
        if clock is None:
            raise ConfigError(
                "a flow with a Stop_Time needs the clock of the drive that it runs on"
            )
        return _until(requests, clock, self.stop_ps)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Flows that run at the same time."""

    flows: tuple[RequestFlow, ...]
    ignored: tuple[Ignored, ...]


def read_workload(path: str | Path) -> tuple[Scenario, ...]:
    """Read the scenarios of MQSim's ``workload.xml``, which run one after the other, each on a new drive.

    Raises:
        ConfigError: The file cannot be read, lacks a key, or has an invalid value.
    """
    name = str(path)
    root = parse(name, _WORKLOAD)
    made = [_scenario(name, scenario) for scenario in root.findall("IO_Scenario")]
    if not made:
        raise ConfigError(f"MQSim file {name!r} has no IO_Scenario")
    return tuple(made)


def _scenario(name: str, scenario: ElementTree.Element) -> Scenario:
    flows: list[RequestFlow] = []
    ignored: list[Ignored] = []
    elements = list(scenario)
    for number, element in enumerate(elements):
        keys = Keys(name, element)
        part = (number, len(elements))
        if element.tag == _SYNTHETIC:
            flows.append(_synthetic(name, keys, part))
        elif element.tag == _TRACE:
            flows.append(_traced(name, keys, part))
        else:
            raise ConfigError(
                f"MQSim file {name!r}: flow {number} is {element.tag!r}, which is not a flow"
            )
        ignored += keys.ignored()
    if not flows:
        raise ConfigError(f"MQSim file {name!r}: a scenario has no flow")
    return Scenario(tuple(flows), tuple(dict.fromkeys(ignored)))


def _moved(requests: Iterator[HostRequest], nbytes: int) -> Iterator[HostRequest]:
    for request in requests:
        request.offset_bytes -= nbytes
        yield request


def _past_the_cache(requests: Iterator[HostRequest]) -> Iterator[HostRequest]:
    for request in requests:
        request.cached = False
        yield request


def _until(requests: Iterator[HostRequest], clock: Events, stop_ps: int) -> Iterator[HostRequest]:
    """Yield requests until the time to stop, from MQSim's first nanosecond on."""
    while clock.now_ps + PS_PER_NS <= stop_ps:
        request = next(requests, None)
        if request is None or (request.arrival_ps or 0) > stop_ps:
            return
        yield request


def _synthetic(name: str, keys: Keys, part: tuple[int, int]) -> RequestFlow:
    address = keys.one_of("Address_Distribution", dict.fromkeys(_ADDRESSES, ""))
    kind = keys.one_of("Synthetic_Generator_Type", {"QUEUE_DEPTH": "", "BANDWIDTH": ""})
    size = keys.one_of("Request_Size_Distribution", {"FIXED": "", "NORMAL": ""})
    stop_ns = keys.whole("Stop_Time")
    count = keys.whole("Total_Requests_To_Generate")
    sectors = keys.whole("Average_Request_Size")
    settings = _Synthetic(
        reads=keys.real("Read_Percentage") / 100,
        address=address,
        hot=keys.real("Percentage_of_Hot_Region") / 100 if address == "RANDOM_HOTCOLD" else 0.0,
        sectors=sectors,
        deviation=keys.real("Variance_Request_Size") if size == "NORMAL" else None,
        gap_ns=_gap_ns(name, keys, sectors) if kind == "BANDWIDTH" else None,
        align=keys.whole("Address_Alignment_Unit")
        if keys.text("Generated_Aligned_Addresses") == "true"
        else 1,
        working_set=keys.real("Working_Set_Percentage") / 100,
        seed=keys.whole("Seed"),
        count=None if stop_ns else count,
    )
    if stop_ns < 0 or (not stop_ns and count < 1) or settings.sectors < 1 or settings.align < 1:
        raise ConfigError(
            f"MQSim file {name!r}: Average_Request_Size, Address_Alignment_Unit and, where Stop_Time is"
            " 0, Total_Requests_To_Generate must be 1 or more"
        )
    depth = 1 if kind == "BANDWIDTH" else keys.whole("Average_No_of_Reqs_in_Queue")
    return RequestFlow(max(1, depth), part, settings.stream, stop_ns * PS_PER_NS, _cached(keys))


def _cached(keys: Keys) -> bool:
    """Return True if a flow's writes are cached; a mode that also caches reads is reported as ignored."""
    key = "Device_Level_Data_Caching_Mode"
    if keys.says(key, "WRITE_READ_CACHE"):
        return True
    return not keys.says(key, "READ_CACHE") and keys.text_or(key, "WRITE_CACHE") == "WRITE_CACHE"


def _gap_ns(name: str, keys: Keys, sectors: int) -> float:
    """Return the mean time between two requests; MQSim computes it in whole numbers, and so does this."""
    rate = keys.whole("Bandwidth")
    a_second = rate // SECTOR_BYTES // max(1, sectors)
    if not 1 <= a_second <= _NS_PER_S:
        raise ConfigError(
            f"MQSim file {name!r}: Bandwidth is {rate} bytes a second, which is less than one request, or"
            " more than one in a nanosecond"
        )
    return float(_NS_PER_S // a_second)


@dataclass(frozen=True, slots=True)
class _Synthetic:
    reads: float
    address: str
    hot: float
    """Share of the working set that is hot, and of the requests that go elsewhere."""
    sectors: int
    deviation: float | None
    """Standard deviation of sizes, in sectors; None if all sizes are equal."""
    gap_ns: float | None
    """Mean time between two requests, independent of completions; None if each waits for the last."""
    align: int
    working_set: float
    seed: int
    count: int | None

    def stream(self, first: int, sectors: int) -> Iterator[HostRequest]:
        """Yield requests like MQSim's; each choice has a random stream, with consecutive seeds."""
        last = first + int((sectors - 1) * self.working_set)
        seeds = itertools.count(self.seed)
        kinds, places = MqsimRandom(next(seeds)), MqsimRandom(next(seeds))
        hot = self.address == "RANDOM_HOTCOLD"
        in_regions, regions = (MqsimRandom(next(seeds) if hot else 0) for _ in range(2))
        sizes = MqsimRandom(next(seeds) if self.deviation is not None else 0)
        gaps = MqsimRandom(next(seeds) if self.gap_ns is not None else 0)
        streaming = self.address == "STREAMING"
        following = places.between(first, last) // self.align * self.align if streaming else 0
        hot_last = first + int((last - first) * self.hot)
        arrival_ns = 0
        for _ in itertools.count() if self.count is None else range(self.count):
            if self.gap_ns is not None:
                arrival_ns += int(gaps.exponential(self.gap_ns))
            is_read = kinds.next() <= self.reads
            size = self.sectors
            if self.deviation is not None:
                size = max(1, math.ceil(sizes.normal(size, self.deviation)))
            if streaming:
                place = first if following + size > last else following
                following += size
                if following > last:
                    following = first
                following = -(-following // self.align) * self.align
            elif hot:
                within = (hot_last + 1, last) if regions.next() < self.hot else (first, hot_last)
                place = min(in_regions.between(*within), first + sectors - size)
            else:
                place = places.between(first, last)
                if place + size > last:
                    place = first
            place -= place % self.align
            arrival_ps = None if self.gap_ns is None else arrival_ns * PS_PER_NS
            yield HostRequest(is_read, place * SECTOR_BYTES, size * SECTOR_BYTES, arrival_ps)


def _traced(name: str, keys: Keys, part: tuple[int, int]) -> RequestFlow:
    path = Path(keys.text("File_Path"))
    if not path.is_file():
        path = Path(name).parent / path  # MQSim looks in its working directory
    share, rounds = keys.whole("Percentage_To_Be_Executed"), keys.whole("Relay_Count")
    if not 0 < share <= 100 or rounds < 1:
        raise ConfigError(
            f"MQSim file {name!r}: Percentage_To_Be_Executed is {share}; it must be 1 to 100."
            f" Relay_Count is {rounds}; it must be 1 or more"
        )
    if not path.is_file():
        raise ConfigError(f"MQSim file {name!r}: File_Path: there is no trace {str(path)!r}")
    return RequestFlow(1, part, _Traced(str(path), share, rounds).stream, cached=_cached(keys))


@dataclass(frozen=True, slots=True)
class _Traced:
    path: str
    share: int
    rounds: int

    def stream(self, first: int, sectors: int) -> Iterator[HostRequest]:
        """Yield requests as MQSim replays a trace: arrivals in ns since the start, rounds in sequence.

        A share is taken of one round only, because MQSim supports none of several.
        """
        left = sum(1 for _ in parsed(self.path, TraceFormat.MQSIM)) * self.rounds
        if self.rounds == 1:
            left = left * self.share // 100
        begin = 0
        for _ in range(self.rounds):
            now = begin
            for arrival, is_read, offset, nbytes in parsed(self.path, TraceFormat.MQSIM):
                if not left:
                    return
                left -= 1
                assert arrival is not None  # this format has times
                now = begin + arrival
                yield HostRequest(is_read, self._place(first, sectors, offset, nbytes), nbytes, now)
            begin = now

    def _place(self, first: int, sectors: int, offset: int, nbytes: int) -> int:
        """Fold an address beyond the flow's part of the drive back into it."""
        sector, count = offset // SECTOR_BYTES, nbytes // SECTOR_BYTES
        if count > sectors:
            raise ConfigError(
                f"trace {self.path!r}: a request of {nbytes} bytes is larger than its flow's part of"
                " the drive"
            )
        if sector >= sectors:
            sector %= sectors - 1 or 1
        return (first + min(sector, sectors - count)) * SECTOR_BYTES
