"""A step of one rank of several: its bytes, its share of a node, the network, and memory."""

from dataclasses import replace

import pytest
from plan_profiles import MS
from test_plan_step import BOX, chain, planner, weights_of

from penstock.core.errors import ConfigError
from penstock.core.units import MIB
from penstock.plan import Compute
from penstock.plan.ranks import DDP, FSDP2, Ranks
from penstock.plan.weights import StepBytes, WeightsChoice, step_bytes

PAGE = 4096
NODE = replace(
    BOX,
    compute=Compute(8e12, 16e12, 1.0, 80e9, 0.0),
    device_bytes=64 << 30,
    host_bytes=64 << 30,
    flash_bytes=10**12,
    network_bytes_per_s=50e9,
    peer_bytes_per_s=400e9,
)


@pytest.mark.parametrize(
    ("parallel", "part", "gathered", "reduced"), [(FSDP2, 4, 6, 3), (DDP, 1, 0, 6)]
)
def test_a_rank_moves_its_part_and_the_network_the_rest(parallel, part, gathered, reduced):
    """Of four ranks each receives three quarters: of two gathers and a reduction, or of two passes."""
    nbytes, records = 4 * 100 * PAGE, 4 * 12 * PAGE
    weights = Ranks(4, parallel=parallel).divide(weights_of([nbytes]))
    weights = [replace(one, record_bytes=records // part) for one in weights]
    assert step_bytes(weights, WeightsChoice()) == StepBytes(
        weights_read=2 * nbytes // part,
        weights_written=nbytes // part,
        records_read=records // part,
        records_written=records // part,
        network=(gathered + reduced) * nbytes // 4,
    )


def test_a_part_is_rounded_up_and_frozen_weights_are_only_gathered():
    (one,) = Ranks(3).divide(weights_of([PAGE + 2], trained=False))
    assert one.part_of(PAGE + 2) == 1366
    assert one.read_bytes == PAGE
    assert (one.gathered_bytes, one.reduced_bytes) == ((PAGE + 2) * 2 // 3, 0)
    assert Ranks().divide([one])[0].gathered_bytes == 0


def test_the_ranks_of_a_node_share_its_ssds_and_links():
    ranks = Ranks(64, 8, ssds=4, links=2)
    share = ranks.share_of(NODE, device="cuda")
    assert share.flash_read_bytes_per_s == NODE.flash_read_bytes_per_s * 4 / 8
    assert share.flash_write_bytes_per_s == NODE.flash_write_bytes_per_s * 4 / 8
    assert share.host_read_bytes_per_s == NODE.host_read_bytes_per_s * 2 / 8
    assert (share.flash_bytes, share.host_bytes) == (10**12 // 2, 8 << 30)
    assert (share.device_bytes, share.compute) == (NODE.device_bytes, NODE.compute)
    own = Ranks(64, 8).share_of(NODE, device="cuda")
    assert own.host_write_bytes_per_s == NODE.host_write_bytes_per_s


def test_the_ranks_of_a_node_without_gpus_share_its_processor_and_memory():
    share = Ranks(8, 2).share_of(NODE, device="cpu")
    assert share.compute == Compute(2e12, 4e12, 1.0, 20e9, 0.0)
    assert (share.device_bytes, share.host_bytes) == (16 << 30, 16 << 30)
    assert share.host_read_bytes_per_s == NODE.host_read_bytes_per_s / 4


@pytest.mark.parametrize(
    ("ranks", "rate", "unknown"),
    [
        (Ranks(), 0.0, ()),
        (Ranks(8), 400e9, ("peer_bytes_per_s",)),
        (Ranks(8, 8), 50e9, ("network_bytes_per_s",)),
        (Ranks(64, 8), 50e9, ("network_bytes_per_s", "peer_bytes_per_s")),
    ],
)
def test_the_network_is_as_fast_as_its_slowest_part_that_is_used(ranks, rate, unknown):
    assert ranks.share_of(NODE, device="cuda").network_bytes_per_s == rate
    assert ranks.unknown(NODE) == ()
    bare = replace(NODE, network_bytes_per_s=0.0, peer_bytes_per_s=0.0)
    assert ranks.unknown(bare) == unknown
    assert ranks.share_of(bare, device="cuda").network_bytes_per_s == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"count": 0}, "ranks is 0"),
        ({"nodes": 0}, "nodes is 0"),
        ({"ssds": 0}, "ssds is 0"),
        ({"links": 0}, "links is 0"),
        ({"count": 8, "nodes": 3}, "8 ranks cannot be divided evenly among 3 nodes"),
        ({"count": 8, "nodes": 2, "links": 3}, "4 ranks on a node cannot share 3 links"),
        ({"parallel": "zero"}, "'zero' is none of fsdp2, ddp"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        Ranks(**settings)


# -- the step ----------------------------------------------------------------------------------------


def of_ranks(ranks, sizes, times, *, machine=NODE, records=12, **settings):
    """The planner of one rank."""
    weights = ranks.divide(weights_of(sizes))
    weights = [
        replace(one, record_bytes=one.part_of(one.trained) * records // PAGE * PAGE)
        for one in weights
    ]
    share = ranks.share_of(machine, device="cuda")
    profile = replace(chain(times), device="cuda")
    return planner(profile, weights, share, **settings)


def test_more_nodes_divide_the_time_of_flash_and_more_ranks_on_a_node_do_not():
    """By the formula: flash is busy with P / (nodes x SSDs) of the weights, whatever the ranks."""
    sizes, times = [256 * MIB] * 4, [MS] * 4
    busy = {}
    for count, nodes, ssds in ((1, 1, 1), (4, 1, 1), (8, 1, 1), (8, 2, 1), (8, 2, 2), (64, 8, 1)):
        found = of_ranks(Ranks(count, nodes, ssds=ssds), sizes, times)
        busy[count, nodes, ssds] = found.plan(found.least.total).bounds.flash
    one = busy[1, 1, 1]
    for (_, nodes, ssds), took in busy.items():
        assert took == pytest.approx(one / nodes / ssds, rel=0.05)  # of fewer bytes more may stay


def test_ddp_wears_each_ssd_as_often_as_ranks_share_it():
    alone, parts, whole = (
        of_ranks(ranks, [64 * MIB] * 3, [MS] * 3, weights_bytes=least)  # so that none is kept
        for ranks, least in (
            (Ranks(), 128 * MIB),
            (Ranks(8), 16 * MIB),
            (Ranks(8, parallel=DDP), 128 * MIB),
        )
    )
    written = [each.plan(each.least.total).written_bytes for each in (alone, parts, whole)]
    assert written[0] == written[2] == Ranks(8).of_each_ssd(written[1])
    assert Ranks(8).of_each_ssd(written[2]) == 8 * written[0]
    assert Ranks(8, 2, ssds=4).of_each_ssd(written[2]) == written[0]
    assert Ranks(8, 2, ssds=4).steps_until(3 * written[0] - 1, written[2]) == 2
    assert Ranks().steps_until(10**9, 0) is None


@pytest.mark.parametrize(("parallel", "passes"), [(FSDP2, 3), (DDP, 2)])
def test_the_network_takes_the_time_of_its_bytes_and_binds_if_it_is_slow(parallel, passes):
    ranks = Ranks(8, 8, parallel, ssds=8)
    slow = replace(NODE, network_bytes_per_s=1e9)
    found = of_ranks(ranks, [64 * MIB] * 4, [MS] * 4, machine=slow, weights_stay=True, records=0)
    plan = found.plan(found.least.total)
    took_ns = passes * 256 * MIB * 7 / 8
    assert plan.bounds.network == pytest.approx(took_ns, rel=1e-3)
    assert plan.bounds.binds == "network"
    assert plan.replayed.step_ns >= plan.bounds.network
    assert plan.network_factor == pytest.approx(took_ns / (12 * MS), rel=1e-3)
    unknown = replace(NODE, network_bytes_per_s=0.0)
    found = of_ranks(ranks, [64 * MIB] * 4, [MS] * 4, machine=unknown, weights_stay=True, records=0)
    free = found.plan(found.least.total)
    assert free.bounds.network == free.network_factor == 0
    assert free.replayed.moved == plan.replayed.moved


def test_the_network_hides_behind_compute_where_memory_lets_it():
    """What compute cannot hide is the first gather and the last reduction."""
    ranks = Ranks(8, 8, ssds=64)
    found = of_ranks(ranks, [50 * MIB] * 8, [20 * MS] * 8, weights_stay=True, records=0)
    plan = found.plan(10 * found.least.total)
    each_ns = 50 * MIB * 7 / 8 / 50
    assert plan.replayed.step_ns == pytest.approx(480 * MS + 2 * each_ns, rel=1e-3)


def test_memory_holds_the_whole_of_a_module_that_is_in_use_and_parts_of_the_others():
    sizes = [64 * MIB] * 8
    found = of_ranks(Ranks(8, 8), sizes, [MS] * 8, weights_stay=True)
    least = found.least
    assert least.kept == 64 * MIB
    # in use, with its gradient, and the next one beside it
    assert least.window == 3 * 64 * MIB
    assert of_ranks(Ranks(8, 8, DDP), sizes, [MS] * 8, weights_stay=True).least.kept == 8 * 64 * MIB


def test_weights_that_stay_are_neither_read_nor_written_and_need_no_flash():
    found = of_ranks(Ranks(2), [64 * MIB] * 2, [MS] * 2, weights_stay=True)
    assert found.home_bytes == 0
    assert found.record_bytes > 0
    plan = found.plan(found.least.total)
    moved = plan.replayed.moved
    assert (moved.weights_read, moved.weights_written) == (0, 0)
    assert moved.records_read == moved.records_written == found.record_bytes == plan.disk_bytes
    more = found.plan(found.least.total + found.record_bytes)
    assert more.replayed.moved.records_read == 0
    assert more.replayed.moved.network == moved.network > 0
