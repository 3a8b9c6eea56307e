"""This process's rank in a distributed run, and the files of its own that it writes there.

Launchers (torchrun, accelerate, DeepSpeed) start the same command several times and tell each process its
``RANK`` and the ``WORLD_SIZE``, as ``torch.distributed`` expects them. What is one file in a run of one
process would be written by all of them at once.
"""

from __future__ import annotations

import os


def rank() -> int | None:
    """Return ``RANK`` where ``WORLD_SIZE`` is more than 1; ``None`` in a run of one process.

    ``None``, too, where they are not numbers that fit together: no launcher has set them.
    """
    try:
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return number if size > 1 and 0 <= number < size else None


def of_rank(path: str | os.PathLike[str]) -> str:
    """Return the path that this rank uses where ``path`` was named; ``path`` in a run of one process.

    The rank stands before the suffix: rank 1 writes ``log.rank1.jsonl`` for ``log.jsonl``,
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
