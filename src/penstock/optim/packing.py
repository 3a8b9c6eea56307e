"""A record's arrays as tensors to compute with, and back. Kernels are loaded when first needed."""

from __future__ import annotations

import importlib
import struct
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from penstock.optim.formats import MASTER, UNIT, Array


def load_kernels() -> Any:
    """The Numba kernels: a second, once, and not where states are plain."""
    return importlib.import_module("penstock.optim.kernels")


def random_key(seed: int, step: int, param: int, state: int) -> int:
    """Return the 32-bit key of the rounding of one state of one parameter in one step."""
    return xxhash.xxh32_intdigest(struct.pack("<4q", seed, step, param, state))


def plain(array: Array, memory: NDArray[np.uint8], at: int, count: int) -> Tensor:
    """Elements of an array that is not packed, as a view of the record."""
    first = array.offset_bytes + at * array.dtype.itemsize
    raw = torch.from_numpy(memory[first : first + count * array.dtype.itemsize])
    return raw.view(array.dtype)


def bits_of(values: Tensor) -> NDArray[Any]:
    """Return the bits of float32 or bfloat16 values on the host, as unsigned integers of that size."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    return values.numpy().view(np.uint32)


def is_copy(array: Array, weight: Tensor) -> bool:
    """Return whether an array is a master that merely repeats the weight, which is the master."""
    return (
        array.name == MASTER
        and array.packing == "plain"
        and weight.dtype == array.dtype
        and weight.device.type == "cpu"
    )


def unpack(array: Array, memory: NDArray[np.uint8], at: int, out: NDArray[np.uint32]) -> None:
    """Elements of a packed state as float32 bits, from a multiple of ``UNIT`` on."""
    kernels = load_kernels()
    count = out.size
    if array.packing == "bfloat16":
        kernels.from_bfloat16(halves(array, memory, at, count), out)
        return
    kernels.from_float8(*codes(array, memory, at, count), out, array.packing == "float8")


def pack(
    array: Array,
    memory: NDArray[np.uint8],
    at: int,
    values: NDArray[np.uint32],
    *,
    key: int,
    first: int,
) -> None:
    """The inverse of ``unpack``, rounding at random; ``first``: the index of the first element."""
    kernels = load_kernels()
    key32, first32 = np.uint32(key), np.uint32(first & 0xFFFFFFFF)
    if array.packing == "bfloat16":
        kernels.to_bfloat16(values, halves(array, memory, at, values.size), key32, first32)
        return
    found, exponents = codes(array, memory, at, values.size)
    kernels.to_float8(values, found, exponents, key32, first32, array.packing == "float8")


def join(
    array: Array,
    memory: NDArray[np.uint8],
    at: int,
    weights: NDArray[np.uint16],
    out: NDArray[np.uint32],
) -> None:
    """Masters of bfloat16 weights, as float32 bits."""
    low = halves(array, memory, at, out.size)
    if array.packing == "low":
        load_kernels().join(weights, low, out)
    else:
        load_kernels().join_even(weights, low, _ties(array, memory, at, out.size), out)


def cut(
    array: Array,
    memory: NDArray[np.uint8],
    at: int,
    masters: NDArray[np.uint32],
    weights: NDArray[np.uint16],
) -> None:
    """The inverse of ``join``: writes the weights, too."""
    low = halves(array, memory, at, masters.size)
    if array.packing == "low":
        load_kernels().cut(masters, weights, low)
    else:
        ties = _ties(array, memory, at, masters.size)
        load_kernels().cut_even(masters, weights, low, ties)


def halves(array: Array, memory: NDArray[np.uint8], at: int, count: int) -> NDArray[np.uint16]:
    """Elements of an array of 16 bits each, as a view of the record."""
    first = array.offset_bytes + 2 * at
    return memory[first : first + 2 * count].view(np.uint16)


def _ties(array: Array, memory: NDArray[np.uint8], at: int, count: int) -> NDArray[np.uint8]:
    elements = array.nbytes * 8 // 17  # two bytes and a bit each
    first = array.offset_bytes + 2 * elements + at // 8
    return memory[first : first + -(-count // 8)]


def codes(
    array: Array, memory: NDArray[np.uint8], at: int, count: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Elements of an array of 8-bit floats, and the exponents of their blocks, as views of the record."""
    elements = array.nbytes * UNIT // (UNIT + 1)  # a byte each, and one for all of a block
    first = array.offset_bytes + at
    block = array.offset_bytes + elements + at // UNIT
    blocks = -(-count // UNIT)
    return memory[first : first + count], memory[block : block + blocks]
