"""The least that moving so many bytes costs a computation on the same machine.

A process of its own, which does nothing else, writes as many bytes while a step goes forward and reads as
many while it goes backward, from few large requests, as fast as they come: no hooks, no accounting, no
memory to be found, no interpreter shared with training. What a plain step beside it takes longer is what
the machine itself charges: memory bandwidth, interrupts, the kernel's part of each transfer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Literal

from penstock.io.aio import default_engine
from penstock.io.engine import Priority, Request
from penstock.io.files import open_unlinked
from penstock.store.arena import Arena

_AHEAD = 4
"""Requests in the engine at once."""
_GRANULE = 4096


class Mover:
    """The process. Leave the ``with`` block to end it."""

    def __init__(self, directory: str, moved_bytes: int, request_bytes: int) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), directory]
        self._process = subprocess.Popen(
            [*command, str(moved_bytes), str(request_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._under_way = 0
        self.begin("write")  # a file that was never written to is slower
        self.wait()

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def begin(self, op: Literal["read", "write"]) -> None:
        """Let it move all of its bytes; behind those that it moves already."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{op}\n")
        self._under_way += 1

    def wait(self) -> None:
        """Until nothing is under way."""
        assert self._process.stdout is not None
        while self._under_way:
            if self._process.stdout.readline() != "done\n":
                raise RuntimeError("the process that moves bytes has ended")
            self._under_way -= 1


def serve(directory: str, moved_bytes: int, request_bytes: int) -> None:
    request_bytes = max(_GRANULE, request_bytes // _GRANULE * _GRANULE)
    count = max(1, round(moved_bytes / request_bytes))
    file, engine, arena = (
        open_unlinked(directory),
        default_engine(),
        Arena(_AHEAD * request_bytes * 2),
    )
    file.preallocate(count * request_bytes)
    blocks = [arena.allocate(request_bytes) for _ in range(_AHEAD)]
    for line in sys.stdin:
        op = line.strip()
        transfers = []
        for index in range(count):
            if index >= _AHEAD:
                transfers[index - _AHEAD].wait()
            transfers.append(
                engine.submit(
                    Request(
                        op="write" if op == "write" else "read",
                        file=file,
                        offset_bytes=index * request_bytes,
                        address=blocks[index % _AHEAD].address,
                        nbytes=request_bytes,
                        keep_alive=None,
                        priority=Priority.PREFETCH,
                    )
                )
            )
        for transfer in transfers[-_AHEAD:]:
            transfer.wait()
        print("done", flush=True)
    engine.close()
    file.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("moved_bytes", type=int)
    parser.add_argument("request_bytes", type=int)
    serve(**vars(parser.parse_args()))
