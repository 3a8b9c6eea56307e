"""What tests share: hypothesis without a stop watch, a directory on a disk, GPU tests on GPUs."""

import os
import tempfile
from pathlib import Path

import pytest

from penstock.io.files import filesystem_of

try:
    from hypothesis import settings
except ImportError:  # scripts/gpu_check runs with what is there, and tests/gpu does without
    pass
else:
    # a busy machine is no failure; in CI the examples are the same in every run
    in_ci = os.environ.get("CI") == "true"
    settings.register_profile("penstock", deadline=None, derandomize=in_ci)
    settings.load_profile("penstock")


@pytest.fixture
def disk_path(tmp_path):
    """A fresh directory that a flash tier accepts, also where ``/tmp`` is in memory."""
    if not filesystem_of(tmp_path).is_memory:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
