"""Account of one memory: bytes are charged before use and freed after; no limit is exceeded.

[Note: one account]
    ``host_account`` is the account of all that Penstock holds in this process's memory. What a product
    holds is charged to a *child* of it, with a limit of its own or without, and so to both. Its limit
    therefore bounds all products together. A device with memory of its own has an account of its own.

    A child, its parent and their other descendants share one lock and one condition, because bytes that
    are freed anywhere may be what somebody elsewhere waits for.

    If a parent refuses, idle memory of other products' pools is freed first (``pool.free_idle``). If
    that is not enough, it is the client's decision: the runtime evicts, waits a moment for other
    products, and then raises ``BudgetError``; tiers are full; checkpoints and optimizers use fewer
    buffers, loaders less to read into, and raise ``BudgetError`` if not even the least fits; buffers that
    make memory free, as those of suspending, are forced. ``Account.refusal`` makes the error, with a
    table of what holds the memory.

[Note: accounts that yield]
    Saved tensors and weights on flash can be moved away, and buffers cannot. So their accounts *yield*
    (``yield_by``): if another one of the same memory is refused, ``make_room`` has them begin to free as
    much, and waits until the bytes fit, for ``PATIENCE_S`` at most; not at all if they hold less than is
    missing. Freed bytes are kept for the account that needs them: meanwhile those that yield are
    refused as if they were taken. A pool does so before it refuses a block, so a buffer is only refused
    if nothing more can be moved. The host tier does not, because saved tensors are moved there. An
    account that yields asks the others itself, when it has nothing left to free: saved tensors do.

[Note: budgets never deadlock]
    ``try_take`` never waits. A thread that must wait does so on ``changed``, and while waiting holds
    nothing that only another waiter could free: the runtime waits in ``pack`` holding no budget for the
    tensor being packed, and never waits for a read while it could drop a prefetched block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from penstock.core.config import UNLIMITED
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.locks import Lock, condition, defer
from penstock.core.process import ForkGuard, call_in_child, fork_guard, release_in_child
from penstock.core.units import format_bytes

PATIENCE_S: Final = 2.0
"""Longest wait for memory that other owners begin to free."""
HOST: Final = "memory"
"""Name of the process's account of host memory."""


class Holding(NamedTuple):
    """Bytes of one owner."""

    nbytes: int
    """Bytes now."""
    peak_bytes: int
    """Most bytes at any one time since ``reset_peak``."""


class _Bytes:
    """Running count of bytes, and its peak."""

    __slots__ = ("now", "peak")

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0


