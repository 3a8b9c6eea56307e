"""Models whose weights rest on flash: time, memory and bytes of a step, beside plain PyTorch.

Each side is a process of its own, in a control group that limits all of its memory, page cache included
(version 1 of control groups; without them the limit is not set, and the result says so). The processes
of a round live together and take turns, step by step, since a machine's speed drifts. ``disk_busy`` is
the part of a step in which the disk had work, as the system counts it. What is trained is
a decoder in the shape of LLaMA with random weights, or GPT-2 XL (``--shape gpt2-xl``, without adapters):

* ``full``: all weights trained by ``FlashAdamW`` in backward, states in int8;
* ``lora``: adapters on a frozen base;
* ``prefill``: a forward over all tokens without gradients;
* ``decode``: a forward over a single token.

``flash`` streams the weights; ``plain`` has them in memory, without a limit; ``mapped`` has them in
mapped files, which the kernel pages. ``accelerate``, ``airllm``, ``slowllama`` and ``deepspeed`` stream
them too (``benchmarks/peers/streamed_weights.py``; each has some of the modes). They get the same weights
and tokens, and what comes out is compared: the loss, or some of the last token's logits. Before it starts
the files of a peer leave the page cache.

``--disk-rate`` lets each side read and write so many bytes per second at most, each way (by the control
groups of block devices, version 1), as a slower disk does: then the disk takes longer than computing on
this machine, too.

``auto`` is ``flash`` with ``memory="auto"``, no memory for gradients and no other limit: the session
divides by itself what the control group leaves. ``untrimmed`` is ``flash`` in a process that keeps what
``malloc`` keeps, and ``mmap`` in one in which ``malloc`` maps each larger block by itself; they may use
three times the memory.

``beside_transfers``, named after ``flash`` and ``plain``, is ``plain`` beside a process that does nothing
but move as many bytes as the last step of ``flash``, by system calls spread over it: what those bytes
cost on this machine, whoever moves them.

Two sides are bounds of a step. ``raw`` moves the bytes that the last step of ``flash`` has read and
written, through the same engine, and does nothing else. ``compute`` is forward and backward of a plain
decoder in memory, without an update, of which 1 and 3 blocks are timed and the others counted, so that it
can be had for models that do not fit. ``bound`` compares with the longer of both in each turn.
``expected`` has the bytes of weights that a step reads and writes if none stays in memory; ``plan`` has
what ``penstock plan --weights flash`` foretells with the machine file of ``--machine``.

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
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _weights_model
import _weights_steps
import torch
from _planned_step import beside, figures_of, request_of
from _raw_file import LENGTH, Mover, RawFile

import _peers
import _results
import penstock
from penstock.cli.step_request import record_bytes
from penstock.core.errors import BudgetError
from penstock.core.units import MIB, parse_bandwidth, parse_bytes, round_up
from penstock.io.mapping import PAGE_BYTES
from penstock.optim import FlashAdamW
from penstock.runtime import freed_memory

BOUNDS = ("raw", "compute")
HEAPS = ("untrimmed", "mmap")
STREAMED = ("flash", "auto", *HEAPS)
PLAIN = ("plain", "beside_transfers")
OURS = (*STREAMED, *PLAIN, "mapped", *BOUNDS)
WARM_UP = 2
"""Turns that are not counted."""
PEERS = {
    "accelerate": ("accelerate", ("full", "prefill", "decode")),
    "airllm": ("airllm", ("prefill", "decode")),
    "slowllama": ("sentencepiece", ("lora",)),
    "deepspeed": ("deepspeed", ("full",)),
}
"""A package that each needs, and the modes that it has."""
PEER_SCRIPT = _results.ROOT / "benchmarks" / "peers" / "streamed_weights.py"
MMAP = {
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "THP_MEM_ALLOC_ENABLE": "1",
}
DISK_GROUPS = Path("/sys/fs/cgroup/blkio")
FLOOR = MIB
"""Smaller weights stay in memory."""


def main():
    args = parse()
    if args.job:
        child(json.loads(args.job))
        return
    _results.warn_if_busy()
    foretold = planned(args) if args.machine and not args.disk_rate else None
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        sides = {side: job_of(args, side, scratch) for side in args.sides}
        sides = {side: job for side, job in sides.items() if job and prepared(job)}
        rounds = []
        for number in range(args.rounds):
            rounds.append(take_turns(args, sides))
            print(json.dumps({"round": number, **rounds[-1]}), flush=True)
    figures = compared(args, rounds, foretold)
    print(json.dumps(figures, indent=2))
    if args.into:
        config = {
            key: getattr(args, key)
            for key in ("shape", "mode", "dtype", "tokens", "memory", "rounds")
        }
        config |= {"weights_memory": args.weights_memory, "steps": args.steps}
        config |= {"disk_rate": args.disk_rate} if args.disk_rate else {}
        config["peers"] = {side: job["version"] for side, job in sides.items() if side in PEERS}
        name = args.name or f"weights_{args.mode}_{args.shape}"
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
    parser.add_argument("--disk-rate", help="limit of reading and of writing, as 200MB/s")
    parser.add_argument("--machine", help="a machine file, to compare the plan with the step")
    parser.add_argument("--peers-python", nargs="*", default=[], help="interpreters with the peers")
    parser.add_argument("--slowllama", help="a checkout of okuvshynov/slowllama")
    parser.add_argument("--into", help="folder for the result file")
    parser.add_argument("--name", help="of the result file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shape == "gpt2-xl" and (args.mode == "lora" or {*args.sides} & {*PEERS}):
        parser.error("gpt2-xl has no mode lora, and peers do not have it")
    return args


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
    job = {**job, "stage": "prepare"}
    with tempfile.TemporaryFile("w+") as errors:
        problem = last_words(started(job, errors), errors, job)
    if problem:
        print(f"{job['side']} is left out: it could not write its files: {problem}")
    return not problem


def take_turns(args, sides):
    """The figures of each side, whose steps alternate with those of the others."""
    running = {side: Running(args, job) for side, job in sides.items()}
    mover = Mover(args.dir) if "beside_transfers" in sides else None
    try:
        turns = {side: [] for side in running}
        for number in range(WARM_UP + args.steps):
            moved, plain_s = (0, 0), 0
            for side, each in running.items():
                if side == "beside_transfers":
                    mover.begin(*moved, plain_s)
                found = each.step(moved)
                if side == "beside_transfers":
                    mover.wait()
                if found is None:
                    continue
                print(f"  {number} {side}: {found['step_s']:.2f} s", file=sys.stderr)
                if side == "flash":
                    moved = found["read_bytes"], found["written_bytes"]
                if side == "plain":
                    plain_s = found["step_s"]
                turns[side].append(found)
        return {side: each.figures(turns[side]) for side, each in running.items()}
    finally:
        for each in running.values():
            each.end()
            each.leave()
        if mover is not None:
            mover.close()


class Running:
    """One side's process, and its control group."""

    def __init__(self, args, job):
        leave_page_cache(job["folder"])
        self.group = None
        unlimited = job["side"] in (*PLAIN, *BOUNDS) or not _weights_steps.CGROUPS.is_dir()
        self.limit = None if unlimited else parse_bytes(args.memory, what="--memory")
        if self.limit is not None and job["side"] in HEAPS:
            self.limit *= 3
        if self.limit is not None:
            self.group = _weights_steps.CGROUPS / f"penstock-weights-{os.getpid()}-{job['side']}"
            self.group.mkdir()
            (self.group / "memory.limit_in_bytes").write_text(str(self.limit))
        self.slowed = slowed(args, job["side"]) if args.disk_rate else None
        job = {**job, "groups": [str(each) for each in self.groups()]}
        self.job = {**job, "stage": "measure"}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in ``end``)
        self.process = started(self.job, self.errors)
        self.known = self.answer() or {}

    def step(self, moved):
        """The figures of the next step; None if the process has ended.

        Args:
            moved: Bytes that the last step of ``flash`` has read, and has written.
        """
        try:
            self.process.stdin.write("{} {}\n".format(*moved))
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def figures(self, turns):
        """Medians of the steps after the first two, and the peak of the control group."""
        found = dict(self.known)
        problem = self.end()
        if problem:
            found["failed"] = problem
        elif turns:
            counted = turns[WARM_UP:]
            found |= {
                key: statistics.median(each[key] for each in counted)
                for key in ("step_s", "read_bytes", "written_bytes", "disk_busy")
                if key in counted[0]
            }
            found["times"] = [each["step_s"] for each in turns]
            found["outputs"] = [each["outputs"] for each in turns]
        if self.group:
            peak = int((self.group / "memory.max_usage_in_bytes").read_text())
            found |= {"limited_to_bytes": self.limit, "group_peak_bytes": peak}
        return found

    def end(self):
        """Let the process end; return its last words if it failed."""
        if self.errors.closed:
            return None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.read()
        problem = last_words(self.process, self.errors, self.job)
        self.errors.close()
        return problem

    def groups(self):
        return [each for each in (self.group, self.slowed) if each]

    def leave(self):
        """Remove the control groups."""
        for each in self.groups():
            time.sleep(0.2)
            each.rmdir()


