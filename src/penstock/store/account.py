"""Account of one memory: bytes are charged before use and freed after; the limit is never exceeded.

[Note: budgets never deadlock]
    ``try_take`` never waits. A thread that must wait does so on ``changed``, and while waiting holds
    nothing that only another waiter could free: the runtime waits in ``pack`` holding no budget for the
    tensor being packed, and never waits for a read while it could drop a prefetched block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.core.errors import ConfigError
from penstock.core.locks import Lock


class Account:
    """Bytes of one memory, by owner. Thread-safe.

    Attributes:
        name: Name of the memory: ``"device"``, ``"host"``.
        limit_bytes: Limit of all owners together.
        advisory: True if the limit is an estimate, which may be exceeded as a last resort.
        changed: Notified whenever bytes are freed.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        name: str = "device",
        on_change: Callable[[int], None] | None = None,
    ) -> None:
        """Make an empty account.

        Args:
            limit_bytes: Limit of all owners together.
            name: Name of the memory.
            on_change: Called with the bytes in use after every change, under the account's lock, so
                it must be quick and must not call back.
        """
        if limit_bytes < 0:
            raise ConfigError(f"the {name} budget is {limit_bytes} bytes; it must be zero or more")
        self.name = name
        self.limit_bytes = limit_bytes
        self.advisory = False
        self._lock = Lock()
        self.changed = threading.Condition(self._lock)  # type: ignore[arg-type]
        self._used: dict[str, int] = {}
        self._total = 0
        self._peak = 0
        self._on_change = on_change

    @property
    def used_bytes(self) -> int:
        """Bytes taken now."""
        return self._total

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be taken; negative while forced takes are over the limit."""
        return self.limit_bytes - self._total

    @property
    def peak_bytes(self) -> int:
        """Most bytes taken at any one time since ``reset_peak``."""
        return self._peak

    def used_by(self, owner: str) -> int:
        """Return the bytes that one owner has taken."""
        return self._used.get(owner, 0)

    def try_take(self, nbytes: int, owner: str) -> bool:
        """Take ``nbytes`` for ``owner`` if they fit under the limit; return True if they did."""
        with self._lock:
            total = self._total + nbytes
            if total > self.limit_bytes:
                return False
            self._used[owner] = self._used.get(owner, 0) + nbytes  # as _add, without a call: hot
            self._total = total
            self._peak = max(self._peak, total)
            if self._on_change is not None:
                self._on_change(total)
            return True

    def force(self, nbytes: int, owner: str) -> None:
        """Take ``nbytes`` even over the limit: the last resort if a disk failed."""
        with self._lock:
            self._add(nbytes, owner)

    def free(self, nbytes: int, owner: str) -> None:
        """Free ``nbytes`` of ``owner``."""
        with self._lock:
            left = self._used.get(owner, 0) - nbytes
            assert left >= 0, f"{owner} frees {nbytes} bytes but holds {left + nbytes}"
            self._used[owner] = left
            self._total -= nbytes
            if self._on_change is not None:
                self._on_change(self._total)
            self.changed.notify_all()

    def move(self, nbytes: int, source: str, target: str) -> None:
        """Move ``nbytes`` from one owner to another; the total does not change."""
        with self._lock:
            held = self._used.get(source, 0)
            assert nbytes <= held, f"{source} moves {nbytes} bytes but holds {held}"
            self._used[source] = held - nbytes
            self._used[target] = self._used.get(target, 0) + nbytes

    def reset_peak(self) -> None:
        """Reset the peak to the bytes taken now."""
        with self._lock:
            self._peak = self._total

    def _add(self, nbytes: int, owner: str) -> None:
        self._used[owner] = self._used.get(owner, 0) + nbytes
        self._total += nbytes
        self._peak = max(self._peak, self._total)
        if self._on_change is not None:
            self._on_change(self._total)
