"""How fast the engines of the simulated SSD are, on one core.

Event engine: requests on MQSim's default device, events a second. Fast path: an Adam step of 6.7 B
parameters on OptimStore's SSD in three placements, page operations a second; the same for 100 devices.
The figures that count are the ratios to what was asked for: 500 000 events a second, 10 M page operations
a second, 10 s, a minute.
"""

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _results
from penstock.lab.ssd import Placement, Update, load, step, with_field
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.operations import phases
from penstock.lab.ssd.requests import Workload
from penstock.lab.ssd.simulation import SimulationEngine, simulate

EVENTS_PER_S = 500_000
PAGES_PER_S = 10_000_000
STEP_S = 10.0
SWEEP_S = 60.0
LOADS = {
    "random reads of 8 KiB, depth 1": {"read_share": 1.0, "queue_depth": 1, "request_bytes": 8192},
    "random reads of 8 KiB, depth 16": {
        "read_share": 1.0,
        "queue_depth": 16,
        "request_bytes": 8192,
    },
    "random writes of 8 KiB, depth 16": {
        "read_share": 0.0,
        "queue_depth": 16,
        "request_bytes": 8192,
    },
    "mixed 4 KiB, depth 32": {"read_share": 0.5, "queue_depth": 32, "request_bytes": 4096},
    "reads of 64 KiB in sequence, depth 8": {
        **{"read_share": 1.0, "queue_depth": 8, "request_bytes": 65536, "random": False},
    },
}
PLACED = (Placement.HOST, Placement.CONTROLLER, Placement.DIE)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="one round; no result file")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    figures = {"events": {}, "weight_update": {}}
    for name, load_of in LOADS.items():
        rates = [events_per_s(options.requests, load_of) for _ in range(rounds)]
        figures["events"][name] = {
            "events_per_s": _results.summary(rates, 0),
            "of_what_was_asked": round(statistics.median(rates) / EVENTS_PER_S, 2),
        }
        print(f"{name}: {statistics.median(rates):.0f} events/s")
    figures["weight_update"] = weight_update(rounds)
    print(figures["weight_update"])
    took = sweep_s()
    figures["sweep"] = {
        "devices": 100,
        "engine": "timeline",
        "took_s": round(took, 2),
        "of_the_time_allowed": round(took / SWEEP_S, 3),
    }
    print(figures["sweep"])
    if not options.quick:
        config = {"rounds": rounds, "requests": options.requests, "cores": 1, "parameters": 6.7e9}
        print(f"wrote {_results.write('ssd', figures, config).name}")


def events_per_s(requests, load_of):
    drive = Drive(load("mqsim-default"))
    start = time.perf_counter()
    run = drive.run(Workload(requests=requests, working_set=0.3, **load_of))
    return run.events / (time.perf_counter() - start)


def weight_update(rounds):
    device = load("optimstore")
    update = Update(parameters=6_700_000_000, optimizer="adam")
    simulate(
        device, update, Placement.DIE, SimulationEngine.TIMELINE
    )  # loads, or compiles, the kernel
    took, off = [], {}
    pages = sum(one.page_operations for each in PLACED for one in phases(device, update, each))
    for _ in range(rounds):
        start = time.perf_counter()
        done = [simulate(device, update, each, SimulationEngine.TIMELINE) for each in PLACED]
        took.append(time.perf_counter() - start)
    for one in done:
        formula = step(device, update, one.placement)
        off[one.placement] = round(one.time_s / formula.time_s - 1, 5)
    median = statistics.median(took)
    return {
        "three_placements_s": _results.summary(took, 4),
        "of_the_time_allowed": round(median / STEP_S, 4),
        "page_operations": pages,
        "page_operations_per_s": round(pages / median),
        "of_what_was_asked": round(pages / median / PAGES_PER_S, 1),
        "step_s": {one.placement: round(one.time_s, 3) for one in done},
        "over_the_closed_form": off,
    }


def sweep_s():
    """Of 100 devices, each in three placements, every operation on a timeline."""
    device = load("optimstore")
    update = Update(parameters=6_700_000_000, optimizer="adam")
    start = time.perf_counter()
    for chips, rate in itertools.product(range(1, 11), range(400, 1400, 100)):
        made = with_field(device, "geometry.chips_per_channel", chips)
        made = with_field(made, "channel.bytes_per_s", rate * 10**6)
        for placement in PLACED:
            simulate(made, update, placement, SimulationEngine.TIMELINE)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
