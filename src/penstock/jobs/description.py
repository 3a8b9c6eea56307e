"""What a manager is to run, and on how much of the machine: ``jobs.toml``, checked when it is read."""

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
ENFORCE: Final = (AUTO, "cgroup", "looking")
_SCALES: Final = {"ms": 1e-3, "s": 1.0, "min": 60.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What all jobs together may have. Sizes are bytes or have a unit, durations have a unit."""

    memory: int | str
    """DRAM: the sum over all jobs at every moment, of what they cannot share with a file."""

    flash: str | tuple[str, ...] = ()
    """Directories where a job's memory rests while it sleeps. Empty: no job sleeps, and those that do
    not fit beside others wait until those are over."""

    flash_capacity: int | str | None = None
    """How much may rest there; None: the space that is free when the manager begins."""

    device_memory: int | str | None = None
    """Memory of the CUDA device; None: it is not shared out."""

    slice: float | str = AUTO
    """How long a job computes before others have their turn; it ends at the next end of a step.
    ``auto``: so long that sleeping and waking takes a twentieth of the time, and 2 seconds at least."""

    patience: float | str = AUTO
    """A job that has waited so long goes before those of any priority, once; ``auto``: as long as ten
    turns of each job take, and 60 seconds at least."""

    grace: float | str = 10.0
    """How long a job that is to stop may take for it, each time it is told in a harsher way."""

    asleep: int | str = 256 * MIB
    """What the process of a job is expected to hold while it sleeps; measured once it has slept."""

    log: int | str = 64 * MIB
    """How long the log of a job may become; what was in it is then kept beside, once."""

    enforce: str = AUTO
    """What keeps ``memory``: ``cgroup``, the kernel; ``looking``, the manager alone; ``auto``, the kernel
    where that is permitted."""

    prefetch: bool = True
    """Whether the next job's memory comes back ahead of its turn, as far as there is room."""

    def __post_init__(self) -> None:
        """Turn sizes into bytes, durations into seconds, directories into a tuple."""
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
                raise ConfigError("flash is ''; it is a directory, as '.', or is left out")
        for each in flash:
            if [os.path.abspath(one) for one in flash].count(os.path.abspath(each)) > 1:
                raise ConfigError(f"flash names {each!r} twice; name each directory once")
        object.__setattr__(self, "flash", flash)
        if self.flash_capacity is not None and not flash:
            raise ConfigError("flash_capacity is set, but flash names no directory")

    @property
    def memory_bytes(self) -> int:
        """``memory`` in bytes."""
        return _whole(self.memory)

    @property
    def directories(self) -> tuple[str, ...]:
        """``flash`` as a tuple."""
        assert isinstance(self.flash, tuple)
        return self.flash

    @property
    def device_bytes(self) -> int | None:
        """``device_memory`` in bytes."""
        return None if self.device_memory is None else _whole(self.device_memory)

    @property
    def capacity_bytes(self) -> int | None:
        """``flash_capacity`` in bytes."""
        return None if self.flash_capacity is None else _whole(self.flash_capacity)

    @property
    def asleep_bytes(self) -> int:
        """``asleep`` in bytes."""
        return _whole(self.asleep)

    @property
    def log_bytes(self) -> int:
        """``log`` in bytes."""
        return _whole(self.log)

    @property
    def slice_s(self) -> float | None:
        """``slice`` in seconds; None: ``auto``."""
        return None if self.slice == AUTO else float(self.slice)

    @property
    def patience_s(self) -> float | None:
        """``patience`` in seconds; None: ``auto``."""
        return None if self.patience == AUTO else float(self.patience)

    @property
    def grace_s(self) -> float:
        """``grace`` in seconds."""
        return float(self.grace)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """A script, what it needs, and what it is worth."""

    name: str
    """Letters, digits, ``.``, ``_`` and ``-``; of the job, its log and its row in the view."""

    script: str = ""
    """The script's path, from ``cwd``."""

    module: str = ""
    """Or a module's name, as after ``python -m``."""

    args: tuple[str, ...] = ()
    """The script's own arguments."""

    options: tuple[str, ...] = ()
    """Of ``penstock run``, as ``["--device-memory", "2GiB"]``."""

    memory: int | str | None = None
    """The most DRAM that it holds. None: it runs alone at first, and what it held then is taken."""

    device_memory: int | str = 0
    """The most memory of the device that it holds."""

    weight: float = 1.0
    """Its share of the time is this in proportion to the others' of its priority."""

    priority: int = 0
    """Those of higher priority go first."""

    durable: bool = False
    """Whether what of it sleeps survives its process: ``penstock run --state``."""

    cwd: str = "."
    """Its directory, from that of the file that describes it."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""

    def __post_init__(self) -> None:
        """Check each value, and turn sizes into bytes."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name is {self.name!r}; it is letters, digits, '.', '_' and '-', at most 64, and begins"
                " with a letter or a digit"
            )
        for name in ("script", "module", "cwd"):
            _check_type(name, getattr(self, name), str, "a string")
            _check_no_nul(name, getattr(self, name))
        if bool(self.script) == bool(self.module):
            raise ConfigError(
                f"script is {self.script!r} and module is {self.module!r}; name one of both"
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
            raise ConfigError(f"weight is {weight!r}; it is a number, more than 0")
        if not 1e-3 <= weight <= 1e3:
            raise ConfigError(f"weight is {weight!r}; it is from 0.001 to 1000")
        object.__setattr__(self, "weight", float(weight))
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ConfigError(f"priority is {self.priority!r}; it is a whole number")
        _check_type("durable", self.durable, bool, "true or false")
        _check_env(self.env)

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes."""
        return None if self.memory is None else _whole(self.memory)

    @property
    def device_bytes(self) -> int:
        """``device_memory`` in bytes."""
        return _whole(self.device_memory)

    @property
    def words(self) -> list[str]:
        """What follows ``penstock run`` and its options."""
        what = [self.script] if self.script else ["-m", self.module]
        return [*what, *self.args]


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A machine and the jobs that share it."""

    machine: Machine
    jobs: tuple[JobSpec, ...]

    source: str = ""
    """What to call it in errors: its file."""

    def __post_init__(self) -> None:
        """Check jobs against each other and the machine."""
        seen: set[str] = set()
        if not self.jobs:
            raise ConfigError("there is no job; describe one in a table [[job]]")
        for job in self.jobs:
            if job.name in seen:
                raise ConfigError(f"job {job.name!r}: there are two of this name")
            seen.add(job.name)
            self._check_fits(job)

    def _check_fits(self, job: JobSpec) -> None:
        limit, need = self.machine.memory_bytes, job.memory_bytes
        if need is not None and need > limit:
            raise ConfigError(
                f"job {job.name!r}: memory is {format_bytes(need)}, and [machine] memory is"
                f" {format_bytes(limit)} for all: give it less, or the machine more"
            )
        device = self.machine.device_bytes
        if device is not None and job.device_bytes > device:
            raise ConfigError(
                f"job {job.name!r}: device_memory is {format_bytes(job.device_bytes)}, and [machine]"
                f" device_memory is {format_bytes(device)} for all"
            )

    def check_places(self) -> None:
        """See that directories and scripts are there. Raises ConfigError."""
        if self.source:
            _within(self.source, self._check_places)
        else:
            self._check_places()

    def _check_places(self) -> None:
        for each in self.machine.directories:
            check_directory(each, "[machine] flash")
        for job in self.jobs:
            if not os.path.isdir(job.cwd):
                raise ConfigError(f"job {job.name!r}: cwd {job.cwd!r} is no directory")
            if job.script:
                _check_script(job.name, os.path.join(job.cwd, job.script))

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, source: str, base: str = ".") -> Self:
        """Make one from a parsed file.

        Args:
            document: Tables ``machine`` and ``job``.
            source: What to call it in errors.
            base: The directory that paths in it are relative to.

        Raises:
            ConfigError: Names the file, the table or job, the key and the value.
        """
        if not isinstance(document, Mapping):
            raise ConfigError(f"{source}: it is {document!r}, not tables [machine] and [[job]]")
        try:
            for keys, value in _numbers(document):
                if not -(2**63) <= value < 2**63:
                    raise ConfigError(f"{source}: {keys} is a number of more than 64 bits")
        except RecursionError as error:
            raise ConfigError(f"{source}: its values are nested too deep") from error
        unknown = sorted(set(document) - {"machine", "job"}, key=str)
        if unknown:
            raise ConfigError(
                f"{source}: unknown table {unknown[0]!r}; known are [machine], [[job]]"
            )
        tables = document.get("job", [])
        if not isinstance(tables, list) or not all(isinstance(each, Mapping) for each in tables):
            raise ConfigError(f"{source}: 'job' must be tables, each headed by [[job]]")
        machine = _made(Machine, document.get("machine"), f"{source}: [machine]")
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
    """Read ``jobs.toml``. Its paths are relative to its own directory.

    Raises:
        ConfigError: It cannot be read, or something in it makes no sense: file, job, key and value.
    """
    try:
        document = parse_toml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    base = os.path.dirname(os.path.abspath(path))
    return Description.from_json(document, source=str(path), base=base)


