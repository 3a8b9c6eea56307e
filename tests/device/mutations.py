"""Leave out every wait, record and reference of the device code, one at a time: does anything notice?

``make test-mutations`` runs it. Each *site* is found in the source: a call that waits, records, keeps or
tells of a use, what a copy comes after, and what is held until its end. For each the programs of
``programs.py`` run with the site left out, until one complains: the order checker, wrong bits, an error,
or no end. A site that none notices must have a sentence in ``excuses.toml`` that says why it may be left
out.

A server process imports torch and forks for every mutant, before the emulated device is touched.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import tomllib
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import forked

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"
EXCUSES = Path(__file__).with_name("excuses.toml")
UNUSABLE = "the programs cannot be run: "
LIMIT_S = 300
"""How long programs may take to begin."""
PROGRAM_LIMIT_S = 90
"""How long one program may take, which is ten seconds for the longest."""
SCHEDULES = ("lazy", "random", "lazy", "eager", "lazy", "random", "lazy", "fixed")
"""Of clean runs, in turn."""
TRIES = 3
"""How often a site is left out, if nothing notices: with threads, no program is sure to notice."""
SETTINGS = {
    "PENSTOCK_GPU_DIRECT": "off",
    "PENSTOCK_IO_PIECE": "256KiB",
    "PENSTOCK_IO_THREADS": "2",
    "PENSTOCK_SLAB": "16MiB",
}
"""As ``test_programs.py`` has them."""
FOLDERS = ("runtime/cuda",)
FILES = (
    "staging.py",
    "session.py",
    "store/frames.py",
    "store/window.py",
    "runtime/digests.py",
    "runtime/executor.py",
    "runtime/recompute.py",
    "runtime/transfers.py",
    "runtime/encoding.py",
    "hooks/recompute.py",
    "hooks/saved_tensors.py",
    "optim/pool.py",
    "optim/gradients.py",
    "optim/overlap.py",
    "optim/gradient_spill.py",
    "optim/state_dict.py",
    "optim/states.py",
    "optim/update.py",
    "optim/update_queue.py",
    "checkpoint/regions.py",
    "checkpoint/tensors.py",
    "swap/swap_out.py",
    "swap/swap_in.py",
    "swap/suspend.py",
)
STATEMENTS = {
    "_use",
    "await_devices",
    "drain",
    "free_early",
    "keep",
    "made",
    "precede",
    "record_stream",
    "restored",
    "synchronize",
    "use",
    "used",
    "wait",
    "wait_event",
    "wait_for",
    "wait_for_all",
    "wait_stream",
}
"""Calls that are left out where their value is not used."""
VALUES = {"record", "ready_event", "_record"}
"""Calls in whose place an event comes that was never recorded: who waits for it waits for nothing."""
STREAMS = {"self._leave", "self._table.leave"}
"""Calls that return what a copy comes after, in ``runtime/cuda``; in their place nothing comes."""
AFTER = {
    "Copy": 2,
    "_ordered_after": 0,
    "_submit": 2,
    "_take_over": 2,
    "copy_across": 2,
    "copy_pinned": 2,
    "to_device": 1,
    "to_host": 1,
    "write": 3,
}
"""Which positional argument of a call says what a copy comes after."""
TUPLES = {"runtime/cuda/timing.py"}
"""Files where the value of such a call is a tuple of events, in whose place none comes."""
NEVER = "__import__('mutations').never_recorded()"
HELD = {"after", "keep_alive"}
"""Arguments by keyword in whose place nothing comes: what a copy comes after, and what it holds."""
EARLY = {
    "runtime/cuda/lanes.py": {
        ("CopyLane._issue", "a copy holds its storage no longer than until it is issued"): {
            "            copy.after = ()\n": "            copy.after, copy.storage = (), None\n"
        },
        ("CopyLane.serve", "a copy has landed when it has been issued"): {
            "watched = self._see_end(copy)": "watched = False"
        },
        ("CopyLane._reuse", "the event that times are reckoned from is used again"): {
            "event is not None and event is not kept": "event is not None"
        },
    },
    "runtime/cuda/outbound.py": {
        ("Outbound.write", "the source is let go of when its copy has been issued"): {
            "tier.spec.name, landed)": "tier.spec.name, landed,"
            " issued=lambda copy: ticket.written.settle(copy.error))",
            "        ticket.written.settle(copy.error)\n": "",
        },
        ("Outbound.overwrite", "a weight is at home when its copy has been submitted"): {
            'storage.device, "out").submit(copy)\n        return written': (
                'storage.device, "out").submit(copy)\n        early = Transfer(nbytes)\n'
                "        early.settle()\n        return early"
            )
        },
    },
    "runtime/cuda/pinned.py": {
        ("Slab._free_unneeded", "a buffer is free while transfers touch it"): {
            "not buffer.wanted and not buffer.moving": "not buffer.wanted"
        },
        (
            "Slab._free_unneeded",
            "a buffer is free when no transfer touches it, whatever it holds",
        ): {"not buffer.wanted and not buffer.moving": "not buffer.moving"},
    },
    "runtime/cuda/inbound.py": {
        ("Inbound._issued", "who uses a target does not know of its copy"): {
            "fill.copy = copy": "pass"
        },
    },
    "runtime/cuda/direct.py": {
        ("DirectOutbound._submit", "the source is let go of when its write begins"): {
            "on_flash.written.add_done_callback(partial(self._flashed_directly, ticket))": (
                "self._flashed_directly(ticket, Transfer(0))"
            )
        },
        ("DirectInbound._fenced", "a read has ended when it begins"): {
            "inner.add_done_callback(partial(self._filled, read))": "self._settle(read, None)"
        },
    },
    "runtime/cuda/encoding.py": {
        ("DeviceCoder.begin", "a source is encoded before it is complete"): {
            "self.inner.fence(job.memory, job.frames.label, partial(_complete, worker, job))": (
                "_complete(worker, job, None)"
            )
        },
        ("DeviceCoder.decode_piece", "who uses a target does not know of its decoding"): {
            "target.fill = Fill(stream, made=link.record(stream))": "pass"
        },
    },
    "store/frames.py": {
        ("FrameWorker._encode", "a source is let go of when its frame is on its way"): {
            "part.written.add_done_callback(partial(self._written, job, slot))": (
                "self._ended(job, slot, None)"
            )
        },
        ("FrameWorker._read", "a frame is decoded before it is there"): {
            "transfer.add_done_callback(partial(self._arrived, job, index, slot))": (
                "self._arrived(job, index, slot, Transfer(0))"
            )
        },
    },
    "runtime/executor.py": {
        ("Executor._admit", "what is saved leaves before it is complete"): {
            "self.completion.wait(partial(self._complete, saved, sign_only), storage.device)": (
                "self._complete(saved, sign_only, True)"
            )
        },
        ("Executor.save", "what is kept leaves before it is complete"): {
            "self.completion.wait(partial(self._complete, saved, sign_only))": (
                "self._complete(saved, sign_only, True)"
            )
        },
    },
    "hooks/saved_tensors.py": {
        ("SavedTensorHooks.when_complete", "what is saved is read before it is complete"): {
            "        completion.wait(act, tensor.device)": "        act(True)"
        },
        ("SavedTensorHooks._pack_span", "a part is copied out before it is complete"): {
            "            self._completion.wait(action, tensor.device)": "            action(True)"
        },
    },
    "runtime/digests.py": {
        ("Comparison.__init__", "digests are let go of before they are compared"): {
            "self._first, self._second = first, second": "self._first, self._second = 0, None"
        },
    },
}
"""What is held let go of too early, by file and what it is; text for text."""


@dataclass(frozen=True)
class Site:
    """A place to leave out."""

    path: str
    where: str
    """Its function."""
    what: str
    """The text that is left out, with a number where there are several; or an entry of ``EARLY``."""
    number: int
    """In the order of the file's tree; -1: an entry of ``EARLY``."""

    @property
    def function(self) -> str:
        return f"{self.path}: {self.where}"

    @property
    def key(self) -> str:
        return f"{self.function}: {self.what}"


