"""What programs do to weights, and what befalls them, without an update or a byte being lost."""

import errno
import multiprocessing

import pytest
import torch
from torch import nn

import penstock
from penstock import checkpoint
from penstock.core.errors import TransferError
from weights_rig import (
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    assert_same,
    built,
    compared,
    homes_of,
    inputs,
    on_flash,
    scripted,
    sgd,
    state_of,
    trained,
)

LIMIT = 3 * WEIGHT_BYTES


def learn(model, steps=4, **options):
    return trained(model, sgd(model), inputs(steps), **options)


class Through(nn.Module):
    """Layers that use what ``change`` makes of their weights."""

    def __init__(self, change, dtype=torch.float32, shape=(WIDTH, WIDTH)):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, dtype=dtype) / 8) for _ in range(6)
        )
        self.layers = nn.ModuleList(Layer(weight, change) for weight in self.weights)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.view_as_real(x) if x.is_complex() else x


class Layer(nn.Module):
    def __init__(self, weight, change):
        super().__init__()
        self.weight = weight
        self.change = change

    def forward(self, x):
        weight = self.change(self.weight)
        return torch.tanh(x.to(weight.dtype) @ weight).to(
            x.dtype if weight.dtype != torch.complex64 else weight.dtype
        )


CHANGES = {
    "complex view": (torch.view_as_complex, torch.float32, (WIDTH, WIDTH, 2)),
    "real view": (lambda w: torch.view_as_real(w)[..., 0], torch.complex64, (WIDTH, WIDTH)),
    "conjugate": (lambda w: w.conj().t(), torch.complex64, (WIDTH, WIDTH)),
    "negative": (torch._neg_view, torch.float32, (WIDTH, WIDTH)),
    "rounded": (lambda w: w.bfloat16().float(), torch.float32, (WIDTH, WIDTH)),
    "rounded twice": (lambda w: w.half().bfloat16(), torch.float32, (WIDTH, WIDTH)),
    "cast in another order": (
        lambda w: w.t().to(torch.bfloat16, memory_format=torch.contiguous_format),
        torch.float32,
        (WIDTH, WIDTH),
    ),
    "cast of a part": (lambda w: w[:, :64].bfloat16(), torch.float32, (WIDTH, 2 * WIDTH)),
    "same size of another part": (
        lambda w: w[:, :64].double(),
        torch.float32,
        (WIDTH, 2 * WIDTH),
    ),
    "cast and back, of a view": (
        lambda w: w.t().double().float().t(),
        torch.float32,
        (WIDTH, WIDTH),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_made_of_a_weight_is_in_backward_what_it_was(name, disk_path):
    change, dtype, shape = CHANGES[name]
    compared(lambda: Through(change, dtype, shape), learn, disk_path, limit=6 * WEIGHT_BYTES)


def in_forward(act):
    class Acting(nn.Linear):
        def forward(self, x):
            act(self)
            return super().forward(x)

    def make():
        model = Chain(6)
        for layer in model.layers:
            layer.__class__ = Acting
        return model

    return make


@torch.no_grad()
def sets(layer):
    layer.weight.set_(layer.weight * 0.5)


def writes_as_array(layer):
    layer.weight.detach().numpy()[0] *= 0.5


@pytest.mark.parametrize("act", [sets, writes_as_array])
def test_weights_that_a_forward_changes(act, disk_path):
    expected = learn(built(in_forward(act)))
    with scripted():
        model = built(in_forward(act))
        with on_flash(model, disk_path, limit=LIMIT):
            found = learn(model)
    assert_same(found, expected)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(4)
        )

    def forward(self, x):
        x = x.view(2, 4, 32)
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


@pytest.mark.timeout(60)
def test_weights_that_were_used_beside_a_module_s_own_are_replaced(disk_path):
    def run(model):
        found = learn(model)
        model.load_state_dict(built(Attending, seed=1).state_dict(), assign=True)
        return found + learn(model)

    expected = run(built(Attending))
    with scripted():
        model = built(Attending)
        with on_flash(model, disk_path, limit=40_000):
            found = run(model)
    assert_same(found, expected)


class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = Chain(10)

    def forward(self, x):
        return self.chain(x) + sum(each.square().mean() for each in self.parameters())


def test_a_module_that_uses_all_weights_does_not_keep_them(disk_path):
    expected = learn(built(Penalized))
    with scripted():
        model = built(Penalized)
        with on_flash(model, disk_path, limit=4 * WEIGHT_BYTES) as session:
            found = learn(model)
            assert session._weights.forced == 0
    assert_same(found, expected)


def test_memory_that_others_know_stays_theirs(disk_path):
    def make():
        model = Chain(6)
        model.layers[2].register_buffer("mirror", model.layers[2].weight.detach().t())
        return model

    expected = learn(built(make))
    with scripted():
        model = built(make)
        context = on_flash(model, disk_path, limit=LIMIT)
        with pytest.warns(penstock.PenstockWarning, match=r"16\.00 KiB of .* layers\.2\.weight$"):
            session = context.__enter__()
        found = learn(model)
        assert len(homes_of(session)) == 5
        context.__exit__(None, None, None)
    assert_same(found, expected)


def test_a_session_that_could_not_write_all_weights_can_be_tried_again(disk_path):
    expected = learn(built(Chain))
    with scripted() as engine:
        model = built(Chain)
        count = [0]

        def fault(request):
            if request.op != "write" or request.nbytes != WEIGHT_BYTES:
                return None
            count[0] += 1
            if count[0] != 3:
                return None
            return TransferError(
                errno=errno.EIO, op="write", path="x", offset_bytes=0, nbytes=request.nbytes
            )

        engine.fault = fault
        with pytest.raises(TransferError), on_flash(model, disk_path, limit=LIMIT):
            pass
        assert_same(state_of(model), state_of(built(Chain)))
        with on_flash(model, disk_path, limit=LIMIT):
            found = learn(model)
    assert_same(found, expected)


@pytest.mark.timeout(60)
def test_a_checkpoint_is_saved_and_loaded_in_a_session(disk_path):
    def run(model):
        optimizer = sgd(model)
        found = trained(model, optimizer, inputs(2))
        path = disk_path / f"checkpoint-{id(model)}"
        checkpoint.save(path, {"model": model})
        found += trained(model, optimizer, inputs(2))
        checkpoint.load(path, {"model": model})
        found.append(state_of(model))
        return found + trained(model, optimizer, inputs(2))

    expected = run(built(Chain))
    with scripted():
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT):
            found = run(model)
    assert_same(found, expected)


