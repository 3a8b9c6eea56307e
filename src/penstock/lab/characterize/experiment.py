"""The poster's experiment on the machine at hand, network by network; see :func:`characterize`."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.lab.characterize.beside import Alone, beside_copies, beside_programs
from penstock.lab.characterize.claims import claims
from penstock.lab.characterize.energy import Meter
from penstock.lab.characterize.machine import device_kind, machine, world_of
from penstock.lab.characterize.networks import NETWORKS, SCALE_MEANS
from penstock.lab.characterize.scratch import check_fits, scratch
from penstock.lab.characterize.settings import Settings
from penstock.lab.characterize.teams import Team, hire

SCHEMA: Final = 1
PER_STEPS: Final = 100
"""Steps to one checkpoint, in what stalls are shares of."""
WAYS: Final = ("torch_save", "sync", "async")
_MOST_BESIDE: Final = 50
_STANDING: Final = 6
"""Checkpoints of three kinds, one to suspend from, and what is suspended: times the state."""

Say = Callable[[str], None]


def characterize(settings: Settings, *, say: Say = lambda _: None) -> dict[str, Any]:
    """Train the poster's networks here, save them in three ways, and put programs beside them.

    Each network is trained by processes of its own, which are ended before the next begins. Takes minutes
    at the default scale. Call it from a main thread that lives on: processes end with it.

    Args:
        settings: What and how.
        say: Told of each network as it begins.

    Returns:
        A document as ``docs/characterize.schema.json`` has it: the machine, the settings, a record of
        each network, and the poster's claims judged by them. Times in seconds, sizes in bytes.

    Raises:
        ConfigError: The directory cannot be used, or there are too few devices.
        NoSpaceError: Checkpoints do not fit there.
        WorkerError: A process was killed or died; all others are ended, and their files removed.
        PenstockError: What went wrong in one of them.
    """
    with scratch(settings.directory) as folder:
        facts = {
            "scale": settings.scale,
            "parallel": settings.parallel,
            "world": world_of(settings.parallel),
            "device": device_kind(),
            "threads": 0,
        }
        records = []
        for number, name in enumerate(settings.networks, start=1):
            say(f"{NETWORKS[name].title} ({number} of {len(settings.networks)})")
            records.append(_network(name, settings, facts, folder))
        return document(settings, machine(str(folder), facts), records)


def document(
    settings: Settings, where: Mapping[str, Any], records: list[dict[str, Any]]
) -> dict[str, Any]:
    """The result of some networks."""
    return {
        "schema": SCHEMA,
        "machine": dict(where),
        "settings": settings.to_json(),
        "scale_means": SCALE_MEANS,
        "networks": records,
        "claims": claims(records),
    }


def merge(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One document of several that were measured one after the other, on one machine, alike.

    Raises:
        ConfigError: They were not, or have a network twice.
    """
    first = documents[0]
    alike = ("epochs", "parallel", "colocate", "scale", "steps", "seconds")
    for other in documents[1:]:
        if other["machine"] != first["machine"]:
            raise ConfigError("results of two machines, or versions, cannot be put together")
        for name in alike:
            if other["settings"][name] != first["settings"][name]:
                raise ConfigError(
                    f"results with {name}={first['settings'][name]!r} and"
                    f" {name}={other['settings'][name]!r} cannot be put together"
                )
    records = [record for each in documents for record in each["networks"]]
    names = [each["name"] for each in records]
    if len(set(names)) < len(names):
        raise ConfigError(f"results to be put together have a network twice: {', '.join(names)}")
    order = list(NETWORKS)
    records.sort(key=lambda each: order.index(each["name"]))
    settings = first["settings"] | {"networks": [each["name"] for each in records]}
    return first | {"settings": settings, "networks": records, "claims": claims(records)}


