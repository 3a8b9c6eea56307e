"""The command ``penstock bench machine``, which measures a machine file for this machine.

It measures:

1. Flash, through Penstock's engine, with one file in the directory (:mod:`.bandwidth`).
2. Copies to and from the host tier.
3. The speed of the device (:mod:`penstock.lab.compute`).
4. The slowdown of training while a flash tier is written and read (interference), and the tier's speed
   then: on a CPU both compete for memory and cores. If the tier is slower than alone, the lower bandwidth
   goes into the machine file, because plans move data while the device computes.
5. The time of an optimizer's update (:mod:`.update_work`).
6. The further delay of training for each write and each read of a session (:mod:`.transfer_work`).
"""

from __future__ import annotations

import argparse
import importlib
import platform
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, Final

from penstock.cli import bandwidth
from penstock.cli.bandwidth import Measurement
from penstock.cli.command import add_command
from penstock.cli.machine_file import answer
from penstock.cli.output import say
from penstock.cli.paths import file_to_write, spill_directory
from penstock.cli.plan_network import FORMATS
from penstock.core.errors import free_space_bytes
from penstock.core.memory import physical_bytes
from penstock.core.units import MIB, format_bandwidth, format_duration, round_down
from penstock.io.aio import default_engine
from penstock.io.engine import Transfer
from penstock.observe.recorder import Recorder, Stage
from penstock.plan.machine import PRODUCT_SIDES, Compute, Machine
from penstock.runtime import probe
from penstock.store.arena import Arena
from penstock.store.base import Ticket
from penstock.store.flash import FlashTier
from penstock.store.host import HostTier

HOST_BYTES: Final = 64 * MIB
_MOVED_BYTES: Final = 16 * MIB
_IN_FLIGHT: Final = 4
_ROUNDS: Final = 3
_LINK_BYTES: Final = 256 * MIB
_FILE_BYTES: Final = 1024 * MIB
_EXAMPLES: Final = """\
examples:
  penstock bench machine --flash /nvme/spill --output here.toml
  penstock bench machine --flash /nvme/spill --json"""


def add_parser(what: Any) -> None:
    """Add ``machine`` to the subcommands of ``penstock bench``."""
    made = add_command(
        what,
        "machine",
        "measure what plans need of this machine; prints a machine file",
        execute,
        description="Measure flash, host copies, arithmetic, memory, launches, and the slowdown of"
        " computing\nduring flash transfers; takes about a minute. Prints a machine file (TOML).",
        examples=_EXAMPLES,
    )
    made.add_argument(
        "--flash",
        metavar="DIR",
        default=".",
        help="directory to measure (default: the current one)",
    )
    made.add_argument("--output", metavar="FILE", help="write the machine file to FILE as well")
    made.add_argument(
        "--seconds", metavar="N", type=float, default=10.0,
        help="how long to measure flash alone, and again while computing (default: 10)",
    )  # fmt: skip


def execute(options: argparse.Namespace) -> int:
    """Measure, and print and write the result.

    Raises:
        ConfigError: The directory is not usable, the file cannot be written, or the time is not positive.
        TransferError: The directory is full.
    """
    directory = spill_directory(options.flash)
    if options.output is not None:
        file_to_write(options.output, "--output")
    machine = measure(directory, seconds=options.seconds, file_bytes=_FILE_BYTES)
    answer(machine, output=options.output, as_json=options.json)
    return 0


