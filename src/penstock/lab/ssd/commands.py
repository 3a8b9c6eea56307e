"""Operations of flash, the queues in which they wait, and their combination into commands.

With ``channel.multi_plane`` a command goes to several planes of a die: to those whose next operation is
of the same kind and at the same page of its block (at any page, for reads of planes that read
independently). Reads may overtake others of their plane for that, programs only if the device has
``channel.any_page_order``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from penstock.lab.ssd.blocks import FlashBlock

READ: Final = 0
PROGRAM: Final = 1
ERASE: Final = 2

GC_READ, GC_PROGRAM, QUEUED_ERASE, USER_READ, USER_PROGRAM, MAP_READ, MAP_PROGRAM = range(7)
"""Queues of a target, the first five by precedence. The controller's map is read and programmed in the
first two, and in the last two only if garbage collection may wait for the host."""
KIND: Final = (READ, PROGRAM, ERASE, READ, PROGRAM, READ, PROGRAM)
_MAP: Final = (MAP_READ, MAP_PROGRAM)
_CLEANING: Final = (GC_READ, GC_PROGRAM, QUEUED_ERASE)
_HOST: Final = (USER_READ, USER_PROGRAM)
CLEANING_FIRST: Final = (*_MAP, *_CLEANING, *_HOST)
HOST_FIRST: Final = (*_MAP, *_HOST, *_CLEANING)


class CommandOwner:
    """The origin of operations: a request of the host, or pages that the cache writes to flash.

    Attributes:
        left: Operations of flash, or pages that wait for room, until it is done.
        done: Callback for the end.
        stream: Stream of the host whose blocks receive the pages.
        is_read: True for reads.
    """

    __slots__ = ("done", "is_read", "left", "stream")

    def __init__(self, is_read: bool, stream: int) -> None:
        self.is_read = is_read
        self.stream = stream
        self.left = 0
        self.done: Callable[[Any], None] = _nothing


class Op:
    """An operation on one page, or the erase of a block.

    Attributes:
        queue: Queue in which it waits, which tells reads, programs and erases apart.
        nbytes: Bytes that cross the channel.
        owner: Origin of the operation; ``done`` interprets it.
        done: Called with the operation at its end, when a page that was read has been sent.
        order: Number among all operations; 0 to get the next number when it is queued.
    """

    __slots__ = ("block", "done", "lpn", "nbytes", "order", "owner", "page", "queue")

    def __init__(  # noqa: PLR0917  (called for every page: keywords would double its time)
        self,
        queue: int,
        block: FlashBlock,
        page: int,
        lpn: int,
        nbytes: int,
        owner: Any,
        done: Callable[[Op], None],
    ) -> None:
        self.queue = queue
        self.block = block
        self.page = page
        self.lpn = lpn
        self.nbytes = nbytes
        self.owner = owner
        self.done = done
        self.order = 0


class Target:
    """A die, or a chip.

    Attributes:
        queues: Waiting operations, by precedence and plane.
        counts: Waiting operations of each queue; waiting: of all queues.
        array: Kind of command that the array executes; None if it is idle.
        outgoing: Pages in registers that have not been sent.
        held: Pages that were read and wait for the cache register.
        loaded: Pages that were loaded while the array programs others.
        working: Operations of the array, until ``until_ps``; resumed: True if they were suspended before.
        paused: Suspended operations, and their remaining time.
        planes: Planes, counted over the drive, if they are needed.
    """

    __slots__ = (
        *("array", "busy_ps", "channel", "coming", "counts", "held", "loaded", "outgoing"),
        *("paused", "planes", "queues", "resumed", "until_ps", "waiting", "working"),
    )

    def __init__(self, channel: ChannelBus, planes: int) -> None:
        self.channel = channel
        self.queues: list[list[deque[Op]]] = [[deque() for _ in range(planes)] for _ in KIND]
        self.counts = [0] * len(KIND)
        self.waiting = 0
        self.array: int | None = None
        self.coming = False  # a command or pages for it are on the channel
        self.outgoing = 0
        self.held: list[Op] = []
        self.loaded: list[Op] = []
        self.working: list[Op] = []
        self.paused: tuple[list[Op], int] | None = None
        self.resumed = False
        self.planes = range(0)
        self.busy_ps = self.until_ps = 0


class ChannelBus:
    """A bus.

    Attributes:
        out: Pages that wait to be sent, with their targets.
        turn: Target to serve next.
        waiting: Waiting operations of all targets.
    """

    __slots__ = ("busy", "busy_ps", "nbytes", "out", "targets", "turn", "waiting")

    def __init__(self) -> None:
        self.busy = False
        self.busy_ps = self.nbytes = self.turn = self.waiting = 0
        self.out: deque[tuple[Target, Op]] = deque()
        self.targets: list[Target] = []


def take(
    planes: list[deque[Op]], kind: int, die_planes: int, *, anywhere: bool, any_order: bool
) -> list[Op]:
    """Remove the operations of one command: the first, and those that fit to it, in order of arrival.

    Args:
        planes: Waiting operations of one queue, by plane of the target.
        kind: READ, PROGRAM or ERASE.
        die_planes: Number of planes in a command; 1 for a single one.
        anywhere: True if operations may be at any page, not only at one offset.
        any_order: True if programs may overtake others of their plane, as reads may.
    """
    if len(planes) == 1:
        return [planes[0].popleft()]
    first, at = None, 0
    for number, plane in enumerate(planes):
        if plane and (first is None or plane[0].order < first.order):
            first, at = plane[0], number
    assert first is not None  # the queue has something
    ops = [planes[at].popleft()]
    if die_planes == 1:
        return ops
    die = at - at % die_planes
    for number in range(die, die + die_planes):
        plane = planes[number]
        if number == at or not plane:
            continue
        if anywhere or plane[0].page == first.page:
            ops.append(plane.popleft())
        elif (kind == READ or any_order) and len(plane) > 1:
            _take_later(plane, first.page, ops)
    if len(ops) > 2:
        ops.sort(key=_order)  # the order in which their pages are sent
    return ops


def _order(op: Op) -> int:
    return op.order


def _take_later(plane: deque[Op], page: int, ops: list[Op]) -> None:
    """Remove the first operation on that page, which overtakes earlier ones."""
    for place, op in enumerate(plane):
        if op.page == page:
            ops.append(op)
            del plane[place]
            return


def put(plane: deque[Op], op: Op) -> None:
    """Queue an operation whose number is lower than that of others that may wait."""
    place = len(plane)
    while place and plane[place - 1].order > op.order:
        place -= 1
    plane.insert(place, op)


def _nothing(_: object) -> None:
    """Do nothing, for operations that nothing waits for."""
