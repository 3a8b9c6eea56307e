"""The summary of a job: bytes of all that moves on each rank, and the rank that is slower than others."""

from __future__ import annotations

import pytest

from penstock.observe.clock import ManualClock
from penstock.observe.events import Stage
from penstock.observe.job_summary import RankLine, joined, rank_line
from penstock.observe.recorder import Recorder
from penstock.observe.summary import RunFacts, summarize

MB, MS = 10**6, 10**6
READS = {"optimizer": 300 * MB, "gradients": 20 * MB, "weights": 400 * MB, "data": 80 * MB}
WRITES = {"optimizer": 200 * MB, "gradients": 100 * MB}


def line_of(rank: int, *, slower: int = 1) -> RankLine:
    """Return the line of a rank without activations on flash: each kind of data moves for 100 ms."""
    recorder = Recorder(clock=ManualClock())
    begun_ns = 0
    for stage, moved in ((Stage.READ, READS), (Stage.WRITE, WRITES)):
        for tier, nbytes in moved.items():
            end_ns = begun_ns + slower * 100 * MS
            recorder.span(stage, begun_ns, end_ns, nbytes=nbytes, tier=tier)
            begun_ns = end_ns
        # as fast as the SSD: no part of training
        recorder.span(stage, 0, MS, nbytes=7 * MB, tier="flash measurement")
        recorder.span(stage, 0, MS, nbytes=10**9, tier="host")
    facts = RunFacts(policy="auto", device="cpu", rank=rank, budget_bytes=None)
    return rank_line(summarize(recorder.snapshot(), facts))


def test_reads_and_writes_of_every_kind_count():
    line = line_of(0)
    assert line.read_bytes == sum(READS.values()) + 7 * MB
    assert line.written_bytes == sum(WRITES.values()) + 7 * MB
    assert line.read_bytes_per_s == pytest.approx(sum(READS.values()) / 0.4)
    assert line.write_bytes_per_s == pytest.approx(sum(WRITES.values()) / 0.2)
    assert RankLine.from_text(line.to_text()) == line


def test_a_rank_that_is_slower_than_the_others_is_named():
    job = joined([line_of(0), line_of(1, slower=10), line_of(2)], 3)
    text = str(job)
    assert "3 of 3 ranks: 878.33 MiB written to flash, 2.25 GiB read" in text
    assert "ranks read at 1.40 GB/s on average, the slowest, rank 1, at 200.00 MB/s" in text
    assert "ranks write at 1.05 GB/s on average, the slowest, rank 1, at 150.00 MB/s" in text
    assert "on average" not in str(joined([line_of(0)], 1))
