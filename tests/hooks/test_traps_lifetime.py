"""Rules 6 to 9, 17 to 23 and 29: how long what is held, who waits for what, and what a fault costs."""

import errno
import gc
import random
import threading
import weakref

import pytest
import torch
from torch import nn

from offload_runs import (
    GatedTier,
    arena,
    assert_nothing_held,
    assert_within_budget,
    counted,
    gradients,
    read_bytes,
    same_bits,
    tiers,
    wait_for_writes,
    wait_until,
    written_bytes,
)
from penstock.core.errors import BudgetError, PenstockWarning, RestoreError, TransferError
from penstock.core.units import KIB, MIB
from penstock.observe.recorder import Stage, StallCause
from penstock.plan import Action
from penstock.runtime.executor import SMALL
from penstock.runtime.residency import Residency
from penstock.runtime.traffic import SAVED
from penstock.tier import FaultyTier

LARGE = 4096
ITEM = 4


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def flow_count(session, stage, tier="flash"):
    return session.recorder.snapshot().flow(stage, tier).count


def squares(weight, count, *, first=1):
    """Losses of as many graphs, each of which saves one storage of its own."""
    return [((weight * n) * (weight * n)).sum() for n in range(first, first + count)]


def flush_engine():
    """After an error autograd's engine keeps the nodes it did not come to until its next backward."""
    torch.ones(1, requires_grad=True).sum().backward()


def mlp(depth=6, width=64):
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())))


def mlp_loss(model, rows=256, width=64, seed=3):
    return model(leaf(rows, width, seed=seed).detach()).pow(2).mean()


# -- 6: unpack as often as you like ---------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "all"])
def test_trap_06_a_graph_can_be_walked_again(session_for, policy):
    """With ``retain_graph`` every tensor is unpacked twice. Designs that pop at the first unpack
    raise KeyError at the second, or leak what was never unpacked.
    """
    model = mlp()

    def step():
        model.zero_grad()
        loss = mlp_loss(model)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step()
    with session_for(model, policy=policy) as session:
        for _ in range(2):
            assert all(map(same_bits, step(), expected))
        assert_nothing_held(session)


def test_trap_06_bytes_are_freed_with_the_last_handle(session_for):
    """Not at the first unpack, nor at the second, but when the graph has died."""
    weight = leaf(LARGE)
    with session_for() as session:
        (loss,) = squares(weight, 1)
        wait_for_writes(session)
        held = tiers(session)["flash"].held_bytes
        assert held > 0
        loss.backward(retain_graph=True)
        assert tiers(session)["flash"].held_bytes == held
        assert arena(session).used_bytes == 0, "the restored copy is used up"
        del loss
        assert_nothing_held(session)


def test_trap_06_saved_attributes_can_be_read_at_any_time(session_for):
    """``grad_fn._saved_self`` unpacks outside any backward, as debuggers and visualisers do."""
    weight = leaf(LARGE)
    with session_for() as session:
        square = (weight * 2).pow(2)
        wait_for_writes(session)
        for _ in range(3):
            assert same_bits(square.grad_fn._saved_self, (weight * 2).detach())
        square.sum().backward()
        assert same_bits(weight.grad, 8 * weight.detach())


def test_trap_06_a_function_may_read_its_saved_tensors_twice(session_for):
    """Every access to ``ctx.saved_tensors`` unpacks anew."""
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features):
            ctx.save_for_backward(features, features.exp())
            return features.exp()

        @staticmethod
        def backward(ctx, gradient):
            first, second = ctx.saved_tensors, ctx.saved_tensors
            seen.append([same_bits(a, b) for a, b in zip(first, second, strict=True)])
            return gradient * second[1]

    weight = leaf(LARGE)
    with session_for() as session:
        loss = Twice.apply(weight * 2).sum()
        wait_for_writes(session)
        loss.backward()
        assert seen == [[True, True]]
        del loss
        assert_nothing_held(session)
    assert same_bits(weight.grad, 2 * (weight * 2).exp().detach())


# -- 7: graphs that nobody walks ------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "all"])
def test_trap_07_a_dropped_graph_gives_everything_back(session_for, policy):
    """Metrics in training mode, an early return, an expert that the router passed over."""
    model = mlp()
    with session_for(model, policy=policy, device_memory="4MiB") as session:
        for _ in range(30):  # more in all than the budget and the spill file hold at once
            mlp_loss(model)
        assert_within_budget(session)
        assert_nothing_held(session)


