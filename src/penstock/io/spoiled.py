"""An engine around an engine that changes what is read: to try what wrong bytes do.

A wrapper of the same type, as those of tiers: whoever reads knows nothing of it. What is read is changed
in memory, after it has come and before anybody who waits for it goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.io.engine import Engine, EngineSpec, Request, Transfer

Spoil = Callable[[int, int], None]
"""``spoil(address, nbytes)`` changes memory; in an engine's thread, one call at a time for each read."""


class SpoiledEngine(Engine):
    """Does what the engine inside does, then spoils what was read.

    Attributes:
        inner: The engine inside, which belongs to this one.
    """

    def __init__(self, inner: Engine, spoil: Spoil) -> None:
        """Wrap ``inner``. An error that ``spoil`` raises is the transfer's."""
        self.inner = inner
        self._spoil = spoil

    @property
    def spec(self) -> EngineSpec:
        """As the engine inside."""
        return self.inner.spec

    def start(self) -> None:
        """As the engine inside."""
        self.inner.start()

    def submit(self, request: Request) -> Transfer:
        """Begin a transfer; returns at once. Raises as the engine inside."""
        inner = self.inner.submit(request)
        if request.op != "read":
            return inner
        outer = Transfer(
            inner.nbytes,
            cancel=lambda _: inner.cancel(),
            promote=lambda _, priority: inner.promote(priority),
        )

        def finish(transfer: Transfer) -> None:
            error = transfer.error
            if error is None:
                try:
                    self._spoil(request.address, request.nbytes)
                except Exception as raised:  # noqa: BLE001  (whoever waits is told)
                    error = raised
            outer.settle(error)

        inner.add_done_callback(finish)
        return outer

    def close(self) -> None:
        """Close the engine inside. Idempotent."""
        self.inner.close()
