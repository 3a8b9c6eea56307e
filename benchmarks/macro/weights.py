"""Models whose weights rest on flash: time, memory and bytes of a step, beside plain PyTorch.

Each side is a process of its own, in a control group that limits all of its memory, page cache included
(version 1 of control groups; without them the limit is not set, and the result says so). Sides take
turns, round by round. What is trained is a decoder in the shape of LLaMA with random weights:

* ``full``: all weights trained by ``FlashAdamW`` in backward, states in int8;
* ``lora``: adapters on a frozen base;
* ``prefill``: a forward over all tokens without gradients;
* ``decode``: a forward over a single token.

``flash`` streams the weights; ``plain`` has them in memory; ``mapped`` has them in mapped files, which
the kernel pages. ``raw`` only reads the bytes that a step of ``flash`` reads, through the same engine.

    python benchmarks/macro/weights.py --dir /nvme/scratch --shape 774M --mode full --tokens 1024
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _weights_model
import torch

import _results
import penstock
from penstock.core.units import GIB, MIB, parse_bytes
from penstock.optim import FlashAdamW
from penstock.store.engine import shared_engine

CGROUPS = Path("/sys/fs/cgroup/memory")
SIDES = ("flash", "plain", "mapped")


def main():
    args = parse()
    if args.job:
        print(json.dumps(child(json.loads(args.job))))
        return
    _results.warn_if_busy()
    rounds = []
    for number in range(args.rounds):
        rounds.append({side: run(args, side) for side in args.sides})
        print(json.dumps({"round": number, **rounds[-1]}), flush=True)
    figures = {"rounds": rounds, **compared(rounds)}
    print(json.dumps(compared(rounds), indent=2))
    if args.into:
        config = {
            key: getattr(args, key)
            for key in ("shape", "mode", "dtype", "tokens", "memory", "rounds")
        }
        config |= {"weights_memory": args.weights_memory, "steps": args.steps}
        name = f"weights_{args.mode}_{args.shape}"
        _results.write(name, figures, config, directory=args.dir, into=args.into)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--shape", default="350M", choices=_weights_model.SHAPES)
    parser.add_argument("--mode", default="full", choices=("full", "lora", "prefill", "decode"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=["flash", "plain"], choices=SIDES)
    parser.add_argument("--memory", default="3GiB", help="of the control group of flash and mapped")
    parser.add_argument("--weights-memory", default="1GiB")
    parser.add_argument("--saved-memory", default="256MiB")
    parser.add_argument("--gradient-memory", default="256MiB")
    parser.add_argument("--states-memory", default="128MiB")
    parser.add_argument("--format", default="int8")
    parser.add_argument("--into", help="folder for the result file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args, side):
    job = {**vars(args), "side": side}
    limit = None if side == "plain" else parse_bytes(args.memory, what="--memory")
    folder = None
    if limit is not None and CGROUPS.is_dir():
        folder = CGROUPS / f"penstock-weights-{os.getpid()}"
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        job["cgroup"] = str(folder)
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return {"failed": done.returncode}
        found = json.loads(done.stdout.splitlines()[-1])
        if folder is not None:
            peak = int((folder / "memory.max_usage_in_bytes").read_text())
            found["limited_to_bytes"], found["group_peak_bytes"] = limit, peak
        return found
    finally:
        if folder is not None:
            time.sleep(0.2)
            folder.rmdir()


def compared(rounds):
    found = {}
    for side in rounds[0]:
        good = [each[side] for each in rounds if "failed" not in each[side]]
        if not good:
            found[side] = "failed"
            continue
        found[side] = {
            key: statistics.median(each[key] for each in good)
            for key in good[0]
            if isinstance(good[0][key], int | float)
        }
    for side in ("plain", "mapped"):
        both = [
            each
            for each in rounds
            if all("failed" not in each.get(s, {"failed": 1}) for s in ("flash", side))
        ]
        if both:
            found[f"step over {side}"] = statistics.median(
                each["flash"]["step_s"] / each[side]["step_s"] for each in both
            )
            found[f"same losses as {side}"] = all(
                each["flash"]["losses"] == each[side]["losses"] for each in both
            )
    both = [each["flash"] for each in rounds if "raw_s" in each.get("flash", {})]
    if both:
        found["step over raw"] = statistics.median(each["step_s"] / each["raw_s"] for each in both)
    return found


# -- one side ----------------------------------------------------------------------------------------


def child(job):
    if job.get("cgroup"):
        Path(job["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    torch.manual_seed(0)
    begun = time.perf_counter()
    shape = _weights_model.SHAPES[job["shape"]]
    if job["side"] == "flash":
        with penstock.built_on_flash(job["dir"]):
            model = _weights_model.Decoder(shape, getattr(torch, job["dtype"]))
    elif job["side"] == "mapped":
        model = mapped(shape, job["dir"], getattr(torch, job["dtype"]))
    else:
        model = _weights_model.Decoder(shape, getattr(torch, job["dtype"]))
    built_s = time.perf_counter() - begun
    if job["mode"] == "lora":
        _weights_model.adapt(model)
    work = Work(model, job)
    if job["side"] != "flash":
        return {"built_s": built_s, **measure(work, job)}
    settings = {"device_memory": job["saved_memory"], "flash": job["dir"]}
    with penstock.offload(
        model, weights="flash", weights_memory=job["weights_memory"], **settings
    ) as session:
        found = measure(work, job)
        print(session.summary(), file=sys.stderr)
    found["raw_s"] = raw_read_s(job["dir"], int(found["read_bytes"]))
    return {"built_s": built_s, **found}


class Work:
    """One step, of training or of inference."""

    def __init__(self, model, job):
        self.model, self.job = model, job
        self.numbers = torch.Generator().manual_seed(1)
        trained = [each for each in model.parameters() if each.requires_grad]
        if job["mode"] == "full":
            self.optimizer = FlashAdamW(
                trained,
                lr=1e-4,
                flash=job["dir"],
                format=job["format"],
                overlap=True,
                host_memory=job["states_memory"],
                gradient_memory=job["gradient_memory"] if job["side"] != "plain" else None,
            )
        elif job["mode"] == "lora":
            self.optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step(self):
        count = 1 if self.job["mode"] == "decode" else self.job["tokens"]
        vocabulary = self.model.shape.vocabulary
        ids = torch.randint(0, vocabulary, (1, count), generator=self.numbers)
        if self.job["mode"] in ("prefill", "decode"):
            with torch.no_grad():
                return self.model(ids)[0, -1].float().sum().item()
        loss = _weights_model.loss_of(self.model, ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def measure(work, job):
    losses, times, moved = [], [], []
    for _ in range(job["steps"] + 2):
        before, begun = counters(), time.perf_counter()
        losses.append(work.step())
        times.append(time.perf_counter() - begun)
        moved.append([now - then for now, then in zip(counters(), before, strict=True)])
        print(f"  {job['side']} step: {times[-1]:.2f} s", file=sys.stderr)
    return {
        "step_s": statistics.median(times[2:]),
        "times": times,
        "losses": losses,
        "read_bytes": statistics.median(each[0] for each in moved[2:]),
        "written_bytes": statistics.median(each[1] for each in moved[2:]),
        "parameters": sum(each.numel() for each in work.model.parameters()),
    }


def counters():
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def mapped(shape, directory, dtype):
    """A decoder whose parameters are mapped files."""
    with torch.device("meta"):
        model = _weights_model.Decoder(shape, dtype)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            with tempfile.NamedTemporaryFile(dir=directory) as file:
                file.truncate(parameter.nbytes)
                data = torch.from_file(
                    file.name, shared=True, size=parameter.numel(), dtype=parameter.dtype
                )
            setattr(module, name, torch.nn.Parameter(data.view(parameter.shape)))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def raw_read_s(directory, nbytes):
    """Seconds to read so many bytes through the engine, nothing else."""
    if nbytes < 64 * MIB:
        return 0.0
    from penstock.io.engine import Priority, Request  # noqa: PLC0415
    from penstock.io.files import open_unlinked  # noqa: PLC0415
    from penstock.store.arena import Arena  # noqa: PLC0415

    length, piece = min(nbytes, 4 * GIB) // (16 * MIB) * 16 * MIB, 16 * MIB
    file, arena, engine = open_unlinked(directory), Arena(8 * piece), shared_engine()
    file.preallocate(length)
    blocks = [arena.allocate(piece) for _ in range(8)]

    def go(op, total):
        moving = [None] * 8
        for number in range(total // piece):
            if moving[number % 8] is not None:
                moving[number % 8].wait()
            block = blocks[number % 8]
            moving[number % 8] = engine.submit(
                Request(
                    op=op,
                    file=file,
                    offset_bytes=number * piece % length,
                    address=block.address,
                    nbytes=piece,
                    keep_alive=block,
                    priority=Priority.PREFETCH,
                )
            )
        for each in moving:
            if each is not None:
                each.wait()

    go("write", length)
    begun = time.perf_counter()
    go("read", nbytes // piece * piece)
    took = time.perf_counter() - begun
    for block in blocks:
        block.free()
    arena.close()
    file.close()
    return took


if __name__ == "__main__":
    main()