def test_trap_07_an_exception_in_forward_leaves_nothing(session_for):
    """The traceback goes, and the frames with the half-made graph go with it."""
    model = mlp()
    expected = gradients(lambda: mlp_loss(model), list(model.parameters()))

    def fail(module, args):
        raise ZeroDivisionError("in forward")

    with session_for(model) as session:
        handle = model[7].register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            mlp_loss(model)
        handle.remove()
        assert_nothing_held(session)
        found = gradients(lambda: mlp_loss(model), list(model.parameters()))
    assert all(map(same_bits, found, expected))


def test_trap_07_an_exception_in_backward_leaves_nothing(session_for):
    """Half of the graph was restored when a gradient hook raised."""
    model = mlp()
    expected = gradients(lambda: mlp_loss(model), list(model.parameters()))
    with session_for(model) as session:

        def fail(gradient):
            raise ZeroDivisionError("in backward")

        handle = model[4].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            mlp_loss(model).backward()
        handle.remove()
        flush_engine()
        assert_nothing_held(session)
        for _ in range(2):
            found = gradients(lambda: mlp_loss(model), list(model.parameters()))
            assert all(map(same_bits, found, expected))


def test_trap_07_part_of_a_graph_is_never_needed(session_for):
    """Two heads, and a loss on one: the other's tensors are packed and never unpacked."""
    model, head, unused = mlp(), nn.Linear(64, 64), mlp(2)
    features = leaf(256, 64)

    def step():
        for each in (model, head, unused):
            each.zero_grad()
        shared = model(features)
        other = unused(shared)
        head(shared).pow(2).sum().backward()
        return other, [p.grad.clone() for p in (*model.parameters(), *head.parameters())]

    _, expected = step()
    with session_for(policy="auto", device_memory="4MiB") as session:
        for _ in range(4):
            other, found = step()
            assert all(map(same_bits, found, expected))
            del other
        assert_nothing_held(session)
        assert_within_budget(session)


# -- 8: the order of need is a guess --------------------------------------------------------------


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_trap_08_any_order_of_unpacking_is_right(session_for, order):
    """Backward does not always unpack in the reverse of packing, and nothing promises it. Here whole
    graphs are walked in the order that is the worst for a guess, and in no order at all.
    """
    weight = leaf(16 * LARGE)
    with session_for(device_memory="3MiB") as session:
        losses = list(enumerate(squares(weight, 24), start=1))
        wait_for_writes(session)
        if order == "reverse":
            losses.reverse()
        elif order == "random":
            random.Random(0).shuffle(losses)
        while losses:
            n, loss = losses.pop(0)
            weight.grad = None
            loss.backward()
            activation = (weight * n).detach()
            once = activation * n
            assert same_bits(weight.grad, once + once)
        assert_within_budget(session)
        del loss
        assert_nothing_held(session)


def test_trap_08_a_miss_is_counted_and_shown(session_for):
    """Nothing was foreseen for the first tensor of a backward: it is loaded on demand, and told."""
    weight = leaf(LARGE)
    with session_for() as session:
        (loss,) = squares(weight, 1)
        wait_for_writes(session)
        loss.backward()
        assert counted(session, "prefetch.missed") == 2
        assert session.recorder.snapshot().stalls[StallCause.DEMAND].count == 2
        assert session.summary().misses == 2


def test_trap_08_what_follows_is_prefetched(session_for):
    """The guess is of use all the same: of a chain of tensors only the first is waited for on demand."""
    model = mlp(8)
    with session_for(model) as session:
        for _ in range(3):
            loss = mlp_loss(model)
            wait_for_writes(session)
            before = counted(session, "prefetch.missed")
            reads = flow_count(session, Stage.READ)
            loss.backward()
            assert flow_count(session, Stage.READ) - reads >= 15
            assert counted(session, "prefetch.missed") - before <= 3


# -- 9: no cycles ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "policy"), [(16, "all"), (1536, "all"), (LARGE, "keep"), (LARGE, "all")]
)
def test_trap_09_a_saved_output_does_not_keep_itself_alive(session_for, size, policy):
    """A hook that returns a saved *output* as it came makes the output keep its own node alive, and
    the node the output: memory that nothing ever frees. Reference counts alone must do.
    """
    weight = leaf(size)
    gc.collect()
    gc.disable()
    try:
        with session_for(policy=policy) as session:
            result = weight.exp()
            wait_for_writes(session)
            alive = weakref.ref(result.untyped_storage())
            del result
            assert alive() is None
            wait_until(lambda: not tiers(session)["flash"].held_bytes, "the bytes are discarded")
            assert session.budget.used_by(SAVED) == 0
    finally:
        gc.enable()


# -- 17: needed while it is written ---------------------------------------------------------------


