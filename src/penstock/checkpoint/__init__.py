"""Training states to flash and back: whole, proven, at the device's speed.

A save goes from top to bottom: ``api`` (one checkpoint) or ``checkpointer`` (a directory of them;
``background`` saves while training goes on), ``tensors`` and ``values`` (the parts of a state, and their
places), ``staging`` (the hidden directory), ``writer`` and ``streams`` (files, block by block),
``manifest``. A load goes from ``api`` to ``targets``, ``reader`` and ``streams``. Both change directories
through ``disk``.
"""

from penstock.checkpoint.api import Saved, load, save, unchanged, verify
from penstock.checkpoint.background import Saving
from penstock.checkpoint.checkpointer import Checkpointer, Stats
from penstock.checkpoint.listing import Info
from penstock.checkpoint.reader import Health
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
