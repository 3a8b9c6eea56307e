"""Every tier, and every wrapper around one, passes the public suite."""

import pytest
from tier_builders import flash, flip_on_flash, flip_on_host, host

from penstock.core.units import KIB
from penstock.store import FaultyTier, LoggedTier, ThrottledTier
from penstock.testing.tiers import TierTests


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    monkeypatch.setenv("PENSTOCK_SLAB", "256KiB")
    monkeypatch.setenv("PENSTOCK_STRIPE", "64KiB")


class TestFlashInOneDirectory(TierTests):
    def build(self, stack, directory, capacity_bytes):
        return flash(stack, directory, capacity_bytes)

    def corrupt(self, tier, ticket):
        flip_on_flash(ticket)


class TestFlashInThreeDirectories(TestFlashInOneDirectory):
    def build(self, stack, directory, capacity_bytes):
        directories = [directory / name for name in "abc"]
        for each in directories:
            each.mkdir(exist_ok=True)
        return flash(stack, directories, capacity_bytes)


class TestFlashInTinySlabs(TestFlashInThreeDirectories):
    """Extents pass from slab to slab, and stripes are shorter than a granule."""

    capacity_bytes = 480 * KIB
    long_bytes = 100_003
    examples = 15

    @pytest.fixture(autouse=True)
    def tiny_slabs(self, small_slabs, monkeypatch):
        monkeypatch.setenv("PENSTOCK_SLAB", "12KiB")
        monkeypatch.setenv("PENSTOCK_STRIPE", "1")


class TestBufferedFlash(TestFlashInThreeDirectories):
    @pytest.fixture(autouse=True)
    def buffered(self, small_slabs, monkeypatch):
        monkeypatch.setenv("PENSTOCK_BUFFERED_IO", "1")


class TestHost(TierTests):
    def build(self, stack, directory, capacity_bytes):
        return host(stack, capacity_bytes)

    def corrupt(self, tier, ticket):
        flip_on_host(ticket)


class TestThrottled(TestFlashInOneDirectory):
    def build(self, stack, directory, capacity_bytes):
        return ThrottledTier(
            flash(stack, directory, capacity_bytes),
            write_bytes_per_s=2 * 10**9,
            read_bytes_per_s=3 * 10**9,
            latency_s=50e-6,
        )


class TestFaultyWithoutFaults(TestHost):
    def build(self, stack, directory, capacity_bytes):
        return FaultyTier(host(stack, capacity_bytes), fail_at={})


class TestLoggedThrottledFaulty(TestHost):
    """Wrappers in wrappers."""

    def build(self, stack, directory, capacity_bytes):
        inner = FaultyTier(host(stack, capacity_bytes), fail_at={})
        slow = ThrottledTier(inner, write_bytes_per_s=10**10, read_bytes_per_s=10**10, shared=True)
        return LoggedTier(slow, [])
