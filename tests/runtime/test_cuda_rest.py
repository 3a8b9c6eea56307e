"""Pinned memory of a job that is suspended: given back, and taken again when it is resumed."""

import pytest
import torch
from cuda_rig import Rig, check_all_given_back, pattern_of, state_of
from cuda_training import BUDGET, HOST, MORE_HOST, trained

import penstock
from offload_runs import session_in
from pages_resident import resident_bytes
from penstock.core.errors import NoSpaceError, PenstockWarning, TransferError
from penstock.core.units import KIB, MIB
from penstock.io.pages import PageRange
from penstock.observe.clients import SUSPENDED
from penstock.runtime.cuda import pinned
from penstock.store.wrappers import FaultyTier

NBYTES = 16 * KIB
SLAB = 4 * MIB


@pytest.fixture
def rig():
    rig = Rig(staging=SLAB, host=SLAB)
    yield rig
    rig.close()
    assert not rig.link.pinned
    assert rig.host_budget.used_bytes == 0


def resident(slab):
    return resident_bytes(PageRange(slab.arena.address, slab.arena.capacity_bytes))


def test_a_slab_that_rests_holds_no_memory_and_has_it_back_at_the_same_place(rig):
    before = dict(rig.link.pinned)
    assert [resident(slab) for slab in rig.slabs] == [SLAB, SLAB]
    assert rig.mover.rest() == 2 * SLAB
    assert not rig.link.pinned
    assert rig.host_budget.used_bytes == 0
    assert [resident(slab) for slab in rig.slabs] == [0, 0]
    assert rig.mover.rest() == 0
    rig.mover.wake()
    rig.mover.wake()
    assert rig.link.pinned == before
    assert rig.host_budget.used_bytes == 2 * SLAB
    assert [resident(slab) for slab in rig.slabs] == [SLAB, SLAB]
    for number, tier in enumerate((rig.flash, rig.host_tier)):
        ticket = rig.spill(number, NBYTES, tier)
        rig.settle()
        assert rig.bytes_of(ticket) == pattern_of(number, NBYTES).tobytes()
        rig.mover.discard(tier, ticket)
    check_all_given_back(rig)


def test_bytes_that_rest_in_the_host_tier_stay(rig):
    ticket = rig.spill(1, NBYTES, rig.host_tier)
    rig.settle()
    assert rig.mover.rest() == 2 * SLAB - 2 * MIB  # the page that they lie in
    assert not rig.link.pinned
    rig.mover.wake()
    assert rig.bytes_of(ticket) == pattern_of(1, NBYTES).tobytes()
    rig.mover.discard(rig.host_tier, ticket)
    check_all_given_back(rig)


def test_nothing_is_staged_in_memory_that_rests(rig):
    rig.mover.rest()
    for tier in (rig.flash, rig.host_tier):
        with pytest.raises(NoSpaceError):
            rig.spill(1, NBYTES, tier)
    assert [resident(slab) for slab in rig.slabs] == [0, 0]
    rig.mover.wake()


def test_memory_that_a_copy_touches_does_not_rest(rig, monkeypatch):
    monkeypatch.setattr(pinned, "PATIENCE_S", 0.01)
    ticket = rig.spill(1, NBYTES, rig.host_tier)  # the device has done nothing yet
    before = dict(rig.link.pinned)
    assert rig.host.rest() == 0
    assert rig.link.pinned == before
    rig.settle()
    assert rig.bytes_of(ticket) == pattern_of(1, NBYTES).tobytes()
    rig.mover.discard(rig.host_tier, ticket)


def test_what_is_not_pinned_again_is_told_and_works(rig):
    rig.mover.rest()
    rig.link.refusal = "not today"
    with pytest.warns(PenstockWarning, match="refuses to pin 8.00 MiB .*not today"):
        rig.mover.wake()
    rig.link.refusal = ""
    ticket = rig.spill(1, NBYTES)
    assert state_of(ticket) == "copying"
    (lane,) = (each for each in rig.mover._lanes.all() if each._flying)
    assert lane._flying[0].end is None  # the lane's thread issues it: the program does not wait
    rig.settle()
    assert rig.bytes_of(ticket) == pattern_of(1, NBYTES).tobytes()
    rig.mover.discard(rig.flash, ticket)


def test_a_slab_may_be_closed_while_it_rests():
    rig = Rig(staging=SLAB, host=0)
    rig.mover.rest()
    rig.close()
    assert not rig.link.pinned
    assert rig.host_budget.used_bytes == 0


def test_a_slab_asks_for_memory_of_the_node_of_its_device(monkeypatch):
    asked = []

    def prefer(address, nbytes, node):
        asked.append((address, nbytes, node, resident_bytes(PageRange(address, nbytes))))
        return ""

    monkeypatch.setattr(pinned.numa, "prefer", prefer)
    monkeypatch.setattr(pinned, "node_of", lambda device: 1)
    rig = Rig(staging=SLAB, host=0)
    assert asked == [(rig.staging.arena.address, SLAB, 1, 0)]  # before any of it is touched
    rig.close()


def test_a_device_that_is_host_memory_has_no_node_of_its_own():
    assert pinned.node_of(torch.device("cpu")) is None


def slabs_of(session):
    return session._stores.mover._slabs


@pytest.mark.parametrize("host_memory", [HOST, MORE_HOST])
def test_a_job_gives_its_pinned_memory_back_and_goes_on_to_the_same_bits(
    link, disk_path, host_memory
):
    slept = []

    def session_of(model, optimizer):
        session = session_in(
            disk_path, model, optimizer, host_memory=host_memory, device_memory=BUDGET
        )

        def sleep():
            session.on_step = None
            penstock.suspend(session)
            slept.append((dict.fromkeys(link.pinned), [resident(s) for s in slabs_of(session)]))
            penstock.resume(session)
            assert len(link.pinned) == len(slabs_of(session))

        session.on_step = sleep
        return session

    with_us, _ = trained(session_of=session_of)
    assert slept == [({}, [0] * (1 if host_memory == HOST else 2))]
    with_us.assert_same_bits(trained()[0])


def test_a_suspend_that_fails_leaves_it_pinned(link, disk_path):
    model = torch.nn.Linear(512, 512)

    def faulty(tier):
        return FaultyTier(tier, fail_at={"write": 0}) if tier.spec.name == SUSPENDED else tier

    with session_in(disk_path, model, host_memory=HOST, wrap_tier=faulty) as session:
        before = set(link.pinned)
        with pytest.raises(TransferError):
            penstock.suspend(session)
        assert link.pinned == before
