"""Parameters that FSDP2 has turned into DTensors are refused in words, before anything is written."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from penstock import ConfigError
from penstock.optim import FlashAdamW, on_flash
from penstock.optim.adopt import Adoption

REFUSAL = r"parameter {} \(400, 1000\) is a DTensor.*keep the states.*DistributedDataParallel"
KINDS = [{}, {"gradient_memory": 0}, {"overlap": True}]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model():
    return nn.Linear(1000, 400)


def sharded():
    return fully_shard(model())


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_refused_when_the_optimizer_is_made(one_rank, small, settings):
    for named, name in ((True, "'weight'"), (False, "0 of group 0")):
        made = sharded()
        params = list(made.named_parameters() if named else made.parameters())
        with pytest.raises(ConfigError, match=REFUSAL.format(name)):
            FlashAdamW(params, **small, **settings)
        plain = torch.optim.AdamW(params)
        with pytest.raises(ConfigError, match=REFUSAL.format(name)):
            on_flash(plain, **small, **settings)
        assert type(plain) is torch.optim.AdamW
    assert list(small["flash"].iterdir()) == []


def test_refused_when_a_group_is_added(one_rank, small):
    optimizer = FlashAdamW([nn.Parameter(torch.zeros(300))], **small)
    with pytest.raises(ConfigError, match=REFUSAL.format("0 of group 1")):
        optimizer.add_param_group({"params": [sharded().weight]})
    assert len(optimizer.param_groups) == 1
    optimizer.close()


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_refused_at_the_first_step_if_sharded_later(one_rank, small, settings):
    """Accelerate makes the optimizer first, and exchanges its parameters for the sharded ones."""
    made = model()
    optimizer = FlashAdamW(made.parameters(), **small, **settings)
    fully_shard(made)
    optimizer.param_groups[0]["params"] = list(made.parameters())
    before = made.weight.full_tensor().clone()
    made(torch.ones(2, 1000)).sum().backward()
    with pytest.raises(ConfigError, match=REFUSAL.format("0 of group 0")):
        optimizer.step()
    assert torch.equal(made.weight.full_tensor(), before)
    optimizer.close()


def test_a_script_that_asked_for_flash_is_refused_not_kept_in_memory(one_rank, small):
    adoption = Adoption(small)
    try:
        with pytest.raises(ConfigError, match=REFUSAL.format("0 of group 0")):
            torch.optim.AdamW(sharded().parameters())
    finally:
        adoption.end()
    assert adoption.adopted == []
