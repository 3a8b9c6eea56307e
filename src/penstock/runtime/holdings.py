"""Samples of who holds host memory, for an event log."""

from __future__ import annotations

from typing import Any

from penstock.core.config import UNLIMITED
from penstock.core.memory import ProcessMemory
from penstock.store.account import Account


class HoldingsSample:
    """Reads the owners of an account, and the memory of the process. Any thread; some microseconds."""

    def __init__(self, account: Account) -> None:
        """Sample this account when called."""
        self._account = account
        self._process = ProcessMemory()

    def __call__(self) -> dict[str, Any]:
        """Return the fields of a line of kind ``holdings``, except its time."""
        account = self._account
        limit_bytes = account.limit_bytes
        return {
            "owners": {owner: row.nbytes for owner, row in account.holdings().items()},
            "limit_bytes": None if limit_bytes >= UNLIMITED else limit_bytes,
            "process_bytes": self._process.held_bytes(),
        }

    def close(self) -> None:
        """Close the process's status, when nothing calls this any more. Idempotent."""
        self._process.close()
