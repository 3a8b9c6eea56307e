"""``penstock plan --weights flash``: what it says of a whole step, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.cli import main, plan, plan_step
from penstock.cli.plan_step import FORMATS
from penstock.cli.step_request import record_bytes
from penstock.core.units import format_bytes
from penstock.optim import formats, on_flash
from penstock.plan import Machine

TINY = ["gpt2", "--set", "size=tiny", "--set", "width=512", "--machine", "cpu"]
FLASH = ["--weights", "flash", "--optimizer", "adam"]
OWN = """
import torch
from torch import nn

def build(batch):
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    return net.to(torch.bfloat16), torch.empty(batch, 1024, dtype=torch.bfloat16)

def adapted(batch):
    net, x = build(batch)
    net.requires_grad_(False)
    net.insert(1, nn.Linear(1024, 1024, dtype=torch.bfloat16))
    return net, x
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_weights.py"
    path.write_text(OWN)
    return path


def told(capsys, *words):
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, code, *words):
    assert main(["plan", *map(str, words)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1].removeprefix("penstock: error: ")


def test_json_has_the_whole_step(capsys):
    words = [*TINY, "--batch", "2", *FLASH, "--format", "int8", "--tbw", "1TB"]
    least = told(capsys, *words)["step"]["least_bytes"]
    facts = told(capsys, *words, "--memory", least)
    step = facts["step"]
    parts = ("compute_ns", "update_delay_ns", "interference_ns", "stall_ns", "tail_ns")
    assert step["step_ns"] == sum(step[part] for part in parts)
    assert step["memory"]["total"] == facts["memory_bytes"] == step["least_bytes"] == least
    assert step["written_bytes"] == step["moved"]["weights_written"] + (
        step["moved"]["records_written"] + step["activations_written"]
    )
    assert step["steps_to_wear_out"] == 10**12 // step["written_bytes"]
    assert (facts["units"], facts["unit"], facts["format"]) == (128, "tokens", "int8")
    assert step["step_ns"] >= max(step["bounds"]["flash"], step["bounds"]["compute"])
    changes = {one["change"]: one for one in facts["changes"]}
    memory = f"twice the memory, {format_bytes(2 * least)}"
    assert set(changes) == {
        "a second SSD",
        memory,
        "twice the tokens, 256",
        "format exact",
        "format split",
        "format bf16",
    }
    assert changes["format split"]["refused"] == "not for these parameters"
    exact, bf16 = (changes[f"format {name}"]["step"] for name in ("exact", "bf16"))
    assert exact["disk_bytes"] > bf16["disk_bytes"] > step["disk_bytes"]
    assert changes[memory]["step"]["step_ns"] <= step["step_ns"]


def test_text_says_what_binds_and_what_would_change_it(capsys):
    words = [*TINY, "--batch", "2", *FLASH, "--memory", "200MiB", "--tbw", "600TB", "--verbose"]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    for line in (
        "trained parameters",
        "in format exact",
        "the whole step",
        "tokens a step on (T*)",
        "of flash needed, of 78.09 GiB",
        "written to the SSD in each step",
        "What would change it",
        "weights that stay:",
    ):
        assert line in out


def test_auto_is_flash(capsys):
    words = [*TINY, "--batch", "2", "--optimizer", "adam"]
    found, expected = (told(capsys, *words, "--weights", each) for each in ("auto", "flash"))
    assert found["step"] == expected["step"]


def test_tokens_stand_for_a_batch(capsys):
    by_tokens = told(capsys, *TINY, "--tokens", "128", *FLASH)
    assert (by_tokens["batch_size"], by_tokens["units"]) == (2, 128)
    message = refused(capsys, 2, *TINY, "--tokens", "100", *FLASH)
    assert message.startswith("--tokens is 100, and a sequence has 64")


def test_a_network_of_ones_own_in_bfloat16_has_all_formats(capsys, own):
    facts = told(
        capsys, f"{own}:build", "--batch", "8", "--machine", "cpu", *FLASH, "--format", "split"
    )
    assert facts["unit"] == "samples"
    assert [one["refused"] for one in facts["changes"]] == [None] * len(facts["changes"])
    parameters = 4 * (1024 * 1024 + 1024)
    assert facts["step"]["parameters"] == parameters
    assert facts["step"]["disk_bytes"] == pytest.approx(12.125 * parameters, rel=0.01)


def test_a_frozen_base_writes_only_its_adapter(capsys, own):
    words = [f"{own}:adapted", "--batch", "8", "--machine", "cpu", *FLASH, "--format", "int8"]
    least = told(capsys, *words)["step"]["least_bytes"]
    facts = told(capsys, *words, "--memory", least)
    assert facts["step"]["parameters"] == 1024 * 1024 + 1024
    moved = facts["step"]["moved"]
    assert moved["weights_read"] > moved["weights_written"] > 0
    assert moved["weights_written"] < 2.01 * facts["step"]["parameters"]


def test_forward_alone_reads_each_weight_once_and_writes_nothing(capsys, own):
    words = [f"{own}:build", "--batch", "8", "--machine", "cpu", "--weights", "flash"]
    least = told(capsys, *words, "--forward-only")["step"]["least_bytes"]
    facts = told(capsys, *words, "--forward-only", "--memory", least)
    step = facts["step"]
    layer = 2 * 1024 * 1024  # beside its bias, which stays in memory
    assert facts["forward_only"]
    assert step["moved"]["weights_read"] == sum(-(-layer // 4096) * 4096 for _ in step["order"]) > 0
    assert step["written_bytes"] == step["parameters"] == 0
    assert step["disk_bytes"] == pytest.approx(4 * layer, rel=0.01)
    assert not any("format" in one["change"] for one in facts["changes"])
    assert main(["plan", *map(str, words), "--forward-only"]) == 0
    assert "forward only" in capsys.readouterr().out


def test_updates_in_step_have_gradients_that_wait(capsys, own):
    words = [f"{own}:build", "--batch", "8", "--machine", "cpu", *FLASH, "--update", "step"]
    layer = 2 * 1024 * 1024  # beside its bias, whose gradient stays in memory
    facts = told(capsys, *words, "--gradient-memory", "5MiB", "--memory", "1GiB")
    step = facts["step"]
    assert facts["update"] == "step"
    assert step["moved"]["gradients_written"] == step["memory"]["gradients"] == 2 * layer
    assert step["written_bytes"] == sum(
        step["moved"][name] for name in ("weights_written", "records_written", "gradients_written")
    )
    changes = {one["change"]: one["step"] for one in facts["changes"]}
    assert changes["updates in backward"]["moved"]["gradients_written"] == 0
    assert main(["plan", *map(str, words), "--gradient-memory", "5MiB"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for line in ("updated in step()", "but not in step()", "updates in step()"):
        assert line in out
    assert out.count("gradients that wait") == 3  # memory, traffic, and flash needed


def test_a_step_of_several_backwards_or_micro_batches_has_all_of_the_batch(capsys, own):
    words = [f"{own}:build", "--batch", "8", "--machine", "cpu", *FLASH, "--weights-memory", "4MiB"]
    layer = 2 * 1024 * 1024

    def of(*more):
        facts = told(capsys, *words, "--memory", "1GiB", *more)
        assert facts["units"] == 8
        changes = {one["change"]: one for one in facts["changes"]}
        assert changes["twice the samples, 16"]["step"]["parameters"] == facts["step"]["parameters"]
        return facts["step"]["moved"], facts["update"]

    moved, _ = of()
    twice, update = of("--accumulate", "2", "--gradient-memory", "0B")
    assert update == "backward"
    assert twice["gradients_read"] == twice["gradients_written"] == 4 * layer  # after the first
    assert twice["weights_read"] > moved["weights_read"]
    assert twice["weights_written"] == moved["weights_written"]
    parts, _ = of("--parts", "2")
    assert parts == moved
    clipped, update = of("--clip", "--gradient-memory", "0B")
    assert update == "step"
    assert clipped["gradients_read"] == clipped["gradients_written"] == 4 * layer
    message = refused(capsys, 2, *words, "--accumulate", "3", "--parts", "1")
    assert message.startswith("a batch of 8 cannot be divided into 3 equal parts by --accumulate 3")


def test_ranks_divide_weights_flash_and_wear(capsys):
    words = [*TINY, "--batch", "2", *FLASH, "--tbw", "1TB", "--memory", "170MiB"]
    alone = told(capsys, *words)
    four = told(capsys, *words, "--ranks", "4", "--nodes", "2", "--ssds", "2")
    ranks, step = four["ranks"], four["step"]
    assert (ranks["count"], ranks["per_node"], ranks["units"]) == (4, 2, 4 * alone["units"])
    assert ranks["not_known"] == ["network_bytes_per_s", "peer_bytes_per_s"]
    assert step["network_ns"] == 0 < step["moved"]["network"]
    assert ranks["flash_read_bytes_per_s"] == alone["ranks"]["flash_read_bytes_per_s"]
    assert step["disk_bytes"] == pytest.approx(alone["step"]["disk_bytes"] / 4, rel=0.1)
    assert ranks["disk_bytes_per_node"] == 2 * step["disk_bytes"]
    assert ranks["written_bytes_per_ssd"] == step["written_bytes"]  # two ranks, two SSDs
    assert step["parameters"] == alone["step"]["parameters"]
    changes = {one["change"]: one["step"] for one in four["changes"]}
    assert {"twice the SSDs, 4 on a node", "twice the nodes, 4", "ddp"} < set(changes)
    each = changes["ddp"]
    assert each["disk_bytes"] == pytest.approx(alone["step"]["disk_bytes"], rel=0.05)
    assert each["steps_to_wear_out"] == 10**12 // each["written_bytes"]


def test_the_text_says_what_one_rank_has_and_what_is_not_known(capsys):
    words = [*TINY, "--batch", "2", "--ranks", "8", "--optimizer", "adam", "--memory", "170MiB"]
    assert main(["plan", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for part in (
        "one of 8 ranks on one node, with one part in 8 of the weights (fsdp2)",
        "one SSD for the 8 ranks of a node",
        "of weights in memory",
        "the bandwidth between the devices of a node is not known (--peer-rate), so its time is not",
        "from other ranks",
    ):
        assert part in out
    words += ["--nodes", "4", "--network-rate", "10MB/s", "--peer-rate", "1GB/s", "--tbw", "1TB"]
    assert main(["plan", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "and 10.00 MB/s of network" in out
    assert "the network binds" in out
    assert "not known" not in out


def test_what_weights_and_saved_tensors_have_may_be_given(own, capsys):
    words = [f"{own}:build", "--batch", "64", "--machine", "cpu", *FLASH]
    each = 2 << 20  # bytes of one weight; its bias stays in memory

    def bytes_with(weights):
        step = told(capsys, *words, "--weights-memory", weights, "--saved-memory", "64MiB")["step"]
        assert step["memory"]["saved"] == 64 << 20
        needed[weights] = step["least_bytes"]
        return step["moved"]["weights_read"], step["moved"]["weights_written"]

    needed = {}
    # two stay where forward turns to backward, and two for the next step
    assert bytes_with("4MiB") == (4 * each, 4 * each)
    assert bytes_with("7MiB") == (2 * each, 2 * each)
    assert bytes_with("8MiB") == (0, 0)
    assert bytes_with("1GiB") == (0, 0)
    assert needed["1GiB"] == needed["8MiB"]  # what is not used is not needed
    message = refused(capsys, 1, *words, "--weights-memory", "3MiB")
    assert f"the two longest need {2 * each} bytes" in message
    message = refused(capsys, 1, *words, "--saved-memory", "1")
    assert "within 1 B; give them more" in message


def test_too_little_memory_is_refused_with_the_least(capsys):
    words = [*TINY, "--batch", "2", *FLASH]
    least = told(capsys, *words)["step"]["least_bytes"]
    message = refused(capsys, 1, *words, "--memory", least - 1)
    assert f"it needs {least} bytes" in message
    assert told(capsys, *words, "--memory", least)["step"]["memory"]["total"] == least


def test_too_little_flash_is_refused_with_the_largest_model(capsys):
    message = refused(capsys, 1, *TINY, "--batch", "2", *FLASH, "--flash-memory", "1MiB")
    assert "1048576 are free; the largest model of this kind that fits has" in message


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--batch", "2", "--weights", "flash", "--device-memory", "1GiB"], "use --memory"),
        (["--batch", "2", "--weights-memory", "1GiB"], "--weights-memory needs --weights flash"),
        (["--batch", "2", "--ranks", "2", "--saved-memory", "1GiB"], "needs --weights flash"),
        (["--batch", "2", "--weights", "flash", "--policy", "all"], "name one policy"),
        (
            ["--batch", "2", "--weights", "host", "--policy", "all"],
            "--policy all does not go with --weights host; name one policy",
        ),
        (
            ["--batch", "2", "--ranks", "2", "--device-memory", "1GiB"],
            "--device-memory does not go with --ranks: use --memory",
        ),
        (["--batch", "2", "--weights", "flash", "--save-plan", "a.json"], "no weights yet"),
        (["--weights", "flash"], "neither is given"),
        (["--batch", "2", "--tokens", "64", "--weights", "flash"], "both are given"),
        (["--batch", "0", "--weights", "flash"], "--batch is 0"),
        (["--tokens", "0", "--weights", "flash"], "--tokens is 0"),
        (["--batch", "2", "--weights", "host"], "--weights host is for a GPU"),
        (["--batch", "2", "--memory", "1GiB"], "--memory needs --weights flash"),
        (["--batch", "2", "--format", "int8"], "--format needs --weights flash"),
        (["--batch", "2", "--forward-only"], "--forward-only needs --weights flash"),
        (["--tokens", "64"], "--tokens needs --weights flash"),
        (["--batch", "2", "--update", "step"], "--update needs --weights flash"),
        (["--batch", "2", "--ranks", "2", "--update", "step"], "--update is for one process"),
        (["--batch", "2", "--ranks", "2", "--accumulate", "2"], "--accumulate is for one process"),
        (["--batch", "2", "--clip"], "--clip needs --weights flash"),
        (["--batch", "2", *FLASH, "--clip", "--update", "backward"], "--clip does not go with"),
        (["--batch", "2", *FLASH, "--parts", "0"], "--parts is 0; it must be 1 or more"),
        (
            ["--batch", "2", *FLASH, "--forward-only", "--gradient-memory", "0B"],
            "--gradient-memory does not go with --forward-only",
        ),
        (["--batch", "2", "--nodes", "2"], "--nodes needs --ranks"),
        (["--batch", "2", *FLASH, "--peer-rate", "1GB/s"], "--peer-rate needs --ranks"),
        (["--batch", "2", "--ranks", "8", "--nodes", "3"], "among 3 nodes"),
        (["--batch", "2", "--ranks", "8", "--network-rate", "9"], "--network-rate: '9'"),
        (["--batch", "2", "--ranks", "8", "--plot", "a.svg"], "no plot of a whole step"),
        ([*FLASH, "--batch", "2", "--format", "split"], "split"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys, words, match):
    assert match in refused(capsys, 2, *TINY, *words)


GPU = [*TINY[:-1], "h200", "--batch", "2", "--optimizer", "adam", "--weights-memory", "8MiB"]


def test_on_a_gpu_weights_rest_in_host_memory(capsys):
    """All of them, or as many as fit in what is given; else none, and each machine has much of it."""

    def planned(*words):
        step = told(capsys, *GPU, *words)["step"]
        moved = step["moved"]
        return step["host_weight_bytes"], moved["host_read"], moved["weights_read"], step

    everything, linked, flashed, step = planned("--weights", "host")
    assert linked > 0 == flashed
    least = planned("--weights", "flash")
    assert least[:3] == (0, 0, linked)
    assert step["disk_bytes"] <= least[3]["disk_bytes"] - everything
    part, *both, _ = planned("--weights", "flash", "--host-memory", everything // 2)
    assert 0 < part <= everything // 2
    assert min(both) > 0
    assert sum(both) == linked
    message = refused(capsys, 1, *GPU, "--weights", "host", "--host-memory", everything // 2)
    assert f"weights take {everything} bytes" in message
    assert main(["plan", *GPU, "--weights", "host"]) == 0
    told_so = " ".join(capsys.readouterr().out.split())
    assert "of weights in host memory" in told_so
    assert "weights, of host memory" in told_so


def test_images_have_no_tokens_and_a_profile_has_no_weights(capsys, tmp_path):
    images = ["alexnet", "--set", "size=tiny", "--machine", "cpu", "--weights", "flash"]
    assert "give --batch" in refused(capsys, 2, *images, "--tokens", "64")
    path = tmp_path / "step.json"
    from penstock.plan import Profile

    path.write_text(Profile("cpu", (), ()).to_json())
    message = refused(capsys, 2, path, "--machine", "cpu", "--weights", "flash", "--batch", "1")
    assert "does not say what the weights are" in message


def test_the_step_has_the_update_that_the_machine_was_measured_with(tmp_path):
    machine = replace(Machine.preset("cpu"), update_int8_s=1e-6, update_exact_s=2e-6)
    path = tmp_path / "here.toml"
    path.write_text(machine.to_toml())
    assert Machine.load(path) == machine

    def updates(*words):
        every = [*TINY[:-1], path, "--batch", "2", "--weights", "flash", "--optimizer", *words]
        request = plan_step.check_step(plan.parser().parse_args([str(word) for word in every]))
        return sum(one.update_ns for one in request.weights) / sum(
            one.trained for one in request.weights
        )

    assert updates("adam", "--format", "int8") == pytest.approx(1000)
    assert updates("adam") == pytest.approx(2000)
    assert updates("adam", "--format", "bf16") == 0  # not known
    assert updates("momentum") == 0


def test_records_are_those_of_the_optimizer():
    assert formats.FORMATS == FORMATS
    tile = 1 << 20
    for dtype, form, each in (
        ("float32", "exact", 8),
        ("float32", "int8", 2 + 2 / 256),
        ("bfloat16", "exact", 12),
        ("bfloat16", "split", 10.125),
        ("bfloat16", "bf16", 6),
        ("bfloat16", "int8", 4 + 2 / 256),
    ):
        assert record_bytes("adam", form)(4 * tile, dtype) == pytest.approx(
            4 * tile * each, rel=1e-3
        )
    assert record_bytes("adam", "exact")(1, "float32") == 4096
    assert record_bytes("sgd", "exact")(tile, "float32") == 0
    assert record_bytes("momentum", "exact")(tile, "float32") == 4 * tile


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        *(("bfloat16", form) for form in FORMATS),
        *(("float32", form) for form in FORMATS if form != "split"),
        ("float16", "exact"),
    ],
)
def test_records_of_a_script_are_those_that_its_optimizer_gets_in_a_run(dtype, form, disk_path):
    weights = nn.Parameter(torch.zeros(3000, dtype=getattr(torch, dtype)))
    optimizer = on_flash(torch.optim.AdamW([weights]), flash=disk_path, format=form)
    found = sum(tile.record_bytes for tile in optimizer._penstock.tiles)
    optimizer.close()
    assert found == record_bytes("adam", form, with_master=False)(3000, dtype)
