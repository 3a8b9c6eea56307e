"""Session: the parts that offloading needs, from open to close."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

import torch

from penstock.core.config import OffloadConfig
from penstock.core.errors import ClosedError, ConfigError, HookError, PenstockWarning
from penstock.core.interrupts import LostInterrupts
from penstock.core.process import call_in_child
from penstock.core.ranks import path_of_rank
from penstock.hooks.attachment import Attachment
from penstock.hooks.boundaries import task_id
from penstock.hooks.saved_tensors import SavedTensorHooks
from penstock.observe.clients import close_account, open_account
from penstock.observe.counters import SESSION
from penstock.observe.events import StallCause
from penstock.observe.recorder import Recorder
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.runtime import user_plan
from penstock.runtime.compute_time import ComputeTime
from penstock.runtime.devices import Devices
from penstock.runtime.executor import Executor
from penstock.runtime.first_limits import FirstLimits
from penstock.runtime.inspection import SessionState, tier_state
from penstock.runtime.job_ranks import JobRanks
from penstock.runtime.loader_demand import LoaderReads, Loaders
from penstock.runtime.planner import Planner, PlannerSettings
from penstock.runtime.session_accounts import (
    SessionAccounts,
    check_weights,
    finds_limits_of,
    kept_note,
)
from penstock.runtime.session_report import SessionReport
from penstock.runtime.stores import Stores, check_device_codec, ranks_on_flash
from penstock.store.account import Account, host_account
from penstock.store.base import Tier
from penstock.store.engine import share_flash
from penstock.vector_math import look_up_kernels

if TYPE_CHECKING:
    from penstock.observe.job_summary import JobSummary
    from penstock.observe.log import EventLog
    from penstock.observe.rss import RssSampler
    from penstock.observe.summary import RunFacts, Summary
    from penstock.runtime.holdings import HoldingsSample
    from penstock.runtime.memory_division import MemoryDivision
    from penstock.runtime.rank_store import RankStore
    from penstock.swap.space import SwapSpace
    from penstock.swap.suspend import Suspended
    from penstock.weights.relocation import Relocation
    from penstock.weights.script_models import ScriptModels
    from penstock.weights.streamer import WeightStreamer

_open: list[Session] = []
"""The open session of this process, if there is one. This reference keeps it alive until it is closed."""


class Session:
    """Offloading in a ``with`` block, or from ``open`` to ``close``. See :func:`penstock.offload`.

    A process has at most one open session. Use it in one thread: saved-tensor hooks are thread-local, and
    the tensors of other threads stay resident (a warning says so once).
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
        make_planner: Callable[..., Planner] = Planner,
    ) -> None:
        """Check the arguments without side effects. See :func:`penstock.offload`.

        Args:
            config: All settings.
            model: Same as for ``offload``.
            optimizer: Same as for ``offload``.
            wrap_tier: Wrapper applied to every opened tier, such as
                :class:`penstock.store.ThrottledTier`, for emulation and tests.
            machine: Bandwidths for planning; by default they are measured when the session is opened.
            plan: User plan, in place of the configuration's policy.
            event_bytes: Memory for the latest events; by default the knob ``PENSTOCK_EVENT_MEMORY``.
            make_planner: Class of the planner of each device.

        Raises:
            ConfigError: The model or the optimizer is of a wrong type.
        """
        _check_kind("model", model, torch.nn.Module)
        _check_kind("optimizer", optimizer, torch.optim.Optimizer)
        self._model = model
        self._optimizer = optimizer
        self.wrap_tier = wrap_tier
        self._machine = machine
        self._make_planner = make_planner
        if plan is None and config.policy.endswith(user_plan.SUFFIX):
            plan = user_plan.load_plan(config.policy)
        self._given = plan
        self.suspended: Suspended | None = None
        self.space: SwapSpace | None = None
        self.on_step: Callable[[], None] | None = None
        self._state = "new"
        self._in_block = False
        self._steps = 0
        self._stores: Stores | None = None
        self._accounts: SessionAccounts | None = None
        self._weights: WeightStreamer | None = None
        self._relocation: Relocation | None = None
        self._script_models: ScriptModels | None = None
        self._loaders = Loaders()
        self._interrupts = LostInterrupts()
        self._rss: RssSampler | None = None
        self._holdings: HoldingsSample | None = None
        self._device = _device_named(config.device) if config.device else _device_of(model)
        finds_limits = finds_limits_of(config, has_plan=plan is not None)
        self.config = config.on(self._device.type, finds_limits=finds_limits)
        self._kept_note = kept_note(config, self.config, self._device.type)
        config = self.config
        if config.weights != "keep":
            check_weights(config, self._device)
        self._ranks = JobRanks()
        self.recorder = Recorder(event_bytes=event_bytes)

    # -- opening and closing ------------------------------------------------------------------

    def open(self) -> Self:
        """Open the session without a ``with`` block, as in a notebook.

        It stays open until :meth:`close` or :func:`penstock.close`, even if no variable refers to it any
        more. A session that an earlier ``open`` left open is closed first, so that a cell with
        ``session = penstock.offload(model, ...).open()`` can run repeatedly. If this session is already
        open, nothing happens.

        Returns:
            The session.

        Raises:
            ClosedError: The session has been closed.
            HookError: A ``with`` block, or another thread, has an open session.
            ConfigError, TransferError: A directory is not usable.
        """
        if self._state == "new" and _open and not _open[0]._in_block:
            _open[0].close()
        return self._ensure_open()

    def __enter__(self) -> Self:
        """Open the session as ``open`` does, but raise if another one is open."""
        self._ensure_open()
        self._in_block = True
        return self

    def _ensure_open(self) -> Self:
        """Open and measure tiers and attach hooks, unless the session is open."""
        if self._state == "closed":
            raise ClosedError(
                "this session is closed and cannot be opened again; call penstock.offload for a new one"
            )
        if self._state == "open":
            return self
        if _open:
            raise HookError(
                "another session is already open, and hooks of two sessions would conflict; leave its"
                " `with` block first, or call penstock.close()"
            )
        self._state = "open"
        try:
            look_up_kernels()
            self._open()
            self._attach()
            if self._weights is not None:
                self._find_first_limits(self._weights)
        except BaseException:
            if self in _open:
                self._detach()
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
        """Close the session; an exception of the body takes precedence over a pending warning."""
        with nullcontext() if error is None else suppress(PenstockWarning):
            self.close()

    def close(self) -> None:
        """Close the session. Idempotent. Finish backward first, since offloaded tensors are discarded.

        Raises:
            HookError: The session was opened in another thread, which still runs.
            SuspendError: It is suspended and cannot be resumed. It stays open.
            PenstockWarning: Warnings are errors and one is pending; the session is closed.
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
                self.recorder.log.conclude(self.summary().to_json())
            self.publish_summary()
        finally:
            self._stores_close()
        self.recorder.raise_warning()

    def _open(self) -> None:
        config = self.config
        kind = self._device.type
        if kind != "cpu" and self._device == torch.device(
            kind
        ):  # each thread may have another current device
            self._device = torch.device(kind, torch.get_device_module(kind).current_device())
        if config.event_log is not None:
            from penstock.observe.log import EventLog  # noqa: PLC0415  (few runs have a log)
            from penstock.runtime.holdings import HoldingsSample  # noqa: PLC0415

            self.recorder.log = EventLog(
                path_of_rank(config.event_log),
                file_bytes=config.event_log_bytes,
                files=config.event_log_files,
            )
            self._holdings = HoldingsSample(host_account())
            self.recorder.log.sample = self._holdings
        if config.sample_rss:
            from penstock.observe.rss import RssSampler  # noqa: PLC0415

            self._rss = RssSampler(self.recorder)
        self._ranks.open()
        if config.flash_by_rank:
            share_flash(ranks_on_flash(config))
        open_account(self.recorder, self._waiting)
        accounts = self._accounts = SessionAccounts(
            config,
            self._device,
            self.recorder,
            has_plan=self._given is not None,
            needs=lambda: self._weights,
            division=self._division,
        )
        self.config = config = accounts.open()
        self.budget = accounts.saved_tensors(self._device)
        if accounts.weights is not None and kind == "cpu":  # before all that shares host memory
            self._open_weights()
        allowance = accounts.shared_allowance(self._device, self.budget)
        stores = self._stores = Stores(
            config,
            budget=self.budget,
            recorder=self.recorder,
            device=self._device,
            wrap_tier=self.wrap_tier,
        )
        allowance = allowance or accounts.device_allowance(self._device, self.budget, stores)
        self._mover = stores.mover
        if self._machine is None:
            meeting = self._ranks.meeting()
            self._machine = stores.measure(meeting)
            if config.has_tier:
                self._ranks.note(meeting)
        self.executor = Executor(
            budget=self.budget,
            tiers=stores.tiers,
            mover=stores.mover,
            recorder=self.recorder,
            time=ComputeTime(self.recorder.clock, stores.timer),
            allowance=allowance,
            make_sampler=stores.make_sampler,
            open_codecs=self._open_codecs,
        )
        self.budget.yield_by(self.executor.give_way)
        self.executor.time.watch.append(accounts.process.look)
        self.devices = Devices(self._device, self.executor, self._open_other)
        stores.mover.account(self.devices.budget_of)
        self.planner = self._make_planner(
            replace(
                self._planner_settings(self._device, self.budget),
                codec=self._codec(),
                recompute=config.recompute or config.policy == "recompute",
                user_plan=self._given,
            ),
            recorder=self.recorder,
            loaders=self._loaders,
            open_codecs=self._open_codecs,
        )
        self.devices.plan_by(self.planner)
        self._report = SessionReport(
            config,
            self._given,
            device=self._device,
            recorder=self.recorder,
            devices=self.devices,
            planner=self.planner,
            accounts=accounts,
            loaders=self._loaders,
            label=self._ranks.label,
        )
        if accounts.weights is not None and kind != "cpu":  # with the mover
            self._open_weights()

    def _waiting(self, cause: StallCause, name: str) -> AbstractContextManager[None]:
        """Return a block in which training waits for a client; other threads do not hold it up."""
        is_training = threading.current_thread() is self._attachment.thread or task_id() != -1
        if not is_training:
            return nullcontext()
        return self.executor.time.waiting(self.recorder, cause, name)

    def _open_weights(self) -> None:
        """Let the weights of models rest elsewhere from now on. Raises ConfigError if they cannot."""
        from penstock.weights.opening import open_device_weights, open_weights  # noqa: PLC0415

        stores = self._stores
        assert self._accounts is not None
        account = self._accounts.weights
        assert account is not None
        if self._device.type == "cpu":
            self._weights = open_weights(self.config, account, self._accounts.updates)
        else:
            assert stores is not None
            self._weights, self._relocation = open_device_weights(
                self.config, account, self._device, stores.mover
            )

    def build_on_flash(self) -> None:
        """Let the models that this thread constructs rest on flash, until one of them runs.

        For scripts that know nothing of :func:`penstock.built_on_flash`; weights are on flash, and the
        session is open. On a device nothing happens: there the script moves its model itself.

        Raises:
            ConfigError: A directory of the session is not usable.
        """
        from penstock.weights.script_models import ScriptModels  # noqa: PLC0415

        if self._weights is not None and self._device.type == "cpu":
            self._script_models = ScriptModels(self.config.directories, self.config.floor_bytes)
            self._weights.before_model = self._script_models.before_run

    @property
    def streams_device_weights(self) -> bool:
        """True if weights on a device rest elsewhere."""
        return self._weights is not None and self._device.type != "cpu"

    @property
    def limits_gradients(self) -> bool:
        """True if the limit of memory is also that of gradients of weights at home, which wait.

        Not with several ranks: gradients that DistributedDataParallel averages are not the session's.
        """
        is_limited = self._accounts is not None and self._accounts.updates is not None
        return is_limited and self._ranks.number is None

    def _division(self) -> MemoryDivision:
        """Return how memory is divided between weights and saved tensors once a step is known."""
        from penstock.hooks.module_weights import session_weights  # noqa: PLC0415  (few runs need these)
        from penstock.runtime.memory_division import MemoryDivision  # noqa: PLC0415

        return MemoryDivision(
            lambda: self.planner.orders.request,
            lambda profile: session_weights(self.modules, self.optimizers, profile.operators),
            self.recorder,
        )

    def _planner_settings(self, device: torch.device, budget: Account) -> PlannerSettings:
        """Return the settings for one device, with the capacity and bandwidth of all tiers."""
        stores = self._stores
        assert stores is not None
        assert self._machine is not None
        return PlannerSettings(
            policy=self.config.policy,
            machine=self._machine,
            budgets=Budgets(
                device_bytes=budget.limit_bytes,
                host_bytes=stores.capacity_bytes("host"),
                flash_bytes=stores.capacity_bytes("flash"),
                staging_bytes=stores.staging_bytes,
            ),
            device=str(device),
            slack_bytes=stores.slack_bytes,
            lent_bytes=stores.lent_bytes,
        )

    def _open_other(self, device: torch.device) -> tuple[Executor, Planner]:
        """Return executor and planner of a further device; see [Note: several devices]."""
        stores, accounts = self._stores, self._accounts
        assert stores is not None
        assert accounts is not None
        budget, time = accounts.saved_tensors(device), self.executor.time
        allowance = accounts.shared_allowance(device, budget)
        allowance = allowance or accounts.device_allowance(device, budget, stores)
        if time.timer is not None:
            time.timer.see(device)
        executor = Executor(
            budget=budget,
            tiers=stores.tiers,
            mover=self._mover,
            recorder=self.recorder,
            time=time,
            completion=self.executor.completion,
            allowance=allowance,
        )
        budget.yield_by(executor.give_way)
        settings = replace(
            self._planner_settings(device, budget),
            policy="auto" if self._given else self.config.policy,
            only_observed=True,  # it may appear in the middle of a pass
        )
        planner = self._make_planner(settings, recorder=self.recorder, loaders=self._loaders)
        return executor, planner

    def _codec(self) -> str:
        """Return the configured codec. Raises ConfigError if the device does not support it."""
        assert self._accounts is not None
        codec = self.config.codec
        if codec == "auto" and not self._accounts.process.affords_codecs:
            return "none"
        if self._device.type != "cpu" and codec not in ("auto", "none"):
            check_device_codec(codec, self._device)
        return codec

    def _open_codecs(self) -> int:
        assert self._stores is not None
        scratch_bytes = self._stores.open_codecs(self.budget, self.budget.limit_bytes)
        if scratch_bytes:
            self.executor.use_transport(self._stores.transport)
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
        if self._weights is not None:
            self._attachment.stream(self._weights)
        self._attachment.attach(self._model, self._optimizer)
        _open.append(self)
        self._interrupts.open()
        self.recorder.mark(
            SESSION,
            policy=self._report.policy_name,
            device=str(self._device),
            budget_bytes=self._report.limit_bytes,
            host_budget_bytes=self.config.host_bytes or None,
            tbw_bytes=self.config.tbw_bytes,
            **self._ranks.label(),
        )
        self.recorder.begin_step(0)

    def _find_first_limits(self, weights: WeightStreamer) -> None:
        """Find limits anew, as weights that were in memory rest on flash now, until a step is known."""
        assert self._accounts is not None
        limits = FirstLimits(
            self._accounts.process,
            self.executor,
            self.planner,
            on_host=self._device.type == "cpu",
            check=weights.check_limit,
        )
        limits.begin_again()
        weights.before_training = limits.begin_again
        weights.in_inference = limits.look if limits.can_look else None

    def _detach(self) -> None:
        self._attachment.detach()
        self._interrupts.close()
        _open.clear()

    def _stores_close(self) -> None:
        """Close all that was opened, the latest first, also if some of it raises."""
        with ExitStack() as stack:
            if self.config.flash_by_rank:
                stack.callback(share_flash, None)
            if self._holdings is not None:
                stack.callback(self._holdings.close)
            if self.recorder.log is not None:
                stack.callback(self.recorder.log.close)
            if self._rss is not None:
                stack.callback(self._rss.stop)
            if self._accounts is not None:
                stack.callback(self._accounts.close)
            if self._stores is not None:
                stack.callback(self._stores.close)
            if self._relocation is not None:
                stack.callback(self._relocation.give_back)
            if self._weights is not None:  # its transfers pass through these
                stack.callback(self._weights.close)
            if self._script_models is not None:
                stack.callback(self._script_models.end, finish=False)
            if self.space is not None:
                stack.callback(self.space.close)
            close_account(self.recorder)

    @property
    def hooks(self) -> SavedTensorHooks:
        """The pack and unpack hooks."""
        return self._attachment.hooks

    # -- while it is open ---------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable the session in this thread inside the block.

        On CUDA it first waits for all transfers, so that a CUDA graph can be captured. If other threads
        continue to train, capture it with ``capture_error_mode="thread_local"``.
        """
        self.hooks.operators_returned()  # offload pending tensors now, not during a capture
        with self._attachment.unhooked():
            for executor in self.devices.all.values():
                executor.drain()
            yield

    def step(self) -> None:
        """End a step. Every ``torch.optim`` optimizer calls it; call it yourself if you have none.

        Raises:
            PenstockWarning: Warnings are errors, and one is pending.
        """
        self._steps += 1
        self._ranks.found()
        self._attachment.protected.refresh()
        assert self._accounts is not None
        self._accounts.process.end_step()
        if self.devices.end_step():
            self._attachment.follow()
        if self._weights is not None:  # after their limit is set
            self._weights.end_step()
        if self.recorder.log is not None and self._steps == 1:
            self._log_model(self.recorder.log)
        self.recorder.end_step()
        self._interrupts.raise_lost()
        if self.on_step is not None:
            self.on_step()
        self.recorder.begin_step(self._steps)
        self.recorder.raise_warning()

    def _log_model(self, log: EventLog) -> None:
        """Write to the event log what the program's own tensors take."""
        from penstock.hooks.model_memory import model_memory  # noqa: PLC0415  (few runs have a log)
        from penstock.observe.records import MODEL  # noqa: PLC0415

        protected = self._attachment.protected
        found = model_memory(protected.modules, protected.optimizers)
        log.write(MODEL, {"t_ns": self.recorder.clock.now_ns(), **found})

    @property
    def device(self) -> torch.device:
        """The device whose tensors are offloaded; of several, the session's own."""
        return self._device

    @property
    def machine(self) -> Machine:
        """The bandwidths for which plans are made, and what flash may hold.

        Raises:
            ClosedError: The session has not been opened.
        """
        if self._machine is None or self._stores is None:
            raise ClosedError("machine: the session has not been opened")
        return replace(self._machine, flash_bytes=self._stores.capacity_bytes("flash"))

    @property
    def plan(self) -> Plan | None:
        """The plan in force; ``None`` until the first backward has ended."""
        return self.executor.orders.plan

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans in force by device, such as ``"cuda:1"``; the session's own device comes first."""
        plans = ((device, each.orders.plan) for device, each in self.devices.all.items())
        return {str(device): plan for device, plan in plans if plan is not None}

    @property
    def profile(self) -> Profile | None:
        """The profile from which the plan was made; ``None`` for a user plan."""
        return self.planner.profile

    def summary(self) -> Summary:
        """Return the summary of the run so far: traffic, stalls, memory, and the plan's decisions."""
        if self._state == "new":
            raise ClosedError("summary: the session has not been opened")
        from penstock.observe.summary import summarize  # noqa: PLC0415  (loads rich)

        return summarize(self.recorder.snapshot(), self._facts(), self.recorder.steps())

    def metrics(self) -> dict[str, float]:
        """Return figures of the last ended step as floats under stable names, for a logger.

        All names begin with ``penstock/``, and end in their unit: ``_s`` or ``_bytes``. Cheap: it makes
        no plan and waits for nothing. Before a step has ended, the figures are those of the run so far.

        Raises:
            ClosedError: The session has not been opened.
        """
        if self._state == "new":
            raise ClosedError("metrics: the session has not been opened")
        from penstock.observe.metrics import metrics  # noqa: PLC0415  (only for those who log)

        return metrics(self.recorder.snapshot(), self.recorder.steps())

    @property
    def ranks(self) -> RankStore | None:
        """The store that the ranks of this job share; None if there is none by now."""
        return self._ranks.found()

    def job_summary(self, *, patience_s: float = 10.0) -> JobSummary:
        """Return the essentials of the summaries of all ranks of the job, as far as they are there.

        Each rank publishes its summary when its session is closed, or when it calls this itself, through
        the key-value store of its process group or of torchrun. No rank has to call this, and it is no
        collective: ranks that have died, or hang, are missing from the result.

        Args:
            patience_s: Longest wait, in seconds, for ranks that have a session and have not published.

        Raises:
            ClosedError: The session has not been opened.
        """
        return self._ranks.job_summary(self.summary(), patience_s)

    def publish_summary(self) -> bool:
        """Hand the essentials of the summary to the other ranks. Closing does it as well.

        Returns:
            False if this is the only rank, or the others cannot be reached.
        """
        return self._ranks.publish(self.summary)

    def inspect(self) -> SessionState:
        """Return what the session holds and moves at this moment: slots, transfers, levels, orders.

        The value is frozen. It is for tests, debuggers and the curious: making it takes a lock and time
        in proportion to the number of saved tensors.

        Raises:
            ClosedError: The session has not been opened.
        """
        if self._state == "new" or self._stores is None:
            raise ClosedError("inspect: the session has not been opened")
        devices = ((str(device), each) for device, each in self.devices.all.items())
        return SessionState(
            steps=self._steps,
            suspended=self.suspended is not None,
            devices=MappingProxyType({name: each.inspect(name) for name, each in devices}),
            tiers=MappingProxyType(
                {name: tier_state(name, tier) for name, tier in self._stores.tiers.items()}
            ),
        )

    # -- for data loaders on the same flash (penstock.data) -----------------------------------

    def add_loader(self, loader: LoaderReads) -> None:
        """Reserve flash bandwidth for a loader from the next plan on; ``FlashLoader`` calls this.

        Raises:
            ClosedError: The session is not open.
        """
        if self._state != "open":
            raise ClosedError(f"the session is {self._state}: only an open session has loaders")
        self._loaders.add(loader)

    def remove_loader(self, loader: LoaderReads) -> None:
        """Stop reserving flash bandwidth for a loader."""
        self._loaders.discard(loader)

    # -- as a job that can be suspended (penstock.suspend) ------------------------------------

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories to which it offloads."""
        return self.config.directories

    @property
    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """The known outermost modules, each with its name."""
        return self._attachment.roots

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer that was passed, and those that have stepped."""
        return self._attachment.protected.optimizers

    def free_idle(self) -> None:
        """Free reserved memory, that of data loaders too, while the job is suspended."""
        assert self._stores is not None
        self._loaders.rest()
        self._stores.rest()

    def reacquire(self) -> None:
        """Pin host memory again, if it was freed."""
        assert self._stores is not None
        self._stores.wake()

    # -- private ------------------------------------------------------------------------------

    def _facts(self) -> RunFacts:
        notes = [] if self._weights is None else [self._weights.note()]
        return self._report.facts(
            steps=self._steps,
            moved_bytes=self._moved_bytes(),
            notes=(*self._ranks.notes, *notes, *self._kept_note),
            warnings=self._attachment.notes,
        )

    def _moved_bytes(self) -> int:
        """Return what weights on flash, and the states of optimizers there, would take in host memory."""
        found = 0 if self._weights is None else self._weights.total_bytes
        for optimizer in self.optimizers:
            moved_bytes = getattr(optimizer, "moved_bytes", None)
            found += 0 if moved_bytes is None else moved_bytes()
        return found


def close() -> None:
    """Close the open session of this process, if there is one.

    Meant for notebooks: a session that was opened without a ``with`` block stays open when its variable
    is deleted or assigned again. See :meth:`Session.close`.

    Raises:
        HookError: The session was opened in another thread, which still runs.
        SuspendError: It is suspended and cannot be resumed. It stays open.
    """
    for session in tuple(_open):
        session.close()


def _check_kind(name: str, given: object, kind: type) -> None:
    if given is not None and not isinstance(given, kind):
        raise ConfigError(
            f"offload: {name} is a {type(given).__name__}, but must be of type {kind.__name__}"
        )


def _device_of(model: torch.nn.Module | None) -> torch.device:
    if model is not None:
        for parameter in model.parameters():
            if not parameter.is_meta:  # else its weights are elsewhere, and have no device
                return parameter.device
        if any(True for _ in model.parameters()):
            return torch.device("cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _device_named(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}, which is none of torch's: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, and torch finds no CUDA device")
    return device


def _leave_child() -> None:
    """Switch off hooks in a forked child, such as a data worker: it has no engines (TRAPS rule 24)."""
    for session in _open:
        session.hooks.active = False


call_in_child(_leave_child)
