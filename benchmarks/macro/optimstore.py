"""OptimStore's figures on the simulated SSD, and what would make its design four times as fast as a host.

First every anchor beside the paper's figure, with the tolerance that was set before, and its kind:
"fitted", what the device was inferred from; "input", what repeats a number of the paper that was put in,
or the paper's own arithmetic; "predicted", the rest. Then who gains most, and why. Then a search: all
combinations of a faster processing element, a second set of registers for the bus, one for the array,
more dies, a faster channel and shorter states, each with its speed-up over the unchanged host, the power
of the drive, what it wears, and its added area. Areas are assumed, in units of today's element (one per
plane): they order the designs, and say nothing in mm2.
"""

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _results
from penstock.report.look import BUDGET_COLOUR, FAINT, INK, STYLE, dress, matplotlib
from penstock.ssd import Placement, Update, load, step, with_field
from penstock.ssd.energy import Boundary
from penstock.ssd.optimizers import OPTIMIZERS
from penstock.ssd.simulated import Engine, extrapolate, simulate

DEVICE = load("optimstore")
ADAM = Update(parameters=6_700_000_000, optimizer="adam")
HOST, CONTROLLER, DIE, _ = Placement
WANTED = 4.0
UPDATE_SHARE = 0.93
"""Of the baseline's iteration, as the paper has it: what follows is an input, not a prediction."""
FIGURE = _results.ROOT / "docs" / "optimstore.svg"
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
    reproduced = anchors()
    for name, one in reproduced.items():
        verdict = "ok" if one["within"] else "NO"
        print(f"{one['kind']}: {name}: {one['here']} (paper {one['paper']}, {verdict})")
    ordered = order()
    print(f"order: {ordered}")
    needed = would_explain()
    print(f"what is not reproduced would be, with {needed}")
    designs = sorted(searched(), key=lambda one: (one["added_area"], -one["speedup"]))
    enough = [one for one in designs if one["speedup"] >= WANTED]
    cheapest = enough[0]
    print(f"{len(designs)} designs, {len(enough)} reach {WANTED} x; cheapest: {cheapest}")
    if options.quick:
        return
    draw(designs, cheapest)
    figures = {
        "anchors": reproduced,
        "order": ordered,
        "would_explain": needed,
        "designs": len(designs),
        "wanted_speedup": WANTED,
        "cheapest": cheapest,
        "front": front(designs),
    }
    config = {
        "device": "optimstore", "parameters": ADAM.parameters, "optimizer": "adam",
        "areas_assumed": {"registers": REGISTERS_AREA, "die": DIE_AREA, "channel": CHANNEL_AREA},
        "engine": "designs: timelines, extrapolated from eight erases of each block's time, with their"
        " error; anchors: closed form, those of time also on timelines",
    }  # fmt: skip
    print(f"wrote {_results.write('optimstore', figures, config).name}")


