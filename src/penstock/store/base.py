"""Interface of tiers, between code that offloads and the memories that it offloads to.

1. The runtime calls :meth:`Tier.write` and keeps the :class:`Ticket`. The source must stay alive
   and unmodified until ``ticket.written`` is settled; the tier holds ``keep_alive`` until then. If
   it was modified nevertheless, ``written`` carries SourceChangedError, as far as checksums tell.
2. Before the data are needed the runtime allocates memory of ``ticket.window.nbytes`` whose address
   is a multiple of ``tier.spec.granule_bytes``, and calls :meth:`Tier.read`, as often as it likes.
   The data then lie ``ticket.window.skew`` bytes into that memory.
3. When they are not needed any more it calls :meth:`Tier.discard`, once, at any time.
4. :meth:`Tier.close` ends everything.

The public methods are not overridden: they do alignment, checksums, counters and spans. A tier
overrides ``_allocate``, ``_discard`` and ``_close``, and, if its places are no ranges of files that an
engine reads and writes, ``_write`` and ``_read``. A transfer
is one future from the engine to its waiters: the tier checks it before it is settled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from penstock.core import knobs
from penstock.core.errors import (
    ChecksumError,
    ClosedError,
    ConfigError,
    PenstockError,
    SourceChangedError,
)
from penstock.core.locks import condition
from penstock.core.process import fork_guard
from penstock.core.units import round_down, round_up
from penstock.io.engine import Engine, File, Op, Priority, Request, Transfer, submit_all
from penstock.observe.clients import measurement_of
from penstock.observe.recorder import Recorder, Stage
from penstock.store import checksums
from penstock.store.checksums import Sum

Place: TypeAlias = Any
"""Place of bytes in a tier: each tier has its own type, which no other code looks into.

Where an engine moves the bytes, ``place.ranges(nbytes)`` yields file, offset and length of each part of
``nbytes``, in the order of memory.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierSpec:
    """Properties of a tier, asked up front."""

    name: str
    """As in plans, logs and traces: ``"flash"``, ``"host"``."""
    kind: Literal["host", "flash"]
    capacity_bytes: int
    """How much it can hold."""
    granule_bytes: int
    """Sources are widened to multiples of this; targets of reads must be aligned to it."""
    where: str
    """For error messages: directories, or what memory."""
    remedy: str = ""
    """End of errors about lost bytes: ", and load a state dict"."""
    gpu_direct: bool = False
    """True if addresses are those of device memory. The host cannot read that, so the tier makes no
    checksums; whoever writes there makes its own."""


@dataclass(frozen=True, slots=True)
class Window:
    """The granule-aligned range of memory around some data that a tier really moves."""

    address: int
    nbytes: int
    skew: int
    """Offset of the data in the window."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A claim on bytes that a tier holds, made by ``write`` or ``adopt``; only the tier changes it."""

    label: str
    """Name of the bytes in errors and traces."""
    nbytes: int
    """Length of the data."""
    window: Window
    written: Transfer
    """Settled when the source is no longer needed; carries the error if writing failed."""
    place: Place = None
    """Private to the tier."""
    checksum: Sum | None = None
    in_flight: int = 0
    """Transfers of this ticket that are not settled; its place is freed when there is none."""
    discarded: bool = False
    is_held: bool = False
    """True while its bytes count as held."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A transfer of a ticket, from before it begins until everyone that waited for it knows its end."""

    ticket: Ticket
    transfer: Transfer | None = None
    """None: it is not known whether it has begun."""
    has_landed: bool = False


def check_readable(ticket: Any, spec: TierSpec) -> None:
    """Raise ConfigError if a ticket was discarded, or is not written, or that has failed.

    Args:
        ticket: A :class:`Ticket`, or another claim with its ``label``, ``written`` and ``discarded``.
        spec: The spec of its tier.
    """
    written = ticket.written
    if ticket.discarded:
        problem = "after it was discarded"
    elif not written.done:
        problem = "before it was written; wait for ticket.written first"
    elif written.error is not None:
        problem = f"although writing it failed ({written.error!r})"
    else:
        return
    raise ConfigError(f"{ticket.label}: read from tier {spec.name} {problem}")


