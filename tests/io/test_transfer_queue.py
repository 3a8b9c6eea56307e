"""In which order an engine takes pieces: urgent ones first, and nothing waits for ever."""

from collections import Counter
from itertools import count, pairwise
from threading import Lock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.io.engine import Priority, Request
from penstock.io.transfer_jobs import MAX_OVERTAKES, TransferJob, TransferQueue

PIECE = 4096
DEMAND, PREFETCH, WRITE_BEHIND, BACKGROUND = Priority


class NoFile:
    fd, path, direct, granule_bytes = -1, "nowhere", True, 4096


def job(priority, pieces=1):
    request = Request(
        op="write",
        file=NoFile(),
        offset_bytes=0,
        address=0,
        nbytes=pieces * PIECE,
        keep_alive=None,
        priority=priority,
    )
    return TransferJob(request, PIECE, cancel=lambda _: False, promote=lambda *_: None)


def taken(queue, most):
    """Priorities of the next pieces, at most so many."""
    pieces = iter(queue.take, None)
    return [piece.job.priority for piece, _ in zip(pieces, range(most), strict=False)]


def test_a_demand_overtakes_a_checkpoint_that_is_under_way():
    queue = TransferQueue(Lock())
    queue.append(job(BACKGROUND, 100))
    assert taken(queue, 3) == [BACKGROUND] * 3
    queue.append(job(DEMAND, 4))
    assert taken(queue, 6) == [DEMAND] * 4 + [BACKGROUND] * 2


def test_a_checkpoint_gets_one_piece_after_so_many_others():
    queue = TransferQueue(Lock())
    queue.append(job(BACKGROUND, 100))
    queue.append(job(DEMAND, 1000))
    turn = [DEMAND] * MAX_OVERTAKES + [BACKGROUND]
    assert taken(queue, 3 * len(turn)) == 3 * turn


def test_what_has_had_its_turn_waits_again():
    queue = TransferQueue(Lock())
    queue.append(job(DEMAND, 1000))
    assert taken(queue, 2 * MAX_OVERTAKES) == [DEMAND] * 2 * MAX_OVERTAKES
    queue.append(job(BACKGROUND))  # what was taken before it came has not overtaken it
    assert taken(queue, MAX_OVERTAKES + 1) == [DEMAND] * MAX_OVERTAKES + [BACKGROUND]


@pytest.mark.parametrize("priority", Priority)
def test_every_priority_keeps_a_share_of_a_queue_that_is_never_empty(priority):
    queue, turn = TransferQueue(Lock()), MAX_OVERTAKES + len(Priority) - 1
    for each in Priority:
        queue.append(job(each, 1000))
    order = taken(queue, 10 * turn)
    last = [-1, *(at for at, each in enumerate(order) if each is priority)]
    assert max(after - before for before, after in pairwise(last)) <= turn
    shares = Counter(order)
    assert shares[DEMAND] >= len(order) * (turn - len(Priority) + 1) // turn
    assert [shares[each] for each in Priority] == sorted(shares.values(), reverse=True)


@given(st.lists(st.tuples(st.sampled_from(Priority), st.integers(1, 40)), max_size=60))
def test_whatever_comes_everything_is_moved_once_and_in_order_within_its_priority(arrivals):
    queue, numbers = TransferQueue(Lock()), count()
    jobs = {priority: [] for priority in Priority}
    moved = []
    for priority, pieces in arrivals:
        jobs[priority].append(job(priority, pieces))
        queue.append(jobs[priority][-1])
        if next(numbers) % 2 and (piece := queue.take()) is not None:
            moved.append(piece)
    moved += iter(queue.take, None)
    for priority, expected in jobs.items():
        found = [(each.job, each.start) for each in moved if each.job.priority is priority]
        assert found == [(one, at) for one in expected for at in range(0, one.nbytes, PIECE)]
