"""Every way to touch a weight that rests: the same values and the same training as without Penstock."""

import copy
import ctypes
import gc
import io
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

from penstock.core.errors import PenstockWarning
from penstock.homed import home_of
from penstock.io.engine import Priority
from penstock.weights.resting import RestingParameter
from weights_rig import (
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    assert_same,
    bits,
    built,
    homes_of,
    inputs,
    on_flash,
    scripted,
    send_home,
    sgd,
    state_of,
    trained,
)

LIMIT = 4 * WEIGHT_BYTES
NAME = "layers.2.weight"


def weight(model):
    return model.layers[2].weight


def saved(thing, **options):
    """What ``torch.load`` makes of what ``torch.save`` makes of something."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


# -- reading ----------------------------------------------------------------------------------------


def address_read(model):
    p = weight(model)
    found = (ctypes.c_float * p.numel()).from_address(p.data_ptr())
    return np.array(found).tolist()


def compiled_read(model):
    @torch.compile(backend="aot_eager")
    def function(p):
        return p.sin() + 1

    return bits(function(weight(model)))


def functional_call(model):
    values = {name: parameter * 2 for name, parameter in model.named_parameters()}
    return bits(torch.func.functional_call(model, values, inputs(1)[0]))


def functional_gradient(model):
    """Gradients of values that stand in for the weights, each of them wrapped by ``torch.func``."""

    def loss(values, x):
        return torch.func.functional_call(model, values, x).square().mean()

    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = torch.func.grad(loss)(values, inputs(1)[0])
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, inputs(2)[1][:, None])
    return {name: bits(grad) for name, grad in found.items()}, {k: bits(v) for k, v in each.items()}


def pulled_back(model):
    found, pull = torch.func.vjp(model, inputs(1)[0])
    return bits(found), bits(pull(torch.ones_like(found))[0])


def copied_in_inference(model):
    """A copy whose weights have no versions."""
    with torch.inference_mode():
        return bits(copy.deepcopy(model)(inputs(1)[0]))


def averaged(model):
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    with torch.no_grad():
        weight(model).mul_(0.5)
    ema.update_parameters(model)
    ema.update_parameters(model)
    return state_of(ema)


def whole_model_saved(model):
    return state_of(saved(model, weights_only=False))


def iterated(model):
    return [bits(row) for row in weight(model)][:3]


def gradient_of_norm(model):
    """A penalty, as of weight decay by hand."""
    (weight(model).square().sum() * 0.01).backward()
    return bits(weight(model).grad)


READS = {
    "add": lambda m: bits(weight(m) + 1),
    "radd": lambda m: bits(1 + weight(m)),
    "matmul": lambda m: bits(torch.ones(3, WIDTH) @ weight(m)),
    "linear": lambda m: bits(F.linear(inputs(1)[0], weight(m))),
    "indexing": lambda m: bits(weight(m)[3, 5:9]),
    "item": lambda m: weight(m)[0, 0].item(),
    "tolist": lambda m: weight(m).tolist(),
    "repr": lambda m: repr(weight(m)),
    "format": lambda m: f"{weight(m).sum():.6f}",
    "iteration": iterated,
    "contains": lambda m: 7.5 in weight(m),
    "numpy": lambda m: weight(m).detach().numpy().tolist(),
    "array": lambda m: np.asarray(weight(m).detach()).tolist(),
    "dlpack": lambda m: bits(torch.from_dlpack(weight(m).detach())),
    "data_ptr": address_read,
    "data": lambda m: bits(weight(m).data),
    "detach": lambda m: bits(weight(m).detach()),
    "clone": lambda m: bits(weight(m).clone()),
    "transposed": lambda m: bits(weight(m).T),
    "storage": lambda m: bytes(weight(m).untyped_storage()[:WEIGHT_BYTES]),
    "equal": lambda m: torch.equal(weight(m), weight(m).clone()),
    "cat": lambda m: bits(torch.cat([weight(m), torch.zeros(1, WIDTH)])),
    "stack": lambda m: bits(torch.stack((weight(m), weight(m)))),
    "out": lambda m: bits(torch.add(weight(m).detach(), 1, out=torch.empty(WIDTH, WIDTH))),
    "einsum": lambda m: bits(torch.einsum("ij,jk->ik", weight(m), weight(m))),
    "norm": lambda m: bits(weight(m).norm()),
    "foreach": lambda m: [bits(each) for each in torch._foreach_norm(list(m.parameters()))],
    "state_dict": lambda m: {k: bits(v) for k, v in m.state_dict().items()},
    "state_dict with parameters": lambda m: {
        k: bits(v) for k, v in m.state_dict(keep_vars=True).items()
    },
    "save a parameter": lambda m: bits(saved(weight(m))),
    "save a state dict": lambda m: saved(m.state_dict()),
    "save the model": whole_model_saved,
    "pickle": lambda m: bits(pickle.loads(pickle.dumps(weight(m)))),
    "copy": lambda m: bits(copy.copy(weight(m))),
    "deepcopy": lambda m: bits(copy.deepcopy(weight(m))),
    "deepcopy the model": lambda m: state_of(copy.deepcopy(m)),
    "to another type": lambda m: bits(weight(m).to(torch.float64)),
    "half": lambda m: bits(weight(m).half()),
    "meta": lambda m: tuple(weight(m).to("meta").shape),
    "empty_like": lambda m: tuple(torch.empty_like(weight(m)).shape),
    "zeros_like": lambda m: bits(torch.zeros_like(weight(m))),
    "new_zeros": lambda m: bits(weight(m).new_zeros(3)),
    "new parameter": lambda m: bits(nn.Parameter(weight(m).detach().clone())),
    "parameters_to_vector": lambda m: bits(nn.utils.parameters_to_vector(m.parameters())),
    "vjp": pulled_back,
    "copy in inference": copied_in_inference,
    "functional gradients": functional_gradient,
    "functional_call": functional_call,
    "compiled function": compiled_read,
    "averaged model": averaged,
    "gradient of a penalty": gradient_of_norm,
    "torch.func.grad": lambda m: bits(torch.func.grad(lambda p: p.sin().sum())(weight(m))),
    "torch.func.vmap": lambda m: bits(torch.func.vmap(lambda row: row.sum())(weight(m))),
    "autograd.grad": lambda m: bits(torch.autograd.grad(weight(m).exp().sum(), weight(m))[0]),
    "allclose": lambda m: torch.allclose(weight(m), weight(m) + 0),
    "svd": lambda m: bits(torch.linalg.svdvals(weight(m))),
    "bool": lambda m: bool(weight(m)[0].any()),
    "numpy function": lambda m: float(np.sum(weight(m).detach().numpy())),
    "histogram": lambda m: bits(torch.histc(weight(m), 5)),
    "inference": lambda m: bits(_inference(m)),
}


def _inference(model):
    with torch.inference_mode():
        return model(inputs(1)[0])


# -- writing ----------------------------------------------------------------------------------------


def written(function):
    """A way that changes the weight, and returns what it is afterwards."""

    def touch(model):
        with torch.no_grad():
            function(model)
        return bits(weight(model))

    return touch


def through_numpy(model):
    weight(model).detach().numpy()[1] = 0.5


def through_address(model):
    p = weight(model)
    (ctypes.c_float * p.numel()).from_address(p.data_ptr())[5] = 0.25


def through_alias(model):
    alias = weight(model).data
    alias[2] = 0.5
    alias.mul_(0.5)


def through_alias_kept(model):
    """An alias that outlives calls of the module: each sees what the other wrote."""
    alias = weight(model).data
    outputs = [bits(model(inputs(1)[0])), bits(model.layers[2](inputs(1)[0]))]
    alias.mul_(0.5)
    outputs += [bits(model.layers[2](inputs(1)[0])), bits(model(inputs(1)[0]))]
    weight(model).add_(0.125)
    outputs.append(bits(alias))
    model.alias_kept = [alias]
    return outputs


def through_view(model):
    view = weight(model).view(-1)
    view[:7] = 0.25


def in_inference(model):
    with torch.inference_mode():
        weight(model).mul_(0.5)


def loaded(model):
    state = {name: torch.full_like(value, 0.01) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def spun(model):
    values = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(values * 0.5, model.parameters())


def out_argument(model):
    torch.mul(torch.ones(WIDTH, WIDTH), 0.01, out=weight(model).data)


def norm_clipped(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    model.zero_grad()
    weight(model).mul_(float(total) / 100)


def stepped(make, **options):
    def touch(model):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer = make(model.parameters(), **options)
        optimizer.step()
        optimizer.step()
        model.zero_grad()

    def way(model):
        touch(model)
        return state_of(model)

    return way


def assigned(model):
    weight(model).data = torch.full((WIDTH, WIDTH), 0.01)


def assigned_itself(model):
    weight(model).data = weight(model).data


def emptied(model):
    model.layers[2].to_empty(device="cpu")
    weight(model).fill_(0.01)


def shared_with_processes(model):
    weight(model).share_memory_()
    return weight(model).is_shared(), bits(weight(model)), bits(model(inputs(1)[0]))


def kept_alias(model):
    with torch.no_grad():
        return through_alias_kept(model)


WRITES = {
    "mul_": written(lambda m: weight(m).mul_(0.5)),
    "imul": written(lambda m: weight(m).__imul__(0.5)),
    "clamp_": written(lambda m: weight(m).clamp_(-0.05, 0.05)),
    "copy_": written(lambda m: weight(m).copy_(torch.full((WIDTH, WIDTH), 0.02))),
    "zero_": written(lambda m: weight(m).zero_()),
    "set a row": written(lambda m: weight(m).__setitem__(3, 0.5)),
    "index_fill_": written(lambda m: weight(m).index_fill_(0, torch.tensor([1]), 0.5)),
    "init.normal_": written(
        lambda m: nn.init.normal_(weight(m), generator=torch.Generator().manual_seed(3))
    ),
    "init.xavier_": written(lambda m: nn.init.constant_(weight(m), 0.01)),
    "init.orthogonal_": written(
        lambda m: nn.init.orthogonal_(weight(m), generator=torch.Generator().manual_seed(3))
    ),
    "data.mul_": written(lambda m: weight(m).data.mul_(0.5)),
    "detach().mul_": written(lambda m: weight(m).detach().mul_(0.5)),
    "numpy alias": written(through_numpy),
    "address": written(through_address),
    "alias": written(through_alias),
    "alias that is kept": kept_alias,
    "view": written(through_view),
    "inference mode": written(in_inference),
    "out=": written(out_argument),
    "to_empty": written(emptied),
    "assign to data": written(assigned),
    "assign its own data": written(assigned_itself),
    "load_state_dict": written(loaded),
    "vector_to_parameters": written(spun),
    "clip_grad_norm_": written(norm_clipped),
    "foreach_mul_": written(lambda m: torch._foreach_mul_(list(m.parameters()), 0.5)),
    "SGD, foreach": stepped(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": stepped(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "AdamW": stepped(torch.optim.AdamW, lr=0.01),
    "AdamW, foreach": stepped(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW, fused": stepped(torch.optim.AdamW, lr=0.01, fused=True),
    "Adagrad": stepped(torch.optim.Adagrad, lr=0.01),
    "RMSprop": stepped(torch.optim.RMSprop, lr=0.01),
}


# -- changing the parameter -------------------------------------------------------------------------


def normed(model):
    weight_norm(model.layers[2])
    return bits(model(inputs(1)[0]))


def normed_and_back(model):
    weight_norm(model.layers[2])
    model(inputs(1)[0]).sum().backward()
    model.zero_grad()
    parametrize.remove_parametrizations(model.layers[2], "weight")
    return bits(weight(model))


def pruned(model):
    prune.l1_unstructured(model.layers[2], "weight", amount=0.3)
    return bits(weight(model))


def pruned_for_good(model):
    prune.l1_unstructured(model.layers[2], "weight", amount=0.3)
    prune.remove(model.layers[2], "weight")
    return bits(weight(model))


def frozen(model):
    weight(model).requires_grad_(False)
    return weight(model).requires_grad


def hooked(model):
    seen = []
    weight(model).register_hook(lambda grad: seen.append(bits(grad)))
    weight(model).register_post_accumulate_grad_hook(lambda p: seen.append(bits(p.grad)))
    model(inputs(1)[0]).sum().backward()
    model.zero_grad()
    return seen


def doubled(model):
    model.double()
    found = bits(weight(model))
    model.float()
    return found


def to_bfloat16_and_back(model):
    model.to(torch.bfloat16)
    model.to(torch.float32)
    return bits(weight(model))


def to_nothing_new(model):
    model.to("cpu", torch.float32)
    return bits(weight(model))


def shape_changed(model):
    weight(model).data = torch.full((WIDTH // 2, WIDTH), 0.01)
    found = bits(model.layers[2](inputs(1)[0]))
    weight(model).data = torch.full((WIDTH, WIDTH), 0.01)
    return found


def strides_changed(model):
    weight(model).data = weight(model).data.t().contiguous().t()
    return weight(model).stride(), bits(weight(model))


CHANGES = {
    "weight_norm": normed,
    "weight_norm and back": normed_and_back,
    "prune": pruned,
    "prune for good": pruned_for_good,
    "requires_grad_": frozen,
    "hooks": hooked,
    "double and float": doubled,
    "bfloat16 and float32": to_bfloat16_and_back,
    "to what it is": to_nothing_new,
    "another shape": shape_changed,
    "other strides": strides_changed,
    "share_memory_": shared_with_processes,
    "attribute": lambda m: setattr(weight(m), "tag", 3) or weight(m).tag,
    "grad": lambda m: weight(m).grad is None,
    "metadata": lambda m: (
        weight(m).shape,
        weight(m).dtype,
        weight(m).is_contiguous(),
        len(weight(m)),
    ),
}
UNNOTICED = {
    *("requires_grad_", "attribute", "grad", "metadata", "hooks"),
    *("to what it is", "new_zeros", "empty_like", "zeros_like", "meta", "inference"),
}
"""Ways that need no values, or those of modules only."""
KEEP_MEMORY = {"alias that is kept", "weight_norm"}
"""Ways after which something else than the weight refers to the memory that it had."""
WAYS = {**READS, **WRITES, **CHANGES}


def bring_to_rest(session, name):
    """Let a weight be at home only."""
    home = homes_of(session)[name]
    stay = send_home(session._weights, home)
    assert stay.storage is None
    return home, stay


def put(state, session, engine):
    """Bring a weight into a state."""
    home, stay = bring_to_rest(session, NAME)
    if state == "memory":
        home.hold()
        session._weights._table.leaving.clear()
        home.let_go(changed=False)
        assert stay.storage is not None
    elif state == "coming":
        engine.hold("read")
        with session._weights._table.wake:
            assert session._weights._reads.begin(stay, Priority.PREFETCH)
        engine.wait_for_held()
        assert stay.coming is not None

        def open_soon():
            time.sleep(0.02)
            engine.open()

        threading.Thread(target=open_soon).start()
    assert type(home.parameter) is RestingParameter
    return home


def run(model, touch, put=lambda: None):
    optimizer = sgd(model)
    data = inputs(4)
    seen = [trained(model, optimizer, data[:1])]
    put()
    seen.append(touch(model))
    seen.append(trained(model, optimizer, data[1:]))
    return seen


SHARED = pytest.mark.filterwarnings("ignore:.*weights stay in memory, because other tensors share")
"""The norm's parametrization makes a parameter of the weight's own memory."""
GRID = [
    pytest.param(
        name,
        state,
        marks=[
            *([] if number % 2 in turns else [pytest.mark.slow]),
            *([SHARED] if name.startswith("weight_norm") else []),
        ],
    )
    for number, name in enumerate(WAYS)
    for state, turns in (("rest", (0, 1)), ("memory", (0,)), ("coming", (1,)))
]
"""At rest each way, and in the other states in turns; all of them in `make test-all`."""


@pytest.fixture(scope="module")
def plain():
    """What each way does without Penstock."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = run(built(Chain), WAYS[name])
        return found[name]

    return of


