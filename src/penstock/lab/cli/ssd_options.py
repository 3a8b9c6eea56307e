"""Common options of the commands of ``penstock ssd``: devices, their fields, lists, counts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.core.files import parse_toml
from penstock.lab.ssd import Device, load, presets, with_field
from penstock.lab.ssd.mqsim import read_device
from penstock.lab.ssd.mqsim_xml import Ignored, is_mqsim

MAX_COUNT: Final = 2**53
"""Largest count: floats are exact for whole numbers up to here."""


def add_fields(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``."""
    parser.add_argument(
        "--set", metavar="TABLE.FIELD=VALUE", action="append", default=[],
        help="set a field of the device, such as geometry.channels=16; repeat it for several",
    )  # fmt: skip


def known_devices() -> str:
    """Return the list of devices for a help text."""
    return f"{', '.join(presets())}; or a file, NAME.toml; or MQSim's, NAME.xml"


def device_of(name: str, settings: list[str]) -> Device:
    """Return a device with the changes of ``--set``; report ignored keys of MQSim's file."""
    if is_mqsim(name):
        device, ignored = read_device(name)
        report_ignored(name, ignored)
    else:
        device = load(name)
    for setting in settings:
        path, sign, value = setting.partition("=")
        if not sign:
            raise ConfigError(f"--set {setting!r} has no value; write it like geometry.channels=16")
        device = with_field(device, path.strip(), toml_value(value))
    return device


def report_ignored(path: str, ignored: Sequence[Ignored]) -> None:
    """Report on standard error the parts of a file that have no effect here."""
    if ignored:
        keys = ", ".join(f"{each.key} ({each.value})" for each in ignored)
        sys.stderr.write(f"penstock: of {path}, these have no effect here: {keys}\n")


def toml_value(text: str) -> Any:
    """Parse a value as in a device file; text that is not a value is a string."""
    try:
        return parse_toml(f"x = {text.strip()}")["x"]
    except ValueError:
        return text.strip()


def count(text: str, option: str) -> int:
    """Parse ``6.7e9`` as a whole number. Raises ConfigError."""
    try:
        value = int(text) if text.strip().isdigit() else float(text)
        whole = int(value)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{option} is {text!r}, not a number like 6.7e9") from error
    if whole != value or not 1 <= whole <= MAX_COUNT:
        raise ConfigError(
            f"{option} is {text!r}; it must be a whole number, 1 or more and at most 2^53 (9e15)"
        )
    return whole


def list_of(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
