"""Tiers in files as their clients build them: activations, suspended jobs, records, gradients."""

import itertools

import numpy as np
import pytest
import torch
from blob_store_tests import BlobStoreTests
from hypothesis import given
from hypothesis import strategies as st
from tier_builders import outcome

from penstock.core.errors import ChecksumError, ShortTransferError, TransferError
from penstock.core.units import MIB
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder
from penstock.optim import FlashAdamW
from penstock.store import FlashTier
from penstock.store.blob import ReservedTier
from penstock.store.engine import shared_engine
from penstock.swap.space import SwapSpace
from penstock.testing.engines import aligned
from penstock.testing.tier_machine import check_all_room
from power_calls import recording
from power_loss import PowerLossDisk
from power_runs import Chance, examples


def advice(needed, free):
    return f"{needed} of {free}"


def reserve(tier, nbytes, name=None):
    (place,) = tier.reserve([nbytes], file_name=name, advice=advice)
    return place


def reserved(directories, name="reserved"):
    return ReservedTier(
        directories, engine=shared_engine(), recorder=Recorder(), name=name, remedy=", and weep"
    )


class TestFlashTier(BlobStoreTests):
    def build(self, stack, directories):
        tier = FlashTier(
            directories, capacity_bytes=2 * MIB, engine=shared_engine(), recorder=Recorder()
        )
        stack.callback(tier.close)
        return tier

    def check_empty(self, tier):
        assert tier.held_bytes == tier.taken_bytes == 0
        check_all_room(tier)

    @pytest.fixture(autouse=True)
    def small_slabs(self, monkeypatch):
        monkeypatch.setenv("PENSTOCK_SLAB", "256KiB")


class TestSuspendedJob(BlobStoreTests):
    def build(self, stack, directories):
        space = SwapSpace(
            [str(each) for each in directories], capacity_bytes=2 * MIB, recorder=Recorder()
        )
        stack.callback(space.tier.close)
        return space.tier

    @pytest.fixture(autouse=True)
    def small_slabs(self, monkeypatch):
        monkeypatch.setenv("PENSTOCK_SLAB", "256KiB")

    test_without_checksums_nothing_is_compared = None  # it holds the only copy: all is verified


class TestReservedTier(BlobStoreTests):
    def build(self, stack, directories):
        tier = reserved(directories)
        stack.callback(tier.close)
        return tier

    def place(self, tier, nbytes):
        self.last = reserve(tier, nbytes)  # a file without a name is closed with its last place
        return self.last

    def refused(self):
        return TransferError


class TestNamedFiles(TestReservedTier):
    leaves_files = True

    def place(self, tier, nbytes):
        return reserve(tier, nbytes, f"{len(tier.named)}.slab")


class TestRecords(TestReservedTier):
    """The tier of an optimizer's records, which has records already."""

    durable = False

    def build(self, stack, directories):
        params = [torch.nn.Parameter(torch.ones(4096))]
        optimizer = FlashAdamW(params, flash=directories, tile=1024, durable=self.durable)
        stack.callback(optimizer.close)
        return optimizer._penstock.store.files


class TestDurableRecords(TestRecords):
    durable = True
    leaves_files = True

    def place(self, tier, nbytes):
        return reserve(tier, nbytes, f"{len(tier.named)}.slab")


class TestGradients(BlobStoreTests):
    """The tier of gradients beyond their budget."""

    def build(self, stack, directories):
        params = [torch.nn.Parameter(torch.ones(1 << 19))]
        optimizer = FlashAdamW(params, flash=directories, tile=1 << 16, gradient_memory=0)
        stack.callback(optimizer.close)
        return optimizer._penstock.gradients._spill.open()

    @pytest.fixture(autouse=True)
    def small_slabs(self, monkeypatch):
        monkeypatch.setenv("PENSTOCK_SLAB", "256KiB")

    def refused(self):
        return TransferError  # that of the records, which come first

    test_a_disk_that_cannot_reserve_more = None  # its files are longer than that test fills


# -- places that were reserved --------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setenv("PENSTOCK_VERIFY", "full")
    engine = ThreadEngine(2)
    yield engine
    engine.close()


def named(directories, engine):
    return ReservedTier(
        directories, engine=engine, recorder=Recorder(), name="named", remedy=", and weep"
    )


