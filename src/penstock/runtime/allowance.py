"""Limits that are found: what the rest of a memory leaves to an account.

[Note: what is left]
    Weights, gradients, optimizer states, and what operators take while they run share a memory with what
    Penstock holds. The limit for that is

        usable - other - reserve

    On a device it is the limit of saved tensors, and of weights on flash if none was given for these.
    *Usable* is what PyTorch could have allocated when the session was opened: what the driver had free,
    and what PyTorch's allocator had reserved already; less, if the program has limited that. In host
    memory it is the limit of all that Penstock holds, if the user has limited the process
    (``memory="auto"``, or a share); see ``core.memory.usable_memory``. *Other* is the most that was
    allocated at any one time beside what is charged to the account. The *reserve* is a part of what is
    usable, for what the allocator cannot use because it lies between other blocks.

    1. When the session is opened, other is what is allocated then, and what the step will take is not
       known. So half of what is left is the limit of saved tensors, until the first pass is over. What
       gradients of long weights on flash will take is known, and if it is more than a third, it
       is not left. In calls without autograd before the first one with it, other is measured from time to
       time, when a module is entered, and at the end. Once such a call has ended, no half is kept for a
       step.
    2. In an observed pass other is measured at each of its moments: what is allocated, less what is
       charged. What was allocated and freed again between two of them, as the workspace of an
       operator, shows in the memory's own peak, if that has risen. If it was higher before (and it
       is never reset, for it is the program's), the sum of all that was allocated since the moment
       before is taken for allocated at once, up to that peak.
    3. An optimizer makes its states in its first step, when the plan has been made. So at the end of
       each step, what is allocated beside what is charged is compared with the same at the end of the
       observed pass; what it has grown by is other as well.

    Other never falls, or plans would change to and fro; but it is measured anew when the session is open,
    as weights that were in memory are on flash then, and before the first training call. What was high
    once (algorithms that were tried for ``torch.backends.cudnn.benchmark``) stays so, and a limit is then
    better given. A limit of saved tensors that was found is an estimate: it is exceeded rather than that
    anything fails for it (``Account.advisory``).

[Note: who yields]
    Where saved tensors are in host memory, they share one limit with all else that Penstock holds there:
    buffers of optimizers, checkpoints, loaders. Those are of fixed size and cannot be moved, so they are
    served first, and saved tensors have what they leave, since more of these can be offloaded. Plans are
    made for the limit less the most that others held in an observed pass or at the end of a step. If
    others need more within a step, saved tensors are evicted for them at once. Only if that is not
    enough does a product raise BudgetError.

    Weights on flash can be moved as well. Until a step is known, they have what they want before saved
    tensors do, since a byte of them that stays saves up to three transfers a step, and one of a saved
    tensor two; but a part is left for saved tensors, without which no step runs (``LAST_SHARE``). Then
    replays of the whole step divide what is left (:mod:`.memory_division`). These know steps like the one
    that was: if saved tensors need more in another, and nothing of them can be moved, weights cede it.
    What weights do not need of their part is for their gradients, if these wait for an optimizer, and
    then, once a step is known, for its records, which give way to all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from penstock.core.config import UNLIMITED
from penstock.core.locks import Lock
from penstock.core.units import MIB, format_bytes
from penstock.homed import UpdateMemory
from penstock.observe.recorder import Recorder
from penstock.store.account import Account

RESERVE_SHARE: Final = 16
"""Divisor of usable memory: that part is left free."""
NOTABLE_SHARE: Final = 32
"""Divisor of a limit: a smaller change is not followed."""
LEAST_SHARE_BYTES: Final = MIB
"""Limit of saved tensors that share an account in which nothing is left."""
LAST_SHARE: Final = 4
"""Divisor of what others leave to weights and saved tensors: that part is for the latter."""
LIMIT: Final = "device_limit"
"""Mark of a limit of a device that was found, with what it was found from."""
HOST: Final = "host"
"""Name of the process's memory."""
HOST_LIMIT: Final = "host_limit"
"""Mark of a limit of Penstock's host memory that was found, with what it was found from."""


