"""State machine of the place of a saved storage's bytes.

::

            save                        written                    read begins
    (new) ────────▶ RESIDENT ──▶ WRITING ────────▶ SPILLED ──────────────────▶ READING
                       ▲            │                 ▲  ▲                        │
                       └────────────┘                 │  └── dropped, or the ─────┤ done
                  needed before it was written,       │      last user took it    ▼
                  or the write failed                 └────────────────────── RESTORED

Every state can also end in DEAD, when the last handle that autograd holds has died.
"""

from __future__ import annotations

import enum
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from penstock.plan.plan import Decision
    from penstock.plan.profile import CodecSample
    from penstock.plan.slots import SlotKey
    from penstock.runtime.kept import KeptStorage
    from penstock.runtime.movers import Encoding
    from penstock.runtime.passes import Pass
    from penstock.runtime.remakes import Remake


class Residency(enum.Enum):
    """Which memory exists for a saved storage."""

    RESIDENT = "resident"
    """The storage itself is held, and charged. If ``ticket`` is set, a tier has its bytes too."""
    WRITING = "writing"
    """The storage is held and charged; a tier is being filled from it."""
    SPILLED = "spilled"
    """Only the tier has the bytes; or nobody, and ``remake`` makes them. The program itself may still
    hold the storage (``source``)."""
    READING = "reading"
    """The tier has the bytes; device memory is charged and being filled from it."""
    RESTORED = "restored"
    """The tier has the bytes, and so does device memory held for a coming unpack, and charged."""
    DEAD = "dead"
    """No handle is left: nothing is held."""


class Origin(NamedTuple):
    """Module and thread that saved a storage."""

    module: str
    """Path of the innermost running module."""
    kind: str
    """Name of the module's type."""
    dtype: str
    """As ``"float32"``."""


class View(Protocol):
    """A handle that keeps a view of a saved storage while that is where it was."""

    view: torch.Tensor | None
    """That; ``None`` once it is stripped."""
    unpacked: bool
    """True if it has been asked for."""
    saved: SavedStorage | KeptStorage | None
    """Storage of which it is a view."""

    def strip(self) -> None:
        """Let go of the storage, remembering the view."""


@dataclass(slots=True)
class SlotRecord:
    """Facts that one pass learnt about one slot, for the profile. Times are compute time."""

    key: SlotKey
    origin: Origin
    saved_at_ns: int
    small_bytes: int
    """Bytes below the floor that were alive then."""
    needed_at_ns: int | None = None
    held_elsewhere: bool = False
    handles: int = 1
    """Saved tensors that are views of it."""
    sign_only_handles: int = 0
    """Those of which backward is proven to ask only which elements are above zero."""
    codecs: tuple[CodecSample, ...] = ()
    """Results of codecs on a sample of it, if one was taken."""
    frame_bytes: int | None = None
    """Bytes that it took in a tier, if it was encoded."""
    planned: bool = False
    """True if the plan of then knew it."""
    waited_ns: int = 0
    """How long backward waited for it to be read."""
    producer: str | None = None
    """As in ``SlotProfile``; known once an observed pass is over."""
    recipe: tuple[str, ...] = ()
    """As in ``SlotProfile``; known in an observed pass."""
    source: SlotRecord | None = None
    """Record of the recipe's input."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedStorage:
    """One storage that autograd saved, however many saved tensors are views of it.

    Guarded by the runtime's lock. What keeps which memory alive:

    * ``storage`` is the only strong reference Penstock holds to memory: to the source while RESIDENT
      or WRITING, to the restored copy while RESTORED, else ``None``.
    * ``source`` and ``restored`` are weak: they tell whether somebody else (the user's frame, a node
      that has unpacked but not finished) still holds a live copy that can be used again.
    """

    cdata: int
    """Key in the executor's table; whose it is, ``source`` tells, for addresses are used again."""
    nbytes: int
    version: int
    """Version counter when it was saved; saves at another version are another SavedStorage."""
    source: weakref.ref[torch.UntypedStorage]
    base: weakref.ref[torch.Tensor | torch.UntypedStorage]
    """The tensor whose version counter ``version`` belongs to, which guards the whole storage; or the
    storage itself, if its parts have counters of their own."""
    of_pass: Pass
    index: int
    """Position in its pass, in the order of saving."""
    record: SlotRecord
    storage: torch.UntypedStorage | None
    state: Residency = Residency.RESIDENT
    restored: weakref.ref[torch.UntypedStorage] | None = None
    ticket: Any = None
    """Claim on the bytes in ``tier``; kept until DEAD, because a graph may be walked again."""
    tier: Any = None
    writing: bool = False
    """True if a write is under way, also after it was needed or has died: its charge stays."""
    target: Any = None
    """Device memory being filled, while READING."""
    read: Any = None
    """The transfer that fills it."""
    handles: int = 1
    complete: bool = True
    """Only an in-place operation could change it, and a version counter would tell; see
    [Note: complete storages]."""
    deferred: Decision | None = None
    """Offloading postponed until it is known whether signs are enough. RESIDENT meanwhile."""
    encoding: Encoding | None = None
    """How its bytes in ``tier`` are encoded; ``None``: they are as they were."""
    views: list[weakref.ref[View]] | None = None
    """Handles that keep a view of the storage, to be stripped before it is spilled."""
    pending: int = 1
    """Handles that were never unpacked: while there are any, RESTORED memory is held for them."""
    stuck: bool = False
    """Writing it has failed: it stays where it is."""
    remake: Remake | None = None
    """How its bytes are made again, when it is SPILLED and no tier has them."""
    awaits_maker: bool = False
    """True if it is dropped when the call that makes it ends. RESIDENT meanwhile."""
    refused_at_bytes: int = -1
    """Bytes that tiers held when they had no room for it: once they hold less, it is not ``stuck``."""

    @property
    def key(self) -> SlotKey:
        """Name of the slot."""
        return self.record.key

    @property
    def label(self) -> str:
        """Name in errors, logs and traces."""
        return str(self.record.key)
