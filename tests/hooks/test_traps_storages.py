"""Rules 4, 5, 26 to 28: a storage moves once, is known while it lives, and returns as it was."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trap_runs import ITEM, LARGE, SMALL, flow_count, leaf, storage_key

from offload_runs import (
    assert_nothing_held,
    gradients,
    movable,
    read_bytes,
    same_bits,
    wait_for_writes,
    wait_until,
    written_bytes,
)
from penstock.observe.recorder import Stage

# -- 4: a storage is transferred once, and aliases alias again -------------------------------------


def test_trap_04_fused_qkv_is_one_storage(session_for):
    """A fused projection is cut into three strided views, and attention saves all of them. They are
    one storage: it is written once and read once, not three times, and each view has its own place
    in it. Keys made of pointer and offset gave wrong gradients in three public offloaders.
    """
    torch.manual_seed(0)
    project = nn.Linear(32, 96)
    features = leaf(4, 16, 32)

    def loss():
        query, key, value = project(features).view(4, 16, 3, 32).unbind(2)
        weights = (query * key.tanh()).sum(-1, keepdim=True)
        return (weights * value).sum()

    leaves = [features, *project.parameters()]
    expected = gradients(loss, leaves)
    with session_for() as session:
        result = loss()
        wait_for_writes(session)
        assert written_bytes(session) < 2 * (4 * 16 * 96 * ITEM) + 8192 + 2 * 4096
        assert all(map(same_bits, gradients(result, leaves), expected))


def test_trap_04_three_views_are_one_write_and_one_read(session_for):
    """The counts of the story above, on the bare views."""
    weight = leaf(3 * LARGE)
    with session_for() as session:
        parts = (weight * 2).view(-1, 3).unbind(1)
        total = sum((part * part).sum() for part in parts)
        del parts
        wait_for_writes(session)
        assert flow_count(session, Stage.WRITE) == 1
        total.backward()
        assert flow_count(session, Stage.READ) == 1
    assert same_bits(weight.grad, 8 * weight.detach())


def test_trap_04_in_place_relu_and_pooling_share_a_storage(session_for):
    """ReLU saves its result, and max-pooling saves it again as its input."""
    images = leaf(2, 4, 32, 32)

    def loss():
        return F.max_pool2d(F.relu(images * 1.5, inplace=True), 2).pow(2).sum()

    expected = gradients(loss, [images])
    with session_for() as session:
        result = loss()
        wait_for_writes(session)
        whole, indices, pooled = 2 * 4 * 32 * 32 * ITEM, 2 * 4 * 16 * 16 * 8, 2 * 4 * 16 * 16 * ITEM
        assert written_bytes(session) <= whole + indices + pooled + 3 * 4096
        assert same_bits(gradients(result, [images])[0], expected[0])


def test_trap_04_a_product_with_itself_is_saved_once(session_for):
    """``a * a`` packs ``a`` twice."""
    weight = leaf(LARGE)
    with session_for() as session:
        activation = weight * 2
        square = activation * activation
        del activation
        wait_for_writes(session)
        assert flow_count(session, Stage.WRITE) == 1
        left, right = square.grad_fn._saved_self, square.grad_fn._saved_other
        assert left.data_ptr() == right.data_ptr(), "aliases alias again"
        square.sum().backward()
        assert flow_count(session, Stage.READ) == 1


def test_trap_04_an_expanded_tensor_is_as_large_as_its_storage(session_for):
    """``expand`` makes 16 kB look like 1.6 MB. What moves is the storage, and strides of 0 return."""
    weight = leaf(LARGE, 1)

    def loss():
        wide = (weight * 2).expand(LARGE, 100)
        return (wide * wide).sum()

    expected = gradients(loss, [weight])
    with session_for() as session:
        result = loss()
        wait_for_writes(session)
        assert written_bytes(session) <= LARGE * ITEM + 4096
        assert result.grad_fn.next_functions[0][0]._saved_self.stride() == (1, 0)
        assert same_bits(gradients(result, [weight])[0], expected[0])


def test_trap_04_a_small_view_is_gathered(session_for):
    """Where a view covers a small part of its storage, only that part is kept, and the rest goes."""
    weight = leaf(64 * LARGE)
    with session_for() as session:
        activation = weight * 2
        rest = weakref.ref(activation.untyped_storage())
        part = activation[LARGE : 2 * LARGE]
        square = (part * part).sum()
        del activation, part
        assert rest() is None
        wait_for_writes(session)
        assert written_bytes(session) <= 2 * (LARGE * ITEM + 4096)
        square.backward()
    expected = torch.zeros(64 * LARGE)
    expected[LARGE : 2 * LARGE] = 8 * weight.detach()[LARGE : 2 * LARGE]
    assert same_bits(weight.grad, expected)


@pytest.mark.parametrize("offset", [1, 5, 16])
@pytest.mark.parametrize("count", [SMALL, LARGE + 3], ids=["small", "large"])
def test_trap_04_a_gathered_view_is_aligned_as_before(session_for, offset, count):
    """BLAS takes another path, with other roundings, where a vector begins at another address
    modulo a cache line. So a copy has to begin where the original did.
    """
    weight = leaf(16 * LARGE)
    with session_for() as session:
        activation = weight * 2
        part = activation[offset : offset + count]
        skew = part.data_ptr() % 64
        square = part * part
        del activation, part
        wait_for_writes(session)
        assert square.grad_fn._saved_self.data_ptr() % 64 == skew


# -- 5 and 27: addresses come back -----------------------------------------------------------------


def came_back(seen):
    """Whether one of them is there twice."""
    return len(set(seen)) < len(seen)


def test_trap_05_a_reused_address_is_another_storage(session_for):
    """An activation is spilled and freed, and the allocator hands its address, and the address of
    its StorageImpl, to the next one. A table keyed by either would give the second graph the bytes
    of the first.
    """
    weight = leaf(LARGE)
    keys, addresses, losses = [], [], []
    with session_for() as session:
        while len(keys) < 20 or not (came_back(keys) and came_back(addresses)):
            assert len(keys) < 400, "no address comes back, or no StorageImpl: this shows nothing"
            activation = weight * (len(losses) + 1)
            keys.append(storage_key(activation))
            addresses.append(activation.data_ptr())
            losses.append((activation * activation).sum())
            del activation
            wait_for_writes(session)
        assert flow_count(session, Stage.WRITE) == len(losses)
        for round_, loss in enumerate(losses):
            weight.grad = None
            loss.backward()
            factor = float(round_ + 1)
            activation = (weight * factor).detach()
            assert same_bits(weight.grad, (activation + activation) * factor)


def test_trap_05_a_key_alone_proves_nothing(session_for):
    """Should an entry ever be found under a key that came back, its storage is compared as well."""
    with session_for(policy="keep") as session:
        old, new = torch.ones(LARGE), torch.ones(LARGE)
        packed = session.hooks.pack(old)
        table = session.executor._table
        table.entries[storage_key(new)] = packed.saved
        assert table.find(new.untyped_storage(), old, old._version) is None
        assert table.find(old.untyped_storage(), old, old._version) is packed.saved
        del table.entries[storage_key(new)]


def test_trap_27_a_key_never_outlives_its_storage(session_for):
    """The key was removed when the write had completed, the storage was released before that, and
    between the two another storage took the address: two steps were bit-identical, the third was
    NaN. So at any moment every key leads to a living storage, in whichever thread it was let go.
    """
    weight = leaf(8 * LARGE)
    with session_for(device_memory="4MiB") as session:
        losses = []
        for round_ in range(60):
            activation = weight * (round_ + 1)
            losses.append((activation * activation).sum())
            del activation
            for key, saved in tuple(movable(session).items()):
                source = saved.source()
                assert source is None or source._cdata == key
            if len(losses) > 8:
                losses.pop(0).backward()
        wait_for_writes(session)
        assert all(each.source() is not None for each in movable(session).values())
        losses.clear()
        assert_nothing_held(session)


def test_trap_27_three_steps_that_release_while_writing(session_for):
    """The story's own run: many sizes, freed by the writer's threads while forward allocates."""
    torch.manual_seed(0)
    sizes = [96, 128, 96, 160, 128, 96, 192, 128]
    layers = [nn.Linear(n, m) for n, m in zip(sizes, sizes[1:] + sizes[:1], strict=True)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU()))).double()
    features = torch.randn(600, 96, dtype=torch.float64)

    def step():
        model.zero_grad()
        model(features).pow(2).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step()
    with session_for(model, device_memory="3MiB") as session:
        for _ in range(3):
            assert all(map(same_bits, step(), expected))
        assert written_bytes(session) > 0


# -- 26 and 28: offsets, skews, alignment ----------------------------------------------------------


@pytest.mark.parametrize("where", ["flash", "host"])
def test_trap_26_offsets_count_from_where_the_data_begin(session_for, where):
    """``as_strided`` counts its offset from the start of the *storage*, not of the view it is called
    on. A reload that lay at a skew inside its buffer read wrong indices, and the backward of
    max-pooling, which takes int64 indices at their word, crashed. Torch's large CPU tensors begin 64
    bytes past a page and so every reload here lies at a skew.
    """
    images = leaf(4, 8, 96, 96)

    def loss():
        pooled, indices = F.max_pool2d((images * 1.5), 3, 2, return_indices=True)
        narrow = pooled[:, 1:7, 3:, 1::2]
        return (narrow * narrow).sum() + (indices.gather(3, indices % 40) * 0.5 * pooled).sum()

    expected = gradients(loss, [images])
    tier = {} if where == "flash" else {"flash": (), "flash_capacity": None, "host_memory": "16MiB"}
    with session_for(**tier) as session:
        result = loss()
        wait_for_writes(session)
        assert written_bytes(session, where) > images.numel() * ITEM
        assert same_bits(gradients(result, [images])[0], expected[0])
        assert read_bytes(session, where) > images.numel() * ITEM


def test_trap_26_a_view_keeps_its_offset_in_its_own_element_size(session_for):
    """A storage saved as float32 and, through a view of another dtype, as complex64."""
    weight = leaf(2 * LARGE)

    def loss():
        activation = weight * 2
        pairs = torch.view_as_complex(activation.view(-1, 2))[7:]
        return (activation * activation).sum() + torch.view_as_real(pairs * pairs).sum()

    expected = gradients(loss, [weight])
    with session_for() as session:
        result = loss()
        wait_for_writes(session)
        assert flow_count(session, Stage.WRITE) == 1
        assert same_bits(gradients(result, [weight])[0], expected[0])


@pytest.mark.parametrize("where", ["flash", "host"])
@pytest.mark.parametrize("skew", [0, 4, 20, 64, 4092])
def test_trap_28_data_return_to_the_same_alignment(session_for, where, skew):
    """Large CPU tensors of torch start 64 bytes past a page, those of NumPy anywhere. O_DIRECT wants
    more, so the aligned window around the live memory is written, without a copy. What comes back
    begins at the same place within a cache line: gemv rounds otherwise where it does not.
    """
    memory = np.zeros(LARGE * ITEM + 8192, np.uint8)
    start = -memory.ctypes.data % 4096 + skew
    array = memory[start : start + LARGE * ITEM].view(np.float32)
    array[:] = np.arange(LARGE)
    tier = {} if where == "flash" else {"flash": (), "flash_capacity": None, "host_memory": "16MiB"}
    with session_for(**tier) as session:
        tensor = torch.from_numpy(array)
        product = leaf(LARGE) * tensor
        alive = weakref.ref(tensor.untyped_storage())
        del tensor, array
        wait_for_writes(session)
        wait_until(lambda: alive() is None, "the source is released")
        back = product.grad_fn._saved_other
        assert back.data_ptr() % 64 == skew % 64
        assert same_bits(back, torch.arange(LARGE, dtype=torch.float32))
        assert session.inspect().device.restored_bytes > 0, "it was not read into the arena"