def slowed(args, side):
    """A new control group that limits what a side reads and writes, as its folder."""
    number = os.stat(args.dir).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    whole = device.parent if (device / "partition").exists() else device
    group = DISK_GROUPS / f"penstock-weights-{os.getpid()}-{side}"
    group.mkdir()
    rate = parse_bandwidth(args.disk_rate, what="--disk-rate")
    for way in ("read", "write"):
        limit = f"{(whole / 'dev').read_text().strip()} {rate}"
        (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
    return group


def started(job, errors):
    return subprocess.Popen(
        [*job["command"], json.dumps(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ | (MMAP if job["side"] == "mmap" else {}),
    )


def last_words(process, errors, job):
    """Wait for a process; return what it said last if it failed."""
    process.wait()
    errors.seek(0)
    lines = errors.read().rstrip().splitlines()
    print("\n".join(lines), file=sys.stderr)
    if process.returncode == 0:
        return None
    last = (
        lines[-1] if lines and process.returncode > 0 else f"ended by signal {-process.returncode}"
    )
    return last.replace(job["folder"], "")


def leave_page_cache(folder):
    """What is cached when a group ends is not counted in the next one, so it must not stay."""
    for path in filter(Path.is_file, Path(folder).rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compared(args, rounds, foretold):
    """Medians of each side, and of the ratios of the steps of ``flash`` to those of the same turns."""
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
        pairs = [(each["flash"], each[side]) for each in good if "times" in each.get("flash", ())]
        pairs = [(ours, theirs) for ours, theirs in pairs if "times" in theirs]
        if side == "flash" or not pairs:
            continue
        ratios = [ratios_of_turns(ours["times"], theirs["times"]) for ours, theirs in pairs]
        figures[side] |= {
            "flash_ratio": statistics.median(ratio for each in ratios for ratio in each),
            "flash_ratio_of_each_round": [statistics.median(each) for each in ratios],
        }
        if side not in BOUNDS:
            figures[side]["largest_difference"] = max(
                largest_difference(ours["outputs"], theirs["outputs"]) for ours, theirs in pairs
            )
    flash = figures.get("flash", {})
    bounded = [
        each for each in rounds if all("times" in each.get(side, ()) for side in ("flash", *BOUNDS))
    ]
    if bounded:
        longest = [longest_of(each) for each in bounded]
        figures["bound"] = {
            "step_s": statistics.median(each for times in longest for each in times[WARM_UP:]),
            "flash_ratio": statistics.median(
                ratio
                for each, times in zip(bounded, longest, strict=True)
                for ratio in ratios_of_turns(each["flash"]["times"], times)
            ),
        }
    if "step_s" in flash:
        figures["expected"] = beside(expected(args), flash)
        if foretold:
            figures["plan"] = beside(foretold, flash)
    return figures


def ratios_of_turns(ours, theirs):
    return [one / other for one, other in zip(ours[WARM_UP:], theirs[WARM_UP:], strict=True)]


def longest_of(turns):
    """The longer of the two that bound a step, turn by turn, in s."""
    return [max(both) for both in zip(*(turns[side]["times"] for side in BOUNDS), strict=True)]


def largest_difference(some, others):
    return max(
        abs(one - other)
        for each, another in zip(some, others, strict=True)
        for one, other in zip(each, another, strict=True)
    )


def expected(args):
    """Bytes of weights, and those that a step reads and writes if no weight stays in memory.

    A trained weight is read twice and written once, and its records both ways once. Of an embedding a
    forward reads rows, and backward nothing.
    """
    with torch.device("meta"):
        shape, dtype = _weights_model.SHAPES[args.shape], getattr(torch, args.dtype)
        model = shape.network(dtype)
    large = [each for each in model.parameters() if each.nbytes >= FLOOR]
    total, embedding = sum(each.nbytes for each in large), shape.unread * dtype.itemsize
    if args.mode in ("prefill", "decode"):
        read, written = total - embedding, 0
    elif args.mode == "lora":
        read, written = 2 * (total - embedding), 0
    else:
        of = record_bytes("adam", args.format)
        records = sum(of(each.numel(), args.dtype) for each in large)
        read, written = 2 * total - embedding + records, total + records
    return {"weight_bytes": total, "read_bytes": read, "written_bytes": written}


def planned(args):
    """What ``penstock plan`` foretells of a step with the same limits of weights and saved tensors."""
    inference = args.mode in ("prefill", "decode")
    tokens = 1 if args.mode == "decode" else args.tokens
    call = (args.shape, args.dtype, args.mode, tokens)
    words = f"--weights flash --batch 1 --optimizer adam --format {args.format}"
    words += f" --machine {args.machine} --weights-memory {args.weights_memory}"
    words += " --forward-only" if inference else f" --saved-memory {args.saved_memory}"
    try:
        return figures_of(request_of(call, words).plan())
    except BudgetError as error:
        print(f"there is no plan to compare with: {error}")
        return None


# -- one side ----------------------------------------------------------------------------------------


def child(job):
    _weights_steps.enter(*job["groups"])
    if job["side"] == "raw":
        serve_raw(job["dir"])
        return
    torch.manual_seed(0)
    begun = time.perf_counter()
    shape = _weights_model.SHAPES[job["shape"]]
    if job["side"] == "compute":
        serve_compute(shape, job)
        return
    if job["side"] == "untrimmed":
        freed_memory.HeapTrimmer._watch = lambda _: None
    if job["side"] in STREAMED:
        with penstock.built_on_flash(job["dir"]):
            model = shape.network(getattr(torch, job["dtype"]))
    elif job["side"] == "mapped":
        model = mapped(shape, job["dir"], getattr(torch, job["dtype"]))
    else:
        model = shape.network(getattr(torch, job["dtype"]))
    built_s = time.perf_counter() - begun
    if job["mode"] == "lora":
        _weights_model.adapt(model)
    work = Work(model, job)
    if job["side"] not in STREAMED:
        _weights_steps.serve(work.step, job, built_s=built_s)
        return
    limits = {"device_memory": job["saved_memory"], "weights_memory": job["weights_memory"]}
    if job["side"] == "auto":
        limits = {"memory": "auto"}
    with penstock.offload(model, weights="flash", flash=job["dir"], **limits) as session:
        _weights_steps.serve(work.step, job, built_s=built_s)
        print(session.summary(), file=sys.stderr)


class Work:
    """One step, of training or of inference."""

    def __init__(self, model, job):
        self.model, self.job = model, job
        self.numbers = torch.Generator().manual_seed(1)
        trained = [each for each in model.parameters() if each.requires_grad]
        if job["mode"] == "full":
            limits = {} if job["side"] == "auto" else {"host_memory": job["states_memory"]}
            if job["side"] not in ("auto", *PLAIN):
                limits["gradient_memory"] = job["gradient_memory"]
            self.optimizer = FlashAdamW(
                trained, lr=1e-4, flash=job["dir"], format=job["format"], overlap=True, **limits
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
        model = shape.network(dtype)
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


def serve_raw(directory):
    """Read and write as many bytes through the engine as each line of stdin says, nothing else."""
    file = RawFile(directory)
    file.go(written=LENGTH)
    _weights_steps.write({})
    for line in sys.stdin:
        read, written = (round_up(int(each), PAGE_BYTES) for each in line.split())
        begun = time.perf_counter()
        file.go(read, written)
        took = time.perf_counter() - begun
        found = {"step_s": took, "outputs": [], "read_bytes": read, "written_bytes": written}
        _weights_steps.write(found)


def serve_compute(shape, job):
    """Time a plain decoder of 1 block and one of 3, and write what all blocks would take."""
    models = []
    for layers in (1, 3):
        models.append(shape._replace(layers=layers).network(getattr(torch, job["dtype"])))
        if job["mode"] == "lora":
            _weights_model.adapt(models[-1])
    _weights_steps.write({})
    for _, ids in zip(sys.stdin, _weights_steps.all_ids(job), strict=False):
        one, three = (timed(model, ids, job["mode"]) for model in models)
        took = one + (shape.layers - 1) * (three - one) / 2
        found = {"step_s": took, "outputs": [], "read_bytes": 0, "written_bytes": 0}
        _weights_steps.write(found)


def timed(model, ids, mode):
    """Seconds of a forward, and of a backward if the mode has one."""
    begun = time.perf_counter()
    if mode in ("prefill", "decode"):
        with torch.no_grad():
            model(ids)
    else:
        _weights_model.loss_of(model, ids).backward()
    took = time.perf_counter() - begun
    model.zero_grad()
    return took


if __name__ == "__main__":
    main()
