"""How a manager is talked to: a socket that only its user can reach, a line of JSON each way."""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from penstock.core.errors import JobError, PenstockError
from penstock.core.files import absolute_path, parse_json
from penstock.jobs.record import last_known

_NAME: Final = "control"
_MOST_BYTES: Final = 64 * 1024
_MOST_ANSWER_BYTES: Final = 16 * 1024**2
_ANSWER_S: Final = 30.0
_PEERS: Final = 128
"""Connections at once; more wait in the backlog."""
_SILENT_S: Final = 1.0
"""A peer that moved nothing for so long makes room for another, where there are too many."""

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class Manages(Protocol):
    """What a manager can be asked; a :class:`.Manager` is one."""

    def status(self) -> dict[str, Any]:
        """How the machine and the jobs are."""

    def suspend(self, name: str) -> str:
        """Have a job sleep until ``resume``; what comes of it, in words."""

    def resume(self, name: str) -> str:
        """Let a job have turns again; what comes of it, in words."""

    def stop(self, name: str | None = None) -> str:
        """End a job, or all; what comes of it, in words."""


def answer(manager: Manages, request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a request says. Raises JobError if it makes no sense, and what the manager raises."""
    what, name = request.get("do"), request.get("name")
    if what == "status":
        return manager.status()
    if what not in ("suspend", "resume", "stop"):
        raise JobError(f"the request {what!r} is unknown; known are status, suspend, resume, stop")
    if what == "stop" and name is None:
        return {"told": manager.stop()}
    if not isinstance(name, str):
        raise JobError(f"the request {what!r} needs the name of a job")
    return {"told": getattr(manager, what)(name)}


@dataclass(slots=True)
class _Peer:
    """A connection: what it has asked so far, and what it is still to be told."""

    moved_s: float
    """When it was last heard or told something."""
    asked: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class Server:
    """A manager's end. For one thread: ``serve`` is called between other work, and waits for no peer.

    Attributes:
        selector: What it listens with; the manager waits with it too.
    """

    def __init__(self, directory_fd: int, handle: Handler) -> None:
        """Listen.

        Args:
            directory_fd: Of the state directory, which the manager has to itself.
            handle: Answers a request; PenstockErrors of it are the answer.

        Raises:
            JobError: It cannot listen.
        """
        self._handle = handle
        self._directory = directory_fd
        self.selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, _Peer] = {}
        self._is_full = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                os.unlink(_NAME, dir_fd=directory_fd)  # a dead manager's
            self._socket.bind(_address(directory_fd))
            os.chmod(_NAME, 0o600, dir_fd=directory_fd)
            self._socket.listen(_PEERS)
        except OSError as error:
            self._socket.close()
            self.selector.close()
            raise JobError(f"the control socket cannot be made: {error}") from error
        self._socket.setblocking(False)
        self.selector.register(self._socket, selectors.EVENT_READ)

    def serve(self, timeout_s: float) -> None:
        """Answer what is asked, and return after so long at the latest, if nobody asks."""
        if self._is_full:
            self._is_full = False
            self.selector.register(self._socket, selectors.EVENT_READ)
        for key, events in self.selector.select(timeout_s):
            if key.fileobj is self._socket:
                while self._accept():
                    pass
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._peers:
                serve = self._send if events & selectors.EVENT_WRITE else self._receive
                serve(key.fileobj, self._peers[key.fileobj])

    def _accept(self) -> bool:
        """Take a connection; whether there may be another.

        Where there are too many, one that has been silent makes room; if there is none, those that are in
        the backlog wait there until ``serve`` is called again.
        """
        if len(self._peers) >= _PEERS and not self._make_room():
            self._be_full()
            return False
        try:
            peer, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._make_room():
                self._be_full()
            return False
        if _user_of(peer) not in (os.geteuid(), 0):
            peer.close()
            return True
        peer.setblocking(False)
        self._peers[peer] = _Peer(time.monotonic())
        self.selector.register(peer, selectors.EVENT_READ)
        return True

    def _be_full(self) -> None:
        self._is_full = True
        self.selector.unregister(self._socket)

    def _make_room(self) -> bool:
        """Drop the peer that has been silent for longest, if that is long; whether it was."""
        if not self._peers:
            return False
        silent = min(self._peers, key=lambda peer: self._peers[peer].moved_s)
        if time.monotonic() - self._peers[silent].moved_s < _SILENT_S:
            return False
        self._drop(silent)
        return True

    def _receive(self, peer: socket.socket, its: _Peer) -> None:
        try:
            piece = peer.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        its.moved_s = time.monotonic()
        its.asked += piece
        line, ends, _ = its.asked.partition(b"\n")
        if ends:
            its.answer = memoryview(json.dumps(self._answer(bytes(line))).encode() + b"\n")
            self._send(peer, its)
        elif not piece or len(its.asked) >= _MOST_BYTES:
            self._drop(peer)

    def _send(self, peer: socket.socket, its: _Peer) -> None:
        """Tell it as much as it takes now; the rest when it has read that."""
        assert its.answer is not None, "it has asked"
        try:
            its.answer = its.answer[peer.send(its.answer) :]
        except BlockingIOError:
            pass
        except OSError:
            its.answer = its.answer[:0]
        if its.answer:
            its.moved_s = time.monotonic()
            self.selector.modify(peer, selectors.EVENT_WRITE)
        else:
            self._drop(peer)

    def _drop(self, peer: socket.socket) -> None:
        self.selector.unregister(peer)
        del self._peers[peer]
        peer.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = parse_json(line)
        except ValueError:
            return {"ok": False, "error": "the request is no JSON"}
        if not isinstance(request, dict):
            return {"ok": False, "error": "the request is no object"}
        try:
            return {"ok": True, **self._handle(request)}
        except PenstockError as error:
            return {"ok": False, "error": str(error)}

    def close(self) -> None:
        """Listen no more. Idempotent, and before the directory is closed."""
        if self._socket.fileno() < 0:
            return
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        self.selector.close()
        self._socket.close()
        with suppress(OSError):
            os.unlink(_NAME, dir_fd=self._directory)


class Client:
    """Talks to the manager of a state directory; each call is a connection of its own."""

    def __init__(self, state: str | os.PathLike[str]) -> None:
        """Say which.

        Args:
            state: The manager's directory.
        """
        self.path = absolute_path(state, "the state directory")

    def status(self) -> dict[str, Any]:
        """How the machine and the jobs are; the manual has its fields. Raises JobError."""
        return self.ask({"do": "status"})

    def suspend(self, name: str) -> str:
        """Have a job sleep until ``resume``; what comes of it, in words. Raises JobError."""
        return str(self.ask({"do": "suspend", "name": name})["told"])

    def resume(self, name: str) -> str:
        """Let a job have turns again; what comes of it, in words. Raises JobError."""
        return str(self.ask({"do": "resume", "name": name})["told"])

    def stop(self, name: str | None = None) -> str:
        """End a job, or all and the manager; what comes of it, in words. Raises JobError."""
        return str(self.ask({"do": "stop", "name": name})["told"])

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for something. Raises JobError: there is no manager, it does not answer, or it refuses."""
        try:
            directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._nobody(error) from error
        try:
            got = _exchange(_address(directory), json.dumps(dict(request)).encode() + b"\n")
        except (BlockingIOError, TimeoutError) as error:
            raise JobError(
                f"the manager in {self.path!r} did not answer within {_ANSWER_S:.0f} s: it is stopped, or"
                " too many ask at once; try again"
            ) from error
        except OSError as error:
            raise self._nobody(error) from error
        finally:
            os.close(directory)
        try:
            answer = parse_json(got)
        except ValueError as error:
            raise JobError(f"the manager in {self.path!r} ended before it answered") from error
        if not answer.pop("ok"):
            raise JobError(str(answer["error"]))
        return dict(answer)

    def _nobody(self, error: OSError) -> JobError:
        text = (
            f"no manager answers in {self.path!r}; `penstock jobs run` starts one, and finds the jobs of"
            " one that was killed"
        )
        if known := last_known(self.path):
            text += f"; when the last one recorded them, its jobs were: {known}"
        return JobError(f"{text} ({error.strerror or error})")


def _exchange(address: str, request: bytes) -> bytes:
    """What is answered; empty or torn if the other end goes away. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        # a connection waits for room in a full backlog only if the socket blocks: so the kernel times it
        limit = struct.pack("ll", int(_ANSWER_S), 0)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        peer.connect(address)
        peer.settimeout(_ANSWER_S)
        got = bytearray()
        with suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(request)
            while not got.endswith(b"\n") and len(got) < _MOST_ANSWER_BYTES:
                piece = peer.recv(_MOST_BYTES)
                if not piece:
                    break
                got += piece
        return bytes(got)


def _address(directory_fd: int) -> str:
    """Of the socket; by this way the directory's own path may be longer than addresses can be."""
    return f"/proc/self/fd/{directory_fd}/{_NAME}"


def _user_of(peer: socket.socket) -> int:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", packed)[1])
