"""The command ``penstock ssd run``: requests on a simulated drive."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from penstock import __version__
from penstock.cli.command import INTERRUPTED_CODE, add_command, size
from penstock.cli.output import print_result, say
from penstock.cli.paths import picture_to_write
from penstock.core.errors import ConfigError
from penstock.core.units import format_bandwidth, format_bytes, format_duration, parse_bytes
from penstock.lab.cli.ssd_options import (
    add_fields,
    count,
    device_of,
    known_devices,
    list_of,
    report_ignored,
)
from penstock.lab.cli.ssd_pace import INTERRUPTED, Pace
from penstock.lab.ssd import with_field
from penstock.lab.ssd.aging import fill
from penstock.lab.ssd.description import nearest
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.measure import DriveRun, Latencies
from penstock.lab.ssd.mqsim_flows import Scenario, read_workload
from penstock.lab.ssd.mqsim_xml import is_mqsim
from penstock.lab.ssd.requests import HostRequest, Workload
from penstock.lab.ssd.run_plot import plot_usage
from penstock.lab.ssd.traces import TraceFormat, read_trace
from penstock.observe.summary_text import percent
from penstock.report.table import Row, side_by_side

_SYNTHETIC: Final = {
    "randread": (True, 1.0),
    "randwrite": (True, 0.0),
    "randrw": (True, 0.5),
    "read": (False, 1.0),
    "write": (False, 0.0),
}
"""Workloads by their names in fio: (random, share of reads)."""
_PLAIN: Final = ("requests", "queue_depth", "working_set", "filled", "skip")
"""Options of every synthetic workload that are fields of :class:`Workload` by the same name."""
_TRACE: Final = "a trace"
_MQSIM: Final = "MQSim's workload"
_TAKES: Final[dict[str, tuple[str, ...]]] = {
    "randread": (*_PLAIN, "request_size", "hot"),
    "randwrite": (*_PLAIN, "request_size", "hot", "flush_every"),
    "randrw": (*_PLAIN, "request_size", "hot", "flush_every", "read_share"),
    "read": (*_PLAIN, "request_size", "start"),
    "write": (*_PLAIN, "request_size", "start", "flush_every"),
    _TRACE: ("format", "requests", "queue_depth", "filled", "skip"),
    _MQSIM: ("scenario",),
}
"""Options that have an effect, by the kind of workload; ``--seed`` and those of the drive always have."""
_REQUESTS: Final = 10_000
_PERCENTILES: Final = (0.5, 0.99, 0.999)
_EXAMPLES: Final = """\
examples:
  penstock ssd run mqsim-default randread --queue-depth 16
  penstock ssd run consumer-tlc randrw --read-share 0.7 --request-size 16KiB --requests 1e5
  penstock ssd run optimstore trace.csv --json
  penstock ssd run ssdconfig.xml workload.xml
  penstock ssd run consumer-tlc events.jsonl"""


def add_parser(what: Any) -> None:
    """Add ``run`` to the subcommands of ``penstock ssd``."""
    made = add_command(
        what,
        "run",
        "serve requests on a simulated drive, event by event",
        _execute,
        description="Serve requests on a simulated drive, event by event: rates, latencies, use, energy,"
        "\nwrite amplification.",
        examples=_EXAMPLES,
    )
    made.add_argument("device", metavar="DEVICE", help=known_devices())
    made.add_argument(
        "workload", metavar="WORKLOAD",
        help=f"{', '.join(_SYNTHETIC)}; or a file with a trace, or MQSim's workload, NAME.xml",
    )  # fmt: skip
    made.add_argument(
        "--format",
        choices=tuple(map(str, TraceFormat)),
        help="format of the trace (default: guessed from its first line)",
    )
    made.add_argument(
        "--scenario",
        metavar="N",
        type=int,
        help="number of the scenario, if MQSim's workload has several",
    )
    made.add_argument(
        "--requests",
        metavar="N",
        help="number of requests (default: 1e4; for a trace, all of it)",
    )
    made.add_argument(
        "--stop-after", metavar="SECONDS", type=float,
        help="send no more requests after this time, and report those that were served; so does Ctrl-C",
    )  # fmt: skip
    made.add_argument(
        "--read-share", metavar="X", type=float, help="share of reads in randrw (default: 0.5)"
    )
    made.add_argument(
        "--request-size",
        metavar="SIZE",
        type=size,
        help="size of a request (default: 4KiB)",
    )
    made.add_argument(
        "--queue-depth", metavar="N", type=int,
        help="requests in the queue; for a trace, those without a time (default: 1)",
    )  # fmt: skip
    made.add_argument(
        "--start", metavar="SIZE", type=size,
        help="where the sequential workloads begin (default: 0B)",
    )  # fmt: skip
    made.add_argument(
        "--working-set",
        metavar="X",
        type=float,
        help="share of the drive that is used (default: 0.5)",
    )
    made.add_argument(
        "--filled", metavar="X", type=float,
        help="share of the drive that is written, in order, before time begins (default: 0)",
    )  # fmt: skip
    made.add_argument(
        "--skip",
        metavar="N",
        type=int,
        help="requests before the measurement begins (default: 0)",
    )
    made.add_argument(
        "--seed", metavar="N", type=int, default=1, help="seed of random choices (default: 1)"
    )
    made.add_argument(
        "--hot", metavar="X,Y",
        help="share of random requests that go to a share of the working set, in a stream of its own, as"
        " 0.9,0.1 (default: none do)",
    )  # fmt: skip
    made.add_argument(
        "--flush-every", metavar="N", type=int,
        help="writes between two flushes of the host (default: no flushes)",
    )  # fmt: skip
    made.add_argument(
        "--power-cap", metavar="W", type=float,
        help="limit of the drive's power in watts; commands wait for others to end",
    )  # fmt: skip
    made.add_argument(
        "--plot", metavar="FILE",
        help="draw channels and dies at work and power over time, and energy by component, as .svg, .png"
        " or .pdf",
    )  # fmt: skip
    add_fields(made)


def _execute(options: argparse.Namespace) -> int:
    """Simulate and print.

    Raises:
        ConfigError: The device, the workload or the trace is invalid, or the drive is full.
    """
    device = device_of(options.device, options.set)
    scenario = _scenario(options.workload, options.scenario)
    given = _given(options, _kind(options.workload, scenario))
    if scenario is not None and len(scenario.flows) > device.ftl.streams:
        # in MQSim every flow has its own blocks
        device = with_field(device, "ftl.streams", len(scenario.flows))
    plot = None if options.plot is None else picture_to_write(options.plot, "--plot")
    drive = Drive(device, seed=options.seed, watch=plot is not None, power_cap_w=options.power_cap)
    if "requests" in given:
        given["requests"] = count(options.requests, "--requests")
    elif options.workload in _SYNTHETIC:
        given["requests"] = _REQUESTS
    pace = Pace(given.get("requests"), options.stop_after)
    with pace, _progress(f"{options.workload} on {options.device}", pace):
        run = _run(options, given, drive, scenario, pace)
    if pace.stopped:
        if not run.requests:
            raise ConfigError(f"{pace.stopped}, before any request was measured")
        say(f"{pace.stopped}: this is what the first {run.requests} requests tell")
    if plot is not None and drive.usage is not None:
        title = f"{options.workload} on {device.name}"
        plot_usage(title, drive.usage.moments(), run.energy_j, plot, cap_w=options.power_cap)
    print_result(
        options.json,
        lambda: {**document(run, options.workload), "stopped": pace.stopped or None},
        lambda: text(run, options.workload),
    )
    return INTERRUPTED_CODE if pace.stopped == INTERRUPTED else 0


def _kind(workload: str, scenario: Scenario | None) -> str:
    """Return the key of a workload in ``_TAKES``. Raises ConfigError if there is no such workload."""
    if workload in _SYNTHETIC:
        return workload
    if scenario is not None:
        return _MQSIM
    if not Path(workload).is_file():
        raise ConfigError(
            f"workload {workload!r} is neither a file nor one of {', '.join(_SYNTHETIC)}"
            f"{nearest(workload, _SYNTHETIC)}"
        )
    return _TRACE


def _given(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Return the given options of ``_TAKES``. Raises ConfigError for one that has no effect here."""
    names = dict.fromkeys(name for takes in _TAKES.values() for name in takes)
    given = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in _TAKES[kind]:
            kinds = ", ".join(each for each, takes in _TAKES.items() if name in takes)
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is for {kinds}, not for {options.workload}; leave it out")
    return given


