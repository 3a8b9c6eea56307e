"""What every tier in files must do, whoever uses it: directories, files, faults, damage, kills.

A subclass builds a tier as its client does. The others of its tests are its own.
"""

import errno
import fcntl
import os
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest
from tier_builders import flip_on_flash, outcome

from penstock.core.errors import (
    ChecksumError,
    ClosedError,
    ConfigError,
    NoSpaceError,
    ShortTransferError,
    TransferError,
)
from penstock.core.units import KIB
from penstock.io.threads import ThreadEngine
from penstock.testing.engines import aligned, run_in_fork
from penstock.testing.faults import Fail, FaultySyscalls, Short
from penstock.testing.shared_engine import shared_engine_replaced
from penstock.testing.tier_machine import assert_equal


class BlobStoreTests:
    """Run with one directory and with three."""

    leaves_files = False
    """True if its files have a name."""

    def build(self, stack, directories):
        """Build a tier in these directories, on the shared engine; the stack closes it."""
        raise NotImplementedError

    def place(self, tier, nbytes):
        """Return the place for a write of ``nbytes``; None: the tier finds one."""
        return None

    def refused(self):
        """Return the error when no file can be made."""
        return ConfigError

    def check_empty(self, tier):
        """Check that a tier that holds nothing has lost nothing."""
        assert tier.held_bytes == 0

    # -- helpers ----------------------------------------------------------------------------------

    @pytest.fixture(params=[1, 3], ids=["one directory", "three"])
    def directories(self, request, tmp_path):
        made = [tmp_path / name for name in "abc"[: request.param]]
        for each in made:
            each.mkdir()
        return made

    @pytest.fixture
    def stack(self):
        with ExitStack() as stack:
            yield stack

    @pytest.fixture(autouse=True)
    def every_byte_is_verified(self, monkeypatch):
        monkeypatch.setenv("PENSTOCK_VERIFY", "full")
        monkeypatch.setenv("PENSTOCK_STRIPE", "16KiB")

    def open(self, stack, directories, syscalls=None):
        stack.enter_context(shared_engine_replaced(ThreadEngine(2, 64 * KIB, syscalls=syscalls)))
        return self.build(stack, directories)

    def write(self, tier, source, nbytes, label="a label"):
        needed = tier.window(source.ctypes.data, nbytes).nbytes
        place = self.place(tier, needed)
        return tier.write(source.ctypes.data, nbytes, keep_alive=source, label=label, at=place)

    def read(self, tier, ticket, target):
        return tier.read(ticket, target.ctypes.data, keep_alive=target)

    def roundtrip(self, tier, nbytes=90_000, seed=2):
        source, target = aligned(nbytes + 8192, seed=seed)[5:][:nbytes], aligned(nbytes + 8192)
        ticket = self.write(tier, source, nbytes)
        error = outcome(ticket.written)
        if error is None:
            error = outcome(self.read(tier, ticket, target))
            if error is not None:  # the fault is over, the data are there
                self.read(tier, ticket, target).wait(20)
            assert_equal(target, ticket, source)
        tier.discard(ticket)
        return error

    def files(self, directories):
        """Descriptors of the files that this process has open there."""
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                path = os.readlink(f"/proc/self/fd/{fd}")
            except FileNotFoundError:
                continue
            if any(path.startswith(f"{each}/") for each in directories):
                found.append(int(fd))
        return found

    # -- directories ------------------------------------------------------------------------------

    @pytest.mark.parametrize("bad", ["missing", "a file", "twice", "linked", "in memory"])
    def test_a_directory_that_will_not_do_is_refused_by_name(self, bad, directories, stack):
        parent = directories[0].parent
        (parent / "file").write_bytes(b"")
        (parent / "link").symlink_to(directories[0])
        names = {
            "missing": (parent / "none", "none' does not exist; create it"),
            "a file": (parent / "file", "is not a directory"),
            "twice": (directories[0], "named twice"),
            "linked": (parent / "link", "named twice"),
            "in memory": (Path("/dev/shm"), r"/dev/shm.*is on tmpfs.*in memory"),
        }
        path, message = names[bad]
        with pytest.raises(ConfigError, match=message):
            self.open(stack, [*directories, path])
        assert self.files(directories) == []

    def test_a_directory_that_is_not_writable(self, directories, stack, monkeypatch):
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
        with pytest.raises(ConfigError, match=f"not writable for user {os.geteuid()}"):
            self.open(stack, directories)

    def test_no_file_can_be_made(self, directories, stack, monkeypatch):
        """As on a file system that is mounted read-only, or out of inodes: nothing is left open."""
        real = os.open

        def refuse(path, *args, **kwargs):
            if os.fspath(path).startswith(str(directories[-1])):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(self.refused(), match="Read-only file system"):
            self.write(self.open(stack, directories), aligned(4096), 4096)
        assert len(self.files(directories)) in (0, len(directories) - 1)
        stack.close()
        assert self.files(directories) == []

    # -- files ------------------------------------------------------------------------------------

    def test_files_are_for_us_alone_and_closed_at_the_end(self, directories, stack):
        stack.callback(os.umask, os.umask(0))
        tier = self.open(stack, directories)
        assert self.roundtrip(tier) is None
        files = self.files(directories)
        assert len(files) >= len(directories)
        for fd in files:
            status = os.fstat(fd)
            assert (status.st_nlink > 0) == self.leaves_files or status.st_size == 0
            assert stat.S_IMODE(status.st_mode) == 0o600
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        stack.close()
        assert self.files(directories) == []
        assert any(os.listdir(each) for each in directories) == self.leaves_files

    def test_a_forked_child_keeps_no_file_open(self, directories, stack):
        """Data-loader workers may outlive a killed parent; its files must not."""
        tier = self.open(stack, directories)
        source, target = aligned(5000, seed=1), aligned(8192 * 2)
        ticket = self.write(tier, source, 5000)
        ticket.written.wait(20)
        named = len(self.files(directories))

        def child():
            assert self.files(directories) == []
            with pytest.raises(ClosedError, match="fork"):
                self.read(tier, ticket, target)

        run_in_fork(child)
        assert len(self.files(directories)) == named > 0
        self.read(tier, ticket, target).wait(20)
        assert_equal(target, ticket, source)

    # -- faults -----------------------------------------------------------------------------------

    def test_a_fault_at_every_call(self, directories):
        """Whichever call fails: an error that says where, no wrong byte, and the next one is well."""
        with ExitStack() as stack:
            counted = FaultySyscalls()
            tier = self.open(stack, directories, counted)
            before = len(counted.calls)
            self.roundtrip(tier)
            count = len(counted.calls) - before
        assert count >= 2 * len(directories)
        for index in range(count):
            with ExitStack() as stack:
                fault = FaultySyscalls({before + index: Fail(errno.EIO)})
                tier = self.open(stack, directories, fault)
                error = self.roundtrip(tier)
                assert isinstance(error, TransferError)
                assert error.errno == errno.EIO
                assert error.nbytes > 0
                assert any(error.path.startswith(str(each)) for each in directories)
                assert self.roundtrip(tier, seed=3) is None
                self.check_empty(tier)

    def test_a_full_disk_found_while_writing(self, directories, stack):
        """A file system that cannot reserve says it late."""
        tier = self.open(stack, directories, FaultySyscalls({0: Fail(errno.ENOSPC)}))
        assert isinstance(self.roundtrip(tier), NoSpaceError)
        assert self.roundtrip(tier) is None
        self.check_empty(tier)

    def test_a_disk_that_cannot_reserve_more(self, directories, stack, monkeypatch):
        """The write is refused as it is asked for; what was written stays."""
        tier = self.open(stack, directories)
        source, target = aligned(64 * KIB, seed=5), aligned(80 * KIB)
        ticket = self.write(tier, source, 64 * KIB)
        ticket.written.wait(20)

        def full(fd, offset, nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            refused = held = None
            while refused is None:
                held = tier.held_bytes
                try:
                    self.write(tier, source, 64 * KIB).written.wait(20)
                except NoSpaceError as error:
                    refused = error
            assert tier.held_bytes == held
        self.read(tier, ticket, target).wait(20)
        assert_equal(target, ticket, source)
        assert self.roundtrip(tier) is None

    def test_short_transfers_go_on(self, directories, stack):
        faults = {0: Short(4096), 1: Short(512), 3: Short(1000), 7: Short(4096)}
        assert self.roundtrip(self.open(stack, directories, FaultySyscalls(faults))) is None

    def test_a_truncated_file_is_no_silence(self, directories, stack):
        tier = self.open(stack, directories)
        source = aligned(100_000, seed=4)
        ticket = self.write(tier, source, 100_000)
        ticket.written.wait(20)
        file, offset, nbytes = next(ticket.place.ranges(ticket.window.nbytes))
        os.ftruncate(file.fd, offset + nbytes // 8192 * 4096)
        error = outcome(self.read(tier, ticket, aligned(120_000)))
        assert isinstance(error, ShortTransferError)

    def test_an_engine_that_was_closed(self, directories, stack):
        tier = self.open(stack, directories)
        held = tier.held_bytes
        place = self.place(tier, 102_400)
        tier.engine.close()
        source = aligned(100_000)
        with pytest.raises(ClosedError):
            tier.write(source.ctypes.data, 100_000, keep_alive=source, label="x", at=place)
        assert tier.held_bytes == held

    # -- damage -----------------------------------------------------------------------------------

    def test_a_changed_byte_is_found_and_told_with_its_place(self, directories, stack):
        tier = self.open(stack, directories)
        source, target = aligned(90_000, seed=6), aligned(100_000)
        bad, good = self.write(tier, source, 90_000), self.write(tier, source, 90_000)
        for ticket in (bad, good):
            ticket.written.wait(20)
        flip_on_flash(bad)
        with pytest.raises(ChecksumError, match=r"a label: 90000 bytes .*offset .*have checksum"):
            self.read(tier, bad, target).wait(20)
        self.read(tier, good, target).wait(20)
        assert_equal(target, good, source)

    def test_bytes_of_another_place_or_time_are_found(self, directories, stack):
        """Whole blocks that were there before, or that belong elsewhere, as a drive may return."""
        tier = self.open(stack, directories)
        old, new, target = aligned(90_000, seed=7), aligned(90_000, seed=8), aligned(100_000)
        first, second = self.write(tier, old, 90_000), self.write(tier, new, 90_000)
        for ticket in (first, second):
            ticket.written.wait(20)
        copy_first_block(first, second)
        with pytest.raises(ChecksumError):
            self.read(tier, second, target).wait(20)
        self.read(tier, first, target).wait(20)
        assert_equal(target, first, old)

    def test_without_checksums_nothing_is_compared(self, directories, stack, monkeypatch):
        monkeypatch.setenv("PENSTOCK_VERIFY", "off")
        tier = self.open(stack, directories)
        source, target = aligned(90_000, seed=9), aligned(100_000)
        ticket = self.write(tier, source, 90_000)
        ticket.written.wait(20)
        flip_on_flash(ticket)
        self.read(tier, ticket, target).wait(20)
        start = ticket.window.skew
        assert (target[start : start + 90_000] != source[:90_000]).sum() == 1
        assert ticket.checksum is None


def copy_first_block(source, target):
    """Copy 4 KiB of one ticket's bytes over those of another, behind the tier's back."""
    (file, offset, _), (other, there, _) = (
        next(ticket.place.ranges(ticket.window.nbytes)) for ticket in (source, target)
    )
    reading = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY)
    writing = os.open(f"/proc/self/fd/{other.fd}", os.O_WRONLY)
    try:
        os.pwrite(writing, os.pread(reading, 4096, offset), there)
        os.fsync(writing)
    finally:
        os.close(reading)
        os.close(writing)
