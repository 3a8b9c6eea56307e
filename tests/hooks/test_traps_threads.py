"""Rules 10 and 24: other threads, and forked processes."""

import os
import signal
import threading
import traceback
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from trap_runs import LARGE, blocks, flow_count, gradients_of, leaf, run_through

from offload_runs import (
    GatedTier,
    assert_nothing_held,
    assert_within_budget,
    held_bytes,
    read_bytes,
    same_bits,
    wait_for_writes,
    wait_until,
    written_bytes,
)
from penstock.core.errors import PenstockWarning
from penstock.core.units import MIB
from penstock.hooks.attachment import MOST_WARNINGS
from penstock.observe.recorder import Stage

# -- 10: threads -----------------------------------------------------------------------------------


def in_thread(work, name="worker"):
    """Run ``work`` in another thread; its result, or its error."""
    outcome = []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001  (the caller raises it)
            outcome.append((None, error))

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the thread hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def test_trap_10_a_thread_that_is_missed_is_named(session_for):
    """Hooks are thread-local. A pipeline's stage thread, or DataParallel's, runs modules without them:
    right, but not offloaded. That is said once, with the thread's name.
    """
    model = blocks(2)
    features = leaf(256, 64)
    expected = gradients_of(lambda: run_through(model, features), model, features)
    with session_for(model) as session:

        def work():
            return gradients_of(lambda: run_through(model, features), model, features)

        with pytest.warns(PenstockWarning, match="'stage 7' runs modules outside"):
            found = in_thread(work, "stage 7")
        in_thread(work, "stage 7")  # a second warning would be an error
        assert flow_count(session, Stage.WRITE) == 0
        assert "stage 7" in str(session.summary())
    assert all(map(same_bits, found, expected))


def test_trap_10_a_program_of_ever_new_threads_is_not_warned_for_ever(session_for):
    """Each warning is kept for the summary, which must not grow with the steps."""
    model = blocks(1)
    with session_for(model) as session:
        for number in range(MOST_WARNINGS):
            with pytest.warns(PenstockWarning, match=f"'stage {number}'"):
                in_thread(lambda: run_through(model, leaf(4, 64)), f"stage {number}")
        for number in range(3):  # a warning would be an error
            in_thread(lambda: run_through(model, leaf(4, 64)), f"late {number}")
        assert len(session.summary().warnings) == MOST_WARNINGS


def test_trap_10_a_thread_that_has_the_hooks_is_not_missed(session_for):
    """As the one that CUDA's backward runs in, which inherits them; a checkpoint runs modules there."""
    model = blocks(2)
    features = leaf(256, 64)
    with session_for(model) as session:

        def work():
            hooks = session.hooks
            with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
                return gradients_of(lambda: run_through(model, features), model, features)

        in_thread(work)  # a warning would be an error
        assert session.profile is not None  # what the thread saved has been seen
        assert "outside this session" not in str(session.summary())


def test_trap_10_a_thread_without_gradients_misses_nothing(session_for):
    """Evaluation in a thread saves nothing, so there is nothing to warn of."""
    model = blocks(1)
    with session_for(model):

        def work():
            with torch.no_grad():
                return run_through(model, torch.ones(4, 64))

        in_thread(work)


def test_trap_10_backward_may_run_in_another_thread(session_for):
    """As CUDA's backward always does."""
    model = blocks()
    features = leaf(256, 64)
    expected = gradients_of(lambda: run_through(model, features), model, features)
    with session_for(model, device_memory="2MiB") as session:
        for _ in range(2):
            loss = run_through(model, features)
            wait_for_writes(session)
            found = in_thread(partial(gradients_of, loss, model, features))
            assert all(map(same_bits, found, expected))
        assert read_bytes(session) > 0
        del loss
        assert_nothing_held(session)


def test_trap_10_two_backwards_may_run_at_once(session_for):
    """Two graphs over different weights, walked by two threads while a third one's forward goes on."""
    models = [blocks(6) for _ in range(2)]
    features = [leaf(256, 64, seed=seed) for seed in range(2)]
    pairs = list(zip(models, features, strict=True))
    expected = [gradients_of(lambda m=m, f=f: run_through(m, f), m, f) for m, f in pairs]
    with session_for(device_memory="8MiB") as session:
        for _ in range(3):
            losses = [run_through(model, each) for model, each in pairs]
            for model, each in pairs:
                model.zero_grad()
                each.grad = None
            threads = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in threads:
                thread.start()
            run_through(models[0], features[0])
            for thread in threads:
                thread.join(60)
            for (model, each), gradient in zip(pairs, expected, strict=True):
                found = [each.grad, *(parameter.grad for parameter in model.parameters())]
                assert all(map(same_bits, found, gradient))
        assert_within_budget(session)
        del losses, threads
        assert_nothing_held(session)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_trap_10_no_wait_holds_the_gil(session_for, kind):
    """Backward waits for a read, or pack for a write, that ends only when another Python thread has
    opened the gate. If the wait held the GIL, that thread would never run.
    """
    made = []

    def wrap(tier):
        made.append(GatedTier(tier, kind))
        return made[0]

    weight = leaf(64 * LARGE)
    with session_for(wrap_tier=wrap, device_memory="5MiB") as session:

        def open_it():
            assert made[0].arrived[kind].wait(20)
            if kind == "write":
                wait_until(lambda: session.budget.free_bytes < MIB, "pack has to wait")
            made[0].open(kind)

        opener = threading.Thread(target=open_it)
        opener.start()
        loss = sum(((weight * n) * (weight * n)).sum() for n in range(1, 5))
        if kind == "read":
            wait_for_writes(session)
        loss.backward()
        opener.join()
    assert weight.grad is not None


