"""Whole sessions through the CUDA mover, on a device whose copies run late (see ``lazy_device``)."""

import threading
from itertools import pairwise

import pytest
import torch
from cuda_training import BUDGET, HOST, MORE_HOST, trained
from lazy_device import LazyLink
from torch import nn

from offload_runs import session_in
from penstock.core import locks
from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError, PenstockWarning
from penstock.core.units import GIB, KIB, MIB
from penstock.io.engine import Priority
from penstock.runtime import stores
from penstock.runtime.cuda import accelerator
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.storage import Residency
from penstock.runtime.transfers import Transfers
from penstock.store.wrappers import FaultyTier


@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize("host_memory", [HOST, MORE_HOST])
@pytest.mark.parametrize("on_flash", [True, False])
def test_gradients_are_the_same_to_the_last_bit(link, disk_path, policy, host_memory, on_flash):
    settings = {"policy": policy, "host_memory": host_memory, "device_memory": BUDGET}
    if not on_flash:
        settings |= {"flash": (), "flash_capacity": None}
    with_us, session = trained(
        session_of=lambda m, o: session_in(disk_path, m, o, **settings), settled=True
    )
    without, _ = trained()
    with_us.assert_same_bits(without)
    assert session.budget.peak_bytes <= 4 * MIB
    assert min(link.copied_bytes.values()) > 4 * MIB
    tiers = ["flash"] if on_flash and host_memory == HOST else ["host"]
    tiers = ["flash", "host"] if on_flash and host_memory == MORE_HOST else tiers
    assert list(session.inspect().tiers) == tiers


@pytest.mark.parametrize("delay_s", [0.0, 0.005])
def test_the_pace_of_copies_changes_no_bit(link, disk_path, delay_s):
    link._most_delay_s = delay_s
    settings = {"host_memory": HOST, "device_memory": BUDGET}
    with_us, _ = trained(session_of=lambda m, o: session_in(disk_path, m, o, **settings))
    with_us.assert_same_bits(trained()[0])


def test_trap_06_a_graph_that_is_walked_twice_comes_back_twice(link, disk_path):
    settings = {"host_memory": HOST, "device_memory": BUDGET}
    with_us, _ = trained(
        session_of=lambda m, o: session_in(disk_path, m, o, **settings), retain_graph=True
    )
    with_us.assert_same_bits(trained(retain_graph=True)[0])


def test_without_pinned_memory_it_is_slower_and_the_same(link, disk_path):
    link.refusal = "not today"
    with pytest.warns(PenstockWarning, match="refuses to pin"):
        with_us, session = trained(
            session_of=lambda m, o: session_in(disk_path, m, o, host_memory=HOST)
        )
    with_us.assert_same_bits(trained()[0])
    assert "pin.failed 1" in str(session.summary())


def test_with_flash_that_fails_it_is_the_same(link, disk_path):
    def faulty(tier):
        return (
            FaultyTier(tier, fail_at={"write": 3}, times=4) if tier.spec.name == "flash" else tier
        )

    with pytest.warns(PenstockWarning, match="stays in pinned host memory"):
        with_us, session = trained(
            session_of=lambda m, o: session_in(
                disk_path, m, o, host_memory=HOST, device_memory=BUDGET, wrap_tier=faulty
            ),
            settled=True,
        )
    with_us.assert_same_bits(trained()[0])
    assert 1 <= session.recorder.snapshot().counted("spill.failed.flash") <= 4  # or cancelled


def test_the_session_measures_the_link_for_the_host_tier(link, disk_path):
    with session_in(disk_path, host_memory=MORE_HOST) as session:
        machine = session._stores.measure()
    assert machine.host_write_bytes_per_s == machine.host_read_bytes_per_s == 10 * MIB * 1e9 / 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_memory": 0}, "all that goes to flash passes through it"),
        ({"host_memory": "128KiB"}, "give at least 256.00 KiB"),
        ({"host_memory": 1 << 50}, "but this machine has"),
    ],
)
def test_host_memory_that_cannot_do_is_refused(link, disk_path, settings, message):
    with pytest.raises(ConfigError, match=message), session_in(disk_path, **settings):
        pass


