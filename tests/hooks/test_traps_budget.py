"""Rule 29: all that is held counts, and never exceeds the budget."""

import gc
import threading

import pytest
import torch
from torch import nn
from trap_runs import ITEM, LARGE, gated, leaf, mlp, squares

from offload_runs import (
    GatedTier,
    assert_nothing_held,
    assert_within_budget,
    counted,
    movable,
    read_bytes,
    same_bits,
    slots,
    wait_for_writes,
    wait_until,
)
from penstock.core.errors import BudgetError
from penstock.core.units import KIB, MIB
from penstock.observe.recorder import StallCause
from penstock.runtime.movers import RESTORED
from penstock.runtime.storage import Residency
from penstock.runtime.table import SAVED


def test_trap_29_pack_waits_rather_than_exceed_the_budget(session_for, monkeypatch):
    """Write-behind keeps sources alive. Were they not counted, a fast forward would have them all in
    memory at once. Here no write ends before the gate opens, and forward stops at the budget.
    """
    weight = leaf(64 * LARGE)  # 1 MiB
    session, made = gated(session_for, "write", device_memory="5MiB")
    with session:
        stopped, refused, take = [], threading.Event(), session.budget.try_take

        def noted(*args):
            taken = take(*args)
            if not taken:
                refused.set()
            return taken

        monkeypatch.setattr(session.budget, "try_take", noted)

        def open_later():
            assert refused.wait(20)
            stopped.append(session.budget.used_bytes)
            made[0].open("write")

        opener = threading.Thread(target=open_later)
        opener.start()
        losses = squares(weight, 6)
        opener.join()
        assert stopped == [5 * MIB]
        assert session.budget.peak_bytes == 5 * MIB
        assert session.recorder.snapshot().stalls[StallCause.BUDGET].count > 0
        for n, loss in enumerate(losses, start=1):
            weight.grad = None
            loss.backward()
            once = (weight * n).detach() * n
            assert same_bits(weight.grad, once + once)
        assert_within_budget(session)


def test_trap_29_idle_buffers_are_given_back(session_for):
    """Exact-size free lists kept every buffer ever used, and memory grew with each new shape. Buffers
    are pages of one arena; those that are idle go when something else needs the room.
    """
    with session_for(device_memory="6MiB") as session:
        for size in (64, 80, 96, 112, 128):
            weight = leaf(size * LARGE)
            losses = squares(weight, 8)
            wait_for_writes(session)
            for loss in losses:
                loss.backward()
            del loss, losses
            assert_within_budget(session)
        idle = session.inspect().device.holdings[RESTORED]
        assert idle > 0, "something is idle: the test can show something"
        assert_nothing_held(session)


def test_trap_29_prefetched_copies_give_way(session_for):
    """Backward itself saves when it is to be differentiated, while prefetches hold what room there
    was. The copy that is needed last goes; its bytes are on flash still.
    """
    weight = leaf(32 * LARGE)
    with session_for(device_memory="5MiB") as session:
        losses = squares(weight, 16)
        wait_for_writes(session)
        losses.reverse()  # as foreseen, so that much is read ahead
        losses[0].backward()
        wait_until(lambda: not session.inspect().device.reads, "prefetches have come")
        more = squares(weight, 8)
        assert counted(session, "prefetch.dropped") > 0
        for n, loss in zip(range(15, 0, -1), losses[1:], strict=True):
            weight.grad = None
            loss.backward()
            once = (weight * n).detach() * n
            assert same_bits(weight.grad, once + once)
        assert_within_budget(session)
        del loss, losses, more
        assert_nothing_held(session)


def test_trap_29_graphs_of_backwards_share_the_budget(session_for):
    """A gradient that is itself differentiated: the second graph is saved while the first returns."""
    model = mlp(6)
    head = nn.Linear(64, 64)

    def step():
        model.zero_grad()
        hidden = model(leaf(1024, 64, seed=3).detach())
        gradient = torch.autograd.grad(hidden.pow(2).mean(), hidden, create_graph=True)[0]
        more = [nn.functional.gelu(head(gradient * n)).pow(2).mean() for n in range(1, 5)]
        (hidden.mean() + sum(more)).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step()
    with session_for(device_memory="3MiB") as session:
        for _ in range(3):
            assert all(map(same_bits, step(), expected))
        assert_within_budget(session)
        assert_nothing_held(session)


