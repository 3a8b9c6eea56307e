"""The control socket of a manager: many clients at once, and peers that misbehave."""

import os
import socket
import threading
from contextlib import ExitStack, contextmanager

import pytest

from penstock.core.errors import JobError
from penstock.jobs import control
from penstock.jobs.control import Client, Server

LARGE = "x" * (4 << 20)
"""More than a socket holds for a peer that does not read."""


@contextmanager
def serving(directory, answer):
    """A server in a thread of its own."""
    fd = os.open(directory, os.O_RDONLY)
    server, over = Server(fd, lambda _: {"told": answer}), threading.Event()

    def serve():
        while not over.is_set():
            server.serve(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server
    finally:
        over.set()
        thread.join()
        server.close()
        os.close(fd)


def peer_of(directory):
    """A connection that is made by hand."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(str(directory / "control"))
    return peer


def test_a_thousand_clients_at_once_get_answers(tmp_path):
    answers, gate = [], threading.Barrier(1000)

    def ask():
        gate.wait()
        answers.append(Client(tmp_path).ask({"do": "status"}))

    with serving(tmp_path, "well"):
        threads = [threading.Thread(target=ask) for _ in range(1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [{"told": "well"}] * 1000


def test_peers_that_ask_and_never_read_hold_up_nobody(tmp_path):
    with serving(tmp_path, LARGE), ExitStack() as stack:
        for _ in range(30):
            peer = stack.enter_context(peer_of(tmp_path))
            peer.sendall(b'{"do": "status"}\n')
        assert Client(tmp_path).ask({"do": "status"}) == {"told": LARGE}


def test_silent_peers_make_room_for_others_where_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "_IDLE_S", 0.0)
    with serving(tmp_path, "well"), ExitStack() as stack:
        for _ in range(2 * control._MAX_PEERS):
            stack.enter_context(peer_of(tmp_path))
        assert Client(tmp_path).ask({"do": "status"}) == {"told": "well"}


def test_a_manager_that_is_stopped_is_told_from_one_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "_ANSWER_S", 1.0)
    fd = os.open(tmp_path, os.O_RDONLY)
    server = Server(fd, lambda _: {})  # it never serves
    with pytest.raises(JobError, match="did not answer within 1 s: it is paused"):
        Client(tmp_path).status()
    server.close()
    os.close(fd)
    with pytest.raises(JobError, match="penstock jobs run"):
        Client(tmp_path).status()
