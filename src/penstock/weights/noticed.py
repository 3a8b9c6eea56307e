"""Methods of torch's classes that call another function for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.core.locks import Lock


class Noticed:
    """A method of a class that is another function between a ``begin`` and the last ``end``."""

    def __init__(
        self, owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Change nothing yet.

        Args:
            owner: The class.
            name: Of the method, which it may have from a base class.
            make: Returns the other function, given the method.
        """
        self._lock = Lock()
        self._count = 0
        self._owner = owner
        self._name = name
        self._make = make
        self._own: Any = None

    def begin(self) -> None:
        """Begin, for one user more."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._own = vars(self._owner).get(self._name)
                setattr(self._owner, self._name, self._make(getattr(self._owner, self._name)))

    def end(self) -> None:
        """End for one user."""
        with self._lock:
            self._count -= 1
            if not self._count and self._own is None:
                delattr(self._owner, self._name)
            elif not self._count:
                setattr(self._owner, self._name, self._own)
