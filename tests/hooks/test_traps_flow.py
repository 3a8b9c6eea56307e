"""Rules 17 to 22: tensors in flight, held by others, in graphs that overlap or change; what stays."""

import random
import threading
import weakref

import pytest
from trap_runs import ITEM, LARGE, flow_count, gated, leaf, mlp, mlp_loss, squares

from offload_runs import (
    assert_nothing_held,
    assert_within_budget,
    counted,
    movable,
    read_bytes,
    same_bits,
    wait_for_writes,
    wait_until,
    written_bytes,
)
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Stage
from penstock.plan import Action
from penstock.runtime.storage import Residency
from penstock.runtime.table import SAVED
from penstock.runtime.table import SMALL as SMALL_OWNER
from penstock.store.wrappers import WrapperTier

# -- 17: needed while it is written ----------------------------------------------------------------


def test_trap_17_a_tensor_on_its_way_out_is_forwarded(session_for):
    """Backward wants a tensor that is being written: it is still in memory, so it is handed over,
    without waiting for the write (which does not end here) and without reading anything.
    """
    weight = leaf(LARGE)
    session, made = gated(session_for, "write")
    with session:
        (loss,) = squares(weight, 1)
        loss.backward()
        n = weight.detach()
        assert same_bits(weight.grad, n + n)
        assert counted(session, "forwarded") == 2
        assert read_bytes(session) == 0
        made[0].open("write")
        del loss
        assert_nothing_held(session)


def test_trap_17_what_was_forwarded_stays_in_memory(session_for):
    """The write goes on, but its graph may be walked again: that reads nothing either."""
    weight = leaf(LARGE)
    session, made = gated(session_for, "write")
    with session:
        (loss,) = squares(weight, 1)
        loss.backward(retain_graph=True)
        made[0].open("write")
        wait_for_writes(session)
        loss.backward()
        n = weight.detach()
        assert same_bits(weight.grad, (n + n) * 2)
        assert read_bytes(session) == 0
        del loss
        assert_nothing_held(session)


def test_trap_17_a_write_that_has_not_begun_is_cancelled(session_for):
    """It would only cost bandwidth and wear."""
    weight = leaf(LARGE)
    session, made = gated(session_for, "write", cancellable=True)
    with session:
        (loss,) = squares(weight, 1)
        loss.backward(retain_graph=True)
        assert counted(session, "write.cancelled.flash") == 2
        assert written_bytes(session) == 0
        made[0].open("write")
        loss.backward()
        n = weight.detach()
        assert same_bits(weight.grad, (n + n) * 2)
        del loss
        assert_nothing_held(session)


def test_trap_17_the_source_lives_until_it_is_written(session_for):
    """And not longer: the writer reads from the live memory itself. (The CPU's part of rule 15.)"""
    weight = leaf(LARGE)
    session, made = gated(session_for, "write")
    with session:
        activation = weight * 2
        alive = weakref.ref(activation.untyped_storage())
        loss = activation.pow(2).sum()
        del activation
        assert alive() is not None
        assert session.budget.used_by(SAVED) == LARGE * ITEM
        made[0].open("write")
        wait_until(lambda: alive() is None, "the source is released")
        assert session.budget.used_by(SAVED) == 0
        loss.backward()
        assert same_bits(weight.grad, 8 * weight.detach())


class UrgedTier(WrapperTier):
    """Reads that nobody waits for do not end."""

    def __init__(self, inner):
        super().__init__(inner)
        self.urged = self.given_up = 0

    def _read(self, place, address, nbytes, keep_alive, priority):
        inner = self.inner._read(place, address, nbytes, keep_alive, priority)
        if priority is Priority.DEMAND:
            return inner

        def end():
            if not outer.done:
                inner.add_done_callback(lambda done: outer.done or outer.settle(done.error))

        def promote(_, priority):
            self.urged += 1
            end()

        def give_up():
            self.given_up += not outer.done
            end()

        outer = Transfer(inner.nbytes, promote=promote)
        timer = threading.Timer(5, give_up)
        timer.daemon = True
        timer.start()
        return outer


