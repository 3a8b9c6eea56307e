"""Ranks of one job that share a machine and an SSD: their steps beside plain ranks, and their rates.

A decoder in the shape of LLaMA is trained by ranks that meet through gloo, each with its part of the
cores: under ``DistributedDataParallel`` (``ddp``), FSDP2 (``fsdp2``), FSDP2 in groups of two ranks
(``hsdp``), tensor parallel (``tp``), FSDP2 over pairs that are tensor parallel (``fsdp2+tp``), and as
stages of a pipeline with the schedule 1F1B (``pipeline``, four micro-batches). Plain ranks and ranks
with Penstock live together and take turns, step by step. The time of a step is that of the slowest
rank. What Penstock has a tenth of the memory for:

* ``activations``: what autograd saves; the optimizer is SGD;
* ``states``: the states of AdamW, exact, updated in backward (in ``step`` in pipelines, where each
  micro-batch has a backward);
* ``gradients``: gradients until the update, whose states are in memory; two backwards make a step;
* ``weights``: the weights, beside exact states that are updated in the same way. They have more than a
  tenth if the largest weights of a rank need more.

Losses must be the same to the last bit. A third side, ``beside_transfers``, shows what those bytes cost
on this machine whoever moves them: plain ranks, beside each of which a process does nothing but move as
many bytes as the rank with Penstock has just moved, by system calls spread over the step. ``rates`` are
those of one process that writes and reads through the engine, and of all ranks that do so at once, in
turns; their sum and the slowest are compared.

With ``--planned`` steps with ``weights`` under ``ddp`` and ``fsdp2`` are compared with those of
``penstock plan --ranks``: for the machine as ``penstock bench machine`` measures it just before, with the
rate at which the ranks exchange 64 MiB, and with the same limit of weights. The plan is that of one rank,
and knows nothing of what an exchange through gloo takes of the cores.

    python benchmarks/macro/ranks.py --dir /nvme/scratch --ranks 2
    python benchmarks/macro/ranks.py --dir /nvme/scratch --what weights --planned --name ranks_step
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _weights_model
import _weights_steps
import torch
import torch.distributed as dist
from _planned_step import beside, figures_of, request_of
from _ranks_parallel import KINDS, groups_of, local_of
from _raw_file import LENGTH, Mover, RawFile

import _results
import penstock
from penstock.core.units import GIB
from penstock.optim import FlashAdamW

CASES = ("activations", "states", "gradients", "weights")
WARM_UP = 3
"""Turns that are not counted."""
SHARE = 10
"""Part of the memory that Penstock has: a tenth."""
MOVED = 2 * GIB
"""Bytes that each process writes, and reads, in a turn of ``rates``."""
SIDES = ("plain", "penstock", "beside_transfers")
PLANNED = ("ddp", "fsdp2")
"""Ways for which there are plans."""
EXCHANGED = 1 << 24
"""Float32 numbers in an exchange: 64 MiB."""


def main():
    args = parse()
    if args.job:
        child(json.loads(args.job))
        return
    _results.warn_if_busy()
    figures = {"rates": rates(args)}
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder, "machine.toml") if args.planned else None
        if machine is not None:
            measure(machine, args.dir)
        compare(args, figures, machine)
    print(json.dumps(figures, indent=2))


def measure(machine, directory):
    """Write a machine file."""
    words = ["bench", "machine", "--flash", directory, "--output", machine]
    subprocess.run([sys.executable, "-m", "penstock", *words], check=True, stdout=sys.stderr)


def compare(args, figures, machine):
    """Go through all cases; with a machine file, compare steps with those of the plan."""
    record(figures, args)
    for parallel in args.parallel:
        for what in args.what:
            found = figures[f"{parallel}, {what}"] = compared(args, parallel, what)
            if machine is not None and what == "weights" and parallel in PLANNED:
                found["plan"] = planned(args, parallel, machine, found)
            record(figures, args)


def planned(args, parallel, machine, found):
    """What ``penstock plan --ranks`` foretells of a step of one rank, and what was measured of it."""
    rate = exchange_rate(args, parallel)
    words = (
        f"--device cpu --machine {machine} --weights flash --batch 1 --optimizer adam --policy keep"
    )
    words += f" --ranks {args.ranks} --parallel {parallel} --peer-rate {rate:.0f}B/s"
    words += f" --weights-memory {found['memory_bytes']}"
    step = request_of((args.shape, "float32", "full", args.tokens), words).plan()
    said = {**figures_of(step), "exchanged_bytes_per_s": rate, "machine": machine.read_text()}
    return beside(said, {key: found[key] for key in ("step_s", "read_bytes", "written_bytes")})


def exchange_rate(args, parallel):
    """Bytes per second that each rank receives, as the plan counts them."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"do": "exchange", "parallel": parallel, "meet": f"file://{folder}/meet"}
        ranks = Ranks(args.ranks, job)
        turns = [ranks.go() for _ in range(1 + args.steps)]
        ranks.close()
    nbytes = 2 * 4 * EXCHANGED * (args.ranks - 1) / args.ranks
    return nbytes / statistics.median(map(slowest, turns[1:]))


