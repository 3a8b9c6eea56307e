"""The command ``penstock run``, which runs an unmodified script inside a session.

1. Settings are checked before the script runs.
2. The script becomes ``__main__`` (:mod:`penstock.cli.script`).
3. When it has imported torch, a session is opened in this thread (:mod:`penstock.cli.torch_import`).
4. Between two of its steps it can be suspended, by a signal or by a manager of jobs
   (:mod:`penstock.swap.signals`).
5. After its end, including that of its threads and ``atexit`` functions, and even after an error, the
   summary is printed and the session closed. If the process ends without Python's clean-up (SIGTERM,
   ``os._exit``), there is no summary.
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
from penstock.cli.command import new_parser, size
from penstock.cli.output import (
    drop_output_if_full,
    report,
    say,
    show,
    take_stdout,
    write_json,
    write_json_line,
)
from penstock.cli.paths import file_to_write, spill_directory
from penstock.cli.script import Program, find_program, request_huge_pages, run_as_main
from penstock.cli.torch_import import when_imported
from penstock.core import knobs
from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.files import absolute_path, given_paths
from penstock.core.process import fork_guard
from penstock.core.ranks import path_of_rank, rank
from penstock.core.units import MIB
from penstock.plan import policies
from penstock.runtime.user_plan import SUFFIX, load_plan
from penstock.swap.channel import JobEnd
from penstock.swap.pending_signals import PendingSignals, listen_to_manager

if TYPE_CHECKING:
    from penstock.api import Session
    from penstock.cli.live_status import LiveStatus
    from penstock.observe.job_summary import JobSummary

_EXAMPLES: Final = """\
examples:
  penstock run --memory 8GiB --flash /nvme/spill train.py --its --own args
  penstock run --memory auto --flash /nvme/spill train.py
  penstock run --config offload.toml --trace trace.json.gz -m package.train --epochs 3

Options of Penstock come before the script; everything after its name is passed to it. Sizes have a
unit: GB is 10^9 bytes, GiB is 2^30. 64GiB/node is divided by the processes that a launcher has
started on the machine."""
_OPTIONS: Final = (
    (
        "--memory",
        "SIZE",
        "limit of all host memory that Penstock holds in this process; auto or a share, such as 60%%,"
        " limit the whole process: to the memory that is available, or to that share of it (default:"
        " no limit)",
    ),
    (
        "--device-memory",
        "SIZE",
        "limit of saved tensors, within --memory if they are in host memory (default: no further"
        " limit; on CUDA the free memory)",
    ),
    (
        "--host-memory",
        "SIZE",
        "limit of host memory to offload to, within --memory (default: none)",
    ),
    (
        "--flash-capacity",
        "SIZE",
        "limit of flash to use (default: 9/10 of the free space, divided by the processes on this"
        " machine that share it)",
    ),
    (
        "--weights-memory",
        "SIZE",
        "with --weights flash or host: limit of weights in memory, within --memory (default: most of it)",
    ),
    ("--floor", "SIZE", "size below which tensors stay resident (default: 1MiB)"),
    ("--event-log-size", "SIZE", "size at which the event log is rotated (default: 64MiB)"),
    (
        "--tbw",
        "SIZE",
        "rated endurance of the SSD, such as 600TB: the summary has the share written",
    ),
)
_TRACE_BYTES: Final = 64 * MIB
"""Minimum memory for the latest events if a trace is to be written."""
_PATIENCE_S: Final = 10.0
"""Longest time that rank 0 waits at the end for the summaries of others."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``penstock run``."""
    made = new_parser(
        "run",
        "Run a script in this process, as `python script.py args` would, and keep the tensors"
        " that\nautograd saves within a memory budget. Prints a summary on standard error at the end.",
        examples=_EXAMPLES,
        usage="penstock run [options] (script.py | -m module) [args ...]",
        execute=execute,
        json_help="print the summary as JSON on standard output; the script's output there goes to"
        " standard error",
    )
    for name, metavar, text in _OPTIONS:
        made.add_argument(name, metavar=metavar, type=size, help=text)
    made.add_argument(
        "--flash",
        metavar="DIR",
        action="append",
        help="directory on an SSD to offload to; repeat it for several",
    )
    made.add_argument(
        "--flash-by-rank",
        action="store_true",
        default=None,
        help="divide these directories among the processes on this machine, by LOCAL_RANK",
    )
    made.add_argument(
        "--policy",
        metavar="NAME",
        help=f"policy: {', '.join(policies.names())}; or a plan, FILE.json (default: auto)",
    )
    made.add_argument(
        "--codec",
        metavar="NAME",
        help="compression of offloaded tensors: auto (lossless), none, or a codec (default: auto)",
    )
    made.add_argument(
        "--recompute",
        action="store_true",
        default=None,
        help="recompute modules in backward if that is faster than offloading what they save",
    )
    made.add_argument(
        "--config",
        metavar="FILE",
        help="read settings from table [offload] of a TOML file; options take precedence",
    )
    made.add_argument(
        "--weights",
        choices=("keep", "flash", "host", "auto"),
        help="place of weights; flash: files in the directories of --flash, read when modules and"
        " backward need them; host: of a model on a GPU, host memory; auto: the first of these that"
        " the limits and directories allow (default: keep)",
    )
    made.add_argument(
        "--optimizer-state",
        choices=("memory", "flash"),
        default="memory",
        help="place of the states of torch's optimizers; flash: the directories of --flash"
        " (default: %(default)s)",
    )
    made.add_argument(
        "--optimizer-memory",
        metavar="SIZE",
        type=size,
        help="with --optimizer-state flash: memory for these states (default: a few tiles)",
    )
    made.add_argument(
        "--gradient-memory",
        metavar="SIZE",
        type=size,
        help="with --optimizer-state flash: memory for gradients; the rest is offloaded to flash"
        " (default: no limit; with --weights flash on a CPU, one process, --memory and no"
        " --weights-memory: what is left of that; otherwise with weights that rest: 0)",
    )
    made.add_argument(
        "--state",
        metavar="DIR",
        help="directory for the state with which another process can resume a suspended run",
    )
    made.add_argument(
        "--resume",
        action="store_true",
        help="continue the suspended run in the directory of --state, with the same bits",
    )
    made.add_argument(
        "--live",
        action="store_true",
        help="show steps, memory, transfers and waits while the script runs: in the last lines of a"
        " terminal, else as a line on standard error every 10 s at most",
    )
    made.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto at the end")
    made.add_argument("--event-log", metavar="FILE", help="write every event as JSON lines")
    made.add_argument(
        "--event-log-files",
        metavar="N",
        type=int,
        help="number of files of the rotated log (default: 8)",
    )
    made.add_argument("--channel", help=argparse.SUPPRESS)  # of a manager of jobs
    made.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        help="run a module, as `python -m` does",
    )
    made.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made


