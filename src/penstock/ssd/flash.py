"""Channels and what hangs on them: which command goes when, and how long it keeps what busy.

A *target* runs one command at a time: a die, or a whole chip where ``channel.dies_in_parallel`` is not
set. A channel carries one thing at a time, and when it is free it serves

1. read data that waits to be sent, first come, first served; but where there is a cache register, the
   command of the next read goes before, so that sensing goes on meanwhile;
2. else the next target, in turn, that can take a command. Of a target's operations those of garbage
   collection go first (reads, programs, erases), then the host's reads, then its programs.

A command goes to several planes of a die where ``channel.multi_plane`` lets it: to those whose next
operation is of the same kind and at the same page of its block (at any page, for reads of planes that
read independently). Reads may pass others of their plane for that, programs only where the device has
``channel.any_page_order``.

- Read: the command on the channel, tR (the longest of its pages), then each page is sent by itself. The
  target is busy until the last has left; with a cache register until that is free to take them.
- Program: the command and all pages on the channel, then tPROG. With a cache register the next pages may
  come meanwhile.
- Erase: the command, then tBERS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from penstock.ssd.device import PS_PER_NS, Device, duration_ps
from penstock.ssd.events import Events
from penstock.ssd.ftl import Block

READ: Final = 0
PROGRAM: Final = 1
ERASE: Final = 2

_GC_READ, _GC_PROGRAM, _ERASE, _USER_READ, _USER_PROGRAM = range(5)
"""Queues of a target, by precedence."""
_KIND: Final = (READ, PROGRAM, ERASE, READ, PROGRAM)
_QUEUE: Final = ((_USER_READ, _USER_PROGRAM, _ERASE), (_GC_READ, _GC_PROGRAM, _ERASE))
"""By whether garbage collection asked, by kind."""


class Op:
    """An operation on one page, or the erase of a block.

    Attributes:
        kind: READ, PROGRAM or ERASE.
        owner: What asked for it: a request of the host, or a block that is cleaned.
        cleaning: Whether garbage collection did.
        nbytes: That cross the channel.
    """

    __slots__ = ("block", "cleaning", "kind", "lpn", "nbytes", "order", "owner", "page")

    def __init__(  # noqa: PLR0917  (made for every page: keywords would take as long as the rest)
        self,
        kind: int,
        block: Block,
        page: int,
        lpn: int,
        nbytes: int,
        owner: object,
        cleaning: bool,
    ) -> None:
        self.kind = kind
        self.block = block
        self.page = page
        self.lpn = lpn
        self.nbytes = nbytes
        self.owner = owner
        self.cleaning = cleaning
        self.order = 0


class _Target:
    """A die, or a chip.

    Attributes:
        queues: By precedence, by plane: operations that wait.
        counts: How many in each queue; waiting: in all.
        array: The kind of command that the array works on; None: it is idle.
        outgoing: Pages in registers that have not been sent.
        held: Pages that were read and wait for the cache register.
        loaded: Pages that came in while the array programs others.
    """

    __slots__ = (
        *("array", "busy_ps", "channel", "coming", "counts", "held", "loaded"),
        *("outgoing", "queues", "waiting"),
    )

    def __init__(self, channel: _Channel, planes: int) -> None:
        self.channel = channel
        self.queues: list[list[deque[Op]]] = [[deque() for _ in range(planes)] for _ in _KIND]
        self.counts = [0] * len(_KIND)
        self.waiting = 0
        self.array: int | None = None
        self.coming = False  # a command or pages for it are on the channel
        self.outgoing = 0
        self.held: list[Op] = []
        self.loaded: list[Op] = []
        self.busy_ps = 0


class _Channel:
    """A bus.

    Attributes:
        out: Pages that wait to be sent, with their targets.
        turn: The target to ask first.
    """

    __slots__ = ("busy", "busy_ps", "nbytes", "out", "targets", "turn")

    def __init__(self) -> None:
        self.busy = False
        self.busy_ps = self.nbytes = self.turn = 0
        self.out: deque[tuple[_Target, Op]] = deque()
        self.targets: list[_Target] = []


class Flash:
    """All channels of a drive.

    Attributes:
        reads: Pages read so far.
        programs: Pages programmed.
        erases: Blocks erased.
    """

    def __init__(self, device: Device, events: Events, done: Callable[[Op], None]) -> None:
        """``done`` is called with each operation when it is over: a read's page has been sent then."""
        geometry, channel, cell = device.geometry, device.channel, device.cell
        self._events = events
        self._done = done
        self._rate = channel.bytes_per_s
        self._bus_ps: dict[int, int] = {}
        self._die_planes = geometry.planes_per_die
        parallel = channel.dies_in_parallel
        self._planes = geometry.planes_per_die * (1 if parallel else geometry.dies_per_chip)
        per_channel = geometry.chips_per_channel * (geometry.dies_per_chip if parallel else 1)
        self._multi, self._independent = channel.multi_plane, channel.independent_plane_reads
        self._any_order = channel.any_page_order
        self._cache_read, self._cache_program = channel.cache_read, channel.cache_program
        pages, most = range(geometry.pages_per_block), range(geometry.planes_per_die + 1)
        self._read_ps = [
            (cell.page_read_ns(page) + channel.read_settle_ns) * PS_PER_NS for page in pages
        ]
        self._program_ps = [cell.page_program_ns(page) * PS_PER_NS for page in pages]
        self._erase_ps = cell.erase_ns * PS_PER_NS
        self._commands = (
            [(channel.read_command_ns + (n - 1) * channel.read_plane_ns) * PS_PER_NS for n in most],
            [
                (channel.program_command_ns + (n - 1) * channel.program_plane_ns) * PS_PER_NS
                for n in most
            ],
            [channel.erase_command_ns * PS_PER_NS for _ in most],
        )
        self.channels = [_Channel() for _ in range(geometry.channels)]
        self._targets: list[_Target] = []
        for each in self.channels:
            each.targets = [_Target(each, self._planes) for _ in range(per_channel)]
            self._targets += each.targets
        self._order = 0
        self.reads = self.programs = self.erases = 0

    def submit(self, ops: Iterable[Op]) -> None:
        """Queue operations that are known at the same time; then start what can."""
        touched: dict[_Channel, None] = {}
        for op in ops:
            number, plane = divmod(op.block.plane, self._planes)
            target = self._targets[number]
            self._order += 1
            op.order = self._order
            queue = _QUEUE[op.cleaning][op.kind]
            target.queues[queue][plane].append(op)
            target.counts[queue] += 1
            target.waiting += 1
            touched[target.channel] = None
        for channel in touched:
            if not channel.busy:
                self._serve(channel)

    def targets_busy_ps(self) -> list[int]:
        """For how long each target's array has worked."""
        return [target.busy_ps for target in self._targets]

    @property
    def idle(self) -> bool:
        """Whether nothing waits; what works is an event."""
        return not any(target.waiting for target in self._targets)

    def bus_ps(self, nbytes: int) -> int:
        """How long so many bytes occupy a channel."""
        known = self._bus_ps.get(nbytes)
        if known is None:
            known = self._bus_ps[nbytes] = duration_ps(nbytes, self._rate)
        return known

    # -- a channel --------------------------------------------------------------------------------

    def _serve(self, channel: _Channel) -> None:
        """Give a free channel something to do."""
        out = channel.out
        if out and not (self._cache_read and self._start_one(channel, reads_only=True)):
            target, op = out.popleft()
            took = self.bus_ps(op.nbytes)
            self._occupy(channel, took, op.nbytes)
            self._events.at(self._events.now_ps + took, self._sent, (target, op))
        elif not out:
            self._start_one(channel, reads_only=False)

    def _start_one(self, channel: _Channel, *, reads_only: bool) -> bool:
        """Send a command to the next target in turn that can take one; whether there is one."""
        targets = channel.targets
        count, turn = len(targets), channel.turn
        for _ in range(count):
            target = targets[turn]
            turn = turn + 1 if turn + 1 < count else 0
            if target.waiting and not target.coming and self._start(target, reads_only):
                channel.turn = turn
                return True
        return False

    def _occupy(self, channel: _Channel, took_ps: int, nbytes: int) -> None:
        channel.busy = True
        channel.busy_ps += took_ps
        channel.nbytes += nbytes

    def _start(self, target: _Target, reads_only: bool) -> bool:
        """Send a target its next command, if it can take one; whether it did."""
        array = target.array
        if array is not None and not (self._cache_program and array == PROGRAM):
            return False
        queue = self._next_queue(target)
        kind = _KIND[queue]
        if reads_only and kind != READ:
            return False
        if array is not None and (kind != PROGRAM or target.loaded):
            return False
        if target.outgoing and not (kind == READ and self._cache_read):
            return False
        ops = self._take(target.queues[queue], kind)
        target.counts[queue] -= len(ops)
        target.waiting -= len(ops)
        nbytes = sum(op.nbytes for op in ops) if kind == PROGRAM else 0
        took = self._commands[kind][len(ops)]
        if kind == PROGRAM:
            took += sum(self.bus_ps(op.nbytes) for op in ops)
        self._occupy(target.channel, took, nbytes)
        target.coming = True
        self._events.at(self._events.now_ps + took, self._arrived, (target, ops))
        return True

    def _next_queue(self, target: _Target) -> int:
        for number, count in enumerate(target.counts):
            if count:
                return number
        raise AssertionError  # it has something that waits

    def _take(self, planes: list[deque[Op]], kind: int) -> list[Op]:
        """The operation that came first, and those that can go with it."""
        first, at = None, 0
        for number, plane in enumerate(planes):
            if plane and (first is None or plane[0].order < first.order):
                first, at = plane[0], number
        assert first is not None  # the queue has something
        ops = [planes[at].popleft()]
        if not self._multi or self._die_planes == 1:
            return ops
        die = at - at % self._die_planes
        anywhere = kind == ERASE or (kind == READ and self._independent)
        for number in range(die, die + self._die_planes):
            plane = planes[number]
            if number == at or not plane:
                continue
            if anywhere or plane[0].page == first.page:
                ops.append(plane.popleft())
            elif (kind == READ or self._any_order) and len(plane) > 1:
                self._take_later(plane, first.page, ops)
        return ops

    @staticmethod
    def _take_later(plane: deque[Op], page: int, ops: list[Op]) -> None:
        """The first operation on that page, past those that came before it."""
        for place, op in enumerate(plane):
            if op.page == page:
                ops.append(op)
                del plane[place]
                return

    # -- events -----------------------------------------------------------------------------------

    def _arrived(self, about: tuple[_Target, list[Op]]) -> None:
        """A command, and the pages that it programs, have crossed the channel."""
        target, ops = about
        target.coming = False
        if target.array is None:
            self._begin(target, ops)
        else:
            target.loaded = ops
        target.channel.busy = False
        self._serve(target.channel)

    def _begin(self, target: _Target, ops: list[Op]) -> None:
        """The array of a target begins to work."""
        kind = ops[0].kind
        target.array = kind
        if kind == READ:
            took = max(self._read_ps[op.page] for op in ops)
        elif kind == PROGRAM:
            took = max(self._program_ps[op.page] for op in ops)
        else:
            took = self._erase_ps
        target.busy_ps += took
        self._events.at(self._events.now_ps + took, self._worked, (target, ops))

    def _worked(self, about: tuple[_Target, list[Op]]) -> None:
        """The array has done a command."""
        target, ops = about
        kind = target.array
        if kind == READ:
            self.reads += len(ops)
            if target.outgoing:
                target.held = ops  # the cache register is taken
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
                self._done(op)
        if not target.channel.busy:
            self._serve(target.channel)

    def _send(self, target: _Target, ops: list[Op]) -> None:
        """Pages go to registers that the channel empties; the array is free if those are its cache."""
        target.outgoing = len(ops)
        target.held = []
        if self._cache_read:
            target.array = None
        target.channel.out.extend((target, op) for op in ops)

    def _sent(self, about: tuple[_Target, Op]) -> None:
        """A page has crossed the channel."""
        target, op = about
        channel = target.channel
        channel.busy = False
        target.outgoing -= 1
        if not target.outgoing:
            if target.held:
                self._send(target, target.held)
            elif not self._cache_read:
                target.array = None
        self._done(op)
        if not channel.busy:
            self._serve(channel)
