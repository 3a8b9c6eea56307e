"""Results of a run of the event engine: rates, latencies, use, energy, wear, in constant memory."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.lab.ssd.cache import Cache, CacheUse
from penstock.lab.ssd.closed_form import program_bytes_per_s
from penstock.lab.ssd.device import PS_PER_S, Device
from penstock.lab.ssd.events import Events
from penstock.lab.ssd.flash import Flash
from penstock.lab.ssd.ftl import Ftl
from penstock.lab.ssd.link import LinkDirection
from penstock.lab.ssd.pages import PageController
from penstock.lab.ssd.requests import HostRequest

_PARTS: Final = 64
"""Parts of an octave: a percentile is off by less than 1 / 64."""
_PJ: Final = 1e-12


class Latencies:
    """Latencies of requests: exact sum, minimum and maximum; a histogram for percentiles."""

    __slots__ = ("_counts", "count", "least_ps", "most_ps", "sum_ps")

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self.count = self.sum_ps = self.most_ps = 0
        self.least_ps = -1

    def add(self, took_ps: int) -> None:
        """Add one latency."""
        self.count += 1
        self.sum_ps += took_ps
        if took_ps > self.most_ps:  # noqa: PLR1730  (a call, for every request)
            self.most_ps = took_ps
        if self.least_ps < 0 or took_ps < self.least_ps:
            self.least_ps = took_ps
        shift = took_ps.bit_length() - 7  # 64 to 127, and the number of halvings
        place = shift * 128 + (took_ps >> shift) if shift > 0 else took_ps
        self._counts[place] += 1

    def merged_with(self, other: Latencies) -> Latencies:
        """Return both together, as if all latencies had been added to one."""
        both = Latencies()
        for each in (self, other):
            both.count += each.count
            both.sum_ps += each.sum_ps
            both.most_ps = max(both.most_ps, each.most_ps)
            for place, times in each._counts.items():
                both._counts[place] += times
        both.least_ps = min((one.least_ps for one in (self, other) if one.count), default=-1)
        return both

    def percentile_ps(self, share: float) -> int:
        """Return the latency that this share did not exceed, rounded up to a part of its octave; or 0."""
        need, seen = math.ceil(share * self.count), 0
        for place in sorted(self._counts):
            seen += self._counts[place]
            if seen >= need:
                shift, top = divmod(place, 128)
                return min(((top + 1) << shift) - 1, self.most_ps)
        return 0

    @property
    def mean_ps(self) -> float:
        """Mean latency; 0 without requests."""
        return self.sum_ps / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of the drive since it began."""

    reads: int
    programs: int
    erases: int
    moves: int
    user_writes: int
    channel_bytes: int
    channel_ps: int
    array_ps: int
    up_bytes: int
    down_bytes: int
    up_ps: int
    down_ps: int
    memory_bytes: int
    map_reads: int
    map_writes: int
    map_hits: int
    map_misses: int

    def since(self, before: _Counts) -> _Counts:
        """Return the counts that came after ``before``."""
        return _Counts(*(getattr(self, name) - getattr(before, name) for name in _Counts.__slots__))


