"""What a drive did over time, and a cap on its power."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_devices import device, random_devices

from penstock.core.errors import ConfigError
from penstock.lab.ssd import load
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.requests import Workload
from penstock.lab.ssd.usage import Usage
from tries import tries

PAGE = 8192
LOADS = st.builds(
    Workload,
    requests=st.integers(2, 80),
    read_share=st.sampled_from([0.0, 0.5, 1.0]),
    request_bytes=st.sampled_from([4096, 3 * PAGE]),
    queue_depth=st.sampled_from([1, 16]),
    filled=st.sampled_from([0.0, 1.0]),
)


def watched(made, workload, **more):
    drive = Drive(made, watch=True, **more)
    return drive, drive.run(workload), drive.usage.moments()


@settings(max_examples=tries(40))
@given(random_devices(), LOADS)
def test_over_time_it_is_what_it_is_in_all(made, workload):
    drive, run, moments = watched(made, workload)
    width = moments[0].end_s
    channels = sum(one.channels for one in moments) * width * made.geometry.channels
    busy = sum(channel.busy_ps for channel in drive.flash.channels) / 1e12
    assert channels == pytest.approx(busy, rel=1e-6)
    targets = drive.flash.targets_busy_ps()
    assert sum(one.dies for one in moments) * width * len(targets) == pytest.approx(
        sum(targets) / 1e12, rel=1e-6
    )
    told = dict(run.energy_j)
    dynamic = sum(one.watts - made.energy.controller_static_w for one in moments) * width
    expected = told["flash, read"] + told["flash, program"] + told["channel"]
    erased = run.flash_erases * made.geometry.pages_per_block * made.geometry.page_bytes
    expected += erased * 8 * made.energy.erase_pj_per_bit * 1e-12
    assert dynamic == pytest.approx(expected, rel=1e-6)
    assert all(0 <= one.channels <= 1 + 1e-9 and 0 <= one.dies <= 1 + 1e-9 for one in moments)


def test_memory_is_flat_and_no_time_is_lost():
    usage = Usage(device(), 32, parts=8)
    for number in range(10_000):
        usage.worked(number * 10**9, 10**9, 0, 1)
    moments = usage.moments()
    assert 4 <= len(moments) <= 8
    assert moments[-1].end_s == pytest.approx(10, rel=0.3)
    assert sum(one.dies for one in moments) * moments[0].end_s * 32 == pytest.approx(10)


def test_watching_changes_nothing():
    pages = Workload(requests=300, read_share=0.5, request_bytes=PAGE, queue_depth=16)
    plain = Drive(device()).run(pages)
    assert watched(device(), pages)[1].latency.sum_ps == plain.latency.sum_ps


@settings(max_examples=tries(20))
@given(random_devices(), LOADS, st.sampled_from([1.0, 1.5, 3.0]))
def test_power_stays_under_its_cap_and_all_is_done(made, workload, times):
    with pytest.raises(ConfigError, match="leaves nothing for flash; this drive needs") as refused:
        Drive(made, power_cap_w=0.0)
    least = float(str(refused.value).split("needs ")[1].split(" W")[0]) + 0.005
    _, free, _ = watched(made, workload)
    _, run, moments = watched(made, workload, power_cap_w=least * times)
    assert run.requests == free.requests
    assert max(one.watts for one in moments) <= least * times
    assert run.flash_programs >= free.flash_programs * 0.8


def test_a_lower_cap_is_slower():
    pages = Workload(requests=600, read_share=0.0, request_bytes=16_384, queue_depth=64)
    made = load("optimstore")
    free, loose, tight = (
        Drive(made, power_cap_w=cap).run(pages).time_ps for cap in (None, 100.0, 5.6)
    )
    assert free == loose
    assert tight > 1.2 * free