@pytest.mark.filterwarnings("ignore:weight .* has left its home, and stays in memory")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("name", "state"), GRID)
def test_a_touched_weight_is_as_without(name, state, plain, disk_path):
    with scripted() as engine:
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT) as session:
            home = homes_of(session)[NAME]
            before = []

            def ready():
                put(state, session, engine)
                before.append((home.touches, engine.read_bytes))

            found = run(model, WAYS[name], ready)
            assert_same(found, plain(name))
            if name not in UNNOTICED:
                assert home.touches > before[0][0]
            account = session._weights.account
            after = state_of(model)
        assert_same(state_of(model), after)
        gc.collect()  # some ways make cycles
        assert account.used_bytes == 0 or name in KEEP_MEMORY, account.held_by()
        assert engine.read_bytes > 0


def swapped(model):
    torch.utils.swap_tensors(weight(model), nn.Parameter(torch.zeros(WIDTH, WIDTH)))


def converted_by_a_swap(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("swap", [swapped, converted_by_a_swap])
@pytest.mark.parametrize("state", ["rest", "memory"])
def test_a_swap_of_tensors_is_refused_and_changes_nothing(swap, state, disk_path):
    """Torch refuses it for tensors with weak references, as each weight at home has."""
    expected = trained(model := built(Chain), sgd(model), inputs(2))
    with scripted() as engine:
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT) as session:
            put(state, session, engine)
            with pytest.raises(RuntimeError, match=r"weakref|Couldn't swap"):
                swap(model)
            assert_same(state_of(model), state_of(built(Chain)))
            assert_same(trained(model, sgd(model), inputs(2)), expected)


