"""What else a dry profile says: work, whose it is, device memory over time; and what it refuses."""

import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from dry_runs import COMPUTE, FLOOR_BYTES, GPU, Accountant, measured, peak_of
from torch import nn
from torch.nn import functional as F

from penstock.core.errors import ConfigError, HookError
from penstock.lab import zoo
from penstock.lab.dry import dry_step, dry_zoo_step
from penstock.lab.dry.roofline import retimed
from penstock.plan import Budgets, Profile, policies
from penstock.plan.operators import Product

SLOW = replace(GPU, compute=replace(COMPUTE, operator_s=1e-4))
"""So slow that every operator outlasts what a profile takes for one node of backward."""


def mean_loss(model, *inputs):
    return model(*inputs).pow(2).mean()


def dry(network, *inputs, **settings):
    return dry_step(network, mean_loss, inputs=inputs, machine=GPU, **settings).profile


def flops(profile, *, backward):
    return sum(one.flops for one in profile.operators if one.backward is backward)


# -- work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "multiplications"),
    [
        ("alexnet", 0.714e9),  # Krizhevsky 2014, one tower, as torchvision has it
        ("vgg16", 15.47e9),  # Simonyan and Zisserman 2015
        ("resnet18", 1.814e9),  # He et al. 2016, table 1, with its last layer
        ("resnet50", 4.089e9),  # with the stride in the 3 x 3 convolution
        ("densenet121", 2.834e9),  # Huang et al. 2017
    ],
)
def test_forward_flops_are_those_of_the_literature(name, multiplications):
    profile = dry_zoo_step(name, 2, machine=GPU).profile
    dense = [one for one in profile.operators if one.name in ("aten.convolution", "aten.addmm")]
    assert sum(one.flops for one in dense) == pytest.approx(2 * 2 * multiplications, rel=0.005)
    assert flops(profile, backward=False) == pytest.approx(4 * multiplications, rel=0.03)


def test_the_backward_of_a_convolution_does_its_work_twice_but_for_the_first():
    network = nn.Sequential(nn.Conv2d(8, 16, 3, groups=4), nn.Conv2d(16, 4, 5, stride=2))
    profile = dry(network, torch.empty(6, 8, 21, 21))
    first, second, *_ = [one for one in profile.operators if one.convolution is not None]
    assert first.flops == 2 * 6 * 16 * 19 * 19 * 2 * 9
    assert second.flops == 2 * 6 * 4 * 8 * 8 * 16 * 25
    back = [one for one in profile.operators if one.name == "aten.convolution_backward"]
    assert [one.flops for one in back] == [2 * second.flops, first.flops]
    assert [one.convolution for one in back] == [second.convolution, first.convolution]
    geometry = second.convolution
    assert (geometry.batch, geometry.channels_in, geometry.channels_out) == (6, 16, 4)
    assert (geometry.input_size, geometry.output_size) == ((19, 19), (8, 8))
    assert (geometry.kernel_size, geometry.stride, geometry.groups) == ((5, 5), (2, 2), 1)
    assert geometry.element_bytes == 4
    assert first.convolution.groups == 4


def test_products_tell_their_sizes():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = nn.Linear(64, 32, bias=False)
            self.biased = nn.Linear(32, 16)

        def forward(self, x):
            x = self.biased(self.plain(x))
            return torch.bmm(x.view(5, 20, 16), x.view(5, 16, 20)).relu().sum()

    profile = dry_step(
        Products(), lambda model, x: model(x), inputs=(torch.empty(100, 64),), machine=GPU
    ).profile
    found = {one.name: one.product for one in profile.operators if not one.backward and one.product}
    assert found == {
        "aten.mm": Product(1, 100, 32, 64),
        "aten.addmm": Product(1, 100, 16, 32),
        "aten.bmm": Product(5, 20, 20, 16),
    }
    for one in profile.operators:
        if one.product is not None:
            sizes = one.product
            assert one.flops == 2 * sizes.count * sizes.rows * sizes.columns * sizes.depth
        else:
            assert one.name not in {"aten.mm", "aten.addmm", "aten.bmm"}
    # of backward the gradient of the first weights, and both of the second product and of the last
    assert sum(one.backward and one.product is not None for one in profile.operators) == 5
    assert Profile.from_json(profile.to_json()) == profile


