"""State dicts go both ways between torch and us, in bounded memory."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optim_runs import assert_same, assert_same_states, parameters, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from penstock import ConfigError
from penstock.optim import FlashAdam, FlashAdamW, FlashSGD
from penstock.optim import state_dict as dicts


@pytest.mark.parametrize("mapped", [False, True])
def test_ours_goes_into_torchs_and_back(mapped, small, monkeypatch):
    if mapped:
        monkeypatch.setattr(dicts, "_IN_MEMORY_BYTES", 0)
    ours, theirs = parameters(), parameters()
    a, b = FlashAdamW(ours, **small), torch.optim.AdamW(theirs, fused=True)
    train(a, ours, steps=3)
    train(b, theirs, steps=3)
    assert_same_states(a.state_dict(), b.state_dict())
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    b.load_state_dict(saved)
    again = FlashAdamW(ours, lr=1.0, **small)
    again.load_state_dict(saved)
    assert again.param_groups[0]["lr"] == 1e-3
    train(again, ours, first=3)
    train(b, theirs, first=3)
    assert_same(ours, theirs)
    a.close()
    again.close()


def test_torchs_goes_into_ours(small):
    ours, theirs = parameters(), parameters()
    b = torch.optim.AdamW(theirs, fused=True)
    train(b, theirs, steps=3, skip=lambda step: (1,))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    a = FlashAdamW(ours, **small)
    train(a, parameters(), steps=0)
    a.load_state_dict(b.state_dict())
    train(a, ours, first=3)
    train(b, theirs, first=3)
    assert_same(ours, theirs)
    assert_same_states(a.state_dict(), b.state_dict())
    a.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
def test_checkpoints_of_dcp_go_both_ways_between_torchs_and_ours(flat, small, disk_path):
    """Of a checkpoint DCP asks for each key that the optimizer's groups have."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def run(cls, **settings):
        model = torch.nn.Linear(8, 8)
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(0.5)
        optimizer = cls(model.parameters(), fused=True, **settings)
        return model, optimizer

    def one_step(model, optimizer):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    kinds = {"torch": (torch.optim.AdamW, {}), "ours": (FlashAdamW, small)}
    for name, (cls, settings) in kinds.items():
        model, optimizer = run(cls, **settings)
        one_step(model, optimizer)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.save({"optimizer": states}, checkpoint_id=disk_path / name, no_dist=True)
    for name in kinds:
        found = []
        for cls, settings in kinds.values():
            model, optimizer = run(cls, **settings)
            states = get_optimizer_state_dict(model, optimizer, options=options)
            dcp.load({"optimizer": states}, checkpoint_id=disk_path / name, no_dist=True)
            set_optimizer_state_dict(model, optimizer, states, options=options)
            one_step(model, optimizer)
            found.append([each.detach() for each in model.parameters()])
        assert_same(*found)


@pytest.mark.parametrize("format_name", ["split", "bf16", "int8"])
def test_compact_states_go_on_where_they_were(format_name, small):
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    a = FlashAdamW(ours, format=format_name, **small)
    train(a, ours, steps=3)
    with torch.no_grad():
        for p, q in zip(theirs, ours, strict=True):
            p.copy_(q)
    b = FlashAdamW(theirs, format=format_name, **small)
    b.load_state_dict(a.state_dict())
    train(a, ours, first=3)
    train(b, theirs, first=3)
    assert_same(ours, theirs)
    assert_same_states(a.state_dict(), b.state_dict())
    a.close()
    b.close()


def test_a_state_dict_of_another_model_or_optimizer_changes_nothing(small):
    ours = parameters()
    a = FlashAdamW(ours, **small)
    train(a, ours, steps=2)
    before = a.state_dict()
    other = parameters(sizes=[(7, 3), *[tuple(p.shape) for p in ours[1:]]])
    b = torch.optim.AdamW(other)
    train(b, other, steps=1)
    with pytest.raises(ConfigError, match=r"\(7, 3\): it is of another model"):
        a.load_state_dict(b.state_dict())
    with pytest.raises(ConfigError, match="groups of"):
        a.load_state_dict(torch.optim.AdamW(ours[:2]).state_dict())
    c = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    train(c, c.param_groups[0]["params"], steps=1)
    with pytest.raises(ConfigError, match="another optimizer"):
        a.load_state_dict(c.state_dict())
    d = torch.optim.AdamW(parameters(), amsgrad=True)
    with pytest.raises(ConfigError, match="make it with the same options"):
        a.load_state_dict(d.state_dict())
    assert_same_states(a.state_dict(), before)
    a.close()


def test_hooks_and_empty_states(small):
    params = parameters()
    a = FlashAdam(params, **small)
    seen = []
    a.register_load_state_dict_pre_hook(lambda *_: seen.append("before"))
    a.register_load_state_dict_post_hook(lambda *_: seen.append("after"))
    a.load_state_dict(FlashAdam(parameters(), **small).state_dict())
    assert seen == ["before", "after"]
    assert a.state_dict()["state"] == {}
    plain = FlashSGD(params, lr=0.1, **small)
    train(plain, params, steps=2)
    plain.load_state_dict(plain.state_dict())
    plain.close()
    a.close()
