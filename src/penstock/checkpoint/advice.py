"""Advice on values that have no form in a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import fractions
import random
from collections import deque
from collections.abc import Mapping, Set
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import torch

_ADVICE: Final[tuple[tuple[Any, str], ...]] = (
    (enum.Enum, "give its .value, and make it anew of that"),
    (torch.Generator, "give its get_state(), and set_state() after the load"),
    (np.random.Generator, "give its bit_generator.state, and set that after the load"),
    (np.random.RandomState, "give list(its get_state()), and set_state() after the load"),
    (random.Random, "give its getstate(), and setstate() after the load"),
    (argparse.Namespace, "give vars(it)"),
    ((datetime.date, datetime.time), "give its isoformat()"),
    (datetime.timedelta, "give its total_seconds()"),
    (
        (decimal.Decimal, fractions.Fraction, np.datetime64, np.timedelta64, PurePath),
        "give str(it)",
    ),
    ((range, slice), "give its start, stop and step"),
    ((bytes, bytearray, memoryview), "give bytes(it)"),
    (deque, "give list(it)"),
    (Mapping, "give dict(it)"),
    (list, "give list(it)"),
    (Set, "give set(it)"),
    (str, "give str(it)"),
    (int, "give int(it)"),
    (float, "give float(it)"),
)


def advice_on(value: object) -> str:
    """In a few words."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "give dataclasses.asdict(it), and make it anew of that"
    if isinstance(value, tuple):
        return "give it._asdict()" if hasattr(value, "_asdict") else "give tuple(it)"
    for kind, advice in _ADVICE:
        if isinstance(value, kind):
            return advice
    if callable(value):
        return "leave it out: code is no state"
    return "give its state_dict(), convert it, or leave it out"
