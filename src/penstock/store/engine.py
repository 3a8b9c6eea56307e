"""The I/O engine that everything in this process shares.

Activations, optimizer records, gradients, checkpoints, data sets and suspended jobs submit to one queue,
so that :class:`penstock.io.engine.Priority` orders all of their transfers: a demand read of backward
overtakes a checkpoint that is being saved. GPU-direct engines are separate: they take other addresses.

[Note: priorities]
    - DEMAND: storages that backward waits for, batches that training waits for.
    - PREFETCH: storages that backward will need; optimizer records, read and written; gradients, read;
      checkpoints that are loaded, and those whose save is waited for; memory of a job that resumes.
    - WRITE_BEHIND: storages, gradients and the memory of a suspended job, written; packed files.
    - BACKGROUND: batches read ahead, and checkpoints saved beside training.

    Within a priority the order is that of submission. No priority starves: see [Note: no starvation] in
    :mod:`penstock.io.transfer_jobs`.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.core import knobs
from penstock.core.locks import Lock
from penstock.core.process import call_in_child
from penstock.core.ranks import local_processes
from penstock.io.aio import default_engine
from penstock.io.engine import Engine


class _Settings(NamedTuple):
    """Knobs from which an engine is made."""

    kind: str
    threads: int
    piece_bytes: int


class _Shared:
    """The engine of one process, with the settings from which it was made."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.settings: _Settings | None = None
        self.engine: Engine | None = None
        self.replacement: Engine | None = None
        self.ranks: int | None = None


_shared = _Shared()


def shared_engine() -> Engine:
    """Return the engine of this process; it is made at first use.

    Never close it: its clients wait for their own transfers, and the kernel takes 30 ms to release an
    engine. A forked child gets another one. If the knobs have changed since it was made, so do those who
    ask from now on; the earlier one ends when the last client drops it. Ranks that share the flash divide
    the depth between them.

    Raises:
        ConfigError: The engine that ``PENSTOCK_IO_ENGINE`` names is not available.
    """
    shared = _shared
    with shared.lock:
        threads = knobs.io_threads(shared.ranks or local_processes())
        settings = _Settings(knobs.io_engine(), threads, knobs.io_piece_bytes())
        if shared.replacement is not None:
            return shared.replacement
        if shared.engine is None or shared.settings != settings:
            shared.engine, shared.settings = default_engine(threads), settings
        return shared.engine


def share_flash(ranks: int | None) -> None:
    """Divide the depth of engines that are made from now on by the ranks that share the flash.

    Args:
        ranks: Number of processes on this machine that use the same file systems, this one included;
            None: all that a launcher has started on it, as if nothing had been said.
    """
    with _shared.lock:
        _shared.ranks = ranks


def replace_shared_engine(engine: Engine | None) -> Engine | None:
    """Have ``shared_engine`` return ``engine``, or its own again if None; for tests.

    Returns:
        The engine that replaced it before, or None.
    """
    with _shared.lock:
        before, _shared.replacement = _shared.replacement, engine
    return before


def _begin_child() -> None:
    global _shared  # noqa: PLW0603  (the parent's lock may be held, and its threads are not here)
    _shared = _Shared()


call_in_child(_begin_child)
