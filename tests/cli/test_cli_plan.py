"""``penstock plan``: what is told, in which order, for which networks; and what is refused."""

import json
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from penstock.cli import main, run
from penstock.cli.plan_batches import MAX_BATCH, LargestBatch, between
from penstock.cli.plan_network import parse_settings
from penstock.core.errors import PlanError
from penstock.core.units import MIB
from penstock.lab.dry import dry_zoo_step
from penstock.plan import policies
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import PassProfile, Profile, SlotProfile
from penstock.plan.slots import SlotKey

TINY = ["alexnet", "--set", "size=tiny", "--set", "image_size=64", "--batch", "512"]
ON_CPU = ["--machine", "cpu"]
OWN = """
import torch
from torch import nn

print("imported")

def build(batch):
    assert torch.empty(1).device.type == "meta"
    net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    return net, torch.empty(batch, 1024)

def with_loss(batch):
    net, x = build(batch)
    y = torch.zeros(batch, dtype=torch.long)
    return net, [x, y], lambda net, x, y: nn.functional.cross_entropy(net(x), y)

def fails(batch):
    raise KeyError("a")

def no_tuple(batch):
    return 3

def no_tensors(batch):
    return build(batch)[0], "abc"

def no_output(batch):
    class Net(nn.Linear):
        def forward(self, x):
            return [super().forward(x)]
    return Net(4, 4), torch.empty(batch, 4)
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_network.py"
    path.write_text(OWN)
    return path


def told(capsys, *words):
    """The JSON document of a plan that fits."""
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    """The line on standard error of what makes no sense."""
    assert main(["plan", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1].removeprefix("penstock: error: ")


def test_json_tells_what_the_replay_and_the_plan_say(capsys):
    words = [*TINY, *ON_CPU, "--device-memory", "36MiB", "--tbw", "1TB", "--policy", "ranked"]
    facts = told(capsys, *words)
    (one,) = facts["policies"]
    profile = dry_zoo_step(
        "alexnet",
        512,
        machine=Machine.preset("cpu"),
        whole_device=False,
        size="tiny",
        image_size=64,
    ).profile
    assert facts["profile"]["saved_bytes"] == profile.saved_bytes
    assert facts["budgets"]["device_bytes"] == 36 * MIB
    assert facts["budgets"]["host_bytes"] == 0
    assert not facts["whole_device"]
    assert (one["policy"], one["fits"]) == ("ranked", True)
    assert one["peak_bytes"] <= 36 * MIB < profile.peak_saved_bytes
    assert one["step_ns"] == sum(
        one[part] for part in ("ideal_ns", "lean_ns", "recompute_ns", "interference_ns", "stall_ns")
    )
    written = one["flash"]["written_bytes"]
    assert written > 0
    assert one["moved_bytes"] == written + one["flash"]["read_bytes"]
    assert one["tbw_share"] == written / 10**12
    assert one["steps_to_wear_out"] == 10**12 // written
    assert 0 < one["flash"]["average_bytes"] <= one["flash"]["peak_bytes"]
    assert one["first_fit"]["peak_address"] >= one["first_fit"]["peak_live_bytes"] > 0
    assert len(one["plan"]["decisions"]) == len(profile.slots)


def test_the_largest_batch_is_largest(capsys):
    (one,) = told(capsys, *TINY, *ON_CPU, "--device-memory", "36MiB")["policies"]
    largest = one["largest_batch"]["batch_size"]
    assert largest > 512
    words = [*TINY[:-1], str(largest), *ON_CPU, "--device-memory", "36MiB"]
    assert told(capsys, *words)["policies"][0]["largest_batch"]["batch_size"] == largest
    assert main(["plan", *words[:6], str(largest + 1), *words[7:]]) == 1


def test_every_policy_is_compared_best_first(capsys):
    words = [*TINY, "--machine", "titan-x", "--device-memory", "50950000", "--policy", "all"]
    facts = told(capsys, *words)
    found = facts["policies"]
    assert facts["whole_device"]
    assert sorted(one["policy"] for one in found) == list(policies.names())
    fitting = [one["step_ns"] for one in found if one["fits"]]
    assert fitting == sorted(fitting)
    assert [one["fits"] for one in found] == [True] * len(fitting) + [False] * (10 - len(fitting))
    keep = next(one for one in found if one["policy"] == "keep")
    assert not keep["fits"]
    assert keep["least_device_bytes"] == facts["profile"]["peak_bytes"]
    batches = {one["policy"]: one["largest_batch"]["batch_size"] for one in found}
    assert batches["keep"] < 512 <= batches["auto"] == max(batches.values())
    assert main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in batches]
    assert names == [one["policy"] for one in found]


def test_what_is_printed_for_people(capsys):
    words = [*TINY, *ON_CPU, "--device-memory", "36MiB", "--policy", "ranked", "--verbose"]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    for words in (
        "alexnet, batch 512 on Two cores",
        "budget 36.00 MiB of what autograd saves",
        "policy ranked: it fits; largest batch that fits: ",
        "with unlimited memory (the oracle)",
        "addresses, two-ended",
        "written to the SSD in each step",
        "offload → flash",
    ):
        assert words in text
    profile = dry_zoo_step(
        "alexnet",
        512,
        machine=Machine.preset("cpu"),
        whole_device=False,
        size="tiny",
        image_size=64,
    ).profile
    for slot in profile.slots:
        assert f"{slot.key.module}#{slot.key.ordinal}" in text
    assert main(["plan", *TINY, *ON_CPU, "--device-memory", "36MiB"]) == 0
    assert len(capsys.readouterr().out) < len(text)


def test_a_budget_that_nothing_can_meet(capsys):
    words = ["plan", *TINY, *ON_CPU, "--device-memory", "1MiB", "--policy"]
    for policy in ("auto", "all"):
        assert main([*words, policy]) == 1
        captured = capsys.readouterr()
        assert "does not fit" in captured.out or "from " in captured.out
        (line,) = captured.err.splitlines()
        assert "resident then: AlexNet." in line  # the slots that bind
        least = int(line.partition("give at least ")[2].split()[0])
        less = ["--device-memory", str(least - 1), "--policy", "auto"]
        assert main(["plan", *TINY, *ON_CPU, "--device-memory", str(least)]) == 0
        assert main(["plan", *TINY, *ON_CPU, *less]) == 1
        capsys.readouterr()


def test_tiers_without_room_are_named(capsys):
    none = ["--flash-memory", "0", "--host-memory", "0", "--policy", "all"]
    assert main(["plan", *TINY, *ON_CPU, "--device-memory", "8MiB", *none]) == 1
    assert "penstock: error: no policy fits; " in capsys.readouterr().err


def test_a_function_of_ones_own(own, capsys):
    for name in ("build", "with_loss"):
        assert main(["plan", f"{own}:{name}", "--batch", "4096", "--machine", "cpu", "--json"]) == 0
        captured = capsys.readouterr()
        facts = json.loads(captured.out)  # what the file prints is not in it
        assert "imported" in captured.err
        assert facts["profile"]["saved_bytes"] >= 2 * 4096 * 1024 * 4
        assert facts["policies"][0]["fits"]


def test_a_function_that_will_not_do(own, capsys):
    cases = {
        "fails": "failed: KeyError: 'a'",
        "no_tuple": "returned (int); it returns (module, inputs)",
        "no_tensors": "its inputs are str, not tensors",
        "no_output": "the module returns list, not a tensor",
        "missing": "has no function 'missing'; it has build",
    }
    for name, expected in cases.items():
        line = refused(capsys, f"{own}:{name}", "--batch", "2", *ON_CPU)
        assert expected in line
        assert str(own) in line
    assert "name a function in it" in refused(capsys, own, "--batch", "2", *ON_CPU)


def four_slots(path, unit_ns):
    """A file with the profile of a step of 11 units that saves 16 MiB; the profile."""
    slots = tuple(
        SlotProfile(
            key=SlotKey("net.layer", place, 4 * MIB), pass_index=0, saved_at_ns=place * unit_ns,
            needed_at_ns=(10 - place) * unit_ns, kind="Linear", held_elsewhere=False, dtype="float32",
        )
        for place in range(4)
    )  # fmt: skip
    profile = Profile("cpu", slots, (PassProfile(0, 0, 5 * unit_ns, 11 * unit_ns),))
    path.write_text(profile.to_json())
    return profile


def test_data_loaders_have_their_part_of_flash(tmp_path, capsys):
    """What they read, the plan cannot: it is told, and the step waits longer."""
    path = tmp_path / "step.json"
    four_slots(path, unit_ns=10**6)
    words = [path, *ON_CPU, "--device-memory", "8MiB"]
    alone, beside = told(capsys, *words), told(capsys, *words, "--data-rate", "2500MB/s")
    machine = Machine.preset("cpu")
    assert alone["data_bytes_per_s"] == 0
    assert alone["flash_read_bytes_per_s"] == machine.flash_read_bytes_per_s
    assert beside["data_bytes_per_s"] == 2_500_000_000
    assert beside["flash_read_bytes_per_s"] == pytest.approx(machine.flash_read_bytes_per_s - 2.5e9)
    assert beside["flash_write_bytes_per_s"] < machine.flash_write_bytes_per_s  # shared
    assert beside["policies"][0]["step_ns"] > alone["policies"][0]["step_ns"]
    assert main(["plan", *map(str, words), "--data-rate", "2500MB/s"]) == 0
    for_people = capsys.readouterr().out
    assert "data loaders read 2.50 GB/s of flash all the time, which leaves" in for_people
    assert "--data-rate is 3.00 GB/s, and the flash" in refused(
        capsys, *words, "--data-rate", "3GB/s"
    )
    assert "--data-rate" in refused(capsys, *words, "--data-rate", "3")


def test_a_profile_in_a_file_is_of_its_own_batch(tmp_path, capsys):
    path = tmp_path / "step.json"
    profile = four_slots(path, unit_ns=10**8)
    saved = tmp_path / "plan.json"
    words = [path, *ON_CPU, "--device-memory", "12MiB", "--save-plan", saved]
    facts = told(capsys, *words)
    assert facts["batch_size"] is None
    assert facts["policies"][0]["largest_batch"] is None
    assert facts["policies"][0]["moved_bytes"] > 0
    written = Plan.from_json(saved.read_text())
    assert written == policies.get("auto")(
        profile, Machine.preset("cpu"), Budgets(12 * MIB, 0, Machine.preset("cpu").flash_bytes)
    )
    assert "leave the option out" in refused(capsys, path, *ON_CPU, "--batch", "2")
    path.write_text("{}")
    assert main(["plan", str(path), *ON_CPU]) == 1
    assert str(path) in capsys.readouterr().err


def test_the_plot_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.svg"
    assert main(["plan", *TINY, *ON_CPU, "--device-memory", "36MiB", "--plot", str(path)]) == 0
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["vgg", "--batch", "1", *ON_CPU], "the zoo has no 'vgg'; it has alexnet"),
        (["vgg16", "--batch", "1", "--machine", "titan"], "known are a100-g10, cpu"),
        (["vgg16", "--batch", "1", "--machine", "no/such.toml"], "no/such.toml"),
        (["vgg16", "--batch", "1", *ON_CPU, "--policy", "best"], "known are all, auto"),
        (["vgg16", *ON_CPU], "--batch is missing"),
        (["vgg16", "--batch", "1"], "--machine is missing: name a preset (a100-g10, cpu"),
        (
            ["vgg16", "--batch", "1", *ON_CPU, "--set", "image_size=x"],
            "image_size='x' must be of type int",
        ),
        (["vgg16", "--batch", "0", *ON_CPU], "--batch is 0"),
        (
            ["vgg16", "--batch", "999999999999", *ON_CPU],
            "vgg16 with a batch of 999999999999 failed",
        ),
        (["vgg16", "--batch", "9" * 30, *ON_CPU], f"vgg16 with a batch of {'9' * 30} failed"),
        (["vgg16", "--batch", "1", *ON_CPU, "--device-memory", "2G"], "'2G' is ambiguous"),
        (["vgg16", "--batch", "1", *ON_CPU, "--device-memory", "0"], "must be 1 or more"),
        (["vgg16", "--batch", "1", *ON_CPU, "--set", "a=1"], "no setting a; it has"),
        (["vgg16", "--batch", "1", *ON_CPU, "--set", "a"], "'a' is not NAME=VALUE"),
        (["none.json", *ON_CPU], "cannot read the profile 'none.json'"),
        (["x.json", *ON_CPU, "--set", "a=1"], "not a network of the zoo"),
        (["none.py:f", "--batch", "1", *ON_CPU], "the file does not exist"),
        (["vgg16", "--batch", "1", *ON_CPU, "--plot", "x.txt"], "does not end with .svg"),
        (["vgg16", "--batch", "1", *ON_CPU, "--plot", "no/x.svg"], "cannot be written"),
        (["vgg16", "--batch", "1", *ON_CPU, "--save-plan", "x.toml"], "end with .json"),
    ],
)
def test_what_makes_no_sense_is_refused(words, expected, capsys):
    assert expected in refused(capsys, *words)


def test_a_machine_that_does_not_say_its_memory_needs_a_budget(tmp_path, capsys):
    path = tmp_path / "here.toml"
    text = Machine.preset("titan-x").to_toml()
    path.write_text(text.replace("device_bytes = 12_884_901_888", "device_bytes = 0"))
    line = refused(capsys, "vgg16", "--batch", "1", "--machine", path)
    assert "--device-memory is 0 bytes" in line
    assert "does not say how much" in line


def test_settings_are_numbers_where_they_can_be():
    words = ["image_size=96", "dropout=0.5", "inplace=false", "size=tiny", "a=b=c"]
    assert parse_settings(words) == {
        "image_size": 96, "dropout": 0.5, "inplace": False, "size": "tiny", "a": "b=c",
    }  # fmt: skip


def linear(made, bytes_of):
    """Profiles of one slot by batch."""

    def profile_of(batch):
        made.append(batch)
        slot = SlotProfile(
            key=SlotKey("net", 0, bytes_of(batch)), pass_index=0, saved_at_ns=0, needed_at_ns=10**9,
            kind="Linear", held_elsewhere=False, dtype="float32",
        )  # fmt: skip
        return Profile("cpu", (slot,), (PassProfile(0, 0, 5 * 10**8, 2 * 10**9),))

    return profile_of


@pytest.mark.parametrize("given", [1, 2, 7, 1000, 5000])
def test_a_linear_need_is_found_with_few_profiles(given):
    made = []
    search = LargestBatch(
        linear(made, lambda batch: 100 + 64 * batch),
        given,
        Machine.preset("cpu"),
        Budgets(64 * 999),
    )
    assert search.of("keep").batch_size == 997
    assert len(made) <= 4  # the one given, another, the answer, and one more


def test_between_two_batches_a_need_is_interpolated():
    made = []

    def bytes_of(batch):  # a line that bends once: what is guessed from the first two is far off
        return 64 * batch if batch < 400 else 64 * 400 + 640 * (batch - 400)

    search = LargestBatch(
        linear(made, bytes_of), 100, Machine.preset("cpu"), Budgets(bytes_of(777))
    )
    answer = search.of("keep").batch_size
    assert answer == 777
    assert len(made) <= 7


def test_a_profile_between_two_is_linear():
    profile_of = linear([], lambda batch: 100 + 64 * batch)
    one, other = profile_of(128), profile_of(256)
    assert between(one, other, 0, 128) == one
    assert between(one, other, 64, 128) == profile_of(192)
    assert between(one, other, 128, 128) == other
    with pytest.raises(PlanError, match="where the other has 'cuda'"):
        between(one, replace(other, device="cuda"), 1, 2)
    with pytest.raises(PlanError, match="has 1 elements where the other has 0"):
        between(one, replace(other, slots=()), 1, 2)


def test_a_need_with_steps_is_found_all_the_same():
    def bytes_of(batch):
        return 4096 * ((batch + 36) // 37) ** 2

    search = LargestBatch(linear([], bytes_of), 3, Machine.preset("cpu"), Budgets(4096 * 100))
    assert search.of("keep").batch_size == 370


def test_batches_without_end_and_none():
    machine = Machine.preset("cpu")
    endless = LargestBatch(linear([], lambda _: 8), 4, machine, Budgets(8)).of("keep")
    assert (endless.batch_size, endless.bounded, str(endless)) == (
        MAX_BATCH,
        False,
        f"≥{MAX_BATCH}",
    )
    none = LargestBatch(linear([], lambda batch: 8 * batch), 4, machine, Budgets(7)).of("keep")
    assert str(none) == "none"


def test_help_does_not_load_torch():
    code = (
        "import sys; from penstock.cli import plan; plan.parser().format_help();"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=280).returncode == 0


def test_a_saved_plan_is_what_run_takes(disk_path, monkeypatch, capsys):
    monkeypatch.chdir(disk_path)
    words = [*ON_CPU, "--device-memory", "36MiB", "--save-plan", "plan.json"]
    assert main(["plan", *TINY, *words]) == 0
    options = run.parser().parse_args(["--flash", ".", "--policy", "plan.json", "x.py"])
    assert run._config(options).policy == str(disk_path / "plan.json")
    (disk_path / "plan.json").write_text("{}")
    assert main(["run", "--flash", ".", "--policy", "plan.json", "x.py"]) == 1
    assert main(["run", "--flash", ".", "--policy", "none.json", "x.py"]) == 2
    assert "plan 'none.json' cannot be read" in capsys.readouterr().err
