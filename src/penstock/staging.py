"""Copies between a CUDA device and unpinned host memory through small pinned staging buffers.

[Note: staging]
    The driver copies to and from unpinned memory through its own buffers, at a fraction of the link's
    rate, and such a copy waits for its stream. So the copies of optimizers, checkpoints and suspended
    jobs pass through two pieces of pinned memory in turn, on a separate stream: the device fills one
    piece while the thread empties the other, or the reverse. The thread waits for the end, so memory may
    be used, and freed, as soon as a call has returned.

    The stream waits for one event and nothing else. The caller records it after all work that fills the
    source and all work that still uses the target.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.core import graph_captures
from penstock.core.errors import PenstockWarning
from penstock.core.locks import Lock
from penstock.core.units import MIB

PIECE_BYTES: Final = MIB
"""Size of a piece: large enough for the link's full rate, small enough for a core's cache."""

Event: TypeAlias = Any
"""A recorded event of a device's stream; None on the host."""


class CopyStep(NamedTuple):
    """A part of a copy that fits one piece."""

    nbytes: int
    on_device: Callable[[Tensor], object]
    """Function that enqueues a copy between the device and the piece (uint8, pinned)."""
    on_host: Callable[[Tensor], object]
    """Function that empties or fills the piece on the host."""


class Staging:
    """Two pieces of pinned memory and a stream for copies of one device. For one thread at a time.

    Attributes:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the memory. If the driver cannot pin it, warn that copies are slower."""
        self.device = device
        # a high-priority stream, which little other code uses: torch hands out streams repeatedly
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._pieces = [pinned(PIECE_BYTES) for _ in range(2)]

    def to_host(self, steps: Iterable[CopyStep], after: Event) -> None:
        """Let the device fill pieces, and empty each on the host.

        Args:
            steps: Steps in order; ``on_device`` of each runs first.
            after: Event that the copy waits for.
        """
        with self._ordered_after(after):
            filled: tuple[Any, Tensor, CopyStep] | None = None
            for number, step in enumerate(steps):
                piece = self._pieces[number % 2][: step.nbytes]
                step.on_device(piece)
                end = self._record()
                if filled is not None:
                    _empty(*filled)
                filled = end, piece, step
            if filled is not None:
                _empty(*filled)

    def to_device(self, steps: Iterable[CopyStep], after: Event) -> None:
        """Fill pieces on the host, and let the device empty each.

        Args:
            steps: Steps in order; ``on_host`` of each runs first.
            after: Event that the copy waits for.
        """
        with self._ordered_after(after):
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
        """Wait for all enqueued copies."""
        self._record().synchronize()

    def copy_pinned(self, source: Tensor, target: Tensor, after: Event) -> None:
        """Copy directly between the device and pinned memory of the same dtype."""
        with self._ordered_after(after):
            target.copy_(source, non_blocking=True)

    @contextmanager
    def _ordered_after(self, after: Event) -> Iterator[None]:
        """Make the stream current inside the block, after an event; wait for it at the end."""
        # torch.cuda.stream alone would call cudaSetDevice on leaving, which creates a context
        with torch.no_grad(), torch.cuda.device(self.device), graph_captures.relaxed():
            try:
                with torch.cuda.stream(self._stream):
                    if after is not None:
                        self._stream.wait_event(after)
                    yield
            finally:  # also after an error: the memory must no longer be in use
                self.synchronize()

    def _record(self) -> Any:
        """Record an event; waiting for it sleeps and does not spin."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


_lock: Final = Lock()
_idle: Final[list[Staging]] = []


@contextmanager
def staging_for(device: torch.device) -> Iterator[Staging]:
    """Lend an idle Staging for the duration of a block; new ones are made when all are in use.

    Args:
        device: Device with an index, such as that of a tensor.
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


def free_idle() -> None:
    """Free unused pinned memory, also torch's own; it is allocated again when needed."""
    with _lock:
        _idle.clear()
    empty_cache = getattr(torch._C, "_host_emptyCache", None)
    if empty_cache is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        empty_cache()


def ready_event(device: torch.device) -> Event:
    """Record an event on this thread's current stream of ``device``; return None on the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def copy_across(source: Tensor, target: Tensor, after: Event) -> Tensor:
    """Copy elements between the host and a device; return when they have arrived. Thread-safe.

    Conversion to the target's dtype happens on the host, after the event, because work that the calling
    thread enqueues on the device would not be ordered after it.

    Args:
        source: One-dimensional, contiguous, of any dtype; on the host or a CUDA device.
        target: Contiguous, with as many elements, of any dtype. If neither is on a device, ``after`` is
            ignored.
        after: Event that the copy waits for.

    Returns:
        The target.
    """
    if source.is_cuda and not target.is_cuda:
        with staging_for(source.device) as staging:
            if target.dtype == source.dtype and target.is_pinned():
                staging.copy_pinned(source, target, after)
            else:
                staging.to_host(_steps(there=source, here=target, out=True), after)
    elif target.is_cuda and not source.is_cuda:
        with staging_for(target.device) as staging:
            staging.to_device(_steps(there=target, here=source, out=False), after)
    else:
        target.copy_(source)
    return target


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a uint8 view of all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def pinned(nbytes: int) -> Tensor:
    """Return uint8 host memory, pinned if the driver can; torch caches it once it is freed."""
    # memory allocated in inference mode could not be filled outside of it
    with torch.inference_mode(False), graph_captures.relaxed():
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _warn_unpinned(nbytes, str(error))
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _steps(*, there: Tensor, here: Tensor, out: bool) -> Iterator[CopyStep]:
    """Yield the steps of a copy between device and host; pieces have the device tensor's dtype."""
    count = PIECE_BYTES // there.element_size()
    for start in range(0, there.numel(), count):
        yield _step(there[start : start + count], here[start : start + count], out=out)


def _step(there: Tensor, here: Tensor, *, out: bool) -> CopyStep:
    def on_device(piece: Tensor) -> None:
        piece = piece.view(there.dtype)
        target, source = (piece, there) if out else (there, piece)
        target.copy_(source, non_blocking=True)

    def on_host(piece: Tensor) -> None:
        piece = piece.view(there.dtype)
        target, source = (here, piece) if out else (piece, here)
        target.copy_(source)

    return CopyStep(there.numel() * there.element_size(), on_device, on_host)


def _empty(end: Any, piece: Tensor, step: CopyStep) -> None:
    end.synchronize()
    step.on_host(piece)


_warned: Final[set[str]] = set()


def _warn_unpinned(nbytes: int, reason: str) -> None:
    if not _warned:
        _warned.add(reason)
        warnings.warn(
            f"the driver cannot pin {nbytes} bytes of host memory ({reason}): copies of an optimizer's"
            " weights and gradients and of checkpoints will take several times as long",
            PenstockWarning,
            stacklevel=2,
        )
