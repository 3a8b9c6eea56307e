"""What a run wrote, read again: whole, cut off, and what is no run at all."""

from __future__ import annotations

import json

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.report.run_file import LOG, SUMMARY, read_run

STEPS = 6


def train(session):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(10)]
    net = torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.ReLU())])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with session:
        for _ in range(STEPS):
            net(torch.randn(8, 3, 64, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return session


@pytest.fixture
def log(session_for, tmp_path):
    """The log of a run, and its summary."""
    path = tmp_path / "events.jsonl"
    session = session_for(
        policy="auto", device_memory="8MiB", floor="64KiB", event_log=path, tbw="1TB"
    )
    return path, train(session).summary()


def test_a_log_tells_what_the_session_told(log):
    path, told = log
    run = read_run(path)
    assert (run.kind, run.complete, run.lost_events) == (LOG, True, 0)
    found = run.summary
    for name in ("policy", "device", "steps", "places", "replans", "tbw_bytes"):
        assert getattr(found, name) == getattr(told, name), name
    assert [(line.cause, line.count, line.total_ms) for line in found.stalls] == [
        (line.cause, line.count, line.total_ms) for line in told.stalls
    ]
    assert found.prediction == told.prediction
    assert str(found)


def test_the_plan_that_was_followed_was_predicted_and_measured(log):
    prediction = log[1].prediction
    assert 0 < prediction.steps < STEPS  # the first had no plan
    rows = {line.what: line for line in prediction.lines}
    whole = rows["forward and backward"]
    assert whole.predicted > 0
    assert whole.measured > 0
    assert whole.difference == whole.predicted / whole.measured - 1
    assert 0 < rows["device peak"].predicted <= 8 << 20
    assert 0 < rows["device peak"].measured <= 8 << 20
    assert rows["flash written"].predicted > 0
    assert "Predicted against measured" in str(log[1])


def test_a_log_without_an_end_tells_of_the_steps_that_it_has(log, tmp_path):
    path, told = log
    whole = path.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    last = next(i for i, line in enumerate(whole) if json.loads(line)["kind"] == "summary")
    cut.write_text("".join(whole[:last]) + whole[last][:40])  # the torn line of a killed process
    run = read_run(cut)
    assert not run.complete
    assert run.summary.steps == STEPS
    assert (run.summary.policy, run.summary.tbw_bytes) == (told.policy, told.tbw_bytes)
    assert run.summary.saved_peak_bytes == told.saved_peak_bytes
    assert {line.cause for line in run.summary.stalls} <= {line.cause for line in told.stalls}
    assert run.summary.prediction == told.prediction
    device = {line.memory: line for line in run.summary.memory}["device"]
    assert 0 < device.peak_bytes <= device.budget_bytes == 8 << 20


def test_a_rotated_log_tells_what_is_missing_at_its_beginning(session_for, tmp_path):
    path = tmp_path / "events.jsonl"
    options = {"event_log": path, "event_log_size": 16_000, "event_log_files": 2, "tbw": "1TB"}
    session = session_for(policy="auto", device_memory="8MiB", floor="64KiB", **options)
    told = train(session).summary()
    run = read_run(path)
    assert run.complete
    assert run.missing_files > 0
    assert 0 < run.missing_steps <= STEPS
    assert run.summary.steps == told.steps == STEPS
    assert run.summary.places == told.places

    # without its end, what is left still says which run it was, and of how many steps it tells
    text = path.read_text().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in text]
    path.write_text("".join(text[: kinds.index("summary")]))
    left = read_run(path)
    assert not left.complete
    assert (left.missing_files, left.missing_steps) == (run.missing_files, run.missing_steps)
    assert left.summary.steps == STEPS - run.missing_steps
    assert (left.summary.policy, left.summary.tbw_bytes) == ("auto", told.tbw_bytes)
    assert left.summary.prediction is not None


def test_a_summary_tells_what_it_told(log, tmp_path):
    told = log[1]
    for name, data in (
        ("bare.json", told.to_json()),
        ("run.json", {"schema": 1, "command": ["x.py"], "summary": told.to_json()}),
    ):
        path = tmp_path / name
        path.write_text(json.dumps(data, indent=2))
        run = read_run(path)
        assert (run.kind, run.complete) == (SUMMARY, True)
        assert run.summary == told


def without(data, name):
    return {key: value for key, value in data.items() if key != name}


HEADER = {"kind": "header", "schema": 1, "t_ns": 0, "unix_ns": 0, "pid": 1}


def test_what_is_no_run_is_refused_with_the_reason(log, tmp_path):
    told = log[1].to_json()
    step = {"kind": "step", "index": 0, "t_ns": 0, "dur_ns": 1, "flows": [{}], "stalls": {}}
    cases = {
        "": "neither an event log nor|nor a complete JSON",
        "epoch 1, loss 2.0\n": "neither an event log nor a complete JSON",
        json.dumps(told)[:-9]: "nor a complete JSON",
        json.dumps([1]): "neither",
        json.dumps({"traceEvents": []}): "a trace for Perfetto",
        json.dumps({"penstock": "plan", "version": 3}): "is a plan, not a run",
        json.dumps({"schema": 1, "command": [], "summary": None}): "did not import torch",
        json.dumps({"schema": 9, "command": [], "summary": told}): "schema.* is 9.* reads 1",
        json.dumps({**told, "schema": 2}): "schema.* is 2.* reads 1",
        json.dumps(without(told, "steps")): "'steps' is missing",
        json.dumps({**told, "steps": "6"}): "'steps' is '6', not int",
        json.dumps({**told, "moons": 1}): "unknown field 'moons'",
        json.dumps({**told, "flows": [1]}): r"'flows'\[0\] is 1",
        json.dumps({**HEADER, "schema": 2}) + "\n": "schema 2.* reads schema 1",
        json.dumps(HEADER) + "\n": "ends before any step",
        json.dumps(HEADER) + "\nnonsense\n": ":2 is not a line",
        json.dumps(HEADER) + "\n" + json.dumps(step) + "\n": ":2: a line of kind 'step' is damaged",
        json.dumps(HEADER) + '\n{"kind":"mark","name":"prediction"}\n': ":2: field 'fields'",
    }
    for number, (text, message) in enumerate(cases.items()):
        path = tmp_path / f"case{number}"
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            read_run(path)
        assert str(path) in str(caught.value)


def test_what_cannot_be_read_is_refused(tmp_path):
    for name, content in (("a.gz", b"\x1f\x8b\x08"), ("b", b"\xff\xfe\x00\x01")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=r"compressed|not a text"):
            read_run(tmp_path / name)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_run(path)
