"""A device from MQSim's XML.

What of a file has no meaning here, or only one value that this simulator has, is named and not read: see
``ignored``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from penstock.core.errors import ConfigError
from penstock.ssd.cells import CellMode, PageOrder
from penstock.ssd.control import Victim
from penstock.ssd.description import load
from penstock.ssd.device import Device
from penstock.ssd.mqsim_xml import Ignored, Keys, find, parse

_VICTIMS: Final = {
    "GREEDY": Victim.GREEDY,
    "RGA": Victim.RANDOM_GREEDY,
    "FIFO": Victim.FIFO,
}
_DEVICE: Final = "Execution_Parameter_Set"


def read_device(path: str | Path) -> tuple[Device, tuple[Ignored, ...]]:
    """A device of MQSim's ``ssdconfig.xml``; what the file does not tell is as in ``mqsim-default``.

    Raises:
        ConfigError: The file cannot be read, lacks a key, or says what makes no sense.
    """
    name = str(path)
    root = parse(name, _DEVICE)
    host, device, flash = (
        Keys(name, find(name, root, tag))
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
            lanes=host.whole("PCIe_Lane_Count"),
            fetch_depth=device.whole("Queue_Fetch_Size"),
        ),
        ftl=dataclasses.replace(
            base.ftl,
            allocation=device.text("Plane_Allocation_Scheme"),
            victim=_VICTIMS[device.one_of("GC_Block_Selection_Policy", _VICTIMS)],
            overprovisioning=device.real("Overprovisioning_Ratio"),
            gc_threshold=device.real("GC_Exec_Threshold"),
            least_worn_first=device.flag("Dynamic_Wearleveling_Enabled"),
            wear_gap=device.whole("Static_Wearleveling_Threshold")
            if device.flag("Static_Wearleveling_Enabled")
            else 0,
        ),
        unit=base.unit,
        energy=base.energy,
        host=base.host,
        endurance=base.endurance,
    )
    capacity = dataclasses.replace(base.endurance, capacity_bytes=made.geometry.raw_bytes)
    left = (*host.ignored(), *device.ignored(), *flash.ignored())
    return dataclasses.replace(made, endurance=capacity), left
