"""Whether this is still the process in which something was made.

A forked child inherits everything but the threads: what had workers, or locks that one of them held,
must not be used there. ``os.getpid`` asks the kernel each time; this is told when a process forks.
"""

from __future__ import annotations

import os


class Process:
    """The running process.

    Attributes:
        pid: Its number, right also in a child made by ``os.fork``.
    """

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    def refresh(self) -> None:
        """It has forked."""
        self.pid = os.getpid()


this = Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=this.refresh)
