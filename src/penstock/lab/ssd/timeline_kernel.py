"""The hot loop of the fast path, with Numba and without the GIL, of :mod:`.timeline`."""

from __future__ import annotations

from typing import Final

from numba import njit

from penstock.lab.ssd import timeline

run_channel: Final = njit(nogil=True, cache=True)(timeline.run_channel)
