"""Samples of who holds host memory, for an event log."""

from __future__ import annotations

from typing import Any, Final

from penstock.core.config import UNLIMITED
from penstock.core.memory import ProcessMemory
from penstock.core.units import MIB
from penstock.store.account import Account

_STEP_BYTES: Final = MIB
"""Change of the process's memory that is worth a line of its own."""


class HoldingsSample:
    """Reads the owners of an account, and the memory of the process. Any thread; some microseconds."""

    def __init__(self, account: Account) -> None:
        """Sample this account when called."""
        self._account = account
        self._process = ProcessMemory()
        self._last: dict[str, Any] = {}
        self._last_process_bytes = 0

    def __call__(self) -> dict[str, Any] | None:
        """Return the fields of a line of kind ``holdings``, except its time; None if nothing changed."""
        account = self._account
        limit_bytes = account.limit_bytes
        held = {
            "owners": {owner: row.nbytes for owner, row in account.holdings().items()},
            "limit_bytes": None if limit_bytes >= UNLIMITED else limit_bytes,
        }
        process_bytes = self._process.held_bytes()
        if held == self._last and abs(process_bytes - self._last_process_bytes) < _STEP_BYTES:
            return None
        self._last, self._last_process_bytes = held, process_bytes
        return {**held, "process_bytes": process_bytes}

    def close(self) -> None:
        """Close the process's status, when nothing calls this any more. Idempotent."""
        self._process.close()
