"""``penstock run`` on two ranks: a signal to one of them suspends both after the same step."""

import json
import os
import re
import signal
import subprocess
import textwrap

import pytest
from cli_processes import agent_of_two_ranks, end

import preloaded

TRAIN = """
    import os, sys, time, torch
    from torch.distributed import all_reduce, broadcast_object_list, init_process_group
    from penstock.checkpoint import Checkpointer, training_state
    torch.set_num_threads(1)
    torch.manual_seed(0)
    init_process_group("gloo")
    rank, steps = torch.distributed.get_rank(), int(os.environ["STEPS"])
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    first, checkpoints = 0, None
    if "own" in sys.argv and rank == 0:  # the others get from it what they need
        checkpoints = Checkpointer("run")
        resumed = checkpoints.load(training_state(model=model, optimizer=optimizer))
        first = 0 if resumed is None else resumed["step"]
    if "own" in sys.argv:
        found = [first, model.state_dict(), optimizer.state_dict()]
        broadcast_object_list(found, src=0)
        first = found[0]
        model.load_state_dict(found[1])
        optimizer.load_state_dict(found[2])
    for step in range(first, steps):
        features = torch.randn(4, 256, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        time.sleep(0.02)  # few lines fit in a pipe
        wrapped(features).square().mean().backward()
        optimizer.step()
        print(step, flush=True)
        due = [checkpoints.due(step + 1) if checkpoints else None]
        if "own" in sys.argv:
            broadcast_object_list(due, src=0)
            if due[0] and rank == 0:
                state = training_state(model=model, optimizer=optimizer, step=step + 1)
                checkpoints.save(step + 1, state)
            torch.distributed.barrier()
    print("sum", sum(float(each.detach().double().sum()) for each in model.parameters()), flush=True)
    """
FOR_EVER = 1_000_000
PENSTOCK = ["-c", "import sys; from penstock.cli import main; sys.exit(main())"]


@pytest.fixture
def work(disk_path):
    (disk_path / "spill").mkdir()
    (disk_path / "train.py").write_text(textwrap.dedent(TRAIN))
    return disk_path


def start_both(work, agent, *words, steps=FOR_EVER, resume=False):
    options = (
        "--flash",
        "spill",
        "--flash-capacity",
        "1GiB",
        "--state",
        "kept",
        "--policy",
        "keep",
    )
    options += ("--resume",) if resume else ()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*PENSTOCK, "run", *options, "train.py", *words]
    return [
        preloaded.Process(
            command, cwd=work, env={**os.environ, **each, "STEPS": str(steps)}, **pipes
        )
        for each in agent
    ]


def read_line(stream, pattern):
    lines = []
    for line in stream:
        lines.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError(f"it ended without {pattern!r}: {''.join(lines)}")


def suspended_steps(work, ranks, asked):
    """Ask one rank; return the steps after which the ranks sleep, by their records."""
    ranks[asked].send_signal(signal.SIGUSR1)
    for process in ranks:
        assert "resumes it and all other ranks" in read_line(process.stderr, "suspended process")
    records = [json.loads((work / f"kept.rank{rank}/run.json").read_text()) for rank in (0, 1)]
    return [record.get("steps", record.get("step")) for record in records]


def trained_for(ranks, step):
    for process in ranks:
        read_line(process.stdout, f"^{step}$")


def kill(ranks):
    for process in ranks:
        process.kill()
        process.communicate()


def test_both_ranks_sleep_and_wake_together_and_resume_with_the_same_bits(work):
    """What is repeated undisturbed is compared with ranks that have slept before.

    One rank has the record of the first sleep, as if it was killed before it wrote that of the second.
    """
    with agent_of_two_ranks() as agent:
        ranks = start_both(work, agent)
        try:
            trained_for(ranks, 2)
            first = suspended_steps(work, ranks, asked=0)
            assert first[0] == first[1]
            record = work / "kept.rank1/run.json"
            earlier = record.read_bytes()
            ranks[1].send_signal(signal.SIGUSR2)
            for process in ranks:
                read_line(process.stderr, "resumed process")
            trained_for(ranks, first[0] + 1)
            second = suspended_steps(work, ranks, asked=1)
            assert second[0] == second[1] > first[0]
        finally:
            kill(ranks)
    record.write_bytes(earlier)
    with agent_of_two_ranks() as agent:
        ranks = start_both(work, agent, resume=True)
        try:
            for process, steps in zip(ranks, (second[0], first[0]), strict=True):
                read_line(
                    process.stderr, f" {steps} steps were repeated, and all bits are the same"
                )
        finally:
            kill(ranks)


@pytest.mark.slow
def test_ranks_resume_with_the_checkpoint_that_one_of_them_saves(work):
    """That rank asks all others to take part when it saves, so they must be awake."""
    with agent_of_two_ranks() as agent:
        ranks = start_both(work, agent, "own")
        try:
            trained_for(ranks, 2)
            saved, last = suspended_steps(work, ranks, asked=1)
            assert last == saved + 1
        finally:
            kill(ranks)
    with agent_of_two_ranks() as agent:
        resumed = start_both(work, agent, "own", steps=saved + 20, resume=True)
        first, second = [end(each) for each in resumed]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert f"suspended after step {saved}" in first.err
    assert f"resumed with the checkpoint of step {saved}" in second.err
    assert first.out.startswith(f"{saved}\n")
    with agent_of_two_ranks() as agent:
        whole = [end(each) for each in start_both(work, agent, steps=saved + 20)]
    for resumed, undisturbed in zip((first, second), whole, strict=True):
        assert resumed.out.splitlines()[-1] == undisturbed.out.splitlines()[-1]
