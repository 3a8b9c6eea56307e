"""Python processes forked from one that has imported torch, NumPy and Penstock already.

A fresh interpreter takes more than two seconds of processor time to import them. ``run`` and ``Process``
are as ``subprocess.run`` and ``subprocess.Popen``, given the words behind ``python``: ``["-c", code]`` or
``[script]``, both with arguments, and ``-W`` before them. Such a process has a number of its own, its own
standard streams, working directory and environment, ends by its own exit code or signal, and runs
``atexit`` functions.

Use ``subprocess`` where the start is the subject: what an import loads or reads of the environment
(``OMP_NUM_THREADS``, ``MALLOC_*``, ``LD_LIBRARY_PATH``), ``python -m``, and resident memory.

The server has a single thread and opens nothing. Each process that runs tests has its own server, which
starts at the first request and ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path

PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",  # which the first optimizer imports
    "penstock",
    "penstock.api",
    "penstock.checkpoint",
    "penstock.data",
    "penstock.optim",
    "penstock.store",
)
STREAMS = 3

# -- in the process that runs tests ------------------------------------------------------------------


class Process:
    """A process forked from the server: what tests use of ``subprocess.Popen``, with text streams."""

    def __init__(self, words, *, stdin=None, stdout=None, stderr=None, cwd=None, env=None):
        self.args = [os.fspath(word) for word in words]
        self.returncode = None
        request = {
            "words": self.args,
            "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "env": dict(os.environ if env is None else env),
            "ignored": [
                number
                for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
                if signal.getsignal(number) == signal.SIG_IGN
            ],
        }
        with contextlib.ExitStack() as theirs:
            ends = [
                self._stream(theirs, number, wanted)
                for number, wanted in enumerate((stdin, stdout, stderr))
            ]
            (self.stdin, self.stdout, self.stderr) = (mine for _, mine in ends)
            reader, writer = os.pipe()
            theirs.callback(os.close, writer)
            self._status = open(reader, encoding="ascii")  # noqa: SIM115
            _server().send(request, [*(fd for fd, _ in ends), writer])
        self.pid = int(self._status.readline() or _lost())

    @staticmethod
    def _stream(theirs, number, wanted):
        """Return the descriptor for the process and, of a pipe, the file for the test."""
        if wanted is None:
            return number, None
        if wanted == subprocess.DEVNULL:
            fd = os.open(os.devnull, os.O_RDWR)
            theirs.callback(os.close, fd)
            return fd, None
        if wanted != subprocess.PIPE:
            return wanted if isinstance(wanted, int) else wanted.fileno(), None
        reader, writer = os.pipe()
        fd, mine = (reader, writer) if number == 0 else (writer, reader)
        theirs.callback(os.close, fd)
        return fd, open(mine, "w" if number == 0 else "r", encoding="utf-8")

    def poll(self):
        """Return the exit code, or None while the process runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout=None):
        """Return the exit code: the negative number of a signal that ended the process."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._end()
        return self.returncode

    def _end(self):
        with self._status as file:
            self.returncode = int(file.readline() or _lost())

    def send_signal(self, number):
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, text=None, timeout=None):
        """Write the text, read both streams to their ends, wait; return what was read.

        Raises:
            subprocess.TimeoutExpired: The process runs on; it can be killed and this called again.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.write(text or "")
        if not hasattr(self, "_read"):
            self._read, self._readers = [None, None], []
            for index, stream in enumerate((self.stdout, self.stderr)):
                if stream is not None:
                    words = (index, stream)
                    self._readers.append(
                        threading.Thread(target=self._drain, args=words, daemon=True)
                    )
                    self._readers[-1].start()
        for reader in self._readers:
            reader.join(None if deadline is None else max(0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(None if deadline is None else max(0, deadline - time.monotonic()))
        return tuple(self._read)

    def _drain(self, index, stream):
        with stream:
            self._read[index] = stream.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()


def run(words, *, cwd=None, env=None, input=None, timeout=280, check=False):
    """Run to the end, output captured as text; return a ``subprocess.CompletedProcess``.

    A process that takes longer than ``timeout`` seconds is killed.
    """
    pipe = subprocess.PIPE
    stdin = pipe if input is not None else subprocess.DEVNULL
    with Process(words, stdin=stdin, stdout=pipe, stderr=pipe, cwd=cwd, env=env) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            process.communicate()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _lost():
    raise RuntimeError("the server of preloaded processes has ended")


class _Server:
    def __init__(self):
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.pid = os.getpid()
        atexit.register(self.close)

    def send(self, request, descriptors):
        body = json.dumps(request).encode()
        with self._lock:
            socket.send_fds(self._socket, [len(body).to_bytes(8, "little")], descriptors)
            self._socket.sendall(body)

    def close(self):
        if os.getpid() == self.pid:
            self._socket.close()
            self.process.wait()


_servers = {}
_starting = threading.Lock()


def _server():
    """Return the server of this process, started if need be; a forked child has none of its own yet."""
    with _starting:
        here = os.getpid()
        if here not in _servers:
            _servers[here] = _Server()
        return _servers[here]


# -- in the server -----------------------------------------------------------------------------------


def _receive(connection):
    """Return the next request and its descriptors; None when the test process has closed its end."""
    head, descriptors, _, _ = socket.recv_fds(connection, 8, STREAMS + 1)
    if not head:
        return None
    while len(head) < 8:
        head += connection.recv(8 - len(head))
    body, length = b"", int.from_bytes(head, "little")
    while len(body) < length:
        body += connection.recv(length - len(body))
    return json.loads(body), descriptors


def _serve(connection):
    """Fork for each request and report ends; return the request in each child, None at the end."""
    running = {}
    while True:
        for ready in select.select([connection, *running], [], [])[0]:
            if ready is connection:
                received = _receive(connection)
                if received is None:
                    return None
                request, descriptors = received
                child = os.fork()
                if child == 0:
                    for number, descriptor in enumerate(descriptors[:STREAMS]):
                        os.dup2(descriptor, number)
                    os.closerange(STREAMS, max(descriptors) + 1)
                    connection.detach()
                    os.closerange(STREAMS, os.sysconf("SC_OPEN_MAX"))
                    return request
                for descriptor in descriptors[:STREAMS]:
                    os.close(descriptor)
                status = open(descriptors[STREAMS], "w", encoding="ascii")  # noqa: SIM115
                print(child, file=status, flush=True)
                running[os.pidfd_open(child)] = child, status
            else:
                child, status = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with contextlib.suppress(BrokenPipeError), status:
                    print(code, file=status)


def _become(request):
    """Run the code as ``__main__``, as ``python`` would; the caller then ends the interpreter."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"
        buffering = 1 if stream == "stderr" else -1
        file = open(number, mode, buffering, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, stream, file)
        setattr(sys, f"__{stream}__", file)
    sys.modules["numpy"].random.seed()  # the server's would be that of each
    words = list(request["words"])
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        del words[:2]
    module = types.ModuleType("__main__")
    module.__builtins__ = __builtins__
    if words[0] == "-c":
        source, name = words[1], "<string>"
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
    else:
        source, name = Path(words[0]).read_bytes(), words[0]
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        module.__file__ = name
    sys.modules["__main__"] = module
    try:
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  (as the interpreter does)
        error.__traceback__ = error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _main():
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # memory that is shared with each process stays so
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads after imports: a fork would lose them"
    request = _serve(connection)
    if request is None:
        os._exit(0)
    _become(request)


if __name__ == "__main__":
    _main()
