"""Configuration of a manager: ``jobs.toml`` with the machine and the jobs, checked when it is read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from penstock.core.errors import ConfigError
from penstock.core.files import parse_toml, read_text
from penstock.core.fs import check_directory
from penstock.core.units import MIB, format_bytes, parse_bytes

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DURATION: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min)\s*")
AUTO: Final = "auto"
ENFORCE: Final = (AUTO, "cgroup", "polling")
_SCALES: Final = {"ms": 1e-3, "s": 1.0, "min": 60.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobsMachine:
    """Limits of all jobs together. Sizes are bytes or have a unit, durations have a unit."""

    memory: int | str
    """DRAM budget for the sum of all jobs at every moment, without file-backed memory."""

    flash: str | tuple[str, ...] = ()
    """Directories for the memory of sleeping jobs. If empty, no job sleeps, and jobs that do not fit
    beside others wait until those have ended."""

    flash_capacity: int | str | None = None
    """Limit of flash for sleeping jobs; None for the space that is free when the manager starts."""

    device_memory: int | str | None = None
    """Budget of the CUDA device's memory; None if it is not limited."""

    slice: float | str = AUTO
    """Duration of a turn, which ends at the next end of a step. ``auto``: long enough that sleeping and
    waking take a twentieth of the time, and at least 2 seconds."""

    patience: float | str = AUTO
    """Waiting time after which a job goes once before jobs of any priority. ``auto``: the duration of ten
    turns of each job, and at least 60 seconds."""

    grace: float | str = 10.0
    """Time that a job has to stop after each of the signals that ask it to."""

    asleep: int | str = 256 * MIB
    """Expected memory of a sleeping job's process; it is measured once the job has slept."""

    log: int | str = 64 * MIB
    """Maximum size of a job's log; a full log is moved aside, and one such file is kept."""

    enforce: str = AUTO
    """Enforcement of ``memory``: ``cgroup``, by the kernel; ``polling``, by the manager's measurements
    alone; ``auto``, by the kernel if that is permitted."""

    prefetch: bool = True
    """Prefetch the next job's memory before its turn, as far as the budget allows."""

    def __post_init__(self) -> None:
        """Convert sizes to bytes, durations to seconds, directories to a tuple."""
        for name in ("memory", "flash_capacity", "device_memory", "asleep", "log"):
            value = getattr(self, name)
            if value is not None or name not in ("flash_capacity", "device_memory"):
                object.__setattr__(self, name, parse_bytes(value, what=name))
                if getattr(self, name) == 0 and name != "asleep":
                    raise ConfigError(f"{name} must be more than 0 bytes")
        for name in ("slice", "patience"):
            if (value := getattr(self, name)) != AUTO:
                object.__setattr__(self, name, _duration(name, value, or_else=f", or {AUTO!r}"))
        object.__setattr__(self, "grace", _duration("grace", self.grace))
        _check_type("prefetch", self.prefetch, bool, "true or false")
        if self.enforce not in ENFORCE:
            raise ConfigError(f"enforce is {self.enforce!r}; known are {', '.join(ENFORCE)}")
        flash = (self.flash,) if isinstance(self.flash, str) else self.flash
        _check_type("flash", flash, tuple, "a directory, or a list of them")
        for each in flash:
            _check_type("flash", each, str, "a directory, or a list of them")
            if not each:
                raise ConfigError("flash is ''; name a directory, such as '.', or leave it out")
        for each in flash:
            if [os.path.abspath(one) for one in flash].count(os.path.abspath(each)) > 1:
                raise ConfigError(f"flash names {each!r} twice; name each directory once")
        object.__setattr__(self, "flash", flash)
        if self.flash_capacity is not None and not flash:
            raise ConfigError("flash_capacity is set, but flash names no directory")

    @property
    def memory_bytes(self) -> int:
        """The value of ``memory`` in bytes."""
        return _whole(self.memory)

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories of ``flash``."""
        assert isinstance(self.flash, tuple)
        return self.flash

    @property
    def device_bytes(self) -> int | None:
        """The value of ``device_memory`` in bytes."""
        return None if self.device_memory is None else _whole(self.device_memory)

    @property
    def capacity_bytes(self) -> int | None:
        """The value of ``flash_capacity`` in bytes."""
        return None if self.flash_capacity is None else _whole(self.flash_capacity)

    @property
    def asleep_bytes(self) -> int:
        """The value of ``asleep`` in bytes."""
        return _whole(self.asleep)

    @property
    def log_bytes(self) -> int:
        """The value of ``log`` in bytes."""
        return _whole(self.log)

    @property
    def slice_s(self) -> float | None:
        """The value of ``slice`` in seconds; None for ``auto``."""
        return None if self.slice == AUTO else float(self.slice)

    @property
    def patience_s(self) -> float | None:
        """The value of ``patience`` in seconds; None for ``auto``."""
        return None if self.patience == AUTO else float(self.patience)

    @property
    def grace_s(self) -> float:
        """The value of ``grace`` in seconds."""
        return float(self.grace)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """A job: a script, its needs, and its weight."""

    name: str
    """Name of the job, its log and its row in the view: letters, digits, ``.``, ``_`` and ``-``."""

    script: str = ""
    """Path of the script, relative to ``cwd``."""

    module: str = ""
    """Name of a module in place of a script, as after ``python -m``."""

    args: tuple[str, ...] = ()
    """Arguments of the script."""

    options: tuple[str, ...] = ()
    """Options of ``penstock run``, such as ``["--device-memory", "2GiB"]``."""

    memory: int | str | None = None
    """Peak of the DRAM that it holds. None: it first runs alone, and its memory is measured."""

    device_memory: int | str = 0
    """Peak of the device memory that it holds."""

    weight: float = 1.0
    """Share of the time, in proportion to the weights of other jobs of its priority."""

    priority: int = 0
    """Priority: jobs with a higher one go first."""

    durable: bool = False
    """Let its suspended state outlive its process: ``penstock run --state``."""

    cwd: str = "."
    """Working directory, relative to that of the configuration file."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment."""

    def __post_init__(self) -> None:
        """Check each value, and convert sizes to bytes."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name is {self.name!r}; it must be at most 64 letters, digits, '.', '_' and '-', and"
                " begin with a letter or a digit"
            )
        for name in ("script", "module", "cwd"):
            _check_type(name, getattr(self, name), str, "a string")
            _check_no_nul(name, getattr(self, name))
        if bool(self.script) == bool(self.module):
            raise ConfigError(
                f"script is {self.script!r} and module is {self.module!r}; set exactly one of them"
            )
        for name in ("args", "options"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes(self.memory, what="memory"))
            if self.memory == 0:
                raise ConfigError("memory must be more than 0 bytes")
        device = parse_bytes(self.device_memory, what="device_memory")
        object.__setattr__(self, "device_memory", device)
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"weight is {weight!r}; it must be a number from 0.001 to 1000")
        if not 1e-3 <= weight <= 1e3:
            raise ConfigError(f"weight is {weight!r}; it must be from 0.001 to 1000")
        object.__setattr__(self, "weight", float(weight))
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ConfigError(f"priority is {self.priority!r}; it must be a whole number")
        _check_type("durable", self.durable, bool, "true or false")
        _check_env(self.env)

    @property
    def memory_bytes(self) -> int | None:
        """The value of ``memory`` in bytes."""
        return None if self.memory is None else _whole(self.memory)

    @property
    def device_bytes(self) -> int:
        """The value of ``device_memory`` in bytes."""
        return _whole(self.device_memory)

    @property
    def words(self) -> list[str]:
        """The script, or module, with its arguments."""
        what = [self.script] if self.script else ["-m", self.module]
        return [*what, *self.args]


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A machine and the jobs that share it."""

    machine: JobsMachine
    jobs: tuple[JobSpec, ...]

    source: str = ""
    """Name of its file, for errors."""

    def __post_init__(self) -> None:
        """Check the jobs against each other and the machine."""
        seen: set[str] = set()
        if not self.jobs:
            raise ConfigError("there is no job; add a table [[job]]")
        for job in self.jobs:
            if job.name in seen:
                raise ConfigError(f"job {job.name!r}: two jobs have this name")
            seen.add(job.name)
            self._check_fits(job)

    def _check_fits(self, job: JobSpec) -> None:
        limit, need = self.machine.memory_bytes, job.memory_bytes
        if need is not None and need > limit:
            raise ConfigError(
                f"job {job.name!r}: memory is {format_bytes(need)}, more than [machine] memory,"
                f" {format_bytes(limit)}: lower the former or raise the latter"
            )
        device = self.machine.device_bytes
        if device is not None and job.device_bytes > device:
            raise ConfigError(
                f"job {job.name!r}: device_memory is {format_bytes(job.device_bytes)}, more than"
                f" [machine] device_memory, {format_bytes(device)}: lower the former or raise the latter"
            )

    def check_places(self) -> None:
        """Check that directories and scripts exist. Raises ConfigError."""
        if self.source:
            _within(self.source, self._check_places)
        else:
            self._check_places()

    def _check_places(self) -> None:
        for each in self.machine.directories:
            check_directory(each, "[machine] flash")
        for job in self.jobs:
            if not os.path.isdir(job.cwd):
                raise ConfigError(f"job {job.name!r}: cwd {job.cwd!r} is not a directory")
            if job.script:
                _check_script(job.name, os.path.join(job.cwd, job.script))

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, source: str, base: str = ".") -> Self:
        """Build a description from a parsed file.

        Args:
            document: Tables ``machine`` and ``job``.
            source: Name of the file, for errors.
            base: Directory to which its paths are relative.

        Raises:
            ConfigError: A value is invalid; names the file, the table or job, the key and the value.
        """
        if not isinstance(document, Mapping):
            raise ConfigError(
                f"{source}: the content is {document!r}, not tables [machine] and [[job]]"
            )
        try:
            for keys, value in _numbers(document):
                if not -(2**63) <= value < 2**63:
                    raise ConfigError(f"{source}: {keys} is a number that needs more than 64 bits")
        except RecursionError as error:
            raise ConfigError(f"{source}: values are nested too deeply") from error
        unknown = sorted(set(document) - {"machine", "job"}, key=str)
        if unknown:
            raise ConfigError(
                f"{source}: unknown table {unknown[0]!r}; known are [machine], [[job]]"
            )
        tables = document.get("job", [])
        if not isinstance(tables, list) or not all(isinstance(each, Mapping) for each in tables):
            raise ConfigError(f"{source}: 'job' must be tables with the header [[job]]")
        machine = _made(JobsMachine, document.get("machine"), f"{source}: [machine]")
        flash = tuple(os.path.join(os.path.abspath(base), each) for each in machine.directories)
        object.__setattr__(machine, "flash", flash)
        jobs = []
        for number, table in enumerate(tables, start=1):
            job = _made(JobSpec, table, f"{source}: job {table.get('name', number)!r}")
            cwd = os.path.normpath(os.path.join(os.path.abspath(base), job.cwd))
            object.__setattr__(job, "cwd", cwd)
            jobs.append(job)
        made: Self = _within(source, lambda: cls(machine=machine, jobs=tuple(jobs), source=source))
        return made


