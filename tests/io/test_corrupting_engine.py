"""An engine around an engine: all that an engine must do, and wrong bytes in what is read."""

import numpy as np
import pytest

from penstock.io import files
from penstock.io.engine import Request
from penstock.io.threads import ThreadEngine
from penstock.testing.corrupting_engine import CorruptingEngine
from penstock.testing.engines import EngineTests

PATIENCE_S = 20


class TestSpoiled(EngineTests):
    def make_engine(self, *, threads, piece_bytes, syscalls):
        return CorruptingEngine(
            ThreadEngine(threads, piece_bytes, syscalls=syscalls), lambda *_: None
        )

    def make_file(self, directory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PENSTOCK_BUFFERED_IO", "1")
            return files.open_unlinked(directory)


def moved(engine, op, file, memory):
    request = Request(
        op=op, file=file, offset_bytes=0, address=memory.ctypes.data, nbytes=memory.nbytes,
        keep_alive=memory,
    )  # fmt: skip
    return engine.submit(request)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_BUFFERED_IO", "1")
    made = files.open_unlinked(tmp_path)
    yield made
    made.close()


def test_what_is_read_is_changed_and_what_is_written_is_not(file):
    memory = np.arange(4096, dtype=np.uint8)
    seen = []

    def spoil(address, nbytes):
        seen.append((address, nbytes))
        memory[7] ^= 0xFF

    engine = CorruptingEngine(ThreadEngine(1), spoil)
    moved(engine, "write", file, memory).wait(PATIENCE_S)
    assert seen == []
    moved(engine, "read", file, memory).wait(PATIENCE_S)
    assert seen == [(memory.ctypes.data, 4096)]
    assert memory[7] == 7 ^ 0xFF
    engine.close()


def test_what_a_spoiler_raises_is_the_transfers_error(file):
    def spoil(*_):
        raise ValueError("no such word")

    memory = np.zeros(4096, np.uint8)
    engine = CorruptingEngine(ThreadEngine(1), spoil)
    moved(engine, "write", file, memory).wait(PATIENCE_S)
    with pytest.raises(ValueError, match="no such word"):
        moved(engine, "read", file, memory).wait(PATIENCE_S)
    engine.close()
