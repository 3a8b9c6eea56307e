"""The command ``penstock jobs``, which lets several training scripts share a machine."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from typing import Final

from penstock.cli.command import add_command, new_parser
from penstock.cli.output import say, show, write_json
from penstock.core.errors import ConfigError, JobError
from penstock.jobs.control import Client
from penstock.jobs.description import load
from penstock.jobs.manager import Manager
from penstock.jobs.options import check_options
from penstock.jobs.view import Watch, table

_EXAMPLES: Final = """\
examples:
  penstock jobs run jobs.toml
  penstock jobs status --watch
  penstock jobs suspend bert
  penstock jobs stop

The exit code of `run` is 0 if every job has ended with 0, otherwise 1. Ctrl-C stops the jobs
properly; a second Ctrl-C kills them. After a manager was killed, the same command starts a new one,
which finds its jobs."""
_STATE: Final = ".penstock-jobs"
_WATCH_S: Final = 0.5


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``penstock jobs``."""
    made = new_parser(
        "jobs",
        "Let several training scripts share one machine under a memory budget.",
        examples=_EXAMPLES,
    )
    what = made.add_subparsers(metavar="WHAT", required=True)
    kinds = {
        "run": ("run the jobs of a file until all have ended", _run),
        "status": ("show which jobs run, sleep or wait, and why", _status),
        "suspend": ("put a job to sleep until it is resumed", _tell),
        "resume": ("let a suspended job run in turns again", _tell),
        "stop": ("stop a job; without a name all jobs, and the manager", _tell),
    }
    for name, (text, execute_it) in kinds.items():
        each = add_command(what, name, text, execute_it)
        if name == "run":
            each.add_argument(
                "file", metavar="FILE", help="TOML file with tables [machine] and [[job]]"
            )
        elif name == "status":
            each.add_argument(
                "--watch",
                action="store_true",
                help="update the view until the manager ends or Ctrl-C",
            )
        else:
            each.add_argument(
                "name", metavar="NAME", nargs="?" if name == "stop" else None, help="name of a job"
            )
        each.add_argument(
            "--state",
            metavar="DIR",
            default=_STATE,
            help=f"the manager's directory (default: {_STATE})",
        )
        each.set_defaults(what=name)
    return made


def _run(options: argparse.Namespace) -> int:
    description = load(options.file)
    check_options(description)
    watch = Watch(sys.stderr)
    with Manager(description, state=options.state, tell=watch.tell) as manager:
        if manager.found:
            say(f"found the jobs of an earlier manager: {', '.join(manager.found)}")
        with watch:
            done = manager.run(watch)
        status = manager.status()
    if options.json:
        write_json(status, sys.stdout)
    else:
        show(table(status), sys.stderr)
    return 0 if done else 1


def _status(options: argparse.Namespace) -> int:
    client = Client(options.state)
    if options.watch:
        return _watch(client, json=options.json)
    status = client.status()
    if options.json:
        write_json(status, sys.stdout)
    else:
        show(table(status), sys.stdout)
    return 0


def _watch(client: Client, *, json: bool) -> int:
    """Update the view until the manager ends or Ctrl-C."""
    if json or not sys.stdout.isatty():
        raise ConfigError(
            "--watch needs a terminal and no --json; run `penstock jobs status --json` repeatedly"
        )
    status = client.status()
    with Watch(sys.stdout) as watch, suppress(KeyboardInterrupt, JobError):
        while True:
            watch(status)
            time.sleep(_WATCH_S)
            status = client.status()
    show(table(status), sys.stdout)
    return 0


def _tell(options: argparse.Namespace) -> int:
    client = Client(options.state)
    answer = (
        client.stop(options.name)
        if options.what == "stop"
        else getattr(client, options.what)(options.name)
    )
    if options.json:
        write_json({"schema": 1, "told": answer}, sys.stdout)
    else:
        say(answer)
    return 0
