"""What a controller keeps in memory: a write cache, a part of the map. Laws, and latencies by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_devices import device, tiny

from penstock.core.errors import ConfigError
from penstock.lab.ssd import Placement, Update, load, step, with_field
from penstock.lab.ssd.aging import fill
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.requests import HostRequest, Workload
from tries import tries

PAGE = 8192
ENTRY_PS, DATA_PS, DONE_PS = 41_000, 64 * 156 * 250, 11_000
"""On MQSim's device: the entry of a request, the data of a page, the completion; see test_ssd_engine."""
MEMORY_PS = 26_000 + PAGE * 10**12 // 6_400_000_000
BUS_PS = PAGE * 3_000


def cached(pages, **fields):
    return device(cache__capacity_bytes=pages * PAGE, **fields)


def serve(drive, *requests, queue_depth=1):
    return drive.serve(iter(requests), queue_depth=queue_depth)


# -- the write cache --------------------------------------------------------------------------------


def test_a_write_is_done_when_memory_has_it():
    one = serve(Drive(cached(8)), HostRequest(False, 0, PAGE))
    assert one.latency.least_ps == ENTRY_PS + 8_000 + DATA_PS + MEMORY_PS + DONE_PS
    assert one.flash_programs == 0
    assert one.cache_use.dirty_bytes == PAGE


def test_a_read_of_it_comes_from_memory_and_of_a_half_the_rest_from_flash():
    drive = Drive(cached(8))
    one = serve(drive, HostRequest(False, 0, PAGE), HostRequest(True, 0, PAGE))
    # behind the doorbell of the first's completion
    assert one.read_latency.least_ps == 8_000 + ENTRY_PS + MEMORY_PS + DATA_PS + DONE_PS
    assert (one.flash_reads, one.cache_use.read_hits) == (0, 1)
    half = Drive(cached(8))
    fill(half.ftl, 4)
    one = serve(half, HostRequest(False, 0, 4096), HostRequest(True, 0, PAGE))
    assert (one.flash_reads, one.cache_use.read_misses) == (1, 1)
    assert one.channel_bytes == 4096  # only what memory lacks


def test_what_is_written_again_is_programmed_once():
    drive = Drive(cached(8))
    one = serve(drive, *(HostRequest(False, 0, PAGE) for _ in range(50)))
    assert (one.flash_programs, one.cache_use.write_hits) == (0, 49)
    assert drive.drain() > 750_000_000
    assert drive.flash.programs == 1


def test_pages_are_written_back_oldest_first_from_one_mark_to_the_other():
    made = cached(10, cache__flush_from=0.6, cache__flush_to=0.3)
    drive = Drive(made)
    one = serve(drive, *(HostRequest(False, i * PAGE, PAGE) for i in range(6)))
    assert one.flash_programs == 0
    drive = Drive(made)
    one = serve(drive, *(HostRequest(False, i * PAGE, PAGE) for i in range(7)))
    assert one.cache_use.flushed == 4
    assert one.cache_use.dirty_bytes == 3 * PAGE
    assert [drive.ftl.find(lpn) is not None for lpn in range(7)] == [True] * 4 + [False] * 3


def test_a_full_cache_lets_writes_wait_for_flash():
    made = cached(4, geometry__channels=1, geometry__chips_per_channel=1)
    told = {}
    for many in (4, 200):
        told[many] = serve(Drive(made), *(HostRequest(False, i * PAGE, PAGE) for i in range(many)))
    assert told[4].write_latency.most_ps < 10_000_000
    # in the long run as fast as flash, two planes of a chip at once at best
    assert told[200].time_ps / 200 > 750_000_000 / 2 * 0.95


