"""``micro_batched``: blocks before micro-batches, with the gradients of the loop over micro-batches."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

import penstock
import rank_programs
from offload_runs import session_in
from penstock import ConfigError, PenstockWarning, micro_batched
from penstock.observe.recorder import Stage
from penstock.optim import FlashAdamW

WIDTH, WORDS = 32, 50


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask=None):
        shape = (*x.shape[:2], 4, WIDTH // 4)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mask = None if mask is None else mask[:, None, None, :]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def loss_of(logits, targets):
    return cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def squared(x):
    return x.square().mean()


def transformer(dtype=torch.float32, *, tied=False, layers=3):
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(TransformerLayer() for _ in range(layers)))
    model.append(nn.Linear(WIDTH, WORDS, bias=False))
    if tied:
        model[-1].weight = model[0].weight
    return model.to(dtype)


def text(rows=12, length=8):
    tokens = torch.randint(0, WORDS, (rows, length))
    return tokens, tokens.roll(-1, 1)


def dense(*layers):
    return nn.Sequential(*(layers or (nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24), nn.Tanh())))


def gradients(model):
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return found


def loop(blocks, batch, parts, *, calls=1):
    """The loop over micro-batches that users write."""
    for _ in range(calls):
        for part in batch.tensor_split(parts):
            (functools.reduce(lambda x, block: block(x), blocks, part) / parts).backward()


def vertical(blocks, batch, parts, *, calls=1, **keywords):
    for _ in range(calls):
        (sum(micro_batched(blocks, batch, parts=parts, **keywords)) / parts).backward()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert any(each is not None for each in expected.values())
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            assert torch.equal(found[name], gradient), name


def assert_as_the_loop(model, batch, parts, *, last=(squared,), calls=1):
    loop([*model, *last], batch, parts, calls=calls)
    expected = gradients(model)
    vertical([*model, *last], batch, parts, calls=calls)
    assert_equal(gradients(model), expected)


def text_loop(model, tokens, targets, parts, *, calls=1):
    for _ in range(calls):
        for part, goal in zip(tokens.tensor_split(parts), targets.tensor_split(parts), strict=True):
            (loss_of(model(part), goal) / parts).backward()


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3, 8])
@pytest.mark.parametrize("calls", [1, 2])
def test_gradients_are_those_of_the_loop(parts, calls):
    assert_as_the_loop(dense(), torch.randn(24, 24), parts, calls=calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_transformer_has_the_gradients_of_the_loop(dtype, tied, calls):
    model, (tokens, targets) = transformer(dtype, tied=tied), text()
    text_loop(model, tokens, targets, 4, calls=calls)
    expected = gradients(model)
    vertical([*model, loss_of], tokens, 4, calls=calls, targets=targets)
    assert_equal(gradients(model), expected)


def test_another_order_of_micro_batches_has_other_gradients():
    """Else the tests here could not fail."""
    model, batch = transformer(), text()
    text_loop(model, *batch, 4)
    expected = gradients(model)
    for part in reversed(range(4)):
        (
            loss_of(model(batch[0].tensor_split(4)[part]), batch[1].tensor_split(4)[part]) / 4
        ).backward()
    other = gradients(model)
    assert not all(torch.equal(other[name], expected[name]) for name in expected)


def test_one_graph_of_all_micro_batches_has_other_gradients_if_some_are_there_already():
    """The reason for a graph for each block and micro-batch."""
    model, batch = dense(), torch.randn(24, 24)
    loop([*model, squared], batch, 8, calls=2)
    expected = gradients(model)
    for _ in range(2):
        parts = list(batch.tensor_split(8))
        for block in [*model, squared]:
            for each in reversed(range(8)):
                parts[each] = block(parts[each])
        (sum(parts) / 8).backward()
    other = gradients(model)
    assert not all(torch.equal(other[name], expected[name]) for name in expected)


def test_parts_that_do_not_divide_the_batch_are_cut_as_by_tensor_split():
    sizes = [len(each) for each in micro_batched([nn.Identity()], torch.randn(11, 3), parts=4)]
    assert sizes == [3, 3, 3, 2]
    assert_as_the_loop(dense(), torch.randn(11, 24), 4)


def test_outputs_are_in_the_order_of_the_batch():
    batch = torch.arange(6.0).view(6, 1)
    assert torch.equal(torch.cat(micro_batched([nn.Identity(), nn.ReLU()], batch, parts=3)), batch)


def test_a_weight_that_a_block_uses_several_times():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(24, 24)

        def forward(self, x):
            return self.inner(torch.tanh(self.inner(torch.tanh(self.inner(x)))))

    assert_as_the_loop(dense(Twice(), nn.Tanh(), Twice()), torch.randn(24, 24), 8, calls=2)


def test_a_weight_that_three_blocks_share_and_each_uses_twice():
    layer = nn.Linear(24, 24)

    def twice(x):
        return torch.tanh(layer(torch.tanh(layer(x))))

    batch, blocks = torch.randn(24, 24), [twice, nn.Tanh(), twice, twice, squared]
    loop(blocks, batch, 8, calls=2)
    expected = gradients(layer)
    vertical(blocks, batch, 8, calls=2)
    assert_equal(gradients(layer), expected)


def test_a_weight_that_other_blocks_use_for_other_micro_batches():
    """As experts' weights may be: the first block does not use it for the first micro-batch."""
    layer, batch = nn.Linear(24, 24), torch.randn(24, 24)
    batch[::2, 0] = batch[::2, 0].abs()
    batch[1::2, 0] = -batch[1::2, 0].abs()
    blocks = [
        lambda x: (x[:, :1], layer(x) if x[0, 0] > 0 else torch.tanh(x * layer.bias)),
        lambda two: (two[1] if two[0][0, 0] > 0 else layer(two[1])).square().mean(),
    ]
    loop(blocks, batch, 24, calls=2)
    expected = gradients(layer)
    vertical(blocks, batch, 24, calls=2)
    assert_equal(gradients(layer), expected)


