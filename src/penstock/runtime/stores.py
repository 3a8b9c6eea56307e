"""Opens what a session spills to: engine, tiers, and the mover of its device; closes them together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.core.budget import Budget
from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError, free_space_bytes
from penstock.core.units import GIB, MIB, format_bytes, round_down
from penstock.io.arena import Arena
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder
from penstock.plan.machine import Machine
from penstock.runtime.movers import CpuMover, Mover
from penstock.runtime.probe import measure
from penstock.tier.base import Tier
from penstock.tier.flash import FlashTier
from penstock.tier.host import HostTier


class Stores:
    """The tiers of one session, by name, and the mover between them and the device.

    Attributes:
        tiers: ``"flash"`` and ``"host"``, those that the configuration asks for.
        mover: Moves storages between the device and the tiers.
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        budget: Budget,
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
        self._engine: ThreadEngine | None = None
        self._host_arena: Arena | None = None
        self.mover: Mover = _mover(device, budget)
        wrap = wrap_tier or (lambda tier: tier)
        try:
            if config.directories:
                self._engine = ThreadEngine()
                self.tiers["flash"] = wrap(self._flash(config, self._engine, recorder))
            if config.host_bytes:
                self.tiers["host"] = wrap(self._host(config, recorder))
        except BaseException:
            self.close()
            raise

    def capacity_bytes(self, name: str) -> int:
        """What a tier can hold; 0 if there is none of this name."""
        tier = self.tiers.get(name)
        return 0 if tier is None else tier.spec.capacity_bytes

    def measure(self) -> Machine:
        """The bandwidths of these tiers, measured now."""
        return measure(self.tiers)

    def close(self) -> None:
        """Close everything; what is still in flight is waited for. Idempotent."""
        for tier in self.tiers.values():
            tier.close()
        if self._engine is not None:
            self._engine.close()
        self.mover.close()
        if self._host_arena is not None:
            self._host_arena.close()

    def _flash(self, config: OffloadConfig, engine: ThreadEngine, recorder: Recorder) -> Tier:
        capacity = config.capacity_bytes or _default_capacity(config.directories)
        return FlashTier(
            config.directories, capacity_bytes=capacity, engine=engine, recorder=recorder
        )

    def _host(self, config: OffloadConfig, recorder: Recorder) -> Tier:
        host = Budget(
            config.host_bytes,
            name="host",
            on_change=lambda nbytes: recorder.level("host", nbytes),
        )
        self._host_arena = Arena(config.host_bytes, budget=host, owner="host tier")
        return HostTier(
            self._host_arena, capacity_bytes=self._host_arena.capacity_bytes, recorder=recorder
        )


def _mover(device: torch.device, budget: Budget) -> Mover:
    if device.type == "cpu":
        return CpuMover(budget=budget)
    raise ConfigError(f"tensors on device {str(device)!r} cannot be offloaded; use 'cpu' or 'cuda'")


def _default_capacity(directories: tuple[str, ...]) -> int:
    """Nine tenths of the free space, in equal parts, because a full system disk harms others."""
    free = min(free_space_bytes(path) for path in directories)
    if free < 0:  # a missing directory: the tier says so better
        return GIB
    capacity = round_down(free * 9 // 10, MIB) * len(directories)
    if capacity == 0:
        raise ConfigError(
            f"flash: {', '.join(directories)}: only {format_bytes(free)} are free; free some space,"
            " or name another directory"
        )
    return capacity
