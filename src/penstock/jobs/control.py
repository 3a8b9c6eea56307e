"""Control socket of a manager, for its user only: one line of JSON in each direction."""

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
_MAX_BYTES: Final = 64 * 1024
_MAX_ANSWER_BYTES: Final = 16 * 1024**2
_ANSWER_S: Final = 30.0
_MAX_PEERS: Final = 128
"""Maximum number of connections; more wait in the backlog."""
_IDLE_S: Final = 1.0
"""Idle time after which a connection is closed if there are too many."""

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class ManagerRequests(Protocol):
    """Requests to a manager, which a :class:`.Manager` implements."""

    def status(self) -> dict[str, Any]:
        """Return the status of the machine and the jobs."""

    def suspend(self, name: str) -> str:
        """Suspend a job until ``resume``; return a message."""

    def resume(self, name: str) -> str:
        """Give a job turns again; return a message."""

    def stop(self, name: str | None = None) -> str:
        """Stop a job, or all; return a message."""


def answer(manager: ManagerRequests, request: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a request. Raises JobError if it is invalid, and the manager's errors."""
    what, name = request.get("do"), request.get("name")
    if what == "status":
        return manager.status()
    if what not in ("suspend", "resume", "stop"):
        raise JobError(f"unknown request {what!r}; known are status, suspend, resume, stop")
    if what == "stop" and name is None:
        return {"told": manager.stop()}
    if not isinstance(name, str):
        raise JobError(f"the request {what!r} needs the name of a job")
    return {"told": getattr(manager, what)(name)}


@dataclass(slots=True)
class _Peer:
    """A connection, with the received part of its request and the unsent part of its answer."""

    moved_s: float
    """Time of the last transfer."""
    asked: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class Server:
    """The manager's end. For one thread: ``serve`` is called between other work, and blocks on no peer.

    Attributes:
        selector: Selector of the sockets, with which the manager waits too.
    """

    def __init__(self, directory_fd: int, handle: Handler) -> None:
        """Listen.

        Args:
            directory_fd: Descriptor of the manager's state directory.
            handle: Function that answers a request; a PenstockError becomes the answer.

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
                os.unlink(_NAME, dir_fd=directory_fd)  # of a dead manager
            self._socket.bind(_address(directory_fd))
            os.chmod(_NAME, 0o600, dir_fd=directory_fd)
            self._socket.listen(_MAX_PEERS)
        except OSError as error:
            self._socket.close()
            self.selector.close()
            raise JobError(f"the control socket cannot be created: {error}") from error
        self._socket.setblocking(False)
        self.selector.register(self._socket, selectors.EVENT_READ)

    def serve(self, timeout_s: float) -> None:
        """Answer pending requests; wait for the first one up to ``timeout_s``."""
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
        """Accept a connection; return whether there may be another.

        If there are too many, an idle one is closed; if none is idle, connections in the backlog wait
        until ``serve`` is called again.
        """
        if len(self._peers) >= _MAX_PEERS and not self._make_room():
            self._stop_accepting()
            return False
        try:
            peer, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._make_room():
                self._stop_accepting()
            return False
        if _user_of(peer) not in (os.geteuid(), 0):
            peer.close()
            return True
        peer.setblocking(False)
        self._peers[peer] = _Peer(time.monotonic())
        self.selector.register(peer, selectors.EVENT_READ)
        return True

    def _stop_accepting(self) -> None:
        self._is_full = True
        self.selector.unregister(self._socket)

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest, if that is long enough, and return true."""
        if not self._peers:
            return False
        silent = min(self._peers, key=lambda peer: self._peers[peer].moved_s)
        if time.monotonic() - self._peers[silent].moved_s < _IDLE_S:
            return False
        self._disconnect(silent)
        return True

    def _receive(self, peer: socket.socket, state: _Peer) -> None:
        try:
            piece = peer.recv(_MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        state.moved_s = time.monotonic()
        state.asked += piece
        line, ends, _ = state.asked.partition(b"\n")
        if ends:
            state.answer = memoryview(json.dumps(self._answer(bytes(line))).encode() + b"\n")
            self._send(peer, state)
        elif not piece or len(state.asked) >= _MAX_BYTES:
            self._disconnect(peer)

    def _send(self, peer: socket.socket, state: _Peer) -> None:
        """Send as much of the answer as possible now, and the rest later."""
        assert state.answer is not None, "there is a request"
        try:
            state.answer = state.answer[peer.send(state.answer) :]
        except BlockingIOError:
            pass
        except OSError:
            state.answer = state.answer[:0]
        if state.answer:
            state.moved_s = time.monotonic()
            self.selector.modify(peer, selectors.EVENT_WRITE)
        else:
            self._disconnect(peer)

    def _disconnect(self, peer: socket.socket) -> None:
        self.selector.unregister(peer)
        del self._peers[peer]
        peer.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = parse_json(line)
        except ValueError:
            return {"ok": False, "error": "the request is not JSON"}
        if not isinstance(request, dict):
            return {"ok": False, "error": "the request is not a JSON object"}
        try:
            return {"ok": True, **self._handle(request)}
        except PenstockError as error:
            return {"ok": False, "error": str(error)}

    def close(self) -> None:
        """Close the socket and all connections. Idempotent. Call it before closing the directory."""
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
    """Client of the manager of a state directory; each call opens a connection."""

    def __init__(self, state: str | os.PathLike[str]) -> None:
        """Remember the directory.

        Args:
            state: State directory of the manager.
        """
        self.path = absolute_path(state, "the state directory")

    def status(self) -> dict[str, Any]:
        """Return the status of the machine and the jobs, as in the manual. Raises JobError."""
        return self.ask({"do": "status"})

    def suspend(self, name: str) -> str:
        """Suspend a job until ``resume``; return a message. Raises JobError."""
        return str(self.ask({"do": "suspend", "name": name})["told"])

    def resume(self, name: str) -> str:
        """Give a job turns again; return a message. Raises JobError."""
        return str(self.ask({"do": "resume", "name": name})["told"])

    def stop(self, name: str | None = None) -> str:
        """Stop a job, or all jobs and the manager; return a message. Raises JobError."""
        return str(self.ask({"do": "stop", "name": name})["told"])

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request. Raises JobError if there is no manager, or it does not answer or refuses."""
        try:
            directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._no_manager(error) from error
        try:
            got = _exchange(_address(directory), json.dumps(dict(request)).encode() + b"\n")
        except (BlockingIOError, TimeoutError) as error:
            raise JobError(
                f"the manager in {self.path!r} did not answer within {_ANSWER_S:.0f} s: it is paused, or"
                " there are too many requests; try again"
            ) from error
        except OSError as error:
            raise self._no_manager(error) from error
        finally:
            os.close(directory)
        try:
            answer = parse_json(got)
        except ValueError as error:
            raise JobError(f"the manager in {self.path!r} ended before it answered") from error
        if not answer.pop("ok"):
            raise JobError(str(answer["error"]))
        return dict(answer)

    def _no_manager(self, error: OSError) -> JobError:
        text = (
            f"no manager answers in {self.path!r}; `penstock jobs run` starts one, which also finds the"
            " jobs of a killed manager"
        )
        if known := last_known(self.path):
            text += f"; the last recorded states of its jobs are: {known}"
        return JobError(f"{text} ({error.strerror or error})")


def _exchange(address: str, request: bytes) -> bytes:
    """Return the answer; empty or incomplete if the connection is lost. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        # only a blocking socket waits for a full backlog, so the kernel enforces the time limit
        limit = struct.pack("ll", int(_ANSWER_S), 0)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        peer.connect(address)
        peer.settimeout(_ANSWER_S)
        got = bytearray()
        with suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(request)
            while not got.endswith(b"\n") and len(got) < _MAX_ANSWER_BYTES:
                piece = peer.recv(_MAX_BYTES)
                if not piece:
                    break
                got += piece
        return bytes(got)


def _address(directory_fd: int) -> str:
    """Return the socket's address, which is short even if the directory's path is too long for one."""
    return f"/proc/self/fd/{directory_fd}/{_NAME}"


def _user_of(peer: socket.socket) -> int:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", packed)[1])
