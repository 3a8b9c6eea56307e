"""Opening for a session that lets the weights of its model rest on flash."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError
from penstock.runtime.movers import Mover
from penstock.store.account import Account
from penstock.weights.brought import HostMemory
from penstock.weights.homes import WeightFiles
from penstock.weights.model import rest_weights
from penstock.weights.streamer import WeightStreamer

if TYPE_CHECKING:
    from penstock.runtime.cuda.mover import CudaMover
    from penstock.weights.relocation import Relocation


def open_weights(config: OffloadConfig, account: Account) -> WeightStreamer:
    """Return what lets the weights of models in host memory rest on flash.

    Args:
        config: Settings of the session.
        account: Account of the weights in memory.
    """
    files = WeightFiles(config.directories)
    return WeightStreamer(
        partial(rest_weights, files=files, floor_bytes=config.floor_bytes),
        account=account,
        memory=HostMemory(account),
    )


def open_device_weights(
    config: OffloadConfig, account: Account, device: torch.device, mover: Mover
) -> tuple[WeightStreamer, Relocation | None]:
    """Return the same for a CUDA device; and what brings a model there that is on the host, if asked for.

    Args:
        config: Settings of the session.
        account: Account of the weights in the device's memory.
        device: The device.
        mover: Copies between host and device.

    Raises:
        ConfigError: Flash is GPU-direct.
    """
    from penstock.runtime.cuda.direct import DirectMover  # noqa: PLC0415  (not without a device)
    from penstock.weights.device import DeviceMemory, resting_on  # noqa: PLC0415

    if isinstance(mover, DirectMover):
        raise ConfigError(
            "weights='flash' brings weights to a device through host memory, and this session has none as"
            " flash is GPU-direct: set PENSTOCK_GPU_DIRECT=off"
        )
    files, relocation = WeightFiles(config.directories), None
    rest = resting_on(device, files, config.floor_bytes)
    if config.device is not None:
        from penstock.weights.relocation import Relocation  # noqa: PLC0415  (few runs need it)

        relocation = Relocation(device, files, config.floor_bytes)
        rest = relocation.rest
    memory = DeviceMemory(cast("CudaMover", mover), account, device)
    return WeightStreamer(rest, account=account, memory=memory), relocation
