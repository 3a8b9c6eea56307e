"""Step time with activations on flash, beside the same step without, at equal batch.

All modes train one network in one process, a few steps in turn and every other round in reverse, so
that a drifting machine drifts for all of them alike, and every figure is a ratio to the plain steps of
the same round. The first step of each turn does not count: it finds memory as the mode before left it.
Peers take part in the first ``--peer-rounds`` only. The modes:

* ``plain``: PyTorch alone (Penstock's session is paused);
* ``penstock``: policy ``auto`` under the stated budget;
* ``beside``: PyTorch alone, while another process moves as many bytes and does nothing else: what the
  machine itself charges for them (see ``_beside``);
* ``checkpoint``: ``torch.utils.checkpoint`` around each block;
* ``save_on_cpu``: ``torch.autograd.graph.save_on_cpu``;
* ``torch_save``: a hook that writes each saved tensor with ``torch.save`` and loads it again.

The bound is what flash bandwidth, measured in this run, allows on paper: no step can be faster than
the plain one, nor its forward than the bytes written, nor its backward than the bytes read.

Every mode runs with glibc told to keep what is freed (see ``_memory``), the quickest that plain PyTorch
can be, or with ``--malloc default`` as it is installed: it then returns large tensors to the system when
they die, and every step pays for new pages, in every mode. These results have a name of their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _beside import Mover

import _memory
import _results
import penstock
from penstock.lab import zoo
from penstock.observe import Stage
from penstock.observe.totals import Totals


@dataclass(frozen=True)
class Job:
    network: str
    batch: int
    budget_share: float
    """Of what autograd saves. VGG's largest single storage is a sixth of it, so a tenth cannot be."""
    overrides: dict[str, Any]


JOBS = {
    "vgg16": Job("vgg16", 16, 0.4, {"image_size": 128}),
    "resnet50": Job("resnet50", 16, 0.15, {"image_size": 160}),
    "resnet50-64": Job("resnet50", 64, 0.15, {"image_size": 160}),
    "resnet50-64-half": Job("resnet50", 64, 0.5, {"image_size": 160}),
    "gpt2": Job("gpt2", 4, 0.3, {"sequence_length": 256, "dropout": 0.0}),
}
Times = tuple[float, float, float]
"""Seconds of forward, backward, and the whole step with the optimizer."""
OWN = 3
"""Modes that take part in every round."""


def main() -> None:
    args = parse()
    if args.malloc == "keep":
        _memory.keep_what_is_freed()
    results = _results.earlier("activation_offload")
    for job in args.networks:
        name = job if args.malloc == "keep" else f"{job}-default-malloc"
        results[name] = measure(JOBS[job], args)
        show(name, results[name])
        if not args.quick:
            record(results, args)