def measure(directory: str, *, seconds: float, file_bytes: int) -> Machine:
    """Measure everything, with progress and results on standard error."""
    compute = importlib.import_module("penstock.lab.compute")  # loads torch, unlike the rest
    device = compute.device()
    with _reported(f"flash in {directory}") as results:
        flash = bandwidth.measure([directory], file_bytes=file_bytes, seconds=seconds)
        results.append(_rates_text(flash))
    with _reported("host copies") as results:
        machine = host_machine()
        if device.type == "cuda":
            out, back = compute.copies(device, _LINK_BYTES)
            machine = replace(machine, host_write_bytes_per_s=out, host_read_bytes_per_s=back)
        results.append(f"out {format_bandwidth(machine.host_write_bytes_per_s)}")
        results.append(f"back {format_bandwidth(machine.host_read_bytes_per_s)}")
    with _reported(f"computing on {device}") as results:
        found = compute.measure(device)
        results.append(f"{found.float32_flops_per_s / 1e12:.3g} TFLOPS float32")
        results.append(f"{found.half_flops_per_s / 1e12:.3g} bfloat16")
        results.append(f"{found.efficiency:.0%} of float32 in layers")
        if shares := found.product_efficiency:
            sides = f"{PRODUCT_SIDES[0]} ... {PRODUCT_SIDES[-1]}"
            reached = f"{shares[0]:.0%} ... {shares[-1]:.0%} of it"
            results.append(f"{reached} in products with a shortest side of {sides}")
        results.append(f"memory {format_bandwidth(found.memory_bytes_per_s)}")
    with _reported("computing while flash moves") as results:
        beside = interference(directory, compute.Load(device).run, seconds)
        results.append(f"{beside.slower:.1%} slower")
        results.append(f"write {format_bandwidth(beside.write_bytes_per_s)}")
        results.append(f"read {format_bandwidth(beside.read_bytes_per_s)}")
    host_bytes = physical_bytes()
    write, read = (flash.rate(name).engine_bytes_per_s for name in ("overwrite", "read"))
    here = Machine(
        name=platform.node() or "this machine",
        flash_write_bytes_per_s=_short(_slower(write, beside.write_bytes_per_s)),
        flash_read_bytes_per_s=_short(_slower(read, beside.read_bytes_per_s)),
        flash_latency_s=_short(flash.latency_s),
        host_write_bytes_per_s=_short(machine.host_write_bytes_per_s),
        host_read_bytes_per_s=_short(machine.host_read_bytes_per_s),
        compute=_shortened(found),
        device_bytes=compute.device_bytes(device) or host_bytes,
        host_bytes=host_bytes,
        flash_bytes=round_down(max(0, free_space_bytes(directory)), MIB),
        flash_shared=_share_one_bandwidth(flash),
        flash_over_link=device.type == "cuda",
        interference=round(beside.slower, 3),
        flash_write_alone_bytes_per_s=_short(write),
        flash_read_alone_bytes_per_s=_short(read),
        sources=(
            _source(flash, str(device)),
            "interference, and bandwidth of flash where computing makes it slower: continuous transfers"
            f" of a tier during the training of a network; alone {_rates_text(flash)}",
        ),
    )
    here = _with_updates(here, directory)
    return _with_work(here, directory, seconds) if device.type == "cpu" else here


def _with_updates(machine: Machine, directory: str) -> Machine:
    """Add the times of updates."""
    updates = importlib.import_module("penstock.cli.update_work")
    found: dict[str, Any] = {}
    with _reported("updates of parameters on the host") as results:
        for name in FORMATS:
            found[f"update_{name}_s"] = took_s = _short(updates.measure(directory, name))
            results.append(f"{name} {took_s * 1e9:.3g} ns")
    how = "updates: steps of FlashAdamW with one thread whose records stay in memory"
    return replace(machine, **found, sources=(*machine.sources, how))


def _with_work(machine: Machine, directory: str, seconds: float) -> Machine:
    """Add the work of transfers, measured as a delay of computing."""
    transfers = importlib.import_module("penstock.cli.transfer_work")
    with _reported("the work of transfers") as results:
        written, read = (
            work.beyond(machine.interference / rate)
            for work, rate in zip(
                transfers.measure(directory, machine, seconds),
                machine.bytes_per_s("flash"),
                strict=True,
            )
        )
        results += [f"write {written}", f"read {read}"]
    how = "steps of a stack of linear layers under the policy all, alternating with plain ones"
    return replace(
        machine,
        write_work_s=_short(written.transfer_s),
        write_work_s_per_byte=_short(written.per_byte_s),
        read_work_s=_short(read.transfer_s),
        read_work_s_per_byte=_short(read.per_byte_s),
        sources=(*machine.sources, f"work: {how}; beyond interference"),
    )


def _shortened(found: Compute) -> Compute:
    """Return the speeds with few digits, as they are only that exact."""
    few: dict[str, Any] = {k: _short(v) for k, v in asdict(found).items() if isinstance(v, float)}
    return replace(found, **few)


def _short(value: float) -> float:
    """Round to four digits, which is the precision of the measurements."""
    return float(f"{value:.4g}")


def host_machine() -> Machine:
    """Return a machine with only measurements of copies in host memory."""
    arena = Arena(2 * HOST_BYTES)
    tier = HostTier(arena, capacity_bytes=HOST_BYTES, recorder=Recorder())
    try:
        return probe.measure({"host": tier})
    finally:
        tier.close()
        arena.close()


@dataclass(frozen=True)
class Slowdown:
    """Speeds of a flash tier and of computing at the same time."""

    slower: float
    """Fraction by which computing takes longer."""
    write_bytes_per_s: float
    """Bandwidth of writes; 0 if nothing was written."""
    read_bytes_per_s: float


def _slower(alone: float, beside: float) -> float:
    return min(alone, beside) if beside else alone


