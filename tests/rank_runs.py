"""Runs the ranks of one job as processes that meet through a file, and returns what each has told."""

import json
import os
import subprocess

import preloaded

PATIENCE_S = 280
"""Long, because a busy machine is no failure."""
EVERYTHING = "weights, states and gradients"
"""What is on flash beside activations, for ``parallel_program.py``: all there is."""


def environment_of(rank, world):
    """Return what torchrun sets for a rank on one machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return {
        **os.environ,
        **{name: str(number) for name, number in numbers.items()},
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PENSTOCK_SLAB": "16MiB",
    }


def start_ranks(words, world):
    """Start a program once for each rank; output of both kinds is a pipe."""
    pipe = subprocess.PIPE
    return [
        preloaded.Process(words, stdout=pipe, stderr=pipe, env=environment_of(rank, world))
        for rank in range(world)
    ]


def end_ranks(ranks):
    """Wait for all ranks; return the exit code, output and errors of each."""
    try:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


def run_ranks(program, place, settings, *, world):
    """Run a program whose ranks each write ``PLACE/told.RANK``; return the values in these files.

    The program is given the directory and the settings, both as arguments, and must end with 0.
    """
    ended = end_ranks(start_ranks([program, place, json.dumps(settings)], world))
    assert all(code == 0 for code, _, _ in ended), "\n".join(err for _, _, err in ended)
    return [json.loads((place / f"told.{rank}").read_text()) for rank in range(world)]
