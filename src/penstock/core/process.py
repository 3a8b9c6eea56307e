"""Guards of objects that a forked child must not use, and what a child releases.

A forked child inherits everything but the threads: what had workers, or locks that one of them held,
must not be used there. ``os.getpid`` asks the kernel each time; a guard is marked in a child by a fork
hook, before which only hooks of modules run that were imported earlier, as those of ``threading``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from penstock.core.errors import ClosedError

T = TypeVar("T")


class ForkGuard:
    """Process that owns an object. All objects made in one process share one guard.

    Attributes:
        pid: Number of the process that owns the object.
        in_child: False in that process, True in every process forked from it.
    """

    __slots__ = ("in_child", "pid")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.in_child = False

    def error(self, what: str, advice: str) -> ClosedError:
        """Return the error that an object is used in a forked child."""
        return ClosedError(
            f"{what} belongs to process {self.pid}, from which this process ({os.getpid()}) was"
            f" forked; {advice}"
        )


_guard = ForkGuard()
_actions: list[Callable[[], object]] = []
_holders: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def fork_guard() -> ForkGuard:
    """Return the guard for objects made now."""
    return _guard


def call_in_child(action: Callable[[], object]) -> None:
    """Have ``action()`` called in every process that is forked from now on."""
    _actions.append(action)


def release_in_child(holder: T, release: Callable[[T], object]) -> None:
    """Have ``release(holder)`` called in every process that is forked while the holder lives.

    Args:
        holder: What has descriptors, say, that a child must not keep open. Not kept alive.
        release: Harmless when repeated, and after the holder was closed.
    """
    _holders[holder] = release


def _begin_child() -> None:
    global _guard  # noqa: PLW0603  (objects of the child have another one)
    _guard.in_child = True
    _guard = ForkGuard()
    with ExitStack() as stack:  # each is called, also after one that fails
        for holder, release in reversed(list(_holders.items())):
            stack.callback(release, holder)
        for action in reversed(_actions):
            stack.callback(action)
    _holders.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)
