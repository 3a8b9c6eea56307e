"""The command ``python -m penstock.testing.gpu``, which checks a machine with a GPU in ten minutes.

1. The contract: the assumptions of Penstock and its tests about CUDA; see :mod:`.contract`.
2. The tests that need a device, several files at once, if this runs from a checkout.
3. The order of accesses in some of these tests, as information only; see :mod:`.observer`.
4. Figures: the link, steps compared with plain torch, GPU-direct, the flash optimizer, checkpoints.

Each part runs in a separate process with a time limit, and results are written after each, so that
neither a hang nor a crash nor Ctrl-C loses earlier results.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

import penstock
from penstock.core.errors import ConfigError
from penstock.core.files import absolute_path
from penstock.core.fs import filesystem_of
from penstock.testing.gpu import processes
from penstock.testing.gpu.contract import FACTS
from penstock.testing.gpu.document import DONE, Document, scrub
from penstock.testing.gpu.fact import Fact, FactOutcome, Finding
from penstock.testing.gpu.figures import FIGURES

PARTS: Final = ("contract", "tests", "order", "figures")
NO_DEVICE: Final = 2
INTERRUPTED: Final = 130
_CONTRACT_S: Final = 90.0
_FIGURES_SHARE: Final = 0.4
"""Share of the time that is reserved for figures."""
_ORDER_S: Final = 75.0
_ORDER_FILES: Final = ("tests/gpu/test_gpu_state.py", "tests/gpu/test_gpu_training.py")
_START_S: Final = 5.0
"""Minimum remaining time to begin a part."""
_NO_TIME: Final = "left out: no time was left"
_FIRST: Final = "training"
"""Part of the names of the slowest test files."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check this machine.

    Returns:
        0 on success; 1 if anything failed, hung or was left out, or an assumption is wrong; 2 if there is
        no device, or the arguments are wrong; 130 if it was interrupted.
    """
    options = _parser().parse_args(argv)
    try:
        options.dir = _spill_directory(options.dir)
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch, processes.NotedInterrupts():
            return CheckRun(options, Path(scratch)).run()
    except ConfigError as error:
        _say(f"error: {error}")
        return NO_DEVICE
    except InterruptedRunError:
        return INTERRUPTED


class InterruptedRunError(Exception):
    """A part was interrupted; its results are in the document."""


class CheckRun:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        """Prepare the run.

        Args:
            options: Options of the command.
            scratch: An empty directory for the records of processes.
        """
        self._options = options
        self._scratch = scratch
        self._end_s: float = time.monotonic() + options.limit
        self._document: Any = None

    def run(self) -> int:
        """Run all chosen parts, and return the exit code."""
        machine = self._machine()
        if not machine["devices"]:
            _say(f"There is no accelerator to check: {machine['lacking']}.")
            return NO_DEVICE
        self._document = Document(self._options.out, machine)
        self._document.write()
        code = INTERRUPTED
        try:
            for part in PARTS:
                if part not in self._options.parts:
                    continue
                if part != "contract" and machine.get("kind", "cuda") != "cuda":
                    _say(f"{part}: for CUDA only; left out")
                    continue
                getattr(self, f"_{part}")()
            self._document.contents["complete"] = True
            code = 0 if self._document.well else 1
        except InterruptedRunError:
            pass
        self._document.write()
        for line in self._document.lines():
            _say(scrub(line))
        return code

    # -- the machine ------------------------------------------------------------------------------

    def _machine(self) -> dict[str, Any]:
        """Describe the machine, in a separate process, since the driver may hang."""
        ended = self._child("machine", limit_s=min(60.0, self._left()))
        if ended.interrupted:
            raise InterruptedRunError
        if ended.records:
            return ended.records[-1]
        said = scrub(ended.said[-1]) if ended.said else "nothing"
        return {"devices": [], "lacking": f"the query failed ({ended.how}), and printed: {said}"}

    # -- the contract -----------------------------------------------------------------------------

    def _contract(self) -> None:
        """Examine all facts; after one that ends its process, continue in another."""
        document, start = self._document, time.monotonic()
        end_s = min(start + _CONTRACT_S, self._end_s)
        devices = len(document.contents["machine"]["devices"])
        wanted = [each for each in FACTS if each.devices <= devices]
        batches = [[each.name for each in wanted if not each.fresh]]
        batches += [[each.name] for each in wanted if each.fresh]
        facts, how, said = {each.name: each for each in FACTS}, DONE, []
        while batches:
            names = batches.pop(0)
            left = end_s - time.monotonic()
            if left < _START_S:
                names += [each for batch in batches for each in batch]
                how = f"no time was left for {', '.join(names)}"
                break
            ended = self._child("contract", *names, limit_s=left)
            found = [each["finding"] for each in ended.records if "finding" in each]
            begun = [each["begun"] for each in ended.records if "begun" in each]
            lost = [name for name in begun if name not in {each["name"] for each in found}]
            found += [_ended(facts[name], ended) for name in lost]
            document.contents["contract"] += found
            document.write()
            if ended.interrupted:
                document.part("contract", ended.how, time.monotonic() - start)
                raise InterruptedRunError
            if not ended.well:
                said = ended.said
                how = how if lost else f"{ended.how} after its last fact"
            rest = [name for name in names if name not in begun]
            if rest and not begun:
                how = f"{ended.how}, before the first fact"
                break
            if rest:
                batches.insert(0, rest)
        document.part("contract", how, time.monotonic() - start, said)
        _say(f"contract: {how}")

    # -- tests ------------------------------------------------------------------------------------

    def _tests(self) -> None:
        root = checkout()
        if root is None:
            _say("tests: left out, as an installed Penstock has no tests")
            self._document.part("tests", DONE, 0.0, ["an installed Penstock has no tests"])
            return
        reserved_s = _FIGURES_SHARE * self._options.limit if "figures" in self._options.parts else 0
        reserved_s += _ORDER_S if "order" in self._options.parts else 0
        files = test_files(root)
        if not self._has_pytest(files):
            return
        interrupted = False
        with ThreadPoolExecutor(self._options.jobs) as pool:
            runs = {
                pool.submit(self._run_tests, root, [file, *self._options.pytest], reserved_s): file
                for file in files
            }
            for run in as_completed(runs):
                ended = run.result()
                self._note_tests(runs[run], ended)
                interrupted |= ended is not None and ended.interrupted
        if interrupted:
            raise InterruptedRunError

    def _note_tests(self, file: str, ended: processes.ProcessResult | None) -> None:
        if ended is None:
            self._document.part(file, _NO_TIME, 0.0)
            return
        if ended.interrupted and not ended.records:
            return
        tests = [each["test"] for each in ended.records if "test" in each]
        over = {each["test"] for each in tests}
        begun = [each["begun"] for each in ended.records if "begun" in each]
        tests += [
            {"test": name, "outcome": "failed", "seconds": None, "said": ended.how}
            for name in begun
            if name not in over
        ]
        self._document.contents["tests"] += tests
        self._over(file, ended, well=_passed(ended), said=f", {len(tests)} tests")

    def _order(self) -> None:
        """Repeat some tests with an observer, which may make them fail; that is ignored."""
        root = checkout()
        if root is None or not self._has_pytest(["order"]):
            return
        words = ["--observe", *_ORDER_FILES, *self._options.pytest]
        ended = self._run_tests(root, words, max(0.0, self._left() - _ORDER_S))
        if ended is None:
            self._document.part("order", _NO_TIME, 0.0)
            return
        found = [each["order"] for each in ended.records if "order" in each]
        self._document.contents["order"] = found
        checked = sum(each["checked"] for each in found)
        complaints = sum(len(each["complaints"]) for each in found)
        said = f", {checked} accesses in {len(found)} tests, {complaints} complaints"
        # it may run out of time
        self._over("order", ended, well=bool(found) or _passed(ended), said=said)
        if ended.interrupted:
            raise InterruptedRunError

    def _has_pytest(self, names: Sequence[str]) -> bool:
        """Return whether pytest is installed; record the parts as left out otherwise."""
        has = importlib.util.find_spec("pytest") is not None
        for name in () if has else names:
            self._document.part(name, "left out: pytest is not installed", 0.0)
        return has

    def _run_tests(
        self, root: Path, words: Sequence[str], reserved_s: float
    ) -> processes.ProcessResult | None:
        """Run pytest until ``reserved_s`` before the end; return None without time. Thread-safe."""
        limit_s = self._left() - reserved_s
        if limit_s < _START_S:
            return None
        records = self._records()
        return processes.run(
            [*self._pytest(records), *words],
            records=records,
            limit_s=limit_s,
            environment={
                "PENSTOCK_TEST_DIR": self._options.dir,
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of unrelated packages
            },
            directory=root,
        )

    def _pytest(self, records: Path) -> Iterator[str]:
        """Yield the arguments of pytest, without options of missing plug-ins."""
        yield from ("-m", "pytest", "-m", "gpu", "-o", "addopts=-ra --strict-markers")
        yield from ("-o", "minversion=7", "-o", "filterwarnings=default", "-p", "no:cacheprovider")
        yield from ("-o", "faulthandler_timeout=90", "-p", "penstock.testing.gpu.plugin")
        for name in self._options.preload:
            yield from ("-p", name)
        yield f"--records={records}"
        if importlib.util.find_spec("pytest_timeout") is not None:
            yield from ("-p", "pytest_timeout", "-o", "timeout=120", "-o", "timeout_method=thread")

    # -- figures ----------------------------------------------------------------------------------

    def _figures(self) -> None:
        document = self._document
        devices = len(document.contents["machine"]["devices"])
        for name, figure in FIGURES.items():
            if figure.devices > devices:
                continue
            limit_s = min(figure.limit_s, self._left())
            if not self._has_time(name, limit_s):
                continue
            ended = self._child("figures", name, limit_s=limit_s, environment=figure.environment)
            found: dict[str, Any] = {}
            for each in ended.records:
                found |= each
            document.contents["figures"][name] = found
            self._over(name, ended, well=ended.well)
            if ended.interrupted:
                raise InterruptedRunError

    # -- private ----------------------------------------------------------------------------------

    def _left(self) -> float:
        return self._end_s - time.monotonic()

    def _has_time(self, name: str, limit_s: float) -> bool:
        """Return whether there is time to begin a part; record it as left out otherwise."""
        if limit_s < _START_S:
            self._document.part(name, _NO_TIME, 0.0)
        return limit_s >= _START_S

    def _over(
        self, name: str, ended: processes.ProcessResult, *, well: bool, said: str = ""
    ) -> None:
        """Record how the process of a part ended."""
        how = DONE if well and not ended.interrupted else ended.how
        self._document.part(name, how, ended.seconds, None if how == DONE else ended.said)
        _say(f"{name}: {how}{said}")

    def _records(self) -> Path:
        handle, name = tempfile.mkstemp(dir=self._scratch)
        os.close(handle)
        return Path(name)

    def _child(
        self, *what: str, limit_s: float, environment: Mapping[str, str] | None = None
    ) -> processes.ProcessResult:
        records = self._records()
        command = ["-m", "penstock.testing.gpu.child", *what, "--records", str(records)]
        command += ["--dir", self._options.dir, "--scale", str(self._options.scale)]
        if self._options.device is not None:
            command += ["--device", self._options.device]
        command += ["--limit", str(limit_s)]
        for name in self._options.preload:
            command += ["--preload", name]
        return processes.run(command, records=records, limit_s=limit_s, environment=environment)


def checkout() -> Path | None:
    """Return the root of the checkout that this runs from; None if it is installed."""
    root = Path(penstock.__file__).resolve().parents[2]
    return root if (root / "tests" / "gpu").is_dir() else None


def test_files(root: Path) -> list[str]:
    """Return the test files for a device, relative to ``root``; the slowest ones come first."""
    found = list((root / "tests" / "gpu").glob("test_*.py"))
    if all(importlib.util.find_spec(each) for each in ("hypothesis", "numba")):
        found += [
            root / "tests" / "codec" / f"test_{name}.py" for name in ("codec_device", "narrow")
        ]
    found.sort(key=lambda file: (_FIRST not in file.name, file))
    return [str(file.relative_to(root)) for file in found if file.exists()]


def _passed(ended: processes.ProcessResult) -> bool:
    """Return whether the tests passed, or pytest had none to run."""
    return ended.code in (0, 5) and not ended.stopped


def _ended(fact: Fact, ended: processes.ProcessResult) -> dict[str, Any]:
    """Return the finding for a fact whose process ended during its examination."""
    said = f": {ended.said[-1]}" if ended.said else ""
    return Finding(
        fact.name, fact.believed, fact.relies, FactOutcome.ENDED, f"{ended.how}{said}", seconds=0.0
    ).as_dict()


def _spill_directory(named: str | None) -> str:
    """Return the named directory, or the first usual one on a disk. Raises ConfigError."""
    environment = os.environ.get("PENSTOCK_TEST_DIR")
    places = [named] if named else [environment] if environment else ["/var/tmp", "/tmp", os.curdir]
    for place in places:
        if os.path.isdir(place) and not filesystem_of(place).is_memory:
            return absolute_path(place, "--dir")
    raise ConfigError(
        f"{' and '.join(places)}: not a directory on a disk; name one to offload to with --dir"
    )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.testing.gpu",
        description="Check a machine with a GPU: assumptions about CUDA, the tests, and figures."
        " Writes one file to send to the project.",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path(),
        help="directory of the file (default: here)",
    )
    parser.add_argument(
        "--dir",
        metavar="DIR",
        help="directory on a disk, to offload to (default: $PENSTOCK_TEST_DIR, or the first of /var/tmp,"
        " /tmp and the current directory that is on one)",
    )
    parser.add_argument(
        "--device",
        metavar="KIND",
        help="kind of device, as in torch: cuda, xpu, npu (default: torch's current accelerator); for"
        " kinds other than cuda only the contract is checked",
    )
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=float,
        default=540.0,
        help="time limit of everything (default: 540)",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)"
    )
    parser.add_argument(
        "--jobs",
        metavar="COUNT",
        type=int,
        default=max(1, min(8, len(os.sched_getaffinity(0)) // 2)),
        help="number of test files that run at once (default: half the cores, up to 8)",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="scale of the sizes of figures (default: 1)"
    )
    parser.add_argument("--preload", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument(
        "--pytest",
        metavar="ARGUMENT",
        nargs=argparse.REMAINDER,
        default=[],
        help="remaining arguments are passed to pytest",
    )
    return parser
