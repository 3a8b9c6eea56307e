"""State of a run that outlives its process: ``penstock run --state DIR``, and ``--resume``.

[Note: what can be resumed]
    A script's state is more than its tensors: the position in its data, counters, what it has printed.
    Only the script knows all of it. So there are exactly two ways to continue with the same bits:

    1. With a ``Checkpointer``. When the run is to sleep, the Checkpointer is ``due``; the script saves
       its state, and sleeps when the checkpoint is durable. A new process loads it and continues from
       that step, or from a later checkpoint if the run was woken and has saved others since.
       With other ranks it sleeps a step later: they may need each other to save, and no rank sleeps while
       another one trains.
    2. Without one. When the run sleeps, checksums of all tensors and random generators are written. A new
       process repeats all steps and is compared there: it must be the same to the last bit. That takes as
       long as the first time, and fails if the script is not deterministic.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
import xxhash

from penstock.checkpoint import Rng
from penstock.checkpoint.listeners import listeners
from penstock.checkpoint.listing import info_of, step_of, steps_in
from penstock.checkpoint.reader import OpenCheckpoint
from penstock.core.errors import CheckpointError, ConfigError, PenstockError, SuspendError
from penstock.core.files import absolute_path, open_regular, parse_json
from penstock.core.fs import FileLock, write_durably
from penstock.core.units import MIB
from penstock.swap import RECORD_FILE
from penstock.swap.loaded_steps import LoadedSteps
from penstock.swap.state import tensors_of
from penstock.swap.suspend import Suspendable

if TYPE_CHECKING:
    from penstock.runtime.rank_store import RankStore

_SCHEMA: Final = 1
_SHOWN: Final = 3
_COMPARED_STEPS: Final = 2
"""Steps after which ranks compare what they have loaded: by the second each has told it at its first."""
_MOST_BYTES: Final = 64 * MIB


class ResumeFile:
    """Record of a sleeping run in a directory. Any process may read it; it contains no tensors."""

    def __init__(self, directory: str, *, words: list[str], script: str | None) -> None:
        """Create the directory if it does not exist.

        Args:
            directory: Directory of this run only.
            words: Script and arguments.
            script: Path of the script, whose content identifies the run; None for a module.

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
    def restart_advice(self) -> str:
        """Advice for a run that cannot be resumed; a job's options are not typed by the user."""
        return f"to start from the beginning, run it without --resume, or remove {self._path!r}"

    def read(self) -> dict[str, Any]:
        """Return the record. Raises ConfigError if there is none, or it is of another run."""
        where = f"--resume: {self._path!r}"
        try:
            with open(self._path, "rb", opener=open_regular) as file:
                found = parse_json(file.read(_MOST_BYTES))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{where} does not exist: this run was never suspended, or it has ended; run it without"
                " --resume"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where} cannot be read ({error}); {self.restart_advice}") from error
        for key, what in (("schema", "version"), ("words", "script and arguments")):
            theirs = found.get(key) if isinstance(found, dict) else found
            if theirs != self._run[key]:
                raise ConfigError(
                    f"{where} has another {what}: {theirs!r}, and this run has {self._run[key]!r}; resume"
                    f" with the same; {self.restart_advice}"
                )
        assert isinstance(found, dict)
        if found.get("script") != self._run["script"]:
            raise ConfigError(
                f"{where}: the script has changed since, so its results may differ; {self.restart_advice}"
            )
        if not _is_complete(found):
            raise ConfigError(f"{where} is damaged, or of another version; {self.restart_advice}")
        return found

    def write(self, **what: Any) -> None:
        """Replace the record durably. Raises SuspendError."""
        text = json.dumps({**self._run, **what})
        try:
            write_durably(self._path, text.encode())
        except OSError as error:
            raise SuspendError(f"--state: {self._path!r} cannot be written: {error}") from error

    def lock(self) -> FileLock:
        """Lock the directory until this process ends or the lock is closed.

        Raises:
            ConfigError: Another process has locked it.
        """
        self._lock = FileLock(
            os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
            f"--state {self.directory!r}",
            "wait until that run has ended, or name another directory",
        )
        return self._lock

    def remove(self) -> None:
        """Remove the record, when the run has ended."""
        with suppress(OSError):
            os.unlink(self._path)


