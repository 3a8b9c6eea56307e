"""Facts about threads: autograd's, their devices and streams, and which calls make a context."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from penstock.testing.gpu.fact import ExaminedDevice, Fact, NotHereError, expect, fact, in_thread

_HOOKS: Final = "hooks/saved_tensors.py"
_LANES: Final = "runtime/cuda/lanes.py: threads set their device first"


@fact(
    "Saved tensors are packed in the thread and on the stream of forward, and unpacked on that stream.",
    relies=f"{_HOOKS}, and runtime/cuda/mover.py: which streams work with a storage",
)
def backward_runs_on_forwards_stream(gpu: ExaminedDevice) -> None:
    """Run forward on a separate stream, and backward from the default stream."""
    stream = gpu.stream()
    seen: dict[str, tuple[Any, int]] = {}

    def note(what: str, tensor: torch.Tensor) -> torch.Tensor:
        seen[what] = (gpu.cuda.current_stream(), threading.get_ident())
        return tensor

    x: Any = torch.ones(1024, device=gpu.device, requires_grad=True)
    stream.wait_stream(gpu.cuda.current_stream())
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: note("pack", tensor), lambda tensor: note("unpack", tensor)
    )
    with gpu.cuda.stream(stream), hooks:
        loss = (x * x).sum()
    gpu.cuda.current_stream().wait_stream(stream)
    loss.backward()
    expect(seen.keys() == {"pack", "unpack"}, f"only {sorted(seen)} were called")
    for what, (found, _) in seen.items():
        expect(found == stream, f"{what} ran on {found}, not on {stream}")
    expect(seen["pack"][1] == threading.get_ident(), "pack ran in another thread")


@fact(
    "Backward of a device's nodes runs in a thread of autograd's own, with that device current.",
    relies=f"{_HOOKS}: hooks are thread-local, and unpack is called in another thread",
)
def backward_has_threads(gpu: ExaminedDevice) -> None:
    """Use the last device, which is not 0 if there are several."""
    index = gpu.cuda.device_count() - 1
    seen: list[tuple[int, int]] = []

    def note(grad: torch.Tensor) -> torch.Tensor:
        seen.append((threading.get_ident(), gpu.cuda.current_device()))
        return grad

    x: Any = torch.ones(1024, device=torch.device(gpu.device.type, index), requires_grad=True)
    y = x * 2
    y.register_hook(note)
    y.sum().backward()
    expect(len(seen) == 1, f"the hook was called {len(seen)} times")
    thread, device = seen[0]
    expect(thread != threading.get_ident(), "it ran in the thread that called backward")
    expect(device == index, f"its current device is {device}, not {index}")


@fact(
    "When backward returns, the caller's stream comes after all gradients, whichever stream made them.",
    relies="optim/update.py and jobs: gradients are read on the current stream",
)
def caller_comes_after_gradients(gpu: ExaminedDevice) -> None:
    """Delay a gradient on a separate stream."""
    stream = gpu.stream()
    x: Any = torch.ones(1 << 20, device=gpu.device, requires_grad=True)
    stream.wait_stream(gpu.cuda.current_stream())

    def late(grad: torch.Tensor) -> torch.Tensor:
        gpu.delay()
        return grad * 3

    with gpu.cuda.stream(stream):
        y = x * 2
        y.register_hook(late)
        loss = y.sum()
    gpu.cuda.current_stream().wait_stream(stream)
    loss.backward()
    found = x.grad.clone().cpu()
    wrong = int((found != 6).sum())
    expect(wrong == 0, f"{wrong} gradients were read before they were made")


@fact(
    "Torch calls back for each event recorded and waited for, and for memory allocated and freed.",
    relies="testing/access_order.py: watch",
    fresh=True,
)
def torch_traces(gpu: ExaminedDevice) -> None:
    """Use the callbacks of torch.cuda._gpu_trace, or those of another kind of device."""
    try:
        trace: Any = importlib.import_module(f"{gpu.cuda.__name__}._gpu_trace")
        activate: Callable[[], None] = torch._C._activate_gpu_trace
    except (ImportError, AttributeError) as error:
        raise NotHereError(f"this torch has no trace: {error}") from error
    wanted = (
        "event_record",
        "event_wait",
        "memory_allocation",
        "memory_deallocation",
        "stream_synchronization",
    )
    seen: set[str] = set()
    for name in wanted:
        getattr(trace, f"register_callback_for_{name}")(lambda *_, name=name: seen.add(name))
    activate()
    one, other = gpu.stream(), gpu.stream()
    with gpu.cuda.stream(one):
        x = gpu.full(1)
    other.wait_event(gpu.mark(one))
    other.synchronize()
    del x
    missing = [name for name in wanted if name not in seen]
    expect(not missing, f"there was no callback for {', '.join(missing)}")


@fact("A new thread's device is 0, whichever its maker's is.", relies=_LANES, devices=2)
def new_threads_have_device_0(gpu: ExaminedDevice) -> None:
    """Start the thread with device 1 current."""
    with gpu.cuda.device(1):
        found = in_thread(gpu.cuda.current_device)
    expect(found == 0, f"it is {found}")


@fact(
    "Work of device 1, with that device current, makes no context on device 0.",
    relies="one process for each device: a rank has a context on its own device only",
    devices=2,
    fresh=True,
)
def own_device_only(gpu: ExaminedDevice) -> None:
    """Use memory, streams, events, copies and backward."""
    gpu.cuda.set_device(1)
    x: Any = torch.ones(1024, device=gpu.second, requires_grad=True)
    stream = gpu.cuda.Stream()
    with gpu.cuda.stream(stream):
        event = gpu.mark(stream)
    event.synchronize()
    torch.zeros(1024).pin_memory().to(gpu.second, non_blocking=True)
    (x * x).sum().backward()
    gpu.cuda.synchronize()
    expect(_contexts(gpu) == [1], f"there are contexts on {_contexts(gpu)}")


@fact(
    "To ask for an event of device 1 in a thread whose device is 0 makes a context on device 0.",
    relies=_LANES,
    devices=2,
    fresh=True,
)
def query_makes_a_context(gpu: ExaminedDevice) -> None:
    """Use a new thread, which has device 0."""
    gpu.cuda.set_device(1)
    torch.ones(1024, device=gpu.second)
    event = gpu.mark()
    event.synchronize()
    expect(_contexts(gpu) == [1], f"there were contexts on {_contexts(gpu)} before")
    in_thread(event.query)
    expect(_contexts(gpu) == [0, 1], f"there are contexts on {_contexts(gpu)}")


@fact(
    "To leave a stream of device 1 in a thread whose device is 0 makes a context on device 0.",
    relies=_LANES,
    devices=2,
    fresh=True,
)
def leaving_a_stream_makes_a_context(gpu: ExaminedDevice) -> None:
    """Use a new thread, which has device 0."""
    gpu.cuda.set_device(1)
    stream = gpu.cuda.Stream()
    torch.ones(1024, device=gpu.second)
    expect(_contexts(gpu) == [1], f"there were contexts on {_contexts(gpu)} before")

    def enter() -> None:
        with gpu.cuda.stream(stream):
            pass

    in_thread(enter)
    expect(_contexts(gpu) == [0, 1], f"there are contexts on {_contexts(gpu)}")


@fact(
    "A thread that sets device 1 first makes no context on device 0.",
    relies=_LANES,
    devices=2,
    fresh=True,
)
def set_device_first(gpu: ExaminedDevice) -> None:
    """Use queries, streams and copies."""
    gpu.cuda.set_device(1)
    x = torch.ones(1024, device=gpu.second)
    stream = gpu.cuda.Stream()
    host = torch.zeros(1024).pin_memory()

    def work() -> None:
        gpu.cuda.set_device(1)
        stream.wait_event(gpu.mark())
        with gpu.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
        event = gpu.mark(stream)
        event.query()
        event.synchronize()

    in_thread(work)
    expect(_contexts(gpu) == [1], f"there are contexts on {_contexts(gpu)}")


def _contexts(gpu: ExaminedDevice) -> list[int]:
    """Return the devices on which this process has a context."""
    has: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has is None or gpu.device.type != "cuda":
        raise NotHereError("this torch does not tell which contexts there are")
    return [index for index in range(gpu.cuda.device_count()) if has(index)]


FACTS: Final = tuple(each for each in list(globals().values()) if isinstance(each, Fact))
