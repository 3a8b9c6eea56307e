"""What one flipped bit does to a checkpoint, and what a writer leaves that is killed while overwriting.

For each way to save, in processes of their own:

* ``flips``: a state is saved; then one bit of each of its files is flipped, at several places, one at a
  time, and the checkpoint is loaded: ``noticed`` (an error), ``harmless`` (the bytes of all tensors are
  right), or ``silently wrong``;
* ``kills``: a state is saved, another one over it, under the same name, and the process is killed (-9)
  at several points of that; what then loads is ``previous`` or ``new``, whole, or it is ``lost`` (an
  error) or ``mixed`` (no error, and bytes of neither, or of both).

The state has random bits. A killed writer leaves what had reached the kernel, which is the milder fault:
a machine that loses power leaves less. Who writes to new names each time loses less than who replaces
what is there, as most scripts do (``latest.pt``). Peers that are not installed are left out.

    python benchmarks/peers/integrity.py --dir /nvme/scratch
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp

import _results
from penstock import checkpoint

TENSORS = 12
POINTS = (0.02, 0.2, 0.4, 0.6, 0.8, 0.95)
PLACES = (0.25, 0.5, 0.75)
"""Of a file, where bits are flipped; also near its ends, in header and trailer."""
END_BYTES = 40


def build(seed, nbytes):
    generator = torch.Generator().manual_seed(seed)
    count = nbytes // TENSORS // 4
    return {
        f"layer.{index}.weight": torch.empty(count, dtype=torch.int32)
        .random_(generator=generator)
        .view(torch.float32)
        for index in range(TENSORS)
    }


def digest(state):
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# -- the ways: save over what is there, load anew ------------------------------------------------------


class TorchSave:
    needs = "torch"

    def save(self, state, path):
        path.mkdir(exist_ok=True)
        torch.save(state, path / "state.pt")

    def load(self, path, state):
        return torch.load(path / "state.pt", weights_only=True)


class TorchSaveLegacy(TorchSave):
    def save(self, state, path):
        path.mkdir(exist_ok=True)
        torch.save(state, path / "state.pt", _use_new_zipfile_serialization=False)


class Safetensors:
    needs = "safetensors"

    def save(self, state, path):
        from safetensors.torch import save_file  # noqa: PLC0415

        path.mkdir(exist_ok=True)
        save_file(state, path / "state.safetensors")

    def load(self, path, state):
        from safetensors.torch import load_file  # noqa: PLC0415

        return load_file(path / "state.safetensors")


class Runai(Safetensors):
    needs = "runai-model-streamer"

    def load(self, path, state):
        from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path / "state.safetensors"))
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


class Dcp:
    needs = "torch"

    def save(self, state, path):
        writer = dcp.FileSystemWriter(path, sync_files=True)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(self, path, state):
        dcp.load(state, checkpoint_id=path, no_dist=True)
        return state


class DcpAsync(Dcp):
    def save(self, state, path):
        writer = dcp.FileSystemWriter(path, sync_files=True)
        future = dcp.async_save(state, storage_writer=writer, no_dist=True)
        getattr(future, "upload_completion", future).result()


class TorchSnapshot:
    needs = "torchsnapshot"

    def save(self, state, path):
        import torchsnapshot  # noqa: PLC0415

        torchsnapshot.Snapshot.take(str(path), {"s": torchsnapshot.StateDict(**state)})

    def load(self, path, state):
        import torchsnapshot  # noqa: PLC0415

        held = torchsnapshot.StateDict(**state)
        torchsnapshot.Snapshot(str(path)).restore({"s": held})
        return dict(held)


class Tensorizer:
    needs = "tensorizer"

    def save(self, state, path):
        from tensorizer import TensorSerializer  # noqa: PLC0415

        path.mkdir(exist_ok=True)
        serializer = TensorSerializer(str(path / "state.tensors"))
        serializer.write_state_dict(state)
        serializer.close()

    def load(self, path, state):
        from tensorizer import TensorDeserializer  # noqa: PLC0415

        with TensorDeserializer(str(path / "state.tensors"), device="cpu") as found:
            return {name: found[name].detach().clone() for name in found.keys()}  # noqa: SIM118


class TensorizerVerified(Tensorizer):
    def load(self, path, state):
        from tensorizer import TensorDeserializer  # noqa: PLC0415

        file = str(path / "state.tensors")
        with TensorDeserializer(file, device="cpu", verify_hash=True) as found:
            return {name: found[name].detach().clone() for name in found.keys()}  # noqa: SIM118


class Ours:
    needs = "penstock"

    def save(self, state, path):
        checkpoint.save(path, state)

    def load(self, path, state):
        return checkpoint.load(path)


WAYS = {
    "torch.save": TorchSave,
    "torch.save, legacy": TorchSaveLegacy,
    "safetensors": Safetensors,
    "safetensors by runai": Runai,
    "dcp": Dcp,
    "dcp, async": DcpAsync,
    "torchsnapshot": TorchSnapshot,
    "tensorizer": Tensorizer,
    "tensorizer, verify_hash": TensorizerVerified,
    "penstock": Ours,
}


# -- the child -----------------------------------------------------------------------------------------


def child(options):
    torch.set_num_threads(1)
    way, path = WAYS[options.way](), Path(options.path)
    if options.what == "save":
        told = save_twice(way, path, options)
    elif options.what == "flips":
        told = flips(way, path, options)
    else:
        told = outcomes(way, path, options)
    print("RESULT " + json.dumps(told), flush=True)
    os._exit(0)


def save_twice(way, path, options):
    """Saves the first state, then the second over it; says when that begins."""
    way.save(build(1, options.bytes), path)
    second = build(2, options.bytes)
    for each in [*path.rglob("*"), path]:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    print("GO", flush=True)
    start = time.perf_counter()
    way.save(second, path)
    return {"seconds": time.perf_counter() - start}


def load(way, path, options):
    try:
        return digest(way.load(path, build(3, options.bytes))), ""
    except BaseException as error:  # noqa: BLE001  (DCP's are no Exceptions; whatever it is, it noticed)
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
            :160
        ]


def flips(way, path, options):
    right = digest(build(1, options.bytes))
    way.save(build(1, options.bytes), path)
    found = []
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        size = file.stat().st_size
        places = {int(size * each) for each in PLACES} | {END_BYTES, size - END_BYTES}
        for place in sorted(each for each in places if 0 <= each < size):
            flip(file, place)
            got, error = load(way, path, options)
            flip(file, place)
            verdict = "noticed" if got is None else "harmless" if got == right else "silently wrong"
            found.append({"file": file.name, "offset": place, "of": size, "verdict": verdict,
                          "error": error})  # fmt: skip
    assert load(way, path, options)[0] == right, "the bits were flipped back"
    return found


def flip(file, place):
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 16]))


def outcomes(way, path, options):
    """What is at each of several paths."""
    whole = {digest(build(1, options.bytes)): "previous", digest(build(2, options.bytes)): "new"}
    found = []
    for each in sorted(each for each in path.iterdir() if not each.name.startswith(".")):
        got, error = load(way, each, options)
        found.append({"point": each.name, "error": error,
                      "verdict": "lost" if got is None else whole.get(got, "mixed")})  # fmt: skip
    return found


# -- the parent ----------------------------------------------------------------------------------------


def command(options, way, what, path):
    return [sys.executable, "-W", "ignore", __file__, "--way", way, "--what", what,
            "--path", str(path), "--bytes", str(options.bytes)]  # fmt: skip


def run(options, way, what, path):
    done = subprocess.run(
        command(options, way, what, path), capture_output=True, text=True, timeout=300, check=False
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not told:
        raise SystemExit(f"{way}, {what}: {(done.stderr.strip().splitlines() or ['died'])[-1]}")
    return json.loads(told[0].removeprefix("RESULT "))


def kill_at(options, way, path, seconds):
    """Let a process overwrite a checkpoint, and kill it after so long; whether it was still at it."""
    process = subprocess.Popen(
        command(options, way, "save", path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        for line in process.stdout:
            if line.strip() == "GO":
                break
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.wait()
    return "RESULT" not in rest


def measure(options, way, directory):
    folder = Path(directory) / "way"
    folder.mkdir()
    try:
        bits = run(options, way, "flips", folder / "flips")
        shutil.rmtree(folder / "flips")
        took = run(options, way, "save", folder / "once")["seconds"]
        shutil.rmtree(folder / "once")
        killed = {}
        for point in POINTS:
            killed[str(point)] = kill_at(options, way, folder / str(point), took * point)
        left = run(options, way, "outcomes", folder)
    finally:
        shutil.rmtree(folder)
    assert len(left) == len(POINTS), "something is under each name"
    for each in left:
        each["killed"] = killed[each["point"]]
    return {"flips": bits, "kills": left, "save_s": round(took, 3)} | counts(bits, left)


def counts(bits, left):
    verdicts = [each["verdict"] for each in bits]
    ends = [each["verdict"] for each in left if each["killed"]]
    return {
        "bits": len(verdicts),
        "noticed": verdicts.count("noticed"),
        "harmless": verdicts.count("harmless"),
        "silently_wrong": verdicts.count("silently wrong"),
        "killed": len(ends),
        "lost": ends.count("lost"),
        "mixed": ends.count("mixed"),
    }


COLUMNS = ("Saved by", "Bits flipped", "Noticed", "Changed nothing", "Silently wrong",
           "Killed while overwriting", "Neither state loads", "Mixed")  # fmt: skip


def table(figures):
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for way, one in figures.items():
        name = "**Penstock**" if way == "penstock" else way
        label = f"{name} {one['version']}" if way != "penstock" else name
        lines.append(
            f"| {label} | {one['bits']} | {one['noticed']} | {one['harmless']} |"
            f" {one['silently_wrong']} | {one['killed']} | {one['lost']} | {one['mixed']} |"
        )
    return "\n".join(lines) + "\n"


def installed(way):
    try:
        return version(WAYS[way].needs)
    except PackageNotFoundError:
        return "" if WAYS[way].needs != "penstock" else "source"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--bytes", type=int, default=96 << 20)
    parser.add_argument("--into", default=str(_results.RESULTS))
    parser.add_argument("--quick", action="store_true", help="a small state; no result file")
    for name in ("--way", "--what", "--path"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        child(options)
    if options.quick:
        options.bytes = 8 << 20
    figures = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for way in options.ways:
            if not (found := installed(way)):
                continue
            figures[way] = measure(options, way, directory) | {"version": found}
            print(way, {k: v for k, v in figures[way].items() if isinstance(v, int)}, flush=True)
    print(table(figures), end="")
    if not options.quick:
        config = {"state_bytes": options.bytes, "kill_points": POINTS, "flip_places": PLACES}
        _results.write(
            Path(__file__).stem, figures, config, directory=options.dir, into=options.into
        )


if __name__ == "__main__":
    main()
