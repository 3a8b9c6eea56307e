"""The session of a callback, opened for one training after the other."""

from __future__ import annotations

from typing import Any

import torch

import penstock
from penstock.observe.summary import Summary


class HostedSession:
    """Base of callbacks that open a session when their host trains.

    Attributes:
        session: The session; ``None`` unless one is open.
        summary: Summary of the last training that has ended; ``None`` before.
    """

    def __init__(self, **settings: Any) -> None:
        """Open nothing yet; ``settings`` are those of :func:`penstock.offload`."""
        super().__init__()
        self.session: penstock.Session | None = None
        self.summary: Summary | None = None
        self._settings = settings

    def close(self) -> None:
        """Close the session, if there is one, and keep its summary. Idempotent."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
            self.summary = session.summary()

    def _open(self, model: torch.nn.Module | None, optimizer: Any) -> None:
        """Open a session, in place of one that an error has left open."""
        self.close()
        self.session = penstock.offload(model, optimizer, **self._settings).open()
