"""Programs that run beside a job, each bound by one resource: the core, memory bandwidth, or I/O.

Started as ``python -m penstock.lab.characterize.neighbours KIND FOLDER PARENT``. Each works in rounds;
for each line on its input it writes how many rounds it has made, and the time.

- ``cpu`` multiplies matrices that fit in the innermost cache;
- ``memory`` copies an array that is larger than any cache;
- ``io`` writes like a job that only checkpoints: files past the page cache, with Penstock's engine, and
  waits until they are on the device.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

KINDS: Final = ("cpu", "memory", "io")
_COPY_BYTES: Final = 64 << 20
_TILE: Final = 48
_IO_BYTES: Final = 64 << 20
_REQUEST_BYTES: Final = 4 << 20


def _cpu(_: str) -> Callable[[], None]:
    import numpy as np  # noqa: PLC0415  (threads are limited before it is loaded)

    tile = np.ones((_TILE, _TILE), np.float32)

    def work() -> None:
        for _ in range(200):
            tile @ tile

    return work


def _memory(_: str) -> Callable[[], None]:
    import numpy as np  # noqa: PLC0415

    source, target = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
    return lambda: np.copyto(target, source)


def _io(folder: str) -> Callable[[], None]:
    from penstock.io.aio import default_engine  # noqa: PLC0415
    from penstock.io.engine import Request  # noqa: PLC0415
    from penstock.io.files import open_unlinked  # noqa: PLC0415
    from penstock.store.arena import Arena  # noqa: PLC0415

    file, engine = open_unlinked(folder), default_engine()
    file.preallocate(_IO_BYTES)
    block = Arena(_REQUEST_BYTES).allocate(_REQUEST_BYTES)
    assert block is not None, "a new arena has room for its first block"

    def work() -> None:
        transfers = [
            engine.submit(
                Request(
                    op="write",
                    file=file,
                    offset_bytes=offset,
                    address=block.address,
                    nbytes=_REQUEST_BYTES,
                    keep_alive=block,
                )
            )
            for offset in range(0, _IO_BYTES, _REQUEST_BYTES)
        ]
        for each in transfers:
            each.wait()
        os.fsync(file.fd)

    return work


_MAKERS: Final[dict[str, Callable[[str], Callable[[], None]]]] = {
    "cpu": _cpu,
    "memory": _memory,
    "io": _io,
}


def main() -> int:
    """Work until the input ends."""
    from penstock.lab.characterize.child_cleanup import exit_with_parent  # noqa: PLC0415

    kind, folder, parent = sys.argv[1:]
    exit_with_parent(int(parent))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    work = _MAKERS[kind](folder)
    rounds = 0
    over = threading.Event()

    def answer(**what: Any) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    def listen() -> None:
        for _ in sys.stdin:
            answer(rounds=rounds, t_s=time.perf_counter())
        over.set()

    work()
    answer()
    threading.Thread(target=listen, daemon=True).start()
    while not over.is_set():
        work()
        rounds += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
