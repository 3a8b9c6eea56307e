"""Child processes that end with their parent. Loads neither NumPy nor torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def exit_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit now if the parent has already ended.

    Args:
        parent: Process id of the parent, as the parent passed it on.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
