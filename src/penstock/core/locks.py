"""Locks that are safe to use with finalizers.

[Note: finalizers]
    A packed tensor, a storage made from an arena block, a dropped graph: each frees its resources in a
    finalizer, and the garbage collector may run a finalizer between any two bytecodes, even while this
    very thread holds one of Penstock's locks. Taking that lock again would deadlock, and a reentrant lock
    would let the finalizer see inconsistent state. So every lock of Penstock is a ``Lock`` of this
    module, which counts the locks held per thread, and finalizers call ``defer(action, ...)``: it runs
    the action at once if the thread holds no lock, else when it releases its last one. An action may
    take locks; it must not raise, log, or wait for I/O.

    Python's own table of threads also has a lock, and the collector may run a finalizer while this thread
    holds that, when it starts a thread or becomes one. If the finalizer then took a lock of Penstock
    whose holder starts a thread, the two would wait for each other, and so would every thread that is
    started from then on. So the action is left to the next thread that releases a lock of Penstock.

[Note: signals]
    The main thread runs handlers of signals where Python checks for them: when a function begins, after
    a call, and where a loop goes back. A handler may raise, as that of Ctrl-C does. So there must be no
    such place between the taking of a lock and the block that releases it, nor before the release in what
    is called to release it. A lock is taken by ``True in iterator``, whose iterator calls ``acquire``:
    Python does not check after an operator. What releases a lock is marked by ``unlocks``, and begins
    without a check, as a generator does that goes on within ``yield from``.
"""

from __future__ import annotations

import dis
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar

from penstock.core.process import call_in_child

_Function = TypeVar("_Function", bound=Callable[..., Any])

_RESUME: Final = dis.opmap["RESUME"]
_AFTER_YIELD_FROM: Final = 2
"""Operand of a RESUME that checks for no signals: a handler runs in what is yielded from."""


def unlocks(function: _Function) -> _Function:
    """Let a function begin without a check for signals; see [Note: signals]."""
    code = bytearray(function.__code__.co_code)
    for at in range(0, len(code), 2):
        if code[at] == _RESUME and code[at + 1] == 0:
            code[at + 1] = _AFTER_YIELD_FROM
            break
    function.__code__ = function.__code__.replace(co_code=bytes(code))
    return function


class _Held(threading.local):
    count = 0


_held = _Held()
_deferred: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
_in_table_of_threads: Callable[[], bool]
"""Function that returns True if this thread holds the lock of Python's table of threads."""


def _find_table_of_threads() -> None:
    """Find the lock, which is private to Python; without it, the deadlock of the note is possible."""
    global _in_table_of_threads  # noqa: PLW0603  (a child that was forked has another one)
    lock = getattr(threading, "_active_limbo_lock", None)
    _in_table_of_threads = getattr(lock, "_is_owned", bool)


_find_table_of_threads()
call_in_child(_deferred.clear)  # a forked child has nothing of its parent's to give back
call_in_child(_find_table_of_threads)


class Lock:
    """Mutual exclusion lock, not reentrant; works as the lock of a ``threading.Condition``.

    Attributes:
        bare: The underlying, uncounted lock. For deferred actions only: while one runs, the finalizers
            of its thread wait in any case.
    """

    __slots__ = ("_lock", "_taking", "bare")

    def __init__(self) -> None:
        self.renew()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, as ``threading.Lock.acquire``. Not for what a signal may interrupt."""
        _held.count += 1
        taken = False
        try:
            taken = self._lock.acquire(blocking, timeout)
        finally:
            if not taken:  # timeout, or Ctrl-C while waiting
                _held.count -= 1
        return taken

    @unlocks
    def release(self) -> None:
        """Release the lock; run deferred actions if it was this thread's last."""
        try:
            self._lock.release()
        finally:
            _held.count -= 1
        if _deferred and not _held.count:
            run_deferred()

    def renew(self) -> None:
        """Unlock it, in a forked child: a thread that held it there is gone."""
        self._lock = self.bare = threading.Lock()
        self._taking = iter(self._lock.acquire, False)  # `True in` it takes the lock

    def _refuse(self) -> NoReturn:
        """Raise RuntimeError, as the lock was not taken: its iterator has ended, and is made anew."""
        self._taking = iter(self._lock.acquire, False)
        raise RuntimeError("a signal's handler has raised StopIteration")

    def _is_owned(self) -> bool:
        """Return True if locked, for ``threading.Condition``, which else tries to take the lock."""
        return self._lock.locked()

    @unlocks
    def _release_save(self) -> None:
        """Unlock for ``Condition.wait``; if that is interrupted, it is locked again."""
        try:
            self.release()
        except BaseException:
            self._acquire_restore(None)
            raise

    @unlocks
    def _acquire_restore(self, _: object) -> None:
        """Lock after ``Condition.wait``, also if that is interrupted, which is raised then."""
        interrupt: BaseException | None = None
        while True:
            try:
                self.__enter__()
                break
            except BaseException as error:  # noqa: BLE001  (raised below)
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> None:
        _held.count += 1
        try:
            if True not in self._taking:  # see [Note: signals]
                self._refuse()
        except BaseException:  # Ctrl-C while waiting
            _held.count -= 1
            raise

    @unlocks
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            self._lock.release()  # as release(), without a call: this is hot
        finally:
            _held.count -= 1
        if _deferred and not _held.count:
            run_deferred()


def defer(action: Callable[..., None], *args: object) -> None:
    """Call ``action(*args)`` as soon as this thread holds no lock of Penstock, possibly now.

    See [Note: finalizers] for a thread that is starting another one.
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
    """Run every deferred action, this thread's and those of other threads."""
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


class Condition(threading.Condition):
    """Condition variable on a ``Lock``, quicker than Python's own where nobody waits: that is hot."""

    _lock: Lock

    def __enter__(self) -> bool:
        """Take the lock, as ``Lock`` does, without a call of it."""
        _held.count += 1
        try:
            if True not in self._lock._taking:
                self._lock._refuse()
            return True
        except BaseException:  # Ctrl-C while waiting
            _held.count -= 1
            raise

    @unlocks
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Release the lock, as ``Lock`` does."""
        try:
            self._lock._lock.release()
        finally:
            _held.count -= 1
        if _deferred and not _held.count:
            run_deferred()

    def notify_all(self) -> None:
        """Wake all that wait. Under the lock."""
        if self._waiters:  # type: ignore[attr-defined]
            super().notify_all()


def condition(lock: Lock | None = None) -> Condition:
    """Return a condition variable on a ``Lock`` of this module, a new one by default."""
    return Condition(Lock() if lock is None else lock)  # type: ignore[arg-type]
