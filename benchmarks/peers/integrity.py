"""What one flipped bit does to a checkpoint, and what a writer leaves that is killed while overwriting.

For each way to save, in processes of their own:

* ``flips``: a state is saved; then single bits are flipped, one at a time, and the checkpoint is
  loaded: ``noticed`` (an error), ``harmless`` (all tensors are right), or ``silently wrong``. Some bits
  are drawn from the whole checkpoint, each as likely as any other, as flash loses them; others are
  near the ends of each file, where headers and indices are. Where a loader's process died or hung, that
  is told (``died``, ``hung``) and counts as noticed;
* ``kills``: a state is saved, another one over it, under the same name, and the process is killed (-9),
  with all that it has started, at several points of that; what then loads is ``previous`` or ``new``,
  whole, or it is ``lost`` (an error) or ``mixed`` (no error, and something that is neither: zeros,
  bytes of both, tensors missing). How much of the disk is taken then, and whether the next save there
  succeeds, loads, and tidies up.

The points are parts of the time that a save takes here; one that was over before its kill is tried again,
killed somewhat earlier. The state has random bits, and each of its parts another size. A killed writer
leaves what had reached the kernel, which is the milder fault: a machine that loses power leaves less. Who
writes to new names each time loses less than who replaces what is there, as most scripts do
(``latest.pt``). Peers that neither this interpreter nor one of ``--peer-python`` has are left out.

    python benchmarks/peers/integrity.py --dir /nvme/scratch
    python benchmarks/peers/integrity.py --table docs/integrity_table.md
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _integrity_ways import WAYS

import _results
from _peers import has, interpreter

CHILD = Path(__file__).with_name("_integrity_child.py")
POINTS = (0.01, *(number / 10 for number in range(1, 10)), 0.95, 0.99)
TIMED, ATTEMPTS, EARLIER = 3, 6, 0.85
TOLD = "TOLD "


class Server:
    """A process that has imported a way, and forks for each thing it is told to do."""

    def __init__(self, options, way, errors):
        python = interpreter(WAYS[way].needs, options.peer_python)
        command = [python, "-W", "ignore", str(CHILD), "--way", way, "--bytes", str(options.bytes)]
        quiet = {"RUNAI_STREAMER_LOG_LEVEL": "ERROR", "JAX_PLATFORMS": "cpu"}
        self.way, self.errors = way, errors
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.open("w"),
            text=True,
            env=os.environ | quiet,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def ask(self, what, path, first=0):
        """What is told, line by line, until the fork is over."""
        wanted = {"what": what, "path": str(path), "first": first}
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(TOLD):
                said = json.loads(line.removeprefix(TOLD))
                yield said
                if "over" in said:
                    return
        raise self.failed("its process is gone")

    def failed(self, what):
        lines = self.errors.read_text(errors="replace").strip().splitlines()
        return SystemExit(f"{self.way}, {what}: {(lines or ['died'])[-1]}")


def each_of(server, what, path):
    """One result after the other; a fork that dies is followed by one that goes on after it."""
    found = []
    while True:
        lines = list(server.ask(what, path, first=len(found)))
        begun = [each for each in lines if "begin" in each]
        ended = [each for each in lines if "end" in each]
        found += [without_number(a | b) for a, b in zip(begun, ended, strict=False)]
        if any("done" in each for each in lines):
            return found
        if len(begun) == len(ended):
            raise server.failed(what)
        found.append(without_number(begun[-1] | last_of(lines[-1]["over"], begun[-1], path)))


def without_number(one):
    return {key: value for key, value in one.items() if key not in ("begin", "end")}


def last_of(status, begun, path):
    """What a fork has left that died while it loaded."""
    if "bit" in begun:
        with (path / begun["file"]).open("r+b") as file:
            file.seek(begun["offset"])
            byte = file.read(1)[0]
            file.seek(begun["offset"])
            file.write(bytes([byte ^ 1 << begun["bit"]]))
    hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    return {"verdict": "hung" if hung else "died", "error": f"wait status {status}"}


def save_once(server, path, kill_after=None):
    """The seconds of an overwriting; None: it was killed after so long, before its end."""
    seconds, begun = None, False
    for each in server.ask("save", path):
        if "go" in each:
            begun = True
            if kill_after is not None:
                time.sleep(kill_after)
                with suppress(ProcessLookupError):  # it was done before
                    os.killpg(each["go"], signal.SIGKILL)
        seconds = each.get("seconds", seconds)
    if not begun or (kill_after is None and seconds is None):
        raise server.failed("save")
    return seconds


def taken_bytes(folder):
    """Of the disk, each file once."""
    found = {each.lstat().st_ino: each.lstat().st_blocks * 512 for each in folder.rglob("*")}
    return sum(found.values())


def kill_at(server, folder, seconds):
    """Overwrite until a kill hits; after what time it was, or None if none did."""
    for _ in range(ATTEMPTS):
        folder.mkdir()
        if save_once(server, folder / "state", seconds) is None:
            return seconds
        shutil.rmtree(folder)
        seconds *= EARLIER
    return None


def kills(server, directory):
    took, whole = [], 0
    for _ in range(TIMED):
        folder = directory / "once"
        folder.mkdir(parents=True)
        took.append(save_once(server, folder / "state"))
        whole = taken_bytes(folder)
        shutil.rmtree(folder)
    seconds = statistics.median(took)
    hit = {}
    for point in POINTS:
        folder = directory / f"{point:.2f}"
        after = kill_at(server, folder, seconds * point)
        if after is not None:
            hit[folder.name] = {"after_s": round(after, 4), "disk_bytes": taken_bytes(folder)}
    found = each_of(server, "outcomes", directory)
    assert [each["point"] for each in found] == sorted(hit)
    left = [
        each | hit[each["point"]] | {"next_disk_bytes": taken_bytes(directory / each["point"])}
        for each in found
    ]
    return left, {"save_s": round(seconds, 3), "whole_disk_bytes": whole}


def measure(options, way, directory):
    try:
        (directory / "flips").mkdir(parents=True)
        with Server(options, way, directory / "errors") as server:
            bits = each_of(server, "flips", directory / "flips" / "state")
            left, facts = kills(server, directory / "kills")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {"flips": bits, "kills": left} | facts | counts(bits, left)


def counts(bits, left):
    made = {}
    for kind in ("anywhere", "end"):
        verdicts = [each["verdict"] for each in bits if each["kind"] == kind]
        made[kind] = {
            "bits": len(verdicts),
            "noticed": sum(each in ("noticed", "died", "hung") for each in verdicts),
            "harmless": verdicts.count("harmless"),
            "silently_wrong": verdicts.count("silently wrong"),
        }
    ends = [each["verdict"] for each in left]
    made["killed"] = {
        "processes": len(ends),
        "previous": ends.count("previous"),
        "new": ends.count("new"),
        "lost": sum(each in ("lost", "died", "hung") for each in ends),
        "mixed": ends.count("mixed"),
        "next_save_whole": sum(each.get("next_save") == "whole" for each in left),
        "most_disk_bytes": max((each["disk_bytes"] for each in left), default=0),
        "most_next_disk_bytes": max((each["next_disk_bytes"] for each in left), default=0),
    }
    return made


def brief(one):
    """With bits of one outcome as one entry, of which the first is told; all come from a seed."""
    grouped = {}
    for each in one["flips"]:
        key = each["kind"], each["verdict"], each["error"].split(":")[0]
        first = f"{each['file']}, bit {each['bit']} of byte {each['offset']} of {each['of']}"
        group = {name: each[name] for name in ("kind", "verdict", "error")}
        grouped.setdefault(key, group | {"first": first, "bits": 0})["bits"] += 1
    return one | {"flips": list(grouped.values())}


COLUMNS = ("Saved by", "Bits flipped", "Noticed", "Changed nothing", "Silently wrong",
           "Killed", "Previous loads", "New loads", "Neither loads", "Loads wrong", "Disk taken",
           "After the next save")  # fmt: skip
HEAD = _results.page_head("peers/integrity.py --table")


def table(figures, state_bytes):
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    for way, one in figures.items():
        label = WAYS[way].label
        if WAYS[way].needs != "penstock":
            label += f" {one['version'].split('+')[0]}"
        killed = one["killed"]
        cells = [label]
        cells += [
            f"{one['anywhere'][each]} + {one['end'][each]}"
            for each in ("bits", "noticed", "harmless", "silently_wrong")
        ]
        cells += [killed[each] for each in ("processes", "previous", "new", "lost", "mixed")]
        for each in ("most_disk_bytes", "most_next_disk_bytes"):
            cells.append(f"{killed[each] / state_bytes:.1f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--bytes", type=int, default=64 << 20, help="of the state, about")
    parser.add_argument("--peer-python", nargs="*", default=[], help="interpreters that have peers")
    parser.add_argument("--into", default=str(_results.RESULTS))
    parser.add_argument("--parts", help="a file with ways of earlier sittings; they are added to")
    parser.add_argument(
        "--table", help="a file for the table of the result that is there; nothing is run"
    )
    parser.add_argument("--quick", action="store_true", help="a small state; no result file")
    return parser.parse_args()


def main():
    options = arguments()
    if options.table:
        result = json.loads((Path(options.into) / "integrity.json").read_text())
        text = table(result["figures"], result["config"]["state_bytes"])
        Path(options.table).write_text(HEAD + text, encoding="utf-8")
        return
    if options.quick:
        options.bytes = 12 << 20
    parts = Path(options.parts) if options.parts else None
    known = json.loads(parts.read_text()) if parts and parts.exists() else {}
    absent = []
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for way in options.ways:
            python = interpreter(WAYS[way].needs, options.peer_python)
            if python is None:
                absent.append(way)
            elif way not in known:
                began = time.monotonic()
                known[way] = measure(options, way, Path(directory) / "way")
                known[way]["version"] = has(WAYS[way].needs, python)
                known[way]["run_s"] = round(time.monotonic() - began, 1)
                print(way, {key: known[way][key] for key in ("anywhere", "end", "killed")})
                sys.stdout.flush()
                if parts:
                    parts.write_text(json.dumps(known))
    figures = {way: brief(known[way]) for way in WAYS if way in known}
    print(table(figures, options.bytes), end="")
    if not options.quick:
        config = {"state_bytes": options.bytes, "kill_points": POINTS, "absent": absent}
        _results.write("integrity", figures, config, directory=options.dir, into=options.into)


if __name__ == "__main__":
    main()