@pytest.mark.parametrize(
    ("host_memory", "flash", "parts"),
    [
        (512 * MIB, True, {"staging": 512 * MIB}),
        (513 * MIB, True, {"staging": 256 * MIB, "host tier": 257 * MIB}),
        (2 * GIB, True, {"staging": GIB, "host tier": GIB}),
        (2 * GIB, False, {"host tier": 2 * GIB}),
    ],
)
def test_host_memory_is_shared_out_as_documented(tmp_path, host_memory, flash, parts):
    config = OffloadConfig(host_memory=host_memory, flash=tmp_path if flash else ())
    assert accelerator._host_parts(config) == parts


@pytest.mark.parametrize(
    ("host_memory", "named", "parts"),
    [
        (2 * GIB, {}, {"host tier": 2 * GIB}),
        (100 * MIB, {"device": "cuda"}, {"staging": 100 * MIB}),
        (128 * MIB, {"device": "cuda"}, {"staging": 64 * MIB, "host tier": 64 * MIB}),
        (2 * GIB, {"flash": "flash"}, {"staging": 512 * MIB, "host tier": 1536 * MIB}),
    ],
)
def test_weights_in_host_memory_leave_less_for_staging(host_memory, named, parts):
    config = OffloadConfig(weights="host", host_memory=host_memory, **named)
    assert accelerator._host_parts(config) == parts


class Work(torch.autograd.Function):
    """Saves its result; the device needs some time for it, and twice as much for its backward."""

    @staticmethod
    def forward(ctx, x, link, takes_ns):
        ctx.link, ctx.takes_ns = link, takes_ns
        result = x.sigmoid()
        ctx.save_for_backward(result)
        link.work(takes_ns)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        ctx.link.work(2 * ctx.takes_ns)
        return gradient * result * (1 - result), None, None


class Working(nn.Module):
    def __init__(self, link, takes_ns):
        super().__init__()
        self.link, self.takes_ns = link, takes_ns

    def forward(self, x):
        return Work.apply(x, self.link, self.takes_ns)


def profiled(link, path, takes_ns, steps=3, **settings):
    """The profile of a chain of such modules, and how often the interpreter waited, by step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Working(link, each) for each in takes_ns))
    waited = []
    with session_in(path, model, host_memory=HOST, **settings) as session:
        for _ in range(steps):
            before = link.host_waits
            x = torch.randn(256, 1024, requires_grad=True)
            model(x).square().mean().backward()
            session.step()
            waited.append(link.host_waits - before)
        return session.profile, waited


TAKES_NS = (3_000_000, 500_000, 40_000, 9_000_000)


@pytest.mark.parametrize("device_memory", [None, "2MiB"])
def test_profiles_are_made_of_the_time_of_the_device(link, disk_path, device_memory):
    """The host's clock would tell how long it takes to enqueue kernels, and that of waits."""
    settings = {"policy": "auto", "device_memory": device_memory}
    link._most_delay_s = 0.01
    profile, _ = profiled(link, disk_path, TAKES_NS, **settings)
    forward = [each for each in profile.operators if not each.backward and each.name == "Working"]
    assert [each.took_ns for each in forward] == list(TAKES_NS)
    backward = [each for each in profile.operators if each.backward]
    assert [each.module for each in backward] == [f"Sequential.{i}" for i in (3, 2, 1, 0)]
    assert [each.took_ns for each in backward] == [2 * each for each in reversed(TAKES_NS)]
    (one,) = profile.passes
    saved = {slot.key.module: slot for slot in profile.slots}
    places = [saved[f"Sequential.{i}"] for i in range(4)]
    begun = [slot.saved_at_ns for slot in places]
    assert [later - sooner for sooner, later in pairwise(begun)] == list(TAKES_NS[1:])
    needed = [slot.needed_at_ns for slot in reversed(places)]
    assert [later - sooner for sooner, later in pairwise(needed)] == [
        2 * each for each in reversed(TAKES_NS[1:])
    ]
    assert one.end_ns - one.start_ns == sum(TAKES_NS[1:]) + 2 * sum(TAKES_NS)
    assert (link.waits > 0) == (device_memory is not None)


