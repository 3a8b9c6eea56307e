"""``penstock run``: a script that knows nothing of Penstock, inside a session.

1. Settings are checked, before anything of the script runs.
2. The script becomes ``__main__`` (:mod:`penstock.cli.script`).
3. When it has imported torch, a session is opened in this thread (:mod:`penstock.cli.torch_import`).
4. Between two of its steps it can be suspended, by a signal or by a manager of jobs
   (:mod:`penstock.swap.signals`).
5. When it is over, its other threads and its ``atexit`` functions included, and however it ended, the
   summary is told and the session closed. What ends a process without Python's doing (SIGTERM,
   ``os._exit``) ends it without a summary.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from penstock import __version__
from penstock.cli import notes
from penstock.cli.command import add_common, formatter, size
from penstock.cli.output import report, say, show, write_json, write_json_line
from penstock.cli.paths import file_to_write, spill_directory
from penstock.cli.script import Program, find, run_as_main
from penstock.cli.torch_import import when_imported
from penstock.core import knobs
from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.files import absolute_path
from penstock.core.process import fork_guard
from penstock.core.ranks import of_rank, rank
from penstock.core.units import MIB
from penstock.jobs.logs import print_if_there_is_room
from penstock.plan import policies
from penstock.runtime.given import SUFFIX, load_plan
from penstock.swap.channel import JobEnd
from penstock.swap.pending_signals import PendingSignals, listen_to_manager

if TYPE_CHECKING:
    from penstock.api import Session

_EXAMPLES: Final = """\
examples:
  penstock run --device-memory 2GiB --flash /nvme/spill train.py --its --own args
  penstock run --config offload.toml --trace trace.json.gz -m package.train --epochs 3

