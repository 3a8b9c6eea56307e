"""Train PyTorch networks that do not fit in memory, spilling to host DRAM and flash on a plan."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.core.config import OffloadConfig
from penstock.core.errors import (
    BudgetError,
    CheckpointError,
    ChecksumError,
    ClosedError,
    CodecError,
    ConfigError,
    DamagedError,
    DatasetError,
    HookError,
    InPlaceError,
    JobError,
    MismatchError,
    NoSpaceError,
    PenstockError,
    PenstockWarning,
    PlanError,
    RestoreError,
    ShortTransferError,
    SizeError,
    SourceChangedError,
    SuspendError,
    TransferError,
    WorkerError,
)

if TYPE_CHECKING:
    from penstock.api import Session, close, offload
    from penstock.micro_batches import micro_batched
    from penstock.swap.suspend import Suspended, resume, suspend
    from penstock.weights.build import built_on_flash

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ChecksumError",
    "ClosedError",
    "CodecError",
    "ConfigError",
    "DamagedError",
    "DatasetError",
    "HookError",
    "InPlaceError",
    "JobError",
    "MismatchError",
    "NoSpaceError",
    "OffloadConfig",
    "PenstockError",
    "PenstockWarning",
    "PlanError",
    "RestoreError",
    "Session",
    "ShortTransferError",
    "SizeError",
    "SourceChangedError",
    "SuspendError",
    "Suspended",
    "TransferError",
    "WorkerError",
    "__version__",
    "built_on_flash",
    "close",
    "micro_batched",
    "offload",
    "resume",
    "suspend",
]
_LAZY = {
    **dict.fromkeys(("Session", "close", "offload"), "penstock.api"),
    "built_on_flash": "penstock.weights.build",
    "micro_batched": "penstock.micro_batches",
    **dict.fromkeys(("Suspended", "resume", "suspend"), "penstock.swap.suspend"),
}


def __getattr__(name: str) -> Any:
    """Import names that need torch on first use (PEP 562), because planning works without torch."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
