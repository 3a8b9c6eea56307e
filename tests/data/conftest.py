import numpy as np
import pytest


@pytest.fixture(autouse=True)
def indexes_apart(tmp_path, monkeypatch):
    """Indexes of tests are kept with the tests' data."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "indexes"))


@pytest.fixture
def rows(disk_path):
    """``rows(count, length)``: a .npy file of uint8 rows that begin with their number; path, array."""

    def make(count, length=512, name="rows.npy"):
        array = np.random.default_rng(count).integers(0, 256, (count, length), np.uint8)
        array[:, :4] = np.arange(count, dtype="<u4")[:, None].view(np.uint8)
        path = disk_path / "set" / name
        path.parent.mkdir(exist_ok=True)
        np.save(path, array)
        return path, array

    return make