@pytest.mark.timeout(60)
def test_a_session_is_suspended_and_paused(disk_path):
    def run(model, session=None):
        optimizer = sgd(model)
        found = trained(model, optimizer, inputs(2))
        if session is not None:
            penstock.suspend(session).resume()
        found += trained(model, optimizer, inputs(2))
        if session is not None:
            with session.paused():
                return found + trained(model, optimizer, inputs(2))
        return found + trained(model, optimizer, inputs(2))

    expected = run(built(Chain))
    with scripted():
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT) as session:
            found = run(model, session)
            found += learn(model)
    assert_same(found, expected + learn_after(run))


def learn_after(run):
    model = built(Chain)
    run(model)
    return learn(model)


def in_child(work):
    """Return what ``work`` returns, or the error that it raises, in a forked child."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run():
        try:
            sender.send(work())
        except Exception as error:  # noqa: BLE001  (whichever it is, the parent is told)
            sender.send(repr(error))

    child = context.Process(target=run)
    child.start()
    assert receiver.poll(30), "the child hangs"
    found = receiver.recv()
    child.join(30)
    assert child.exitcode == 0
    return found


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.timeout(120)
def test_a_forked_child_is_refused_and_changes_nothing(disk_path):
    expected = learn(built(Chain))
    with scripted() as engine:
        model = built(Chain)
        with on_flash(model, disk_path, limit=LIMIT) as session:
            optimizer = sgd(model)
            found = trained(model, optimizer, inputs(2))[:-1]
            engine.hold("read")  # a child must not wait for what is the parent's
            streamer = session._weights
            streamer._table.order.begin(None)
            streamer._reads.pump()
            layer = model.layers[0]
            for work in (
                lambda: layer.weight.sum().item(),
                lambda: model.layers[5].weight.add_(1),
                lambda: model(inputs(1)[0]),
            ):
                assert "give the child a copy" in in_child(work)
            assert in_child(lambda: tuple(layer.weight.shape)) == (WIDTH, WIDTH)
            assert in_child(session.close) is None
            engine.open()
            found += trained(model, optimizer, inputs(4)[2:])
    assert_same(found, expected)