def execute(options: argparse.Namespace) -> Callable[[], int]:
    """Check everything; return the function that runs the script.

    Raises:
        ConfigError: A setting is invalid, or a path cannot be used.
        SystemExit: The script does not exist (2).
    """
    module: list[str] = options.module or []
    words: list[str] = [*module, *options.script]  # `-mname args` has its arguments in `script`
    if not words:
        raise ConfigError("nothing to run; name a script, or a module with -m")
    config, trace, states = checked(options)
    program = find_program(words, is_module=bool(module))
    misplaced = notes.misplaced_options(parser(), options, words)
    if misplaced is not None and rank() in (None, 0):
        say(misplaced)
    lifecycle = _RunLifecycle(config, words=words, trace=trace, states=states, debug=options.debug)
    if options.channel is not None:
        lifecycle.channel = JobEnd(options.channel)
        listen_to_manager()
        drop_output_if_full()
    lifecycle.resume_arguments = _resume_arguments(options, words)
    lifecycle.is_live = options.live and rank() in (None, 0)
    if options.json:
        lifecycle.answer = take_stdout()
    return lambda: _run(program, lifecycle)


def checked(
    options: argparse.Namespace,
) -> tuple[OffloadConfig, str | None, dict[str, Any] | None]:
    """Return the session's settings, the trace's path, and optimizers' settings. Raises ConfigError."""
    config = _config(options)
    return config, _file(options.trace, "--trace"), _optimizer_settings(options, config)


def _run(program: Program, lifecycle: _RunLifecycle) -> int:
    request_huge_pages()
    lifecycle.pending = PendingSignals()
    atexit.register(lifecycle.finish)
    when_imported(lifecycle.start)
    lifecycle.code = 1
    try:
        run_as_main(program)
    except SystemExit as exit:
        lifecycle.code = _code_of(exit)
        raise
    except PenstockError as error:
        lifecycle.failure = str(error)
        raise
    lifecycle.code = 0
    return 0


