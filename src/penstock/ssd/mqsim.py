"""MQSim's XML as input: a device, and what its workloads ask for.

What of a file has no meaning here, or only one value that this simulator has, is named and not read: see
``ignored``. Addresses are MQSim's own, from the same seeds (:mod:`.mqsim_random`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from penstock.core.errors import ConfigError
from penstock.ssd.cells import SECTOR_BYTES, CellMode, PageOrder
from penstock.ssd.control import Victim
from penstock.ssd.description import load, nearest
from penstock.ssd.device import Device
from penstock.ssd.mqsim_random import MqsimRandom
from penstock.ssd.requests import Request

_VICTIMS: Final = {
    "GREEDY": Victim.GREEDY,
    "RGA": Victim.RANDOM_GREEDY,
    "FIFO": Victim.FIFO,
}
_DEVICE: Final = "Execution_Parameter_Set"
_WORKLOAD: Final = "MQSim_IO_Scenarios"
_SYNTHETIC: Final = "IO_Flow_Parameter_Set_Synthetic"
_TRACE: Final = "IO_Flow_Parameter_Set_Trace_Based"
_ALWAYS: Final = {
    "Memory_Type": "FLASH",
    "HostInterface_Type": "NVME",
    "Address_Mapping": "PAGE_LEVEL",
    "Ideal_Mapping_Table": "true",
    "Use_Copyback_for_GC": "false",
    "Preemptible_GC_Enabled": "false",
    "Flash_Comm_Protocol": "NVDDR2",
    "Flash_Channel_Width": "1",
    "Enabled_Preconditioning": "false",
    "Initial_Occupancy_Percentage": "0",
    "Device_Level_Data_Caching_Mode": "TURNED_OFF",
    "Synthetic_Generator_Type": "QUEUE_DEPTH",
    "Request_Size_Distribution": "FIXED",
    "Dynamic_Wearleveling_Enabled": "false",
    "Static_Wearleveling_Enabled": "false",
}
"""What there is one value of, here: with another the key is named as ignored, with this it is not."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A key that has no effect here."""

    key: str
    value: str


class _Keys:
    """The leaves of an element by name; those that nobody asks for are ignored."""

    def __init__(self, path: str, element: ElementTree.Element) -> None:
        self._path = path
        self._values = {each.tag: (each.text or "").strip() for each in element if not len(each)}
        self._left = dict(self._values)

    def text(self, key: str) -> str:
        if key not in self._values:
            near = nearest(key, self._values)
            raise ConfigError(f"MQSim file {self._path!r} has no {key}{near}")
        self._left.pop(key, None)
        return self._values[key]

    def whole(self, key: str) -> int:
        return self._number(key, int, "a whole number")

    def real(self, key: str) -> float:
        return self._number(key, float, "a number")

    def one_of(self, key: str, known: dict[str, Victim] | dict[str, str]) -> str:
        text = self.text(key)
        if text not in known:
            raise ConfigError(
                f"MQSim file {self._path!r}: {key} is {text!r}; known here are {', '.join(known)}"
            )
        return text

    def _number(self, key: str, kind: Callable[[str], float], what: str) -> int:
        text = self.text(key)
        try:
            return kind(text)  # type: ignore[return-value]
        except ValueError as error:
            raise ConfigError(
                f"MQSim file {self._path!r}: {key} is {text!r}, not {what}"
            ) from error

    def ignored(self) -> tuple[Ignored, ...]:
        """What has not been asked for, but for what is as this simulator is."""
        left = ((key, value) for key, value in self._left.items())
        return tuple(Ignored(key, value) for key, value in left if _ALWAYS.get(key) != value)


def is_mqsim(path: str | Path) -> bool:
    """Whether a file is named as MQSim's are."""
    return Path(path).suffix.lower() == ".xml"


