"""Result files as tables of Markdown: each row of a template, with its figures in place."""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from _results import RESULTS

FIGURE = re.compile(r"\{([^{}]+?)(?::([^:/{}]+(?:/s)?))?\}")
ROW = re.compile(
    r"^\| (?P<later>\?)?(?P<result>[^|]+?)(?: @ (?P<commit>[^|]+?))? \|(?P<cells>.*)\|$"
)

UNITS: Mapping[str, Callable[[float], str]] = {
    "GB/s": lambda value: f"{value / 1e9:.1f} GB/s",
    "G": lambda value: f"{value / 1e9:.1f}",
    "MB": lambda value: f"{value / 1e6:.0f} MB",
    "MiB": lambda value: f"{value / 2**20:.0f} MiB",
    "GiB": lambda value: f"{value / 2**30:.1f} GiB",
    "Mp/s": lambda value: f"{value / 1e6:.0f} M parameters/s",
    "yes": lambda value: "yes" if value else "no",
}
NAMES = {
    "fastpersist": "FastPersist",
    "torch_save": "`torch.save`",
    "litdata": "LitData",
    "webdataset": "WebDataset",
    "mosaicml-streaming": "MosaicML Streaming",
    "memmap": "`numpy.memmap`",
}


def filled(row: str, *, source: bool = True) -> str | None:
    """A template's row with its figures, and with ``source`` the machine, commit and date of its file.

    None if the row begins with ``?`` and its file is not written yet.
    """
    parts = ROW.match(row)
    if parts is None:
        raise SystemExit(f"not a row of a result: {row}")
    file, _, base = parts["result"].partition("/")
    if parts["later"] and not (RESULTS / f"{file}.json").exists():
        return None
    result = _load(file)
    figures = _at(result["figures"], base, file) if base else result["figures"]

    def figure(match: re.Match[str]) -> str:
        return _written(_at(figures, match[1], parts["result"]), match[2] or "")

    cells = FIGURE.sub(figure, parts["cells"])
    if not source:
        return f"|{cells}|"
    commit = _at(result["figures"], parts["commit"], file) if parts["commit"] else result["commit"]
    return f"|{cells}| {_machine(result['hardware'])} | `{commit[:7]}`, {result['date']} |"


def _written(value: Any, form: str) -> str:
    if isinstance(value, list):
        return ", ".join(_written(each, form) for each in value)
    if form in UNITS:
        return UNITS[form](value)
    if isinstance(value, str):
        return NAMES.get(value, value)
    return format(value, form).replace("%", " %")


def _at(figures: Any, path: str, where: str) -> Any:
    found = figures
    try:
        for step in path.split("/"):
            found = found[int(step)] if isinstance(found, list) else found[step]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise SystemExit(f"benchmarks/results: {where} has no figure {path!r}") from error
    return found


@cache
def _load(file: str) -> dict[str, Any]:
    result = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    derive = DERIVED.get("weights" if file.startswith("weights_") else file)
    if derive is not None:
        derive(result["figures"])
    return result


def _machine(hardware: Mapping[str, Any]) -> str:
    cpu = re.sub(r"\(R\)|Processor|@.*", "", hardware["cpu"])
    cores = hardware["cores"]
    return f"{' '.join(cpu.split())}, {cores} core{'s' * (cores != 1)}"


def _checkpoint(figures: dict[str, Any]) -> None:
    """Of the libraries the best in each direction; saves in the background are not compared."""
    libraries = {
        name: each
        for name, each in figures.items()
        if not name.startswith(("raw", "ours")) and not name.endswith("_async")
    }
    found: dict[str, Any] = {}
    for way in ("save", "load"):
        speeds = {name: each[way]["bytes_per_s"] for name, each in libraries.items() if way in each}
        found[f"best_{way}"] = max(speeds, key=speeds.__getitem__)
        found[f"best_{way}_bytes_per_s"] = max(speeds.values())
        found[f"libraries_{way}"] = len(speeds)
    best = found["best_load_bytes_per_s"]
    found["load_of_best_peer"] = figures["ours"]["load"]["bytes_per_s"] / best
    found["fresh_load_of_best_peer"] = figures["ours_fresh"]["load"]["bytes_per_s"] / best
    figures["derived"] = found


def _suspend(figures: dict[str, Any]) -> None:
    for case in figures.values():
        by = case["by_checkpoint"]
        case["derived"] = {
            "suspend": by["save_and_end_s"] / case["first_suspend_s"]["median"],
            "suspend_again": by["save_and_end_s"] / case["suspend_s"]["median"],
            "resume_at_once": by["start_and_load_s"] / case["resume_at_once_s"]["median"],
            "resume": by["start_and_load_s"] / case["resume_s"]["median"],
        }


def _dataset(figures: dict[str, Any]) -> None:
    for sides in figures.values():
        best = sides[sides["ratios"]["best_peer"]]
        window = sides["ours:window"]["steady_gb_per_s"]
        sides["derived"] = {
            "best_peer_gb_per_s": best["steady_gb_per_s"],
            "best_peer_spread": best["spread"],
            "window_of_best_peer": window / best["steady_gb_per_s"],
        }