def _code_of(exit: SystemExit) -> int:
    """Return the exit code that the interpreter will use."""
    if exit.code is None:
        return 0
    return exit.code & 0xFF if isinstance(exit.code, int) else 1


class _RunLifecycle:
    """Opens the session when torch is imported, and reports and closes it at the end.

    Attributes:
        answer: Output of the summary as JSON; ``None`` for text on standard error.
        channel: Channel to the manager of jobs, if there is one.
        resume_arguments: Arguments of the resume record; ``None`` for no record.
        pending: Handler of signals until the session is open.
        is_live: True to show figures while the script runs.
        code: Exit code, once it is known.
        failure: Message of the error of Penstock that has ended the script.
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
        self.resume_arguments: dict[str, Any] | None = None
        self.pending: PendingSignals | None = None
        self.is_live = False
        self._live: LiveStatus | None = None
        self._resume_record: Any = None
        self.code = 0
        self.failure: str | None = None
        self._states = states
        self._config = config
        self._words = words
        self._rank = rank()
        self._trace = None if trace is None else path_of_rank(trace)
        self._debug = debug
        self._guard = fork_guard()
        self._session: Session | None = None
        self._sleeper: Any = None
        self._was_refused = False
        self._is_told_by_rank_0 = False

    def start(self) -> None:
        """Open the session, when torch has been imported.

        Raises:
            SystemExit: It cannot be opened; the reason was printed.
        """
        if self._guard.in_child or self._session is not None:
            return  # children of the script run without a session
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            say(
                f"warning: torch was first imported in thread {thread.name!r}, but a session must be"
                " opened in the main thread: nothing is offloaded; import torch in the main thread"
                " first"
            )
            return
        try:
            kept_bytes = None if self._trace is None else max(knobs.event_bytes(), _TRACE_BYTES)
            # what the end of the run needs: code that is executed after Ctrl-C, as when a module is
            # loaded, makes the interpreter exit with 1 in place of death by SIGINT
            importlib.import_module("penstock.observe.summary")
            if self._trace is not None:
                importlib.import_module("penstock.report.trace")
            session = importlib.import_module("penstock.api").Session(
                self._config, event_bytes=kept_bytes
            )
            if self.resume_arguments is not None:
                module = importlib.import_module("penstock.swap.resume_record")
                self._resume_record = module.opened(**self.resume_arguments, tell=say)
            session.__enter__()
            self._session = session
            session.build_on_flash()
            if self._states is not None:
                adopt = importlib.import_module("penstock.optim.adopt")
                adopt.Adoption(
                    _with_gradients(self._states, session),
                    floor_bytes=self._config.floor_bytes,
                    tell=say,
                )
        except PenstockError as error:
            if self._debug:
                raise
            self._was_refused = True
            raise SystemExit(report(error)) from None
        self._sleeper = importlib.import_module("penstock.swap.signals").StepSuspender(
            session,
            tell=say,
            channel=self.channel,
            record=self._resume_record,
            pending=self.pending,
        )
        if self.is_live:
            self._live = importlib.import_module("penstock.cli.live_status").LiveStatus(session)
        # registered before functions that the script registers from now on, so that it runs after them
        atexit.unregister(self.finish)
        atexit.register(self.finish)

    def finish(self) -> None:
        """Report and close at the end. Never raises; the exit code is the script's."""
        if self._guard.in_child:
            return
        for act in (
            self._end_live,
            self._write_trace,
            self._report_summary,
            self._close,
            self._report_to_manager,
            self._repeat_failure,
        ):
            try:
                act()
            except (PenstockError, OSError, ValueError) as error:
                say(f"error: at the end of the run: {error}")

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.close()

    def _write_trace(self) -> None:
        if self._session is None or self._trace is None:
            return
        trace = importlib.import_module("penstock.report.trace")
        about = {
            "penstock": __version__,
            "command": " ".join(self._words),
            "policy": self._config.policy,
            "memory": self._config.memory,
            "device_memory_bytes": self._config.device_memory,
        }
        trace.write_trace(self._session.recorder, self._trace, about=about)

    def _report_summary(self) -> None:
        reason = None if self._sleeper is None else self._sleeper.why_awake
        if reason is not None:
            say(f"warning: a signal asked the run to sleep, but it did not: {reason}")
        summary = None if self._session is None else self._session.summary()
        job = self._job_summary()
        if self.answer is not None:
            facts = None if summary is None else summary.to_json()
            document = {"schema": 1, "command": self._words, "summary": facts}
            if job is not None:
                document["job"] = job.to_json()
            if self._rank is None:
                write_json(document, self.answer)
            else:
                write_json_line({"rank": self._rank, **document}, self.answer)
        elif sys.__stderr__ is None:
            return
        elif self._was_refused:
            return  # the reason was printed
        elif summary is None:
            say("the script did not import torch: there was nothing to offload")
        else:
            sys.__stderr__.write("\n")
            text = importlib.import_module("penstock.observe.summary_text")
            show(text.head(summary) if self._is_told_by_rank_0 else summary, sys.__stderr__)
            if job is not None:
                sys.__stderr__.write("\n")
                show(job, sys.__stderr__)
        if summary is not None and summary.steps == 0 and self.code == 0:
            say(notes.no_step(self._words[0]))

    def _job_summary(self) -> JobSummary | None:
        """Publish this rank's summary; on rank 0 return that of the job, if others have published."""
        if self._session is None or not self._session.publish_summary():
            return None
        self._is_told_by_rank_0 = self._rank != 0
        if self._is_told_by_rank_0:
            return None
        job = self._session.job_summary(patience_s=_PATIENCE_S if self.code == 0 else 0.0)
        return job if len(job.ranks) > 1 else None

    def _close(self) -> None:
        if self._resume_record is not None:
            self._resume_record.finish(self.code)
        if self._session is not None:
            self._session.close()

    def _report_to_manager(self) -> None:
        if self.channel is not None:
            self.channel.tell(state="over", code=self.code)

    def _repeat_failure(self) -> None:
        """Repeat the error that has ended the script, which precedes the traceback and the summary."""
        if (
            self.failure is not None and self._session is not None
        ):  # otherwise it is the script's own
            say(f"error: {self.failure}")


