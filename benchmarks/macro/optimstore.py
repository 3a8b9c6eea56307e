"""OptimStore's figures on the simulated SSD, and what would make its design four times as fast as a host.

First every anchor beside the paper's figure, with the tolerance that was set before, and its kind:
"fitted", what the device was inferred from; "input", what repeats a number of the paper that was put in,
or the paper's own arithmetic; "predicted", the rest. Then whole iterations of networks, end to end; which
optimizer gains most, and why; what would explain the figures that are not met; channels and dies. Then a
search: all combinations of a faster processing element, a second set of registers for the bus, one for
the array, more dies, a faster channel and shorter states, each with its speed-up over the unchanged host,
the power of the drive, what it wears, and its added area. Areas are assumed, in units of today's element
(one per plane): they order the designs, and say nothing in mm2.
"""

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _optimstore_models
import _optimstore_plot
from _optimstore_models import CARDS

import _results
from penstock.lab.ssd import Gradient, Placement, Update, load, step, with_field
from penstock.lab.ssd.energy import Boundary
from penstock.lab.ssd.operations import phases
from penstock.lab.ssd.optimizers import OPTIMIZERS
from penstock.lab.ssd.simulation import SimulationEngine, channel_waits, extrapolate, simulate

DEVICE = load("optimstore")
ADAM = Update(parameters=6_700_000_000, optimizer="adam")
HOST, CONTROLLER, DIE, _ = Placement
WANTED = 4.0
KNOWN, LARGER = "GPT, 32 x 4096", "GPT, 50 x 4096"
"""The networks of 6.7 and 10.3 billion parameters."""
REST = 0.07
"""Forward and backward of the baseline's iteration, of 6.7 B: the paper's update is 93 % of it."""
FEW = 100_000_000
"""Parameters of an update whose waits are counted: the event engine takes seconds for it."""
CHANNELS, DIES = (4, 8, 16), (32, 64, 128)
"""Of the paper's study of scaling."""
DOCS = _results.ROOT / "docs"
CHANGES = {
    "unit.divider": (4, 2, 1),
    "unit.double_buffered": (False, True),
    "unit.overlaps_array": (False, True),
    "geometry.chips_per_channel": (4, 6, 8),
    "channel.bytes_per_s": (800_000_000, 1_200_000_000),
}
STATES = ((4, 4, 4), (4, 2, 2))
REGISTERS_AREA, DIE_AREA, CHANNEL_AREA = 1.0, 100.0, 2.0
"""Assumed: a page register for each plane is as large as an element at a quarter of the clock; a further
die dwarfs both; a faster interface is twice an element."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="print; no result file, no picture")
    options = parser.parse_args()
    networks = _optimstore_models.measure(DEVICE, ADAM)
    reproduced, whole = anchors(networks), _optimstore_models.lines(networks)
    for name, one in (reproduced | whole).items():
        verdict = "ok" if one["within"] else "NO"
        print(f"{one['kind']}: {name}: {one['here']} (paper {one['paper']}, {verdict})")
    ordered = order()
    print(f"order: {ordered}")
    needed = would_explain(networks)
    print(f"what is not reproduced would be, with {needed}")
    scales = list(scaling())
    designs = sorted(searched(), key=lambda one: (one["added_area"], -one["speedup"]))
    enough = [one for one in designs if one["speedup"] >= WANTED]
    cheapest = enough[0]
    print(f"{len(designs)} designs, {len(enough)} reach {WANTED} x; cheapest: {cheapest}")
    if options.quick:
        return
    line = front(designs)
    _optimstore_plot.designs(designs, line, cheapest, WANTED, DOCS / "optimstore.svg")
    _optimstore_plot.scales(scales, networks, DOCS / "optimstore_scaling.svg")
    tables = _optimstore_models.tables(networks, whole)
    (DOCS / "optimstore_table.md").write_text(tables, encoding="utf-8")
    figures = {
        "anchors": reproduced,
        "end_to_end": whole,
        "cpu_offload out of memory above, B parameters": _optimstore_models.out_of_memory(),
        "order": ordered,
        "would_explain": needed,
        "networks": networks,
        "scaling": scales,
        "designs": len(designs),
        "wanted_speedup": WANTED,
        "cheapest": cheapest,
        "front": line,
    }
    config = {
        "device": "optimstore", "parameters": ADAM.parameters, "optimizer": "adam",
        "areas_assumed": {"registers": REGISTERS_AREA, "die": DIE_AREA, "channel": CHANNEL_AREA},
        "engine": "designs: timelines, extrapolated from eight erases of each block's time, with their"
        " error; networks and scaling: timelines; waits: events; other anchors: closed form, those of"
        " time also on timelines",
        "cards_assumed": list(CARDS),
        "host_bytes_assumed": _optimstore_models.HOST_BYTES,
    }  # fmt: skip
    print(f"wrote {_results.write('optimstore', figures, config).name}")


def anchors(networks):
    """Ours beside the paper's; where a card matters, of each card."""
    host, controller, die = (step(DEVICE, ADAM, each) for each in (HOST, CONTROLLER, DIE))
    fast = [
        simulate(DEVICE, ADAM, each, SimulationEngine.TIMELINE).time_s
        for each in (HOST, CONTROLLER, DIE)
    ]
    large = replace(ADAM, parameters=10_300_000_000)
    life = step(DEVICE, large, DIE)
    level = step(with_field(DEVICE, "ftl.levels_planes", True), large, DIE)
    updates = [one["update"] for one in networks.values()]
    waits = dict(waiting(DEVICE))

    def on_cards(name, of):
        cards = networks[name]["cards"]
        return {card: of(one) for card, one in cards.items() if one is not None}

    def years(one):
        return on_cards(
            LARGER,
            lambda card: (
                one.wear.steps_credited
                * (one.time_s + card["forward_s"] + card["backward_s"])
                / (365.25 * 86400)
            ),
        )

    def gain(boundary, one):
        return host.ledger.joules(boundary) / one.ledger.joules(boundary)

    fitted = {
        "die over host": (host.time_s / die.time_s, 2.8, 0.1),
        "controller over host": (host.time_s / controller.time_s, 1.5, 0.1),
        "die over controller": (controller.time_s / die.time_s, 1.9, 0.1),
        "die over host, timelines": (fast[0] / fast[2], 2.8, 0.1),
        "die over host, timelines, mean over networks": (
            mean(one["host"] / one["die"] for one in updates),
            *(2.8, 0.1),
        ),
        "controller over host, timelines": (fast[0] / fast[1], 1.5, 0.1),
        "energy, die, system": (gain(Boundary.SYSTEM, die), 3.6, 0.1),
        "energy, controller, system": (gain(Boundary.SYSTEM, controller), 2.0, 0.1),
    }
    repeated = {
        "written, B a parameter": (die.wear.written_bytes / ADAM.parameters, 12, 0.0),
        "life, M iterations of 10.3 B, levelled in the die": (
            level.wear.steps_credited / 1e6,
            *(12.4, 0.1),
        ),
    }
    predicted = {
        "step on the die, s": (die.time_s, 13.5, 0.1),
        "forward and backward of the baseline's iteration": (
            on_cards(KNOWN, lambda card: 1 - card["update_share"]),
            *(REST, 0.1),
        ),
        "transfers of the baseline's update, of its iteration": (
            on_cards(KNOWN, lambda card: card["transfer_share"]),
            *(0.82, 0.1),
        ),
        "reads wait for the channel": (waits["read"], 0.195, 0.1),
        "writes wait for the channel": (waits["write"], 0.66, 0.1),
        "dies busy, controller": (controller.use("die"), 0.3, 0.1),
        "processing at the channel, over host (DeepStore)": (fast[0] / fast[1], 1.1, 0.1),
        "drive's power without static": (
            die.ledger.ssd_dynamic_w / host.ledger.ssd_dynamic_w,
            *(2.2, 0.3),
        ),
        "drive's power with static": (die.ledger.ssd_w / host.ledger.ssd_w, 2.2, 0.3),
        "life, years, levelled in the die": (years(level), 9.4, 0.1),
        "life, M iterations of 10.3 B": (life.wear.steps_credited / 1e6, 12.4, 0.1),
        "life, years": (years(life), 9.4, 0.1),
        "momentum, die over host": (gain_of("momentum"), 3.2, 0.2),
    }
    kinds = {"fitted": fitted, "input": repeated, "predicted": predicted}
    return {name: judged(kind, *row) for kind, rows in kinds.items() for name, row in rows.items()}


