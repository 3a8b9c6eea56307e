"""Interface to a device that runs behind the interpreter: a thin layer over torch's own.

The mover and its lanes know the device only through a :class:`CudaLink`. A test can put a simulated one
in its place, whose streams run their queues as late, and in as unlucky an order, as they may.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias, TypeVar

import torch

from penstock.core import graph_captures
from penstock.runtime.allowance import Allocated
from penstock.runtime.cuda import pools
from penstock.runtime.cuda.digest import DIGEST_BYTES, digest_of
from penstock.staging import bytes_of

T = TypeVar("T")
Stream: TypeAlias = Any
"""A queue of device work; hashable, equal if it is the same queue."""
Event: TypeAlias = Any
"""A place in a queue: reached when all that was enqueued before it is done."""

_PORTABLE: Final = 1
"""``cudaHostRegisterPortable``: pinned for every device, not only for the current one."""
_MAPPED: Final = 2
"""``ACL_HOST_REG_MAPPED``, of Ascend: for memory that begins at a multiple of 4096, as slabs do."""
_IDLE_CYCLES: Final = 2_000_000
"""Of a clock of 1 to 2 GHz."""
_HERE: Final = nullcontext()
_FIGURES: Final = ("mem_get_info", "memory_reserved", "memory_stats_as_nested_dict")
"""Functions of torch's module for a kind of device that tell of memory."""


