"""Lightning and Hugging Face's Trainer train from flash, and go on where they stopped."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from penstock.data import FlashDataset, FlashLoader, Order
from penstock.data.order import BatchNumbers, Share

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
SAMPLES, BATCH, STEPS = 200, 16, 20


@pytest.fixture
def path(disk_path):
    array = np.random.default_rng(0).random((SAMPLES, 16), np.float32)
    array[:, 0] = np.arange(SAMPLES)
    np.save(disk_path / "rows.npy", array)
    return disk_path / "rows.npy"


def numbers(batch):
    return batch[:, 0].int().tolist()


def once_each_epoch(seen):
    """Two epochs, each sample once in each."""
    half = len(seen) // 2
    parts = [
        sorted(number for batch in part for number in batch) for part in (seen[:half], seen[half:])
    ]
    return parts == [list(range(SAMPLES))] * 2 and seen[0] != seen[half]


def test_a_batch_sampler_has_the_batches_of_the_loader(path):
    order = Order(kind="window", chunk_samples=4, window_chunks=12, seed=5)
    with FlashLoader(FlashDataset(path, memory="1MiB"), BATCH, order=order) as loader:
        for epoch in (0, 3):
            loader.set_epoch(epoch)
            by_number = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
            assert len(by_number) == len(loader)
            found = [numbers(batch) for batch in by_number]
            assert found == [numbers(batch) for batch in loader]
    few = BatchNumbers(Order(), Share(batch_size=4, rank=2, world=3), 13)
    assert [len(each) for each in few] == [4, 1]
    assert len(BatchNumbers(Order(), Share(batch_size=4, rank=0, world=3), 13)) == 2


# -- Lightning ------------------------------------------------------------------------------------


def of_lightning(data, disk_path, *, save=None, resume=None, **settings):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(16, 1), []

        def training_step(self, batch, _):
            self.seen.append(numbers(batch))
            return self.layer(batch / SAMPLES).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        enable_checkpointing=False,
        default_root_dir=disk_path,
        **quiet,
        **settings,
    )
    module = Module()
    trainer.fit(module, data, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.seen


def loader_of(path, **settings):
    return FlashLoader(FlashDataset(path, memory="1MiB", **settings), BATCH, order="full", seed=1)


def test_lightning_over_torchs_loader(path, disk_path):
    data = DataLoader(FlashDataset(path, memory="1MiB"), batch_size=BATCH, shuffle=True)
    assert once_each_epoch(of_lightning(data, disk_path, max_epochs=2))


def test_lightning_over_ours(path, disk_path):
    """Its checkpoints have the loader's state: what is resumed mid-epoch goes on at the exact sample."""
    with loader_of(path) as loader:
        assert once_each_epoch(of_lightning(loader, disk_path, max_epochs=2))
    with loader_of(path) as loader:
        whole = of_lightning(loader, disk_path, max_steps=STEPS)
    saved = disk_path / "seven.ckpt"
    with loader_of(path) as loader:
        assert of_lightning(loader, disk_path, max_steps=7, save=saved) == whole[:7]
    with loader_of(path) as loader:
        assert of_lightning(loader, disk_path, max_steps=STEPS, resume=saved) == whole[7:]


# -- Hugging Face's Trainer -----------------------------------------------------------------------


def as_dict(sample):
    return {"rows": np.frombuffer(sample.data, np.float32).copy()}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.seen = torch.nn.Linear(16, 1), []

    def forward(self, rows):
        self.seen.append(numbers(rows))
        return {"loss": self.layer(rows / SAMPLES).square().mean()}


def of_trainer(data, disk_path, *, resume=None, save_steps=500, **settings):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(disk_path / "run"),
        per_device_train_batch_size=BATCH,
        save_strategy="steps",
        save_steps=save_steps,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    ours = isinstance(data, FlashLoader)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return data if ours else super().get_train_dataloader()

    net = Net()
    trainer = Trainer(model=net, args=arguments, train_dataset=None if ours else data)
    trainer.train(resume_from_checkpoint=resume)
    return net.seen


@pytest.mark.parametrize("workers", [0, 2])
def test_trainer_over_a_data_set(path, disk_path, workers):
    dataset = FlashDataset(path, memory="1MiB", decode=as_dict)
    seen = of_trainer(dataset, disk_path, num_train_epochs=2, dataloader_num_workers=workers)
    assert once_each_epoch(seen)


def test_trainer_over_our_loader(path, disk_path):
    with loader_of(path, decode=as_dict) as loader:
        assert once_each_epoch(of_trainer(loader, disk_path, num_train_epochs=2))
        whole = of_trainer(loader, disk_path, max_steps=STEPS, save_steps=7)
    at = str(disk_path / "run" / "checkpoint-7")
    with loader_of(path, decode=as_dict) as loader:
        assert of_trainer(loader, disk_path, max_steps=STEPS, resume=at) == whole[7:]
