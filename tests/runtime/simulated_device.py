"""A device that runs behind the interpreter, in one thread and as unluckily as a schedule says.

Its memory is host memory that is never unmapped, and its copies know addresses, not tensors. So what
is forgotten in the order of things shows as wrong bytes: a copy that does not wait reads what has not
been written yet, memory that is freed too soon belongs to the next tensor at once. ``broken`` leaves
one thing out, to see that the tests notice.

It has a time of its own: a stream does one thing after the other, nothing before the host has told it
to, and each takes as long as it was said to. The host's clock is a ``ManualClock``, and waits move it.
"""

import ctypes
import errno
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from penstock.core.errors import NoSpaceError, TransferError
from penstock.io.engine import Transfer
from penstock.observe.clock import ManualClock
from penstock.runtime.cuda.digest import DIGEST_BYTES, digest_of
from penstock.store.base import Tier, TierSpec

DEVICE = torch.device("cpu")
COPY_NS = 1000
"""How long any copy takes."""
IDLE_NS = 1_000_000
"""How long a stream does nothing that is told to."""


class Schedule:
    """Decisions from a string of bytes; when it has run out, always the first choice."""

    def __init__(self, decisions=b""):
        self._decisions = iter(decisions)
        self.spent = False

    def pick(self, choices):
        choices = list(choices)
        byte = next(self._decisions, None)
        self.spent = byte is None
        return choices[(byte or 0) % len(choices)]


class SimEvent:
    def __init__(self, timed):
        self.timed = timed
        self.reached = False
        self.idle = False
        self.at_ns = 0
        """When it was reached."""


class SimStream:
    def __init__(self, name, clock=None):
        self.name = name
        self.queue = deque()
        self.now_ns = 0
        """When the last thing was done."""
        self._clock = clock or ManualClock()

    def put(self, kind, what, takes_ns=0):
        self.queue.append((kind, what, self._clock.now_ns(), takes_ns))

    def __repr__(self):
        return self.name

    @property
    def runnable(self):
        """Whether the device can do what is at the head of the queue."""
        if not self.queue:
            return False
        kind, what, *_ = self.queue[0]
        return kind != "wait" or what.reached

    def step(self):
        kind, what, told_ns, takes_ns = self.queue.popleft()
        self.now_ns = max(self.now_ns, told_ns) + takes_ns
        if kind == "run":
            what()
        elif kind == "record":
            what.reached, what.at_ns = True, self.now_ns
        else:
            self.now_ns = max(self.now_ns, what.at_ns)


