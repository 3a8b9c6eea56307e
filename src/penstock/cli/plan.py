"""The command ``penstock plan``: time and memory of training, predicted before a step is run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli import deepspeed_config
from penstock.cli.command import new_parser, size
from penstock.cli.output import print_result, say
from penstock.cli.paths import write_file
from penstock.cli.plan_network import OPTIMIZER_COPIES
from penstock.cli.plan_request import ALL, PlanRequest, check
from penstock.cli.plan_step import FORMATS, OF_RANKS, execute_step
from penstock.core.errors import ConfigError
from penstock.core.units import format_bandwidth, format_bytes, format_duration
from penstock.plan import Machine, policies
from penstock.plan.plan import INFEASIBLE
from penstock.plan.ranks import PARALLEL
from penstock.plan.serial import encode_fields
from penstock.report.outcome import PolicyOutcome, best_first, outcome
from penstock.report.plan_plot import plot_plan
from penstock.report.plan_table import LargestFit, all_policies, one_policy

_EXAMPLES: Final = """\
examples:
  penstock plan vgg16 --batch 256 --machine titan-x
  penstock plan bert-large --batch 64 --machine v100-nvme --policy all
  penstock plan gpt2 --batch 8 --machine cpu --device-memory 2GiB --plot step.svg
  penstock plan gpt2 --tokens 4096 --machine cpu --weights flash --memory 2GiB --optimizer adam
  penstock plan gpt2 --tokens 4096 --machine h200 --weights flash --ranks 64 --nodes 8 --ssds 4
  penstock plan train.py:build --batch 64 --machine here.toml --device-memory 20GiB --json
  penstock plan --from-deepspeed ds.json

