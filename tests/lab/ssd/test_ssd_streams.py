"""Streams and super-pages: what they save, and what they cost."""

import random

import pytest
from small_devices import tiny

from penstock.lab.ssd.aging import clean_now, fill, overwrite
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.ftl import Ftl
from penstock.lab.ssd.requests import HostRequest, Workload
from penstock.lab.ssd.wear import write_amplification

PAGE = 8192


def hot_and_cold(streams, count=30_000):
    """Write amplification where nine writes of ten go to a tenth of the pages."""
    ftl = Ftl(
        tiny(
            geometry__channels=1, geometry__chips_per_channel=1, geometry__planes_per_die=1,
            geometry__blocks_per_plane=128, ftl__streams=streams, ftl__gc_least_blocks=4,
        )
    )  # fmt: skip
    fill(ftl, ftl.user_pages)
    chance, hot = random.Random(1), ftl.user_pages // 10
    for number in range(count):
        is_hot = chance.random() < 0.9
        lpn = chance.randrange(hot) if is_hot else chance.randrange(hot, ftl.user_pages)
        ftl.place(lpn, stream=int(is_hot) % streams)
        clean_now(ftl, ftl.plane_of(lpn))
        if number == count // 3:
            ftl.reset_counts()
    return ftl.write_amplification


def test_a_stream_for_what_is_hot_saves_moves():
    one, two = hot_and_cold(1), hot_and_cold(2)
    assert 1 < two < one
    assert (two - 1) < 0.8 * (one - 1)


def test_streams_have_blocks_of_their_own_and_moves_stay_in_theirs():
    ftl = Ftl(tiny(ftl__streams=2))
    for lpn in range(ftl.user_pages):
        ftl.place(lpn, stream=lpn % 2 and 1)
        clean_now(ftl, ftl.plane_of(lpn))
    chance = random.Random(2)
    for _ in range(3000):
        lpn = chance.randrange(ftl.user_pages)
        ftl.place(lpn, stream=lpn % 2 and 1)
        clean_now(ftl, ftl.plane_of(lpn))
    assert ftl.moves > 100
    for lpn in range(ftl.user_pages):
        block, _ = ftl.find(lpn)
        assert block.stream == (lpn % 2 and 1)


def test_flows_and_hot_requests_are_streams_of_a_drive():
    made = tiny(ftl__streams=2)
    drive = Drive(made)
    flows = [iter([HostRequest(False, lpn * PAGE, PAGE)]) for lpn in (0, 8)]
    drive.serve_flows([(flow, 1) for flow in flows])
    assert [drive.ftl.find(lpn)[0].stream for lpn in (0, 8)] == [0, 1]
    drive = Drive(made)
    drive.run(
        Workload(
            requests=300,
            read_share=0,
            request_bytes=PAGE,
            hot_share=0.8,
            hot_set=0.1,
            working_set=0.5,
        )
    )
    hot = drive.ftl.user_pages // 20 - 1
    for lpn in range(drive.ftl.user_pages):
        if (place := drive.ftl.find(lpn)) is not None and lpn != hot:
            assert place[0].stream == (lpn < hot)


# -- super-pages ------------------------------------------------------------------------------------


def test_a_super_page_is_one_program_of_all_planes_of_a_die():
    made = tiny(ftl__superpage_share=0.5, geometry__planes_per_die=4)
    drive = Drive(made)
    one = drive.serve(iter([HostRequest(False, 0, 4 * PAGE)]), queue_depth=1)
    assert (one.flash_programs, one.write_amplification) == (4, 1)
    blocks = [drive.ftl.find(lpn) for lpn in range(4)]
    assert [block.plane for block, _ in blocks] == [0, 1, 2, 3]
    assert len({page for _, page in blocks}) == 1
    # one command: it takes one program, and the bus of four pages
    assert 750_000_000 < one.latency.most_ps < 2 * 750_000_000


def test_one_page_of_it_costs_all_of_it():
    """Write amplification without garbage collection is as many as a super-page has planes."""
    made = tiny(ftl__superpage_share=1.0, geometry__planes_per_die=4)
    drive = Drive(made)
    fill(drive.ftl, 400)
    requests = [HostRequest(False, lpn * PAGE, PAGE) for lpn in range(0, 320, 4)]
    one = drive.serve(iter(requests), queue_depth=4)
    assert one.write_amplification == 4
    assert (one.flash_reads, one.flash_programs) == (3 * 80, 4 * 80)


def test_its_map_has_an_entry_for_each():
    plain, wide = (
        Drive(tiny(ftl__map_cache_bytes=64, ftl__superpage_share=share)).pages.map.entries
        for share in (0.0, 1.0)
    )
    assert plain == 2 * wide  # two planes


def test_whole_super_pages_written_in_sequence_move_nothing():
    """OptimStore's way: write amplification stays at 1 whatever is overwritten."""
    made = tiny(ftl__superpage_share=1.0)
    drive = Drive(made)
    fill(drive.ftl, drive.ftl.user_pages)
    room = drive.ftl.user_pages // 2 * 2 * PAGE
    one = drive.serve(
        (HostRequest(False, i * 2 * PAGE % room, 2 * PAGE) for i in range(4000)), queue_depth=8
    )
    assert one.flash_erases > 50
    assert one.write_amplification == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("used", [0.7, 0.85])
def test_rows_are_cleaned_as_the_closed_form_says(used):
    """Uniform random overwrites of whole super-pages: as of pages."""
    made = tiny(
        geometry__channels=1, geometry__chips_per_channel=1, geometry__blocks_per_plane=200,
        geometry__pages_per_block=32, ftl__victim="fifo", ftl__gc_threshold=0.0,
        ftl__gc_least_blocks=2, ftl__overprovisioning=1 - used, ftl__superpage_share=1.0,
    )  # fmt: skip
    ftl = Ftl(made)
    fill(ftl, ftl.user_pages)
    overwrite(ftl, ftl.user_pages, ftl.user_pages)
    ftl.reset_counts()
    overwrite(ftl, ftl.user_pages, 3 * ftl.user_pages // 2, seed=2)
    # of one page each: a super-page is two, of which one was wanted
    expected = 2 * write_amplification(ftl.user_pages / 2 / ((200 - 2) * 32))
    assert ftl.write_amplification == pytest.approx(expected, rel=0.04)


def test_blocks_of_a_row_are_erased_together():
    drive = Drive(tiny(ftl__superpage_share=1.0))
    fill(drive.ftl, drive.ftl.user_pages)
    drive.run(
        Workload(
            requests=3000, read_share=0, request_bytes=2 * PAGE, queue_depth=16, working_set=0.9
        )
    )
    planes = drive.ftl.planes
    for first, second in zip(planes[::2], planes[1::2], strict=True):
        assert sum(b.erases for b in first.blocks()) == sum(b.erases for b in second.blocks()) > 0
