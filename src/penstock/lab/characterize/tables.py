"""Results as tables in a terminal, like the poster's, and its claims in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.core.units import format_bytes, format_duration
from penstock.lab.characterize.checkpoint_methods import WAYS
from penstock.lab.characterize.claims import rows, times
from penstock.observe.summary_text import add_row, grid


def table(document: Mapping[str, Any]) -> RenderableType:
    """Render a document of :func:`.characterize`."""
    records = document["networks"]
    parts: list[RenderableType] = [_head(document), Text()]
    if records:
        parts += [_stalls(records), Text(), _latencies(records), Text()]
    if any(each["colocation"] for each in records):
        parts += [_colocation(records), Text()]
    if document.get("mix"):
        parts += [_mix(document["mix"]), Text()]
    if records:
        parts += [_memory(records), Text()]
    for number, each in enumerate(document["claims"], start=1):
        parts.append(Text(f"{number}. {each['claim']}: {each['verdict']}. {each['words']}"))
    return Group(*parts)


def scale_words(document: Mapping[str, Any]) -> str:
    """Describe the scale, for every kind of output."""
    settings = document["settings"]
    what = "full size" if settings["scale"] == 1 else document["scale_means"]
    return f"scale {settings['scale']:g}: {what}"


def _head(document: Mapping[str, Any]) -> Text:
    settings, machine = document["settings"], document["machine"]
    how = {"none": "one process", "ddp": "data parallelism", "pipeline": "a pipeline"}
    processes = "" if machine["processes"] == 1 else f" of {machine['processes']} processes"
    return Text(
        f"{scale_words(document)}; {settings['epochs']}"
        f" epoch{'' if settings['epochs'] == 1 else 's'} of {settings['steps']} steps;"
        f" {how[settings['parallel']]}{processes} on {machine['device']}, {machine['cores']} cores"
        f" ({machine['cpu']}), {machine['filesystem']}; energy {machine['energy']}"
    )


def _stalls(records: Any) -> RenderableType:
    columns = ("network", "parameters", "state", "step", "training", "energy")
    title = "Training, and its stall at a checkpoint every 100 steps"
    made = grid(title, (*columns, "torch.save", "ours", "background"))
    facts = {title: each for each in records for title, _ in rows([each])}
    for title, stage in rows(records):
        joules = stage["energy"]["joules"]
        add_row(
            made,
            title,
            f"{facts[title]['parameters'] / 1e6:.1f} M",
            format_bytes(facts[title]["state_bytes"]),
            format_duration(stage["step_s"]["median"]),
            format_duration(stage["seconds"]),
            "-" if joules is None else f"{joules:.0f} J",
            *(f"{stage['checkpoint'][way]['stall_share']:.2%}" for way in WAYS),
        )
    return made


def _latencies(records: Any) -> RenderableType:
    columns = ("network", "torch.save", "ours", "background", "torch.load", "ours")
    made = grid("Until a checkpoint is durable, and until it is restored, cold", columns)
    for title, stage in rows(records):
        found = stage["checkpoint"]
        times = [found[way]["latency_s"] for way in WAYS]
        times += [found[way]["restore_s"] for way in WAYS[:2]]
        add_row(made, title, *map(format_duration, times))
    return made


def _colocation(records: Any) -> RenderableType:
    kinds = ("copies", "cpu", "memory", "io")
    count = records[0]["colocation"]["copies"]["count"]
    made = grid(
        f"Time of a step beside {count} of each, over its time alone",
        ("network", *kinds, "all copies, of one after the other"),
    )
    for each in records:
        found = each["colocation"]
        slow = [f"{found[kind]['slowdown']:.2f}" for kind in kinds]
        add_row(made, each["title"], *slow, f"{found['copies']['all_slowdown']:.2f}")
    return made


def _mix(mix: Any) -> RenderableType:
    columns = ("network", "steps", "step, alone", "beside", "times")
    stalls = (f"stall, {name}: times" for name in ("torch.save", "ours", "background"))
    made = grid("Different networks at the same time, one job each", (*columns, *stalls))
    for each in mix["networks"]:
        step = each["step_s"]
        add_row(
            made,
            each["title"],
            str(each["steps"]),
            format_duration(step["alone"]),
            format_duration(step["beside"]),
            f"{times(step):.2f}",
            *(f"{times(each['stall_s'][way]):.2f}" for way in WAYS),
        )
    return made


def _memory(records: Any) -> RenderableType:
    columns = ("network", "idle", "suspended", "freed", "written", "suspend", "resume")
    made = grid("DRAM of a job that waits, idle and suspended to flash", columns)
    for each in records:
        found = each["dram"]
        add_row(
            made,
            each["title"],
            format_bytes(found["idle_bytes"]),
            format_bytes(found["suspended_bytes"]),
            f"{1 - found['suspended_bytes'] / found['idle_bytes']:.0%}",
            format_bytes(found["written_bytes"]),
            format_duration(found["suspend_s"]),
            format_duration(found["resume_s"]),
        )
    return made
