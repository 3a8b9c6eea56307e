"""Checkpoints of models on a device whose weights rest on flash: never all weights in device memory."""

import copy

import pytest
import torch
from gpu_weights_rig import (
    DEPTH,
    DEVICE,
    LIMIT,
    WEIGHT_BYTES,
    WIDTH,
    Blocks,
    TiedWords,
    bits,
    inputs,
    on_device_flash,
    state_of,
)
from torch import nn

from penstock import checkpoint, weights
from penstock.checkpoint import Checkpointer, training_state
from penstock.core.errors import InPlaceError, MismatchError
from weights_rig import assert_same

pytestmark = pytest.mark.gpu


def built(seed=0):
    torch.manual_seed(seed)
    return Blocks(lambda: nn.Linear(WIDTH, WIDTH)).to(DEVICE)


def trained(model, optimizer, batches):
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adam_of(model):
    # on a GPU torch's default for ordinary parameters is foreach, whose last bits differ
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def most_in(session, action):
    """The most weights that were in device memory meanwhile, and all of them can go again."""
    session._weights.account.reset_peak()
    result = action()
    assert session._weights.forced == 0
    assert "address" not in session._weights.note()
    return session._weights.account.peak_bytes, result


@pytest.mark.parametrize(("wait", "place"), [(True, "flash"), (False, "flash"), (True, "host")])
def test_a_run_that_is_resumed_from_a_checkpoint_is_that_run(tmp_path, wait, place, monkeypatch):
    if wait:  # as a large checkpoint: what is loaded is in a file first
        monkeypatch.setattr("penstock.checkpoint.targets._IN_MEMORY_BYTES", 0)
    batches = inputs(6)
    plain = built()
    trained(plain, adam_of(plain), batches)
    model = built()
    optimizer = adam_of(model)
    with (
        on_device_flash(model, tmp_path, weights=place) as session,
        Checkpointer(tmp_path / "saved") as checkpointer,
    ):
        trained(model, optimizer, batches[:3])
        state = training_state(model=model, optimizer=optimizer, step=3)
        most, _ = most_in(session, lambda: checkpointer.save(3, state, wait=wait))
        assert most <= LIMIT < DEPTH * WEIGHT_BYTES
        trained(model, optimizer, batches[3:])  # nothing of this is in the checkpoint
        checkpointer.wait()
    assert_same(state_of(model), state_of(plain))

    resumed = built(seed=1)
    optimizer = adam_of(resumed)
    trained(resumed, optimizer, inputs(1))  # so that it has states to load into
    with (
        on_device_flash(resumed, tmp_path, weights=place) as session,
        Checkpointer(tmp_path / "saved") as checkpointer,
    ):
        state = training_state(model=resumed, optimizer=optimizer)
        most, _ = most_in(session, lambda: checkpointer.load(state))
        assert most <= LIMIT
        trained(resumed, optimizer, batches[3:])
    assert_same(state_of(resumed), state_of(plain))


def test_what_is_newer_on_the_device_than_at_home_is_saved(tmp_path):
    model = built()
    with on_device_flash(model, tmp_path):
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(2)
        expected = {name: bits(each) for name, each in model.state_dict().items()}
        checkpoint.save(tmp_path / "saved", {"model": model.state_dict()})
    assert_same(state_of(model), expected)
    loaded = checkpoint.load(tmp_path / "saved")["model"]
    assert_same({name: bits(each) for name, each in loaded.items()}, expected)


def test_a_tied_weight_is_saved_once_and_loaded_tied(tmp_path):
    torch.manual_seed(0)
    model = TiedWords(512, nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    expected = copy.deepcopy(model)
    with on_device_flash(model, tmp_path, limit=4 * 512 * WIDTH * 2):
        saved = checkpoint.save(tmp_path / "saved", {"model": model})
        with torch.no_grad():
            model.head.weight.zero_()
        checkpoint.load(tmp_path / "saved", {"model": model})
        assert model.head.weight is model.embedding.weight
    assert saved.nbytes < 2 * 4 * 512 * WIDTH
    assert_same(state_of(model), state_of(expected))


def test_a_frozen_base_has_files_of_its_own_and_is_found_unchanged(tmp_path):
    model = built()
    for block in model.blocks[1:]:
        block.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
    with on_device_flash(model, tmp_path) as session:
        checkpoint.save(tmp_path / "saved", {"model": model})
        trained(model, optimizer, inputs(1))
        _, same = most_in(
            session, lambda: checkpoint.unchanged(tmp_path / "saved", {"model": model})
        )
    assert {each.name for each in same} == {
        f"model.blocks.{i}.{name}" for i in range(1, DEPTH) for name in ("weight", "bias")
    }
    assert len({each.path for each in same}) == 1
    assert len(list((tmp_path / "saved").glob("data-*"))) == 2


def test_others_save_weights_that_are_mapped(tmp_path):
    """By addresses, or all at once: pickle and safetensors do both."""
    torch.manual_seed(0)
    model = TiedWords(512, nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    with on_device_flash(model, tmp_path, limit=4 * 512 * WIDTH * 2) as session:
        with torch.no_grad():
            model.body.weight.mul_(2)

        def save():
            state = weights.on_host(model.state_dict())
            torch.save(state, tmp_path / "x.pt")
            return {name: (each.device.type, each.data_ptr()) for name, each in state.items()}

        most, where = most_in(session, save)
        assert most <= 4 * 512 * WIDTH * 2
    assert where["embedding.weight"] == where["head.weight"]
    assert {device for device, _ in where.values()} == {"cpu", "cuda"}  # biases do not rest
    loaded = torch.load(tmp_path / "x.pt", map_location="cpu")
    assert_same(loaded, {name: bits(each) for name, each in model.state_dict().items()})


def test_a_weight_that_was_replaced_since_the_state_dict_was_made_is_an_error(tmp_path):
    model = built()
    with on_device_flash(model, tmp_path):
        state = model.state_dict()
        model.blocks[0].weight.data = torch.zeros(WIDTH, WIDTH, device=DEVICE)
        with pytest.raises(InPlaceError, match=r"blocks\.0\.weight was replaced"):
            weights.on_host(state)
        assert not weights.on_host(model.state_dict())["blocks.0.weight"].any()


def test_a_checkpoint_of_another_form_changes_nothing(tmp_path):
    other = Blocks(lambda: nn.Linear(WIDTH, 2 * WIDTH))
    checkpoint.save(tmp_path / "saved", {"model": other})
    model = built()
    expected = state_of(model)
    with on_device_flash(model, tmp_path) as session:

        def load():
            with pytest.raises(MismatchError, match=r"blocks\.0\.weight"):
                checkpoint.load(tmp_path / "saved", {"model": model})

        most, _ = most_in(session, load)
        assert most == 0
    assert_same(state_of(model), expected)