def judged(kind, here, paper, tolerance):
    """A line with its verdict: "yes" only if it is so on all cards, where there are several."""
    cards = here if isinstance(here, dict) else {}
    values = list(cards.values()) or [here]
    return {
        "kind": kind,
        "here": round(values[0], 3),
        **({"cards": {card: round(one, 3) for card, one in cards.items()}} if cards else {}),
        "paper": paper,
        "tolerance": tolerance,
        "within": all(abs(one / paper - 1) <= tolerance + 1e-12 for one in values),
    }


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def waiting(device, *, paced=False):
    """(phase, share): of the time of the pages that a host reads and writes, their wait for the channel.

    A die has the next pages as soon as it has registers for them, unless they come at the pace of the
    link (``paced``).
    """
    update = replace(ADAM, parameters=FEW)
    link, share = device.link, device.host.io_efficiency
    rates = {"read": link.up_bytes_per_s * share, "write": link.down_bytes_per_s * share}
    pages = device.geometry.planes_per_die * device.geometry.page_bytes
    for phase in phases(device, update, HOST):
        made = phase
        if paced:
            made = replace(phase, release_ps=round(pages / rates[phase.name] * 1e12))
        kinds = ("read", "write") if phase.name == "both" else (phase.name,)
        yield from zip(kinds, channel_waits(made), strict=True)