def load(path: str | Path) -> Description:
    """Read ``jobs.toml``. Its paths are relative to its directory.

    Raises:
        ConfigError: It cannot be read, or a value is invalid; names the file, job, key and value.
    """
    try:
        document = parse_toml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    base = os.path.dirname(os.path.abspath(path))
    return Description.from_json(document, source=str(path), base=base)


def _numbers(value: Any, keys: str = "") -> Iterator[tuple[str, int]]:
    """Yield all whole numbers in tables and lists, with their keys."""
    if isinstance(value, int):
        yield keys, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, f"{keys}.{key}" if keys else str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each, keys)


def _made(kind: type[Any], table: Any, where: str) -> Any:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: this table is missing")
    known = [each.name for each in fields(kind)]
    unknown = sorted(set(table) - set(known), key=str)
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r} = {table[unknown[0]]!r}; known are {', '.join(known)}"
        )
    required = "memory" if kind is JobsMachine else "name"
    if required not in table:
        raise ConfigError(f"{where}: {required} is missing")
    values = {key: tuple(each) if isinstance(each, list) else each for key, each in table.items()}
    return _within(where, lambda: kind(**values))


def _within(where: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_script(job: str, path: str) -> None:
    """Check that a script is readable, as execute permission is not needed, or has a ``__main__``."""
    inner = os.path.join(path, "__main__.py")
    if not os.path.exists(path):
        raise ConfigError(f"job {job!r}: script {path!r} does not exist")
    if os.path.isdir(path) and not os.path.exists(inner) and not os.path.exists(inner + "c"):
        raise ConfigError(f"job {job!r}: script {path!r} is a directory without __main__.py")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"job {job!r}: script {path!r} cannot be read")


