"""Fact: an assumption about CUDA or torch on CUDA, and its examination on a device of any kind."""

from __future__ import annotations

import enum
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias, TypeVar

import torch

from penstock.core.units import MIB

SIZE_BYTES: Final = 24 * MIB
"""Size of allocations in facts: more than torch's allocator puts into a shared segment."""
_DELAYS_S: Final = (0.05, 0.2, 0.8)
"""Time for which streams are kept busy, by attempt."""
_T = TypeVar("_T")


class DiffersError(Exception):
    """The device behaves differently. The text describes the observation."""


class NotHereError(Exception):
    """The fact cannot be examined on this machine or with this torch. The text gives the reason."""


class FactOutcome(enum.StrEnum):
    """Result of an examination."""

    HOLDS = "holds"
    DIFFERS = "differs"
    NOT_HERE = "not here"
    ERROR = "error"
    """The examination itself failed, so nothing is known."""
    ENDED = "ended the process"
    """The examination hung or crashed, so nothing is known."""


class ExaminedDevice:
    """The examined device, with functions to keep it busy.

    Attributes:
        cuda: Torch's module for the kind of device: ``torch.cuda``, or one with the same functions.
        device: The device, with an index.
        second: The device with index 1.
    """

    def __init__(self, kind: str = "cuda", *, delay_s: float = _DELAYS_S[0]) -> None:
        """Choose torch's current device; this makes no context.

        Args:
            kind: Kind of device, as in torch.
            delay_s: Time for which ``delay`` keeps a stream busy.
        """
        self.cuda: Any = torch.get_device_module(kind)
        self.device = torch.device(kind, self.cuda.current_device())
        self.second = torch.device(kind, 1)
        self._delay_s = delay_s

    def delay(self, stream: Any = None) -> Any:
        """Keep ``stream``, or the current one, busy for a while; return an event at the end."""
        stream = self.cuda.current_stream() if stream is None else stream
        with self.cuda.stream(stream):
            busy = _busy_on(self.device)
            busy(int(self._delay_s * _cycles_per_s(self, busy)))
            return self.mark(stream)

    def mark(self, stream: Any = None, *, timed: bool = False) -> Any:
        """Record and return a new event on ``stream`` or the current one."""
        event = self.cuda.Event(enable_timing=timed)
        event.record(self.cuda.current_stream() if stream is None else stream)
        return event

    def stream(self) -> Any:
        """Return one of torch's streams; 32 in a row are different."""
        return self.cuda.Stream()

    def empty(self, nbytes: int = SIZE_BYTES) -> torch.Tensor:
        """Allocate bytes of device memory on the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def full(self, value: int, nbytes: int = SIZE_BYTES) -> torch.Tensor:
        """Allocate bytes of device memory and fill them with ``value``."""
        return self.empty(nbytes).fill_(value)

    def clean(self) -> None:
        """Wait for the device, and free idle memory."""
        self.cuda.synchronize()
        self.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Fact:
    """An assumption.

    Attributes:
        name: Unique name.
        believed: The assumption in one sentence.
        relies: The part of Penstock that relies on it.
        examine: Function that returns, or raises DiffersError or NotHereError.
        devices: Number of devices that it needs.
        fresh: It needs a process that has not used CUDA.
        tries: Maximum number of examinations, with longer delays, as the host may have been too slow.
    """

    name: str
    believed: str
    relies: str
    examine: Callable[[ExaminedDevice], None]
    devices: int = 1
    fresh: bool = False
    tries: int = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome for one fact; ``found`` is ``""`` if it holds at the first examination."""

    name: str
    believed: str
    relies: str
    outcome: FactOutcome
    found: str = ""
    tries: int = 1
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the values for a result file."""
        return asdict(self) | {"seconds": round(self.seconds, 3)}


Examine: TypeAlias = Callable[[ExaminedDevice], None]


def fact(
    believed: str, *, relies: str, devices: int = 1, fresh: bool = False, late: bool = False
) -> Callable[[Examine], Fact]:
    """Make a :class:`Fact` from a function, with the function's name.

    Args:
        believed: The assumption in one sentence.
        relies: The part of Penstock that relies on it.
        devices: Number of devices that it needs.
        fresh: It needs a process that has not used CUDA.
        late: A slow host makes it fail, so it is repeated.
    """

    def made(examine: Examine) -> Fact:
        tries = len(_DELAYS_S) if late else 1
        return Fact(examine.__name__, believed, relies, examine, devices, fresh, tries)

    return made


def expect(holds: bool, found: str) -> None:
    """Raise DiffersError with the observation ``found``, unless ``holds`` is true."""
    if not holds:
        raise DiffersError(found)


def judge(one: Fact, kind: str = "cuda") -> Finding:
    """Examine a fact on torch's current device of a kind; never raises an Exception."""
    start = time.perf_counter()
    module: Any = torch.get_device_module(kind)
    found: list[str] = []
    outcome = FactOutcome.NOT_HERE
    for delay_s in _DELAYS_S[: one.tries]:
        try:
            if module.device_count() < one.devices:
                raise NotHereError(f"needs {one.devices} devices")
            one.examine(ExaminedDevice(kind, delay_s=delay_s))
            module.synchronize()
            outcome = FactOutcome.HOLDS
        except DiffersError as error:
            outcome = FactOutcome.DIFFERS
            found.append(str(error))
        except NotHereError as error:
            found.append(str(error))
        except Exception as error:  # noqa: BLE001  (a driver or a kernel may fail in any way)
            # modules of other kinds may lack functions of CUDA's, or arguments of them
            lacks = kind != "cuda" and isinstance(error, AttributeError | TypeError)
            outcome = FactOutcome.NOT_HERE if lacks else FactOutcome.ERROR
            found.append(brief(error))
        if outcome is not FactOutcome.DIFFERS:
            break
        module.synchronize()
    return Finding(
        one.name,
        one.believed,
        one.relies,
        outcome,
        "; then ".join(found),
        tries=len(found) + (outcome is FactOutcome.HOLDS),
        seconds=time.perf_counter() - start,
    )


