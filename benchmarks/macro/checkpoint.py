"""Checkpoints of one training state: ours, the peers', and what the disk allows.

Each figure comes from a process of its own; the sides take turns, round by round, and ratios are of the
same round. The state has the shapes of BERT-Base with Adam's two moments: 597 float32 tensors, 1.31 GB
(``--layers`` makes it larger, and the result one of its own). What is measured:

* ``save``: from the call until every file and directory is fsynced, at the rate of the state's bytes;
* ``load``: with no page of the files in the page cache, until every byte is in the tensors' memory and
  compared with what was saved; ours into tensors that are there (``ours``) and anew (``ours_fresh``);
* ``stall_s``: until the call gives control back, and what the next step of the optimizer waits;
* ``extra_bytes``: the most anonymous memory beyond what the process had before the call;
  ``cache_left_bytes``: pages of the files that are left in the page cache, by mincore;
* ``one_flipped_bit``: whether a load notices one in the middle of the longest file.

``raw`` writes the same bytes from huge pages into one new preallocated file and fsyncs it, with the same
engine, and reads them back to huge pages that are resident; ``raw_small`` reads to resident pages of
4 KiB, which is what the memory of torch's tensors is. ``raw_reused`` writes them over a file that has
been written before, and ``ours_reused`` over the files of a retired checkpoint, as every save of a
``Checkpointer`` does once one is retired. Where a file lies on a device makes a difference to what can
be had of it, so ``of_raw_there`` is a part of what the same engine does with huge pages and the very
files of the checkpoint, in the same process, afterwards. Peers that are not installed are left out, and
recorded as absent; ``--peer-python`` names interpreters that have some. ``fastpersist`` is DeepSpeed's
writer.
``--parts`` gathers rounds over several sittings, each of them ended by ``--limit``.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _checkpoint_child import files_of

import _peers
import _results

LAYERS = 12
CHILD = Path(__file__).with_name("_checkpoint_child.py")
SAVES = (
    "raw",
    "raw_reused",
    "ours",
    "ours_reused",
    "ours_async",
    "ours_async_reused",
    "torch_save",
    "safetensors",
    "dcp",
    "dcp_async",
    "fastpersist",
    "torchsnapshot",
)
LOADS = ("raw", "raw_small", "ours", "ours_fresh", "torch_save", "safetensors", "runai", "dcp",
         "fastpersist", "torchsnapshot")  # fmt: skip
NEEDS = {
    "safetensors": "safetensors",
    "torchsnapshot": "torchsnapshot",
    "runai": "runai-model-streamer",
    "fastpersist": "deepspeed",
}
SAVED_BY = {"raw_small": "raw", "ours_fresh": "ours", "runai": "safetensors"}
LIMITS = {"ours_reused": "raw_reused", "ours_async_reused": "raw_reused"}
"""What a side's saves are a part of, if not of ``raw``: the same into a file that is there."""
OURS = {"raw", "raw_reused", "ours", "ours_reused", "ours_async", "ours_async_reused"}


