"""A plugin of pytest: tests that need a GPU run on the emulated device, and the order of all is judged.

``make test-device`` loads it. ``EMU_SCHEDULE`` and ``EMU_SEED`` say when the device does what it is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import emulated_operators
import emulator
import handovers
import pytest
import torch

from penstock.testing.access_order import AccessOrder, watch

SCHEDULE = emulator.Schedule[os.environ.get("EMU_SCHEDULE", "lazy").upper()]
SEED = int(os.environ.get("EMU_SEED", "0"))


def pytest_configure(config: pytest.Config) -> None:
    prepare()


def prepare() -> None:
    """Put kernels, handovers and names of threads in place; for the whole process."""
    torch.backends.cudnn.enabled = False
    # what is not filled shows by the checker; filling would order what is not ordered
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.cuda.init()
    emulated_operators.install()
    handovers.install()
    _name_threads()


def pytest_report_header(config: pytest.Config) -> str:
    devices = torch.cuda.device_count()
    return (
        f"emulated device: torch {torch.__version__}, {devices} device{'s' * (devices > 1)},"
        f" {SCHEDULE.name.lower()}, seed {SEED}"
    )


@contextlib.contextmanager
def judged() -> Iterator[AccessOrder]:
    """All that is done is judged."""
    emulator.set_schedule(SCHEDULE, SEED)
    order = AccessOrder(emulator.recorded_by_allocator)
    for each in (watch, emulated_operators.use, handovers.use):
        each(order)
    try:
        yield order
    finally:
        for each in (watch, emulated_operators.use, handovers.use):
            each(None)


def faults(order: AccessOrder) -> list[str]:
    """What went wrong so far; waits for the device."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    gc.collect()
    failures, emulated_operators.failures[:] = emulated_operators.failures.copy(), []
    return [*(f"a kernel failed: {failure}" for failure in failures), *order.complaints]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with judged() as order:
        if item.get_closest_marker("concurrent_streams"):
            emulator.set_schedule(emulator.Schedule.LAZY)
        item.stash[ORDER] = order
        return (yield)


ORDER = pytest.StashKey[AccessOrder]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    result = yield
    found = faults(item.stash[ORDER])
    assert not found, "\n".join(["the emulated device complains:", *found])
    return result


def _name_threads() -> None:
    """Tell the system the names of threads, so that the runtime can say who has called."""
    library = ctypes.CDLL(None)
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def named(self: threading.Thread) -> None:
        short = self.name.removeprefix("penstock-")
        text = ("P:" if short != self.name else "") + short
        library.pthread_setname_np(ctypes.c_void_p(threading.get_ident()), text.encode()[:15])
        begin(self)

    threading.Thread._bootstrap_inner = named  # type: ignore[attr-defined]
