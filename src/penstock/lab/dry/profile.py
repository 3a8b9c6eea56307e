"""Dry profile: one forward and backward on shapes alone, as a session would have measured it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from penstock.core import knobs
from penstock.core.errors import ConfigError, HookError
from penstock.lab.dry.capture import DryCapture
from penstock.lab.dry.fake_tensors import FakeTensors
from penstock.lab.dry.kernels import CudaKernels
from penstock.lab.dry.ledger import StorageLedger
from penstock.lab.dry.operator_recorder import OperatorRecorder
from penstock.lab.dry.roofline import compute_of
from penstock.lab.dry.weight_recorder import WeightRecorder
from penstock.observe.clock import ManualClock
from penstock.plan.machine import Machine
from penstock.plan.profile import Profile, Transient
from penstock.plan.weights import ModuleWeights

Step = Callable[..., torch.Tensor | None]
"""Type of ``step(module, *inputs)``, which returns the loss, or runs backward itself."""
AUTOCASTS: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES: Final = {"cpu": nullcontext, "cuda": CudaKernels}
_NEEDS_DATA: Final = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True)
class DryStep:
    """A step on shapes alone."""

    profile: Profile
    weights: tuple[ModuleWeights, ...]
    """Weights of each module that has any, in the order of the module tree, and the operators of
    ``profile`` that use them."""
    tokens: int = 0
    """Elements of the first input if these are integers, in sequences; 0 if not."""


def dry_step(
    module: torch.nn.Module,
    step: Step,
    *,
    machine: Machine,
    inputs: Sequence[torch.Tensor] = (),
    device: str = "cpu",
    optimizer_state_copies: int = 0,
    autocast: str | None = None,
    whole_device: bool = True,
    floor_bytes: int | None = None,
    nonzero_count: int | None = None,
) -> DryStep:
    """Profile one step of ``module``, and its weights.

    The step's forward and backward run on fake tensors, which have shapes and no elements. Autograd saves
    what it saves on a CPU, to the byte; with ``device="cuda"`` what CUDA's kernels save, where a
    difference is known (:mod:`.kernels`). The tensors say that they are on the CPU in either case. ::

        with torch.device("meta"):  # or a real module
            model = Net()
        profile = dry_step(
            model,
            lambda model, x, y: F.cross_entropy(model(x), y),
            inputs=(torch.empty(512, 3, 224, 224, device="meta"), torch.empty(512, device="meta").long()),
            machine=machine,
        ).profile

    Args:
        module: The module to train: real, or on the device "meta". It is copied and not changed.
        step: Called once with the copy and the fake inputs. It returns the loss, or ``None`` if it has
            run one backward itself. Tensors that it creates are fake.
        machine: The machine for which operators are timed; it must describe its compute.
        inputs: Tensors, real or on "meta"; only their shapes matter.
        device: ``"cpu"`` or ``"cuda"``, whose kernels compute.
        optimizer_state_copies: Number of tensors of a parameter's size that the optimizer keeps: 2 for
            Adam, 1 for SGD with momentum.
        autocast: ``"bfloat16"`` or ``"float16"``: the autocast under which the step runs.
        whole_device: True to profile all device memory: parameters, gradients, buffers and optimizer
            state are ``fixed_bytes``, everything else that is not a slot is in ``transients``, and each
            slot's ``small_bytes`` are the most of both beside it, when it is saved and when it is needed.
            False to profile saved tensors only, as a session on a CPU does.
        floor_bytes: Smallest storage that is a slot; the knob ``PENSTOCK_FLOOR`` by default.
        nonzero_count: Number of elements that ``nonzero`` finds, which depends on data. Without it, a
            step that calls ``nonzero`` is refused.

    Raises:
        ConfigError: The module has no parameters or cannot be copied, the step runs no backward or
            several, a setting is unknown, or ``machine`` does not describe its compute.
        HookError: The step calls an operator whose result, or its shape, depends on data.
    """
    compute = compute_of(machine)
    _check(module, device, optimizer_state_copies, autocast)
    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        fakes = FakeTensors()
        model = fakes.module(module)
        batch = tuple(fakes.tensor(one) for one in inputs)
        clock = ManualClock()
        ledger = StorageLedger(clock, fixed=(*model.parameters(), *model.buffers()))
        for one in batch:
            ledger.add(one, at_ns=0)
        capture = DryCapture(
            clock=clock,
            ledger=ledger,
            floor_bytes=knobs.floor_bytes() if floor_bytes is None else floor_bytes,
        )
        weights = WeightRecorder(model)
        recorder = OperatorRecorder(
            clock=clock,
            compute=compute,
            ledger=ledger,
            modules=capture.modules,
            nonzero_count=nonzero_count,
            weights=weights,
        )
        weights.watch(recorder.operators)
        with _explain_errors(recorder), recorder, capture.attached(model), DEVICES[device]():
            _run(step, model, batch, autocast, capture)
        profile = replace(_complete(capture, recorder, clock), device=device)
        found = weights.found(profile.operators)
        tokens = _tokens(batch)
        if not whole_device:
            return DryStep(profile, found, tokens)
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        fixed_bytes = _bytes_of(
            (*model.parameters(), *model.buffers(), *gradients)
        ) + optimizer_state_copies * _bytes_of(p for p in model.parameters() if p.requires_grad)
        whole = add_device_memory(profile, fixed_bytes, ledger.timeline(without=gradients))
        return DryStep(whole, found, tokens)


def _check(
    module: torch.nn.Module, device: str, optimizer_state_copies: int, autocast: str | None
) -> None:
    name = type(module).__name__
    if not any(one.requires_grad for one in module.parameters()):
        raise ConfigError(
            f"dry profile: this {name} has no parameters that require gradients, so there is no backward"
        )
    if optimizer_state_copies < 0:
        raise ConfigError(
            f"dry profile: optimizer_state_copies is {optimizer_state_copies}; it must be 0 or more"
        )
    if device not in DEVICES:
        raise ConfigError(
            f"dry profile: device is {device!r}; it must be {' or '.join(map(repr, DEVICES))}"
        )
    if autocast is not None and autocast not in AUTOCASTS:
        raise ConfigError(
            f"dry profile: autocast is {autocast!r}; use None, {', '.join(map(repr, AUTOCASTS))}"
        )


def _run(
    step: Step,
    model: torch.nn.Module,
    batch: tuple[torch.Tensor, ...],
    autocast: str | None,
    capture: DryCapture,
) -> None:
    with torch.autocast("cpu", AUTOCASTS.get(autocast or ""), enabled=autocast is not None):
        loss = step(model, *batch)
    if not capture.backwards:
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(
                f"dry profile: the step ran no backward, and returned {type(loss).__name__}, not a loss"
            )
        if not loss.requires_grad:
            raise ConfigError(
                "dry profile: the loss that the step returned does not require gradients, so there is"
                " no backward; was it computed under no_grad, detached, or without the step's model?"
            )
        loss.backward()  # type: ignore[no-untyped-call]
    if capture.backwards > 1:
        raise ConfigError(
            f"dry profile: the step ran {capture.backwards} backwards, but a dry profile covers one"
            " forward and one backward: profile one micro-batch, or measure a real step"
        )


@contextmanager
def _explain_errors(recorder: OperatorRecorder) -> Iterator[None]:
    """Turn errors of fake tensors into errors that say where they came from and what to do."""
    try:
        yield
    except _NEEDS_DATA as error:
        func: Any = getattr(error, "func", None) or (error.args[0] if error.args else error)
        raise HookError(
            f"dry profile: operator {func} of module {recorder.place or '<root>'!r} cannot run on shapes"
            " alone because its result, or its shape, depends on data; measure a real step instead (a"
            " session's profile), or, if the operator is nonzero, set nonzero_count"
        ) from error
    except AssertionError as error:
        if "convert all Tensors to FakeTensors" not in str(error):
            raise
        raise ConfigError(
            "dry profile: the step uses a real tensor; it must use the module that it is called with, and"
            f" tensors that are among `inputs` or made in it ({error})"
        ) from error


def _complete(capture: DryCapture, recorder: OperatorRecorder, clock: ManualClock) -> Profile:
    """Add to the profile of a session what only a dry run knows."""
    profile = capture.profile(clock.now_ns())
    (only,) = profile.passes
    operators = tuple(replace(one, pass_index=only.index) for one in recorder.operators)
    backward = (one.start_ns for one in operators if one.backward)
    backward_ns = min(only.backward_start_ns, next(backward, only.end_ns))
    return replace(
        profile,
        passes=(replace(only, backward_start_ns=backward_ns),),
        operators=operators,
    )


def _tokens(batch: Sequence[torch.Tensor]) -> int:
    """Return the number of tokens in the first input; 0 if it has none."""
    if not batch or batch[0].is_floating_point() or batch[0].dim() < 2:
        return 0
    return batch[0].numel()


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all storages, each counted once."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}
    return sum(one.nbytes() for one in storages.values())


def add_device_memory(
    profile: Profile, fixed_bytes: int, transients: tuple[Transient, ...]
) -> Profile:
    """Add the rest of device memory to a profile: the total, and the most beside each slot.

    Bytes count for a slot from its save, and from its need, until any slot is saved or needed next. So
    every moment counts for some slot, except those before the first, which are in
    ``Profile.small_bytes``.
    """
    moments = sorted(
        {slot.saved_at_ns for slot in profile.slots}
        | {slot.needed_at_ns for slot in profile.slots if slot.needed_at_ns is not None}
    )
    worst = dict(zip(moments, _worst_after(moments, transients), strict=True))
    slots = tuple(
        replace(
            slot,
            small_bytes=fixed_bytes + worst[slot.saved_at_ns],
            small_bytes_at_need=fixed_bytes
            + worst[slot.saved_at_ns if slot.needed_at_ns is None else slot.needed_at_ns],
        )
        for slot in profile.slots
    )
    return replace(
        profile,
        slots=slots,
        small_bytes=fixed_bytes + max((one.nbytes for one in transients), default=0),
        fixed_bytes=fixed_bytes,
        transients=transients,
    )


def _worst_after(moments: Sequence[int], transients: Sequence[Transient]) -> Iterator[int]:
    """Yield, for each moment, the most transient bytes until the next one or, for the last, the end."""
    starts = [one.at_ns for one in transients]
    for index, moment in enumerate(moments):
        first = max(bisect_right(starts, moment) - 1, 0)
        last = len(starts)
        if index + 1 < len(moments):
            last = bisect_right(starts, moments[index + 1] - 1)
        yield max((one.nbytes for one in transients[first:last]), default=0)