def _config(options: argparse.Namespace) -> OffloadConfig:
    names = (
        "memory",
        "device_memory",
        "host_memory",
        "flash_by_rank",
        "flash_capacity",
        "policy",
        "codec",
        "recompute",
        "weights",
        "weights_memory",
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
    return replace(  # absolute, because the script may change its directory
        config,
        flash=tuple(spill_directory(each) for each in given_paths(config.flash, "flash")),
        event_log=_file(config.event_log, "event_log"),
    )


def _optimizer_settings(
    options: argparse.Namespace, config: OffloadConfig
) -> dict[str, Any] | None:
    """Return fields of ``penstock.optim.StatesConfig``; None if states stay in memory."""
    if options.optimizer_state == "memory":
        for name in ("optimizer_memory", "gradient_memory"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} needs --optimizer-state flash, which is not set")
        return None
    if not config.directories:
        raise ConfigError("--optimizer-state flash needs a directory: --flash DIR")
    return {
        "flash": config.directories,
        "host_memory": options.optimizer_memory or 0,
        "gradient_memory": options.gradient_memory,
        "tbw": config.tbw_bytes,
    }


def _with_gradients(states: dict[str, Any], session: Session) -> dict[str, Any]:
    """Return fields of ``StatesConfig`` by which gradients take no memory beyond the session's limits.

    They take as much as weights: of those that rest elsewhere none waits in memory, unless the user says
    so, or ``memory`` is the one limit of the session and limits them as well.
    """
    config = session.config
    is_limited = session.limits_gradients and config.weights_memory is None
    if states["gradient_memory"] is not None or config.weights == "keep" or is_limited:
        return states
    return {**states, "gradient_memory": 0}


def _resume_arguments(options: argparse.Namespace, words: list[str]) -> dict[str, Any] | None:
    """Return the arguments of the resume record, or None."""
    if options.state is None:
        if options.resume:
            raise ConfigError("--resume needs the directory of the run's state: --state DIR")
        return None
    if not options.flash and options.config is None:
        raise ConfigError("--state needs a directory on flash for suspended memory: --flash DIR")
    script = None if options.module else os.path.abspath(words[0])
    directory = absolute_path(options.state, "--state")
    if options.channel is None:  # otherwise a manager has named it and reads it
        directory = path_of_rank(directory)
    return {"directory": directory, "words": words, "script": script, "resume": options.resume}


def _file(name: str | Path | None, option: str) -> str | None:
    return None if name is None else file_to_write(name, option)
