"""Weights on flash of models that are spread over ranks: bits, what is read, what is refused."""

import copy
import io
import os
import textwrap
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import penstock
import rank_programs
from penstock import BudgetError, ConfigError, weights
from penstock.core.errors import PenstockWarning
from penstock.homed import home_of
from penstock.io.engine import Priority
from penstock.runtime.storage import TensorRef
from tensor_parallel_rig import (
    CHANGES,
    change_an_array_of_it,
    change_what_is_placed_the_same,
    mesh_of_one,
    parallel,
)

SAME_BITS = """
def last_dimension(param):
    even = param.ndim == 2 and param.shape[1] % world == 0
    return Shard(1) if even else Shard(0)

settings = {
    "plain": ({}, sgd),
    "fused": ({}, fused),
    "states": ({}, adamw),
    "kept after forward": ({"reshard_after_forward": False}, adamw),
    "last dimension": ({"shard_placement_fn": last_dimension}, overlapped),
    "mixed precision": (
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, overlapped
    ),
}
compare(settings)
"""


FORETOLD = """
sys.path.insert(0, {tests!r})
from penstock.plan.ranks import Ranks
from penstock.plan.weight_stays import order_of_uses, weight_stays
from penstock.plan.weights import ModuleWeights, WeightUse
from weights_rig import Traffic, settle

depth, width = 8, 128
part = 4 * width * width // world
ends = [WeightUse(2 * depth - 1 - i, 2 * depth - 1 - i, True) for i in range(depth)]
whole = [
    ModuleWeights(str(i), 4 * width * width, 4 * width * width, width * width, "float32",
                  (WeightUse(i, i, False), ends[i]), ends[i])
    for i in range(depth)
]
order = [place for place, _ in order_of_uses(Ranks(world).divide(whole))]
for room in (2, 4):
    model = sharded(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))))
    optimizer = FlashAdamW(
        model.parameters(), lr=1e-2, flash=flash, tile=width * width // world, overlap=True
    )
    with session_of(model, limit=room * part) as session:
        def step():
            model(torch.randn(6, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            settle(session._weights)
        for _ in range(4):  # two show the order
            step()
        traffic, found = Traffic(session._weights), []
        for _ in range(3):
            traffic.reset()
            step()
            found.append((traffic.read, traffic.written))
    optimizer.close()
    plan = weight_stays(order, [part] * depth, [True] * depth, room * part)
    assert found == [(plan.read_bytes, plan.written_bytes)] * 3, (room, found, plan)
"""


def test_bytes_of_shards_are_those_foretold_at_the_least_limit_and_above(disk_path):
    program = rank_programs.WEIGHTS + FORETOLD.format(tests=os.path.dirname(rank_programs.__file__))
    rank_programs.run(disk_path, program)


def test_fsdp2_trains_to_the_same_bits_with_uneven_shards_and_other_settings(disk_path):
    rank_programs.run(disk_path, rank_programs.WEIGHTS + SAME_BITS)


DCP = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from penstock.checkpoint.dcp import DcpReader, DcpWriter

class OfTorch:
    def save(self, state, path):
        dcp.save(state, checkpoint_id=path)
    def load(self, state, path):
        dcp.load(state, checkpoint_id=path)

class OfPenstock:
    def save(self, state, path):
        dcp.save(state, storage_writer=DcpWriter(path))
    def load(self, state, path):
        dcp.load(state, storage_reader=DcpReader(path))

def loaded(model, files, path):
    state = get_model_state_dict(model)
    files.load(state, path)
    set_model_state_dict(model, state)
    return values_of(model)

for files in (OfTorch(), OfPenstock()):
    path = f"{place}/{type(files).__name__}"
    model, fresh, resting = (sharded(wide()) for _ in range(3))
    with session_of(model):
        steps(model, sgd(model), 1)
        files.save(get_model_state_dict(model), path)
        expected = steps(model, sgd(model), 1, first=1)
        after = values_of(model)
    found = loaded(fresh, files, path)
    assert any(not torch.equal(*each) for each in zip(found, after))
    assert_same(steps(fresh, sgd(fresh), 1, first=1), expected)
    assert_same(values_of(fresh), after)
    with session_of(resting):
        steps(resting, sgd(resting), 1, first=5)  # of which nothing is left
        assert_same(loaded(resting, files, path), found)
        assert_same(steps(resting, sgd(resting), 1, first=1), expected)
        assert any(home_of(each) is not None for each in resting.parameters())
    assert_same(values_of(resting), after)
