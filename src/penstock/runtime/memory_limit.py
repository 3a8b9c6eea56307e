"""Host memory of the process while a session is open: the limit of what Penstock holds, and its use.

[Note: freed memory]
    The C library keeps much of what is freed, so it stays resident. If the process is limited, the C
    library is set to return freed blocks of a MiB and more at once, unless its environment says what it
    is to keep. It stays set when the session is closed: the C library adapts these thresholds to the
    program only until they are set, and can neither tell them nor begin to adapt them again. Otherwise,
    or where it keeps everything, the memory that it keeps is used again, and does not count as held.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.core.config import UNLIMITED, OffloadConfig
from penstock.core.errors import BudgetError
from penstock.core.memory import ProcessMemory, usable_memory
from penstock.core.ranks import local_processes
from penstock.core.units import MIB, format_bytes, round_down
from penstock.io.pages import HeapGaps, free_heap_bytes, return_freed_blocks, trim_heap
from penstock.observe.counters import SAVED_TENSORS
from penstock.observe.recorder import Recorder
from penstock.observe.summary_values import HostMemoryUse, OwnerLine
from penstock.runtime.allowance import (
    HOST,
    Allocated,
    FirstServed,
    FoundAllowance,
    Remainder,
    SharedAllowance,
)
from penstock.runtime.freed_memory import HeapTrimmer
from penstock.runtime.probe import MEASUREMENT
from penstock.store.account import Account, host_account
from penstock.store.heap import heap_is_better

_LEAST_WITH_CODECS_BYTES: Final = 512 * MIB
"""Limit from which on codecs are used where the process is limited: Numba takes some 120 MiB."""
_LOOK_AGAIN_NS: Final = 10**9
"""Time between two measurements of what the machine and the control groups leave."""


class MemoryLimit:
    """Limit of the host account while a session is open. For the session's thread.

    Attributes:
        affords_codecs: False if the process is limited so tightly that the kernels of codecs would take
            a notable part of what is left, since Numba and what it compiles are part of the process.
    """

    def __init__(self, config: OffloadConfig, recorder: Recorder) -> None:
        """Limit the host account according to the setting ``memory``.

        Raises:
            BudgetError: Penstock already holds more than the limit.
        """
        self._last_use: HostMemoryUse | None = None
        self._gaps: HeapGaps | None = None
        self._account = host_account()
        self._limit_before = self._account.limit_bytes
        self._recorder = recorder
        self._request = config.memory_request
        self._finds = self._request is not None and self._request.nbytes is None
        self._is_exact = self._finds and not heap_is_better()
        if self._is_exact:
            return_freed_blocks()
            trim_heap()
            self._gaps = HeapGaps()
        self._process = ProcessMemory()
        self._first_peak_bytes = self._process.peak_bytes()
        self._account.reset_peak()
        self._remainder = Remainder(self._measure, self._account)
        self._source = ""
        self._next_look_ns = 0
        self._found: FoundAllowance | None = None
        if self._finds:
            self._found = FoundAllowance(
                self._remainder,
                self._usable_bytes(),
                account=self._account,
                recorder=recorder,
                device=HOST,
                parts=1,
            )
        elif self._request is not None and self._request.nbytes is not None:
            self._source = f"memory={format_bytes(self._request.nbytes)}"
            self._account.limit_bytes = self._request.nbytes
        self.affords_codecs = (
            not self._finds or self._account.limit_bytes >= _LEAST_WITH_CODECS_BYTES
        )
        self._check()
        self._trimmer = None if self._is_exact else HeapTrimmer()

    def _check(self) -> None:
        account, limit_bytes = self._account, self._account.limit_bytes
        if account.free_bytes >= 0 or self._request is None:
            return
        self._restore()
        raise BudgetError(
            f"memory limits Penstock to {format_bytes(limit_bytes)}, but in this process it already holds"
            f" {format_bytes(account.used_bytes)} ({account.held_by()}); close what is not needed, or"
            f" give at least {account.used_bytes} bytes, and what saved tensors need",
            slot="memory",
            limit_bytes=limit_bytes,
            least_bytes=account.used_bytes,
        )

    def configure(self, config: OffloadConfig, device: str) -> OffloadConfig:
        """Return the configuration with the size of the host tier, if ``memory`` implies it.

        Args:
            config: Settings of the session.
            device: Type of the device that saved tensors are on.
        """
        if device == "cpu" or config.host_memory is not None or self._request is None:
            return config
        left = self._account.free_bytes
        return replace(
            config, host_memory=round_down(left // 2 if self._finds else left * 3 // 4, MIB)
        )

    def share(
        self,
        account: Account,
        limit_bytes: int,
        *,
        reserved_bytes: int,
        first: FirstServed | None = None,
    ) -> SharedAllowance | None:
        """Return the allowance of saved tensors in host memory; ``None`` without a limit to share.

        Args:
            account: Account of saved tensors, a child of the host account.
            limit_bytes: Limit of them alone.
            reserved_bytes: Bytes that others will take: the host tier.
            first: Weights on flash, if there are any.
        """
        if self._request is None:
            return None
        return SharedAllowance(
            account,
            limit_bytes=limit_bytes,
            reserved_bytes=reserved_bytes,
            first=first,
            process=self._found,
        )

    def begin_again(self, step_bytes: int) -> None:
        """Find the limit anew: weights of the program that were in memory rest on flash now.

        Args:
            step_bytes: Bytes of host memory that the first step is known to take beside the account.
        """
        if self._found is not None:
            trim_heap()
            self._found.usable_bytes = self._usable_bytes()
            self._account.limit_bytes = self._found.begin_again(step_bytes)

    def look(self) -> None:
        """Measure at this moment of an observed pass."""
        self._remainder.look()

    def look_in_inference(self) -> None:
        """Measure at this moment of a call without autograd, and adapt a limit that was found."""
        if self._found is None:
            return
        if self._is_time_to_look:
            self._found.usable_bytes = self._usable_bytes()
        if (limit_bytes := self._found.measured()) is not None:
            self._account.limit_bytes = limit_bytes

    def end_step(self) -> None:
        """Measure after a step, and adapt a limit that was found."""
        is_first, found = not self._remainder.is_settled, self._found
        if found is None:
            if is_first:
                self._remainder.end_pass()
            else:
                self._remainder.end_step()
            return
        if self._is_time_to_look:
            found.usable_bytes = min(found.usable_bytes, self._usable_bytes())
        limit_bytes = found.settle() if is_first else found.grown()
        if limit_bytes is not None:
            self._account.limit_bytes = limit_bytes

    @property
    def _is_time_to_look(self) -> bool:
        """Return whether it was long ago that usable memory was measured."""
        return self._recorder.clock.now_ns() >= self._next_look_ns

    @property
    def found_bytes(self) -> int:
        """Most that the limit may be when it is found anew; 0 if it was given, or there is none."""
        return 0 if self._found is None else self._found.usable_bytes

    @property
    def others_bytes(self) -> int:
        """Sum of the peaks of what other parts hold beside saved tensors, while the program trains."""
        rows = self._account.holdings().items()
        return sum(
            row.peak_bytes for owner, row in rows if owner not in (SAVED_TENSORS, MEASUREMENT)
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about a limit that was found, and about freed memory, for the summary."""
        found = () if self._found is None else (f"{self._source}; {self._found}",)
        trimmer = self._trimmer
        return found if trimmer is None or not trimmer.times else (*found, str(trimmer))

    def use(self, without_bytes: int) -> HostMemoryUse:
        """Return the process's memory for the summary.

        Args:
            without_bytes: Bytes that the program would hold in host memory beside the rest if Penstock
                moved nothing: saved tensors, weights, states; 0 if they are not known.
        """
        use = self._last_use or self._use()
        return replace(use, without_bytes=use.rest_bytes + without_bytes if without_bytes else None)

    def close(self) -> None:
        """Restore the limit that the host account had before. Idempotent."""
        if self._trimmer is not None:
            self._trimmer.close()
        self._restore()

    def _restore(self) -> None:
        if self._last_use is None:
            self._last_use = self._use()
            if self._gaps is not None:
                self._gaps.close()
            self._account.limit_bytes = self._limit_before
            self._process.close()

    def _use(self) -> HostMemoryUse:
        account, limit_bytes = self._account, self._account.limit_bytes
        rows = sorted(account.holdings().items(), key=lambda row: -row[1].peak_bytes)
        peak_bytes = self._process.peak_bytes()
        if peak_bytes <= self._first_peak_bytes:  # that of an earlier time
            peak_bytes = self._remainder.peak_bytes
        return HostMemoryUse(
            limit_bytes=None if limit_bytes >= UNLIMITED else limit_bytes,
            limit_source=self._source,
            usable_bytes=None if self._found is None else self._found.usable_bytes,
            held_peak_bytes=account.peak_bytes,
            owners=tuple(
                OwnerLine(owner=owner, peak_bytes=row.peak_bytes, current_bytes=row.nbytes)
                for owner, row in rows
            ),
            rest_bytes=self._remainder.other_bytes,
            process_peak_bytes=peak_bytes,
            without_bytes=None,
        )

    def _measure(self) -> Allocated:
        """Return what the process holds; see [Note: freed memory]."""
        now = self._process.held_bytes()
        if self._is_exact:
            return Allocated(now, max(now, self._process.peak_bytes()), now)
        now = max(0, now - free_heap_bytes())
        return Allocated(now, now, now)

    def _usable_bytes(self) -> int:
        """Return what the process may use now, and note where that is from."""
        assert self._request is not None
        self._next_look_ns = self._recorder.clock.now_ns() + _LOOK_AGAIN_NS
        found = usable_memory(
            self._request, self._process.held_bytes(), processes=local_processes()
        )
        self._source = f"memory='{self._request}': {found.source}"
        return found.nbytes