Nothing is trained, and the machine need not be there. The exit code is 0 if a plan fits, 1 if none
does. Sizes have a unit: GB is 10^9 bytes, GiB is 2^30."""

_OF_RANKS: Final = (
    ("--ranks", "N", int, "plan the step of one of so many ranks; a batch is that of each rank"),
    ("--nodes", "M", int, "with --ranks: nodes that they are divided among (default: 1)"),
    (
        *("--ssds", "K", int),
        "with --ranks: SSDs of each node, each as the machine's flash, shared by its ranks (default: 1)",
    ),
    (
        *("--links", "L", int),
        "with --ranks: links between host and devices on each node (default: one for each rank)",
    ),
    (
        *("--network-rate", "RATE", str),
        "with --nodes: bandwidth each way between a node and the others, such as 50GB/s (default: the"
        " machine's)",
    ),
    (
        *("--peer-rate", "RATE", str),
        "with --ranks: bandwidth each way between a device and the others of its node (default: the"
        " machine's)",
    ),
)


def parser() -> argparse.ArgumentParser:
    """Build the parser of ``penstock plan``."""
    made = new_parser(
        "plan",
        "Predict, before a step is run, if training fits in memory, how long a step takes,"
        "\nand what goes where.",
        examples=_EXAMPLES,
        usage="penstock plan NETWORK --batch N --machine MACHINE [options]",
        execute=execute,
    )
    made.add_argument(
        "network", metavar="NETWORK", nargs="?", help="a network of the zoo, such as resnet50; your own"
        " function, file.py:function; or a profile, file.json",
    )  # fmt: skip
    made.add_argument("--batch", metavar="N", type=int, help="images or sequences in a step")
    made.add_argument(
        "--tokens", metavar="N", type=int, help="with --weights flash or --ranks, in place of --batch:"
        " tokens in a step",
    )  # fmt: skip
    made.add_argument(
        "--machine", metavar="NAME",
        help=f"{', '.join(Machine.presets())}; or a file written by `penstock bench machine`",
    )  # fmt: skip
    for name, text in (
        ("--device-memory", "budget for the device (default: all the machine's)"),
        ("--host-memory", "what the host tier may hold (default: the machine's; none for a CPU)"),
        ("--flash-memory", "what the flash tier may hold (default: the machine's)"),
        ("--tbw", "bytes written that the SSD is rated for, as 600TB: to tell how long it lasts"),
    ):
        made.add_argument(name, metavar="SIZE", type=size, help=text)
    made.add_argument(
        "--data-rate", metavar="RATE", help="rate at which data loaders read from flash, such as 500MB/s;"
        " the plan uses what is left (default: nothing)",
    )  # fmt: skip
    made.add_argument(
        "--policy", metavar="NAME", default="auto",
        help=f"{', '.join(n for n in policies.names() if n != ALL)}; or {ALL}, to compare all of them"
        " (default: auto)",
    )  # fmt: skip
    made.add_argument(
        "--device", choices=("cpu", "cuda"), help="whose kernels compute; for cuda the budget is"
        " for all device memory, for cpu for what autograd saves (default: the machine's)",
    )  # fmt: skip
    made.add_argument(
        "--optimizer", choices=tuple(OPTIMIZER_COPIES), default="sgd",
        help="optimizer whose states are in device memory (default: sgd, which has none)",
    )  # fmt: skip
    made.add_argument(
        "--weights", choices=("keep", "flash"), default="keep", help="flash: weights and the optimizer's"
        " records rest on flash, and the plan covers the whole step with the update (default: keep)",
    )  # fmt: skip
    made.add_argument(
        "--memory", metavar="SIZE", type=size, help="with --weights flash or --ranks: memory for weights,"
        " gradients, buffers and saved tensors together (default: all the machine's)",
    )  # fmt: skip
    made.add_argument(
        "--format", choices=FORMATS, help="with --weights flash or --ranks: format of the records"
        " (default: exact)",
    )  # fmt: skip
    made.add_argument(
        "--forward-only", action="store_true", help="with --weights flash or --ranks: inference,"
        " without backward and update",
    )  # fmt: skip
    for name, metavar, kind, text in _OF_RANKS:
        made.add_argument(name, metavar=metavar, type=kind, help=text)
    made.add_argument(
        "--parallel", choices=PARALLEL, help="with --ranks: each rank has a part of every weight and its"
        " records (fsdp2), or all of them (ddp) (default: fsdp2)",
    )  # fmt: skip
    made.add_argument("--autocast", choices=("bfloat16", "float16"), help="train under autocast")
    made.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[],
        help="set an argument of the zoo's network, such as image_size=96; repeat it for several",
    )  # fmt: skip
    made.add_argument(
        "--verbose",
        action="store_true",
        help="show every slot: every tensor saved in a step",
    )
    made.add_argument(
        "--from-deepspeed", metavar="FILE.json", help="in place of a plan: what stands for each key of a"
        " DeepSpeed configuration, and the code and command that result",
    )  # fmt: skip
    made.add_argument("--plot", metavar="FILE", help="draw one step, as .svg, .png or .pdf")
    made.add_argument(
        "--save-plan", metavar="FILE.json", help="write the plan; with --policy all, the best"
    )
    return made


def execute(options: argparse.Namespace) -> int:
    """Plan, print, draw, save; return 1 if nothing fits.

    Raises:
        ConfigError: An option, the network or the machine is invalid.
        PlanError: The file has no valid profile.
    """
    if options.from_deepspeed is not None:
        _refuse_others(options)
        return deepspeed_config.execute(options)
    if options.network is None or options.machine is None:
        raise ConfigError("plan needs NETWORK and --machine; `penstock plan --help` has examples")
    if options.weights == "flash" or options.ranks is not None:
        return execute_step(options)
    for name in OF_RANKS:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --ranks")
    for name in ("tokens", "memory", "format"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} needs --weights flash or --ranks")
    if options.forward_only:
        raise ConfigError("--forward-only needs --weights flash or --ranks")
    request = check(options)
    largest = _largest(request)
    outcomes = best_first(
        outcome(name, request.profile, request.machine, request.budgets)
        for name in request.policies
    )
    best = outcomes[0]
    if options.plot is not None:
        plot_plan(best, options.plot, title=_title(request, best))
    if options.save_plan is not None:
        write_file(options.save_plan, best.plan.to_json() + "\n", "--save-plan")
    print_result(
        options.json,
        lambda: document(request, outcomes, largest),
        lambda: text(request, outcomes, largest, verbose=options.verbose),
    )
    if not best.fits:
        say(f"error: {_why_not(outcomes)}")
    return 0 if best.fits else 1


def _refuse_others(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option of plans stands beside ``--from-deepspeed``."""
    allowed = {"from_deepspeed", "json", "debug", "execute"}
    defaults = vars(parser().parse_args([]))
    given = {name for name, value in vars(options).items() if value != defaults.get(name)}
    if other := sorted(given - allowed):
        name = "NETWORK" if other[0] == "network" else f"--{other[0].replace('_', '-')}"
        raise ConfigError(f"--from-deepspeed makes no plan, so it takes no {name}: leave that out")


def _largest(request: PlanRequest) -> dict[str, LargestFit]:
    """Return the largest batch of each policy; `auto` comes last, and starts from those of the others."""
    if request.search is None:
        return {}
    order = sorted(request.policies, key=lambda name: name == "auto")
    return {name: request.search.of(name) for name in order}


def _why_not(outcomes: Sequence[PolicyOutcome]) -> str:
    """Explain why the best of the plans does not fit, and which memory would suffice."""
    best = outcomes[0]
    whose = f"policy {best.policy}" if len(outcomes) == 1 else f"no policy fits; {best.policy}"
    if best.least_bytes is None:
        budgets = best.plan.budgets
        return (
            f"{whose}: the tiers have too little room, {format_bytes(budgets.host_bytes)} of host"
            f" memory and {format_bytes(budgets.flash_bytes)} of flash, and no device memory was"
            " found that makes up for it; give more of these"
        )
    notes = (note for note in best.plan.notes if note.startswith(INFEASIBLE))
    why = next(notes, "the device budget cannot be kept")
    more = f"; --device-memory {best.least_bytes} would do"
    return f"{whose}: {why}{more * (f'at least {best.least_bytes} bytes' not in why)}"


