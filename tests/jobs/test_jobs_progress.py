"""What a manager says of its jobs, each thing once."""

from types import SimpleNamespace

from penstock.jobs.policy import JobPhase
from penstock.jobs.progress import ProgressReporter


def job(name, phase, note="", *, held_back=False):
    return SimpleNamespace(
        spec=SimpleNamespace(name=name),
        phase=phase,
        note=note,
        told="",
        held_back=held_back,
        lives=phase is not JobPhase.OVER,
        io_bytes=0,
    )


def said(jobs, seconds):
    lines = []
    teller = ProgressReporter(lines.append)
    for now in range(seconds):
        teller.update(jobs, float(now))
    return [line for line in lines if "all jobs sleep" in line]


def test_jobs_that_keep_each_other_from_waking_are_told_once():
    jobs = [
        job(name, JobPhase.ASLEEP, "needs 3 GiB, and others hold 2 GiB of 4 GiB") for name in "ab"
    ]
    jobs.append(job("c", JobPhase.OVER))
    assert said(jobs, 5) == []
    lines = said(jobs, 20)
    assert [line[:9] for line in lines] == ["a: needs ", "b: needs "]
    assert all("stop one, or raise [machine] memory" in line for line in lines)


def test_who_sleeps_beside_others_or_was_told_to_is_not_stuck():
    waits = job("a", JobPhase.ASLEEP, "waits for its turn")
    assert said([waits, job("b", JobPhase.AWAKE)], 20) == []
    assert said([waits, job("b", JobPhase.SUSPENDING)], 20) == []
    assert said([job("a", JobPhase.ASLEEP, "sleeps until it is resumed", held_back=True)], 20) == []
