"""``penstock plan --from-deepspeed``: every key is said; the code and the command that it prints work."""

import json

import pytest

import preloaded
from penstock.cli import main
from penstock.cli.deepspeed_config import translate
from penstock.cli.deepspeed_keys import KEYS, KINDS, SECTIONS

INFINITY = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-7}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "", "buffer_size": 1e8},
        "stage3_max_live_parameters": 1000000,
    },
    "aio": {"block_size": 262144},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
}
PRELUDE = """
import warnings

import torch

warnings.filterwarnings("ignore", ".*on flash takes more memory than in memory")  # so small a model
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model, optimizer):
    torch.manual_seed(1)
    for inputs in torch.randn(3, 8, 512):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


"""
TWIN = """
found = [weight.detach().clone() for weight in model.parameters()]
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
train(model, {0})
assert all(map(torch.equal, found, model.parameters()))
"""
ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-2, {}, fused=True)"


def written(folder, configuration, name="ds.json"):
    file = folder / name
    text = configuration if isinstance(configuration, str) else json.dumps(configuration)
    file.write_text(text)
    return file


def told(capsys, file):
    assert main(["plan", "--from-deepspeed", str(file), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shown(capsys, file):
    assert main(["plan", "--from-deepspeed", str(file)]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert main(["plan", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1].removeprefix("penstock: error: ")


def on_flash(path, configuration):
    """The configuration with its directories there."""
    text = json.dumps(configuration)
    return json.loads(text.replace('"nvme_path": ""', f'"nvme_path": {json.dumps(str(path))}'))


def rows(document):
    return {row["key"]: row for row in document["keys"]}


def test_each_key_is_said_and_what_is_unknown_too(tmp_path, capsys):
    configuration = on_flash(tmp_path, INFINITY) | {"my_own": [1], "zero.stage": 2}
    configuration["zero_optimization"]["stage3_prefetch"] = 7
    file = written(tmp_path, configuration)
    document = told(capsys, file)
    found = rows(document)
    assert found["zero_optimization.offload_param.device"]["text"] == "weights='flash'"
    assert found["zero_optimization.stage3_max_live_parameters"]["text"] == "weights_memory='4MB'"
    assert found["optimizer.params.betas"] == {
        "key": "optimizer.params.betas",
        "value": [0.9, 0.95],
        "counterpart": "optimizer",
        "text": "betas=(0.9, 0.95)",
    }
    unknown = {key for key, row in found.items() if row["counterpart"] == "unknown"}
    assert unknown == {"my_own", '"zero.stage"', "zero_optimization.stage3_prefetch"}
    assert any("my_own" in note and "stage3_prefetch" in note for note in document["notes"])
    text = shown(capsys, file)
    for line in ("  offload_param", "    buffer_size ", "my_own ", '"zero.stage" ', "unknown: "):
        assert line in text
    assert document["code"] in text


def test_code_with_a_long_path_is_not_wrapped(tmp_path, capsys):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    file = written(tmp_path, on_flash(folder, INFINITY))
    document = told(capsys, file)
    text = shown(capsys, file)
    assert str(folder) in document["code"]
    assert document["code"] in text


def test_every_known_key_has_an_answer(tmp_path):
    """Of every value that it may have, and beside ``auto``."""
    values = {
        "flag": [True, False, "auto"],
        "numbers": [[0.5, 0.9], "auto"],
        "count": [0, 3, 1e8, "auto"],
        "number": [0, 0.5, "auto"],
        "text": ["AdamW", "auto"],
        "object": [{}],
        "list": [[]],
        "any": [None],
    }
    assert values.keys() == KINDS.keys()
    for key, known in KEYS.items():
        if key in SECTIONS:
            continue
        for value in known.kind if isinstance(known.kind, tuple) else values[known.kind]:
            configuration = {}
            inner = configuration
            *sections, name = key.split(".")
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
            if value == "nvme":
                inner["nvme_path"] = "/nvme"
            found = translate(str(written(tmp_path, configuration))).keys
            (row,) = (each for each in found if each.key == key)
            assert row.value == value
            assert row.text
            if sections[:2] != ["optimizer", "params"]:  # those that its class does not have
                assert row.counterpart != "unknown"


def test_both_names_of_a_key_are_known(tmp_path, capsys):
    configuration = json.loads(json.dumps(on_flash(tmp_path, INFINITY)).replace("stage3_", ""))
    found = rows(told(capsys, written(tmp_path, configuration | {"bfloat16": {"enabled": True}})))
    assert found["zero_optimization.max_live_parameters"]["text"] == "weights_memory='2MB'"
    assert "torch.bfloat16" in found["bfloat16.enabled"]["text"]


def test_nothing_is_said_twice_or_dropped(tmp_path, capsys):
    def leaves(value, prefix=""):
        for name, each in value.items():
            if isinstance(each, dict):
                yield from leaves(each, f"{prefix}{name}.")
            else:
                yield prefix + name

    configuration = on_flash(tmp_path, INFINITY)
    document = told(capsys, written(tmp_path, configuration))
    assert [row["key"] for row in document["keys"]] == list(leaves(configuration))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "ds.json: is not JSON: Expecting property name"),
        ("[]", "ds.json: is a list; a configuration is an object in JSON"),
        ('{"bf16": {}, "bf16": {}}', "the key 'bf16' is there twice"),
        ('{"gradient_clipping": NaN}', "NaN is no number in JSON"),
        ('{"gradient_clipping": 1e999}', "1e999 is too large"),
        ('{"gradient_clipping": "1.0"}', "gradient_clipping is the string '1.0'; it must be a number"),
        ('{"train_batch_size": 1.5}', "train_batch_size is 1.5; it must be a whole number, 0 or more"),
        ('{"train_batch_size": true}', "train_batch_size is true; it must be a whole number"),
        ('{"bf16": true}', "ds.json: bf16 is true; it must be an object"),
        ('{"bf16": "auto"}', "ds.json: bf16 is the string 'auto'; it must be an object"),
        ('{"bf16": {"enabled": 1}}', "bf16.enabled is 1; it must be true or false"),
        ('{"zero_optimization": {"stage": 4}}', "stage is 4; it must be one of 0, 1, 2, 3"),
        ('{"zero_optimization": {"stage": true}}', "stage is true; it must be one of"),
        (
            '{"zero_optimization": {"offload_optimizer": {"device": "disk"}}}',
            "zero_optimization.offload_optimizer.device is the string 'disk'; it must be one of none,",
        ),
        (
            '{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}',
            "zero_optimization.offload_optimizer.nvme_path is missing",
        ),
        ('{"optimizer": {"params": {"lr": "1e-3"}}}', "optimizer.params.lr is the string '1e-3'"),
    ],
)  # fmt: skip
def test_what_is_no_configuration_is_refused_with_file_and_key(tmp_path, capsys, text, error):
    file = written(tmp_path, text)
    message = refused(capsys, "--from-deepspeed", file)
    assert error in message
    assert str(file) in message


def test_other_options_and_missing_ones_are_refused(tmp_path, capsys):
    file = written(tmp_path, {})
    assert "no --batch" in refused(capsys, "--from-deepspeed", file, "--batch", 2)
    assert "no NETWORK" in refused(capsys, "gpt2", "--from-deepspeed", file)
    assert "cannot be read" in refused(capsys, "--from-deepspeed", tmp_path / "none.json")
    assert "--machine is missing" in refused(capsys, "gpt2", "--batch", 2)


def offloaded(device, **others):
    where = {"device": device, **({"nvme_path": ""} if device == "nvme" else {})}
    return {"zero_optimization": {"stage": 2, "offload_optimizer": where}, **others}


@pytest.mark.parametrize(
    ("configuration", "optimizer"),
    [
        (INFINITY, ADAMW.format("betas=(0.9, 0.95), eps=1e-7, weight_decay=0.0")),
        (offloaded("nvme"), ADAMW.format("weight_decay=1e-2")),
        (
            offloaded("nvme", optimizer={"type": "RAdam", "params": {"lr": 1e-2}}),
            "torch.optim.RAdam(model.parameters(), lr=1e-2)",
        ),
        (
            offloaded("none", optimizer={"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.5}}),
            "torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5)",
        ),
        ({}, ADAMW.format("weight_decay=1e-2")),
    ],
)
def test_the_code_trains_to_the_bits_of_torch(disk_path, capsys, configuration, optimizer):
    code = told(capsys, written(disk_path, on_flash(disk_path, configuration)))["code"]
    code = code.replace("/nvme/spill", str(disk_path))
    program = disk_path / "program.py"
    program.write_text(PRELUDE + code + TWIN.format(optimizer))
    done = preloaded.run(["-W", "error", program], cwd=disk_path)
    assert done.returncode == 0, f"{done.stderr}\n{code}"


@pytest.mark.parametrize(
    ("configuration", "line"),
    [
        ({"bf16": {"enabled": True}, "gradient_clipping": 0.5}, "clip_norm=0.5"),
        ({"bf16": {"enabled": True}}, "master=True"),
        ({"optimizer": {"type": "Lion"}}, "    lr=0.001,\n    flash="),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "FlashAdam("),
        (
            {
                "bf16": {
                    "enabled": True,
                    "bf16_master_weights_and_grads": True,
                    "bf16_optimizer_states": True,
                },
                "optimizer": {"type": "AdamW"},
            },
            "format='bf16'",
        ),
        (
            {
                "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
                "optimizer": {"type": "AdamW"},
            },
            "master=False",
        ),
    ],
)
def test_the_code_runs_with_weights_of_sixteen_bits(disk_path, capsys, configuration, line):
    file = written(disk_path, on_flash(disk_path, offloaded("nvme", **configuration)))
    code = told(capsys, file)["code"]
    assert line in code
    half = PRELUDE.replace("optimizer =", "model.bfloat16()\noptimizer =", 1)
    half = half.replace("model(inputs)", "model(inputs.bfloat16())")
    program = disk_path / "program.py"
    program.write_text(half + code + "\nassert model[0].weight.isfinite().all()\n")
    done = preloaded.run(["-W", "error", program], cwd=disk_path)
    assert done.returncode == 0, f"{done.stderr}\n{code}"


def test_the_command_trains_with_weights_and_states_on_flash(disk_path, capsys):
    document = told(capsys, written(disk_path, on_flash(disk_path, INFINITY)))
    assert document["command_on_ranks"] is None
    (disk_path / "train.py").write_text(PRELUDE + "train(model, optimizer)\n")
    words = document["command"].split()
    assert words[0] == "penstock"
    done = preloaded.run([preloaded.PENSTOCK_COMMAND, *words[1:]], cwd=disk_path, bare=True)
    assert done.returncode == 0, done.stderr
    assert "weights" in done.stderr
    assert "optimizer" in done.stderr


def test_states_on_the_host_and_ranks(tmp_path, capsys):
    document = told(capsys, written(tmp_path, offloaded("cpu", optimizer={"type": "AdamW"})))
    launched = "torchrun --nproc-per-node gpu --no-python penstock run "
    assert document["command_on_ranks"].startswith(launched)
    assert document["command_on_ranks"].endswith(document["command"])
    assert "--optimizer-state flash" in document["command"]
    assert any("/nvme/spill stands for yours" in note for note in document["notes"])
    assert (
        "host_memory=SIZE" in rows(document)["zero_optimization.offload_optimizer.device"]["text"]
    )
    assert "reshard_after_forward=False" in rows(document)["zero_optimization.stage"]["text"]


def test_nothing_is_offloaded_at_a_stage_at_which_deepspeed_does_not(tmp_path, capsys):
    configuration = on_flash(tmp_path, INFINITY)
    configuration["zero_optimization"]["stage"] = 0
    document = told(capsys, written(tmp_path, configuration))
    for part, stages in (("optimizer", "1 to 3"), ("param", "3 only")):
        row = rows(document)[f"zero_optimization.offload_{part}.device"]
        assert row["counterpart"] == "none"
        assert stages in row["text"]
    assert "Flash" not in document["code"]
    assert "weights" not in document["command"]


def test_two_directories_are_both_named(tmp_path, capsys):
    configuration = on_flash(tmp_path, INFINITY)
    configuration["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/second/one"
    document = told(capsys, written(tmp_path, configuration))
    assert "flash='/second/one'" in document["code"]
    assert f"flash='{tmp_path}'" in document["code"]
    assert any("--flash /second/one" in note for note in document["notes"])


def test_an_optimizer_that_is_not_element_wise_stays(tmp_path, capsys):
    document = told(capsys, written(tmp_path, offloaded("cpu", optimizer={"type": "Lamb"})))
    device = rows(document)["zero_optimization.offload_optimizer.device"]
    assert device["counterpart"] == "none"
    assert "not element-wise" in device["text"]
    assert "--optimizer-state" not in document["command"]
    assert "Lamb" not in document["code"]