def _network(
    name: str, settings: Settings, facts: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    case = NETWORKS[name]
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        team = stack.enter_context(hire(name, f"the job of {case.title}", own, **facts))
        team.end()
        told = team.ask("facts")
        state_bytes = sum(each["state_bytes"] for each in told)
        check_fits(folder, _STANDING * state_bytes)
        record: dict[str, Any] = {
            "name": name,
            "title": case.title,
            "configuration": case.settings(settings.scale),
            "batch": case.batch,
            "optimizer": case.optimizer,
            "parameters": told[0]["parameters"],
            "state_bytes": state_bytes,
            "threads": told[0]["threads"],
            "stages": [],
        }
        for number, stage in enumerate(case.stages):
            data = told[0]["data"] if not number else team.ask("tune")[0]["data"]
            record["stages"].append({"stage": stage, "data": data} | _stage(team, settings))
        step_s = record["stages"][-1]["step_s"]["median"]
        alone = Alone(team, step_s, settings.seconds)
        record["colocation"] = _colocation(name, alone, settings, facts, folder)
        record["dram"] = _dram(team)
    return record


def _stage(team: Team, settings: Settings) -> dict[str, Any]:
    """Epochs of training; after each, every way to save, once."""
    meter = Meter()
    took: list[float] = []
    losses: list[float] = []
    joules: list[float | None] = []
    saves: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(settings.epochs):
        meter.start()
        trained = team.ask("train", steps=settings.epoch_steps)
        joules.append(meter.joules())
        took += _slowest(trained)
        losses.append(next(each["loss"] for each in trained if each["loss"] is not None))
        _save_all(team, statistics.median(took), saves)
    step_s = statistics.median(took)
    known = [each for each in joules if each is not None]
    return {
        "steps": len(took),
        "seconds": sum(took),
        "step_s": {"median": step_s, "min": min(took), "max": max(took)},
        "losses": losses,
        "checkpoint": {way: _way(found, step_s) for way, found in saves.items()},
        "energy": {
            "source": meter.source,
            "joules": sum(known) if len(known) == len(joules) else None,
        },
    }


def _save_all(team: Team, step_s: float, saves: dict[str, list[dict[str, Any]]]) -> None:
    steps = 0
    for way in WAYS:
        if way == "async":  # until it is durable, as far as the save before tells
            steps = min(_MOST_BESIDE, 1 + math.ceil(saves["sync"][-1]["latency_s"] / step_s))
        saved = team.ask("save", way=way, steps=steps, step_s=step_s)
        restored = team.ask("restore", way=way)
        one = _over_ranks(saved) | _over_ranks(restored)
        one["same"] = all(each["same"] for each in restored if each)
        saves[way].append(one)


def _slowest(trained: list[dict[str, Any]]) -> list[float]:
    """Each step is over when the last rank's is."""
    return [max(each) for each in zip(*(one["steps_s"] for one in trained), strict=True)]


def _over_ranks(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Times are those of the slowest rank, bytes of all together."""
    names = {name for each in told for name in each}
    return {
        name: (sum if name.endswith("bytes") else max)(each[name] for each in told if name in each)
        for name in sorted(names)
    }


def _way(found: list[dict[str, Any]], step_s: float) -> dict[str, Any]:
    """Medians of the epochs; a share is of the time of so many steps without a checkpoint."""
    made: dict[str, Any] = {
        name: statistics.median(each[name] for each in found)
        for name in ("stall_s", "latency_s", "restore_s", "beside_s")
        if name in found[0]
    }
    made |= {
        "nbytes": found[-1]["nbytes"],
        "samples": len(found),
        "same_bits": all(each["same"] for each in found),
        "stall_share": made["stall_s"] / (PER_STEPS * step_s),
        "most_stall_s": max(each["stall_s"] for each in found),
    }
    return made


def _colocation(
    name: str, alone: Alone, settings: Settings, facts: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    if not settings.colocate:
        return {}
    copies = beside_copies(name, alone, settings.colocate, facts, folder)
    return {"copies": copies} | beside_programs(alone, settings.colocate, folder)


def _dram(team: Team) -> dict[str, Any]:
    """What the job holds between two steps, and once it is suspended; from outside."""
    before = team.resident_bytes()
    told = _over_ranks(team.ask("suspend"))
    during = team.resident_bytes()
    back = _over_ranks(team.ask("resume"))
    return {"idle_bytes": before, "suspended_bytes": during} | told | back
