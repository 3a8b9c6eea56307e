"""Common style of Penstock's plots: colours, axes, units, and thinning of long curves."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS: Final = 4000
"""Approximate maximum number of points of a curve: more than there are pixels."""
COLOURS: Final = ("#0b6e99", "#d9730d", "#4d6461", "#ad1a72", "#6940a5")
BUDGET_COLOUR: Final = "#c4342d"
INK: Final = "#2b2f33"
FAINT: Final = "#8a9199"
STYLE: Final = {"font.family": "DejaVu Sans", "font.size": 10, "svg.hashsalt": "penstock"}


def matplotlib() -> tuple[Any, ...]:
    """Import matplotlib's ``figure``, ``style`` and ``patheffects``, without pyplot's global state.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    names = ("figure", "style", "patheffects")
    try:
        return tuple(importlib.import_module(f"matplotlib.{name}") for name in names)
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib, which is not installed: pip install 'penstock[plot]'"
        ) from error


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a picture; the file's suffix decides the format.

    Raises:
        ConfigError: The file cannot be written in that format.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot {str(path)!r} cannot be written: {error}") from error


def unit_of(top_bytes: int) -> tuple[int, str]:
    """Return the unit for an axis that ends at ``top_bytes``: its size in bytes, and its name."""
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if top_bytes >= scale:
            return scale, unit
    return 1, "B"


def dress(axis: Axes, title: str, label: str, *, grid: str = "y") -> None:
    """Give an axis its title, label, faint grid lines, and a frame at the left and bottom only."""
    axis.set_title(title, loc="left", fontsize=10, color=INK)
    axis.set_ylabel(label, color=INK)
    axis.grid(axis=grid, color="#d8dde1", linewidth=0.6)  # type: ignore[arg-type]
    axis.set_axisbelow(True)
    axis.tick_params(colors=FAINT, labelcolor=INK, labelsize=9)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(FAINT)


def thinned(
    times: npt.NDArray[np.float64], levels: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return a curve of about ``MAX_POINTS`` points at most, with all its peaks and dips."""
    if len(levels) <= MAX_POINTS:
        return times, levels
    chosen: set[int] = {0, len(levels) - 1}
    for part in np.array_split(np.arange(len(levels)), MAX_POINTS // 2):
        chosen.add(int(part[levels[part].argmax()]))
        chosen.add(int(part[levels[part].argmin()]))
    index = np.array(sorted(chosen))
    return times[index], levels[index]
