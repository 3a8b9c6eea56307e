"""What lossless codecs make of checkpoints: bytes, and the time that they take, of trained states.

Networks of the poster's, some scaled down, are trained for some steps on their data and saved plain and
with each codec; what is loaded is compared by a fingerprint of all its bits. Times are of
the processor, for the save and the load each: what waits for flash is not in them.

    python benchmarks/macro/checkpoint_codecs.py --dir /nvme/scratch
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import _results
from penstock import checkpoint
from penstock.checkpoint.manifest import CODECS
from penstock.lab.characterize.training import RankTraining

STATES = {"alexnet": (0.5, 40), "resnet18": (1.0, 12), "gpt2": (0.5, 12)}
"""How much of the published size, and how many steps of training."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--into", default=str(_results.RESULTS))
    options = parser.parse_args()
    figures = {name: measure(name, options.dir) for name in STATES}
    for name, each in figures.items():
        for codec, told in each["codecs"].items():
            print(f"{name} {codec}: {told}")
    config = {"states": STATES}
    _results.write(Path(__file__).stem, figures, config, directory=options.dir, into=options.into)


def measure(name, directory):
    scale, steps = STATES[name]
    training = RankTraining(name, scale=scale, parallel="none", device=torch.device("cpu"))
    for _ in range(steps):
        training.step()
    state = training.state()
    wanted = training.fingerprint()
    made = {"parameters": training.parameters, "codecs": {}}
    folder = Path(tempfile.mkdtemp(dir=directory))
    try:
        for codec in (None, *CODECS):
            checkpoint.save(
                folder / "a", state, codec=codec
            )  # code is compiled when it is first used
            start = time.process_time()
            saved = checkpoint.save(folder / "a", state, codec=codec)
            save_s = time.process_time() - start
            training.wipe()
            start = time.process_time()
            checkpoint.load(folder / "a", state)
            load_s = time.process_time() - start
            assert training.fingerprint() == wanted
            plain = made["codecs"].get("none", {"bytes": saved.nbytes})["bytes"]
            made["codecs"][codec or "none"] = {
                "bytes": saved.nbytes,
                "share": round(saved.nbytes / plain, 4),
                "save_cpu_s": round(save_s, 3),
                "load_cpu_s": round(load_s, 3),
            }
    finally:
        shutil.rmtree(folder)
    return made


if __name__ == "__main__":
    main()