# -- 24: fork --------------------------------------------------------------------------------------

CHILD_TIMEOUT_S = 20


def in_child(work):
    """Run ``work`` in a forked child: ``"done"``, or what it raised, or ``""`` if it hung."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forking beside threads, from 3.12 on
        pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_TIMEOUT_S)  # also where it waits for a lock: SIGALRM ends it
        try:
            torch.set_num_threads(1)
            work()
            report = "done"
        except BaseException:  # noqa: BLE001  (the parent wants to see it)
            report = traceback.format_exc()
        os.write(writable, report.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        report = pipe.read()
    os.waitpid(pid, 0)
    return report


@contextmanager
def held(*locks):
    """Within, another thread holds the locks, as a worker may at the moment of a fork."""
    taken, release = threading.Event(), threading.Event()

    def hold():
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        release.set()
        thread.join()


def test_trap_24_a_forked_child_trains_without_the_parents_engine(session_for):
    """Data-loader workers inherit threads that do not run and files that are not theirs. In the child
    the session is out of action: tensors stay, gradients are right, and the parent does not notice.
    """
    model = blocks(2)
    features = leaf(256, 64)
    expected = gradients_of(lambda: run_through(model, features), model, features)
    with session_for(model) as session:
        loss = run_through(model, features)
        wait_for_writes(session)
        held = held_bytes(session)

        def work():
            small = leaf(16, 64)
            weight = leaf(LARGE)
            run_through(model, small).backward()
            (weight * 2).pow(2).sum().backward()
            assert same_bits(weight.grad, 8 * weight.detach())
            assert held_bytes(session) == held

        assert in_child(work) == "done"
        found = gradients_of(loss, model, features)
        assert all(map(same_bits, found, expected))
        del loss
        assert_nothing_held(session)


def test_trap_24_a_forked_child_goes_backward_through_a_graph_that_is_in_memory(session_for):
    """What the plan keeps, and what is below the floor, the child has as without Penstock."""
    model = blocks(2)
    features = leaf(256, 64)
    expected = gradients_of(lambda: run_through(model, features), model, features)
    with session_for(model, policy="keep", device_memory="64MiB"):
        for _ in range(3):  # then storages that fit are counted, and nothing more is noted of them
            run_through(model, features).backward()
        loss = run_through(model, features)

        def work():
            found = gradients_of(loss, model, features)
            assert all(map(same_bits, found, expected))

        assert in_child(work) == "done"


def test_trap_24_a_child_waits_for_no_lock_of_its_parent(session_for):
    """A lock that a worker held at the fork is held for ever in the child, and nobody there lets go."""
    weight = leaf(LARGE)
    small = leaf(1536)
    optimizer = torch.optim.SGD([weight, small], lr=0.1)
    with session_for(policy="keep", device_memory="8MiB") as session:
        losses = [(weight * 2).pow(2).sum(), (small * 2).pow(2).sum(), (weight * 3).pow(2).sum()]

        def work():
            losses.pop()
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            nn.Linear(64, 64)(leaf(256, 64)).pow(2).sum().backward()
            losses.clear()
            session.close()

        locks = (session.executor._lock, session.budget.changed, session.recorder._lock)
        with held(*locks):
            assert in_child(work) == "done"
        losses[0].backward()
        assert same_bits(weight.grad, 8 * weight.detach())


def test_trap_24_a_child_may_drop_and_close_what_it_inherited(session_for):
    """A worker that ends runs finalizers and ``with`` blocks of its parent."""
    weight = leaf(LARGE)
    with session_for() as session:
        losses = [(weight * 2).pow(2).sum()]
        wait_for_writes(session)

        def work():
            losses.clear()
            session.close()

        assert in_child(work) == "done"
        losses[0].backward()
        assert same_bits(weight.grad, 8 * weight.detach())


def test_trap_24_a_child_is_told_that_it_cannot_restore(session_for):
    """What the parent has spilled the child cannot read; it must not hang over that."""
    weight = leaf(LARGE)
    with session_for() as session:
        loss = (weight * 2).pow(2).sum()
        wait_for_writes(session)
        report = in_child(loss.backward)
        assert "RestoreError" in report
        assert f"spilled by process {os.getpid()}" in report


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        features = torch.full((64,), float(index)).requires_grad_()
        (features * features).sum().backward()
        return features.grad


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_trap_24_data_loader_workers_inside_a_session(session_for):
    """The usual case: workers are forked in the middle of training."""
    model = blocks(1)
    with session_for(model, device_memory="2MiB") as session:
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
        seen = []
        for batch in loader:
            loss = run_through(model, batch.repeat(128, 1))
            wait_for_writes(session)
            loss.backward()
            seen += batch[:, 0].tolist()
        assert seen == [0, 2, 4, 6, 8, 10]
        assert written_bytes(session) > 0
        del batch, loader, loss
        assert_nothing_held(session)