def test_places_lie_one_behind_the_other_and_parts_are_equal(tmp_path, engine):
    folders = [tmp_path / name for name in "abc"]
    for each in folders:
        each.mkdir()
    tier = named(folders, engine)
    first, second = tier.reserve([40_960, 8192], file_name="x.slab", advice=advice)
    assert first.offset_bytes == 0
    assert second.offset_bytes == 16_384  # a third of 10 pages, in whole ones
    parts = [(file.path, offset, nbytes) for file, offset, nbytes in first.ranges(40_960)]
    assert parts == [
        (str(folder / "x.slab"), 0, nbytes)
        for folder, nbytes in zip(folders, (16_384, 16_384, 8192), strict=True)
    ]
    assert [nbytes for _, _, nbytes in first.ranges(4096)] == [4096]
    assert [nbytes for _, _, nbytes in second.ranges(8192)] == [4096, 4096]
    assert "offset 16384 of" in str(second)
    assert all((folder / "x.slab").stat().st_size == 20_480 for folder in folders)
    tier.close()


def test_a_later_tier_adopts_what_an_earlier_one_wrote(tmp_path, engine):
    source, target = aligned(65_536, seed=1), aligned(65_536)
    tier = named(tmp_path, engine)
    ticket = tier.write(
        source.ctypes.data, 65_536, keep_alive=source, label="x", at=reserve(tier, 65_536, "x")
    )
    ticket.written.wait(20)
    tier.close()
    for checksum, is_well in ((ticket.checksum, True), (None, True), (("full", 7), False)):
        again = named(tmp_path, engine)
        adopted = again.adopt(reserve(again, 65_536, "x"), 65_536, label="x", checksum=checksum)
        target[:] = 0
        transfer = again.read(adopted, target.ctypes.data, keep_alive=target)
        error = outcome(transfer)
        assert (target == source).all()
        assert (error is None) == is_well
        assert is_well or (isinstance(error, ChecksumError) and str(error).endswith(", and weep"))
        again.discard(adopted)
        assert again.held_bytes == 0
        again.close()


def test_a_source_that_is_private_is_not_compared_with_itself(tmp_path, engine):
    tier = named(tmp_path, engine)
    place = reserve(tier, 4096)
    for is_private in (True, False):
        source, target = aligned(4096, seed=2), aligned(4096)
        begin = engine.submit

        def change_then(request, begin=begin, source=source):
            source[5] ^= 1
            return begin(request)

        tier.engine = type("Changing", (), {"submit": staticmethod(change_then)})()
        ticket = tier.write(
            source.ctypes.data, 4096, keep_alive=source, label="x", at=place, is_private=is_private
        )
        tier.engine = engine
        assert (outcome(ticket.written) is None) == is_private
        if is_private:  # what was written is not what the checksum is of
            with pytest.raises(ChecksumError):
                tier.read(ticket, target.ctypes.data, keep_alive=target).wait(20)
    tier.close()


def test_a_loss_of_power_never_shows_other_bytes_than_those_that_were_written(disk_path):
    """After a sync all are there; before it, each place has a whole version or an error."""
    nbytes, places = 16_384, 3
    versions = [aligned(nbytes, seed=seed) for seed in range(4)]
    with Chance(None, disk_path).folder_for() as path:
        for name in "ab":
            (path / name).mkdir()
        disk = PowerLossDisk(path)
        syncs = [(0, {})]  # from which moment on, which version of each place must be there
        with recording(disk):
            tier = reserved([path / "a", path / "b"])
            held = tier.reserve([nbytes] * places, file_name="x.slab", advice=advice)
            sums, state = {}, {}
            for step, index in itertools.product(range(3), range(places)):
                source = versions[step]
                ticket = tier.write(
                    source.ctypes.data, nbytes, keep_alive=source, label="x", at=held[index]
                )
                ticket.written.wait(20)
                sums[step], state[index] = ticket.checksum, step
                if index == places - 1:
                    tier.sync()
                    syncs.append((disk.now, dict(state)))
            tier.close()
        assert not disk.missed()

    @examples(30)
    @given(st.data())
    def lose(data):
        chance = Chance(data, disk_path)
        at = chance.moment(0, disk.now)
        before = [sync for sync in syncs if sync[0] <= at]
        last, is_newest = before[-1], len(before) == len(syncs)
        with chance.without_power(disk, at) as left:
            tier = reserved([left.root / "a", left.root / "b"])
            held = tier.reserve([nbytes] * places, file_name="x.slab", advice=advice)
            for index in range(places):
                found = versions_in(tier, held[index])
                if is_newest:  # nothing was written after that sync
                    assert found == {last[1][index]}
            tier.close()

    def versions_in(tier, place):
        target = aligned(nbytes)
        found = set()
        for step, checksum in sums.items():
            ticket = tier.adopt(place, nbytes, label="x", checksum=checksum)
            error = outcome(tier.read(ticket, target.ctypes.data, keep_alive=target))
            assert error is None or isinstance(error, (ChecksumError, ShortTransferError))
            if error is None:
                assert np.array_equal(target, versions[step])
                found.add(step)
        return found

    lose()
