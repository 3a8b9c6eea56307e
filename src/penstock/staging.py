"""Copies between a CUDA device and memory of the host that is not pinned, by way of a little that is.

[Note: staging]
    The driver copies to and from memory that is not pinned by way of its own buffers, at a part of the
    link's rate, and a copy in that direction waits for the stream that it is on. So what optimizers,
    checkpoints and suspended jobs copy passes through two pieces of pinned memory in turn, on a stream of
    its own: the device fills one piece while the thread empties the other, and the other way round. The
    thread waits for the end, so memory may be used, and let go of, as soon as a call has returned.

    The stream waits for one event and for nothing else. Whoever calls says by it what the copy comes
    after: what fills the source, and what still uses the target.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.core import captures
from penstock.core.errors import PenstockWarning
from penstock.core.locks import Lock
from penstock.core.units import MIB

PIECE_BYTES: Final = MIB
"""Long enough for the rate of the link, short enough for a core's cache."""

Event: TypeAlias = Any
"""A place in a stream of a device; None on the host."""


class Step(NamedTuple):
    """A part of a copy that fits one piece."""

    nbytes: int
    on_device: Callable[[Tensor], object]
    """Enqueues a copy between the device and the piece (uint8, pinned), on the current stream."""
    on_host: Callable[[Tensor], object]
    """Empties the piece, or fills it."""


class Staging:
    """Two pieces of pinned memory and a stream, for copies of one device. For one thread at a time.

    Attributes:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        """Take the memory. If the driver refuses to pin it, a warning says that copies are slower."""
        self.device = device
        # of the high-priority streams, which few others use: torch hands streams out twice
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._pieces = [pinned(PIECE_BYTES) for _ in range(2)]

    def to_host(self, steps: Iterable[Step], after: Event) -> None:
        """Have the device fill pieces, and empty each on the host.

        Args:
            steps: In order; of each, ``on_device`` comes first.
            after: What the copy comes after.
        """
        with self._behind(after):
            filled: tuple[Any, Tensor, Step] | None = None
            for number, step in enumerate(steps):
                piece = self._pieces[number % 2][: step.nbytes]
                step.on_device(piece)
                end = self._record()
                if filled is not None:
                    _empty(*filled)
                filled = end, piece, step
            if filled is not None:
                _empty(*filled)

    def to_device(self, steps: Iterable[Step], after: Event) -> None:
        """Fill pieces on the host, and have the device empty each.

        Args:
            steps: In order; of each, ``on_host`` comes first.
            after: What the copy comes after.
        """
        with self._behind(after):
            ends: list[Any] = [None, None]
            for number, step in enumerate(steps):
                turn = number % 2
                if ends[turn] is not None:
                    ends[turn].synchronize()
                piece = self._pieces[turn][: step.nbytes]
                step.on_host(piece)
                step.on_device(piece)
                ends[turn] = self._record()

    def synchronize(self) -> None:
        """Wait for what a step has enqueued so far."""
        self._record().synchronize()

    def straight(self, source: Tensor, target: Tensor, after: Event) -> None:
        """Copy at once, between the device and memory that is pinned already; of one type."""
        with self._behind(after):
            target.copy_(source, non_blocking=True)

    @contextmanager
    def _behind(self, after: Event) -> Iterator[None]:
        """The stream is current, behind an event; at the end the host has waited for it."""
        # torch.cuda.stream alone would leave the device by way of cudaSetDevice, which makes a context
        with torch.no_grad(), torch.cuda.device(self.device), captures.relaxed():
            try:
                with torch.cuda.stream(self._stream):
                    if after is not None:
                        self._stream.wait_event(after)
                    yield
            finally:  # also after an error: the memory must not be in use any more
                self.synchronize()

    def _record(self) -> Any:
        """An event, waiting for which sleeps and does not spin."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


_lock: Final = Lock()
_idle: Final[list[Staging]] = []


@contextmanager
def staging_for(device: torch.device) -> Iterator[Staging]:
    """One that nobody else uses meanwhile; there are as many as were ever in use at once.

    Args:
        device: With its index, as that of a tensor.
    """
    staging = _take(device)
    try:
        yield staging
    finally:
        _give(staging)


def _take(device: torch.device) -> Staging:
    with _lock:
        found = next((each for each in _idle if each.device == device), None)
        if found is not None:
            _idle.remove(found)
    return found or Staging(device)


def _give(staging: Staging) -> None:
    with _lock:
        _idle.append(staging)


def give_back_idle() -> None:
    """Let pinned memory go that is not in use now, ours and torch's own; it is taken anew when needed."""
    with _lock:
        _idle.clear()
    empty_cache = getattr(torch._C, "_host_emptyCache", None)
    if empty_cache is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        empty_cache()


def ready_event(device: torch.device) -> Event:
    """Record an event on the stream of ``device`` that is current in this thread; None on the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def copy_across(source: Tensor, target: Tensor, after: Event) -> Tensor:
    """Copy elements between the host and a device; returns when they are there. Thread-safe.

    The target's type is made on the host, behind the event: what the calling thread itself computes on
    the device would come after other things, or after nothing.

    Args:
        source: Of one dimension, contiguous, of any dtype; on the host or a CUDA device.
        target: Of as many elements, contiguous, of any dtype. If neither is on a device, ``after`` is
            ignored.
        after: What the copy comes after.

    Returns:
        The target.
    """
    if source.is_cuda and not target.is_cuda:
        with staging_for(source.device) as staging:
            if target.dtype == source.dtype and target.is_pinned():
                staging.straight(source, target, after)
            else:
                staging.to_host(_steps(there=source, here=target, out=True), after)
    elif target.is_cuda and not source.is_cuda:
        with staging_for(target.device) as staging:
            staging.to_device(_steps(there=target, here=source, out=False), after)
    else:
        target.copy_(source)
    return target


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, as uint8; shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def pinned(nbytes: int) -> Tensor:
    """uint8 memory of the host, pinned where the driver does that; torch's own once it is let go of."""
    # memory made in inference mode could not be filled outside of it
    with torch.inference_mode(False), captures.relaxed():
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _warn_unpinned(nbytes, str(error))
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _steps(*, there: Tensor, here: Tensor, out: bool) -> Iterator[Step]:
    """Of a copy between a device and the host; pieces are of the device's type."""
    count = PIECE_BYTES // there.element_size()
    for start in range(0, there.numel(), count):
        yield _step(there[start : start + count], here[start : start + count], out=out)


def _step(there: Tensor, here: Tensor, *, out: bool) -> Step:
    def on_device(piece: Tensor) -> None:
        piece = piece.view(there.dtype)
        target, source = (piece, there) if out else (there, piece)
        target.copy_(source, non_blocking=True)

    def on_host(piece: Tensor) -> None:
        piece = piece.view(there.dtype)
        target, source = (here, piece) if out else (piece, here)
        target.copy_(source)

    return Step(there.numel() * there.element_size(), on_device, on_host)


def _empty(end: Any, piece: Tensor, step: Step) -> None:
    end.synchronize()
    step.on_host(piece)


_warned: Final[set[str]] = set()


def _warn_unpinned(nbytes: int, reason: str) -> None:
    if not _warned:
        _warned.add(reason)
        warnings.warn(
            f"the driver refuses to pin {nbytes} bytes of host memory ({reason}): copies of an"
            " optimizer's weights and gradients and of checkpoints will take several times as long",
            PenstockWarning,
            stacklevel=2,
        )
