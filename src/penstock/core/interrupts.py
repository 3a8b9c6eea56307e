"""Recovery of a Ctrl-C that arrives while a finalizer runs, which Python prints and then ignores.

While torch computes, a signal waits for the next line of Python; in forward and backward that is often
the finalizer of a handle that autograd drops. So without this, Ctrl-C would often have no effect.
"""

from __future__ import annotations

import sys
import threading
from typing import Any


class LostInterrupts:
    """KeyboardInterrupts that finalizers swallowed, to be raised later at a safe place."""

    def __init__(self) -> None:
        """Start inactive; ``open`` activates it."""
        self._lost = False
        self._before = sys.unraisablehook

    def open(self) -> None:
        """Record interrupts from now on if this is the main thread, the only one that gets signals."""
        if threading.current_thread() is threading.main_thread():
            self._before = sys.unraisablehook
            sys.unraisablehook = self._record

    def close(self) -> None:
        """Restore Python's behaviour. Idempotent."""
        if sys.unraisablehook == self._record:  # otherwise a later hook still calls this one
            sys.unraisablehook = self._before

    def _record(self, unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._lost = True
        else:
            self._before(unraisable)

    def raise_lost(self) -> None:
        """Raise KeyboardInterrupt once if one was swallowed."""
        if self._lost:
            self._lost = False
            raise KeyboardInterrupt
