"""Rank of this process in a distributed run, and names of files per rank.

Launchers (torchrun, accelerate, DeepSpeed) start the same command several times and set ``RANK`` and
``WORLD_SIZE`` for each process, as ``torch.distributed`` expects them. Without names per rank, all
processes would write the same file at once.
"""

from __future__ import annotations

import os


def rank() -> int | None:
    """Return ``RANK`` if ``WORLD_SIZE`` is more than 1; ``None`` in a run of one process.

    Also ``None`` if they are not numbers that fit together: no launcher has set them.
    """
    try:
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return number if size > 1 and 0 <= number < size else None


def local_processes() -> int:
    """Return ``LOCAL_WORLD_SIZE``, the number of processes on this machine; 1 without a launcher."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if rank() is not None and text.isdecimal() else 1


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
