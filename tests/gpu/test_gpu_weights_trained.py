"""Weights that are trained rest on flash, too, of a model on a device: the bits of plain training."""

import errno
import gc

import pytest
import torch
from gpu_weights_rig import (
    DEPTH,
    DEVICE,
    LIMIT,
    WEIGHT_BYTES,
    WIDTH,
    Blocks,
    TiedWords,
    bits,
    inputs,
    on_device_flash,
    rested_bytes,
    state_of,
)
from torch import nn
from torch.nn import functional as F

from penstock.core.errors import PenstockWarning, TransferError
from penstock.core.units import MIB
from penstock.homed import home_of
from penstock.optim import FlashAdamW, FlashSGD, on_flash
from weights_rig import ScriptedEngine, Traffic, assert_same, shared_engine_replaced

pytestmark = pytest.mark.gpu

WORDS = 256


class Deep(Blocks):
    """Linear layers of 64 KiB each, with biases, which stay in device memory."""

    def __init__(self, *, checkpointed=False):
        super().__init__(
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), checkpointed=checkpointed
        )


class Tied(TiedWords):
    def __init__(self):
        super().__init__(WORDS, Deep())


def built(make=Deep, dtype=torch.float32):
    torch.manual_seed(0)
    return make().to(DEVICE, dtype)


def trained(model, optimizer, *, steps=3, first=0, micro=1, autocast=False, evaluated=False):
    """Losses of some steps, and gradients where they are not used up."""
    dtype = next(model.parameters()).dtype
    seen = []
    for x in inputs(steps, first):
        if evaluated:
            model.eval()
            with torch.no_grad():
                seen.append(bits(model(x.to(dtype))))
            model.train()
        for part in x.to(dtype).chunk(micro):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = model(part).float().square().mean()
            loss.backward()
            seen.append(bits(loss))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_kept_to(weights, limit):
    assert weights.account.peak_bytes <= limit
    assert weights.forced == 0
    assert weights.present_bytes <= limit


def assert_back_within_the_limit(model, weights):
    """What has exceeded it leaves with the next uses, when it is at home."""
    model(inputs(1)[0])
    for stay in weights._table.stays:
        weights._eviction.wait_for_write(stay)
    model(inputs(1)[0])
    gc.collect()
    assert weights.account.used_bytes <= LIMIT


def assert_bits_of_plain(run, directory):
    """Let ``run(model)`` train a plain model, and one whose weights rest on flash."""
    plain = built()
    expected = [run(plain), state_of(plain)]
    model = built()
    with on_device_flash(model, directory) as session:
        found = run(model)
        assert_kept_to(session._weights, LIMIT)
    assert_same([found, state_of(model)], expected)


SMALL = {"lr": 1e-2, "tile": 6144}
OVERLAPPED = {**SMALL, "overlap": True, "gradient_memory": "64KiB"}


def flash_adamw(model, directory, **settings):
    directory.mkdir(exist_ok=True)
    return FlashAdamW(model.parameters(), flash=str(directory), **{**OVERLAPPED, **settings})


OPTIMIZERS = {
    "step": (FlashAdamW, {}),
    "sgd": (FlashSGD, {"momentum": 0.9}),
    "overlap": (FlashAdamW, {"overlap": True}),
    "sgd, overlap": (FlashSGD, {"momentum": 0.9, "overlap": True}),
    "overlap, gradients used up": (FlashAdamW, {"overlap": True, "gradient_memory": "64KiB"}),
    "gradients on flash": (FlashAdamW, {"gradient_memory": 0}),
    "clipped": (FlashAdamW, {"clip_norm": 0.1}),
    "clipped, gradients on flash": (FlashAdamW, {"clip_norm": 0.1, "gradient_memory": 0}),
    "clipped, overlap": (FlashAdamW, {**OVERLAPPED, "clip_norm": 0.1}),
    "accumulated": (FlashAdamW, {"overlap": True, "accumulation": 2}),
    "int8": (FlashAdamW, {"format": "int8"}),
    "int8, overlap": (FlashAdamW, {"format": "int8", "overlap": True}),
    "durable": (FlashAdamW, {"durable": True}),
    "several weights in a tile": (FlashAdamW, {"tile": 1 << 17, "overlap": True}),
}