def record(results: dict[str, Any], args: argparse.Namespace) -> None:
    """After each network, so that what was measured is not lost with the next."""
    config = {
        "rounds": args.rounds,
        "steps_of_a_round": args.steps,
        "peer_rounds": args.peer_rounds,
        "threads": torch.get_num_threads(),
        "optimizer": "SGD",
        "environment": _memory.KEEPS,
        "environment of -default-malloc": {},
    }
    path = _results.write("activation_offload", results, config, directory=args.dir)
    print(f"wrote {path.name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="of each mode in a round")
    parser.add_argument("--peer-rounds", type=int, default=2)
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory to spill to")
    parser.add_argument("--quick", action="store_true", help="one round of a small size; no result")
    args = parser.parse_args()
    if args.quick:
        args.rounds = args.peer_rounds = args.steps = 1
    return args


def measure(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    network = zoo.build(job.network, **job.overrides)
    batch = zoo.example_batch(network, 2 if args.quick else job.batch)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    mover: Mover | None = None

    def step() -> Times:
        start = time.perf_counter()
        if mover is not None:
            mover.begin("write")
        loss = network(batch.inputs, batch.targets)
        forward = time.perf_counter()
        if mover is not None:
            mover.begin("read")
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        if mover is not None:
            mover.wait()
        return forward - start, backward - forward, end - start

    step()
    saved_bytes = saved_by_autograd(network, step)
    budget = saved_bytes if args.quick else int(saved_bytes * job.budget_share)
    times: dict[str, list[Times]] = {}
    with penstock.offload(network, optimizer, device_memory=budget, flash=args.dir) as session:
        for _ in range(3):  # profile, plan, steady state
            step()
        session.budget.reset_peak()
        before = session.recorder.snapshot()
        step()
        after = session.recorder.snapshot()
        written, read = (
            Flow(*(now - then for now, then in zip(late, early, strict=True)))
            for late, early in zip(flows(after), flows(before), strict=True)
        )
        modes = list(contexts(network, session, args.dir).items())
        with ExitStack() as stack:
            bare = None
            if written.nbytes:
                request_bytes = written.nbytes // written.count
                bare = stack.enter_context(Mover(args.dir, written.nbytes, request_bytes))
            for turn in range(args.rounds):
                present = modes if turn < args.peer_rounds else modes[:OWN]
                for mode, context in present if turn % 2 else reversed(present):
                    mover = bare if mode == "beside" else None
                    with context():
                        step()  # what the mode before left in memory is gone after this one
                        steps = [step() for _ in range(args.steps)]
                    times.setdefault(mode, []).append(middle(steps))
            mover = None
        after = session.recorder.snapshot()
        figures = figures_of({mode: times[mode] for mode, _ in modes if mode in times})
        machine = session.planner.machine
        figures |= {
            "saved_bytes": saved_bytes,
            "budget_bytes": budget,
            "peak_resident_bytes": session.budget.peak_bytes,
            "written_bytes_per_step": written.nbytes,
            "read_bytes_per_step": read.nbytes,
            "written_storages_per_step": written.count,
            "flash_write_bytes_per_s": machine.flash_write_bytes_per_s,
            "flash_read_bytes_per_s": machine.flash_read_bytes_per_s,
            "stall_s_per_step": (after.stall_ns - before.stall_ns)
            / 1e9
            / (1 + (1 + args.steps) * args.rounds),
            "network": job.network,
            "batch": job.batch,
            "overrides": job.overrides,
        }
    figures["bound_ratio"] = bound(figures)
    figures["penstock"]["ratio_to_beside"] = statistics.median(
        mine[2] / other[2] for mine, other in zip(times["penstock"], times["beside"], strict=True)
    )
    return figures


class Flow(NamedTuple):
    """Of one step, or up to some moment."""

    count: int
    nbytes: int


def flows(totals: Totals) -> tuple[Flow, Flow]:
    """Written to flash, and read from it."""
    written, read = (totals.flow(stage, "flash") for stage in (Stage.WRITE, Stage.READ))
    return Flow(written.count, written.nbytes), Flow(read.count, read.nbytes)


def middle(steps: list[Times]) -> Times:
    """Of each part, the median."""
    forward, backward, whole = (statistics.median(column) for column in zip(*steps, strict=True))
    return forward, backward, whole


def saved_by_autograd(network: zoo.Network, step: Callable[[], Times]) -> int:
    with penstock.offload(network, policy="keep") as session:
        step()
        return session.budget.peak_bytes


def contexts(
    network: zoo.Network, session: penstock.Session, directory: str
) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    return {
        "plain": session.paused,
        "penstock": nullcontext,
        "beside": session.paused,
        "checkpoint": lambda: checkpointed(network, session),
        "save_on_cpu": lambda: hooked(session, torch.autograd.graph.save_on_cpu()),
        "torch_save": lambda: hooked(session, torch_save(network, directory)),
    }


@contextmanager
def hooked(session: penstock.Session, context: AbstractContextManager[Any]) -> Iterator[None]:
    with session.paused(), context:
        yield


@contextmanager
def checkpointed(network: zoo.Network, session: penstock.Session) -> Iterator[None]:
    """Every block of the network is recomputed in backward."""
    blocks = blocks_of(network)
    wrapped = [recompute(block.forward) for block in blocks]
    if not blocks:
        blocks = [network.features]
        wrapped = [recompute_segments(network.features)]
    for block, forward in zip(blocks, wrapped, strict=True):
        block.forward = forward
    try:
        with session.paused():
            yield
    finally:
        for block in blocks:
            del block.forward  # the class's own is back


def recompute(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


def recompute_segments(features: torch.nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    """A VGG has no blocks: its layers up to each pooling are one, for in-place ReLUs stay inside."""
    segments: list[list[torch.nn.Module]] = [[]]
    for layer in features:
        segments[-1].append(layer)
        if isinstance(layer, torch.nn.MaxPool2d):
            segments.append([])
    parts = [torch.nn.Sequential(*segment) for segment in segments if segment]

    def forward(images: torch.Tensor) -> torch.Tensor:
        for part in parts:
            images = checkpoint(part, images, use_reentrant=False)
        return images

    return forward


def blocks_of(network: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated parts: residual blocks, transformer layers."""
    kinds: dict[str, list[torch.nn.Module]] = {}
    for module in network.modules():
        name = type(module).__name__
        if "block" in name.lower() or "bottleneck" in name.lower():
            kinds.setdefault(name, []).append(module)
    return max(kinds.values(), key=len, default=[])


def torch_save(network: torch.nn.Module, directory: str) -> AbstractContextManager[Any]:
    weights = {parameter.data_ptr() for parameter in network.parameters()}

    def pack(tensor: torch.Tensor) -> object:
        if tensor.nbytes < 1 << 20 or tensor.data_ptr() in weights:
            return tensor.detach()
        file = tempfile.NamedTemporaryFile(dir=directory)  # noqa: SIM115  (lives with its tensor)
        torch.save(tensor, file)
        file.flush()
        return file

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else torch.load(packed.name)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def figures_of(times: dict[str, list[Times]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for mode, rounds in times.items():
        forward, backward, whole = middle(rounds)
        ratios = [mine[2] / plain[2] for mine, plain in zip(rounds, times["plain"], strict=False)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        figures[mode] = {
            "forward_s": forward,
            "backward_s": backward,
            "step_s": whole,
            "ratio_to_plain": statistics.median(ratios),
            "ratio_quartiles": [low, high],
            "rounds": len(rounds),
        }
    return figures


def bound(figures: dict[str, Any]) -> float:
    """The least ratio to the plain step that this flash allows for these bytes."""
    plain = figures["plain"]
    write_s = figures["written_bytes_per_step"] / figures["flash_write_bytes_per_s"]
    read_s = figures["read_bytes_per_step"] / figures["flash_read_bytes_per_s"]
    rest_s = plain["step_s"] - plain["forward_s"] - plain["backward_s"]
    bound_s = max(plain["forward_s"], write_s) + max(plain["backward_s"], read_s) + rest_s
    return bound_s / plain["step_s"]


def show(name: str, figures: dict[str, Any]) -> None:
    mib = 1 << 20
    print(
        f"{name}, batch {figures['batch']}: autograd saves {figures['saved_bytes'] / mib:.0f} MiB,"
        f" budget {figures['budget_bytes'] / mib:.0f} MiB,"
        f" peak {figures['peak_resident_bytes'] / mib:.0f} MiB,"
        f" {figures['written_bytes_per_step'] / mib:.0f} MiB written a step;"
        f" bound {figures['bound_ratio']:.3f}; penstock / beside"
        f" {figures['penstock']['ratio_to_beside']:.3f}"
    )
    for mode, one in figures.items():
        if isinstance(one, dict) and "step_s" in one:
            print(
                f"  {mode:<12} {one['step_s']:8.3f} s   {one['ratio_to_plain']:6.3f} x plain"
                f"   (quartiles {one['ratio_quartiles'][0]:.3f} to {one['ratio_quartiles'][1]:.3f},"
                f" {one['rounds']} rounds)"
            )


if __name__ == "__main__":
    main()
