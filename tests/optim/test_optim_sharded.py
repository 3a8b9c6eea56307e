"""Optimizers on flash for DTensors, as FSDP2 and tensor parallelism make them: bits, states, norms."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import rank_programs
from penstock import ConfigError
from penstock.optim import FlashAdamW, on_flash

SAME_BITS = """
plain = {"lr": 1e-2, "fused": True}
for settings in ({}, {"gradient_memory": 0}):
    ours, theirs = sharded(network()), sharded(network())
    a = FlashAdamW(ours.parameters(), lr=1e-2, flash=flash, tile=1024, **settings)
    b = torch.optim.AdamW(theirs.parameters(), **plain)
    train(ours, a, 3), train(theirs, b, 3)
    assert_same(ours.parameters(), theirs.parameters())
    assert bool(settings) == bool(a.wear().gradient_bytes_per_step)
    found, wanted = a.state_dict()["state"], b.state_dict()["state"]
    assert found.keys() == wanted.keys() and len(found) == 6
    for index, state in wanted.items():
        assert found[index].keys() == state.keys()
        for name, value in state.items():
            mine = found[index][name]
            assert type(mine) is type(value)
            assert_same([mine], [value])
            if isinstance(mine, DTensor):
                assert (mine.placements, mine.shape) == (value.placements, value.shape)
    # torch's states into ours, of another that goes on
    c = FlashAdamW(ours.parameters(), lr=1e-2, flash=flash, tile=1024, **settings)
    c.load_state_dict(b.state_dict())
    train(ours, c, 2, first=3), train(theirs, b, 2, first=3)
    assert_same(ours.parameters(), theirs.parameters())
    a.close(), c.close()
"""


def test_fsdp2_trains_to_the_same_bits_with_padded_and_empty_shards(disk_path):
    rank_programs.run(disk_path, SAME_BITS)


@pytest.mark.slow
def test_four_ranks_train_to_the_same_bits(disk_path):
    rank_programs.run(disk_path, SAME_BITS, 4)


def test_other_classes_and_masters_are_the_same_bits(disk_path):
    rank_programs.run(
        disk_path,
        """
        for make in (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
            lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
            lambda p: torch.optim.NAdam(p, foreach=False),
        ):
            ours, theirs = sharded(network()), sharded(network())
            a, b = on_flash(make(ours.parameters()), flash=flash, tile=1024), make(theirs.parameters())
            train(ours, a, 3), train(theirs, b, 3)
            assert_same(ours.parameters(), theirs.parameters())
            a.close()
        # exact and split are torch's fused step on a float32 master
        for format in ("exact", "split"):
            ours = sharded(network(dtype=torch.bfloat16))
            masters = [nn.Parameter(local(p).detach().float()) for p in ours.parameters()]
            a = FlashAdamW(ours.parameters(), lr=1e-2, flash=flash, tile=1024, format=format)
            b = torch.optim.AdamW(masters, lr=1e-2, fused=True)
            for step in range(3):
                backward(ours, step)
                for mine, master in zip(ours.parameters(), masters):
                    master.grad = local(mine.grad).float()
                a.step(), b.step(), a.zero_grad()
            assert_same(ours.parameters(), [each.bfloat16() for each in masters])
            saved = a.state_dict()["state"]
            assert_same([saved[i]["master"] for i in range(6)], masters)
            assert all(isinstance(saved[i]["master"], DTensor) for i in range(6))
            a.close()
        """,
    )


CLIPPED = """
ours, theirs = sharded(network(), mesh), sharded(network(), mesh)
a = FlashAdamW(ours.parameters(), lr=1e-2, flash=flash, tile=1024, clip_norm=0.05)
b = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
norms = []
for step in range(3):
    backward(ours, step), backward(theirs, step)
    wanted = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05).full_tensor()
    a.step(), b.step()
    found = a._penstock.last_norm
    torch.testing.assert_close(found, wanted)
    assert wanted > 0.05
    norms.append(found.item())
    a.zero_grad(), b.zero_grad()
for mine, other in zip(ours.parameters(), theirs.parameters()):
    torch.testing.assert_close(local(mine), local(other))