def test_bytes_are_operands_and_results_once():
    network = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(inplace=True), nn.Flatten(0))
    profile = dry_step(
        network, lambda model, x: model(x).sum(), inputs=(torch.empty(100, 64),), machine=GPU
    ).profile
    moved = {one.name: one.moved_bytes for one in profile.operators if not one.backward}
    out = 100 * 32 * 4
    assert moved["aten.mm"] == 100 * 64 * 4 + 64 * 32 * 4 + out
    assert moved["aten.relu_"] == 2 * out
    assert moved["aten.sum"] == out + 4
    assert "aten.view" not in moved
    assert "aten.t" not in moved
    assert "aten.detach" not in moved


def test_only_the_rows_that_are_looked_up_are_read():
    profile = dry_step(
        nn.Embedding(10_000, 16),
        lambda model, x: model(x).sum(),
        inputs=(torch.empty(50, dtype=torch.int64),),
        machine=GPU,
    ).profile
    (lookup,) = [one for one in profile.operators if one.name == "aten.embedding"]
    assert lookup.moved_bytes == 2 * 50 * 16 * 4 + 50 * 8


def test_sixteen_bits_are_seen_and_faster():
    wide = dry_zoo_step("bert-base", 4, machine=GPU, size="tiny", width=512, heads=8).profile
    half = dry_zoo_step(
        "bert-base", 4, machine=GPU, size="tiny", width=512, heads=8, autocast="bfloat16"
    ).profile

    def linear(profile):
        return [one for one in profile.operators if one.name in ("aten.addmm", "aten.mm")]

    assert linear(half)
    assert all(one.half for one in linear(half))
    assert not any(one.half for one in wide.operators)
    assert half.saved_bytes < wide.saved_bytes
    assert sum(one.took_ns for one in linear(half)) < sum(one.took_ns for one in linear(wide))


def test_operators_follow_each_other_from_start_to_end():
    profile = dry_zoo_step("googlenet", 4, machine=GPU, size="tiny").profile
    end = 0
    for one in profile.operators:
        assert 0 <= one.start_ns - end < 30  # one nanosecond for each storage that a node asks for
        assert one.took_ns >= 5_000
        end = one.end_ns
    (only,) = profile.passes
    assert (only.start_ns, only.end_ns) == (0, end)
    assert not any(one.backward for one in profile.operators if one.end_ns < only.backward_start_ns)


# -- whose operator it is -------------------------------------------------------------------------


BACK = {
    "aten.convolution": "aten.convolution_backward",
    "aten.native_batch_norm": "aten.native_batch_norm_backward",
    "aten.native_layer_norm": "aten.native_layer_norm_backward",
    "aten.max_pool2d_with_indices": "aten.max_pool2d_with_indices_backward",
    "aten.relu": "aten.threshold_backward",
    "aten.relu_": "aten.threshold_backward",
    "aten.gelu": "aten.gelu_backward",
    "aten.embedding": "aten.embedding_dense_backward",
    "aten._safe_softmax": "aten._softmax_backward_data",
    "aten._softmax": "aten._softmax_backward_data",
    "aten._log_softmax": "aten._log_softmax_backward_data",
}


@pytest.mark.parametrize(
    "name", ["vgg16", "googlenet", "resnet50", "densenet121", "bert-base", "gpt2"]
)
def test_a_backward_operator_is_of_the_module_of_its_forward(name):
    profile = dry_zoo_step(name, 4, machine=GPU, size="tiny").profile
    forward = Counter((BACK[one.name], one.module) for one in profile.operators if one.name in BACK)
    back = Counter((one.name, one.module) for one in profile.operators if one.name in BACK.values())
    assert len({kind for kind, _ in forward}) >= 4
    assert back == forward


