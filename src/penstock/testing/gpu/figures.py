"""Figures of a device: link, steps against plain torch, GPU-direct, optimizer, checkpoints, weights.

Each is measured in a separate process, and reports its parts as soon as they are known.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import penstock
from penstock import checkpoint
from penstock.core.units import GIB, MIB
from penstock.lab import zoo
from penstock.observe import Stage
from penstock.optim import FlashAdamW
from penstock.testing.gpu import processes, steps
from penstock.testing.gpu.fact import brief


class RefusedError(Exception):
    """The figure cannot be measured on this machine. The text gives the reason."""


@dataclass(frozen=True)
class FigureRequest:
    """Parameters of a measurement.

    Attributes:
        directory: Directory on a disk, to offload to.
        scale: Scale of sizes; 1 for a real device.
        limit_s: Time limit in seconds.
        tell: Function that receives parts of the result as soon as they are known.
    """

    directory: str
    scale: float
    limit_s: float
    tell: Callable[[Mapping[str, Any]], None]
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def small(self) -> bool:
        """True for tiny networks, as for an emulated device."""
        return self.scale < 0.1

    def until(self, share: float) -> float:
        """Return the moment after ``share`` of the time, by ``time.monotonic``."""
        return self.begun_s + share * self.limit_s

    def sized(self, nbytes: int, *, least: int = MIB) -> int:
        """Return a size at this scale, as a multiple of 4096."""
        return max(least, int(nbytes * self.scale)) & ~4095


@dataclass(frozen=True)
class Figure:
    """A figure to measure.

    Attributes:
        measure: Function that measures and reports the parts. Raises RefusedError.
        limit_s: Time limit in seconds.
        environment: Environment variables of the process.
        devices: Number of devices that it needs.
    """

    measure: Callable[[FigureRequest], None]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: int = 1


# -- the link -------------------------------------------------------------------------------------


def link(request: FigureRequest) -> None:
    """Measure copies in both directions, with pinned and other memory, and in both at once."""
    nbytes = request.sized(512 * MIB)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(device)
    host = torch.zeros(nbytes, dtype=torch.uint8)
    request.tell({"nbytes": nbytes})
    for name, memory in (("pageable", host), ("pinned", host.pin_memory())):
        for way, target, source in (("out", memory, device), ("in", device, memory)):
            copy = partial(target.copy_, source, non_blocking=True)
            seconds = min(_device_seconds(copy) for _ in range(4))
            request.tell({f"{name}_{way}_bytes_per_s": nbytes / seconds})
    second = host.pin_memory()
    one, two = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def both() -> None:
        for stream in (one, two):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(one):
            second.copy_(device, non_blocking=True)
        with torch.cuda.stream(two):
            other.copy_(memory, non_blocking=True)
        for stream in (one, two):
            torch.cuda.current_stream().wait_stream(stream)

    seconds = min(_device_seconds(both) for _ in range(4))
    request.tell({"both_ways_bytes_per_s": 2 * nbytes / seconds})


def _device_seconds(work: Callable[[], object]) -> float:
    """Measure the device time of work on the current stream, and wait for it."""
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    events[0].record()
    work()
    events[1].record()
    events[1].synchronize()
    return max(1e-6, float(events[0].elapsed_time(events[1])) / 1e3)


# -- steps ----------------------------------------------------------------------------------------


def step(network: str, place: str, request: FigureRequest) -> None:
    """Measure a step against plain torch, with a batch that fits and with four times that."""
    job, host_memory = steps.JOBS[network], steps.pinned_bytes()
    staging_bytes = min(host_memory, GIB)  # with flash, so that host memory does not take all
    if request.small:
        job, host_memory = replace(job, size="tiny", overrides={}), 256 * MIB
        staging_bytes = host_memory
    free = torch.cuda.mem_get_info()[0]
    batch = steps.fitting_batch(
        job,
        wanted=max(2, round(job.batch * request.scale)),
        most_saved_bytes=min(free // 8, host_memory // 4),
    )
    factors = (1, 4) if place == "host" else (1,)
    for number, factor in enumerate(factors, 1):
        share = 0.5 if factor == 1 else 1 / factor
        figures = _step_at(
            steps.NetworkTraining(job, batch * factor),
            (share, 1.5 * share, 0.9),
            host_memory=staging_bytes if place == "flash" else host_memory,
            flash=request.directory if place == "flash" else (),
            rounds=5,
            end_s=request.until(0.8 * number / len(factors)),
            settings={"floor": 1024} if request.small else {},
        )
        request.tell({f"batch x {factor}": figures})
        torch.cuda.empty_cache()


def _step_at(
    training: steps.NetworkTraining, shares: Sequence[float], **how: Any
) -> dict[str, Any]:
    """Return figures under the first sufficient budget, or the refusal if there is none."""
    refused: dict[str, Any] = {}
    for share in shares:
        try:
            return steps.measure(training, budget_share=share, **how) | {"budget_share": share}
        except penstock.BudgetError as error:  # tensors that must stay resident need more
            refused = {"refused": brief(error)}
        except (torch.OutOfMemoryError, penstock.PenstockError) as error:
            return {"refused": brief(error)}
    return refused


# -- GPU-direct -----------------------------------------------------------------------------------


def direct(request: FigureRequest) -> None:
    """Measure transfers between flash and device memory without the host, and compare the bits."""
    os.environ["PENSTOCK_GPU_DIRECT"] = "on"
    rows = max(64, request.sized(48 * MIB) // 4 // 1024)
    expected = _trained(rows)
    storage_bytes = rows * 1024 * 4
    settings: dict[str, Any] = {"flash": request.directory, "host_memory": 0, "policy": "all"}
    settings["device_memory"] = 6 * storage_bytes  # of 9, so that storages are written and read
    try:
        with penstock.offload(**settings) as session:
            found = _trained(rows)
    except penstock.ConfigError as error:
        raise RefusedError(brief(error)) from error
    totals = session.recorder.snapshot()
    flows = {stage: totals.flow(stage, "flash") for stage in (Stage.WRITE, Stage.READ)}
    same = all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
    request.tell(
        {
            "storage_bytes": storage_bytes,
            "written_bytes": flows[Stage.WRITE].nbytes,
            "read_bytes": flows[Stage.READ].nbytes,
            "write_bytes_per_s": flows[Stage.WRITE].bytes_per_s,
            "read_bytes_per_s": flows[Stage.READ].bytes_per_s,
            "same_bits": same,
        }
    )
    if not same:
        request.tell({"failed": "the gradients are not those of plain torch"})


def _trained(rows: int) -> list[Tensor]:
    """Return gradients of two steps of a network whose saved storages have ``rows`` x 1024 floats."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(8)]
    model = nn.Sequential(*layers).to("cuda")
    x = torch.randn(rows, 1024).to("cuda")
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    return [each.grad for each in model.parameters() if each.grad is not None]


