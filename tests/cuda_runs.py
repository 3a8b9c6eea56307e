"""What must be true after a session whose mover is the one for CUDA, real or simulated."""

import gc

from offload_runs import wait_until
from penstock.runtime.cuda.encoding import DeviceEncodingMover
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.encoding.scratch import SCRATCH


def assert_nothing_held(session):
    """No graph is alive: every byte of pinned memory, of the budget and of the tiers is given back."""
    gc.collect()
    mover = session._stores.mover
    if isinstance(mover, DeviceEncodingMover):
        mover = mover._inner
    assert isinstance(mover, CudaMover)
    wait_until(lambda: not any(slab.used_bytes for slab in mover._slabs), "no buffer is in use")
    budget = session.budget
    wait_until(lambda: budget.used_bytes == budget.used_by(SCRATCH), "nothing else is charged")
    for tier in session._stores.tiers.values():
        wait_until(lambda tier=tier: tier.held_bytes == 0, "the tier holds nothing")