assert on_all(norms) == [norms] * world  # to the bit, also on ranks without an element
again = sharded(network(), mesh)
c = FlashAdamW(again.parameters(), lr=1e-2, flash=flash, tile=1024, clip_norm=0.05)
train(again, c, 3)
assert_same(again.parameters(), ours.parameters())
a.close(), c.close()
"""


def test_the_norm_is_that_of_all_ranks_and_the_same_on_each(disk_path):
    rank_programs.run(disk_path, "mesh = init_device_mesh('cpu', (world,))\n" + CLIPPED)


def test_ranks_that_would_clip_by_different_factors_are_refused_before_a_weight_changes(disk_path):
    rank_programs.run(
        disk_path,
        """
        def refused(group, **settings):
            model = sharded(network()) if group is None else network()
            optimizer = FlashAdamW(
                model.parameters(), lr=1e-2, flash=flash, tile=1024, clip_group=group, **settings
            )
            before = [local(each.detach()).clone() for each in model.parameters()]
            backward(model, 0)
            try:
                optimizer.step()
            except ConfigError as error:
                assert_same(model.parameters(), before)
                return str(error)
            finally:
                optimizer.close()

        for group in (None, dist.group.WORLD):
            found = on_all(refused(group, clip_norm=0.1, overlap=rank == 0))
            assert len(set(found)) == 1, found
            assert "rank 0: clip_norm=0.1, overlap=True; rank 1: clip_norm=0.1, overlap=False" in found[0]
            found = on_all(refused(group, clip_norm=0.1 + rank))
            assert len(set(found)) == 1, found
            assert "rank 0: clip_norm=0.1, overlap=False; rank 1: clip_norm=1.1, over" in found[0]
        """,
    )


@pytest.mark.slow
def test_replicas_count_once_in_the_norm(disk_path):
    names = "mesh_dim_names=('replicas', 'shards')"
    rank_programs.run(disk_path, f"mesh = init_device_mesh('cpu', (2, 2), {names})\n" + CLIPPED, 4)


def test_tensor_parallelism_trains_to_the_same_bits(disk_path):
    """The bias of the second layer is on all ranks, and its gradient a sum that is not computed yet."""
    rank_programs.run(
        disk_path,
        """
        from torch.distributed.tensor.parallel import (
            ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
        )
        mesh = init_device_mesh("cpu", (world,))
        def made():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(20, 64), nn.Linear(64, 20), nn.LayerNorm(20))
            styles = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(0)), SequenceParallel(
                sequence_dim=0, use_local_output=True
            )
            return parallelize_module(model, mesh, dict(zip("012", styles)))
        def run(model, optimizer):
            for step in range(3):
                inputs = torch.randn(6, 20, generator=torch.Generator().manual_seed(step))
                model(inputs).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        ours, theirs = made(), made()
        a = FlashAdamW(ours.parameters(), lr=1e-2, flash=flash, tile=1024)
        run(ours, a)
        run(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True))
        assert_same(ours.parameters(), theirs.parameters())
        clipped = made()
        c = FlashAdamW(clipped.parameters(), lr=1e-2, flash=flash, tile=1024, clip_norm=1e-3)
        run(clipped, c)
        assert len(set(on_all(c._penstock.last_norm.item()))) == 1
        a.close(), c.close()
        """,
    )


def test_gradients_are_accumulated_with_and_without_reducing_each(disk_path):
    rank_programs.run(
        disk_path,
        """
        def run(model, optimizer, synced):
            for step in range(3):
                for turn in range(2):
                    model.set_requires_gradient_sync(synced or turn == 1)
                    backward(model, step, turn)
                optimizer.step()
                optimizer.zero_grad()
        for synced in (True, False):
            theirs = sharded(network())
            run(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True), synced)
            for settings in ({}, {"gradient_memory": 0}):
                ours = sharded(network())
                a = FlashAdamW(ours.parameters(), lr=1e-2, flash=flash, tile=1024, **settings)
                run(ours, a, synced)
                assert bool(settings) == bool(a.wear().gradient_bytes_per_step)
                assert_same(ours.parameters(), theirs.parameters())
                a.close()
        """,
    )


IN_BACKWARD = """
def go(model, optimizer, synced=True, turns=1, steps=3):
    for step in range(steps):
        for turn in range(turns):
            model.set_requires_gradient_sync(synced or turn == turns - 1)
            backward(model, step, turn)
        if isinstance(optimizer, FlashAdamW):
            assert optimizer._penstock.overlap.is_under_way
        optimizer.step()
        optimizer.zero_grad()

