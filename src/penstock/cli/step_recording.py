"""Recording of a step of a user's script, up to the moment when its optimizer would update weights.

A session that keeps everything is open while the script runs. Before the optimizer's step begins,
:class:`StepReached` is raised there, so that no weight is changed.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, cast

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from penstock.cli.recorded_step import MOST_PASSES, RecordedStep
from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.memory import ProcessMemory, physical_bytes
from penstock.core.process import fork_guard
from penstock.hooks.boundaries import task_id
from penstock.hooks.module_weights import named_modules, recorded_weights
from penstock.hooks.modules import remove_hooks
from penstock.plan.machine import Machine
from penstock.runtime.orders import PassRecord
from penstock.runtime.recording import RecordedPasses, RecordingPlanner
from penstock.session import Session

_PATIENCE: Final = 3
"""Further steps after which a script counts as one that cannot be stopped."""
_IN_CHILD: Final = (
    "penstock plan: an optimizer was to step in a process that the script has forked; only a script that"
    " trains in its own process can be planned for"
)


class StepReached(BaseException):
    """The step that was to be recorded is over; raised in the script in place of the update.

    It is no ``Exception``, so that a script which handles those is stopped all the same.
    """


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of one call of a module."""

    at_ns: int
    """Time of computing at which the call had ended."""
    tokens: int
    samples: int


