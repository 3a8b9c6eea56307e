"""Tiers of a session, and the mover of its device: opened and closed together.

What devices that run behind the interpreter need is in :mod:`.cuda.accelerator`, loaded only for them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import torch

from penstock.codec import registry
from penstock.core import knobs
from penstock.core.config import UNLIMITED, OffloadConfig
from penstock.core.errors import BudgetError, ConfigError, free_space_bytes
from penstock.core.ranks import local_processes, local_rank, own_of
from penstock.core.units import GIB, MIB, format_bytes, round_down
from penstock.io.engine import Engine
from penstock.observe.recorder import Recorder
from penstock.plan.machine import Machine
from penstock.runtime.movers import CpuMover, Mover, Transport, page_slack_bytes
from penstock.runtime.probe import Meeting, measure
from penstock.runtime.sampling import CodecSampler, Sampler
from penstock.store.account import Account, host_account
from penstock.store.arena import Arena
from penstock.store.base import Tier
from penstock.store.engine import shared_engine
from penstock.store.flash import FlashTier
from penstock.store.host import HostTier

if TYPE_CHECKING:
    from penstock.runtime.allowance import FoundAllowance
    from penstock.runtime.cuda.accelerator import Accelerator
    from penstock.runtime.cuda.timing import DeviceTimer

SCRATCH_SHARE: Final = 32
"""Part of the device budget that codecs work in, where they pay."""
LEAST_SCRATCH_BYTES: Final = MIB
"""With less the pieces are so small that handling them costs more than they save."""
GOOD_SCRATCH_BYTES: Final = 10 * MIB
"""With so much the pieces are long enough; up to here a small budget gives twice its share."""
MOST_SCRATCH_BYTES: Final = 32 * MIB
MOST_DEVICE_SCRATCH_BYTES: Final = 256 * MIB
"""On CUDA: pieces are longer there, so that they take longer than to launch what encodes them."""
LEAST_CODEC_BUDGET_BYTES: Final = LEAST_SCRATCH_BYTES * SCRATCH_SHARE // 2
"""Device budgets below this have no room for codecs."""


class Stores:
    """The tiers of one session, by name, and the mover between them and the device.

    Attributes:
        tiers: ``"flash"`` and ``"host"``, those that the configuration asks for.
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        budget: Account,
        recorder: Recorder,
        device: torch.device,
        wrap_tier: Callable[[Tier], Tier] | None = None,
    ) -> None:
        """Open them.

        Raises:
            ConfigError: A directory is missing, read-only, in memory, or the device is unknown.
            NoSpaceError: A file system has not the space that ``flash_capacity`` asks for.
        """
        self.tiers: dict[str, Tier] = {}
        self._direct_engine: Engine | None = None  # GPU-direct
        self._host: Account | None = None
        self._host_arena: Arena | None = None
        self._recorder = recorder
        self._mover: Mover | None = None
        self._encoding: Transport | None = None
        self._budget = budget
        wrap = wrap_tier or (lambda tier: tier)
        self._accelerator: Accelerator | None = None
        if _runs_behind(device):
            opening = importlib.import_module("penstock.runtime.cuda.accelerator")
            self._accelerator = opening.Accelerator(device, budget=budget, recorder=recorder)
        try:
            if config.directories:
                self.tiers["flash"] = wrap(self._open_flash(config, device))
            self._mover, arena = self._open_mover(config)
            if arena is not None:
                self._host_arena = arena
                host = HostTier(arena, capacity_bytes=arena.capacity_bytes, recorder=recorder)
                self.tiers["host"] = wrap(host)
        except BaseException:
            self.close()
            raise

    @property
    def mover(self) -> Mover:
        """Moves storages between the device and the tiers."""
        assert self._mover is not None, "stores that could not be opened have no mover"
        return self._mover

    @property
    def transport(self) -> Transport:
        """The encoding stage in front of the mover once codecs are open; until then the mover."""
        return self._encoding or self.mover

    @property
    def timer(self) -> DeviceTimer | None:
        """Of the device; ``None``: it does not run behind the interpreter."""
        return None if self._accelerator is None else self._accelerator.timer

    def allowance(
        self, device: torch.device, budget: Account, *, parts: int = 2
    ) -> FoundAllowance | None:
        """Return what finds the limit of a device's ``budget``; at first one of equal ``parts``.

        ``None``: the memory is the host's, or torch does not tell how much there is.
        """
        if self._accelerator is None:
            return None
        return self._accelerator.allowance(device, budget, parts=parts)

    def make_sampler(self) -> CodecSampler:
        """Make what measures codecs on storages of the mover's device."""
        return Sampler() if self._accelerator is None else self._accelerator.make_sampler()

    def open_codecs(self, budget: Account, device_bytes: int) -> int:
        """Put an encoding stage in front of the mover.

        Args:
            budget: The device's. Scratch memory is taken from it: a part, 32 MiB at most, or 256 MiB on
                CUDA.
            device_bytes: Its limit, as configured.

        Returns:
            The scratch memory in bytes; 0 if there is no room for it.
        """
        mover = self.mover
        accelerator = self._accelerator
        scratch_bytes = codec_scratch_bytes(device_bytes, on_device=accelerator is not None)
        if not scratch_bytes:
            return 0
        mover.trim(scratch_bytes)
        stage: Callable[..., Transport]
        if accelerator is None:
            stage = importlib.import_module("penstock.runtime.encoding").open_host_stage
        else:
            stage = accelerator.encoding_stage()
        try:
            self._encoding = stage(
                mover, scratch_bytes=scratch_bytes, budget=budget, recorder=self._recorder
            )
        except BudgetError:
            return 0
        return scratch_bytes

    def slack_bytes(self, device_bytes: int) -> int:
        """Return what plans should leave of a device budget; see ``page_slack_bytes``."""
        if not isinstance(self.mover, CpuMover) or device_bytes >= UNLIMITED:
            return 0
        return page_slack_bytes(device_bytes)

    def capacity_bytes(self, name: str) -> int:
        """Return the bytes that a tier can hold; 0 if there is none of this name."""
        tier = self.tiers.get(name)
        return 0 if tier is None else tier.spec.capacity_bytes

    def lent_bytes(self) -> int:
        """Return the bytes of the host tier that saved tensors cannot have: weights rest there."""
        return 0 if self._accelerator is None else self._accelerator.mover.lent_bytes

    @property
    def staging_bytes(self) -> int:
        """Pinned memory that everything to and from flash passes; 0: nothing is staged."""
        return 0 if self._accelerator is None else self._accelerator.staging_bytes

    def measure(self, meeting: Meeting | None = None) -> Machine:
        """The bandwidths of these tiers, measured now, at once with the ranks of a meeting."""
        together = Meeting() if meeting is None else meeting
        if self._accelerator is None:
            return measure(self.tiers, meeting=together)
        return self._accelerator.measure(self.tiers, together)

    def rest(self) -> None:
        """Give the system all memory that holds nothing at the moment; nothing moves until ``wake``."""
        self.mover.trim(UNLIMITED)
        self.mover.rest()
        if self._host_arena is not None:
            self._host_arena.trim()

    def wake(self) -> None:
        """Take again what is not taken as it is needed: pinned memory."""
        self.mover.wake()

    def close(self) -> None:
        """Close everything; what is still in flight is waited for. Idempotent."""
        for tier in self.tiers.values():
            tier.close()
        if self._direct_engine is not None:
            self._direct_engine.close()
        if self._mover is not None:
            self.transport.close()
        if self._host_arena is not None:
            self._host_arena.close()
        if self._host is not None:
            self._host.close()

    def _open_flash(self, config: OffloadConfig, device: torch.device) -> Tier:
        """The flash tier over the engine that fits the device; see :mod:`.cuda.gpu_direct`."""
        capacity = config.capacity_bytes or _default_capacity(
            config.directories, ranks_on_flash(config)
        )

        def open_tier(engine: Engine) -> Tier:
            return FlashTier(
                config.directories, capacity_bytes=capacity, engine=engine, recorder=self._recorder
            )

        accelerator = self._accelerator
        if accelerator is not None or knobs.gpu_direct() == "on":  # of which the CPU has to be told
            gpu_direct = importlib.import_module("penstock.runtime.cuda.gpu_direct")
            link = None if accelerator is None else accelerator.link
            direct = gpu_direct.open_flash(open_tier, device, link, self._recorder)
            if direct is not None:
                self._direct_engine, tier = direct
                return cast(Tier, tier)
        return open_tier(shared_engine())

    def _open_mover(self, config: OffloadConfig) -> tuple[Mover, Arena | None]:
        """The mover, and what the host tier's bytes rest in, if there is one."""
        host = self._host = host_account().child(
            "host",
            config.host_bytes,
            owner="host tier",
            on_change=partial(self._recorder.level, "host"),
        )
        if self._accelerator is not None:
            return self._accelerator.open_mover(config, host, self.tiers.get("flash"))
        mover = CpuMover(budget=self._budget)
        if not config.host_bytes:
            return mover, None
        return mover, Arena(config.host_bytes, account=host, owner="host tier")


