"""Memory that weights are brought to."""

from types import SimpleNamespace

from penstock.core.units import MIB
from penstock.io.engine import Priority
from penstock.store.account import Account
from penstock.weights.brought import HostMemory


def home(nbytes):
    ticket = SimpleNamespace(window=SimpleNamespace(nbytes=nbytes))
    return SimpleNamespace(
        ticket=ticket, tier=SimpleNamespace(read=lambda *_, **__: SimpleNamespace())
    )


def test_a_read_ahead_that_has_no_room_frees_nothing(monkeypatch):
    monkeypatch.setenv("PENSTOCK_RESTORE_INTO", "arena")
    account = Account(6 * MIB)
    memory = HostMemory(account)
    first, _ = memory.begin(home(3 * MIB), Priority.PREFETCH, force=False)
    second, _ = memory.begin(home(3 * MIB), Priority.PREFETCH, force=False)
    memory.drop(first)
    assert account.used_bytes == 6 * MIB  # one page is idle, and one is shared with the second
    assert memory.begin(home(4 * MIB), Priority.PREFETCH, force=False) is None
    assert account.used_bytes == 6 * MIB
    assert memory.begin(home(4 * MIB), Priority.DEMAND, force=False) is None
    assert account.used_bytes == 4 * MIB  # so that less is taken beyond the limit
    memory.drop(second)
    memory.close()
    assert account.used_bytes == 0
