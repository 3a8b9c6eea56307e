"""``penstock plan --script``: plans for an unmodified script, from a step of its own.

1. Options are checked before the script runs.
2. The script becomes ``__main__``, as under ``penstock run``. What it prints goes to standard error.
3. When it has imported torch, a session is opened that only records (:mod:`.step_recording`).
4. It is stopped when its optimizer would change weights for the first time.
5. Plans are made of what was recorded (:mod:`.plan_budgets`, :mod:`.plan_step`).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import os
import shlex
import sys
import threading
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Final

from penstock.cli.command import INTERRUPTED_CODE, UNREAD_CODE
from penstock.cli.output import UnreadError, report, say, take_stdout
from penstock.cli.paths import picture_to_write, spill_directory
from penstock.cli.plan_network import ALL, OF_RANKS, whole_step_option
from penstock.cli.script import Program, find_program, request_huge_pages, run_as_main
from penstock.cli.torch_import import when_imported
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.process import fork_guard
from penstock.core.ranks import rank
from penstock.core.units import parse_bytes
from penstock.plan import machines, policies

if TYPE_CHECKING:
    from penstock.cli.step_recording import StepRecording

_OF_THE_SCRIPT: Final = {
    "network": "name a network, or a script",
    "batch": "the script says how large its batch is",
    "tokens": "the script says how large its batch is",
    "optimizer": "the script has an optimizer",
    "autocast": "the script says if it trains under autocast",
    "accumulate": "the script says how many backwards make its step",
    "parts": "the script has micro-batches, or not",
    "clip": "it is noted if the script clips gradients",
    "set": "the script makes its own network",
    "device": "the script says where it computes",
    "device_memory": "use --memory, which lists the budgets to compare",
    "forward_only": "the script is stopped at its optimizer's step",
    "save_plan": "give penstock run the budget: its session makes the plan",
}
"""Options that do not go with ``--script``, and what to do."""
_OF_WHOLE_STEPS: Final = ("format", "update", "gradient_memory", *OF_RANKS)
"""Options that need ``--weights flash`` or ``--ranks``."""
_SIZES: Final = (
    *("memory", "host_memory", "flash_memory", "tbw"),
    *("weights_memory", "saved_memory", "gradient_memory"),
)


def planned_script(options: argparse.Namespace) -> Callable[[], int]:
    """Check everything; return the function that runs the script, plans, and returns the exit code.

    Raises:
        ConfigError: An option is invalid, or a launcher has started several processes.
        SystemExit: The script does not exist (2).
    """
    words: list[str] = options.script
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words:
        raise ConfigError("--script: nothing to run; name a script, or -m and a module")
    _check(options)
    directories: tuple[str, ...] = ()
    if options.machine is None:
        directories = tuple(spill_directory(one) for one in options.flash or ["."])
    program = find_program(words, is_module=is_module)
    script = _PlannedScript(options, words, directories, take_stdout())
    return lambda: script.run(program)


def _check(options: argparse.Namespace) -> None:
    if rank() is not None:
        raise ConfigError(
            "--script profiles one process, and a launcher has started several: start the script without"
            " it, with the batch of one rank; --ranks N plans for N of them"
        )
    whole = _is_whole(options)
    for name, why in _OF_THE_SCRIPT.items():
        if getattr(options, name):
            raise ConfigError(f"{_option(name)} does not go with --script: {why}")
    if options.codec is not None and whole:
        raise ConfigError(
            f"--codec does not go with {whole_step_option(options)}: it is for budgets"
        )
    for name in () if whole else _OF_WHOLE_STEPS:
        if getattr(options, name) is not None:
            raise ConfigError(f"{_option(name)} needs --weights flash or --ranks")
    if options.flash and options.machine is not None:
        raise ConfigError("--flash is measured where no --machine is named; give one of the two")
    if options.plot is not None and whole:
        raise ConfigError("--plot: there is no plot of a whole step")
    _check_values(options)


def _check_values(options: argparse.Namespace) -> None:
    if options.step is not None and options.step < 1:
        raise ConfigError(f"--step is {options.step}; it must be 1 or more")
    for name in _SIZES:
        for text in str(getattr(options, name) or "0").split(","):
            parse_bytes(int(text) if text.isdigit() else text, what=_option(name))
    if options.machine is not None:
        machines.find(options.machine)
    if options.policy == ALL:
        raise ConfigError("--policy all does not go with --script; name one policy")
    policies.get(options.policy)
    if options.plot is not None:
        options.plot = picture_to_write(options.plot, "--plot")


def _is_whole(options: argparse.Namespace) -> bool:
    return options.weights != "keep" or options.ranks is not None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name != "network" else "NETWORK"


class _PlannedScript:
    """Runs a script until its step is recorded, and plans for it."""

    def __init__(
        self,
        options: argparse.Namespace,
        words: list[str],
        directories: tuple[str, ...],
        answer: IO[str],
    ) -> None:
        self._options = options
        self._words = words
        self._directories = directories
        self._answer = answer
        self._number: int = options.step or 1
        self._recording: StepRecording | None = None
        self._was_refused = False
        self._guard = fork_guard()

    def run(self, program: Program) -> int:
        """Run the script, print the answer, and return the exit code. Passes on the script's errors."""
        request_huge_pages()
        when_imported(self._start)
        which = "its first step" if self._number == 1 else f"step {self._number}"
        say(
            f"running {self._words[0]} until its optimizer would make {which}; it is stopped"
            " there, and files that it writes before are written"
        )
        try:
            run_as_main(program)
        except SystemExit as exit:
            if self._was_refused or self._guard.in_child:
                raise
            if not self._reached:
                code = exit.code
                return self._explain("" if code in (None, 0) else f", by sys.exit({code!r})")
        except BaseException as error:
            if self._guard.in_child:
                raise
            if not self._reached:
                if isinstance(error, Exception):
                    atexit.register(self._explain, f", by {type(error).__name__}")
                raise
        if not self._reached:
            return self._explain("")
        return self._plan()

    @property
    def _reached(self) -> bool:
        return self._recording is not None and self._recording.recorded is not None

    def _start(self) -> None:
        """Open the session, when torch has been imported. Raises SystemExit if it cannot be opened."""
        if self._guard.in_child or self._recording is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            say("warning: torch was first imported in another thread: nothing is recorded")
            return
        module = importlib.import_module("penstock.cli.step_recording")
        try:
            self._recording = module.StepRecording(
                self._directories,
                self._number,
                codec=self._options.codec or "none",
                on_swallowed=self._end,
            )
        except PenstockError as error:
            if self._options.debug:
                raise
            self._was_refused = True
            raise SystemExit(report(error)) from None

    def _explain(self, how: str) -> int:
        """Say that there is no step to plan for, and return the exit code."""
        what = f"{self._words[0]} ended{how} before"
        if self._recording is None:
            why = "it did not import torch"
        elif self._number > 1:
            why = f"--step {self._number} may be more steps than it makes"
        elif self._recording.passes:
            why = (
                f"{self._recording.passes} backwards were seen, and no step() of a torch optimizer"
                " in this process"
            )
        else:
            why = (
                "no backward and no step() of a torch optimizer was seen in this process; processes that"
                " it starts, such as ranks, are not profiled"
            )
        say(
            f"error: {what} step {self._number} of an optimizer, so there is nothing to plan: {why}"
        )
        return 1

    def _end(self) -> None:
        """Plan, and end the process at once: the script catches every exception, and goes on."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        say(
            f"{self._words[0]} catches every exception, also that which is to stop it: it is ended"
            " without the functions of atexit"
        )
        os._exit(self._plan())

    def _plan(self) -> int:
        try:
            return self._planned()
        except PenstockError as error:
            if self._options.debug:
                raise
            return report(error)
        except KeyboardInterrupt:
            return INTERRUPTED_CODE
        except UnreadError:
            return UNREAD_CODE

    def _planned(self) -> int:
        assert self._recording is not None
        step = self._recording.recorded
        assert step is not None
        self._recording.close()
        if isinstance(step, PenstockError):
            raise step
        name = shlex.join(self._options.script)
        if not _is_whole(self._options):
            budgets: Any = importlib.import_module("penstock.cli.plan_budgets")
            return int(budgets.print_budgets(self._options, step, name, self._answer))
        whole: Any = importlib.import_module("penstock.cli.plan_step")
        request = whole.check_step(self._options, step, name=name)
        whole.print_step(request, self._options, self._answer)
        return 0