def swapped(model):
    """Other values for a while, as of an average, and those of before again."""
    kept = [p.data for p in model.parameters()]
    average = [p.detach() * 0.5 for p in model.parameters()]
    for p, values in zip(model.parameters(), average, strict=True):
        p.data = values
    with torch.no_grad():
        found = bits(model(inputs(1)[0]))
    for p, values in zip(model.parameters(), kept, strict=True):
        p.data = values
    return found, [bits(values) for values in average], state_of(model)


def flattened(model):
    """All weights are parts of one tensor, by which they are changed."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    flat.mul_(0.5)
    found = bits(flat), bits(model(inputs(1)[0]))
    weight(model).data.zero_()
    return *found, bits(flat)


def assigned_of_another(model):
    other = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.constant_(other.weight, 0.01)
    weight(model).data = other.weight.data
    with torch.no_grad():
        other.weight[3] = 0.5
        weight(model)[5] = 0.25
    return bits(other.weight), bits(weight(model))


def mastered(model):
    """A parameter that nothing else refers to but the program, by which the weight is changed."""
    master = nn.Parameter(torch.full((WIDTH, WIDTH), 0.02))
    weight(model).data = master
    with torch.no_grad():
        master[2] = 0.75
    return bits(weight(model))


@pytest.mark.filterwarnings("ignore:.*weights stay in memory, because other tensors share")
@pytest.mark.filterwarnings("ignore:weight .* has left its home, and stays in memory")
@pytest.mark.parametrize("is_at_home", [False, True], ids=["session", "at home"])
@pytest.mark.parametrize("way", [swapped, flattened, assigned_of_another, mastered])
def test_memory_that_the_program_gives_and_takes_is_shared_as_without(way, is_at_home, disk_path):
    plain = built(Chain)
    expected = run(plain, way) + trained(plain, sgd(plain), inputs(2))
    with scripted():
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT):
            found = [] if is_at_home else run(model, way)
        found += run(model, way) if is_at_home else []
        with on_flash(model, disk_path, limit=LIMIT):
            found += trained(model, sgd(model), inputs(2))
    assert_same(found, expected)


NEW_VALUES = {
    "new": lambda like: torch.full_like(like, 0.5),
    "a view": lambda like: torch.full((like.numel(),), 0.5).view(like.shape),
    "transposed": lambda like: torch.full(like.shape, 0.5).t(),
    "converted": lambda like: torch.full((like.numel(),), 0.5).double().reshape(like.shape).float(),
    "detached": lambda like: torch.full_like(like, 0.5).requires_grad_().detach(),
}


@pytest.mark.parametrize("is_at_home", [False, True], ids=["session", "at home"])
@pytest.mark.parametrize("values", NEW_VALUES.values(), ids=NEW_VALUES)
def test_a_weight_stays_at_home_if_it_gets_memory_that_nobody_else_has(
    values, is_at_home, disk_path
):
    with scripted():
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT):
            run(model, lambda m: bits(m(inputs(1)[0])))
            if not is_at_home:
                weight(model).data = values(torch.empty(WIDTH, WIDTH))
                assert home_of(weight(model)) is not None
        if is_at_home:
            assert home_of(weight(model)) is not None
            weight(model).data = values(torch.empty(WIDTH, WIDTH))
            assert home_of(weight(model)) is not None
        assert torch.equal(weight(model), torch.full((WIDTH, WIDTH), 0.5))


def test_a_weight_that_leaves_its_home_is_named(disk_path):
    with scripted():
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT):
            run(model, lambda m: bits(m(inputs(1)[0])))
            kept = torch.full((WIDTH, WIDTH), 0.5)
            with pytest.warns(PenstockWarning, match="weight .* has left its home"):
                weight(model).data = kept.data
            assert home_of(weight(model)) is None
