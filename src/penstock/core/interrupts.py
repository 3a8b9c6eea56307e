"""Ctrl-C that comes while a finalizer runs: Python prints a line, and forgets it.

While torch computes, a signal waits for the next line of Python; in forward and backward that is often
the finalizer of a handle that autograd lets go of. So without this many a Ctrl-C would have no effect.
"""

from __future__ import annotations

import sys
import threading
from typing import Any


class LostInterrupts:
    """Remembers what a finalizer swallowed, to be raised where it does no harm."""

    def __init__(self) -> None:
        """Nothing is remembered before ``open``."""
        self._lost = False
        self._before = sys.unraisablehook

    def open(self) -> None:
        """Remember from now on, if this is the main thread: signals come to no other."""
        if threading.current_thread() is threading.main_thread():
            self._before = sys.unraisablehook
            sys.unraisablehook = self._hear

    def close(self) -> None:
        """Leave it to Python again. Idempotent."""
        if sys.unraisablehook == self._hear:  # else somebody has come after us, and calls it still
            sys.unraisablehook = self._before

    def _hear(self, unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._lost = True
        else:
            self._before(unraisable)

    def raise_lost(self) -> None:
        """Raise KeyboardInterrupt if one was swallowed, once."""
        if self._lost:
            self._lost = False
            raise KeyboardInterrupt
