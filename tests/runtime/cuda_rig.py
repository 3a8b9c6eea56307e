"""A mover on a simulated device, and what a training loop would do with it."""

import threading

import numpy as np
from simulated_device import DEVICE, SimFlash, SimLink

from penstock.core.units import KIB
from penstock.io.engine import Priority
from penstock.observe.recorder import Recorder
from penstock.runtime.cuda.direct import DirectMover
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.cuda.pinned import Slab
from penstock.runtime.movers import RESTORED
from penstock.store.account import Account
from penstock.store.base import TierSpec


class HostSpec:
    """All that a CUDA mover asks of the host tier: whose bytes are its own to keep."""

    spec = TierSpec(
        name="host", kind="host", capacity_bytes=1 << 30, granule_bytes=1, where="host memory"
    )


class Rig:
    """Mover, tiers and device; threads only if ``threaded``, else ``settle`` does their work.

    If it is ``direct``, flash is GPU-direct, and there is no staging.
    """

    def __init__(
        self,
        link=None,
        *,
        staging=64 * KIB,
        host=64 * KIB,
        budget=1 << 30,
        threaded=False,
        direct=False,
    ):
        self.link = link or SimLink()
        self.recorder = Recorder()
        self.budget = Account(budget)
        self.works = []
        start = self._start if threaded else lambda work, name: self.works.append(work)
        self.host_budget = Account(1 << 30, name="host")
        self.staging = self._slab(0 if direct else staging, "staging", start)
        self.host = self._slab(host, "host tier", start)
        self.flash = SimFlash(self.recorder, gpu_direct=direct)
        self.host_tier = HostSpec()
        self.mover = (DirectMover if direct else CudaMover)(
            device=DEVICE,
            budget=self.budget,
            recorder=self.recorder,
            link=self.link,
            staging=self.staging,
            host=self.host,
            start_thread=start,
        )

    def _slab(self, nbytes, name, start):
        if not nbytes:
            return None
        return Slab(
            nbytes,
            link=self.link,
            device=DEVICE,
            budget=self.host_budget,
            name=name,
            start_thread=start,
        )

    @staticmethod
    def _start(work, name):
        threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def slabs(self):
        return [slab for slab in (self.staging, self.host) if slab is not None]

    def counters(self):
        return self.recorder.snapshot().counters

    # -- what a training loop does ----------------------------------------------------------------

    def tensor(self, number, nbytes, producer=None):
        """A storage that a kernel on the current stream fills with a pattern.

        With a ``producer`` that stream allocates and fills it, and the current one waits for that.
        """
        reader = self.link.current
        self.link.current = producer or reader
        storage = self.link.empty(nbytes, DEVICE)
        address, pattern = storage.data_ptr(), pattern_of(number, nbytes)
        self.link.launch(lambda: _poke(address, pattern))
        if producer not in (None, reader):
            self.link.wait(reader, self.link.record(producer))
        self.link.current = reader
        self.mover.use(storage)
        return storage

    def scratch(self, nbytes):
        """A kernel that fills a tensor of its own, which is freed at once."""
        storage = self.link.empty(nbytes, DEVICE)
        address = storage.data_ptr()
        self.link.launch(lambda: _poke(address, np.full(nbytes, 0xEE, np.uint8)))

    def check(self, storage, number, wrong):
        """A kernel on the current stream that looks whether the bytes are right."""
        address, pattern = storage.data_ptr(), pattern_of(number, storage.nbytes())
        self.mover.use(storage)
        self.link.launch(lambda: None if _peek(address, pattern) else wrong.append(number))

    def spill(self, number, nbytes, tier=None):
        """A ticket for a new tensor, to which nobody else refers."""
        return self.mover.write(self.tensor(number, nbytes), tier or self.flash, f"slot {number}")

    def fetch(self, ticket, priority=Priority.DEMAND):
        """Target and transfer of a read that has begun."""
        target = self.mover.allocate(ticket)
        return target, self.mover.read(ticket.tier, ticket, target, priority)

    def restored(self, ticket):
        """The storage, however long it takes."""
        target, transfer = self.fetch(ticket)
        self.settle()
        transfer.wait(1)
        return self.mover.finish(target)

    def bytes_of(self, ticket):
        """What comes back, once the device is done."""
        storage = self.restored(ticket)
        self.mover.use(storage)
        self.link.finish()
        return bytes(storage)

    # -- what threads would do --------------------------------------------------------------------

    def serve(self):
        """One thing that a thread of the mover would do next; False if there is none."""
        lanes = [lane for lane in self.mover._lanes.all() if lane._flying]
        for server in self.link.schedule.pick([[*lanes, *self.slabs], [*self.slabs, *lanes]]):
            if server.serve(wait=False):
                return True
        return False

    def settle(self):
        """Let everything that is under way come to its end."""
        while self.serve() or self.flash.pending or self.link.step():
            if self.flash.pending:
                self.flash.end()
        self.link.finish()

    def close(self):
        """End what is under way, then close."""
        self.settle()
        self.flash.close()
        self.mover._lanes.stop()
        for work in self.works:
            work_ends = threading.Thread(target=work, daemon=True)
            work_ends.start()
        self.mover.close()

    def close_flash_first(self):
        """As a session does, in the middle of things."""
        for entry in list(self.flash.pending):
            entry[0].cancel()
        self.flash.close()
        for work in self.works:
            threading.Thread(target=work, daemon=True).start()
        self.mover.close()


def check_all_given_back(rig):
    """After every ticket was discarded and every storage dropped, and before ``close``."""
    assert [slab.used_bytes for slab in rig.slabs] == [0] * len(rig.slabs)
    assert [slab._moving for slab in rig.slabs] == [0] * len(rig.slabs)
    assert rig.budget.used_by(RESTORED) == 0
    assert rig.link.live == 0
    assert rig.flash.places == 0
    assert set(rig.mover._out._promised.values()) <= {0}
    assert not len(rig.mover._table)


def state_of(ticket):
    """Place of a ticket's bytes."""
    if not ticket.written.done:
        return "queued" if ticket.buffer is None and ticket.on_flash is None else "copying"
    if ticket.discarded or ticket.written.error is not None:
        return "gone"
    return "on flash" if ticket.buffer is None else "staged"


def pattern_of(number, nbytes):
    return (np.arange(nbytes, dtype=np.int64) * 31 + number * 7 + 1).astype(np.uint8)


def _poke(address, values):
    import ctypes

    ctypes.memmove(address, values.ctypes.data, values.nbytes)


def _peek(address, values):
    import ctypes

    return ctypes.string_at(address, values.nbytes) == values.tobytes()
