"""What CUDA saves where it computes with other operators than a CPU."""

import pytest
import torch
from dry_runs import GPU
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.lab.dry import dry_step, dry_zoo_step

B, H, T, D = 2, 4, 128, 32
SCORES = B * H * T * T
HEADS = B * H * T * D


class Attention(nn.Module):
    def __init__(self, *, dtype=torch.float32, **options):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D, dtype=dtype))
        self.options = options

    def forward(self, query, key, value):
        # three storages of their own, so that all of them are slots of this module
        query, key, value = (one * self.scale for one in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, **self.options)


def saved(*, device="cuda", dtype=torch.float32, **options):
    """Bytes of the slots that attention saves, but for the factors of ``scale``."""
    given = [torch.empty(B, H, T, D, dtype=dtype) for _ in range(3)]
    profile = dry_step(
        Attention(dtype=dtype, **options),
        lambda model, *batch: model(*batch).sum(),
        inputs=given,
        device=device,
        machine=GPU,
        floor_bytes=4097,
    ).profile
    sizes = [slot.key.nbytes for slot in profile.slots]
    for one in given:
        sizes.remove(one.nbytes)
    assert profile.device == device
    return sorted(sizes)


def test_a_dropout_keeps_one_byte_for_each_element():
    network = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    sizes = {}
    for device in ("cpu", "cuda"):
        profile = dry_step(
            network,
            lambda model, x: model(x).sum(),
            inputs=(torch.empty(100, 64),),
            device=device,
            machine=GPU,
            floor_bytes=4097,
        ).profile
        (sizes[device],) = [s.key.nbytes for s in profile.slots if s.kind == "Dropout"]
        (back,) = [
            one for one in profile.operators if one.backward and "Sequential.1" in one.module
        ]
    assert sizes == {"cpu": 100 * 64 * 4, "cuda": 100 * 64}
    assert back.name == "aten.native_dropout_backward"


def test_a_dropout_without_effect_is_none():
    network = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).eval()
    profile = dry_step(
        network,
        lambda model, x: model(x).sum(),
        inputs=(torch.empty(100, 64),),
        device="cuda",
        machine=GPU,
    ).profile
    assert not any("dropout" in one.name for one in profile.operators)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}])
def test_fused_attention_saves_what_goes_in_and_comes_out(options):
    assert saved(**options) == [HEADS * 4] * 4  # and 4 KiB of sums, which are too few to count
    assert saved(dtype=torch.bfloat16, **options) == [HEADS * 2] * 4


def test_a_mask_is_saved_as_what_is_added_to_scores():
    mask = torch.ones(T, T, dtype=torch.bool)
    assert saved(attn_mask=mask) == sorted([*[HEADS * 4] * 4, T * T * 4])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unfused_attention_saves_what_it_saves_on_a_cpu(options, dtype):
    with sdpa_kernel(SDPBackend.MATH):
        assert saved(dtype=dtype, **options) == saved(dtype=dtype, device="cpu", **options)


def test_unfused_attention_saves_all_scores_and_a_mask_of_one_byte():
    with sdpa_kernel(SDPBackend.MATH):
        sizes = saved(dropout_p=0.1)
    assert sizes == sorted([SCORES * 4, SCORES, SCORES * 4, HEADS * 4, HEADS * 4, HEADS * 4])


def test_half_precision_under_autocast():
    def step(model, *batch):
        return model(*batch).sum()

    profile = dry_step(
        Attention(dropout_p=0.1),
        step,
        inputs=[torch.empty(B, H, T, D) for _ in range(3)],
        device="cuda",
        autocast="bfloat16",
        machine=GPU,
    ).profile
    names = {one.name: one.half for one in profile.operators}
    assert names["aten._scaled_dot_product_flash_attention"]
    assert names["aten._scaled_dot_product_flash_attention_backward"]


def test_networks_of_convolutions_are_the_same_but_for_their_dropout():
    def keys(device):
        profile = dry_zoo_step(
            "vgg16", 4, machine=GPU, size="tiny", device=device, floor_bytes=64
        ).profile
        return {slot.key for slot in profile.slots if slot.kind != "Dropout"}

    assert keys("cpu") == keys("cuda")


def test_attention_flops_are_counted():
    profile = dry_step(
        Attention(),
        lambda model, *batch: model(*batch).sum(),
        inputs=[torch.empty(B, H, T, D) for _ in range(3)],
        device="cuda",
        machine=GPU,
    ).profile
    flops = {one.name: one.flops for one in profile.operators}
    product = 2 * SCORES * D
    assert flops["aten._scaled_dot_product_efficient_attention"] == 2 * product
    assert flops["aten._scaled_dot_product_efficient_attention_backward"] == 5 * product
    on_cpu = dry_step(
        Attention(),
        lambda model, *batch: model(*batch).sum(),
        inputs=[torch.empty(B, H, T, D) for _ in range(3)],
        machine=GPU,
    ).profile
    flops = {one.name: one.flops for one in on_cpu.operators}
    assert flops["aten._scaled_dot_product_flash_attention_for_cpu"] == 2 * product
    assert flops["aten._scaled_dot_product_flash_attention_for_cpu_backward"] == 5 * product
