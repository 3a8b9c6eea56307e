"""Operations of flash, the queues in which they wait, and which of them go together.

A command goes to several planes of a die where ``channel.multi_plane`` lets it: to those whose next
operation is of the same kind and at the same page of its block (at any page, for reads of planes that
read independently). Reads may pass others of their plane for that, programs only where the device has
``channel.any_page_order``.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from penstock.ssd.ftl import Block

READ: Final = 0
PROGRAM: Final = 1
ERASE: Final = 2

GC_READ, GC_PROGRAM, QUEUED_ERASE, USER_READ, USER_PROGRAM = range(5)
"""Queues of a target, by precedence."""
KIND: Final = (READ, PROGRAM, ERASE, READ, PROGRAM)
QUEUE: Final = ((USER_READ, USER_PROGRAM, QUEUED_ERASE), (GC_READ, GC_PROGRAM, QUEUED_ERASE))
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


class Target:
    """A die, or a chip.

    Attributes:
        queues: By precedence, by plane: operations that wait.
        counts: How many in each queue; waiting: in all.
        array: The kind of command that the array works on; None: it is idle.
        outgoing: Pages in registers that have not been sent.
        held: Pages that were read and wait for the cache register.
        loaded: Pages that came in while the array programs others.
        working: What the array works on, until ``until_ps``; resumed: whether it was suspended before.
        paused: What is suspended, and how long it still takes.
    """

    __slots__ = (
        *("array", "busy_ps", "channel", "coming", "counts", "held", "loaded", "outgoing"),
        *("paused", "queues", "resumed", "until_ps", "waiting", "working"),
    )

    def __init__(self, channel: Channel, planes: int) -> None:
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
        self.busy_ps = self.until_ps = 0


class Channel:
    """A bus.

    Attributes:
        out: Pages that wait to be sent, with their targets.
        turn: The target to ask first.
    """

    __slots__ = ("busy", "busy_ps", "nbytes", "out", "targets", "turn")

    def __init__(self) -> None:
        self.busy = False
        self.busy_ps = self.nbytes = self.turn = 0
        self.out: deque[tuple[Target, Op]] = deque()
        self.targets: list[Target] = []


def take(
    planes: list[deque[Op]], kind: int, die_planes: int, *, anywhere: bool, any_order: bool
) -> list[Op]:
    """Operations for one command: the one that came first, and those that can go with it.

    Args:
        planes: Operations of one queue that wait, by plane of the target.
        kind: READ, PROGRAM or ERASE.
        die_planes: Planes that a command may go to; 1: one alone.
        anywhere: Whether they may be at any page, and not at one offset.
        any_order: Whether programs may pass others of their plane, as reads may.
    """
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
    return ops


def _take_later(plane: deque[Op], page: int, ops: list[Op]) -> None:
    """The first operation on that page, past those that came before it."""
    for place, op in enumerate(plane):
        if op.page == page:
            ops.append(op)
            del plane[place]
            return
