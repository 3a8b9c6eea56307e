"""Is a data set whole? Every sample is read, checked where there are checksums, and decoded if asked."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.core.errors import PenstockError
from penstock.data.assemble import Assembler
from penstock.data.build import Opened
from penstock.data.formats import Progress
from penstock.data.scan import scan

_MOST_TOLD: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a verification."""

    samples: int
    data_bytes: int
    bad: int
    """Samples that cannot be read, have a wrong checksum, or do not decode."""
    first_bad: tuple[str, ...]
    """Reasons why the first of them are bad."""
    checksums: bool
    """True if there were any to compare."""
    seconds: float


def verify(opened: Opened, *, decode: bool = False, progress: Progress = lambda _: None) -> Verdict:
    """Read everything.

    Args:
        opened: The data set.
        decode: Decode each sample, too.
        progress: Told the share that is done.

    Raises:
        BudgetError: A record is longer than the memory for it.
        DatasetError: A file is missing.
    """
    started = time.perf_counter()
    values = Assembler(opened.index, opened.root, collate=list) if decode else None
    done, nbytes, bad = 0, 0, list[str]()
    count = 0
    for group in scan(opened):
        wrong = {row: _told(error) for row, error in group.bad.items()}
        for row in range(len(group.samples)) if values is not None else ():
            if row not in wrong:
                try:
                    values.samples(group, [row])  # type: ignore[union-attr]
                except PenstockError as error:
                    wrong[row] = _told(error)
        count += len(wrong)
        bad += [wrong[row] for row in sorted(wrong)][: _MOST_TOLD - len(bad)]
        done += len(group.samples)
        nbytes += int(np.maximum(group.nbytes, 0).sum())
        progress(done / opened.index.samples)
    return Verdict(
        samples=done,
        data_bytes=nbytes,
        bad=count,
        first_bad=tuple(bad),
        checksums=len(opened.index.sums) > 0,
        seconds=time.perf_counter() - started,
    )


def _told(error: Exception) -> str:
    return " ".join([str(error), *getattr(error, "__notes__", ())])
