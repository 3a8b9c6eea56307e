"""Weak references to tensors and storages.

[Note: preserved objects]
    When the last reference in Python to a tensor or a storage goes, and torch has others, torch keeps the
    Python object for later, and owns it. Before torch 2.11 whoever gets that object back by a weak
    reference has to say so: else it refers to memory that may go while it is held. ``torch.utils.weak``
    does the same.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

_KNOWS: Final = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)
"""True if torch itself sees who gets its objects."""


class Telling(weakref.ref[Any]):
    """Tells torch when what it refers to is held again. See [Note: preserved objects]."""

    __slots__ = ()

    def __call__(self) -> Any:
        """The tensor or storage; None if it is gone."""
        found = super().__call__()
        if found is not None:
            found._fix_weakref()
        return found


if TYPE_CHECKING:
    TensorRef = weakref.ref
else:
    TensorRef = weakref.ref if _KNOWS else Telling