class CudaLink:
    """Streams, events, memory and copies of the devices of one kind, by torch's module for it.

    Thread-safe; waits only where said. Events are reused, and all copies of a slab use slices of one
    tensor, because to make an event or a tensor of host memory takes longer than to use it.

    [Note: other devices]
        AMD's are CUDA to torch. Modules of others (``torch.xpu``, ``torch.npu``) promise the same
        streams, events and memory, but nothing of this has run on any of them. It does without what a
        module lacks: registered host memory (copies then go through memory that is not pinned, in the
        threads of lanes), pools of memory, events that are waited for asleep, graphs, figures of memory
        (then no budget is found where none is given).

    [Note: the current device]
        Each thread has a current device, at first the first one, and a call of CUDA may make a context
        on it: half a gigabyte, on a device that may be another process's. So no call is made while an
        unrelated device is current. Threads of copies are given their device once, by ``adopt_thread``,
        and every call that does not itself choose its device is made inside ``torch.cuda.device``. That
        restores the thread's former device without a call, if that has no context yet.

    [Note: captures]
        While a CUDA graph is captured in the mode ``global``, which is torch's default, a call that might
        interfere (of ``cudaEventQuery``, ``cudaMalloc``, ...) breaks it, whichever thread makes it. The
        threads of lanes ask for the ends of copies, which interferes with nothing: so they take the mode
        ``relaxed``, in which such calls are allowed (:mod:`penstock.core.graph_captures`); so do copies
        of optimizers and checkpoints, and a loader that pins its batches. ``Session.paused`` also waits
        for what is under way, so that nothing is copied meanwhile. A thread of the program that goes on
        to train is not held up: it allocates memory of its own, so the capture has to be made with
        ``capture_error_mode="thread_local"`` in any case.

        An event that is recorded on a stream that is being captured is a node of the graph, and a lane
        that waits for it is captured, too. So none is recorded there: nothing that such a stream has
        worked with is spilled meanwhile, and nothing is restored for it.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        """Make a link that knows no device yet.

        Args:
            device_type: Which kind of devices. Targets on CUDA are allocated from pools of their own, if
                the knob says so.

        Raises:
            ConfigError: The knob asks for pools, and this torch has none.
        """
        self._torch: Any = torch.get_device_module(device_type)
        is_cuda = device_type == "cuda"
        self._pools = pools.shared() if is_cuda else None
        self._segments = pools.segments if is_cuda else None
        self._has_capture = hasattr(self._torch, "is_current_stream_capturing")
        self._sleeping = {"blocking": True} if _takes_blocking(self._torch.Event) else {}
        self._fast: Any = torch._C if is_cuda and hasattr(torch._C, "_cuda_setStream") else None
        self._streams: dict[tuple[int, int, int], Stream] = {}
        self._idle_events: dict[tuple[torch.device, bool], list[Event]] = {}
        self._pinned: dict[int, torch.Tensor] = {}
        self.begin_pass()

    def adopt_thread(self, device: torch.device) -> None:
        """Prepare the calling thread, one of Penstock's, to work with ``device`` and no other.

        Its calls break no capture: see [Note: captures].
        """
        self._torch.set_device(device)
        graph_captures.relax()

    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream that the calling thread enqueues work of ``device`` on at this moment."""
        fast, index = self._fast, device.index
        if fast is None or index is None:
            return self._torch.current_stream(device)
        name = fast._cuda_getCurrentStream(index)
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = self._torch.current_stream(device)
        return stream

    def within(self, stream: Stream) -> AbstractContextManager[object]:
        """Make ``stream`` current, and its device: a stream alone would set the former device later."""
        if self._fast is not None and self._fast._cuda_getDevice() == stream.device_index:
            return _Within(self._fast, stream)
        return self._within(stream)

    @contextmanager
    def _within(self, stream: Stream) -> Iterator[None]:
        with self._torch.device(stream.device), self._torch.stream(stream):
            yield

    def _on(self, device: torch.device) -> AbstractContextManager[object]:
        """Make ``device`` current."""
        if self._fast is not None and self._fast._cuda_getDevice() == device.index:
            return _HERE
        return self._torch.device(device)  # type: ignore[no-any-return]

    def copy_stream(self, device: torch.device) -> Stream:
        """Return a stream of high priority, whose pool few others use: torch hands streams out twice."""
        return self._torch.Stream(device, priority=-1)

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """Mark this place in ``stream`` by an event, a reused one if possible.

        To wait for it sleeps and does not spin. With ``timed`` it can tell when it was reached.
        """
        key = stream.device, timed
        idle = self._idle_events.get(key)
        if idle is None:
            idle = self._idle_events.setdefault(key, [])
        try:
            event = idle.pop()
        except IndexError:
            event = self._torch.Event(enable_timing=timed, **self._sleeping)
            event.idle = idle
        event.record(stream)
        return event

    def reuse(self, event: Event) -> None:
        """Let ``record`` take an event that nobody asks for, or waits for from now on."""
        event.idle.append(event)

    def wait(self, stream: Stream, event: Event) -> None:
        """Have everything enqueued on ``stream`` from now on run after ``event``."""
        stream.wait_event(event)

    def idle(self, stream: Stream) -> None:
        """Have ``stream`` do nothing for a while, about a millisecond; where the kind of device can."""
        sleep = getattr(self._torch, "_sleep", None)
        if sleep is not None:
            with self.within(stream):
                sleep(_IDLE_CYCLES)

    def reached(self, event: Event) -> bool:
        """Return whether the device has come to ``event``."""
        with self._on(event.device):
            return bool(event.query())

    def synchronize(self, event: Event) -> None:
        """Wait, with the GIL released, until the device has come to ``event``."""
        with self._on(event.device):
            event.synchronize()

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """Return the device time between two timed events that have been reached, to about 500 ns."""
        with self._on(end.device):
            return int(start.elapsed_time(end) * 1e6)

    def empty(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Allocate device memory on the current stream. Raises ``torch.OutOfMemoryError``."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def empty_target(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Allocate memory for a restored storage, from a pool of its own if asked: [Note: own pool]."""
        if self._pools is None:
            return self.empty(nbytes, device)
        return self._pools.empty(nbytes, device)

    def frees(self, storage: torch.UntypedStorage) -> bool:
        """Return whether others get the memory when it is freed; see [Note: memory of CUDA graphs]."""
        return self._segments is None or not self._segments.is_of_another_pool(storage)

    def begin_pass(self) -> None:
        """Ask anew, once, which pools there are."""
        if self._segments is not None:
            self._segments.renew()

    def keep(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """Delay the reuse of freed memory until ``stream`` has done all it then has to do.

        Nothing happens if it is the stream that the memory is allocated on.
        """
        bytes_of(storage).record_stream(stream)

    def copy_out(self, stream: Stream, source: torch.UntypedStorage, address: int) -> None:
        """Enqueue a copy of a whole storage to host memory. Keeps neither alive."""
        self._copy(stream, self._host_bytes(address, source.nbytes()), bytes_of(source))

    def copy_in(self, stream: Stream, target: torch.UntypedStorage, address: int) -> None:
        """Enqueue a copy of host memory to a whole storage. Keeps neither alive."""
        self._copy(stream, bytes_of(target), self._host_bytes(address, target.nbytes()))

    def _copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with self.within(stream):
            target.copy_(source, non_blocking=True)

    def _host_bytes(self, address: int, nbytes: int) -> torch.Tensor:
        """Host memory as a tensor that does not own it."""
        for begin, pinned in self._pinned.copy().items():
            if 0 <= address - begin <= pinned.numel() - nbytes:
                return pinned[address - begin : address - begin + nbytes]
        return _tensor_at(address, nbytes)

    def digest(self, stream: Stream, source: torch.UntypedStorage, address: int) -> None:
        """Put a :mod:`.digest` of a whole storage at ``address``; waits until ``stream`` has done it."""
        with self.within(stream):
            _tensor_at(address, DIGEST_BYTES).copy_(digest_of(bytes_of(source)))

    def usable_bytes(self, device: torch.device) -> int | None:
        """Return what torch could allocate now: free memory and what it has reserved, within its limit.

        None: torch does not tell.
        """
        if not all(hasattr(self._torch, name) for name in _FIGURES):
            return None
        share_of = getattr(self._torch, "get_per_process_memory_fraction", lambda _: 1.0)
        try:
            free, total = self._torch.mem_get_info(device)
            usable = int(free + self._torch.memory_reserved(device))
            return min(usable, int(total * share_of(device)))
        except RuntimeError:  # some devices of Intel, and allocators that are plugged into torch
            return None

    def allocated(self, device: torch.device) -> Allocated:
        """Return what torch's allocator has allocated."""
        counts = self._torch.memory_stats_as_nested_dict(device).get("allocated_bytes")
        if counts is None:
            return Allocated(0, 0, 0)
        every = counts["all"]
        return Allocated(every["current"], every["peak"], every["allocated"])

    def capturing(self, stream: Stream | None = None) -> bool:
        """Return whether ``stream``, or else the current one, records a CUDA graph."""
        if not self._has_capture:
            return False
        if stream is None:
            return bool(self._torch.is_current_stream_capturing())
        with self.within(stream):
            return bool(self._torch.is_current_stream_capturing())

    def pin(self, address: int, nbytes: int, device: torch.device) -> str:
        """Register host memory with the driver; return ``""``, or why that failed.

        In a thread of its own: the runtime remembers the last error of each thread, and torch would
        report a refused registration as the failure of whatever kernel the caller launches next.
        """
        refusal = _in_thread(_pin, self._torch, address, nbytes, device)
        if not refusal:
            self._pinned[address] = _tensor_at(address, nbytes)
        return refusal

    def unpin(self, address: int, device: torch.device) -> None:
        """Undo ``pin``, in a thread of its own for the same reason."""
        self._pinned.pop(address, None)
        _in_thread(_unpin, self._torch, address, device)


class _Within:
    """Makes a stream of the current device current: ``torch.cuda.stream`` takes ten times as long."""

    __slots__ = ("_before", "_stream", "_torch")

    def __init__(self, torch_c: Any, stream: Stream) -> None:
        self._torch = torch_c
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = self._torch._cuda_getCurrentStream(stream.device_index)
        self._torch._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        self._torch._cuda_setStream(*self._before)


def device_time(link: CudaLink, device: torch.device, call: Callable[[Stream], T]) -> tuple[T, int]:
    """Call with the current stream; return the result, and the device time of its work in ns. Waits."""
    stream = link.current_stream(device)
    start = link.record(stream, timed=True)
    result = call(stream)
    end = link.record(stream, timed=True)
    link.synchronize(end)
    return result, max(1, link.elapsed_ns(start, end))


def _takes_blocking(event: Any) -> bool:
    """Return whether events of a kind of device can be waited for asleep."""
    return "blocking" in inspect.signature(event.__new__).parameters


def _pin(module: Any, address: int, nbytes: int, device: torch.device) -> str:
    with module.device(device):
        if hasattr(module, "npurt"):
            code = int(module.npurt().npuHostRegister(address, nbytes, _MAPPED))
            return "" if code == 0 else f"npuHostRegister returned {code}"
        if hasattr(module, "cudart"):
            runtime = module.cudart()
            code = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
            return "" if int(code) == 0 else str(runtime.cudaGetErrorString(code))
    return f"torch cannot register host memory for devices of type {device.type!r}"


def _unpin(module: Any, address: int, device: torch.device) -> str:
    with module.device(device):
        if hasattr(module, "npurt"):
            return str(int(module.npurt().npuHostUnregister(address)))
        return str(int(module.cudart().cudaHostUnregister(address)))


def _in_thread(call: Callable[..., str], *args: object) -> str:
    """Return the result of ``call`` in another thread, or its error in words.

    When the interpreter ends, Python 3.12 and later start no thread any more, and no kernel follows
    that could be blamed: then it is called here.
    """
    results: list[str] = []

    def work() -> None:
        try:
            results.append(call(*args))
        except Exception as error:  # noqa: BLE001  (a driver that fails in any way is one that refuses)
            results.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="penstock-pin", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        work()
    else:
        thread.join()
    return results[0]


def _tensor_at(address: int, nbytes: int) -> torch.Tensor:
    """Host memory as a tensor that does not own it."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