class Account:
    """Bytes of one memory, by owner. Thread-safe.

    Attributes:
        name: Name of the memory: ``"device"``, ``"host"``.
        limit_bytes: Limit of all owners together, children included; ``UNLIMITED`` if there is none. May
            be set, also below what is held: takes are refused then until enough is freed.
        may_reach_bytes: Limit that it may be given later, if more; pools reserve addresses for it.
        advisory: True if the limit is an estimate, which may be exceeded as a last resort.
        extend: Raises the limit by so many bytes, of what is left to others, and returns True; None, or
            False: it cannot be raised.
        changed: Notified whenever bytes are freed, in this account or one of the same memory.
        parent: Account that its bytes are charged to as well; None if there is none.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        *,
        name: str = "device",
        on_change: Callable[[int], None] | None = None,
        parent: Account | None = None,
        owner: str = "",
    ) -> None:
        """Make an empty account.

        Args:
            limit_bytes: Limit of all owners together; None: no limit.
            name: Name of the memory, for errors.
            on_change: Called with the bytes in use after every change, under the account's lock, so
                it must be quick and must not call back.
            parent: See ``child``.
            owner: See ``child``.

        Raises:
            ConfigError: The limit is negative.
        """
        if limit_bytes is not None and limit_bytes < 0:
            raise ConfigError(f"the {name} budget is {limit_bytes} bytes; it must be zero or more")
        self.name = name
        self.limit_bytes = UNLIMITED if limit_bytes is None else limit_bytes
        self.may_reach_bytes = 0
        self.advisory = False
        self.extend: Callable[[int], bool] | None = None
        self.parent = parent
        self._on_change = on_change
        self._rows: dict[str, _Bytes] = {}
        self._all = _Bytes()
        self._in_parent = self._all  # not used without a parent
        self._close: weakref.finalize[..., Account] | None = None
        self._yielding: dict[Account, Callable[[int], None]] = {}
        self._wanted_bytes = 0
        self._yields = False
        if parent is None:
            self._lock = Lock()
            self.changed = condition(self._lock)
            release_in_child(self, Account._renew)
            return
        self._lock, self.changed = parent._lock, parent.changed
        with self._lock:
            self._in_parent = parent._row(owner or name)
        self._close = weakref.finalize(
            self, defer, parent._lose, self._all, self._in_parent, fork_guard()
        )
        self._close.atexit = False

    def child(
        self,
        name: str,
        limit_bytes: int | None = None,
        *,
        owner: str = "",
        on_change: Callable[[int], None] | None = None,
    ) -> Account:
        """Return an empty account whose bytes are charged to this one as well.

        What it holds is freed in this account when it is closed, or when nothing refers to it any more.

        Args:
            name: Name of the child's memory, for errors; several children may have the same.
            limit_bytes: Limit of the child alone; None: only this account's limit counts.
            owner: Name of its bytes in this account; ``name`` if empty. Children may share an owner.
            on_change: See the constructor.

        Raises:
            ConfigError: The limit is negative.
        """
        return Account(limit_bytes, name=name, on_change=on_change, parent=self, owner=owner)

    def __repr__(self) -> str:
        limit = "" if self.limit_bytes >= UNLIMITED else f" of {format_bytes(self.limit_bytes)}"
        return f"Account({self.name}: {format_bytes(self.used_bytes)}{limit})"

    @property
    def used_bytes(self) -> int:
        """Bytes taken now, by children as well."""
        return self._all.now

    @property
    def yields(self) -> bool:
        """True if others of the same memory may have this account's."""
        return self._yields

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be taken here and in all parents; negative while over a limit."""
        free, parent = self.limit_bytes - self._all.now, self.parent
        if parent is None:
            return free
        return min(free, parent.free_bytes - (parent._wanted_bytes if self._yields else 0))

    @property
    def owed_bytes(self) -> int:
        """Bytes that others wait for, if this account yields, and that nobody has freed yet."""
        parent = self.parent
        if parent is None or not self._yields:
            return 0
        return max(0, parent._wanted_bytes - parent.free_bytes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes taken at any one time since ``reset_peak``."""
        return self._all.peak

    def missing_elsewhere(self, nbytes: int) -> int:
        """Return the bytes that others of the same memory would have to free for ``nbytes`` here.

        Freed bytes that are kept for another account count as held by it. Zero if ``nbytes`` fit, or if
        it is this account's own limit that refuses them.
        """
        if self.parent is None or self.limit_bytes - self.used_bytes < nbytes:
            return 0
        return max(0, nbytes - self.free_bytes)

    def shares_memory(self, other: Account) -> bool:
        """Return True if both are accounts of the same memory."""
        return self._lock is other._lock

    def used_by(self, owner: str) -> int:
        """Return the bytes that one owner has taken."""
        row = self._rows.get(owner)
        return 0 if row is None else row.now

    def holdings(self) -> Mapping[str, Holding]:
        """Return an immutable table of all owners that have ever taken bytes here, in their order.

        In a parent the owners are its children, and whoever has taken bytes from it directly.
        """
        with self._lock:
            rows = {owner: Holding(row.now, row.peak) for owner, row in self._rows.items()}
        return MappingProxyType({owner: row for owner, row in rows.items() if row.peak_bytes})

    def try_take(self, nbytes: int, owner: str) -> bool:
        """Take ``nbytes`` for ``owner`` if they fit under all limits; return True if they did."""
        with self._lock:
            if self._all.now + nbytes > self.limit_bytes:  # as _fits, without a call: hot
                return False
            parent = self.parent
            if parent is not None:
                wanted = parent._wanted_bytes if self._yields else 0
                if not parent._fits(nbytes + wanted):
                    return False
            row = self._rows.get(owner) or self._row(owner)
            if parent is not None:
                parent._count(nbytes, self._in_parent)
            everything = self._all
            row.now += nbytes  # as _count, without a call
            everything.now += nbytes
            if row.now > row.peak:  # noqa: PLR1730  (as there)
                row.peak = row.now
            if everything.now > everything.peak:  # noqa: PLR1730
                everything.peak = everything.now
            self._tell()
            return True

    def yield_by(self, free: Callable[[int], None]) -> None:
        """Let other accounts of the parent have this one's memory. See [Note: accounts that yield].

        Args:
            free: Begins to free so many bytes, and does not wait; called in any thread, without locks.
        """
        if self.parent is not None:
            with self._lock:
                self._yields = True
                self.parent._yielding[self] = free

    def make_room(self, nbytes: int) -> bool:
        """Have accounts that yield free memory for ``nbytes`` of this one; return whether they fit.

        Waits, so call it without locks; and while this thread holds one, what it lets go is not freed
        (``penstock.core.locks.defer``).
        """
        parent = self.parent
        if parent is None or self.limit_bytes - self._all.now < nbytes:
            return False
        if nbytes > parent.limit_bytes:
            return False
        with self._lock:
            yielding = [each for each in parent._yielding.items() if each[0] is not self]
            if not yielding:
                return False
            parent._wanted_bytes += nbytes
        try:
            if sum(each.used_bytes for each, _ in yielding) < nbytes - parent.free_bytes:
                return False
            for _, free in yielding:
                free(nbytes - parent.free_bytes)
            with self.changed:
                return self.changed.wait_for(lambda: parent.free_bytes >= nbytes, PATIENCE_S)
        finally:
            with self._lock:
                parent._wanted_bytes -= nbytes
                self.changed.notify_all()  # the accounts that yield are no longer refused these bytes

    def force(self, nbytes: int, owner: str) -> None:
        """Take ``nbytes`` even over the limits: a last resort, and for what makes memory free."""
        with self._lock:
            self._add(nbytes, self._row(owner))

    def free(self, nbytes: int, owner: str) -> None:
        """Free ``nbytes`` of ``owner``."""
        with self._lock:
            row = self._row(owner)
            assert row.now >= nbytes, f"{owner} frees {nbytes} bytes but holds {row.now}"
            self._add(-nbytes, row)
            self.changed.notify_all()

    def move(self, nbytes: int, source: str, target: str) -> None:
        """Move ``nbytes`` from one owner to another; the total does not change."""
        with self._lock:
            row, to = self._row(source), self._row(target)
            assert nbytes <= row.now, f"{source} moves {nbytes} bytes but holds {row.now}"
            row.now -= nbytes
            to.now += nbytes
            to.peak = max(to.peak, to.now)

    def reset_peak(self) -> None:
        """Reset all peaks of this account, those of owners too, to the bytes taken now."""
        with self._lock:
            for each in (self._all, *self._rows.values()):
                each.peak = each.now

    def close(self) -> None:
        """Free in the parent what is held there, and charge nothing to it from now on. Idempotent.

        The account itself goes on as one without a parent.
        """
        if self._close is not None and self._close.detach() is not None:
            with self._lock:
                parent, self.parent = self.parent, None
                assert parent is not None
                parent._yielding.pop(self, None)
                parent._add(-self._all.now, self._in_parent)
                self.changed.notify_all()

    def refusal(self, nbytes: int, slot: str, advice: str, *, least_bytes: int = 0) -> BudgetError:
        """Return the error that ``nbytes`` do not fit, which names all that the full account holds.

        Args:
            nbytes: Bytes that were refused.
            slot: Purpose of the bytes: ``"1 of the 2 buffers that an optimizer needs"``.
            advice: Remedies, after "give it at least N bytes, or": ``"a smaller tile"``.
            least_bytes: Smallest limit that would do; zero: what is held, and ``nbytes``.
        """
        full = self
        while full.parent is not None and full.limit_bytes - full.used_bytes >= nbytes:
            full = full.parent
        least = max(least_bytes, full.used_bytes + nbytes)
        return BudgetError(
            f"{slot}: {format_bytes(nbytes)} ({nbytes} bytes) do not fit in the {full.name} budget of"
            f" {format_bytes(full.limit_bytes)}, which has {max(0, full.free_bytes)} bytes left"
            f" ({full.held_by()}); give it at least {least} bytes, or {advice}",
            slot=slot,
            limit_bytes=full.limit_bytes,
            least_bytes=least,
        )

    def held_by(self) -> str:
        """Return a list of owners and their bytes, most first, for people."""
        rows = sorted(self.holdings().items(), key=lambda item: -item[1].nbytes)
        parts = [f"{owner} {format_bytes(row.nbytes)}" for owner, row in rows if row.nbytes]
        return ", ".join(parts) or "nothing is held"

    def _renew(self) -> None:
        """Unlock the account in a forked child: a thread that held the lock is not there."""
        self._lock.renew()

    # -- under the lock ---------------------------------------------------------------------------

    def _row(self, owner: str) -> _Bytes:
        row = self._rows.get(owner)
        if row is None:
            row = self._rows[owner] = _Bytes()
        return row

    def _fits(self, nbytes: int) -> bool:
        if self._all.now + nbytes > self.limit_bytes:
            return False
        return self.parent is None or self.parent._fits(nbytes)

    def _add(self, nbytes: int, row: _Bytes) -> None:
        self._count(nbytes, row)
        self._tell()

    def _tell(self) -> None:
        account: Account | None = self
        while account is not None:
            if account._on_change is not None:
                account._on_change(account._all.now)
            account = account.parent

    def _count(self, nbytes: int, row: _Bytes) -> None:
        """Count in all accounts or in none: between the first and the last, no signal's handler runs."""
        if self.parent is not None:
            self.parent._count(nbytes, self._in_parent)
        everything = self._all
        row.now += nbytes
        everything.now += nbytes
        if row.now > row.peak:  # noqa: PLR1730  (a call is where a handler may run)
            row.peak = row.now
        if everything.now > everything.peak:  # noqa: PLR1730
            everything.peak = everything.now

    def _lose(self, held: _Bytes, row: _Bytes, guard: ForkGuard) -> None:
        """Free what a child held that was dropped without ``close``."""
        if not guard.in_child:
            with self._lock:
                self._add(-held.now, row)
                self.changed.notify_all()


_host: Account | None = None
_host_lock = Lock()


def host_account() -> Account:
    """Return the account of all that Penstock holds in this process's memory; see [Note: one account].

    It has no limit until one is set. A forked child has one of its own, which is empty.
    """
    global _host  # noqa: PLW0603
    with _host_lock:
        if _host is None:
            _host = Account(name=HOST)
        return _host


def _begin_child() -> None:
    """Leave the parent's account to what was inherited."""
    global _host, _host_lock
    _host, _host_lock = None, Lock()


call_in_child(_begin_child)