for turns, synced in ((1, True), (2, True), (2, False)):
    theirs = sharded(network(), mesh)
    go(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True), synced, turns)
    for settings in ({}, {"gradient_memory": 0}):
        settings["accumulation"] = turns if synced else 1  # how often gradients are reduced
        ours = sharded(network(), mesh)
        a = FlashAdamW(
            ours.parameters(), lr=1e-2, flash=flash, tile=1024, overlap=True, **settings
        )
        go(ours, a, synced, turns)
        assert_same(ours.parameters(), theirs.parameters())
        a.close()
"""


def test_fsdp2_updates_in_backward_when_gradients_are_reduced(disk_path):
    rank_programs.run(disk_path, "mesh = init_device_mesh('cpu', (world,))\n" + IN_BACKWARD)


@pytest.mark.slow
def test_replicas_update_in_backward_when_gradients_are_averaged_over_all(disk_path):
    names = "mesh_dim_names=('replicas', 'shards')"
    rank_programs.run(
        disk_path, f"mesh = init_device_mesh('cpu', (2, 2), {names})\n" + IN_BACKWARD, 4
    )


def test_updates_in_backward_clip_by_the_norm_of_all_ranks_in_the_step_before(disk_path):
    rank_programs.run(
        disk_path,
        """
        def made(**settings):
            model = sharded(network())
            return model, FlashAdamW(
                model.parameters(), lr=1e-2, flash=flash, tile=1024, overlap=True, clip_norm=0.05,
                **settings
            )
        theirs = sharded(network())
        b, before, norms = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True), None, []
        for step in range(4):
            backward(theirs, step)
            norm = nn.utils.get_total_norm([p.grad for p in theirs.parameters()]).full_tensor()
            factor = torch.clamp(0.05 / (norm if before is None else before), max=1)
            for p in theirs.parameters():
                p.grad.mul_(factor)
            b.step(), b.zero_grad()
            before = norm
        first, a = made()
        train(first, a, 4)
        torch.testing.assert_close(a._penstock.last_norm, before)
        assert len(set(on_all(a._penstock.last_norm.item()))) == 1
        for mine, other in zip(first.parameters(), theirs.parameters()):
            torch.testing.assert_close(local(mine), local(other))
        for settings in ({}, {"gradient_memory": 0}):
            again, c = made(**settings)
            train(again, c, 4)
            assert_same(again.parameters(), first.parameters())
            c.close()
        a.close()
        """,
    )


DCP = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, get_state_dict, set_state_dict
)
from penstock.checkpoint.dcp import DcpReader, DcpWriter
first, dtype = int(sys.argv[3]), torch.bfloat16 if sys.argv[4] == "masters" else torch.float32

def made():
    model = sharded(network(seed=world, dtype=dtype))
    return model, FlashAdamW(model.parameters(), lr=1e-2, flash=flash, tile=1024)

def go_on(model, optimizer, step):
    # the same gradients however many ranks there are
    for index, param in enumerate(model.parameters()):
        whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + index))
        param.grad = distribute_tensor(whole.to(dtype), param.device_mesh, param.placements)
    optimizer.step()
    optimizer.zero_grad()

def wholes(model, optimizer):
    state = optimizer.state_dict()["state"]
    found = [p.detach().full_tensor().float() for p in model.parameters()]
    names = ("exp_avg", "exp_avg_sq", *(("master",) if dtype == torch.bfloat16 else ()))
    return found + [state[i][name].full_tensor() for i in range(6) for name in names]

def documents(model, optimizer):
    kept, states = get_state_dict(model, optimizer)
    return {"model": kept, "optimizer": states}

model, optimizer = made()
if first:
    state = documents(model, optimizer)
    dcp.load(state, storage_reader=DcpReader(f"{place}/kept{first - 1}"))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    before = torch.load(f"{place}/wholes{first - 1}")
    assert_same(wholes(model, optimizer), before)
for step in range(first, first + 2):
    go_on(model, optimizer, step)
weights = [local(p).clone() for p in model.parameters()]
options = StateDictOptions(full_state_dict=True)
assert get_optimizer_state_dict(model, optimizer, options=options)["state"]
assert_same(model.parameters(), weights)  # to look at states makes no step
steps = {float(each["step"]) for each in optimizer.state_dict()["state"].values()}
assert steps == {first + 2.0}, steps
dcp.save(documents(model, optimizer), storage_writer=DcpWriter(f"{place}/kept{first + 1}"))
found = wholes(model, optimizer)
if rank == 0:
    torch.save(found, f"{place}/wholes{first + 1}")
optimizer.close()
"""


