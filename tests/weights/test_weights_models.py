"""Training with weights on flash is training without: for many models, and ways to train."""

import threading
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.weights.homes import WeightFiles
from weights_rig import (
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    assert_same,
    bits,
    built,
    compared,
    inputs,
    on_flash,
    scripted,
    settle,
    sgd,
    state_of,
    trained,
)

LIMIT = 3 * WEIGHT_BYTES
WORDS = 256


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.head = nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.body(self.embedding(words)))


class Attending(nn.Module):
    """Attention whose function uses the weights of another module."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(4)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))

    def forward(self, x):
        x = x.view(2, 4, 32)
        for attention, norm in zip(self.attention, self.norms, strict=True):
            x = x + attention(norm(x), x, x, need_weights=False)[0]
        return x


class Convolving(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, groups=2),
            nn.ConvTranspose2d(32, 8, 3),
        )

    def forward(self, x):
        return self.body(x.view(-1, 1, 8, 8))


class Adapted(nn.Module):
    """A frozen linear layer beside which a small one learns."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


class LowRank(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        chain = Chain(depth)
        self.layers = nn.ModuleList(Adapted(layer) for layer in chain.layers)

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Chain(2) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant:
            x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Repeating(nn.Module):
    """A module that is called twice in a forward."""

    def __init__(self):
        super().__init__()
        self.chain = Chain(3)

    def forward(self, x):
        return self.chain(self.chain(x))


class Borrowing(nn.Module):
    """Uses the weights of its modules without a call of them."""

    def __init__(self):
        super().__init__()
        self.chain = Chain(5)

    def forward(self, x):
        for layer in self.chain.layers:
            x = F.gelu(F.linear(x, layer.weight))
        return x @ self.chain.layers[0].weight.t()


class Clamping(nn.Module):
    """Changes its weights in its forward, in ways that count no version."""

    def __init__(self):
        super().__init__()
        self.chain = Chain(5)

        class Layer(nn.Linear):
            def forward(self, x):
                self.weight.data.clamp_(-0.1, 0.1)
                return super().forward(x)

        for layer in self.chain.layers:
            layer.__class__ = Layer

    def forward(self, x):
        return self.chain(x)


class Binary(nn.Module):
    """Takes other weights in each forward, by ``weight.data = x``."""

    def __init__(self):
        super().__init__()
        self.chain = Chain(5)

        class Layer(nn.Linear):
            def forward(self, x):
                self.weight.data = self.weight.data.round(decimals=2)
                return super().forward(x)

        for layer in self.chain.layers:
            layer.__class__ = Layer

    def forward(self, x):
        return self.chain(x)


def words(steps):
    random = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (1, 8), generator=random) for _ in range(steps)]


def next_word_loss(model, x):
    return F.cross_entropy(model(x).view(-1, WORDS), x.view(-1))


def learn(model, data=None, make=sgd, **options):
    return trained(model, make(model), inputs(4) if data is None else data, **options)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def with_autocast(model):
    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    return learn(model, loss=loss)


def with_compiled_blocks(model):
    blocks = [torch.compile(block, backend="aot_eager") for block in model.children()]

    def loss(model, x):
        for block in blocks:
            x = block(x)
        return x.square().mean()

    return learn(model, loss=loss)


def compiled_in_place(model):
    for block in model.children():
        block.compile(backend="aot_eager")
    return model


def with_blocks_compiled_in_place(model):
    return learn(compiled_in_place(model))