"""


def test_a_model_goes_on_before_a_session_and_after_it_and_loads_states_and_checkpoints(disk_path):
    rank_programs.run(
        disk_path,
        rank_programs.WEIGHTS
        + textwrap.dedent(
            """
            results = []
            for rests in (False, True):
                model = sharded(wide())
                optimizer = adamw(model)
                found = steps(model, optimizer, 1)
                saved = {name: each.detach().clone() for name, each in model.state_dict().items()}
                with session_of(model) if rests else nullcontext():
                    found += steps(model, optimizer, 1, first=1)
                    model.load_state_dict(saved)
                    found += steps(model, optimizer, 1, first=2)
                    found += [local(each).clone() for each in model.state_dict().values()]
                assert rests == any(home_of(each) is not None for each in model.parameters())
                found += steps(model, optimizer, 1, first=3)  # at home, if there is one
                with session_of(model) if rests else nullcontext():
                    found += steps(model, optimizer, 1, first=4)
                results.append([*found, *values_of(model)])
                optimizer.close()
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other)
            """
        )
        + DCP,
    )


SCHEDULES = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

def loss_of(found, wanted):
    return nn.functional.mse_loss(found, wanted)

def scheduled(name, blocks):
    if name == "GPipe":
        parts = [nn.Sequential(*blocks[2 * rank : 2 * rank + 2])]
        stage = PipelineStage(parts[0], rank, world, device)
        return parts, ScheduleGPipe(stage, 4, loss_fn=loss_of)
    numbers = rank, rank + world
    parts = [blocks[number] for number in numbers]
    stages = [PipelineStage(*each, 2 * world, device) for each in zip(parts, numbers)]
    return parts, ScheduleInterleaved1F1B(stages, 4, loss_fn=loss_of)

for name in ("GPipe", "Interleaved1F1B"):
    results = []
    for rests in (False, True):
        torch.manual_seed(0)
        layers = [(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(4)]
        parts, schedule = scheduled(name, [nn.Sequential(*each) for each in layers])
        model = nn.ModuleList(parts)
        optimizer = adamw(model)
        found = []
        with session_of(model, "72KiB") if rests else nullcontext() as session:
            for step in range(3):
                features, wanted = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(step))
                losses = [torch.zeros(())]
                inputs = (features,) if rank == 0 else ()
                targets = {"target": wanted, "losses": losses} if rank == world - 1 else {}
                schedule.step(*inputs, **targets)
                found += [each.detach().clone() for each in losses]
                found += [each.grad.clone() for each in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            if rests:
                weights = session._weights
                assert not weights.forced and weights.account.peak_bytes <= 72 * 1024
                assert weights.total_bytes == 128 * 1024
        results.append([*found, *values_of(model)])
        optimizer.close()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other), name
"""


def test_pipelines_of_other_schedules_train_to_the_same_bits(disk_path):
    rank_programs.run(disk_path, rank_programs.WEIGHTS + SCHEDULES)


# -- on one rank --------------------------------------------------------------------------------------


@pytest.fixture
def one_rank():
    with mesh_of_one("cpu") as mesh:
        yield mesh


def session_of(model, directory, limit="64KiB"):
    return penstock.offload(
        model,
        weights="flash",
        weights_memory=limit,
        flash=str(directory),
        floor="4KiB",
        device_memory="64MiB",
        flash_capacity="64MiB",
    )


@pytest.mark.parametrize("change", [*CHANGES, change_an_array_of_it])
def test_whatever_changes_a_shard_is_noticed(one_rank, disk_path, change):
    """Weights that do not fit leave memory after each change, and come back with it."""
    plain, model = parallel(one_rank), parallel(one_rank)
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    with session_of(model, disk_path):
        for _ in range(2):
            for one in (plain, model):
                one(inputs).square().mean().backward()
                with torch.no_grad():
                    for layer in one:
                        change(layer.weight)
        after = [each.full_tensor() for each in model.parameters()]
    for one, other, each in zip(plain.parameters(), after, model.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other)
        assert torch.equal(one.grad.full_tensor(), each.grad.full_tensor())
        assert torch.equal(each.full_tensor(), other)


@pytest.mark.parametrize("change", [change_an_array_of_it, change_what_is_placed_the_same])
def test_a_shard_that_is_changed_while_it_is_read_ahead(one_rank, disk_path, change):
    """The read began before, and has the values before the change."""
    plain, model = parallel(one_rank), parallel(one_rank)
    weight, expected = model[0].weight, plain[0].weight
    with session_of(model, disk_path) as session:
        stay = session._weights._table.stay_of(weight)
        with session._weights._table.wake:
            session._weights._reads.begin(stay, Priority.PREFETCH)
        with suppress(Exception):
            stay.coming.wait()
        with torch.no_grad():
            for one in (weight, expected):
                change(one)
        x = torch.randn(4, 64)
        assert torch.equal(model[0](x), plain[0](x))


def test_a_shard_that_backward_needs_leaves_memory_meanwhile(one_rank, disk_path):
    model = parallel(one_rank)
    with session_of(model, disk_path) as session:
        loss = model(torch.randn(4, 64)).square().mean()
        assert session._weights.present_bytes <= 64 << 10
        assert session._weights.total_bytes == 96 << 10
        loss.backward()
        assert session._weights.forced == 0


