"""Rank of this process in a distributed run, and its files and directories.

Launchers (torchrun, accelerate, DeepSpeed) start the same command several times and set ``RANK`` and
``WORLD_SIZE`` for each process, as ``torch.distributed`` expects them. Without names per rank, all
processes would write the same file at once. ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` count the processes
of one machine.
"""

from __future__ import annotations

import os
from typing import TypeVar

from penstock.core.errors import ConfigError

T = TypeVar("T")


def rank() -> int | None:
    """Return ``RANK`` if ``WORLD_SIZE`` is more than 1; ``None`` in a run of one process.

    Also ``None`` if they are not numbers that fit together: no launcher has set them.
    """
    try:
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return number if size > 1 and 0 <= number < size else None


def run_facts(name: str) -> dict[str, str]:
    """Return what tells a start or restart of torchrun from others, under a name; empty without it."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {} if run is None else {name: f"{run}, restart {restarts}"}


def world_size() -> int:
    """Return ``WORLD_SIZE``, the number of processes of the job; 1 without a launcher."""
    return 1 if rank() is None else int(os.environ["WORLD_SIZE"])


def local_processes() -> int:
    """Return ``LOCAL_WORLD_SIZE``, the number of processes on this machine; 1 without a launcher."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if rank() is not None and text.isdecimal() else 1


def local_rank() -> int | None:
    """Return ``LOCAL_RANK``, the index among the processes on this machine.

    ``None`` in a run of one process, or if the launcher does not set it.
    """
    text = os.environ.get("LOCAL_RANK", "")
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return int(text) if rank() is not None and is_number else None


def own_of(places: tuple[T, ...], local: int | None, processes: int) -> tuple[T, ...]:
    """Return the places of one local rank if each rank has its own.

    Args:
        places: Those of all ranks on the machine, in order; at least one.
        local: Index of the rank on the machine. With ``None`` it is alone and has all.
        processes: Number of ranks on the machine. If there are more of them than places, rank ``i`` has
            place ``i`` modulo the number of places; otherwise places are dealt out in turn.
    """
    if local is None or not places:
        return places
    dealt = places[local::processes] if local < processes else ()
    return dealt or (places[local % len(places)],)


def own_directories(places: tuple[T, ...], *, by_rank: bool) -> tuple[str, ...]:
    """Return all directories as strings, or with ``by_rank`` those of this rank.

    Raises ConfigError if the rank is not known on its machine.
    """
    if by_rank and rank() is not None and local_rank() is None:
        raise ConfigError(
            "flash_by_rank is set, but LOCAL_RANK is not in the environment: start the processes by"
            " torchrun, or set it to the index of each process on its machine"
        )
    own = own_of(places, local_rank(), local_processes()) if by_rank and places else places
    return tuple(str(each) for each in own)


def path_of_rank(path: str | os.PathLike[str]) -> str:
    """Return this rank's version of ``path``; ``path`` itself in a run of one process.

    The rank is put before the suffix: rank 1 writes ``log.rank1.jsonl`` for ``log.jsonl``,
    ``trace.rank1.json.gz`` for ``trace.json.gz``, and ``kept.rank1`` for a directory ``kept``.
    """
    number = rank()
    stem, suffix = os.path.splitext(path)
    if number is None:
        return os.fspath(path)
    if suffix == ".gz":
        stem, inner = os.path.splitext(stem)
        suffix = inner + suffix
    return f"{stem}.rank{number}{suffix}"