def test_a_tied_weight_that_only_a_function_uses_is_found_in_the_graph():
    model, (tokens, targets) = transformer()[:-1], text()
    embedding = model[0].weight

    def head(x, targets):
        return loss_of(linear(x, embedding), targets)

    for part, goal in zip(tokens.tensor_split(4), targets.tensor_split(4), strict=True):
        (head(model(part), goal) / 4).backward()
    expected = gradients(model)
    vertical([*model, head], tokens, 4, targets=targets)
    assert_equal(gradients(model), expected)


def test_batch_normalization_has_the_gradients_and_statistics_of_the_loop():
    model = dense(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))
    other, batch = copy.deepcopy(model), torch.randn(24, 24)
    loop([*model, squared], batch, 4)
    vertical([*other, squared], batch, 4)
    assert_equal(gradients(other), gradients(model))
    assert all(map(torch.equal, other.buffers(), model.buffers()))


def test_tuples_and_dicts_pass_from_block_to_block():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(24, 24)

        def forward(self, state):
            x, rest = state["x"], state["rest"]
            return {"x": torch.tanh(self.inner(x)) + rest[0], "rest": (x, rest[1], None)}

    blocks = [
        lambda pair: {"x": pair[0], "rest": (pair[1][0], pair[1][1])},
        Residual(),
        Residual(),
        Residual(),
        lambda state: state["x"].square().mean() + (state["rest"][0] * state["rest"][1]).mean(),
    ]
    model, batch = (
        dense(*blocks[1:4]),
        (torch.randn(24, 24), [torch.randn(24, 24), torch.randn(24, 1)]),
    )
    for part in range(8):
        x, a, b = (each.tensor_split(8)[part] for each in (batch[0], *batch[1]))
        (functools.reduce(lambda x, block: block(x), blocks, (x, [a, b])) / 8).backward()
    expected = gradients(model)
    vertical(blocks, batch, 8)
    assert_equal(gradients(model), expected)