def test_what_joins_gradients_is_of_a_module_too():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            return self.left(x) * self.right(x)

    network = nn.Sequential(nn.Linear(32, 32), Fork())
    profile = dry(network, torch.empty(64, 32))
    (joined,) = [one for one in profile.operators if one.backward and one.name == "aten.add"]
    assert joined.module in ("Sequential.1.left", "Sequential.1.right")


def test_a_part_run_again_in_backward_is_of_its_modules_and_of_backward():
    network = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def step(model, x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()

    profile = dry_step(network, step, inputs=(torch.empty(64, 32),), machine=GPU).profile
    tanh = [(one.module, one.backward) for one in profile.operators if one.name == "aten.tanh"]
    assert tanh == [("Sequential.1", False), ("Sequential.1", True)]
    (back,) = [one for one in profile.operators if one.name == "aten.tanh_backward"]
    assert back.module == "Sequential.1"


# -- device memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "excess"),
    [
        ("resnet272", 1.0),
        ("bert-base", 1.0),
        ("gpt2", 1.0),
        # the indices of a pooling count until the next slot is needed, one operator too long
        ("vgg16", 1.15),
        ("alexnet", 1.1),
    ],
)
def test_the_peak_is_that_of_real_tensors(name, excess):
    torch.manual_seed(0)
    network = zoo.build(name, size="tiny")
    batch = zoo.example_batch(network, 16)
    with Accountant() as accountant:
        network(*batch).backward()
    real = accountant.peak(without=[one.grad for one in network.parameters()])
    real += sum(one.nbytes for one in batch)
    profile = dry_zoo_step(name, 16, machine=SLOW, size="tiny", floor_bytes=FLOOR_BYTES).profile
    assert real <= peak_of(profile) <= excess * real


def test_what_is_there_all_the_time():
    network = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    network[1].weight.requires_grad_(False)
    profile = dry(network, torch.empty(16, 64), optimizer_state_copies=2)
    trained = (64 * 64 + 64 + 64) * 4
    rest = (64 + 2 * 64) * 4 + 8  # a frozen weight, two buffers, and their count of batches
    assert profile.fixed_bytes == trained + rest + trained + 2 * trained


def test_each_slot_has_the_most_of_the_rest_beside_it():
    profile = dry_zoo_step(
        "resnet50", 4, machine=SLOW, size="tiny", floor_bytes=FLOOR_BYTES
    ).profile
    sizes = {}
    resident = peak = 0
    for _, event, i in profile.steps:
        if event.name == "SAVE":
            resident += profile.slots[i].key.nbytes
        elif event.name == "FREE":
            resident -= profile.slots[i].key.nbytes
            continue
        slot = profile.slots[i]
        sizes[i, event] = slot.small_bytes if event.name == "SAVE" else slot.small_bytes_at_need
        peak = max(peak, resident + sizes[i, event])
    assert peak == profile.peak_saved_bytes
    assert peak >= profile.fixed_bytes + peak_of(profile)
    assert peak <= 1.05 * (profile.fixed_bytes + peak_of(profile))
    assert (
        profile.small_bytes == max(one.nbytes for one in profile.transients) + profile.fixed_bytes
    )
    assert max(sizes.values()) <= profile.small_bytes


def test_nothing_stays_of_a_step_but_gradients_and_inputs():
    profile = dry_zoo_step("resnet18", 4, machine=GPU, size="tiny").profile
    inputs = sum(one.nbytes for one in zoo.example_batch("resnet18", 4, size="tiny"))
    assert profile.transients[-1].nbytes == inputs


def test_a_step_of_saved_tensors_only_has_nothing_beside():
    profile = dry_zoo_step("resnet18", 4, machine=GPU, size="tiny", whole_device=False).profile
    assert profile.fixed_bytes == 0
    assert profile.transients == ()


