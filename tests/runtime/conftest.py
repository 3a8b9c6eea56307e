"""What whole sessions on a device that runs behind need."""

import pytest
from lazy_device import LazyLink

from penstock.core.units import KIB, MIB
from penstock.runtime import stores
from penstock.runtime.cuda import accelerator


@pytest.fixture
def link(monkeypatch, small_knobs, one_thread):
    """Every device counts as one that runs behind, and its parts of host memory are small."""
    link = LazyLink()
    monkeypatch.setattr(stores, "_runs_behind", lambda device: True)
    monkeypatch.setattr(accelerator, "CudaLink", lambda device_type: link)
    monkeypatch.setattr(accelerator, "LEAST_STAGING_BYTES", 256 * KIB)
    monkeypatch.setattr(accelerator, "ALL_STAGING_BYTES", 10 * MIB)
    yield link
    link.end()
    assert not link.pinned