class ResumeRecord:
    """Makes a sleeping run resumable by another process. For the training thread.

    Attributes:
        has_checkpointer: True if the script has opened a Checkpointer.
    """

    def __init__(self, record: ResumeFile, *, resume: bool, tell: Callable[[str], None]) -> None:
        """Register as a listener of Checkpointers.

        Args:
            record: Record of the run.
            resume: Continue from the record.
            tell: Function that prints a line for the user.

        Raises:
            ConfigError: There is nothing to resume.
            CheckpointError: The checkpoint is damaged or was removed.
        """
        self._record = record
        self._tell = tell
        self.has_checkpointer = self._pending = False
        self._loaded_steps = LoadedSteps(tell=tell) if resume else None
        self._saved: dict[str, Any] | None = None
        self._sleep: Callable[[str, object], None] | None = None
        self._loaded = ""  # the last checkpoint that the script loaded
        self._untouched = _generators()
        self._before = record.read() if resume else None
        if self._before is not None and self._before["kind"] == "checkpoint":
            _check_exists(self._before, record)
        listeners.append(self)

    def set_sleep(self, sleep: Callable[[str, object], None] | None) -> None:
        """Set the function that suspends the job, given the path and state of a checkpoint.

        With None the job is suspended after the step that follows the checkpoint.
        """
        self._sleep = sleep

    def set_ranks(self, ranks: Callable[[], RankStore | None]) -> None:
        """Set the function that returns the store of the job's ranks, if there is one by now."""
        if self._loaded_steps is not None:
            self._loaded_steps.ranks = ranks

    # -- as a listener --------------------------------------------------------------------------------

    def opened(self) -> None:
        """Note that there is a Checkpointer."""
        self.has_checkpointer = True
        if self._loaded_steps is not None:
            self._loaded_steps.note(None)

    def wants_save(self) -> bool:
        """Return whether the Checkpointer is to save."""
        return self._pending and self._saved is None

    def saved(self, path: str, step: int, state: object) -> None:
        """Suspend the job, if it waits for this checkpoint to be durable."""
        if not self._pending:
            return
        self._saved = {"path": path, "step": step}
        if self._sleep is not None:
            self._pending = False
            self._sleep(path, state)

    def loaded(self, path: str) -> None:
        """Note that the script has loaded a checkpoint."""
        self._loaded = path
        if self._loaded_steps is not None:
            self._loaded_steps.note(step_of(path))
        before = self._before
        if before is None or before["kind"] != "checkpoint":
            return
        later = _saved_since(before)
        if os.path.realpath(path) in later:  # neither another nor an earlier one
            self._before = None
            when = "since" if later[os.path.realpath(path)] > before["step"] else "when"
            self._tell(
                f"resumed from {path!r}, saved {when} it was suspended after step {before['step']}"
            )

    # -- between two steps ----------------------------------------------------------------------------

    def step_over(self, job: Suspendable, steps: int) -> None:
        """Compare the run with the record, at the step after which it was suspended.

        Raises:
            SuspendError: The bits differ, or other ranks have loaded another checkpoint.
        """
        if self._loaded_steps is not None and steps <= _COMPARED_STEPS:
            self._compare_ranks(self._loaded_steps)
        before = self._before
        if before is None:
            return
        if before["kind"] == "checkpoint":
            raise SuspendError(
                f"--resume: the script has not loaded its checkpoint {before['path']!r}: call"
                " Checkpointer.load before the first step"
            )
        if steps == before["steps"]:
            self._before = None
            differ = _differing(
                _with_unique_names(before["digests"]), _with_unique_names(self._digests(job))
            )
            if differ:
                raise SuspendError(
                    f"--resume: after {steps} steps {len(differ)} of {len(before['digests'])} parts"
                    " differ from those of the suspended run:"
                    f" {', '.join(differ[:_SHOWN])}; {self._reason_of_mismatch()}"
                )
            self._tell(f"resumed: {steps} steps were repeated, and all bits are the same")

    def _compare_ranks(self, loaded_steps: LoadedSteps) -> None:
        """Check that all ranks have loaded the same step, and follow them if only others load one."""
        step = loaded_steps.common()
        before = self._before
        if step is None or self.has_checkpointer or before is None or before["kind"] != "replay":
            return
        self._before = None
        self._tell(
            f"resumed with the checkpoint of step {step} that other ranks have loaded; this rank has no"
            " Checkpointer, so nothing is compared"
        )

    def _reason_of_mismatch(self) -> str:
        """Return the reason for different bits, and what to do."""
        if self._loaded:
            return (
                f"the script continued from {self._loaded!r}, but no checkpoint was saved when it was"
                f" suspended: {self._record.restart_advice}, and call its Checkpointer's due() after each"
                " step"
            )
        return (
            "the script is not deterministic (seeds, order of its data, threads), so it cannot be"
            f" resumed: {self._record.restart_advice}, or use a Checkpointer in it"
        )

    def waits_for_checkpoint(self, *, of_others: bool = False) -> bool:
        """Return whether to wait for a checkpoint: until it is saved, or at most for one more step.

        Args:
            of_others: Another rank has a Checkpointer.
        """
        self._pending = (self.has_checkpointer or of_others) and not self._pending
        return self._pending

    def write(self, job: Suspendable, steps: int) -> None:
        """Write the record before the run sleeps: the path of its checkpoint, or its checksums.

        Raises:
            SuspendError: The record cannot be written.
        """
        saved, self._saved = self._saved, None
        if saved is not None:
            self._record.write(kind="checkpoint", **saved)
            return
        if self._before is not None:
            return  # it repeats steps: the existing record is of a later step, and stays
        if self.has_checkpointer:
            self._tell(
                "sleeps without a checkpoint: the script did not call its Checkpointer's due()"
            )
        self._record.write(kind="replay", steps=steps, digests=self._digests(job))

    def _digests(self, job: Suspendable) -> list[tuple[str, str]]:
        """Return checksums of all the job's tensors and random generators, by name."""
        found = []
        for name, tensor in tensors_of(job.modules, job.optimizers):
            # a subclass without memory of its own, or a lazy module's that has not run
            with suppress(RuntimeError, ValueError):
                plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
                found.append((name, xxhash.xxh3_128_hexdigest(plain.numpy().data)))
        for name, digest in _generators().items():
            # an unused, unseeded generator differs in every process, which does not matter
            found.append((name, "untouched" if digest == self._untouched[name] else digest))
        return found

    def cancel(self) -> None:
        """Cancel a pending sleep."""
        self._pending = False
        self._saved = None

    def finish(self, code: int) -> None:
        """Handle the end of the script."""
        listeners[:] = [each for each in listeners if each is not self]
        if code != 0:
            return
        if self._before is None:
            self._record.remove()
            return
        when = self._before["step" if self._before["kind"] == "checkpoint" else "steps"]
        self._tell(
            f"warning: --resume: the script has ended before step {when}, after which it was suspended,"
            " so its bits were not compared and may differ; the record stays"
        )