def test_autocast_makes_the_same_bits(one_rank, disk_path):
    results = []
    for rests in (False, True):
        model = parallel(one_rank)
        with (
            session_of(model, disk_path) if rests else nullcontext(),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        ):
            loss = model(torch.ones(4, 64)).float().square().mean()
            loss.backward()
        results.append([loss.detach(), *(each.grad.full_tensor() for each in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_change_before_backward_is_the_error_of_autograd(one_rank, disk_path):
    model = parallel(one_rank)
    with session_of(model, disk_path):
        loss = model(torch.randn(4, 64)).square().mean()
        with torch.no_grad():
            model[3].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()


def test_copies_of_a_shard_are_ordinary_parameters(one_rank, disk_path):
    model = parallel(one_rank)
    expected = [each.full_tensor().clone() for each in model.parameters()]
    with session_of(model, disk_path):
        copies = copy.deepcopy([*model.parameters()])
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        made = nn.Parameter(model[0].weight)
        assert torch.equal((made + 0).full_tensor(), expected[0])
    assert type(made) is DTensor
    file.seek(0)
    loaded = torch.load(file, weights_only=False).values()
    for one, other, wanted in zip(copies, loaded, expected, strict=True):
        assert type(one) is type(other) is DTensor
        assert home_of(one) is None
        assert torch.equal(one.full_tensor(), wanted)
        assert torch.equal(other.full_tensor(), wanted)


def test_shards_that_are_converted_are_an_error_of_torch(one_rank, disk_path):
    model = parallel(one_rank)
    with (
        session_of(model, disk_path),
        pytest.raises(RuntimeError, match="Couldn't swap"),
    ):
        model.double()


def test_a_replaced_parameter_of_fsdp2_stays_in_memory_with_a_warning(one_rank, disk_path):
    model = fully_shard(nn.Sequential(nn.Linear(64, 64, bias=False)))
    new = distribute_tensor(torch.ones(64, 64), one_rank, [Shard(0)])
    with session_of(model, disk_path):
        model(torch.ones(2, 64))
        model.reshard()
        with pytest.warns(PenstockWarning, match=r"weight 0\.weight was replaced"):
            model.load_state_dict({"0.weight": nn.Parameter(new)}, assign=True)
        found = model(torch.ones(2, 64))
    assert torch.equal(found, torch.full((2, 64), 64.0))


class Tied(nn.Module):
    """Layers of which two have the same weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.last = nn.Linear(64, 64, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x)).relu())


def test_tied_weights_of_fsdp2_have_one_home_and_leave_memory(one_rank, disk_path):
    results = []
    for rests in (False, True):
        torch.manual_seed(0)
        model = fully_shard(Tied())
        before = TensorRef(model.first.weight._local_tensor.untyped_storage())
        with session_of(model, disk_path) if rests else nullcontext() as session:
            if rests:
                assert before() is None
                assert session._weights.total_bytes == 2 << 14
            loss = model(torch.ones(2, 64)).square().mean()
            loss.backward()
            results.append(
                [loss.detach(), *(each.grad.full_tensor() for each in model.parameters())]
            )
            assert model.first.weight is model.last.weight
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_what_is_gathered_at_once_must_fit(one_rank, disk_path):
    model = fully_shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
    with (
        pytest.raises(BudgetError, match=r"0\.weight and 2 more .*weights_memory=49152"),
        session_of(model, disk_path, limit="32KiB"),
    ):
        pass
    assert all(home_of(each) is None for each in model.parameters())


def test_host_memory_of_fsdp2_is_refused(one_rank, disk_path):
    model = fully_shard(nn.Linear(64, 64), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ConfigError, match="CPUOffloadPolicy"), session_of(model, disk_path):
        pass
    assert home_of(model.weight) is None


def test_fewer_ranks_after_forward_are_refused(disk_path):
    rank_programs.run(
        disk_path,
        rank_programs.WEIGHTS
        + textwrap.dedent(
            """
            model = sharded(wide(), reshard_after_forward=2)
            try:
                with session_of(model):
                    raise AssertionError("it was not refused")
            except ConfigError as error:
                assert "reshard_after_forward" in str(error)
            assert all(home_of(each) is None for each in model.parameters())
            """
        ),
        4,
    )


def test_values_that_are_converted_before_they_are_sent_are_refused(one_rank, disk_path):
    class Converted(torch.Tensor):
        def fsdp_pre_all_gather(self, mesh):
            return (self,), None

        def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
            return outputs[0], outputs

    model = fully_shard(nn.Linear(64, 64))
    model.weight._local_tensor.__class__ = Converted
    with pytest.raises(ConfigError, match="Converted"), session_of(model, disk_path):
        pass


def test_files_of_weights_are_for_models_that_are_not_spread(one_rank, disk_path):
    model = parallel(one_rank)
    with pytest.raises(ConfigError, match="spread over ranks"):
        weights.save(model, disk_path / "saved")
    with penstock.built_on_flash(str(disk_path), floor="4KiB"):
        model = nn.Linear(64, 64, bias=False)
        expected = model.weight.detach().clone()
        parallelize_module(model, one_rank, ColwiseParallel())
    assert torch.equal(model.weight.full_tensor(), expected)
    assert model.weight.placements == (Shard(0),)
