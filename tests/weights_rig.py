"""Training with weights on flash beside plain training, on an engine that counts, waits and fails."""

import errno
import threading
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.core.errors import TransferError
from penstock.io.engine import Engine, Transfer
from penstock.io.threads import ThreadEngine
from penstock.optim import FlashAdamW
from penstock.testing.shared_engine import shared_engine_replaced

PATIENCE_S = 60
WIDTH = 64
WEIGHT_BYTES = 4 * WIDTH * WIDTH
"""Of the weights of ``Chain``, 16 KiB each."""
FLOOR = 4096


class ScriptedEngine(Engine):
    """An engine that counts what it moves and lets a test hold it up, fail it, or change its bytes.

    Attributes:
        read_bytes, written_bytes: What was moved, by transfers that succeeded.
        fault: Called with each request before it begins; an error that it returns is the transfer's.
        spoil: Called with each read that has succeeded, before its waiters continue.
        holding: Ops whose transfers wait, after they were made, until ``open``.
    """

    def __init__(self):
        self.inner = ThreadEngine(threads=2)
        self._change = threading.Condition()
        self.read_bytes = 0
        self.written_bytes = 0
        self.fault = lambda request: None
        self.spoil = lambda request: None
        self.holding = frozenset()
        self.held = []

    @property
    def spec(self):
        return self.inner.spec

    def start(self):
        self.inner.start()

    def submit(self, request):
        error = self.fault(request)
        outer = Transfer(request.nbytes)
        if error is not None:
            outer.settle(error)
            return outer

        def finish(transfer):
            if transfer.error is None and request.op == "read":
                self.spoil(request)
            with self._change:
                if transfer.error is None:
                    setattr_name = "read_bytes" if request.op == "read" else "written_bytes"
                    setattr(self, setattr_name, getattr(self, setattr_name) + request.nbytes)
                if request.op in self.holding:
                    self.held.append((outer, transfer.error))
                    self._change.notify_all()
                    return
            outer.settle(transfer.error)

        self.inner.submit(request).add_done_callback(finish)
        return outer

    def hold(self, *ops):
        with self._change:
            self.holding = frozenset(ops)

    def wait_for_held(self, count=1):
        with self._change:
            assert self._change.wait_for(lambda: len(self.held) >= count, PATIENCE_S)

    def open(self):
        """Let all transfers settle, those that wait and those to come."""
        with self._change:
            self.holding = frozenset()
            held, self.held = self.held, []
        for outer, error in held:
            outer.settle(error)

    def close(self):
        self.inner.close()


def failing(op, times):
    """A fault of an engine: the next transfers of this kind fail."""
    left = [times]

    def fault(request):
        if request.op != op or not left[0]:
            return None
        left[0] -= 1
        return TransferError(
            errno=errno.EIO,
            op=op,
            path=request.file.path,
            offset_bytes=request.offset_bytes,
            nbytes=request.nbytes,
        )

    return fault


@contextmanager
def scripted():
    """An engine for everything that is opened within."""
    with shared_engine_replaced(ScriptedEngine()) as engine:
        yield engine


class Chain(nn.Module):
    """Linear layers without biases, one behind the other: 16 KiB each."""

    def __init__(self, depth=6, width=WIDTH):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def built(make, seed=0):
    torch.manual_seed(seed)
    return make()


@contextmanager
def on_flash(model, directory, *, limit, **options):
    """A session in which the weights of a model rest on flash."""
    options = {"device_memory": "64MiB", "floor": FLOOR, **options}
    with penstock.offload(
        model, weights="flash", weights_memory=limit, flash=str(directory), **options
    ) as session:
        yield session


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def flash_adamw(model, directory, **options):
    """AdamW with its states on flash, in tiles that are shorter than a weight."""
    options = {"lr": 1e-2, "tile": 6144, **options}
    return FlashAdamW(model.parameters(), flash=str(directory), **options)


def loss_of(model, x):
    return model(x).square().mean()


def train_step(model, optimizer, x):
    """Make one step; its loss."""
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def inputs(steps, shape=(4, WIDTH), seed=1):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random) for _ in range(steps)]


def bits(tensor):
    """A copy of a tensor's values that nothing changes."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().clone()


def state_of(model):
    """Values and gradients of all parameters, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = bits(parameter)
        if parameter.grad is not None:
            found[name + ".grad"] = bits(parameter.grad)
    for name, buffer in model.named_buffers():
        found[name] = bits(buffer)
    return found


def trained(model, optimizer, data, *, loss=loss_of, after_backward=None):
    """Train; losses, and states before each update."""
    seen = []
    for x in data:
        value = loss(model, x)
        value.backward()
        if after_backward is not None:
            after_backward(model)
        seen.append((bits(value), state_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    seen.append((torch.zeros(()), state_of(model)))
    return seen


def assert_same(found, expected, where=""):
    """Assert that two structures of tensors and plain values are equal, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert found == expected, where


class TierTraffic:
    """Bytes that are read from a tier and written to it, from a moment on."""

    def __init__(self, tier):
        self.read = self.written = 0
        self._read, self._write = tier.read, tier.write
        tier.read, tier.write = self._count_read, self._count_write

    def _count_read(self, ticket, *args, **kwargs):
        self.read += ticket.nbytes
        return self._read(ticket, *args, **kwargs)

    def _count_write(self, address, nbytes, **kwargs):
        self.written += nbytes
        return self._write(address, nbytes, **kwargs)

    def reset(self):
        self.read = self.written = 0


class Traffic(TierTraffic):
    """Bytes of weights that are read and written, from a moment on."""

    def __init__(self, streamer):
        self.weights = streamer.total_bytes
        super().__init__(next(iter(streamer._table.stays)).home.tier)


def settle(streamer):
    """Wait until nothing moves, and nothing else can be read ahead."""
    table = streamer._table
    while True:
        streamer._reads.pump()
        with table.wake:
            moving = [each.writing or each.coming for each in table.stays]
        moving = [each for each in moving if each is not None and not each.done]
        if not moving:
            return
        for each in moving:
            each.wait()


def homes_of(session):
    """Homes of the weights of a session, by name."""
    return {stay.home.name: stay.home for stay in session._weights._table.stays}


def send_home(streamer, home):
    """Let a weight be at home only; its place in the streamer's table."""
    table, eviction = streamer._table, streamer._eviction
    stay = table.by_home[home]
    streamer._reads.finish(stay)
    eviction.wait_for_write(stay)
    with table.wake:
        if stay.storage is not None and stay.is_changed:
            eviction.write(stay)
    eviction.wait_for_write(stay)
    with table.wake:
        if stay.storage is not None:
            table.send_home(stay)
    return stay


def compared(make, run, directory, *, limit, session_around=nullcontext, **options):
    """Let ``run(model)`` do the same with a plain model and with one on flash; the engine and session.

    Asserts that what it returns is the same, and that weights were really read.
    """
    expected = run(built(make))
    with scripted() as engine:
        model = built(make)
        with on_flash(model, directory, limit=limit, **options) as session:
            found = run(model)
        account = session._weights.account
        assert account.used_bytes == 0, account.held_by()
        after = state_of(model)
    assert_same(found, expected)
    assert engine.read_bytes > 0
    return engine, session, after
