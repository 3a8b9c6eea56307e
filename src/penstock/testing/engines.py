"""Conformance suite of engines. A subclass defines how to build one.

::

    class TestMine(EngineTests):
        def make_engine(self, *, threads, piece_bytes, syscalls):
            return MyEngine(threads, piece_bytes)

        def make_file(self, directory):
            return open_unlinked(directory)

        takes_syscalls = False  # skips the tests that inject faults
"""

from __future__ import annotations

import errno as errnos
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import (
    ClosedError,
    ConfigError,
    NoSpaceError,
    ShortTransferError,
    TransferError,
)
from penstock.io.engine import Engine, File, Op, Priority, Transfer
from penstock.io.threads import Syscalls
from penstock.testing.faults import Crash, Fail, Fault, FaultySyscalls, GatedSyscalls, Short
from penstock.testing.transfers import (
    PATIENCE_S,
    PIECE_BYTES,
    Bytes,
    aligned,
    move,
    move_from_threads,
    request,
    roundtrip,
    run_in_fork,
)

__all__ = ["PATIENCE_S", "PIECE_BYTES", "Bytes", "EngineTests", "aligned", "move", "run_in_fork"]


class EngineBuilder(Protocol):
    """Type of the ``build`` fixture."""

    def __call__(
        self, *, threads: int = 2, piece_bytes: int = PIECE_BYTES, syscalls: Syscalls | None = None
    ) -> Engine:
        """Build an engine that is closed at the end of the test."""


@contextmanager
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the system refuse to start threads inside the block."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


