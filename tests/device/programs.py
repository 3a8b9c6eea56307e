"""Small programs that need every rule of order: each trains on the device and returns its bits.

They are what ``test_programs.py`` runs clean, and what ``mutations.py`` runs with something left out.
``program(path)`` runs under Penstock, ``program(None)`` without.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import penstock
from cuda_runs import wait_until_settled
from offload_runs import MACHINE, session_in
from penstock import checkpoint
from penstock.core.units import MIB
from penstock.observe.recorder import Stage
from penstock.optim import FlashAdamW
from penstock.runtime.cuda import gpu_direct

WIDTH = 128
ROWS = 256
HOST: dict[str, Any] = {"host_memory": "32MiB", "flash": (), "flash_capacity": None}
FLASH: dict[str, Any] = {"host_memory": "64MiB"}
DIRECT: dict[str, Any] = {"host_memory": 0}
BUDGET: dict[str, Any] = {"policy": "auto", "device_memory": "1MiB"}
RECOMPUTED: dict[str, Any] = HOST | {"policy": "recompute", "device_memory": "1MiB"}
SLOW = replace(MACHINE, host_write_bytes_per_s=1e5, host_read_bytes_per_s=1e5)
"""So that it is sure to be quicker to run something again, however long that takes here."""
Bits = list[torch.Tensor]


class Chain(nn.Module):
    """One stream."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(6)]
        self.layers = nn.Sequential(*(each for layer in layers for each in layer))

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        return self.layers(x).square().mean()


class Noisy(nn.Module):
    """Its operators save what they then fill, whole or a small part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            noise = torch.empty(8 * ROWS, WIDTH, device="cuda")
            few = torch.ops.aten.rrelu_with_noise(x[:8], noise[:8], 0.1, 0.3, True)
            x = torch.rrelu(x, training=True) + few.mean()
        return x.square().mean()


class Rectified(nn.Module):
    """Saves many zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Branches(nn.Module):
    """Two branches on a stream each; each waits where it reads from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        main, side = torch.cuda.current_stream(), self.side
        left = right = x
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            side.wait_stream(main)
            left.record_stream(side)
            right.record_stream(side)
            with torch.cuda.stream(side):
                right = torch.tanh(second(right + left))
            left = torch.sigmoid(first(left)) * left
            main.wait_stream(side)
            right.record_stream(main)
            left = left + right
        return left.square().mean()


class Fork(nn.Module):
    """What one stream has made is saved there and on another one, which backward comes to first."""

    busy_s = 0.0
    """What the host does meanwhile, so that what is copied out has landed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.side = torch.cuda.Stream()

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, side = torch.cuda.current_stream(), self.side
        fork = torch.tanh(self.first(x))
        left = fork * fork.abs()
        side.wait_stream(main)  # which waits for it before backward frees ``fork``
        with torch.cuda.stream(side):
            right = self.last(torch.tanh(self.second(fork)))
        del fork
        time.sleep(self.busy_s)
        torch.ones_like(left)  # in memory that is free by now
        main.wait_stream(side)
        right.record_stream(main)
        return left + right


class ForkAnew(Fork):
    """On a new stream each time it is run; its last operator saves what it then fills."""

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rrelu(x, training=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side = torch.cuda.Stream()
        return super().forward(x)


class Twice(nn.Module):
    """What modules without parameters make is saved on two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.pure = nn.ModuleList(nn.GELU() for _ in range(4))
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        main, side = torch.cuda.current_stream(), self.side
        for number, pure in enumerate(self.pure):
            first, second, third = self.layers[3 * number : 3 * number + 3]
            fork = pure(first(x))
            side.wait_stream(main)  # which waits for it before backward frees ``fork``
            with torch.cuda.stream(side):
                right = second(fork)
            left = third(fork)
            del fork
            torch.ones_like(left)  # in memory that is free by now
            main.wait_stream(side)
            right.record_stream(main)
            x = left + right
        return x.square().mean()


class Corner(nn.Module):
    """Another stream saves a small part of what nobody else saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, side = torch.cuda.current_stream(), self.side
        whole = self.first(x)
        left = whole + 1
        side.wait_stream(main)  # which waits for it before backward frees ``whole``
        with torch.cuda.stream(side):
            corner = whole[:4] * whole[:4].abs()
        del whole
        torch.ones_like(left)
        main.wait_stream(side)
        corner.record_stream(main)
        return torch.tanh(left + corner.mean())


class Forks(nn.Module):
    """Several, one after another."""

    kind: Callable[[], nn.Module] = Fork

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(self.kind() for _ in range(4)))

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        return self.layers(x).square().mean()


