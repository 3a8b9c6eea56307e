"""Table of the streams that have worked with each storage, and of how far a restored one has come.

A storage is in the table from its first use until it dies. So a stream counts only for what it has worked
with, and nothing is remembered of streams whose storages are gone.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import torch

from penstock.core.locks import Lock
from penstock.runtime.cuda.link import CudaLink, Stream
from penstock.runtime.cuda.tickets import Fill
from penstock.runtime.storage import TensorRef


@dataclass(slots=True, eq=False)
class _Entry:
    """One storage. Guarded by the table's lock, but ``streams`` may be read without it."""

    storage: weakref.ref[torch.UntypedStorage]
    streams: tuple[Stream, ...] = ()
    """Those that work with it, each ordered after its bytes, the first one first."""
    fill: Fill | None = None
    """How it came to be, if it was restored."""
    leaving: bool = False
    """True if it is, or was, copied out: then it may be freed before backward, and the allocator knows
    ``streams``."""


class StreamTable:
    """The storages that streams work with. Thread-safe; waits where said."""

    def __init__(self, link: CudaLink, lock: Lock) -> None:
        """Make an empty table.

        Args:
            link: To the devices.
            lock: Guards the entries.
        """
        self._link = link
        self._lock = lock
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        """Return the number of storages in the table."""
        return len(self._entries)

    def use(self, storage: torch.UntypedStorage) -> None:
        """The current stream works with ``storage`` from now on: rules 1 and 5 to 7 of the note."""
        stream = self._link.current_stream(storage.device)
        entry = self._entries.get(storage._cdata)
        if entry is None or entry.storage() is not storage:
            with self._lock:
                entry = self._find(storage)
                if entry is None:  # nothing fills it, and no other stream has used it
                    self._add(storage).streams = (stream,)
                    return
        elif stream in entry.streams:
            return
        fill = entry.fill
        if fill is not None:
            fill.precede(self._link, stream)
        with self._lock:  # not before the stream waits: another thread with it relies on that
            entry.streams = (*entry.streams, stream)
            leaving = entry.leaving
        if leaving or (fill is not None and fill.is_others(stream)):
            self._link.keep(storage, stream)
        if fill is not None:
            fill.used()

    def restored(self, storage: torch.UntypedStorage, fill: Fill) -> None:
        """Order every stream that uses ``storage`` from now on after what fills it."""
        with self._lock:
            self._add(storage).fill = fill

    def settle(self, storage: torch.UntypedStorage) -> None:
        """Wait until the bytes of ``storage`` are there, if they were copied."""
        entry = self._entries.get(storage._cdata)
        if entry is not None and entry.storage() is storage and entry.fill is not None:
            entry.fill.settle(self._link)

    def leave(self, storage: torch.UntypedStorage) -> tuple[Stream, ...]:
        """Return the streams that a copy out of ``storage`` comes after; the allocator learns of them.

        Streams that use it later are reported, too. A storage that no stream has used counts as the
        current one's.
        """
        with self._lock:
            entry = self._find(storage) or self._add(storage)
            if not entry.streams:
                entry.streams = (self._link.current_stream(storage.device),)
            entry.leaving, streams = True, entry.streams
        for stream in streams:
            self._link.keep(storage, stream)
        return streams

    def _find(self, storage: torch.UntypedStorage) -> _Entry | None:
        entry = self._entries.get(storage._cdata)
        return entry if entry is not None and entry.storage() is storage else None

    def _add(self, storage: torch.UntypedStorage) -> _Entry:
        cdata = storage._cdata
        entry = _Entry(TensorRef(storage, partial(_forget, self._entries, cdata)))
        self._entries[cdata] = entry
        return entry


def _forget(
    entries: dict[int, _Entry], cdata: int, dead: weakref.ref[torch.UntypedStorage]
) -> None:
    """A storage is dying: its key may soon be another's (TRAPS rule 27)."""
    entry = entries.get(cdata)
    if entry is not None and entry.storage is dead:
        del entries[cdata]
