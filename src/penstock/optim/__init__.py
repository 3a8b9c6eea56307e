"""Optimizers whose states live on flash.

They come to the processor tile by tile, are updated there by the optimizer's own step, and go back.
Read in this order:

- ``optimizer``: the front, ``on_flash``; ``front``: the optimizers by name; ``config``: settings;
- ``states``: what is where, and how a step passes over it; ``groups``: what is kept of each group;
- ``layout``: parameters to tiles; ``formats``: a tile's record; ``probe``: what an optimizer keeps;
- ``store``: where records rest; ``pipeline``: read ahead, update, write behind; ``ring``: the memory for
  that; ``turns``: whose turn it is; ``squeeze``: fewer bytes;
- ``gradients``: those that wait; ``away``: what stands for one that left; ``shelf``: where that rests;
- ``update``: a tile's update; ``packing``, ``kernels``: compact forms;
- ``conductor``: a step to its commit; ``overlap``: in backward; ``durable``: journals;
- ``state_dict``: streamed; ``wear``: what it costs the SSD.
"""

from penstock.optim.config import StatesConfig
from penstock.optim.front import (
    FlashAdagrad,
    FlashAdam,
    FlashAdamW,
    FlashLion,
    FlashRMSprop,
    FlashSGD,
    Lion,
)
from penstock.optim.optimizer import OnFlash, on_flash

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
