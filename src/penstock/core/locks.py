"""Locks that finalizers may meet.

[Note: finalizers]
    A packed tensor, a storage made from an arena block, a dropped graph: each gives back what it
    held from a finalizer, and the garbage collector may run a finalizer between any two bytecodes,
    also while this very thread holds one of our locks. Taking that lock again would deadlock, and a
    reentrant lock would let the finalizer see half-made state. So every lock of Penstock is a
    ``Lock`` of this module, which counts per thread how many are held, and finalizers say
    ``defer(action, ...)``: done at once if the thread holds none, else when it lets go of the last.
    An action may take locks; it must not raise, log, or wait for I/O.

    Python's own table of threads has a lock, too, and the collector may run a finalizer while this thread
    holds that: as it starts a thread or becomes one. If the finalizer then took a lock of ours whose
    holder starts a thread, the two would wait for each other, and so would every thread that is started
    from then on. So the action is left to whoever lets go of a lock of ours next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from penstock.core.process import call_in_child


class _Held(threading.local):
    count = 0


_held = _Held()
_deferred: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
_in_table_of_threads: Callable[[], bool]
"""Whether this thread holds the lock of Python's table of threads; see [Note: finalizers]."""


def _find_table_of_threads() -> None:
    """Look the lock up. It is private to Python: without it, such a deadlock is as likely as it was."""
    global _in_table_of_threads  # noqa: PLW0603  (a child that was forked has another one)
    lock = getattr(threading, "_active_limbo_lock", None)
    _in_table_of_threads = getattr(lock, "_is_owned", bool)


_find_table_of_threads()
call_in_child(_deferred.clear)  # a forked child has nothing of its parent's to give back
call_in_child(_find_table_of_threads)


class Lock:
    """A mutual exclusion lock, not reentrant; works as the lock of a ``threading.Condition``.

    Attributes:
        bare: What it locks by, uncounted. For deferred actions only: while one runs, its thread's
            finalizers wait in any case.
    """

    __slots__ = ("_lock", "bare")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bare = self._lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, as ``threading.Lock.acquire``."""
        _held.count += 1
        taken = False
        try:
            taken = self._lock.acquire(blocking, timeout)
        finally:
            if not taken:  # in vain, or Ctrl-C came while waiting
                _held.count -= 1
        return taken

    def release(self) -> None:
        """Let go of the lock; run what finalizers deferred if it was this thread's last."""
        self._lock.release()
        _held.count -= 1
        if _deferred and not _held.count:
            run_deferred()

    def _is_owned(self) -> bool:
        """For ``threading.Condition``, which otherwise tries to take the lock to find out."""
        return self._lock.locked()

    def __enter__(self) -> None:
        _held.count += 1
        try:
            self._lock.acquire()
        except BaseException:  # Ctrl-C came while waiting
            _held.count -= 1
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._lock.release()  # as release(), without a call: this is hot
        _held.count -= 1
        if _deferred and not _held.count:
            run_deferred()


def defer(action: Callable[..., None], *args: object) -> None:
    """Call ``action(*args)`` as soon as this thread holds none of our locks: now, if that is so now.

    But see [Note: finalizers] for a thread that is starting another one.
    """
    if _held.count or _in_table_of_threads():
        _deferred.append((action, args))
        return
    _held.count = 1  # an action's own finalizers join the queue instead of nesting
    try:
        action(*args)
    finally:
        _held.count = 0
    if _deferred:
        run_deferred()


def run_deferred() -> None:
    """Run every deferred action, this thread's and those that other threads left."""
    _held.count += 1
    try:
        while _deferred:
            try:
                action, args = _deferred.popleft()
            except IndexError:  # another thread was quicker
                break
            action(*args)
    finally:
        _held.count -= 1


def condition() -> threading.Condition:
    """A condition variable on a ``Lock`` of this module."""
    return threading.Condition(Lock())  # type: ignore[arg-type]
