"""The flash tier: what it refuses, what it leaves behind, how it fails."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tier_builders import flash, outcome

import preloaded
from penstock.core.errors import (
    ClosedError,
    ConfigError,
    NoSpaceError,
)
from penstock.core.units import GIB, KIB, MIB
from penstock.io.engine import Priority
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder
from penstock.store import FlashTier
from penstock.testing.engines import aligned
from penstock.testing.faults import FaultySyscalls, GatedSyscalls
from penstock.testing.tier_machine import assert_equal, check_all_room, fill, read, write


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    monkeypatch.setenv("PENSTOCK_SLAB", "256KiB")
    monkeypatch.setenv("PENSTOCK_STRIPE", "16KiB")


def three(tmp_path):
    directories = [tmp_path / name for name in "abc"]
    for each in directories:
        each.mkdir()
    return directories


def make(directories, capacity_bytes=MIB, **options):
    return FlashTier(
        directories,
        capacity_bytes=capacity_bytes,
        engine=ThreadEngine(),
        recorder=Recorder(),
        **options,
    )


class TestGpuDirect:
    class Engine(ThreadEngine):
        """In place of one that moves device memory."""

        @property
        def spec(self):
            return replace(super().spec, gpu_direct=True)

    @pytest.mark.parametrize("nbytes", [1, 5000, 100_001])
    def test_exactly_the_data_are_moved_and_never_looked_at(self, tmp_path, stack, nbytes):
        engine = self.Engine()
        stack.callback(engine.close)
        tier = FlashTier(
            three(tmp_path),
            capacity_bytes=MIB,
            engine=engine,
            recorder=Recorder(),
            allow_memory_filesystem=True,
        )
        stack.callback(tier.close)
        assert tier.spec.gpu_direct
        source, target = aligned(nbytes + 9, seed=1), aligned(nbytes + 9, seed=2)
        around = bytes(target)
        ticket = tier.write(source.ctypes.data + 3, nbytes, keep_alive=source, label="odd")
        ticket.written.wait(10)
        assert (ticket.window.nbytes, ticket.window.skew, ticket.checksum) == (nbytes, 0, None)
        tier.read(ticket, target.ctypes.data + 5, keep_alive=target).wait(10)
        assert bytes(target[5 : 5 + nbytes]) == bytes(source[3 : 3 + nbytes])
        assert bytes(target[:5]) == around[:5]
        assert bytes(target[5 + nbytes :]) == around[5 + nbytes :]
        tier.discard(ticket)
        assert (tier.held_bytes, tier.taken_bytes) == (0, 0)


class TestDirectories:
    def test_no_file_can_be_made(self, tmp_path, monkeypatch):
        """As on a file system that is mounted read-only, or out of inodes."""
        directories = three(tmp_path)
        real = os.open

        def refuse(path, *args, **kwargs):
            if os.fspath(path).startswith(str(directories[1])):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, *args, **kwargs)

        files = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(ConfigError, match=r"b' cannot be used.*Read-only file system"):
            make(directories)
        assert len(os.listdir("/proc/self/fd")) == files

    def test_none(self):
        with pytest.raises(ConfigError, match="no flash directory is named"):
            make([])

    @pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs")
    def test_in_memory(self, monkeypatch, stack):
        monkeypatch.setenv("PENSTOCK_BUFFERED_IO", "1")
        with pytest.raises(ConfigError, match=r"/dev/shm.*is on tmpfs.*in memory"):
            make("/dev/shm")
        tier = flash(stack, "/dev/shm", 64 * KIB, allow_memory_filesystem=True)
        check_all_room(tier)

    def test_too_little_capacity(self, tmp_path):
        with pytest.raises(ConfigError, match=r"8191 bytes.*2 directories"):
            make(three(tmp_path)[:2], 8191)


class TestFreeSpace:
    """Asked for up front, not found missing in mid-run."""

    def test_too_little(self, tmp_path, monkeypatch):
        monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda path: MIB - 1)
        with pytest.raises(NoSpaceError) as caught:
            make(tmp_path)
        for part in (str(tmp_path), "1.00 MiB", f"free space: {MIB - 1}", "lower its capacity"):
            assert part in str(caught.value)
        assert caught.value.errno == errno.ENOSPC

    def test_directories_of_one_file_system_share_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda path: 3 * MIB - 1)
        with pytest.raises(NoSpaceError, match="of 3145728 bytes"):
            make(three(tmp_path), 3 * MIB)

    def test_capacity_is_divided_to_the_last_unit(self, tmp_path, stack):
        tier = flash(stack, three(tmp_path), 10 * 4096 + 4095)
        assert tier.spec.capacity_bytes == 10 * 4096
        check_all_room(tier)

    def test_a_large_tier_claims_nothing_yet(self, tmp_path, stack):
        free = os.statvfs(tmp_path)
        capacity = free.f_bavail * free.f_frsize // 2
        tier = flash(stack, tmp_path, capacity)
        assert tier.claimed_bytes == 0
        assert capacity - 4096 < tier.spec.capacity_bytes <= capacity


class TestFiles:
    def spill_files(self, directory):
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{directory}/"):
                    found.append(int(fd))
            except FileNotFoundError:
                pass
        return found

    def test_unlinked_and_for_us_alone(self, tmp_path, stack):
        old = os.umask(0)
        stack.callback(os.umask, old)
        tier = flash(stack, tmp_path)
        write(tier, aligned(MIB), 0, MIB).written.wait(20)
        files = self.spill_files(tmp_path)
        assert len(files) == MIB // (256 * KIB)
        for fd in files:
            status = os.fstat(fd)
            assert status.st_nlink == 0
            assert stat.S_IMODE(status.st_mode) == 0o600
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert os.listdir(tmp_path) == []
        tier.close()
        assert self.spill_files(tmp_path) == []

    def test_few_files_for_a_large_capacity(self, tmp_path, stack, monkeypatch):
        monkeypatch.setenv("PENSTOCK_SLAB", "4KiB")
        tier = flash(stack, tmp_path, 4 * MIB)
        check_all_room(tier)
        assert len(self.spill_files(tmp_path)) <= 64

    def test_a_tier_that_is_dropped_closes_its_files(self, tmp_path):
        tier = make(tmp_path)
        write(tier, aligned(4096), 0, 4096).written.wait(20)
        tier.engine.close()
        assert self.spill_files(tmp_path)
        del tier
        assert self.spill_files(tmp_path) == []


class TestRequests:
    def test_one_directory_takes_a_write_in_one_go(self, tmp_path, stack, monkeypatch):
        monkeypatch.setenv("PENSTOCK_SLAB", "1MiB")
        calls = FaultySyscalls()
        engine = ThreadEngine(1, 4 * MIB, syscalls=calls)
        stack.callback(engine.close)
        tier = FlashTier(tmp_path, capacity_bytes=MIB, engine=engine, recorder=Recorder())
        stack.callback(tier.close)
        for _ in range(2):
            ticket = write(tier, aligned(500_000), 0, 500_000)
            ticket.written.wait(20)
        assert [call.nbytes for call in calls.calls] == [ticket.window.nbytes] * 2

    def test_small_writes_take_turns(self, tmp_path, stack):
        tier = flash(stack, three(tmp_path))
        source = aligned(4096)
        tickets = [write(tier, source, 0, 4096) for _ in range(6)]
        paths = [Path(ticket.place.pieces[0].file.path).name for ticket in tickets]
        assert "".join(paths) == "abcabc"

    def test_a_demand_overtakes(self, tmp_path, stack):
        gate = GatedSyscalls()
        tier = flash(stack, three(tmp_path), syscalls=gate)
        source = aligned(64 * KIB)
        first = write(tier, source, 0, 4096)
        gate.let_through()
        first.written.wait(20)
        blocking = [write(tier, source, 0, 4096) for _ in range(2)]  # one for each worker
        for _ in range(3):
            gate.wait_for_call()
        waiting = write(tier, source, 0, 64 * KIB)
        transfer = read(tier, first, aligned(4096))
        transfer.promote(Priority.DEMAND)
        gate.let_through()  # one worker is free
        gate.wait_for_call()
        assert [call.op for call in gate.calls] == ["write", "write", "write", "read"]
        gate.open()
        waiting.written.wait(20)
        transfer.wait(20)
        for ticket in blocking:
            ticket.written.wait(20)


class TestFaults:
    def test_an_engine_that_was_closed(self, tmp_path, stack):
        tier = flash(stack, three(tmp_path))
        tier.engine.close()
        with pytest.raises(ClosedError):
            write(tier, aligned(100_000), 0, 100_000)
        assert tier.taken_bytes == tier.held_bytes == 0

    def test_a_disk_that_fills_up(self, tmp_path, stack, monkeypatch):
        """The write is refused as it is asked for; what was written stays."""
        tier = flash(stack, three(tmp_path), 3 * MIB)
        source, target = aligned(64 * KIB, seed=5), aligned(64 * KIB)
        tickets = [write(tier, source, 0, 64 * KIB) for _ in range(4)]
        claimed = tier.claimed_bytes

        def full(fd, offset, nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        tickets += fill(tier, source, 64 * KIB)
        assert tier.claimed_bytes == tier.taken_bytes == claimed
        for ticket in tickets:
            ticket.written.wait(20)
            read(tier, ticket, target).wait(20)
            assert_equal(target, ticket, source)
        tier.discard(tickets.pop())
        tickets.append(write(tier, source, 0, 64 * KIB))
        for ticket in tickets:
            tier.discard(ticket)
            outcome(ticket.written)
        assert tier.taken_bytes == 0


NEIGHBOUR = """
import sys
from penstock.core.units import MIB
from penstock.io.engine import Priority
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder
from penstock.testing.engines import aligned
from penstock.store import FlashTier

