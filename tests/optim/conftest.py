import pytest


@pytest.fixture
def small(disk_path, one_thread):
    """Settings of small tiles, so that borders lie inside parameters and tiles really move."""
    return {"flash": disk_path, "tile": 1024, "threads": 2}
