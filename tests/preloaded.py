"""Python processes forked from one that has imported torch, NumPy and Penstock already.

A fresh interpreter takes more than two seconds of processor time to import them. ``run`` and ``Process``
are as ``subprocess.run`` and ``subprocess.Popen``, given the words behind ``python``: ``["-c", code]`` or
``[script]``, both with arguments, and ``-W`` before them. Such a process has a number of its own, its own
standard streams, working directory and environment, ends by its own exit code or signal, and runs
``atexit`` functions.

A process that is ``bare`` finds only the standard library imported. Its own imports of torch and NumPy
pass through the import system, whose loader then hands over the modules that the server has, and Penstock
is imported as it is on disk. So it is for what watches imports, such as ``penstock run``. Torch has the
threads that ``OMP_NUM_THREADS`` gives the server.

Use ``subprocess`` where the start is the subject: what an import loads or reads of the environment
(``OMP_NUM_THREADS``, ``MALLOC_*``, ``LD_LIBRARY_PATH``), ``python -m``, and resident memory.

The servers have a single thread and open nothing. Each process that runs tests has two of its own, one of
them for bare processes, which start at the first request and end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
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
)
PENSTOCK_MODULES = (
    "penstock",
    "penstock.api",
    "penstock.checkpoint",
    "penstock.data",
    "penstock.optim",
    "penstock.store",
)
PENSTOCK_COMMAND = str(Path(sys.executable).with_name("penstock"))
"""A script, for a bare process."""
STREAMS = 3

# -- in the process that runs tests ------------------------------------------------------------------


class Process:
    """A process forked from the server: what tests use of ``subprocess.Popen``, with text streams."""

    def __init__(
        self, words, *, stdin=None, stdout=None, stderr=None, cwd=None, env=None, bare=False
    ):
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
            _server().send(request, [*(fd for fd, _ in ends), writer], bare)
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


def run(words, *, cwd=None, env=None, input=None, timeout=280, check=False, bare=False):
    """Run to the end, output captured as text; return a ``subprocess.CompletedProcess``.

    A process that takes longer than ``timeout`` seconds is killed.
    """
    pipe = subprocess.PIPE
    stdin = pipe if input is not None else subprocess.DEVNULL
    streams = {"stdin": stdin, "stdout": pipe, "stderr": pipe}
    with Process(words, **streams, cwd=cwd, env=env, bare=bare) as process:
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
        pairs = [socket.socketpair(), socket.socketpair()]
        self._sockets = [ours for ours, _ in pairs]
        self._lock = threading.Lock()
        descriptors = [theirs.fileno() for _, theirs in pairs]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
        )
        for _, theirs in pairs:
            theirs.close()
        self.pid = os.getpid()
        atexit.register(self.close)

    def send(self, request, descriptors, bare):
        body, to = json.dumps(request).encode(), self._sockets[bare]
        with self._lock:
            socket.send_fds(to, [len(body).to_bytes(8, "little")], descriptors)
            to.sendall(body)

    def close(self):
        if os.getpid() == self.pid:
            for each in self._sockets:
                each.close()
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


class _Again(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads a package that the server has imported: its modules are there again at once."""

    def __init__(self, name, modules, *, needs=()):
        self._package, self._modules, self._needs = modules[name], modules, needs
        self._spec = self._package.__spec__
        for each in modules:
            sys.modules.pop(each, None)

    def find_spec(self, fullname, path, target=None):
        if fullname != self._package.__name__:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, origin=self._spec.origin, is_package=True
        )

    def create_module(self, spec):
        return self._package

    def exec_module(self, module):
        sys.meta_path.remove(self)
        for name in self._needs:
            importlib.import_module(name)
        module.__spec__, module.__loader__ = self._spec, self._spec.loader
        sys.modules.update(self._modules)


def _become(request):
    """Run the code as ``__main__``, as ``python`` would; the caller then ends the interpreter."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"
        buffering = 1 if stream == "stderr" else -1
        file = open(number, mode, buffering, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, stream, file)
        setattr(sys, f"__{stream}__", file)
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
        source, name = Path(words[0]).read_bytes(), str(Path(words[0]).absolute())
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


def _import(names):
    """Import modules; return all that have come, but for those of the standard library."""
    before = {*sys.modules}
    for name in names:
        importlib.import_module(name)
    return {
        name: module
        for name, module in sys.modules.items()
        if name not in before and name.partition(".")[0] not in sys.stdlib_module_names
    }


def _main():
    connections = [socket.socket(fileno=int(word)) for word in sys.argv[1:]]
    numpy, torch = _import(PRELOADED[:1]), _import(PRELOADED[1:])
    bare = os.fork() == 0
    if not bare:
        _import(PENSTOCK_MODULES)
    connections.pop(not bare).close()
    gc.collect()
    gc.freeze()  # memory that is shared with each process stays so
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads after imports: a fork would lose them"
    request = _serve(*connections)
    if request is None:
        os._exit(0)
    sys.modules["numpy"].random.seed()  # the server's would be that of each
    if bare:
        sys.meta_path[:0] = [_Again("torch", torch, needs=["numpy"]), _Again("numpy", numpy)]
    _become(request)


if __name__ == "__main__":
    _main()