def gated(session_for, *kinds, cancellable=False, **settings):
    """A session whose flash tier has a gate."""
    made = []

    def wrap(tier):
        made.append(GatedTier(tier, *kinds, cancellable=cancellable))
        return made[0]

    session = session_for(wrap_tier=wrap, **settings)
    return session, made


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
        (saved,) = session.executor._by_storage.values()
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


# -- 18: somebody else holds it -------------------------------------------------------------------


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
        assert "held elsewhere: offloading it would free nothing" in reasons
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


# -- 19 and 20: several graphs, and graphs that change --------------------------------------------


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


# -- 21 and 22: what is not worth moving ----------------------------------------------------------


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
        assert session.budget.used_by(SMALL) >= 40 * 1536 * ITEM
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


# -- 23: faults -----------------------------------------------------------------------------------


def faulty(**options):
    return lambda tier: FaultyTier(tier, **options) if tier.spec.kind == "flash" else tier


def count_operations(session_for, model, op):
    with session_for(model) as session:
        loss = mlp_loss(model)
        wait_for_writes(session)
        loss.backward()
        return flow_count(session, op)


def written_gradients(session, model):
    """Gradients of a step between whose forward and backward every write has ended."""
    loss = mlp_loss(model)
    wait_for_writes(session)
    return gradients(loss, list(model.parameters()))


def test_trap_23_a_write_that_fails_at_any_moment_costs_no_gradient(session_for):
    """A public offloader logs a failed write and goes on, without the tensor. Here the tensor is still
    in memory, so it stays there: one warning, a count, and the right gradient; for every write.
    """
    model = mlp(3)
    parameters = list(model.parameters())
    expected = gradients(lambda: mlp_loss(model), parameters)
    total = count_operations(session_for, model, Stage.WRITE)
    assert total >= 5
    for index in range(total):
        with session_for(model, wrap_tier=faulty(fail_at={"write": index})) as session:
            with pytest.warns(PenstockWarning, match="Input/output error"):
                assert all(map(same_bits, written_gradients(session, model), expected))
            assert all(map(same_bits, written_gradients(session, model), expected))
            assert counted(session, "spill.failed.flash") == 1
            assert_nothing_held(session)


def test_trap_23_every_write_fails(session_for):
    """As a disk that went away: everything stays, over the budget if it must, and that is told."""
    model = mlp(8)
    parameters = list(model.parameters())
    expected = gradients(lambda: mlp_loss(model, rows=2048), parameters)
    session = session_for(
        model, wrap_tier=faulty(fail_at={"write": 0}, times=None), device_memory="3MiB"
    )
    with session:
        with pytest.warns(PenstockWarning) as caught:
            found = gradients(lambda: mlp_loss(model, rows=2048), parameters)
        assert all(map(same_bits, found, expected))
        assert counted(session, "budget.overflow") > 0
    messages = [str(each.message) for each in caught]
    assert sum("cannot be spilled" in message for message in messages) == 1
    assert sum("budget is exceeded" in message for message in messages) == 1


def test_trap_23_a_full_disk_falls_back_to_host_memory_then_to_keeping(session_for):
    """One warning for each tier that is full, a count, and the right result."""
    model = mlp(6)
    parameters = list(model.parameters())
    expected = gradients(lambda: mlp_loss(model), parameters)
    session = session_for(
        model,
        wrap_tier=faulty(fail_at={"write": 3}, mode="raise", times=None),
        host_memory="256KiB",
    )
    with session:
        with pytest.warns(PenstockWarning) as caught:
            found = written_gradients(session, model)
        assert all(map(same_bits, found, expected))
        assert all(map(same_bits, written_gradients(session, model), expected))
        assert counted(session, "spill.full.flash") > 1
        assert counted(session, "spill.full.host") > 1
        assert written_bytes(session, "host") > 0
        assert_nothing_held(session)
    assert len(caught) == 2
    assert {"No space left" in str(each.message) for each in caught} == {True}


def test_trap_23_a_read_that_fails_names_slot_file_and_offset(session_for):
    """There is no other copy. The error comes at the unpack that needs the tensor, for every read,
    with everything needed to look at the disk; and the session can go on.
    """
    model = mlp(3)
    parameters = list(model.parameters())
    expected = gradients(lambda: mlp_loss(model), parameters)
    total = count_operations(session_for, model, Stage.READ)
    failed = 0
    for index in range(total):
        error = TransferError(
            errno=errno.EIO, op="read", path="/the/file", offset_bytes=4096 * 7, nbytes=65536
        )
        # a prefetch that fails is tried again on demand, so the second try has to fail as well
        session = session_for(
            model, wrap_tier=faulty(fail_at={"read": index}, error=error, times=None)
        )
        with session:
            loss = mlp_loss(model)
            wait_for_writes(session)
            with pytest.raises(RestoreError, match=r"cannot restore .*#\d .*/the/file") as caught:
                loss.backward()
            assert "offset 28672" in str(caught.value)
            assert caught.value.__cause__ is error
            failed += 1
            del loss, caught
            error.__traceback__ = None  # its frames hold the graph
            flush_engine()
            assert_nothing_held(session)
    assert failed == total
    with session_for(model):
        assert all(map(same_bits, gradients(lambda: mlp_loss(model), parameters), expected))


