"""A stage that encodes, over a tier, and the tiers and codecs that stand still when a test says so."""

import threading
from contextlib import suppress

import numpy as np
import torch

from penstock.core.units import KIB, MIB
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.encoding import open_host_stage
from penstock.runtime.movers import CpuMover
from penstock.runtime.storage import Encoding
from penstock.store import HostTier, WrapperTier
from penstock.store.account import Account
from penstock.store.arena import Arena

SCRATCH = 80 * KIB
PIECE = 4096
"""What a piece is with so little scratch memory."""
FLOATS = Encoding("zero-value", "float32")
PATIENCE_S = 60


def storage_of(content, skew=0):
    """A storage with these bytes that begins ``skew`` bytes behind a multiple of 64."""
    room = np.zeros(len(content) + 128, np.uint8)
    begin = -room.ctypes.data % 64 + skew
    room[begin : begin + len(content)] = np.frombuffer(bytes(content), np.uint8)
    return torch.from_numpy(room[begin : begin + len(content)]).untyped_storage()


def bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def floats(nbytes, seed=0):
    """Bytes of float32, half of them zero."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(-(-nbytes // 4)).astype(np.float32)
    values[random.random(values.size) < 0.5] = 0
    return values.tobytes()[:nbytes]


class Rig:
    """Stage, mover and tier, with a budget that must never be exceeded."""

    def __init__(
        self, *, tier=None, wrap=None, budget=64 * MIB, scratch=SCRATCH, capacity=16 * MIB
    ):
        self.recorder = Recorder()
        self.budget = Account(budget)
        self.arena = Arena(capacity)
        self.base = tier or HostTier(self.arena, capacity_bytes=capacity, recorder=self.recorder)
        self.tier = wrap(self.base) if wrap else self.base
        self.mover = CpuMover(budget=self.budget)
        self.stage = open_host_stage(
            self.mover,
            scratch_bytes=scratch,
            budget=self.budget,
            recorder=self.recorder,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.stage.close()
        self.tier.close()
        self.arena.close()
        assert self.budget.peak_bytes <= self.budget.limit_bytes

    def begin(self, content, *, skew=0, encoding=FLOATS, label="slot"):
        """Begin to write; the ticket."""
        return self.stage.write(storage_of(content, skew), self.tier, label, encoding)

    def written(self, content, **options):
        """Write and wait; the ticket."""
        ticket = self.begin(content, **options)
        ticket.written.wait(PATIENCE_S)
        return ticket

    def reading(self, ticket, priority=Priority.PREFETCH):
        """Begin to read; the target and the transfer."""
        target = self.mover.allocate(ticket)
        assert target is not None
        return target, self.stage.read(self.tier, ticket, target, priority)

    def restored(self, ticket):
        """Read and wait; the storage."""
        target, transfer = self.reading(ticket)
        transfer.wait(PATIENCE_S)
        return self.mover.finish(target)

    def free_slots(self):
        """How many there are now."""
        return len(self.stage._scratch._free)

    def discard(self, *tickets):
        for ticket in tickets:
            self.stage.discard(self.tier, ticket)


def outcome(transfer):
    """Wait for a transfer; its error."""
    with suppress(BaseException):
        transfer.wait(PATIENCE_S)
    assert transfer.done, "not settled"
    return transfer.error


class GateTier(WrapperTier):
    """Transfers are made, but settle when they are let through; the others can be cancelled.

    Attributes:
        held: What stands at the gate, in order: op and transfer.
        promoted: What was said to transfers that stood there.
        before_read: Called by each read, in whichever thread that is.
    """

    def __init__(self, inner, *, ops=("write", "read"), cancellable=True):
        super().__init__(inner)
        self._ops = set(ops)
        self._cancellable = cancellable
        self._change = threading.Condition()
        self.held = []
        self.promoted = []
        self.before_read = lambda: None

    def _write(self, place, address, nbytes, keep_alive, priority):
        return self._hold("write", self.inner._write(place, address, nbytes, keep_alive, priority))

    def _read(self, place, address, nbytes, keep_alive, priority):
        self.before_read()
        return self._hold("read", self.inner._read(place, address, nbytes, keep_alive, priority))

    def _hold(self, op, inner):
        with self._change:
            if op not in self._ops:
                return inner
            inner.wait(PATIENCE_S)
            outer = Transfer(
                inner.nbytes,
                cancel=lambda transfer: self._cancellable and self._take(transfer),
                promote=lambda _, priority: self.promoted.append(priority),
            )
            self.held.append((op, outer))
            self._change.notify_all()
            return outer

    def _take(self, transfer):
        with self._change:
            before = len(self.held)
            self.held = [each for each in self.held if each[1] is not transfer]
            return len(self.held) < before

    def wait_for(self, count):
        """Until so many stand at the gate."""
        with self._change:
            assert self._change.wait_for(lambda: len(self.held) >= count, PATIENCE_S), self.held

    def let_through(self, count=1, *, which=0):
        for _ in range(count):
            with self._change:
                _, transfer = self.held.pop(which)
            transfer.settle()

    def open(self):
        """Let all through, now and later."""
        with self._change:
            self._ops.clear()
            held, self.held = self.held, []
        for _, transfer in held:
            transfer.settle()


class GatedCodec:
    """A codec that waits before each piece, and writes down what it did."""

    def __init__(self, inner):
        self._inner = inner
        self._tokens = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._open = False
        self.name = inner.name
        self.log = []
        self.error = None

    def spec(self, dtype, nbytes):
        return self._inner.spec(dtype, nbytes)

    def encode(self, source, out, *, dtype):
        self._pass("encode")
        return self._inner.encode(source, out, dtype=dtype)

    def decode(self, frame, out, *, dtype=None):
        self._pass("decode")
        self._inner.decode(frame, out, dtype=dtype)

    def _pass(self, what):
        self.log.append(what)
        self._arrived.release()
        if not self._open:
            assert self._tokens.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error

    def wait_for_call(self):
        """Until one more stands before its piece."""
        assert self._arrived.acquire(timeout=PATIENCE_S)

    def let_through(self, count=1):
        self._tokens.release(count)

    def open(self):
        self._open = True
        self._tokens.release(10_000)
