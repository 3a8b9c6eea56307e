"""State dicts of models on a device whose weights rest on flash: values are brought one by one."""

import copy
import io

import pytest
import torch
from gpu_weights_rig import (
    DEPTH,
    DEVICE,
    LIMIT,
    WEIGHT_BYTES,
    WIDTH,
    Blocks,
    bits,
    inputs,
    on_device_flash,
    state_of,
)
from safetensors.torch import load_file, save_file
from torch import nn

import penstock
from weights_rig import ScriptedEngine, assert_same, shared_engine_replaced

pytestmark = pytest.mark.gpu
NAME = "blocks.0.weight"


def built():
    torch.manual_seed(0)
    return Blocks(lambda: nn.Linear(WIDTH, WIDTH)).to(DEVICE)


def loss_of(model, x):
    return model(x).square().mean()


def test_a_state_dict_brings_one_weight_at_a_time_and_writes_nothing(tmp_path):
    model = built()
    expected = state_of(model)
    with (
        shared_engine_replaced(ScriptedEngine()) as engine,
        on_device_flash(model, tmp_path) as session,
    ):
        loss_of(model, inputs(1)[0]).backward()
        written = engine.written_bytes
        state = model.state_dict()
        assert session._weights.account.used_bytes <= LIMIT
        most = 0
        here = {}
        for name, each in state.items():
            here[name] = each.cpu()
            most = max(most, session._weights.account.used_bytes)
        assert most <= LIMIT < DEPTH * WEIGHT_BYTES
        assert session._weights.forced == 0
        assert engine.written_bytes == written
    assert_same(here, expected)


def _told(state):
    each = state[NAME]
    return [
        *(each.shape, each.stride(), each.dtype, each.device, each.is_contiguous(), each.nbytes),
        *(each.numel(), len(each), each.size(0), each.requires_grad, each.is_leaf, each.grad),
        *(isinstance(each, torch.Tensor), each.contiguous().shape, each.type()),
    ]


def _pickled(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    return [{name: (each.device, bits(each)) for name, each in loaded.items()}]


def _exported(state, folder):
    state = {name: each.contiguous() for name, each in state.items()}
    save_file(state, folder / "x.safetensors")
    return [load_file(folder / "x.safetensors")]


def _worked_with(state):
    each = state[NAME]
    with torch.no_grad():
        made = [
            each + 1,
            2 * each,
            each @ each.T,
            torch.stack([each, each]),
            each[3],
            each.type(torch.half),
        ]
        made += torch._foreach_mul([each, each], 2)
        made += [
            torch.linalg.vector_norm(each),
            each.double(),
            each.to("cpu"),
            torch.zeros_like(each),
        ]
    x = torch.ones(WIDTH, device=DEVICE, requires_grad=True)
    (each @ x).sum().backward()
    return [*map(bits, made), bits(x.grad), repr(each), each.tolist()]


READS = {
    "told": _told,
    "pickled": _pickled,
    "worked with": _worked_with,
    "copied": lambda state: [{n: bits(each) for n, each in copy.deepcopy(state).items()}],
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_a_state_dict_finds_what_is_in_a_plain_one(read, tmp_path):
    plain, model = built(), built()
    with on_device_flash(model, tmp_path):
        assert_same(READS[read](model.state_dict()), READS[read](plain.state_dict()))
        assert_same(state_of(model), state_of(plain))


def test_a_state_dict_is_exported(tmp_path):
    plain, model = built(), built()
    with on_device_flash(model, tmp_path):
        assert_same(
            _exported(model.state_dict(), tmp_path), _exported(plain.state_dict(), tmp_path)
        )


def _data(state):
    state[NAME].data.mul_(2)


def _storage(state):
    state[NAME].untyped_storage().fill_(0)


def _in_place(state):
    state[NAME].mul_(2)


def _slice(state):
    state[NAME][1] = 3


def _copied_to(state):
    state[NAME].copy_(state["blocks.1.weight"])


def _past_the_class(state):
    with torch._C.DisableTorchFunctionSubclass():
        state[NAME].mul_(2)


def _out(state):
    each = state["blocks.1.weight"]
    torch.add(each, each, out=state[NAME])


CHANGES = [_data, _storage, _in_place, _slice, _copied_to, _past_the_class, _out]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_a_state_dict_is_one_of_the_model(change, tmp_path):
    plain, model = built(), built()
    x = inputs(1)[0]
    with on_device_flash(model, tmp_path):
        for each in (plain, model):
            change(each.state_dict())
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
    assert_same(state_of(model), state_of(plain))


def test_a_state_dict_shows_what_training_changes(tmp_path):
    """As the tensors of any state dict, which share the memory of the parameters."""
    found = []
    for is_plain in (True, False):
        model = built()
        session = None if is_plain else on_device_flash(model, tmp_path)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = model.state_dict()
        for x in inputs(2):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: bits(each) for name, each in state.items()})
        other = built()
        other.load_state_dict(state)
        found.append(state_of(other))
        if session is not None:
            session.close()
            found.append({name: bits(each) for name, each in state.items()})
    for each in found[1:]:
        assert_same(each, found[0])


def test_a_state_dict_is_loaded_into_its_own_model(tmp_path):
    model = built()
    expected = state_of(model)
    with on_device_flash(model, tmp_path) as session:
        model.load_state_dict(model.state_dict())
        assert session._weights.forced == 0
    assert_same(state_of(model), expected)


def test_a_state_dict_is_loaded_into_another_model_that_rests(tmp_path):
    model, other = built(), built()
    expected = state_of(model)
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    with on_device_flash(nn.ModuleList([model, other]), tmp_path):
        other.load_state_dict(model.state_dict())
    assert_same([state_of(other), state_of(model)], [expected, expected])


def test_a_weight_that_was_replaced_since_is_an_error(tmp_path):
    model = built()
    with on_device_flash(model, tmp_path):
        state = model.state_dict()
        model.blocks[0].weight.data = torch.zeros(WIDTH, WIDTH, device=DEVICE)
        with pytest.raises(penstock.InPlaceError, match=rf"{NAME} was replaced"):
            state[NAME].cpu()
        assert not model.state_dict()[NAME].any()


def test_a_gradient_of_its_own_is_refused(tmp_path):
    model = built()
    with on_device_flash(model, tmp_path):
        with pytest.raises(penstock.ConfigError, match=rf"{NAME} .* requires_grad_ .* clone"):
            model.state_dict()[NAME].requires_grad_()
        assert model.state_dict()[NAME].clone().requires_grad_().requires_grad


def test_a_weight_at_rest_is_converted_by_type(tmp_path):
    plain, model = built(), built()
    with on_device_flash(model, tmp_path):
        for each in (torch.float64, "torch.cuda.HalfTensor"):
            found, expected = (m.blocks[0].weight.type(each) for m in (model, plain))
            assert_same(bits(found), bits(expected))
