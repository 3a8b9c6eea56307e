"""Settings of a run: networks, their size, repetitions, neighbours. Loads neither NumPy nor torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

from penstock.core.errors import ConfigError
from penstock.lab.characterize.networks import NETWORKS

Parallel = Literal["none", "ddp", "pipeline"]

MIN_SCALE: Final = 0.05
_STEPS_AT_FULL_SCALE: Final = 100
_MIN_STEPS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one run of the experiment; invalid values raise ConfigError."""

    networks: tuple[str, ...] = tuple(NETWORKS)
    """Names of networks, in the order in which they are measured; may be empty if there is a mix."""
    mix: tuple[str, ...] = ()
    """Names of networks to be trained at the same time, a job of each, after the others."""
    epochs: int = 3
    """Number of epochs; the default is the poster's. After each, every way to save is measured once."""
    parallel: Parallel = "none"
    """Kind of parallelism: two processes; ``ddp`` on CUDA: one for each device."""
    colocate: int = 1
    """Number of copies, and of programs of each kind, that run beside a job; 0 measures none."""
    scale: float = 0.25
    """Factor of depths and widths; 1 is the published network. See ``networks``."""
    steps: int | None = None
    """Steps of an epoch; None means 100 times the scale, and at least 4."""
    threads: int | None = None
    """Threads of each process; None: torch's default, or a rank's share of the cores. Jobs of a mix that
    have all cores each wait for one another's threads."""
    seconds: float = 1.0
    """Shortest time for which each neighbour is measured."""
    directory: str = "."
    """Directory for checkpoints and suspended jobs, on the device to characterize."""

    def __post_init__(self) -> None:
        _check_names("networks", self.networks, least=0 if self.mix else 1)
        _check_names("mix", self.mix, least=2 if self.mix else 0)
        if not MIN_SCALE <= self.scale <= 1:
            raise ConfigError(
                f"scale={self.scale} is not between {MIN_SCALE} and 1; 1 is the published network"
            )
        if self.parallel not in get_args(Parallel):
            raise ConfigError(f"parallel={self.parallel!r} is not none, ddp or pipeline")
        if self.mix and self.parallel != "none":
            raise ConfigError(
                f"mix does not go with parallel={self.parallel!r}: each of its jobs is one process"
            )
        _check_count("epochs", self.epochs, 1)
        _check_count("colocate", self.colocate, 0)
        for name in ("steps", "threads"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 1)
        if not 0 < self.seconds < 3600:
            raise ConfigError(f"seconds={self.seconds} is not between 0 and 3600")
        if not os.path.isdir(self.directory):  # --help and --merge write nothing
            raise ConfigError(
                f"the directory for checkpoints {self.directory!r} does not exist, or is not a directory;"
                " name another"
            )

    @property
    def epoch_steps(self) -> int:
        """Number of steps of an epoch."""
        return self.steps or max(_MIN_STEPS, round(_STEPS_AT_FULL_SCALE * self.scale))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, without the directory, which would be published with the results."""
        made = asdict(self) | {"steps": self.epoch_steps}
        made |= {"networks": list(self.networks), "mix": list(self.mix)}
        del made["directory"]
        return made

    @classmethod
    def from_json(cls, document: Mapping[str, Any], directory: str) -> Settings:
        """Return the settings that ``to_json`` has written, with this directory."""
        names = {name: tuple(document.get(name, ())) for name in ("networks", "mix")}
        fields = {**document, **names, "directory": directory}
        return cls(**fields)


def _check_names(name: str, values: tuple[str, ...], least: int) -> None:
    unknown = [each for each in values if each not in NETWORKS]
    if unknown:
        raise ConfigError(
            f"{name}: {', '.join(map(repr, unknown))} is not one of the poster's nine:"
            f" {', '.join(NETWORKS)}"
        )
    if len(set(values)) < len(values):
        raise ConfigError(f"{name}: {', '.join(values)} names one of them twice")
    if not values and least:
        raise ConfigError(f"{name}: there is none; name one, or a mix of two or more")
    if len(values) < least:
        raise ConfigError(f"{name}: {', '.join(values)} is one network; name two or more")


def _check_count(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}={value} must not be below {least}")
