"""Rule 23: what a fault costs: a warning, time, memory, or an error that says where; never a gradient."""

import errno

import pytest
from trap_runs import (
    ITEM,
    LARGE,
    flow_count,
    flush_engine,
    leaf,
    mlp,
    mlp_loss,
    squares,
)

from offload_runs import (
    assert_nothing_held,
    counted,
    gradients,
    same_bits,
    wait_for_writes,
    written_bytes,
)
from penstock.core.errors import (
    PenstockWarning,
    RestoreError,
    TransferError,
)
from penstock.core.units import MIB
from penstock.observe.recorder import Stage
from penstock.store import FaultyTier
from penstock.store.wrappers import WrapperTier


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
            cause = caught.value.__cause__  # each waiter has one of its own, see ``renewed``
            assert (type(cause), cause.args, vars(cause)) == (type(error), error.args, vars(error))
            failed += 1
            del loss, caught, cause  # whose frames hold the graph
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
        session.executor._transfers.failed = True
        with pytest.warns(PenstockWarning, match="budget is exceeded"):
            back = session.hooks.unpack(packed)
        assert same_bits(back, expected)
        session.budget.free(session.budget.used_by("others"), "others")
        del back, packed
        assert_nothing_held(session)


def test_trap_23_a_write_that_is_interrupted_is_over(session_for):
    """Ctrl-C comes while a tensor is handed to a tier: nothing waits for that write ever after."""

    class Interrupted(WrapperTier):
        times = 1

        def _write(self, place, address, nbytes, keep_alive, priority):
            if self.times:
                self.times -= 1
                raise KeyboardInterrupt
            return self.inner._write(place, address, nbytes, keep_alive, priority)

    model = mlp(3)
    with session_for(model, wrap_tier=Interrupted) as session:
        with pytest.raises(KeyboardInterrupt):
            mlp_loss(model)
        wait_for_writes(session)
        assert_nothing_held(session)
        written_gradients(session, model)
        assert_nothing_held(session)
