"""In which form a tile's states rest: which arrays a record has, how each is packed, how long it is.

======== =============================== ===================================== ====================
format   master                          states                                error
======== =============================== ===================================== ====================
exact    float32; none where the weight  as torch keeps them                   none
         is the master
split    16 bits beside a bfloat16       float32                               none
         weight, and a bitmap of ties
bf16     16 bits beside a bfloat16       bfloat16, rounded at random           less than 2^-7 of
         weight; none beside float32                                           the value, 0 on average
int8     the same                        8-bit floats, 256 to an exponent      less than 2^-3 of the
                                                                               value, or 2^-14 of the
                                                                               largest of 256
======== =============================== ===================================== ====================

An unsigned state, such as a variance, has 2^-30 in place of 2^-14, and is never rounded to zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from penstock.core.errors import ConfigError
from penstock.core.units import round_up

UNIT: Final = 256
"""Elements. A parameter begins in its tile, and is cut, at multiples of this: torch then rounds the
elements of a piece as those of the whole (its vectors are shorter), and 8-bit blocks are the same."""

RECORD_BYTES: Final = 4096
"""A record's length is a multiple of this: of every file's granule."""

Packing = Literal["plain", "bfloat16", "float8", "unsigned8", "low", "low+ties"]

FORMATS: Final = ("exact", "split", "bf16", "int8")
_PACKED: Final[dict[str, Packing]] = {"bf16": "bfloat16", "int8": "float8"}
_HALVES: Final = (torch.bfloat16, torch.float16)
MASTER: Final = "master"
"""The array of the master, in records and in state dicts."""

SIGNED: Final[dict[str, bool]] = {
    **{"exp_avg": True, "momentum_buffer": True, "grad_avg": True, "exp_avg_sq": False},
    **{"max_exp_avg_sq": False, "sum": False, "square_avg": False, "acc_delta": False},
}
"""States that may be packed, by torch's name: whether they can be negative."""


@dataclass(frozen=True, slots=True)
class State:
    """One state of an optimizer that has a value for each parameter."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a record."""

    name: str
    packing: Packing
    dtype: torch.dtype
    """Dtype of its elements when unpacked."""
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Form:
    """Parts of a tile's record, for any length of the tile."""

    format: str
    param_dtype: torch.dtype
    states: tuple[State, ...]
    master: Packing | None
    """How the master is kept; None: the weight is the master."""
    master_dtype: torch.dtype = torch.float32
    """Dtype of the values updated: float32, or the parameters' own where the master is a copy of them."""

    def arrays(self, elements: int) -> tuple[Array, ...]:
        """The arrays of a record of so many elements, a multiple of ``UNIT``, one after another."""
        found: list[Array] = []
        offset = 0
        for name, packing, dtype in self._parts():
            nbytes = packed_bytes(packing, dtype, elements)
            found.append(Array(name, packing, dtype, offset, nbytes))
            offset = round_up(offset + nbytes, 64)
        return tuple(found)

    def record_bytes(self, elements: int) -> int:
        """Length of a record; 0 if there is nothing to keep."""
        arrays = self.arrays(elements)
        return round_up(arrays[-1].offset_bytes + arrays[-1].nbytes, RECORD_BYTES) if arrays else 0

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of one parameter's states on flash, without padding."""
        elements = 1 << 20
        return sum(
            packed_bytes(packing, dtype, elements) for _, packing, dtype in self._parts()
        ) / (elements)

    def _parts(self) -> Iterable[tuple[str, Packing, torch.dtype]]:
        if self.master is not None:
            yield MASTER, self.master, self.master_dtype
        packed = _PACKED.get(self.format, "plain")
        for state in self.states:
            if packed == "float8" and not SIGNED[state.name]:
                yield state.name, "unsigned8", state.dtype
            else:
                yield state.name, packed, state.dtype


def form_of(
    format_name: str,
    param_dtype: torch.dtype,
    states: Sequence[State],
    *,
    with_master: bool,
    whole_master: bool,
    where: str,
) -> Form:
    """The form of a group's records.

    Args:
        format_name: One of ``FORMATS``.
        param_dtype: Of the group's parameters.
        states: What the optimizer keeps for each parameter, of which the dtypes are those beside
            the master.
        with_master: True if a parameter of 16 bits has a float32 master.
        whole_master: True if every bit of the master is kept, even where the weight has some: what
            survives a crash, and what the host does not hold.
        where: Which group, for errors.

    Raises:
        ConfigError: The format does not exist, or is not for these parameters or states.
    """
    if format_name not in FORMATS:
        raise ConfigError(f"{where}: format {format_name!r} is none of {', '.join(FORMATS)}")
    if format_name == "split" and param_dtype != torch.bfloat16:
        raise ConfigError(
            f"{where}: format 'split' keeps the lower half of a master beside a bfloat16 weight, and"
            f" these are {param_dtype}; make the model bfloat16, or use 'exact'"
        )
    if format_name != "exact":
        _check_packable(format_name, param_dtype, states, where)
    master: Packing | None = None
    if whole_master or (param_dtype in _HALVES and with_master):
        master = "plain"
        if not whole_master and param_dtype == torch.bfloat16 and format_name != "exact":
            master = "low+ties" if format_name == "split" else "low"
    stepped = stepped_dtype(param_dtype, with_master=with_master)
    return Form(format_name, param_dtype, tuple(states), master, stepped)


def stepped_dtype(param_dtype: torch.dtype, *, with_master: bool) -> torch.dtype:
    """Return the dtype that is updated: the parameters', or float32 for masters of 16-bit ones."""
    return torch.float32 if with_master and param_dtype in _HALVES else param_dtype


def _check_packable(
    format_name: str, param_dtype: torch.dtype, states: Sequence[State], where: str
) -> None:
    if param_dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"{where}: format {format_name!r} is for float32 and bfloat16 parameters, and these are"
            f" {param_dtype}; use 'exact'"
        )
    for state in states:
        if format_name in _PACKED and (state.name not in SIGNED or state.dtype != torch.float32):
            raise ConfigError(
                f"{where}: format {format_name!r} cannot keep the state {state.name!r} of"
                f" {state.dtype}; it knows float32 {', '.join(SIGNED)}; use 'exact'"
            )


def packed_bytes(packing: Packing, dtype: torch.dtype, elements: int) -> int:
    """Return the bytes that ``elements``, a multiple of ``UNIT``, take."""
    match packing:
        case "bfloat16" | "low":
            return 2 * elements
        case "float8" | "unsigned8":
            return elements + elements // UNIT
        case "low+ties":
            return 2 * elements + elements // 8
        case "plain":
            return dtype.itemsize * elements
