"""Callbacks of hosts: the manual's examples run, and training has the bits that it has without them.

``make test-hosts`` installs the hosts; without them these tests are skipped.
"""

import contextlib
import re
from pathlib import Path

import pytest
import torch

import penstock
import preloaded
from host_runs import needs, same, weights_of
from penstock.core.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
BLOCK = re.compile(r"^```python [^\n`]*hosts\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = {"flash_capacity": "1GiB", "floor": "16KiB", "device_memory": "256KiB"}

pytestmark = pytest.mark.filterwarnings("default")  # of the hosts' own


@pytest.mark.parametrize(
    ("host", "number"), [("transformers", 0), ("lightning.pytorch", 1), ("accelerate", 2)]
)
def test_the_manuals_examples_run(host, number, disk_path):
    needs(host)
    program = disk_path / "example.py"
    program.write_text(BLOCK.findall(PAGE.read_text())[number])
    done = preloaded.run([program], cwd=disk_path)
    assert done.returncode == 0, done.stderr


def train_by_trainer(path, *callbacks, **arguments):
    transformers = needs("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 128, (32, 32))
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(path / "out"),
            max_steps=3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": each, "labels": each} for each in ids],
        callbacks=list(callbacks),
    )
    for name, value in arguments.items():
        setattr(trainer.args, name, value)
    trainer.train()
    return weights_of(model), trainer.state.log_history


def test_a_trainer_trains_to_the_same_bits_and_logs_what_was_moved(patient, disk_path):
    needs("transformers")
    from penstock.hosts.transformers import TrainerOffload

    expected, _ = train_by_trainer(disk_path)
    settings = SMALL | {"device_memory": "4MiB"}
    offloading = TrainerOffload(flash=str(disk_path), **settings)
    found, history = train_by_trainer(disk_path, offloading)
    assert same(found, expected)
    assert offloading.session is None
    assert offloading.summary.steps == 3
    logged = [each for each in history if "loss" in each]
    assert len(logged) == 3
    assert all(each["penstock/flash_written_bytes"] > 0 for each in logged[1:])


def test_a_trainer_that_offloads_by_itself_is_refused(disk_path):
    needs("transformers")
    from penstock.hosts.transformers import TrainerOffload

    with pytest.raises(ConfigError, match="activation_offloading"):
        train_by_trainer(
            disk_path, TrainerOffload(flash=str(disk_path), **SMALL), activation_offloading=True
        )


def fit(path, *, callbacks=(), plugins=(), fail_at=None, epochs=1, resume=None):
    pl = needs("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            layers = [
                layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())
            ]
            self.layers = torch.nn.Sequential(*layers)

        def training_step(self, batch, number):
            if number == fail_at:
                raise RuntimeError("as the test wants")
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    torch.manual_seed(0)
    module = Module()
    inputs = torch.utils.data.TensorDataset(torch.randn(1024, 64))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(path),
        callbacks=list(callbacks),
        plugins=list(plugins),
    )
    trainer.fit(module, torch.utils.data.DataLoader(inputs, batch_size=256), ckpt_path=resume)
    return weights_of(module), trainer


def test_lightning_trains_to_the_same_bits_and_logs_what_was_moved(patient, disk_path):
    needs("lightning.pytorch")
    from penstock.hosts.lightning import LightningOffload

    expected, _ = fit(disk_path)
    offloading = LightningOffload(flash=str(disk_path), **SMALL)
    found, trainer = fit(disk_path, callbacks=[offloading])
    assert same(found, expected)
    assert offloading.session is None
    assert offloading.summary.steps == 4
    assert trainer.logged_metrics["penstock/flash_written_bytes"] > 0


def test_an_error_under_lightning_closes_the_session(disk_path):
    needs("lightning.pytorch")
    from penstock.hosts.lightning import LightningOffload

    offloading = LightningOffload(flash=str(disk_path), **SMALL)
    with pytest.raises(RuntimeError, match="as the test wants"):
        fit(disk_path, callbacks=[offloading], fail_at=2)
    assert offloading.session is None
    assert offloading.summary.steps == 2


def test_lightning_goes_on_from_a_checkpoint_to_the_same_bits(disk_path):
    needs("lightning.pytorch")
    from penstock.hosts.lightning import LightningCheckpoints

    expected, _ = fit(disk_path / "whole", epochs=2)
    _, trainer = fit(disk_path / "first", plugins=[LightningCheckpoints()])
    saved = trainer.checkpoint_callback.best_model_path
    assert Path(saved).is_dir()
    found, _ = fit(disk_path / "rest", plugins=[LightningCheckpoints()], epochs=2, resume=saved)
    assert same(found, expected)


def test_a_tied_model_that_accelerate_has_offloaded_is_trained(disk_path):
    """Its head is its embedding, which accelerate's disk offload unties."""
    transformers, accelerate = needs("transformers"), needs("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    settings, found = SMALL | {"device_memory": "1MiB"}, []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        with contextlib.ExitStack() as stack:
            if is_offloaded:
                folder = str(disk_path / "offloaded")
                accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
                stack.enter_context(
                    penstock.offload(
                        model,
                        weights="flash",
                        weights_memory="96KiB",
                        flash=str(disk_path),
                        **settings,
                    )
                )
            assert model.lm_head.weight is model.model.embed_tokens.weight
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(weights_of(model))
    assert same(*found)