def _integrity(figures: dict[str, Any]) -> None:
    ours = [each for name, each in figures.items() if name.startswith("ours")]
    others = [each for name, each in figures.items() if not name.startswith("ours")]
    flips = [each[kind] for each in ours for kind in ("anywhere", "end")]
    figures["derived"] = {
        "ours_bits": sum(each["bits"] for each in flips),
        "ours_noticed": sum(each["noticed"] for each in flips),
        "ours_kills": sum(each["killed"]["processes"] for each in ours),
        "ours_lost": sum(each["killed"]["lost"] + each["killed"]["mixed"] for each in ours),
        "others": len(others),
        "blind": sum(each["anywhere"]["noticed"] == 0 for each in others),
        "losers": sum(each["killed"]["lost"] + each["killed"]["mixed"] > 0 for each in others),
    }


def _jobs(figures: dict[str, Any]) -> None:
    sides = ("managed", "all at once")
    budget, steps = figures["budget_bytes"], sum(figures["one after the other"]["steps"])
    figures["derived"] = {name: figures[name]["peak_bytes"] / budget for name in sides} | {
        "paged_steps": sum(figures["paged"]["steps"]) / steps
    }


def _planning(figures: dict[str, Any]) -> None:
    times = [each["median_s"] for each in figures.values() if isinstance(each, dict)]
    figures["derived"] = {"fastest_s": min(times), "slowest_s": max(times)}


def _papers(figures: dict[str, Any]) -> None:
    """The memory that VGG-16 needs, and what the papers say."""
    said = {
        line["what"]: line["paper"].replace("%", " %").replace("  %", " %")
        for line in figures["lines"]
    }
    figures["derived"] = {
        "vgg16_needed_bytes": figures["vdnn"]["vgg16-256"]["baseline_bytes"],
        "vdnn": next(text for what, text in said.items() if "first two configurations" in what),
    } | {
        network: next(
            text
            for what, text in said.items()
            if what.startswith(network) and "auto's share" in what
        )
        for network in figures["g10"]
    }


def _arena(figures: dict[str, Any]) -> None:
    ours = figures["arena_to_torch_touched"]["ns_per_block"]["median"]
    torch = figures["torch_empty_touched"]["ns_per_block"]["median"]
    figures["derived"] = {"arena_us": ours / 1e3, "torch_us": torch / 1e3, "times": torch / ours}


def _weights(figures: dict[str, Any]) -> None:
    """Of the other sides their steps, and what training with accelerate changes."""
    others = []
    for side, name in WEIGHTS_SIDES.items():
        found = figures.get(side)
        if found is None:
            continue
        if "failed" in found:
            others.append(f"{name} failed: {found['failed']}".replace("|", " "))
        elif "gradients" in found:
            others.append(
                f"{name} trains nothing, and says nothing: {found['gradients']:.0f} of"
                f" {found['tensors']:.0f} tensors get a gradient, {found['changed_files']:.0f} files"
                " change"
            )
        else:
            differs = found.get("largest_difference")
            others.append(
                f"{name} {found['step_s']:.2f} s (Penstock {found['flash_ratio']:.2f} x"
                + ("" if differs is None else f"; differs by {differs:.1g}")
                + (f"; peak {UNITS['MiB'](found['group_peak_bytes'])}" if side in HEAPS else "")
                + ")"
            )
    plan = figures.get("plan", {})
    ratios = {name: plan.get(f"measured_of_{name}") for name in ("step_s", "read_bytes")}
    said = [f"{name} {ratios[key]:.2f} x" for key, name in PLANNED.items() if ratios[key]]
    figures["derived"] = {"others": "; ".join(others), "plan": ", ".join(said) or "not asked"}


WEIGHTS_SIDES = {
    "plain": "plain, all in memory:",
    "untrimmed": "without trimming of the heap",
    "mmap": "blocks mapped one by one",
    "raw": "the transfers alone",
    "compute": "plain forward and backward alone",
    "bound": "the longer of both",
    "mapped": "mapped files",
    "accelerate": "accelerate",
    "airllm": "AirLLM",
    "slowllama": "slowllama",
    "deepspeed": "DeepSpeed",
}
HEAPS = ("untrimmed", "mmap")
"""Sides that may use more memory."""
PLANNED = {"step_s": "time", "read_bytes": "bytes read"}

DERIVED: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "arena": _arena,
    "checkpoint": _checkpoint,
    "checkpoint_epyc": _checkpoint,
    "dataset": _dataset,
    "integrity": _integrity,
    "jobs": _jobs,
    "papers": _papers,
    "planning": _planning,
    "suspend": _suspend,
    "suspend_epyc": _suspend,
    "weights": _weights,
}
"""By result file, what adds the figures that follow from others, under ``derived``."""
