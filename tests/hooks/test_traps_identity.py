"""Rules 1 to 5 and 26 to 28: what a saved tensor is, and that it comes back as what it was.

One storage above the floor of 8 KiB is 4096 floats here (``LARGE``); ``SMALL`` ones are counted but
never move, ``TINY`` ones are not even counted.
"""

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload_runs import (
    arena,
    assert_nothing_held,
    counted,
    gradients,
    read_bytes,
    same_bits,
    wait_for_writes,
    wait_until,
    written_bytes,
)
from penstock.core.errors import HookError, InPlaceError
from penstock.observe.recorder import Stage

LARGE, SMALL, TINY = 4096, 1536, 16
ITEM = 4


def leaf(*shape, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, **options).requires_grad_()


def storage_key(tensor):
    return tensor.untyped_storage()._cdata


def taken_keys(session):
    """Keys of the storages that the executor is in charge of."""
    return set(session.executor._by_storage)


def flow_count(session, stage, tier="flash"):
    return session.recorder.snapshot().flow(stage, tier).count


# -- 1: the version check -------------------------------------------------------------------------

HANDLES = [
    pytest.param(TINY, "all", id="kept"),
    pytest.param(SMALL, "all", id="small"),
    pytest.param(LARGE, "keep", id="resident"),
    pytest.param(LARGE, "all", id="spilled"),
]


@pytest.mark.parametrize(("size", "policy"), HANDLES)
def test_trap_01_in_place_edit_of_a_kept_tensor_raises(session_for, size, policy):
    """Hooks switch off autograd's own check. A kept tensor that is edited after it was saved then
    gives a wrong gradient in silence: 24 instead of 4 in the first offloader we looked at. Where
    autograd raises without us, it must raise with us, whatever became of the tensor.
    """
    weight = leaf(size)

    def edited():
        activation = weight * 2
        square = activation * activation
        activation.add_(1)
        square.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edited()
    with session_for(policy=policy), pytest.raises(InPlaceError, match="inplace") as caught:
        edited()
    assert isinstance(caught.value, HookError)
    assert f"[{size}]" in str(caught.value)
    assert "is at version 1; expected version 0" in str(caught.value)


@pytest.mark.parametrize(("size", "policy"), HANDLES)
def test_trap_01_edit_through_a_view_raises(session_for, size, policy):
    """A view shares its base's version: writing one element through it counts."""
    weight = leaf(size)
    with session_for(policy=policy):
        activation = weight * 2
        square = activation * activation
        activation.view(2, -1)[0, :3] = 7
        with pytest.raises(InPlaceError):
            square.sum().backward()


@pytest.mark.parametrize(("size", "policy"), HANDLES)
def test_trap_01_edit_of_an_output_after_it_was_saved_raises(session_for, size, policy):
    """``exp`` saves its own output, and that is what the user gets hold of."""
    weight = leaf(size)
    with session_for(policy=policy):
        result = weight.exp()
        result.mul_(2)
        with pytest.raises(InPlaceError):
            result.sum().backward()


def test_trap_01_edit_of_a_kept_parameter_raises(session_for):
    """An optimizer step between forward and backward."""
    layer = nn.Linear(64, 64, bias=False)
    with session_for(layer):
        loss = layer(leaf(8, 64)).sum()
        with torch.no_grad():
            layer.weight.mul_(0.9)
        with pytest.raises(InPlaceError):
            loss.backward()


def test_trap_01_edit_of_a_tensor_of_a_foreign_kind_raises(session_for):
    """A conjugate is no plain strided tensor, so it stays as it is; it can be edited all the same."""
    weight = leaf(LARGE, dtype=torch.complex64)

    def edited():
        activation = weight * 2
        product = activation.conj() * weight
        activation.mul_(3)
        torch.view_as_real(product).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edited()
    with session_for(), pytest.raises(InPlaceError):
        edited()


