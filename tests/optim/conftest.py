import pytest

from penstock.store.account import host_account


@pytest.fixture(autouse=True)
def memory_is_given_back():
    """What a test has closed or dropped is out of the account without a collection, after errors too."""
    account = host_account()
    before = account.used_bytes
    yield
    assert account.used_bytes <= before, account.held_by()


@pytest.fixture
def small(disk_path, one_thread):
    """Settings of small tiles, so that borders lie inside parameters and tiles really move."""
    return {"flash": disk_path, "tile": 1024, "threads": 2}