@dataclass(frozen=True, slots=True)
class MapUse:
    """Use of a map on flash."""

    hits: int
    """Entries found in memory."""
    misses: int
    reads: int
    """Pages of the map that were read."""
    writes: int

    @property
    def hit_rate(self) -> float:
        """Share of hits; 1 without accesses."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0


@dataclass(frozen=True, slots=True)
class PowerLoss:
    """Consequences of a loss of power at the worst moment."""

    nbytes: int
    """Dirty bytes in the cache."""
    flush_s: float
    """Time for which capacitors must last."""
    flush_j: float
    lost: bool
    """True if there are no capacitors, and the bytes are lost."""


@dataclass(frozen=True, slots=True)
class DriveRun:
    """Measurements after the skipped requests."""

    device: str
    requests: int
    reads: int
    writes: int
    time_ps: int
    read_bytes: int
    written_bytes: int
    latency: Latencies
    read_latency: Latencies
    write_latency: Latencies
    outstanding: float
    """Requests between queue and completion, on average over time."""
    flash_reads: int
    flash_programs: int
    flash_erases: int
    channel_bytes: int
    channel_use: float
    die_use: float
    """Use of the targets that execute one command at a time: dies, or chips."""
    up_use: float
    down_use: float
    write_amplification: float
    most_erases: int
    """Most erases of any block, since the drive was new."""
    mean_erases: float
    energy_j: tuple[tuple[str, float], ...]
    """(component, joules) of the drive."""
    events: int
    map_use: MapUse | None
    """Use of the map; None if all of it is in memory."""
    cache_use: CacheUse | None
    """Use of the write cache, or None."""
    power_loss: PowerLoss | None

    @property
    def time_s(self) -> float:
        """Time from the last skipped request, or the beginning, to the last completion."""
        return self.time_ps / PS_PER_S

    @property
    def iops(self) -> float:
        """Completions per second."""
        return self.requests / self.time_s

    @property
    def bytes_per_s(self) -> float:
        """Bytes read and written per second."""
        return (self.read_bytes + self.written_bytes) / self.time_s

    @property
    def joules(self) -> float:
        """Sum of the components."""
        return math.fsum(joules for _, joules in self.energy_j)


class MeteredDrive(Protocol):
    """A drive, as a meter reads it."""

    device: Device
    events: Events
    ftl: Ftl
    flash: Flash
    pages: PageController
    cache: Cache | None
    up: LinkDirection
    down: LinkDirection


class DriveMeter:
    """Recorder of a drive's requests.

    Attributes:
        outstanding: Requests between queue and completion now.
    """

    def __init__(self, drive: MeteredDrive, skip: int) -> None:
        """Measure from the completion of the request that follows the first ``skip``."""
        self._drive = drive
        self._skip = skip
        self._area = self._since_ps = self._start_ps = self._end_ps = 0
        self.outstanding = 0
        self._read_bytes = self._written_bytes = 0
        self._reading, self._writing = Latencies(), Latencies()
        self._before = _Counts(*[0] * 17)

    def asked(self) -> None:
        """Count a request that the host has queued."""
        self._level(1)

    def completed(self, request: HostRequest) -> None:
        """Count a completion that the host has received."""
        self._level(-1)
        now = self._drive.events.now_ps
        if self._skip:
            self._skip -= 1
            if not self._skip:
                self._begin()
            return
        self._end_ps = now
        took = now - request.began_ps
        if request.is_read:
            self._read_bytes += request.nbytes
            self._reading.add(took)
        else:
            self._written_bytes += request.nbytes
            self._writing.add(took)

    def run(self) -> DriveRun:
        """Return the measurements."""
        drive, device = self._drive, self._drive.device
        done = self._counts().since(self._before)
        time_ps = max(1, self._end_ps - self._start_ps)
        geometry = device.geometry
        targets = len(drive.flash.targets_busy_ps())
        erases = drive.ftl.erases()
        blocks = geometry.planes * geometry.blocks_per_plane
        user = done.user_writes
        latency = self._reading.merged_with(self._writing)
        return DriveRun(
            device=device.name,
            requests=latency.count,
            reads=self._reading.count,
            writes=self._writing.count,
            time_ps=time_ps,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            latency=latency,
            read_latency=self._reading,
            write_latency=self._writing,
            outstanding=self._area / time_ps,
            flash_reads=done.reads,
            flash_programs=done.programs,
            flash_erases=done.erases,
            channel_bytes=done.channel_bytes,
            channel_use=done.channel_ps / geometry.channels / time_ps,
            die_use=done.array_ps / targets / time_ps,
            up_use=done.up_ps / time_ps,
            down_use=done.down_ps / time_ps,
            write_amplification=(user + done.moves) / user if user else 1.0,
            most_erases=max(erases, default=0),
            mean_erases=sum(erases) / blocks,
            energy_j=tuple(self._energy(done, time_ps).items()),
            events=drive.events.count,
            map_use=self._map_use(done),
            cache_use=None if drive.cache is None else drive.cache.use(),
            power_loss=self._power_loss(),
        )

    def _level(self, change: int) -> None:
        now = self._drive.events.now_ps
        self._area += self.outstanding * (now - self._since_ps)
        self._since_ps = now
        self.outstanding += change

    def _begin(self) -> None:
        self._start_ps = self._end_ps = self._drive.events.now_ps
        self._area = 0
        self._before = self._counts()
        if self._drive.cache is not None:
            self._drive.cache.reset_counts()

    def _map_use(self, done: _Counts) -> MapUse | None:
        if self._drive.pages.map is None:
            return None
        return MapUse(done.map_hits, done.map_misses, done.map_reads, done.map_writes)

    def _power_loss(self) -> PowerLoss | None:
        """Return the worst case: pages in sequence, by the closed form, and the last of them alone."""
        drive, device = self._drive, self._drive.device
        if drive.cache is None:
            return None
        nbytes = drive.cache.use().most_dirty_bytes
        if not nbytes or not device.cache.protected:
            return PowerLoss(nbytes, 0.0, 0.0, lost=bool(nbytes))
        time_s = nbytes / program_bytes_per_s(device) + max(device.cell.program_ns) * 1e-9
        cost = device.energy
        pj = cost.program_pj_per_bit + cost.channel_pj_per_bit + cost.controller_dram_pj_per_bit
        joules = nbytes * 8 * pj * _PJ + cost.controller_static_w * time_s
        return PowerLoss(nbytes, time_s, joules, lost=False)

    def _counts(self) -> _Counts:
        drive = self._drive
        flash, ftl = drive.flash, drive.ftl
        cache, held = drive.cache, drive.pages.map
        return _Counts(
            reads=flash.reads,
            programs=flash.programs,
            erases=flash.erases,
            moves=ftl.moves,
            user_writes=ftl.user_writes,
            channel_bytes=sum(channel.nbytes for channel in flash.channels),
            channel_ps=sum(channel.busy_ps for channel in flash.channels),
            array_ps=sum(flash.targets_busy_ps()),
            up_bytes=drive.up.nbytes,
            down_bytes=drive.down.nbytes,
            up_ps=drive.up.busy_ps,
            down_ps=drive.down.busy_ps,
            memory_bytes=2 * drive.down.nbytes if cache is None else cache.moved_bytes,
            map_reads=held.reads if held else 0,
            map_writes=held.writes if held else 0,
            map_hits=held.hits if held else 0,
            map_misses=held.misses if held else 0,
        )

    def _energy(self, done: _Counts, time_ps: int) -> dict[str, float]:
        """Return joules by component; reads sense whole pages, however little of them is sent."""
        cost, page = self._drive.device.energy, self._drive.device.geometry.page_bytes
        bits = {
            "flash, read": (done.reads * page, cost.read_pj_per_bit),
            "flash, program": (done.programs * page, cost.program_pj_per_bit),
            "flash, erase": (done.programs * page, cost.erase_pj_per_bit),
            "channel": (done.channel_bytes, cost.channel_pj_per_bit),
            "error correction": (done.reads * page, cost.controller_ecc_pj_per_bit),
            "controller's memory": (done.memory_bytes, cost.controller_dram_pj_per_bit),
            "link, the drive's end": (done.up_bytes + done.down_bytes, cost.link_pj_per_bit / 2),
        }
        joules_by_name = {name: nbytes * 8 * pj * _PJ for name, (nbytes, pj) in bits.items()}
        joules_by_name["controller, static"] = cost.controller_static_w * time_ps / PS_PER_S
        return joules_by_name