def read_device(path: str | Path) -> tuple[Device, tuple[Ignored, ...]]:
    """A device of MQSim's ``ssdconfig.xml``; what the file does not tell is as in ``mqsim-default``.

    Raises:
        ConfigError: The file cannot be read, lacks a key, or says what makes no sense.
    """
    name = str(path)
    root = _parse(name, _DEVICE)
    host, device, flash = (
        _Keys(name, _find(name, root, tag))
        for tag in ("Host_Parameter_Set", "Device_Parameter_Set", ".//Flash_Parameter_Set")
    )
    base = load("mqsim-default")
    rate = device.whole("Channel_Transfer_Rate")
    if rate < 1:
        raise ConfigError(f"MQSim file {name!r}: Channel_Transfer_Rate is {rate}")
    # MQSim moves two bytes in 2 * floor(1000 / MT/s) ns; above 1000 MT/s that would be none
    byte_ns = 1000 // rate
    link = round(host.real("PCIe_Lane_Bandwidth") * host.whole("PCIe_Lane_Count") * 10**9)
    read, program = (
        tuple(flash.whole(f"Page_{what}_Latency_{page}") for page in ("LSB", "CSB", "MSB"))
        for what in ("Read", "Program")
    )
    mode = CellMode(flash.one_of("Flash_Technology", {"SLC": "", "MLC": "", "TLC": ""}).lower())
    pick = {1: (0,), 2: (0, 2), 3: (0, 1, 2)}[mode.bits]
    made = Device(
        name=f"MQSim's {name}",
        geometry=dataclasses.replace(
            base.geometry,
            channels=device.whole("Flash_Channel_Count"),
            chips_per_channel=device.whole("Chip_No_Per_Channel"),
            dies_per_chip=flash.whole("Die_No_Per_Chip"),
            planes_per_die=flash.whole("Plane_No_Per_Die"),
            blocks_per_plane=flash.whole("Block_No_Per_Plane"),
            pages_per_block=flash.whole("Page_No_Per_Block"),
            page_bytes=flash.whole("Page_Capacity"),
            spare_bytes=flash.whole("Page_Metadat_Capacity"),
        ),
        cell=dataclasses.replace(
            base.cell,
            mode=mode,
            read_ns=tuple(read[each] for each in pick),
            program_ns=tuple(program[each] for each in pick),
            order=PageOrder.PAIRS if mode is CellMode.TLC else PageOrder.TURNS,
            erase_ns=flash.whole("Block_Erase_Latency"),
            cycles=flash.whole("Block_PE_Cycles_Limit"),
        ),
        channel=dataclasses.replace(
            base.channel, bytes_per_s=10**9 // byte_ns if byte_ns else rate * 10**6
        ),
        link=dataclasses.replace(
            base.link,
            up_bytes_per_s=link,
            down_bytes_per_s=link,
            fetch_depth=device.whole("Queue_Fetch_Size"),
        ),
        ftl=dataclasses.replace(
            base.ftl,
            allocation=device.text("Plane_Allocation_Scheme"),
            victim=_VICTIMS[device.one_of("GC_Block_Selection_Policy", _VICTIMS)],
            overprovisioning=device.real("Overprovisioning_Ratio"),
            gc_threshold=device.real("GC_Exec_Threshold"),
        ),
        unit=base.unit,
        energy=base.energy,
        host=base.host,
        endurance=base.endurance,
    )
    capacity = dataclasses.replace(base.endurance, capacity_bytes=made.geometry.raw_bytes)
    left = (*host.ignored(), *device.ignored(), *flash.ignored())
    return dataclasses.replace(made, endurance=capacity), left


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
    root = _parse(name, _WORKLOAD)
    made = [_scenario(name, scenario) for scenario in root.findall("IO_Scenario")]
    if not made:
        raise ConfigError(f"MQSim file {name!r} has no IO_Scenario")
    return tuple(made)


def _scenario(name: str, scenario: ElementTree.Element) -> Scenario:
    flows: list[Flow] = []
    ignored: list[Ignored] = []
    elements = list(scenario)
    for number, element in enumerate(elements):
        keys = _Keys(name, element)
        part = (number, len(elements))
        if element.tag == _SYNTHETIC:
            flows.append(_synthetic(name, keys, part))
        elif element.tag == _TRACE:
            raise ConfigError(
                f"MQSim file {name!r}: flow {number} replays a trace; run that by itself, as format"
                " mqsim"
            )
        else:
            raise ConfigError(
                f"MQSim file {name!r}: flow {number} is {element.tag!r}, which is none"
            )
        ignored += keys.ignored()
    if not flows:
        raise ConfigError(f"MQSim file {name!r}: a scenario has no flow")
    return Scenario(tuple(flows), tuple(dict.fromkeys(ignored)))


def _synthetic(name: str, keys: _Keys, part: tuple[int, int]) -> Flow:
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


def _parse(name: str, tag: str) -> ElementTree.Element:
    try:
        root = ElementTree.parse(name).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ConfigError(f"MQSim file {name!r} cannot be read: {error}") from error
    if root.tag != tag:
        raise ConfigError(f"MQSim file {name!r} is a {root.tag}, not a {tag}")
    return root


def _find(name: str, root: ElementTree.Element, tag: str) -> ElementTree.Element:
    found = root.find(tag)
    if found is None:
        raise ConfigError(f"MQSim file {name!r} has no {tag.removeprefix('.//')}")
    return found
