"""Environment variables that Penstock reads: name, default, meaning. There are no others.

They are read at the time of use, so that tests and notebooks may change them. They tune the machinery;
budgets, directories and policies of a run are configuration, in :mod:`penstock.core.config`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeVar

from penstock.core.errors import ConfigError
from penstock.core.units import MIB, parse_bytes

Choice = TypeVar("Choice", bound=str)
_VERIFY: Final[tuple[Literal["full", "off", "sampled"], ...]] = ("full", "off", "sampled")
_GPU_DIRECT: Final[tuple[Literal["auto", "off", "on"], ...]] = ("auto", "off", "on")
_IO_ENGINE: Final[tuple[Literal["aio", "auto", "threads"], ...]] = ("aio", "auto", "threads")
_RESTORE_INTO: Final[tuple[Literal["arena", "auto", "heap"], ...]] = ("arena", "auto", "heap")
_OWN_POOL: Final[tuple[Literal["off", "on"], ...]] = ("off", "on")


def io_engine() -> Literal["aio", "auto", "threads"]:
    """``PENSTOCK_IO_ENGINE`` (auto): asynchronous system calls, or one thread per transfer."""
    return _choice("PENSTOCK_IO_ENGINE", "auto", _IO_ENGINE)


def io_threads(ranks: int = 1) -> int:
    """``PENSTOCK_IO_THREADS`` (6): transfers of one I/O engine in flight at once, and its threads.

    The default is divided by the ranks that share the flash, but is at least 2, one for each direction.

    With fewer, short transfers end before the engine's thread, which waits for the interpreter's lock
    for up to 5 ms, has submitted more; with many, a demand read waits for more bytes in flight.
    """
    return _positive_int("PENSTOCK_IO_THREADS", max(2, 6 // ranks))


def io_piece_bytes() -> int:
    """``PENSTOCK_IO_PIECE`` (4MiB): size of a ``preadv``/``pwritev``; an asynchronous call takes four."""
    return _size("PENSTOCK_IO_PIECE", 4 * MIB)


def buffered_io() -> bool:
    """``PENSTOCK_BUFFERED_IO`` (0): never use O_DIRECT, even where the file system allows it."""
    return os.environ.get("PENSTOCK_BUFFERED_IO", "0") not in ("", "0")


def slab_bytes() -> int:
    """``PENSTOCK_SLAB`` (256MiB): unit in which a flash tier preallocates its spill files."""
    return _size("PENSTOCK_SLAB", 256 * MIB)


def stripe_bytes() -> int:
    """``PENSTOCK_STRIPE`` (4MiB): unit in which a write is striped over several directories."""
    return _size("PENSTOCK_STRIPE", 4 * MIB)


def verify() -> Literal["full", "off", "sampled"]:
    """``PENSTOCK_VERIFY`` (sampled): checksum all writes, a sample or none, and compare when reading."""
    return _choice("PENSTOCK_VERIFY", "sampled", _VERIFY)


def gpu_direct() -> Literal["auto", "off", "on"]:
    """``PENSTOCK_GPU_DIRECT`` (auto): GPU to flash without host memory: if available, never, always."""
    return _choice("PENSTOCK_GPU_DIRECT", "auto", _GPU_DIRECT)


def own_pool() -> Literal["off", "on"]:
    """``PENSTOCK_OWN_POOL`` (off): on CUDA, restored tensors use a separate memory pool."""
    return _choice("PENSTOCK_OWN_POOL", "off", _OWN_POOL)


def restore_into() -> Literal["arena", "auto", "heap"]:
    """``PENSTOCK_RESTORE_INTO`` (auto): restore tensors into an arena or the process's heap."""
    return _choice("PENSTOCK_RESTORE_INTO", "auto", _RESTORE_INTO)


def floor_bytes() -> int:
    """``PENSTOCK_FLOOR`` (1MiB): storages smaller than this are never offloaded."""
    return _size("PENSTOCK_FLOOR", MIB)


def cache_directory() -> str:
    """``PENSTOCK_CACHE`` (~/.cache/penstock): directory of the indexes of data sets."""
    return os.path.expanduser(os.environ.get("PENSTOCK_CACHE") or "~/.cache/penstock")


def event_bytes() -> int:
    """``PENSTOCK_EVENT_MEMORY`` (4MiB): memory for the latest events of a session, for traces."""
    return _size("PENSTOCK_EVENT_MEMORY", 4 * MIB)


KNOBS: Final[Mapping[str, Callable[[], str | int | bool]]] = {
    "PENSTOCK_IO_ENGINE": io_engine,
    "PENSTOCK_IO_THREADS": io_threads,
    "PENSTOCK_IO_PIECE": io_piece_bytes,
    "PENSTOCK_BUFFERED_IO": buffered_io,
    "PENSTOCK_SLAB": slab_bytes,
    "PENSTOCK_STRIPE": stripe_bytes,
    "PENSTOCK_VERIFY": verify,
    "PENSTOCK_GPU_DIRECT": gpu_direct,
    "PENSTOCK_OWN_POOL": own_pool,
    "PENSTOCK_RESTORE_INTO": restore_into,
    "PENSTOCK_FLOOR": floor_bytes,
    "PENSTOCK_CACHE": cache_directory,
    "PENSTOCK_EVENT_MEMORY": event_bytes,
}
"""Reader of each variable; raises ConfigError for an invalid value."""
_MAX_DIGITS: Final = 18


def _choice(name: str, default: Choice, choices: tuple[Choice, ...]) -> Choice:
    text = os.environ.get(name, default)
    for choice in choices:
        if text == choice:
            return choice
    raise ConfigError(f"{name}={text!r} is none of {', '.join(choices)}")


def _positive_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not _is_number(text) or int(text) == 0:
        raise ConfigError(
            f"{name}={text[:40]!r} is not a positive whole number of at most {_MAX_DIGITS} digits"
        )
    return int(text)


def _size(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    size = parse_bytes(int(text) if _is_number(text) else text, what=name)
    if size == 0:
        raise ConfigError(f"{name}={text!r} must be positive")
    return size


def _is_number(text: str) -> bool:
    """Return True for plain digits, of a length that ``int`` takes."""
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