def test_a_step_too_small_to_have_slots_is_profiled_all_the_same(tmp_path):
    profile = dry(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.empty(64, 64))
    assert profile.slots == ()
    assert profile.small_count == 2
    assert profile.peak_saved_bytes >= profile.fixed_bytes + 2 * 64 * 64 * 4
    assert profile.passes[0].end_ns == profile.operators[-1].end_ns
    plan = policies.get("keep")(profile, GPU, Budgets(device_bytes=1 << 30))
    assert plan.feasible


def test_a_batch_of_a_hundred_thousand_takes_no_memory():
    profile = dry_zoo_step("resnet50", 100_000, machine=GPU).profile
    assert profile.saved_bytes > 8e12


# -- values ---------------------------------------------------------------------------------------


def test_it_is_the_same_each_time_and_in_json():
    profile, again = (
        dry_zoo_step("googlenet", 4, machine=GPU, size="tiny", floor_bytes=FLOOR_BYTES).profile
        for _ in range(2)
    )
    assert profile == again
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("whole_device", [False, True])
def test_timed_anew_it_is_what_it_would_have_been_on_the_other_machine(whole_device):
    settings = {"size": "tiny", "floor_bytes": FLOOR_BYTES, "whole_device": whole_device}
    here = dry_zoo_step("vgg16", 4, machine=GPU, **settings).profile
    there = dry_zoo_step("vgg16", 4, machine=SLOW, **settings).profile
    assert here != there
    assert retimed(here, SLOW) == there
    assert retimed(there, GPU) == here


def test_the_module_and_the_generator_are_not_touched():
    network = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5))
    before = {name: one.clone() for name, one in network.state_dict().items()}
    state = torch.get_rng_state()
    dry(network, torch.randn(16, 32).requires_grad_())
    assert all(torch.equal(one, before[name]) for name, one in network.state_dict().items())
    assert all(one.grad is None for one in network.parameters())
    assert all(type(one) is nn.Parameter for one in network.parameters())
    torch.randn(16, 32)
    torch.set_rng_state(state)
    dry(network, torch.empty(16, 32))
    assert torch.equal(torch.get_rng_state(), state)


def test_real_and_meta_and_shared_tensors_have_the_same_profile():
    def make():
        network = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Tanh())
        network[1].weight = network[0].weight
        return network

    with torch.device("meta"):
        meta, x = make(), torch.empty(2, 64, 32)[1]
    assert dry(make(), torch.empty(2, 64, 32)[1]) == dry(meta, x)
    assert dry(meta, x).fixed_bytes == 2 * (32 * 32 + 2 * 32) * 4


def test_a_step_may_run_its_backward_itself():
    def step(model, x):
        model(x).pow(2).mean().backward()

    network, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), torch.empty(64, 32)
    assert dry_step(network, step, inputs=(x,), machine=GPU).profile == dry(network, x)


def test_a_forward_that_is_dropped_is_another_pass():
    def step(model, x):
        mean_loss(model, x)
        return mean_loss(model, x)

    network = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    profile = dry_step(
        network, step, inputs=(torch.empty(64, 64),), machine=GPU, floor_bytes=4097
    ).profile
    (last,) = profile.passes
    assert {one.pass_index for one in (*profile.slots, *profile.operators)} == {last.index}
    assert len(profile.slots) == 2
    assert last.start_ns >= profile.operators[0].end_ns


def test_it_does_not_disturb_a_session_that_is_open(tmp_path):
    network, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(64, 64)
    alone = measured(tmp_path, network, lambda: mean_loss(network, x).backward(), floor_bytes=8192)

    def with_dry():
        dry(network, x)
        mean_loss(network, x).backward()

    beside = measured(tmp_path, network, with_dry, floor_bytes=8192)
    assert [one.key for one in beside.slots] == [one.key for one in alone.slots]


# -- bad input ------------------------------------------------------------------------------------


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="this ReLU has no parameters that require gradients"):
        dry(nn.ReLU(), torch.empty(4, 4))


def test_a_module_that_cannot_be_copied_is_refused():
    network = nn.Linear(4, 4)
    network.lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot copy this Linear: cannot pickle"):
        dry(network, torch.empty(4, 4))