def record(figures, args):
    """After each case, so that what was measured is not lost with the next."""
    config = {key: getattr(args, key) for key in ("ranks", "shape", "tokens", "steps")}
    _results.write(args.name, figures, config, directory=args.dir, into=args.into)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", default="91M", choices=_weights_model.SHAPES)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--parallel", nargs="*", default=["ddp", "fsdp2"], choices=KINDS)
    parser.add_argument("--what", nargs="*", default=["activations", "states"], choices=CASES)
    parser.add_argument("--planned", action="store_true", help="compare with penstock plan --ranks")
    parser.add_argument("--name", default="ranks", help="of the result file")
    parser.add_argument("--into", default=_results.RESULTS, help="folder for the result file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


class Ranks:
    """The processes of one job, which do something whenever each is sent a line."""

    def __init__(self, count, job):
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--job", json.dumps({**job, "rank": rank})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment_of(rank, count),
            )
            for rank in range(count)
        ]
        self.known = self._answers()

    def go(self, word=""):
        """What each rank tells of its next turn; ``word`` says what to do, where there is a choice."""
        for each in self.processes:
            each.stdin.write(f"{word}\n")
            each.stdin.flush()
        return self._answers()

    def _answers(self):
        lines = [each.stdout.readline() for each in self.processes]
        if not all(lines):
            sys.exit("ranks: a rank has ended; what it said is above")
        return [json.loads(line) for line in lines]

    def close(self):
        for each in self.processes:
            each.stdin.close()
        for each in self.processes:
            each.wait()