def codec_scratch_bytes(device_bytes: int, *, on_device: bool) -> int:
    """Return the scratch memory that codecs take from a device budget; 0 if there is no room for it.

    Args:
        device_bytes: The budget's limit.
        on_device: Whether they run on a device, with its own memory.
    """
    most = MOST_DEVICE_SCRATCH_BYTES if on_device else MOST_SCRATCH_BYTES
    scratch_bytes = max(
        min(device_bytes // SCRATCH_SHARE, most),
        min(2 * device_bytes // SCRATCH_SHARE, GOOD_SCRATCH_BYTES),
    )
    return scratch_bytes if scratch_bytes >= LEAST_SCRATCH_BYTES else 0


def check_device_codec(name: str, device: torch.device) -> None:
    """Raise ConfigError if storages of a device cannot be encoded by a codec, or there is none."""
    registry.get(name)
    forms = importlib.import_module("penstock.codec.device").FORMS
    if name not in forms:
        raise ConfigError(
            f"codec {name!r} runs on the CPU only, and saved tensors are on {str(device)!r}: chains have"
            f" no form for devices; give codec='auto' or one of {', '.join(forms)}"
        )


def _runs_behind(device: torch.device) -> bool:
    """Return whether the device runs behind the interpreter, with its own memory. Raises ConfigError."""
    if device.type in ("cpu", "cuda"):
        return device.type == "cuda"
    if device.type == "mps":
        raise ConfigError(
            "tensors on device 'mps' cannot be offloaded: its memory is the CPU's, so nothing would come"
            " free, and it has no streams; use 'cpu' or 'cuda'"
        )
    here = torch.accelerator.current_accelerator()
    if here is None or here.type != device.type:
        raise ConfigError(
            f"tensors on device {str(device)!r} cannot be offloaded: torch has no such accelerator here;"
            " use 'cpu' or 'cuda'"
        )
    return True


def ranks_on_flash(config: OffloadConfig) -> int:
    """Return the number of ranks on this machine, with this one, that offload to its file systems."""
    processes = local_processes()
    if not config.flash_by_rank or processes == 1:
        return processes
    assert isinstance(config.flash, tuple)
    own = _file_systems(config.directories)
    others = (
        _file_systems(own_of(config.flash, local, processes))
        for local in range(processes)
        if local != local_rank()
    )
    return 1 + sum(not own.isdisjoint(each) for each in others)


def _file_systems(paths: Iterable[str | os.PathLike[str]]) -> set[int]:
    """Return the devices of directories, without those that are missing."""
    found = set()
    for path in paths:
        with suppress(OSError):
            found.add(os.stat(path).st_dev)
    return found


def _default_capacity(directories: tuple[str, ...], ranks: int) -> int:
    """Nine tenths of the free space, in equal parts, because a full system disk harms others.

    Args:
        directories: Those of the tier.
        ranks: Number of processes that divide the space.
    """
    free = min(free_space_bytes(path) for path in directories)
    if free < 0:  # a missing directory: the tier says so better
        return GIB
    capacity = round_down(free * 9 // 10 // ranks, MIB) * len(directories)
    if capacity == 0:
        raise ConfigError(
            f"flash: {', '.join(directories)}: only {format_bytes(free)} are free; free some space,"
            " or name another directory"
        )
    return capacity
