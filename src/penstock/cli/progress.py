"""Progress of a long command, on standard error: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from penstock.cli.output import say
from penstock.observe.clients import close_account, open_account
from penstock.observe.events import Stage
from penstock.observe.recorder import Recorder

_EVERY_S: Final = 5.0
"""Time between two lines."""
_LOOK_EVERY_S: Final = 0.2
"""Time between two looks at what has moved."""


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """Yield a function, for any thread, that is told the finished share, from 0 to 1."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _lines(what: str) -> Callable[[float], None]:
    told_s = time.monotonic()

    def tell(share: float) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _EVERY_S:
            told_s = time.monotonic()
            say(f"{what}: {share:.0%}")

    return tell


@contextmanager
def progress_of_bytes(what: str, total: int) -> Iterator[None]:
    """Show which share of ``total`` bytes has been read and written by clients of flash in the block.

    No session may be open meanwhile. Files in memory count as nothing.
    """
    recorder, ended = Recorder(event_bytes=0), threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            tell(_moved_share(recorder, total))

    with progress(what) as tell:
        looking = threading.Thread(target=look, name="penstock-progress", daemon=True)
        open_account(recorder)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()
            close_account(recorder)
            tell(_moved_share(recorder, total))


def _moved_share(recorder: Recorder, total: int) -> float:
    flows = recorder.snapshot().flows.items()
    moved = sum(flow.nbytes for (stage, _), flow in flows if stage in (Stage.READ, Stage.WRITE))
    return min(1.0, moved / max(1, total))
