"""Optimizers whose states live on flash.

They come to the processor tile by tile, are updated there by the optimizer's own step, and go back.
Read in this order:

- ``optimizer``: ``OnFlash`` and ``on_flash``; ``optimizers``: by name; ``config``: settings;
- ``states``: steps and their commit; ``params``: parameters, tiles, groups; ``shards``: DTensors;
- ``formats``: a tile's record; ``probe``: the states that an optimizer keeps;
- ``store``: records on flash; ``pipeline``: read ahead, update, write behind; ``squeeze``: fewer bytes;
- ``gradients``: those that wait; ``offloaded_gradient``: the tensor in ``.grad`` of one on flash;
  ``gradient_spill``: its bytes;
- ``update``: a tile's update; ``packing``, ``kernels``: compact forms;
- ``overlap``: updates in backward; ``averaged``: those under DDP; ``journal``: of durable steps;
- ``state_dict``: streamed; ``wear``: what it costs the SSD.
"""

from penstock.optim.config import StatesConfig
from penstock.optim.optimizer import OnFlash, on_flash
from penstock.optim.optimizers import (
    FlashAdagrad,
    FlashAdam,
    FlashAdamW,
    FlashLion,
    FlashRMSprop,
    FlashSGD,
    Lion,
)

__all__ = [
    "FlashAdagrad",
    "FlashAdam",
    "FlashAdamW",
    "FlashLion",
    "FlashRMSprop",
    "FlashSGD",
    "Lion",
    "OnFlash",
    "StatesConfig",
    "on_flash",
]
