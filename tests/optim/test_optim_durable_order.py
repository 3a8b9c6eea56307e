"""Durable steps: which journal counts, what it names, and what is on the device before it says so."""

import os

import pytest
import torch
from optim_runs import assert_same, parameters, train

from penstock import ChecksumError, ConfigError, TransferError
from penstock.optim import FlashAdam, FlashAdamW


def test_a_state_dict_of_an_earlier_step_counts_after_later_steps(small):
    params, early = parameters(), parameters()
    a = FlashAdamW(params, durable=True, **small)
    train(a, params, steps=1)
    states, weights = a.state_dict(), [p.detach().clone() for p in params]
    train(a, params, steps=3, first=1)
    with torch.no_grad():
        for p, q in zip(params, weights, strict=True):
            p.copy_(q)
    a.load_state_dict(states)
    a.close()
    b = FlashAdamW(early, durable=True, **small)
    assert b.resume() == 1
    assert_same(early, weights)
    b.close()


@pytest.mark.parametrize("same", [True, False])
def test_a_load_that_dies_leaves_the_earlier_step_or_none(same, small, monkeypatch):
    """The records of the earlier run are not overwritten while a journal still names them."""
    params = parameters()
    a = FlashAdamW(params, durable=True, **small)
    train(a, params, steps=1)  # records in the first places
    states = a.state_dict()
    a.close()
    tile = small["tile"] if same else 2048
    b = FlashAdamW(parameters(), durable=True, **{**small, "tile": tile})
    monkeypatch.setattr(b._penstock, "loaded", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        b.load_state_dict(states)
    b.close()
    after = parameters()
    c = FlashAdamW(after, durable=True, **small)
    assert c.resume() == int(same)
    if same:
        assert_same(after, params)
    c.close()


def test_two_damaged_journals_are_not_a_new_beginning(small):
    params = parameters()
    a = FlashAdamW(params, durable=True, **small)
    train(a, params, steps=2)
    a.close()
    for path in small["flash"].glob("*.journal"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ChecksumError, match="journals"):
        FlashAdamW(parameters(), durable=True, **small)


def test_two_first_journals_that_are_torn_one_after_the_other_are_no_damage(small):
    """Two losses of power, each in the first step after an earlier run's was forgotten."""
    params = parameters()
    a = FlashAdamW(params, durable=True, **small)
    train(a, params, steps=1)
    states = a.state_dict()
    a.close()
    other = {**small, "tile": 2048}
    for _ in range(2):
        b = FlashAdamW(parameters(), durable=True, **other)
        b.load_state_dict(states)
        b.close()
        for path in small["flash"].glob("*.journal"):
            path.write_bytes(path.read_bytes()[:100])
    c = FlashAdamW(parameters(), durable=True, **other)
    assert c.resume() == 0
    c.close()


def test_a_journal_whose_sync_failed_is_taken_back(small, monkeypatch):
    params = parameters()
    a = FlashAdamW(params, durable=True, **small)
    train(a, params, steps=2)
    two = [p.detach().clone() for p in params]
    sync, calls = os.fsync, []

    def fail(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(5, "as if")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TransferError, match="journal"):
        train(a, params, steps=1, first=2)
    monkeypatch.undo()
    a.close()
    after = parameters()
    b = FlashAdamW(after, durable=True, **small)
    assert b.resume() == 2
    assert_same(after, two)
    b.close()


def test_files_are_in_all_directories_before_a_journal_names_them(small, monkeypatch):
    places = [small["flash"] / "a", small["flash"] / "b"]
    for each in places:
        each.mkdir()
    synced, sync = [], os.fsync

    def note(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    params = parameters()
    a = FlashAdamW(params, durable=True, **{**small, "flash": tuple(places)})
    train(a, params, steps=1)
    first = next(i for i, path in enumerate(synced) if path.endswith(".journal"))
    assert {str(each) for each in places} <= set(synced[:first])
    with pytest.raises(ConfigError, match="another one"):
        FlashAdamW(parameters(), durable=True, **{**small, "flash": places[1]})
    a.close()
    with pytest.raises(ConfigError, match="first"):
        FlashAdamW(parameters(), durable=True, **{**small, "flash": (places[1], places[0])})


def test_another_optimizer_of_the_same_states_is_another(small):
    params = parameters()
    a = FlashAdamW(params, durable=True, **small)
    train(a, params, steps=1)
    a.close()
    b = FlashAdam(parameters(), durable=True, **small)
    with pytest.raises(ConfigError, match="another"):
        b.resume()
    b.close()


def test_files_that_are_there_already_need_no_room(small, monkeypatch):
    params = parameters()
    a = FlashAdamW(params, durable=True, **small)
    train(a, params, steps=1)
    a.close()
    monkeypatch.setattr("penstock.core.fs.free_space_bytes", lambda path: 4096)
    b = FlashAdamW(parameters(), durable=True, **small)
    assert b.resume() == 1
    b.close()


@pytest.mark.filterwarnings(
    "ignore:AdamW on flash takes more memory"
)  # one tile that is checked in part
@pytest.mark.parametrize("then", ["full", "off"])
def test_checksums_of_another_kind_are_known_again(then, small, monkeypatch):
    params = parameters(sizes=[(300, 300)])
    monkeypatch.setenv("PENSTOCK_VERIFY", "sampled")
    settings = {**small, "tile": 1 << 16, "durable": True}
    a = FlashAdamW(params, **settings)
    train(a, params, steps=1)
    a.close()
    monkeypatch.setenv("PENSTOCK_VERIFY", then)
    after = parameters(sizes=[(300, 300)])
    b = FlashAdamW(after, **settings)
    assert b.resume() == 1
    assert_same(after, params)
    b.close()