def with_accumulation(model):
    optimizer, seen = sgd(model), []
    for x in inputs(3):
        for part in x.chunk(2):
            loss = model(part).square().mean() / 2
            loss.backward()
            seen.append(bits(loss))
        seen += [bits(nn.utils.clip_grad_norm_(model.parameters(), 0.01)), state_of(model)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def with_two_losses(model):
    def loss(model, x):
        y = model(x)
        first = y.square().mean()
        first.backward(retain_graph=True)
        return y.abs().mean()

    return learn(model, loss=loss)


def with_double_backward(model):
    def loss(model, x):
        x = x.clone().requires_grad_()
        y = model(x).square().mean()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + slope.square().sum()

    return learn(model, loss=loss)


def with_evaluation(model):
    """Passes without gradients between the steps, between forward and backward, and in eval mode."""
    seen = []

    def loss(model, x):
        value = model(x).square().mean()
        model.eval()
        with torch.no_grad():
            seen.append(bits(model(2 * x)))
        model.train()
        with torch.inference_mode():
            seen.append(bits(model(3 * x).clone()))
        return value

    return [learn(model, loss=loss), seen]


def with_failures(model):
    """Forwards that raise in the middle, or that the user interrupts."""
    optimizer, seen = sgd(model), []
    layer = [module for module in model.modules() if isinstance(module, nn.Linear)][2]
    for index, x in enumerate(inputs(4)):
        kind = (ValueError, KeyboardInterrupt)[index % 2]

        def fail(*_, kind=kind):
            raise kind

        handle = layer.register_forward_hook(fail)
        with suppress(kind):
            model(x)
        handle.remove()
        seen.append(trained(model, optimizer, [x]))
    return seen


def with_grad_of_part(model):
    optimizer, seen = sgd(model), []
    for x in inputs(3):
        parameters = list(model.parameters())
        grads = torch.autograd.grad(model(x).square().mean(), parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        seen.append([bits(grad) for grad in grads])
        optimizer.step()
    return [seen, state_of(model)]


def with_lbfgs(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    seen = []
    for x in inputs(2):

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        seen.append(bits(optimizer.step(closure)))
    return [seen, state_of(model)]


CASES = {
    "chain": (Chain, learn),
    "chain, AdamW": (Chain, lambda m: learn(m, make=adamw)),
    "tied": (Tied, lambda m: learn(m, words(4), loss=next_word_loss)),
    "attention": (Attending, learn),
    "convolutions": (Convolving, learn),
    "low rank": (LowRank, learn),
    "checkpointed": (lambda: Checkpointed(reentrant=False), learn),
    "checkpointed, reentrant": (lambda: Checkpointed(reentrant=True), learn),
    "called twice": (Repeating, learn),
    "borrowed weights": (Borrowing, learn),
    "clamped in forward": (Clamping, learn),
    "replaced in forward": (Binary, learn),
    "autocast": (Chain, with_autocast),
    "compiled blocks": (lambda: nn.Sequential(Chain(2), Chain(2), Chain(2)), with_compiled_blocks),
    "blocks compiled late": (
        lambda: nn.Sequential(Chain(2), Chain(2), Chain(2)),
        with_blocks_compiled_in_place,
    ),
    "blocks compiled in place": (
        lambda: compiled_in_place(nn.Sequential(Chain(2), Chain(2), Chain(2))),
        learn,
    ),
    "accumulation and clipping": (Chain, with_accumulation),
    "two losses": (Chain, with_two_losses),
    "double backward": (lambda: nn.Sequential(Chain(3), nn.Tanh(), Chain(3)), with_double_backward),
    "evaluation in the middle": (Chain, with_evaluation),
    "failed forwards": (Chain, with_failures),
    "autograd.grad": (Chain, with_grad_of_part),
    "LBFGS": (Chain, with_lbfgs),
}
NOT_LEAF = "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"


@pytest.mark.filterwarnings(NOT_LEAF)
@pytest.mark.parametrize("name", CASES)
def test_training_is_as_without(name, disk_path):
    make, learn_it = CASES[name]
    limit = {"tied": 80_000, "convolutions": 80_000, "attention": 40_000}.get(name, LIMIT)
    engine, session, _ = compared(make, learn_it, disk_path, limit=limit)
    assert engine.read_bytes > session._weights.total_bytes, "the weights were never away"


class Encoding(nn.Module):
    """An encoder that torch computes by kernels of whole layers when it infers, and attention."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        x = x.view(2, -1, 64)
        x = self.encoder(
            x, src_key_padding_mask=torch.tensor([[False] * 4, [False, False, True, True]])
        )
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_by_the_kernels_of_whole_layers(mode, disk_path):
    def run(model):
        found, optimizer = [], sgd(model)
        for x in torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(1)):
            model.eval()
            with mode():
                found.append(bits(model(x)))
            model.train()
            found += trained(model, optimizer, [x])
        return found

    expected = run(built(Encoding))
    with scripted():
        model = built(Encoding)
        with on_flash(model, disk_path, limit=300_000) as session:
            found = run(model)
            assert session._weights.forced == 0
    assert_same(found, expected)


class Mixing(nn.TransformerEncoderLayer):
    """A layer whose own forward uses more than torch's kernel takes."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x, src_mask=None, src_key_padding_mask=None, is_causal=False):
        x = self.norm1(x + self._sa_block(x, src_mask, src_key_padding_mask, is_causal))
        for expert in self.experts:
            x = x + expert(x)
        return self.norm2(x + self._ff_block(x))


class Watched(nn.TransformerEncoderLayer):
    """A layer with a hook, for which torch takes no kernel of whole layers."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.linear1.register_forward_hook(lambda *_: None)


def encoder(layer=nn.TransformerEncoderLayer, *, batch_first=True, nested=True, **options):
    layer = layer(64, 4, 128, dropout=0.0, batch_first=batch_first, **options)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=nested)


def encoded(model):
    """Values for input of which the second sequence is shorter."""
    x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1))
    masked = torch.tensor([[False] * 4, [False, False, True, True]])
    if not model.layers[0].self_attn.batch_first:
        x = x.transpose(0, 1)
    return bits(model(x, src_key_padding_mask=masked))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize(
    ("options", "has_kernels"),
    [
        ({"batch_first": False}, True),
        ({"activation": torch.tanh}, True),
        ({"layer": Mixing, "nested": False}, True),
        ({"layer": Watched, "nested": False}, True),
        ({}, False),
    ],
    ids=["batch second", "tanh", "own forward", "hook", "switched off"],
)
def test_no_more_than_a_module_is_in_memory_without_a_kernel(options, has_kernels, disk_path):
    def run(model):
        with torch.no_grad():
            return encoded(model.eval())

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(has_kernels)
    try:
        expected = run(built(lambda: encoder(**options)))
        with scripted():
            model = built(lambda: encoder(**options))
            with on_flash(model, disk_path, limit=100_000) as session:  # less than a layer
                found = [run(model) for _ in range(2)]
                assert session._weights.forced == 0
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert_same(found, [expected] * 2)


def only_layers_evaluate(model):
    model.train()
    for layer in model.layers:
        layer.eval()
    with torch.no_grad():
        return encoded(model)


def all_but_an_addition_is_frozen(model):
    model.eval().requires_grad_(False)
    model.layers[0].extra = nn.Linear(64, 64)
    return encoded(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("run", [only_layers_evaluate, all_but_an_addition_is_frozen])
def test_a_kernel_is_chosen_as_torch_chooses(run, disk_path):
    expected = run(built(encoder))
    assert not expected[1, 2:].any(), "torch took no kernel"
    with scripted():
        model = built(encoder)
        with on_flash(model, disk_path, limit=300_000) as session:
            found = run(model)
            assert session._weights.forced == 0
    assert_same(found, expected)


def test_a_frozen_base_is_read_twice_a_step_and_never_written(disk_path):
    def learn_part(model):
        return trained(
            model,
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1),
            inputs(1),
        )

    expected = [learn_part(m) for m in [built(LowRank)] for _ in range(4)]
    with scripted() as engine:
        model = built(LowRank)
        with on_flash(model, disk_path, limit=2 * WEIGHT_BYTES) as session:
            found = [learn_part(model)]
            read, written = engine.read_bytes, engine.written_bytes
            found += [learn_part(model) for _ in range(3)]
            total = session._weights.total_bytes
            assert engine.written_bytes == written
            found_bytes = engine.read_bytes - read
            ahead = 2 * WEIGHT_BYTES  # read for the next step before this one was over
            assert 3 * 2 * (total - 2 * WEIGHT_BYTES) - ahead <= found_bytes <= 3 * 2 * total
            assert not session._weights.touches
    assert_same(found, expected)


def test_each_token_reads_what_does_not_fit(disk_path):
    depth, tokens = 10, 8
    limit = 6 * WEIGHT_BYTES

    @torch.no_grad()
    def generate(model, count=tokens):
        x = inputs(1)[0]
        for _ in range(count):
            x = model(x)
        return bits(x)

    expected = generate(built(lambda: Chain(depth)))
    with scripted() as engine:
        model = built(lambda: Chain(depth))
        with on_flash(model, disk_path, limit=limit) as session:
            assert_same(generate(model), expected)
            generate(model, 3)
            settle(session._weights)
            read = engine.read_bytes
            generate(model)
            settle(session._weights)
            per_token = (engine.read_bytes - read) / tokens
            missing = session._weights.total_bytes - limit
            # beside those that stay there is room for one in use, and for two that are read ahead
            assert missing <= per_token <= missing + 3 * WEIGHT_BYTES
            assert session._weights.forced == 0


def test_threads_run_two_modules(disk_path):
    def losses(model, seed):
        return [bits(model(x)) for x in inputs(8, seed=seed)]

    with torch.no_grad():
        expected = [losses(built(Chain, seed), seed) for seed in (1, 2)]
    with scripted() as engine:
        models = [built(Chain, seed) for seed in (1, 2)]
        both = nn.ModuleList(models)
        found = [None, None]

        def work(index):
            with torch.no_grad():
                found[index] = losses(models[index], index + 1)

        with on_flash(both, disk_path, limit=LIMIT):
            threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert engine.read_bytes > 0
    assert_same(found, expected)


@pytest.mark.parametrize("part", ["", "layers.0"])
def test_threads_make_the_first_calls_at_once(part, disk_path, monkeypatch):
    """While the weights of the model are moved to flash, another thread calls it, or a part of it."""
    x = inputs(1)[0]
    with torch.no_grad():
        expected = [bits(built(Chain)(x)), bits(built(Chain).get_submodule(part)(x))]
    model, found = built(Chain), [None, None]

    def call(place, module):
        with torch.no_grad():
            found[place] = bits(module(x))

    other = threading.Thread(target=call, args=(1, model.get_submodule(part)))

    def move_in(files, *args, _move_in=WeightFiles.move_in):
        if other.ident is None:
            other.start()
            other.join(0.2)  # it may wait until the weights are there
        return _move_in(files, *args)

    monkeypatch.setattr(WeightFiles, "move_in", move_in)
    with scripted(), on_flash(None, disk_path, limit=LIMIT) as session:
        call(0, model)
        other.join()
        assert session._weights.total_bytes == 6 * WEIGHT_BYTES
    assert_same(found, expected)
    assert_same(state_of(model), state_of(built(Chain)))


def test_backward_after_the_session_is_closed(disk_path):
    def learn_late(model, around):
        with around:
            loss = model(inputs(1)[0]).square().mean()
        loss.backward()
        return state_of(model)

    expected = built(Chain)
    loss = expected(inputs(1)[0]).square().mean()
    loss.backward()
    with scripted():
        model = built(Chain)
        found = learn_late(model, on_flash(model, disk_path, limit=LIMIT))
    assert_same(found, state_of(expected))


def test_another_session_finds_the_weights_at_home(disk_path):
    data = inputs(4)
    plain = built(Chain)
    expected = trained(plain, sgd(plain), data)
    with scripted():
        model = built(Chain)
        optimizer = sgd(model)
        with on_flash(model, disk_path, limit=LIMIT):
            found = trained(model, optimizer, data[:2])[:-1]
        found += trained(model, optimizer, data[2:3])[:-1]  # at rest, without a session
        with on_flash(model, disk_path, limit=LIMIT):
            found += trained(model, optimizer, data[3:])
    assert_same(found, expected)
