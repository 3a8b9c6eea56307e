"""Torch optimizers with their states on flash.

``OnFlash`` is a mixin before a class of torch, and overrides the methods that touch states: ``step``,
``state_dict``, ``load_state_dict``, ``add_param_group``. Everything else (groups, schedulers, hooks,
``zero_grad``) is torch's. Its ``state`` stays empty.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from penstock.core.errors import ConfigError, PenstockWarning
from penstock.io.engine import Engine
from penstock.optim import state_dict as dicts
from penstock.optim.config import StatesConfig
from penstock.optim.formats import State
from penstock.optim.memory import memory_notes, plain_bytes
from penstock.optim.overlap import Overlap
from penstock.optim.params import options_of
from penstock.optim.probe import ProbedOptimizer, probe
from penstock.optim.states import FlashStates
from penstock.optim.wear import StepWear, staying_tiles, wear_of

T = TypeVar("T", bound=torch.optim.Optimizer)
_FIELDS = frozenset(field.name for field in fields(StatesConfig))
_log = logging.getLogger("penstock.optim")


class StatesElsewhere(defaultdict[Tensor, Any]):
    """The ``state`` of an optimizer that keeps its states elsewhere: empty, but true once there are some.

    ``torch.distributed.checkpoint.state_dict`` would otherwise make a step to have some.
    """

    def __init__(self, states: FlashStates) -> None:
        """Begin without items."""
        super().__init__(dict)
        self._states = states

    def __bool__(self) -> bool:
        """Return whether a step was made, or states were loaded."""
        return bool(self.keys()) or any(param.has_state for param in self._states.params)


class OnFlash(torch.optim.Optimizer):
    """Mixin placed before an optimizer class of torch. Not used alone."""

    torch_class: ClassVar[type[torch.optim.Optimizer]]
    """Class whose step is run."""
    preferred: ClassVar[Mapping[str, Any]] = {}
    """Options of that class that are set unless the user sets ``fused`` or ``foreach``."""
    _penstock: FlashStates

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Lay the parameters into tiles and reserve their place on flash.

        Args:
            params: As torch's. A group may have a key ``"format"``.
            args: As of the class of torch.
            kwargs: As of the class of torch; the others are fields of ``StatesConfig``.

        Raises:
            ConfigError: A setting makes no sense, or a parameter's states cannot be on flash.
            NoSpaceError: There is no room for them; with what would fit.
        """
        config = StatesConfig(**{name: kwargs.pop(name) for name in _FIELDS & kwargs.keys()})
        if kwargs.get("fused") is None and kwargs.get("foreach") is None:
            kwargs.update(self.preferred)
        model = self.torch_class([torch.zeros(2, requires_grad=True)], *args, **kwargs)
        before = dict(next(iter(model.state.values()), {}))
        self.__dict__.update(model.__dict__)
        initial = functools.partial(_initial, before)
        reference: weakref.ref[torch.optim.Optimizer] = weakref.ref(self)
        source = ProbedOptimizer(reference, self.torch_class, config, initial, prefers_master=True)
        states = self._penstock = FlashStates(source)
        try:
            torch.optim.Optimizer.__init__(self, params, model.defaults)
            self.state = StatesElsewhere(states)
            states.begin(Overlap)
        except BaseException:
            states.close()
            raise
        self._note_scaling()

    def _note_scaling(self) -> None:
        # a GradScaler unscales gradients itself, except for optimizers that say they do
        self._step_supports_amp_scaling = self._penstock.config.overlap

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, streaming their states.

        Args:
            closure: Evaluates the model again and returns the loss.

        Raises:
            ConfigError: A parameter is not what it was, or a gradient is sparse: nothing was touched.
            TransferError: A record could not be read; the optimizer needs a state dict now.
            ChecksumError: A record is not what was written; the same.
            ClosedError: The optimizer is closed, or such an error came before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "grad_scale", None) is not None:
            raise ConfigError(
                "a GradScaler does not go with overlap=True: gradients are used while they are scaled;"
                " leave overlap out, or train in bfloat16 without a scaler"
            )
        self._penstock.check_can_step()
        _report_costs(self._penstock)
        self._penstock.step()
        return loss

    def record_bytes(self) -> dict[Tensor, int]:
        """Return the bytes of each parameter's records that a step reads and writes.

        Those that stay in memory of the optimizer's own are not counted, as far as that is known before
        the next step.
        """
        states = self._penstock
        found = dict.fromkeys(range(len(states.params)), 0.0)
        stay = staying_tiles(states, states.pipeline.own_count) if states.has_buffers else 0
        for tile in states.tiles[: len(states.tiles) - stay]:
            for piece in tile.pieces:
                share = (piece.stop - piece.start) / max(1, tile.elements)
                found[piece.param] += share * tile.record_bytes
        return {states.params[index].tensor: round(nbytes) for index, nbytes in found.items()}

    def moved_bytes(self) -> int:
        """Return the bytes that torch's optimizer would hold: states, and gradients that do not stay."""
        states = self._penstock
        found = plain_bytes(states)
        if states.gradients is not None:
            whole = sum(one.tensor.nbytes for one in states.params if one.tensor.requires_grad)
            found += max(0, whole - states.gradients.budget_bytes)
        return found

    def update_after(self, parallel: torch.nn.Module) -> None:
        """With ``overlap``: update when a ``DistributedDataParallel`` has averaged the gradients.

        Call it before the first backward, for each such module. It registers the module's communication
        hook, which averages as the module itself does. FSDP2 and tensor parallelism do not need it.

        Args:
            parallel: The module.

        Raises:
            ConfigError: ``overlap`` is not set; the module is of another class, has a communication hook,
                or averages zeros for unused parameters.
        """
        self._penstock.update_after(parallel)

    def rest(self) -> None:
        """Write all states to flash, and hold no memory for them until the next step.

        Raises:
            ConfigError: Backward has begun a step that was not finished.
            TransferError: A record could not be written; it is still in memory.
            ClosedError: The optimizer is closed.
        """
        self._penstock.check_between_steps("rest()")
        self._penstock.rest()

    def wrap_engine(self, wrap: Callable[[Engine], Engine]) -> None:
        """Move records through an engine around the present one, which logs, slows or corrupts them.

        Args:
            wrap: Takes the engine, and returns one that uses it and closes it.

        Raises:
            ConfigError: A step is under way.
        """
        self._penstock.check_between_steps("wrap_engine()")
        self._penstock.wrap_engine(wrap)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with a place for its states. Raises as the constructor."""
        self._penstock.check_between_steps("add_param_group()")
        super().add_param_group(param_group)
        try:
            self._penstock.add_group(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise
        self._penstock.listen()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's. What is large lies in a file without a name on flash, mapped into memory."""
        states = self._penstock
        states.check_between_steps("state_dict()")
        states.check_usable()
        saved = dicts.save(states)
        self.state = defaultdict(dict, {states.params[i].tensor: s for i, s in saved.items()})
        try:
            made: dict[str, Any] = super().state_dict()
        finally:
            self.state = StatesElsewhere(states)
        made["penstock"] = {"steps": states.steps, "norm": states.last_norm}
        return made

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` made, ours or that of torch's class of the same name.

        Raises:
            ConfigError: It is that of another model or optimizer; nothing was changed.
        """
        states = self._penstock
        states.check_between_steps("load_state_dict()")
        document = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            document = hook(self, document) or document
        groups = dicts.check(states, self.param_groups, document)
        states.prepare_for_load()
        dicts.load(states, document)
        self.__setstate__({"state": StatesElsewhere(states), "param_groups": groups})
        states.loaded()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def resume(self) -> int:
        """With ``durable``: set weights and states to those of the last completed step.

        If ``torch.distributed`` is initialized, it is the newest step that all its ranks have completed:
        all call this, each for an optimizer of its own. The logger ``penstock.optim`` says after which
        step training is resumed: as a warning if a later one was torn, or completed by this rank alone.

        Returns:
            The number of that step, from 1; 0 if there is none, and nothing was changed. ``torn_step``
            has the number of a later one that was torn.

        Raises:
            ConfigError: The steps there are another model's, or of another number of ranks; the ranks
                have none in common; or steps are not durable.
        """
        states = self._penstock
        newest = states.durable_step
        step = states.resume()
        _report_resumed(states, newest, step)
        return step

    @property
    def torn_step(self) -> int | None:
        """With ``durable``: the step that the run before had begun and not completed, from 1.

        None: it had none under way, or a loss of power has forgotten which. Weights and records of a torn
        step are partly written; ``resume`` goes back to the step before.
        """
        return self._penstock.torn_step

    def wear(self) -> StepWear:
        """Estimate what a step writes, and how long the SSD lasts at that rate."""
        return wear_of(self._penstock)

    def close(self) -> None:
        """Free memory, files and threads. States that are not durable are gone. Idempotent."""
        self._penstock.close()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled."""
        raise ConfigError(
            f"{type(self).__name__} has its states in files and cannot be copied or pickled; use"
            " state_dict() and load_state_dict()"
        )


@functools.cache
def flash_class(cls: type[torch.optim.Optimizer]) -> type[OnFlash]:
    """The class ``cls`` with its states on flash; a subclass of it."""
    return cast(type[OnFlash], type(f"{cls.__name__}OnFlash", (OnFlash, cls), {"torch_class": cls}))


def on_flash(optimizer: T, **settings: Any) -> T:
    """Move the states of any element-wise optimizer to flash. It runs its own step on tiles.

    Args:
        optimizer: It is changed in place: its class becomes a subclass of its own. States that it has
            are moved.
        settings: Fields of ``StatesConfig``.

    Returns:
        The same optimizer.

    Raises:
        ConfigError: It is not element-wise, or a scheduler was made for it before.
        NoSpaceError: There is no room for its states.
    """
    cls = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"on_flash takes an optimizer of torch, and this is of {cls.__name__}")
    if isinstance(optimizer, OnFlash):
        raise ConfigError(f"{cls.__name__} is on flash already")
    if "step" in optimizer.__dict__:
        raise ConfigError(
            f"the step of this {cls.__name__} was replaced, as a learning-rate scheduler does that was"
            " made for it; call on_flash before making the scheduler"
        )
    config = StatesConfig(**settings)
    before = _saved(optimizer)
    initial = functools.partial(_initial, {} if before is None else _made_at_first(optimizer))
    reference: weakref.ref[torch.optim.Optimizer] = weakref.ref(optimizer)
    states = FlashStates(ProbedOptimizer(reference, cls, config, initial, prefers_master=False))
    try:
        for group in optimizer.param_groups:
            states.add_group(group)
        if before is not None:
            dicts.load(states, before)
        states.begin(Overlap)
    except BaseException:
        states.close()
        raise
    optimizer.state = StatesElsewhere(states)
    made = cast(OnFlash, optimizer)
    made.__class__ = flash_class(cast(Any, cls))
    made._patch_step_function()
    made._penstock = states
    made._note_scaling()
    return optimizer


def states_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[State, ...]]:
    """Find by trial the states that an optimizer keeps for each parameter that has a gradient.

    It does not step, and nothing of it is changed; the trial is on small tensors.

    Raises:
        ConfigError: It cannot be run on tiles, so its states could not be on flash; with the reason.
    """
    cls = type(optimizer)
    if isinstance(optimizer, OnFlash):
        raise ConfigError(f"the states of this {cls.__name__} are on flash already")
    initial = functools.partial(_initial, _made_at_first(optimizer))
    reference: weakref.ref[torch.optim.Optimizer] = weakref.ref(optimizer)
    config = StatesConfig(flash=".")  # nothing is opened there
    source = ProbedOptimizer(reference, cls, config, initial, prefers_master=False)
    found: dict[Tensor, tuple[State, ...]] = {}
    for group in optimizer.param_groups:
        options = options_of(group)
        kept: dict[torch.dtype, tuple[State, ...]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.dtype not in kept:
                where = f"parameters of {parameter.dtype}"
                made = probe(source, options, parameter.dtype, initial(options), where=where)
                kept[parameter.dtype] = made.states
            found[parameter] = kept[parameter.dtype]
    return found


def _report_costs(states: FlashStates) -> None:
    """Tell the user once what steps write, and of the memory that they take."""
    if states.has_reported_costs:
        return
    states.has_reported_costs = True
    for note in memory_notes(states):
        warnings.warn(note, PenstockWarning, stacklevel=5)
    wear = wear_of(states)
    _log.info("%s", wear)
    if wear.is_beyond:
        warnings.warn(str(wear), PenstockWarning, stacklevel=5)


def _report_resumed(states: FlashStates, newest: int, step: int) -> None:
    """Tell the user after which step training is resumed, and what became of a later one."""
    found = f"resumed after step {step}" if step else "there is no step to resume after"
    level, then = logging.WARNING, "" if step else "; training begins anew"
    if newest > step:
        found = f"step {newest} was completed here and not by all ranks; {found}"
    elif states.torn_step is not None:
        found = f"step {states.torn_step} was torn; {found}"
    else:
        level, then = logging.INFO, then or "; no later one had begun"
    _log.log(
        level,
        "durable steps of %s in %r: %s%s",
        states.class_name,
        states.config.directories[0],
        found,
        then,
    )


def _saved(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    if not any(optimizer.state.values()):
        return None
    numbers: dict[Tensor, int] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            numbers.setdefault(param, len(numbers))
    return {"state": {numbers[param]: state for param, state in optimizer.state.items()}}


def _made_at_first(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """States that its class makes before the first step, as Adagrad, of a parameter of two zeros."""
    cls = type(optimizer)
    wanted = inspect.signature(cls).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in wanted}
    try:
        model = cls([torch.zeros(2, requires_grad=True)], **options)
    except Exception:  # noqa: BLE001  (a class that wants more; what its steps need, they then make)
        return {}
    return dict(next(iter(model.state.values()), {}))


def _initial(before: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """States that there are before the first step: numbers for each element, tensors for scalars."""
    found: dict[str, Any] = {}
    for name, value in before.items():
        is_state = isinstance(value, Tensor) and value.numel() == 2
        found[name] = float(value[0]) if is_state else value
    if "sum" in found:  # Adagrad's, the only one of torch's that a group may set for itself
        found["sum"] = float(group.get("initial_accumulator_value", found["sum"]))
    return found
