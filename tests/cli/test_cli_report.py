"""``penstock report``: one document or tables, and what its exit code says."""

from __future__ import annotations

import json

import pytest

from penstock.cli import main
from penstock.observe.clock import ManualClock
from penstock.observe.events import Stage
from penstock.observe.log import EventLog
from penstock.observe.recorder import Recorder
from penstock.observe.summary import RunFacts, summarize


@pytest.fixture(params=["whole", "cut"])
def log(request, tmp_path):
    """A log, and whether it is whole."""
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        clock = ManualClock()
        recorder = Recorder(clock=clock, log=log)
        recorder.begin_step(0)
        recorder.span(Stage.WRITE, 0, 1000, nbytes=4096, tier="flash")
        clock.advance(10**9)
        recorder.end_step()
        facts = RunFacts(policy="auto", device="cpu", budget_bytes=None, steps=1)
        if request.param == "whole":
            log.conclude(summarize(recorder.snapshot(), facts).to_json())
    return path, request.param == "whole"


def test_tables_and_the_exit_code(log, capsys):
    path, whole = log
    assert main(["report", str(path)]) == (0 if whole else 1)
    out, err = capsys.readouterr()
    assert "1 optimizer step in 1.00 s" in out
    assert "Traffic" in out
    assert "no prediction" in out
    if whole:
        assert not err
    else:
        assert err.startswith("penstock: error: ")
        assert "covers only its 1 steps" in err


def test_one_document(log, capsys):
    path, whole = log
    main(["report", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["source"], found["complete"]) == (1, "event log", whole)
    assert found["summary"]["steps"] == 1
    assert found["summary"]["flows"][0]["nbytes"] == 4096


def rank_logs(tmp_path, ranks):
    """Logs of ranks of one job; the last one was killed before its end."""
    paths = []
    for place, rank in enumerate(ranks):
        paths.append(str(tmp_path / f"events.{place}.jsonl"))
        with EventLog(paths[-1]) as log:
            recorder = Recorder(clock=ManualClock(), log=log)
            facts = {
                "rank": rank,
                "local_rank": rank,
                "node": "a",
                "policy": "auto",
                "device": "cpu",
            }
            recorder.mark("session", budget_bytes=None, **facts)
            recorder.begin_step(0)
            recorder.span(Stage.WRITE, 0, 1000, nbytes=4096, tier="flash")
            recorder.span(Stage.READ, 0, 1000, nbytes=1024, tier="flash")
            recorder.end_step()
            if place < len(ranks) - 1:
                run = RunFacts(**facts, budget_bytes=None, steps=1, warnings=("beware",))
                log.conclude(summarize(recorder.snapshot(), run).to_json())
    return paths


def test_the_logs_of_ranks_make_one_summary_of_the_job(tmp_path, capsys):
    paths = rank_logs(tmp_path, [0, 3, 1])
    assert main(["report", *paths]) == 1
    out, err = capsys.readouterr()
    assert "Ranks of the job" in out
    assert "3 of 4 ranks: 12.00 KiB written to flash, 3.00 KiB read" in out
    assert "warning: no report of rank 2: " in out
    assert "warning: rank 0, 3: beware" in out
    (line,) = err.splitlines()
    assert paths[2] in line
    assert "covers only its 1 steps" in line
    main(["report", "--json", *paths])
    job = json.loads(capsys.readouterr().out)["job"]
    assert [(each["rank"], each["node"]) for each in job["ranks"]] == [(0, "a"), (1, "a"), (3, "a")]
    assert (job["world_size"], job["missing"]) == (4, [2])


def test_files_that_are_not_of_one_job_are_refused(tmp_path, capsys):
    paths = rank_logs(tmp_path, [0, 0])
    assert main(["report", *paths]) == 2
    assert "are both of rank 0" in capsys.readouterr().err
    (alone,) = rank_logs(tmp_path, [None])
    assert main(["report", alone, paths[1]]) == 2
    assert f"{alone} is of a run of one process" in capsys.readouterr().err


def test_what_is_no_run_is_told_in_one_line(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text('{"penstock": "plan"}')
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("penstock: error: ")
    assert err.count("\n") == 1
    assert str(path) in err


@pytest.mark.parametrize("whole", [True, False])
def test_a_rotated_log_says_what_its_beginning_lacks(tmp_path, capsys, whole):
    path = tmp_path / "events.jsonl"
    with EventLog(path, file_bytes=4000, files=2) as log:
        recorder = Recorder(clock=ManualClock(), log=log)
        for index in range(40):
            recorder.begin_step(index)
            recorder.end_step()
            assert log.flush()
        facts = RunFacts(policy="auto", device="cpu", budget_bytes=None, steps=40)
        if whole:
            log.conclude(summarize(recorder.snapshot(), facts).to_json())
    assert main(["report", str(path)]) == (0 if whole else 1)
    out = " ".join(capsys.readouterr().out.split())
    assert main(["report", str(path), "--json"]) == (0 if whole else 1)
    found = json.loads(capsys.readouterr().out)
    files, steps = found["missing_files"], found["missing_steps"]
    assert files > 0
    assert 0 < steps < 40
    assert found["summary"]["steps"] == (40 if whole else 40 - steps)
    have = "totals include them" if whole else "totals do not include them"
    assert f"its first {files} files are missing" in out
    assert f"events of the first {steps} steps; {have}" in out


def test_a_page_is_written_and_the_exit_code_is_that_of_the_log(log, tmp_path, capsys):
    path, whole = log
    target = tmp_path / "run.html"
    assert main(["report", str(path), "--html", str(target)]) == (0 if whole else 1)
    out, err = capsys.readouterr()
    page = target.read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "open it in a browser" in out
    assert str(target) in out.replace("\n", "")
    assert ("covers only its 1 steps" in err) == (not whole)
    main(["report", str(path), "--json", "--html", str(target)])
    found = json.loads(capsys.readouterr().out)
    assert (found["page"], found["bytes"]) == (str(target), len(page.encode()))


def test_a_page_has_each_rank_and_runs_of_one_process_too(tmp_path, capsys):
    target = tmp_path / "ranks.html"
    paths = [*rank_logs(tmp_path, [0, 1]), *rank_logs(tmp_path, [None])]
    assert main(["report", *paths, "--html", str(target)]) == 1
    capsys.readouterr()
    data = target.read_text().split('id="data">')[1].split("</script>")[0]
    assert [run["summary"]["rank"] for run in json.loads(data)["runs"]] == [None, 1, None]


def test_what_no_page_can_be_made_of_or_written_to_is_refused(log, tmp_path, capsys):
    path, _ = log
    assert main(["report", str(path), "--html", str(path)]) == 2
    assert "is the log of the run; name another file" in capsys.readouterr().err
    assert main(["report", str(path), "--html", str(tmp_path / "none" / "run.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    summary = tmp_path / "summary.json"
    recorder = Recorder(clock=ManualClock())
    facts = RunFacts(policy="auto", device="cpu", budget_bytes=None)
    summary.write_text(json.dumps(summarize(recorder.snapshot(), facts).to_json()))
    assert main(["report", str(summary), "--html", str(tmp_path / "run.html")]) == 2
    assert "is a summary, which has no events to draw" in capsys.readouterr().err
    assert not (tmp_path / "run.html").exists()
