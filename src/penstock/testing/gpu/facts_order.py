"""Facts about the order of work on streams and events."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Final

import torch

from penstock.testing.gpu import cudart
from penstock.testing.gpu.fact import ExaminedDevice, Fact, expect, fact, in_thread

_MOVER: Final = "runtime/cuda/mover.py, [Note: streams]"
_LINK: Final = "runtime/cuda/link.py"
_LANES: Final = "runtime/cuda/lanes.py"


@fact("An event that was never recorded is complete.", relies=f"{_LANES}: what has no event")
def event_unrecorded(gpu: ExaminedDevice) -> None:
    """Query with torch, and with the runtime itself."""
    expect(gpu.cuda.Event().query(), "torch's event is not complete")
    library, made = cudart.library(), ctypes.c_void_p()
    gpu.empty(512)
    expect(library.cudaEventCreate(ctypes.byref(made)) == 0, "no event could be created")
    code = library.cudaEventQuery(made)
    library.cudaEventDestroy(made)
    cudart.last_error()
    expect(code == 0, f"cudaEventQuery returned {code}")


@fact(
    "A call that enqueues work returns before the work is done.",
    relies=f"{_MOVER}: the device runs behind the interpreter",
    late=True,
)
def host_runs_ahead(gpu: ExaminedDevice) -> None:
    """Run an operator after a delay."""
    x = gpu.full(0)
    gpu.cuda.synchronize()
    gpu.delay()
    x.add_(1)
    expect(not gpu.mark().query(), "all was done when the calls returned")


@fact(
    "An event is reached when what was enqueued before it is done, whatever comes later.",
    relies=f"{_MOVER}, rule 1",
    late=True,
)
def event_marks_a_place(gpu: ExaminedDevice) -> None:
    """Record an event between two delays."""
    stream = gpu.stream()
    first = gpu.delay(stream)
    second = gpu.delay(stream)
    expect(not first.query(), "the first event was reached at once")
    first.synchronize()
    expect(first.query(), "an event was not complete after it was waited for")
    expect(not second.query(), "the second event was reached with the first")


@fact(
    "A stream that waits for an event waits for the record made before the wait, not for a later one.",
    relies=f"{_MOVER}, rules 1, 4 and 5: no cycle of waits",
    late=True,
)
def wait_takes_the_state(gpu: ExaminedDevice) -> None:
    """Record the event again, after a delay, when the other stream has begun to wait."""
    one, other = gpu.stream(), gpu.stream()
    event = gpu.cuda.Event()
    event.record(one)
    other.wait_event(event)
    after = gpu.mark(other)
    gpu.delay(one)
    event.record(one)
    after.synchronize()
    expect(not event.query(), "the waiting stream went on only with the later record")


@fact(
    "What is enqueued after a stream has waited for an event sees what was done before that event.",
    relies=f"{_MOVER}, rules 1, 4, 5 and 7",
)
def wait_orders_streams(gpu: ExaminedDevice) -> None:
    """Fill memory late on one stream, and copy it on the other."""
    one, other = gpu.stream(), gpu.stream()
    source, target = gpu.full(0), gpu.full(0)
    gpu.cuda.synchronize()
    gpu.delay(one)
    with gpu.cuda.stream(one):
        source.fill_(7)
    other.wait_event(gpu.mark(one))
    with gpu.cuda.stream(other):
        target.copy_(source)
    other.synchronize()
    wrong = int((target != 7).sum())
    expect(wrong == 0, f"{wrong} bytes were copied before they were written")


@fact(
    "Streams are not ordered otherwise: one goes on while another is busy.",
    relies=f"{_MOVER}: every wait there is needed",
    late=True,
)
def streams_are_independent(gpu: ExaminedDevice) -> None:
    """Use a busy stream, and one with little work."""
    one, other = gpu.stream(), gpu.stream()
    busy = gpu.delay(one)
    gpu.mark(other).synchronize()
    expect(not busy.query(), "the other stream was done only with the busy one")


@fact(
    "Torch's streams do not wait for the default stream, nor it for them.",
    relies=f"{_LANES}: copies overlap with training on the default stream",
    late=True,
)
def default_stream_holds_nobody_up(gpu: ExaminedDevice) -> None:
    """Check both directions."""
    default, side = gpu.cuda.default_stream(), gpu.stream()
    for busy_one, free_one in ((default, side), (side, default)):
        busy = gpu.delay(busy_one)
        gpu.mark(free_one).synchronize()
        reached = busy.query()
        gpu.cuda.synchronize()
        which = "side" if free_one is side else "default"
        expect(not reached, f"the {which} stream waited for the other")


@fact(
    "The default stream's handle is 0.",
    relies="testing/access_order.py: default streams have all the same handle",
)
def default_stream_is_zero(gpu: ExaminedDevice) -> None:
    """Check that torch uses the legacy default stream."""
    handle = gpu.cuda.default_stream().cuda_stream
    expect(handle == 0, f"it is {handle:#x}")


@fact(
    "To synchronize a stream waits for that stream only, the device for all.",
    relies="staging.py: the thread waits for its own stream",
    late=True,
)
def synchronize_waits_for_its_own(gpu: ExaminedDevice) -> None:
    """Synchronize with another stream busy."""
    one, other = gpu.stream(), gpu.stream()
    busy = gpu.delay(one)
    other.synchronize()
    expect(not busy.query(), "synchronizing an idle stream waited for a busy one")
    gpu.cuda.synchronize()
    expect(busy.query(), "synchronizing the device left a stream busy")
    expect(one.query(), "a stream was not idle after the device was synchronized")


@fact(
    "A stream that waits for a stream waits for what that has to do at the call.",
    relies="programs that load batches on a stream of their own",
    late=True,
)
def wait_stream_takes_the_state(gpu: ExaminedDevice) -> None:
    """Enqueue a delay after the wait."""
    one, other = gpu.stream(), gpu.stream()
    first = gpu.delay(one)
    other.wait_stream(one)
    after = gpu.mark(other)
    later = gpu.delay(one)
    after.synchronize()
    expect(first.query(), "the wait was over before the work was")
    expect(not later.query(), "the wait was for work that came after it")


@fact(
    "An event may be destroyed while a stream waits for it; the stream waits all the same.",
    relies=f"{_LANES}: Copy.after is dropped once the copy is issued",
)
def event_may_die(gpu: ExaminedDevice) -> None:
    """Delete the event before the work that precedes it has ended."""
    one, other = gpu.stream(), gpu.stream()
    source, target = gpu.full(0), gpu.full(0)
    gpu.cuda.synchronize()
    gpu.delay(one)
    with gpu.cuda.stream(one):
        source.fill_(9)
    event = gpu.mark(one)
    other.wait_event(event)
    del event
    with gpu.cuda.stream(other):
        target.copy_(source)
    other.synchronize()
    wrong = int((target != 9).sum())
    expect(wrong == 0, f"{wrong} bytes were copied before they were written")


@fact(
    "When an event has been reached, the host sees what was copied before it, in any thread.",
    relies=f"{_MOVER}, rule 3",
)
def reached_means_visible(gpu: ExaminedDevice) -> None:
    """Copy to pinned memory, and read it in another thread after the event."""
    source = gpu.full(3)
    host = torch.zeros(source.numel(), dtype=torch.uint8).pin_memory()
    gpu.delay()
    host.copy_(source, non_blocking=True)
    event = gpu.mark()

    def look() -> int:
        event.synchronize()
        return int((host != 3).sum())

    wrong = in_thread(look)
    expect(wrong == 0, f"{wrong} bytes were not there yet")


@fact(
    "The device time between two events is what the work between them took, and adds up.",
    relies=f"{_LANES}, [Note: when copies happened]",
)
def elapsed_time_adds_up(gpu: ExaminedDevice) -> None:
    """Record three events around two delays."""
    stream = gpu.stream()
    events = [gpu.mark(stream, timed=True)]
    for _ in range(2):
        gpu.delay(stream)
        events.append(gpu.mark(stream, timed=True))
    events[-1].synchronize()
    first, second, whole = (
        events[start].elapsed_time(events[end]) for start, end in ((0, 1), (1, 2), (0, 2))
    )
    expect(min(first, second) > 0, f"{first} and {second} ms")
    off = abs(whole - first - second)
    expect(off <= 0.1 + 0.01 * whole, f"{first} + {second} ms are not {whole} ms")


@fact(
    "The device time of an event that is not reached is an error, not a number.",
    relies="runtime/executor.py and the lanes: times are read when events have been reached",
    late=True,
)
def elapsed_time_needs_both(gpu: ExaminedDevice) -> None:
    """Check that the error does not persist."""
    stream = gpu.stream()
    start = gpu.mark(stream, timed=True)
    gpu.delay(stream)
    end = gpu.mark(stream, timed=True)
    try:
        found = start.elapsed_time(end)
    except RuntimeError:
        gpu.full(1, 512)  # would report an error that is left
    else:
        expect(end.query(), f"{found} ms, though the event was not reached")
        expect(False, "the host came late: the event was reached")


@fact(
    "Waiting for a blocking event leaves the processor idle.",
    relies=f"{_LINK}: record",
)
def blocking_event_sleeps(gpu: ExaminedDevice) -> None:
    """Compare thread time with the clock."""
    event = gpu.cuda.Event(blocking=True)
    for _ in range(4):
        gpu.delay()
    event.record()
    start, busy = time.perf_counter(), time.thread_time()
    event.synchronize()
    waited, worked = time.perf_counter() - start, time.thread_time() - busy
    expect(worked <= 0.02 + waited / 2, f"{worked:.3f} s of work in {waited:.3f} s of waiting")


@fact(
    "Waiting for an event releases the GIL.",
    relies=f"{_LINK}: synchronize",
    late=True,
)
def wait_releases_the_gil(gpu: ExaminedDevice) -> None:
    """Count in another thread meanwhile."""
    event = gpu.delay()
    begun, over = threading.Event(), threading.Event()
    counted = 0

    def count() -> None:
        nonlocal counted
        begun.set()
        while not over.is_set():
            counted += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    begun.wait()
    before = counted
    event.synchronize()
    during = counted - before
    over.set()
    thread.join()
    expect(during >= 3, f"another thread took {during} turns")


@fact(
    "Torch hands out 32 streams of one priority in turn, then the first again.",
    relies=f"{_LINK}: copy_stream takes the other pool",
)
def pool_repeats(gpu: ExaminedDevice) -> None:
    """Take 33 streams in a row."""
    handles = [gpu.stream().cuda_stream for _ in range(33)]
    expect(len(set(handles[:32])) == 32, f"{len(set(handles[:32]))} of 32 are different")
    expect(handles[32] == handles[0], "the 33rd is not the first")


@fact(
    "Streams of high priority are none of the others.",
    relies=f"{_LINK}: copy_stream is not a stream that the program has",
)
def priorities_have_pools(gpu: ExaminedDevice) -> None:
    """Compare all streams of both pools."""
    normal = {gpu.stream().cuda_stream for _ in range(32)}
    high = {gpu.cuda.Stream(priority=-1).cuda_stream for _ in range(32)}
    expect(not normal & high, f"{len(normal & high)} streams are of both")


@fact(
    "A stream made with priority -1 comes before one made without.",
    relies=f"{_LINK}: copy_stream",
)
def priority_is_higher(gpu: ExaminedDevice) -> None:
    """Check that a lower number is a higher priority."""
    high, normal = gpu.cuda.Stream(priority=-1).priority, gpu.stream().priority
    expect(high < normal, f"their priorities are {high} and {normal}")


@fact(
    "The current stream equals, and hashes as, the one that was made current.",
    relies="runtime/cuda/mover.py: streams are kept in sets",
)
def streams_are_values(gpu: ExaminedDevice) -> None:
    """Compare different objects of one stream."""
    stream = gpu.stream()
    with gpu.cuda.stream(stream):
        current = gpu.cuda.current_stream()
    same = current == stream and hash(current) == hash(stream)
    expect(same, f"{current} and {stream} differ")


@fact(
    "A stream outlives its object.",
    relies="runtime/cuda/mover.py: use",
)
def streams_live_on(gpu: ExaminedDevice) -> None:
    """Enqueue work with its handle."""
    stream = gpu.stream()
    handle = stream.cuda_stream
    del stream
    again = gpu.cuda.ExternalStream(handle)
    with gpu.cuda.stream(again):
        x = gpu.full(5, 512)
    again.synchronize()
    expect(int(x.sum()) == 5 * 512, "its work was not done")


@fact(
    "The current stream is each thread's own: a new thread has the default stream.",
    relies="runtime/cuda/lanes.py and optim/update.py: threads name their stream",
)
def current_stream_is_a_threads(gpu: ExaminedDevice) -> None:
    """Start the thread from one with another current stream."""
    with gpu.cuda.stream(gpu.stream()):
        found = in_thread(gpu.cuda.current_stream)
    expect(found == gpu.cuda.default_stream(), f"it is {found}")


FACTS: Final = tuple(each for each in list(globals().values()) if isinstance(each, Fact))