def _run(
    options: argparse.Namespace,
    given: dict[str, Any],
    drive: Drive,
    scenario: Scenario | None,
    pace: Pace,
) -> DriveRun:
    if options.workload in _SYNTHETIC:
        workload = _synthetic(options, given)
        fill(drive.ftl, int(drive.ftl.user_pages * workload.filled))
        stream = pace.of(workload.stream(drive.user_bytes))
        return drive.serve(stream, queue_depth=workload.queue_depth, skip=workload.skip)
    if scenario is not None:
        flows = [
            (pace.of(flow.stream(drive.device, drive.events)), flow.queue_depth)
            for flow in scenario.flows
        ]
        return drive.serve_flows(flows)
    filled = given.get("filled", 0.0)
    if not 0 <= filled <= 1:
        raise ConfigError(f"--filled is {filled}; it must be a share from 0 to 1")
    fill(drive.ftl, int(drive.ftl.user_pages * filled))
    kind = TraceFormat(options.format) if options.format else None
    requests: Iterator[HostRequest] = read_trace(
        Path(options.workload), drive.user_bytes, kind=kind
    )
    if "queue_depth" in given:  # if the first request has a time, so have all
        first = next(requests, None)
        if first is not None and first.arrival_ps is not None:
            raise ConfigError(
                f"--queue-depth is for requests without times, and {options.workload} has times; leave it"
                f" out"
            )
        requests = chain([] if first is None else [first], requests)
    return drive.serve(
        pace.of(islice(requests, given.get("requests"))),
        queue_depth=given.get("queue_depth", 1),
        skip=given.get("skip", 0),
    )