class Allocated(NamedTuple):
    """Bytes that are allocated in a memory."""

    now: int
    peak: int
    """Most at any one time; the program may reset it."""
    ever: int
    """Sum of all allocations, of freed memory too; ``now`` if it is not known."""


class Allowance(Protocol):
    """Finds the limit of an account of saved tensors."""

    def begin_again(self, step_bytes: int) -> int:
        """Return the limit in bytes, before the first pass, when weights have left memory.

        Args:
            step_bytes: Bytes that the first step is known to take beside the account.
        """

    def look(self) -> None:
        """Measure at this moment of an observed pass."""

    def settle(self) -> int:
        """Return the limit in bytes, after an observed pass."""

    def grown(self) -> int | None:
        """Return another limit, after a step, if notably less is left than before."""


class Remainder:
    """Most that a memory holds beside what is charged to an account.

    Attributes:
        other_bytes: Most bytes beside the account at any one time.
        peak_bytes: Most bytes at any one time, the account's included.
    """

    def __init__(self, measure: Callable[[], Allocated], account: Account) -> None:
        """Measure for the first time."""
        self._measure = measure
        self._account = account
        self._last = measure()
        self.peak_bytes = self._last.now
        self.other_bytes = self._last.now - account.used_bytes
        self._base_bytes: int | None = None
        """Other bytes at the end of the last observed pass; ``None`` before the first."""
        self._held_bytes: int | None = None
        """Bytes charged at the last moment of the pass that is being observed."""

    def look(self) -> None:
        """Measure at this moment of an observed pass."""
        last, now = self._last, self._measure()
        held = self._account.used_bytes
        top = now.now
        if self._held_bytes is None:  # the first moment: what was before is not the pass's
            most = top - held
        else:
            at_once = last.now + now.ever - last.ever
            top = now.peak if now.peak > last.peak else min(at_once, max(now.peak, last.peak))
            # where it is not known what was freed in between, and most was allocated about now, what is
            # charged now is taken for charged then
            is_now = now.ever == now.now and top - now.now <= top // NOTABLE_SHARE
            most = top - (held if is_now else min(held, self._held_bytes))
        self.peak_bytes = max(self.peak_bytes, top)
        self.other_bytes = max(self.other_bytes, most)
        self._last, self._held_bytes = now, held

    def begin_again(self) -> None:
        """Forget what the program held before: it has freed memory that it does not take again."""
        self._base_bytes = self._held_bytes = None
        self._last = self._measure()
        self.other_bytes = self._last.now - self._account.used_bytes

    @property
    def is_settled(self) -> bool:
        """True once an observed pass has ended."""
        return self._base_bytes is not None

    def end_pass(self) -> None:
        """End an observed pass."""
        self._held_bytes = None
        self._base_bytes = self._now()

    def end_step(self, notable_bytes: int = 0) -> bool:
        """Add what has been allocated since the observed pass; return False if that is not notable."""
        if self._base_bytes is None:
            return False
        now = self._now()
        growth = now - self._base_bytes
        if growth <= notable_bytes:
            return False
        self._base_bytes = now
        self.other_bytes += growth
        return True

    def _now(self) -> int:
        now = self._measure().now
        self.peak_bytes = max(self.peak_bytes, now)
        return now - self._account.used_bytes