class ForksAnew(Forks):
    """Several, one after another."""

    kind = ForkAnew


class Corners(Forks):
    """Several, one after another."""

    kind = Corner


class MadeAgain(nn.Module):
    """What a module makes again is saved on two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        main, side = torch.cuda.current_stream(), self.side
        made = self.layer(x)
        left = torch.cos(made)
        side.wait_stream(main)
        with torch.cuda.stream(side):  # which backward comes to first
            right = torch.sin(made)
        made.record_stream(side)
        del made
        main.wait_stream(side)
        right.record_stream(main)
        return (left * right).square().mean()


class NewStream(nn.Module):
    """Two chains, the second on a stream made anew in each step: nothing knows it beforehand.

    ``more`` makes a step larger than the one that was profiled, so that what was kept is spilled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        x.record_stream(side)
        left = right = x
        with torch.cuda.stream(side):
            for layer in self.second:
                right = torch.tanh(layer(right))
        for layer in self.first:
            left = torch.tanh(layer(left))
        extra = torch.tanh(more).square().mean() if more is not None else 0.0
        main.wait_stream(side)
        right.record_stream(main)
        return (left * right).square().mean() + extra


class Apart(nn.Module):
    """The first half on one device, the second on another if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.devices = "cuda:0", f"cuda:{torch.cuda.device_count() - 1}"
        self.halves = nn.ModuleList(Chain().layers.to(device) for device in self.devices)

    def to(self, *_: object, **__: object) -> Apart:
        return self

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        for device, half in zip(self.devices, self.halves, strict=True):
            x = half(x.to(device))
        return x.square().mean()


class ShowsNothingError(AssertionError):
    """Nothing was done of what the program is about: plans depend on what was measured."""


def tried_again(program: Callable[..., Bits]) -> Callable[..., Bits]:
    """A program that is run again, twice at most, if it has shown nothing."""

    @functools.wraps(program)
    def tried(*arguments: Any, **named: Any) -> Bits:
        for _ in range(2):
            with contextlib.suppress(ShowsNothingError):
                return program(*arguments, **named)
        return program(*arguments, **named)

    return tried


@contextlib.contextmanager
def under(path: Path | None, model: nn.Module | None, settings: dict[str, Any]) -> Iterator[Any]:
    if path is None:
        yield None
        return
    again = settings.get("policy") == "recompute"
    with session_in(path, model, machine=SLOW if again else MACHINE, **settings) as session:
        yield session
    flows = session.recorder.snapshot().flows
    wanted = [(Stage.RECOMPUTE, "")] if again else []
    wanted.append(
        (Stage.WRITE, "flash") if settings.get("flash", path) else (Stage.COPY_OUT, "host")
    )
    for stage, tier in wanted:
        if (stage, tier) not in flows:
            raise ShowsNothingError(f"no {stage.value} {tier}")


@tried_again
def train(
    path: Path | None,
    kind: Callable[[], nn.Module],
    settings: dict[str, Any],
    *,
    grows: bool = False,
    rows: int = ROWS,
    steps: int = 3,
    settled: bool = False,
) -> Bits:
    """Losses and gradients of some steps; ``settled``: what leaves has left before backward begins."""
    torch.manual_seed(0)
    model = kind().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    bits: Bits = []
    with under(path, model, settings) as session:
        for step in range(5 if grows else steps):
            x = torch.randn(rows, WIDTH, generator=generator).to("cuda")
            more = torch.randn(16 * ROWS, WIDTH, generator=generator).requires_grad_()
            loss = model(x, more.to("cuda") if grows and step >= 3 else None)
            del x, more
            if settled and session is not None:
                wait_until_settled(session)
            loss.backward()
            bits.append(loss.detach().cpu())
            bits += [parameter.grad.cpu() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            del loss
    return bits


def one_stream_on_flash(path: Path | None) -> Bits:
    return train(path, Chain, FLASH, settled=True)


def one_stream_on_host(path: Path | None) -> Bits:
    return train(path, Chain, HOST)


def one_stream_under_a_budget(path: Path | None) -> Bits:
    return train(path, Chain, HOST | BUDGET)


def noise_on_host(path: Path | None) -> Bits:
    return train(path, Noisy, HOST)


def noise_spilled_late(path: Path | None) -> Bits:
    return train(path, Noisy, HOST | {"policy": "keep", "device_memory": "768KiB"})


def one_stream_recomputed(path: Path | None) -> Bits:
    return train(path, Chain, RECOMPUTED)


def two_streams_on_flash(path: Path | None) -> Bits:
    return train(path, Branches, FLASH, settled=True)


def two_streams_on_host(path: Path | None) -> Bits:
    return train(path, Branches, HOST | BUDGET)


def two_streams_recomputed(path: Path | None) -> Bits:
    return train(path, Forks, RECOMPUTED | {"device_memory": "1536KiB"})


def two_streams_made_again(path: Path | None) -> Bits:
    """Nothing is spilled once the plan is in force."""
    return train(path, MadeAgain, RECOMPUTED | {"device_memory": "576KiB"})


def two_streams_remade(path: Path | None) -> Bits:
    return train(path, Twice, RECOMPUTED | {"device_memory": "1536KiB"})


def new_streams_recomputed(path: Path | None) -> Bits:
    return train(path, ForksAnew, RECOMPUTED | {"device_memory": "1536KiB"})


def two_streams_and_small_parts(path: Path | None) -> Bits:
    return train(path, Corners, HOST)


def two_streams_that_share(path: Path | None) -> Bits:
    Fork.busy_s = 0.03
    try:
        return train(path, Forks, HOST)
    finally:
        Fork.busy_s = 0.0


def spilled_late(path: Path | None) -> Bits:
    """What another stream has saved is spilled for want of room."""
    return train(path, NewStream, HOST | {"policy": "keep", "device_memory": "768KiB"})


def two_devices_on_flash(path: Path | None) -> Bits:
    return train(path, Apart, FLASH, settled=True)


def two_devices_on_host(path: Path | None) -> Bits:
    return train(path, Apart, HOST | BUDGET)


def two_streams_gpu_direct(path: Path | None, **settings: Any) -> Bits:
    with (
        mock.patch.dict(os.environ, PENSTOCK_GPU_DIRECT="on"),
        mock.patch.object(gpu_direct, "TRIAL_BYTES", 2 * MIB + 5097),
    ):
        return train(path, Branches, DIRECT | settings, settled=True)


def two_streams_gpu_direct_and_host(path: Path | None) -> Bits:
    """Flash is soon full."""
    return two_streams_gpu_direct(path, host_memory="32MiB", flash_capacity="1MiB")


def kept_and_spilled_late(path: Path | None) -> Bits:
    """Kept from a stream that is new, and spilled from another when the step outgrows its plan."""
    return train(path, NewStream, HOST | {"policy": "auto", "device_memory": "2560KiB"}, grows=True)


def encoded_on_flash(path: Path | None) -> Bits:
    settings = FLASH | {"codec": "exponent", "device_memory": "32MiB"}
    return train(path, Chain, settings, settled=True)


def encoded_on_two_streams(path: Path | None) -> Bits:
    settings = HOST | {"codec": "exponent", "device_memory": "32MiB"}
    return train(path, Branches, settings, settled=True)


def encoded_small_parts(path: Path | None) -> Bits:
    settings = HOST | {"codec": "exponent", "device_memory": "32MiB"}
    return train(path, Corners, settings, steps=1, settled=True)


def encoded_and_recomputed(path: Path | None) -> Bits:
    settings = RECOMPUTED | {"codec": "exponent", "device_memory": "16MiB"}
    return train(path, Forks, settings, rows=8 * ROWS)


def encoded_under_a_budget(path: Path | None) -> Bits:
    """What comes back is decoded to memory that kernels have used a moment before."""
    settings = {"codec": "zero-value", "policy": "auto", "device_memory": "16MiB"}
    return train(path, Rectified, HOST | settings, rows=32 * ROWS, steps=1)


def batches_of_a_loader(path: Path | None) -> Bits:
    """Uploaded on the loader's stream, read on another, freed when the copy out has landed."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False).to("cuda")
    main, load = torch.cuda.current_stream(), torch.cuda.Stream()
    hosts = [torch.randn(ROWS, WIDTH).pin_memory() for _ in range(6)]
    torch.cuda.synchronize()

    def fetch(number: int) -> torch.Tensor:
        with torch.cuda.stream(load):
            return hosts[number].to("cuda", non_blocking=True)

    bits: Bits = []
    with under(path, None, HOST):
        batches = [fetch(0)]
        for step in range(5):
            main.wait_stream(load)
            batch = batches.pop()
            loss = model(batch).square().mean()
            with torch.no_grad():  # a reader that saves nothing: the graph holds what it reads
                bits.append(batch.abs().sum())
            del batch
            time.sleep(0.03)  # the rest of a long forward; copies land
            batches.append(fetch(step + 1))
            loss.backward()
            bits.append(loss.detach().cpu())
            bits.append(model.weight.grad.cpu())
            model.weight.grad = None
            del loss
    return bits


