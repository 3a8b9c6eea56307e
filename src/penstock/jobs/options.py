"""Check of the jobs' options before any job starts, as ``penstock run`` would check them."""

from __future__ import annotations

import argparse
import io
from contextlib import chdir, redirect_stdout
from typing import Final, NoReturn

from penstock.cli import run
from penstock.codec import registry
from penstock.core.errors import ConfigError
from penstock.jobs.description import Description, JobsMachine, JobSpec

_MANAGERS: Final = {
    "channel": "the manager sets it",
    "state": "the manager sets it; write durable = true",
    "resume": "the manager sets it if there is something to resume; write durable = true",
}


def check_options(description: Description) -> None:
    """Check each job's options as ``penstock run`` will in the job's directory.

    Raises:
        ConfigError: An option would be refused; names the file, job and options, and those allowed.
    """
    description.check_places()
    for job in description.jobs:
        try:
            _check(job, description.machine)
        except ConfigError as error:
            raise ConfigError(
                f"{description.source}: job {job.name!r}: options is {list(job.options)!r}: {error}"
            ) from error


def _check(job: JobSpec, machine: JobsMachine) -> None:
    parser = run.parser()
    known = f"known are {', '.join(_names(parser))}"
    found = _parsed(parser, [*job.options, *job.words], known)
    words = [*(found.module or []), *found.script]
    if not words:
        raise ConfigError(f"its last option has no value; {known}")
    if words != job.words[1 if job.module else 0 :] or bool(found.module) != bool(job.module):
        raise ConfigError(
            f"these options would run {' '.join(words)!r} in place of the script or module; {known}"
        )
    for name, why in _MANAGERS.items():
        if getattr(found, name):
            raise ConfigError(f"--{name} is not for a job: {why}; {known}")
    found.flash = [*machine.directories, *(found.flash or [])]
    if job.durable and not found.flash and found.config is None:
        raise ConfigError(
            "durable is true, but [machine] flash names no directory for sleeping jobs: name one, or"
            " remove durable"
        )
    with chdir(job.cwd):
        config, _, _ = run.checked(found)
    for name in config.codec.split("+"):
        if name not in ("auto", "none", *registry.names()):
            registry.get(name)  # its error lists the known codecs


def _parsed(parser: argparse.ArgumentParser, words: list[str], known: str) -> argparse.Namespace:
    """Parse without printing, and without ending the process."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; {known}")

    parser.error = refuse  # type: ignore[method-assign]
    try:
        with redirect_stdout(io.StringIO()):
            return parser.parse_args(words)
    except SystemExit:
        raise ConfigError(f"--help is not for a job; {known}") from None


def _names(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options that a job may have."""
    names = [
        each.option_strings[0]
        for each in parser._actions
        if each.option_strings and each.help != argparse.SUPPRESS
    ]
    others = {"-h", "-m", *(f"--{name}" for name in _MANAGERS)}
    return [name for name in names if name not in others]