def test_a_flush_of_the_host_waits_for_flash_only_without_capacitors():
    flush = HostRequest(False, 0, 0)
    for protected in (True, False):
        one = serve(
            Drive(cached(8, cache__protected=protected)),
            HostRequest(False, 0, PAGE),
            HostRequest(False, 0, 0),
        )
        assert (one.write_latency.most_ps > 750_000_000) is not protected
        assert (one.flash_programs, one.requests) == (0 if protected else 1, 2)
    assert flush.is_flush
    alone = serve(Drive(device()), HostRequest(False, 0, 0))  # no cache: nothing to wait for
    assert alone.latency.most_ps == ENTRY_PS + DONE_PS


def test_at_a_loss_of_power_capacitors_last_for_what_flash_has_not():
    load_of = Workload(requests=600, read_share=0, request_bytes=PAGE, queue_depth=16, random=False)
    made = cached(2000, cache__flush_from=1.0, cache__flush_to=1.0)
    drive = Drive(made)
    one = drive.run(load_of)
    assert one.power_loss.nbytes == one.cache_use.most_dirty_bytes == 600 * PAGE
    assert drive.drain() / 1e12 == pytest.approx(one.power_loss.flush_s, rel=0.15)
    assert not one.power_loss.lost
    lost = Drive(with_field(made, "cache.protected", False)).run(load_of).power_loss
    assert (lost.lost, lost.nbytes, lost.flush_s) == (True, 600 * PAGE, 0)


@pytest.mark.parametrize("at_once", [False, True])
def test_pages_leave_it_one_by_one_or_start_in_the_instant_in_which_they_come(at_once):
    """Two pages of the two planes of a chip: two programs, or one command for both."""
    pair = {"geometry__channels": 1, "geometry__chips_per_channel": 1, "geometry__dies_per_chip": 1}
    made = cached(8, cache__flush_to=0.0, cache__flush_from=0.0, cache__at_once=at_once, **pair)
    drive = Drive(made)
    one = serve(drive, HostRequest(False, 0, 2 * PAGE))
    two_ps = 26_000 + 2 * PAGE * 10**12 // 6_400_000_000
    assert one.latency.least_ps == ENTRY_PS + 8_000 + 128 * 156 * 250 + two_ps + DONE_PS
    assert drive.flash.programs == 2
    flash_ps = drive.flash.targets_busy_ps()[0]
    assert flash_ps == (1 if at_once else 2) * 750_000_000
    assert drive.cache.moved_bytes == (2 if at_once else 4) * PAGE  # it is not read for them


def test_what_is_written_again_within_a_second_stays_until_its_place_is_wanted():
    drive = Drive(cached(4, cache__at_once=True))
    apart = 2_000_000_000  # what flash has leaves the cache meanwhile
    again = [HostRequest(False, 0, PAGE, n * apart) for n in range(1, 6)]
    others = [HostRequest(False, lpn * PAGE, PAGE, 12_000_000_000 + lpn) for lpn in range(1, 5)]
    one = serve(drive, *again, *others)
    # the first of all is forgotten at once, as by MQSim; of the rest one program, and the eviction
    assert one.cache_use.flushed == 2 + 1 + 4
    assert drive.cache.dirty_pages == 0


def test_a_flow_may_pass_the_cache_by():
    drive = Drive(cached(8))
    request = HostRequest(False, 0, PAGE)
    request.cached = False
    one = serve(drive, request)
    assert one.latency.least_ps > 750_000_000
    assert one.cache_use.write_misses == 0


