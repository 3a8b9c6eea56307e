"""Facts about the capture of CUDA graphs: what breaks it, and what is part of it.

Except where torch's own are needed, captures are made by the runtime itself, so that a deliberately
broken one leaves no trace in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from penstock.testing.gpu import cudart
from penstock.testing.gpu.fact import ExaminedDevice, Fact, expect, fact, in_thread

_PAUSED: Final = "session.py: paused() holds the lanes while a capture lasts"
_LANES: Final = "runtime/cuda/lanes.py: lanes may query during a capture"


@fact(
    "A capturing stream is known as such where it is current, and other streams are not.",
    relies="runtime/cuda/link.py: capturing",
)
def capture_is_known(gpu: ExaminedDevice) -> None:
    """Ask in this thread, and in another."""
    graph, x = gpu.cuda.CUDAGraph(), gpu.full(0, 512)
    asked = gpu.cuda.is_current_stream_capturing
    expect(not asked(), "a stream captures before a capture has begun")
    with gpu.cuda.graph(graph):
        inside, elsewhere = asked(), in_thread(asked)
        x.add_(1)
    expect(inside, "the capturing stream is not known to capture")
    expect(not elsewhere, "another thread's stream is said to capture")
    expect(not asked(), "the stream is said to capture when that is over")


@fact(
    "What is captured does not run until the graph is replayed.",
    relies="runtime/cuda/mover.py: nothing is moved during a capture",
)
def captured_work_waits(gpu: ExaminedDevice) -> None:
    """Check that it then runs once for each replay."""
    graph, x = gpu.cuda.CUDAGraph(), gpu.full(0, 512)
    gpu.cuda.synchronize()
    with gpu.cuda.graph(graph):
        x.add_(1)
    gpu.cuda.synchronize()
    expect(int(x.sum()) == 0, "it ran while it was captured")
    graph.replay()
    graph.replay()
    gpu.cuda.synchronize()
    expect(int(x[0]) == 2, f"after two replays it had run {int(x[0])} times")


@fact(
    "What is allocated during a capture lies in the graph's own pool, which keeps it when it is freed.",
    relies="hooks/saved_tensors.py: memory of graphs is not spilled, since that frees nothing",
)
def graphs_keep_their_memory(gpu: ExaminedDevice) -> None:
    """Check that the address is not allocated to others."""
    gpu.clean()
    graph, x = gpu.cuda.CUDAGraph(), gpu.full(0)
    with gpu.cuda.graph(graph):
        y = x + 1
    where = y.data_ptr()
    reserved = gpu.cuda.memory_reserved()
    del y
    others = [gpu.empty() for _ in range(3)]
    given = any(each.data_ptr() == where for each in others)
    del others
    gpu.clean()
    kept = gpu.cuda.memory_reserved()
    del graph
    expect(not given, "others got it")
    expect(kept >= reserved, f"{reserved - kept} bytes went back to the device")


@fact(
    "In the mode global, cudaEventQuery in any thread fails and breaks the capture.",
    relies=_PAUSED,
)
def query_breaks_a_global_capture(gpu: ExaminedDevice) -> None:
    """Call it in another thread than the capturing one."""
    _elsewhere(gpu, cudart.GLOBAL, breaks=True)


@fact(
    "In the mode global, cudaMalloc in any thread fails and breaks the capture.",
    relies=_PAUSED,
)
def malloc_breaks_a_global_capture(gpu: ExaminedDevice) -> None:
    """Call it in another thread than the capturing one."""
    _elsewhere(gpu, cudart.GLOBAL, breaks=True, call=cudart.malloc_code)


@fact(
    "In the mode global, cudaEventSynchronize in any thread fails and breaks the capture.",
    relies=_PAUSED,
)
def waiting_breaks_a_global_capture(gpu: ExaminedDevice) -> None:
    """Call it in another thread than the capturing one, for a reached event."""
    event = _reached(gpu)
    _elsewhere(gpu, cudart.GLOBAL, breaks=True, call=lambda: cudart.event_synchronize(event))


@fact(
    "In the mode global, cudaHostAlloc in any thread fails and breaks the capture.",
    relies=f"{_PAUSED}; staging.py: pinned memory is taken when it is needed first",
)
def host_alloc_breaks_a_global_capture(gpu: ExaminedDevice) -> None:
    """Call it in another thread than the capturing one."""
    _elsewhere(gpu, cudart.GLOBAL, breaks=True, call=cudart.host_alloc_code)


@fact(
    "In the mode thread_local, cudaEventQuery and cudaMalloc in another thread work and break nothing.",
    relies="docs: capture_error_mode='thread_local'",
)
def thread_local_captures_hold(gpu: ExaminedDevice) -> None:
    """Make both calls."""
    _elsewhere(gpu, cudart.THREAD_LOCAL, breaks=False)
    _elsewhere(gpu, cudart.THREAD_LOCAL, breaks=False, call=cudart.malloc_code)


@fact(
    "In the mode thread_local, cudaEventQuery in the capturing thread itself breaks the capture.",
    relies=f"{_PAUSED}: the program's own thread must not query either",
)
def thread_local_captures_break(gpu: ExaminedDevice) -> None:
    """Query an unrelated event."""
    event = _reached(gpu)
    with cudart.RawCapture(gpu.stream(), cudart.THREAD_LOCAL) as capture:
        code = cudart.event_query(event)
    expect(code == cudart.CAPTURE_UNSUPPORTED, f"the query returned {code}")
    expect(capture.code == cudart.CAPTURE_INVALIDATED, f"the capture ended with {capture.code}")


@fact(
    "In the mode relaxed, cudaEventQuery works in every thread and breaks nothing.",
    relies="docs: capture_error_mode='relaxed'",
)
def relaxed_captures_hold(gpu: ExaminedDevice) -> None:
    """Query in another thread, and in the capturing one."""
    _elsewhere(gpu, cudart.RELAXED, breaks=False)
    event = _reached(gpu)
    with cudart.RawCapture(gpu.stream(), cudart.RELAXED) as capture:
        code = cudart.event_query(event)
    expect(code == 0, f"the query returned {code}")
    expect(capture.code == 0, f"the capture ended with {capture.code}")


@fact(
    "A thread that has exchanged its capture mode for relaxed breaks no capture.",
    relies=_LANES,
)
def relaxed_threads_break_nothing(gpu: ExaminedDevice) -> None:
    """Query during a capture in the mode global."""
    event = _reached(gpu)

    def query() -> int:
        former = cudart.exchange_mode(cudart.RELAXED)
        try:
            return cudart.event_query(event)
        finally:
            cudart.exchange_mode(former)

    with cudart.RawCapture(gpu.stream(), cudart.GLOBAL) as capture:
        code = in_thread(query)
    expect(code == 0, f"the query returned {code}")
    expect(capture.code == 0, f"the capture ended with {capture.code}")


@fact(
    "A stream that was drawn into a capture and has come back makes no trouble.",
    relies="programs that capture work on several streams",
)
def joined_captures_hold(gpu: ExaminedDevice) -> None:
    """Join the capture and return from it by events."""
    capturing, drawn, x = gpu.stream(), gpu.stream(), gpu.full(0, 512)
    gpu.cuda.synchronize()
    with cudart.RawCapture(capturing, cudart.THREAD_LOCAL) as capture:
        drawn.wait_event(gpu.mark(capturing))
        with gpu.cuda.stream(drawn):
            x.fill_(1)
        capturing.wait_event(gpu.mark(drawn))
    expect(capture.code == 0, f"the capture ended with {capture.code}")
    expect(int(x.sum()) == 0, "what was captured has run")


@fact(
    "A stream that waits for an event of a capturing stream is drawn into the capture.",
    relies="runtime/cuda/mover.py: no lane may wait for a stream that captures",
)
def waiting_joins_a_capture(gpu: ExaminedDevice) -> None:
    """Check that the capture fails if the stream that began it does not wait for the work."""
    capturing, drawn, x = gpu.stream(), gpu.stream(), gpu.full(0, 512)
    gpu.cuda.synchronize()
    with cudart.RawCapture(capturing, cudart.THREAD_LOCAL) as capture:
        drawn.wait_event(gpu.mark(capturing))
        inside = cudart.capturing(drawn)
        with gpu.cuda.stream(drawn):
            x.fill_(1)
    expect(inside, "the waiting stream is not part of the capture")
    unjoined = capture.code == cudart.CAPTURE_UNJOINED
    expect(unjoined, f"the capture ended with {capture.code} though a stream had not come back")
    expect(not cudart.capturing(drawn), "the waiting stream still captures")


def _elsewhere(
    gpu: ExaminedDevice, mode: int, *, breaks: bool, call: Callable[[], int] | None = None
) -> None:
    """Make a call in another thread during a capture: by default a query of a reached event."""
    event = _reached(gpu)
    with cudart.RawCapture(gpu.stream(), mode) as capture:
        code = in_thread(call or (lambda: cudart.event_query(event)))
    wanted = (cudart.CAPTURE_UNSUPPORTED, cudart.CAPTURE_INVALIDATED) if breaks else (0, 0)
    found = f"the call returned {code}, the capture ended with {capture.code}"
    expect((code, capture.code) == wanted, found)


def _reached(gpu: ExaminedDevice) -> Any:
    event = gpu.mark()
    gpu.cuda.synchronize()
    return event


FACTS: Final = tuple(each for each in list(globals().values()) if isinstance(each, Fact))