def test_trap_23_a_prefetch_that_fails_is_tried_again(session_for):
    """One bad read of many is not yet a lost tensor."""
    model = mlp(3)
    parameters = list(model.parameters())
    expected = gradients(lambda: mlp_loss(model), parameters)
    with session_for(model, wrap_tier=faulty(fail_at={"read": 2})) as session:
        loss = mlp_loss(model)
        wait_for_writes(session)
        try:
            found = gradients(loss, parameters)
        except RestoreError:  # backward was there already, waiting: then it is told
            pass
        else:
            assert all(map(same_bits, found, expected))
        assert counted(session, "read.failed.flash") == 1


def test_trap_23_wrong_bytes_are_never_handed_over(session_for):
    """A device that returns other bytes than were written: the checksum stands before autograd."""
    weight = leaf(LARGE)
    wrap = faulty(fail_at={"read": 0}, mode="corrupt", times=None)
    with session_for(wrap_tier=wrap) as session:
        (loss,) = squares(weight, 1)
        wait_for_writes(session)
        with pytest.raises(RestoreError, match="checksum"):
            loss.backward()
        assert weight.grad is None


@pytest.mark.parametrize("nbytes", [LARGE * ITEM, LARGE * ITEM + 4, 3 * MIB + 36])
@pytest.mark.parametrize("where", ["flash", "host"])
def test_trap_23_the_last_resort_is_memory_beyond_the_budget(session_for, where, nbytes):
    """When a tier has failed and nothing can go, what backward needs is read all the same."""
    tier = {} if where == "flash" else {"flash": (), "flash_capacity": None, "host_memory": "16MiB"}
    with session_for(device_memory="64MiB", **tier) as session:
        activation = leaf(nbytes // ITEM) * 2
        expected = activation.detach().clone()
        packed = session.hooks.pack(activation)
        del activation
        wait_for_writes(session)
        assert session.budget.try_take(session.budget.free_bytes, "others")
        session.executor._traffic.failed = True
        with pytest.warns(PenstockWarning, match="budget is exceeded"):
            back = session.hooks.unpack(packed)
        assert same_bits(back, expected)
        session.budget.give(session.budget.used_by("others"), "others")
        del back, packed
        assert_nothing_held(session)


# -- 29: everything counts ------------------------------------------------------------------------


def test_trap_29_pack_waits_rather_than_exceed_the_budget(session_for):
    """Write-behind keeps sources alive. Were they not counted, a fast forward would have them all in
    memory at once. Here no write ends before the gate opens, and forward stops at the budget.
    """
    weight = leaf(64 * LARGE)  # 1 MiB
    session, made = gated(session_for, "write", device_memory="5MiB")
    with session:
        stopped = []

        def open_later():
            wait_until(lambda: session.budget.free_bytes < MIB, "the budget is used up")
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
        assert arena(session).touched_bytes > 0, "something is idle: the test can show something"
        assert_nothing_held(session)


def test_trap_29_prefetched_copies_give_way(session_for):
    """Backward may need room while prefetches hold it: the copy needed last goes back to flash."""
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
        (saved,) = session.executor._by_storage.values()
        used = loss.grad_fn.next_functions[0][0]._saved_self
        room = session.executor._room
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
        (saved,) = session.executor._by_storage.values()
        assert saved.state is Residency.WRITING
        assert saved.storage is not None
        made[0].open("write")
        wait_for_writes(session)
        assert saved.state is Residency.SPILLED
        assert saved.storage is None
        assert session.budget.used_bytes == 0

        def open_reads():
            made[0].arrived["read"].wait(10)
            assert saved.state is Residency.READING
            made[0].open("read")

        opener = threading.Thread(target=open_reads)
        opener.start()
        loss.backward(retain_graph=True)
        opener.join()
        assert saved.state is Residency.SPILLED, "used up; the graph could be walked again"
        del loss
        gc.collect()
        assert saved.state is Residency.DEAD
        assert arena(session).touched_bytes <= 2 * MIB
        assert session.budget.peak_bytes <= 2 * MIB + 2 * 16 * KIB
