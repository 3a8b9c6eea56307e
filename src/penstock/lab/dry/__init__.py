"""Profiles without a run: a network's forward and backward on shapes alone, in seconds and no memory.

1. :mod:`.fakes` makes a copy of the module whose tensors have shapes and no data.
2. :mod:`.recording` sees every operator that its step calls, :mod:`.work` counts what that has to do,
   and the machine's roofline (:mod:`penstock.plan.roofline`) says how long it takes.
3. :mod:`.capture` lets Penstock's own hooks see what autograd saves, as in a real session.
4. :mod:`.ledger` knows every byte that is alive, over time.
5. :mod:`.profile` puts them together.
"""

from penstock.lab.dry.networks import dry_zoo_profile
from penstock.lab.dry.profile import dry_profile

__all__ = ["dry_profile", "dry_zoo_profile"]
