"""Sessions for tests, training with and without one, and what must be true afterwards.

Sessions here are given a machine, so that they measure nothing, and a low floor, so that little
tensors move as well.
"""

import gc
import threading
import time
from dataclasses import dataclass, field, replace

import torch

from penstock.api import Session
from penstock.core.config import OffloadConfig
from penstock.core.units import KIB
from penstock.io.engine import Transfer
from penstock.observe.recorder import Stage
from penstock.plan import Machine
from penstock.runtime.movers import RESTORED
from penstock.runtime.storage import Residency
from penstock.store.wrappers import WrapperTier

MACHINE = Machine(
    name="a machine for tests",
    flash_write_bytes_per_s=2e9,
    flash_read_bytes_per_s=3e9,
    flash_latency_s=1e-4,
    host_write_bytes_per_s=8e9,
    host_read_bytes_per_s=8e9,
)
SLOW_FLASH = replace(
    MACHINE, flash_write_bytes_per_s=1e4, flash_read_bytes_per_s=1e4, name="slow flash"
)
"""To plan for, not to run on: next to it codecs and networks are quick, on a busy machine too."""
FLOOR_BYTES = 8 * KIB
PATIENCE_S = 60.0


def session_in(path, model=None, optimizer=None, *, wrap_tier=None, machine=MACHINE, **settings):
    """A session that spills to ``path``; enter it with ``with``."""
    fields = {"flash": path, "flash_capacity": "1GiB", "floor": FLOOR_BYTES, "policy": "all"}
    config = OffloadConfig.from_mapping(fields | settings)
    return Session(config, model=model, optimizer=optimizer, wrap_tier=wrap_tier, machine=machine)


def slots(session):
    """Storages that autograd has saved and that are not dead, in the order of saving."""
    return session.inspect().device.slots


def held_bytes(session, tier="flash"):
    """Bytes that a tier holds, or that are on their way in."""
    return session.inspect().tiers[tier].held_bytes


def movable(session):
    """Saved storages that can be moved, by their address."""
    entries = tuple(session.executor._table.entries.items())
    return {key: saved for key, saved in entries if saved.recorded}


def kept_storages(session):
    """Saved storages that are KEPT, in the order of saving."""
    passes = sorted(session.executor._table.passes, key=lambda each: each.index)
    return [
        saved for each in passes for saved in each.live.values() if saved.state is Residency.KEPT
    ]


def small_storages(session):
    """Saved storages that are SMALL."""
    entries = tuple(session.executor._table.entries.values())
    return [saved for saved in entries if saved.state is Residency.SMALL]


def promote_kept(session):
    """Make everything that is KEPT ready to be moved."""
    with session.executor._lock:
        session.executor._table.promote_all()


def written_bytes(session, tier="flash"):
    """Bytes that went to a tier so far."""
    return session.recorder.snapshot().flow(Stage.WRITE, tier).nbytes


def read_bytes(session, tier="flash"):
    """Bytes that came back from a tier so far."""
    return session.recorder.snapshot().flow(Stage.READ, tier).nbytes


def counted(session, name):
    return session.recorder.snapshot().counted(name)


def wait_until(condition, what):
    """Wait for other threads; fails after ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.001)


def wait_for_writes(session):
    """Until nothing is on its way out, so that all that is to be spilled is spilled.

    Called where no operator is running: what the last one has saved goes as well.
    """
    session.hooks.operators_returned()
    wait_until(lambda: not session.inspect().device.writes, "all writes have ended")


def assert_nothing_held(session, *, beside=()):
    """No graph is alive: every byte has been freed but for idle pages of restored storages.

    ``beside`` are owners of what is held all the time, as the scratch memory of codecs.
    """
    gc.collect()
    wait_until(lambda: _is_idle(session.inspect()), "tiers and restored storages hold nothing")
    state = session.inspect()
    assert set(state.device.holdings) - {*beside} <= {RESTORED}
    assert state.device.used_bytes == sum(state.device.holdings.values())
    assert all(tier.taken_bytes == 0 for tier in state.tiers.values())
    assert state.device.slots == ()
    assert state.device.small_count == state.device.small_bytes == 0


def _is_idle(state):
    holds = any(tier.held_bytes for tier in state.tiers.values())
    return not (holds or state.device.restored_bytes or state.device.writes or state.device.reads)


def assert_within_budget(session):
    """Not one byte more than the budget was ever held."""
    assert 0 < session.budget.peak_bytes <= session.budget.limit_bytes


def same_bits(left, right):
    """Whether two tensors are equal to the last bit, NaNs and signs of zeros included."""
    if left is None or right is None:
        return left is right
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_bytes_of(left), _bytes_of(right))


def _bytes_of(tensor):
    values = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if type(values) is not torch.Tensor or values.stride() != (1,):
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8)


@dataclass
class Trace:
    """Every loss, gradient and weight of some steps."""

    tensors: list = field(default_factory=list)
    names: list = field(default_factory=list)

    def note(self, name, tensor):
        self.names.append(name)
        self.tensors.append(None if tensor is None else tensor.detach().clone())

    def note_gradients(self, step, model):
        for name, parameter in model.named_parameters():
            self.note(f"step {step}, gradient of {name}", parameter.grad)

    def note_weights(self, step, model):
        for name, tensor in model.state_dict().items():
            self.note(f"step {step}, {name}", tensor)

    def assert_same_bits(self, other):
        """Equal to the last bit in everything; names the first that is not."""
        assert self.names == other.names
        for name, mine, theirs in zip(self.names, self.tensors, other.tensors, strict=True):
            assert same_bits(mine, theirs), f"differs: {name}"


def gradients(loss, inputs):
    """Clones of the gradients of a loss, or of what a function returns, with respect to ``inputs``."""
    for each in inputs:
        each.grad = None
    (loss() if callable(loss) else loss).backward()
    return [None if each.grad is None else each.grad.clone() for each in inputs]


class GatedTier(WrapperTier):
    """Operations do not end before the gate of their kind is opened; those begun later wait as well.

    Attributes:
        arrived: By kind, set when an operation has come to the gate.
        cancellable: Whether a write at the gate counts as not begun, so that it can be withdrawn.
    """

    def __init__(self, inner, *kinds, cancellable=False):
        super().__init__(inner)
        self.cancellable = cancellable
        self.arrived = {"write": threading.Event(), "read": threading.Event()}
        self._waiting = {kind: [] for kind in kinds}
        self._gate = threading.Lock()

    def waiting(self, kind):
        """How many operations are at the gate."""
        with self._gate:
            return len(self._waiting[kind])

    def open(self, kind):
        """Let everything of this kind pass from now on."""
        with self._gate:
            waiting = self._waiting.pop(kind)
        for release in waiting:
            release()

    def _write(self, place, address, nbytes, keep_alive, priority):
        transfer = self.inner._write(place, address, nbytes, keep_alive, priority)
        return self._hold("write", transfer, keep_alive)

    def _read(self, place, address, nbytes, keep_alive, priority):
        transfer = self.inner._read(place, address, nbytes, keep_alive, priority)
        return self._hold("read", transfer, keep_alive)

    def _hold(self, kind, inner, keep_alive):
        with self._gate:
            if kind not in self._waiting:
                return inner
            withdraw = (lambda _: True) if self.cancellable else None
            outer = Transfer(inner.nbytes, cancel=withdraw)
            memory = [keep_alive]

            def end(done):
                memory.clear()
                if not outer.done:
                    outer.settle(done.error)

            self._waiting[kind].append(lambda: inner.add_done_callback(end))
        self.arrived[kind].set()
        return outer