def test_trap_01_a_copy_is_right_by_itself(session_for):
    """A small view of a large storage is copied out when it is saved, so what becomes of the original
    is of no matter: the gradient is that of the values that were saved.
    """
    weight = leaf(64 * LARGE)
    with session_for():
        activation = weight * 2
        part = activation[:LARGE]
        square = part * part
        activation.add_(1)
        square.sum().backward()
    assert same_bits(weight.grad[:LARGE], 8 * weight.detach()[:LARGE])


@pytest.mark.parametrize("policy", ["keep", "all"])
def test_trap_01_saves_at_two_versions_are_two(session_for, policy):
    """One storage, saved, edited, and saved again. Its second save must not be taken for the first:
    then the second graph's gradient would be made of the values before the edit.
    """
    weight = leaf(LARGE)

    def second_graph(written=lambda: None):
        activation = weight * 2
        first = activation.sin()
        written()
        activation.add_(1)
        return first, activation.sin()

    expected = gradients(second_graph()[1].sum, [weight])
    with session_for(policy=policy) as session:
        first, second = second_graph(lambda: wait_for_writes(session))
        wait_for_writes(session)
        weight.grad = None
        second.sum().backward()
        assert same_bits(weight.grad, expected[0])
        with pytest.raises(InPlaceError):
            first.sum().backward()


def test_trap_01_an_edit_before_the_save_is_none(session_for):
    """In-place ReLU edits its input, and what is saved is the edited tensor. Nothing is wrong."""
    weight = leaf(LARGE)

    def loss():
        return F.relu(weight * 2, inplace=True).pow(2).sum()

    expected = gradients(loss, [weight])
    for policy in ("keep", "all"):
        with session_for(policy=policy):
            assert same_bits(gradients(loss, [weight])[0], expected[0])


# -- 2 and 3: weights are never moved -------------------------------------------------------------


class FlatLinear(nn.Module):
    """A layer whose weight is a slice of a flat parameter, as FSDP1 makes them."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.randn(2 * LARGE))

    def forward(self, features):
        return F.linear(features, self.flat[LARGE:].view(64, 64))


def tied():
    embedding = nn.Linear(64, 64, bias=False)
    other = nn.Linear(64, 64, bias=False)
    other.weight = embedding.weight
    return nn.Sequential(embedding, other)


def frozen():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(64, 64),
        lambda: nn.Conv2d(16, 64, 3),
        FlatLinear,
        tied,
        frozen,
        lambda: nn.BatchNorm1d(LARGE).eval(),
        lambda: nn.Embedding(64, 64),
    ],
    ids=["linear", "conv", "flat", "tied", "frozen", "batchnorm", "embedding"],
)
@pytest.mark.parametrize("told", [True, False], ids=["given", "found"])
def test_trap_02_weights_and_buffers_are_not_moved(session_for, build, told):
    """``Linear`` saves ``weight.t()``, which is no ``Parameter``; ``BatchNorm`` saves its running
    mean. An offloader that asks ``isinstance(tensor, Parameter)`` writes the whole model each step.
    Here the model is known, or is met when it is called first.
    """
    torch.manual_seed(0)
    model = build()
    state = [*model.parameters(), *model.buffers()]
    if isinstance(model, nn.Embedding):
        features = torch.arange(8)
    elif isinstance(model, nn.Conv2d):
        features = leaf(1, 16, 4, 4)
    else:
        features = leaf(2, LARGE if isinstance(model, nn.BatchNorm1d) else 64)
    with session_for(model if told else None) as session:
        loss = model(features).pow(2).sum()
        assert taken_keys(session).isdisjoint(map(storage_key, state))
        loss.backward()


def test_trap_02_a_leaf_of_no_module_is_not_moved(session_for):
    """Functional code keeps its weights in a list. What requires a gradient and has no history is
    one, also behind views.
    """
    weights = [leaf(64, 64, seed=seed) for seed in range(3)]
    with session_for() as session:
        features = leaf(2, 64)
        for weight in weights:
            features = F.linear(features, weight.t().contiguous().t()[:, :64])
        wait_for_writes(session)
        assert (
            flow_count(session, Stage.WRITE) == 3
        )  # the contiguous copies are tensors by themselves
        features = features @ weights[0] @ weights[1].transpose(0, 1).unsqueeze(0).squeeze(0)
        wait_for_writes(session)
        assert flow_count(session, Stage.WRITE) == 3
        assert taken_keys(session).isdisjoint(map(storage_key, weights))


def test_trap_02_weights_replaced_in_training_are_known_after_the_step(session_for):
    """``model.half()``, an unshard, or a loaded checkpoint give parameters new storages."""
    model = nn.Linear(64, 64).requires_grad_(False)
    features = leaf(2, 64)
    with session_for(model) as session:
        model(features).sum().backward()
        model.weight.data = model.weight.data.clone()
        session.step()
        model(features).sum().backward()
        assert flow_count(session, Stage.WRITE) == 0


def test_trap_02_optimizer_state_is_not_moved(session_for):
    """A differentiable use of a momentum buffer, as meta-learning makes it."""
    weight = leaf(LARGE)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    with session_for(optimizer=optimizer) as session:
        weight.pow(2).sum().backward()
        optimizer.step()
        momentum = optimizer.state[weight]["momentum_buffer"]
        loss = (weight * 2 * momentum).sum()
        assert storage_key(momentum) not in taken_keys(session)
        loss.backward()


def test_trap_03_copies_of_weights_under_autocast_are_not_moved(session_for):
    """Under autocast ``Linear`` saves a bfloat16 copy of its weight: a new storage, in no set of
    parameters. Moving those would write the model once more each step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 1))
    features = leaf(2, 128)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return model(features).float().sum()

    leaves = [features, *model.parameters()]
    expected = gradients(loss, leaves)
    with session_for(model) as session:
        found = gradients(loss, leaves)
        assert flow_count(session, Stage.WRITE) == 0
        assert counted(session, "kept.weights") >= 2
    assert all(map(same_bits, found, expected))


