"""The accounts of a session's memory, of the host's and of devices', and who limits which."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.core.config import UNLIMITED, OffloadConfig
from penstock.core.errors import ConfigError
from penstock.homed import UpdateMemory
from penstock.observe.clients import WEIGHTS
from penstock.observe.counters import SAVED_TENSORS
from penstock.observe.recorder import Recorder
from penstock.runtime.allowance import Allowance, DeviceAllowance, FirstServed
from penstock.runtime.memory_limit import MemoryLimit
from penstock.runtime.stores import Stores
from penstock.store.account import Account, host_account

if TYPE_CHECKING:
    from penstock.runtime.memory_division import MemoryDivision


class WeightNeeds(Protocol):
    """Limits that weights on flash need of their account."""

    @property
    def wanted_bytes(self) -> int:
        """Limit with which none of them has to leave memory."""

    @property
    def least_bytes(self) -> int:
        """Least limit with which they can be used."""


class SessionAccounts:
    """Accounts of a session's saved tensors and weights, and what finds their limits.

    On the host they are children of the process's account. On a device each has a limit of its own,
    unless that of the weights is to be found: then they share an account. For the session's thread.

    Attributes:
        process: Limit of the process's account.
        weights: Account of weights on flash while they are in memory; None: they stay in memory.
        updates: Memory that is left to their updates; None: it is not limited.
    """

    def __init__(
        self,
        config: OffloadConfig,
        device: torch.device,
        recorder: Recorder,
        *,
        has_plan: bool,
        needs: Callable[[], WeightNeeds | None],
        division: Callable[[], MemoryDivision],
    ) -> None:
        """Limit the process's account as configured.

        Args:
            config: Settings of the session.
            device: The session's own device.
            recorder: Gets levels of accounts and marks of limits.
            has_plan: True if the user has given a plan.
            needs: Returns what weights on flash need; None: there are none yet.
            division: Returns how weights and saved tensors divide memory once a step is known.

        Raises:
            BudgetError: Penstock already holds more than the limit.
        """
        self._config = config
        self._device = device
        self._recorder = recorder
        self._needs = needs
        self._division = division
        self._all: list[Account] = []
        self._shared: Account | None = None
        self.weights: Account | None = None
        self.updates: UpdateMemory | None = None
        self.may_find_limits = finds_limits_of(config, has_plan=has_plan)
        self.process = MemoryLimit(config, recorder)

    def open(self) -> OffloadConfig:
        """Make the accounts of weights; return the settings with the size of the host tier."""
        config = self._config = self.process.configure(self._config, self._device.type)
        if config.weights != "keep":
            if self._device.type != "cpu" and config.weights_memory is None:
                self._shared = Account(name="device memory")
            limit = host_account().limit_bytes // 2  # until saved tensors share with them
            own_bytes = UNLIMITED
            if config.weights_memory is not None:
                limit = own_bytes = int(config.weights_memory)
            parent = self._parent(self._device)
            self.weights = Account(limit, name=WEIGHTS, parent=parent, owner=WEIGHTS)
            self._keep(self.weights, own_bytes)
            if parent is host_account() and config.memory_request is not None:
                self.updates = UpdateMemory(parent)
        return config

    def close(self) -> None:
        """Close all accounts, and restore the limit of the process's."""
        self._needs = lambda: None  # without the session
        del self._division
        with ExitStack() as stack:
            stack.callback(self.process.close)
            for account in self._all:
                stack.callback(account.close)
            if self.updates is not None:
                stack.callback(self.updates.close)

    def saved_tensors(self, device: torch.device) -> Account:
        """Return an empty account of a device's saved tensors, named ``device`` for the session's own."""
        name = "device" if device == self._device else f"device {device}"
        made = Account(
            self._config.device_bytes,
            name=name,
            on_change=partial(self._recorder.level, name),
            parent=self._parent(device),
            owner=SAVED_TENSORS,
        )
        self._keep(made, self._config.device_bytes)
        return made

    def shared_allowance(self, device: torch.device, budget: Account) -> Allowance | None:
        """Limit saved tensors in host memory to what others leave of ``memory``, if that is set."""
        if device.type != "cpu":
            return None
        return self.process.share(
            budget,
            budget.limit_bytes,
            reserved_bytes=self._config.host_bytes,
            first=self._first_served() if self._device.type == "cpu" else None,
        )

    def device_allowance(
        self, device: torch.device, budget: Account, stores: Stores
    ) -> Allowance | None:
        """Limit a device's budget to its free memory, unless the user has set the budget.

        Raises:
            ConfigError: A limit of weights on flash is missing, and cannot be found.
        """
        if device != self._device or self._shared is None:
            return stores.allowance(device, budget) if self.finds_limits else None
        found = None
        if self.may_find_limits:
            found = stores.allowance(device, self._shared, parts=1)
        if found is None:
            raise ConfigError(
                f"weights={self._config.weights!r} with a model on {device} needs weights_memory, the"
                " limit of its weights in device memory: "
                + (
                    "torch does not tell how much there is"
                    if self.may_find_limits
                    else "with policy='keep', or a plan of your own, limits are not found"
                )
            )
        first = self._first_served()
        assert first is not None
        return DeviceAllowance(budget, found, first=first)

    @property
    def finds_limits(self) -> bool:
        """True if limits of saved tensors on devices are found."""
        config = self._config
        return config.has_tier and config.device_memory is None and self.may_find_limits

    @property
    def divides(self) -> bool:
        """True if memory is divided between weights and saved tensors."""
        config = self._config
        is_shared = config.memory_request is not None or self._shared is not None
        has_own = config.weights_memory is not None or config.device_memory is not None
        return is_shared and not has_own and self.weights is not None

    def _keep(self, account: Account, own_bytes: int) -> None:
        """Take charge of an account, whose own limit may be more than what the process leaves it now."""
        if account.parent is host_account():
            account.may_reach_bytes = min(own_bytes, self.process.found_bytes)
        self._all.append(account)

    def _parent(self, device: torch.device) -> Account | None:
        """Return the account that weights and saved tensors of a device share; None: each has its own."""
        if device.type == "cpu":
            return host_account()
        return self._shared if device == self._device else None

    def _first_served(self) -> FirstServed | None:
        """Return the weights on flash, which share a memory with saved tensors; None without any."""
        if self.weights is None:
            return None
        return FirstServed(
            self.weights,
            self._wanted_bytes,
            adapts=self._config.weights_memory is None,
            least_bytes=self._least_bytes,
            divide=self._division().weights_bytes,
            updates=self.updates,
        )

    def _wanted_bytes(self) -> int:
        needs = self._needs()
        return UNLIMITED if needs is None else needs.wanted_bytes

    def _least_bytes(self) -> int:
        needs = self._needs()
        return 0 if needs is None else needs.least_bytes


