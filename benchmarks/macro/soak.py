"""A soak: a job that trains, evaluates, saves, sleeps and reads its data from flash, killed for hours.

The job (``_soak_child.py``) is a decoder that learns text with AdamW. In ``durable`` its weights, states,
gradients and activations are on flash and each step is durable; in ``checkpoints`` weights are in memory
and whole checkpoints are saved in the background. Half of the time is for each. At random moments the
job is killed (SIGKILL): while it starts, while it trains, while it is suspended, while the disk is full.
It is suspended (SIGTERM) and resumed or ended, stopped (SIGSTOP) and continued, its disk is full for a
while, its data set is slow to read, and some jobs have less flash than they need. In the last quarter of
its half nothing ends the job: resident memory, descriptors and threads may not grow then.

An undisturbed run, in memory and without Penstock, goes on beside it. Each loss, and the weights after
each evaluation, must be the same to the last bit. A job may resume no earlier than after the last step
that it had called durable; and when it has ended, no file is left but those that are named for the next.

As root it works on a file system of its own in a file of ``--dir``: filling that, and finding what has no
name but takes space, is possible only there.

    python benchmarks/macro/soak.py --dir /nvme/scratch --minutes 60
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _soak_child
from _soak_jobs import Job, Undisturbed, content_of

import _results

KINDS = ("durable", "checkpoints")
FAULTS = {
    "killed": 8,
    "killed at its start": 2,
    "killed while suspended": 2,
    "killed while the disk is full": 2,
    "suspended and resumed": 3,
    "suspended and ended": 1,
    "stopped": 2,
    "disk full": 2,
    "data slow": 2,
}
"""What is done to the job, and how often in proportion; each is done once at least."""
ENDS = tuple(each for each in FAULTS if each.startswith("killed") or each.endswith("ended"))
NEEDS_MOUNT = ("killed while the disk is full", "disk full")
TIGHT = 0.2
"""Share of jobs that have less flash than they need."""
QUIET = 0.25
"""Share of the time, at its end, in which nothing ends the job."""
FOLDERS = ("spill", "states", "rests", "checkpoints")


def is_checkpoint(name):
    """Return whether a name is that of a checkpoint, or of what the next Checkpointer removes."""
    return name.startswith(("step-", "."))


NOTHING = dict.fromkeys(FOLDERS, lambda _: False)
ALLOWED = {
    "durable": NOTHING
    | {"states": lambda name: name.startswith("penstock-states"), "rests": is_checkpoint},
    "checkpoints": NOTHING | {"checkpoints": is_checkpoint},
}
"""Names that a job may leave in its folders."""
DISK = "768M"
SLACK_BYTES = 4 << 20
"""What a file system may need for itself, beyond what it did at first."""


def main():
    args = parse()
    if os.geteuid() == 0 and not args.mounted and shutil.which("unshare"):
        # what is mounted goes with the last process
        words = ["unshare", "--mount", sys.executable, __file__, *sys.argv[1:], "--mounted"]
        os.execvp(words[0], words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(dir=args.dir) as folder, disk(Path(folder), args) as place:
        figures = soaked(args, place, Path(folder))
    config = {"minutes": args.minutes, "within_s": args.within, "seed": args.seed}
    config |= {"shape": _soak_child.SHAPE._asdict(), "tokens": _soak_child.TOKENS}
    _results.write("soak", figures, config, directory=args.dir, into=args.into)
    if wrong := [what for what in args.what if not is_right(figures[what])]:
        sys.exit(f"soak: not as undisturbed: {', '.join(wrong)}")


def is_right(found):
    return (
        found["losses_that_differ"] == found["weights_that_differ"] == 0
        and found["weights_compared"] > 0
        and found["most_durable_steps_lost"] == 0
        and found["left"] == []
        and (found["most_bytes_left"] or 0) <= SLACK_BYTES
    )


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all kinds together")
    parser.add_argument(
        "--within", type=float, default=8.0, help="longest time in seconds from fault to fault"
    )
    parser.add_argument("--what", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="of faults and their moments")
    parser.add_argument("--into", default=_results.RESULTS, help="folder for the result file")
    parser.add_argument("--mounted", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


@contextmanager
def disk(folder, args):
    """Yield a small file system of its own, or a folder where that cannot be."""
    image, place = folder / "image", folder / "place"
    place.mkdir()
    if args.mounted:
        with image.open("w") as file:
            file.truncate(int(DISK[:-1]) << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        mounting = subprocess.run(["mount", "-o", "loop", image, place], check=False)
        args.mounted = mounting.returncode == 0
    try:
        yield place
    finally:
        if args.mounted:
            subprocess.run(["umount", place], check=True)


def soaked(args, place, notes):
    moment, figures = random.Random(args.seed), {}
    _soak_child.write_tokens(place / "tokens.bin")
    with Undisturbed(place, notes) as undisturbed:
        for kind in args.what:
            soak = Soak(kind, place, notes, moment, undisturbed, mounted=args.mounted)
            figures[kind] = soak.run(args.minutes * 60 / len(args.what), args.within)
            print(kind, json.dumps(figures[kind]), file=sys.stderr)
    figures["own_file_system"] = args.mounted
    figures["minutes"] = round(sum(figures[kind]["seconds"] for kind in args.what) / 60, 1)
    return figures


class Soak:
    """One kind of job, from its first step to its last."""

    def __init__(self, kind, place, notes, moment, undisturbed, *, mounted):
        self.kind, self.place, self.notes, self.mounted = kind, place, notes, mounted
        self.moment, self.undisturbed = moment, undisturbed
        self.faults = {name: FAULTS[name] for name in FAULTS if mounted or name not in NEEDS_MOUNT}
        self.done, self.counts, self.moved = Counter(), Counter(), Counter()
        self.durable = self.step = 0
        self.lost, self.repeated = [0], [0]
        self.left, self.bytes_left, self.kept = [], [0], []
        for name in FOLDERS:
            (place / name).mkdir()
        self.overhead = self.unnamed_bytes()

    def run(self, seconds, within):
        begun = time.monotonic()
        faults = list(self.faults)
        self.moment.shuffle(faults)
        job = None
        try:
            while faults or time.monotonic() - begun < seconds * (1 - QUIET):
                job = self.after(faults.pop() if faults else self.chosen(self.faults), job, within)
            job = job or self.start(tight=False)
            quiet = self.quiet_phase(job, seconds * QUIET, within)
        finally:
            self.running.process.kill()
            self.running.process.wait()
        for name in FOLDERS:
            shutil.rmtree(self.place / name)
        return {
            "seconds": round(time.monotonic() - begun),
            "steps": self.step,
            "steps_repeated": sum(self.repeated),
            "most_steps_repeated": max(self.repeated),
            "most_durable_steps_lost": max(self.lost),
            "jobs": self.counts["jobs"],
            "jobs_with_too_little_flash": self.counts["tight"],
            "faults": dict(sorted(self.done.items())),
            "suspends_refused_for_space": self.counts["refused"],
            "saves_refused_for_space": self.counts["no space"],
            "losses_compared": self.counts["step"],
            "losses_that_differ": self.counts["step differs"],
            "weights_compared": self.counts["evaluated"],
            "weights_that_differ": self.counts["evaluated differs"],
            "read_bytes": self.moved["read"],
            "written_bytes": self.moved["written"],
            "left": self.left,
            "most_bytes_left": max(self.bytes_left) if self.mounted else None,
            "bytes_without_name_while_it_ran": self.unnamed_before_end,
            "quiet": quiet,
        }

    def chosen(self, faults):
        return self.moment.choices(list(faults), list(faults.values()))[0]

    # -- jobs ----------------------------------------------------------------------------------------

    def launch(self, *, tight=None):
        tight = self.moment.random() < TIGHT if tight is None else tight
        self.counts["jobs"] += 1
        self.counts["tight"] += tight
        self.last = None
        notes = self.notes / f"{self.kind}.{self.counts['jobs']}"
        self.running = Job(self.kind, self.place, notes, tight=tight)
        return self.running

    def start(self, **how):
        """Start the job, and wait until it has resumed."""
        job = self.launch(**how)
        job.wait_for("resumed")
        self.compare(job)
        return job

    def compare(self, job):
        """Deal with what a job has noted; return the notes."""
        job.read()
        notes, job.news = job.news, []
        for note in notes:
            if "resumed" in note:
                self.lost.append(self.durable - note["resumed"])
                self.repeated.append(max(0, self.step - note["resumed"]))
                self.step = note["resumed"]
            elif "no_space" in note:
                self.counts["refused" if "suspended" in note else "no space"] += 1
            elif content_of(note):
                what = "step" if "step" in note else "evaluated"
                self.counts[what] += 1
                self.counts[f"{what} differs"] += not self.undisturbed.is_same(note)
            if "step" in note:
                self.step, self.durable = note["step"], max(self.durable, note["durable"])
            if "resident" in note:
                self.last = note
        return notes

    def over(self, job):
        """Look at what a job that has ended has left."""
        self.compare(job)
        (self.place / "ballast").unlink(missing_ok=True)
        self.moved += {name: self.last[name] for name in ("read", "written") if self.last}
        job.forget()
        allowed = ALLOWED[self.kind]
        for folder in FOLDERS:
            names = sorted(each.name for each in (self.place / folder).iterdir())
            self.left += [f"{folder}/{each}" for each in names if not allowed[folder](each)]
        self.bytes_left.append(self.unnamed_bytes() - self.overhead)

    def unnamed_bytes(self):
        """Bytes of the file system that no name leads to."""
        if not self.mounted:
            return 0
        os.sync()
        there = os.statvfs(self.place)
        named = [self.place, *self.place.rglob("*")]
        return (there.f_blocks - there.f_bfree) * there.f_frsize - sum(
            each.lstat().st_blocks * 512 for each in named
        )

    # -- faults --------------------------------------------------------------------------------------

    def after(self, fault, job, within):
        """Do something to a job; return the job, or None if it has ended."""
        if fault == "killed at its start":
            if job:
                job.kill()
                self.over(job)
                self.done["killed"] += 1
            job = self.launch()
            time.sleep(self.moment.uniform(0, within))
            job.kill()
        else:
            job = job or self.start()
            self.let_train(job, within)
            getattr(self, fault.replace(" ", "_"))(job)
        self.done[fault] += 1
        if fault not in ENDS:
            return job
        self.over(job)
        return None

    def let_train(self, job, seconds):
        until = time.monotonic() + self.moment.uniform(0, seconds)
        while time.monotonic() < until:
            self.kept += self.compare(job)
            time.sleep(0.05)

    def killed(self, job):
        job.kill()

    def killed_while_suspended(self, job):
        self.suspend(job)
        job.kill()

    def killed_while_the_disk_is_full(self, job):
        self.fill_disk()
        self.let_train(job, 3)
        job.kill()

    def suspended_and_ended(self, job):
        self.suspend(job)
        job.send(signal.SIGTERM)
        job.end()

    def suspended_and_resumed(self, job):
        self.suspend(job)
        job.send(signal.SIGUSR2)

    def suspend(self, job):
        note = {"suspended": None}
        while note["suspended"] is None:  # there was no space
            job.send(signal.SIGTERM)
            note = job.wait_for("suspended")
        time.sleep(self.moment.uniform(0, 0.5))

    def stopped(self, job):
        job.send(signal.SIGSTOP)
        time.sleep(self.moment.uniform(0, 3))
        job.send(signal.SIGCONT)

    def disk_full(self, job):
        self.fill_disk()
        self.let_train(job, 3)
        (self.place / "ballast").unlink()

    def fill_disk(self):
        with (self.place / "ballast").open("wb") as file:
            nbytes, length = 1 << 30, 0
            while nbytes >= 1 << 12:
                try:
                    os.posix_fallocate(file.fileno(), length, nbytes)
                    length += nbytes
                except OSError:
                    nbytes //= 2

    def data_slow(self, job):
        (self.place / "slow").touch()
        self.let_train(job, 2)
        (self.place / "slow").unlink()

    # -- nothing ends the job ------------------------------------------------------------------------

    def quiet_phase(self, job, seconds, within):
        """Return how memory, descriptors and threads of a job change that is not killed."""
        faults = {name: self.faults[name] for name in self.faults if name not in ENDS}
        begun, self.kept = time.monotonic(), []
        while time.monotonic() - begun < seconds:
            self.after(self.chosen(faults), job, within)
        self.unnamed_before_end = self.unnamed_bytes() - self.overhead
        job.send(signal.SIGUSR1)
        job.end()
        took = time.monotonic() - begun
        notes = [each for each in self.kept + job.news if "step" in each]
        self.over(job)
        return {"seconds": round(took), "steps": len(notes), **drift(notes)}


def drift(notes):
    """Medians of the first and last tenth, and the slope of all tenths, after a fifth to warm up."""
    notes = notes[len(notes) // 5 :]
    size = max(1, len(notes) // 10)
    tenths = [notes[first : first + size] for first in range(0, len(notes) - size + 1, size)]
    found = {}
    for name in ("resident", "descriptors", "threads"):
        medians = [statistics.median(each[name] for each in tenth) for tenth in tenths]
        steps = [statistics.median(each["step"] for each in tenth) for tenth in tenths]
        slope = statistics.linear_regression(steps, medians).slope if len(steps) > 1 else 0.0
        found[name] = {
            "first": round(medians[0]),
            "last": round(medians[-1]),
            "per_1000_steps": round(1000 * slope, 1),
        }
    return found


if __name__ == "__main__":
    main()
