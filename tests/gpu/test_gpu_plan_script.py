"""``penstock plan --script`` for a script that computes on a GPU: its link is measured, too."""

import json
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn

import preloaded
from penstock.api import Session
from penstock.cli import run
from penstock.cli.plan_step import check_step
from penstock.cli.step_recording import StepReached, StepRecording
from penstock.core.units import MIB
from penstock.optim import on_flash
from penstock.plan import Machine
from script_plans import answered, options_of

pytestmark = pytest.mark.gpu

WIDTH, ROWS, LAYERS = 256, 4096, 4
SAVED = 4 * WIDTH * ROWS
"""Bytes of what each layer saves."""


SCRIPT = """
    import torch
    try:
        import emulated  # what the emulated device needs in each process
    except ImportError:
        pass

    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(1024, 512).cuda()).square().mean().backward()
        optimizer.step()
    print("trained")
    """


def recorded(directories, steps=1, **settings):
    """What is recorded of a step of some layers on the GPU; the weights are as they were."""
    torch.manual_seed(0)
    recording = StepRecording(directories, steps, on_swallowed=pytest.fail, **settings)
    try:
        layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        before = [one.detach().clone() for one in model.parameters()]
        rows = torch.randn(ROWS, WIDTH).cuda()

        def train():
            for _ in range(steps):
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                optimizer.step()

        with pytest.raises(StepReached):
            train()
        if steps == 1:
            assert all(map(torch.equal, model.parameters(), before))
    finally:
        recording.close()
    return recording.recorded


def test_without_a_machine_the_link_is_measured_and_said(disk_path):
    step = recorded((str(disk_path),))
    machine = step.machine
    assert min(machine.bytes_per_s("flash")) > MIB
    assert min(machine.bytes_per_s("host")) > MIB
    assert machine.device_bytes == torch.cuda.get_device_properties(0).total_memory
    assert machine.host_bytes > machine.device_bytes / 64
    assert machine.flash_over_link
    assert machine.flash_bytes > 0
    assert step.device == "cuda"

    unmeasured = recorded(()).process_peak_bytes  # the probe takes 64 MiB, libraries differ by some
    assert abs(step.process_peak_bytes - unmeasured) < 32 * MIB

    text, document = answered(step)
    said = "link of this machine: from the device "
    assert said in text
    assert document["link_write_bytes_per_s"] == machine.host_write_bytes_per_s
    assert document["link_read_bytes_per_s"] == machine.host_read_bytes_per_s
    whole, *smaller = document["budgets"]
    assert whole["budget_bytes"] == document["saved"]["peak_bytes"] >= LAYERS * SAVED
    assert all(one["fits"] for one in smaller)
    assert smaller[-1]["budget_bytes"] == document["least_bytes"] < LAYERS * SAVED


def test_codecs_are_tried_on_the_device(disk_path):
    step = recorded((), codec="auto")
    tried = {sample.codec for slot in step.kinds.slots for sample in slot.codecs}
    assert "zero-value" in tried
    assert not any("+" in name for name in tried), "chains have no form for devices"
    slow = replace(Machine.preset("h200"), host_write_bytes_per_s=1e6, host_read_bytes_per_s=1e6)
    (disk_path / "slow.toml").write_text(slow.to_toml())
    words = ("--machine", str(disk_path / "slow.toml"), "--codec", "auto", "--memory", "16MiB")
    text, document = answered(step, *words)
    assert document["try_codecs"] == [16 * MIB]
    assert ("With lossless codecs" in text) == bool(document["with_codecs"])
    raw = {one["budget_bytes"]: one["step_ns"] for one in document["budgets"]}
    assert all(one["step_ns"] < raw[one["budget_bytes"]] for one in document["with_codecs"])


def test_the_command_needs_no_machine(disk_path):
    (disk_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = "import sys; from penstock.cli import main; sys.exit(main())"
    ended = preloaded.run(
        ["-c", command, "plan", "--json", "--script", "train.py"], cwd=disk_path, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert "trained" not in ended.stderr
    document = json.loads(ended.stdout)
    assert document["device"] == "cuda:0"
    assert document["link_read_bytes_per_s"] > MIB
    assert document["setting"] == "--device-memory"


def test_steps_of_whole_weights_are_planned_for_on_the_measured_machine(disk_path):
    step = recorded((str(disk_path),), steps=2)
    request = check_step(options_of("--weights", "flash"), step, name="train.py")
    assert request.device == "cuda"
    assert request.node == step.machine
    assert request.memory_bytes == step.machine.device_bytes
    assert request.plan().memory.total <= request.memory_bytes
    weights = [nn.Parameter(torch.zeros(one.trained, device="cuda")) for one in request.weights]
    optimizer = on_flash(torch.optim.AdamW(weights), flash=disk_path, tile=WIDTH * (WIDTH + 1))
    found = [tile.record_bytes for tile in optimizer._penstock.tiles]
    optimizer.close()
    assert found == [one.record_bytes for one in request.weights if one.trained]


def test_a_named_machine_is_asked_in_place_of_this_one():
    step = recorded(())
    text, document = answered(step, "--machine", "h200")
    assert document["link_write_bytes_per_s"] == 55e9
    assert "measured" not in text


@pytest.mark.parametrize("words", [(), ("--host-memory", "0B")])
def test_a_session_takes_the_options_that_are_advised(disk_path, words):
    step = recorded((str(disk_path),))
    rates = Machine.preset("h200")  # measured rates vary, and with them which tier a plan takes
    steady = replace(rates, device_bytes=step.machine.device_bytes)
    text, document = answered(replace(step, machine=steady), *words)
    (line,) = (line for line in text.splitlines() if line.startswith("penstock run "))
    given = line.replace("DIR", str(disk_path)).split()[2:]
    parsed = run.parser().parse_args([*given[:-1], "--flash-capacity", "1GiB", given[-1]])
    uses_flash = any(one["written_bytes"] for one in document["budgets"])
    assert uses_flash == bool(words)
    with Session(run._config(parsed)) as session:
        assert session._stores.tiers.keys() == ({"flash"} if uses_flash else {"flash", "host"})
