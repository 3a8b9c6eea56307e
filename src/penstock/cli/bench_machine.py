"""``penstock bench machine``: a machine file for this machine, every figure measured.

1. Flash, through our engine, with one file of the directory (:mod:`.bandwidth`).
2. Copies to and from the host tier.
3. What the device computes (:mod:`.compute`).
4. By how much training is slower while a flash tier is written and read (interference), and how fast
   the tier is meanwhile: on a CPU both want memory and cores. Where that is slower than alone, the
   machine's bandwidth of flash is what it is beside computing, for that is when plans use it.
5. By how much more training is later for each write and each read of a session (:mod:`.transfer_work`).
"""

from __future__ import annotations

import argparse
import importlib
import os
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
from penstock.cli.command import add_common, formatter
from penstock.cli.machine_file import answer
from penstock.cli.output import say
from penstock.cli.paths import file_to_write, spill_directory
from penstock.core.errors import free_space_bytes
from penstock.core.units import MIB, format_bandwidth, format_duration, round_down
from penstock.io.aio import default_engine
from penstock.io.arena import Arena
from penstock.io.engine import Transfer
from penstock.observe.recorder import Recorder, Stage
from penstock.plan.machine import Machine
from penstock.runtime import probe
from penstock.tier.base import Ticket
from penstock.tier.flash import FlashTier
from penstock.tier.host import HostTier

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
    made = what.add_parser(
        "machine",
        help="measure all that plans need to know of this machine; prints a machine file",
        description="Measure flash, host copies, arithmetic, memory, launches, and how much computing"
        " slows down\nwhile flash moves; takes less than a minute. Prints a machine file (TOML).",
        epilog=_EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--flash",
        metavar="DIR",
        default=".",
        help="directory to measure (default: the current one)",
    )
    made.add_argument("--output", metavar="FILE", help="write the machine file there as well")
    made.add_argument(
        "--seconds", metavar="N", type=float, default=10.0,
        help="how long to measure flash, and again beside computing (default: 10)",
    )  # fmt: skip
    add_common(made, json_help="print one JSON document on standard output")
    made.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Measure, print, write.

    Raises:
        ConfigError: The directory cannot be spilled to, the file not written, or the time is none.
        TransferError: The directory is full.
    """
    directory = spill_directory(options.flash)
    if options.output is not None:
        file_to_write(options.output, "--output")
    machine = measure(directory, seconds=options.seconds, file_bytes=_FILE_BYTES)
    answer(machine, output=options.output, as_json=options.json)
    return 0


def measure(directory: str, *, seconds: float, file_bytes: int) -> Machine:
    """Measure everything, telling on standard error what is being measured, and what it gave."""
    compute = importlib.import_module("penstock.cli.compute")  # loads torch, as nothing else here
    device = compute.device()
    with _told(f"flash in {directory}") as told:
        flash = bandwidth.measure([directory], file_bytes=file_bytes, seconds=seconds)
        told.append(_rates_text(flash))
    with _told("host copies") as told:
        machine = host_machine()
        if device.type == "cuda":
            out, back = compute.copies(device, _LINK_BYTES)
            machine = replace(machine, host_write_bytes_per_s=out, host_read_bytes_per_s=back)
        told.append(f"out {format_bandwidth(machine.host_write_bytes_per_s)}")
        told.append(f"back {format_bandwidth(machine.host_read_bytes_per_s)}")
    with _told(f"computing on {device}") as told:
        found = compute.measure(device)
        told.append(f"{found.float32_flops_per_s / 1e12:.3g} TFLOPS float32")
        told.append(f"{found.half_flops_per_s / 1e12:.3g} bfloat16")
        told.append(f"{found.efficiency:.0%} of it in layers")
        told.append(f"memory {format_bandwidth(found.memory_bytes_per_s)}")
    with _told("computing while flash moves") as told:
        beside = interference(directory, compute.Load(device).run, seconds)
        told.append(f"{beside.slower:.1%} slower")
        told.append(f"write {format_bandwidth(beside.write_bytes_per_s)}")
        told.append(f"read {format_bandwidth(beside.read_bytes_per_s)}")
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    here = Machine(
        name=platform.node() or "this machine",
        flash_write_bytes_per_s=_short(
            _slower(flash.rate("overwrite").engine_bytes_per_s, beside.write_bytes_per_s)
        ),
        flash_read_bytes_per_s=_short(
            _slower(flash.rate("read").engine_bytes_per_s, beside.read_bytes_per_s)
        ),
        flash_latency_s=_short(flash.latency_s),
        host_write_bytes_per_s=_short(machine.host_write_bytes_per_s),
        host_read_bytes_per_s=_short(machine.host_read_bytes_per_s),
        compute=replace(
            found, **{k: _short(v) for k, v in asdict(found).items() if isinstance(v, float)}
        ),
        device_bytes=compute.device_bytes(device) or host_bytes,
        host_bytes=host_bytes,
        flash_bytes=round_down(max(0, free_space_bytes(directory)), MIB),
        flash_shared=_share_one_bandwidth(flash),
        flash_over_link=device.type == "cuda",
        interference=round(beside.slower, 3),
        sources=(
            _source(flash, str(device)),
            "interference, and bandwidth of flash where computing makes it slower: the tier moving"
            f" without a pause beside the training of a network; alone {_rates_text(flash)}",
        ),
    )
    return _with_work(here, directory, seconds) if device.type == "cpu" else here


def _with_work(machine: Machine, directory: str, seconds: float) -> Machine:
    """The same, with what transfers take of computing."""
    transfers = importlib.import_module("penstock.cli.transfer_work")
    with _told("the work of transfers") as told:
        written, read = (
            work.beyond(machine.interference / rate)
            for work, rate in zip(
                transfers.measure(directory, machine, seconds),
                machine.bytes_per_s("flash"),
                strict=True,
            )
        )
        told += [f"write {written}", f"read {read}"]
    how = "steps of a stack of linear layers under the policy all, in turns with plain ones"
    return replace(
        machine,
        write_work_s=_short(written.transfer_s),
        write_work_s_per_byte=_short(written.per_byte_s),
        read_work_s=_short(read.transfer_s),
        read_work_s_per_byte=_short(read.per_byte_s),
        sources=(*machine.sources, f"work: {how}; beyond interference"),
    )


def _short(value: float) -> float:
    """Four digits: no more was measured."""
    return float(f"{value:.4g}")


def host_machine() -> Machine:
    """A machine of which only copies within host memory are measured."""
    arena = Arena(2 * HOST_BYTES)
    tier = HostTier(arena, capacity_bytes=HOST_BYTES, recorder=Recorder())
    try:
        return probe.measure({"host": tier})
    finally:
        tier.close()
        arena.close()


@dataclass(frozen=True)
class Beside:
    """A flash tier and computing, at the same time."""

    slower: float
    """By what share computing takes longer."""
    write_bytes_per_s: float
    """0: nothing was moved meanwhile."""
    read_bytes_per_s: float


def _slower(alone: float, beside: float) -> float:
    return min(alone, beside) if beside else alone


def interference(directory: str, work: Callable[[float], float], seconds: float) -> Beside:
    """By what share ``work`` takes longer while a flash tier is written or read without a pause.

    Through the tier, as in a session: its checksums and its threads take time of the cores as well.

    Args:
        directory: Where the tier is.
        work: Works for so many seconds, and tells the seconds of one turn.
        seconds: How long to measure, altogether.
    """
    each_s = seconds / (4 * _ROUNDS)
    work(each_s)
    ratios = []
    rates: dict[Stage, list[float]] = {Stage.WRITE: [], Stage.READ: []}
    with _flash_tier(directory) as (tier, addresses):
        for _ in range(_ROUNDS):
            for way, stage in ((_write_on, Stage.WRITE), (_read_on, Stage.READ)):
                alone_s = work(each_s)
                with _beside(partial(way, tier, addresses)):
                    before, begun = tier.recorder.snapshot(), time.perf_counter()
                    ratios.append(work(each_s) / alone_s)
                    after, took_s = tier.recorder.snapshot(), time.perf_counter() - begun
                moved = after.flow(stage, "flash").nbytes - before.flow(stage, "flash").nbytes
                rates[stage].append(moved / took_s)
    return Beside(
        max(0.0, statistics.median(ratios) - 1),
        *(statistics.median(rates[stage]) for stage in (Stage.WRITE, Stage.READ)),
    )


@contextmanager
def _flash_tier(directory: str) -> Iterator[tuple[FlashTier, list[int]]]:
    """A tier, and the addresses of what to move."""
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


def _write_on(tier: FlashTier, addresses: list[int], enough: threading.Event) -> None:
    """Overwrite as many blocks at a time as there are addresses, until it is enough."""
    under_way: deque[Ticket] = deque()
    for address in cycle(addresses):
        if len(under_way) == len(addresses) or enough.is_set():
            if not under_way:
                return
            ticket = under_way.popleft()
            ticket.written.wait()
            tier.discard(ticket)
        if not enough.is_set():
            written = tier.write(address, _MOVED_BYTES, keep_alive=None, label="speed probe")
            under_way.append(written)


def _read_on(tier: FlashTier, addresses: list[int], enough: threading.Event) -> None:
    """Read as many blocks at a time as there are addresses, until it is enough."""
    tickets = [
        tier.write(each, _MOVED_BYTES, keep_alive=None, label="speed probe") for each in addresses
    ]
    for ticket in tickets:
        ticket.written.wait()
    under_way: deque[Transfer] = deque()
    for ticket, address in cycle(zip(tickets, addresses, strict=True)):
        if len(under_way) == len(addresses) or enough.is_set():
            if not under_way:
                break
            under_way.popleft().wait()
        if not enough.is_set():
            under_way.append(tier.read(ticket, address, keep_alive=None))
    for ticket in tickets:
        tier.discard(ticket)


@contextmanager
def _beside(move: Callable[[threading.Event], None]) -> Iterator[None]:
    """Within, another thread moves, until it is told that it is enough."""
    enough = threading.Event()
    failures: list[BaseException] = []

    def go_on() -> None:
        try:
            move(enough)
        except BaseException as error:  # noqa: BLE001  (told to who waits)
            failures.append(error)

    thread = threading.Thread(target=go_on, name="penstock-bench")
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()
    if failures:
        raise failures[0]


def _share_one_bandwidth(flash: Measurement) -> bool:
    """Whether reading and overwriting at once is hardly quicker than one after the other."""
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
def _told(what: str) -> Iterator[list[str]]:
    """One line on standard error before, and one after, with what was found."""
    say(f"measuring {what} ...")
    begun = time.perf_counter()
    found: list[str] = []
    yield found
    say(f"  {', '.join(found)} ({format_duration(time.perf_counter() - begun)})")
