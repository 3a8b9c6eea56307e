"""Parts of a session for devices that run behind the interpreter: link, timer, pinned memory, mover.

[Note: host memory on CUDA]
    Everything between a device and flash is staged in pinned host memory, so with ``host_memory=0``
    there is no way out; so is what a model on the host has in memory of its own, whose weights a device
    works with. Up to 512 MiB all of it is for staging; of more, half is, up to 16 GiB, and
    the rest is the host tier. With weights='host', which rest in the host tier, half of any is for
    staging, up to 512 MiB. Without flash, or if flash is GPU-direct, all of it is the host tier, and
    there may be none. It is taken, touched and pinned when the session is opened, and given back as a
    whole: when it is closed, and while the job is suspended.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError
from penstock.core.memory import physical_bytes
from penstock.core.units import GIB, MIB, format_bytes, round_down
from penstock.io.mapping import HUGE_PAGE_BYTES
from penstock.observe.recorder import Recorder
from penstock.plan.machine import Machine
from penstock.runtime.allowance import FoundAllowance, Remainder
from penstock.runtime.cuda.codec_speeds import CodecSpeeds
from penstock.runtime.cuda.direct import DirectMover
from penstock.runtime.cuda.link import CudaLink
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.cuda.pinned import Slab
from penstock.runtime.cuda.timing import DeviceTimer
from penstock.runtime.movers import Mover, Transport
from penstock.runtime.probe import Meeting, host_memory, measure
from penstock.runtime.sampling import CodecSampler
from penstock.store.account import Account
from penstock.store.arena import Arena
from penstock.store.base import Tier

LEAST_STAGING_BYTES: Final = 64 * MIB
"""Less would make every transfer wait for another."""
ALL_STAGING_BYTES: Final = 512 * MIB
MOST_STAGING_BYTES: Final = 16 * GIB


class Accelerator:
    """One session's part that is for devices of one kind.

    Attributes:
        link: To the devices.
        timer: Of the session's device, and of others as they appear.
        staging_bytes: Memory that everything to and from flash passes; 0: none.
    """

    def __init__(self, device: torch.device, *, budget: Account, recorder: Recorder) -> None:
        """Make the link.

        Args:
            device: The session's.
            budget: Of its memory.
            recorder: Gets spans, counters and marks.
        """
        self.link = CudaLink(device.type)
        self.timer = DeviceTimer(self.link, device, recorder.clock)
        self._device = device
        self._budget = budget
        self._recorder = recorder
        self.staging_bytes = 0
        self._mover: CudaMover | None = None
        self._codec_speeds = CodecSpeeds()

    @property
    def mover(self) -> CudaMover:
        """Mover that ``open_mover`` has opened."""
        assert self._mover is not None, "open_mover comes first"
        return self._mover

    def allowance(
        self, device: torch.device, budget: Account, *, parts: int = 2
    ) -> FoundAllowance | None:
        """Return what finds the limit of a device's ``budget``; None if torch tells no figures.

        Until a pass was observed it is one of so many equal ``parts`` of what is left.
        """
        usable_bytes = self.link.usable_bytes(device)
        if usable_bytes is None:
            return None
        budget.advisory = True
        return FoundAllowance(
            Remainder(partial(self.link.allocated, device), budget),
            usable_bytes,
            account=budget,
            recorder=self._recorder,
            device=str(device),
            parts=parts,
        )

    def make_sampler(self) -> CodecSampler:
        """Make what measures codecs on storages of the device."""
        samples = importlib.import_module("penstock.runtime.cuda.encoding_samples")
        sampler: CodecSampler = samples.DeviceSampler(self.link, self._budget, self._codec_speeds)
        return sampler

    def encoding_stage(self) -> Callable[..., Transport]:
        """Return the function that opens stages which encode on the device."""
        encoding = importlib.import_module("penstock.runtime.cuda.encoding")
        return partial(encoding.open_device_stage, link=self.link, speeds=self._codec_speeds)

    def open_mover(
        self, config: OffloadConfig, host: Account, flash: Tier | None
    ) -> tuple[Mover, Arena | None]:
        """Take and pin host memory, and open the mover over it.

        Args:
            config: Says how much; see [Note: host memory on CUDA].
            host: It is charged to.
            flash: The flash tier, if there is one.

        Returns:
            The mover, which closes the memory, and what the host tier's bytes rest in, if there is one.

        Raises:
            ConfigError: The machine has not so much, or that is too little.
        """
        direct = flash is not None and flash.spec.gpu_direct
        slabs: dict[str, Slab] = {}
        try:
            for name, nbytes in _host_parts(config, staged=not direct).items():
                slabs[name] = Slab(
                    nbytes, link=self.link, device=self._device, budget=host, name=name
                )
            tier, staging = slabs.get("host tier"), slabs.get("staging")
            if flash is not None and staging is not None:
                self.staging_bytes = staging.capacity_bytes
            self._mover = (DirectMover if direct else CudaMover)(
                device=self._device,
                budget=self._budget,
                recorder=self._recorder,
                link=self.link,
                staging=staging,
                host=tier,
            )
        except BaseException:
            for slab in slabs.values():
                slab.close()
            raise
        return self._mover, None if tier is None else tier.arena

    def measure(self, tiers: dict[str, Tier], meeting: Meeting) -> Machine:
        """The bandwidths of these tiers, and of the link as those of the host tier; measured now."""
        mover = self.mover
        flash = {name: tier for name, tier in tiers.items() if name != "host"}
        lend = mover.lend if isinstance(mover, DirectMover) else host_memory
        machine = measure(flash, lend=lend, meeting=meeting)
        out, back = mover.measure()
        if not out:
            return machine
        return replace(machine, host_write_bytes_per_s=out, host_read_bytes_per_s=back)


def host_memory_for(tier_bytes: int) -> int:
    """Return the host memory with which a session has a host tier of at least ``tier_bytes``, and flash.

    See [Note: host memory on CUDA].
    """
    if not tier_bytes:
        return LEAST_STAGING_BYTES
    staging = min(max(tier_bytes, ALL_STAGING_BYTES // 2 + HUGE_PAGE_BYTES), MOST_STAGING_BYTES)
    return max(tier_bytes, staging) + staging


def _host_parts(config: OffloadConfig, *, staged: bool = True) -> dict[str, int]:
    """Bytes of host memory by use; see [Note: host memory on CUDA].

    Args:
        config: Asks for so much.
        staged: Whether what goes to flash passes through it.
    """
    total = config.host_bytes
    if not config.has_tier:
        return {}
    physical = physical_bytes()
    if total > physical:
        raise ConfigError(
            f"host_memory is {format_bytes(total)} ({total} bytes), but this machine has"
            f" {format_bytes(physical)}, and on CUDA all of host_memory is taken at once; lower it"
        )
    stages_weights = config.weights == "host" and config.device is not None
    if not (config.directories and staged) and not stages_weights:
        return {"host tier": total} if total else {}
    if total < LEAST_STAGING_BYTES:
        raise ConfigError(
            f"host_memory is {total} bytes: on CUDA all that goes to flash passes through it, and so do"
            " weights of a model on the host; give at least"
            f" {format_bytes(LEAST_STAGING_BYTES)}, and better some times the largest tensor"
        )
    is_tier_first = config.weights == "host"
    if total <= (2 * LEAST_STAGING_BYTES - 1 if is_tier_first else ALL_STAGING_BYTES):
        return {"staging": total}
    most = ALL_STAGING_BYTES if is_tier_first else MOST_STAGING_BYTES
    staging = min(round_down(total // 2, HUGE_PAGE_BYTES), most)
    return {"staging": staging, "host tier": total - staging}
