"""A session: everything that offloading takes, put together, from opening to closing it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from penstock.core.budget import Budget
from penstock.core.config import UNLIMITED, OffloadConfig
from penstock.core.errors import ClosedError, ConfigError, HookError, PenstockWarning
from penstock.core.interrupts import LostInterrupts
from penstock.core.process import call_in_child
from penstock.core.ranks import of_rank, rank
from penstock.core.units import format_bytes
from penstock.hooks.attachment import Attachment
from penstock.hooks.saved_tensors import SavedTensorHooks
from penstock.io.engine import Engine
from penstock.observe.clients import close_account, open_account
from penstock.observe.counters import REFUSED, SESSION
from penstock.observe.log import EventLog
from penstock.observe.recorder import Recorder
from penstock.observe.records import LastWords
from penstock.observe.rss import RssSampler
from penstock.observe.suggestion import Suggestion
from penstock.observe.summary import RunFacts, SlotFact, Summary, summarize
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import INFEASIBLE, Action, Plan
from penstock.plan.profile import Profile
from penstock.runtime import given
from penstock.runtime.compute_time import ComputeTime
from penstock.runtime.devices import Devices
from penstock.runtime.executor import Executor
from penstock.runtime.loaders import Loaders, Reads
from penstock.runtime.planner import Planner
from penstock.runtime.stores import Stores, check_device_codec
from penstock.tier.base import Tier

if TYPE_CHECKING:
    from penstock.runtime.cuda.allowance import Allowance
    from penstock.swap.space import Space
    from penstock.swap.suspend import Suspended

_open: list[Session] = []
"""The session that is open in this process, if there is one. It lives until it is closed."""


class Session:
    """Offloading, within a ``with`` block or from ``open`` to ``close``. See :func:`penstock.offload`.

    One session is open in a process at a time. Use it in one thread: saved-tensor hooks are
    thread-local, and other threads' tensors stay where they are (a warning says so once).
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        wrap_tier: Callable[[Tier], Tier] | None = None,
        machine: Machine | None = None,
        plan: Plan | None = None,
        event_bytes: int | None = None,
    ) -> None:
        """Check everything; touch nothing. See :func:`penstock.offload`.

        Args:
            config: What to do.
            model: As for ``offload``.
            optimizer: As for ``offload``.
            wrap_tier: Applied to every tier that is opened, as with
                :class:`penstock.tier.ThrottledTier`, for emulation and tests.
            machine: Bandwidths to plan with; measured when the session is opened if not given.
            plan: Followed as it is, in place of the configuration's policy.
            event_bytes: Memory for the latest events; without, the knob ``PENSTOCK_EVENT_MEMORY``.

        Raises:
            ConfigError: What is given as model or optimizer is none.
        """
        _check_kind("model", model, torch.nn.Module)
        _check_kind("optimizer", optimizer, torch.optim.Optimizer)
        self.config = config
        self._model = model
        self._optimizer = optimizer
        self.wrap_tier = wrap_tier
        self._machine = machine
        if plan is None and config.policy.endswith(given.SUFFIX):
            plan = given.load_plan(config.policy)
        self._given = plan
        self.suspended: Suspended | None = None
        self.space: Space | None = None
        self.on_step: Callable[[], None] | None = None
        self._state = "new"
        self._in_block = False
        self._steps = 0
        self._stores: Stores | None = None
        self._loaders = Loaders()
        self._interrupts = LostInterrupts()
        self._rss: RssSampler | None = None
        self._suggested: tuple[Profile | None, Suggestion | None] = (None, None)
        self._device = _device_of(model)
        self._rank = rank()
        self.recorder = Recorder(event_bytes=event_bytes)

    # -- opening and closing ------------------------------------------------------------------

    def open(self) -> Self:
        """Open the session without a ``with`` block, as in the cells of a notebook.

        It stays open until :meth:`close`, or :func:`penstock.close`, even if no name refers to it any
        more. A session that an earlier ``open`` left open is closed first, so that a cell with
        ``session = penstock.offload(model, ...).open()`` can be run again. If this session is open
        already, nothing happens.

        Returns:
            The session.

        Raises:
            ClosedError: The session was closed before.
            HookError: A ``with`` block, or another thread, has a session open.
            ConfigError, TransferError: A directory cannot be spilled to.
        """
        if self._state == "new" and _open and not _open[0]._in_block:
            _open[0].close()
        return self._ensure_open()

    def __enter__(self) -> Self:
        """Open the session, as ``open`` does, but refuse if another one is open."""
        self._ensure_open()
        self._in_block = True
        return self

    def _ensure_open(self) -> Self:
        """Open tiers, measure them, attach hooks."""
        if self._state == "closed":
            raise ClosedError(
                "this session is closed, and a session is opened once; call penstock.offload again for"
                " another"
            )
        if self._state == "open":
            return self
        if _open:
            raise HookError(
                "a session is open already, and its hooks would pack what those of this one packed;"
                " leave its `with` block first, or call penstock.close()"
            )
        self._state = "open"
        try:
            self._open()
            self._attach()
        except BaseException:
            self._stores_close()
            self._state = "closed"
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Detach hooks and release everything; files vanish. What the body raises goes first."""
        with nullcontext() if error is None else suppress(PenstockWarning):
            self.close()

    def close(self) -> None:
        """Close the session. Idempotent. Finish backward first: what was moved out of memory is gone.

        Raises:
            HookError: The session was opened in another thread, which still runs.
            SuspendError: It is suspended, and cannot be resumed. It is still open.
            PenstockWarning: Warnings are errors, and a thread of ours had to warn; once it is closed.
        """
        if self._state != "open":
            return
        thread = self._attachment.thread
        if thread is not threading.current_thread() and thread.is_alive():
            raise HookError(
                f"this session was opened in thread {thread.name!r}, and its hooks can only be removed"
                " there; close it in that thread"
            )
        if self.suspended is not None:
            importlib.import_module("penstock.swap.suspend").resume(self)
        self._state = "closed"
        try:
            self._detach()
            for executor in self.devices.all.values():
                executor.close()
            if self.recorder.log is not None:
                self.recorder.log.conclude(LastWords(self.summary().to_json()))
        finally:
            self._stores_close()
        self.recorder.raise_warning()

    def _open(self) -> None:
        config = self.config
        kind = self._device.type
        if kind != "cpu" and self._device == torch.device(kind):  # another one in other threads
            self._device = torch.device(kind, torch.get_device_module(kind).current_device())
        if config.event_log is not None:
            self.recorder.log = EventLog(
                of_rank(config.event_log),
                file_bytes=config.event_log_bytes,
                files=config.event_log_files,
            )
        if config.sample_rss:
            self._rss = RssSampler(self.recorder)
        open_account(self.recorder)
        self.budget = self._account(self._device)
        stores = self._stores = Stores(
            config,
            budget=self.budget,
            recorder=self.recorder,
            device=self._device,
            wrap_tier=self.wrap_tier,
        )
        allowance = self._allowance(self._device, self.budget)
        self._mover = stores.mover
        if self._machine is None:
            self._machine = stores.measure()
        self.planner = self._make_planner(
            self._device,
            self.budget,
            policy=config.policy,
            codec=self._codec(),
            prepare_codecs=self._open_codecs,
            recompute=config.recompute or config.policy == "recompute",
            plan=self._given,
        )
        self.executor = Executor(
            budget=self.budget,
            tiers=stores.tiers,
            mover=stores.mover,
            planner=self.planner,
            recorder=self.recorder,
            time=ComputeTime(self.recorder.clock, stores.timer),
            allowance=allowance,
            make_sampler=stores.make_sampler,
        )
        self.devices = Devices(self._device, self.executor, self._open_other)
        stores.mover.account(self.devices.budget_of)
        self.planner.begin()

    def _account(self, device: torch.device) -> Budget:
        """Return an empty account of a device's memory; the session's own is called just that."""
        name = "device" if device == self._device else f"device {device}"
        on_change = partial(self.recorder.level, name)
        return Budget(self.config.device_bytes, name=name, on_change=on_change)

    def _allowance(self, device: torch.device, budget: Budget) -> Allowance | None:
        """Limit a device's budget to what is left there, where the user has not said what it is."""
        assert self._stores is not None
        return self._stores.allowance(device, budget) if self._finds_limits else None

    @property
    def _finds_limits(self) -> bool:
        config = self.config
        if config.device_memory is not None or not config.has_tier or self._given is not None:
            return False
        return config.policy != "keep"

    def _make_planner(
        self, device: torch.device, budget: Budget, *, policy: str, **settings: Any
    ) -> Planner:
        """Return a planner for one device, with room and bandwidth of all tiers."""
        stores = self._stores
        assert stores is not None
        assert self._machine is not None
        return Planner(
            policy=policy,
            machine=self._machine,
            budgets=Budgets(
                device_bytes=budget.limit_bytes,
                host_bytes=stores.capacity_bytes("host"),
                flash_bytes=stores.capacity_bytes("flash"),
            ),
            budget=budget,
            floor_bytes=self.config.floor_bytes,
            recorder=self.recorder,
            device=str(device),
            slack_bytes=stores.slack_bytes,
            loaders=self._loaders,
            **settings,
        )

    def _open_other(self, device: torch.device) -> Executor:
        """Return the executor of a device beside the session's own; see [Note: several devices]."""
        assert self._stores is not None
        budget, time = self._account(device), self.executor.time
        allowance = self._allowance(device, budget)
        if time.timer is not None:
            time.timer.see(device)
        return Executor(
            budget=budget,
            tiers=self._stores.tiers,
            mover=self._mover,
            planner=self._make_planner(
                device,
                budget,
                policy="auto" if self._given else self.config.policy,
                only_observed=True,  # it may appear in the middle of a pass
            ),
            recorder=self.recorder,
            time=time,
            completion=self.executor.completion,
            allowance=allowance,
        )

    def _codec(self) -> str:
        """The configured codec. Raises ConfigError if the device cannot have it."""
        codec = self.config.codec
        if self._device.type != "cpu" and codec not in ("auto", "none"):
            check_device_codec(codec, self._device)
        return codec

    def _open_codecs(self) -> int:
        assert self._stores is not None
        scratch_bytes = self._stores.open_codecs(self.budget, self.budget.limit_bytes)
        if scratch_bytes:
            self.executor.use_mover(self._stores.mover)
        return scratch_bytes

    def _attach(self) -> None:
        self._attachment = Attachment(
            devices=self.devices,
            recorder=self.recorder,
            device=self._device,
            floor_bytes=self.config.floor_bytes,
            prove_signs=self._codec() == "auto",
            given_plan=self._given,
            on_step=self.step,
        )
        self._attachment.attach(self._model, self._optimizer)
        self._interrupts.open()
        _open.append(self)
        self.recorder.mark(
            SESSION,
            policy=self._policy_name,
            device=str(self._device),
            budget_bytes=self._limit_bytes,
            host_budget_bytes=self.config.host_bytes or None,
            tbw_bytes=self.config.tbw_bytes,
            rank=self._rank,
        )
        self.recorder.begin_step(0)

    def _detach(self) -> None:
        self._attachment.detach()
        self._interrupts.close()
        _open.clear()

    def _stores_close(self) -> None:
        close_account(self.recorder)
        if self.space is not None:
            self.space.close()
        if self._stores is not None:
            self._stores.close()
        if self._rss is not None:
            self._rss.stop()
        if self.recorder.log is not None:
            self.recorder.log.close()

    @property
    def hooks(self) -> SavedTensorHooks:
        """What packs and unpacks."""
        return self._attachment.hooks

    # -- while it is open ---------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, this thread saves tensors as if there were no session.

        On CUDA it first waits for what is being moved, so that a CUDA graph can be captured. If other
        threads go on to train meanwhile, capture it with ``capture_error_mode="thread_local"``.
        """
        self.hooks.operators_returned()  # what has been saved is not spilled later, amid a capture
        with self._attachment.aside():
            for executor in self.devices.all.values():
                executor.drain()
            yield

    def step(self) -> None:
        """A step has ended. Called by every ``torch.optim`` optimizer; call it if you have none.

        Raises:
            PenstockWarning: Warnings are errors, and a thread of ours had to warn.
        """
        self._steps += 1
        self._attachment.protected.refresh()
        if self.devices.end_step():
            self._attachment.follow()
        self.recorder.end_step()
        self._interrupts.raise_lost()
        if self.on_step is not None:
            self.on_step()
        self.recorder.begin_step(self._steps)
        self.recorder.raise_warning()

    @property
    def plan(self) -> Plan | None:
        """The plan in force; ``None`` until the first backward is over."""
        return self.planner.plan

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans in force by device, as ``"cuda:1"``, the session's own first; see ``plan``."""
        plans = ((device, each.planner.plan) for device, each in self.devices.all.items())
        return {str(device): plan for device, plan in plans if plan is not None}

    @property
    def profile(self) -> Profile | None:
        """What the plan was made from; ``None`` if that was given."""
        return self.planner.profile

    def summary(self) -> Summary:
        """What was moved, where, at what stall; what stayed and why. At any time after opening."""
        if self._state == "new":
            raise ClosedError("summary: the session has not been opened")
        return summarize(self.recorder.snapshot(), self._facts(), self.recorder.steps())

    # -- for data loaders that share its flash (penstock.data) --------------------------------

    @property
    def engine(self) -> Engine | None:
        """What moves its bytes to flash and back; None: there is no flash, or it is GPU-direct.

        Raises:
            ClosedError: The session is not open.
        """
        if self._state != "open" or self._stores is None:
            raise ClosedError(f"the session is {self._state}: its engine is lent while it is open")
        return self._stores.engine

    def add_loader(self, loader: Reads) -> None:
        """Leave this loader what it needs of flash, from the next plan on; ``FlashLoader`` calls it."""
        self._loaders.add(loader)

    def discard_loader(self, loader: Reads) -> None:
        """It reads no more."""
        self._loaders.discard(loader)

    # -- as a job that can be suspended (penstock.suspend) ------------------------------------

    @property
    def directories(self) -> tuple[str, ...]:
        """Where it spills to."""
        return self.config.directories

    @property
    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """The outermost modules that it knows, by name."""
        return self._attachment.roots

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that were given, or have stepped."""
        return self._attachment.protected.optimizers

    def rest(self) -> None:
        """Give the system what is held in reserve for what comes back, and what data loaders hold."""
        assert self._stores is not None
        self._loaders.rest()
        self._stores.rest()

    def wake(self) -> None:
        """Pin host memory again, if that was given back."""
        assert self._stores is not None
        self._stores.wake()

    # -- inside -------------------------------------------------------------------------------

    def _facts(self) -> RunFacts:
        config = self.config
        slots = tuple(
            SlotFact(
                module=decision.key.module,
                ordinal=decision.key.ordinal,
                nbytes=decision.key.nbytes,
                action=str(decision.action),
                tier=decision.tier,
                reason=decision.reason,
            )
            for plan in self.plans.values()
            for decision in plan.decisions
        )
        suggestion = self._suggestion()
        return RunFacts(
            policy=self._policy_name,
            device=str(self._device),
            rank=self._rank,
            budget_bytes=_limit_of(self.budget),
            other_budgets=tuple(
                (each.budget.name, _limit_of(each.budget))
                for each in self.devices.all.values()
                if each is not self.executor
            ),
            host_budget_bytes=config.host_bytes or None,
            steps=self._steps,
            slots=slots,
            saved_peak_bytes=self._saved_bytes(),
            tbw_bytes=config.tbw_bytes,
            foreseen=self.planner.foreseen,
            loaders_bytes_per_s=self._loaders.demand_bytes_per_s,
            loaders_planned_bytes_per_s=self._loaders.planned_bytes_per_s,
            suggestion=suggestion,
            notes=self._notes(suggestion),
            warnings=(*self._attachment.notes, *self._plan_notes()),
        )

    def _plan_notes(self) -> Iterator[str]:
        """Yield notes on plans, without that one may exceed a budget which was never exceeded."""
        refused = self.recorder.snapshot().counted(REFUSED)
        for executor in self.devices.all.values():
            budget = executor.budget
            kept_it = not refused and budget.peak_bytes <= budget.limit_bytes
            for note in executor.planner.notes:
                if not (kept_it and note.startswith(INFEASIBLE)):
                    yield note if executor is self.executor else f"{budget.name}: {note}"

    def _notes(self, suggestion: Suggestion | None) -> tuple[str, ...]:
        """Return sentences on budgets that were found, and on what others would do."""
        found = [str(each.allowance) for each in self.devices.all.values() if each.allowance]
        if self._finds_limits and not found and self.executor.time.timer is not None:
            found.append(
                f"no device_memory was given, and torch does not tell how much memory {self._device} has:"
                " there is no budget"
            )
        return (*found, *self._advice(suggestion))

    def _advice(self, suggestion: Suggestion | None) -> tuple[str, ...]:
        """Return sentences on whether there is anything to gain by a smaller budget, or by this one."""
        limit, saved_bytes = self._limit_bytes, self._saved_bytes()
        if self.plan is None or not saved_bytes:
            return ()
        if limit is None and not self.config.has_tier:
            return (
                "to be told here what a smaller memory budget would cost, name a directory to spill"
                " to: flash=DIR, or --flash DIR",
            )
        if suggestion is not None and not suggestion.budgets:
            least = suggestion.least_bytes
            known = "none is known" if least is None else f"the least is {format_bytes(least)}"
            return (
                f"a device budget below what autograd saves would not do for these passes: {known}",
            )
        moves = any(decision.action is not Action.KEEP for decision in self.plan.decisions)
        if limit is None or saved_bytes > limit or moves:
            return ()
        return (
            f"what autograd saves, {format_bytes(saved_bytes)} at its peak, fits in the budget of"
            f" {format_bytes(limit)}: there is nothing to gain by moving it",
        )

    def _suggestion(self) -> Suggestion | None:
        """Return what budgets would cost, if there is none; predicted once for each profile."""
        if self._limit_bytes is not None:
            return None
        profile, found = self._suggested
        if profile is not self.profile:
            profile = self.profile
            found = self.planner.suggest()
            self._suggested = profile, found
        return found

    @property
    def _policy_name(self) -> str:
        return self.config.policy if self._given is None else self._given.policy

    @property
    def _limit_bytes(self) -> int | None:
        """Of the device's memory, as given; ``None``: none was."""
        return None if self.config.device_bytes == UNLIMITED else self.config.device_bytes

    def _saved_bytes(self) -> int:
        """The most that autograd would hold at once, on each device."""
        return sum(_saved_bytes(each.planner) for each in self.devices.all.values())


