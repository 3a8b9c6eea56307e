"""``penstock plan --weights flash``, ``host``, and ``--ranks``: one whole training step, of one rank.

Weights and optimizer records rest on flash, or with several ranks only the records, as far as memory
does not hold them.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import IO, Any, Final

from penstock.cli.output import print_result
from penstock.cli.plan_network import (
    FORMATS,
    OF_GRADIENTS,
    OF_RANKS,
    PlannedNetwork,
    StepShapes,
    TrainingSetup,
    parse_settings,
    several_batches,
    subject,
    whole_step_option,
)
from penstock.cli.plan_request import bytes_of, data_rate, device_of, machine_of
from penstock.cli.recorded_step import RecordedStep
from penstock.cli.step_answer import document, text
from penstock.cli.step_request import StepRequest, of_one_rank
from penstock.core.config import UNLIMITED
from penstock.core.errors import BudgetError, ConfigError, NoSpaceError, PenstockError
from penstock.core.units import format_bytes, parse_bandwidth
from penstock.plan import Machine, policies
from penstock.plan.ranks import PARALLEL, Ranks
from penstock.plan.step_plan import StepPlan
from penstock.plan.weights import (
    IN_BACKWARD,
    IN_STEP,
)
from penstock.report.step_table import ChangedStep

_UNUSED: Final = {
    "device_memory": "use --memory, which is for weights, gradients, buffers and saved tensors together",
    "plot": "there is no plot of a whole step",
    "save_plan": "a plan file has no weights yet",
}


def check_step_options(options: argparse.Namespace) -> None:
    """Check what needs neither the machine nor the network. Raises ConfigError."""
    for name, why in _UNUSED.items():
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} does not go with {whole_step_option(options)}: {why}"
            )
    if options.policy == "all":
        raise ConfigError(
            f"--policy all does not go with {whole_step_option(options)}; name one policy"
        )
    policies.get(options.policy)
    _check_gradients(options)


def _check_gradients(options: argparse.Namespace) -> None:
    """Check the options that say when gradients are made and used. Raises ConfigError."""
    given = [name for name in OF_GRADIENTS if getattr(options, name) is not None]
    for name in (*given, *(["clip"] if options.clip else [])):
        option = f"--{name.replace('_', '-')}"
        if options.forward_only and name != "parts":
            raise ConfigError(f"{option} does not go with --forward-only, which has no update")
        if options.ranks not in {None, 1} and (name, options.update) != ("update", IN_BACKWARD):
            raise ConfigError(
                f"{option} is for one process; with --ranks there is one backward, which updates"
            )
    for name in ("accumulate", "parts"):
        count = getattr(options, name)
        if count is not None and count < 1:
            raise ConfigError(f"--{name} is {count}; it must be 1 or more")
    if options.clip and options.update == IN_BACKWARD:
        raise ConfigError(
            "--clip does not go with --update backward: the norm is known after backward (overlap=True"
            " clips by the norm of the step before, which moves nothing)"
        )


def check_step(
    options: argparse.Namespace, recorded: RecordedStep | None = None, *, name: str = ""
) -> StepRequest:
    """Check every option before any work is done; then make the profile.

    Args:
        options: The parsed command line.
        recorded: A step of the user's script, in place of a network.
        name: The script.

    Raises:
        ConfigError: An option, the network or the machine is invalid.
    """
    check_step_options(options)
    node = machine_of(options, recorded)
    device = options.device or (device_of(node) if recorded is None else recorded.device)
    ranks, node = _ranks(options, node)
    machine = ranks.share_of(node, device=device)
    memory_bytes = bytes_of(options, "memory", machine.device_bytes, least=1)
    host_bytes = bytes_of(options, "host_memory", machine.host_bytes if device == "cuda" else 0)
    flash_bytes: int | None = bytes_of(options, "flash_memory", machine.flash_bytes)
    if options.flash_memory is None and not machine.flash_bytes:
        flash_bytes = None
    tbw_bytes = None if options.tbw is None else bytes_of(options, "tbw", 0, least=1)
    rate = data_rate(options.data_rate, machine)
    shapes: StepShapes
    if recorded is not None:
        if ranks.count > 1 and recorded.passes > 1:
            raise ConfigError(
                f"--ranks is for steps of one backward, and a step of {name} has {recorded.passes}: plan"
                " it without --ranks"
            )
        found = PlannedNetwork(name, None)
        batch_size, shapes = recorded.samples or recorded.passes, recorded
        states: tuple[str, ...] | None = states_on_flash(recorded)
    else:
        machine = of_one_rank(node, ranks, device, rate)
        # states are on flash, so that none are in device memory
        training = TrainingSetup(machine, device, "sgd", options.autocast)
        found = subject(options.network, training, parse_settings(options.set))
        if found.step_of is None:
            raise ConfigError(
                f"{found.name!r}: a profile does not say what the weights are; name the network, of the"
                " zoo or file.py:function"
            )
        one_of = functools.cache(found.step_of)
        batch_size, states = _batch_size(options, one_of), None
        accumulate, parts = options.accumulate or 1, options.parts or 1
        step_of = several_batches(one_of, accumulate=accumulate, parts=parts)
        found = replace(found, step_of=step_of)
        shapes = step_of(batch_size)
    return StepRequest(
        subject=found,
        batch_size=batch_size,
        shapes=shapes,
        node=node,
        ranks=ranks,
        data_bytes_per_s=rate,
        device=device,
        optimizer=options.optimizer or ("sgd" if recorded is None else recorded.optimizer),
        format=options.format or "exact",
        policy=options.policy,
        memory_bytes=memory_bytes,
        host_bytes=host_bytes,
        flash_bytes=flash_bytes,
        tbw_bytes=tbw_bytes,
        forward_only=options.forward_only,
        weights_stay=options.weights == "keep",
        weights_bytes=_part(options, "weights_memory"),
        saved_bytes=_part(options, "saved_memory"),
        states=states,
        update=options.update or _update_of(options, recorded),
        own_optimizer=recorded is not None,
        clips=recorded is not None and recorded.clips,
        gradient_memory=_gradient_memory(options, recorded),
        gradients_last=recorded is not None,
        weights_on_host=_weights_on_host(options, device),
    )


def _update_of(options: argparse.Namespace, recorded: RecordedStep | None) -> str:
    """Return when weights are updated, where no option says it."""
    is_script = recorded is not None and options.ranks in {None, 1}
    return IN_STEP if options.clip or is_script else IN_BACKWARD


def _gradient_memory(options: argparse.Namespace, recorded: RecordedStep | None) -> int | None:
    """Return the memory of gradients that wait, of a script as ``penstock run`` sets it."""
    if options.gradient_memory is not None:
        return bytes_of(options, "gradient_memory", 0)
    if recorded is None or options.update == IN_BACKWARD:
        return None
    if options.weights == "keep":
        return UNLIMITED
    # a session on the CPU whose one limit is that of all memory limits gradients as well
    is_limited = recorded.is_cpu and options.weights_memory is None and options.ranks in {None, 1}
    return None if is_limited else 0


def _weights_on_host(options: argparse.Namespace, device: str) -> bool | None:
    """Return a value of ``StepRequest.weights_on_host``. Raises ConfigError if they are there already."""
    if options.weights != "host":
        is_given = options.weights in {"flash", "auto"} and options.host_memory is not None
        return None if is_given and device != "cpu" else False
    if device == "cpu":
        raise ConfigError(
            "--weights host is for a GPU: on a CPU weights are in host memory already"
        )
    return True


def _part(options: argparse.Namespace, name: str) -> int | None:
    return None if getattr(options, name) is None else bytes_of(options, name, 0, least=1)


def states_on_flash(recorded: RecordedStep) -> tuple[str, ...]:
    """Return the states of a recorded optimizer. Raises ConfigError if they cannot be on flash."""
    if recorded.states_unknown:
        raise ConfigError(
            f"the states of {recorded.optimizer} cannot be planned for on flash:"
            f" {recorded.states_unknown}"
        )
    return recorded.states


def _ranks(options: argparse.Namespace, node: Machine) -> tuple[Ranks, Machine]:
    """Return the ranks, and the machine with the bandwidths of its network that are given."""
    given = {
        name: getattr(options, name) for name in OF_RANKS if getattr(options, name) is not None
    }
    if options.ranks is None:
        if given:
            raise ConfigError(f"--{next(iter(given)).replace('_', '-')} needs --ranks")
        return Ranks(), node
    for name in ("network", "peer"):
        if f"{name}_rate" in given:
            rate = parse_bandwidth(given.pop(f"{name}_rate"), what=f"--{name}-rate")
            changed: dict[str, Any] = {f"{name}_bytes_per_s": float(rate)}
            node = replace(node, **changed)
    ranks = Ranks(options.ranks, **given)
    if node.flash_service is not None and ranks.ssds != ranks.per_node:
        raise ConfigError(
            f"--ssds is {ranks.ssds} for {ranks.per_node} ranks on a node, and the times of a simulated"
            f" drive ({node.name!r}) are those of one rank: give as many SSDs as ranks"
        )
    return ranks, node


def _batch_size(options: argparse.Namespace, step_of: Callable[[int], StepShapes]) -> int:
    """Return the batch, given as such or by its tokens."""
    batch, tokens = options.batch, options.tokens
    if (batch is None) == (tokens is None):
        both = "both are given" if batch is not None else "neither is given"
        raise ConfigError(f"a step has --batch N or --tokens N; {both}")
    if tokens is None:
        if batch < 1:
            raise ConfigError(f"--batch is {batch}; it must be 1 or more images or sequences")
        return int(batch)
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; it must be 1 or more")
    each = step_of(1).tokens
    if not each:
        raise ConfigError(
            "--tokens is for networks whose first input is sequences of integers; give --batch"
        )
    if tokens % each:
        raise ConfigError(
            f"--tokens is {tokens}, and a sequence has {each}; give a multiple, or shorter sequences"
            " (--set sequence_length=...)"
        )
    return int(tokens // each)


def execute_step(options: argparse.Namespace) -> int:
    """Plan a step with weights on flash, and print it.

    Raises:
        ConfigError: An option, the network or the machine is invalid.
        BudgetError: The memory is below the least.
        NoSpaceError: Flash has no room.
    """
    print_step(check_step(options), options)
    return 0


def print_step(
    request: StepRequest, options: argparse.Namespace, file: IO[str] | None = None
) -> None:
    """Plan a step, and print the plan, on standard output if no file is given.

    Raises:
        BudgetError: The memory is below the least.
        NoSpaceError: Flash has no room.
    """
    plan = request.plan()
    changes = list(_changes(request, plan))
    print_result(
        options.json,
        lambda: document(request, plan, changes),
        lambda: text(request, plan, changes, verbose=options.verbose),
        file,
    )


def _changes(request: StepRequest, plan: StepPlan) -> Iterator[ChangedStep]:
    """Plan the step again, with one thing changed at a time."""
    ranks = request.ranks
    if request.node.flash_service is None:
        two = replace(ranks, ssds=2 * ranks.ssds)
        room = None if request.flash_bytes is None else 2 * request.flash_bytes
        name = "a second SSD" if ranks.ssds == 1 else f"twice the SSDs, {two.ssds} on a node"
        yield _changed(name, replace(request, ranks=two, flash_bytes=room))
    if ranks.count > 1:
        more_nodes = replace(ranks, count=2 * ranks.count, nodes=2 * ranks.nodes)
        yield _changed(f"twice the nodes, {more_nodes.nodes}", replace(request, ranks=more_nodes))
        other = next(one for one in PARALLEL if one != ranks.parallel)
        yield _changed(other, replace(request, ranks=replace(ranks, parallel=other)))
    if plan.in_step:
        yield _changed("updates in backward", replace(request, update=IN_BACKWARD))
    more = replace(request, memory_bytes=2 * request.memory_bytes)
    is_given = request.weights_bytes is not None and request.saved_bytes is not None
    if (plan.read_bytes or plan.written_bytes) and not is_given:
        yield _changed(f"twice the memory, {format_bytes(more.memory_bytes)}", more)
    step_of, batch = request.subject.step_of, 2 * request.batch_size
    if step_of is not None:
        twice = replace(request, batch_size=batch, shapes=step_of(batch))
        yield _changed(f"twice the {request.unit}, {twice.units}", twice)
    if plan.parameters:
        for name in FORMATS:
            if name != request.format:
                yield _changed(f"format {name}", replace(request, format=name))


def _changed(name: str, request: StepRequest) -> ChangedStep:
    try:
        return ChangedStep(name, request.units, request.plan(), ranks=request.ranks)
    except BudgetError as error:
        return ChangedStep(name, request.units, None, f"needs {format_bytes(error.least_bytes)}")
    except NoSpaceError:
        return ChangedStep(name, request.units, None, "no room on flash")
    except ConfigError:
        return ChangedStep(name, request.units, None, "not for these parameters")
    except PenstockError as error:
        return ChangedStep(name, request.units, None, str(error).partition(";")[0])
