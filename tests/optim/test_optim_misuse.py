"""What would give wrong weights without a word: either right, or an error."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from optim_runs import assert_same, assert_same_states, give_gradients, parameters, train
from torch import nn

from penstock import ClosedError, ConfigError
from penstock.optim import FlashAdamW, FlashSGD, on_flash
from penstock.optim.pool import wait_for_all


def _adamw_on_flash(params, **settings):
    return on_flash(torch.optim.AdamW(params), **settings)


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [(FlashAdamW, torch.float64), (_adamw_on_flash, torch.float64), (_adamw_on_flash, torch.bfloat16)],
)  # fmt: skip
def test_parameters_without_a_master_are_stepped_in_their_own_dtype(make, dtype, durable, small):
    ours, theirs, again = parameters(dtype), parameters(dtype), parameters(dtype)
    a = make(ours, **small, durable=durable)
    b = torch.optim.AdamW(theirs, fused=make is FlashAdamW)
    for step in range(3):
        for params in (ours, theirs):
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, dtype=dtype)
        a.step()
        b.step()
    assert_same(ours, theirs)
    assert_same_states(a.state_dict(), b.state_dict())
    assert a.state_dict()["state"][0]["exp_avg"].dtype == dtype
    a.close()
    if durable:
        c = make(again, **small, durable=True)
        assert c.resume() == 3
        assert_same(again, ours)
        assert_same_states(c.state_dict(), b.state_dict())
        c.close()


def test_gradients_that_lie_in_another_order_are_not_mixed_up(small):
    """As torch's fused step does, which takes both to lie alike."""
    ours = nn.Parameter(torch.randn(8, 4, 3, 3))
    theirs = nn.Parameter(ours.detach().clone())
    grad = torch.randn(8, 4, 3, 3)
    ours.grad, theirs.grad = grad.to(memory_format=torch.channels_last), grad
    a = FlashAdamW([ours], **small)
    a.step()
    torch.optim.AdamW([theirs], fused=True).step()
    assert torch.equal(ours, theirs)
    a.close()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_parameters_without_elements(shape, small):
    params = [nn.Parameter(torch.zeros(shape))]
    a = FlashAdamW(params, **small)
    give_gradients(params, 0)
    a.step()
    a.load_state_dict(a.state_dict())
    a.close()


def test_a_parameter_named_twice_is_refused(small):
    p = parameters()[0]
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ConfigError, match="twice"):
        FlashAdamW([p, p], **small)


def test_a_parameter_that_was_exchanged_in_its_group_is_an_error(small):
    params = parameters()
    a = FlashAdamW(params, **small)
    new = parameters(seed=1)
    a.param_groups[0]["params"][2] = new[2]
    give_gradients([*params, *new], 0)
    with pytest.raises(ConfigError, match="add_param_group"):
        a.step()
    a.close()


@pytest.mark.parametrize("format_name", ["exact", "split", "bf16"])
def test_weights_that_were_set_by_others_are_not_undone_by_their_master(format_name, small):
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16, seed=1)
    a = FlashSGD(ours, lr=0.1, momentum=0.5, format=format_name, **small)
    train(a, ours, steps=2)
    before = a.state_dict()["state"]
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p[0] = q[0]
    expected = [p.detach().clone() for p in ours]
    for p in ours:
        p.grad = torch.zeros_like(p)
    a.param_groups[0]["lr"] = 0.0
    a.step()
    after = a.state_dict()["state"]
    assert_same(ours, expected)
    for i, p in enumerate(ours):
        assert torch.equal(after[i]["master"][1:], before[i]["master"][1:])
        if format_name == "exact":
            assert torch.equal(after[i]["master"].bfloat16(), p)
    a.close()


