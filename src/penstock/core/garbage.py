"""Python's garbage collector, held off while others wait.

[Note: owed collections]
    Python looks through all that a process has when enough has been made since the last time; once torch
    is there that takes long. It falls to whoever makes the next object, though it was training that made
    the others. What has to be quick, and makes many objects, leaves it to the next step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Within, or in what it decorates, nothing is collected unless asked for; in the whole process."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