class StepRecording:
    """A session that records, and the hook that stops the script.

    Attributes:
        recorded: The step, once it is over; or the error because of which it is not known.
    """

    def __init__(
        self,
        directories: tuple[str, ...],
        number: int,
        *,
        codec: str = "none",
        on_swallowed: Callable[[], object],
    ) -> None:
        """Open the session in this thread.

        Args:
            directories: Directories whose bandwidth is measured, and with a GPU that of its link;
                none: the machine is known.
            number: Number of the step to record; those before it are trained.
            codec: ``"auto"``: lossless codecs are tried on what is saved; ``"none"``: none is.
            on_swallowed: Called when the script has caught ``StepReached`` and goes on to train, again
                and again. It ends the process.

        Raises:
            ConfigError: A directory is not usable.
        """
        self.recorded: RecordedStep | PenstockError | None = None
        self._number = number
        self._on_swallowed = on_swallowed
        self._swallowed = 0
        self._trained = 0
        self._inputs: weakref.WeakKeyDictionary[torch.nn.Module, list[_Inputs]] = (
            weakref.WeakKeyDictionary()
        )
        self._guard = fork_guard()
        config = OffloadConfig(
            policy="keep",
            codec=codec,
            flash=directories,
            host_memory=_staging_bytes() if directories else None,
        )
        self._session = Session(config, event_bytes=0, make_planner=RecordingPlanner)
        self._session.open()
        if self._session.device.type == "cuda":  # what was measured with is not the script's
            torch.cuda.reset_peak_memory_stats(self._session.device)
        self._session.on_step = self._after_step
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_module_forward_hook(self._note_inputs, with_kwargs=True),
        ]
        self._launchers = [(one, one.start_processes) for one in _launchers()]
        for module, _ in self._launchers:
            module.start_processes = self._refuse_processes
        self._clips = False
        self._clippers = [(one, one.clip_grad_norm_) for one in _clippers()]
        for module, clip in self._clippers:
            module.clip_grad_norm_ = self._noting_clips(clip)

    def close(self) -> None:
        """Remove the hooks, and close the session. Idempotent."""
        remove_hooks(self._handles)
        for module, start in self._launchers:
            module.start_processes = start
        self._launchers = []
        for module, clip in self._clippers:
            module.clip_grad_norm_ = clip
        self._clippers = []
        self._session.close()

    @property
    def passes(self) -> int:
        """Number of passes that are recorded so far."""
        return len(self._planner.records)

    @property
    def _planner(self) -> RecordingPlanner:
        return cast("RecordingPlanner", self._session.planner)

    # -- hooks --------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> Any:
        """Stop the script, unless the step to be recorded is a later one or has not run yet."""
        if self._guard.in_child:
            raise StepReached(_IN_CHILD)
        if self.recorded is not None:  # the script goes on after StepReached
            self._swallowed += 1
            if self._swallowed == _PATIENCE:
                self._on_swallowed()
            raise StepReached
        if self._trained < self._number - 1:
            return None
        if not self.passes and task_id() != -1:
            # a step inside backward, whose pass is not over: without gradients it changes nothing
            for parameter in _parameters(optimizer):
                parameter.grad = None
            return None
        closure = next((one for one in (*args, *options.values()) if callable(one)), None)
        if closure is not None:
            return self._stopping(optimizer, closure, args, options)
        if not self.passes and all(one.grad is None for one in _parameters(optimizer)):
            return None  # it changes nothing
        self._stop(optimizer)

    def _stopping(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], args: Any, options: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a step with a closure after which the script is stopped."""

        def evaluated() -> NoReturn:
            closure()
            self._stop(optimizer)

        def exchanged(one: Any) -> Any:
            return evaluated if one is closure else one

        return tuple(map(exchanged, args)), {k: exchanged(v) for k, v in options.items()}

    def _stop(self, optimizer: torch.optim.Optimizer) -> NoReturn:
        try:
            self.recorded = self._record(optimizer)
        except PenstockError as error:  # the script might handle it
            self.recorded = error
        raise StepReached

    def _refuse_processes(self, *_args: Any, **_options: Any) -> NoReturn:
        """Stop a script that would train in processes of its own, where nothing would stop it."""
        self.recorded = PenstockError(
            "the script starts processes of its own with torch.multiprocessing, and would train in them;"
            " it was stopped there. Plan for a script that trains in its own process, with the batch of"
            " one rank; --ranks N plans for N of them"
        )
        raise StepReached

    def _noting_clips(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that clips gradients by their norm, and notes that."""

        @functools.wraps(clip)
        def noted(*args: Any, **options: Any) -> Any:
            self._clips = True
            return clip(*args, **options)

        return noted

    def _after_step(self) -> None:
        """Forget a step that was trained, before the one to be recorded."""
        if self._trained < self._number - 1:
            self._trained += 1
            self._planner.records.clear()
            self._inputs.clear()
            self._clips = False

    def _note_inputs(self, module: torch.nn.Module, args: Any, options: Any, output: Any) -> None:
        """Note the inputs of a call; those of the outermost module count."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for one in tree_leaves((args, options)):
            if isinstance(one, torch.Tensor) and one.dim():
                numbers = one.is_floating_point() or one.is_complex() or one.dim() == 1
                tokens = 0 if numbers else one.numel()
                noted = _Inputs(self._session.executor.compute_ns(), tokens, one.shape[0])
                self._inputs.setdefault(module, []).append(noted)
                return

    # -- what was recorded --------------------------------------------------------------------------

    def _record(self, optimizer: torch.optim.Optimizer) -> RecordedStep:
        records, device = tuple(self._planner.records), str(self._session.device)
        if not records:
            raise ConfigError(
                f"the script has saved no tensors on {device} for backward in its main thread, and made"
                " gradients otherwise: there is nothing to plan"
            )
        passes = RecordedPasses(records, device=device)
        profile = passes.step(MOST_PASSES).without_codecs()
        modules = list(named_modules(self._session.modules))
        inputs = list(self._inputs_of(self._session.modules, records))
        gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
        states, unknown = _states(optimizer)
        return RecordedStep(
            number=self._number,
            kinds=passes.kinds,
            counts=passes.counts,
            saved_bytes=sum(slot.key.nbytes for one in records for slot in one.slots),
            slots=sum(len(one.slots) for one in records),
            profile=profile,
            weights=recorded_weights(modules, profile.operators),
            tokens=sum(one.tokens for one in inputs),
            samples=sum(one.samples for one in inputs),
            optimizer=type(optimizer).__name__,
            gradient_bytes=sum(one.nbytes for one in gradients),
            state_bytes=sum(
                parameter.numel() * state.dtype.itemsize
                for parameter, kept in states.items()
                for state in kept
            ),
            states=tuple(state.name for state in next(iter(states.values()), ())),
            states_unknown=unknown,
            clips=self._clips,
            process_peak_bytes=_peak_bytes(self._session.device),
            machine=self._machine(),
        )

    def _inputs_of(
        self, roots: Sequence[tuple[str, torch.nn.Module]], records: Sequence[PassRecord]
    ) -> Iterator[_Inputs]:
        """Yield the inputs of the first outermost module that has parameters, in the recorded passes.

        Forwards without a backward, as lazy modules need one, are in none of them.
        """
        begins = [one.slots[0].saved_at_ns if one.slots else one.start_ns for one in records]
        spans = list(zip(begins, (one.end_ns for one in records), strict=True))
        for _, root in roots:
            if root in self._inputs and any(True for _ in root.parameters()):
                for one in self._inputs[root]:
                    if any(begin <= one.at_ns <= end for begin, end in spans):
                        yield one
                return

    def _machine(self) -> Machine:
        """Return the measured machine, with the size of its memories."""
        device, nbytes = self._session.device, physical_bytes()
        here = replace(self._session.machine, device_bytes=nbytes, host_bytes=nbytes)
        if device.type == "cpu":
            return here
        device_bytes = torch.cuda.get_device_properties(device).total_memory
        return replace(here, device_bytes=device_bytes, flash_over_link=True)


def _staging_bytes() -> int | None:
    """Return the host memory through which flash and the link of a GPU are measured; None: no GPU."""
    if not torch.cuda.is_available():
        return None
    accelerator: Any = importlib.import_module("penstock.runtime.cuda.accelerator")
    return int(accelerator.LEAST_STAGING_BYTES)


def _launchers() -> list[Any]:
    """Return the modules of torch that have the function by which ranks are started."""
    return [torch.multiprocessing, importlib.import_module("torch.multiprocessing.spawn")]


def _clippers() -> list[Any]:
    """Return the modules of torch that have the function which clips gradients by their norm."""
    return [torch.nn.utils, importlib.import_module("torch.nn.utils.clip_grad")]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _states(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[torch.Tensor, tuple[Any, ...]], str]:
    """Return the states of each parameter, and why they are not known if they are not."""
    from penstock.optim.optimizer import states_of  # noqa: PLC0415  (only at the end)

    try:
        return dict(states_of(optimizer)), ""
    except ConfigError as error:
        return {}, str(error)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    memory = ProcessMemory()
    try:
        return memory.peak_bytes()
    finally:
        memory.close()