def _whole(value: int | str) -> int:
    assert isinstance(value, int)  # converted by __post_init__
    return value


def _check_type(name: str, value: object, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r}; it must be {what}")


def _check_env(env: object) -> None:
    if not isinstance(env, Mapping):
        raise ConfigError(f"env is {env!r}; it must be a table of strings")
    for key, value in env.items():
        if not isinstance(value, str) or "\0" in value:
            raise ConfigError(f"env.{key} is {value!r}; it must be a string without a NUL")
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise ConfigError(
                f"env has a variable {key!r}; a name must not be empty or contain '=' or NUL"
            )


def _check_no_nul(name: str, value: str) -> None:
    if "\0" in value:
        raise ConfigError(f"{name} has {value!r}; it must not contain a NUL")


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is {value!r}; it must be a list of strings")
    for each in value:
        _check_type(name, each, str, "a list of strings")
        _check_no_nul(name, each)
    return tuple(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int of hundreds of digits
        return False


def _duration(name: str, value: float | str, *, or_else: str = "") -> float:
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            raise ConfigError(
                f"{name} is {value!r}; it must be a number and ms, s or min, such as '2 s'{or_else}"
            )
        value = float(match[1]) * _SCALES[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ConfigError(f"{name} is {value!r}; it must be a duration, such as '2 s'{or_else}")
    if value <= 0:
        raise ConfigError(f"{name} is {value!r}; it must be more than 0")
    return float(value)
