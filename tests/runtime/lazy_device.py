"""A device of which only the copies run behind the interpreter, late, in threads of their own.

Operators of torch run at once, on the CPU. So a whole session trains on it, and what is used before it
was copied, or freed before it was copied, shows as wrong gradients.

Its time is not the host's: only ``work`` takes some, as much as it says, and so do copies.
"""

import ctypes
import queue
import random
import threading
import time
from contextlib import contextmanager

import torch

from penstock.core.config import UNLIMITED
from penstock.runtime.allowance import Allocated
from penstock.runtime.cuda.digest import DIGEST_BYTES, digest_of

COPY_NS = 1000
"""How long any copy takes, by the device's time."""
WAIT_NS = 77_000_000
"""How long it waits for a copy, if that has not ended when the host comes to the wait."""


class LazyEvent(threading.Event):
    def __init__(self, of, at_ns):
        super().__init__()
        self.of = of
        self.at_ns = at_ns
        """By the device's time; ``None`` on a stream for copies, or if it tells no time."""


class LazyStream(threading.Thread):
    def __init__(self, name, seed, most_delay_s):
        super().__init__(name=name, daemon=True)
        self.work = queue.SimpleQueue()
        self._random = random.Random(seed)
        self._most_delay_s = most_delay_s
        self.start()

    def run(self):
        while (what := self.work.get()) is not None:
            time.sleep(self._random.random() * self._most_delay_s)
            what()


class LazyLink:
    """The link that a CUDA mover uses.

    Attributes:
        current: The current stream, by any name: of those that are no copy streams, all run at once.
    """

    NOW = "the interpreter itself"

    def __init__(self, *, refusal="", most_delay_s=0.001, seed=0):
        self.refusal = refusal
        self.adopted = []
        self.is_capturing = False
        self.graph_sizes = ()  # of storages that count as memory of a CUDA graph
        self._base = self.NOW
        self.copied_bytes = {"out": 0, "in": 0}
        self.pinned = set()
        self.waits = 0
        self.host_waits = 0
        """How often the interpreter waited for what it had enqueued itself."""
        self.now_ns = 0
        self.memory_bytes = UNLIMITED * 2
        self.others_bytes = 0
        self._allocated = Allocated(0, 0, 0)
        self.charged_bytes = lambda: 0
        self._most_delay_s = most_delay_s
        self._seed = seed
        self._streams = []
        self._within = threading.local()

    def end(self):
        for stream in self._streams:
            stream.work.put(None)
            stream.join(5)

    def adopt_thread(self, device):
        self.adopted.append((threading.current_thread().name, device))

    def work(self, ns):
        """The stream of the interpreter is busy for so long."""
        self.now_ns += ns

    def idle(self, stream):
        """It does not take the device long to do nothing."""

    @property
    def current(self):
        return getattr(self._within, "stream", self._base)

    @current.setter
    def current(self, stream):
        self._base = stream

    def current_stream(self, device):
        return self.current

    @contextmanager
    def within(self, stream):
        """Operators of torch run at once, so a stream for copies first does what it was told before."""
        before = getattr(self._within, "stream", None)
        if isinstance(stream, LazyStream):
            torch.set_num_threads(1)  # of this thread: little tensors are computed quicker by one
            self.synchronize(self.record(stream))
        self._within.stream = stream
        try:
            yield
        finally:
            if before is None:
                del self._within.stream
            else:
                self._within.stream = before

    def copy_stream(self, device):
        self._seed += 1
        self._streams.append(LazyStream(f"lazy-{self._seed}", self._seed, self._most_delay_s))
        return self._streams[-1]

    def record(self, stream, *, timed=False):
        event = LazyEvent(stream, self.now_ns if timed and isinstance(stream, str) else None)
        self._enqueue(stream, event.set)
        return event

    def reuse(self, event):
        pass

    def wait(self, stream, event):
        if isinstance(stream, str):
            if not event.is_set():
                self.waits += 1
                self.work(WAIT_NS)
            assert event.wait(10), "a copy does not end"
        else:
            stream.work.put(lambda: event.wait(10))

    def reached(self, event):
        return event.is_set()

    def synchronize(self, event):
        self.host_waits += isinstance(event.of, str)
        assert event.wait(10), "a copy does not end"

    def elapsed_ns(self, start, end):
        if not isinstance(start.of, str):
            return COPY_NS
        return end.at_ns - start.at_ns

    def empty(self, nbytes, device):
        storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        ctypes.memset(storage.data_ptr(), 0xFF, nbytes)  # a NaN in every floating-point type
        return storage

    def empty_target(self, nbytes, device):
        return self.empty(nbytes, device)

    def begin_pass(self):
        pass

    def frees(self, storage):
        return storage.nbytes() not in self.graph_sizes

    def keep(self, storage, stream):
        pass

    def copy_out(self, stream, source, address):
        self._copy("out", stream, address, source.data_ptr(), source.nbytes())

    def copy_in(self, stream, target, address):
        self._copy("in", stream, target.data_ptr(), address, target.nbytes())

    def digest(self, stream, source, address):
        memory, nbytes = source.data_ptr(), source.nbytes()

        def make():
            data = (ctypes.c_ubyte * nbytes).from_address(memory)
            found = digest_of(torch.frombuffer(data, dtype=torch.uint8))
            ctypes.memmove(address, found.data_ptr(), DIGEST_BYTES)

        self._enqueue(stream, make)
        self.synchronize(self.record(stream))

    def usable_bytes(self, device):
        return self.memory_bytes

    def allocated(self, device):
        """What the test says that the program has beside what is charged."""
        now = self.others_bytes + self.charged_bytes()
        last = self._allocated
        ever = last.ever + max(0, now - last.now)
        self._allocated = Allocated(now, max(last.peak, now), ever)
        return self._allocated

    def capturing(self, stream=None):
        return self.is_capturing and stream is None

    def pin(self, address, nbytes, device):
        if not self.refusal:
            self.pinned.add(address)
        return self.refusal

    def unpin(self, address, device):
        self.pinned.remove(address)

    def _copy(self, direction, stream, target, source, nbytes):
        self.copied_bytes[direction] += nbytes
        if isinstance(stream, str):
            self.work(COPY_NS)
        self._enqueue(stream, lambda: ctypes.memmove(target, source, nbytes))

    def _enqueue(self, stream, what):
        if isinstance(stream, str):
            what()
        else:
            stream.work.put(what)
