"""Options of ``penstock plan``, checked, and the profile of the network."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.cli.paths import file_to_write, picture_to_write
from penstock.cli.plan_batches import LargestBatch
from penstock.cli.plan_network import ALL, PlannedNetwork, TrainingSetup, parse_settings, subject
from penstock.cli.recorded_step import RecordedStep
from penstock.core.errors import ConfigError
from penstock.core.units import format_bandwidth, parse_bandwidth, parse_bytes
from penstock.plan import machines, policies
from penstock.plan.machine import Budgets, Machine
from penstock.plan.profile import Profile

MAX_DATA_SHARE: Final = 0.9
"""Limit for the share of flash reads by data loaders; ``Machine.less_read`` always leaves a tenth."""


@dataclass(frozen=True)
class PlanRequest:
    """A checked request for plans."""

    subject: PlannedNetwork
    batch_size: int | None
    machine: Machine
    """Machine whose flash is reduced by the reads of data loaders."""
    training: TrainingSetup
    budgets: Budgets
    policies: tuple[str, ...]
    tbw_bytes: int | None
    data_bytes_per_s: int
    """Rate at which data loaders read from flash."""
    profile: Profile
    search: LargestBatch | None

    @property
    def whole_device(self) -> bool:
        """True if the budget is for everything on the device."""
        return bool(self.profile.fixed_bytes or self.profile.transients)


def check(options: argparse.Namespace) -> PlanRequest:
    """Check every option before any work is done; then make the profile.

    Raises:
        ConfigError: An option, the network or the machine is invalid.
        PlanError: The file has no valid profile.
    """
    machine = machine_of(options)
    device = options.device or device_of(machine)
    budgets = Budgets(
        device_bytes=bytes_of(options, "device_memory", machine.device_bytes, least=1),
        host_bytes=bytes_of(options, "host_memory", machine.host_bytes if device == "cuda" else 0),
        flash_bytes=bytes_of(options, "flash_memory", machine.flash_bytes),
    )
    data_bytes_per_s = data_rate(options.data_rate, machine)
    machine = machine.less_read(data_bytes_per_s) if data_bytes_per_s else machine
    tbw_bytes = None if options.tbw is None else bytes_of(options, "tbw", 0, least=1)
    every = options.policy == ALL
    if not every:
        policies.get(options.policy)
    _check_paths(options)
    training = TrainingSetup(machine, device, options.optimizer or "sgd", options.autocast)
    found = subject(options.network, training, parse_settings(options.set))
    batch_size, profile, search = options.batch, found.profile, None
    if profile is None:
        if batch_size is None or batch_size < 1:
            given = "missing" if batch_size is None else f"{batch_size}"
            raise ConfigError(f"--batch is {given}; it must be 1 or more images or sequences")
        search = LargestBatch(found.profile_of, batch_size, machine, budgets)
        profile = search.profile(batch_size)
    elif batch_size is not None:
        raise ConfigError(
            f"--batch: the profile {found.name!r} is of one batch; leave the option out"
        )
    return PlanRequest(
        subject=found,
        batch_size=batch_size,
        machine=machine,
        training=training,
        budgets=budgets,
        policies=policies.names() if every else (options.policy,),
        tbw_bytes=tbw_bytes,
        data_bytes_per_s=data_bytes_per_s,
        profile=profile,
        search=search,
    )


def machine_of(options: argparse.Namespace, recorded: RecordedStep | None = None) -> Machine:
    """Return the machine that is named, or else that on which a script's step was recorded.

    Raises:
        ConfigError: There is no such machine.
    """
    if options.machine is None and recorded is not None:
        return recorded.machine
    return machines.find(options.machine)


def device_of(machine: Machine) -> str:
    """Return ``cpu`` for a machine whose device memory is the host's, else ``cuda``."""
    same = machine.device_bytes == machine.host_bytes and not machine.flash_over_link
    return "cpu" if same else "cuda"


def data_rate(given: str | None, machine: Machine) -> int:
    """Return the rate of data loaders in bytes per second, which must leave some of the flash's."""
    if given is None:
        return 0
    rate, flash = parse_bandwidth(given, what="--data-rate"), machine.flash_read_bytes_per_s
    if rate > MAX_DATA_SHARE * flash:
        raise ConfigError(
            f"--data-rate is {format_bandwidth(rate)}, and the flash of {machine.name!r} reads"
            f" {format_bandwidth(flash)}; set at most {MAX_DATA_SHARE:.0%} of that, or keep the data"
            " set on another device"
        )
    return rate


def bytes_of(options: argparse.Namespace, name: str, default: int, *, least: int = 0) -> int:
    """Return a size option in bytes. Raises ConfigError below ``least``."""
    option = f"--{name.replace('_', '-')}"
    given = getattr(options, name)
    nbytes = default if given is None else parse_bytes(given, what=option)
    if nbytes < least:
        unknown = "" if given is not None else "; the machine does not say how much it has"
        raise ConfigError(f"{option} is {nbytes} bytes; it must be {least} or more{unknown}")
    return nbytes


def _check_paths(options: argparse.Namespace) -> None:
    """Check all paths before any work is done."""
    if options.plot is not None:
        picture_to_write(options.plot, "--plot")
    if options.save_plan is not None:
        file_to_write(options.save_plan, "--save-plan")
        if Path(options.save_plan).suffix != ".json":
            raise ConfigError(f"--save-plan: {options.save_plan!r} must end with .json")