def test_a_step_without_a_loss_or_a_backward_is_refused():
    network, x = nn.Linear(4, 4), torch.empty(4, 4)
    with pytest.raises(ConfigError, match="ran no backward, and returned NoneType"):
        dry_step(network, lambda model, x: None, inputs=(x,), machine=GPU)
    with pytest.raises(ConfigError, match="does not require gradients"):
        dry_step(network, lambda model, x: x.sum(), inputs=(x,), machine=GPU)


def test_a_step_with_two_backwards_is_refused():
    def step(model, x):
        for _ in range(2):
            model(x).pow(2).mean().backward()

    with pytest.raises(ConfigError, match="ran 2 backwards"):
        dry_step(nn.Linear(64, 64), step, inputs=(torch.empty(64, 64),), machine=GPU)


class Picky(nn.Module):
    def __init__(self, pick):
        super().__init__()
        self.linear, self.pick = nn.Linear(32, 32), pick

    def forward(self, x):
        return self.pick(self.linear(x))


def test_an_operator_that_needs_data_is_refused_by_name_and_place():
    with pytest.raises(HookError, match=r"aten\.nonzero.* of module 'Picky'.*measure a real step"):
        dry(Picky(lambda x: x[(x > 0).nonzero()[:, 0]]), torch.empty(8, 32))
    with pytest.raises(HookError, match=r"_local_scalar_dense.* of module 'Picky'"):
        dry(Picky(lambda x: x * x.max().item()), torch.empty(8, 32))
    with pytest.raises(HookError, match=r"of module 'Picky'.*measure a real step"):
        dry(Picky(lambda x: x[x > 0]), torch.empty(8, 32))


def test_nonzero_finds_as_many_as_it_is_told():
    network = Picky(lambda x: x[(x > 0).nonzero()[:, 0]])
    profile = dry(network, torch.empty(8, 32), nonzero_count=5000, floor_bytes=4097)
    assert 5000 * 32 * 4 in [slot.key.nbytes for slot in profile.slots]


def test_a_real_tensor_in_the_step_is_refused():
    network = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="uses a real tensor; it must use the module"):
        dry_step(network, lambda model: network(torch.empty(4, 4)).sum(), machine=GPU)


def test_other_errors_of_the_step_come_through():
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same reduction dim"):
        dry(nn.Linear(4, 4), torch.empty(4, 5))


def test_settings_that_make_no_sense_are_refused():
    network, x = nn.Linear(4, 4), torch.empty(4, 4)
    with pytest.raises(ConfigError, match="autocast is 'int8'; use None, 'bfloat16', 'float16'"):
        dry(network, x, autocast="int8")
    with pytest.raises(ConfigError, match="device is 'tpu'; it must be 'cpu' or 'cuda'"):
        dry(network, x, device="tpu")
    with pytest.raises(ConfigError, match="optimizer_state_copies is -1"):
        dry(network, x, optimizer_state_copies=-1)
    with pytest.raises(ConfigError, match="its field 'compute' is missing"):
        dry_step(network, mean_loss, inputs=(x,), machine=replace(GPU, compute=None))
    with pytest.raises(ConfigError, match=r"Tensor of layout torch\.sparse_coo"):
        dry(network, x.to_sparse())
    with pytest.raises(ConfigError, match="batch_size=0"):
        dry_zoo_step("alexnet", 0, machine=GPU)


def test_functional_and_bare_losses_are_outside_any_module():
    profile = dry_step(
        nn.Linear(32, 10),
        lambda model, x, y: F.cross_entropy(model(x), y),
        inputs=(torch.empty(64, 32), torch.empty(64, dtype=torch.int64)),
        machine=GPU,
    ).profile
    (loss,) = [one for one in profile.operators if one.name == "aten.nll_loss_forward"]
    (back,) = [one for one in profile.operators if one.name == "aten.nll_loss_backward"]
    assert loss.module == back.module == ""