class Counting(torch.optim.SGD):
    """Counts steps in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["count"])


def test_an_optimizer_that_counts_in_its_groups_is_refused(small):
    with pytest.raises(ConfigError, match="count"):
        on_flash(Counting(parameters(), lr=0.1), **small)


def _broken(document, **changes):
    state = {**document["state"], 1: {**document["state"][1], **changes}}
    return {**document, "state": {i: {k: v for k, v in s.items() if v is not ...}
                                  for i, s in state.items()}}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{"exp_avg": torch.tensor(1.0)}, {"exp_avg": [1.0]}, {"exp_avg_sq": None},
                {"step": ...}, {"step": torch.ones(3)}, {"step": "1"}],
)  # fmt: skip
def test_a_state_dict_of_odd_values_changes_nothing(changes, small):
    ours, theirs = parameters(), parameters()
    a, b = FlashAdamW(ours, **small), torch.optim.AdamW(theirs, fused=True)
    train(a, ours, steps=2)
    train(b, theirs, steps=2)
    with pytest.raises(ConfigError, match="state dict"):
        a.load_state_dict(_broken(a.state_dict(), **changes))
    train(a, ours, steps=1, first=2)
    train(b, theirs, steps=1, first=2)
    assert_same(ours, theirs)
    a.close()


def test_a_group_that_could_not_be_added_is_not_there(small):
    model = nn.Linear(3, 3)
    a = FlashAdamW(model.parameters(), overlap=True, **small)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ConfigError, match="between backward and step"):
        a.add_param_group({"params": parameters()})
    assert len(a.param_groups) == 1
    a.step()
    a.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_so(small):
    params = parameters()
    a = FlashAdamW(params, **small)
    train(a, params, steps=1)
    child = os.fork()
    if not child:
        signal.alarm(5)
        code = 1
        try:
            a.step()
        except ClosedError as error:
            code = 0 if "forked" in str(error) else 2
            a.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    train(a, params, steps=1)
    a.close()


@pytest.mark.usefixtures("default_signals")
def test_an_interrupted_wait_leaves_no_thread_at_work():
    begun, go, done = threading.Event(), threading.Event(), []
    main = threading.main_thread().ident

    def work(number):
        begun.set()
        assert go.wait(60)
        done.append(number)

    def interrupt(last):
        begun.wait(60)
        while not is_in(wait, sys._current_frames()[main]):
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)
        while (
            not last.cancelled()
        ):  # it may have come just before ``main`` was blocked, which it is then
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0.001)
        go.set()

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    with ThreadPoolExecutor(1) as pool:
        futures = [pool.submit(work, i) for i in range(3)]
        interrupter = threading.Thread(target=interrupt, args=(futures[-1],))
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            wait_for_all(futures)
        interrupter.join()
        signal.signal(signal.SIGUSR1, before)
        assert [future.cancelled() for future in futures] == [False, True, True]
        assert done == [0]


def test_a_wait_for_all_is_for_those_that_have_not_begun_too():
    main, done = threading.get_ident(), []

    def first():
        while not is_in(wait, sys._current_frames()[main]):
            time.sleep(0.001)
        done.append(0)

    with ThreadPoolExecutor(1) as pool:
        futures = [pool.submit(first), pool.submit(done.append, 1)]
        wait_for_all(futures)
    assert done == [0, 1]


def is_in(function, frame):
    """Whether a frame is one of the function's, or was called from one."""
    return frame is not None and (
        frame.f_code is function.__code__ or is_in(function, frame.f_back)
    )


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [("amsgrad", True, "max_exp_avg_sq"), ("format", "int8", "its format is 'int8' now")],
)
def test_options_that_decide_what_is_kept_are_refused_before_anything_is_touched(
    option, value, words, small
):
    ours, theirs = parameters(), parameters()
    a, b = FlashAdamW(ours, **small), torch.optim.AdamW(theirs, fused=True)
    train(a, ours, steps=1)
    train(b, theirs, steps=1)
    before = a.param_groups[0].get(option, "exact")
    a.param_groups[0][option] = value
    give_gradients(ours, 1)
    with pytest.raises(ConfigError, match=words):
        a.step()
    assert_same(ours, theirs)
    a.param_groups[0][option] = before
    train(a, ours, steps=2, first=1)
    train(b, theirs, steps=2, first=1)
    assert_same(ours, theirs)
    a.close()


def test_a_momentum_that_is_turned_off_rests_until_it_is_turned_on(small):
    ours, theirs = parameters(), parameters()
    a = FlashSGD(ours, lr=0.1, momentum=0.9, **small)
    b = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, fused=True)
    for step, momentum in enumerate((0.9, 0.0, 0.9)):
        for optimizer, params in ((a, ours), (b, theirs)):
            optimizer.param_groups[0]["momentum"] = momentum
            train(optimizer, params, steps=1, first=step)
    assert_same(ours, theirs)
    a.close()


def test_what_is_no_optimizer_or_no_state_dict_or_has_no_values_is_named(small):
    with pytest.raises(ConfigError, match="takes an optimizer of torch, and this is of Linear"):
        on_flash(nn.Linear(2, 2), **small)
    with pytest.raises(ConfigError, match="to_empty"):
        FlashAdamW(nn.Linear(2, 2, device="meta").parameters(), **small)
    a = FlashAdamW(parameters(), **small)
    with pytest.raises(ConfigError, match=r"has \['model', 'optimizer'\]: is it a part of"):
        a.load_state_dict({"model": {}, "optimizer": a.state_dict()})
    a.close()
