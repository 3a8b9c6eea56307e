"""The event engine: laws that any such machine keeps, and latencies by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_devices import device, random_devices, tiny

from penstock.core.errors import ConfigError
from penstock.lab.ssd import with_field
from penstock.lab.ssd.aging import fill, overwrite
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.ftl import Ftl
from penstock.lab.ssd.measure import Latencies
from penstock.lab.ssd.requests import HostRequest, Workload
from penstock.lab.ssd.wear import write_amplification
from tries import tries

PAGE = 8192


def run(made, **workload):
    return Drive(made).run(Workload(**workload))


def serve(made, *requests, queue_depth=1):
    return Drive(made).serve(iter(requests), queue_depth=queue_depth)


# -- by hand, on MQSim's default device: 4 GB/s each way, 3 ns a byte on a channel ------------------

ENTRY_PS = 8_000 + 8_000 + 25_000
"""Doorbell of 2 bytes, a request for the entry, the entry of 72; each with 28 beside it, in whole ns."""
DATA_PS = 64 * 156 * 250
"""A page in packets of 128 and 28 bytes."""
DONE_PS = 11_000
BUS_PS = PAGE * 3_000


def test_the_latency_of_one_read():
    one = serve(device(), HostRequest(True, 0, PAGE))
    assert one.latency.least_ps == ENTRY_PS + 290_000 + 75_020_000 + BUS_PS + DATA_PS + DONE_PS


def test_the_latency_of_one_write():
    one = serve(device(), HostRequest(False, 0, PAGE))
    expected = ENTRY_PS + 8_000 + DATA_PS + 361_000 + BUS_PS + 750_000_000 + DONE_PS
    assert one.latency.least_ps == expected


def test_a_read_of_two_planes_is_one_command_and_two_transfers():
    made = device(ftl__allocation="PCWD")
    one = serve(made, HostRequest(True, 0, 2 * PAGE))
    command = 290_000 + 650_000 + 75_020_000
    assert one.latency.least_ps == ENTRY_PS + command + 2 * BUS_PS + 2 * DATA_PS + DONE_PS
    assert one.flash_reads == 2


def test_without_multi_plane_they_are_one_after_the_other():
    made = device(ftl__allocation="PCWD", channel__multi_plane=False)
    one = serve(made, HostRequest(True, 0, 2 * PAGE))
    each = 290_000 + 75_020_000 + BUS_PS
    assert one.latency.least_ps == ENTRY_PS + 2 * each + 2 * DATA_PS + DONE_PS


def test_dies_of_a_chip_work_together_only_where_they_can():
    for parallel, reads_in_a_row in ((False, 2), (True, 1)):
        made = device(ftl__allocation="DCWP", channel__dies_in_parallel=parallel)
        one = serve(made, HostRequest(True, 0, 2 * PAGE))
        senses = one.latency.least_ps // 75_000_000
        assert senses == reads_in_a_row


def test_of_a_page_written_in_part_a_map_of_sectors_saves_what_it_can():
    made = device(ftl__sector_map=True)
    whole = serve(made, HostRequest(False, 0, PAGE), HostRequest(False, 512, 512))
    assert (whole.flash_reads, whole.channel_bytes) == (1, PAGE + (PAGE - 512) + 512)
    # only what was written before is read, and nothing that is overwritten
    beside = serve(made, HostRequest(False, 0, 1024), HostRequest(False, 2048, 512))
    assert (beside.flash_reads, beside.channel_bytes) == (1, 1024 + 1024 + 512)
    again = serve(made, HostRequest(False, 512, 512), HostRequest(False, 0, 2048))
    assert (again.flash_reads, again.channel_bytes) == (0, 512 + 2048)


def test_a_page_written_in_part_is_read_first():
    made = device(ftl__sector_map=False)
    one = serve(made, HostRequest(False, 0, PAGE), HostRequest(False, 512, 512))
    assert (one.flash_reads, one.flash_programs) == (1, 2)
    assert one.channel_bytes == PAGE + (PAGE - 512) + PAGE
    fresh = serve(made, HostRequest(False, 512, 512))
    assert (fresh.flash_reads, fresh.channel_bytes) == (0, 512)


def test_page_types_and_one_shot_programs():
    made = device("consumer-tlc", channel__multi_plane=False, ftl__allocation="CWDP")
    planes = made.geometry.planes
    page = made.geometry.page_bytes
    writes = [HostRequest(False, i * planes * page, page) for i in range(3)]
    one = serve(made, *writes)
    took = one.latency.most_ps - one.latency.least_ps
    # the third of a word line programs all; a doorbell may be before it on the link
    assert took == pytest.approx(1_000_000_000, abs=1000)


def test_cache_reads_hide_sensing_behind_transfers():
    times = {}
    for cached in (False, True):
        made = tiny(geometry__channels=1, geometry__chips_per_channel=1, channel__cache_read=cached)
        made = device_with(made, channel__multi_plane=False, geometry__planes_per_die=1)
        times[cached] = run(made, requests=400, request_bytes=PAGE, queue_depth=8, random=False)
    sense, bus = 75_020_000 + 290_000, BUS_PS
    assert times[False].time_ps / 400 == pytest.approx(sense + bus, rel=0.02)
    assert times[True].time_ps / 400 == pytest.approx(max(sense, bus), rel=0.02)


def test_cache_programs_hide_transfers_behind_programming():
    times = {}
    for cached in (False, True):
        made = tiny(
            geometry__channels=1, geometry__chips_per_channel=1, channel__cache_program=cached
        )
        made = device_with(made, channel__multi_plane=False, geometry__planes_per_die=1)
        times[cached] = run(
            made, requests=250, read_share=0, request_bytes=PAGE, queue_depth=8, random=False
        )
    bus = BUS_PS + 361_000
    assert times[False].time_ps / 250 == pytest.approx(750_000_000 + bus, rel=0.02)
    assert times[True].time_ps / 250 == pytest.approx(750_000_000, rel=0.02)


def device_with(made, **fields):
    for name, value in fields.items():
        made = with_field(made, name.replace("__", "."), value)
    return made


# -- ceilings ---------------------------------------------------------------------------------------


def test_reads_reach_the_channels_rate_and_not_more():
    made = device(channel__cache_read=True, channel__dies_in_parallel=True)
    one = run(made, requests=2000, request_bytes=16 * PAGE, queue_depth=64, random=False)
    ceiling = 8 / 3e-9
    assert 0.93 * ceiling < one.bytes_per_s <= ceiling
    assert one.channel_use > 0.93


def test_a_slow_link_is_the_ceiling():
    slow = device(link__up_bytes_per_s=400_000_000)
    one = run(slow, requests=2000, request_bytes=PAGE, queue_depth=64)
    assert one.bytes_per_s == pytest.approx(4e8 * 128 / 156, rel=0.02)
    assert one.up_use == pytest.approx(1, rel=0.02)


def test_writes_are_bound_by_programming():
    one = run(device(), requests=3000, read_share=0, request_bytes=PAGE, queue_depth=256)
    chips, planes = 32, 2
    assert one.bytes_per_s < chips * planes * PAGE / 750e-6
    assert one.die_use > 0.75


# -- laws -------------------------------------------------------------------------------------------

WORKLOADS = st.builds(
    Workload,
    requests=st.integers(2, 120),
    read_share=st.sampled_from([0.0, 0.5, 1.0]),
    request_bytes=st.sampled_from([512, 4096, PAGE, 3 * PAGE]),
    queue_depth=st.sampled_from([1, 4, 32]),
    random=st.booleans(),
    working_set=st.sampled_from([0.3, 0.9]),
    filled=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 3),
)


@settings(max_examples=tries(60))
@given(random_devices(), WORKLOADS)
def test_laws_of_any_run(made, workload):
    one = Drive(made).run(workload)
    assert one.requests == workload.requests
    # bytes are conserved
    assert one.read_bytes + one.written_bytes == workload.requests * workload.request_bytes
    page = made.geometry.page_bytes + made.geometry.spare_bytes * made.channel.send_spare
    assert one.channel_bytes <= (one.flash_reads + one.flash_programs) * page
    assert one.channel_bytes >= one.read_bytes
    assert one.flash_programs * made.geometry.page_bytes >= one.written_bytes
    # Little's law, the two sides measured apart
    assert one.outstanding == pytest.approx(one.latency.sum_ps / one.time_ps, rel=1e-9)
    assert one.outstanding <= workload.queue_depth + 1e-9
    for use in (one.channel_use, one.die_use, one.up_use, one.down_use):
        assert 0 <= use <= 1 + 1e-9
    assert one.joules == pytest.approx(sum(joules for _, joules in one.energy_j))
    assert one.write_amplification >= 1
    assert one.latency.least_ps <= one.latency.percentile_ps(0.5) <= one.latency.most_ps


@settings(max_examples=15)
@given(random_devices(), WORKLOADS)
def test_a_run_is_the_same_every_time(made, workload):
    first, second = Drive(made).run(workload), Drive(made).run(workload)
    assert (first.time_ps, first.latency.sum_ps, first.events, first.energy_j) == (
        *(second.time_ps, second.latency.sum_ps, second.events, second.energy_j),
    )


def test_what_is_skipped_is_not_measured():
    whole = run(device(), requests=400, request_bytes=PAGE, queue_depth=8)
    part = run(device(), requests=400, request_bytes=PAGE, queue_depth=8, skip=200)
    assert (part.requests, part.flash_reads) == (200, pytest.approx(200, abs=8))
    assert part.iops == pytest.approx(whole.iops, rel=0.1)


def test_requests_with_a_time_wait_for_it():
    apart = 10**9
    one = serve(device(), *(HostRequest(True, 0, PAGE, i * apart) for i in range(5)))
    assert one.latency.least_ps == one.latency.most_ps
    assert one.time_ps == 4 * apart + one.latency.most_ps


def test_percentiles_are_off_by_a_part_of_an_octave():
    each = Latencies()
    for took in range(1, 100_001):
        each.add(took)
    for share in (0.001, 0.5, 0.99, 0.999):
        assert share * 1e5 <= each.percentile_ps(share) <= share * 1e5 * (1 + 1 / 64) + 1
    assert each.percentile_ps(1) == 100_000


# -- suspending -------------------------------------------------------------------------------------


def test_a_read_does_not_wait_for_a_program_that_may_be_suspended():
    one_chip = {
        "geometry__channels": 1,
        "geometry__chips_per_channel": 1,
        "geometry__dies_per_chip": 1,
    }
    took = {}
    for suspend in (0, 5_000):
        made = device(**one_chip, cell__program_suspend_ns=suspend)
        requests = [HostRequest(False, 0, PAGE, 0), HostRequest(True, 4 * PAGE, PAGE, 200_000_000)]
        took[suspend] = serve(made, *requests, queue_depth=1)
    waited, quick = took[0].read_latency.most_ps, took[5_000].read_latency.most_ps
    write_before, write_after = (took[each].write_latency.most_ps for each in (0, 5_000))
    alone = ENTRY_PS + 290_000 + 75_020_000 + BUS_PS + DATA_PS + DONE_PS
    assert quick == alone + 5_000_000
    assert waited > 6 * quick
    # what was suspended takes longer by the read, from its arrival at the array until it has been sent
    assert write_after == write_before + 5_000_000 + 75_020_000 + BUS_PS


def test_what_is_nearly_done_is_not_suspended_and_nothing_twice():
    made = device(
        geometry__channels=1, geometry__chips_per_channel=1, cell__program_suspend_ns=5_000
    )
    reads = [HostRequest(True, (4 + i) * PAGE, PAGE, 200_000_000 + i) for i in range(3)]
    one = serve(made, HostRequest(False, 0, PAGE, 0), *reads)
    # one read goes before, the others wait for the end
    assert one.read_latency.least_ps < 200_000_000 < one.read_latency.most_ps
    late = serve(
        made, HostRequest(False, 0, PAGE, 0), HostRequest(True, 8 * PAGE, PAGE, 775_000_000)
    )
    plain = serve(
        device(geometry__channels=1, geometry__chips_per_channel=1), HostRequest(False, 0, PAGE, 0)
    )
    assert late.write_latency.most_ps == plain.write_latency.most_ps


@settings(max_examples=tries(30))
@given(random_devices(), WORKLOADS)
def test_suspending_loses_no_work(made, workload):
    slow = device_with(made, cell__program_suspend_ns=4_000, cell__erase_suspend_ns=9_000)
    drive = Drive(slow)
    one, other = drive.run(workload), Drive(made).run(workload)
    assert one.requests == other.requests == workload.requests
    assert one.read_bytes == other.read_bytes
    array = sum(drive.flash.targets_busy_ps())
    assert array <= one.time_ps * len(drive.flash.targets_busy_ps()) * 2
    assert all(target.paused is None for target in drive.flash._targets)


# -- garbage collection -----------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["greedy", "random-greedy", "fifo", "cost-benefit"])
def test_a_drive_that_is_overwritten_cleans_itself(victim):
    made = tiny(ftl__victim=victim)
    one = run(
        made, requests=6000, read_share=0, request_bytes=PAGE, queue_depth=16, working_set=1, filled=1,
        skip=2000,
    )  # fmt: skip
    assert one.flash_erases > 50
    assert one.write_amplification > 1.2
    moved = (one.write_amplification - 1) * 4000
    assert one.flash_programs == pytest.approx(4000 + moved, rel=0.02)
    # what is erased was filled: a block for each 16 programs
    assert one.flash_erases == pytest.approx(one.flash_programs / 16, rel=0.05)


@settings(max_examples=tries(20))
@given(random_devices(), st.sampled_from([0.0, 0.5]), st.sampled_from([1, 64]), st.integers(0, 5))
def test_no_drive_with_room_is_ever_stuck(made, reads, depth, seed):
    planes = made.geometry.planes
    one = run(
        made, requests=250 * planes, read_share=reads, request_bytes=PAGE, queue_depth=depth,
        working_set=1, filled=1, seed=seed,
    )  # fmt: skip
    assert one.requests == 250 * planes
    assert one.flash_erases > 0


def test_the_host_goes_before_garbage_collection_where_that_may_be_preempted():
    """Unless blocks run short: then it is as if it may not."""
    told = {}
    for preemptible, hard in ((False, 0.0), (True, 0.0), (True, 0.9)):
        made = tiny(
            ftl__gc_threshold=0.4, ftl__gc_preemptible=preemptible, ftl__gc_hard_threshold=hard
        )
        told[preemptible, hard] = run(
            made,
            requests=4000,
            read_share=0.7,
            request_bytes=PAGE,
            queue_depth=4,
            filled=1.0,
            skip=500,
        )
    waits, preempted, short = told.values()
    assert waits.write_amplification > 1.3  # there is something to preempt
    assert preempted.read_latency.percentile_ps(0.9) < 0.8 * waits.read_latency.percentile_ps(0.9)
    assert preempted.iops > waits.iops
    assert (short.time_ps, short.latency.sum_ps) == (waits.time_ps, waits.latency.sum_ps)


@settings(max_examples=tries(30))
@given(
    random_devices(),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.sampled_from([1, 64]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0, 64]),
)
def test_preempted_garbage_collection_is_never_stuck(made, reads, depth, hard, map_bytes):
    made = with_field(made, "ftl.gc_preemptible", True)
    made = with_field(made, "ftl.gc_hard_threshold", hard)
    made = with_field(made, "ftl.map_cache_bytes", map_bytes)
    pages = Drive(made).ftl.user_pages
    one = run(
        made,
        requests=2 * pages,
        read_share=reads,
        request_bytes=PAGE,
        queue_depth=depth,
        filled=0.5,
    )
    assert one.requests == 2 * pages
    assert one.flash_programs * PAGE >= one.written_bytes


def test_events_and_no_time_have_the_same_write_amplification():
    made = tiny(ftl__victim="fifo")
    one = run(
        made, requests=12_000, read_share=0, request_bytes=PAGE, queue_depth=1, working_set=1, filled=1,
        skip=4000,
    )  # fmt: skip
    ftl = Ftl(made)
    fill(ftl, ftl.user_pages)
    overwrite(ftl, ftl.user_pages, 4000)
    ftl.reset_counts()
    overwrite(ftl, ftl.user_pages, 8000, seed=2)
    assert one.write_amplification == pytest.approx(ftl.write_amplification, rel=0.05)


@pytest.mark.parametrize("used", [0.7, 0.8, 0.9])
def test_write_amplification_against_the_closed_form(used):
    """Uniform random overwrites, blocks cleaned in the order in which they were filled."""
    blocks = 400
    made = tiny(
        geometry__channels=1, geometry__chips_per_channel=1, geometry__planes_per_die=1,
        geometry__blocks_per_plane=blocks, geometry__pages_per_block=64, ftl__victim="fifo",
        ftl__gc_threshold=0.0, ftl__gc_least_blocks=2, ftl__overprovisioning=1 - used,
    )  # fmt: skip
    ftl = Ftl(made)
    fill(ftl, ftl.user_pages)
    overwrite(ftl, ftl.user_pages, 3 * ftl.user_pages)
    ftl.reset_counts()
    overwrite(ftl, ftl.user_pages, 4 * ftl.user_pages, seed=2)
    # one erased block is kept free, and two are being filled, half on average
    physical = (blocks - 2) * 64
    expected = write_amplification(ftl.user_pages / physical)
    assert ftl.write_amplification == pytest.approx(expected, rel=0.03)


def test_greedy_cleans_for_less_than_fifo():
    told = {}
    for victim in ("greedy", "fifo"):
        ftl = Ftl(tiny(ftl__victim=victim))
        fill(ftl, ftl.user_pages)
        overwrite(ftl, ftl.user_pages, 20_000)
        told[victim] = ftl.write_amplification
    assert told["greedy"] < told["fifo"]


def test_a_drive_that_fills_is_reported():
    made = tiny(ftl__overprovisioning=0.0)
    with pytest.raises(ConfigError, match="the drive is full: 1 requests wait"):
        run(made, requests=4000, read_share=0, request_bytes=PAGE, random=False, working_set=1)
    ftl = Ftl(made)
    fill(ftl, ftl.user_pages)
    with pytest.raises(ConfigError, match="the drive is full: plane"):
        overwrite(ftl, ftl.user_pages, 400)


def test_every_allocation_visits_every_plane_in_its_order():
    from penstock.lab.ssd.allocation import plane_order
    from penstock.lab.ssd.control import ALLOCATIONS

    geometry = tiny(geometry__dies_per_chip=3).geometry
    for allocation in ALLOCATIONS:
        order = plane_order(geometry, allocation)
        assert sorted(order) == list(range(geometry.planes))
    assert len(ALLOCATIONS) == 24
    assert plane_order(geometry, "PDWC")[:4] == [0, 1, 2, 3]
    assert plane_order(geometry, "CWDP")[:3] == [0, 12, 6]


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        ({"requests": 0}, "requests is 0"),
        ({"queue_depth": 0}, "queue_depth is 0"),
        ({"request_bytes": 100}, "use a multiple of 512"),
        ({"read_share": 1.5}, "read_share is 1.5"),
        ({"skip": 10}, "skip is 10; it must be below the 10"),
        ({"working_set": 1e-9}, "has no room for a request"),
        ({"align_bytes": 100}, "align_bytes is 100"),
    ],
)
def test_workloads_that_make_no_sense_are_refused(workload, says):
    with pytest.raises(ConfigError, match=says):
        run(tiny(), **{"requests": 10, **workload})


def test_settings_that_leave_no_room_are_refused():
    with pytest.raises(ConfigError, match="moved pages would have no room"):
        Ftl(tiny(ftl__gc_victims=4))
    with pytest.raises(ConfigError, match="no block would be left"):
        Ftl(tiny(ftl__gc_least_blocks=22))


def test_a_request_beyond_the_end_is_refused():
    with pytest.raises(ConfigError, match="ends beyond the"):
        serve(tiny(), HostRequest(True, 1 << 40, PAGE))
