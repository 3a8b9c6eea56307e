"""Where bytes go: stripes, slabs, extents; and what happens when there is no more room."""

import errno
import itertools
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import NoSpaceError, TransferError
from penstock.core.units import GIB, KIB, TIB
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder
from penstock.store.blob import UNIT_BYTES
from penstock.store.flash import MAX_SLABS, FlashTier, SlabDirectory, spread

UNIT = UNIT_BYTES


@given(
    nbytes=st.integers(1, 200),
    stripe=st.integers(1, 20),
    rooms=st.lists(st.integers(0, 100), min_size=1, max_size=5),
    start=st.integers(0, 4),
)
def test_spread_uses_room_that_exists(nbytes, stripe, rooms, start):
    start %= len(rooms)
    shares = spread(nbytes, stripe_bytes=stripe, rooms=rooms, start=start)
    if nbytes > sum(rooms):
        assert shares is None
        return
    assert sum(share for _, share in shares) == nbytes
    assert all(share > 0 for _, share in shares)
    assert all(one[0] != other[0] for one, other in itertools.pairwise(shares))
    for index, room in enumerate(rooms):
        assert sum(share for which, share in shares if which == index) <= room


def test_spread_takes_turns():
    assert spread(10, stripe_bytes=2, rooms=[9, 9, 9], start=1) == [
        *((1, 2), (2, 2), (0, 2)),
        *((1, 2), (2, 2)),
    ]


def test_spread_passes_over_the_full_ones_and_joins_neighbours():
    assert spread(6, stripe_bytes=2, rooms=[9, 1, 1], start=1) == [(0, 6)]
    assert spread(5, stripe_bytes=4, rooms=[2, 3], start=0) == [(1, 3), (0, 2)]


class Space(FlashTier):
    """A tier of which the tests take places and write nothing."""

    def __init__(self, root, *, count=1, quota=16 * UNIT, slab=4 * UNIT, stripe=UNIT):
        paths = [root / str(index) for index in range(count)]
        for path in paths:
            path.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PENSTOCK_SLAB", str(slab))
            patch.setenv("PENSTOCK_STRIPE", str(stripe))
            super().__init__(
                paths, capacity_bytes=count * quota, engine=ThreadEngine(), recorder=Recorder()
            )
        self.directories = self._directories
        self.allocate, self.release = self._allocate, self._discard


def make_space(root, **options):
    space = Space(root, **options)
    return space, space.directories


