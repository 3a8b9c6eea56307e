"""Helpers of conformance suites: aligned buffers, whole-buffer transfers, forks."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.io.engine import Engine, File, Op, Priority, Request, Transfer

PIECE_BYTES: Final = 8192
"""Size of pieces in the suites: small, so that many pieces are fast."""
PATIENCE_S: Final = 60.0
"""Time limit of a single transfer on a busy machine."""

Bytes = NDArray[np.uint8]


def aligned(nbytes: int, *, seed: int | None = None) -> Bytes:
    """Return memory at a multiple of 4096 with zeros or random bytes."""
    room = np.zeros(nbytes + 4096, np.uint8)
    skew = -room.ctypes.data % 4096
    memory = room[skew : skew + nbytes]
    if seed is not None:
        memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return memory


def move(
    engine: Engine,
    op: Op,
    file: File,
    offset: int,
    buffer: Bytes,
    *,
    priority: Priority = Priority.WRITE_BEHIND,
) -> Transfer:
    """Submit the transfer of a whole buffer."""
    return engine.submit(request(op, file, offset, buffer, priority=priority))


def run_in_fork(action: Callable[[], object]) -> None:
    """Run ``action`` in a forked child; fail if it raises there or does not end."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # about forking a process with threads, which is intended
        pid = os.fork()
    if not pid:
        code = 1
        try:
            action()
            code = 0
        except BaseException:  # noqa: BLE001  (no code of pytest may run in the child)
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, f"the child ended with status {status}"
            return
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def request(
    op: Op,
    file: File,
    offset: int,
    buffer: Bytes,
    *,
    keep_alive: object = None,
    priority: Priority = Priority.WRITE_BEHIND,
) -> Request:
    """Return a request for a whole buffer, which is kept alive unless there is another owner."""
    return Request(
        op=op,
        file=file,
        offset_bytes=offset,
        address=buffer.ctypes.data,
        nbytes=len(buffer),
        keep_alive=buffer if keep_alive is None else keep_alive,
        priority=priority,
    )


def roundtrip(engine: Engine, file: File, offset: int, nbytes: int) -> None:
    """Write random bytes and read them back."""
    source, target = aligned(nbytes, seed=nbytes), aligned(nbytes)
    assert move(engine, "write", file, offset, source).wait(PATIENCE_S) == nbytes
    assert move(engine, "read", file, offset, target).wait(PATIENCE_S) == nbytes
    assert np.array_equal(source, target)


def move_from_threads(
    engine: Engine, op: Op, file: File, buffers: list[Bytes], *, count: int = 4
) -> list[Transfer]:
    """Move buffers of one length to or from consecutive offsets, submitted by several threads."""
    transfers: list[Transfer] = []

    def submit(which: int) -> None:
        for index in range(which, len(buffers), count):
            offset = index * len(buffers[index])
            transfers.append(move(engine, op, file, offset, buffers[index]))

    threads = [threading.Thread(target=submit, args=(which,)) for which in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return transfers
