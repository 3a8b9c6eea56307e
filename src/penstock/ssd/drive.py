"""The event-driven engine: a host's requests, from the queue to the plane and back.

A request's way, after NVMe:

1. It comes to the submission queue; the host rings the doorbell (down).
2. The drive asks for the entry (up) and has it (down), if fewer than ``fetch_depth`` are inside.
3. Firmware. Of a write the drive asks for the data (up) and has it (down).
4. Its pages become operations of flash (:mod:`.ftl`, :mod:`.flash`). A page that is written in part, and
   was written before, is read first. One that is read and was never written gets a place, unprogrammed.
5. When all are done another request may be fetched. Of a read the data goes to the host (up).
6. The completion goes to the host (up), which rings a doorbell (down) and may ask for more.

A plane whose erased blocks run out takes nothing from the host until one has been erased. If none can be,
the drive is full, and that is an error, never a wait without end.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence

from penstock.core.errors import ConfigError
from penstock.ssd.commands import ERASE, PROGRAM, READ, Op
from penstock.ssd.device import PS_PER_NS, Device
from penstock.ssd.events import Events
from penstock.ssd.flash import Flash
from penstock.ssd.ftl import EMPTY, Block, Ftl
from penstock.ssd.link import REQUEST_BYTES, Lane
from penstock.ssd.measure import Meter, Run
from penstock.ssd.requests import Request, Workload
from penstock.ssd.usage import Usage


class Drive:
    """One simulated drive. ``run`` it once.

    Attributes:
        user_bytes: That the host can address.
    """

    def __init__(
        self,
        device: Device,
        *,
        seed: int = 1,
        watch: bool = False,
        power_cap_w: float | None = None,
    ) -> None:
        """An empty drive.

        Args:
            device: What it is made of.
            seed: For victims that are chosen among a random few.
            watch: Whether ``usage`` tells what it does over time.
            power_cap_w: What it may draw; commands wait for others to be done. None: no cap.

        Raises:
            ConfigError: Settings that leave no room, or a cap too low for any command.
        """
        self.device = device
        self.events = Events()
        self.ftl = Ftl(device, seed=seed)
        self.flash = Flash(device, self.events, self._op_done, power_cap_w=power_cap_w)
        if watch:
            self.flash.usage = Usage(device, len(self.flash.targets_busy_ps()))
        link = device.link
        self.up = Lane(link, link.up_bytes_per_s, self.events)
        self.down = Lane(link, link.down_bytes_per_s, self.events)
        self._page_bytes = device.geometry.page_bytes
        self._spare = device.geometry.spare_bytes if device.channel.send_spare else 0
        self.user_bytes = self.ftl.user_pages * self._page_bytes
        self._firmware_ps = (
            link.write_firmware_ns * PS_PER_NS,
            link.read_firmware_ns * PS_PER_NS,
        )
        self._queue: deque[Request] = deque()
        self._inside = 0
        self._flows: list[Iterator[Request]] = []
        self._waiting: dict[int, deque[tuple[Request, int, int]]] = {}
        self._left: dict[Block, int] = {}  # pages of a victim that are still to be moved
        self.meter = Meter(self, 0)

    @property
    def usage(self) -> Usage | None:
        """What it did over time, if that was asked for."""
        return self.flash.usage

    def run(self, workload: Workload) -> Run:
        """Everything that a workload asks for.

        Raises:
            ConfigError: The workload does not fit the drive, or the drive is full.
        """
        fill(self.ftl, int(self.ftl.user_pages * workload.filled))
        return self.serve(
            workload.stream(self.user_bytes), queue_depth=workload.queue_depth, skip=workload.skip
        )

    def serve(self, requests: Iterator[Request], *, queue_depth: int, skip: int = 0) -> Run:
        """Everything that is asked for.

        Args:
            requests: Those with an ``arrival_ps`` must come in its order, and wait for nobody.
            queue_depth: How many of the others are in the queue at once.
            skip: Requests that complete before anything is measured.

        Raises:
            ConfigError: A request is beyond the drive's end, or the drive is full.
        """
        return self.serve_flows([(requests, queue_depth)], skip=skip)

    def serve_flows(self, flows: Sequence[tuple[Iterator[Request], int]], *, skip: int = 0) -> Run:
        """The same of several streams of requests at once, each with its queue depth."""
        self._flows = [requests for requests, _ in flows]
        self.meter = Meter(self, skip)
        for flow, (_, depth) in enumerate(flows):
            for _ in range(depth):
                if not self._next(flow):
                    break
        self.events.run()
        if self.meter.outstanding:
            raise ConfigError(
                f"the drive is full: {self.meter.outstanding} requests wait for erased blocks, and"
                " garbage collection has nothing left to clean; use less of the drive, or give it more"
                " over-provisioning"
            )
        return self.meter.run()

    # -- the host, and NVMe ---------------------------------------------------------------------------

    def _next(self, flow: int) -> bool:
        """Have the host ask for the next one of a stream; whether there is one."""
        request = next(self._flows[flow], None)
        if request is None:
            return False
        request.flow = flow
        if request.offset_bytes < 0 or request.offset_bytes + request.nbytes > self.user_bytes:
            raise ConfigError(
                f"a request of {request.nbytes} bytes at {request.offset_bytes} is beyond the end of"
                f" the drive, {self.user_bytes}"
            )
        if request.arrival_ps is None:
            self._ask(request)
        else:
            self.events.at(max(request.arrival_ps, self.events.now_ps), self._timed, request)
        return True

    def _timed(self, request: Request) -> None:
        self._ask(request)
        self._next(request.flow)

    def _ask(self, request: Request) -> None:
        request.began_ps = self.events.now_ps
        self.meter.asked()
        self.down.send(self.device.link.doorbell_bytes, self._rung, request)

    def _rung(self, request: Request) -> None:
        self._queue.append(request)
        self._fetch()

    def _fetch(self) -> None:
        if self._queue and self._inside < self.device.link.fetch_depth:
            self._inside += 1
            self.up.send(REQUEST_BYTES, self._asked_entry, self._queue.popleft())

    def _asked_entry(self, request: Request) -> None:
        self.down.send(self.device.link.command_bytes, self._fetched, request)

    def _fetched(self, request: Request) -> None:
        took = self._firmware_ps[request.is_read]
        action = self._translate if request.is_read else self._ask_data
        if took:
            self.events.at(self.events.now_ps + took, action, request)
        else:
            action(request)

    def _ask_data(self, request: Request) -> None:
        self.up.send(REQUEST_BYTES, self._asked_data, request)

    def _asked_data(self, request: Request) -> None:
        self.down.nbytes += request.nbytes
        self.down.send(request.nbytes, self._translate, request)

    def _flash_done(self, request: Request) -> None:
        self._inside -= 1
        if request.is_read:
            self.up.nbytes += request.nbytes
            self.up.send(request.nbytes, _nothing, None)
        self._fetch()
        self.up.send(self.device.link.completion_bytes, self._completed, request)

    def _completed(self, request: Request) -> None:
        self.down.send(self.device.link.doorbell_bytes, _nothing, None)
        self.meter.completed(request)
        if request.arrival_ps is None:
            self._next(request.flow)

    # -- pages ----------------------------------------------------------------------------------------

    def _translate(self, request: Request) -> None:
        """Pages of a request become operations, all at the same time."""
        size, begin = self._page_bytes, request.offset_bytes
        end = begin + request.nbytes
        first, last = begin // size, (end - 1) // size
        request.left = last - first + 1
        ops: list[Op] = []
        for lpn in range(first, last + 1):
            nbytes = min(end, (lpn + 1) * size) - max(begin, lpn * size)
            if request.is_read:
                ops.append(self._read_op(request, lpn, nbytes))
            else:
                self._write(request, lpn, nbytes, ops)
        self.flash.submit(ops)

    def _read_op(self, request: Request, lpn: int, nbytes: int) -> Op:
        block, page = self.ftl.find(lpn) or self.ftl.adopt(lpn)
        block.pending += 1
        return Op(READ, block, page, lpn, nbytes + self._spare, request, False)

    def _write(self, request: Request, lpn: int, nbytes: int, ops: list[Op]) -> None:
        """Place a page and program it; or read the rest of it first; or let it wait for room."""
        plane = self.ftl.plane_of(lpn)
        if nbytes < self._page_bytes and self.ftl.find(lpn) is not None:
            rest = self._read_op(request, lpn, self._page_bytes - nbytes)
            rest.lpn = -2 - lpn  # when it is done, the page is written
            ops.append(rest)
        elif self.ftl.stopped(plane):
            self._waiting.setdefault(plane, deque()).append((request, lpn, nbytes))
            self._clean(plane, ops)
        else:
            self._program(request, lpn, nbytes, ops)

    def _program(self, request: Request, lpn: int, nbytes: int, ops: list[Op]) -> None:
        block, page = self.ftl.place(lpn)
        block.pending += 1
        ops.append(Op(PROGRAM, block, page, lpn, nbytes + self._spare, request, False))
        self._clean(block.plane, ops)

    def _op_done(self, op: Op) -> None:
        if op.cleaning:
            self._clean_done(op)
            return
        block, request = op.block, op.owner
        assert isinstance(request, Request)  # the host's operations belong to one
        block.pending -= 1
        if not block.pending:
            self._quiet(block)
        if op.lpn < EMPTY:
            ops: list[Op] = []
            self._write(request, -2 - op.lpn, self._page_bytes, ops)
            self.flash.submit(ops)
            return
        request.left -= 1
        if not request.left:
            self._flash_done(request)

    def _quiet(self, block: Block) -> None:
        """The host has nothing under way on a block: it may be erased, or be a victim."""
        if self._left.get(block) == 0:
            self._erase(block)
        elif self._waiting.get(block.plane):
            ops: list[Op] = []
            self._clean(block.plane, ops)
            self.flash.submit(ops)

    # -- garbage collection ---------------------------------------------------------------------------

    def _clean(self, plane: int, ops: list[Op]) -> None:
        """Begin to clean blocks of a plane, where there is need."""
        if self.ftl.planes[plane].free >= self.ftl.threshold:
            return
        while (block := self.ftl.victim(plane)) is not None:
            moving = [
                Op(READ, block, page, lpn, self._page_bytes + self._spare, block, True)
                for page, lpn in enumerate(block.lpns)
                if lpn != EMPTY
            ]
            self._left[block] = len(moving)
            if moving:
                ops += moving
            else:
                ops.append(Op(ERASE, block, 0, EMPTY, 0, block, True))

    def _clean_done(self, op: Op) -> None:
        victim = op.owner
        assert isinstance(victim, Block)  # garbage collection's operations belong to one
        if op.kind == ERASE:
            self._erased(victim)
            return
        if op.kind == READ and victim.lpns[op.page] == op.lpn:
            block, page = self.ftl.place(op.lpn, cleaning=True)
            nbytes = self._page_bytes + self._spare
            self.flash.submit([Op(PROGRAM, block, page, op.lpn, nbytes, victim, True)])
            return
        self._left[victim] -= 1  # programmed, or overwritten by the host meanwhile
        if not self._left[victim] and not victim.pending:
            self._erase(victim)

    def _erase(self, block: Block) -> None:
        self.flash.submit([Op(ERASE, block, 0, EMPTY, 0, block, True)])

    def _erased(self, block: Block) -> None:
        del self._left[block]
        self.ftl.erased(block)
        ops: list[Op] = []
        waiting = self._waiting.get(block.plane)
        while waiting and not self.ftl.stopped(block.plane):
            self._program(*waiting.popleft(), ops)
        self._clean(block.plane, ops)
        self.flash.submit(ops)


def fill(ftl: Ftl, pages: int) -> None:
    """Write the first ``pages`` logical pages in order, in no time."""
    for lpn in range(pages):
        ftl.place(lpn)
        _clean_at_once(ftl, ftl.plane_of(lpn))
    ftl.forget_counts()


def overwrite(ftl: Ftl, pages: int, count: int, *, seed: int = 1) -> None:
    """Write ``count`` of the first ``pages`` logical pages, each as likely, in no time."""
    chance = random.Random(seed)
    for _ in range(count):
        lpn = int(chance.random() * pages)
        ftl.place(lpn)
        _clean_at_once(ftl, ftl.plane_of(lpn))


def _clean_at_once(ftl: Ftl, plane: int) -> None:
    while (block := ftl.victim(plane)) is not None:
        for lpn in block.lpns:
            if lpn != EMPTY:
                ftl.place(lpn, cleaning=True)
        ftl.erased(block)


def _nothing(_: object) -> None:
    """What happens when a message that nobody waits for has arrived."""
