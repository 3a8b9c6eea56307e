"""The position in the data belongs to a checkpoint: a resumed run goes on at the exact sample."""

import numpy as np
import pytest
import torch
from data_runs import numbers

from penstock.checkpoint import Checkpointer, load, training_state
from penstock.core.errors import ConfigError
from penstock.data import FlashDataset, FlashLoader, Order

WINDOW = Order(kind="window", chunk_samples=4, window_chunks=8, seed=3)
STEPS = 32  # an epoch has 25


def parts(path, seed, order):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    )
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "data": FlashLoader(FlashDataset(path, memory="1MiB"), 8, order=order, seed=seed),
    }


def run(found, first, save=None):
    """(samples, loss) of each step."""
    done = []
    while first + len(done) < STEPS:
        for batch in found["data"]:
            found["optimizer"].zero_grad()
            loss = found["model"](batch.float() / 255).square().mean()
            loss.backward()
            found["optimizer"].step()
            done.append((numbers(batch), loss.item()))
            step = first + len(done)
            if save is not None:
                save(step, training_state(**found, step=step))
            if step == STEPS:
                break
    return done


@pytest.mark.parametrize("order", ["full", WINDOW], ids=["full", "window"])
def test_a_run_that_is_resumed_mid_epoch_is_the_one_that_never_stopped(rows, disk_path, order):
    """Bit for bit, whatever the resumed loader was before."""
    path, _ = rows(200, 64)
    whole = parts(path, 0, order)
    with Checkpointer(disk_path / "run", keep=STEPS) as ours:
        done = run(whole, 0, lambda step, made: ours.save(step, made, wait=False))
    for step in (3, 25, 29):
        resumed = parts(path, 99, "sequential")
        next(iter(resumed["data"]))
        with Checkpointer(disk_path / "run", keep=STEPS) as ours:
            assert ours.load(training_state(**resumed), step=step)["step"] == step
        assert run(resumed, step) == done[step:]
        for name, tensor in whole["model"].state_dict().items():
            assert torch.equal(resumed["model"].state_dict()[name], tensor)
        resumed["data"].close()
    whole["data"].close()
    first = [number for samples, _ in done[:25] for number in samples]
    assert sorted(first) == list(range(200))


def test_a_checkpoint_of_another_data_set_is_refused(rows, disk_path):
    paths = [rows(count, 64, name=f"{count}.npy")[0] for count in (200, 100)]
    saved, other = (parts(path, 0, "full") for path in paths)
    with Checkpointer(disk_path / "run") as ours:
        ours.save(1, training_state(**saved))
        at = ours.latest().path
    with pytest.raises(ConfigError, match="of 200 samples, this one has 100"):
        load(at, training_state(**other))
    assert np.array_equal(other["data"].state_dict()["consumed"], 0)
    for each in (saved, other):
        each["data"].close()