# -- sites ------------------------------------------------------------------------------------------


class _Scoped(ast.NodeTransformer):
    """Knows in which function it is."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._scope: list[str] = []

    def _scoped(self, node: Any) -> Any:
        self._scope.append(node.name)
        found = self.generic_visit(node)
        self._scope.pop()
        return found

    visit_FunctionDef = visit_ClassDef = _scoped


class _Finder(_Scoped):
    """Numbers the sites of a module, and leaves out the one that is asked for."""

    def __init__(self, path: str, wanted: int | None = None) -> None:
        super().__init__(path)
        self.wanted = wanted
        self.sites: list[Site] = []

    def _site(self, node: ast.AST) -> bool:
        where, what = ".".join(self._scope), " ".join(ast.unparse(node).split())
        alike = [(each.where, each.what.partition(" #")[0]) for each in self.sites]
        same = alike.count((where, what))
        number = f" #{same + 1}" if same else ""
        self.sites.append(Site(self.path, where, what + number, len(self.sites)))
        return self.wanted == len(self.sites) - 1

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if _called(node.value) in STATEMENTS and not _sleeps(node) and self._site(node):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = _called(node)
        if name in VALUES and self._site(node):
            return self._parsed("()" if self.path in TUPLES else NEVER)
        if "cuda/" in self.path and ast.unparse(node.func) in STREAMS and self._site(node):
            return self._parsed("()")
        for keyword in node.keywords:
            if keyword.arg in HELD and _says(keyword.value) and self._site(keyword):
                keyword.value = self._parsed("()" if name == "Copy" else "None")
        place = AFTER.get(name, len(node.args))
        if place < len(node.args) and _says(node.args[place]) and self._site(node.args[place]):
            node.args[place] = self._parsed("()" if "cuda/" in self.path else "None")
        return self.generic_visit(node)

    def _parsed(self, text: str) -> ast.expr:
        return ast.parse(text, mode="eval").body


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def _sleeps(node: ast.Expr) -> bool:
    """Whether it is a condition, which a loop looks at again; or puts something off: see ``EARLY``."""
    text = ast.unparse(node)
    return text.endswith(("_wake.wait()", "changed.wait()")) or "ompletion.wait(" in text


def _says(node: ast.expr) -> bool:
    """Whether an argument is something that is not a site itself."""
    return ast.unparse(node) not in ("()", "None") and _called(node) not in VALUES


def never_recorded() -> Any:
    """An event that is reached already."""
    import torch

    event: Any = torch.cuda.Event(blocking=True, enable_timing=True)
    event.idle = []  # where the link puts it when it is not needed any more
    return event


def all_sites() -> list[Site]:
    """Every site, in the order of files and lines."""
    sites: list[Site] = []
    for path in paths():
        finder = _Finder(path)
        text = (SOURCE / path).read_text()
        finder.visit(ast.parse(text))
        sites += finder.sites
        for what, changes in EARLY.get(path, {}).items():
            for old in changes:
                assert text.count(old) == 1, f"{path}: the text of {what!r} changed; mend EARLY"
            sites.append(Site(path, *what, -1))
    return sites


def paths() -> Iterator[str]:
    """Files with device code."""
    for folder in FOLDERS:
        for path in sorted((SOURCE / folder).glob("*.py")):
            yield str(path.relative_to(SOURCE))
    yield from (path for path in FILES if (SOURCE / path).exists())


def excuses() -> dict[str, str]:
    """By site: why it may be left out."""
    return tomllib.loads(EXCUSES.read_text())


# -- one mutant -------------------------------------------------------------------------------------

Change: TypeAlias = Callable[[str, str], ast.AST]
"""Given a file's path and its text, what is imported in its place."""


