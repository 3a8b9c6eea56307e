"""A plugin of pytest: tests that need a GPU run on the emulated device, and the order of all is judged.

``make test-device`` loads it. ``EMU_SCHEDULE`` and ``EMU_SEED`` say when the device does what it is told.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import emulator
import handovers
import kernels
import pytest
import torch

from penstock.testing.order import Order, watch

SCHEDULE = emulator.Schedule[os.environ.get("EMU_SCHEDULE", "lazy").upper()]
SEED = int(os.environ.get("EMU_SEED", "0"))


def pytest_configure(config: pytest.Config) -> None:
    torch.backends.cudnn.enabled = False
    # what is not filled shows by the checker; filling would order what is not ordered
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.cuda.init()
    kernels.install()
    handovers.install()
    _name_threads()


def pytest_report_header(config: pytest.Config) -> str:
    devices = torch.cuda.device_count()
    return (
        f"emulated device: torch {torch.__version__}, {devices} device{'s' * (devices > 1)},"
        f" {SCHEDULE.name.lower()}, seed {SEED}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    emulator.set_schedule(SCHEDULE, SEED)
    order = Order(emulator.recorded_by_allocator)
    for each in (watch, kernels.use, handovers.use):
        each(order)
    item.stash[ORDER] = order
    try:
        return (yield)
    finally:
        for each in (watch, kernels.use, handovers.use):
            each(None)


ORDER = pytest.StashKey[Order]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    result = yield
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    gc.collect()
    failures, kernels.failures[:] = kernels.failures.copy(), []
    assert not failures, f"kernels failed: {failures}"
    expected = item.get_closest_marker("disorderly")
    complaints = item.stash[ORDER].complaints
    if expected is None:
        assert not complaints, "\n".join(["accesses without an order:", *complaints])
    else:
        assert complaints, "the checker should have complained, and has not"
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
