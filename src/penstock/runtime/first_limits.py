"""Limits of a session with weights on flash, until it is known what a step of training takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from penstock.runtime.allowance import SharedAllowance
from penstock.runtime.executor import Executor
from penstock.runtime.memory_limit import MemoryLimit
from penstock.runtime.planner import Planner

_LOOK_AGAIN_NS: Final = 10**7
"""Time between two measurements within a call, which take some 50 microseconds each."""


class FirstLimits:
    """Finds the limits of weights and saved tensors before the first step. For the session's thread."""

    def __init__(
        self,
        process: MemoryLimit,
        executor: Executor,
        planner: Planner,
        *,
        on_host: bool,
        check: Callable[[], None],
    ) -> None:
        """Find nothing yet.

        Args:
            process: Limit of the process's host memory.
            executor: That of the session's device, with the allowance of its saved tensors.
            planner: Gets the limit of saved tensors.
            on_host: True if weights and saved tensors are in host memory.
            check: Raises if weights do not fit in their limit.
        """
        self._process = process
        self._executor = executor
        self._planner = planner
        self._on_host = on_host
        self._check = check
        self._next_look_ns = 0
        self._thread = threading.get_ident()

    def begin_again(self, step_bytes: int = 0) -> None:
        """Find limits anew, since weights that were in memory rest on flash now.

        Args:
            step_bytes: Bytes that the first step is known to take beside what Penstock holds.

        Raises:
            BudgetError: Two weights do not fit.
        """
        self._process.begin_again(step_bytes if self._on_host else 0)
        if self._executor.allowance is not None:
            self._limit(self._executor.allowance.begin_again(step_bytes))
        self._check()

    @property
    def can_look(self) -> bool:
        """Return whether ``look`` may find other limits."""
        allowance = self._executor.allowance
        return isinstance(allowance, SharedAllowance) and allowance.finds_in_inference

    def look(self, has_ended: bool) -> None:
        """Find limits in a call without autograd. Other threads find none.

        Args:
            has_ended: True at the end of the outermost call.
        """
        now_ns = time.monotonic_ns()
        if threading.get_ident() != self._thread:
            return
        if not has_ended and now_ns < self._next_look_ns:
            return
        self._next_look_ns = now_ns + _LOOK_AGAIN_NS
        self._process.look_in_inference()
        allowance = self._executor.allowance
        assert isinstance(allowance, SharedAllowance)
        if (limit_bytes := allowance.infer(has_ended=has_ended)) is not None:
            self._limit(limit_bytes)

    def _limit(self, limit_bytes: int) -> None:
        self._executor.budget.limit_bytes = limit_bytes
        self._planner.limit(limit_bytes)