def check_weights(config: OffloadConfig, device: torch.device) -> None:
    """Raise ConfigError if the weights of a model on a device cannot rest as configured."""
    weights = config.weights
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"weights={weights!r} is for models on the CPU or on CUDA, not {device}")
    if device.type == "cpu" and weights == "host":
        raise ConfigError(
            "weights='host' is for a model on a device: here the model is on the CPU, and its weights are"
            " in host memory already; set weights='flash' or 'keep', or name the device on which to work"
            " with it, as device='cuda'"
        )
    if device.type == "cpu" and config.weights_memory is None and config.memory is None:
        raise ConfigError(
            "weights='flash' needs a limit of the weights in memory: weights_memory, or memory, of which"
            " they get most"
        )


def finds_limits_of(config: OffloadConfig, *, has_plan: bool) -> bool:
    """Return whether limits of memory may be found: no plan or policy forbids it."""
    return not has_plan and config.policy != "keep"


def kept_note(asked: OffloadConfig, config: OffloadConfig, device: str) -> tuple[str, ...]:
    """Return a sentence for the summary if the weights stay in memory although they were to rest.

    Args:
        asked: Settings as the user has given them.
        config: Those of the session.
        device: Type of the device that the session works on.
    """
    if asked.weights != "auto" or config.weights != "keep":
        return ()
    return (f"weights='auto': weights stay in memory; {asked.place_missing(device)}",)
