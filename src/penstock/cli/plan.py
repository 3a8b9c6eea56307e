"""The command ``penstock plan``: time and memory of training, predicted before a step is run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any, Final

from penstock.cli.command import new_parser, size
from penstock.cli.plan_network import ALL, FORMATS, OF_GRADIENTS, OF_RANKS, OPTIMIZER_COPIES
from penstock.core.errors import ConfigError
from penstock.plan import policies
from penstock.plan.machine import Machine
from penstock.plan.ranks import PARALLEL
from penstock.plan.weights import IN_BACKWARD, IN_STEP

_EXAMPLES: Final = """\
examples:
  penstock plan vgg16 --batch 256 --machine titan-x
  penstock plan bert-large --batch 64 --machine v100-nvme --policy all
  penstock plan gpt2 --batch 8 --machine cpu --device-memory 2GiB --plot step.svg
  penstock plan gpt2 --tokens 4096 --machine cpu --weights flash --memory 2GiB --optimizer adam
  penstock plan gpt2 --tokens 4096 --machine h200 --weights flash --ranks 64 --nodes 8 --ssds 4
  penstock plan train.py:build --batch 64 --machine here.toml --device-memory 20GiB --json
  penstock plan --flash /nvme/spill --script train.py --its --own args
  penstock plan --from-deepspeed ds.json

Nothing is trained, and the machine need not be there. With --script the script runs until its
optimizer would change weights for the first time, and is stopped there: files that it writes before
are written. The exit code is 0 if a plan fits, 1 if none does. Sizes have a unit: GB is 10^9 bytes,
GiB is 2^30."""

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
        usage="penstock plan NETWORK --batch N --machine MACHINE [options]\n"
        "       penstock plan [options] --script SCRIPT [args ...]",
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
        help=f"{', '.join(Machine.presets())}; or a file written by `penstock bench machine` (with"
        " --script the default is this machine, measured)",
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
        "--optimizer", choices=tuple(OPTIMIZER_COPIES),
        help="optimizer whose states are in device memory (default: sgd, which has none)",
    )  # fmt: skip
    made.add_argument(
        "--weights", choices=("keep", "flash", "host", "auto"), default="keep", help="flash: weights and"
        " the optimizer's records rest on flash, and the plan covers the whole step with the update;"
        " those weights rest in host memory that fit in a --host-memory that is given; host: on a GPU all"
        " of them do; auto: as flash (default: keep)",
    )  # fmt: skip
    made.add_argument(
        "--memory", metavar="SIZE", type=size, help="with --weights flash or --ranks: memory for weights,"
        " gradients, buffers and saved tensors together (default: all the machine's); with --script"
        " alone: budgets to compare, as 8GiB,4GiB (default: shares of what autograd saves)",
    )  # fmt: skip
    for name, what in (
        ("--weights-memory", "weights on flash"),
        ("--saved-memory", "saved tensors"),
    ):
        made.add_argument(
            name, metavar="SIZE", type=size, help=f"with --weights flash: what {what} have of --memory,"
            " as in a session with that limit (default: what makes the step shortest)",
        )  # fmt: skip
    made.add_argument(
        "--update", choices=(IN_BACKWARD, IN_STEP), help="with --weights flash: update weights"
        " in backward, as a flash optimizer with overlap does, or in step(), until which gradients wait"
        " (default: backward; with --script step, as under penstock run)",
    )  # fmt: skip
    made.add_argument(
        "--gradient-memory", metavar="SIZE", type=size, help="with --weights flash: what"
        " gradients that wait have of --memory; the others wait on flash (default: what makes the step"
        " shortest; with --script as under penstock run: on a CPU without --weights-memory what weights"
        " do not need, else none)",
    )  # fmt: skip
    for name, text in (
        ("--accumulate", "M backwards make a step, each with its part of the batch"),
        (
            "--parts",
            "penstock.micro_batched(parts=M): each block computes M parts before the next does",
        ),
    ):
        made.add_argument(
            name, metavar="M", type=int, help=f"with --weights flash: {text} (default: 1)"
        )
    made.add_argument(
        "--clip", action="store_true", help="with --weights flash: the optimizer clips gradients by their"
        " norm (clip_norm), so updates come in step()",
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
    made.add_argument(
        "--flash", metavar="DIR", action="append",
        help="with --script: directory whose bandwidth is measured (default: the current one)",
    )  # fmt: skip
    made.add_argument(
        "--step", metavar="N", type=int, help="with --script: plan for the Nth step; those before it are"
        " trained, in memory (default: 1)",
    )  # fmt: skip
    made.add_argument(
        "--codec", choices=("auto", "none"), help="with --script: auto tries lossless codecs on what"
        " the step saves, as a session does, and says what they change (default: none)",
    )  # fmt: skip
    made.add_argument(
        "--script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="an unmodified script and its"
        " arguments, or -m and a module: it runs until its optimizer would step; comes last",
    )  # fmt: skip
    return made


def execute(options: argparse.Namespace) -> int | Callable[[], int]:
    """Plan for what is named, by the module for it, which is loaded only now.

    NumPy is loaded with it, and must not be before a script has set its variables.

    Returns:
        The exit code, 1 if nothing fits; or the function that runs the script and then plans.

    Raises:
        ConfigError: An option, the network or the machine is invalid.
        PlanError: The file has no valid profile.
    """
    if options.from_deepspeed is not None:
        _refuse_others(options)
        return int(_of("deepspeed_config").execute(options))
    _refuse_limits(options)
    if options.script is not None:
        made: Callable[[], int] = _of("plan_script").planned_script(options)
        return made
    for name in ("flash", "step", "codec"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} needs --script")
    if options.network is None:
        raise ConfigError(
            "plan needs NETWORK and --machine, or --script; `penstock plan --help` has examples"
        )
    if options.machine is None:
        raise ConfigError(
            f"--machine is missing: name a preset ({', '.join(Machine.presets())}) or a file that"
            f" `penstock bench machine` has written"
        )
    if options.weights != "keep" or options.ranks is not None:
        return int(_of("plan_step").execute_step(options))
    _refuse_step_options(options)
    return int(_of("plan_policies").execute_policies(options))


def _refuse_limits(options: argparse.Namespace) -> None:
    """Refuse limits of parts of memory that nothing divides. Raises ConfigError."""
    for name in ("weights_memory", "saved_memory"):
        if getattr(options, name) is not None and options.weights == "keep":
            raise ConfigError(f"--{name.replace('_', '-')} needs --weights flash or host")


def _refuse_step_options(options: argparse.Namespace) -> None:
    """Refuse options that are for whole steps only. Raises ConfigError."""
    for name in OF_RANKS:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --ranks")
    for name in ("tokens", "memory", "format", *OF_GRADIENTS):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} needs --weights flash or --ranks")
    for name in ("forward_only", "clip"):
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')} needs --weights flash or --ranks")


def _refuse_others(options: argparse.Namespace) -> None:
    """Raise ConfigError if an option of plans stands beside ``--from-deepspeed``."""
    allowed = {"from_deepspeed", "json", "debug", "execute"}
    defaults = vars(parser().parse_args([]))
    given = {name for name, value in vars(options).items() if value != defaults.get(name)}
    if other := sorted(given - allowed):
        name = "NETWORK" if other[0] == "network" else f"--{other[0].replace('_', '-')}"
        raise ConfigError(f"--from-deepspeed makes no plan, so it takes no {name}: leave that out")


def _of(module: str) -> Any:
    return importlib.import_module(f"penstock.cli.{module}")