class FoundAllowance:
    """Finds a limit from what is usable of a memory. See [Note: what is left].

    Attributes:
        usable_bytes: Bytes that the program and Penstock may use together.
        other_bytes: Most bytes that the program has used beside the account.
        limit_bytes: Bytes that are left.
        device: Name of the memory.
    """

    def __init__(
        self,
        remainder: Remainder,
        usable_bytes: int,
        *,
        account: Account,
        recorder: Recorder,
        device: str,
        parts: int = 2,
    ) -> None:
        """Limit ``account`` to one of several equal parts of what is left now.

        Args:
            remainder: Measures what is beside the account.
            usable_bytes: Bytes that may be used in all.
            account: Nothing, or little, is charged to it yet.
            recorder: Gets a mark for each limit.
            device: Name of the memory, for the mark: ``"cuda:0"``, or ``HOST``.
            parts: Two if the step may take as much beside the account.
        """
        self._remainder = remainder
        self.usable_bytes = usable_bytes
        self._account = account
        self._recorder = recorder
        self.device = device
        self._parts = parts
        self._step_bytes = 0
        account.limit_bytes = self._found(parts)

    def look(self) -> None:
        """Measure at this moment of an observed pass."""
        self._remainder.look()

    def begin_again(self, step_bytes: int) -> int:
        """Return the limit in bytes, before the first pass, when weights have left memory.

        Args:
            step_bytes: Bytes that the first step is known to take beside the account. If they are more
                than a third of what is left, the limit is that much lower until they are measured.
        """
        self._remainder.begin_again()
        self._step_bytes = 0
        if step_bytes > self.limit_bytes // 3:
            self._step_bytes = step_bytes
        return self._found(self._parts)

    def cede(self, nbytes: int) -> bool:
        """Raise the account's limit by a part of what the first step is known to take, if enough."""
        if nbytes > self._step_bytes:
            return False
        self._step_bytes -= nbytes
        self._account.limit_bytes += nbytes
        return True

    def measured(self) -> int | None:
        """Measure in a call without autograd; return another limit if it is notably another one."""
        self._remainder.look()
        before = self._account.limit_bytes
        return self._found() if abs(before - self.limit_bytes) > before // NOTABLE_SHARE else None

    def settle(self) -> int:
        """Return the limit in bytes, after an observed pass."""
        self._remainder.end_pass()
        self._step_bytes = 0
        return self._found()

    def grown(self) -> int | None:
        """Return another limit, after a step, if the program holds notably more than before."""
        before = self._account.limit_bytes
        grew = self._remainder.end_step(before // NOTABLE_SHARE)
        return (
            self._found() if grew or before - self.limit_bytes > before // NOTABLE_SHARE else None
        )

    def __str__(self) -> str:
        if self.device == HOST:
            return (
                f"of the {format_bytes(self.usable_bytes)} that this process may use, a step takes up to"
                f" {format_bytes(self.other_bytes)} beside what Penstock holds,"
                f" {format_bytes(self.reserve_bytes)} are left free, and the other"
                f" {format_bytes(self.limit_bytes)} are for Penstock"
            )
        return (
            f"no device_memory was given: of the {format_bytes(self.usable_bytes)} that PyTorch can use"
            f" on {self.device}, a step takes up to {format_bytes(self.other_bytes)} beside saved"
            f" tensors, {format_bytes(self.reserve_bytes)} are left free, and the other"
            f" {format_bytes(self.limit_bytes)} are the budget"
        )

    @property
    def other_bytes(self) -> int:
        """Most bytes that the program has used beside the account."""
        return self._remainder.other_bytes

    @property
    def reserve_bytes(self) -> int:
        """Bytes that are left free."""
        return self.usable_bytes // RESERVE_SHARE

    @property
    def limit_bytes(self) -> int:
        """Bytes that are left for the account."""
        other_bytes = self.other_bytes + self._step_bytes
        return max(1, self.usable_bytes - other_bytes - self.reserve_bytes)

    def _found(self, parts: int = 1) -> int:
        """Return the limit, or one of several equal parts of it, and record it."""
        limit_bytes = max(1, self.limit_bytes // parts)
        self._recorder.mark(
            HOST_LIMIT if self.device == HOST else LIMIT,
            device=self.device,
            limit_bytes=limit_bytes,
            usable_bytes=self.usable_bytes,
            other_bytes=self.other_bytes,
        )
        return limit_bytes


class FirstServed(NamedTuple):
    """Weights on flash, which share a memory with saved tensors. See [Note: who yields]."""

    account: Account
    """Their account, a child of the same parent."""
    wanted_bytes: Callable[[], int]
    """Returns the bytes of all of them."""
    adapts: bool
    """True if the account's limit is to be found; False if it was given."""
    least_bytes: Callable[[], int] = lambda: 0
    """Returns the least limit with which they can be used."""
    divide: Callable[[int], int | None] = lambda _: None
    """Returns what they get of the bytes that are left to them and saved tensors; None: not known."""
    updates: UpdateMemory | None = None
    """Memory of their gradients and records, which is what neither they nor saved tensors need."""


class SharedAllowance:
    """Limits saved tensors to what other owners of the same account leave. See [Note: who yields]."""

    def __init__(
        self,
        account: Account,
        *,
        limit_bytes: int,
        reserved_bytes: int = 0,
        first: FirstServed | None = None,
        process: FoundAllowance | None = None,
    ) -> None:
        """Limit ``account`` to its part of what is left now, or of half of it if the parent's was found.

        Args:
            account: Account of saved tensors; its parent has the limit that all share.
            limit_bytes: Limit of saved tensors alone.
            reserved_bytes: Bytes that others will take.
            first: Those who are served before, and whose limit is found as well.
            process: Finds the parent's limit; None: it is given.
        """
        assert account.parent is not None
        self._is_settled = self._is_divided = self._has_begun = self._has_inferred = False
        self._account, self._parent = account, account.parent
        self._own_limit_bytes = limit_bytes
        self._process = process
        self._first = first
        self._divided_bytes = self._ceded_bytes = 0
        self._ceding = Lock()
        if first is not None and first.adapts:
            account.extend = self._cede
            first.account.extend = self._extend_first
        self._other_bytes = max(reserved_bytes, self._beside())
        account.limit_bytes = self._left()
        account.advisory = process is not None and limit_bytes >= UNLIMITED

    def begin_again(self, step_bytes: int) -> int:
        """Return the limit in bytes when that of the parent was found anew, before the first pass."""
        self._has_begun, self._is_settled, self._has_inferred = True, False, False
        return self._left()

    def look(self) -> None:
        """Measure at this moment of an observed pass."""
        self._look_beside()

    def settle(self) -> int:
        """Return the limit in bytes, after an observed pass."""
        if self._process is not None:
            self._parent.limit_bytes = self._process.settle()
        # what the optimizer takes is waited for: weights would fill all at once
        fills = self._first is not None and self._first.adapts
        self._is_settled = self._process is None or not fills
        return self._left()

    def grown(self) -> int | None:
        """Return another limit, after a step, if notably less is left, or replays give notably more."""
        self._look_beside()
        was_settled, self._is_settled = self._is_settled, True  # also under a user plan
        left, before = self._left(), self._account.limit_bytes
        notable = before // NOTABLE_SHARE
        is_larger = self._is_divided and left - before > notable
        return left if before - left > notable or is_larger or not was_settled else None

    @property
    def finds_in_inference(self) -> bool:
        """Return whether ``infer`` may find other limits."""
        return self._process is not None and self._first is not None and self._first.adapts

    def infer(self, *, has_ended: bool) -> int | None:
        """Return another limit, if there is one, in a call without autograd before the first with it.

        Args:
            has_ended: True at the end of the outermost call.
        """
        self._look_beside()
        is_first = has_ended and not self._has_inferred
        self._has_inferred = self._has_inferred or has_ended
        left, before = self._left(), self._account.limit_bytes
        return left if is_first or abs(before - left) > before // NOTABLE_SHARE else None

    def _look_beside(self) -> None:
        self._other_bytes = max(self._other_bytes, self._beside())

    def _beside(self) -> int:
        beside = self._parent.used_bytes - self._account.used_bytes
        if self._first is not None:
            updates = self._first.updates
            beside -= self._first.account.used_bytes
            beside -= 0 if updates is None else updates.used_bytes
        return beside

    def _left(self) -> int:
        first, given_bytes = self._first, 0
        if first is not None and not first.adapts:
            given_bytes = min(first.account.limit_bytes, first.wanted_bytes())
        left = self._part_of(self._parent.limit_bytes - self._other_bytes - given_bytes)
        if first is not None and first.adapts:
            left -= self._limit_first(first, max(LEAST_SHARE_BYTES, left))
        elif first is not None:
            left -= self._limit_updates(first, left - min(self._own_limit_bytes, left // 2))
        return min(self._own_limit_bytes, max(LEAST_SHARE_BYTES, left))

    def _limit_updates(self, first: FirstServed, left_bytes: int) -> int:
        """Limit gradients that wait, and records that stay, to what others leave; return their bytes."""
        if first.updates is None:
            return 0
        return first.updates.limit(left_bytes, with_records=self._is_divided)

    def _part_of(self, left_bytes: int) -> int:
        """Return what others leave; half of it while it is not known what a step takes beside them."""
        is_known = self._process is None or self._is_settled or self._has_inferred
        return left_bytes if is_known else left_bytes // 2

    def _limit_first(self, first: FirstServed, left_bytes: int) -> int:
        """Limit those who are served first, and return the bytes that they will have."""
        found = first.divide(left_bytes) if self._is_settled else None
        self._is_divided = found is not None
        part = left_bytes - left_bytes // LAST_SHARE if found is None else found
        if part != self._divided_bytes:  # by replays of what they were ceded for
            self._divided_bytes, self._ceded_bytes = part, 0
        part = max(part - self._ceded_bytes, first.least_bytes())
        first.account.limit_bytes = min(part, left_bytes)
        taken = min(first.account.limit_bytes, first.wanted_bytes())
        return taken + self._limit_updates(first, first.account.limit_bytes - taken)

    def _cede(self, nbytes: int) -> bool:
        """Give saved tensors more of what weights have; return False if weights need it."""
        first = self._first
        assert first is not None
        with self._ceding:
            if self._account.limit_bytes + nbytes > self._own_limit_bytes:
                return False
            if first.account.limit_bytes - nbytes < first.least_bytes():
                return False
            self._ceded_bytes += nbytes
            first.account.limit_bytes -= nbytes
            self._account.limit_bytes += nbytes
            self._limit_updates(first, first.account.limit_bytes - first.wanted_bytes())
            return True

    def _extend_first(self, nbytes: int) -> bool:
        """Give longer weights than all before more of what is left; False if that is too little."""
        first = self._first
        assert first is not None
        limit_bytes = first.account.limit_bytes + nbytes
        if self._process is not None and not self._has_begun:  # weights are about to leave memory
            first.account.limit_bytes = limit_bytes
            return True
        shortage = limit_bytes + LEAST_SHARE_BYTES - self._parent.limit_bytes + self._other_bytes
        if shortage > 0 and (self._process is None or not self._process.cede(shortage)):
            return False
        first.account.limit_bytes = limit_bytes
        left = self._parent.limit_bytes - self._other_bytes - limit_bytes
        self._account.limit_bytes = min(self._account.limit_bytes, left)
        return True


class DeviceAllowance(SharedAllowance):
    """The same in device memory, where saved tensors and weights on flash share what is left."""

    def __init__(self, account: Account, found: FoundAllowance, *, first: FirstServed) -> None:
        """Limit ``account`` to its part of half of what is left now.

        Args:
            account: Account of saved tensors, with the limit of these alone; its parent is that of all.
            found: Finds the parent's limit.
            first: The weights.
        """
        super().__init__(account, limit_bytes=account.limit_bytes, first=first, process=found)
        self._found = found

    def begin_again(self, step_bytes: int) -> int:
        """Find the parent's limit anew, and return that of saved tensors."""
        self._parent.limit_bytes = self._found.begin_again(step_bytes)
        return super().begin_again(step_bytes)

    def infer(self, *, has_ended: bool) -> int | None:
        """Find the parent's limit anew, and return that of saved tensors, if there is another one."""
        if (limit_bytes := self._found.measured()) is not None:
            self._parent.limit_bytes = limit_bytes
        return super().infer(has_ended=has_ended)

    def look(self) -> None:
        """Measure at this moment of an observed pass."""
        self._found.look()
        super().look()

    def grown(self) -> int | None:
        """Return another limit, after a step, if notably less is left, or replays give notably more."""
        if (limit_bytes := self._found.grown()) is not None:
            self._parent.limit_bytes = limit_bytes
        return super().grown()

    def __str__(self) -> str:
        found = self._found
        return (
            f"no weights_memory was given: of the {format_bytes(found.usable_bytes)} that PyTorch can use"
            f" on {found.device}, a step takes up to {format_bytes(found.other_bytes)} beside saved"
            f" tensors and weights that rest elsewhere, {format_bytes(found.reserve_bytes)} are left"
            f" free, and the other {format_bytes(found.limit_bytes)} are for these"
        )
