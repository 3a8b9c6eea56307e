"""Models of a script that knows nothing of Penstock, built on flash until one of them runs."""

import copy
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import penstock
from penstock.homed import home_of
from penstock.weights import build
from penstock.weights.resting import RestingParameter

FLOOR = 4096
PLAIN_COPY = Parameter.__deepcopy__


def model(layers=6):
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))


@contextmanager
def script(directory):
    """A session that builds what this thread constructs on flash, as under ``penstock run``."""
    with penstock.offload(
        weights="flash", weights_memory="64KiB", flash=directory, floor=FLOOR
    ) as session:
        session.build_on_flash()
        yield session


@pytest.fixture(autouse=True)
def few_young(monkeypatch):
    monkeypatch.setattr(build, "YOUNG_BYTES", 2 * 64 * 64 * 4)


def kinds_of(model):
    return {type(each.weight) for each in model}


def in_thread(act):
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


def test_building_ends_when_a_large_model_runs_and_not_before(disk_path):
    with script(disk_path):
        small = nn.Linear(8, 8)
        small.sparse = Parameter(torch.eye(100).to_sparse())
        small(torch.ones(1, 8))
        first, second = model(), model()
        assert [home_of(each.weight) is not None for each in first] == [True] * 6
        first(torch.ones(1, 64))
        assert kinds_of(second) == {RestingParameter}
        assert Parameter.__deepcopy__ is PLAIN_COPY
        assert kinds_of(model()) == {Parameter}


def test_a_model_may_run_first_in_another_thread(disk_path):
    def infer(model):
        with torch.no_grad():
            return model(torch.ones(1, 64))

    torch.manual_seed(0)
    expected = infer(model())
    with script(disk_path):
        torch.manual_seed(0)
        mine = model()
        assert torch.equal(in_thread(lambda: infer(mine)), expected)
        copies = [copy.deepcopy(mine), model()]  # in memory, and without effect on the one that ran
        assert [kinds_of(each) for each in copies] == [{Parameter}, {Parameter}]
        assert kinds_of(mine) == {RestingParameter}
        assert torch.equal(infer(mine), expected)


def test_a_session_that_another_thread_closes_leaves_nothing(disk_path):
    sessions = []

    def run():
        session = penstock.offload(
            weights="flash", weights_memory="64KiB", flash=disk_path, floor=FLOOR
        ).open()
        sessions.append(session)
        session.build_on_flash()
        return model()

    made = in_thread(run)
    sessions[0].close()
    assert Parameter.__deepcopy__ is PLAIN_COPY
    assert {getattr(home_of(each.weight), "keeper", None) for each in made} == {None}
    with script(disk_path):
        made(torch.ones(1, 64))


def test_a_script_that_builds_on_flash_itself_may(disk_path):
    with script(disk_path):
        first = model()
        with penstock.built_on_flash(disk_path, floor=FLOOR):
            second = model()
            with (
                pytest.raises(penstock.ConfigError, match="inside another"),
                penstock.built_on_flash(disk_path),
            ):
                pass
        assert kinds_of(second) == kinds_of(first) == {RestingParameter}
        second(first(torch.ones(1, 64)))


def test_memory_that_other_processes_share_is_kept(disk_path):
    with script(disk_path):
        shared = model(1).share_memory()
        address = shared[0].weight.data_ptr()
        model()
        assert kinds_of(shared) == {Parameter}
        assert shared[0].weight.data_ptr() == address
        assert shared[0].weight.is_shared()


def test_what_a_forked_process_constructs_is_in_memory(disk_path, monkeypatch):
    guard = SimpleNamespace(in_child=False)
    monkeypatch.setattr(build, "fork_guard", lambda: guard)
    with script(disk_path):
        model()
        guard.in_child = True
        assert kinds_of(model()) == kinds_of(copy.deepcopy(model())) == {Parameter}
        guard.in_child = False
