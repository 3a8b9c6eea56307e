"""One rank's flash is full, when an optimizer is made or in a step: it says so, and nothing is lost."""

from pathlib import Path

import rank_programs

HELP = (
    f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
    + """
import errno, time
from penstock import NoSpaceError, PenstockWarning
from penstock.core import fs
from weights_rig import scripted

room = fs.free_space_bytes
KINDS = "fsdp2", "ddp"
ADAM = {"lr": 1e-2, "flash": flash, "tile": 1024, "squeeze": False}

def made(kind, seed=0):
    # more tiles on each rank than stay in memory from step to step
    torch.manual_seed(seed)
    sizes = (20, 130), (130, 130), (130, 130), (130, 1)
    model = nn.Sequential(*(nn.Linear(*each) for each in sizes))
    return sharded(model) if kind == "fsdp2" else nn.parallel.DistributedDataParallel(model)

def values_of(model):
    return [local(each.detach()).clone() for each in model.parameters()]

def plain(kind, steps):
    model = made(kind)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), steps)
    return values_of(model)

def fill():
    fs.free_space_bytes = lambda path: 4096

def refused(request):
    if request.op != "write":
        return None
    refusals.append(request)
    return NoSpaceError(
        errno=errno.ENOSPC, op="write", path=request.file.path,
        offset_bytes=request.offset_bytes, nbytes=request.nbytes,
    )

def warned(told, words):
    return any(words in str(each.message) and flash in str(each.message) for each in told)
"""
)


def test_a_rank_without_room_for_states_says_so_and_all_ranks_can_go_on(disk_path):
    """And one that ends takes the others along, long before the group's 200 seconds, as torch has it."""
    rank_programs.run(
        disk_path,
        HELP
        + """
for kind in KINDS:
    model, error = made(kind), None
    before = values_of(model)
    if rank == 1:
        fill()
    try:
        optimizer = FlashAdamW(model.parameters(), **ADAM)
    except NoSpaceError as raised:
        error = str(raised)
    fs.free_space_bytes = room
    assert (error is not None) == (rank == 1)
    if rank == 1:
        assert flash in error and "are needed there" in error and "4.00 KiB are free" in error, error
    assert_same(values_of(model), before)
    if any(on_all(error is not None)):
        if error is None:
            optimizer.close()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train(model, optimizer, 3)
    assert_same(values_of(model), plain(kind, 3))
    assert os.listdir(flash) == []

model = made("fsdp2")
before = values_of(model)
if rank == 1:
    fill()
try:
    optimizer = FlashAdamW(model.parameters(), **ADAM)
    assert rank == 0
    begun = time.monotonic()
    train(model, optimizer, 1)
    raise AssertionError("trained alone")
except NoSpaceError:
    assert rank == 1
except RuntimeError as error:
    assert rank == 0 and time.monotonic() - begun < 100, error
assert_same(values_of(model), before)
open(f"{place}/done{rank}", "w").close()
os._exit(0)
""",
    )


def test_a_step_on_a_rank_whose_disk_is_full_is_completed_in_memory(disk_path):
    """States, and gradients that leave in backward, whose file may not even be made."""
    rank_programs.run(
        disk_path,
        HELP
        + """
cases = {
    "states": ({}, "states could not be written"),
    "in backward": ({"overlap": True}, "states could not be written"),
    "gradients": ({"gradient_memory": 0, "host_memory": "1GiB"}, "gradients that are to wait on flash"),
    "no file": ({"gradient_memory": 0, "host_memory": "1GiB"}, "gradients that are to wait on flash"),
}
for kind in KINDS:
    expected = plain(kind, 4)
    for name, (settings, words) in cases.items():
        refusals = []
        with scripted() as engine, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", PenstockWarning)
            model = made(kind)
            optimizer = FlashAdamW(model.parameters(), **ADAM, **settings)
            if kind == "ddp" and "overlap" in settings:
                optimizer.update_after(model)
            first = int(name != "no file")
            train(model, optimizer, first)
            assert not warned(told, words), name
            if rank == 1 and name == "no file":
                fill()
            elif rank == 1:
                engine.fault = refused
            train(model, optimizer, 1, first)
            assert warned(told, words) == (rank == 1), (kind, name, [str(each.message) for each in told])
            assert bool(refusals) == (rank == 1 and name != "no file"), (kind, name)
            engine.fault, fs.free_space_bytes = lambda request: None, room
            train(model, optimizer, 3 - first, first + 1)
            assert_same(values_of(model), expected)
            optimizer.close()
""",
    )


def test_a_step_that_one_rank_cannot_make_durable_is_made_durable_by_the_next_or_made_again(
    disk_path,
):
    rank_programs.run(
        disk_path,
        HELP
        + """
def begun(last):
    model = made("fsdp2")
    optimizer = FlashAdamW(model.parameters(), **ADAM, durable=True)
    train(model, optimizer, last - 1)
    if rank == 1:
        engine.fault = refused
    backward(model, last - 1)
    try:
        optimizer.step()
        assert rank == 0
    except NoSpaceError as error:
        assert rank == 1 and flash in str(error), error
    assert bool(refusals) == (rank == 1)
    optimizer.zero_grad()
    engine.fault = lambda request: None
    return model, optimizer

def resumed():
    model = made("fsdp2", seed=9)
    optimizer = FlashAdamW(model.parameters(), **ADAM, durable=True)
    return model, optimizer, optimizer.resume()

refusals = []
with scripted() as engine:
    model, optimizer = begun(2)
    train(model, optimizer, 1, first=2)  # nothing was applied by half
    assert_same(values_of(model), plain("fsdp2", 3))
    optimizer.close()
    model, optimizer, step = resumed()
    assert step == 3
    assert_same(values_of(model), plain("fsdp2", 3))
    optimizer.close()
    for name in os.listdir(flash):
        os.unlink(f"{flash}/{name}")
    _, optimizer = begun(3)
    optimizer.close()  # as if it ended here
    model, optimizer, step = resumed()
    assert step == 2
    train(model, optimizer, 2, first=2)
    assert_same(values_of(model), plain("fsdp2", 4))
    optimizer.close()
""",
    )
