"""What is asked for: which networks, how large, how often, beside what. Loads neither NumPy nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

from penstock.core.errors import ConfigError
from penstock.core.fs import check_directory
from penstock.lab.characterize.networks import NETWORKS

Parallel = Literal["none", "ddp", "pipeline"]

LEAST_SCALE: Final = 0.05
_STEPS_AT_FULL_SCALE: Final = 100
_LEAST_STEPS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One run of the experiment. Checks itself: raises ConfigError."""

    networks: tuple[str, ...] = tuple(NETWORKS)
    """Of the nine, in the order in which they are measured."""
    epochs: int = 3
    """The poster's number. After each epoch every way to save is measured once."""
    parallel: Parallel = "none"
    """``ddp`` and ``pipeline``: two processes, or on CUDA as many as there are devices for ``ddp``."""
    colocate: int = 1
    """How many copies, or programs of each kind, run beside a job; 0: that is left out."""
    scale: float = 0.25
    """What depths and widths are multiplied by; 1 is the published network. See ``networks``."""
    steps: int | None = None
    """Steps of an epoch; None: 100 times the scale, and 4 at least."""
    seconds: float = 1.0
    """How long each neighbour is looked at, at least."""
    directory: str = "."
    """Where checkpoints and suspended jobs go: on the device that is characterized."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.networks if name not in NETWORKS]
        if unknown or not self.networks:
            raise ConfigError(
                f"networks: {', '.join(map(repr, unknown)) or 'none'} is not one of the poster's nine:"
                f" {', '.join(NETWORKS)}"
            )
        if len(set(self.networks)) < len(self.networks):
            raise ConfigError(f"networks: {', '.join(self.networks)} names one of them twice")
        if not LEAST_SCALE <= self.scale <= 1:
            raise ConfigError(
                f"scale={self.scale} is not between {LEAST_SCALE} and 1; 1 is the published network"
            )
        if self.parallel not in get_args(Parallel):
            raise ConfigError(f"parallel={self.parallel!r} is not none, ddp or pipeline")
        _check_count("epochs", self.epochs, 1)
        _check_count("colocate", self.colocate, 0)
        if self.steps is not None:
            _check_count("steps", self.steps, 1)
        if not 0 < self.seconds < 3600:
            raise ConfigError(f"seconds={self.seconds} is not between 0 and 3600")
        check_directory(
            self.directory, "the directory for checkpoints", allow_memory_filesystem=True
        )

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch."""
        return self.steps or max(_LEAST_STEPS, round(_STEPS_AT_FULL_SCALE * self.scale))

    def to_json(self) -> dict[str, Any]:
        """Without the directory: results are published."""
        made = asdict(self) | {"networks": list(self.networks), "steps": self.epoch_steps}
        del made["directory"]
        return made

    @classmethod
    def from_json(cls, document: Mapping[str, Any], directory: str) -> Settings:
        """The inverse of ``to_json``."""
        fields = {**document, "networks": tuple(document["networks"]), "directory": directory}
        return cls(**fields)


def _check_count(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}={value} must not be below {least}")
