"""How an optimizer's states are kept: one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.core.files import given_paths
from penstock.core.ranks import own_directories
from penstock.core.units import parse_bytes
from penstock.optim.formats import FORMATS, UNIT

TILE: Final = 1 << 20
RING: Final = 8
"""Buffers at least: two being updated, three on their way in and three on their way out."""
RING_BYTES: Final = 96
"""Bytes of the ring for each parameter of a tile: eight records of Adam with whole masters, and more of
those that are shorter, so that as many bytes are under way in every format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatesConfig:
    """Settings of states on flash: directories, format, and when they are updated."""

    flash: str | Path | tuple[str | Path, ...] = ()
    """Directories, best on different SSDs; each record is spread over all of them."""

    flash_by_rank: bool = False
    """True if the ranks on a machine divide the directories by ``LOCAL_RANK``, as they do those of a
    session with this setting."""

    host_memory: int | str = 0
    """Memory for tiles that stay, and for the ring that others pass through; the ring alone, of
    ``RING_BYTES`` for each parameter of a tile (96 MiB), is there even if this is less. 0: the ring, and
    with weights on flash, tiles for which a session has memory left."""

    gradient_memory: int | str | None = None
    """Memory for gradients that wait for their tile. Those beyond it are written to flash, in their own
    dtype, and come back when they are added to or used. ``None``: all stay in memory, but those of
    weights on flash only if a session has memory left for them."""

    format: str = "exact"
    """How states are kept, where a parameter group does not say it itself by its key ``"format"``: one
    of ``FORMATS``."""

    master: bool | None = None
    """True if 16-bit parameters have a float32 master. ``None``: as the optimizer is made for."""

    durable: bool = False
    """True if each step is on flash, weights and all, before ``step`` returns, so that a run that was
    killed can go on after it. Otherwise states are scratch: they are gone when the process is."""

    overlap: bool = False
    """True if tiles are updated while backward goes on, as gradients become final. Gradients must then
    not be changed between backward and ``step``."""

    squeeze: bool | None = None
    """True if records are made shorter, without loss, on their way to flash; ``None``: where it pays,
    which is measured, and not with ``overlap``."""

    accumulation: int = 1
    """With ``overlap``: how many backwards make a step; gradients are final in the last of them."""

    clip_norm: float | None = None
    """Clip the gradients' 2-norm to this. With ``overlap`` the norm is that of the step before, since
    this one's is not known in time."""

    clip_group: Any = None
    """Process group of ``torch.distributed`` over whose ranks the norm of ``clip_norm`` is taken, for
    ranks with different parameters; all of them call ``step``. The norm of DTensors is that of the ranks
    of their mesh without it. Stages of a pipeline need it in any case: a group with one rank of each."""

    threads: int | None = None
    """Tiles updated at once; ``None``: two, or one with ``overlap`` or on one core."""

    tile: int = TILE
    """Parameters in a tile, a multiple of 256."""

    seed: int = 0
    """Seed of the random rounding in compact formats."""

    tbw: int | str | None = None
    """Bytes written that the SSD is rated for, as ``"600TB"``."""

    planned_steps: int | None = None
    """How many steps the run will make; a warning tells if that is beyond ``tbw``."""

    allow_memory_filesystem: bool = False
    """Accept a directory in memory, where states save none; for tests."""

    def __post_init__(self) -> None:
        """Turn sizes into bytes and directories into a tuple; check them together."""
        object.__setattr__(self, "flash", given_paths(self.flash, "flash"))
        for name in ("host_memory", "gradient_memory", "tbw"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_bytes(value, what=name))
        if not self.directories:
            raise ConfigError("an optimizer on flash needs a directory: flash='/nvme/spill'")
        if self.format not in FORMATS:
            raise ConfigError(f"format {self.format!r} is none of {', '.join(FORMATS)}")
        for name in ("tile", "accumulation", "threads", "planned_steps"):
            value = getattr(self, name)
            if value is None and name in ("threads", "planned_steps"):
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ConfigError(f"{name}={value!r} must be an integer, 1 or more")
            object.__setattr__(self, name, int(value))
        if self.tile % UNIT:
            raise ConfigError(f"tile={self.tile} is not a multiple of {UNIT}")
        if self.accumulation > 1 and not self.overlap:
            raise ConfigError("accumulation is told only with overlap=True: step() knows otherwise")
        self._check_clipping()

    def _check_clipping(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm={self.clip_norm} must be more than 0")
        if self.clip_group is None:
            return
        if self.clip_norm is None:
            raise ConfigError(
                "clip_group says over which ranks clip_norm=... is the norm; set that too"
            )
        from torch import distributed  # noqa: PLC0415  (there is none without a group)

        is_group = isinstance(self.clip_group, distributed.ProcessGroup)
        if not is_group or distributed.get_rank(self.clip_group) < 0:
            raise ConfigError(
                f"clip_group is {self.clip_group!r}, but must be a process group of torch.distributed"
                " that this rank is in"
            )

    @property
    def directories(self) -> tuple[str, ...]:
        """``flash`` as strings, or this rank's part of it."""
        assert isinstance(self.flash, tuple)
        return own_directories(self.flash, by_rank=self.flash_by_rank)

    @property
    def gradient_bytes(self) -> int | None:
        """``gradient_memory`` in bytes."""
        assert not isinstance(self.gradient_memory, str)
        return self.gradient_memory

    @property
    def lets_gradients_wait(self) -> bool:
        """True if gradients wait for others before they are used; with ``overlap`` few do."""
        return not self.overlap or self.accumulation > 1 or self.clip_norm is not None

    @property
    def host_bytes(self) -> int:
        """``host_memory`` in bytes."""
        assert isinstance(self.host_memory, int)
        return self.host_memory