def _scenario(workload: str, number: int | None) -> Scenario | None:
    """Return the scenario to run of MQSim's workload; None for another kind of workload."""
    if not is_mqsim(workload) or not Path(workload).is_file():
        return None
    scenarios = read_workload(workload)
    if number is None and len(scenarios) == 1:
        number = 1
    if number is None or not 1 <= number <= len(scenarios):
        raise ConfigError(
            f"{workload!r} has {len(scenarios)} scenarios, each for a new drive; choose one, as in"
            " --scenario 1"
        )
    scenario = scenarios[number - 1]
    report_ignored(workload, scenario.ignored)
    return scenario


def _synthetic(options: argparse.Namespace, given: dict[str, Any]) -> Workload:
    random, share = _SYNTHETIC[options.workload]
    fields: dict[str, Any] = {
        name: given[name] for name in (*_PLAIN, "flush_every", "read_share") if name in given
    }
    for name, field in (("request_size", "request_bytes"), ("start", "start_bytes")):
        if name in given:
            fields[field] = parse_bytes(given[name], what=f"--{name.replace('_', '-')}")
    if "hot" in given:
        fields["hot_share"], fields["hot_set"] = _hot(given["hot"])
    return Workload(random=random, seed=options.seed, **{"read_share": share, **fields})


def _hot(text: str) -> tuple[float, float]:
    """Parse the shares (of requests, of the working set). Raises ConfigError."""
    try:
        share, part = map(float, list_of(text))
    except ValueError:
        raise ConfigError(f"--hot is {text!r}, not two shares like 0.9,0.1") from None
    return share, part


