"""Channels and their targets: the order of commands, and the time for which they occupy both.

A *target* executes one command at a time: a die, or a whole chip unless ``channel.dies_in_parallel`` is
set. A channel carries one thing at a time, and when it is free it serves

1. read data that waits to be sent, in order of arrival; but with a cache register, the command of the
   next read goes first, so that sensing continues meanwhile;
2. otherwise the next target, in turn, that can take a command. Operations of a target go in this order:
   garbage collection (reads, programs, erases), the host's reads, its programs; with
   ``ftl.gc_preemptible``, the host's come first unless blocks run short.

:mod:`.commands` combines operations into commands.

- Read: the command on the channel, tR (the longest of its pages), then each page is sent by itself. The
  target is busy until the last page has left, or with a cache register until the register is free.
- Program: the command and all pages on the channel, then tPROG. With a cache register the next pages may
  come meanwhile.
- Erase: the command, then tBERS.
- A program or an erase that may be suspended (``cell.program_suspend_ns``, ``erase_suspend_ns``) is
  suspended once, for one read, if more than twice that time is left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappush
from itertools import count

from penstock.lab.ssd.commands import (
    CLEANING_FIRST,
    ERASE,
    HOST_FIRST,
    KIND,
    PROGRAM,
    READ,
    ChannelBus,
    Op,
    Target,
    put,
    take,
)
from penstock.lab.ssd.device import PS_PER_NS, Device, duration_ps
from penstock.lab.ssd.events import Events
from penstock.lab.ssd.powercap import PowerCap
from penstock.lab.ssd.usage import Power, Usage


class _BusTimes(dict[int, int]):
    """Times for which byte counts occupy a channel."""

    def __init__(self, bytes_per_s: int) -> None:
        super().__init__()
        self._rate = bytes_per_s

    def __missing__(self, nbytes: int) -> int:
        took = self[nbytes] = duration_ps(nbytes, self._rate)
        return took


class Flash:
    """All channels of a drive.

    Attributes:
        usage: Recorder of activity, or None.
        reads: Pages read so far.
        programs: Pages programmed so far.
        erases: Blocks erased so far.
    """

    def __init__(self, device: Device, events: Events, *, power_cap_w: float | None = None) -> None:
        """Create an idle array.

        Args:
            device: Description of the drive.
            events: The drive's time.
            power_cap_w: Limit of the drive's power: arrays whose commands have arrived then wait for
                others to end. None for no limit.

        Raises:
            ConfigError: The limit is too low for any command.
        """
        geometry, channel, cell = device.geometry, device.channel, device.cell
        self._events = events
        self._heap, self._tick = events.heap, events.tick
        self._bus_ps = _BusTimes(channel.bytes_per_s)
        self._die_planes = geometry.planes_per_die if channel.multi_plane else 1
        parallel = channel.dies_in_parallel
        planes = geometry.planes_per_die * (1 if parallel else geometry.dies_per_chip)
        per_channel = geometry.chips_per_channel * (geometry.dies_per_chip if parallel else 1)
        self._independent = channel.independent_plane_reads
        self._any_order = channel.any_page_order
        self._cache_read, self._cache_program = channel.cache_read, channel.cache_program
        pages, most = range(geometry.pages_per_block), range(geometry.planes_per_die + 1)
        self._read_ps = [
            (cell.page_read_ns(page) + channel.read_settle_ns) * PS_PER_NS for page in pages
        ]
        self._program_ps = [cell.page_program_ns(page) * PS_PER_NS for page in pages]
        self._erase_ps = cell.erase_ns * PS_PER_NS
        # by kind; with a power cap nothing is suspended, because a suspended command's power is undefined
        suspend_ns = (0, cell.program_suspend_ns, cell.erase_suspend_ns)
        self._suspend_ps = [0 if power_cap_w else time_ns * PS_PER_NS for time_ns in suspend_ns]
        self._suspends = any(self._suspend_ps)
        self._commands = (
            [(channel.read_command_ns + (n - 1) * channel.read_plane_ns) * PS_PER_NS for n in most],
            [
                (channel.program_command_ns + (n - 1) * channel.program_plane_ns) * PS_PER_NS
                for n in most
            ],
            [channel.erase_command_ns * PS_PER_NS for _ in most],
        )
        self.channels = [ChannelBus() for _ in range(geometry.channels)]
        self._targets: list[Target] = []
        for each in self.channels:
            each.targets = [Target(each, planes) for _ in range(per_channel)]
            self._targets += each.targets
        # for each plane of the drive, its target and its number there
        self._homes = [(target, plane) for target in self._targets for plane in range(planes)]
        self._short: Callable[[int], bool] | None = None
        self.next_order = count(1).__next__
        self.usage: Usage | None = None
        self._cap = None if power_cap_w is None else PowerCap(Power(device), power_cap_w)
        self.reads = self.programs = self.erases = 0
        # bound once, because they are scheduled with every event
        self._when_arrived, self._when_worked = self._arrived, self._worked
        self._when_sent = self._sent

    def put_host_first(self, short: Callable[[int], bool]) -> None:
        """Put the host first on targets none of whose planes is ``short`` of blocks."""
        self._short = short
        first = 0
        for target in self._targets:
            target.planes = range(first, first + len(target.queues[0]))
            first = target.planes.stop

    def submit(self, ops: Iterable[Op]) -> None:
        """Queue operations that are known at the same time; then start those that can start.

        One that already has its number, from ``next_order``, precedes those with a later one.
        """
        touched: dict[ChannelBus, None] = {}
        homes, next_order = self._homes, self.next_order
        for op in ops:
            target, plane = homes[op.block.plane]
            queue = op.queue
            if op.order:
                put(target.queues[queue][plane], op)
            else:
                op.order = next_order()
                target.queues[queue][plane].append(op)
            target.counts[queue] += 1
            target.waiting += 1
            channel = target.channel
            channel.waiting += 1
            touched[channel] = None
        for channel in touched:
            if not channel.busy:
                self._serve(channel)

    def targets_busy_ps(self) -> list[int]:
        """Return the working time of each target's array."""
        return [target.busy_ps for target in self._targets]

    @property
    def idle(self) -> bool:
        """True if nothing waits; operations at work are pending events."""
        return not any(target.waiting for target in self._targets)

    # -- a channel --------------------------------------------------------------------------------

    def _serve(self, channel: ChannelBus) -> None:
        """Start the next transfer or command on a free channel."""
        out = channel.out
        if not out:
            if channel.waiting:
                self._start_one(channel, reads_only=False)
            return
        if self._cache_read and channel.waiting and self._start_one(channel, reads_only=True):
            return
        pair = out.popleft()
        nbytes = pair[1].nbytes
        took = self._bus_ps[nbytes]
        now = self._events.now_ps
        channel.busy = True
        channel.busy_ps += took
        channel.nbytes += nbytes
        if self.usage is not None:
            self.usage.sent(now, took, nbytes)
        heappush(self._heap, (now + took, self._tick(), self._when_sent, pair))

    def _start_one(self, channel: ChannelBus, *, reads_only: bool) -> bool:
        """Send a command to the next target that can take one; return True if there is one."""
        targets = channel.targets
        count, turn = len(targets), channel.turn
        for _ in range(count):
            target = targets[turn]
            turn = turn + 1 if turn + 1 < count else 0
            if not target.waiting or target.coming:
                continue
            array = target.array
            if array is None or (self._cache_program and array == PROGRAM):
                queue = 0
                if self._short is not None:
                    queue = next(each for each in self._precedence(target) if target.counts[each])
                else:
                    for waiting in target.counts:
                        if waiting:
                            break
                        queue += 1
                idle = array is None and not target.outgoing and not reads_only
                if idle or self._can_take(target, KIND[queue], reads_only):
                    self._command(target, queue)
                    channel.turn = turn
                    return True
            if self._suspends and array is not None and self._interrupt(target):
                channel.turn = turn
                return True
        return False

    def _precedence(self, target: Target) -> tuple[int, ...]:
        """Return the queues of a target by precedence."""
        short = self._short
        if short is None or any(map(short, target.planes)):
            return CLEANING_FIRST
        return HOST_FIRST

    def _can_take(self, target: Target, kind: int, reads_only: bool) -> bool:
        """Return True if a target can take the first of its waiting commands."""
        if reads_only and kind != READ:
            return False
        if target.array is not None and (kind != PROGRAM or target.loaded):
            return False
        return not target.outgoing or (kind == READ and self._cache_read)

    def _interrupt(self, target: Target) -> bool:
        """Send a read to a target that programs or erases, if that may be suspended for it."""
        kind = target.array
        assert kind is not None  # the array is working
        takes = self._suspend_ps[kind]
        if not takes or target.paused is not None or target.resumed or target.loaded:
            return False
        if target.until_ps - self._events.now_ps < 2 * takes:
            return False  # it ends as soon as it could be suspended
        if target.outgoing and not self._cache_read:
            return False
        reads = (each for each in self._precedence(target) if KIND[each] == READ)
        queue = next((each for each in reads if target.counts[each]), None)
        if queue is None:
            return False
        self._command(target, queue)
        return True

    def _command(self, target: Target, queue: int) -> None:
        """Send the next command of a target's queue."""
        kind = KIND[queue]
        planes = target.queues[queue]
        if target.counts[queue] == 1:
            ops = [next(filter(None, planes)).popleft()]
            many = 1
        else:
            ops = take(
                planes,
                kind,
                self._die_planes,
                anywhere=kind == ERASE or (kind == READ and self._independent),
                any_order=self._any_order,
            )
            many = len(ops)
        channel = target.channel
        target.counts[queue] -= many
        target.waiting -= many
        channel.waiting -= many
        nbytes, took = 0, self._commands[kind][many]
        if kind == PROGRAM:
            for op in ops:
                nbytes += op.nbytes
                took += self._bus_ps[op.nbytes]
            channel.nbytes += nbytes
        now = self._events.now_ps
        channel.busy = target.coming = True
        channel.busy_ps += took
        if self.usage is not None:
            self.usage.sent(now, took, nbytes)
        heappush(self._heap, (now + took, self._tick(), self._when_arrived, (target, ops)))

    # -- events -----------------------------------------------------------------------------------

    def _arrived(self, about: tuple[Target, list[Op]]) -> None:
        """React to a command, with the pages that it programs, that has crossed the channel."""
        target, ops = about
        target.coming = False
        if target.array is None:
            self._begin(target, ops)
        elif KIND[ops[0].queue] == READ:
            self._pause(target, ops)
        else:
            target.loaded = ops
        channel = target.channel
        channel.busy = False
        if channel.waiting or channel.out:
            self._serve(channel)

    def _pause(self, target: Target, ops: list[Op]) -> None:
        """Suspend the array's work once, for one read; it continues when the read has left the array."""
        kind, left_ps = target.array, target.until_ps - self._events.now_ps
        assert kind is not None  # the array is working
        target.paused = target.working, left_ps
        target.busy_ps -= left_ps
        self._begin(target, ops, self._suspend_ps[kind])

    def _leave(self, target: Target) -> None:
        """Free the array, or continue suspended work."""
        target.array = None
        if target.paused is not None:
            ops, left_ps = target.paused
            target.paused = None
            target.resumed = True
            target.array = KIND[ops[0].queue]
            # a new list, so that the event scheduled before the suspension finds that it is obsolete
            self._occupied(target, list(ops), left_ps)

    def _begin(self, target: Target, ops: list[Op], more_ps: int = 0) -> None:
        """Start the array of a target; ``more_ps`` is the time to suspend other work first."""
        kind = target.array = KIND[ops[0].queue]
        if self._cap is not None and not self._cap.try_start(target, ops):
            return
        if kind == ERASE:
            took = self._erase_ps
        else:
            times = self._read_ps if kind == READ else self._program_ps
            took = times[ops[0].page]
            if len(ops) > 1:
                took = max(times[op.page] for op in ops)
        if self.usage is not None:
            self.usage.worked(self._events.now_ps, took, kind, len(ops))
        target.resumed = False
        self._occupied(target, ops, took + more_ps)

    def _occupied(self, target: Target, ops: list[Op], took_ps: int) -> None:
        target.busy_ps += took_ps
        target.working = ops
        until = target.until_ps = self._events.now_ps + took_ps
        heappush(self._heap, (until, self._tick(), self._when_worked, (target, ops)))

    def _worked(self, about: tuple[Target, list[Op]]) -> None:
        """React to the end of a command in the array."""
        target, ops = about
        if target.working is not ops:
            return  # it was suspended meanwhile
        kind = target.array
        if self._cap is not None:
            for waited in self._cap.finish(target):
                self._begin(*waited)
        if kind == READ:
            self.reads += len(ops)
            if target.outgoing:
                target.held = ops  # the cache register is occupied
            else:
                self._send(target, ops)
        else:
            target.array = None
            if kind == PROGRAM:
                self.programs += len(ops)
            else:
                self.erases += len(ops)
            if target.loaded:
                loaded, target.loaded = target.loaded, []
                self._begin(target, loaded)
            for op in ops:
                op.done(op)
        channel = target.channel
        if not channel.busy:
            self._serve(channel)

    def _send(self, target: Target, ops: list[Op]) -> None:
        """Move pages to the registers for the channel; with a cache register this frees the array."""
        target.outgoing = len(ops)
        target.held = []
        if self._cache_read:
            self._leave(target)
        out = target.channel.out
        for op in ops:
            out.append((target, op))

    def _sent(self, about: tuple[Target, Op]) -> None:
        """React to a page that has crossed the channel."""
        target, op = about
        channel = target.channel
        channel.busy = False
        target.outgoing -= 1
        if not target.outgoing:
            if target.held:
                self._send(target, target.held)
            elif not self._cache_read:
                self._leave(target)
        op.done(op)
        if not channel.busy:
            self._serve(channel)
