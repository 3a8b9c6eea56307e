"""Random numbers of torch's CPU generator, drawn by several threads, bit for bit.

[Note: random numbers by pieces]
    torch draws the numbers of a tensor in one thread, which takes longer than writing them to flash. But
    the generator's state after so many numbers is known long before the numbers are: renewing the state
    takes a small part of the time (:mod:`.twister`). So a tensor is cut into pieces, each gets a
    generator with the state that it would find, and torch's own function fills them, each in a thread.

    How many numbers a function draws, and how a state is laid out, is torch's own affair. So before a
    function fills the first large tensor of a type by pieces, it fills a small one in both ways. If they
    differ in a bit, or their generators do, it fills no tensor of that type by pieces.

    Numba, which renews states, takes a second to load. So pieces begin when that pays.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import Parameter

from penstock.core.units import MIB

Draw = Callable[..., Tensor]
"""``Tensor.uniform_`` or ``Tensor.normal_``: fills a tensor and returns it."""

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Types of which each number takes 32 bits of the generator."""
_GROUP: Final = 16
"""Numbers that ``normal_`` makes at a time; it fills fewer in another way."""
_PIECE: Final = 1 << 18
"""Numbers of a piece, a multiple of these."""
_LEAST_BYTES: Final = 4 * MIB
"""Smaller tensors are filled by torch alone."""
_PAYS_AFTER: Final = 1 << 30
"""Numbers after which pieces pay: to load what computes states takes as long as they save in so many."""
_WORDS: Final = 624
_STATE: Final = np.dtype(
    {
        "names": ["left", "next", "words"],
        "formats": ["<i4", "<u8", f"({_WORDS},)<u8"],
        "offsets": [8, 16, 24],
        "itemsize": 24 + 8 * _WORDS,
    }
)
"""A generator's state, after its seed: one more than the words that are left, the next one, all words."""


def drawn(
    draw: Draw, tensor: Tensor, *args: Any, generator: Generator | None = None, **named: Any
) -> Tensor:
    """Fill a tensor as torch's function does, a large one by several threads.

    Args:
        draw: torch's function.
        tensor: Any shape, dtype and device.
        args: Of the distribution.
        generator: None: torch's default one.
        named: Of the distribution.

    Returns:
        The tensor.
    """
    threads = torch.get_num_threads()
    is_able = threads > 1 and _is_able(tensor)
    if not is_able or not _pays(tensor.numel()) or not _is_alike(draw, tensor.dtype):
        return draw(tensor, *args, generator=generator, **named)

    def fill(part: Tensor, generator: Generator) -> Tensor:
        return draw(part, *args, generator=generator, **named)

    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-draw") as pool:
        _fill(tensor, fill, generator, _PIECE, pool)
    return tensor


def _pays(count: int) -> bool:
    """Return whether so many more numbers are to be drawn by pieces. In any thread."""
    before = _seen[0]
    _seen[0] = before + count
    return before >= _PAYS_AFTER or "numba" in sys.modules


_seen: Final = [0]
"""Numbers of large tensors so far."""


def _is_able(tensor: Tensor) -> bool:
    """Return whether a tensor is large and may be filled by pieces."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.nbytes >= _LEAST_BYTES
        and tensor.dtype in _DTYPES
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and not (tensor.requires_grad and torch.is_grad_enabled())  # torch refuses it
    )


@cache
def _is_alike(draw: Draw, dtype: torch.dtype) -> bool:
    """Return whether a function fills a small tensor by pieces with the same bits, and its generator."""
    whole, by_pieces = (torch.zeros(5 * 1024 + 7, dtype=dtype) for _ in range(2))
    one, other = (Generator().manual_seed(1) for _ in range(2))
    for each in one, other:
        draw(torch.empty(100, dtype=dtype), generator=each)
    draw(whole, generator=one)
    with ThreadPoolExecutor(1) as pool:
        try:
            _fill(by_pieces, draw, other, 1024, pool)
        except (RuntimeError, ValueError):  # a state of another layout
            return False
    same = torch.equal(whole.view(torch.uint8), by_pieces.view(torch.uint8))
    return same and torch.equal(one.get_state(), other.get_state())


def _fill(
    tensor: Tensor, draw: Draw, generator: Generator | None, piece: int, pool: ThreadPoolExecutor
) -> None:
    generator = torch.default_generator if generator is None else generator
    flat = tensor.detach().view(-1)
    begins = range(0, max(1, flat.numel() - _GROUP + 1), piece)
    own = [Generator().set_state(state) for state in _states(generator, begins)]
    draw(flat[begins[-1] :], generator=own[-1])
    generator.set_state(own[-1].get_state())  # early: another thread may draw, too
    filled = [
        pool.submit(draw, flat[begin : begin + piece], generator=each)
        for begin, each in zip(begins[:-1], own, strict=False)
    ]
    for each in filled:
        each.result()


def _states(generator: Generator, counts: Iterable[int]) -> Iterator[Tensor]:
    """Yield the states of a generator after so many numbers of 32 bits, which increase."""
    twist = importlib.import_module("penstock.weights.twister").twist  # Numba takes long to load
    state = generator.get_state().numpy()
    record = state[: _STATE.itemsize].view(_STATE)
    words = record["words"][0].astype(np.uint32)
    before = 0
    for count in counts:
        more, left = count - before, int(record["left"][0]) - 1
        if more <= left:
            record["next"] += np.uint64(more)
            record["left"] -= more
        else:
            times, over = divmod(more - left - 1, _WORDS)
            twist(words, times + 1)
            record["words"], record["next"], record["left"] = words, over + 1, _WORDS - over
        before = count
        yield torch.from_numpy(state.copy())
