"""Another engine in place of the process's shared one: to inject faults, delays and kills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.io.engine import Engine
from penstock.store.engine import replace_shared_engine


@contextmanager
def shared_engine_replaced(engine: Engine) -> Iterator[Engine]:
    """Let everything that is opened within use ``engine``; it is closed at the end.

    What was opened before keeps its engine. Close what was opened within before the end.
    """
    before = replace_shared_engine(engine)
    try:
        yield engine
    finally:
        replace_shared_engine(before)
        engine.close()
