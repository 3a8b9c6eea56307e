"""One sample, as whoever decodes it gets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample, as a decoding function gets it."""

    index: int
    """Number of the sample in the data set."""
    fields: Mapping[str, memoryview | None]
    """The bytes of each field; None where it has none. They are there during the call only."""
    label: int | None
    """Class of the sample, where the format has classes."""
    path: str
    """The file that it is in."""
    row: int
    """Number of the sample within its file."""

    @property
    def data(self) -> memoryview:
        """The bytes of the only field, or of the first that is there."""
        return next(each for each in self.fields.values() if each is not None)


Decode = Callable[[Sample], Any]