# -- optimizer and checkpoints --------------------------------------------------------------------


def optimizer(request: FigureRequest) -> None:
    """Measure a step of AdamW with its states on flash, and of torch's on the device."""
    width = 128 if request.small else 4096
    model, twin = _wide(width), _wide(width)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        two.grad = one.grad.clone()
    request.tell({"parameters": sum(each.numel() for each in model.parameters())})
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=False)
    plain_s = _wall(plain.step, request.until(0.2))
    request.tell({"plain_step_s": plain_s[-1]})
    flash = FlashAdamW(model.parameters(), lr=1e-3, flash=request.directory)
    try:
        flash_s = _wall(flash.step, request.until(0.7))
        for _ in range(
            len(plain_s) - len(flash_s)
        ):  # the same number, so that weights can be compared
            flash.step()
        for _ in range(len(flash_s) - len(plain_s)):
            plain.step()
    finally:
        flash.close()
    difference = max(
        float((one - two).abs().max().detach())
        for one, two in zip(model.parameters(), twin.parameters(), strict=True)
    )
    request.tell(
        {
            "first_step_s": flash_s[0],
            "step_s": sorted(flash_s[1:] or flash_s)[len(flash_s[1:] or flash_s) // 2],
            "steps": len(flash_s),
            "largest_difference_to_plain": difference,
        }
    )


def checkpoints(request: FigureRequest) -> None:
    """Measure a durable save and a load of a network and its optimizer on the device."""
    model = _wide(128 if request.small else 4096)
    adam = torch.optim.AdamW(model.parameters())
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    adam.step()
    state = {"model": model, "optimizer": adam}
    tensors = [*model.parameters(), *(each["exp_avg"] for each in adam.state.values())]
    wanted = [each.detach().clone() for each in tensors]
    nbytes = sum(3 * each.numel() * each.element_size() for each in model.parameters())
    request.tell({"nbytes": nbytes})
    with tempfile.TemporaryDirectory(dir=request.directory) as place:
        path = Path(place) / "one"
        saved_s = _wall(lambda: checkpoint.save(path, state), request.until(0.3), most=3)
        request.tell({"save_s": min(saved_s), "save_bytes_per_s": nbytes / min(saved_s)})
        with torch.no_grad():
            for each in tensors:
                each.zero_()
        loaded_s = _wall(lambda: checkpoint.load(path, into=state), request.until(0.8), most=3)
    found = [*model.parameters(), *(each["exp_avg"] for each in adam.state.values())]
    same = all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    request.tell(
        {"load_s": min(loaded_s), "load_bytes_per_s": nbytes / min(loaded_s), "same_bits": same}
    )
    if not same:
        request.tell({"failed": "the loaded tensors differ from the saved ones"})


def _wide(width: int) -> nn.Module:
    """Build a network of eight square layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to("cuda")


def _wall(work: Callable[[], object], until_s: float, *, most: int = 6) -> list[float]:
    """Return seconds of repeated calls with device work: at least two, until ``until_s`` or ``most``."""
    found: list[float] = []
    while len(found) < 2 or (len(found) < most and time.monotonic() < until_s):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found


# -- weights on flash -----------------------------------------------------------------------------


def weights(request: FigureRequest) -> None:
    """Measure a model on the host that is worked with on the device in a third of its weights' memory.

    Both steps, inference and training, are compared with those of the whole model on the device.
    """
    overrides = {} if request.small else {"width": 1024, "depth": 24, "heads": 16}

    def build() -> zoo.Network:
        torch.manual_seed(0)
        size: Any = "tiny" if request.small else "full"
        return zoo.build("gpt2", size=size, dropout=0.0, attention_dropout=0.0, **overrides)

    def infer(model: zoo.Network) -> Tensor:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = model(*batch)
        return loss

    def train(model: zoo.Network, optimizer: torch.optim.Optimizer) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = model(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    plain = build().to("cuda")
    batch = zoo.example_batch(plain, 2 if request.small else 8, device="cuda")
    nbytes = sum(each.nbytes for each in plain.parameters())
    request.tell({"weights_bytes": nbytes})
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    expected = [infer(plain), infer(plain)]
    plain_s = {"infer": min(_wall(partial(infer, plain), request.until(0.1)))}
    expected.append(train(plain, adam))
    plain_s["train"] = min(_wall(partial(train, plain, adam), request.until(0.2)))
    del plain, adam
    torch.cuda.empty_cache()

    begun_s = time.monotonic()
    floor = 1024 if request.small else MIB
    with penstock.built_on_flash(request.directory, floor=floor):
        model = build()
    request.tell({"build_s": time.monotonic() - begun_s})
    settings: dict[str, Any] = {"weights_memory": nbytes // 3, "floor": floor, "policy": "keep"}
    settings |= {"flash": request.directory, "host_memory": request.sized(2 * GIB, least=64 * MIB)}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with penstock.offload(model, weights="flash", device="cuda", **settings):
        found = [infer(model), infer(model)]
        _weights_steps(request, "infer", partial(infer, model), plain_s, 0.5)
        peak = torch.cuda.max_memory_allocated() - before
        request.tell({"infer_peak_bytes": peak})
        flash = FlashAdamW(
            model.parameters(),
            lr=1e-4,
            flash=request.directory,
            overlap=True,
            gradient_memory="256MiB",
        )
        try:
            found.append(train(model, flash))
            _weights_steps(request, "train", partial(train, model, flash), plain_s, 0.9)
        finally:
            flash.close()
    same = all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
    request.tell({"same_bits": same})
    if not same:
        request.tell({"failed": "the losses are not those of plain torch"})


def _weights_steps(
    request: FigureRequest,
    name: str,
    step: Callable[[], object],
    plain_s: Mapping[str, float],
    until: float,
) -> None:
    before = _io_bytes()
    seconds = _wall(step, request.until(until))
    read, written = (
        (now - then) // len(seconds) for now, then in zip(_io_bytes(), before, strict=True)
    )
    request.tell(
        {
            f"{name}_plain_step_s": plain_s[name],
            f"{name}_step_s": sorted(seconds)[len(seconds) // 2],
            f"{name}_read_bytes": read,
            f"{name}_written_bytes": written,
        }
    )


def _io_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from and written to disks."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


# -- several devices ------------------------------------------------------------------------------


def second_device(request: FigureRequest) -> None:
    """Check that sessions on device 1, to host memory and to flash, make no context on device 0."""
    torch.cuda.set_device(1)
    rows = max(64, request.sized(8 * MIB) // 4 // 1024)
    has: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has is None:
        raise RefusedError("this torch does not report contexts")
    for place, flash in (("host", ()), ("flash", request.directory)):
        settings: dict[str, Any] = {"flash": flash, "host_memory": "256MiB", "policy": "all"}
        with penstock.offload(**settings):
            _trained(rows)
        free = not has(0)
        request.tell({f"no_context_on_device_0_after_{place}": free})
        if not free:
            request.tell({"failed": f"a session to {place} made a context on device 0"})
            return


FIGURES: Final[Mapping[str, Figure]] = {
    "link": Figure(link, 30),
    "step resnet50, host": Figure(partial(step, "resnet50", "host"), 60),
    "step gpt2, host": Figure(partial(step, "gpt2", "host"), 60),
    "step gpt2, flash": Figure(partial(step, "gpt2", "flash"), 45),
    "weights on flash": Figure(weights, 75),
    "flash optimizer": Figure(optimizer, 40),
    "checkpoints": Figure(checkpoints, 40),
    "GPU-direct": Figure(direct, 30),
    "GPU-direct, expandable segments": Figure(
        direct, 30, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ),
    "second device": Figure(second_device, 40, devices=2),
}


def work(options: argparse.Namespace) -> int:
    """Measure the named figure, in a process of :mod:`.child`, and record its parts.

    Records also ``refused`` or ``failed`` with the reason; the exit code is 1 for the latter.
    """
    tell: Any = partial(processes.append, options.records)
    try:
        FIGURES[options.names[0]].measure(
            FigureRequest(options.dir, options.scale, options.limit, tell)
        )
    except RefusedError as error:
        tell({"refused": str(error)})
    except Exception as error:  # noqa: BLE001  (a driver or a kernel may fail in any way)
        traceback.print_exc()
        tell({"failed": brief(error)})
        return 1
    return 0
