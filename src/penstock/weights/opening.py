"""Opening for a session whose weights rest on flash or in host memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError
from penstock.homed import UpdateMemory
from penstock.runtime.movers import Mover
from penstock.store.account import Account
from penstock.weights.brought import HostMemory
from penstock.weights.homes import WeightFiles
from penstock.weights.model import rest_weights
from penstock.weights.streamer import WeightStreamer

if TYPE_CHECKING:
    from penstock.runtime.cuda.mover import CudaMover
    from penstock.weights.relocation import Relocation


def open_weights(
    config: OffloadConfig, account: Account, updates: UpdateMemory | None
) -> WeightStreamer:
    """Return what lets the weights of models in host memory rest on flash.

    Args:
        config: Settings of the session.
        account: Account of the weights in memory.
        updates: Memory that is left to their updates; None: no limit.
    """
    files = WeightFiles(config.directories)
    return WeightStreamer(
        partial(rest_weights, places=files, floor_bytes=config.floor_bytes),
        account=account,
        memory=HostMemory(account),
        updates=updates,
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
    from penstock.weights.host_places import HostPlaces  # noqa: PLC0415

    if isinstance(mover, DirectMover):
        raise ConfigError(
            f"weights={config.weights!r} brings weights to a device through host memory, and this session"
            " has none as flash is GPU-direct: set PENSTOCK_GPU_DIRECT=off"
        )
    cuda = cast("CudaMover", mover)
    files = WeightFiles(config.directories) if config.weights == "flash" else None
    places, relocation = HostPlaces(cuda, files), None
    rest = resting_on(device, places, config.floor_bytes, places.keep)
    if config.device is not None:
        from penstock.weights.relocation import Relocation  # noqa: PLC0415  (few runs need it)

        relocation = Relocation(device, places, config.floor_bytes)
        rest = relocation.rest
    memory = DeviceMemory(cuda, account, device)
    return WeightStreamer(rest, account=account, memory=memory), relocation
