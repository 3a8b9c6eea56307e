"""Records of a flash optimizer stay in memory that a session has left, as long as nobody needs it."""

import gc

import pytest
import torch

import penstock
from penstock.core.units import MIB
from penstock.store.account import host_account
from weights_rig import Chain, bits, built, failing, flash_adamw, inputs, scripted, train_step

WIDTH = 512
"""Of a layer, whose weight is one MiB, and the records of that two."""
DEPTH = 8
TILE = 1 << 16
RECORD = 8 * TILE


@pytest.fixture(autouse=True)
def nothing_is_held():
    """Not even by optimizers of other tests that were dropped."""
    gc.collect()


def chain():
    return built(lambda: Chain(depth=DEPTH, width=WIDTH))


def batches(steps):
    return inputs(steps, shape=(64, WIDTH))


def adamw(model, directory, **options):
    return flash_adamw(model, directory, lr=1e-3, tile=TILE, squeeze=False, **options)


def land(optimizer):
    """Wait until no record moves."""
    pipeline = optimizer._penstock.pipeline
    with pipeline._wake:
        pipeline._wake.wait_for(lambda: not any(each.is_moving for each in pipeline._buffers))


def moved(optimizer):
    store = optimizer._penstock.store
    return store.read, store.written


@pytest.mark.parametrize("overlap", [False, True])
def test_records_stay_in_what_is_left_until_others_need_it(disk_path, overlap):
    plain, model = chain(), chain()
    data = batches(8)
    optimizer = adamw(plain, disk_path, overlap=overlap)
    expected = [train_step(plain, optimizer, x) for x in data]
    optimizer.close()
    optimizer = adamw(model, disk_path, overlap=overlap)
    memory, settings = host_account(), {"weights": "flash", "flash": str(disk_path)}
    with penstock.offload(model, memory="64MiB", floor="64KiB", **settings):
        found = [train_step(model, optimizer, x) for x in data[:4]]
        land(optimizer)
        before = moved(optimizer)
        found += [train_step(model, optimizer, x) for x in data[4:6]]
        land(optimizer)
        assert moved(optimizer) == before  # all stay
        held = memory.used_by("optimizer")
        assert held >= 2 * DEPTH * MIB
        others = memory.child("others")
        while held - memory.used_by("optimizer") < 3 * RECORD:  # others may free theirs meanwhile
            missing = memory.free_bytes + 3 * RECORD
            assert others.make_room(missing)
            assert others.try_take(missing, "others")
        assert optimizer._penstock.pipeline.give_way(0) == 0  # none is retiring any more
        found += [train_step(model, optimizer, x) for x in data[6:]]
        land(optimizer)
        assert moved(optimizer) > before
        assert memory.peak_bytes <= memory.limit_bytes
        others.close()
        states = optimizer.state_dict()["state"]
    land(optimizer)
    ring = optimizer._penstock.pipeline.memory_bytes
    assert memory.used_by("optimizer") <= ring + 2 * MIB
    assert found == expected
    assert all(map(torch.equal, map(bits, plain.parameters()), map(bits, model.parameters())))
    assert len(states) == DEPTH
    optimizer.close()
    assert memory.used_by("optimizer") == 0


def test_a_record_that_cannot_be_written_stays_though_others_need_its_memory(disk_path):
    plain, model = chain(), chain()
    data = batches(5)
    optimizer = adamw(plain, disk_path)
    expected = [train_step(plain, optimizer, x) for x in data]
    optimizer.close()
    memory, settings = host_account(), {"weights": "flash", "flash": str(disk_path)}
    with scripted() as engine:
        optimizer = adamw(model, disk_path)
        with penstock.offload(model, memory="64MiB", floor="64KiB", **settings):
            found = [train_step(model, optimizer, x) for x in data[:4]]
            pipeline, held = optimizer._penstock.pipeline, memory.used_by("optimizer")
            engine.fault = failing("write", 1 << 20)
            assert pipeline.give_way(3 * RECORD) >= 3 * RECORD
            land(optimizer)
            assert memory.used_by("optimizer") == held
            assert pipeline.write_failure is not None
            assert pipeline.give_way(3 * RECORD) == 0  # it is tried again in the next step
            engine.fault = lambda _: None
            found += [train_step(model, optimizer, x) for x in data[4:]]
        optimizer.close()
    assert found == expected
    assert all(map(torch.equal, map(bits, plain.parameters()), map(bits, model.parameters())))


@pytest.mark.parametrize("options", [{"host_memory": "7MiB"}, {"durable": True}], ids=str)
def test_records_that_have_a_limit_or_are_written_in_each_step_get_nothing(disk_path, options):
    model = chain()
    optimizer = adamw(model, disk_path, **options)
    settings = {"weights": "flash", "flash": str(disk_path)}
    with penstock.offload(model, memory="64MiB", floor="64KiB", **settings):
        for x in batches(3):
            train_step(model, optimizer, x)
        pipeline = optimizer._penstock.pipeline
        assert pipeline.count * RECORD <= max(pipeline.memory_bytes, 7 * MIB)
        assert not any(each.is_spare for each in pipeline._buffers)
    optimizer.close()