class SimLink:
    """See the module; the link that movers use, and ``launch`` and ``step`` for the test's own."""

    def __init__(self, schedule=None, *, broken="", refusal="", clock=None):
        self.schedule = schedule or Schedule()
        self.broken = broken
        self.refusal = refusal
        self.adopted = []
        self.clock = clock or ManualClock()
        self.streams = []
        self.current = self.stream("compute-0")
        self.is_capturing = False
        self.captured = set()
        self.out_of_memory = False
        self.pinned = {}
        self.live = 0
        self._memory = []
        self._pools = {}
        self._kept = {}
        self._limbo = []

    # -- for the test -----------------------------------------------------------------------------

    def stream(self, name):
        self.streams.append(SimStream(name, self.clock))
        return self.streams[-1]

    def launch(self, kernel=lambda: None, takes_ns=0):
        """Enqueue a kernel on the current stream."""
        self.current.put("run", kernel, takes_ns)

    def step(self):
        """Let the device do one thing; False if there is none that it can do."""
        runnable = [stream for stream in self.streams if stream.runnable]
        if not runnable:
            return False
        self.schedule.pick(runnable).step()
        return True

    def finish(self):
        """Let the device do all there is."""
        while self.step():
            pass
        assert not any(stream.queue for stream in self.streams), "the device is deadlocked"

    # -- for the mover ----------------------------------------------------------------------------

    def adopt_thread(self, device):
        self.adopted.append((threading.current_thread().name, device))

    def current_stream(self, device):
        assert device == DEVICE
        return self.current

    @contextmanager
    def within(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy_stream(self, device):
        return self.stream(f"copy-{len(self.streams)}")

    def record(self, stream, *, timed=False):
        assert stream not in self.captured, "an event that is a node of a graph"
        event = SimEvent(timed)
        stream.put("record", event)
        return event

    def reuse(self, event):
        assert not event.idle, "twice"
        event.idle = True

    def wait(self, stream, event):
        assert not event.idle
        kind = stream.name.split("-")[0]
        if self.broken != f"{kind} streams do not wait":
            stream.put("wait", event)

    def idle(self, stream):
        stream.put("run", lambda: None, IDLE_NS)

    def reached(self, event):
        assert not event.idle
        return event.reached

    def synchronize(self, event):
        assert not event.idle
        while not event.reached:
            if self.broken == "the host does not wait":
                return
            assert self.step(), "the device is deadlocked"
        self.clock.advance(max(0, event.at_ns - self.clock.now_ns()))

    def elapsed_ns(self, start, end):
        for event in (start, end):
            assert not event.idle
            assert event.timed, "an event that tells no time"
            assert event.reached or self.broken, "an event that has not been reached"
        return end.at_ns - start.at_ns

    def empty(self, nbytes, device):
        return self._empty(nbytes, "torch's")

    def empty_target(self, nbytes, device):
        return self._empty(nbytes, "targets")

    def _empty(self, nbytes, whose):
        if self.out_of_memory:
            raise torch.OutOfMemoryError("simulated")
        self._reclaim()
        pool = self._pools.setdefault((whose, self.current, nbytes), [])
        memory = pool.pop() if pool else np.zeros(nbytes, np.uint8)
        self._memory.append(memory)
        self.live += 1
        array = memory[:]
        weakref.finalize(array, self._freed, memory, self.current, whose)
        return torch.from_numpy(array).untyped_storage()

    def begin_pass(self):
        pass

    def frees(self, storage):
        return True

    def keep(self, storage, stream):
        if self.broken != "nothing is kept":
            self._kept.setdefault(storage.data_ptr(), set()).add(stream)

    def copy_out(self, stream, source, address):
        move = partial(ctypes.memmove, address, source.data_ptr(), source.nbytes())
        stream.put("run", move, COPY_NS)

    def copy_in(self, stream, target, address):
        move = partial(ctypes.memmove, target.data_ptr(), address, target.nbytes())
        stream.put("run", move, COPY_NS)

    def digest(self, stream, source, address):
        """Of what is at the storage's address when the stream comes to it."""
        memory, nbytes = source.data_ptr(), source.nbytes()

        def make():
            found = digest_of(
                torch.frombuffer(bytearray(ctypes.string_at(memory, nbytes)), dtype=torch.uint8)
            )
            ctypes.memmove(address, found.data_ptr(), DIGEST_BYTES)

        stream.put("run", make)
        self.synchronize(self.record(stream))

    def capturing(self, stream=None):
        return self.is_capturing if stream is None else stream in self.captured

    def pin(self, address, nbytes, device):
        if not self.refusal:
            self.pinned[address] = nbytes
        return self.refusal

    def unpin(self, address, device):
        del self.pinned[address]

    # -- the allocator ----------------------------------------------------------------------------

    def _freed(self, memory, stream, whose):
        """As torch's: at once free for the stream it was allocated on, later if others were named."""
        self.live -= 1
        others = self._kept.pop(memory.ctypes.data, set()) - {stream}
        events = [self.record(other) for other in others]
        self._limbo.append((events, memory, (whose, stream)))
        self._reclaim()

    def _reclaim(self):
        waiting = []
        for events, memory, place in self._limbo:
            if all(event.reached for event in events):
                self._pools.setdefault((*place, memory.nbytes), []).append(memory)
            else:
                waiting.append((events, memory, place))
        self._limbo = waiting


class SimFlash(Tier):
    """A tier whose transfers end when the test says so, in any order, and then move their bytes.

    If it is GPU-direct, addresses are those of the simulated device's memory, and what the device does
    with that meanwhile shows.
    """

    def __init__(self, recorder, *, capacity_bytes=1 << 30, gpu_direct=False):
        spec = TierSpec(
            name="flash",
            kind="flash",
            capacity_bytes=capacity_bytes,
            granule_bytes=1 if gpu_direct else 512,
            where="a simulated disk",
            gpu_direct=gpu_direct,
        )
        super().__init__(spec, recorder=recorder)
        self.pending = []
        self.fails = lambda op: None
        self.full = False
        self.places = 0

    def _allocate(self, nbytes):
        if self.full:
            raise NoSpaceError(
                errno=errno.ENOSPC, op="write", path="sim", offset_bytes=0, nbytes=nbytes
            )
        self.places += 1
        return np.zeros(nbytes, np.uint8)

    def _write(self, place, address, nbytes, keep_alive, priority):
        return self._enqueue("write", place.ctypes.data, address, nbytes, priority)

    def _read(self, place, address, nbytes, keep_alive, priority):
        return self._enqueue("read", address, place.ctypes.data, nbytes, priority)

    def _discard(self, place):
        self.places -= 1

    def _close(self):
        pass

    def _enqueue(self, op, target, source, nbytes, priority):
        transfer = Transfer(nbytes, cancel=self._cancel, promote=self._promote)
        self.pending.append([transfer, op, target, source, nbytes, priority])
        return transfer

    def _cancel(self, transfer):
        found = [entry for entry in self.pending if entry[0] is transfer]
        for entry in found:
            self.pending.remove(entry)
        return bool(found)

    def _promote(self, transfer, priority):
        for entry in self.pending:
            if entry[0] is transfer:
                entry[5] = min(entry[5], priority)

    def end(self, entry=None):
        """End a transfer: the first one, or the one given."""
        entry = entry or self.pending[0]
        self.pending.remove(entry)
        transfer, op, target, source, nbytes, _ = entry
        error = self.fails(op)
        if error is None:
            ctypes.memmove(target, source, nbytes)
        transfer.settle(error)

    def finish(self):
        while self.pending:
            self.end()


def io_error(op):
    return TransferError(errno=errno.EIO, op=op, path="sim", offset_bytes=0, nbytes=0)
