"""Ranks that are killed: do all of them go on after one common step, with the right bits?

torchrun starts ranks that meet through gloo and train a decoder in the shape of LLaMA with FlashAdamW
and durable steps: under ``DistributedDataParallel`` (``ddp``), under FSDP2 with updates in backward
(``fsdp2``), and the same with weights on flash (``weights``). At a random moment of each attempt a random
rank is killed (SIGKILL): counted from its start, or from the end of its first step, which is long.
torchrun ends the others and starts all ranks again, which call ``resume()``; a rank may be killed before
that. When all have resumed as often as is wanted, the ranks make a few steps more. Another job then makes
as many steps without Penstock and undisturbed: in memory, with torch's AdamW. Parameters must be the same
to the last bit.

What a rank did when it was killed is in a file that it writes as it goes on.

    python benchmarks/macro/ranks_killed.py --dir /nvme/scratch --resumes 20
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _weights_model
import torch
import torch._dynamo  # which the first optimizer imports: it takes longer than all else here
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import _results
import penstock
from penstock.optim import FlashAdamW

SHAPE = _weights_model.Shape(256, 2, 4, 688, 1024)
TOKENS = 64
LAST_STEPS = 3
"""After the last kill."""
FIRST_STEP = "in its first step"
PATIENCE_S = 240
"""Longest wait for ranks to begin, and for a collective."""
LAUNCHER = ["-m", "torch.distributed.run", "--standalone"]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # else a rank may find where one of the attempt before was: torch keeps the same store
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def main():
    args = parse()
    if args.job:
        child(json.loads(args.job))
        return
    figures = _results.earlier(args.name) if args.into == _results.RESULTS else {}
    for what in args.what:
        figures[what] = survived(args, what)
        print(what, json.dumps(figures[what]), file=sys.stderr)
        config = {"ranks": args.ranks, "resumes": args.resumes, "within_s": args.within}
        config |= {"seed": args.seed, "shape": SHAPE._asdict(), "tokens": TOKENS}
        _results.write(args.name, figures, config, directory=args.dir, into=args.into)
    wrong = [what for what, found in figures.items() if not is_right(found)]
    if wrong:
        sys.exit(f"ranks_killed: not as undisturbed: {', '.join(wrong)}")


def is_right(found):
    return (
        found["common_resumes"] == found["resumes"]
        and found["most_steps_lost"] <= 1
        and found["same_bits"]
    )


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--resumes", type=int, default=20, help="after a rank was killed")
    parser.add_argument(
        "--within", type=float, default=2.0, help="longest time in seconds until a rank is killed"
    )
    parser.add_argument("--seed", type=int, default=0, help="of moments and of ranks")
    parser.add_argument("--what", nargs="*", default=["ddp", "fsdp2", "weights"])
    parser.add_argument("--name", default="ranks_killed", help="of the result file")
    parser.add_argument("--into", default=_results.RESULTS, help="folder for the result file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def survived(args, what, launch=None):
    """Kill ranks of one job, and compare what it has trained.

    Args:
        args: As of the command.
        what: One of ``what``.
        launch: Starts the ranks again after each kill; None: torchrun.
    """
    launch = launch or Launched
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        place = Path(folder)
        job = {"what": what, "place": folder, "resumes": args.resumes}
        moment, kills = random.Random(args.seed), []
        with launch(args.ranks, job, restarts=5 * args.resumes) as launched:
            while not is_last(launched.begin(len(kills)), place, args.resumes):
                kills.append(kill_one(launched, len(kills), moment, args.within))
        known = resumed_before(1 + len(kills), place)
        steps = json.loads((place / "told.0").read_text())["steps"]
        with launch(args.ranks, {**job, "plain": steps}, restarts=0):
            pass
        ours, plain = (
            [json.loads((place / f"{name}.{rank}").read_text()) for rank in range(args.ranks)]
            for name in ("told", "plain")
        )
    return {
        "kills": len(kills),
        "killed_while": dict(Counter(doing for _, doing in kills)),
        "killed_ranks": dict(Counter(str(rank) for rank, _ in kills)),
        "resumes": len(known),
        "common_resumes": sum(len(set(each["at"])) == 1 for each in known),
        "resumed_at": [each["at"][0] for each in known],
        "ranks_differed": sum(len(set(each["newest"])) > 1 for each in known),
        "most_steps_lost": max(max(each["newest"]) - each["at"][0] for each in known),
        "steps": steps,
        "same_bits": ours == plain,
    }


def resumed_before(attempt, place):
    """Return what was noted when all ranks had resumed, in attempts after a kill and before this one."""
    path = place / "resumed"
    lines = path.read_text().splitlines() if path.exists() else []
    return [each for each in map(json.loads, lines) if 0 < each["attempt"] < attempt]


def is_last(attempt, place, resumes):
    """Return whether nothing is killed in an attempt any more: ranks and their killer must agree."""
    return attempt > 0 and len(resumed_before(attempt, place)) == resumes - 1


class Launched:
    """Ranks that torchrun has started; its end must be a success."""

    def __init__(self, ranks, job, *, restarts):
        self.ranks, self.place = ranks, Path(job["place"])
        self._said = (self.place / "said").open("w+")
        words = ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        self._process = subprocess.Popen(
            [sys.executable, *LAUNCHER, *words, __file__, "--job", json.dumps(job)],
            stdout=self._said,
            stderr=self._said,
            env=os.environ | ENVIRONMENT,
        )

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self._process.terminate()  # torchrun ends its ranks
        code = self._process.wait(PATIENCE_S)
        self._said.seek(0)
        said = self._said.read()
        self._said.close()
        if code or kind is not None:
            sys.exit(f"ranks_killed: torchrun has ended with {code}:\n{said[-8000:]}")

    def is_up(self):
        return self._process.poll() is None

    def begin(self, attempt):
        """Wait until all ranks of an attempt are there; return its number."""
        for rank in range(self.ranks):
            self.wait_for(lambda doing: doing, attempt, rank)
        return attempt

    def wait_for(self, condition, attempt, rank):
        """Wait until a condition holds of what a rank does."""
        until = time.monotonic() + PATIENCE_S
        while not condition(self.doing(attempt, rank)[1]):
            if not self.is_up() or time.monotonic() > until:
                raise TimeoutError(f"rank {rank} of attempt {attempt} has ended or hangs")
            time.sleep(0.01)

    def doing(self, attempt, rank):
        """Return number and occupation of the process of a rank; 0 and "" before it is there."""
        path = self.place / f"doing.{attempt}.{rank}"
        number, what = path.read_text().split(maxsplit=1) if path.exists() else ("0", "")
        return int(number), what.strip()


def kill_one(launched, attempt, moment, within):
    """Kill a rank of an attempt at a random moment; return its number, and what it did."""
    rank = moment.randrange(launched.ranks)
    if moment.random() < 0.5:
        launched.wait_for(FIRST_STEP.__eq__, attempt, rank)
        launched.wait_for(FIRST_STEP.__ne__, attempt, rank)
    time.sleep(moment.uniform(0, within))
    number, _ = launched.doing(attempt, rank)
    os.kill(number, signal.SIGKILL)
    return rank, launched.doing(attempt, rank)[1]


# -- one rank ----------------------------------------------------------------------------------------


class Doing:
    """What this rank is doing, in a file that outlives it."""

    def __init__(self, path):
        made = path.with_name(f"{path.name}.made")  # one for each rank
        self._file = os.open(made, os.O_RDWR | os.O_CREAT)
        self("joining the process group")
        made.rename(path)

    def __call__(self, what):
        os.pwrite(self._file, f"{os.getpid()} {what}".ljust(64).encode(), 0)


def child(job):
    rank, place = int(os.environ["RANK"]), Path(job["place"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    doing = Doing(place / ("doing.plain" if "plain" in job else f"doing.{attempt}.{rank}"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    doing("making model and optimizer")
    torch.manual_seed(0)
    model = _weights_model.Decoder(SHAPE, torch.float32)
    model = DistributedDataParallel(model) if job["what"] == "ddp" else sharded(model)
    if "plain" in job:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for step in range(job["plain"]):
            train(model, optimizer, step, rank)
        tell(place / f"plain.{rank}", model, job["plain"])
    else:
        flash = place / f"flash{rank}"
        flash.mkdir(exist_ok=True)
        optimizer = FlashAdamW(
            model.parameters(),
            lr=1e-3,
            flash=flash,
            tile=1 << 16,
            durable=True,
            overlap=job["what"] != "ddp",
        )
        with session(model, flash) if job["what"] == "weights" else nullcontext():
            step = resumed(optimizer, attempt, place, doing)
            ends = is_last(attempt, place, job["resumes"])
            last = step + LAST_STEPS if ends else None
            doing(FIRST_STEP)
            first = step
            while step != last:
                train(model, optimizer, step, rank, doing if step > first else None)
                step += 1
            tell(place / f"told.{rank}", model, step)
        optimizer.close()
    dist.barrier()
    dist.destroy_process_group()


def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def session(model, flash):
    """Weights on flash, in memory for what FSDP2 exchanges at once."""
    return penstock.offload(
        model,
        weights="flash",
        weights_memory="8MiB",
        flash=flash,
        floor="64KiB",
        flash_capacity="1GiB",
    )


def resumed(optimizer, attempt, place, doing):
    """Go on after the last step that all have; note which that is, and the newest of each rank."""
    doing("resuming")
    last = optimizer._penstock._journal.last
    newest = 0 if last is None else last.step
    step = optimizer.resume()
    doing("telling the step")
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (newest, step))
    if dist.get_rank() == 0:
        newest, at = zip(*found, strict=True)
        with (place / "resumed").open("a") as file:
            file.write(json.dumps({"attempt": attempt, "newest": newest, "at": at}) + "\n")
    return step


def train(model, optimizer, step, rank, doing=None):
    """One step on this rank's tokens, which are others in each step."""
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    note = doing or (lambda _: None)
    note("in forward and backward")
    _weights_model.loss_of(
        model, torch.randint(0, SHAPE.vocabulary, (1, TOKENS), generator=numbers)
    ).backward()
    note("in step()")
    optimizer.step()
    optimizer.zero_grad()


def tell(path, model, steps):
    """Note the digest of this rank's parameters."""
    digest = hashlib.sha256()
    for each in model.parameters():
        values = each.detach()
        local = values.to_local() if hasattr(values, "to_local") else values
        digest.update(local.contiguous().numpy().tobytes())
    path.write_text(json.dumps({"steps": steps, "sha256": digest.hexdigest()}))


if __name__ == "__main__":
    main()
