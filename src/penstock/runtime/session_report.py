"""Report of a session beside counts: its limits, decisions of the plan, notes and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.config import UNLIMITED, OffloadConfig
from penstock.core.units import format_bytes
from penstock.observe.counters import REFUSED
from penstock.observe.recorder import Recorder
from penstock.observe.suggestion import Suggestion
from penstock.plan.plan import INFEASIBLE, TIGHT, Action, Plan
from penstock.plan.profile import Profile
from penstock.runtime.allowance import DeviceAllowance, FoundAllowance
from penstock.runtime.devices import Devices
from penstock.runtime.loader_demand import Loaders
from penstock.runtime.planner import Planner
from penstock.runtime.session_accounts import SessionAccounts
from penstock.store.account import Account

if TYPE_CHECKING:
    from penstock.observe.summary import RunFacts


class SessionReport:
    """Makes the facts of a session for its summary. For the session's thread."""

    def __init__(
        self,
        config: OffloadConfig,
        given: Plan | None,
        *,
        device: torch.device,
        recorder: Recorder,
        devices: Devices,
        planner: Planner,
        accounts: SessionAccounts,
        loaders: Loaders,
        label: Callable[[], dict[str, Any]],
    ) -> None:
        """Begin, with the parts of an open session.

        Args:
            config: Its settings.
            given: The user's plan, if there is one.
            device: Its own.
            recorder: Of its events.
            devices: Its executors and planners.
            planner: That of the session's own device.
            accounts: Its accounts of memory.
            loaders: Its data loaders.
            label: Returns rank, local rank and machine.
        """
        self._config = config
        self._given = given
        self._device = device
        self._recorder = recorder
        self._devices = devices
        self._planner = planner
        self._accounts = accounts
        self._loaders = loaders
        self._label = label
        self._suggested: tuple[Profile | None, Suggestion | None] = (None, None)

    def facts(
        self, *, steps: int, moved_bytes: int, notes: Iterable[str], warnings: Iterable[str]
    ) -> RunFacts:
        """Return what a summary tells of the session.

        Args:
            steps: Number of ended steps.
            moved_bytes: What weights and optimizer states that rest elsewhere would take in host memory.
            notes: Sentences of other parts of the session.
            warnings: What did not happen as it was asked for, of those parts.
        """
        from penstock.observe.summary import RunFacts, SlotFact  # noqa: PLC0415  (loads rich)

        config, main = self._config, self._devices.main
        slots = tuple(
            SlotFact(
                nbytes=decision.key.nbytes,
                action=str(decision.action),
                tier=decision.tier,
                reason=decision.reason,
            )
            for executor in self._devices.all.values()
            if executor.orders.plan is not None
            for decision in executor.orders.plan.decisions
        )
        suggestion = self._suggestion()
        saved_bytes = sum(
            _saved_bytes(planner)
            for device, planner in self._devices.planners.items()
            if device.type == "cpu"
        )
        return RunFacts(
            policy=self.policy_name,
            device=str(self._device),
            **self._label(),
            budget_bytes=self._budget_of(self._device, main.budget),
            other_budgets=tuple(
                (each.budget.name, self._budget_of(device, each.budget))
                for device, each in self._devices.all.items()
                if each is not main
            ),
            host_budget_bytes=config.host_bytes or None,
            steps=steps,
            slots=slots,
            saved_peak_bytes=self._saved_bytes(),
            tbw_bytes=config.tbw_bytes,
            foreseen=self._planner.foreseen,
            loaders_bytes_per_s=self._loaders.demand_bytes_per_s,
            loaders_planned_bytes_per_s=self._loaders.planned_bytes_per_s,
            suggestion=suggestion,
            notes=self._notes(notes, suggestion),
            warnings=(*warnings, *self._plan_notes()),
            host=self._accounts.process.use(saved_bytes and saved_bytes + moved_bytes),
        )

    def _budget_of(self, device: torch.device, account: Account) -> int | None:
        """Return the limit that saved tensors had all the time; ``None`` if there was none."""
        if device.type == "cpu" and self._config.memory_request is not None:  # what others leave
            return self._config.device_bytes if self._config.device_memory is not None else None
        return _limit_of(account)

    def _plan_notes(self) -> Iterator[str]:
        """Yield notes on plans, but none on a budget that was never exceeded, or that replays found."""
        refused = self._recorder.snapshot().counted(REFUSED)
        for executor in self._devices.all.values():
            budget = executor.budget
            kept_it = not refused and budget.peak_bytes <= budget.limit_bytes
            for note in executor.orders.notes:
                is_divided = note.startswith(TIGHT) and self._accounts.divides
                if not (is_divided or (kept_it and note.startswith(INFEASIBLE))):
                    yield note if executor is self._devices.main else f"{budget.name}: {note}"

    def _notes(self, others: Iterable[str], suggestion: Suggestion | None) -> tuple[str, ...]:
        """Return sentences on the budgets that were found, and advice on others."""
        found = [*self._accounts.process.notes, *others]
        allowances = (each.allowance for each in self._devices.all.values())
        found += [
            str(each) for each in allowances if isinstance(each, FoundAllowance | DeviceAllowance)
        ]
        if (
            self._accounts.finds_limits
            and not self._devices.main.allowance
            and self._devices.main.time.timer is not None
        ):
            found.append(
                f"device_memory is not set, and torch does not report the memory of {self._device}:"
                " there is no budget"
            )
        return (*found, *self._advice(suggestion))

    def _advice(self, suggestion: Suggestion | None) -> tuple[str, ...]:
        """Return advice on whether a smaller budget, or the present one, is useful."""
        limit, saved_bytes = self.limit_bytes, self._saved_bytes()
        plan = self._devices.main.orders.plan
        if plan is None or not saved_bytes:
            return ()
        if limit is None and not self._config.has_tier:
            return (
                "to see here what a smaller memory budget would cost, name a directory to offload to:"
                " flash=DIR, or --flash DIR",
            )
        if suggestion is not None and not suggestion.budgets:
            least = suggestion.least_bytes
            known = (
                "the minimum is not known"
                if least is None
                else f"the minimum is {format_bytes(least)}"
            )
            return (f"these passes need a device budget as large as what autograd saves: {known}",)
        moves = any(decision.action is not Action.KEEP for decision in plan.decisions)
        if limit is None or saved_bytes > limit or moves:
            return ()
        return (
            f"what autograd saves, {format_bytes(saved_bytes)} at its peak, fits in the budget of"
            f" {format_bytes(limit)}: offloading it has no benefit",
        )

    def _suggestion(self) -> Suggestion | None:
        """Return the predicted costs of budgets if none is set; computed once for each profile."""
        if self.limit_bytes is not None:
            return None
        profile, found = self._suggested
        if profile is not self._planner.profile:
            profile = self._planner.profile
            found = self._devices.main.orders.suggestion()
            self._suggested = profile, found
        if found is None or self._device.type != "cpu":
            return found
        return replace(found, is_host=True, others_bytes=self._accounts.process.others_bytes)

    @property
    def policy_name(self) -> str:
        """The policy of the user's plan, or of the settings."""
        return self._config.policy if self._given is None else self._given.policy

    @property
    def limit_bytes(self) -> int | None:
        """The configured limit of saved tensors; ``None`` if there is none."""
        config = self._config
        limits = [config.device_bytes] if config.device_memory is not None else []
        if self._device.type == "cpu" and config.memory_request is not None:
            limits += [config.memory_request.nbytes] if config.memory_request.nbytes else []
        return min(limits, default=None)

    def _saved_bytes(self) -> int:
        """Return the peak of the bytes that autograd would hold, summed over devices."""
        return sum(map(_saved_bytes, self._devices.planners.values()))


def _limit_of(budget: Account) -> int | None:
    return None if budget.limit_bytes >= UNLIMITED else budget.limit_bytes


def _saved_bytes(planner: Planner) -> int:
    if planner.profile is not None:
        return planner.profile.peak_saved_bytes
    return sum(each.key.nbytes for each in planner.plan.decisions) if planner.plan else 0
