"""Messages over a store: what ranks see of each other, and stores that fail or hang."""

import threading

import pytest
import torch.distributed as dist

from penstock.runtime import rank_store
from penstock.runtime.rank_store import RankStore


@pytest.fixture
def ranks():
    """Two ranks of one job with a store in this process."""
    shared = dist.HashStore()
    return [RankStore(shared, number, 2, session=0) for number in range(2)]


def test_what_ranks_have_published_is_collected(ranks):
    first, second = ranks
    assert first.publish("summary", "a")
    assert first.collect("summary", 0.0) == {0: "a"}
    assert second.publish("summary", "b")
    assert second.publish("summary", "c")
    assert first.collect("summary", 240) == second.collect("summary", 240) == {0: "a", 1: "c"}
    assert first.collect("other", 0.0) == {}


def test_a_rank_without_a_session_is_not_waited_for():
    alone = RankStore(dist.HashStore(), 0, 3, session=0)
    alone.publish("summary", "a")
    assert alone.collect("summary", 10**6) == {0: "a"}


def test_the_next_session_knows_nothing_of_the_last(ranks):
    shared = ranks[0]._store
    ranks[1].publish("summary", "b")
    assert RankStore(shared, 0, 2, session=1).collect("summary", 240) == {}


def test_ranks_meet(ranks):
    other = threading.Thread(target=ranks[1].meet, args=("here", 2))
    other.start()
    assert ranks[0].meet("here", 2)
    other.join()


def test_a_rank_that_is_alone_goes_on(ranks, monkeypatch):
    monkeypatch.setattr(rank_store, "PATIENCE_S", 0.05)
    assert not ranks[0].meet("here", 2)
    assert ranks[0].publish("summary", "a")


def test_a_text_of_the_job_is_exchanged_by_one_rank_at_a_time(ranks):
    first, second = ranks
    assert first.exchange("order", "", "") == ""
    assert first.exchange("order", "", "a") == "a"
    assert second.exchange("order", "", "b") == "a"
    assert second.exchange("order", "a", "b") == "b"
    assert first.exchange("order", "", "") == "b"


def test_a_glance_finds_the_text_of_the_job_soon(ranks, monkeypatch):
    first, second = ranks
    assert first.glance("order") == ""
    second.exchange("order", "", "a")
    monkeypatch.setattr(rank_store, "_GLANCE_S", 60)
    assert "a" in (first.glance("order"), first.glance("order"))  # the first may have begun before


def test_a_look_at_a_store_in_a_file_writes_nothing(tmp_path, monkeypatch):
    """As of ``init_process_group(init_method="file://...")``: the file would grow in all of training."""
    monkeypatch.setattr(rank_store, "_GLANCE_S", 60)
    path = tmp_path / "store"
    ranks = RankStore(dist.FileStore(str(path), 2), 0, 2, session=0)
    before = path.stat().st_size
    for _ in range(3):
        assert ranks.glance("order") == ranks.exchange("order", "", "") == ""
    assert path.stat().st_size == before
    ranks.exchange("order", "", "a")
    before = path.stat().st_size
    for _ in range(3):
        assert ranks.glance("order") == ranks.exchange("order", "", "") == "a"
    assert path.stat().st_size == before


class Failing:
    """A store whose process has ended."""

    def __getattr__(self, name):
        def fail(*_):
            raise dist.DistStoreError("Connection reset by peer")

        return fail


def test_a_store_that_fails_has_no_other_ranks():
    lost = RankStore(Failing(), 0, 2, session=0)
    assert not lost.publish("summary", "a")
    assert lost.collect("summary", 10**6) == {}
    assert not lost.meet("here", 2)
    assert lost.exchange("order", "", "a") is None
    assert lost.glance("order") == ""


class Hanging:
    """A store whose process hangs, until the test has ended."""

    def __init__(self):
        self.calls, self.ended = 0, threading.Event()

    def __getattr__(self, name):
        def hang(*_):
            self.calls += 1
            self.ended.wait()

        return hang


def test_a_store_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(rank_store, "_SHORT_S", 0.05)
    hanging = Hanging()
    try:
        lost = RankStore(hanging, 0, 2, session=0)
        assert not lost.publish("summary", "a")
        assert lost.collect("summary", 10**6) == {}  # at once
        assert not lost.meet("here", 2)
        assert lost.exchange("order", "", "a") is None
        assert lost.glance("order") == ""
        assert hanging.calls == 1
    finally:
        hanging.ended.set()


def test_outside_of_a_job_there_is_no_store(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert RankStore.find(session=0, by_agent=True) is None


def test_the_store_of_torchruns_agent_is_there_before_a_process_group(monkeypatch):
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    numbers = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port}
    for name, value in {**numbers, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    found = []
    for number in range(2):
        monkeypatch.setenv("RANK", str(number))
        found.append(RankStore.find(session=0, by_agent=True))
    assert [(each.rank, each.world_size) for each in found] == [(0, 2), (1, 2)]
    found[1].publish("summary", "b")
    assert found[0].collect("summary", 0.0) == {1: "b"}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = RankStore.find(session=0, by_agent=True)
    assert again.collect("summary", 0.0) == {}