def optimizer(path: Path | None, **settings: Any) -> Bits:
    """States on flash; an evaluation reads the weights while they are about to come back.

    Without a path: the same on the host, where every kernel has run when it returns.
    """
    if path is None:
        with tempfile.TemporaryDirectory() as directory:
            return _optimized(Path(directory), "cpu", settings)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        bits = _optimized(path, "cuda", settings)
    torch.cuda.synchronize()
    return bits


def _optimized(path: Path, device: str, settings: dict[str, Any]) -> Bits:
    torch.manual_seed(0)
    sizes = (WIDTH, 2 * WIDTH, 2 * WIDTH, WIDTH)  # the gradient of none is too short to leave
    layers = [nn.Linear(*each, bias=False) for each in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers).to(device)
    other = nn.Parameter(torch.zeros(ROWS * WIDTH, device=device))  # without a part in backward
    bits: Bits = []
    with warnings.catch_warnings(action="ignore"):  # it takes more memory than so small states
        parameters = [*model.parameters(), other]
        made = FlashAdamW(parameters, lr=1e-2, flash=path, tile=102_400, **settings)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(ROWS, WIDTH, generator=generator).to(device)
            made.zero_grad()
            if step != 1:  # the program sets what it trains
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.mul_(0.5)
            model(x).square().mean().backward()
            for parameter in model.parameters() if "gradient_memory" in settings else ():
                late = torch.full_like(parameter, 2.0).mul_(3)
                del late  # kernels still use the memory that the gradient comes back to
                bits.append((parameter.grad * 1).cpu())
            if settings.get("overlap"):  # else weights are about to change already
                other.grad = x.flatten().square()
                made.step()
            with torch.no_grad():
                seen = model(x)
            if not settings.get("overlap"):
                made.step()
            bits.append(seen.cpu())
        bits += [parameter.detach().cpu() for parameter in parameters]
        assert "gradient_memory" not in settings or made.wear().gradient_bytes_per_step > 0
        made.close()
    return bits


