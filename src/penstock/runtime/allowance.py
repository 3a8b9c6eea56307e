"""How much of a device's memory saved tensors may take, where the user has not said.

[Note: what is left]
    Weights, gradients, optimizer states, and what operators take while they run share a device's memory
    with what autograd saves. The limit for that is

        usable - other - reserve

    *Usable* is what PyTorch could have allocated when the session was opened: what the driver had free,
    and what PyTorch's allocator had reserved already; less, if the program has limited that. *Other* is
    the most that was allocated at any one time beside what is charged to the budget. The *reserve* is a
    part of what is usable, for what the allocator cannot use because it lies between other blocks.

    1. When the session is opened, other is what is allocated then, and what the step will take is not
       known. So half of what is left is the limit, until the first pass is over.
    2. In an observed pass other is looked up at each of its moments: what is allocated, less what is
       charged. What was allocated and freed again between two of them, as the workspace of an
       operator, shows in the allocator's own peak, if that has risen. If it was higher before (and it
       is never reset, for it is the program's), the sum of all that was allocated since the moment
       before is taken for allocated at once, up to that peak.
    3. An optimizer makes its states in its first step, when the plan has been made. So at the end of
       each step, what is allocated beside what is charged is compared with the same at the end of the
       observed pass; what it has grown by is other as well.

    Other never falls, or plans would change to and fro. What was high once (algorithms that were tried
    for ``torch.backends.cudnn.benchmark``) stays so, and ``device_memory`` is then better given. The
    limit is an estimate: it is exceeded rather than that anything fails for it (``Account.advisory``).
"""

from __future__ import annotations

from typing import Final

import torch

from penstock.core.units import format_bytes
from penstock.observe.recorder import Recorder
from penstock.runtime.cuda.link import Link
from penstock.store.account import Account

RESERVE_SHARE: Final = 16
"""The part of what is usable that is left free."""
NOTABLE_SHARE: Final = 32
"""A limit that changes by less than this part of it is left as it is."""
LIMIT: Final = "device_limit"
"""The mark of a limit that was found, with what it was found from."""


class Allowance:
    """Finds the limit of one device's budget. See [Note: what is left]."""

    def __init__(
        self,
        link: Link,
        device: torch.device,
        usable_bytes: int,
        *,
        budget: Account,
        recorder: Recorder,
    ) -> None:
        """Limit ``budget`` to half of what is left now; nothing is charged to it yet."""
        self._link = link
        self._device = device
        self._budget = budget
        self._recorder = recorder
        self._usable_bytes = usable_bytes
        self._last = link.allocated(device)
        """At the last moment."""
        self._other_bytes = self._last.now
        self._base_bytes: int | None = None
        """Of other, at the end of the last observed pass; ``None`` before the first."""
        self._held_bytes: int | None = None
        """Bytes charged at the last moment of the pass that is being observed."""
        budget.advisory = True
        budget.limit_bytes = self._tell(parts=2)

    def look(self) -> None:
        """Take note of this moment of an observed pass."""
        last, now = self._last, self._link.allocated(self._device)
        held = self._budget.used_bytes
        if self._held_bytes is None:  # the first moment: what was before is not the pass's
            most = now.now - held
        else:
            at_once = last.now + now.ever - last.ever
            top = now.peak if now.peak > last.peak else min(at_once, max(now.peak, last.peak))
            most = top - min(held, self._held_bytes)
        self._other_bytes = max(self._other_bytes, most)
        self._last, self._held_bytes = now, held

    def settle(self) -> int:
        """The observed pass is over; return the limit in bytes."""
        self._held_bytes = None
        self._base_bytes = self._now()
        return self._tell()

    def grown(self) -> int | None:
        """A step is over; return another limit if the program holds notably more than before."""
        if self._base_bytes is None:
            return None
        now = self._now()
        growth = now - self._base_bytes
        if growth * NOTABLE_SHARE <= self._budget.limit_bytes:
            return None
        self._base_bytes = now
        self._other_bytes += growth
        return self._tell()

    def __str__(self) -> str:
        return (
            f"no device_memory was given: of the {format_bytes(self._usable_bytes)} that PyTorch can use"
            f" on {self._device}, a step takes up to {format_bytes(self._other_bytes)} beside saved"
            f" tensors, {format_bytes(self._reserve_bytes)} are left free, and the other"
            f" {format_bytes(self._limit_bytes)} are the budget"
        )

    def _now(self) -> int:
        return self._link.allocated(self._device).now - self._budget.used_bytes

    @property
    def _reserve_bytes(self) -> int:
        return self._usable_bytes // RESERVE_SHARE

    @property
    def _limit_bytes(self) -> int:
        return max(1, self._usable_bytes - self._other_bytes - self._reserve_bytes)

    def _tell(self, parts: int = 1) -> int:
        """Return the limit, or one of several equal parts of it; tell the recorder."""
        limit_bytes = max(1, self._limit_bytes // parts)
        self._recorder.mark(
            LIMIT,
            device=str(self._device),
            limit_bytes=limit_bytes,
            usable_bytes=self._usable_bytes,
            other_bytes=self._other_bytes,
        )
        return limit_bytes
