"""Where weights rest if ``weights="auto"`` leaves it to the other settings."""

from dataclasses import replace

import pytest
import torch

import penstock
from penstock import ConfigError, OffloadConfig
from penstock.core.units import MIB
from weights_rig import (
    Chain,
    ScriptedEngine,
    assert_same,
    bits,
    built,
    inputs,
    shared_engine_replaced,
    train_step,
)

WIDTH = 512
"""Of a layer, whose weight is one MiB."""
DEPTH = 8


def trained(steps, after=lambda: None, **options):
    model = built(lambda: Chain(depth=DEPTH, width=WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with penstock.offload(model, **options) as session:
        for x in inputs(steps, shape=(8, WIDTH)):
            train_step(model, optimizer, x)
            after()
        notes = [each for each in session.summary().notes if each.startswith("weights='auto'")]
        return session.config.weights, notes, [bits(each) for each in model.parameters()]


@pytest.mark.parametrize(
    ("device", "settings", "weights"),
    [
        ("cpu", {"flash": ".", "memory": "8MiB"}, "flash"),
        ("cpu", {"flash": ".", "memory": "auto"}, "flash"),
        ("cpu", {"flash": ".", "weights_memory": "8MiB"}, "flash"),
        ("cpu", {"flash": "."}, "keep"),
        ("cpu", {"host_memory": "8MiB", "memory": "8MiB"}, "keep"),
        ("cpu", {}, "keep"),
        ("cuda", {"flash": ".", "memory": "8MiB"}, "flash"),
        ("cuda", {"flash": ".", "host_memory": "8MiB", "device": "cuda"}, "flash"),
        ("cuda", {"host_memory": "8MiB"}, "host"),
        ("cuda", {"memory": "8MiB", "host_memory": "4MiB"}, "host"),
        ("cuda", {"flash": "."}, "keep"),
        ("cuda", {"flash": ".", "memory": "8MiB", "host_memory": 0}, "keep"),
        ("cuda", {}, "keep"),
        ("mps", {"flash": ".", "host_memory": "8MiB"}, "keep"),
    ],
)
def test_the_other_settings_say_where_weights_rest(device, settings, weights):
    asked = OffloadConfig(weights="auto", **settings)
    assert asked.on(device).weights == weights
    named = OffloadConfig(weights="host", host_memory="1MiB")
    assert named.on(device) is named


def test_limits_of_a_device_that_are_not_found_must_be_given():
    asked = OffloadConfig(weights="auto", host_memory="8MiB", policy="keep")
    assert asked.on("cuda", finds_limits=False).weights == "keep"
    assert replace(asked, weights_memory="4MiB").on("cuda", finds_limits=False).weights == "host"


def test_weights_with_a_directory_and_a_limit_rest_on_flash(tmp_path):
    places, notes, found = trained(2, weights="auto", flash=str(tmp_path), memory="12MiB")
    assert (places, notes) == ("flash", [])
    places, _, expected = trained(2)
    assert places == "keep"
    assert_same(found, expected)


def test_weights_that_have_room_are_moved_by_the_first_step_alone(tmp_path):
    moved = []
    with shared_engine_replaced(ScriptedEngine()) as engine:
        trained(
            4,
            lambda: moved.append((engine.read_bytes, engine.written_bytes)),
            **{"weights": "auto", "flash": str(tmp_path), "memory": "1GiB"},
        )
    assert moved[0][1] >= DEPTH * MIB  # to their homes
    assert moved[1:] == moved[:1] * 3


def test_the_summary_says_why_they_stay_in_memory(tmp_path):
    places, (note,), _ = trained(1, weights="auto", flash=str(tmp_path))
    assert places == "keep"
    assert note == (
        "weights='auto': weights stay in memory; they would rest on flash with a directory there (flash)"
        " and a limit (memory)"
    )


def test_a_limit_of_weights_says_nothing_where_they_stay():
    with penstock.offload(weights="auto", weights_memory="8MiB") as session:
        assert (session.config.weights, session.config.weights_memory) == ("keep", None)
        assert any(each.startswith("weights='auto'") for each in session.summary().notes)


def test_a_model_cannot_move_to_a_device_where_its_weights_have_no_place():
    asked = OffloadConfig(weights="auto", device="cuda")
    with pytest.raises(
        ConfigError, match=r"device is set, but weights='auto' finds no place .*host_memory"
    ):
        asked.on("cuda")