CACHES = st.fixed_dictionaries(
    {
        "cache__capacity_bytes": st.sampled_from([1, 3, 16, 200]).map(lambda n: n * PAGE),
        "cache__flush_from": st.sampled_from([0.0, 0.5, 1.0]),
        "cache__flush_pages": st.sampled_from([1, 64]),
        "cache__protected": st.booleans(),
        "cache__at_once": st.booleans(),
        "ftl__sector_map": st.booleans(),
        "ftl__superpage_share": st.sampled_from([0.0, 0.4, 1.0]),
        "ftl__streams": st.sampled_from([1, 2]),
        "ftl__map_cache_bytes": st.sampled_from([0, 4, 64]),
        "ftl__map_entry_bytes": st.just(4),
        "ftl__map_read_bytes": st.sampled_from([0, 512]),
        "ftl__map_stored": st.booleans(),
        "ftl__gc_preemptible": st.booleans(),
    }
)
LOADS = st.builds(
    Workload,
    requests=st.integers(2, 150),
    read_share=st.sampled_from([0.0, 0.5, 1.0]),
    request_bytes=st.sampled_from([512, 4096, PAGE, 3 * PAGE]),
    queue_depth=st.sampled_from([1, 32]),
    random=st.booleans(),
    working_set=st.sampled_from([0.1, 0.8]),
    filled=st.sampled_from([0.0, 0.9]),
    hot_share=st.sampled_from([0.0, 0.7]),
    flush_every=st.sampled_from([0, 7]),
    seed=st.integers(0, 3),
)


@settings(max_examples=tries(60))
@given(CACHES, LOADS, st.booleans())
def test_laws_of_any_run_with_memory(fields, workload, cache):
    """Every combination of cache, streams, super-pages and a map on flash."""
    fields = {"geometry__blocks_per_plane": 32, "cache__flush_to": 0.0, **fields}
    made = tiny(**fields)
    if not cache:
        made = with_field(made, "cache.capacity_bytes", 0)
    drive = Drive(made)
    one = drive.run(workload)
    assert one.requests >= workload.requests
    assert one.read_bytes + one.written_bytes == workload.requests * workload.request_bytes
    assert one.outstanding == pytest.approx(one.latency.sum_ps / one.time_ps, rel=1e-9)
    assert one.joules == pytest.approx(sum(joules for _, joules in one.energy_j))
    drive.drain()
    if drive.cache is not None:
        assert drive.cache.dirty_pages == 0
    # every page is where the map says, and nothing else holds it
    places = [place for lpn in range(drive.ftl.user_pages) if (place := drive.ftl.find(lpn))]
    assert len(set(places)) == len(places)
    for lpn in range(drive.ftl.user_pages):
        if (place := drive.ftl.find(lpn)) is not None:
            block, page = place
            assert block.lpns[page] == lpn
            assert block.pending == 0
    assert not drive.pages.cleaner.busy


@settings(max_examples=10)
@given(CACHES, LOADS)
def test_such_a_run_is_the_same_every_time(fields, workload):
    made = tiny(**{"geometry__blocks_per_plane": 32, "cache__flush_to": 0.0, **fields})
    first, second = Drive(made).run(workload), Drive(made).run(workload)
    assert (first.time_ps, first.latency.sum_ps, first.events) == (
        *(second.time_ps, second.latency.sum_ps, second.events),
    )


# -- a map that lies on flash -----------------------------------------------------------------------


def mapped(entries, **fields):
    return tiny(ftl__map_cache_bytes=4 * entries, **fields)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_reads_of_the_map_are_what_the_cache_misses(share):
    """Uniform random reads: an entry is in memory as often as that is large."""
    made = mapped(1)
    pages = int(Drive(made).ftl.user_pages * 0.9)
    made = mapped(int(share * pages))
    one = Drive(made).run(
        Workload(
            requests=8000, request_bytes=PAGE, queue_depth=1, working_set=0.9, filled=0.9, skip=2000
        )
    )
    assert one.map_use.hit_rate == pytest.approx(share, abs=0.03)
    assert one.map_use.reads == one.map_use.misses  # depth 1: none shares a read with another
    assert one.map_use.writes == 0
    assert one.flash_reads == 6000 + one.map_use.reads


def test_a_map_that_fits_is_read_once_and_one_in_memory_never():
    made = mapped(100_000)
    load_of = Workload(requests=4000, request_bytes=PAGE, working_set=0.2, filled=0.9)
    one = Drive(made).run(load_of)
    assert one.map_use.misses <= 0.2 * Drive(made).ftl.user_pages + 1
    assert Drive(tiny()).run(load_of).map_use is None


