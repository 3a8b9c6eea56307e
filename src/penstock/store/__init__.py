"""Tiers that hold bytes. Read :mod:`penstock.store.base` first, then :mod:`penstock.store.flash`."""

from penstock.store.base import Ticket, Tier, TierSpec, Window
from penstock.store.flash import FlashTier
from penstock.store.host import HostTier
from penstock.store.throttled import ThrottledTier
from penstock.store.wrappers import FaultyTier, LogEntry, LoggedTier, WrapperTier

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
