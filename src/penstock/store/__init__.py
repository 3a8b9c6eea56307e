"""Tiers that hold bytes. Read :mod:`penstock.store.base` first, then :mod:`penstock.store.flash`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.store.base import Ticket, Tier, TierSpec, Window
    from penstock.store.flash import FlashTier
    from penstock.store.host import HostTier
    from penstock.store.throttled import ThrottledTier
    from penstock.store.wrappers import FaultyTier, LogEntry, LoggedTier, WrapperTier

_MODULES: Final = {
    "FaultyTier": "wrappers",
    "FlashTier": "flash",
    "HostTier": "host",
    "LogEntry": "wrappers",
    "LoggedTier": "wrappers",
    "ThrottledTier": "throttled",
    "Ticket": "base",
    "Tier": "base",
    "TierSpec": "base",
    "Window": "base",
    "WrapperTier": "wrappers",
}

__all__ = [
    "FaultyTier",
    "FlashTier",
    "HostTier",
    "LogEntry",
    "LoggedTier",
    "ThrottledTier",
    "Ticket",
    "Tier",
    "TierSpec",
    "Window",
    "WrapperTier",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use (PEP 562): a session needs few of these modules."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