def document(run: DriveRun, workload: str) -> dict[str, Any]:
    """Return the JSON document."""
    plain = (
        *("device", "requests", "reads", "writes", "time_s", "iops", "bytes_per_s", "read_bytes"),
        *("written_bytes", "outstanding", "flash_reads", "flash_programs", "flash_erases"),
        *("channel_bytes", "channel_use", "die_use", "up_use", "down_use", "write_amplification"),
        *("most_erases", "mean_erases", "events"),
    )
    return {
        "schema": 1,
        "penstock": __version__,
        "workload": workload,
        "engine": "events",
        **{name: getattr(run, name) for name in plain},
        "latency_us": {
            name: _latency(each)
            for name, each in (
                ("all", run.latency),
                ("read", run.read_latency),
                ("write", run.write_latency),
            )
            if each.count
        },
        "map": None if run.map_use is None else asdict(run.map_use),
        "cache": None if run.cache_use is None else asdict(run.cache_use),
        "power_loss": None if run.power_loss is None else asdict(run.power_loss),
        "energy_j": {"total": run.joules, "components": dict(run.energy_j)},
    }


def _latency(each: Latencies) -> dict[str, float]:
    return {
        "mean": each.mean_ps / 1e6,
        "min": each.least_ps / 1e6,
        "max": each.most_ps / 1e6,
        **{f"p{share * 100:g}": each.percentile_ps(share) / 1e6 for share in _PERCENTILES},
    }


def text(run: DriveRun, workload: str) -> RenderableType:
    """Render a table for the terminal."""

    def latency(each: Latencies) -> str:
        if not each.count:
            return "none"
        names = ", ".join(
            f"p{share * 100:g} {format_duration(each.percentile_ps(share) / 1e12)}"
            for share in _PERCENTILES
        )
        return f"{format_duration(each.mean_ps / 1e12)} ({names})"

    rows = [
        Row("requests", (f"{run.requests} in {format_duration(run.time_s)}",)),
        Row("rate", (f"{run.iops:.0f} a second, {format_bandwidth(run.bytes_per_s)}",)),
        Row("latency of reads", (latency(run.read_latency),)),
        Row("latency of writes", (latency(run.write_latency),)),
        Row("outstanding, on average", (f"{run.outstanding:.1f}",)),
        Row("channels, dies busy", (f"{percent(run.channel_use)}, {percent(run.die_use)}",)),
        Row("link busy, up, down", (f"{percent(run.up_use)}, {percent(run.down_use)}",)),
        Row("over the channels", (format_bytes(run.channel_bytes),)),
        Row("write amplification", (f"{run.write_amplification:.3f}",)),
        Row("erases", (f"{run.flash_erases}; of a block {run.most_erases} at most",)),
        *_memory_rows(run),
        Row("energy of the drive", (f"{run.joules:.4g} J",)),
    ]
    title = f"{workload} on {run.device}"
    return Group(side_by_side(title, ("simulated",), rows), Text(f"\n{run.events} events"))


def _memory_rows(run: DriveRun) -> list[Row]:
    """Return rows for a map on flash, and for a write cache."""
    rows: list[Row] = []
    if run.map_use is not None:
        its = run.map_use
        summary = (
            f"{percent(its.hit_rate)} found in memory; {its.reads} pages read, {its.writes} written"
        )
        rows.append(Row("map", (summary,)))
    if run.cache_use is not None and run.power_loss is not None:
        use, loss = run.cache_use, run.power_loss
        summary = f"hits: {use.read_hits} of {use.read_hits + use.read_misses} pages read"
        summary += f", {use.write_hits} of {use.write_hits + use.write_misses} written"
        rows.append(Row("write cache", (summary,)))
        what = "lost" if loss.lost else f"{format_duration(loss.flush_s)}, {loss.flush_j:.3g} J"
        rows.append(Row("at a loss of power", (f"{format_bytes(loss.nbytes)} at most: {what}",)))
    return rows


@contextmanager
def _progress(label: str, pace: Pace) -> Iterator[None]:
    """Show progress on a terminal; do nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        pace.tell = lambda progress: bar.update(task, description=f"{label}: {progress}")
        yield