def scaling():
    """The update by channels and dies: host, controller and die, on the same drive."""
    for channels, dies in itertools.product(CHANNELS, DIES):
        made = with_field(DEVICE, "geometry.channels", channels)
        made = with_field(made, "geometry.chips_per_channel", dies // channels)
        host, controller, die = (
            simulate(made, ADAM, each, SimulationEngine.TIMELINE).time_s
            for each in (HOST, CONTROLLER, DIE)
        )
        yield {
            "channels": channels,
            "dies": dies,
            "host_s": round(host, 3),
            "controller_s": round(controller, 3),
            "die_s": round(die, 3),
        }


def gain_of(name):
    """Die over host of an optimizer."""
    update = replace(ADAM, optimizer=name)
    return step(DEVICE, update, HOST).time_s / step(DEVICE, update, DIE).time_s


def order():
    """Who gains most and least on the die, why, and what would make it the paper's order.

    A step on the die is the array's time, the passes and the bus, one after the other; what is changed is
    one of these, or the host's rate, for all optimizers alike, until Momentum gains as much as Adam.
    """
    gains = {name: round(gain_of(name), 3) for name in OPTIMIZERS}
    parts = {name: parts_of(name) for name in ("sgd", "momentum", "adam")}

    def changed(*, array=1.0, packed=False, passes=1.0, processor=1.0):
        found = {}
        for name, part in parts.items():
            used = len(OPTIMIZERS[name].states) / (DEVICE.geometry.planes_per_die - 1)
            die = part["array_s"] * array * (used if packed else 1)
            die += part["passes_s"] * passes + part["bus_s"]
            host = part["host_transfers_s"] + part["host_processor_s"] * processor
            found[name] = round(host / die, 3)
        return found

    def least(name, towards):
        factor = 1.0
        while (now := changed(**{name: factor}))["momentum"] <= now["adam"]:
            factor = round(factor + towards, 3)
        return {"factor": factor, **now}

    return {
        "paper": "momentum gains most, adam least",
        "kind": "predicted",
        "here": gains,
        "within": max(gains, key=gains.get) == "momentum" and min(gains, key=gains.get) == "adam",
        "momentum_above_adam": gains["momentum"] > gains["adam"],
        "parts": {
            name: {key: round(value, 3) for key, value in part.items()}
            for name, part in parts.items()
        },
        "would_turn_it": {
            "idle planes hold states of other units": changed(packed=True),
            "the array's time, times": least("array", -0.01),
            "the time of a pass, times": least("passes", 0.01),
            "the host's time for arithmetic, times": least("processor", 0.01),
        },
    }


def parts_of(name):
    """Seconds of a step that follow one another, on the die and on the host."""
    update = replace(ADAM, optimizer=name)
    host, die = step(DEVICE, update, HOST), step(DEVICE, update, DIE)
    busy, there = dict(die.busy_s), dict(host.busy_s)
    parts = {
        "array_s": busy["die"] - busy["element"],
        "passes_s": busy["element"],
        "bus_s": busy["channel"] / DEVICE.geometry.chips_per_channel,
    }
    assert abs(sum(parts.values()) / die.time_s - 1) < 1e-9
    return {
        **parts,
        "host_transfers_s": there["read"] + there["write"],
        "host_processor_s": there["processor"],
    }


def would_explain(networks):
    """What weak numbers, or what is not known, would have to be for figures that are not the paper's."""
    energy = 63.0
    while True:
        made = with_field(DEVICE, "energy.program_pj_per_bit", energy)
        host, controller, die = (step(made, ADAM, each) for each in (HOST, CONTROLLER, DIE))
        if die.ledger.ssd_w / host.ledger.ssd_w >= 2.2 * 0.7:
            break
        energy += 1.0
    momentum = replace(ADAM, optimizer="momentum")
    rate = DEVICE.host.parameters_per_s
    on_die = step(DEVICE, momentum, DIE).time_s
    while step(slower_host(rate), momentum, HOST).time_s / on_die < 3.2:
        rate -= 1e7
    joules = [one.ledger.joules(Boundary.SYSTEM) for one in (host, controller, die)]
    return {
        "power ratio with static power at the edge of its tolerance": {
            "program_pj_per_bit": energy,
            "energy, die and controller, system": [
                round(joules[0] / joules[2], 2),
                round(joules[0] / joules[1], 2),
            ],
        },
        "momentum 3.2 on the die": {"host_parameters_per_s": rate},
        "DeepStore's 1.1": channel_gains(),
        "waits for the channel": other_waits(),
        "end to end": _optimstore_models.other_iterations(networks, KNOWN, REST),
    }


def channel_gains():
    """Processing at the channel over host, without what the paper gave its own controller."""
    base = simulate(DEVICE, ADAM, HOST, SimulationEngine.TIMELINE).time_s
    programmed = replace(ADAM, gradient=Gradient.PROGRAMMED)
    single = with_field(DEVICE, "channel.multi_plane", False)
    changed = {
        "gradients programmed and read": (DEVICE, programmed),
        "states read and programmed plane by plane": (single, ADAM),
        "both": (single, programmed),
    }
    return {
        name: round(base / simulate(*what, CONTROLLER, SimulationEngine.TIMELINE).time_s, 3)
        for name, what in changed.items()
    }


def other_waits():
    """Reads and writes, if the host asks otherwise, or the channel is another."""
    faster = with_field(DEVICE, "channel.bytes_per_s", 1_200_000_000)
    single = with_field(
        with_field(DEVICE, "channel.cache_read", False), "channel.cache_program", False
    )
    changed = {
        "pages at the pace of the link": waiting(DEVICE, paced=True),
        "reads and writes at once": waiting(with_field(DEVICE, "host.overlap", True)),
        "a channel of 1200 MB/s": waiting(faster),
        "one set of registers a die": waiting(single),
    }
    return {
        name: {kind: round(share, 3) for kind, share in waits} for name, waits in changed.items()
    }


def slower_host(rate):
    return with_field(DEVICE, "host.parameters_per_s", rate)


def searched():
    """Every design, by its operations on timelines, and by its formula beside that."""
    base = simulate(DEVICE, ADAM, HOST, SimulationEngine.TIMELINE).time_s
    for *values, states in itertools.product(*CHANGES.values(), STATES):
        made = DEVICE
        for path, value in zip(CHANGES, values, strict=True):
            made = with_field(made, path, value)
        update = replace(ADAM, state_bytes=states)
        one, error = extrapolate(made, update, DIE, SimulationEngine.TIMELINE, periods=8)
        formula = step(made, update, DIE).time_s
        divider, buffered, overlaps, chips, rate = values
        area = 4 / divider - 1 + REGISTERS_AREA * (buffered + overlaps)
        area += DIE_AREA * (chips / 4 - 1) + CHANNEL_AREA * (rate > 800_000_000)
        yield {
            **dict(zip(CHANGES, values, strict=True)),
            "state_bytes": list(states),
            "speedup": round(base / one.time_s, 3),
            "speedup_by_formula": round(base / formula, 3),
            "extrapolation_error": round(error, 4),
            "time_s": round(one.time_s, 3),
            "added_area": area,
            "ssd_w": round(one.ledger.ssd_w, 2),
            "ssd_j": round(one.ledger.joules(Boundary.SSD), 1),
            "written_bytes": one.wear.written_bytes,
        }


def front(designs):
    """Those that no cheaper one outruns, with states as they are."""
    best, found = 0.0, []
    for one in designs:
        if one["state_bytes"] == [4, 4, 4] and one["speedup"] > best:
            best = one["speedup"]
            found.append(one)
    return found


if __name__ == "__main__":
    main()