def interference(directory: str, work: Callable[[float], float], seconds: float) -> Slowdown:
    """Measure the slowdown of ``work`` during continuous writes or reads of a flash tier.

    The transfers go through the tier, as in a session, since its checksums and threads use cores as well.

    Args:
        directory: Directory of the tier.
        work: Function that works for a number of seconds and returns the seconds of one step.
        seconds: Total duration.
    """
    each_s = seconds / (4 * _ROUNDS)
    work(each_s)
    ratios = []
    rates: dict[Stage, list[float]] = {Stage.WRITE: [], Stage.READ: []}
    with _flash_tier(directory) as (tier, addresses):
        for _ in range(_ROUNDS):
            for way, stage in (
                (_write_continuously, Stage.WRITE),
                (_read_continuously, Stage.READ),
            ):
                alone_s = work(each_s)
                with _while_moving(partial(way, tier, addresses)):
                    before, begun = tier.recorder.snapshot(), time.perf_counter()
                    ratios.append(work(each_s) / alone_s)
                    after, took_s = tier.recorder.snapshot(), time.perf_counter() - begun
                moved = after.flow(stage, "flash").nbytes - before.flow(stage, "flash").nbytes
                rates[stage].append(moved / took_s)
    return Slowdown(
        max(0.0, statistics.median(ratios) - 1),
        *(statistics.median(rates[stage]) for stage in (Stage.WRITE, Stage.READ)),
    )


@contextmanager
def _flash_tier(directory: str) -> Iterator[tuple[FlashTier, list[int]]]:
    """Open a tier, with the addresses of memory to move."""
    engine = default_engine()
    arena = Arena(_IN_FLIGHT * _MOVED_BYTES)
    try:
        tier = FlashTier(
            (directory,),
            capacity_bytes=2 * _IN_FLIGHT * _MOVED_BYTES,
            engine=engine,
            recorder=Recorder(),
        )
        try:
            blocks = [arena.allocate(_MOVED_BYTES) for _ in range(_IN_FLIGHT)]
            yield tier, [block.address for block in blocks if block is not None]
        finally:
            tier.close()
    finally:
        engine.close()
        arena.close()


def _write_continuously(tier: FlashTier, addresses: list[int], enough: threading.Event) -> None:
    """Overwrite blocks, as many at once as there are addresses, until ``enough`` is set."""
    in_flight: deque[Ticket] = deque()
    for address in cycle(addresses):
        if len(in_flight) == len(addresses) or enough.is_set():
            if not in_flight:
                return
            ticket = in_flight.popleft()
            ticket.written.wait()
            tier.discard(ticket)
        if not enough.is_set():
            written = tier.write(address, _MOVED_BYTES, keep_alive=None, label="speed probe")
            in_flight.append(written)


def _read_continuously(tier: FlashTier, addresses: list[int], enough: threading.Event) -> None:
    """Read blocks, as many at once as there are addresses, until ``enough`` is set."""
    tickets = [
        tier.write(each, _MOVED_BYTES, keep_alive=None, label="speed probe") for each in addresses
    ]
    for ticket in tickets:
        ticket.written.wait()
    in_flight: deque[Transfer] = deque()
    for ticket, address in cycle(zip(tickets, addresses, strict=True)):
        if len(in_flight) == len(addresses) or enough.is_set():
            if not in_flight:
                break
            in_flight.popleft().wait()
        if not enough.is_set():
            in_flight.append(tier.read(ticket, address, keep_alive=None))
    for ticket in tickets:
        tier.discard(ticket)


@contextmanager
def _while_moving(move: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``move`` in another thread during the block."""
    enough = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            move(enough)
        except BaseException as error:  # noqa: BLE001  (raised in the waiting thread)
            failures.append(error)

    thread = threading.Thread(target=run, name="penstock-bench")
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()
    if failures:
        raise failures[0]


def _share_one_bandwidth(flash: Measurement) -> bool:
    """Return whether simultaneous reads and writes are hardly faster than successive ones."""
    apart_s = sum(0.5 / flash.rate(kind).engine_bytes_per_s for kind in ("read", "overwrite"))
    return flash.rate("mixed").engine_bytes_per_s * apart_s < 1.5


def _rates_text(flash: Measurement) -> str:
    rates = [
        f"{kind} {format_bandwidth(flash.rate(kind).engine_bytes_per_s)}"
        for kind in bandwidth.KINDS
    ]
    return ", ".join([*rates, f"latency {format_duration(flash.latency_s)}"])


def _source(flash: Measurement, device: str) -> str:
    how = "direct" if flash.direct else "buffered"
    return (
        f"measured by penstock bench machine on {time.strftime('%Y-%m-%d')}: flash {how} through"
        f" {flash.threads} threads, computing on {device}; capacities as they were then"
    )


@contextmanager
def _reported(what: str) -> Iterator[list[str]]:
    """Write a line to standard error before the block, and one with its results after it."""
    say(f"measuring {what} ...")
    begun = time.perf_counter()
    found: list[str] = []
    yield found
    say(f"  {', '.join(found)} ({format_duration(time.perf_counter() - begun)})")
