"""Work in a thread of its own, also while the interpreter ends.

A pool of ``concurrent.futures`` takes nothing more once the main thread is done; but a save in the
background is waited for then, and has still to wait for the device. From Python 3.12 on no thread can be
started then either: what is to be done in one is done at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Made = TypeVar("Made")


def in_thread(name: str, work: Callable[[], Made]) -> Future[Made]:
    """Do something in a thread of its own; in this one if the system starts none.

    Args:
        name: Of the thread.
        work: Is called there.

    Returns:
        What comes of it, or what it raises.
    """
    future: Future[Made] = Future()

    def run() -> None:
        try:
            made = work()
        except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
            future.set_exception(error)
        else:
            future.set_result(made)

    try:
        threading.Thread(target=run, name=name).start()
    except RuntimeError:  # there are as many as there may be, or the program ends
        run()
    return future
