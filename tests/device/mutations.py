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
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import select
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"
EXCUSES = Path(__file__).with_name("excuses.toml")
LIMIT_S = 150
"""How long the programs of one mutant may take."""
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
    "runtime/executor.py",
    "runtime/kept.py",
    "runtime/repeats.py",
    "runtime/remakes.py",
    "runtime/encoding/mover.py",
    "hooks/recompute.py",
    "hooks/saved_tensors.py",
    "optim/update.py",
    "optim/gradients.py",
    "checkpoint/moves.py",
)
STATEMENTS = {
    "_use",
    "free_early",
    "keep",
    "made",
    "precede",
    "record_stream",
    "synchronize",
    "use",
    "used",
    "wait",
    "wait_event",
}
"""Calls that are left out where their value is not used."""
VALUES = {"record", "ready_event", "_record"}
"""Calls in whose place an event comes that was never recorded: who waits for it waits for nothing."""
EARLY = {
    "runtime/cuda/lanes.py": {
        "Lane._issue: a copy holds its storage no longer than until it is issued": {
            "            copy.after = ()\n": "            copy.after, copy.storage = (), None\n"
        },
        "Lane.serve: a copy has landed when it has been issued": {
            "watched = self._see_end(copy)": "watched = False"
        },
        "Lane._reuse: the event that times are reckoned from is used again": {
            "event is not None and event is not kept": "event is not None"
        },
    },
    "runtime/cuda/outbound.py": {
        "Outbound.write: the source is let go of when its copy has been issued": {
            "tier.spec.name, landed)": "tier.spec.name, landed,"
            " issued=lambda copy: ticket.written.settle(copy.error))",
            "        ticket.written.settle(copy.error)\n": "",
        },
    },
    "runtime/cuda/pinned.py": {
        "Slab._free_unneeded: a buffer is free while transfers touch it": {
            "not buffer.wanted and not buffer.moving": "not buffer.wanted"
        },
        "Slab._free_unneeded: a buffer is free when no transfer touches it, whatever it holds": {
            "not buffer.wanted and not buffer.moving": "not buffer.moving"
        },
    },
    "runtime/cuda/inbound.py": {
        "Inbound._issued: who uses a target does not know of its copy": {
            "fill.copy = copy": "pass"
        },
    },
    "runtime/cuda/direct_outbound.py": {
        "DirectOutbound._go: the source is let go of when its write begins": {
            "on_flash.written.add_done_callback(partial(self._ended, leaving))": (
                "self._ended(leaving, Transfer(0))"
            )
        },
    },
    "runtime/cuda/direct_inbound.py": {
        "DirectInbound._fenced: a read has ended when it begins": {
            "inner.add_done_callback(partial(self._filled, read))": "self._settle(read, None)"
        },
    },
}
"""What is held let go of too early, by file and what it is; text for text."""


@dataclass(frozen=True)
class Site:
    """A place to leave out."""

    path: str
    where: str
    """The function, and the text that is left out; told apart by a number where there are several."""
    number: int
    """In the order of the file's tree; -1: an entry of ``EARLY``."""

    @property
    def key(self) -> str:
        return f"{self.path}: {self.where}"


# -- sites ------------------------------------------------------------------------------------------


class _Finder(ast.NodeTransformer):
    """Numbers the sites of a module, and leaves out the one that is asked for."""

    def __init__(self, path: str, wanted: int | None = None) -> None:
        self.path, self.wanted = path, wanted
        self.sites: list[Site] = []
        self._scope: list[str] = []

    def _site(self, node: ast.AST) -> bool:
        text = " ".join(ast.unparse(node).split())
        where = f"{'.'.join(self._scope)}: {text}"
        same = sum(each.where.partition(" #")[0] == where for each in self.sites)
        self.sites.append(
            Site(self.path, where + (f" #{same + 1}" if same else ""), len(self.sites))
        )
        return self.wanted == len(self.sites) - 1

    def _scoped(self, node: Any) -> Any:
        self._scope.append(node.name)
        found = self.generic_visit(node)
        self._scope.pop()
        return found

    visit_FunctionDef = visit_ClassDef = _scoped

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if _called(node.value) in STATEMENTS and not _sleeps(node) and self._site(node):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = _called(node)
        if name in VALUES and self._site(node):
            return ast.parse("__import__('mutations').never_recorded()", mode="eval").body
        for keyword in node.keywords:
            if keyword.arg == "after" and self._site(keyword):
                keyword.value = self._nothing()
        if (
            name == "Copy"
            and len(node.args) > 2
            and _says(node.args[2])
            and self._site(node.args[2])
        ):
            node.args[2] = ast.Tuple([], ast.Load())
        return self.generic_visit(node)

    def _nothing(self) -> ast.expr:
        return ast.Tuple([], ast.Load()) if "cuda/" in self.path else ast.Constant(None)


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def _sleeps(node: ast.Expr) -> bool:
    """Whether it is a condition, which a loop looks at again."""
    return ast.unparse(node).endswith(("_wake.wait()", "changed.wait()"))


