"""Models larger than memory built, saved and loaded: speed beside the disk's, and memory.

In a control group that limits all memory of the process, page cache included, one process builds a
decoder in the shape of LLaMA on flash (``built_on_flash``), saves it as safetensors (``weights.save``),
and loads these into new homes (``weights.load`` of a model on meta). Beside them in each round: the same
constructor in memory, without a limit (``plain``), for random numbers take most of a build; and the same
bytes written to a new file and read through the engine, and nothing else (``raw``). A save reads homes
and writes files, a load the reverse, so their limit is both. Medians of the rounds; ratios are of the
times in the same round. ``peak_bytes`` is of the group; before the build it holds ``start_bytes``.

    python benchmarks/macro/weights_files.py --dir /nvme/scratch --shape 774M
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _weights_model
import _weights_steps
import torch
from _raw_file import LENGTH, RawFile

import _results
import penstock
from penstock import weights
from penstock.core.units import parse_bytes

SIDES = ("plain", "flash", "raw")


def main():
    args = parse()
    if args.side:
        globals()[f"do_{args.side}"](args)
        return
    _results.warn_if_busy()
    rounds = []
    for number in range(args.rounds):
        rounds.append({side: run(args, side) for side in SIDES})
        print(json.dumps({"round": number, **rounds[-1]}), flush=True)
    figures = compared(rounds)
    print(json.dumps(figures, indent=2))
    if args.into:
        config = {key: getattr(args, key) for key in ("shape", "memory", "rounds")}
        name = f"model_files_{args.shape}"
        figures["rounds"] = rounds
        _results.write(name, figures, config, directory=args.dir, into=args.into)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--shape", default="774M", choices=_weights_model.SHAPES)
    parser.add_argument("--memory", default="1GiB", help="of the control group of flash")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--into", help="folder for the result file")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args, side):
    """The figures of one side, a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--dir", args.dir, "--shape", args.shape]
    command += ["--memory", args.memory]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compared(rounds):
    """Medians, and the ratios of times in the same round."""
    ratios = {
        "build_of_plain": ("build_s", lambda each: each["plain"]["build_s"]),
        "build_of_disk": ("build_s", lambda each: each["raw"]["write_s"]),
        "save_of_disk": ("save_s", lambda each: each["raw"]["read_s"] + each["raw"]["write_s"]),
        "load_of_disk": ("load_s", lambda each: each["raw"]["read_s"] + each["raw"]["write_s"]),
    }
    return {
        side: {
            key: statistics.median(each[side][key] for each in rounds) for key in rounds[0][side]
        }
        for side in SIDES
    } | {
        name: [round(each["flash"][step] / limit(each), 3) for each in rounds]
        for name, (step, limit) in ratios.items()
    }


# -- one side ----------------------------------------------------------------------------------------


def do_plain(args):
    torch.manual_seed(0)
    begun = time.perf_counter()
    _weights_model.Decoder(_weights_model.SHAPES[args.shape], torch.float32)
    print(json.dumps({"build_s": time.perf_counter() - begun}))


def do_raw(args):
    file, total = RawFile(args.dir), nbytes_of(args)
    if total > LENGTH:
        sys.exit("weights_files: the raw file is shorter than the model")
    found = {}
    for op, share in ("write", {"written": total}), ("read", {"read": total}):
        begun = time.perf_counter()
        file.go(**share)
        found[f"{op}_s"] = time.perf_counter() - begun
        found[f"{op}_bytes_per_s"] = total / found[f"{op}_s"]
    print(json.dumps(found))


def do_flash(args):
    group = Group(args.memory)
    torch.zeros(1)
    shape, total = _weights_model.SHAPES[args.shape], nbytes_of(args)
    with torch.device("meta"):
        other = _weights_model.Decoder(shape, torch.float32)
    largest = max(each.nbytes for each in other.parameters())
    found = {"nbytes": total, "largest_tensor_bytes": largest, "start_bytes": group.peak()}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        torch.manual_seed(0)
        with group.timed(found, "build"), penstock.built_on_flash(args.dir):
            model = _weights_model.Decoder(shape, torch.float32)
        with group.timed(found, "save"):
            weights.save(model, f"{folder}/saved")
        with group.timed(found, "load"):
            weights.load(other, f"{folder}/saved", directory=args.dir)
        assert all(map(torch.equal, model.parameters(), other.parameters()))
    for step in ("build", "save", "load"):
        found[f"{step}_bytes_per_s"] = total / found[f"{step}_s"]
        over = found[f"{step}_peak_bytes"] - found["start_bytes"] - largest
        found[f"{step}_beside_largest_bytes"] = max(0, over)
    print(json.dumps(found))
    del model, other
    group.leave()


def nbytes_of(args):
    return 4 * _weights_model.SHAPES[args.shape].parameters


class Group:
    """A control group that limits this process, and knows how much it has held."""

    def __init__(self, limit):
        self._folder = _weights_steps.CGROUPS / f"penstock-files-{os.getpid()}"
        self._folder.mkdir()
        (self._folder / "memory.limit_in_bytes").write_text(str(parse_bytes(limit, what="memory")))
        _weights_steps.enter(self._folder)

    def peak(self):
        """Most bytes since the last call; page cache included."""
        most = self._folder / "memory.max_usage_in_bytes"
        found = int(most.read_text())
        most.write_text("0")
        return found

    @contextmanager
    def timed(self, found, step):
        """Note time and peak of a block."""
        self.peak()
        begun = time.perf_counter()
        yield
        found[f"{step}_s"] = time.perf_counter() - begun
        found[f"{step}_peak_bytes"] = self.peak()

    def leave(self):
        """Remove the group."""
        _weights_steps.enter(_weights_steps.CGROUPS)
        time.sleep(0.2)
        self._folder.rmdir()


if __name__ == "__main__":
    main()
