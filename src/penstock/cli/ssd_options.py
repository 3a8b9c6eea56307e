"""What the commands of ``penstock ssd`` have in common: a device, its fields, lists, counts."""

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

MOST: Final = 2**53
"""A count: as far as floats know every whole number."""


def add_fields(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``."""
    parser.add_argument(
        "--set", metavar="TABLE.FIELD=VALUE", action="append", default=[],
        help="set a field of the device, as geometry.channels=16; repeat it for several",
    )  # fmt: skip


def known_devices() -> str:
    """For a help text."""
    return f"{', '.join(presets())}; or a file, NAME.toml; or MQSim's, NAME.xml"


def device_of(name: str, settings: list[str]) -> Device:
    """A device with what ``--set`` changes; tells what of MQSim's file is ignored. Raises ConfigError."""
    if is_mqsim(name):
        device, ignored = read_device(name)
        name_ignored(name, ignored)
    else:
        device = load(name)
    for setting in settings:
        path, sign, value = setting.partition("=")
        if not sign:
            raise ConfigError(f"--set {setting!r} has no value; write it as geometry.channels=16")
        device = with_field(device, path.strip(), toml_value(value))
    return device


def name_ignored(path: str, ignored: Sequence[Ignored]) -> None:
    """Tell on standard error what of a file has no effect here."""
    if ignored:
        told = ", ".join(f"{each.key} ({each.value})" for each in ignored)
        sys.stderr.write(f"penstock: of {path}, these have no effect here: {told}\n")


def toml_value(text: str) -> Any:
    """A value as a device file has it; what is none is a string."""
    try:
        return parse_toml(f"x = {text.strip()}")["x"]
    except ValueError:
        return text.strip()


def count(text: str, option: str) -> int:
    """``6.7e9`` as a whole number. Raises ConfigError."""
    try:
        value = int(text) if text.strip().isdigit() else float(text)
        whole = int(value)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{option} is {text!r}, not a number, as 6.7e9") from error
    if whole != value or not 1 <= whole <= MOST:
        raise ConfigError(
            f"{option} is {text!r}, it must be a whole number, 1 or more and at most 2^53 (9e15)"
        )
    return whole


def list_of(text: str) -> list[str]:
    """Words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