def opened(
    directory: str,
    *,
    words: list[str],
    script: str | None,
    resume: bool,
    tell: Callable[[str], None],
) -> ResumeRecord:
    """Lock the directory of a run and read its record."""
    record = ResumeFile(directory, words=words, script=script)
    record.lock()
    return ResumeRecord(record, resume=resume, tell=tell)


def _is_complete(found: dict[str, Any]) -> bool:
    """Return whether a record has all the fields of its kind."""
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
    """Return the steps, by path, of the recorded checkpoint and later ones, which can be resumed."""
    directory = os.path.dirname(before["path"])
    found = steps_in(directory) if os.path.isdir(directory) else []
    return {os.path.realpath(path): step for step, path in found if step >= before["step"]}


def _check_exists(before: dict[str, Any], record: ResumeFile) -> None:
    path = before["path"]
    try:
        OpenCheckpoint(path).close()
    except PenstockError as error:
        if any(info_of(step, later).ok for later, step in _saved_since(before).items()):
            return  # it was woken and continued until that checkpoint was removed
        raise CheckpointError(
            f"--resume: the run was suspended with checkpoint {path!r}, which is damaged or missing:"
            f" {error}; {record.restart_advice}: the script then continues from what its Checkpointer"
            " finds"
        ) from error


def _generators() -> dict[str, str]:
    """Return checksums of the random generators, by name."""
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


def _with_unique_names(digests: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return digests by unique names: parts of two optimizers of a type have the same name."""
    found: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for name, digest in digests:
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = digest
    return found


def _differing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _digest_of_file(path: str | None) -> str | None:
    if path is None or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
