"""Postponement of Python's garbage collection in code that others wait for.

[Note: postponed collections]
    Python traverses all objects of a process after enough were created since the last time; once torch is
    loaded that takes long. It happens when the next object is created, even if training created the
    others. Code that must be quick and creates many objects postpones it to the next step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable automatic collection in the whole process; a context manager and decorator."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