Options of Penstock come before the script; everything after its name is its own. Sizes have a unit:
GB is 10^9 bytes, GiB is 2^30."""
_OPTIONS: Final = (
    (
        "--device-memory",
        "SIZE",
        "most device memory for saved tensors (default: none; on CUDA what is free)",
    ),
    ("--host-memory", "SIZE", "most host memory to spill to (default: none)"),
    ("--flash-capacity", "SIZE", "most to spill to flash (default: 9/10 of the free space)"),
    ("--floor", "SIZE", "smaller tensors stay in memory (default: 1MiB)"),
    ("--event-log-size", "SIZE", "size at which the event log is rotated (default: 64MiB)"),
    ("--tbw", "SIZE", "what the SSD is rated for, as 600TB: the summary tells the share written"),
)
_TRACE_BYTES: Final = 64 * MIB
"""Memory for the latest events where a trace is asked for, if the knob does not give more."""
_HUGE_PAGES: Final = "THP_MEM_ALLOC_ENABLE"
"""Has torch ask for huge pages under large CPU tensors; read when torch first allocates one."""


def parser() -> argparse.ArgumentParser:
    """Of ``penstock run``."""
    made = argparse.ArgumentParser(
        prog="penstock run",
        usage="penstock run [options] (script.py | -m module) [args ...]",
        description="Run a script in this process, as `python script.py args` would, and keep what"
        " autograd\nsaves within a memory budget. The summary goes to standard error at the end.",
        epilog=_EXAMPLES,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    for name, metavar, text in _OPTIONS:
        made.add_argument(name, metavar=metavar, type=size, help=text)
    made.add_argument(
        "--flash",
        metavar="DIR",
        action="append",
        help="directory on an SSD to spill to; repeat it for several",
    )
    made.add_argument(
        "--policy",
        metavar="NAME",
        help=f"what to move: {', '.join(policies.names())}; or a plan, FILE.json (default: auto)",
    )
    made.add_argument(
        "--codec",
        metavar="NAME",
        help="compression of what is moved: auto (lossless), none, or a codec's name (default: auto)",
    )
    made.add_argument(
        "--recompute",
        action="store_true",
        default=None,
        help="have modules run again in backward where that is quicker than moving what they save",
    )
    made.add_argument(
        "--config",
        metavar="FILE",
        help="read settings from table [offload] of a TOML file; options overrule it",
    )
    made.add_argument(
        "--optimizer-state",
        choices=("memory", "flash"),
        default="memory",
        help="where torch's optimizers keep their states; flash: in the directories of --flash"
        " (default: %(default)s)",
    )
    made.add_argument(
        "--optimizer-memory",
        metavar="SIZE",
        type=size,
        help="with --optimizer-state flash: most memory for these states (default: a few tiles)",
    )
    made.add_argument(
        "--gradient-memory",
        metavar="SIZE",
        type=size,
        help="with --optimizer-state flash: most memory for gradients; the rest wait on flash (default:"
        " no limit)",
    )
    made.add_argument(
        "--state",
        metavar="DIR",
        help="directory of what a suspended run needs to survive its process",
    )
    made.add_argument(
        "--resume",
        action="store_true",
        help="continue the suspended run that --state has, to the same bits",
    )
    made.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto at the end")
    made.add_argument("--event-log", metavar="FILE", help="write every event as JSON lines")
    made.add_argument(
        "--event-log-files",
        metavar="N",
        type=int,
        help="how many files the log is rotated through (default: 8)",
    )
    made.add_argument("--channel", help=argparse.SUPPRESS)  # of a manager of jobs
    add_common(
        made,
        json_help="print the summary as JSON on standard output; what the script prints there goes"
        " to standard error",
    )
    made.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        help="run a module, as `python -m` does",
    )
    made.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made


def execute(options: argparse.Namespace) -> Callable[[], int]:
    """Check everything; return what runs the script.

    Raises:
        ConfigError: A setting makes no sense, or a path cannot be used.
        SystemExit: There is no such script (2).
    """
    module: list[str] = options.module or []
    words: list[str] = [*module, *options.script]  # `-mname args` has its arguments in `script`
    if not words:
        raise ConfigError("nothing to run; name a script, or a module with -m")
    config, trace, states = checked(options)
    program = _program(words, is_module=bool(module))
    misplaced = notes.misplaced_options(parser(), options, words)
    if misplaced is not None and rank() in (None, 0):
        say(misplaced)
    attendant = _Attendant(config, words=words, trace=trace, states=states, debug=options.debug)
    if options.channel is not None:
        attendant.channel = JobEnd(options.channel)
        listen_to_manager()
        print_if_there_is_room()
    attendant.keep = _keeping(options, words)
    if options.json:
        attendant.answer = _take_stdout()
    return lambda: _run(program, attendant)


def checked(
    options: argparse.Namespace,
) -> tuple[OffloadConfig, str | None, dict[str, Any] | None]:
    """Settings of the session, where a trace goes, settings of optimizers. Raises ConfigError."""
    config = _config(options)
    return config, _file(options.trace, "--trace"), _optimizer_settings(options, config)


def _run(program: Program, attendant: _Attendant) -> int:
    os.environ.setdefault(_HUGE_PAGES, "1")
    attendant.early = PendingSignals()
    atexit.register(attendant.finish)
    when_imported(attendant.start)
    attendant.code = 1
    try:
        run_as_main(program)
    except SystemExit as exit:
        attendant.code = _code_of(exit)
        raise
    except PenstockError as error:
        attendant.failure = str(error)
        raise
    attendant.code = 0
    return 0


def _program(words: list[str], *, is_module: bool) -> Program:
    """Return what there is to run. Raises SystemExit: there is no such script."""
    try:
        return find(words[0], words[1:], is_module=is_module)
    except SystemExit:
        note = notes.program_on_path(words[0])
        if note is not None:
            say(note)
        raise


def _code_of(exit: SystemExit) -> int:
    """What the interpreter will make of it."""
    if exit.code is None:
        return 0
    return exit.code & 0xFF if isinstance(exit.code, int) else 1


class _Attendant:
    """Opens the session when it is time, tells about it when all is over.

    Attributes:
        answer: Where the summary is written as JSON, or ``None``: as text to standard error.
        channel: To the manager of jobs, if there is one.
        keep: Where what sleeps is kept, and whether to resume; None: nowhere.
        early: Hears signals until the session is open.
        code: The exit code, once it is known.
        failure: The message of the error of Penstock's that has ended the script.
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        words: list[str],
        trace: str | None,
        states: dict[str, Any] | None,
        debug: bool,
    ) -> None:
        self.answer: IO[str] | None = None
        self.channel: JobEnd | None = None
        self.keep: dict[str, Any] | None = None
        self.early: PendingSignals | None = None
        self._keeper: Any = None
        self.code = 0
        self.failure: str | None = None
        self._states = states
        self._config = config
        self._words = words
        self._rank = rank()
        self._trace = None if trace is None else of_rank(trace)
        self._debug = debug
        self._guard = fork_guard()
        self._session: Session | None = None
        self._sleeper: Any = None
        self._was_refused = False

    def start(self) -> None:
        """Torch is there: open the session.

        Raises:
            SystemExit: It cannot be opened; the reason was told.
        """
        if self._guard.in_child or self._session is not None:
            return  # children of the script run as they are
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            say(
                f"warning: torch was imported first in thread {thread.name!r}, and a session serves"
                " only the thread that opens it: nothing is offloaded; import torch in the main"
                " thread before"
            )
            return
        try:
            kept_bytes = None if self._trace is None else max(knobs.event_bytes(), _TRACE_BYTES)
            session = importlib.import_module("penstock.api").Session(
                self._config, event_bytes=kept_bytes
            )
            if self.keep is not None:
                keeper = importlib.import_module("penstock.swap.resume_record")
                self._keeper = keeper.opened(**self.keep, tell=say)
            session.__enter__()
            if self._states is not None:
                adopt = importlib.import_module("penstock.optim.adopt")
                adopt.Adoption(self._states, tell=say)
        except PenstockError as error:
            if self._debug:
                raise
            self._was_refused = True
            raise SystemExit(report(error)) from None
        self._session = session
        self._sleeper = importlib.import_module("penstock.swap.signals").Sleeper(
            session, tell=say, channel=self.channel, keeper=self._keeper, early=self.early
        )
        # before what the script registers from now on, so that it runs after that
        atexit.unregister(self.finish)
        atexit.register(self.finish)

    def finish(self) -> None:
        """All is over: tell, and close. Never raises; the exit code is the script's."""
        if self._guard.in_child:
            return
        for act in (
            self._write_trace,
            self._tell,
            self._close,
            self._tell_manager,
            self._tell_failure,
        ):
            try:
                act()
            except (PenstockError, OSError, ValueError) as error:
                say(f"error: at the end of the run: {error}")

    def _write_trace(self) -> None:
        if self._session is None or self._trace is None:
            return
        trace = importlib.import_module("penstock.report.trace")
        about = {
            "penstock": __version__,
            "command": " ".join(self._words),
            "policy": self._config.policy,
            "device_memory_bytes": self._config.device_memory,
        }
        trace.write_trace(self._session.recorder, self._trace, about=about)

    def _tell(self) -> None:
        if self._sleeper is not None and self._sleeper.asked:
            say(
                "warning: a signal asked it to sleep, and it did not: it sleeps when the step() of an"
                " optimizer of torch's ends, and none has since"
            )
        summary = None if self._session is None else self._session.summary()
        if self.answer is not None:
            facts = None if summary is None else summary.to_json()
            document = {"schema": 1, "command": self._words, "summary": facts}
            if self._rank is None:
                write_json(document, self.answer)
            else:
                write_json_line({"rank": self._rank, **document}, self.answer)
        elif sys.__stderr__ is None:
            return
        elif self._was_refused:
            return  # that was said
        elif summary is None:
            say("the script did not import torch: there was nothing to offload")
        else:
            sys.__stderr__.write("\n")
            show(summary, sys.__stderr__)
        if summary is not None and summary.steps == 0 and self.code == 0:
            say(notes.no_step(self._words[0]))

    def _close(self) -> None:
        if self._keeper is not None:
            self._keeper.finish(self.code)
        if self._session is not None:
            self._session.close()

    def _tell_manager(self) -> None:
        if self.channel is not None:
            self.channel.tell(state="over", code=self.code)

    def _tell_failure(self) -> None:
        """Repeat what has ended the script: the summary, and torch's traceback, are between."""
        if self.failure is not None and self._session is not None:  # else it is the script's own
            say(f"error: {self.failure}")


