"""What must be true after a session whose mover is the one for CUDA, real or simulated."""

import gc

from offload_runs import held_bytes, wait_for_writes, wait_until
from penstock.store.frames import SCRATCH


def slabs(session):
    """The pinned memory of a session."""
    return session._stores._accelerator.mover._slabs


def wait_until_settled(session):
    """Until all that is to be spilled is where it will rest: what goes to flash is there, too."""
    wait_for_writes(session)
    wait_until(lambda: not any(slab._moving for slab in slabs(session)), "no buffer is being moved")


def assert_nothing_held(session):
    """No graph is alive: every byte of pinned memory, of the budget and of the tiers is given back."""
    gc.collect()
    wait_until(lambda: not any(slab.used_bytes for slab in slabs(session)), "no buffer is in use")
    budget = session.budget
    wait_until(lambda: budget.used_bytes == budget.used_by(SCRATCH), "nothing else is charged")
    for name in session.inspect().tiers:
        wait_until(lambda name=name: not held_bytes(session, name), "the tier holds nothing")