def close() -> None:
    """Close the session that is open in this process; do nothing if there is none.

    For notebooks: a session whose name is lost, because it was opened without a ``with`` block and the
    variable was assigned again or deleted, is still open, and is closed so. See :meth:`Session.close`.

    Raises:
        HookError: The session was opened in another thread, which still runs.
        SuspendError: It is suspended, and cannot be resumed. It is still open.
    """
    for session in tuple(_open):
        session.close()


def _check_kind(name: str, given: object, kind: type) -> None:
    if given is not None and not isinstance(given, kind):
        raise ConfigError(
            f"offload: {name} is a {type(given).__name__}, it must be of type {kind.__name__}"
        )


def _limit_of(budget: Budget) -> int | None:
    return None if budget.limit_bytes >= UNLIMITED else budget.limit_bytes


def _saved_bytes(planner: Planner) -> int:
    if planner.profile is not None:
        return planner.profile.peak_saved_bytes
    return sum(each.key.nbytes for each in planner.plan.decisions) if planner.plan else 0


def _device_of(model: torch.nn.Module | None) -> torch.device:
    if model is not None:
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _leave_child() -> None:
    """In a forked child (a data loader's worker) engines are dead: its tensors stay (TRAPS rule 24)."""
    for session in _open:
        session.hooks.active = False


call_in_child(_leave_child)
