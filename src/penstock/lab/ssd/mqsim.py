"""Devices from MQSim's XML.

Keys of a file that have no meaning here, or only one possible value, are reported and not read: see
``ignored``.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.cells import SECTOR_BYTES, CellMode, Geometry, PageOrder
from penstock.lab.ssd.control import Victim, WriteCache
from penstock.lab.ssd.description import load
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.mqsim_xml import Ignored, Keys, find, parse

_VICTIMS: Final = {
    "GREEDY": Victim.GREEDY,
    "RGA": Victim.RANDOM_GREEDY,
    "FIFO": Victim.FIFO,
}
_CMT_BYTES: Final = 2 << 20
"""Default for files that do not set it."""
_DEVICE: Final = "Execution_Parameter_Set"


def read_device(path: str | Path) -> tuple[Device, tuple[Ignored, ...]]:
    """Read a device from MQSim's ``ssdconfig.xml``; missing values are ``mqsim-default``'s.

    Raises:
        ConfigError: The file cannot be read, lacks a key, or has an invalid value.
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
    # MQSim moves two bytes in 2 * floor(1000 / MT/s) ns; above 1000 MT/s that would be zero
    byte_ns = 1000 // rate
    link = round(host.real("PCIe_Lane_Bandwidth") * host.whole("PCIe_Lane_Count") * 10**9)
    read, program = (
        tuple(flash.whole(f"Page_{what}_Latency_{page}") for page in ("LSB", "CSB", "MSB"))
        for what in ("Read", "Program")
    )
    mode = CellMode(flash.one_of("Flash_Technology", {"SLC": "", "MLC": "", "TLC": ""}).lower())
    pick = {1: (0,), 2: (0, 2), 3: (0, 1, 2)}[mode.bits]
    geometry = dataclasses.replace(
        base.geometry,
        channels=device.whole("Flash_Channel_Count"),
        chips_per_channel=device.whole("Chip_No_Per_Channel"),
        dies_per_chip=flash.whole("Die_No_Per_Chip"),
        planes_per_die=flash.whole("Plane_No_Per_Die"),
        blocks_per_plane=flash.whole("Block_No_Per_Plane"),
        pages_per_block=flash.whole("Page_No_Per_Block"),
        page_bytes=flash.whole("Page_Capacity"),
        spare_bytes=flash.whole("Page_Metadat_Capacity"),
    )
    made = Device(
        name=f"MQSim's {name}",
        geometry=geometry,
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
            gc_preemptible=device.flag("Preemptible_GC_Enabled"),
            gc_hard_threshold=device.real_or("GC_Hard_Threshold", base.ftl.gc_hard_threshold),
            least_worn_first=device.flag("Dynamic_Wearleveling_Enabled"),
            wear_gap=device.whole("Static_Wearleveling_Threshold")
            if device.flag("Static_Wearleveling_Enabled")
            else 0,
            **_cached_map(device, geometry),
        ),
        unit=base.unit,
        energy=base.energy,
        host=base.host,
        endurance=base.endurance,
        cache=_cache(device, geometry),
    )
    capacity = dataclasses.replace(base.endurance, capacity_bytes=made.geometry.raw_bytes)
    left = (*host.ignored(), *device.ignored(), *flash.ignored())
    return dataclasses.replace(made, endurance=capacity), left


def _cached_map(device: Keys, geometry: Geometry) -> dict[str, Any]:
    """Return the settings of the map, which is all in memory unless the file says otherwise.

    An entry is larger in MQSim's memory than on its flash, because it includes the logical page. The
    number of entries matters in both, so the size of the memory is given here in entries of flash.
    """
    capacity = device.whole_or("CMT_Capacity", _CMT_BYTES)
    if device.text_or("Ideal_Mapping_Table", "true").lower() != "false":
        return {}
    bits = math.log2(geometry.planes * geometry.pages_per_plane)
    sectors = geometry.page_bytes // SECTOR_BYTES
    in_memory, on_flash = (math.ceil((n * bits + sectors) / 8) for n in (2, 1))
    return {
        "map_entry_bytes": on_flash,
        "map_cache_bytes": max(1, capacity // in_memory) * on_flash,
        "map_read_bytes": SECTOR_BYTES,
        "map_stored": True,
    }


def _cache(device: Keys, geometry: Geometry) -> WriteCache:
    """Return the write cache; a file without its capacity has none. Flows may bypass it."""
    rate = device.whole_or("Data_Cache_DRAM_Data_Rate", 800) * 10**6
    burst_bytes = device.whole_or("Data_Cache_DRAM_Data_Busrt_Size", 4)
    access_ns = sum(device.whole_or(f"Data_Cache_DRAM_{key}", 13) for key in ("tRCD", "tCL"))
    return WriteCache(
        capacity_bytes=device.whole_or("Data_Cache_Capacity", 0),
        bytes_per_s=2 * rate * burst_bytes,
        access_ns=access_ns,
        flush_pages=geometry.planes,
        at_once=True,
    )