class EngineTests:
    """Roundtrips, order, cancelling, faults at every index, closing, forking."""

    takes_syscalls = True
    """True if ``make_engine`` uses ``syscalls``."""

    def make_engine(self, *, threads: int, piece_bytes: int, syscalls: Syscalls | None) -> Engine:
        """Build an engine. To be overridden."""
        raise NotImplementedError

    def make_file(self, directory: Path) -> File:
        """Build an empty file that can be read and written. To be overridden."""
        raise NotImplementedError

    # -- fixtures ---------------------------------------------------------------------------------

    @pytest.fixture
    def build(self) -> Iterator[EngineBuilder]:
        """Build engines that are closed at the end."""
        engines: list[Engine] = []
        gates: list[GatedSyscalls] = []

        def build(
            *, threads: int = 2, piece_bytes: int = PIECE_BYTES, syscalls: Syscalls | None = None
        ) -> Engine:
            if syscalls is not None and not self.takes_syscalls:
                pytest.skip("this engine does not take injected system calls")
            engine = self.make_engine(threads=threads, piece_bytes=piece_bytes, syscalls=syscalls)
            engines.append(engine)
            if isinstance(syscalls, GatedSyscalls):
                gates.append(syscalls)
            return engine

        yield build
        for gate in gates:  # a failed test may have left it closed
            gate.open()
        for engine in engines:
            engine.close()

    @pytest.fixture
    def file(self, tmp_path: Path) -> File:
        """An empty file."""
        return self.make_file(tmp_path)

    # -- moving -----------------------------------------------------------------------------------

    def test_what_is_written_is_read(self, build: EngineBuilder, file: File) -> None:
        """One granule, several pieces, and lengths that are no multiple of a piece."""
        engine, granule = build(), file.granule_bytes
        for pieces in (0, 1, 2, 5):
            for extra in (-granule, 0, granule):
                nbytes = pieces * PIECE_BYTES + extra
                if nbytes > 0:
                    roundtrip(engine, file, 0, nbytes)

    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    @given(offset=st.integers(0, 64), granules=st.integers(1, 96), seed=st.integers(0, 9))
    def test_any_offset_and_length(
        self, build: EngineBuilder, file: File, offset: int, granules: int, seed: int
    ) -> None:
        """The neighbours of what is written stay as they were."""
        engine, granule = build(), file.granule_bytes
        start, nbytes = offset * granule, granules * granule
        around = aligned(start + nbytes + granule, seed=seed)
        move(engine, "write", file, 0, around).wait(PATIENCE_S)
        inner = aligned(nbytes, seed=seed + 1)
        move(engine, "write", file, start, inner).wait(PATIENCE_S)
        around[start : start + nbytes] = inner
        found = aligned(len(around))
        move(engine, "read", file, 0, found).wait(PATIENCE_S)
        assert np.array_equal(found, around)

    def test_many_at_once(self, build: EngineBuilder, file: File) -> None:
        """Transfers from several threads, all in flight together, do not mix."""
        engine, nbytes, count = build(threads=4), 3 * PIECE_BYTES, 24
        sources = [aligned(nbytes, seed=index) for index in range(count)]
        targets = [aligned(nbytes) for _ in range(count)]
        plan: tuple[tuple[Op, list[Bytes]], ...] = (("write", sources), ("read", targets))
        for op, buffers in plan:
            transfers = move_from_threads(engine, op, file, buffers)
            assert [transfer.wait(PATIENCE_S) for transfer in transfers] == [nbytes] * count
        for source, target in zip(sources, targets, strict=True):
            assert np.array_equal(source, target)

    def test_wait_says_how_much_and_can_be_repeated(self, build: EngineBuilder, file: File) -> None:
        """A settled transfer stays settled."""
        transfer = move(build(), "write", file, 0, aligned(PIECE_BYTES, seed=0))
        assert transfer.wait(PATIENCE_S) == PIECE_BYTES
        assert transfer.wait(0) == PIECE_BYTES
        assert transfer.done
        assert transfer.error is None
        assert not transfer.cancel()

    def test_memory_is_let_go_when_settled(self, build: EngineBuilder, file: File) -> None:
        """Neither the transfer nor an idle worker keeps the source alive."""

        class Owner:
            pass

        gate = GatedSyscalls() if self.takes_syscalls else None
        owner, buffer = Owner(), aligned(PIECE_BYTES, seed=0)
        alive, seen = weakref.ref(owner), list[object]()
        transfer = build(syscalls=gate).submit(request("write", file, 0, buffer, keep_alive=owner))
        del owner
        if gate is not None:
            gate.wait_for_call()
            assert alive() is not None
            transfer.add_done_callback(lambda _: seen.append(alive()))
            gate.open()
        transfer.wait(PATIENCE_S)
        assert alive() is None
        assert gate is None or seen == [None]

    def test_callbacks_run_before_waiters_wake(self, build: EngineBuilder, file: File) -> None:
        """Callbacks added by a callback run too; one that is added after the end runs at once."""
        gate = GatedSyscalls()
        transfer = move(build(syscalls=gate), "write", file, 0, aligned(PIECE_BYTES, seed=0))
        seen: list[str] = []

        def first(_: Transfer) -> None:
            seen.append("first")
            transfer.add_done_callback(lambda _: seen.append("nested"))

        transfer.add_done_callback(first)
        transfer.add_done_callback(lambda _: seen.append("second"))
        gate.open()
        transfer.wait(PATIENCE_S)
        assert seen == ["first", "second", "nested"]
        transfer.add_done_callback(lambda _: seen.append("late"))
        assert seen[-1] == "late"

    # -- misuse -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("field", ["offset_bytes", "address", "nbytes"])
    def test_misaligned_requests_are_refused(
        self, build: EngineBuilder, file: File, field: str
    ) -> None:
        """The error is raised at once and names the field; nothing is moved."""
        buffer, granule = aligned(2 * PIECE_BYTES), file.granule_bytes
        good = request("read", file, 0, buffer)
        bad = [-granule] if field == "offset_bytes" else [-granule, 0]
        bad += [getattr(good, field) + odd for odd in {1, granule // 2} if odd % granule]
        engine = build()
        for value in bad:
            changed: dict[str, Any] = {field: value}
            with pytest.raises(ConfigError, match=field):
                engine.submit(replace(good, **changed))

    def test_reading_past_the_end_fails(self, build: EngineBuilder, file: File) -> None:
        """A read of fewer bytes than requested raises an error."""
        engine = build()
        move(engine, "write", file, 0, aligned(PIECE_BYTES, seed=0)).wait(PATIENCE_S)
        for offset in (0, PIECE_BYTES, 5 * PIECE_BYTES):
            transfer = move(engine, "read", file, offset, aligned(4 * PIECE_BYTES))
            with pytest.raises(ShortTransferError, match="the file ends"):
                transfer.wait(PATIENCE_S)

    # -- order ------------------------------------------------------------------------------------

    def test_priorities_go_first_and_equals_in_order(
        self, build: EngineBuilder, file: File
    ) -> None:
        """The order is demand, prefetch, write-behind, background, and first in, first out in each."""
        gate, order = GatedSyscalls(), [*range(10)]
        engine = build(threads=1, syscalls=gate)
        blocker = move(engine, "write", file, 0, aligned(PIECE_BYTES))
        gate.wait_for_call()
        early, late = (
            [Priority.DEMAND, Priority.PREFETCH],
            [Priority.BACKGROUND, Priority.WRITE_BEHIND],
        )
        wanted = [*late, Priority.PREFETCH, *early] * 2
        transfers = [
            move(
                engine,
                "write",
                file,
                (1 + slot) * PIECE_BYTES,
                aligned(PIECE_BYTES),
                priority=priority,
            )
            for slot, priority in zip(order, wanted, strict=True)
        ]
        gate.open()
        for transfer in (blocker, *transfers):
            transfer.wait(PATIENCE_S)
        served = [call.offset_bytes // PIECE_BYTES - 1 for call in gate.calls[1:]]
        assert served == sorted(order, key=lambda slot: (wanted[slot], slot))

    def test_demand_overtakes_between_pieces(self, build: EngineBuilder, file: File) -> None:
        """A long write-behind does not make a demand wait for more than a piece."""
        gate = GatedSyscalls()
        engine = build(threads=1, syscalls=gate)
        long = move(engine, "write", file, 0, aligned(4 * PIECE_BYTES))
        gate.wait_for_call()
        demand = move(
            engine, "write", file, 9 * PIECE_BYTES, aligned(PIECE_BYTES), priority=Priority.DEMAND
        )
        gate.let_through(2)
        demand.wait(PATIENCE_S)
        assert not long.done
        assert [call.offset_bytes // PIECE_BYTES for call in gate.calls[:2]] == [0, 9]
        gate.open()
        long.wait(PATIENCE_S)

    def test_promotion_moves_what_is_left_up(self, build: EngineBuilder, file: File) -> None:
        """A promoted transfer overtakes; asking for a lower priority changes nothing."""
        gate = GatedSyscalls()
        engine = build(threads=1, syscalls=gate)
        first = move(engine, "write", file, 0, aligned(2 * PIECE_BYTES))
        gate.wait_for_call()
        second = move(engine, "write", file, 2 * PIECE_BYTES, aligned(PIECE_BYTES))
        third = move(engine, "write", file, 3 * PIECE_BYTES, aligned(PIECE_BYTES))
        fourth = move(engine, "write", file, 4 * PIECE_BYTES, aligned(PIECE_BYTES))
        third.promote(Priority.DEMAND)
        third.promote(Priority.WRITE_BEHIND)
        fourth.promote(Priority.DEMAND)
        first.promote(Priority.PREFETCH)
        gate.open()
        for transfer in (first, second, third, fourth):
            transfer.wait(PATIENCE_S)
        third.promote(Priority.DEMAND)  # settled: nothing to move
        assert [call.offset_bytes // PIECE_BYTES for call in gate.calls] == [0, 3, 4, 1, 2]

    def test_cancel_only_what_has_not_started(self, build: EngineBuilder, file: File) -> None:
        """A cancelled transfer never reaches the device; a started one runs to its end."""
        gate = GatedSyscalls()
        engine = build(threads=1, syscalls=gate)
        started = move(engine, "write", file, 0, aligned(2 * PIECE_BYTES))
        gate.wait_for_call()
        waiting = move(engine, "write", file, 4 * PIECE_BYTES, aligned(PIECE_BYTES))
        seen: list[BaseException | None] = []
        waiting.add_done_callback(lambda transfer: seen.append(transfer.error))
        assert not started.cancel()
        assert waiting.cancel()
        assert not waiting.cancel()
        assert [type(error) for error in seen] == [CancelledError]
        with pytest.raises(CancelledError):
            waiting.wait(PATIENCE_S)
        gate.open()
        started.wait(PATIENCE_S)
        assert [call.offset_bytes for call in gate.calls] == [0, PIECE_BYTES]

    def test_none_is_lost_in_a_crowd(self, build: EngineBuilder, file: File) -> None:
        """Each transfer settles exactly once, in any mix of cancelling and promoting."""
        engine, count = build(threads=4), 300
        rng = np.random.default_rng(0)
        settled: list[Transfer] = []
        transfers = []
        for index in range(count):
            length = int(rng.integers(1, 4)) * PIECE_BYTES
            priority = Priority(int(rng.integers(0, 3)))
            offset = index * 4 * PIECE_BYTES
            transfer = move(engine, "write", file, offset, aligned(length), priority=priority)
            transfer.add_done_callback(settled.append)
            transfers.append(transfer)
            chosen = transfers[int(rng.integers(0, len(transfers)))]
            chosen.promote(Priority(int(rng.integers(0, 3))))
            if index % 3 == 0:
                transfers[int(rng.integers(0, len(transfers)))].cancel()
        moved = cancelled = 0
        for transfer in transfers:
            try:
                moved += transfer.wait(PATIENCE_S) == transfer.nbytes
            except CancelledError:
                cancelled += 1
        assert moved + cancelled == count
        assert len(settled) == len(set(map(id, settled))) == count

    def test_a_demand_read_is_served_before_queued_writes(
        self, build: EngineBuilder, file: File
    ) -> None:
        """The read is served first even if it is submitted later."""
        gate = GatedSyscalls()
        engine = build(threads=1, syscalls=gate)
        first = move(engine, "write", file, 0, aligned(PIECE_BYTES, seed=1))
        gate.wait_for_call()
        writes = [
            move(engine, "write", file, (1 + index) * PIECE_BYTES, aligned(PIECE_BYTES))
            for index in range(4)
        ]
        target = aligned(PIECE_BYTES)
        read = move(engine, "read", file, 0, target, priority=Priority.DEMAND)
        gate.let_through(2)
        read.wait(PATIENCE_S)
        assert np.array_equal(target, aligned(PIECE_BYTES, seed=1))
        assert not any(write.done for write in writes)
        gate.open()
        for transfer in (first, *writes):
            transfer.wait(PATIENCE_S)

    # -- faults -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("op", ["write", "read"])
    @pytest.mark.parametrize("index", range(5))
    @pytest.mark.parametrize("errno", [errnos.EIO, errnos.ENOSPC])
    def test_an_errno_at_every_index(
        self, build: EngineBuilder, file: File, op: Op, index: int, errno: int
    ) -> None:
        """The error has all details, and the engine continues to work."""
        self._fill(build, file, 5)
        engine = build(syscalls=FaultySyscalls({index: Fail(errno)}))
        with pytest.raises(TransferError) as caught:
            move(engine, op, file, 0, aligned(5 * PIECE_BYTES)).wait(PATIENCE_S)
        error = caught.value
        assert isinstance(error, NoSpaceError) == (errno == errnos.ENOSPC)
        assert (error.errno, error.op, error.path) == (errno, op, file.path)
        assert error.offset_bytes in range(0, 5 * PIECE_BYTES, PIECE_BYTES)
        assert (error.nbytes, error.moved_bytes) == (PIECE_BYTES, 0)
        assert error.free_bytes > 0
        roundtrip(engine, file, 0, 5 * PIECE_BYTES)

    @pytest.mark.parametrize("op", ["write", "read"])
    @pytest.mark.parametrize("index", range(5))
    @pytest.mark.parametrize(
        "fault",
        [
            Short(1),
            Short(4096),
            Short(4097),
            Short(PIECE_BYTES - 1),
            Fail(errnos.EINTR),
            Fail(errnos.EAGAIN),
        ],
        ids=str,
    )
    def test_a_short_or_interrupted_call_is_continued(
        self, build: EngineBuilder, file: File, op: Op, index: int, fault: Fault
    ) -> None:
        """The call is continued at every index, and from a granule for a direct file."""
        content = self._fill(build, file, 5)
        syscalls = FaultySyscalls({index: fault})
        engine = build(syscalls=syscalls)
        buffer = aligned(5 * PIECE_BYTES, seed=3 if op == "write" else None)
        assert move(engine, op, file, 0, buffer).wait(PATIENCE_S) == 5 * PIECE_BYTES
        assert len(syscalls.calls) == 6
        found = aligned(5 * PIECE_BYTES)
        move(engine, "read", file, 0, found).wait(PATIENCE_S)
        assert np.array_equal(found, buffer)
        assert op == "write" or np.array_equal(found, content)

    @pytest.mark.parametrize("op", ["write", "read"])
    @pytest.mark.parametrize("index", range(3))
    def test_a_call_that_moves_nothing_fails(
        self, build: EngineBuilder, file: File, op: Op, index: int
    ) -> None:
        """Zero bytes do not count as success, and are not requested for ever."""
        self._fill(build, file, 3)
        engine = build(syscalls=FaultySyscalls({index: Short(0)}))
        with pytest.raises(ShortTransferError):
            move(engine, op, file, 0, aligned(3 * PIECE_BYTES)).wait(PATIENCE_S)

    def test_always_short_still_arrives(self, build: EngineBuilder, file: File) -> None:
        """A transfer succeeds if each call moves something, however little."""
        engine = build(syscalls=FaultySyscalls(every=Short(file.granule_bytes + 1000)))
        roundtrip(engine, file, 0, 3 * PIECE_BYTES)

    def test_an_unforeseen_exception_reaches_the_waiter(
        self, build: EngineBuilder, file: File
    ) -> None:
        """No request is lost with its worker, and no worker with its request."""
        crash = RuntimeError("no system call raises this")
        engine = build(threads=1, syscalls=FaultySyscalls({1: Crash(crash)}))
        with pytest.raises(RuntimeError, match="no system call"):
            move(engine, "write", file, 0, aligned(3 * PIECE_BYTES)).wait(PATIENCE_S)
        roundtrip(engine, file, 0, 3 * PIECE_BYTES)

    def test_a_failure_settles_when_no_piece_is_running(
        self, build: EngineBuilder, file: File
    ) -> None:
        """Memory is not touched after the transfer settles; pieces after a failure never begin.

        The first failure is reported.
        """
        failing = FaultySyscalls({0: Fail(errnos.EIO), 1: Fail(errnos.ENOSPC)})
        gate = GatedSyscalls(inner=failing)
        transfer = move(build(syscalls=gate), "write", file, 0, aligned(5 * PIECE_BYTES))
        gate.wait_for_call()
        gate.wait_for_call()
        gate.let_through()  # fails, while the second piece is still in flight
        with pytest.raises(TimeoutError):
            transfer.wait(0.05)
        gate.open()
        with pytest.raises(TransferError) as caught:
            transfer.wait(PATIENCE_S)
        assert caught.value.errno == errnos.EIO
        assert len(gate.calls) == 2

    # -- the end ----------------------------------------------------------------------------------

    def test_close_finishes_what_began_and_cancels_the_rest(
        self, build: EngineBuilder, file: File
    ) -> None:
        """Closing is idempotent; afterwards nothing can be submitted."""
        gate = GatedSyscalls()
        engine = build(threads=1, syscalls=gate)
        began = move(engine, "write", file, 0, aligned(2 * PIECE_BYTES))
        gate.wait_for_call()
        waiting = move(engine, "write", file, 4 * PIECE_BYTES, aligned(PIECE_BYTES))
        closer = threading.Thread(target=engine.close)
        closer.start()
        with pytest.raises(CancelledError):
            waiting.wait(PATIENCE_S)
        assert not began.done
        gate.open()
        closer.join(PATIENCE_S)
        assert began.wait(PATIENCE_S) == 2 * PIECE_BYTES
        engine.close()
        with pytest.raises(ClosedError):
            move(engine, "read", file, 0, aligned(PIECE_BYTES))

    def test_close_without_any_transfer(self, build: EngineBuilder, file: File) -> None:
        """Closing works before any transfer has started; afterwards nothing can be submitted."""
        engine = build()
        engine.close()
        with pytest.raises(ClosedError):
            move(engine, "read", file, 0, aligned(PIECE_BYTES))

    def test_an_engine_that_is_dropped_stops_its_threads(self, tmp_path: Path) -> None:
        """Garbage collection stops the threads without ``close``."""
        file = self.make_file(tmp_path)
        before = threading.active_count()
        engine = self.make_engine(threads=2, piece_bytes=PIECE_BYTES, syscalls=None)
        move(engine, "write", file, 0, aligned(4 * PIECE_BYTES)).wait(PATIENCE_S)
        del engine
        gc.collect()
        deadline = time.monotonic() + PATIENCE_S
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.005)
        assert threading.active_count() <= before

    def test_no_thread_to_be_had_loses_no_request(
        self, build: EngineBuilder, file: File, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The request fails if no thread can be started, and the next one is served."""
        engine = build()
        with _no_threads(monkeypatch):
            transfer = move(engine, "write", file, 0, aligned(PIECE_BYTES))
            with pytest.raises(RuntimeError, match="new thread"):
                transfer.wait(PATIENCE_S)
        move(engine, "write", file, 0, aligned(PIECE_BYTES)).wait(PATIENCE_S)

    def test_once_started_it_needs_no_other_thread(
        self, build: EngineBuilder, file: File, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A started engine works when no thread can be started any more, as at the end of a program."""
        engine = build()
        with _no_threads(monkeypatch), pytest.raises(RuntimeError, match="new thread"):
            engine.start()
        engine.start()
        engine.start()
        with _no_threads(monkeypatch):
            roundtrip(engine, file, 0, 5 * PIECE_BYTES)

    def test_close_from_a_callback(self, build: EngineBuilder, file: File) -> None:
        """A worker does not wait for itself."""
        engine = build()
        transfer = move(engine, "write", file, 0, aligned(PIECE_BYTES))
        transfer.add_done_callback(lambda _: engine.close())
        transfer.wait(PATIENCE_S)
        engine.close()

    def test_a_forked_child_is_refused(self, build: EngineBuilder, file: File) -> None:
        """A child cannot submit, cancel and close return there, and nothing hangs (TRAPS rule 24)."""
        gate = GatedSyscalls()
        engine = build(threads=1, syscalls=gate)
        buffer = aligned(2 * PIECE_BYTES, seed=0)
        transfer = move(engine, "write", file, 0, buffer)
        waiting = move(engine, "write", file, 0, buffer)
        gate.wait_for_call()

        def child() -> None:
            try:
                move(engine, "read", file, 0, aligned(PIECE_BYTES))
            except ClosedError:
                waiting.promote(Priority.DEMAND)
                assert not waiting.cancel()  # it belongs to the parent
                engine.close()
                return
            raise AssertionError("the child could submit")

        run_in_fork(child)
        gate.open()
        for mine in (transfer, waiting):
            assert mine.wait(PATIENCE_S) == len(buffer)

    def test_an_idle_engine_costs_nothing(self, build: EngineBuilder, file: File) -> None:
        """Idle workers block and do not poll."""
        engine = build(threads=4)
        roundtrip(engine, file, 0, 8 * PIECE_BYTES)

        def spent_ns() -> int:
            before = time.process_time_ns()
            time.sleep(0.1)
            return time.process_time_ns() - before

        assert any(spent_ns() < 2_000_000 for _ in range(10))

    def _fill(self, build: EngineBuilder, file: File, pieces: int) -> Bytes:
        content = aligned(pieces * PIECE_BYTES, seed=7)
        move(build(), "write", file, 0, content).wait(PATIENCE_S)
        return content