def _says(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Tuple) and not node.elts)


def never_recorded() -> Any:
    """An event that is reached already."""
    import torch

    return torch.cuda.Event(blocking=True, enable_timing=True)


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
            sites.append(Site(path, what, -1))
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


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with a site left out."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._name = "penstock." + site.path.removesuffix(".py").replace("/", ".")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(SOURCE / self._site.path))

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        path = SOURCE / self._site.path
        text = path.read_text()
        if self._site.number < 0:
            for old, new in EARLY[self._site.path][self._site.where].items():
                text = text.replace(old, new)
            tree: ast.AST = ast.parse(text)
        else:
            tree = _Finder(self._site.path, self._site.number).visit(ast.parse(text))
        module.__file__ = str(path)
        exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), module.__dict__)  # type: ignore[arg-type]


def judge(site: Site | None) -> str:
    """In a process of its own: run programs until one notices. What did, or ``""``."""
    os.environ.update(SETTINGS)
    if site is not None:
        sys.meta_path.insert(0, _Importer(site))
    import plugin

    plugin.prepare()
    import emulator
    import torch
    from programs import PROGRAMS

    for program in PROGRAMS:
        expected = program(None)
        with plugin.judged() as order, tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
            found = program(Path(directory))
            complaints = plugin.faults(order) + emulator.offences()
            same = all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        if complaints or not same:
            bits = "bits are the same" if same else "bits are WRONG"
            return f"{program.__name__}: {bits}; {len(complaints)} complaints {complaints[:1]}"
    return ""


def in_a_child(work: Callable[[], str]) -> tuple[int, int]:
    """Fork; the child's number, and where its result comes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    signal.alarm(LIMIT_S)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        said = work()
    except BaseException:  # noqa: BLE001  (it notices)
        said = "error: " + traceback.format_exc().strip().rpartition("\n")[2]
    os.write(writer, said.encode()[:4000])
    os._exit(0)


def run(sites: Sequence[Site | None], jobs: int) -> Iterator[tuple[Site | None, str]]:
    """What noticed each mutant."""
    waiting = list(reversed(sites))
    running: dict[int, tuple[Site | None, int]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            site = waiting.pop()
            child, reader = in_a_child(lambda site=site: judge(site))
            running[reader] = site, child
        for reader in select.select(list(running), [], [])[0]:
            site, child = running.pop(reader)
            said = b""
            while chunk := os.read(reader, 65536):
                said += chunk
            os.close(reader)
            _, status = os.waitpid(child, 0)
            died = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            text = said.decode()
            if died:
                text = "no end" if died == signal.SIGALRM else f"died of signal {died}"
            yield site, text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="sites whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="the sites, and nothing else")
    given = parser.parse_args()
    sites = [site for site in all_sites() if given.only in site.key]
    if given.list:
        print(*(site.key for site in sites), sep="\n")
        return 0
    import torch

    # what shapes are computed with is imported once, before forking
    torch.nn.functional.layer_norm(torch.empty(2, 2, device="meta"), (2,))
    began = time.monotonic()
    excused, killed, survived = excuses(), 0, []
    clean = next(run([None], 1))[1]
    if clean:
        print(f"the programs fail with nothing left out: {clean}")
        return 1
    for site, noticed in run(sites, given.jobs):
        assert site is not None
        killed += bool(noticed)
        if not noticed:
            survived.append(site)
        verdict = "killed" if noticed else "excused" if site.key in excused else "SURVIVED"
        print(
            f"{verdict:9}{site.key}\n          {noticed or excused.get(site.key, '')}", flush=True
        )
    unexcused = [site for site in survived if site.key not in excused]
    took = time.monotonic() - began
    print(
        f"{len(sites)} mutants: {killed} killed, {len(survived) - len(unexcused)} excused,"
        f" {len(unexcused)} survived; {took:.0f} s"
    )
    return bool(unexcused)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