class Tier(ABC):
    """A memory that holds spilled bytes. Thread-safe. Unusable in a forked child."""

    def __init__(
        self,
        spec: TierSpec,
        *,
        recorder: Recorder,
        engine: Engine | None = None,
        verify: checksums.Kind | None = None,
    ) -> None:
        """Initialise a subclass.

        Args:
            spec: Properties of the tier.
            recorder: Gets counters and spans.
            engine: Moves the bytes; None if the subclass overrides ``_write`` and ``_read``.
            verify: Kind of checksum; ``knobs.verify()`` if None.
        """
        self.spec = spec
        self.engine = engine
        self.recorder = recorder
        self._reported_as = spec.name
        self._verify: checksums.Kind = "off" if spec.gpu_direct else verify or knobs.verify()
        self._guard = fork_guard()
        self._lock = condition()  # notified when nothing is in flight any more
        self._closed = False
        self._held_bytes = 0
        self._in_flight: set[_Flight] = set()

    # -- primitives, for subclasses ---------------------------------------------------------------

    @abstractmethod
    def _allocate(self, nbytes: int) -> Place:
        """Find a place. Raises NoSpaceError, at once, if there is none."""

    def _write(
        self, place: Place, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        """Begin to copy memory to a place.

        ``address`` and ``nbytes`` are multiples of the granule. The transfer is of this call alone: the
        tier has it checked and settled (``Transfer.finish_with``).
        """
        return self._move("write", place.ranges(nbytes), address, keep_alive, priority)

    def _read(
        self, place: Place, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        """Begin to copy a place's bytes to memory. As ``_write``."""
        return self._move("read", place.ranges(nbytes), address, keep_alive, priority)

    @abstractmethod
    def _discard(self, place: Place) -> None:
        """Free a place; no transfer touches it any more. May run in a finalizer: no waiting.

        Also called after ``_close`` where a discard and a close met; then there is nothing to do.
        """

    @abstractmethod
    def _close(self) -> None:
        """Release everything. Called once, after the last transfer in flight has ended."""

    # -- for everyone -----------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes at rest or on their way in."""
        return self._held_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of the capacity in use: held bytes, in whole units of the tier."""
        return self._held_bytes

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Within, what is moved is reported as the tier's measurement, not as its use.

        It ends when nothing is in flight, also if an exception ends it, so that memory which was moved
        from or to may be freed afterwards.
        """
        self._reported_as = measurement_of(self.spec.name)
        try:
            yield
        finally:
            self._wait_idle()
            self._reported_as = self.spec.name

    def window(self, address: int, nbytes: int) -> Window:
        """The aligned range around ``nbytes`` at ``address``, within the pages of the data."""
        start = round_down(address, self.spec.granule_bytes)
        skew = address - start
        return Window(start, round_up(skew + nbytes, self.spec.granule_bytes), skew)

    def write(
        self,
        address: int,
        nbytes: int,
        *,
        keep_alive: object,
        label: str,
        priority: Priority = Priority.WRITE_BEHIND,
        at: Place = None,
        is_private: bool = False,
    ) -> Ticket:
        """Begin to spill ``nbytes`` at ``address``; returns at once.

        A ticket whose write failed or was cancelled holds its place until it is discarded.

        Args:
            address: Address of the source.
            nbytes: Length of the source.
            keep_alive: Owner of the source.
            label: Name of the bytes in errors and traces.
            priority: Priority of the transfer.
            at: A place that was reserved, no transfer of which is in flight; None: the tier finds one.
            is_private: True if nobody else can change the source, which is then not compared with itself
                after the write.

        Raises:
            NoSpaceError: The tier, or the file system under it, has no room for them.
            TransferError: It could not make room, for another reason: no file can be made, say.
            ClosedError: The tier is closed.
        """
        if nbytes <= 0:
            raise ConfigError(f"{label}: {nbytes} bytes cannot be written to tier {self.spec.name}")
        window = self.window(address, nbytes)
        start_ns = self.recorder.clock.now_ns()
        before = checksums.sum_of(self._verify, address, nbytes)
        ticket = Ticket(label, nbytes, window, _NOTHING_WRITTEN, at)
        flight = _Flight(ticket)

        def check(error: BaseException | None) -> BaseException | None:
            if error is None and before is not None:
                if not is_private and checksums.sum_of(before[0], address, nbytes) != before:
                    error = _source_changed(label, nbytes, self.spec)
                ticket.checksum = before
            return error

        try:
            self._begin(flight)
            if at is None:
                ticket.place = self._allocate(window.nbytes)
            flight.transfer = ticket.written = self._write(
                ticket.place, window.address, window.nbytes, keep_alive, priority
            )
            with self._lock:
                self._held_bytes += window.nbytes
                ticket.is_held = True
                self._note_level()
            self._settle_with(check, flight, Stage.WRITE, keep_alive=keep_alive, start_ns=start_ns)
        except BaseException as error:
            self._give_up(flight, error, discards=True)
            raise
        return ticket

    def read(
        self,
        ticket: Ticket,
        address: int,
        *,
        keep_alive: object,
        priority: Priority = Priority.PREFETCH,
    ) -> Transfer:
        """Begin to bring a ticket's window to ``address``; returns at once.

        ``ticket.written`` must have settled without an error. The transfer fails with ChecksumError
        where the data are not those that were written.
        """
        if address % self.spec.granule_bytes:
            raise ConfigError(
                f"{ticket.label}: target address {address:#x} is not a multiple of"
                f" {self.spec.granule_bytes}, the granule of tier {self.spec.name}"
            )
        flight = _Flight(ticket)

        def check(error: BaseException | None) -> BaseException | None:
            return error or self._mismatch(ticket, address + ticket.window.skew)

        try:
            self._begin(flight, reads=True)
            start_ns = self.recorder.clock.now_ns()
            transfer = flight.transfer = self._read(
                ticket.place, address, ticket.window.nbytes, keep_alive, priority
            )
            self._settle_with(check, flight, Stage.READ, keep_alive=keep_alive, start_ns=start_ns)
        except BaseException as error:
            self._give_up(flight, error)
            raise
        return transfer

    def adopt(self, place: Place, nbytes: int, *, label: str, checksum: Sum | None) -> Ticket:
        """Claim bytes that an earlier process has written to a reserved place.

        Args:
            place: The place.
            nbytes: Length of the bytes, a multiple of the granule.
            label: Name of the bytes in errors and traces.
            checksum: Checksum that they must have; None: it is not known.
        """
        written = Transfer(nbytes)
        written.settle()
        with self._lock:
            self._held_bytes += nbytes
            self._note_level()
        return Ticket(label, nbytes, Window(0, nbytes, 0), written, place, checksum, is_held=True)

    def damage(self, ticket: Ticket, facts: str) -> ChecksumError:
        """Return the error that a ticket's bytes are not those that were written.

        Args:
            ticket: The claim.
            facts: Difference, as the predicate of "bytes read back ...".
        """
        return ChecksumError(
            f"{ticket.label}: {ticket.nbytes} bytes read back from tier {self.spec.name}"
            f" ({self.spec.where}, {ticket.place}) {facts}. The device or its memory returned other"
            f" bytes: it is faulty, stop using it{self.spec.remedy}"
        )

    def discard(self, ticket: Ticket) -> None:
        """Give up a claim. Cancels a write that has not started.

        Never waits and takes only Penstock's own locks, so a finalizer may (by ``locks.defer``).
        Does nothing in a forked child: the place is the parent's.
        """
        if self._guard.in_child:
            return
        with self._lock:
            if ticket.discarded:
                return
            ticket.discarded = True
            idle = ticket.in_flight == 0
            is_free = idle and self._gives_back(ticket)
        if is_free:
            self._discard(ticket.place)
        elif not idle:
            ticket.written.cancel()

    def close(self) -> None:
        """Drop everything: cancel what has not started, wait for what has. Idempotent.

        Never call it in a done callback of a transfer: that transfer has not ended yet.
        """
        if self._guard.in_child:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            moving = [flight.transfer for flight in self._in_flight]
        for transfer in moving:
            if transfer is not None:
                transfer.cancel()
        try:
            self._wait_idle()  # also if it raises what a signal's handler has raised
        finally:
            self._close()

    # -- inside -----------------------------------------------------------------------------------

    def _wait_idle(self) -> None:
        """Wait until nothing is in flight, however often it is interrupted: memory is freed next."""
        interrupt: BaseException | None = None
        while self._in_flight:
            try:
                with self._lock:
                    self._lock.wait_for(lambda: not self._in_flight)
            except BaseException as error:  # noqa: BLE001  (raised below)
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _move(
        self,
        op: Op,
        ranges: Iterable[tuple[File, int, int]],
        address: int,
        keep_alive: object,
        priority: Priority,
    ) -> Transfer:
        assert self.engine is not None, f"tier {self.spec.name} has no engine"
        requests = []
        for file, offset_bytes, nbytes in ranges:
            requests.append(
                Request(
                    op=op,
                    file=file,
                    offset_bytes=offset_bytes,
                    address=address,
                    nbytes=nbytes,
                    keep_alive=keep_alive,
                    priority=priority,
                )
            )
            address += nbytes
        if len(requests) == 1:
            return self.engine.submit(requests[0])
        return submit_all(self.engine, requests)

    def _settle_with(
        self,
        check: Callable[[BaseException | None], BaseException | None],
        flight: _Flight,
        stage: Stage,
        *,
        keep_alive: object,
        start_ns: int,
    ) -> None:
        """Have a transfer, which has begun, checked and accounted for before it is seen as settled."""
        transfer, ticket = flight.transfer, flight.ticket
        assert transfer is not None

        def finish(error: BaseException | None) -> BaseException | None:
            nonlocal keep_alive
            try:
                error = check(error)
            except MemoryError as failure:
                error = failure
            self._account(stage, ticket, start_ns, error)
            keep_alive = None
            self._landed(flight)  # first, so that a waiter that discards has the space at once
            return error

        transfer.finish_with(finish, lambda: self._end(flight))

    def _begin(self, flight: _Flight, *, reads: bool = False) -> None:
        """A transfer is about to be in flight."""
        if self._guard.in_child:  # before the lock, which a thread left behind may hold
            raise self._guard.error(f"tier {self.spec.name} ({self.spec.where})", "make one here")
        with self._lock:
            if self._closed:
                raise ClosedError(f"tier {self.spec.name} ({self.spec.where}) is closed")
            if reads:
                check_readable(flight.ticket, self.spec)
            flight.ticket.in_flight += 1
            # the last call of this block: a signal may interrupt after it
            self._in_flight.add(flight)

    def _end(self, flight: _Flight) -> None:
        """Note that what ``_begin`` began is over, and that everyone that waited for it knows."""
        with self._lock:
            self._in_flight.discard(flight)
            if not self._in_flight:
                self._lock.notify_all()

    def _give_up(self, flight: _Flight, error: BaseException, *, discards: bool = False) -> None:
        """End a transfer that was refused, or at whose beginning a signal's handler has raised.

        Then it may have begun without anybody knowing: it has ended when all that moves now has. Nobody
        waits for that here, where the caller may hold locks, but whoever closes the tier.
        """
        if (
            self._guard.in_child
        ):  # it was refused there, where a thread left behind may hold the lock
            return
        moving: list[Transfer] = []
        if not isinstance(error, PenstockError):
            moving = self._unsettled() if flight.transfer is None else [flight.transfer]
        left: set[Transfer | None] = {None, *moving}

        def over(transfer: Transfer | None) -> None:
            left.discard(transfer)
            if not left:
                self._landed(flight)
                self._end(flight)

        if discards:
            self.discard(flight.ticket)
        for each in moving:
            each.add_done_callback(over)
        over(None)

    def _unsettled(self) -> list[Transfer]:
        """Return the transfers that may be under way; see :meth:`penstock.io.engine.Engine.unsettled`."""
        return [] if self.engine is None else self.engine.unsettled()

    def _note_level(self) -> None:
        if self.spec.kind == "flash":  # host memory is on its budget's line already
            self.recorder.level(self.spec.name, self._held_bytes)

    def _landed(self, flight: _Flight) -> None:
        ticket = flight.ticket
        with self._lock:
            if flight.has_landed or flight not in self._in_flight:
                return
            flight.has_landed = True
            ticket.in_flight -= 1
            last = ticket.discarded and ticket.in_flight == 0
            is_free = last and self._gives_back(ticket)
        if is_free:
            self._discard(ticket.place)

    def _gives_back(self, ticket: Ticket) -> bool:
        """Hold a ticket's bytes no more; return whether its place is to be freed. Under the lock."""
        if ticket.is_held:
            ticket.is_held = False
            self._held_bytes -= ticket.window.nbytes
            self._note_level()
        return ticket.place is not None and not self._closed

    def _mismatch(self, ticket: Ticket, address: int) -> ChecksumError | None:
        if ticket.checksum is None or self._verify == "off":
            return None
        found = checksums.mismatch(ticket.checksum, address, ticket.nbytes)
        if found is None:
            return None
        written = ticket.checksum[1]
        facts = f"have checksum {found:#018x}; the memory that was written had {written:#018x}"
        return self.damage(ticket, facts)

    def _account(
        self, stage: Stage, ticket: Ticket, start_ns: int, error: BaseException | None
    ) -> None:
        if isinstance(error, CancelledError):
            self.recorder.count(f"{stage}.cancelled.{self.spec.name}")
            return
        if error is not None:
            self.recorder.count(f"{stage}.failed.{self.spec.name}")
            return
        self.recorder.span(
            stage,
            start_ns,
            self.recorder.clock.now_ns(),
            nbytes=ticket.window.nbytes,
            tier=self._reported_as,
            slot=ticket.label,
        )


_NOTHING_WRITTEN: Final = Transfer(0)
_NOTHING_WRITTEN.settle()


def _source_changed(label: str, nbytes: int, spec: TierSpec) -> SourceChangedError:
    return SourceChangedError(
        f"{label}: the memory of its {nbytes} bytes changed while it was written to tier {spec.name}"
        f" ({spec.where}); the device is not at fault: the program changes memory that autograd has"
        " saved, without autograd's knowledge, as through .data or a NumPy array that shares it"
    )
