"""Tiers that hold bytes. Read :mod:`penstock.tier.base` first, then :mod:`penstock.tier.striping`."""

from penstock.tier.base import Ticket, Tier, TierSpec, Window
from penstock.tier.flash import FlashTier
from penstock.tier.host import HostTier
from penstock.tier.throttled import ThrottledTier
from penstock.tier.wrappers import FaultyTier, LogEntry, LoggedTier, WrapperTier

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