def without(site: Site) -> Change:
    """Leave a site out."""

    def change(path: str, text: str) -> ast.AST:
        if site.number >= 0:
            return _Finder(path, site.number).visit(ast.parse(text))  # type: ignore[no-any-return]
        for old, new in EARLY[path][site.where, site.what].items():
            text = text.replace(old, new)
        return ast.parse(text)

    return change


_entered: set[str] = set()


def entered(function: str) -> None:
    """A function with a site was called."""
    _entered.add(function)


def telling(path: str, text: str) -> ast.AST:
    """Have functions tell that they are called."""
    return _Teller(path).visit(ast.parse(text))  # type: ignore[no-any-return]


class _Teller(_Scoped):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._scoped(node)
        where = f"{self.path}: {'.'.join([*self._scope, node.name])}"
        node.body[:0] = ast.parse(f"__import__('mutations').entered({where!r})").body
        return node


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports changed modules."""

    def __init__(self, paths: Iterable[str], change: Change) -> None:
        self._change = change
        self._paths = {
            "penstock." + path.removesuffix(".py").replace("/", "."): path for path in paths
        }

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self._paths:
            return None
        origin = str(SOURCE / self._paths[name])
        return importlib.util.spec_from_loader(name, self, origin=origin)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        path = SOURCE / self._paths[module.__name__]
        tree = self._change(self._paths[module.__name__], path.read_text())
        module.__file__ = str(path)
        exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), module.__dict__)  # type: ignore[arg-type]


class _CannotBeginError(Exception):
    """The emulated device cannot be used, so nothing was noticed."""


def judge(order: Callable[[list[str]], Iterable[str]]) -> Iterator[tuple[str, str]]:
    """In a process of its own: run programs, in some order; of each, what is wrong, or ``""``."""
    os.environ.update(SETTINGS)
    try:
        import plugin

        plugin.prepare()
        import emulator
        import torch
        from programs import PROGRAMS
    except BaseException as error:
        raise _CannotBeginError(repr(error)) from error

    programs = {program.__name__: program for program in PROGRAMS}
    for name in order(list(programs)):
        signal.alarm(PROGRAM_LIMIT_S)  # what ends a task of ``forked`` that takes too long
        try:
            expected = programs[name](None)
            with plugin.judged() as told, tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
                found = programs[name](Path(directory))
                complaints = plugin.faults(told) + emulator.offences()
        except BaseException as error:  # noqa: BLE001  (it notices)
            yield name, f"error: {error!r}"
            continue
        same = all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        bits = "bits are the same" if same else "bits are WRONG"
        signal.alarm(0)
        is_wrong = complaints or not same
        yield name, f"{bits}; {len(complaints)} complaints {complaints[:1]}" if is_wrong else ""


def notice(site: Site, order: Callable[[list[str]], Iterable[str]]) -> str:
    """Run programs with a site left out until one notices: which, and what."""
    sys.meta_path.insert(0, _Importer([site.path], without(site)))
    return next((f"{name}: {wrong}" for name, wrong in judge(order) if wrong), "")


def survey(part: slice = slice(None)) -> str:
    """Run programs with nothing left out: what each calls, and how long it takes, as JSON."""
    sys.meta_path.insert(0, _Importer(paths(), telling))
    found: dict[str, tuple[list[str], float]] = {}
    began = time.monotonic()
    for name, wrong in judge(lambda names: names[part]):
        if wrong:
            return f"{name}: {wrong}"
        found[name] = sorted(_entered), time.monotonic() - began
        _entered.clear()
        began = time.monotonic()
    return json.dumps(found)


def clean(seed: int) -> str:
    """Run the programs with nothing left out, by a schedule: what is wrong, as JSON."""
    os.environ["EMU_SEED"] = str(seed)
    os.environ["EMU_SCHEDULE"] = SCHEDULES[seed % len(SCHEDULES)]
    return json.dumps(dict(judge(lambda names: names)))


def run(tasks: Iterable[tuple[T, Callable[[], str]]], jobs: int) -> Iterator[tuple[T, str]]:
    """Yield what each task said, which runs in a process of its own; end if the device cannot be used."""
    able = ((key, partial(_said_by, work)) for key, work in tasks)
    for key, text in forked.run(able, jobs, LIMIT_S):
        if text.startswith(UNUSABLE):
            sys.exit(text)
        yield key, text


def _said_by(work: Callable[[], str]) -> str:
    try:
        return work()
    except _CannotBeginError as error:
        return f"{UNUSABLE}{error}"


# -- all of them ------------------------------------------------------------------------------------


class _Programs:
    """In which order they run for a site."""

    def __init__(self, surveyed: Iterable[str]) -> None:
        self._found: dict[str, tuple[list[str], float]] = {}
        for text in surveyed:
            self._found |= json.loads(text)
        self._noticed: Counter[tuple[str, str]] = Counter()

    def of(self, site: Site, *, excused: bool) -> Callable[[list[str]], Iterable[str]]:
        """Those that call the function, what has noticed most in the file first, then the quickest.

        The others follow, in case that threads have met otherwise; not for what is excused.
        """
        calling = self.calling(site)
        others = [] if excused else [name for name in self._found if name not in calling]
        places = {
            name: (name in others, -self._noticed[site.path, name], self._found[name][1])
            for name in calling + others
        }
        return lambda _: sorted(places, key=places.__getitem__)

    def calling(self, site: Site) -> list[str]:
        """Those that call a site's function."""
        return [name for name in self._found if site.function in self._found[name][0]]

    def noticed(self, site: Site, text: str) -> None:
        """Some program did, or none."""
        self._noticed[site.path, text.partition(":")[0]] += 1


