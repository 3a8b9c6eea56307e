"""A machine to time for, and the measured twin of a dry profile: a real session that keeps everything."""

import functools
import gc
import itertools
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload_runs import session_in
from penstock.lab import zoo
from penstock.plan import Compute, Machine
from penstock.plan.profile import Event

COMPUTE = Compute(
    float32_flops_per_s=6.6e12,
    half_flops_per_s=13.2e12,
    efficiency=0.5,
    memory_bytes_per_s=336e9,
    operator_s=5e-6,
)
GPU = Machine(
    name="a GPU on paper",
    flash_write_bytes_per_s=2e9,
    flash_read_bytes_per_s=3e9,
    flash_latency_s=1e-4,
    host_write_bytes_per_s=12e9,
    host_read_bytes_per_s=12e9,
    compute=COMPUTE,
)
FLOOR_BYTES = 32 * 1024


def measured(path, network, step, floor_bytes=FLOOR_BYTES):
    """The profile of a real session's first step; ``step`` runs forward and backward."""
    with session_in(path, network, policy="keep", floor=floor_bytes) as session:
        step()
        gc.collect()
        assert session.profile is not None
        return session.profile


def measured_zoo(path, name, batch_size, *, autocast=None, **overrides):
    """The same of a tiny network of the zoo."""
    torch.manual_seed(0)
    network = zoo.build(name, size="tiny", **overrides)
    batch = zoo.example_batch(network, batch_size)

    def step():
        dtype = getattr(torch, autocast or "bfloat16")
        with torch.autocast("cpu", dtype, enabled=autocast is not None):
            loss = network(*batch)
        loss.backward()

    return measured(path, network, step)


def slots_of(profile):
    """All that a dry and a measured profile have to agree on, slot by slot."""
    return [
        (str(slot.key), slot.key.nbytes, slot.kind, slot.dtype, slot.small_bytes, slot.producer)
        for slot in profile.slots
    ]


def needed(profile):
    """Slots in the order of first asking."""
    return [str(profile.slots[i].key) for i in profile.needs]


class Accountant(TorchDispatchMode):
    """Counts the bytes of every real storage that operators make, while it lives; knows no hooks."""

    def __init__(self):
        super().__init__()
        self.changes = []
        self._alive = {}
        self._numbers = itertools.count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {id(one.untyped_storage()) for one in tensors_of((args, kwargs))}
        for tensor in tensors_of(out):
            storage = tensor.untyped_storage()
            if id(storage) not in given and self._known(storage) is None:
                number = next(self._numbers)
                died = functools.partial(self._died, number, storage.nbytes())
                self._alive[storage._cdata] = (number, weakref.ref(storage, died))
                self.changes.append((number, storage.nbytes()))
        return out

    def peak(self, *, without):
        """The most bytes at once, of all storages but those of some tensors."""
        stay = {self._known(one.untyped_storage()) for one in without}
        deltas = (delta for number, delta in self.changes if number not in stay)
        return max(itertools.accumulate(deltas))

    def _known(self, storage):
        number, source = self._alive.get(storage._cdata, (None, lambda: None))
        return number if source() is storage else None

    def _died(self, number, nbytes, _):
        self.changes.append((number, -nbytes))


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peak_of(profile):
    """The most that a profile of a whole device says is alive at once beside what is fixed."""
    sizes = [slot.key.nbytes for slot in profile.slots]
    events = [(one.at_ns, 1, one.nbytes) for one in profile.transients]
    for when, event, i in profile.steps:
        if event is not Event.USE:
            events.append((when, 0, sizes[i] if event is Event.SAVE else -sizes[i]))
    slots = transient = peak = 0
    for _, together in itertools.groupby(sorted(events), key=lambda one: one[0]):
        for _, is_level, value in together:
            slots, transient = (slots, value) if is_level else (slots + value, transient)
        peak = max(peak, slots + transient)
    return peak
