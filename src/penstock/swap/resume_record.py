"""What of a run survives its process: ``penstock run --state DIR``, and ``--resume``.

[Note: what can be resumed]
    A script's state is more than its tensors: the position in its data, counters, what it has printed.
    Only the script can say what that is. So there are two ways to go on to the same bits, and no third:

    1. It has a ``Checkpointer``. When it is to sleep, that says it is ``due``; the script saves what it
       has, and sleeps when that is durable. A new process loads it and goes on from that step; or, if
       it was woken and has saved others since, from the last of these.
    2. It has none. When it sleeps, checksums of all tensors and random generators are kept. A new process
       does all its steps again, and is compared there: to go on it must be the same to the last bit. That
       takes as long as the first time, and is refused if the script is not deterministic.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
import xxhash

from penstock.checkpoint import Rng
from penstock.checkpoint.listeners import listeners
from penstock.checkpoint.listing import info_of, steps_in
from penstock.checkpoint.reading import Opened
from penstock.core.errors import CheckpointError, ConfigError, PenstockError, SuspendError
from penstock.core.files import absolute_path, open_regular, parse_json
from penstock.core.fs import FileLock, write_durably
from penstock.core.units import MIB
from penstock.swap import RECORD_FILE
from penstock.swap.state import tensors_of
from penstock.swap.suspend import Job

_SCHEMA: Final = 1
_SHOWN: Final = 3
_MOST_BYTES: Final = 64 * MIB


class ResumeFile:
    """What is known of a run that sleeps, in a directory. Loads no torch tensor; any process may look."""

    def __init__(self, directory: str, *, words: list[str], script: str | None) -> None:
        """Make the directory if need be.

        Args:
            directory: Of this run alone.
            words: Script and arguments.
            script: Its path, whose content belongs to the run; None: a module.

        Raises:
            ConfigError: The directory or the script cannot be read.
        """
        self.directory = absolute_path(directory, "--state")
        self._path = os.path.join(self.directory, RECORD_FILE)
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            self._run = {"schema": _SCHEMA, "words": words, "script": _digest_of_file(script)}
        except OSError as error:
            raise ConfigError(f"--state {directory!r}: {error}") from error

    @property
    def anew(self) -> str:
        """What to do where it cannot be resumed, in words: of a job nobody types the options."""
        return f"to begin anew, run it without --resume, or remove {self._path!r}"

    def read(self) -> dict[str, Any]:
        """What there is to resume. Raises ConfigError: nothing, or not of this run."""
        where = f"--resume: {self._path!r}"
        try:
            with open(self._path, "rb", opener=open_regular) as file:
                found = parse_json(file.read(_MOST_BYTES))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{where} is not there: this run was never suspended, or it has ended; run it without"
                " --resume"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where} cannot be read ({error}); {self.anew}") from error
        for key, what in (("schema", "version"), ("words", "script and arguments")):
            theirs = found.get(key) if isinstance(found, dict) else found
            if theirs != self._run[key]:
                raise ConfigError(
                    f"{where} is of another {what}: {theirs!r}, and this is {self._run[key]!r}; resume"
                    f" the same; {self.anew}"
                )
        assert isinstance(found, dict)
        if found.get("script") != self._run["script"]:
            raise ConfigError(
                f"{where}: the script has changed since, so its bits would be others; {self.anew}"
            )
        if not _is_whole(found):
            raise ConfigError(f"{where} is damaged, or of another version; {self.anew}")
        return found

    def write(self, **what: Any) -> None:
        """Replace it, durably. Raises SuspendError."""
        text = json.dumps({**self._run, **what})
        try:
            write_durably(self._path, text.encode())
        except OSError as error:
            raise SuspendError(f"--state: {self._path!r} cannot be written: {error}") from error

    def hold(self) -> FileLock:
        """Lock the directory, until the process ends or closes what is returned.

        Raises:
            ConfigError: Another run, which has not ended, holds it.
        """
        self._lock = FileLock(
            os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
            f"--state {self.directory!r}",
            "wait until that run has ended, or name another directory",
        )
        return self._lock

    def forget(self) -> None:
        """The run is over: there is nothing to resume."""
        with suppress(OSError):
            os.unlink(self._path)


class ResumeRecord:
    """Sees to it that what sleeps can be resumed by another process. For the thread that trains."""

    def __init__(self, record: ResumeFile, *, resume: bool, tell: Callable[[str], None]) -> None:
        """Listen to Checkpointers from now on.

        Args:
            record: Of the run.
            resume: Whether to go on from what it says.
            tell: Is told, in a line, what happens.

        Raises:
            ConfigError: There is nothing to resume.
            CheckpointError: What there was is damaged, or was removed.
        """
        self._record = record
        self._tell = tell
        self._knows_checkpointer = self._pending = False
        self._saved: dict[str, Any] | None = None
        self._sleep: Callable[[str, object], None] | None = None
        self._loaded = ""  # the last that the script went on from
        self._untouched = _generators()
        self._before = record.read() if resume else None
        if self._before is not None and self._before["kind"] == "checkpoint":
            _check_is_there(self._before, record)
        listeners.append(self)

    def sleep_by(self, sleep: Callable[[str, object], None]) -> None:
        """Say how the job is put to sleep when there is a checkpoint of it: given its path and state."""
        self._sleep = sleep

    # -- as a listener --------------------------------------------------------------------------------

    def opened(self) -> None:
        """There is a Checkpointer."""
        self._knows_checkpointer = True

    def wants_save(self) -> bool:
        """Whether it is to save."""
        return self._pending

    def saved(self, path: str, step: int, state: object) -> None:
        """What sleeps is durable: now it may sleep."""
        if self._pending and self._sleep is not None:
            self._pending = False
            self._saved = {"path": path, "step": step}
            self._sleep(path, state)

    def loaded(self, path: str) -> None:
        """The script goes on from a checkpoint."""
        self._loaded = path
        before = self._before
        if before is None or before["kind"] != "checkpoint":
            return
        later = _saved_since(before)
        if os.path.realpath(path) in later:  # not another, or one before
            self._before = None
            when = "since" if later[os.path.realpath(path)] > before["step"] else "when"
            self._tell(
                f"resumed from {path!r}, saved {when} it was suspended after step {before['step']}"
            )

    # -- between two steps ----------------------------------------------------------------------------

    def step_over(self, job: Job, steps: int) -> None:
        """Compare, if this is where the run was when it was suspended.

        Raises:
            SuspendError: It is not the same.
        """
        before = self._before
        if before is None:
            return
        if before["kind"] == "checkpoint":
            raise SuspendError(
                f"--resume: the script trains without having loaded its checkpoint {before['path']!r}:"
                " call Checkpointer.load before the first step"
            )
        if steps == before["steps"]:
            self._before = None
            differ = _differing(_told_apart(before["digests"]), _told_apart(self._digests(job)))
            if differ:
                raise SuspendError(
                    f"--resume: after {steps} steps {len(differ)} of {len(before['digests'])} parts are"
                    " not what they were when the run was suspended:"
                    f" {', '.join(differ[:_SHOWN])}; {self._why_not_the_same()}"
                )
            self._tell(f"resumed: {steps} steps were done again, and all bits are the same")

    def _why_not_the_same(self) -> str:
        """And what to do."""
        if self._loaded:
            return (
                f"the script went on from {self._loaded!r}, and not from where it slept, which no"
                f" checkpoint has: {self._record.anew}, and ask due() of its Checkpointer after each step"
            )
        return (
            "the script is not deterministic (seeds, order of its data, threads), so it cannot be"
            f" resumed: {self._record.anew}, or give it a Checkpointer"
        )

    def puts_off(self) -> bool:
        """Whether a Checkpointer is asked first: sleep when it has saved, or after the next step."""
        self._pending = self._knows_checkpointer and not self._pending
        return self._pending

    def keep(self, job: Job, steps: int) -> None:
        """It is about to sleep: keep where its checkpoint is, or what another process is compared with.

        Raises:
            SuspendError: That cannot be written.
        """
        saved, self._saved = self._saved, None
        if saved is not None:
            self._record.write(kind="checkpoint", **saved)
            return
        if self._before is not None:
            return  # it does steps again: where it will be compared stays, and is further on
        if self._knows_checkpointer:
            self._tell(
                "sleeps without a checkpoint: the script did not ask its Checkpointer's due()"
            )
        self._record.write(kind="replay", steps=steps, digests=self._digests(job))

    def _digests(self, job: Job) -> list[tuple[str, str]]:
        """Checksums of all that the job holds, by name."""
        made = []
        for name, tensor in tensors_of(job.modules, job.optimizers):
            # a subclass without memory of its own, or a lazy module's that has not run
            with suppress(RuntimeError, ValueError):
                plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
                made.append((name, xxhash.xxh3_128_hexdigest(plain.numpy().data)))
        for name, digest in _generators().items():
            # one that was neither seeded nor used begins elsewhere in every process, and it is no matter
            made.append((name, "untouched" if digest == self._untouched[name] else digest))
        return made

    def call_off(self) -> None:
        """It is not to sleep any more."""
        self._pending = False

    def finish(self, code: int) -> None:
        """The script has ended."""
        listeners[:] = [each for each in listeners if each is not self]
        if code != 0:
            return
        if self._before is None:
            self._record.forget()
            return
        when = self._before["step" if self._before["kind"] == "checkpoint" else "steps"]
        self._tell(
            f"warning: --resume: the script has ended before step {when}, after which it was suspended,"
            " so it was not compared and may have other bits; what was kept stays"
        )


def opened(
    directory: str,
    *,
    words: list[str],
    script: str | None,
    resume: bool,
    tell: Callable[[str], None],
) -> ResumeRecord:
    """Take the directory of a run and read its record; see :class:`ResumeFile`, :class:`ResumeRecord`."""
    record = ResumeFile(directory, words=words, script=script)
    record.hold()
    return ResumeRecord(record, resume=resume, tell=tell)


def _is_whole(found: dict[str, Any]) -> bool:
    """Whether all is there that its kind takes."""
    if found.get("kind") == "checkpoint":
        return isinstance(found.get("path"), str) and type(found.get("step")) is int
    digests = found.get("digests")
    return (
        found.get("kind") == "replay"
        and type(found.get("steps")) is int
        and isinstance(digests, list)
        and all(isinstance(each, list) and [*map(type, each)] == [str, str] for each in digests)
    )


def _saved_since(before: dict[str, Any]) -> dict[str, int]:
    """Steps of the checkpoints with which it can go on, by path: that it slept with, and later ones."""
    directory = os.path.dirname(before["path"])
    found = steps_in(directory) if os.path.isdir(directory) else []
    return {os.path.realpath(path): step for step, path in found if step >= before["step"]}


def _check_is_there(before: dict[str, Any], record: ResumeFile) -> None:
    path = before["path"]
    try:
        Opened(path).close()
    except PenstockError as error:
        if any(info_of(step, later).ok for later, step in _saved_since(before).items()):
            return  # it was woken and went on, until that one did not stay
        raise CheckpointError(
            f"--resume: the run was suspended with checkpoint {path!r}, which is not whole any more:"
            f" {error}; {record.anew}: the script goes on from what its Checkpointer finds"
        ) from error


def _generators() -> dict[str, str]:
    """Checksums of the random generators."""
    return {
        f"random generator of {name}": hashlib.sha256(repr(_plain(state)).encode()).hexdigest()
        for name, state in Rng().state_dict().items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _told_apart(digests: Iterable[Sequence[str]]) -> dict[str, str]:
    """By name; two optimizers of a kind have parts of one name."""
    made: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for name, digest in digests:
        seen[name] += 1
        made[name if seen[name] == 1 else f"{name} ({seen[name]})"] = digest
    return made


def _differing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _digest_of_file(path: str | None) -> str | None:
    if path is None or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