@pytest.mark.filterwarnings("ignore:.*takes more memory than in memory")
@pytest.mark.parametrize(
    ("case", "place"),
    [
        *((case, "flash") for case in OPTIMIZERS),
        ("overlap, gradients used up", "host"),
    ],
)
def test_bits_are_those_of_weights_in_device_memory_within_the_limit(case, place, tmp_path):
    make, settings = OPTIMIZERS[case]
    settings = {**SMALL, **settings}
    micro = settings.get("accumulation", 1 if "overlap" in settings else 2)

    def run(model, directory):
        directory.mkdir()
        optimizer = make(model.parameters(), flash=str(directory), **settings)
        seen = trained(model, optimizer, micro=micro)
        optimizer.close()
        return seen

    plain = built()
    expected = [run(plain, tmp_path / "plain"), state_of(plain)]
    model = built()
    with on_device_flash(model, tmp_path, weights=place) as session:
        assert rested_bytes(model) == DEPTH * WEIGHT_BYTES
        found = run(model, tmp_path / "ours")
        weights = session._weights
        assert_kept_to(weights, LIMIT)
    gc.collect()
    assert weights.account.used_bytes == 0
    assert all(home_of(each) is None for each in model.parameters())
    assert_same([found, state_of(model)], expected)


MODELS = {
    "evaluated": (Deep, torch.float32, {"evaluated": True}, LIMIT),
    "checkpointed": (lambda: Deep(checkpointed=True), torch.float32, {}, LIMIT),
    "autocast": (Deep, torch.float32, {"autocast": True}, LIMIT),
    "bfloat16": (Deep, torch.bfloat16, {}, LIMIT // 2),
    "tied": (Tied, torch.float32, {}, 5 * WEIGHT_BYTES),
}


@pytest.mark.parametrize("case", MODELS)
def test_bits_of_other_models(case, tmp_path):
    make, dtype, options, limit = MODELS[case]

    def run(model, directory):
        optimizer = flash_adamw(model, directory)
        seen = trained(model, optimizer, **options)
        optimizer.close()
        return seen

    plain = built(make, dtype)
    expected = [run(plain, tmp_path / "plain"), state_of(plain)]
    model = built(make, dtype)
    with on_device_flash(model, tmp_path, limit=limit) as session:
        found = run(model, tmp_path / "ours")
        assert rested_bytes(model) > limit
        assert_kept_to(session._weights, limit)
    assert_same([found, state_of(model)], expected)


def test_each_weight_is_read_twice_and_written_once_a_step(tmp_path):
    steps, model = 4, built()
    with on_device_flash(model, tmp_path) as session:
        optimizer = flash_adamw(model, tmp_path)
        trained(model, optimizer, steps=2)
        traffic = Traffic(session._weights)
        trained(model, optimizer, steps=steps)
        total = DEPTH * WEIGHT_BYTES
        assert steps * (total - LIMIT) <= traffic.written <= steps * total + LIMIT
        assert steps * (total - LIMIT) <= traffic.read <= 2 * steps * total
        assert not session._weights.touches
        optimizer.close()


def test_a_step_takes_less_device_memory_than_the_weights(tmp_path):
    model = built()
    with on_device_flash(model, tmp_path):
        optimizer = flash_adamw(model, tmp_path)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trained(model, optimizer)
        most = torch.cuda.max_memory_allocated() - before
        optimizer.close()
    activations = 6 * DEPTH * 16 * WIDTH * 4
    assert most <= LIMIT + 3 * WEIGHT_BYTES + activations < 2 * DEPTH * WEIGHT_BYTES


TORCH = {
    "sgd": (lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9), True),
    "adamw": (lambda params: torch.optim.AdamW(params, lr=1e-2), True),
    "for each": (lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True), False),
    "fused": (lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True), False),
    "rmsprop": (lambda params: torch.optim.RMSprop(params, lr=1e-3), True),
}