def run(options, side, what, path):
    python = interpreter(options, side)
    command = [python, "-W", "ignore", str(CHILD), "--side", side, "--what", what,
               "--path", str(path), "--layers", str(options.layers)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not told:
        return {"error": (done.stderr.strip().splitlines() or ["died"])[-1][:200]}
    return json.loads(told[0].removeprefix("RESULT "))


def flip(path):
    """One bit in the middle of the longest file."""
    longest = max(files_of(path), key=lambda each: each.stat().st_size)
    with longest.open("r+b") as file:
        file.seek(longest.stat().st_size // 2 + 12345)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())


def interpreter(options, side):
    """One that has what a side needs: this one, or one of ``--peer-python``; None: there is none."""
    wanted = NEEDS.get(side)
    return sys.executable if wanted is None else _peers.interpreter(wanted, options.peer_python)


def measure(options, directory, gathered, side, number):
    """A save of one side, and the loads of what it has saved."""
    path = directory / side
    gathered.setdefault(f"{side} save", []).append(run(options, side, "save", path))
    for loader in LOADS:
        if SAVED_BY.get(loader, loader) == side and interpreter(options, loader):
            gathered.setdefault(f"{loader} load", []).append(run(options, loader, "load", path))
    if number == 0 and side in LOADS and side != "raw" and not options.quick:
        flip(path)
        told = run(options, side, "load", path)
        verdict = "noticed" if "error" in told else "not hit" if told["same"] else "silently wrong"
        gathered[f"{side} flip"] = [verdict]
    shutil.rmtree(path, ignore_errors=True)


def all_measurements(options, parts, gathered):
    """Those that are missing; false: time was up before the last."""
    start = time.monotonic()
    saves = [each for each in SAVES if each in options.only and interpreter(options, each)]
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for number in range(options.rounds):
            turn = number % len(saves)
            for side in saves[turn:] + saves[:turn]:
                if len(gathered.get(f"{side} save", [])) > number:
                    continue
                if time.monotonic() - start > options.limit:
                    return False
                measure(options, Path(directory), gathered, side, number)
                if parts:
                    parts.write_text(json.dumps(gathered))
    return True


def figures(gathered):
    """Medians, and ratios of the same round."""
    made = {}
    for key, rounds in gathered.items():
        side, what = key.split()
        if what == "flip":
            made.setdefault(side, {})["one_flipped_bit"] = rounds[0]
            continue
        errors = [each["error"] for each in rounds if "error" in each]
        if errors:
            made.setdefault(side, {})[f"{what}_error"] = errors[0]
            continue
        rates = [each["bytes"] / each["seconds"] for each in rounds]
        limits = [
            each["bytes"] / each["seconds"]
            for each in gathered.get(f"{LIMITS.get(side, 'raw')} {what}", ())
            if "error" not in each
        ]
        told = {
            "bytes_per_s": round(statistics.median(rates)),
            "least_bytes_per_s": round(min(rates)),
            "most_bytes_per_s": round(max(rates)),
            "extra_bytes": max(each["extra"] for each in rounds),
            "cache_left_bytes": max(each["cache"] for each in rounds),
        }
        if limits:
            shares = [a / b for a, b in zip(rates, limits, strict=False)]
            told["of_raw"] = round(statistics.median(shares), 3)
        if "limit_s" in rounds[0]:
            shares = [each["limit_s"] / each["seconds"] for each in rounds]
            told["of_raw_there"] = round(statistics.median(shares), 3)
        if "stall_s" in rounds[0]:
            told["stall_s"] = round(statistics.median(each["stall_s"] for each in rounds), 4)
        if what == "load":
            told["same"] = all(each["same"] for each in rounds)
        made.setdefault(side, {})[what] = told
    return made


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="a directory on the device to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--parts", help="a file with the rounds of earlier sittings; they are added to"
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds of this sitting")
    parser.add_argument("--into", default=str(_results.RESULTS))
    parser.add_argument(
        "--peer-python",
        nargs="*",
        default=[],
        help="interpreters that have DeepSpeed or torchsnapshot",
    )
    parser.add_argument("--only", nargs="*", default=SAVES, choices=SAVES, help="sides that save")
    parser.add_argument("--quick", action="store_true", help="one round; no result is written")
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    return options


def main():
    options = arguments()
    parts = Path(options.parts) if options.parts else None
    gathered = json.loads(parts.read_text()) if parts and parts.exists() else {}
    if not all_measurements(options, parts, gathered):
        return
    made = figures(gathered)
    compare(made)
    if not options.quick:
        first = gathered["raw save"][0]
        config = {"rounds": len(gathered["raw save"]), "layers": options.layers}
        config["state_bytes"] = first["bytes"]
        for side, package in NEEDS.items():
            python = interpreter(options, side)
            known = None if python is None else _peers.has(package, python)
            config[f"{side}_version"] = known or "absent"
        size = "" if options.layers == LAYERS else f"_{options.layers}_layers"
        name = Path(__file__).stem + size
        _results.write(name, made, config, directory=options.dir, into=options.into)
    sys.stdout.write(json.dumps(made, indent=1) + "\n")


def compare(made):
    """Our saves with the best of the peers."""
    saves = {side: each["save"]["bytes_per_s"] for side, each in made.items() if "save" in each}
    peers = [rate for side, rate in saves.items() if side not in OURS]
    for side in ("ours", "ours_reused"):
        if peers and side in saves:
            made[side]["save"]["of_best_peer"] = round(saves[side] / max(peers), 3)


if __name__ == "__main__":
    main()
