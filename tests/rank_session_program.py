"""One rank of a job with a session in each rank, some of which misbehave: see ``test_rank_sessions.py``.

    python rank_session_program.py DIRECTORY SETTINGS

The settings are a JSON object with ``rank_1``, what that rank does: ``"closes"``, ``"closes late"``,
``"dies"`` or ``"hangs"`` before it closes its session, or ``"none"``: it has no session; and
``patience_s``, which rank 0 has for the others.
"""

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from offload_runs import session_in
from penstock.runtime import rank_store
from penstock.store.wrappers import WrapperTier

LONG_S = 240


class Noting(WrapperTier):
    """Appends a line to a file of all ranks when a long write or read begins."""

    def __init__(self, inner, path, rank):
        super().__init__(inner)
        self.path, self.rank = path, rank

    def _note(self, kind, nbytes):
        if nbytes > 2**20:
            with self.path.open("a") as file:
                file.write(f"{self.rank} {kind}\n")

    def _write(self, place, address, nbytes, keep_alive, priority):
        self._note("write", nbytes)
        return super()._write(place, address, nbytes, keep_alive, priority)

    def _read(self, place, address, nbytes, keep_alive, priority):
        self._note("read", nbytes)
        return super()._read(place, address, nbytes, keep_alive, priority)


def wait_for(path):
    deadline = time.monotonic() + LONG_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(256, 128)).square().mean().backward()
        optimizer.step()


def main(place, settings):
    torch.set_num_threads(1)
    place, acts = Path(place), settings["rank_1"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank_store.PATIENCE_S = 0.2 if acts == "none" else LONG_S
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place}/meet",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=LONG_S),
    )
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    flash = place / f"flash{rank}"
    flash.mkdir()
    if rank == 1 and acts == "none":
        wait_for(place / "told.0")
        (place / "told.1").write_text("{}")
        return
    session = session_in(
        flash, model, machine=None, wrap_tier=lambda tier: Noting(tier, place / "order", rank)
    )
    if rank == 1:
        time.sleep(0.3)  # an unequal start, after which the ranks measure at once all the same
    with session:
        train(model, 2 + rank)
        if rank == 1 and acts == "dies":
            os._exit(0)
        if rank == 1 and acts == "hangs":
            wait_for(place / "told.0")
            os._exit(0)
        if rank == 1 and acts == "closes late":
            time.sleep(0.3)
    job = session.job_summary(patience_s=settings["patience_s"] if rank == 0 else 0.0)
    told = {
        "job": job.to_json(),
        "text": str(job),
        "own": session.summary().to_json(),
        "own_text": str(session.summary()),
        "rates": [
            session._machine.flash_write_bytes_per_s,
            session._machine.flash_read_bytes_per_s,
        ],
    }
    (place / f"told.{rank}").write_text(json.dumps(told))
    os._exit(0)  # without a farewell to the other rank, which may have ended


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
