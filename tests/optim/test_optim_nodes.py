"""Several nodes, as the manual's recipes start them: flash of their own, shared checkpoints."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rank_programs

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
SRUN = """#!{python}
# What srun does with one task on each of two nodes: both run the command, each with its own flash.
import os, subprocess, sys

tasks = []
for node in range(2):
    words = [word.replace("/nvme/spill", f"{place}/node{{node}}") for word in sys.argv[1:]]
    tasks.append(subprocess.Popen(words, env=os.environ | {{"SLURM_NODEID": str(node)}}))
sys.exit(max(abs(each.wait()) for each in tasks))
"""
TRAINED = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from penstock.checkpoint.dcp import DcpReader, DcpWriter
from penstock.core import ranks as numbers

def made():
    model = sharded(network(seed=world))
    return model, FlashAdamW(model.parameters(), lr=1e-2, flash=flash, tile=1024)

def documents(model, optimizer):
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}

def wholes(model, optimizer):
    states = optimizer.state_dict()["state"]
    found = [p.detach().full_tensor() for p in model.parameters()]
    return found + [states[i][name].full_tensor() for i in range(6) for name in ("exp_avg", "exp_avg_sq")]
"""
SAVES = (
    TRAINED
    + """
flash, shared = sys.argv[sys.argv.index("--flash") + 1], sys.argv[sys.argv.index("--checkpoints") + 1]
node = int(os.environ["SLURM_NODEID"])
assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"  # restarts need it
assert flash == f"{place}/node{node}"
assert (numbers.local_processes(), numbers.world_size(), world) == (2, 4, 4)
assert sorted(on_all((node, numbers.local_rank()))) == [(0, 0), (0, 1), (1, 0), (1, 1)]
model, optimizer = made()
train(model, optimizer, 3)
theirs = sharded(network(seed=world))
train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True), 3)
assert_same(model.parameters(), theirs.parameters())
dcp.save(documents(model, optimizer), storage_writer=DcpWriter(f"{shared}/kept"))
found = wholes(model, optimizer)
if rank == 0:
    torch.save(found, f"{shared}/wholes")
optimizer.close()
"""
)
LOADS = (
    TRAINED
    + """
shared = f"{place}/shared"
model, optimizer = made()
state = documents(model, optimizer)
dcp.load(state, storage_reader=DcpReader(f"{shared}/kept"))
set_state_dict(
    model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
)
assert_same(wholes(model, optimizer), torch.load(f"{shared}/wholes"))
train(model, optimizer, 1)
optimizer.close()
"""
)


def recipe(language, has):
    """The block of the manual in this language that has these words."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (text,) = (block for block in found if has in block)
    return text


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def command(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.slow
def test_the_recipe_for_slurm_trains_on_two_nodes_and_another_number_of_ranks_loads(disk_path):
    commands = disk_path / "commands"
    for name in ("commands", "node0", "node1", "shared"):
        (disk_path / name).mkdir()
    command(commands, "scontrol", "#!/bin/sh\nprintf 'localhost\\nlocalhost\\n'\n")
    command(commands, "srun", SRUN.format(python=sys.executable, place=disk_path))
    launcher = f'exec {sys.executable} -m torch.distributed.run "$@"'
    command(commands, "torchrun", f"#!/bin/sh\n{launcher}\n")
    script = recipe("bash", "srun torchrun")
    for word, ours in (
        (":29500", f":{free_port()}"),
        ("/shared/run", f"{disk_path}/shared"),
        ("train.py", f"train.py {disk_path}"),
    ):
        assert word in script
        script = script.replace(word, ours)
    (disk_path / "train.py").write_text(rank_programs.for_a_launcher(SAVES))
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=disk_path,
        capture_output=True,
        text=True,
        timeout=280,
        env={
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "2",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "localhost",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in disk_path.glob("done*")} == {f"done{rank}" for rank in range(4)}
    rank_programs.run(disk_path, LOADS, 3)


def test_the_function_for_ray_trains_in_a_plain_process_group(disk_path):
    function = recipe("python", "def train_loop")
    rank_programs.run(
        disk_path,
        function
        + """
ours = train_loop({"flash": flash, "steps": 3})
FlashAdamW = lambda params, lr, **settings: torch.optim.AdamW(params, lr=lr, fused=True)
torch.optim.AdamW.close = lambda self: None
theirs = train_loop({"flash": flash, "steps": 3})
assert_same(ours.parameters(), theirs.parameters())
""",
    )