def test_a_profiled_step_waits_for_the_device_once_and_others_not_at_all(link, disk_path):
    """Once for what it computes; and once more for an event by which that is told, at once."""
    _, waited = profiled(link, disk_path, TAKES_NS, policy="keep")
    assert waited == [2, 0, 0]


def test_trap_33_what_was_kept_is_spilled_behind_the_stream_that_saved_it(link, disk_path):
    """Although another stream is current when room gets short, and the plan was made before."""

    def half(start, length):
        value = start * 1.5
        for _ in range(length):
            value = torch.sin(value)
        return value.sum()

    start = torch.randn(64 * KIB, requires_grad=True)
    settings = {"policy": "keep", "host_memory": HOST, "device_memory": BUDGET}
    with session_in(disk_path, **settings) as session:
        for _ in range(2):
            half(start, 8).backward()
        assert session.executor.orders.kept
        link.current = "side"
        loss = half(start, 8)
        assert {slot.state for slot in session.inspect().device.slots} == {"kept"}
        link.current = LazyLink.NOW
        recorded = []
        record = link.record
        link.record = lambda stream, **how: (recorded.append(stream), record(stream, **how))[1]
        loss = loss + half(start, 12)
        assert "side" in recorded
        loss.backward()
        del loss


def test_a_small_view_is_copied_on_the_stream_that_saved_it(link, disk_path):
    """When its operator has returned, and another stream may be current."""
    weight = torch.randn(64 * KIB, requires_grad=True)
    with session_in(disk_path, host_memory=HOST) as session:
        saved = []
        save = session.executor.save
        session.executor.save = lambda storage, *args, **how: (
            saved.append((storage.nbytes(), link.current_stream(None))),
            save(storage, *args, **how),
        )[1]
        link.current = "side"
        part = torch.randn(16 * 64 * KIB)[: 64 * KIB]
        loss = (weight * part).sum()  # saves it
        link.current = LazyLink.NOW
        loss = loss + (weight * 1.5).sin().sum()  # and this lets it be copied
        assert (256 * KIB, "side") in saved
        assert (256 * KIB, LazyLink.NOW) in saved
        loss.backward()
        assert torch.equal(weight.grad, part + (weight * 1.5).cos() * 1.5)
        del loss


def test_what_waits_for_its_operator_is_done_on_the_stream_of_that(link, disk_path):
    """Spilling, and the digest of what is to be made again: another stream may be current by then."""
    weight = torch.randn(64 * KIB, requires_grad=True)
    with session_in(disk_path, host_memory=HOST) as session:
        done = []
        spill, note = session.executor._spill, []
        session.executor._spill = lambda saved, *how: (
            done.append((saved.nbytes, link.current_stream(None))),
            spill(saved, *how),
        )[1]
        link.current = "side"
        given = torch.randn(64 * KIB)  # requires no gradient, so it may be filled by its operator
        loss = (weight * given).sum()
        digest_of = torch.randn(8)
        session.hooks.when_complete(digest_of, lambda: note.append(link.current_stream(None)))
        link.current = LazyLink.NOW
        loss = loss + (weight * 1.5).sin().sum()
        assert done[0] == (256 * KIB, "side")
        assert note == ["side"]
        assert link.current_stream(None) == LazyLink.NOW
        loss.backward()
        del loss


def test_trap_35_a_pause_waits_for_what_is_under_way(link, disk_path):
    """A copy of ours, or its end, could break the capture of a CUDA graph."""
    link._most_delay_s = 0.02
    start = torch.randn(64 * KIB, requires_grad=True)
    with session_in(disk_path, host_memory=HOST) as session:
        value = start * 1.5
        for _ in range(12):
            value = torch.sin(value)
        transfers, lanes = session.executor._transfers, session._stores.mover._lanes
        assert transfers.writing
        with session.paused():
            assert not transfers.writing + transfers.reading
            assert not any(lane._flying for lane in lanes.all())
            link.is_capturing = True
            torch.cos(start).sum().backward()  # saved as if there were no session
            link.is_capturing = False
        value.sum().backward()
        del value


