"""Durable steps over ranks: if one is killed in the middle of a step, all go on after the same one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rank_programs

RESUMED = """
import logging, signal, time
from penstock.optim.journal import Journal

def durable(**settings):
    model = sharded(network())
    return model, FlashAdamW(
        model.parameters(), lr=1e-2, flash=flash, tile=1024, durable=True, **settings
    )
"""

LATE = (
    RESUMED
    + """
# rank 0 completes steps 1 to 3; the journal of the last rank is that of step 2
model, a = durable(overlap=sys.argv[3] == "overlap")
assert a.resume() == 0
train(model, a, 2)
if rank == world - 1:
    Journal.write = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
try:
    train(model, a, 1, first=2)
except KeyboardInterrupt:
    assert rank == world - 1
a.close()
"""
)

AFTER = (
    RESUMED
    + """
model, a = durable(overlap=sys.argv[3] == "overlap")
try:
    train(model, a, 1)
    raise AssertionError("made a step over those of an earlier run")
except ConfigError as error:
    assert "call resume()" in str(error)
a.close()
model, a = durable()
said = []
logging.getLogger("penstock.optim").addFilter(lambda record: said.append(record.getMessage()))
assert a.resume() == 2
fate = "was torn" if rank == world - 1 else "was completed here and not by all ranks"
assert f"step 3 {fate}; resumed after step 2" in said[-1], said
train(model, a, 3, first=2)
theirs = sharded(network())
train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True), 5)
assert_same(model.parameters(), theirs.parameters())
a.close()
model, a = durable()
assert a.resume() == 5  # the step that rank 0 went back from is forgotten
assert_same(model.parameters(), theirs.parameters())
a.close()
"""
)


@pytest.mark.parametrize("kind", ["step", "overlap"])
def test_ranks_resume_at_the_newest_step_that_all_have(kind, disk_path):
    rank_programs.run(disk_path, LATE, 2, kind)
    rank_programs.run(disk_path, AFTER, 2, kind)


def test_a_first_step_that_others_have_not_is_forgotten_and_more_are_not(disk_path):
    rank_programs.run(
        disk_path,
        RESUMED
        + """
model, a = durable()
write = Journal.write
if rank:
    Journal.write = lambda *_: None
train(model, a, 1)
a.close()
model, a = durable()
assert a.resume() == 0
train(model, a, 2)
a.close()
model, a = durable()
try:
    a.resume()
    raise AssertionError("resumed")
except ConfigError as error:
    assert "rank 0: 2, 1; rank 1: none" in str(error), error
a.close()
""",
    )


KILLED = (
    RESUMED
    + """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model, a = durable()
done = a.resume()
assert done == (2 if attempt else 0), (attempt, done)
write = Journal.write

def dies(journal, entry):
    if entry.step == 3:
        while not os.path.exists(f"{place}/completed"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    write(journal, entry)

if rank == 1 and not attempt:
    Journal.write = dies
for step in range(done, 5):
    backward(model, step)
    a.step()
    a.zero_grad()
    if step == 2 and rank == 0:
        open(f"{place}/completed", "w").close()
theirs = sharded(network())
train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True), 5)
assert_same(model.parameters(), theirs.parameters())
a.close()
"""
)


@pytest.mark.slow
def test_a_rank_is_killed_in_a_step_and_torchrun_starts_all_again(disk_path):
    program = disk_path / "program.py"
    program.write_text(rank_programs.for_a_launcher(KILLED))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "--max-restarts", "1", str(program), str(disk_path)]
    done = subprocess.run(
        launcher,
        capture_output=True,
        text=True,
        timeout=280,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a store of its own for each attempt
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in Path(disk_path).glob("done*")} == {"done0", "done1"}
