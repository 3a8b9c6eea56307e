"""How well an order is shuffled, beside a true shuffle of as many samples.

Three figures, each 1 for a uniformly random permutation, on average, and 0 for none at all:

- *displacement*: how far samples are delivered from where they rest, on average, over n/3;
- *spread*: of 1000 equal regions of the set, how many a batch touches, over what is expected;
- *separation*: how far apart neighbours of the set are delivered, on average, over n/3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.data.permutation import Numbers

_REGIONS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Ratios to a true shuffle."""

    displacement: float
    spread: float
    separation: float


def quality_of(samples: Numbers, *, total: int, batch_size: int = 64) -> Quality:
    """Measure an epoch, or the beginning of one.

    Args:
        samples: In the order of delivery.
        total: How many the set has.
        batch_size: Of the batches whose spread is measured.
    """
    places = np.linspace(0, len(samples) - 1, len(samples)) * (total / max(1, len(samples)))
    displacement = float(np.abs(samples - places).mean()) / (total / 3)
    return Quality(
        displacement=displacement,
        spread=_spread(samples, total, batch_size),
        separation=_separation(samples, total),
    )


def _spread(samples: Numbers, total: int, batch_size: int) -> float:
    regions = min(_REGIONS, total)
    batches = samples[: len(samples) // batch_size * batch_size].reshape(-1, batch_size)
    if not len(batches):
        return float("nan")
    ordered = np.sort(batches * regions // total, axis=1)
    touched = 1 + (np.diff(ordered, axis=1) != 0).sum(axis=1)
    return float(touched.mean() / (regions * (1 - (1 - 1 / regions) ** batch_size)))


def _separation(samples: Numbers, total: int) -> float:
    when = np.full(total, -1, np.int64)
    when[samples] = np.arange(len(samples))
    both = (when[:-1] >= 0) & (when[1:] >= 0)
    if not both.any():
        return float("nan")
    apart = np.abs(np.diff(when))[both].mean()
    return float(apart / (len(samples) / 3))
