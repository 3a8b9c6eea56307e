"""Messages between the ranks of a job, over the key-value store of torch.distributed.

A store needs no rank to be there, unlike a collective: one without a session, one that has ended or one
that hangs holds up nobody, and the program's own collectives are not disturbed.

[Note: no wait without an end]
    Even a store can wait for ever, if the process that has it hangs. So one daemon thread uses it, and
    the session waits for that thread as long as it has patience. When patience has run out once, the
    store is given up.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from penstock.core.ranks import rank, world_size

T = TypeVar("T")
PATIENCE_S: Final = 10.0
"""Longest time that a rank waits for others."""
_SHORT_S: Final = 2.0
"""Longest time for an operation that waits for no other rank."""
_LOOK_AGAIN_S: Final = 0.02
_GLANCE_S: Final = 0.001
"""Longest time that training waits for a glance at the store."""
_MEET_AGAIN_S: Final = 0.0005


def _agent_store() -> Any:
    """Return the store of torchrun's agent, which is there before there is a process group, or None."""
    if rank() is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    inner = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=PATIENCE_S),
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", inner)  # type: ignore[attr-defined]


class RankStore:
    """A store that the ranks of a job share. For the session's thread.

    Attributes:
        rank: Number of this process.
        world_size: Number of ranks.
    """

    def __init__(self, store: Any, number: int, size: int, *, session: int) -> None:
        """Tell the other ranks that this one has a session.

        Args:
            store: Store of the job.
            number: Rank of this process.
            size: Number of ranks.
            session: As for ``find``.
        """
        self.rank = number
        self.world_size = size
        self._prefix = f"penstock/session {session}"
        self._store = store
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_lost = False
        self._glanced = ""
        self._glance: threading.Event | None = None
        threading.Thread(
            target=_serve, args=(self._calls,), name="penstock ranks", daemon=True
        ).start()
        weakref.finalize(self, self._calls.put, None)
        self.publish("opened", "")

    @classmethod
    def find(cls, *, session: int, by_agent: bool) -> RankStore | None:
        """Return the store of torchrun's agent, or of the default process group; None without either.

        Args:
            session: Number of this session among those of the process, which all ranks open in turn.
            by_agent: Try the agent's.
        """
        if not dist.is_available():
            return None
        number, size = rank(), world_size()
        store = None
        with suppress(RuntimeError, ValueError, KeyError):  # torch's errors of connections as well
            store = _agent_store() if by_agent else None
        if store is None:
            if not dist.is_initialized():
                return None
            number, size = dist.get_rank(), dist.get_world_size()
            with suppress(AttributeError, RuntimeError, ValueError):
                store = dist.distributed_c10d._get_default_store()
        if store is None or number is None or size < 2:
            return None
        return cls(store, number, size, session=session)

    def publish(self, name: str, text: str) -> bool:
        """Set what this rank says under a name, in place of an earlier text; False if it is lost."""
        return self._call(lambda: self._set(name, text), _SHORT_S, default=False)

    def collect(self, name: str, patience_s: float) -> dict[int, str]:
        """Return what ranks have published under a name, by rank.

        Waits for other ranks that have a session, up to ``patience_s`` seconds.
        """
        deadline = time.monotonic() + patience_s
        return self._call(lambda: self._collect(name, deadline), patience_s + _SHORT_S, default={})

    def meet(self, place: str, count: int) -> bool:
        """Wait until ``count`` processes have called this with the same place.

        Returns:
            False if they have not after ``PATIENCE_S`` seconds.
        """
        patience_s = PATIENCE_S
        deadline = time.monotonic() + patience_s
        return self._call(
            lambda: self._meet(place, count, deadline), patience_s + _SHORT_S, default=False
        )

    def exchange(self, name: str, expected: str, text: str) -> str | None:
        """Set a text of the whole job in place of the expected one, and of no other.

        Waits up to ``PATIENCE_S`` seconds for the store: ranks that do not agree wait for each other.

        Args:
            name: Name of the text.
            expected: Text that is replaced; "" if there is none yet.
            text: New text. With "" for both, nothing changes.

        Returns:
            The text that is there then; None if the store is lost.
        """
        return self._call(lambda: self._exchange(name, expected, text), PATIENCE_S, default=None)

    def glance(self, name: str) -> str:
        """Return the text of the whole job that is there, or was when this was called before.

        Waits a millisecond at most, also for a store that hangs. For one name only.
        """
        if self._glance is None and not self._is_lost:
            self._glance = done = threading.Event()
            self._calls.put(lambda: self._glance_at(name, done))
            done.wait(_GLANCE_S)
        if self._glance is not None and self._glance.is_set():
            self._glance = None
        return self._glanced

    def _key(self, name: str, number: int) -> str:
        return f"{self._prefix}/{name}/{number}"

    def _set(self, name: str, text: str) -> bool:
        self._store.set(self._key(name, self.rank), text)
        return True

    def _exchange(self, name: str, expected: str, text: str) -> str:
        key = f"{self._prefix}/{name}"
        if (
            expected == text == ""
        ):  # only read: a FileStore appends to its file for what it compares
            there: bytes = self._store.get(key) if self._store.check([key]) else b""
        else:
            there = self._store.compare_set(key, expected, text)
        return there.decode()

    def _glance_at(self, name: str, done: threading.Event) -> None:
        with suppress(RuntimeError, ValueError, OSError):
            self._glanced = self._exchange(name, "", "")
        done.set()

    def _collect(self, name: str, deadline: float) -> dict[int, str]:
        found: dict[int, str] = {}
        missing = set(range(self.world_size))
        while True:
            for number in self._having(name, missing):
                found[number] = self._store.get(self._key(name, number)).decode()
                missing.discard(number)
            others = missing - {self.rank}
            if time.monotonic() >= deadline or not self._having("opened", others):
                return found
            time.sleep(_LOOK_AGAIN_S)

    def _having(self, name: str, ranks: Iterable[int]) -> list[int]:
        return [each for each in sorted(ranks) if self._store.check([self._key(name, each)])]

    def _meet(self, place: str, count: int, deadline: float) -> bool:
        key = f"{self._prefix}/meet/{place}"
        self._store.add(key, 1)
        while self._store.add(key, 0) < count:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_MEET_AGAIN_S)
        return True

    def _call(self, act: Callable[[], T], patience_s: float, *, default: T) -> T:
        """Return what ``act`` returns in the thread of the store; see [Note: no wait without an end]."""
        if self._is_lost:
            return default
        done, results = threading.Event(), [default]

        def call() -> None:
            with suppress(RuntimeError, ValueError, OSError):  # as if the others were not there
                results[0] = act()
            done.set()

        self._calls.put(call)
        if not done.wait(patience_s):
            self._is_lost = True
            return default
        return results[0]


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
