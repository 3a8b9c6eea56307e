"""``penstock plan --script --codec auto``: what lossless codecs change, and that a session does so."""

import io
from dataclasses import replace

import pytest
import torch
from torch import nn

from offload_runs import session_in
from penstock.cli import main
from penstock.cli.plan_budgets import print_budgets, requested
from penstock.cli.step_recording import StepReached, StepRecording
from penstock.core.units import MIB
from penstock.plan import Machine
from script_plans import answered, options_of

WIDTH, ROWS = 256, 1024
SAVED = 4 * WIDTH * ROWS
"""Bytes of each of the outputs that are saved."""
SLOW = Machine(
    name="slow",
    flash_write_bytes_per_s=2e6,
    flash_read_bytes_per_s=2e6,
    flash_latency_s=1e-4,
    host_write_bytes_per_s=1e9,
    host_read_bytes_per_s=1e9,
    device_bytes=8 << 30,
    host_bytes=8 << 30,
    flash_bytes=1 << 30,
)


def network():
    """Layers whose outputs are half zeros, and are needed with all their bits."""
    torch.manual_seed(0)
    layers = [each for _ in range(24) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(ROWS, WIDTH)


def train(model, optimizer, rows, steps=1):
    for _ in range(steps):
        model(rows).square().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def steps():
    """A step that is recorded without codecs, and with them."""
    made = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for codec in ("none", "auto"):
        recording = StepRecording((), 1, codec=codec, on_swallowed=pytest.fail)
        try:
            with pytest.raises(StepReached):
                train(*network())
        finally:
            recording.close()
        made.append(recording.recorded)
    torch.set_num_threads(before)
    return made


@pytest.fixture
def machine(disk_path):
    """Name of the file of a slow machine."""
    path = disk_path / "slow.toml"
    path.write_text(SLOW.to_toml())
    return str(path)


def test_by_default_it_says_only_where_a_session_would_try_codecs(steps, machine):
    plain, _ = steps
    assert not any(slot.codecs for slot in plain.kinds.slots)
    text, document = answered(plain, "--machine", machine)
    (note,) = (one for one in text.split("\n\n") if "note:" in one)
    for one in document["budgets"][1:]:
        assert one["budget_bytes"] in document["try_codecs"]
        assert f"{one['budget_bytes'] // MIB}MiB" in note
    assert "--codec auto" in note
    assert document["with_codecs"] is None

    text, document = answered(plain, "--machine", "h200")
    assert document["try_codecs"] == []
    assert "note:" not in text


def test_codecs_that_pay_are_planned_beside_the_step_as_it_is(steps, machine):
    _, tried = steps
    text, document = answered(
        tried, "--machine", machine, "--codec", "auto", "--memory", "20MiB,18MiB,9MiB"
    )
    title = "With lossless codecs, where a session uses them"
    assert title in text
    plain = {one["budget_bytes"]: one for one in document["budgets"][1:]}
    encoded = {one["budget_bytes"]: one for one in document["with_codecs"]}
    assert encoded.keys() == {20 * MIB, 18 * MIB}, "codecs have no room to work within 9 MiB"
    for budget, one in encoded.items():
        assert one["fits"]
        assert one["step_ns"] < 0.8 * plain[budget]["step_ns"]
        assert one["written_bytes"] < plain[budget]["written_bytes"]
        source = sum(each["source_bytes"] for each in one["codecs"])
        frames = sum(each["frame_bytes"] for each in one["codecs"])
        assert frames < 0.7 * source
        assert source <= one["spilled_bytes"]
    assert any(f"With --memory {each // MIB}MiB a step holds" in text for each in encoded)


@pytest.mark.parametrize("flash_bytes", [3 * MIB, 6 * MIB])
def test_a_budget_that_fits_with_codecs_alone_fits(steps, disk_path, flash_bytes, capsys):
    plain, tried = steps
    path = disk_path / "little.toml"
    path.write_text(replace(SLOW, flash_bytes=flash_bytes).to_toml())
    words = ("--machine", str(path), "--memory", "18MiB")
    assert print_budgets(options_of(*words), plain, "train.py", io.StringIO()) == 1
    assert "no budget fits" in capsys.readouterr().err
    words = (*words, "--codec", "auto")
    fits = flash_bytes > 3 * MIB
    assert print_budgets(options_of(*words), tried, "train.py", io.StringIO()) == (not fits)
    assert ("no budget fits" in capsys.readouterr().err) != fits


def test_what_is_planned_without_codecs_is_the_same_when_they_were_tried(steps, machine):
    _, tried = steps
    options = options_of("--machine", machine, "--codec", "auto")
    request = requested(options, tried, "train.py")
    for one in request.costs:
        assert not any(each.codec for each in one.outcome.plan.decisions)
    assert not any(slot.codecs for slot in tried.profile.slots)


def test_where_nothing_pays_it_says_so(steps):
    _, tried = steps
    text, document = answered(tried, "--machine", "h200", "--codec", "auto")
    assert document["with_codecs"] == document["try_codecs"] == []
    assert "Lossless codecs change nothing: within no budget do the tiers bind." in text


def test_a_session_encodes_as_is_planned(steps, disk_path, one_thread):
    _, tried = steps
    # so slow that the fewest bytes are best, however long each codec is measured to take
    slow = replace(SLOW, flash_write_bytes_per_s=2e4, flash_read_bytes_per_s=2e4)
    path = disk_path / "slower.toml"
    path.write_text(slow.to_toml())
    options = options_of("--machine", str(path), "--codec", "auto")
    request = requested(options, tried, "train.py")
    everything = replace(request, policy="all", memory_bytes=(18 * MIB,))
    ((cost, _),) = everything.with_codecs
    with session_in(disk_path, machine=slow, device_memory=18 * MIB, floor=MIB) as session:
        train(*network(), steps=6)
        found = session.plan
    planned = {one.key.match_key: (one.action, one.codec) for one in cost.outcome.plan.decisions}
    assert {one.key.match_key: (one.action, one.codec) for one in found.decisions} == planned
    assert "zero-value+exponent" in {codec for _, codec in planned.values()}
    assert found.budgets == cost.outcome.plan.budgets


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--codec", "auto", "--weights", "flash", "--script", "x.py"], "--codec does not go with"),
        (["--codec", "auto", "resnet50", "--batch", "1"], "--codec needs --script"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, message, capsys):
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