def optimizer_on_flash(path: Path | None) -> Bits:
    return optimizer(path)


def optimizer_and_gradients_on_flash(path: Path | None) -> Bits:
    return optimizer(path, gradient_memory=0)


def optimizer_in_backward(path: Path | None) -> Bits:
    return optimizer(path, overlap=True)


def optimizer_taken_over(path: Path | None) -> Bits:
    """A state dict is loaded, and a durable step restored, to weights that kernels still change."""
    if path is None:
        with tempfile.TemporaryDirectory() as directory:
            return _taken_over(Path(directory), "cpu")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        bits = _taken_over(path, "cuda")
    torch.cuda.synchronize()
    return bits


def _taken_over(path: Path, device: str) -> Bits:
    torch.manual_seed(0)

    def made(name: str) -> tuple[nn.Linear, FlashAdamW]:
        layer = nn.Linear(WIDTH, 2 * WIDTH, bias=False).to(device)
        (path / name).mkdir(exist_ok=True)
        with warnings.catch_warnings(action="ignore"):  # it takes more memory than so small states
            return layer, FlashAdamW(
                layer.parameters(), lr=1e-2, flash=path / name, tile=102_400, durable=True
            )

    bits: Bits = []
    layer, first = made("first")
    layer(torch.randn(ROWS, WIDTH).to(device)).square().mean().backward()
    first.step()
    saved, trained = first.state_dict(), layer
    first.close()
    layer, second = made("second")
    there = {
        key: {
            name: value.to(device) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in state.items()
        }
        for key, state in saved["state"].items()
    }
    for states in (saved["state"], there):
        with torch.no_grad():
            layer.weight.copy_(trained.weight * 1)
            for value in (value for state in there.values() for value in state.values()):
                if isinstance(value, torch.Tensor) and value.dim():
                    value.mul_(1)
        second.load_state_dict(saved | {"state": states})
        bits.append((layer.weight * 1).detach().cpu())
    second.close()
    layer, third = made("first")
    with torch.no_grad():
        layer.weight.mul_(3)
    third.resume()
    bits.append((layer.weight * 1).detach().cpu())
    third.close()
    return bits


