"""One rank's flash is full: that rank says so, the others do not hang, and no weight is lost."""

from pathlib import Path

import pytest

import rank_programs

FULL = (
    rank_programs.WEIGHTS
    + """
import errno, time
from penstock import NoSpaceError, PenstockWarning
from penstock.core import fs
from penstock.store import blob

def check_when_full(*args):
    fs.free_space_bytes = lambda path: 4096
    fs.check_space(*args)

def fill():
    # no room for what the session may spill; or none for weights; or others take it after the check
    if sys.argv[3] == "spilled":
        fs.free_space_bytes = lambda path: 4096
    elif sys.argv[3] == "homes":
        blob.check_space = check_when_full
    else:
        def refuse(fd, offset, nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate = refuse

def assert_clear(error):
    assert flash in str(error), error
    assert "another directory" in str(error), error
    if sys.argv[3] != "taken":
        assert "4.00 KiB are free" in str(error), error
    if sys.argv[3] == "homes":
        assert "the homes of weights take" in str(error), error

def assert_nothing_is_left():
    assert os.listdir(flash) == []

before = values_of(sharded(wide()))
plain = sharded(wide())
expected = steps(plain, sgd(plain), 3)
"""
)


@pytest.mark.parametrize("kind", ["spilled", "homes", "taken"])
def test_all_ranks_can_go_on_in_memory(disk_path, kind):
    rank_programs.run(
        disk_path,
        FULL
        + """
model = sharded(wide())
optimizer = sgd(model)
if rank == 1:
    fill()
session, error = session_of(model), None
try:
    session.__enter__()
except NoSpaceError as raised:
    error = raised
assert (error is not None) == (rank == 1)
if rank == 1:
    assert_clear(error)
    assert all(home_of(each) is None for each in model.parameters())
    assert_same(values_of(model), before)
if any(on_all(error is not None)) and error is None:
    session.__exit__(None, None, None)
assert_same(steps(model, optimizer, 3), expected)
assert_same(values_of(model), values_of(plain))
assert_nothing_is_left()
""",
        2,
        kind,
    )


@pytest.mark.parametrize("kind", ["homes", "taken"])
def test_a_rank_that_ends_takes_the_others_along(disk_path, kind):
    """As torch has it: a peer that has ended is an error, long before the group's 200 seconds."""
    rank_programs.run(
        disk_path,
        FULL
        + """
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{place}/meet again", rank=rank, world_size=world)
model = sharded(wide())
if rank == 1:
    fill()
try:
    with session_of(model):
        assert rank == 0
        begun = time.monotonic()
        steps(model, sgd(model), 1)
except NoSpaceError as error:
    assert rank == 1
    assert_clear(error)
    open(f"{place}/done{rank}", "w").close()
    os._exit(0)
except RuntimeError as error:
    assert time.monotonic() - begun < 100, error
assert_same(values_of(model), before)
assert_nothing_is_left()
open(f"{place}/done{rank}", "w").close()
os._exit(0)
""",
        2,
        kind,
    )


def test_weights_that_a_full_device_does_not_take_stay_in_memory_and_ranks_go_on(disk_path):
    rank_programs.run(
        disk_path,
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        + FULL
        + """
from weights_rig import scripted

def refused(request):
    if request.op != "write":
        return None
    return NoSpaceError(
        errno=errno.ENOSPC, op="write", path=request.file.path,
        offset_bytes=request.offset_bytes, nbytes=request.nbytes,
    )

with scripted() as engine, warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    model = sharded(wide())
    optimizer = sgd(model)
    session = session_of(model)
    session.__enter__()
    found = steps(model, optimizer, 1)
    if rank == 1:
        engine.fault = refused
    found += steps(model, optimizer, 2, first=1)
    try:
        session.__exit__(None, None, None)
        assert rank == 0
    except NoSpaceError as error:
        assert rank == 1
        assert flash in str(error)
texts = [str(each.message) for each in warned if issubclass(each.category, PenstockWarning)]
assert any("could not be written home" in text and flash in text for text in texts) == (rank == 1)
assert_same(found, expected)
assert_same(values_of(model), values_of(plain))
assert_nothing_is_left()
""",
    )
