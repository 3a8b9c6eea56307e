"""Two ranks with a session each: what they tell each other; no rank waits for one that is lost."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from penstock.runtime import rank_store
from penstock.runtime.job_ranks import JobRanks
from rank_runs import end_ranks, start_ranks

PROGRAM = Path(__file__).with_name("rank_session_program.py")
PHASES = ["write", "read", "write", "read"]


def run(place, **settings):
    """Run two ranks; return what those have told that have come so far."""
    ended = end_ranks(start_ranks([PROGRAM, place, json.dumps(settings)], 2))
    assert all(code == 0 for code, _, _ in ended), "\n".join(err for _, _, err in ended)
    paths = [place / f"told.{rank}" for rank in range(2)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


@pytest.mark.parametrize("rank_1", ["closes", "closes late"])
def test_rank_0_has_one_summary_of_the_job(disk_path, rank_1):
    told = run(disk_path, rank_1=rank_1, patience_s=240)
    job = told[0]["job"]
    assert (job["world_size"], job["missing"]) == (2, [])
    for number, (line, rank) in enumerate(zip(job["ranks"], told, strict=True)):
        own = rank["own"]
        node = socket.gethostname()
        assert (line["rank"], line["local_rank"], line["node"]) == (number, number, node)
        assert (own["rank"], own["local_rank"], own["node"]) == (number, number, node)
        assert line["steps"] == own["steps"] == 2 + number
        assert line["written_bytes"] == own["ssd_written_bytes"] > 0
        assert line["saved_peak_bytes"] == own["saved_peak_bytes"] > 0
        assert f"rank {number}, local rank {number} on {node}: " in rank["own_text"]
    assert "Ranks of the job" in told[0]["text"]
    assert "2 of 2 ranks: " in told[0]["text"]
    assert "no report" not in told[0]["text"]


def test_ranks_on_a_machine_measure_bandwidth_at_once(disk_path):
    told = run(disk_path, rank_1="closes", patience_s=240)
    lines = [line.split() for line in (disk_path / "order").read_text().splitlines()]
    begun = [[at for at, (rank, _) in enumerate(lines) if rank == number] for number in "01"]
    for number, places in zip("01", begun, strict=True):
        assert [kind for rank, kind in lines if rank == number][:4] == PHASES
        assert len(places) >= 4
    for first, second in zip(range(3), range(1, 4), strict=True):
        # no rank begins with a transfer before all have begun with the one before
        assert max(each[first] for each in begun) < min(each[second] for each in begun)
    for rank in told:
        (note,) = (each for each in rank["own"]["notes"] if each.startswith("bandwidth"))
        assert note == "bandwidth was measured by the 2 ranks on this machine at once"
        assert all(rate > 0 for rate in rank["rates"])


def test_a_session_on_one_rank_only_does_not_wait_for_the_other(disk_path):
    told, _ = run(disk_path, rank_1="none", patience_s=240)
    (note,) = (each for each in told["own"]["notes"] if each.startswith("bandwidth"))
    assert "by this rank alone: the others on this machine did not open a session" in note
    assert told["job"]["missing"] == [1]
    assert [line["rank"] for line in told["job"]["ranks"]] == [0]


@pytest.mark.parametrize("rank_1", ["dies", "hangs"])
def test_a_rank_that_is_lost_is_missing_and_holds_up_nobody(disk_path, rank_1):
    told, lost = run(disk_path, rank_1=rank_1, patience_s=0.5)
    assert lost is None
    assert told["job"]["missing"] == [1]
    assert "1 of 2 ranks: " in told["text"]
    assert "warning: no report of rank 1: " in told["text"]


def test_ranks_of_two_agents_on_machines_of_one_name_meet_those_of_their_own(monkeypatch):
    """As in containers, or with two agents on one machine: each agent has local ranks 0 and 1."""
    monkeypatch.setattr(rank_store, "PATIENCE_S", 240)
    shared, meetings = dist.HashStore(), []
    for number, agent in enumerate("0011"):
        numbers = {"RANK": number, "LOCAL_RANK": number % 2, "GROUP_RANK": agent}
        for name, value in {**numbers, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        ranks = JobRanks()
        ranks._store = rank_store.RankStore(shared, number, 4, session=0)
        meetings.append(ranks.meeting())
    threads = [threading.Thread(target=each.meet) for each in meetings]
    threads[0].start()
    threads[2].start()
    time.sleep(0.2)  # in which they would have met
    assert threads[0].is_alive()
    assert threads[2].is_alive()
    threads[1].start()
    threads[0].join()
    threads[1].join()
    assert threads[2].is_alive()
    threads[3].start()
    threads[2].join()
    threads[3].join()
    assert [each.ranks for each in meetings] == [2, 2, 2, 2]
