"""Data sets that stay on flash: read as they are needed, in bounded memory, past the page cache.

Read in this order: ``index`` (where samples lie) and ``formats``, ``build`` (an index is made once),
``order`` (which sample when, and for whom), ``extents`` (what to read for some), ``reader`` on ``group``
(samples to memory, as a ``group``), ``decode``, ``coded`` and ``assemble`` (to values), ``stream`` on
``depth`` (ahead of the training). These do without torch; ``dataset`` and ``loader`` are what its users
meet.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from penstock.data.build import Opened, open_index
from penstock.data.coded import image
from penstock.data.index import Index
from penstock.data.order import Epoch, Order, Share
from penstock.data.packing import PackedFile, pack
from penstock.data.quality import Quality, quality_of
from penstock.data.sample import Sample
from penstock.data.verify import Verdict, verify

if TYPE_CHECKING:
    from penstock.data.dataset import FlashDataset, FlashIterable
    from penstock.data.loader import FlashLoader

_WITH_TORCH: Final = {
    "FlashDataset": "penstock.data.dataset",
    "FlashIterable": "penstock.data.dataset",
    "FlashLoader": "penstock.data.loader",
}

__all__ = [
    "Epoch",
    "FlashDataset",
    "FlashIterable",
    "FlashLoader",
    "Index",
    "Opened",
    "Order",
    "PackedFile",
    "Quality",
    "Sample",
    "Share",
    "Verdict",
    "image",
    "open_index",
    "pack",
    "quality_of",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for (PEP 562)."""
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'penstock.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
