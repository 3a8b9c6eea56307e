"""The poster's experiment on the machine at hand, network by network; see :func:`characterize`."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.lab.characterize.checkpoint_methods import WAYS, each_way
from penstock.lab.characterize.claims import claims
from penstock.lab.characterize.energy import EnergyMeter
from penstock.lab.characterize.machine import (
    device_kind,
    machine,
    process_count,
    threads_per_process,
)
from penstock.lab.characterize.mix import measure_mix
from penstock.lab.characterize.networks import NETWORKS, SCALE_MEANS
from penstock.lab.characterize.rank_processes import RankProcesses, spawn
from penstock.lab.characterize.scratch import check_free_space, scratch
from penstock.lab.characterize.settings import Settings
from penstock.lab.characterize.slowdown import SoloSteps, measure_copies, measure_programs

SCHEMA: Final = 1
PER_STEPS: Final = 100
"""Training steps for each checkpoint, when stalls are given as shares."""
_STATES_ON_DISK: Final = 6
"""Disk space in states: checkpoints of three kinds, one to suspend from, and a suspended job."""

Say = Callable[[str], None]


def characterize(settings: Settings, *, say: Say = lambda _: None) -> dict[str, Any]:
    """Train the poster's networks here, save them in three ways, and run programs beside them.

    Each network is trained by processes of its own, which end before the next network begins. Takes
    minutes at the default scale. Call it from the main thread: processes end with the thread that started
    them.

    Args:
        settings: Networks, scale, and numbers of steps.
        say: Called with a line for each network as it begins.

    Returns:
        A document that follows ``docs/characterize.schema.json``: the machine, the settings, a record of
        each network and of the mix, and the poster's claims judged by them. Times in seconds, sizes in
        bytes.

    Raises:
        ConfigError: The directory cannot be used, or there are too few devices.
        NoSpaceError: Checkpoints do not fit there.
        WorkerError: A process was killed or died; all others are ended, and their files removed.
        PenstockError: An error in one of the processes.
    """
    with scratch(settings.directory) as folder:
        world = process_count(settings.parallel)
        facts = {
            "scale": settings.scale,
            "parallel": settings.parallel,
            "world": world,
            "device": device_kind(),
            "threads": settings.threads or threads_per_process(world),
        }
        records = []
        for number, name in enumerate(settings.networks, start=1):
            say(f"{NETWORKS[name].title} ({number} of {len(settings.networks)})")
            records.append(_network(name, settings, facts, folder))
        mix = {}
        if settings.mix:
            say(f"a mix of {', '.join(NETWORKS[name].title for name in settings.mix)}")
            mix = measure_mix(settings, facts, folder)
        return document(settings, machine(str(folder), facts), records, mix)


def document(
    settings: Settings,
    where: Mapping[str, Any],
    records: list[dict[str, Any]],
    mix: Mapping[str, Any],
) -> dict[str, Any]:
    """Put the records of some networks, and of a mix if there was one, into a result document."""
    return {
        "schema": SCHEMA,
        "machine": dict(where),
        "settings": settings.to_json(),
        "scale_means": SCALE_MEANS,
        "networks": records,
        "mix": dict(mix),
        "claims": claims(records, mix),
    }


def merge(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Join documents that were measured one after the other, on one machine and with the same settings.

    Raises:
        ConfigError: Machines or settings differ, a network occurs twice, or there are two mixes.
    """
    first = documents[0]
    alike = ("epochs", "parallel", "colocate", "scale", "steps", "threads", "seconds")
    for other in documents[1:]:
        if other["machine"] != first["machine"]:
            raise ConfigError("results of different machines or versions cannot be joined")
        for name in alike:
            one, another = (each["settings"].get(name) for each in (first, other))
            if one != another:
                raise ConfigError(
                    f"results with {name}={one!r} and {name}={another!r} cannot be joined"
                )
    records = [record for each in documents for record in each["networks"]]
    names = [each["name"] for each in records]
    if len(set(names)) < len(names):
        raise ConfigError(f"results to be joined have a network twice: {', '.join(names)}")
    mixes = [each for each in documents if each.get("mix")]
    if len(mixes) > 1:
        raise ConfigError("of results to be joined, only one may have a mix")
    mix, mixed = (mixes[0]["mix"], mixes[0]["settings"]["mix"]) if mixes else ({}, [])
    order = list(NETWORKS)
    records.sort(key=lambda each: order.index(each["name"]))
    settings = first["settings"] | {"networks": [each["name"] for each in records], "mix": mixed}
    found = {"networks": records, "mix": mix, "claims": claims(records, mix)}
    return first | {"settings": settings} | found


