"""Tasks in processes forked from this one, several at once, each with a limit of time."""

from __future__ import annotations

import itertools
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 300
"""Seconds that one task may take."""


def in_a_child(work: Callable[[], str], limit_s: int = LIMIT_S) -> tuple[int, int]:
    """Fork; return the child's process number and a descriptor from which its result can be read."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    signal.alarm(limit_s)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        said = work()
    except BaseException:  # noqa: BLE001  (it is the result)
        said = "error: " + traceback.format_exc().strip().rpartition("\n")[2]
    with open(writer, "w", encoding="utf-8", errors="replace") as file:
        file.write(said)
        file.flush()
        os._exit(0)


def run(
    tasks: Iterable[tuple[T, Callable[[], str]]], jobs: int, limit_s: int = LIMIT_S
) -> Iterator[tuple[T, str]]:
    """Yield each task's key and result, as tasks end; a task runs in a process of its own.

    The result of a process that was killed is ``"no end"`` (it took longer than ``limit_s``) or
    ``"died of signal N"``.
    """
    waiting = iter(tasks)
    running: dict[int, tuple[T, int]] = {}
    while True:
        for key, work in itertools.islice(waiting, jobs - len(running)):
            child, reader = in_a_child(work, limit_s)
            running[reader] = key, child
        if not running:
            return
        for reader in select.select(list(running), [], [])[0]:
            key, child = running.pop(reader)
            with open(reader, "rb") as file:
                text = file.read().decode()
            _, status = os.waitpid(child, 0)
            died = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            if died:
                text = "no end" if died == signal.SIGALRM else f"died of signal {died}"
            yield key, text
