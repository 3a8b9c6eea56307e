"""What a plan will cost, on paper: one step of a profile under a plan on a machine, event by event.

Compute goes along the profile's axis. On the way slots are saved, written behind, freed when they are
written, read ahead in the plan's order of need, waited for, used and freed, as the runtime does it:

1. :mod:`.moves`: what the plan does with each slot, and how long that occupies which channel.
2. :mod:`.lanes`: the channels, and who goes first.
3. :mod:`.order`: in which order slots are read back.
4. :mod:`.rerun`: which modules are run again, and what that takes.
5. :mod:`.joins`: vDNN's rule, for plans that ask for it.
6. :mod:`.walk`: compute, and the device's memory.
7. :mod:`.result`: step time, waits by cause, bytes, and on demand the timelines (:mod:`.timeline`).
"""

from penstock.plan.replay.replay import replay
from penstock.plan.replay.result import Replayed, Residence, TierUse, Trace

__all__ = ["Replayed", "Residence", "TierUse", "Trace", "replay"]