def test_a_read_ahead_that_backward_waits_for_becomes_a_demand(session_for):
    """It goes before all that nobody waits for, so the stall is as short as it can be."""
    made = []

    def wrap(tier):
        made.append(UrgedTier(tier))
        return made[0]

    weight = leaf(LARGE)
    with session_for(wrap_tier=wrap) as session:
        loss = weight.sin().sin().sin().sum()
        wait_for_writes(session)
        loss.backward()
        assert made[0].urged > 0
        assert made[0].given_up == 0


def test_a_graph_that_is_walked_again_is_read_ahead_from_its_end_again(session_for):
    weight = leaf(LARGE)
    with session_for() as session:
        value = weight * 2
        for _ in range(6):
            value = value.sin()
        loss = value.sum()
        del value
        missed = []
        for _ in range(3):
            wait_for_writes(session)
            before = counted(session, "prefetch.missed")
            loss.backward(retain_graph=True)
            missed.append(counted(session, "prefetch.missed") - before)
        assert missed == [1, 1, 1]


def test_trap_17_a_graph_dropped_while_it_is_written_is_charged_until_then(session_for):
    """The writer still holds the memory; whoever took it for free would exceed the budget."""
    weight = leaf(LARGE)
    session, made = gated(session_for, "write")
    with session:
        squares(weight, 1)
        assert session.budget.used_by(SAVED) == 2 * LARGE * ITEM
        made[0].open("write")
        assert_nothing_held(session)


def test_trap_17_a_tensor_can_be_read_the_moment_it_is_written(session_for):
    """The worker that ends a write first tells us, and its source is freed; then it wakes those who
    wait. Backward may come in between, and has to read what has been written by then.
    """
    weight = leaf(LARGE)
    session, made = gated(session_for, "write")
    with session:
        loss = (weight * 2).pow(2).sum()
        (saved,) = movable(session).values()
        over = threading.Event()
        saved.ticket.written.add_done_callback(lambda _: over.wait(20))  # runs after ours
        opener = threading.Thread(target=made[0].open, args=["write"])
        opener.start()
        wait_until(lambda: saved.state is Residency.SPILLED, "the write has ended")
        try:
            loss.backward()
        finally:
            over.set()
            opener.join()
        assert same_bits(weight.grad, 8 * weight.detach())


# -- 18: somebody else holds it --------------------------------------------------------------------


def test_trap_18_what_the_program_holds_is_found_out_and_reported(session_for):
    """A list of features for a metric, a custom Function's attribute, the model's own output: moving
    these to flash frees nothing. It is noticed when backward finds them alive; the next plan keeps
    them, and says why.
    """
    model = mlp(4, 128)
    features = leaf(512, 128)

    def step(held):
        for block in model:
            out = block(held[-1] if held else features)
            held.append(out)
        held[-1].pow(2).mean().backward()

    step([])
    with session_for(model, policy="auto", device_memory="1MiB") as session:
        for _ in range(4):
            step([])
        reasons = {decision.reason.split(";")[0] for decision in session.plan.decisions}
        assert "held elsewhere: offload frees nothing" in reasons
        assert any(slot.held_elsewhere for slot in session.profile.slots)
        assert "held elsewhere" in str(session.summary())


def test_trap_18_a_tensor_that_is_held_is_not_read_back(session_for):
    """Its bytes are there; the copy on flash is of no use."""
    weight = leaf(LARGE)
    with session_for() as session:
        activation = weight * 2
        loss = activation.pow(2).sum()
        wait_for_writes(session)
        assert written_bytes(session) > 0
        loss.backward()
        assert read_bytes(session) == 0
        assert same_bits(weight.grad, 4 * activation.detach())


# -- 19 and 20: several graphs, and graphs that change ---------------------------------------------


