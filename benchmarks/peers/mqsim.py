"""MQSim beside the simulator here, on points that were drawn at random; writes what MQSim gave.

    python benchmarks/peers/mqsim.py --source MQSIM --commit ITS_COMMIT

MQSIM is a checkout of github.com/CMU-SAFARI/MQSim, of which a copy gets three lines that print
nanoseconds and counts, and is built with `make`. The table, tests/lab/ssd/mqsim.json, has for each point
the keys of MQSim's files that differ from those in tests/lab/ssd/mqsim_files.py, and its figures: facts,
and none of its code.
"""

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lab" / "ssd"))

from mqsim_files import files

from penstock.lab.ssd import with_field
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.mqsim import read_device
from penstock.lab.ssd.mqsim_flows import read_workload

TABLE = Path(__file__).resolve().parents[2] / "tests" / "lab" / "ssd" / "mqsim.json"
PRINTS = (
    (
        "src/host/IO_Flow_Base.cpp",
        "\t\tnvme_software_request_queue.erase(cqe->Command_Identifier);",
        "STAT_last_ns = Simulator->Time();",
    ),
    (
        "src/host/IO_Flow_Base.cpp",
        '\t\tstd::string tmp = name_prefix + ".IO_Flow";',
        'std::cout << "FLOW " << STAT_generated_request_count << " " << STAT_serviced_request_count'
        ' << " " << STAT_sum_device_response_time << " " << STAT_last_ns << std::endl;',
    ),
    (
        "src/ssd/FTL.cpp",
        '\t\tstd::string attr = "Issued_Flash_Read_CMD";',
        'std::cout << "MOVED " << Stats::Total_page_movements_for_gc << std::endl;',
    ),
)
"""(file, a line of it, what is put behind that)."""
NEEDED = {
    "Enabled_Preconditioning": "false", "IO_Queue_Depth": 65535, "Data_Cache_Sharing_Mode": "SHARED",
    "Data_Cache_Capacity": 268435456, "Data_Cache_DRAM_Row_Size": 8192,
    "Data_Cache_DRAM_Data_Rate": 100, "Data_Cache_DRAM_Data_Busrt_Size": 1,
    "Data_Cache_DRAM_tRCD": 13, "Data_Cache_DRAM_tCL": 13, "Data_Cache_DRAM_tRP": 13,
    "Address_Mapping": "PAGE_LEVEL", "CMT_Capacity": 2097152, "CMT_Sharing_Mode": "SHARED",
    "Transaction_Scheduling_Policy": "OUT_OF_ORDER", "Use_Copyback_for_GC": "false",
    "Preemptible_GC_Enabled": "false", "GC_Hard_Threshold": "0.005",
    "Dynamic_Wearleveling_Enabled": "false", "Static_Wearleveling_Enabled": "false",
    "Static_Wearleveling_Threshold": 100, "Preferred_suspend_erase_time_for_read": 700000,
    "Preferred_suspend_erase_time_for_write": 700000,
    "Preferred_suspend_write_time_for_read": 100000, "Flash_Channel_Width": 1,
    "Flash_Comm_Protocol": "NVDDR2",
}  # fmt: skip
"""What MQSim wants to be told, and nothing here depends on."""
IN_FLASH = {
    "CMD_Suspension_Support": "ERASE", "Suspend_Erase_Time": 700000, "Suspend_Program_Time": 100000,
}  # fmt: skip
RESOURCES = {
    "Channel_IDs": "Flash_Channel_Count", "Chip_IDs": "Chip_No_Per_Channel",
    "Die_IDs": "Die_No_Per_Chip", "Plane_IDs": "Plane_No_Per_Die",
}  # fmt: skip
DEFAULTS = {
    "Flash_Channel_Count": 8, "Chip_No_Per_Channel": 4, "Die_No_Per_Chip": 2, "Plane_No_Per_Die": 2,
}  # fmt: skip
ORDERS = [
    "".join(order)
    for order in itertools.permutations("CWDP")
    if order != tuple("DWCP")  # in which MQSim reads beyond a list of its own
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="a checkout of MQSim")
    parser.add_argument("--commit", required=True, help="of that checkout")
    parser.add_argument("--points", type=int, default=36, help="drawn without garbage collection")
    options = parser.parse_args()
    points = []
    with tempfile.TemporaryDirectory() as directory:
        program = built(Path(options.source), Path(directory) / "mqsim")
        for kind, name, device, flows in drawn(options.points):
            point = {"kind": kind, "name": name, "device": device, "flows": flows}
            try:
                point["mqsim"] = asked(program, device, flows, Path(directory))
            except RuntimeError as error:
                print(f"{name}: MQSim fails: {error}")
                continue
            points.append(point)
            print(name, beside(point, Path(directory)))
    table = {
        "what": "mean latency, last completion, requests and pages moved that MQSim gave",
        "source": "github.com/CMU-SAFARI/MQSim, MIT",
        "commit": options.commit,
        "points": points,
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {TABLE.name}: {len(points)} points")


def built(source, copy):
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git", "traces", "fast18"))
    for path, line, code in PRINTS:
        text = (copy / path).read_text(encoding="utf-8")
        if line not in text:
            sys.exit(f"{path} has no line {line.strip()!r}: another version of MQSim")
        text = text.replace(line, f"{line}\n\t\t{code}", 1)
        if "STAT_last_ns =" in code:
            text = text.replace(
                "namespace Host_Components\n{",
                "namespace Host_Components\n{\nstatic sim_time_type STAT_last_ns = 0;",
                1,
            )
        (copy / path).write_text(f"#include <iostream>\n{text}", encoding="utf-8")
    subprocess.run(
        ["make", "-j2", "CC_FLAGS=-std=c++11 -O1 -w"],
        cwd=copy,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return copy / "MQSim"


def asked(program, device, flows, directory):
    """MQSim's figures of all flows."""
    told = {**DEFAULTS, **device}
    resources = {key: ",".join(map(str, range(told[count]))) for key, count in RESOURCES.items()}
    more = {"Priority_Class": "HIGH", "Percentage_of_Hot_Region": 0, "Variance_Request_Size": 0}
    config, work = files(
        directory, {**NEEDED, **device}, [{**resources, **more, **flow} for flow in flows], IN_FLASH
    )
    done = subprocess.run(
        [program, "-i", config, "-w", work], input="\n", capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    each = [list(map(int, words[1:])) for words in lines if words[:1] == ["FLOW"]]
    if len(each) != len(flows):
        raise RuntimeError(f"it ended with {done.returncode}")
    asked_for, served, total_ns, _ = (sum(column) for column in zip(*each, strict=True))
    (moved,) = (int(words[1]) for words in lines if words[:1] == ["MOVED"])
    return {
        "lost": asked_for - served,
        "served": served,
        "mean_ns": round(total_ns / served, 3),
        "end_ns": max(one[3] for one in each),
        "moved": moved,
    }


def beside(point, directory):
    """Ours over MQSim's."""
    config, work = files(directory, point["device"], point["flows"])
    device, _ = read_device(config)
    device = with_field(device, "ftl.streams", len(point["flows"]))
    (scenario,) = read_workload(work)
    drive = Drive(device)
    run = drive.serve_flows(
        [(flow.stream(device, drive.events), flow.queue_depth) for flow in scenario.flows]
    )
    its = point["mqsim"]
    return {
        "latency": round(run.latency.mean_ps / 1000 / its["mean_ns"], 4),
        "rate": round(run.iops / (its["served"] / its["end_ns"] * 1e9), 4),
        "moved": (
            run.flash_programs - run.written_bytes // device.geometry.page_bytes,
            its["moved"],
        ),
        "lost": its["lost"],
    }


def drawn(points):
    for seed in range(points):
        yield ("plain", f"random {seed}", *plain(random.Random(seed)))
    for seed in range(10):
        yield ("plain", f"flows {seed}", {}, generated(seed, random.Random(seed)))
    for seed in range(16):
        yield ("collection", f"collection {seed}", *collected(random.Random(seed)))
    for what, first in (("map", 1000), ("cache", 1100)):
        for seed in range(14):
            yield (what, f"{what} {seed}", *remembered(what, random.Random(first + seed)))


def remembered(what, chance):
    """A device with a write cache, or with a map of which no entry has to make room for another."""
    device, [flow] = plain(chance)
    device["Block_No_Per_Plane"] = 256
    if what == "map":
        device |= {"Ideal_Mapping_Table": "false", "CMT_Capacity": 200_000_000}
        return device, [flow]
    device |= {
        "Data_Cache_Capacity": device["Page_Capacity"] * chance.choice([256, 4096, 65536]),
        "Data_Cache_DRAM_Data_Rate": chance.choice([100, 400, 800]),
        "Data_Cache_DRAM_Data_Busrt_Size": chance.choice([1, 4, 8]),
        "Data_Cache_DRAM_Row_Size": 1 << 20,  # by longer transfers MQSim's formula is quicker
    }
    flow["Device_Level_Data_Caching_Mode"] = "WRITE_CACHE"
    flow["Working_Set_Percentage"] = chance.choice([1, 10, 50])
    return device, [flow]


def plain(chance):
    """A device and a flow, without garbage collection."""
    pick = chance.choice
    page = pick([2048, 4096, 8192, 16384])
    sectors = page // 512
    device = {
        "Flash_Technology": pick(["SLC", "MLC", "TLC"]),
        "Flash_Channel_Count": pick([1, 2, 3, 4, 6, 8, 16]), "Chip_No_Per_Channel": pick([1, 2, 3, 4, 8]),
        "Die_No_Per_Chip": pick([1, 2, 4]), "Plane_No_Per_Die": pick([1, 2, 4]), "Page_Capacity": page,
        "Channel_Transfer_Rate": pick([100, 200, 333, 400, 533, 800, 1000]),
        "Plane_Allocation_Scheme": pick(ORDERS), "Queue_Fetch_Size": pick([16, 128, 512]),
        "PCIe_Lane_Count": pick([1, 2, 4, 8]), "Page_No_Per_Block": pick([64, 128, 256]),
    }  # fmt: skip
    for page_type in ("LSB", "CSB", "MSB"):
        device[f"Page_Read_Latency_{page_type}"] = pick([20, 30, 45, 75, 90]) * 1000
        device[f"Page_Program_Latency_{page_type}"] = pick([100, 200, 350, 750, 1500]) * 1000
    size = pick([1, sectors // 2, sectors, 2 * sectors, 4 * sectors, 8, 16, 32])
    flow = {
        "Read_Percentage": pick([0, 100, 50, 70, 30, chance.randint(0, 100)]),
        "Average_No_of_Reqs_in_Queue": pick([1, 2, 4, 8, 16, 32, 64, 128, 256]),
        "Average_Request_Size": size,
        "Address_Distribution": pick(["RANDOM_UNIFORM", "RANDOM_UNIFORM", "STREAMING"]),
        "Generated_Aligned_Addresses": pick(["true", "true", "false"]),
        "Address_Alignment_Unit": pick([sectors, size]), "Working_Set_Percentage": pick([1, 10, 50, 90]),
        "Seed": chance.randint(1, 1500), "Total_Requests_To_Generate": 1000,
    }  # fmt: skip
    return device, [flow]


def generated(kind, chance):
    """Flows of the other kinds that MQSim has."""
    pick = chance.choice
    flow = {
        "Read_Percentage": pick([0, 50, 100]), "Average_No_of_Reqs_in_Queue": pick([1, 8, 32]),
        "Seed": chance.randint(1, 900), "Total_Requests_To_Generate": 800,
    }  # fmt: skip
    hot = {"Address_Distribution": "RANDOM_HOTCOLD", "Percentage_of_Hot_Region": pick([10, 20, 30])}
    other = {
        **flow,
        **hot,
        "Seed": chance.randint(1, 900),
        "Average_No_of_Reqs_in_Queue": pick([1, 4]),
    }
    kinds = (
        [{**flow, **hot}],
        [{**flow, "Request_Size_Distribution": "NORMAL", "Variance_Request_Size": pick([1, 3])}],
        [
            {
                **flow,
                "Synthetic_Generator_Type": "BANDWIDTH",
                "Bandwidth": pick([50, 200, 400]) * 10**6,
            }
        ],
        [{**flow, "Stop_Time": pick([5, 10]) * 10**6, "Total_Requests_To_Generate": 0}],
        [flow, other],
    )
    return kinds[kind % len(kinds)]


def collected(chance):
    """A device that is overwritten several times, mostly one request after the other."""
    pick = chance.choice
    device = {
        "Flash_Technology": pick(["SLC", "MLC", "TLC"]), "Flash_Channel_Count": pick([1, 2]),
        "Chip_No_Per_Channel": pick([1, 2]), "Die_No_Per_Chip": pick([1, 2]),
        "Plane_No_Per_Die": pick([1, 2]), "Block_No_Per_Plane": pick([64, 96, 128, 192]),
        "Page_No_Per_Block": pick([16, 32]), "GC_Block_Selection_Policy": pick(["GREEDY", "RGA"]),
        "Overprovisioning_Ratio": pick([0.07, 0.15, 0.25]), "GC_Exec_Threshold": pick([0.05, 0.1, 0.2]),
    }  # fmt: skip
    planes = 1
    for key in RESOURCES.values():
        planes *= device[key]
    pages = planes * device["Block_No_Per_Plane"] * device["Page_No_Per_Block"]
    flow = {
        "Read_Percentage": 0, "Average_No_of_Reqs_in_Queue": pick([1, 1, 1, 4, 16]),
        "Working_Set_Percentage": pick([60, 70, 75, 80, 86, 90]), "Seed": chance.randint(1, 1500),
        "Total_Requests_To_Generate": min(3 * pages, 40_000),
    }  # fmt: skip
    return device, [flow]


if __name__ == "__main__":
    main()