engine = ThreadEngine(2)
tier = FlashTier(sys.argv[1], capacity_bytes=4 * MIB, engine=engine, recorder=Recorder())
source = aligned(MIB)
source[:] = int(sys.argv[2])
tickets = [
    tier.write(source.ctypes.data, MIB, keep_alive=source, label="x") for _ in range(4)
]
for ticket in tickets:
    ticket.written.wait(20)
print("written", flush=True)
sys.stdin.readline()
target = aligned(MIB)
for ticket in tickets:
    tier.read(ticket, target.ctypes.data, keep_alive=target).wait(20)
    assert (target == int(sys.argv[2])).all()
tier.close()
"""


def test_two_processes_in_one_directory(tmp_path):
    processes = [
        preloaded.Process(
            ["-c", NEIGHBOUR, tmp_path, str(value)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for value in (1, 2)
    ]
    with processes[0], processes[1]:
        for process in processes:
            assert process.stdout.readline() == "written\n"
        for process in processes:
            process.communicate("go\n", timeout=200)
    assert [process.returncode for process in processes] == [0, 0]
    assert os.listdir(tmp_path) == []


def test_import_brings_no_torch():
    code = "import sys, penstock.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_default_slab_is_for_large_tiers(monkeypatch, tmp_path):
    monkeypatch.delenv("PENSTOCK_SLAB")
    tier = make(tmp_path, GIB)
    assert tier._directories[0].slab_bytes == 256 * MIB
    tier.close()
    tier.engine.close()