class TestSlabs:
    def test_claimed_as_needed(self, tmp_path):
        space, _ = make_space(tmp_path)
        assert space.claimed_bytes == 0
        one = space.allocate(UNIT)
        assert space.claimed_bytes == 4 * UNIT
        space.allocate(3 * UNIT)
        assert space.claimed_bytes == 4 * UNIT
        space.allocate(5 * UNIT)
        assert space.claimed_bytes == 12 * UNIT
        space.release(one)
        space.allocate(UNIT)
        assert space.claimed_bytes == 12 * UNIT
        assert space.taken_bytes == 9 * UNIT
        space.close()

    def test_claimed_once_for_all_who_wait_for_it(self, tmp_path, monkeypatch):
        """Nor does claiming keep anybody from giving back, who may be a finalizer."""
        space, _ = make_space(tmp_path)
        one = space.allocate(4 * UNIT)
        real, grow, go = os.posix_fallocate, space._grow, threading.Event()
        came = threading.Semaphore(0)

        def slow(*args):
            assert go.wait(20)
            real(*args)

        def counted(*args):
            came.release()
            grow(*args)

        monkeypatch.setattr(os, "posix_fallocate", slow)
        monkeypatch.setattr(space, "_grow", counted)
        threads = [threading.Thread(target=space.allocate, args=(UNIT,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert came.acquire(timeout=20)
        space.release(one)  # does not wait
        assert space.taken_bytes == 0
        go.set()
        for thread in threads:
            thread.join(20)
        assert space.taken_bytes == 3 * UNIT
        assert space.claimed_bytes == 8 * UNIT
        space.close()

    def test_reserved_on_the_disk(self, tmp_path):
        space, _ = make_space(tmp_path)
        (piece,) = space.allocate(UNIT).pieces
        assert os.fstat(piece.file.fd).st_blocks * 512 >= 4 * UNIT
        space.close()

    def test_the_last_one_is_as_long_as_the_quota_allows(self, tmp_path):
        space, (directory,) = make_space(tmp_path, quota=6 * UNIT)
        place = space.allocate(6 * UNIT)
        assert [piece.nbytes for piece in place.pieces] == [4 * UNIT, 2 * UNIT]
        assert directory.claimed_bytes == 6 * UNIT
        space.close()

    def test_a_small_capacity_has_a_small_slab(self, tmp_path):
        _, (directory,) = make_space(tmp_path, quota=3 * UNIT, slab=GIB)
        assert directory.slab_bytes == 3 * UNIT

    def test_the_number_of_files_is_bounded(self, tmp_path):
        directory = SlabDirectory(str(tmp_path), quota_bytes=10 * TIB, slab_bytes=256 * KIB)
        assert directory.slab_bytes * MAX_SLABS >= 10 * TIB
        assert directory.slab_bytes % UNIT == 0

    def test_no_piece_passes_from_one_slab_to_the_next(self, tmp_path):
        space, (directory,) = make_space(tmp_path)
        place = space.allocate(10 * UNIT)
        assert len(place.extents) == 1
        assert [piece.nbytes for piece in place.pieces] == [4 * UNIT, 4 * UNIT, 2 * UNIT]
        assert len({piece.file for piece in place.pieces}) == 3
        assert all(
            piece.offset_bytes + piece.nbytes <= directory.slab_bytes for piece in place.pieces
        )
        assert "and 2 more" in str(place)
        space.close()


class TestPlaces:
    def test_one_directory_gives_one_piece(self, tmp_path):
        space, _ = make_space(tmp_path, slab=16 * UNIT)
        assert [piece.nbytes for piece in space.allocate(9 * UNIT).pieces] == [9 * UNIT]
        space.close()

    def test_stripes_take_turns_and_the_next_write_goes_on(self, tmp_path):
        space, directories = make_space(tmp_path, count=3, slab=16 * UNIT)
        paths = [each.path for each in directories]
        first, second = space.allocate(4 * UNIT), space.allocate(UNIT)
        assert [piece.file.path for piece in first.pieces] == [
            paths[0],
            paths[1],
            paths[2],
            paths[0],
        ]
        assert [piece.file.path for piece in second.pieces] == [paths[1]]
        # a directory's stripes are one extent
        assert [piece.offset_bytes for piece in first.pieces] == [0, 0, 0, UNIT]
        assert len(first.extents) == 3
        space.close()

    def test_scattered_room_is_used(self, tmp_path):
        space, _ = make_space(tmp_path)
        places = [space.allocate(UNIT) for _ in range(16)]
        for place in places[::2]:
            space.release(place)
        place = space.allocate(8 * UNIT)
        assert len(place.extents) == 8
        with pytest.raises(NoSpaceError, match="capacity"):
            space.allocate(1)
        space.release(place)
        for other in places[1::2]:
            space.release(other)
        assert space.taken_bytes == 0
        assert len(space.allocate(16 * UNIT).extents) == 1  # coalesced
        space.close()

    def test_a_new_slab_is_preferred_to_cutting_up(self, tmp_path):
        space, _ = make_space(tmp_path)
        places = [space.allocate(UNIT) for _ in range(4)]
        space.release(places[0])
        space.release(places[2])
        assert len(space.allocate(2 * UNIT).extents) == 1
        assert space.claimed_bytes == 8 * UNIT
        space.close()

    def test_released_after_close(self, tmp_path):
        """A discard that met a close finds nothing to do."""
        space, _ = make_space(tmp_path)
        place = space.allocate(UNIT)
        space.close()
        space.release(place)

    @given(st.data())
    def test_places_never_overlap(self, tmp_path_factory, data):
        """Refused only if there is no room; every byte is handed out once."""
        space, _ = make_space(tmp_path_factory.mktemp("space"), count=2, quota=12 * UNIT)
        held = []
        for _ in range(data.draw(st.integers(1, 15))):
            if held and data.draw(st.booleans()):
                space.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
                continue
            nbytes = data.draw(st.integers(1, 10 * UNIT))
            units = -(-nbytes // UNIT)
            try:
                held.append(space.allocate(nbytes))
            except NoSpaceError:
                assert space.taken_bytes + units * UNIT > space.spec.capacity_bytes
        ranges = sorted(
            (piece.file.fd, piece.offset_bytes, piece.nbytes)
            for place in held
            for piece in place.pieces
        )
        for (file, offset, nbytes), (next_file, next_offset, _) in itertools.pairwise(ranges):
            assert file != next_file or offset + nbytes <= next_offset
        assert sum(nbytes for _, _, nbytes in ranges) == space.taken_bytes
        space.close()


class TestFullDisk:
    """A disk that fills up while we run."""

    @pytest.fixture
    def full_after(self, monkeypatch):
        real = os.posix_fallocate
        calls = []

        def install(count, code=errno.ENOSPC):
            def fallocate(fd, offset, nbytes):
                calls.append(nbytes)
                if len(calls) > count:
                    os.ftruncate(fd, nbytes // 2)  # as a real one that fails half way
                    raise OSError(code, os.strerror(code))
                real(fd, offset, nbytes)

            monkeypatch.setattr(os, "posix_fallocate", fallocate)
            return calls

        return install

    def test_what_is_claimed_stays_usable(self, tmp_path, full_after):
        full_after(2)
        space, (directory,) = make_space(tmp_path)
        places = [space.allocate(2 * UNIT) for _ in range(4)]
        assert space.claimed_bytes == 8 * UNIT
        with pytest.raises(NoSpaceError) as caught:
            space.allocate(UNIT)
        assert caught.value.op == "allocate"
        assert directory.path in str(caught.value)
        assert space.taken_bytes == space.claimed_bytes == 8 * UNIT
        space.release(places[1])
        space.release(places[3])
        place = space.allocate(3 * UNIT)  # not in one extent: no slab can be had
        assert len(place.extents) == 2
        with pytest.raises(NoSpaceError):
            space.allocate(2 * UNIT)
        space.allocate(UNIT)
        space.close()

    def test_a_failed_claim_keeps_no_space_and_no_file(self, tmp_path, full_after):
        full_after(0)
        space, (directory,) = make_space(tmp_path)
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with pytest.raises(NoSpaceError):
                space.allocate(UNIT)
        assert len(os.listdir("/proc/self/fd")) == files
        assert os.fstat(directory._next_file.fd).st_size == 0
        assert os.listdir(directory.path) == []
        space.close()

    def test_room_that_comes_back_is_found(self, tmp_path, full_after, monkeypatch):
        full_after(0)
        space, _ = make_space(tmp_path)
        with pytest.raises(NoSpaceError):
            space.allocate(UNIT)
        monkeypatch.undo()
        space.allocate(UNIT)
        space.close()

    def test_other_directories_take_over(self, tmp_path, full_after):
        full_after(1)
        space, directories = make_space(tmp_path, count=2, slab=8 * UNIT)
        place = space.allocate(6 * UNIT)
        assert {piece.file.path for piece in place.pieces} == {directories[0].path}
        assert directories[1].claimed_bytes == 0
        space.release(place)
        assert space.taken_bytes == 0
        space.close()

    def test_a_nearly_full_disk_is_not_filled_to_find_out(self, tmp_path, full_after, monkeypatch):
        calls = full_after(99)
        space, _ = make_space(tmp_path)
        monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda path: 4 * UNIT - 1)
        with pytest.raises(NoSpaceError, match=f"free space: {4 * UNIT - 1} bytes"):
            space.allocate(UNIT)
        assert not calls
        space.close()

    def test_another_failure_is_reported_as_what_it_is(self, tmp_path, full_after):
        full_after(0, errno.EIO)
        space, _ = make_space(tmp_path)
        with pytest.raises(TransferError) as caught:
            space.allocate(UNIT)
        assert caught.value.errno == errno.EIO
        assert not isinstance(caught.value, NoSpaceError)
        space.close()
