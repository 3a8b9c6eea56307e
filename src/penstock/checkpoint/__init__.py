"""Training states to flash and back: whole, proven, at the device's speed.

Read in this order:

- ``front``: ``save``, ``load``, ``verify``; ``store``: one checkpoint, saved whole or not at all;
  ``hidden``: where it is made; ``spare``: of which files; ``unchanged``: what of a state it has;
- ``directory``: many checkpoints, ``Checkpointer``; ``listing``: which there are; ``background``: saving
  while training goes on; ``interval``: how often; ``training``: what belongs to a training state;
  ``listeners``: who is told; ``room``: how much memory;
- ``prepared``: what goes where; ``parts``: what is in a state; ``values``: what is no tensor, as JSON;
  ``advice``: what has no form; ``leaves``: the tensors; ``dtypes``;
- ``packing``: tensors to files; ``manifest``: what a checkpoint says of itself;
- ``moves``, ``streams``: tensors to blocks, blocks to files; ``writing``, ``reading``; ``threads``;
- ``frames``, ``encoded``, ``blocks``: tensors by a codec, and files whose length is known last;
- ``targets``: loading in place; ``differences``: what does not fit; ``fresh``: memory for what has none;
- ``disk``: what changes directories.
"""

from penstock.checkpoint.background import Saving
from penstock.checkpoint.directory import Checkpointer, Stats
from penstock.checkpoint.front import load, save, unchanged, verify
from penstock.checkpoint.listing import Info
from penstock.checkpoint.reading import Health
from penstock.checkpoint.store import Saved
from penstock.checkpoint.training import Rng, training_state
from penstock.checkpoint.unchanged import Place

__all__ = [
    "Checkpointer",
    "Health",
    "Info",
    "Place",
    "Rng",
    "Saved",
    "Saving",
    "Stats",
    "load",
    "save",
    "training_state",
    "unchanged",
    "verify",
]
