"""Reporting of flash transfers by clients without a tier to the open session.

See :mod:`penstock.observe.clients`. Files in memory wear no SSD, and are not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from penstock.core.fs import filesystem_of
from penstock.io.engine import Op, Transfer
from penstock.observe.clients import open_recorder
from penstock.observe.events import Stage
from penstock.observe.recorder import Recorder


def reported(transfer: Transfer, op: Op, client: str, path: str) -> Transfer:
    """Report a transfer that has just begun once it ends, unless it fails.

    Args:
        transfer: The transfer that the engine returned.
        op: Its direction.
        client: Name of a tier in :mod:`penstock.observe.clients`.
        path: The file, or the directory of an unlinked one.

    Returns:
        The same transfer.
    """
    recorder = _recorder(path)
    if recorder is None:
        return transfer
    start_ns = recorder.clock.now_ns()

    def report(done: Transfer) -> None:
        if done.error is None:
            end_ns = recorder.clock.now_ns()
            recorder.span(Stage(op), start_ns, end_ns, nbytes=done.nbytes, tier=client)

    transfer.add_done_callback(report)
    return transfer


@contextmanager
def written(client: str, nbytes: int, path: str) -> Iterator[None]:
    """Report ``nbytes`` as written by ``client`` if the block ends without an error."""
    recorder = _recorder(path)
    start_ns = 0 if recorder is None else recorder.clock.now_ns()
    yield
    if recorder is not None:
        end_ns = recorder.clock.now_ns()
        recorder.span(Stage.WRITE, start_ns, end_ns, nbytes=nbytes, tier=client)


def _recorder(path: str) -> Recorder | None:
    recorder = open_recorder()
    if recorder is None or _is_in_memory(path):
        return None
    return recorder


@lru_cache(maxsize=256)
def _is_in_memory(path: str) -> bool:
    return filesystem_of(path).is_memory
