"""Running a script by ``python`` and under ``penstock run``, and comparing what the two leave."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import preloaded

PENSTOCK = {
    "command": [sys.executable, str(Path(sys.executable).with_name("penstock"))],
    "module": [sys.executable, "-m", "penstock"],
}
NOTICE = "penstock: the script did not import torch: there was nothing to offload\n"
TIMEOUT_S = 200


@dataclass(frozen=True)
class End:
    """How a process ended."""

    code: int
    out: str
    err: str


def start(command, cwd, *, preload=False, **environment):
    """Start a command; one for this Python can get torch from a process that has it, which is quicker."""
    inherited = {name: os.environ[name] for name in os.environ if name != "OMP_NUM_THREADS"}
    settings = {
        "cwd": cwd,
        "env": {**inherited, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    if preload:
        assert command[0] == sys.executable
        return preloaded.Process(command[1:], bare=True, **settings)
    return subprocess.Popen(command, text=True, **settings)


def end(process):
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return End(process.returncode, *(re.sub("0x[0-9a-f]{8,}", "0x", text) for text in (out, err)))


def start_plain(cwd, *words, preload=False, **environment):
    return start([sys.executable, *words], cwd, preload=preload, **environment)


def start_under(cwd, *words, entry="command", options=(), preload=False, **environment):
    command = [*PENSTOCK[entry], "run", *options, *words]
    return start(command, cwd, preload=preload, **environment)


def both(cwd, *words, entry="command", **environment):
    """Ends of the same script, without and with, run at the same time; the notice is taken off."""
    processes = [
        start_plain(cwd, *words, **environment),
        start_under(cwd, *words, entry=entry, **environment),
    ]
    plain, under = [end(process) for process in processes]
    if under.err.endswith(NOTICE):
        under = End(under.code, under.out, under.err.removesuffix(NOTICE))
    return plain, under


@contextmanager
def agent_of_two_ranks():
    """The environment that torchrun's agent gives each of two ranks, with its store in this process."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    every = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    yield [{**every, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    del store
