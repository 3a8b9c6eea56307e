"""The engine of host memory. Order, priorities and pieces are those of every engine of threads."""

from concurrent.futures import CancelledError

import pytest

from penstock.core.errors import ClosedError
from penstock.core.units import KIB
from penstock.io.copies import MEMORY, CopyEngine
from penstock.io.engine import Request
from penstock.testing.engines import aligned


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setenv("PENSTOCK_IO_PIECE", "4KiB")
    engine = CopyEngine("copies")
    yield engine
    engine.close()


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("nbytes", [5, 20_001])
def test_pieces_make_the_whole_at_any_address(engine, op, nbytes):
    memory, other = aligned(64 * KIB, seed=4), aligned(64 * KIB, seed=5)
    before, after = memory.copy(), other.copy()
    request = Request(
        op=op,
        file=MEMORY,
        offset_bytes=other.ctypes.data + 7,
        address=memory.ctypes.data + 3,
        nbytes=nbytes,
        keep_alive=(memory, other),
    )
    assert engine.submit(request).wait(20) == nbytes
    if op == "write":
        after[7 : 7 + nbytes] = before[3 : 3 + nbytes]
    else:
        before[3 : 3 + nbytes] = after[7 : 7 + nbytes]
    assert (memory == before).all()
    assert (other == after).all()


def test_closed(engine):
    memory = aligned(64 * KIB)
    request = Request(
        op="read",
        file=MEMORY,
        offset_bytes=memory.ctypes.data,
        address=memory.ctypes.data + 32 * KIB,
        nbytes=32 * KIB,
        keep_alive=memory,
    )
    transfer = engine.submit(request)
    engine.close()
    assert transfer.done
    assert transfer.error is None or isinstance(transfer.error, CancelledError)
    with pytest.raises(ClosedError, match="I/O engine is closed"):
        engine.submit(request)