# -- 4: a storage is transferred once, and aliases alias again ------------------------------------


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


# -- 5 and 27: addresses come back ----------------------------------------------------------------


def test_trap_05_a_reused_address_is_another_storage(session_for):
    """An activation is spilled and freed, and the allocator hands its address, and the address of
    its StorageImpl, to the next one. A table keyed by either would give the second graph the bytes
    of the first.
    """
    weight = leaf(LARGE)
    keys, addresses, losses = [], [], []
    with session_for() as session:
        for round_ in range(40):
            activation = weight * (round_ + 1)
            keys.append(storage_key(activation))
            addresses.append(activation.data_ptr())
            losses.append((activation * activation).sum())
            del activation
            wait_for_writes(session)
        assert len(set(addresses)) < len(addresses), "no address came back: the test shows nothing"
        assert len(set(keys)) < len(keys), "no StorageImpl came back: the test shows nothing"
        assert flow_count(session, Stage.WRITE) == 40
        for round_, loss in enumerate(losses):
            weight.grad = None
            loss.backward()
            factor = float(round_ + 1)
            activation = (weight * factor).detach()
            assert same_bits(weight.grad, (activation + activation) * factor)


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
            for key, saved in tuple(session.executor._by_storage.items()):
                source = saved.source()
                assert source is None or source._cdata == key
            if len(losses) > 8:
                losses.pop(0).backward()
        wait_for_writes(session)
        assert all(each.source() is not None for each in session.executor._by_storage.values())
        losses.clear()
        assert_nothing_held(session)


def test_trap_27_three_steps_that_release_while_writing(session_for):
    """The story's own run: many sizes, freed by the writer's threads while forward allocates."""
    torch.manual_seed(0)
    sizes = [96, 128, 96, 160, 128, 96, 192, 128]
    layers = [nn.Linear(n, m) for n, m in zip(sizes, sizes[1:] + sizes[:1], strict=True)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU()))).double()
    features = torch.randn(128, 96, dtype=torch.float64)

    def step():
        model.zero_grad()
        model(features).pow(2).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step()
    with session_for(model, device_memory="3MiB") as session:
        for _ in range(3):
            assert all(map(same_bits, step(), expected))
        assert written_bytes(session) > 0


# -- 26 and 28: offsets, skews, alignment ---------------------------------------------------------


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
        assert arena(session).used_bytes > 0, "it was not read into the arena"
