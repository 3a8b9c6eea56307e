"""Training states to flash and back: whole, proven, at the device's speed.

Read in this order:

- ``front``: ``save``, ``load``, ``verify``; ``store``: one checkpoint, saved whole or not at all;
- ``values``: what is no tensor, as JSON; ``leaves``: the tensors; ``dtypes``;
- ``packing``: tensors to files; ``manifest``: what a checkpoint says of itself;
- ``moves``, ``streams``: tensors to blocks, blocks to files; ``writing``, ``reading``;
- ``targets``: loading in place; ``fresh``: memory for what has none; ``disk``: what changes directories.
"""

from penstock.checkpoint.front import load, save, unchanged, verify
from penstock.checkpoint.reading import Health
from penstock.checkpoint.store import Place, Saved

__all__ = [
    "Health",
    "Place",
    "Saved",
    "load",
    "save",
    "unchanged",
    "verify",
]