def weights_on_flash(path: Path | None) -> Bits:
    """They rest; an optimizer changes them on a stream of its own, others after and in backward."""
    return _weights_elsewhere(path, FLASH | {"weights": "flash"})


def weights_on_host(path: Path | None) -> Bits:
    """The same in host memory."""
    return _weights_elsewhere(path, HOST | {"weights": "host"})


def _weights_elsewhere(path: Path | None, settings: dict[str, Any]) -> Bits:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers).to("cuda")
    settings = settings | {
        "policy": "all",
        "weights_memory": 3 * layers[0].weight.nbytes,
        "floor": layers[0].weight.nbytes,
    }
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    bits: Bits = []

    def step(optimizer: torch.optim.Optimizer, stream: Any) -> None:
        loss = model(torch.randn(ROWS, WIDTH).to("cuda")).square().mean()
        loss.backward()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            optimizer.step()
        main.wait_stream(stream)
        optimizer.zero_grad()
        bits.append(loss.detach().cpu())

    with under(path, model, settings), tempfile.TemporaryDirectory() as directory:
        sgd = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        for _ in range(3):
            step(sgd, other)
        for overlap in (False, True):
            adamw = FlashAdamW(
                model.parameters(), flash=path or directory, tile=6144, overlap=overlap
            )
            with warnings.catch_warnings(action="ignore"):  # states that small take less in memory
                for _ in range(3):
                    step(adamw, main)
            adamw.close()
    return [*bits, *(parameter.detach().cpu() for parameter in model.parameters())]