def environment_of(rank, world):
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    threads = max(1, (os.cpu_count() or 1) // world)
    numbers["OMP_NUM_THREADS"] = threads
    return os.environ | {name: str(number) for name, number in numbers.items()}


def rates(args):
    """Bytes per second of one process, and of all ranks at once."""
    with ExitStack() as stack:
        sides = {}
        for side, count in ("one", 1), ("all", args.ranks):
            sides[side] = Ranks(count, {"do": "rates", "dir": args.dir})
            stack.callback(sides[side].close)
        turns = {(side, op): [] for op in ("write", "read") for side in sides}
        for _ in range(1 + args.steps):
            for (side, op), found in turns.items():
                found.append([each["bytes_per_s"] for each in sides[side].go(op)])
    found = {}
    for op in ("write", "read"):
        one = [alone for (alone,) in turns["one", op][1:]]
        ranks = turns["all", op][1:]
        found[op] = {
            "one_bytes_per_s": statistics.median(one),
            "sum_bytes_per_s": statistics.median(map(sum, ranks)),
            "sum_of_one": statistics.median(
                sum(each) / alone for each, alone in zip(ranks, one, strict=True)
            ),
            "slowest_of_mean": statistics.median(
                min(each) / statistics.mean(each) for each in ranks
            ),
        }
    return found


def compared(args, parallel, what):
    """Steps of ranks with Penstock beside those of plain ones."""
    with tempfile.TemporaryDirectory(dir=args.dir) as folder, ExitStack() as stack:
        sides, moved = {}, [(0, 0)] * args.ranks
        movers = [Mover(args.dir) for _ in range(args.ranks)]
        for mover in movers:
            stack.callback(mover.close)
        for side in ("plain", "penstock"):
            job = {**vars(args), "do": "steps", "parallel": parallel, "what": what, "side": side}
            job |= {"meet": f"file://{folder}/{side}", "into": None, "mode": "full"}
            job["vocabulary"] = _weights_model.SHAPES[args.shape].vocabulary
            sides[side] = Ranks(args.ranks, job)
            stack.callback(sides[side].close)
        turns = {side: [] for side in SIDES}
        for number in range(WARM_UP + args.steps):
            for side in SIDES:
                if side == "beside_transfers":
                    over_s = slowest(turns["plain"][-1])
                    for mover, each in zip(movers, moved, strict=True):
                        mover.begin(*each, over_s)
                turns[side].append(sides["penstock" if side == "penstock" else "plain"].go())
                if side == "penstock":
                    moved = [
                        (each["read_bytes"], each["written_bytes"]) for each in turns[side][-1]
                    ]
                if side == "beside_transfers":
                    for mover in movers:
                        mover.wait()
                print(f"  {number} {side}: {slowest(turns[side][-1]):.2f} s", file=sys.stderr)
        known = sides["penstock"].known[0]
    times = {side: list(map(slowest, found[WARM_UP:])) for side, found in turns.items()}
    counted = turns["penstock"][WARM_UP:]
    # plain ranks have made two steps in each turn
    of_plain = [
        losses(turn)
        for pair in zip(turns["plain"], turns["beside_transfers"], strict=True)
        for turn in pair
    ]
    return {
        "plain_step_s": statistics.median(times["plain"]),
        "step_s": statistics.median(times["penstock"]),
        "ratio_to_plain": ratio(times["penstock"], times["plain"]),
        "plain_beside_transfers_ratio": ratio(times["beside_transfers"], times["plain"]),
        "ratio_to_plain_beside_transfers": ratio(times["penstock"], times["beside_transfers"]),
        "same_losses": list(map(losses, turns["penstock"])) == of_plain[: WARM_UP + args.steps],
        **known,
        "read_bytes": statistics.median(each["read_bytes"] for turn in counted for each in turn),
        "written_bytes": statistics.median(
            each["written_bytes"] for turn in counted for each in turn
        ),
    }


def slowest(turn):
    """Seconds of a step, which is as slow as its slowest rank."""
    return max(each["step_s"] for each in turn)


def losses(turn):
    """Those of all ranks."""
    return [each["outputs"] for each in turn]


def ratio(ours, theirs):
    """Median of the ratios of neighbouring steps."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


# -- one rank ----------------------------------------------------------------------------------------


def child(job):
    if job["do"] == "rates":
        serve_rates(job["dir"])
        return
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=job["meet"], rank=job["rank"], world_size=world)
    if job["do"] == "exchange":
        serve_exchanges(job["parallel"], world)
        return
    torch.manual_seed(0)
    together = KINDS[job["parallel"]](
        _weights_model.Decoder(_weights_model.SHAPES[job["shape"]], torch.float32)
    )
    module = together.module
    total = sum(local_of(each).nbytes for each in module.parameters())
    optimizer = optimizer_of(module, job, total)
    take = Step(together, optimizer, job, backwards=2 if job["what"] == "gradients" else 1)
    known = {"states_bytes": 2 * total, "memory_bytes": 2 * total // SHARE}
    offloading = nullcontext()
    if job["what"] == "gradients":
        known = {"gradient_bytes": total, "memory_bytes": total // SHARE}
    if job["what"] == "weights":
        limit = max(total // SHARE, 2 * together.largest_bytes() + (1 << 20))
        known = {"weight_bytes": total, "memory_bytes": limit}
        if job["side"] == "penstock":
            offloading = penstock.offload(
                module, optimizer, weights="flash", weights_memory=limit, flash=job["dir"]
            )
    if job["what"] == "activations":
        with penstock.offload(module, optimizer, policy="keep") as session:
            take()
        saved = session.budget.peak_bytes
        known = {"saved_bytes": saved, "memory_bytes": saved // SHARE}
        if job["side"] == "penstock":
            offloading = penstock.offload(
                module,
                optimizer,
                device_memory=saved // SHARE,
                flash=job["dir"],
                floor="128KiB",
            )
    with offloading:
        _weights_steps.serve(lambda _: take(), job, **known)
    dist.destroy_process_group()


def ids_of(together, job):
    """Token ids of this rank's steps: those of ranks with the same share are the same."""
    numbers = torch.Generator().manual_seed(1 + together.share)
    while True:
        yield torch.randint(
            0, job["vocabulary"], (together.batch, job["tokens"]), generator=numbers
        )


def optimizer_of(module, job, weight_bytes):
    groups = groups_of(module)
    if job["what"] == "activations":
        return torch.optim.SGD(groups, lr=1e-3)
    if job["side"] == "plain":
        return torch.optim.AdamW(groups, lr=1e-4, fused=True)
    settings = {"lr": 1e-4, "flash": job["dir"], "tile": 1 << 18}
    if job["what"] == "gradients":
        memory = {"host_memory": 4 * weight_bytes, "gradient_memory": weight_bytes // SHARE}
        return FlashAdamW(groups, **memory, **settings)
    settings["host_memory"] = 2 * weight_bytes // SHARE
    optimizer = FlashAdamW(groups, overlap=job["parallel"] != "pipeline", **settings)
    if job["parallel"] == "ddp":
        optimizer.update_after(module)
    return optimizer


class Step:
    """One step of the optimizer, on this rank's tokens."""

    def __init__(self, together, optimizer, job, *, backwards):
        self.together, self.optimizer, self.backwards = together, optimizer, backwards
        self.ids = ids_of(together, job)

    def __call__(self):
        losses = [
            loss for _ in range(self.backwards) for loss in self.together.backward(next(self.ids))
        ]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


def serve_exchanges(parallel, world):
    """Exchange as a step does, whenever a line comes: gradients, or weights and gradients."""
    whole = torch.ones(EXCHANGED)
    part = torch.ones(EXCHANGED // world)
    _weights_steps.write({})
    for _ in sys.stdin:
        begun = time.perf_counter()
        if parallel == "ddp":
            dist.all_reduce(whole)
        else:
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
        _weights_steps.write({"step_s": time.perf_counter() - begun})
    dist.destroy_process_group()


def serve_rates(directory):
    """Write and read whenever a line comes."""
    file = RawFile(directory)
    file.go(written=LENGTH)
    _weights_steps.write({})
    for line in sys.stdin:
        begun = time.perf_counter()
        file.go(**{{"write": "written", "read": "read"}[line.strip()]: MOVED})
        _weights_steps.write({"bytes_per_s": MOVED / (time.perf_counter() - begun)})


if __name__ == "__main__":
    main()
