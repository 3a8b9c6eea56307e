"""Recipes for hosts: adapters, TRL, launchers, loggers. Each trains to the same bits without Penstock.

``make test-hosts`` installs the hosts; without them these tests are skipped.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penstock
from host_runs import needs, same, weights_of
from penstock.cli.deepspeed_config import translate
from penstock.core.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"flash_capacity": "1GiB", "floor": "16KiB", "policy": "all"}
LETTERS = "abcdefghijklmnopqrstuvwxyz "

pytestmark = pytest.mark.filterwarnings("default")  # of the hosts' own


def test_adapters_train_over_frozen_weights_on_flash(disk_path, monkeypatch, capsys, one_thread):
    needs("peft", "transformers")

    def printed():
        runpy.run_path(str(EXAMPLES / "peft_lora.py"), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    monkeypatch.setattr(sys, "argv", ["peft_lora.py", "--steps", "3", "--batch", "1"])
    without = printed()
    assert without[-1].startswith("sha256 of the adapters: ")
    with penstock.offload(
        weights="flash",
        weights_memory="6MiB",
        flash=disk_path,
        flash_capacity="1GiB",
        floor="256KiB",
    ) as session:
        assert printed() == without
    summary = session.summary()
    assert summary.steps == 3
    assert summary.ssd_written_bytes > 0
    assert "rest on flash" in str(summary)
    assert not any(disk_path.iterdir())


def sft(path, *callbacks, **changes):
    """Train a tiny Llama by TRL on words of one letter, by a tokenizer that is made here."""
    trl, transformers, datasets = (needs(name) for name in ("trl", "transformers", "datasets"))
    tokenizers = needs("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<end>", *LETTERS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>"
    )
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=1,
        )
    )
    texts = [LETTERS[number:] + LETTERS[:number] for number in range(16)]
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(
            str(path / "out"),
            max_steps=3,
            max_length=32,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    for name, value in changes.items():  # later: offloading of TRL's own needs an accelerator
        setattr(trainer.args, name, value)
    trainer.train()
    return weights_of(model), trainer.state.log_history


def test_a_trainer_of_trl_trains_to_the_same_bits(patient, disk_path, monkeypatch):
    needs("trl", "transformers")
    from penstock.hosts.transformers import TrainerOffload

    monkeypatch.setenv("HF_HOME", str(disk_path / "hub"))
    expected, _ = sft(disk_path)
    offloading = TrainerOffload(flash=str(disk_path), **SMALL)
    found, history = sft(disk_path, offloading)
    assert same(found, expected)
    assert offloading.summary.steps == 3
    logged = [each for each in history if "loss" in each]
    assert all(each["penstock/flash_written_bytes"] > 0 for each in logged[1:])


def test_offloading_of_trls_own_is_refused_beside_the_callback(disk_path):
    needs("trl", "transformers")
    from penstock.hosts.transformers import TrainerOffload

    offloading = TrainerOffload(flash=str(disk_path), **SMALL)
    with pytest.raises(ConfigError, match="activation_offloading"):
        sft(disk_path, offloading, activation_offloading=True)
    assert offloading.session is None


LAUNCHED = """
import hashlib
import accelerate
import torch

accelerator = accelerate.Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for inputs in torch.randn(3, 256, 256):
    accelerator.backward(model(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("sha256", hashlib.sha256(weights).hexdigest())
"""


def test_the_launcher_of_accelerate_starts_penstock(disk_path):
    needs("accelerate")
    script = disk_path / "train.py"
    script.write_text(LAUNCHED)
    launcher = Path(sys.executable).with_name("accelerate")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(disk_path / "hub"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def launched(*words):
        done = subprocess.run(
            [launcher, "launch", "--cpu", "--num_processes", "1", *words],
            cwd=disk_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    limits = ("--policy", "all", "--flash", ".", "--floor", "64KiB")
    ours = ("--no_python", sys.executable, "-m", "penstock", "run", *limits, "train.py")
    without = launched("train.py").splitlines()
    within = launched(*ours)
    assert next(line for line in without if line.startswith("sha256 ")) in within.splitlines()
    assert "3 optimizer steps" in within


def scalars(folder):
    """The scalars of a folder of TensorBoard's, by name, each with its values."""
    (accumulator,) = [needs("tensorboard.backend.event_processing.event_accumulator")]
    found = accumulator.EventAccumulator(str(folder)).Reload()
    return {
        name: [event.value for event in found.Scalars(name)] for name in found.Tags()["scalars"]
    }


def test_metrics_reach_tensorboard_from_a_loop(patient, disk_path):
    needs("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        SummaryWriter(disk_path / "events") as writer,
        penstock.offload(model, optimizer, flash=disk_path, **SMALL) as session,
    ):
        for step, inputs in enumerate(torch.randn(3, 128, 256)):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            last = session.metrics()
            for name, value in last.items():
                writer.add_scalar(name, value, step)
    found = scalars(disk_path / "events")
    assert found.keys() == last.keys()
    for name, values in found.items():
        assert len(values) == 3
        assert values[-1] == pytest.approx(last[name])
    assert found["penstock/flash_written_bytes"][-1] > 0


def test_metrics_reach_tensorboard_from_a_trainer(patient, disk_path):
    """By a callback that comes after Penstock's, as the manual has it."""
    transformers = needs("transformers", "tensorboard")
    from penstock.hosts.transformers import TrainerOffload

    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    ids = torch.randint(0, 64, (32, 32))
    arguments = transformers.TrainingArguments(
        str(disk_path / "out"),
        max_steps=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    writer = SummaryWriter(disk_path / "events")
    offloading = TrainerOffload(flash=str(disk_path), **SMALL)
    transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        arguments,
        train_dataset=[{"input_ids": each, "labels": each} for each in ids],
        callbacks=[offloading, TensorBoardCallback(writer)],
    ).train()
    writer.close()
    found = scalars(disk_path / "events")
    (name,) = (each for each in found if each.endswith("penstock/flash_written_bytes"))
    assert found[name][-1] > 0


def test_the_code_for_a_deepspeed_configuration_of_a_trainer_runs(disk_path):
    transformers = needs("transformers")
    configuration = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(disk_path)},
            "offload_param": {"device": "nvme", "nvme_path": str(disk_path)},
            "stage3_max_live_parameters": 1000000,
        },
    }
    file = disk_path / "ds.json"
    file.write_text(json.dumps(configuration))
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    ids = torch.randint(0, 64, (32, 32))

    def trained(code):
        transformers.set_seed(0)
        names = {
            "model": transformers.GPT2LMHeadModel(config),
            "args": transformers.TrainingArguments(
                str(disk_path / "out"),
                max_steps=3,
                learning_rate=1e-2,
                max_grad_norm=0.0,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            ),
            "dataset": [{"input_ids": each, "labels": each} for each in ids],
        }
        exec(code, names)
        return weights_of(names["model"])

    plain = """
import torch
from transformers import Trainer

optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0, fused=True)
Trainer(model, args, train_dataset=dataset, optimizers=(optimizer, None)).train()
"""
    assert same(trained(translate(str(file)).code), trained(plain))