def _network(
    name: str, settings: Settings, facts: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    case = NETWORKS[name]
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        team = stack.enter_context(spawn(name, f"the job of {case.title}", own, **facts))
        team.receive()
        replies = team.ask("facts")
        state_bytes = sum(each["state_bytes"] for each in replies)
        check_free_space(folder, _STATES_ON_DISK * state_bytes)
        record: dict[str, Any] = {
            "name": name,
            "title": case.title,
            "configuration": case.settings(settings.scale),
            "batch": case.batch,
            "optimizer": case.optimizer,
            "parameters": replies[0]["parameters"],
            "state_bytes": state_bytes,
            "threads": replies[0]["threads"],
            "stages": [],
        }
        for number, stage in enumerate(case.stages):
            data = replies[0]["data"] if not number else team.ask("tune")[0]["data"]
            record["stages"].append({"stage": stage, "data": data} | _stage(team, settings))
        step_s = record["stages"][-1]["step_s"]["median"]
        alone = SoloSteps(team, step_s, settings.seconds)
        record["colocation"] = _colocation(name, alone, settings, facts, folder)
        record["dram"] = _dram(team)
    return record


def _stage(team: RankProcesses, settings: Settings) -> dict[str, Any]:
    """Train for some epochs; after each, save once in every way."""
    meter = EnergyMeter()
    took: list[float] = []
    losses: list[float] = []
    joules = 0.0
    saves: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(settings.epochs):
        meter.start()
        trained = team.ask("train", steps=settings.epoch_steps)
        joules += meter.joules()
        took += _slowest(trained)
        losses.append(next(each["loss"] for each in trained if each["loss"] is not None))
        _save_all(team, statistics.median(took), saves)
    step_s = statistics.median(took)
    return {
        "steps": len(took),
        "seconds": sum(took),
        "step_s": {"median": step_s, "min": min(took), "max": max(took)},
        "losses": losses,
        "checkpoint": {way: _way(found, step_s) for way, found in saves.items()},
        "energy": {"source": meter.source, "joules": joules},
    }


def _save_all(team: RankProcesses, step_s: float, saves: dict[str, list[dict[str, Any]]]) -> None:
    for way, steps in each_way(saves, step_s):
        saved = team.ask("save", way=way, steps=steps, step_s=step_s)
        restored = team.ask("restore", way=way)
        one = _over_ranks(saved) | _over_ranks(restored)
        one["same"] = all(each["same"] for each in restored if each)
        saves[way].append(one)


def _slowest(trained: list[dict[str, Any]]) -> list[float]:
    """Return the times of steps; a step ends when the last rank's ends."""
    return [max(each) for each in zip(*(one["steps_s"] for one in trained), strict=True)]


def _over_ranks(replies: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine ranks: times of the slowest, bytes of all together."""
    names = {name for each in replies for name in each}
    return {
        name: (sum if name.endswith("bytes") else max)(
            each[name] for each in replies if name in each
        )
        for name in sorted(names)
    }


def _way(found: list[dict[str, Any]], step_s: float) -> dict[str, Any]:
    """Return medians over the epochs; the share is of ``PER_STEPS`` steps without a checkpoint."""
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
    name: str, alone: SoloSteps, settings: Settings, facts: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    if not settings.colocate:
        return {}
    copies = measure_copies(name, alone, settings.colocate, facts, folder)
    return {"copies": copies} | measure_programs(alone, settings.colocate, folder)


def _dram(team: RankProcesses) -> dict[str, Any]:
    """Memory of the job between two steps, and while it is suspended, as the system counts it."""
    before = team.resident_bytes()
    suspended = _over_ranks(team.ask("suspend"))
    during = team.resident_bytes()
    resumed = _over_ranks(team.ask("resume"))
    return {"idle_bytes": before, "suspended_bytes": during} | suspended | resumed