def anchors():
    """Ours beside the paper's."""
    host, controller, die = (step(DEVICE, ADAM, each) for each in (HOST, CONTROLLER, DIE))
    fast = [
        simulate(DEVICE, ADAM, each, Engine.TIMELINE).time_s for each in (HOST, CONTROLLER, DIE)
    ]
    rest = host.time_s * (1 / UPDATE_SHARE - 1)
    large = replace(ADAM, parameters=10_300_000_000)
    life = step(DEVICE, large, DIE)
    level = step(with_field(DEVICE, "ftl.levels_planes", True), large, DIE)
    beside = step(DEVICE, large, HOST).time_s * (1 / UPDATE_SHARE - 1)

    def years(one):
        return one.wear.steps_credited * (one.time_s + beside) / (365.25 * 86400)

    def gain(boundary, one):
        return host.ledger.joules(boundary) / one.ledger.joules(boundary)

    def lines(kind, rows):
        return {name: (kind, *row) for name, row in rows.items()}

    fitted = {
        "die over host": (host.time_s / die.time_s, 2.8, 0.1),
        "controller over host": (host.time_s / controller.time_s, 1.5, 0.1),
        "die over controller": (controller.time_s / die.time_s, 1.9, 0.1),
        "die over host, timelines": (fast[0] / fast[2], 2.8, 0.1),
        "controller over host, timelines": (fast[0] / fast[1], 1.5, 0.1),
        "energy, die, system": (gain(Boundary.SYSTEM, die), 3.6, 0.1),
        "energy, controller, system": (gain(Boundary.SYSTEM, controller), 2.0, 0.1),
    }
    repeated = {
        "end to end": ((host.time_s + rest) / (die.time_s + rest), 2.4, 0.1),
        "transfers of the baseline's iteration": (
            (host.time_s - host.use("processor") * host.time_s) / (host.time_s + rest),
            *(0.82, 0.1),
        ),
        "written, B a parameter": (die.wear.written_bytes / ADAM.parameters, 12, 0.0),
        "life, M iterations of 10.3 B, levelled in the die": (
            level.wear.steps_credited / 1e6,
            *(12.4, 0.1),
        ),
        "life, years, levelled in the die": (years(level), 9.4, 0.1),
    }
    predicted = {
        "step on the die, s": (die.time_s, 13.5, 0.1),
        "dies busy, controller": (controller.use("die"), 0.3, 0.1),
        "drive's power without static": (
            die.ledger.ssd_dynamic_w / host.ledger.ssd_dynamic_w,
            *(2.2, 0.3),
        ),
        "drive's power with static": (die.ledger.ssd_w / host.ledger.ssd_w, 2.2, 0.3),
        "life, M iterations of 10.3 B": (life.wear.steps_credited / 1e6, 12.4, 0.1),
        "life, years": (years(life), 9.4, 0.1),
        "momentum, die over host": (gain_of("momentum"), 3.2, 0.2),
    }
    ours = lines("fitted", fitted) | lines("input", repeated) | lines("predicted", predicted)
    return {
        name: {
            "kind": kind,
            "here": round(here, 3),
            "paper": paper,
            "tolerance": tolerance,
            "within": abs(here / paper - 1) <= tolerance + 1e-12,
        }
        for name, (kind, here, paper, tolerance) in ours.items()
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


def would_explain():
    """What weak numbers would have to be for the two figures that are not the paper's to be."""
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
    }


def slower_host(rate):
    return with_field(DEVICE, "host.parameters_per_s", rate)


def searched():
    """Every design, by its operations on timelines, and by its formula beside that."""
    base = simulate(DEVICE, ADAM, HOST, Engine.TIMELINE).time_s
    for *values, states in itertools.product(*CHANGES.values(), STATES):
        made = DEVICE
        for path, value in zip(CHANGES, values, strict=True):
            made = with_field(made, path, value)
        update = replace(ADAM, state_bytes=states)
        one, error = extrapolate(made, update, DIE, Engine.TIMELINE, periods=8)
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


def draw(designs, cheapest):
    figure_module, style, _ = matplotlib()
    with style.context(STYLE):
        figure = figure_module.Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
        axis = figure.subplots()
        for states, marker in ((STATES[0], "o"), (STATES[1], "v")):
            some = [one for one in designs if one["state_bytes"] == list(states)]
            shift, note = (1.0, "") if marker == "o" else (1.07, " (drawn beside)")
            points = axis.scatter(
                [(one["added_area"] + 1) * shift for one in some], [one["speedup"] for one in some],
                c=[one["ssd_w"] for one in some], cmap="viridis", vmin=6, vmax=20, s=30, marker=marker,
                label=f"{sum(states)} B written for a parameter{note}", linewidths=0,
            )  # fmt: skip
        line = front(designs)
        axis.step(
            [one["added_area"] + 1 for one in line], [one["speedup"] for one in line], where="post",
            color=FAINT, linewidth=1, zorder=0,
        )  # fmt: skip
        axis.axhline(WANTED, color=BUDGET_COLOUR, linewidth=1, linestyle=(0, (5, 3)))
        axis.annotate(
            f"cheapest of {WANTED:g} times: the element works\nwhile the array does,"
            f" {cheapest['speedup']:.2f} x at {cheapest['ssd_w']:.1f} W",
            (cheapest["added_area"] + 1, cheapest["speedup"]), xytext=(28, -62),
            textcoords="offset points", fontsize=9, color=INK,
            arrowprops={"arrowstyle": "-", "color": INK},
        )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel("area of elements and additions, today's = 1 (assumed; log)", color=INK)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=9, loc="lower right")
        figure.colorbar(points, ax=axis, label="mean power of the drive, W")
        dress(
            axis,
            "Adam, 6.7 B parameters on the dies: speed-up over the host by added area",
            "times",
        )
        figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
