"""Models whose weights rest on flash: time, memory and bytes of a step, beside plain PyTorch.

Each side is a process of its own, in a control group that limits all of its memory, page cache included
(version 1 of control groups; without them the limit is not set, and the result says so). Sides take
turns, round by round. What is trained is a decoder in the shape of LLaMA with random weights:

* ``full``: all weights trained by ``FlashAdamW`` in backward, states in int8;
* ``lora``: adapters on a frozen base;
* ``prefill``: a forward over all tokens without gradients;
* ``decode``: a forward over a single token.

``flash`` streams the weights; ``plain`` has them in memory, without a limit; ``mapped`` has them in
mapped files, which the kernel pages. ``accelerate``, ``airllm``, ``slowllama`` and ``deepspeed`` stream
them too (``benchmarks/peers/streamed_weights.py``; each has some of the modes). They get the same weights
and tokens, and what comes out is compared: the loss, or some of the last token's logits. Before each side
the files of the peers leave the page cache.

``raw_s`` is the time to read the bytes that a step of ``flash`` reads, through the same engine and
nothing else. ``expected`` has the bytes of weights that a step reads and writes if none stays in memory;
``plan`` has what ``penstock plan --weights flash`` foretells with the machine file of ``--machine``.

    penstock bench machine --flash /nvme/scratch --output here.toml
    python benchmarks/macro/weights.py --dir /nvme/scratch --shape 774M --mode lora --tokens 512 \\
        --sides flash plain mapped slowllama --slowllama slowllama --peers-python peers/bin/python \\
        --machine here.toml
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
import _weights_steps
import torch

import _peers
import _results
import penstock
from penstock.cli import plan, plan_step
from penstock.core.errors import BudgetError
from penstock.core.units import GIB, MIB, parse_bytes
from penstock.optim import FlashAdamW
from penstock.plan.training_step import ENGINE_BYTES
from penstock.store.engine import shared_engine

CGROUPS = Path("/sys/fs/cgroup/memory")
OURS = ("flash", "plain", "mapped")
PEERS = {
    "accelerate": ("accelerate", ("full", "prefill", "decode")),
    "airllm": ("airllm", ("prefill", "decode")),
    "slowllama": ("sentencepiece", ("lora",)),
    "deepspeed": ("deepspeed", ("full",)),
}
"""A package that each needs, and the modes that it has."""
PEER_SCRIPT = _results.ROOT / "benchmarks" / "peers" / "streamed_weights.py"
FLOOR = MIB
"""Smaller weights stay in memory."""


def main():
    args = parse()
    if args.job:
        print(json.dumps(child(json.loads(args.job))))
        return
    _results.warn_if_busy()
    foretold = planned(args) if args.machine else None
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        sides = {side: job_of(args, side, scratch) for side in args.sides}
        sides = {side: job for side, job in sides.items() if job and prepared(job)}
        rounds = []
        for number in range(args.rounds):
            rounds.append({side: run(args, job) for side, job in sides.items()})
            print(json.dumps({"round": number, **rounds[-1]}), flush=True)
    figures = compared(args, rounds, foretold)
    print(json.dumps(figures, indent=2))
    if args.into:
        config = {
            key: getattr(args, key)
            for key in ("shape", "mode", "dtype", "tokens", "memory", "rounds")
        }
        config |= {"weights_memory": args.weights_memory, "steps": args.steps}
        config["peers"] = {side: job["version"] for side, job in sides.items() if side in PEERS}
        name = f"weights_{args.mode}_{args.shape}"
        figures["rounds"] = rounds
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
    parser.add_argument("--sides", nargs="+", default=["flash", "plain"], choices=(*OURS, *PEERS))
    parser.add_argument("--memory", default="3GiB", help="of the control group of all but plain")
    parser.add_argument("--weights-memory", default="1GiB")
    parser.add_argument("--saved-memory", default="256MiB")
    parser.add_argument("--gradient-memory", default="256MiB")
    parser.add_argument("--states-memory", default="128MiB")
    parser.add_argument("--format", default="int8")
    parser.add_argument("--machine", help="a machine file, to compare the plan with the step")
    parser.add_argument("--peers-python", nargs="*", default=[], help="interpreters with the peers")
    parser.add_argument("--slowllama", help="a checkout of okuvshynov/slowllama")
    parser.add_argument("--into", help="folder for the result file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def job_of(args, side, scratch):
    """What a side is told; None, with a sentence, if it cannot run."""
    vocabulary = _weights_model.SHAPES[args.shape].vocabulary
    job = {**vars(args), "side": side, "vocabulary": vocabulary, "folder": f"{scratch}/{side}"}
    if side in OURS:
        return {**job, "command": [sys.executable, __file__, "--job"]}
    package, modes = PEERS[side]
    python = _peers.interpreter(package, args.peers_python)
    if args.mode not in modes:
        print(f"{side} is left out: it has no mode {args.mode}")
    elif python is None:
        print(f"{side} is left out: no interpreter of --peers-python has {package}")
    elif side == "slowllama" and not args.slowllama:
        print("slowllama is left out: --slowllama does not name a checkout")
    else:
        command = [python, str(PEER_SCRIPT)]
        return {**job, "command": command, "version": _peers.has(package, python)}
    return None


def prepared(job):
    """Let a peer write its files; False, with a sentence, if it fails."""
    if job["side"] in OURS:
        return True
    Path(job["folder"]).mkdir()
    _, problem = started({**job, "stage": "prepare"})
    if problem:
        print(f"{job['side']} is left out: it could not write its files: {problem['failed']}")
    return not problem


def run(args, job):
    """The figures of one side in one round."""
    leave_page_cache(job["folder"])
    limit = None if job["side"] == "plain" else parse_bytes(args.memory, what="--memory")
    if limit is None or not CGROUPS.is_dir():
        found, problem = started({**job, "stage": "measure"})
        return problem or found
    group = CGROUPS / f"penstock-weights-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        found, problem = started({**job, "stage": "measure", "group": str(group)})
        peak = int((group / "memory.max_usage_in_bytes").read_text())
        return (problem or found) | {"limited_to_bytes": limit, "group_peak_bytes": peak}
    finally:
        time.sleep(0.2)
        group.rmdir()


def started(job):
    """What a process says of a job, and its last words if it failed."""
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [*job["command"], json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
        errors.seek(0)
        lines = errors.read().rstrip().splitlines()
    print("\n".join(lines), file=sys.stderr)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), None
    last = lines[-1] if lines and done.returncode > 0 else f"ended by signal {-done.returncode}"
    return None, {"failed": last.replace(job["folder"], "")}


def leave_page_cache(folder):
    """What is cached when a group ends is not counted in the next one, so it must not stay."""
    for path in filter(Path.is_file, Path(folder).rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compared(args, rounds, foretold):
    """Medians of each side, and of the ratios of ``flash`` to it in the same round."""
    figures = {"tokens": 1 if args.mode == "decode" else args.tokens}
    for side in rounds[0]:
        good = [each for each in rounds if "failed" not in each[side]]
        if not good:
            figures[side] = rounds[0][side]
            continue
        figures[side] = {
            key: statistics.median(each[side][key] for each in good)
            for key, value in good[0][side].items()
            if isinstance(value, int | float)
        }
        both = [each for each in good if "outputs" in each[side] and "outputs" in each["flash"]]
        if side != "flash" and both:
            pairs = [(each["flash"], each[side]) for each in both]
            figures[side] |= {
                "flash_ratio": statistics.median(a["step_s"] / b["step_s"] for a, b in pairs),
                "flash_ratio_of_each_round": [a["step_s"] / b["step_s"] for a, b in pairs],
                "largest_difference": max(
                    largest_difference(a["outputs"], b["outputs"]) for a, b in pairs
                ),
            }
    flash = figures.get("flash", {})
    if flash.get("raw_s"):
        flash["raw_ratio"] = statistics.median(
            each["flash"]["step_s"] / each["flash"]["raw_s"]
            for each in rounds
            if "raw_s" in each["flash"]
        )
    if "step_s" in flash:
        figures["expected"] = beside(expected(args), flash)
        if foretold:
            figures["plan"] = beside(foretold, flash)
    return figures


def largest_difference(some, others):
    return max(
        abs(one - other)
        for each, another in zip(some, others, strict=True)
        for one, other in zip(each, another, strict=True)
    )


def beside(said, flash):
    """What was said, and what was measured as a ratio to it."""
    ratios = {
        f"measured_of_{key}": flash[key] / value
        for key, value in said.items()
        if flash.get(key) is not None and value
    }
    return {**said, **ratios}


def expected(args):
    """Bytes of weights, and those that a step reads and writes if no weight stays in memory.

    A trained weight is read twice and written once, and its records both ways once. Of an embedding a
    forward reads rows, and backward nothing.
    """
    with torch.device("meta"):
        model = _weights_model.Decoder(
            _weights_model.SHAPES[args.shape], getattr(torch, args.dtype)
        )
    large = [each for each in model.parameters() if each.nbytes >= FLOOR]
    total, embedding = sum(each.nbytes for each in large), model.tokens.weight.nbytes
    if args.mode in ("prefill", "decode"):
        read, written = total - embedding, 0
    elif args.mode == "lora":
        read, written = 2 * (total - embedding), 0
    else:
        of = plan_step.record_bytes("adam", args.format)
        records = sum(of(each.numel(), args.dtype) for each in large)
        read, written = 2 * total - embedding + records, total + records
    return {"weight_bytes": total, "read_bytes": read, "written_bytes": written}


def planned(args):
    """What ``penstock plan`` foretells of a step in all its memory, which it divides by itself."""
    inference, full = args.mode in ("prefill", "decode"), args.mode == "full"
    limits = [args.weights_memory]
    limits += [] if inference else [args.saved_memory]
    limits += [args.gradient_memory, args.states_memory] if full else []
    memory = ENGINE_BYTES + sum(parse_bytes(each, what="memory") for each in limits)
    tokens = 1 if args.mode == "decode" else args.tokens
    call = (args.shape, args.dtype, args.mode, tokens)
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder, "network.py")
        network.write_text(
            "import _weights_model\n\n\ndef build(batch):\n"
            f"    return _weights_model.planned(*{call!r})\n"
        )
        words = f"{network}:build --weights flash --batch 1 --optimizer adam --format {args.format}"
        words += f" --machine {args.machine} --memory {memory}"
        words += " --forward-only" * inference
        request = plan_step.check_step(plan.parser().parse_args(words.split()))
        try:
            step = request.plan()
        except BudgetError as error:
            print(f"there is no plan to compare with: {error}")
            return None
    return {
        "memory_bytes": memory,
        "step_s": step.replayed.step_ns / 1e9,
        "read_bytes": step.read_bytes,
        "written_bytes": step.written_bytes,
        "binds": step.bounds.binds,
    }


# -- one side ----------------------------------------------------------------------------------------


def child(job):
    _weights_steps.enter(job.get("group"))
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
        return {"built_s": built_s, **_weights_steps.measure(work.step, job)}
    settings = {"device_memory": job["saved_memory"], "flash": job["dir"]}
    with penstock.offload(
        model, weights="flash", weights_memory=job["weights_memory"], **settings
    ) as session:
        found = _weights_steps.measure(work.step, job)
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

    def step(self, ids):
        if self.job["mode"] in ("prefill", "decode"):
            with torch.no_grad():
                return _weights_steps.sampled(self.model(ids))
        loss = _weights_model.loss_of(self.model, ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item()]


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