@pytest.mark.parametrize("what", ["states", "masters"])
def test_states_are_saved_by_two_ranks_and_loaded_by_another_number(what, disk_path):
    rank_programs.run(disk_path, DCP, 2, "0", what)
    rank_programs.run(disk_path, DCP, 1, "2", what)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["states", "masters"])
def test_states_are_resharded_from_four_ranks_to_two_to_three(what, disk_path):
    for first, world in (("0", 4), ("2", 2), ("4", 3)):
        rank_programs.run(disk_path, DCP, world, first, what)


# -- refused, in words --------------------------------------------------------------------------------


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model():
    return nn.Linear(1000, 400)


def sharded():
    return fully_shard(model())


@pytest.mark.parametrize("settings", [{}, {"gradient_memory": 0}, {"overlap": True}], ids=str)
def test_a_model_that_is_sharded_later_is_refused_before_a_weight_changes(
    one_rank, small, settings
):
    """Accelerate makes the optimizer first, and exchanges its parameters for the sharded ones."""
    made = model()
    optimizer = FlashAdamW(made.parameters(), **small, **settings)
    fully_shard(made)
    optimizer.param_groups[0]["params"] = list(made.parameters())
    before = made.weight.full_tensor().clone()
    made(torch.ones(2, 1000)).sum().backward()
    with pytest.raises(ConfigError, match="shard the model first and make the optimizer then"):
        optimizer.step()
    assert torch.equal(made.weight.full_tensor(), before)
    optimizer.close()


def by_norm(params):
    nn.utils.clip_grad_norm_(params, 1e-3)


def by_value(params):
    nn.utils.clip_grad_value_(params, 10.0)


def unscaled(params):
    torch._foreach_mul_([each.grad for each in params], 0.5)


def negated(params):
    torch._foreach_neg_([each.grad for each in params])


def an_element(params):
    params[0].grad.to_local()[123, 457] += 1


@pytest.mark.parametrize("change", [by_norm, by_value, unscaled, negated, an_element])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_gradients_that_are_changed_after_use_are_an_error(one_rank, small, change, dtype):
    """Few elements are not zero, as in an embedding, so a look at some elements may miss a change."""
    made = fully_shard(nn.Linear(1001, 401, bias=False, dtype=dtype))
    made.weight.data.zero_()
    optimizer = FlashAdamW(made.parameters(), overlap=True, **small)
    inputs = torch.zeros(2, 1001, dtype=dtype)
    inputs[0, 457], inputs[1, 458] = 20, -20  # as many below zero as above
    made(inputs)[:, 123].sum().backward()
    change(list(made.parameters()))
    with pytest.raises(ConfigError, match="was changed between backward and step"):
        optimizer.step()
    optimizer.close()


def test_a_sum_that_is_not_computed_yet_is_refused(one_rank, small):
    mesh = init_device_mesh("cpu", (1,))
    local = torch.zeros(300)
    made = nn.Parameter(DTensor.from_local(local, mesh, [Partial()]))
    with pytest.raises(ConfigError, match=r"0 of group 0 \(300,\) is placed.*redistribute"):
        FlashAdamW([made], **small)


def test_a_state_dict_that_is_placed_otherwise_is_refused(one_rank, small):
    made, plain = sharded(), model()
    a = on_flash(torch.optim.AdamW(made.parameters()), **small)
    b = torch.optim.AdamW(plain.parameters())
    for each, optimizer in ((made, a), (plain, b)):
        each(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
    with pytest.raises(ConfigError, match=r"a plain tensor.*set_optimizer_state_dict"):
        a.load_state_dict(b.state_dict())
    c = FlashAdamW(plain.parameters(), **small)
    with pytest.raises(ConfigError, match=r"is a DTensor.*full_tensor"):
        c.load_state_dict(a.state_dict())
    a.close()
    c.close()


def test_a_plain_gradient_of_a_sharded_parameter_is_refused(one_rank, small):
    made = sharded()
    optimizer = FlashAdamW(made.named_parameters(), **small)
    made.weight.grad = torch.ones(400, 1000)
    with pytest.raises(ConfigError, match=r"'weight' .* is a DTensor.*gradient is a plain tensor"):
        optimizer.step()
    made.weight.grad = torch.distributed.tensor.DTensor.from_local(
        torch.ones(400, 1000), made.weight.device_mesh, made.weight.placements
    )
    optimizer.step()
    optimizer.close()