@pytest.mark.parametrize("case", TORCH)
def test_an_optimizer_of_torch_gives_its_bits(case, tmp_path):
    """One after the other within the limit; all at once if it is told to, and the summary says so.

    For ordinary parameters on a GPU torch's default is ``foreach``, whose last bits may be others.
    """
    make, keeps_limit = TORCH[case]
    plain = built()
    optimizer = make(plain.parameters())
    for group in optimizer.param_groups:
        if not group.get("fused") and group["foreach"] is None:
            group["foreach"] = False
    expected = [trained(plain, optimizer), state_of(plain)]
    model = built()
    with on_device_flash(model, tmp_path) as session:
        found = trained(model, make(model.parameters()))
        if keeps_limit:
            assert_kept_to(session._weights, LIMIT)
        else:
            assert "their limit was exceeded" in session._weights.note()
            assert_back_within_the_limit(model, session._weights)
    assert_same([found, state_of(model)], expected)


def test_an_optimizer_put_on_flash_in_the_session(tmp_path):
    def run(model):
        optimizer = on_flash(torch.optim.RMSprop(model.parameters(), lr=1e-3), flash=str(tmp_path))
        seen = trained(model, optimizer)
        optimizer.close()
        return seen

    assert_bits_of_plain(run, tmp_path)


def test_durable_steps_are_resumed_in_a_session(tmp_path):
    settings = {**SMALL, "durable": True, "flash": str(tmp_path)}
    model = built()
    optimizer = FlashAdamW(model.parameters(), **settings)
    with on_device_flash(model, tmp_path):
        trained(model, optimizer, steps=2)
    optimizer.close()
    again = built()
    with on_device_flash(again, tmp_path) as session:
        optimizer = FlashAdamW(again.parameters(), **settings)
        assert optimizer.resume() == 2
        assert_same(state_of(again), state_of(model))
        found = trained(again, optimizer, first=2)
        assert session._weights.forced == 0
        optimizer.close()
    plain = built()
    optimizer = FlashAdamW(plain.parameters(), **SMALL, flash=str(tmp_path))
    trained(plain, optimizer, steps=2)
    expected = trained(plain, optimizer, first=2)
    optimizer.close()
    assert_same([found, state_of(again)], [expected, state_of(plain)])


def test_weights_that_are_set_between_steps_are_trained_on(tmp_path):
    def run(model, directory):
        optimizer = flash_adamw(model, directory)
        seen = trained(model, optimizer, steps=1)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        seen += trained(model, optimizer, steps=1, first=1)
        model.load_state_dict(saved)
        with torch.no_grad():
            model.blocks[1][0].weight.mul_(2)
            model.blocks[2][0].weight.data[0] = 3
        seen += trained(model, optimizer, steps=1, first=2)
        optimizer.close()
        return seen

    plain = built()
    expected = [run(plain, tmp_path / "plain"), state_of(plain)]
    model = built()
    with on_device_flash(model, tmp_path) as session:
        found = run(model, tmp_path / "ours")
        assert_back_within_the_limit(model, session._weights)
        assert "address" not in session._weights.note()
    assert_same([found, state_of(model)], expected)


def test_a_weight_whose_address_is_known_stays(tmp_path):
    model = built()
    with on_device_flash(model, tmp_path) as session:
        weight = model.blocks[0][0].weight
        address = weight.data_ptr()
        optimizer = flash_adamw(model, tmp_path)
        trained(model, optimizer)
        optimizer.close()
        assert weight.data_ptr() == address
        assert "1 of them stay in device memory" in session._weights.note()
        assert "blocks.0.0.weight" in session._weights.note()