def _config(options: argparse.Namespace) -> OffloadConfig:
    names = (
        "device_memory",
        "host_memory",
        "flash_capacity",
        "policy",
        "codec",
        "recompute",
        "floor",
        "event_log",
        "event_log_size",
        "event_log_files",
        "tbw",
    )
    given: dict[str, Any] = {
        name: value for name in names if (value := getattr(options, name)) is not None
    }
    if options.flash:
        given["flash"] = tuple(options.flash)
    if options.config is None:
        config = OffloadConfig(**given)
    else:
        config = replace(OffloadConfig.from_toml(options.config), **given)
    if config.policy.endswith(SUFFIX):
        load_plan(config.policy)
        config = replace(config, policy=str(Path(config.policy).resolve()))
    else:
        policies.get(config.policy)
    return replace(  # absolute, for the script may change its directory
        config,
        flash=tuple(spill_directory(each) for each in config.directories),
        event_log=_file(config.event_log, "event_log"),
    )


def _optimizer_settings(
    options: argparse.Namespace, config: OffloadConfig
) -> dict[str, Any] | None:
    """Fields of ``penstock.optim.StatesConfig``; None: states stay in memory."""
    if options.optimizer_state == "memory":
        for name in ("optimizer_memory", "gradient_memory"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is for --optimizer-state flash, which is not set")
        return None
    if not config.directories:
        raise ConfigError("--optimizer-state flash needs a directory: --flash DIR")
    return {
        "flash": config.directories,
        "host_memory": options.optimizer_memory or 0,
        "gradient_memory": options.gradient_memory,
        "tbw": config.tbw_bytes,
    }


def _keeping(options: argparse.Namespace, words: list[str]) -> dict[str, Any] | None:
    """What a keeper is made of."""
    if options.state is None:
        if options.resume:
            raise ConfigError("--resume needs the directory where the run was kept: --state DIR")
        return None
    if not options.flash and options.config is None:
        raise ConfigError("--state is for what sleeps on flash: name a directory with --flash")
    script = None if options.module else os.path.abspath(words[0])
    directory = absolute_path(options.state, "--state")
    if options.channel is None:  # else a manager has named it, who looks there
        directory = of_rank(directory)
    return {"directory": directory, "words": words, "script": script, "resume": options.resume}


def _file(name: str | Path | None, option: str) -> str | None:
    return None if name is None else file_to_write(name, option)


def _take_stdout() -> IO[str]:
    """Keep standard output for the answer; whatever writes to it goes to standard error.

    The descriptors are changed and not ``sys.stdout``, so that this holds for C code and children.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    if sys.__stdout__ is None or sys.__stderr__ is None:
        raise ConfigError("--json needs both standard output and error open")
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", encoding="utf-8")