def test_the_batch_may_need_gradients_too_and_so_may_keywords():
    class Conditioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(24, 24)

        def forward(self, x, *, given):
            return torch.tanh(self.inner(x) * given + given)

    model = dense(Conditioned(), nn.Tanh(), Conditioned(), Conditioned())
    batch = torch.randn(24, 24, requires_grad=True)
    given = torch.randn(24, 24, requires_grad=True)
    for x, c in zip((batch * 2).tensor_split(8), (given * 3).tensor_split(8), strict=True):
        y = model[2](model[1](model[0](x, given=c)), given=c)
        (model[3](y, given=c).square().mean() / 8).backward(retain_graph=True)
    expected = gradients(model) | {"batch": batch.grad, "given": given.grad}
    batch.grad = given.grad = None
    vertical([*model, squared], batch * 2, 8, given=given * 3)
    assert_equal(gradients(model) | {"batch": batch.grad, "given": given.grad}, expected)


def test_a_mask_goes_to_the_blocks_that_take_one():
    model, (tokens, targets) = transformer(), text()
    mask = torch.rand(tokens.shape) > 0.2
    mask[:, 0] = True
    for t, m, g in zip(*(e.tensor_split(4) for e in (tokens, mask, targets)), strict=True):
        x = model[0](t)
        for layer in model[1:-1]:
            x = layer(x, mask=m)
        (loss_of(model[-1](x), g) / 4).backward()
    expected = gradients(model)
    vertical([*model, loss_of], tokens, 4, mask=mask, targets=targets)
    assert_equal(gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant):
    model, batch = dense(), torch.randn(24, 24, requires_grad=True)
    blocks = [functools.partial(checkpoint, block, use_reentrant=reentrant) for block in model]
    loop([*model, squared], batch, 8, calls=2)
    expected = gradients(model)
    vertical([*blocks, squared], batch, 8, calls=2)
    assert_equal(gradients(model), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own
def test_compiled_blocks():
    model, (tokens, targets) = transformer(), text()
    compiled = [torch.compile(block, backend="aot_eager") for block in model]
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    for t, g, m in zip(*(e.tensor_split(4) for e in (tokens, targets, mask)), strict=True):
        x = compiled[0](t)
        for layer in compiled[1:-1]:
            x = layer(x, mask=m)
        (loss_of(compiled[-1](x), g) / 4).backward()
    expected = gradients(model)
    vertical([*compiled, loss_of], tokens, 4, targets=targets, mask=mask)
    assert_equal(gradients(model), expected)


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_blocks_that_share_a_weight_and_its_cast(cached):
    layer, batch = nn.Linear(24, 24), torch.randn(24, 24)
    blocks = [
        lambda x: torch.tanh(x * layer.weight[0]),
        lambda x: torch.tanh(layer(torch.tanh(layer(x)))),
        nn.Tanh(),
        lambda x: torch.tanh(layer(torch.tanh(layer(x)))),
        squared,
    ]
    for part in [*batch.tensor_split(8)] * 2:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            loss = functools.reduce(lambda x, block: block(x), blocks, part) / 8
        loss.backward()
    expected = gradients(layer)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            losses = micro_batched(blocks, batch, parts=8)
            total = sum(loss / 8 for loss in losses)
        total.backward()
    assert_equal(gradients(layer), expected)


def test_blocks_that_work_in_place_or_return_what_they_got():
    layers = nn.Linear(24, 24), nn.ReLU(inplace=True), nn.Identity(), nn.Linear(24, 24)
    assert_as_the_loop(dense(*layers), torch.randn(24, 24), 8)


def test_a_block_that_gradients_do_not_pass():
    model = dense(nn.Linear(24, 24), nn.Linear(24, 24))
    blocks = [model[0], torch.Tensor.detach, model[1]]
    batch = torch.randn(24, 24)
    loop([*blocks, squared], batch, 8)
    expected = gradients(model)
    vertical([*blocks, squared], batch, 8)
    assert_equal(gradients(model), expected)


def test_frozen_weights_with_a_trained_one_above():
    model = dense()
    model[0].requires_grad_(False)
    assert_as_the_loop(model, torch.randn(24, 24), 8)


# -- random numbers --------------------------------------------------------------------------------


def test_one_random_block_draws_what_it_draws_in_the_loop():
    model, batch = dense(nn.Linear(24, 48), nn.Dropout(0.3), nn.Linear(48, 24)), torch.randn(24, 24)
    torch.manual_seed(5)
    loop([*model, squared], batch, 8)
    expected = gradients(model)
    torch.manual_seed(5)
    vertical([*model, squared], batch, 8)
    assert_equal(gradients(model), expected)


def test_several_random_blocks_are_warned_of_since_their_masks_differ_from_the_loop():
    model, batch = dense(nn.Dropout(0.3), nn.Linear(24, 24), nn.Dropout(0.3)), torch.randn(24, 24)
    torch.manual_seed(5)
    loop([*model, squared], batch, 8)
    expected = gradients(model)
    torch.manual_seed(5)
    with pytest.warns(PenstockWarning, match="2 blocks drew random numbers"):
        vertical([*model, squared], batch, 8)
    assert not torch.equal(model[1].weight.grad, expected["1.weight"])
    model.eval()
    vertical([*model, squared], batch, 8)  # no warning


# -- the order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 8])
def test_each_block_is_used_at_one_place_of_forward_and_one_of_backward(parts):
    """So its weight is read once in each, however many micro-batches there are."""
    model, order, unpacked = dense(*(nn.Linear(24, 24) for _ in range(4))), [], []
    numbers = {weight.data_ptr(): number for number, weight in enumerate(model.parameters())}

    def unpack(saved):
        if saved.data_ptr() in numbers:
            unpacked.append(numbers[saved.data_ptr()] // 2)
        return saved

    for number, block in enumerate(model):
        block.register_forward_hook(lambda *_, number=number: order.append(number))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        vertical([*model, squared], torch.randn(24, 24), parts)
    assert order == [number for number in range(4) for _ in range(parts)]
    assert unpacked == [number for number in (3, 2, 1) for _ in range(parts)]


def test_hooks_of_gradients_run_as_in_the_loop_for_a_tied_weight_as_well():
    model, (tokens, targets) = transformer(tied=True), text()
    seen = []
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(
            lambda w, name=name: seen.append((name, w.grad.sum().item()))
        )
    text_loop(model, tokens, targets, 4)
    expected = sorted(seen)
    seen.clear()
    model.zero_grad()
    vertical([*model, loss_of], tokens, 4, targets=targets)
    assert sorted(seen) == expected
    assert len(seen) == 4 * len(list(model.parameters()))


def test_tensors_between_blocks_are_not_held():
    """But by what autograd saves: here nothing."""
    alive = []

    def watched(x):
        alive.append(weakref.ref(x.untyped_storage()))
        return x

    scale = nn.Parameter(torch.ones(()))
    blocks = [lambda x: x + scale, watched, lambda x: x + scale, watched, lambda x: x + scale]
    outputs = micro_batched(blocks, torch.randn(8, 64), parts=4)
    assert len(alive) == 8
    assert all(each() is None for each in alive)
    sum(each.sum() for each in outputs).backward()
    assert scale.grad.item() == 3 * 8 * 64


def test_graphs_die_with_the_outputs():
    batch, model = torch.randn(8, 24), dense()
    outputs = micro_batched([*model, squared], batch, parts=4)
    node = weakref.ref(outputs[0].grad_fn)
    gc.disable()
    try:
        del outputs
        assert node() is None
    finally:
        gc.enable()


# -- other passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_outputs_are_those_of_the_loop(context):
    model, batch = dense(), torch.randn(24, 24)
    with context():
        outputs = micro_batched(model, batch, parts=8)
        assert all(map(torch.equal, outputs, map(model, batch.tensor_split(8))))
    assert not any(each.requires_grad for each in outputs)


def test_backward_of_one_micro_batch_alone_is_that_of_its_loss():
    model, batch = dense(), torch.randn(24, 24)
    squared(model(batch.tensor_split(8)[3])).backward()
    expected = gradients(model)
    micro_batched([*model, squared], batch, parts=8)[3].backward()
    assert_equal(gradients(model), expected)


def test_a_second_backward_is_refused_unless_the_graph_was_retained():
    model, batch = dense(), torch.randn(24, 24)
    total = sum(micro_batched([*model, squared], batch, parts=8))
    total.backward(retain_graph=True)
    once = gradients(model)
    total.backward()
    assert_equal(gradients(model), once)
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_backwards_of_micro_batches_one_by_one_add_up():
    model, batch = dense(), torch.randn(24, 24)
    loop([*model, squared], batch, 8)
    expected = gradients(model)
    losses = micro_batched([*model, squared], batch, parts=8)
    for loss in losses:
        (loss / 8).backward(retain_graph=True)
    assert_equal(gradients(model), expected)


def test_an_error_in_backward_is_the_blocks_own_and_leaves_no_hook_behind():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError("mine")

    layer = nn.Linear(24, 24)
    outputs = micro_batched(
        [layer, nn.Tanh(), lambda x: Failing.apply(linear(x, layer.weight)), squared],
        torch.randn(8, 24),
        parts=2,
    )
    with pytest.raises(ZeroDivisionError, match="mine"):
        sum(outputs).backward()
    layer.zero_grad()
    layer(torch.randn(8, 24)).sum().backward()
    assert layer.weight.grad is not None


def test_the_outputs_may_be_changed_in_place():
    model, batch = dense(), torch.randn(24, 24)
    loop([*model, squared], batch, 8)
    expected = gradients(model)
    losses = micro_batched([*model, squared], batch, parts=8)
    for loss in losses:
        loss.div_(8)
    torch.stack(losses).sum().backward()
    assert_equal(gradients(model), expected)


# -- with a session --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["all", "auto", "recompute"])
def test_training_under_a_tight_budget_has_the_same_bits(tmp_path, policy):
    def train():
        torch.manual_seed(0)
        model = transformer(tied=True, layers=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens, targets = text(16, 64)
        for _ in range(4):
            vertical([*model, loss_of], tokens, 4, targets=targets)
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    expected = train()
    with session_in(tmp_path, device_memory="2MiB", policy=policy) as session:
        found = train()
        assert session.inspect().device.peak_bytes <= 2 << 20
        if policy != "recompute":
            assert session.recorder.snapshot().flow(Stage.READ, "flash").nbytes > 16 << 20
    assert all(map(torch.equal, found, expected))


def test_a_session_sees_one_backward(tmp_path):
    model, batch = dense(), torch.randn(256, 24)
    with session_in(tmp_path, device_memory="1MiB") as session:
        ends = []
        inner = session._attachment._boundaries._on_backward_end
        session._attachment._boundaries._on_backward_end = lambda: (ends.append(1), inner())
        vertical([*model, squared], batch, 4)
    assert ends == [1]


def test_an_optimizer_that_updates_in_backward(tmp_path):
    def train(step):
        torch.manual_seed(0)
        model = transformer(tied=True)
        optimizer = FlashAdamW(model.parameters(), flash=tmp_path, overlap=True, accumulation=4)
        for _ in range(3):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return [each.detach().clone() for each in model.parameters()]

    tokens, targets = text()
    expected = train(lambda model: text_loop(model, tokens, targets, 4))
    found = train(lambda model: vertical([*model, loss_of], tokens, 4, targets=targets))
    assert all(map(torch.equal, found, expected))


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "keywords", "message"),
    [
        (torch.randn(4, 2), {"parts": 5}, "parts is 5, but must be a number from 1 to .* 4"),
        (torch.randn(4, 2), {"parts": 0}, "parts is 0"),
        (torch.randn(4, 2), {"parts": True}, "parts is True"),
        (torch.randn(()), {"parts": 1}, r"their shapes: \(\)"),
        ((), {"parts": 1}, "their shapes: none"),
        ((torch.randn(4, 2), torch.randn(3)), {"parts": 2}, r"\(4, 2\), \(3,\)"),
        ((torch.randn(4, 2), 7), {"parts": 2}, "has a int"),
        (torch.randn(4, 2), {"parts": 2, "mask": torch.ones(4)}, "no block has a parameter 'mask'"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch, keywords, message):
    with pytest.raises(ConfigError, match=message):
        micro_batched([nn.Identity(), nn.ReLU()], batch, **keywords)


def test_no_blocks_are_refused():
    with pytest.raises(ConfigError, match="no block"):
        micro_batched([], torch.randn(4, 2), parts=2)


def test_gradients_of_gradients_are_refused():
    losses = micro_batched([*dense(), squared], torch.randn(8, 24), parts=2)
    with pytest.raises(ConfigError, match="create_graph"):
        sum(losses).backward(create_graph=True)


def test_a_hook_on_the_gradient_of_a_shared_weight_is_refused():
    model, (tokens, targets) = transformer(tied=True), text()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ConfigError, match=rf"shape \({WORDS}, {WIDTH}\).*\[0, 4\]"):
        micro_batched([*model, loss_of], tokens, parts=2, targets=targets)


def test_a_tensor_that_reaches_a_block_around_its_arguments_is_refused():
    layer, aside = nn.Linear(24, 24), []
    blocks = [lambda x: aside.append(layer(x)) or layer(x), lambda x: x + aside[-1]]
    with pytest.raises(ConfigError, match="not in its arguments"):
        micro_batched(blocks, torch.randn(8, 24), parts=2)


def test_it_is_a_public_name():
    assert penstock.micro_batched is micro_batched


def test_gradients_that_distributed_data_parallel_would_not_reduce_are_refused(disk_path):
    rank_programs.run(
        disk_path,
        """
        import contextlib, gc
        from penstock import micro_batched

        DDP = nn.parallel.DistributedDataParallel
        torch.manual_seed(rank)
        batch = torch.randn(8, 20)

        def squared(x):
            return x.square().mean()

        def gradients(blocks, parts=2):
            for block in blocks:
                block.zero_grad()
            (sum(micro_batched([*blocks, squared], batch, parts=parts)) / parts).backward()
            return [each.grad for block in blocks for each in block.parameters()]

        def refused(blocks, name, parts=2):
            try:
                micro_batched([*blocks, squared], batch, parts=parts)
                raise AssertionError("it was not refused")
            except ConfigError as error:
                text = str(error)
            assert f"the gradient of {name}, of shape (130, 20), " in text and "2 ranks" in text, text
            assert "no_sync()" in text, text

        # blocks of a module that is not called, and functions around them
        first, second, third = network()
        model = nn.Sequential(first, second, third)
        parallel = DDP(model)
        for parts in (1, 2):
            refused(model, "module.0.weight", parts)
            refused([lambda x: first(x), second, third], "module.0.weight", parts)
        with torch.no_grad():
            micro_batched([*model, squared], batch, parts=2)

        # what the message says, against what the module does
        with parallel.no_sync():
            found = gradients(model)
        for each in found:
            dist.all_reduce(each.div_(world))
        found = [each.clone() for each in found]
        model.zero_grad()
        for number, part in enumerate(batch.tensor_split(2)):
            with parallel.no_sync() if number == 0 else contextlib.nullcontext():
                (squared(parallel(part)) / 2).backward()
        for mine, other in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(mine, other.grad)

        # the module is looked for again when the one that was found is gone
        del parallel
        gc.disable()
        alone = gradients(model)
        parallel = DDP(model)
        del parallel
        assert_same(gradients(model), alone)

        gc.enable()

        # a block is such a module itself: it is called once for each micro-batch, and reduces the first
        blocks = [DDP(each) for each in network()]
        refused(blocks, "module.weight")
        found = [each.clone() for each in gradients(blocks, parts=1)]
        assert on_all(found[0].tolist())[0] == found[0].tolist()

        # a group of one rank has nothing to reduce
        groups = [dist.new_group([each]) for each in range(world)]
        model = network()
        parallel = DDP(model, process_group=groups[rank])
        gradients(model)

        # a module that is made after a search that has found none
        model = network()
        gradients(model)
        parallel = DDP(model)
        refused(model, "module.0.weight")

        # a weight that the module leaves out
        model = network()
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
        parallel = DDP(model)
        gradients([model[0]])
        """,
    )