def mutate(sites: Sequence[Site], jobs: int, *, excused: bool) -> bool:
    """Leave out each site, and print what noticed; whether all did that must.

    Those that may be left out are only counted, unless they are tried as well: ``excused``.
    """
    began = time.monotonic()
    reasons, counts = excuses(), Counter[str]()
    parts = ((start, partial(survey, slice(start, None, jobs))) for start in range(jobs))
    surveyed = [said for _, said in sorted(run(parts, jobs))]
    if wrong := [said for said in surveyed if not said.startswith("{")]:
        print("the programs fail with nothing left out:", *wrong)
        return False
    programs = _Programs(surveyed)
    needed = [site for site in sites if site.key not in reasons]
    if unknown := [site.key for site in needed if not programs.calling(site)]:
        print("no program calls these:", *unknown, sep="\n")
        return False
    tried = list(sites) if excused else needed
    counts["excused"] = len(sites) - len(tried)
    for left in range(TRIES - 1, -1, -1):
        tasks = (
            (site, partial(notice, site, programs.of(site, excused=site.key in reasons)))
            for site in tried
        )
        tried = []
        for site, noticed in run(tasks, jobs):
            programs.noticed(site, noticed)
            verdict = "killed" if noticed else "excused" if site.key in reasons else "SURVIVED"
            if verdict == "SURVIVED" and left:
                tried.append(site)
                continue
            counts[verdict] += 1
            why = noticed or reasons.get(site.key, "")
            print(f"{verdict:9}{site.key}\n          {why}", flush=True)
    numbers = ", ".join(f"{counts[each]} {each}" for each in ("killed", "excused", "SURVIVED"))
    print(f"{len(sites)} mutants: {numbers}; {time.monotonic() - began:.0f} s")
    return not counts["SURVIVED"]