@pytest.mark.concurrent_streams
def test_steps_on_streams_of_their_own(tmp_path):
    def run(model, directory):
        optimizer = flash_adamw(model, directory)
        seen = []
        streams = [torch.cuda.Stream() for _ in range(2)]
        for step in range(4):
            stream = streams[step % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                seen += trained(model, optimizer, steps=1, first=step)
            torch.cuda.current_stream().wait_stream(stream)
        optimizer.close()
        return seen

    plain = built()
    expected = [run(plain, tmp_path / "plain"), state_of(plain)]
    model = built()
    with on_device_flash(model, tmp_path):
        found = run(model, tmp_path / "ours")
    assert_same([found, state_of(model)], expected)


@pytest.mark.concurrent_streams
def test_an_optimizer_of_torch_on_a_stream_of_its_own(tmp_path):
    """What it changes there goes home behind it, and comes to the other stream when it is there."""

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        seen, other = [], torch.cuda.Stream()
        for x in inputs(3):
            loss = model(x).square().mean()
            loss.backward()
            seen.append(bits(loss))
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                optimizer.step()
            torch.cuda.current_stream().wait_stream(other)
            optimizer.zero_grad()
        return seen

    assert_bits_of_plain(run, tmp_path)


def test_weights_longer_than_pinned_memory(tmp_path, monkeypatch):
    """They are brought and written through memory that is not pinned."""
    monkeypatch.setattr("penstock.runtime.cuda.accelerator.LEAST_STAGING_BYTES", MIB)

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(3))

        def forward(self, x):
            x = F.pad(x, (0, 1024 - WIDTH))
            for layer in self.layers:
                x = F.gelu(layer(x))
            return x

    def run(model):
        return trained(model, torch.optim.SGD(model.parameters(), lr=1e-2))

    plain = built(Wide)
    expected = [run(plain), state_of(plain)]
    model = built(Wide)
    limit = 2 * 4 * 1024 * 1024
    with on_device_flash(model, tmp_path, limit=limit, host_memory="2MiB") as session:
        found = run(model)
        assert_kept_to(session._weights, limit)
        assert session.recorder.snapshot().counters["staging.beyond"] > 0
    assert_same([found, state_of(model)], expected)


def failing_writes(times):
    left = [times]

    def fault(request):
        if request.op != "write" or not left[0]:
            return None
        left[0] -= 1
        return TransferError(
            errno=errno.EIO,
            op="write",
            path=request.file.path,
            offset_bytes=request.offset_bytes,
            nbytes=request.nbytes,
        )

    return fault


def test_a_weight_that_cannot_be_written_stays_in_device_memory_and_is_written_later(tmp_path):
    plain, model = built(), built()
    sgd = [torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9) for each in (plain, model)]
    expected = [*trained(plain, sgd[0], steps=6), state_of(plain)]
    with (
        shared_engine_replaced(ScriptedEngine()) as engine,
        on_device_flash(model, tmp_path) as session,
    ):
        found = trained(model, sgd[1], steps=1)

        def refused():
            engine.fault = failing_writes(DEPTH)
            seen = trained(model, sgd[1], steps=1, first=1)
            engine.fault = failing_writes(0)
            return seen + trained(model, sgd[1], steps=1, first=2)  # which tells of a late one

        with pytest.warns(
            PenstockWarning, match=r"written home, .*: weight \S+ cannot be written to .* at offset"
        ):
            found += refused()
        written = engine.written_bytes
        found += trained(model, sgd[1], steps=3, first=3)
        assert engine.written_bytes >= written + DEPTH * WEIGHT_BYTES
        assert_back_within_the_limit(model, session._weights)
    found.append(state_of(model))
    assert_same(found, expected)


def test_all_come_back_though_none_can_be_written(tmp_path):
    with shared_engine_replaced(ScriptedEngine()) as engine:
        model = built()
        with on_device_flash(model, tmp_path, limit=DEPTH * WEIGHT_BYTES):
            engine.fault = failing_writes(1 << 30)
            with torch.no_grad():
                for each in model.parameters():
                    each.fill_(0.5)
    assert all(home_of(each) is None for each in model.parameters())
    assert all((bits(each) == 0.5).all() for each in model.parameters())