@pytest.mark.parametrize("policy", ["keep", "all", "auto"])
def test_trap_29_a_refusal_names_a_budget_that_helps(session_for, policy):
    """What is restored takes whole pages of 2 MiB, so a budget may be too small although the bytes
    would fit. Each refusal names a larger budget, and whoever follows it soon has one that works.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(5)))
    features = leaf(2000, 96)
    budgets = [100 * KIB]

    def refusal(budget):
        """The error under this budget, or ``None`` if it is enough."""
        try:
            with session_for(model, policy=policy, device_memory=budget) as session:
                for _ in range(3):
                    model(features).pow(2).mean().backward()
                assert_within_budget(session)
        except BudgetError as error:
            return error
        return None

    while (error := refusal(budgets[-1])) is not None:
        assert error.limit_bytes == budgets[-1]
        assert f"give at least {error.least_bytes} bytes" in str(error)
        budgets.append(error.least_bytes)
        assert len(budgets) <= 8, "no end to it"
    assert budgets == sorted(set(budgets))
    assert len(budgets) > 1
    assert budgets[-1] <= 8 * MIB


class Weighted(torch.autograd.Function):
    """Saves a mask that needs no gradient, and then a tensor that does."""

    @staticmethod
    def forward(ctx, features, mask):
        ctx.save_for_backward(mask, features)
        return (features * features * mask).sum()

    @staticmethod
    def backward(ctx, gradient):
        mask, features = ctx.saved_tensors
        return gradient * 2 * features * mask, None


def test_trap_29_what_was_handed_over_stays_whole_when_it_is_evicted(session_for):
    """A node has got its mask and wants the next tensor, for which there is no room. The mask's
    storage is chosen to go, since another node is yet to ask for it. But this node goes on with it,
    and autograd hands over what needs no gradient as it came from us.
    """
    weight = leaf(64 * LARGE)  # 1 MiB
    mask = torch.rand(64 * LARGE, generator=torch.Generator().manual_seed(5))
    expected = (weight * 3).detach() * 2 * mask * 3
    with session_for(policy="keep", device_memory="5MiB") as session:
        features = weight * 3
        others = [features.pow(2).sum()]  # the features are saved first, and so evicted first
        mask = mask.clone()
        loss = Weighted.apply(features, mask)
        others += [Weighted.apply(weight * 4, mask), (weight * 5).pow(2).sum()]
        del features, mask
        others += [(weight * n).pow(2).sum() for n in (6, 7)]
        assert counted(session, "evicted") == 1
        loss.backward()
        assert same_bits(weight.grad, expected)
        assert counted(session, "evicted") > 1
        assert read_bytes(session) > 0
        assert_within_budget(session)


def test_trap_29_a_retained_graph_may_be_evicted_unless_it_is_in_use(session_for):
    """All of its tensors have been unpacked, and any may be again. What a node is using at the moment
    would stay in memory all the same, so it is no way to make room.
    """
    weight = leaf(64 * LARGE)
    with session_for(policy="keep", device_memory="5MiB") as session:
        loss = (weight * 2).pow(2).sum()
        loss.backward(retain_graph=True)
        (saved,) = movable(session).values()
        used = loss.grad_fn.next_functions[0][0]._saved_self
        room = session.executor._eviction
        with pytest.raises(BudgetError, match=f"beside {MIB} that cannot be moved away now"):
            room.make(5 * MIB, name="a test", of_pass=saved.of_pass, saved=None)
        del used
        assert room.make(5 * MIB, name="a test", of_pass=saved.of_pass, saved=None)
        wait_for_writes(session)
        assert saved.state is Residency.SPILLED
        assert session.budget.used_bytes == 0
        weight.grad = None
        loss.backward()
        assert same_bits(weight.grad, 8 * weight.detach())
        assert_within_budget(session)


def test_trap_29_a_mask_is_in_use_too(session_for):
    """Autograd hands over what needs no gradient as it came from us: it must not be our own view, by
    which nobody could tell that somebody uses the storage.
    """
    weight = leaf(64 * LARGE)
    with session_for(policy="keep", device_memory="5MiB") as session:
        loss = (weight * (leaf(64 * LARGE).detach() * 2)).sum()
        loss.backward(retain_graph=True)
        (saved,) = movable(session).values()
        used = loss.grad_fn.next_functions[0][0]._saved_other
        room = session.executor._eviction
        with pytest.raises(BudgetError, match=f"beside {MIB} that cannot be moved away now"):
            room.make(5 * MIB, name="a test", of_pass=saved.of_pass, saved=None)
        content = used.clone()
        del used
        assert room.make(5 * MIB, name="a test", of_pass=saved.of_pass, saved=None)
        wait_for_writes(session)
        assert saved.state is Residency.SPILLED
        assert same_bits(loss.grad_fn.next_functions[0][0]._saved_other, content)
        assert_within_budget(session)


def test_trap_29_evicted_while_its_graph_dies(session_for):
    """Memory is full, a kept storage is chosen to go, and while its write begins its graph dies. Its
    place in the tier must not stay taken.
    """
    weight = leaf(64 * LARGE)
    losses = []

    class Dropping(GatedTier):
        def _write(self, *args):
            losses.clear()
            return super()._write(*args)

    with session_for(wrap_tier=Dropping, policy="keep", device_memory="4MiB") as session:
        losses += squares(weight, 2)
        extra = squares(weight, 2, first=7)
        assert counted(session, "evicted") > 0
        del extra
        assert_nothing_held(session)


def test_trap_29_residency_is_what_it_says(session_for):
    """The states of one storage on its trip, and what is charged in each."""
    weight = leaf(LARGE)
    session, made = gated(session_for, "write", "read", device_memory=64 * MIB)
    with session:
        loss = (weight * 2).pow(2).sum()
        nbytes, states = LARGE * ITEM, []

        def note():
            state = session.inspect()
            (slot,) = state.device.slots
            states.append((slot.state, slot.tier, dict(state.device.holdings)))

        note()
        made[0].open("write")
        wait_for_writes(session)
        note()

        def open_reads():
            made[0].arrived["read"].wait(10)
            note()
            made[0].open("read")

        opener = threading.Thread(target=open_reads)
        opener.start()
        loss.backward(retain_graph=True)
        opener.join()
        note()
        assert states == [
            ("writing", "flash", {SAVED: nbytes}),
            ("spilled", "flash", {}),
            ("reading", "flash", {RESTORED: 2 * MIB}),
            ("spilled", "flash", {}),  # used up, but the graph could be walked again
        ]
        del loss
        gc.collect()
        assert slots(session) == ()
        assert session.budget.peak_bytes <= 2 * MIB + 2 * 16 * KIB