def test_a_read_of_the_map_comes_before_that_of_the_page():
    drive = Drive(mapped(8))
    fill(drive.ftl, 100)
    one = serve(drive, HostRequest(True, 0, PAGE), HostRequest(True, 0, PAGE))
    each = 290_000 + 75_020_000 + BUS_PS
    # the second behind the doorbell of the first's completion
    assert one.latency.least_ps == 8_000 + ENTRY_PS + each + DATA_PS + DONE_PS
    assert one.latency.most_ps == ENTRY_PS + 2 * each + DATA_PS + DONE_PS


def test_a_miss_moves_its_page_of_the_map_or_as_few_bytes_as_the_device_says():
    told = {}
    for nbytes in (0, 512):
        drive = Drive(mapped(8, ftl__map_read_bytes=nbytes))
        fill(drive.ftl, 100)
        told[nbytes] = serve(drive, HostRequest(True, 0, PAGE))
    assert told[0].channel_bytes == 2 * PAGE
    assert told[512].channel_bytes == PAGE + 512
    # tR and the page of the data are as long, the one of the map crosses in a sixteenth
    assert told[0].time_ps - told[512].time_ps == (PAGE - 512) * 3_000


@pytest.mark.parametrize("stored", [False, True])
def test_of_a_new_drive_the_map_is_read_only_if_flash_has_it(stored):
    drive = Drive(mapped(8, ftl__map_stored=stored))
    one = serve(drive, HostRequest(True, 0, PAGE), HostRequest(False, 0, PAGE))
    assert (one.map_use.reads, one.map_use.misses) == (int(stored), 1)
    assert one.write_amplification == 1


def test_changed_entries_are_written_back_when_they_make_room():
    load_of = Workload(requests=2000, read_share=0, request_bytes=PAGE, working_set=0.5, filled=0.6)
    told = {}
    for entries in (4, 10_000):
        made = tiny(ftl__map_entry_bytes=512, ftl__map_cache_bytes=512 * entries)
        told[entries] = Drive(made).run(load_of)
    # where all fits, only what garbage collection moves before it was ever wanted
    assert told[10_000].map_use.writes < 0.15 * 2000
    few = told[4]
    # nearly every write drives a changed entry of another page of the map out, which is read for that
    assert few.map_use.writes == pytest.approx(2000, rel=0.15)
    assert few.map_use.reads == pytest.approx(4000, rel=0.15)
    assert few.write_amplification > told[10_000].write_amplification + 0.8


# -- who has no such memory -------------------------------------------------------------------------


def test_engines_of_weight_updates_say_that_they_have_none():
    update = Update(parameters=10**9, optimizer="adam")
    made = load("optimstore")
    host, die = Placement.HOST, Placement.DIE
    with pytest.raises(ConfigError, match=r"ftl\.map_cache_bytes is 64; .* set it to 0"):
        step(with_field(made, "ftl.map_cache_bytes", 64), update, die)
    large, small = (with_field(made, "cache.capacity_bytes", size) for size in (10**9, 10**6))
    with pytest.raises(ConfigError, match=r"cache\.capacity_bytes is 1000000000, more than"):
        step(large, update, host)
    assert step(small, update, host) == step(made, update, host)
    assert step(large, update, die) == step(made, update, die)  # states do not pass the cache


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cache__capacity_bytes": 100}, "less than one page"),
        ({"cache__flush_to": 0.9}, "flush_to must not exceed"),
        ({"cache__bytes_per_s": 0}, "nothing would ever be transferred"),
        ({"ftl__map_cache_bytes": 2}, "holds no entry"),
        ({"ftl__map_read_bytes": 2}, "less than an entry"),
        ({"ftl__map_read_bytes": 10**6}, "more than a page"),
        ({"ftl__superpage_share": 1.5}, "at most 1"),
        ({"ftl__streams": 0}, "1 or more"),
        ({"ftl__streams": 12}, "no block would be left"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        Drive(tiny(**fields))
