"""Work in a thread of its own, also while the interpreter ends.

A pool of ``concurrent.futures`` takes nothing more once the main thread is done; but a save in the
background is waited for then, and has still to wait for the device. From Python 3.12 on no thread can be
started then either: what is to be done in one is done at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Made = TypeVar("Made")


def in_thread(name: str, work: Callable[[], Made], outcome: Future[Made]) -> None:
    """Do something in a thread of its own; in this one if the system starts none.

    The caller keeps the outcome before it calls this, so that Ctrl-C hides no thread. Work whose outcome
    is cancelled before it begins is not done; see ``cancel_all``.

    Args:
        name: Name of the thread.
        work: Called in the thread.
        outcome: Settled with what it returns or raises.
    """

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            made = work()
        except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
            outcome.set_exception(error)
        else:
            outcome.set_result(made)

    try:
        threading.Thread(target=run, name=name).start()
    except RuntimeError:  # there are as many as there may be, or the program ends
        run()


def cancel_all(outcomes: Iterable[Future[Any]]) -> None:
    """Cancel work that has not begun, and wait for the rest."""
    wait([each for each in outcomes if not each.cancel()])