def _head(request: PlanRequest) -> Text:
    profile, budgets = request.profile, request.budgets
    batch = f", batch {request.batch_size}" if request.batch_size else ""
    line = Text(f"{request.subject.name}{batch}", style="bold")
    line.append(f" on {request.machine.name}", style="not bold")
    counted = "of all device memory" if request.whole_device else "of what autograd saves"
    line.append(
        f"\na step saves {format_bytes(profile.saved_bytes)} in {len(profile.slots)} slots; if all of it"
        f" stayed, the peak {counted} would be {format_bytes(profile.peak_saved_bytes)}"
        f"\nbudget {format_bytes(budgets.device_bytes)} {counted}; tiers: host"
        f" {format_bytes(budgets.host_bytes)}, flash {format_bytes(budgets.flash_bytes)}",
        style="not bold",
    )
    if request.data_bytes_per_s:
        left = format_bandwidth(request.machine.flash_read_bytes_per_s)
        line.append(
            f"\ndata loaders read {format_bandwidth(request.data_bytes_per_s)} of flash all the time,"
            f" which leaves reads of {left}",
            style="not bold",
        )
    if request.whole_device and request.search is not None:
        line.append(
            f"\nparameters, gradients and the state of {request.training.optimizer}:"
            f" {format_bytes(profile.fixed_bytes)}",
            style="not bold",
        )
    return line


def text(
    request: PlanRequest,
    outcomes: Sequence[PolicyOutcome],
    largest: Mapping[str, LargestFit],
    *,
    verbose: bool,
) -> RenderableType:
    """Render a report for the terminal."""
    head, best = _head(request), outcomes[0]
    if len(outcomes) == 1:
        body = one_policy(
            best,
            largest=largest.get(best.policy),
            tbw_bytes=request.tbw_bytes,
            verbose=verbose,
        )
        return Group(head, Text(), body)
    oracle = format_duration(best.replayed.ideal_ns / 1e9)
    foot = f"The oracle, a step with memory without end, takes {oracle}."
    return Group(head, Text(), all_policies(outcomes, largest=largest), Text(), Text(foot))


def document(
    request: PlanRequest, outcomes: Sequence[PolicyOutcome], largest: Mapping[str, LargestFit]
) -> dict[str, Any]:
    """Return the JSON document."""
    profile = request.profile
    return {
        "schema": 1,
        "penstock": __version__,
        "network": request.subject.name,
        "batch_size": request.batch_size,
        "machine": request.machine.name,
        "device": profile.device,
        "whole_device": request.whole_device,
        "budgets": asdict(request.budgets),
        "tbw_bytes": request.tbw_bytes,
        "data_bytes_per_s": request.data_bytes_per_s,
        "flash_read_bytes_per_s": request.machine.flash_read_bytes_per_s,
        "flash_write_bytes_per_s": request.machine.flash_write_bytes_per_s,
        "profile": {
            "slots": len(profile.slots),
            "saved_bytes": profile.saved_bytes,
            "peak_bytes": profile.peak_saved_bytes,
            "fixed_bytes": profile.fixed_bytes,
        },
        "policies": [_facts(one, largest.get(one.policy), request.tbw_bytes) for one in outcomes],
    }


def _facts(one: PolicyOutcome, largest: LargestFit | None, tbw_bytes: int | None) -> dict[str, Any]:
    found = asdict(one.replayed)
    del found["trace"], found["feasible"]
    for tier in ("host", "flash"):
        found[tier]["average_bytes"] = one.average_bytes(tier)
    written = one.replayed.flash.written_bytes
    return {
        "policy": one.policy,
        "fits": one.fits,
        "least_device_bytes": one.least_bytes,
        "largest_batch": None if largest is None else asdict(largest),
        **found,
        "stall_ns": one.replayed.stall_ns,
        "slowdown": one.replayed.slowdown,
        "first_fit": {**asdict(one.first_fit), "fragmentation": one.first_fit.fragmentation},
        "two_ended": {**asdict(one.two_ended), "fragmentation": one.two_ended.fragmentation},
        "moved_bytes": one.moved_bytes,
        "tbw_share": None if tbw_bytes is None else written / tbw_bytes,
        "steps_to_wear_out": None if not (tbw_bytes and written) else tbw_bytes // written,
        "plan": encode_fields(one.plan),
    }


def _title(request: PlanRequest, best: PolicyOutcome) -> str:
    batch = f", batch {request.batch_size}" if request.batch_size else ""
    return f"{request.subject.name}{batch}, policy {best.policy}, on {request.machine.name}"
