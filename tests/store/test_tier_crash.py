"""kill -9 at every phase: no file without a name is left, and nobody holds the space."""

import os
import signal
import subprocess
from pathlib import Path

import preloaded
from grids import parametrize

VICTIM = """
import sys, threading, time
from penstock.core.units import MIB
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder
from penstock.testing.engines import aligned
from penstock.store import FlashTier
from penstock.store.blob import ReservedTier

kind, phase, *directories = sys.argv[1:]
common = {"engine": ThreadEngine(4), "recorder": Recorder()}
place = None
if kind == "flash":
    tier = FlashTier(directories, capacity_bytes=32 * MIB, **common)
else:
    tier = ReservedTier(directories, name="x", remedy="", **common)
    (place,) = tier.reserve([8 * MIB], file_name=None, advice=lambda needed, free: "none")
source, target = aligned(8 * MIB, seed=1), aligned(8 * MIB)
ticket = None
def write():
    return tier.write(source.ctypes.data, 8 * MIB, keep_alive=source, label="x", at=place)
if phase != "open":
    ticket = write()
    ticket.written.wait(20)
threading.Timer(0.05, print, ["ready"], {"flush": True}).start()
while phase == "write":
    again = write()
    again.written.wait(20)
    tier.discard(again)
while phase == "read":
    tier.read(ticket, target.ctypes.data, keep_alive=target).wait(20)
time.sleep(60)
"""


@parametrize(
    {
        "phase": ("open", "write", "rest", "read"),
        "kind": ("flash", "reserved"),
        "opened": ("O_TMPFILE", "unlink"),
    }
)
def test_killed(phase, opened, kind, tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    for each in directories:
        each.mkdir()
    as_an_old_kernel = "import os; os.O_TMPFILE = os.O_DIRECTORY\n"
    prelude = as_an_old_kernel if opened == "unlink" else ""
    victim = preloaded.Process(
        ["-c", prelude + VICTIM, kind, phase, *directories],
        stdout=subprocess.PIPE,
    )
    with victim:
        assert victim.stdout.readline() == "ready\n"
        assert holders(tmp_path) == {victim.pid}
        os.kill(victim.pid, signal.SIGKILL)
    assert victim.returncode == -signal.SIGKILL
    assert [os.listdir(each) for each in directories] == [[], []]
    assert holders(tmp_path) == set()


def holders(directory):
    """Processes that have a file of this directory open, and so keep its space taken."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(f"{directory}/"):
                found.add(int(link.parts[2]))
        except OSError:
            continue  # gone, or not ours
    return found
