"""Profiles without a run: forward and backward of a network on shapes alone, in seconds.

1. :mod:`.fake_tensors` copies the module; tensors of the copy have shapes and no data.
2. :mod:`.operator_recorder` sees every operator that the step calls, :mod:`.operator_work` counts its
   work, and the machine's roofline (:mod:`.roofline`) gives its time.
3. :mod:`.capture` lets Penstock's own hooks see what autograd saves, as in a real session.
4. :mod:`.ledger` accounts for every byte that is alive, over time.
5. :mod:`.weight_recorder` notes which operators use which module's weights.
6. :mod:`.profile` puts them together.
"""

from penstock.lab.dry.networks import dry_zoo_step
from penstock.lab.dry.profile import DryStep, dry_step

__all__ = ["DryStep", "dry_step", "dry_zoo_step"]
