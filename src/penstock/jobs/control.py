"""How a manager is talked to: a socket that only its user can reach, a line of JSON each way."""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

from penstock.core.errors import JobError, PenstockError
from penstock.jobs.record import last_known

_NAME: Final = "control"
_MOST_BYTES: Final = 64 * 1024
_MOST_ANSWER_BYTES: Final = 16 * 1024**2
_ANSWER_S: Final = 30.0
_PEERS: Final = 16

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


class Server:
    """A manager's end. For one thread: ``serve`` is called between other work.

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
        self._peers: dict[socket.socket, bytearray] = {}
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
        for key, _ in self.selector.select(timeout_s):
            if key.fileobj is self._socket:
                self._accept()
            elif key.fileobj in self._peers and isinstance(key.fileobj, socket.socket):
                self._receive(key.fileobj)

    def _accept(self) -> None:
        try:
            peer, _ = self._socket.accept()
        except OSError:
            return
        if _user_of(peer) not in (os.geteuid(), 0):
            peer.close()
            return
        if len(self._peers) >= _PEERS:  # who has said nothing for longest goes: it may be stopped
            self._let_go(next(iter(self._peers)))
        peer.setblocking(False)
        self._peers[peer] = bytearray()
        self.selector.register(peer, selectors.EVENT_READ)

    def _receive(self, peer: socket.socket) -> None:
        got = self._peers[peer]
        try:
            piece = peer.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        got += piece
        if b"\n" not in got and piece and len(got) < _MOST_BYTES:
            return
        if b"\n" in got:
            answer = json.dumps(self._answer(bytes(got.partition(b"\n")[0]))).encode() + b"\n"
            with suppress(OSError):
                peer.settimeout(1.0)
                peer.sendall(answer)
        self._let_go(peer)

    def _let_go(self, peer: socket.socket) -> None:
        self.selector.unregister(peer)
        del self._peers[peer]
        peer.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
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
        self.path = os.path.abspath(state)

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
        """Ask for something. Raises JobError: there is no manager, or it refuses."""
        nobody = (
            f"no manager answers in {self.path!r}; `penstock jobs run` starts one, and finds the jobs of"
            " one that was killed"
        )
        if known := last_known(self.path):
            nobody += f"; when the last one recorded them, its jobs were: {known}"
        try:
            directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise JobError(f"{nobody} ({error.strerror})") from error
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(_ANSWER_S)
                peer.connect(_address(directory))
                peer.sendall(json.dumps(dict(request)).encode() + b"\n")
                got = bytearray()
                while not got.endswith(b"\n") and len(got) < _MOST_ANSWER_BYTES:
                    piece = peer.recv(_MOST_BYTES)
                    if not piece:
                        break
                    got += piece
        except OSError as error:
            raise JobError(f"{nobody} ({error})") from error
        finally:
            os.close(directory)
        try:
            answer = json.loads(got)
        except ValueError as error:
            raise JobError(f"the manager in {self.path!r} ended before it answered") from error
        if not answer.pop("ok"):
            raise JobError(str(answer["error"]))
        return dict(answer)


def _address(directory_fd: int) -> str:
    """Of the socket; by this way the directory's own path may be longer than addresses can be."""
    return f"/proc/self/fd/{directory_fd}/{_NAME}"


def _user_of(peer: socket.socket) -> int:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", packed)[1])