def in_thread(call: Callable[[], _T]) -> _T:
    """Run ``call`` in a new thread; return its result, or raise its exception."""
    returned: list[_T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # noqa: BLE001  (raised again by the caller)
            raised.append(error)

    thread = threading.Thread(target=work, name="fact")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return returned[0]


@functools.cache
def _busy_on(device: torch.device) -> Callable[[int], object]:
    """Return a function that keeps the current stream busy for a number of cycles."""
    module: Any = torch.get_device_module(device.type)
    sleep: Callable[[int], object] | None = getattr(module, "_sleep", None)
    if sleep is not None:
        return sleep
    matrix = torch.ones(2048, 2048, device=device)
    product = torch.empty_like(matrix)  # nothing is allocated later, on any stream

    def multiply(cycles: int) -> None:
        for _ in range(max(1, cycles // _CYCLES)):
            torch.mm(matrix, matrix, out=product)

    return multiply


_CYCLES: Final = 10_000_000
_measured: dict[str, float] = {}


def _cycles_per_s(gpu: ExaminedDevice, busy: Callable[[int], object]) -> float:
    """Return the number of cycles per second on a kind of device; measured once."""
    kind = gpu.device.type
    if kind not in _measured:
        busy(_CYCLES)
        start, end = (gpu.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        busy(_CYCLES)
        end.record()
        end.synchronize()
        measured = _CYCLES * 1e3 / max(start.elapsed_time(end), 1e-3)
        _measured[kind] = min(max(measured, 1e7), 1e10)
    return _measured[kind]


def brief(error: Exception) -> str:
    """Return the type and the first line of an error, up to 400 characters."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}"[:400]
