"""The event-driven engine: a host's requests, from the queue to the plane and back.

The steps of a request, after NVMe:

1. It enters the submission queue; the host rings the doorbell (down).
2. The drive asks for the entry (up) and receives it (down), if fewer than ``fetch_depth`` are inside.
3. Firmware runs. For a write the drive asks for the data (up) and receives it (down).
4. Its pages go to the write cache, where there is one (:mod:`.cache`), or become operations of flash
   (:mod:`.pages`, :mod:`.ftl`, :mod:`.flash`).
5. When all are done another request may be fetched. The data of a read goes to the host (up).
6. The completion goes to the host (up), which rings a doorbell (down) and may send the next request.

A plane without erased blocks takes no writes of the host until a block has been erased. If none can be
erased, the drive is full; that raises an error instead of waiting forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from penstock.core.errors import ConfigError
from penstock.lab.ssd.aging import fill, store_map
from penstock.lab.ssd.destaging import cache_of
from penstock.lab.ssd.device import PS_PER_NS, Device
from penstock.lab.ssd.events import Events
from penstock.lab.ssd.flash import Flash
from penstock.lab.ssd.ftl import Ftl
from penstock.lab.ssd.link import REQUEST_BYTES, LinkDirection
from penstock.lab.ssd.measure import DriveMeter, DriveRun
from penstock.lab.ssd.pages import PageController
from penstock.lab.ssd.requests import HostRequest, Workload
from penstock.lab.ssd.usage import Usage


class Drive:
    """A simulated drive. ``run`` it once.

    Attributes:
        user_bytes: Bytes that the host can address.
        cache: Its write cache, or None.
    """

    def __init__(
        self,
        device: Device,
        *,
        seed: int = 1,
        watch: bool = False,
        power_cap_w: float | None = None,
    ) -> None:
        """Create an empty drive.

        Args:
            device: Description of the drive.
            seed: Seed for victims that are chosen at random.
            watch: True to record ``usage`` over time.
            power_cap_w: Limit of its power; commands wait for others to end. None for no limit.

        Raises:
            ConfigError: The settings leave no room, or the limit is too low for any command.
        """
        self.device = device
        self.events = Events()
        self.ftl = Ftl(device, seed=seed)
        self.flash = Flash(device, self.events, power_cap_w=power_cap_w)
        self.pages = PageController(device, self.ftl, self.flash)
        if self.pages.map is not None and device.ftl.map_stored:
            store_map(self.ftl, self.ftl.user_pages)
        self.cache = cache_of(device, self.events, self.ftl, self.pages)
        if watch:
            self.flash.usage = Usage(device, len(self.flash.targets_busy_ps()))
        link = device.link
        self.up = LinkDirection(link, link.up_bytes_per_s, self.events)
        self.down = LinkDirection(link, link.down_bytes_per_s, self.events)
        self.user_bytes = self.ftl.user_pages * device.geometry.page_bytes
        self._firmware_ps = (
            link.write_firmware_ns * PS_PER_NS,
            link.read_firmware_ns * PS_PER_NS,
        )
        self._link = link
        self._streams = device.ftl.streams
        self._queue: deque[HostRequest] = deque()
        self._inside = 0
        self._flows: list[Iterator[HostRequest]] = []
        self.meter = DriveMeter(self, 0)
        self._when_done = self._flash_done

    @property
    def usage(self) -> Usage | None:
        """Activity over time, if it was recorded."""
        return self.flash.usage

    def run(self, workload: Workload) -> DriveRun:
        """Serve a whole workload.

        Raises:
            ConfigError: The workload does not fit the drive, or the drive is full.
        """
        fill(self.ftl, int(self.ftl.user_pages * workload.filled))
        return self.serve(
            workload.stream(self.user_bytes), queue_depth=workload.queue_depth, skip=workload.skip
        )

    def serve(
        self, requests: Iterator[HostRequest], *, queue_depth: int, skip: int = 0
    ) -> DriveRun:
        """Serve all requests.

        Args:
            requests: Requests; those with an ``arrival_ps`` must be sorted by it, and wait for none.
            queue_depth: Number of the others that are in the queue at the same time.
            skip: Number of requests that complete before the measurement starts.

        Raises:
            ConfigError: A request is beyond the drive's end, or the drive is full.
        """
        return self.serve_flows([(requests, queue_depth)], skip=skip)

    def serve_flows(
        self, flows: Sequence[tuple[Iterator[HostRequest], int]], *, skip: int = 0
    ) -> DriveRun:
        """Serve several streams of requests at the same time, each with its queue depth."""
        self._flows = [requests for requests, _ in flows]
        self.meter = DriveMeter(self, skip)
        for flow, (_, depth) in enumerate(flows):
            for _ in range(depth):
                if not self._next(flow):
                    break
        self.events.run()
        if self.meter.outstanding:
            raise ConfigError(
                f"the drive is full: {self.meter.outstanding} requests wait for erased blocks, and"
                " garbage collection has nothing left to clean; use less of the drive, or increase its"
                " over-provisioning"
            )
        return self.meter.run()

    def drain(self) -> int:
        """Write all of the cache to flash, as after a loss of power; return the time in ps.

        Raises:
            ConfigError: The drive is full.
        """
        begin = self.events.now_ps
        if self.cache is not None:
            self.cache.drain()
        self.events.run()
        if self.cache is not None and self.cache.dirty_pages:
            raise ConfigError(
                f"the drive is full: {self.cache.dirty_pages} pages of the cache have no room on flash"
            )
        return self.events.now_ps - begin

    # -- the host, and NVMe ---------------------------------------------------------------------------

    def _next(self, flow: int) -> bool:
        """Send the host's next request of a stream; return True if there is one."""
        request = next(self._flows[flow], None)
        if request is None:
            return False
        request.flow = flow
        request.done = self._when_done
        request.stream = (request.stream + flow) % self._streams
        if request.offset_bytes < 0 or request.offset_bytes + request.nbytes > self.user_bytes:
            raise ConfigError(
                f"a request of {request.nbytes} bytes at {request.offset_bytes} ends beyond the"
                f" {self.user_bytes} bytes of the drive"
            )
        if request.arrival_ps is None:
            self._ask(request)
        else:
            self.events.at(max(request.arrival_ps, self.events.now_ps), self._timed, request)
        return True

    def _timed(self, request: HostRequest) -> None:
        self._ask(request)
        self._next(request.flow)

    def _ask(self, request: HostRequest) -> None:
        request.began_ps = self.events.now_ps
        self.meter.asked()
        self.down.send(self._link.doorbell_bytes, self._rung, request)

    def _rung(self, request: HostRequest) -> None:
        self._queue.append(request)
        self._fetch()

    def _fetch(self) -> None:
        if self._queue and self._inside < self._link.fetch_depth:
            self._inside += 1
            self.up.send(REQUEST_BYTES, self._asked_entry, self._queue.popleft())

    def _asked_entry(self, request: HostRequest) -> None:
        self.down.send(self._link.command_bytes, self._fetched, request)

    def _fetched(self, request: HostRequest) -> None:
        took = self._firmware_ps[request.is_read]
        at_once = request.is_read or request.is_flush
        action = self._translate if at_once else self._ask_data
        if took:
            self.events.at(self.events.now_ps + took, action, request)
        else:
            action(request)

    def _ask_data(self, request: HostRequest) -> None:
        self.up.send(REQUEST_BYTES, self._asked_data, request)

    def _asked_data(self, request: HostRequest) -> None:
        self.down.nbytes += request.nbytes
        self.down.send(request.nbytes, self._translate, request)

    def _translate(self, request: HostRequest) -> None:
        """Find the pages of a read, or place those of a write, whose data have come."""
        if request.is_flush:
            self._flush(request)
        elif self.cache is None or not request.cached:
            begin = request.offset_bytes
            self.pages.serve(request, begin, begin + request.nbytes)
        elif request.is_read:
            self.cache.read(request)
        else:
            self.cache.write(request)

    def _flush(self, request: HostRequest) -> None:
        """Complete a flush; without a cache every completed write is on flash already."""
        if self.cache is None:
            request.done(request)
        else:
            self.cache.flush(request)

    def _flash_done(self, request: HostRequest) -> None:
        self._inside -= 1
        if request.is_read:
            self.up.nbytes += request.nbytes
            self.up.send(request.nbytes, _nothing, None)
        self._fetch()
        self.up.send(self._link.completion_bytes, self._completed, request)

    def _completed(self, request: HostRequest) -> None:
        self.down.send(self._link.doorbell_bytes, _nothing, None)
        self.meter.completed(request)
        if request.arrival_ps is None:
            self._next(request.flow)


def _nothing(_: object) -> None:
    """Do nothing, for messages that nothing waits for."""