def _numbers(value: Any, keys: str = "") -> Iterator[tuple[str, int]]:
    """All whole numbers in tables and lists, by their keys."""
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
        raise ConfigError(f"{where}: there is no such table, and it must be there")
    known = [each.name for each in fields(kind)]
    unknown = sorted(set(table) - set(known), key=str)
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r} = {table[unknown[0]]!r}; known are {', '.join(known)}"
        )
    required = "memory" if kind is Machine else "name"
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
    """It needs no permission to be executed, for Python reads it; a folder is run by its ``__main__``."""
    inner = os.path.join(path, "__main__.py")
    if not os.path.exists(path):
        raise ConfigError(f"job {job!r}: script {path!r} is not there")
    if os.path.isdir(path) and not os.path.exists(inner) and not os.path.exists(inner + "c"):
        raise ConfigError(f"job {job!r}: script {path!r} is a directory without __main__.py")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"job {job!r}: script {path!r} cannot be read")


def _whole(value: int | str) -> int:
    assert isinstance(value, int)  # made so by __post_init__
    return value


def _check_type(name: str, value: object, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r}; it is {what}")


def _check_env(env: object) -> None:
    if not isinstance(env, Mapping):
        raise ConfigError(f"env is {env!r}; it is a table of strings")
    for key, value in env.items():
        if not isinstance(value, str) or "\0" in value:
            raise ConfigError(f"env.{key} is {value!r}; it is a string without a NUL")
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise ConfigError(f"env has {key!r}; a name is not empty, without '=' and NUL")


def _check_no_nul(name: str, value: str) -> None:
    if "\0" in value:
        raise ConfigError(f"{name} has {value!r}; a process can be given no NUL")


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is {value!r}; it is a list of strings")
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
                f"{name} is {value!r}; it is a number and ms, s or min, as '2 s'{or_else}"
            )
        value = float(match[1]) * _SCALES[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ConfigError(f"{name} is {value!r}; it is a duration, as '2 s'{or_else}")
    if value <= 0:
        raise ConfigError(f"{name} is {value!r}; it must be more than 0")
    return float(value)