def test_memory_is_allocated_without_a_lock(link, disk_path, monkeypatch):
    """An allocation may take long, and another thread may be about to free memory."""
    held = []
    allocate = CudaMover.allocate
    monkeypatch.setattr(
        CudaMover,
        "allocate",
        lambda *args, **how: (held.append(locks._held.count), allocate(*args, **how))[1],
    )
    settings = {"host_memory": HOST, "device_memory": BUDGET}
    trained(session_of=lambda m, o: session_in(disk_path, m, o, **settings))
    assert len(held) > 10
    assert set(held) == {0}


def test_what_another_thread_brings_back_meanwhile_is_brought_back_once(
    link, disk_path, monkeypatch
):
    """The memory that was allocated for it is given up."""
    fetched = []
    fetch, allocate = Transfers.fetch, CudaMover.allocate

    def noted_fetch(traffic, saved, *args, **how):
        fetched.append(saved)
        return fetch(traffic, saved, *args, **how)

    def slow_allocate(mover, ticket, **how):
        target = allocate(mover, ticket, **how)
        if target is not None and len(fetched) % 3 == 0:
            saved = fetched[-1]
            fetched.append(None)
            quicker = threading.Thread(
                target=fetch, args=(session.executor._transfers, saved, Priority.DEMAND)
            )
            quicker.start()
            quicker.join()
            assert saved.state is not Residency.SPILLED
        return target

    monkeypatch.setattr(Transfers, "fetch", noted_fetch)
    monkeypatch.setattr(CudaMover, "allocate", slow_allocate)
    session = None

    def session_of(model, optimizer):
        nonlocal session
        session = session_in(disk_path, model, optimizer, host_memory=HOST)
        return session

    with_us, _ = trained(session_of=session_of)
    with_us.assert_same_bits(trained()[0])
    assert None in fetched


def test_trap_36_memory_of_a_cuda_graph_stays_and_is_said_once(link, disk_path):
    start = torch.randn(64 * KIB, requires_grad=True)
    outputs = [torch.randn(128 * KIB) for _ in range(2)]  # of graphs
    link.graph_sizes = (512 * KIB,)

    def step():
        loss = start.sin().cos().exp().sum()
        for output in outputs:
            loss = loss + (output[: 64 * KIB] * start).sum()
        loss.backward()

    settings = {"policy": "auto", "host_memory": HOST, "device_memory": "1280KiB"}
    with session_in(disk_path, **settings) as session:
        with pytest.warns(PenstockWarning, match="memory of a CUDA graph") as warned:
            step()
        stay = [each for each in session.plan.decisions if each.key.nbytes == 512 * KIB]
        assert len(stay) == 2
        assert {str(each.action) for each in stay} == {"keep"}
        assert all(each.reason.startswith("held elsewhere") for each in stay)
        for _ in range(3):
            step()
        counted = session.recorder.snapshot().counted("kept.graph_memory")
        assert counted > 0
        step()
        assert session.recorder.snapshot().counted("kept.graph_memory") == counted
        assert sum("CUDA graph" in str(each.message) for each in warned) == 1
        assert link.copied_bytes["out"] > 0


def test_without_a_tier_no_host_memory_is_taken():
    assert accelerator._host_parts(OffloadConfig(policy="keep")) == {}


def test_a_device_that_nobody_knows_is_refused(disk_path, tmp_path):
    config = OffloadConfig(policy="keep")
    with pytest.raises(ConfigError, match="'xpu'"):
        stores.Stores(config, budget=None, recorder=None, device=torch.device("xpu"))


def test_memory_that_is_the_cpus_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="its memory is the CPU's"):
        stores._runs_behind(torch.device("mps"))


def test_another_accelerator_is_taken_if_torch_has_it(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert stores._runs_behind(torch.device("xpu", 1))
    with pytest.raises(ConfigError, match=r"'hpu:0'.*no such accelerator"):
        stores._runs_behind(torch.device("hpu", 0))


def test_a_tensor_too_long_to_be_staged_stays(link, disk_path):
    with pytest.warns(PenstockWarning, match="longer than the staging memory"):
        with_us, session = trained(
            session_of=lambda m, o: session_in(disk_path, m, o, host_memory="512KiB")
        )
    with_us.assert_same_bits(trained()[0])
    assert session.recorder.snapshot().counted("spill.full.flash") > 0
