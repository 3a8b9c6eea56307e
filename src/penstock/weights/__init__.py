"""Weights whose home is a file on flash, and which are in memory only while something works with them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.weights.conversion import convert
    from penstock.weights.export import on_host, save
    from penstock.weights.importing import load

__all__ = ["convert", "load", "on_host", "save"]
_LAZY = {
    "convert": "penstock.weights.conversion",
    "load": "penstock.weights.importing",
    "on_host": "penstock.weights.export",
    "save": "penstock.weights.export",
}


def __getattr__(name: str) -> Any:
    """Import names that need torch on first use (PEP 562)."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'penstock.weights' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