@pytest.mark.parametrize("order", ["first", "last", "mixed"])
@pytest.mark.parametrize("policy", ["auto", "all"])
def test_trap_19_micro_batches_may_be_alive_together(session_for, policy, order):
    """Pipelines and accumulation have several forwards alive at once. Identifiers by iteration, or by
    layer, would mix them up.
    """
    model = mlp()

    def step():
        model.zero_grad()
        losses = [mlp_loss(model, seed=seed) for seed in range(4)]
        sequence = {"first": [0, 1, 2, 3], "last": [3, 2, 1, 0], "mixed": [2, 0, 3, 1]}[order]
        for place in sequence:
            losses[place].backward()
            losses[place] = None
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step()
    with session_for(model, policy=policy, device_memory="2MiB") as session:
        for _ in range(3):
            assert all(map(same_bits, step(), expected))
        assert written_bytes(session) > 0
        assert_within_budget(session)
        assert_nothing_held(session)


def test_trap_19_forward_of_the_next_before_backward_of_the_last(session_for):
    """As a one-forward-one-backward pipeline has it: each backward ends a pass, and graphs of several
    passes share the budget. What an earlier pass kept must be able to go as well.
    """
    model = mlp()

    def run(steps=8):
        model.zero_grad()
        alive = []
        for seed in range(steps):
            alive.append(mlp_loss(model, seed=seed))
            if len(alive) == 4:
                alive.pop(0).backward()
        for loss in alive:
            loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = run()
    for policy in ("keep", "auto"):
        with session_for(model, policy=policy, device_memory="2MiB") as session:
            assert all(map(same_bits, run(), expected))
            assert written_bytes(session) > 0
            assert_within_budget(session)
            assert_nothing_held(session)


def test_trap_20_shapes_and_control_flow_may_change(session_for):
    """Every step has another batch size and another path. A slot that the plan does not know is a
    guess, never an error; when too much is unknown there is a new plan.
    """
    model = mlp(8)
    path = random.Random(1)
    steps = [(path.choice([64, 200, 256, 333]), path.sample(range(8), 6)) for _ in range(10)]

    def step(rows, blocks):
        model.zero_grad()
        features = leaf(rows, 64, seed=rows).detach()
        for block in blocks:
            features = model[2 * block + 1](model[2 * block](features))
        features.pow(2).mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = [step(*each) for each in steps]
    with session_for(model, policy="auto", device_memory="1MiB") as session:
        for each, gradient in zip(steps, expected, strict=True):
            assert all(map(same_bits, step(*each), gradient))
        assert session.planner.replans > 1
        assert_within_budget(session)
        assert_nothing_held(session)


# -- 21 and 22: what is not worth moving -----------------------------------------------------------


def test_trap_21_the_tail_of_forward_stays(session_for):
    """The last layers are needed first; to write them is to wait for them."""
    model = mlp(12)
    with session_for(model, policy="auto", device_memory="3MiB") as session:
        for _ in range(3):
            mlp_loss(model, rows=1024).backward()
        actions = [decision.action for decision in session.plan.decisions]
        assert actions[-1] is Action.KEEP
        assert actions[0] is Action.OFFLOAD
        assert actions == sorted(actions, reverse=True), "one run is offloaded, then one is kept"


def test_trap_22_storages_below_the_floor_stay(session_for):
    """A hook costs microseconds, an I/O a hundred of them. Small ones stay, but they count."""
    weight = leaf(1536)
    with session_for(floor="8KiB") as session:
        losses = squares(weight, 20)
        wait_for_writes(session)
        assert flow_count(session, Stage.WRITE) == 0
        assert session.budget.used_by(SMALL_OWNER) >= 40 * 1536 * ITEM
        for loss in losses:
            loss.backward()
        del loss, losses
        assert_nothing_held(session)


def test_trap_22_the_floor_is_a_setting(session_for):
    weight = leaf(LARGE)
    for floor, moved in ((LARGE * ITEM, True), (LARGE * ITEM + 1, False)):
        with session_for(floor=floor) as session:
            losses = squares(weight, 2)
            wait_for_writes(session)
            assert bool(flow_count(session, Stage.WRITE)) is moved
            del losses
