"""Wrapper of an engine that corrupts what is read, to test the handling of wrong bytes.

It has the engine's interface, so clients do not notice it. Bytes are changed in memory after they were
read and before any waiter continues.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.io.engine import Engine, EngineSpec, Request, Transfer

Spoil = Callable[[int, int], None]
"""Function ``spoil(address, nbytes)`` that changes memory; called once per read in an engine's thread."""


class CorruptingEngine(Engine):
    """Engine that corrupts what its inner engine has read.

    Attributes:
        inner: The inner engine, which belongs to this one.
    """

    def __init__(self, inner: Engine, spoil: Spoil) -> None:
        """Wrap ``inner``. An error that ``spoil`` raises fails the transfer."""
        self.inner = inner
        self._spoil = spoil

    @property
    def spec(self) -> EngineSpec:
        """Properties of the inner engine."""
        return self.inner.spec

    def start(self) -> None:
        """Start the inner engine's thread."""
        self.inner.start()

    def submit(self, request: Request) -> Transfer:
        """Begin a transfer; returns at once. Raises as the inner engine."""
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
                except Exception as raised:  # noqa: BLE001  (waiters get it)
                    error = raised
            outer.settle(error)

        inner.add_done_callback(finish)
        return outer

    def close(self) -> None:
        """Close the inner engine. Idempotent."""
        self.inner.close()
