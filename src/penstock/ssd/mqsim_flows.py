"""What a workload of MQSim's XML asks for: synthetic flows, and traces.

Synthetic flows ask for MQSim's own addresses, from the same seeds (:mod:`.mqsim_random`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from penstock.core.errors import ConfigError
from penstock.ssd.cells import SECTOR_BYTES
from penstock.ssd.device import Device
from penstock.ssd.mqsim_random import MqsimRandom
from penstock.ssd.mqsim_xml import Ignored, Keys, parse
from penstock.ssd.requests import Request
from penstock.ssd.traces import Format, parsed

_WORKLOAD: Final = "MQSim_IO_Scenarios"
_SYNTHETIC: Final = "IO_Flow_Parameter_Set_Synthetic"
_TRACE: Final = "IO_Flow_Parameter_Set_Trace_Based"


@dataclass(frozen=True, slots=True)
class Flow:
    """One stream of requests of a scenario."""

    queue_depth: int
    share: tuple[int, int]
    """Which part of the drive's addresses is its own, of how many."""
    requests: Callable[[int, int], Iterator[Request]]
    """Its requests, given the first of its sectors and how many there are."""

    def stream(self, device: Device) -> Iterator[Request]:
        """Its requests, for a drive of which it has its part of the addresses."""
        geometry = device.geometry
        number, count = self.share
        room = geometry.pages_per_plane * (geometry.page_bytes // SECTOR_BYTES)
        sectors = geometry.planes * int(room * (1.0 - device.ftl.overprovisioning) / count)
        return self.requests(number * sectors, sectors)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is asked for at the same time."""

    flows: tuple[Flow, ...]
    ignored: tuple[Ignored, ...]


def read_workload(path: str | Path) -> tuple[Scenario, ...]:
    """The scenarios of MQSim's ``workload.xml``, which are run one after the other, each on a new drive.

    Raises:
        ConfigError: The file cannot be read, lacks a key, or says what makes no sense.
    """
    name = str(path)
    root = parse(name, _WORKLOAD)
    made = [_scenario(name, scenario) for scenario in root.findall("IO_Scenario")]
    if not made:
        raise ConfigError(f"MQSim file {name!r} has no IO_Scenario")
    return tuple(made)


def _scenario(name: str, scenario: ElementTree.Element) -> Scenario:
    flows: list[Flow] = []
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
                f"MQSim file {name!r}: flow {number} is {element.tag!r}, which is none"
            )
        ignored += keys.ignored()
    if not flows:
        raise ConfigError(f"MQSim file {name!r}: a scenario has no flow")
    return Scenario(tuple(flows), tuple(dict.fromkeys(ignored)))


def _synthetic(name: str, keys: Keys, part: tuple[int, int]) -> Flow:
    address = keys.one_of("Address_Distribution", {"RANDOM_UNIFORM": "", "STREAMING": ""})
    settings = _Synthetic(
        reads=keys.real("Read_Percentage") / 100,
        streaming=address == "STREAMING",
        sectors=keys.whole("Average_Request_Size"),
        align=keys.whole("Address_Alignment_Unit")
        if keys.text("Generated_Aligned_Addresses") == "true"
        else 1,
        working_set=keys.real("Working_Set_Percentage") / 100,
        seed=keys.whole("Seed"),
        count=keys.whole("Total_Requests_To_Generate"),
    )
    if keys.whole("Stop_Time"):
        raise ConfigError(
            f"MQSim file {name!r}: a flow has Stop_Time; set that to 0 and Total_Requests_To_Generate"
        )
    if settings.count < 1 or settings.sectors < 1 or settings.align < 1:
        raise ConfigError(
            f"MQSim file {name!r}: Total_Requests_To_Generate, Average_Request_Size and"
            " Address_Alignment_Unit must be 1 or more"
        )
    depth = keys.whole("Average_No_of_Reqs_in_Queue")
    return Flow(max(1, depth), part, settings.stream)


@dataclass(frozen=True, slots=True)
class _Synthetic:
    reads: float
    streaming: bool
    sectors: int
    align: int
    working_set: float
    seed: int
    count: int

    def stream(self, first: int, sectors: int) -> Iterator[Request]:
        """As MQSim makes them, from the second stream of its seed."""
        last = first + int((sectors - 1) * self.working_set)
        kinds, places = MqsimRandom(self.seed), MqsimRandom(self.seed + 1)
        following = places.between(first, last) // self.align * self.align if self.streaming else 0
        for _ in range(self.count):
            is_read = kinds.next() <= self.reads
            if self.streaming:
                place = first if following + self.sectors > last else following
                following += self.sectors
                if following > last:
                    following = first
                following = -(-following // self.align) * self.align
            else:
                place = places.between(first, last)
                if place + self.sectors > last:
                    place = first
            place -= place % self.align
            yield Request(is_read, place * SECTOR_BYTES, self.sectors * SECTOR_BYTES)


def _traced(name: str, keys: Keys, part: tuple[int, int]) -> Flow:
    path = Path(keys.text("File_Path"))
    if not path.is_file():
        path = Path(name).parent / path  # MQSim looks where it was started
    share, rounds = keys.whole("Percentage_To_Be_Executed"), keys.whole("Relay_Count")
    if not 0 < share <= 100 or rounds < 1:
        raise ConfigError(
            f"MQSim file {name!r}: Percentage_To_Be_Executed is {share}, it must be 1 to 100;"
            f" Relay_Count is {rounds}, it must be 1 or more"
        )
    if not path.is_file():
        raise ConfigError(f"MQSim file {name!r}: File_Path: there is no trace {str(path)!r}")
    return Flow(1, part, _Traced(str(path), share, rounds).stream)


@dataclass(frozen=True, slots=True)
class _Traced:
    path: str
    share: int
    rounds: int

    def stream(self, first: int, sectors: int) -> Iterator[Request]:
        """As MQSim replays a trace: arrivals in ns since the beginning, rounds one after the other.

        A share is taken of one round only, for MQSim knows none of several.
        """
        left = sum(1 for _ in parsed(self.path, Format.MQSIM)) * self.rounds
        if self.rounds == 1:
            left = left * self.share // 100
        begin = 0
        for _ in range(self.rounds):
            now = begin
            for arrival, is_read, offset, nbytes in parsed(self.path, Format.MQSIM):
                if not left:
                    return
                left -= 1
                assert arrival is not None  # this format has times
                now = begin + arrival
                yield Request(is_read, self._place(first, sectors, offset, nbytes), nbytes, now)
            begin = now

    def _place(self, first: int, sectors: int, offset: int, nbytes: int) -> int:
        """Addresses beyond the flow's part of the drive are folded back."""
        sector, count = offset // SECTOR_BYTES, nbytes // SECTOR_BYTES
        if count > sectors:
            raise ConfigError(
                f"trace {self.path!r}: a request of {nbytes} bytes is larger than its flow's part of"
                " the drive"
            )
        if sector >= sectors:
            sector %= sectors - 1 or 1
        return (first + min(sector, sectors - count)) * SECTOR_BYTES
