"""Simulation of a plan's cost: one step of a profile under a plan on a machine, event by event.

Compute advances along the profile's axis. Meanwhile slots are saved, written behind, freed when they are
written, prefetched in the plan's order of need, waited for, used and freed, as the runtime does it:

1. :mod:`.moves`: the plan's action for each slot, and its time on each channel.
2. :mod:`.lanes`: the channels, and the priorities of their jobs.
3. :mod:`.order`: the order in which slots are read back.
4. :mod:`.recompute`: the modules that are recomputed, and the time that takes.
5. :mod:`.joins`: vDNN's rule, for plans that ask for it.
6. :mod:`.walk`: compute, and the device's memory.
7. :mod:`.staging`, :mod:`.staged_walk`: the way to flash through pinned host memory, on CUDA.
8. :mod:`.result`: step time, waits by cause, bytes, and on demand the timelines (:mod:`.timeline`).
"""

from penstock.plan.replay.replay import replay
from penstock.plan.replay.result import Replayed, Residence, TierUse, Trace

__all__ = ["Replayed", "Residence", "TierUse", "Trace", "replay"]