def checkpoints(path: Path | None) -> Bits:
    """Saved and loaded on a stream that is behind, and goes on with the same memory."""
    generator = torch.Generator().manual_seed(0)
    hosts = [torch.randn(800_003, generator=generator, dtype=torch.float64), torch.ones(3) > 0]
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):  # which nobody waits for
        aside = torch.ones(3, dtype=torch.uint8, device="cuda").mul_(3)
    with torch.cuda.stream(stream):
        saved = {str(index): each.to("cuda").mul(3) for index, each in enumerate(hosts)}
        saved["aside"] = aside
        late = torch.empty_like(saved["0"]).fill_(7)
        loaded = {key: torch.empty_like(each) for key, each in saved.items()}
        if path is not None:
            checkpoint.save(path / "saved", saved)
        else:
            stream.wait_stream(other)
            loaded = {key: each.clone() for key, each in saved.items()}
        for each in saved.values():
            each.zero_()
        for each in loaded.values() if path is not None else ():
            each.fill_(5)
        if path is not None:
            checkpoint.load(path / "saved", loaded)
        bits = [each.mul(2).cpu() for each in loaded.values()]
        bits.append(late.cpu())
    torch.cuda.synchronize()
    return bits


def suspended(path: Path | None) -> Bits:
    """With kernels of another stream under way, and resumed amid kernels that use the same memory."""
    torch.manual_seed(0)
    model = Chain().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    aside, on_host = torch.ones(300_000, device="cuda"), torch.ones(3_000_000)
    side.wait_stream(main)
    bits: Bits = []
    with under(path, model, FLASH) as session:
        for step in range(3):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = model(x.to("cuda"))
            if session is not None:
                wait_until_settled(session)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            on_host.add_(1)
            with torch.cuda.stream(side):
                aside.mul_(3)
            if session is not None:
                penstock.suspend(session, also=[aside, on_host])
                late = torch.full((300_000,), 2.0, device="cuda").mul_(3)
                del late
                penstock.resume(session)
            main.wait_stream(side)
            bits += [(aside * 1).cpu(), on_host.clone()]
            side.wait_stream(main)
        bits += [parameter.detach().cpu() for parameter in model.parameters()]
    return bits


def a_capture(path: Path | None) -> Bits:
    """A graph captured amid training, and replayed."""
    torch.manual_seed(0)
    model = Chain().to("cuda")
    static = torch.ones(8, device="cuda")
    bits: Bits = []
    with under(path, model, HOST) as session:
        loss = model(torch.randn(ROWS, WIDTH).to("cuda"))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with session.paused() if session else contextlib.nullcontext(), torch.cuda.graph(graph):
            for _ in range(20):
                static.add_(1)
                time.sleep(0.0005)
        loss.backward()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        bits += [static.cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]
        del loss
    return bits


PROGRAMS: list[Callable[[Path | None], Bits]] = [
    one_stream_on_flash,
    one_stream_on_host,
    one_stream_under_a_budget,
    noise_on_host,
    noise_spilled_late,
    one_stream_recomputed,
    two_streams_on_flash,
    two_streams_on_host,
    two_streams_recomputed,
    two_streams_made_again,
    two_streams_remade,
    new_streams_recomputed,
    two_streams_and_small_parts,
    two_streams_that_share,
    spilled_late,
    two_streams_gpu_direct,
    two_streams_gpu_direct_and_host,
    two_devices_on_flash,
    two_devices_on_host,
    encoded_on_flash,
    encoded_on_two_streams,
    encoded_small_parts,
    encoded_and_recomputed,
    encoded_under_a_budget,
    kept_and_spilled_late,
    batches_of_a_loader,
    optimizer_on_flash,
    optimizer_and_gradients_on_flash,
    optimizer_in_backward,
    optimizer_taken_over,
    weights_on_flash,
    weights_on_host,
    checkpoints,
    suspended,
    a_capture,
]