def repeat_clean(times: int, jobs: int) -> bool:
    """Run all programs again and again with nothing left out; whether nothing was ever wrong."""
    began = time.monotonic()
    runs = alarms = 0
    for seed, text in run(((seed, partial(clean, seed)) for seed in range(times)), jobs):
        found = json.loads(text) if text.startswith("{") else {"all": text}
        wrong = {name: what for name, what in found.items() if what}
        runs += len(found)
        alarms += len(wrong)
        for name, what in wrong.items():
            print(
                f"ALARM    seed {seed}, {SCHEDULES[seed % len(SCHEDULES)]}: {name}: {what}",
                flush=True,
            )
    print(f"{runs} runs of a program, {alarms} alarms; {time.monotonic() - began:.0f} s")
    return not alarms


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="sites whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="the sites, and nothing else")
    parser.add_argument(
        "--excused", action="store_true", help="try also what excuses.toml says may be left out"
    )
    parser.add_argument(
        "--clean",
        type=int,
        metavar="N",
        help="leave nothing out: run all programs N times, with seeds and schedules in turn",
    )
    given = parser.parse_args()
    sites = [site for site in all_sites() if given.only in site.key]
    if given.list:
        print(*(site.key for site in sites), sep="\n")
        return 0
    # once, before forking; so is what shapes are computed with
    import numba  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch._dynamo  # which the first optimizer imports

    torch.nn.functional.layer_norm(torch.empty(2, 2, device="meta"), (2,))
    gc.freeze()
    if given.clean:
        is_good = repeat_clean(given.clean, given.jobs)
    else:
        is_good = mutate(sites, given.jobs, excused=given.excused)
    return 0 if is_good else 1


if __name__ == "__main__":
    import mutations  # the changed modules import it by this name, and it must be the same

    sys.exit(mutations.main())
