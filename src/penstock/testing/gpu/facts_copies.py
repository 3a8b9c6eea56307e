"""Facts about copies between the host and the device, and about pinned memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from penstock.testing.gpu import cudart
from penstock.testing.gpu.fact import SIZE_BYTES, ExaminedDevice, Fact, expect, fact, in_thread

_PINNED: Final = "runtime/cuda/pinned.py"
_MOVER: Final = "runtime/cuda/mover.py, [Note: streams]"


@fact(
    "A copy to pinned memory with non_blocking does not hold up the host.",
    relies=f"{_MOVER}, rule 2",
    late=True,
)
def pinned_out_is_asynchronous(gpu: ExaminedDevice) -> None:
    """Copy after a delay."""
    source, host = gpu.full(1), _pinned()
    gpu.cuda.synchronize()
    gpu.delay()
    host.copy_(source, non_blocking=True)
    expect(not gpu.mark().query(), "the copy was over when the call returned")


@fact(
    "A copy from pinned memory with non_blocking does not hold up the host, and reads it when it runs.",
    relies=f"{_MOVER}, rule 3",
    late=True,
)
def pinned_in_is_asynchronous(gpu: ExaminedDevice) -> None:
    """Check that bytes written to the source after the call arrive."""
    target, host = gpu.full(0), _pinned().fill_(1)
    gpu.cuda.synchronize()
    gpu.delay()
    target.copy_(host, non_blocking=True)
    expect(not gpu.mark().query(), "the copy was over when the call returned")
    host.fill_(2)
    gpu.cuda.synchronize()
    old = int((target != 2).sum())
    expect(old == 0, f"{old} bytes were read before the copy's turn came")


@fact(
    "A copy to memory that is not pinned holds up the host until it is done, non_blocking or not.",
    relies="staging.py where nothing is pinned: the bytes are there at once",
)
def pageable_out_blocks(gpu: ExaminedDevice) -> None:
    """Copy after a delay."""
    source = gpu.full(4)
    host = torch.zeros(SIZE_BYTES, dtype=torch.uint8)
    busy = gpu.delay()
    host.copy_(source, non_blocking=True)
    wrong = int((host != 4).sum())
    expect(wrong == 0, f"{wrong} bytes were not there when the call returned")
    expect(busy.query(), "the call returned before its stream had come to the copy")


@fact(
    "A copy from memory that is not pinned has read it when the call returns.",
    relies="staging.py where nothing is pinned: the source may be used again at once",
)
def pageable_in_reads_at_once(gpu: ExaminedDevice) -> None:
    """Overwrite the source after the call."""
    target = gpu.full(0)
    host = torch.full((SIZE_BYTES,), 1, dtype=torch.uint8)
    gpu.cuda.synchronize()
    gpu.delay()
    target.copy_(host, non_blocking=True)
    host.fill_(2)
    gpu.cuda.synchronize()
    late = int((target != 1).sum())
    expect(late == 0, f"{late} bytes were read after the call had returned")


@fact(
    "A copy without non_blocking has been done when the call returns, to pinned memory too.",
    relies="runtime/cuda/link.py: digest",
)
def plain_copy_blocks(gpu: ExaminedDevice) -> None:
    """Copy after a delay."""
    source, host = gpu.full(6), _pinned().fill_(0)
    gpu.delay()
    host.copy_(source)
    wrong = int((host != 6).sum())
    expect(wrong == 0, f"{wrong} bytes were not there when the call returned")


@fact(
    "Registered memory is pinned, in part and as a whole; before and afterwards it is not.",
    relies=f"{_PINNED}: a slab is registered once",
)
def registered_is_pinned(gpu: ExaminedDevice) -> None:
    """Register a mapping of 8 MiB."""
    gpu.empty(512)
    memory = mmap.mmap(-1, 8 << 20)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    expect(not whole.is_pinned(), "it is pinned though it was not registered")
    with _registered(memory):
        expect(whole.is_pinned(), "it is not pinned though it was registered")
        part = torch.frombuffer(memory, dtype=torch.uint8, offset=(4 << 20) + 4096, count=4096)
        expect(part.is_pinned(), "a part of it is not pinned")
    expect(not whole.is_pinned(), "it is still pinned after it was unregistered")


@fact(
    "Copies to and from registered memory do not hold up the host.",
    relies=f"{_PINNED}: as good as memory of cudaHostAlloc",
    late=True,
)
def registered_is_asynchronous(gpu: ExaminedDevice) -> None:
    """Copy in both directions, after a delay."""
    memory = mmap.mmap(-1, SIZE_BYTES)
    with _registered(memory):
        host, other = torch.frombuffer(memory, dtype=torch.uint8), gpu.full(1)
        gpu.cuda.synchronize()
        try:
            for target, source in ((host, other), (other, host)):
                gpu.delay()
                target.copy_(source, non_blocking=True)
                expect(not gpu.mark().query(), "the copy was over when the call returned")
                gpu.cuda.synchronize()
        finally:
            gpu.cuda.synchronize()


@fact(
    "Memory that was marked not to be inherited by forked processes can be registered and copied.",
    relies="io/mapping.py: MADV_DONTFORK on the slab",
)
def not_inherited_can_be_pinned(gpu: ExaminedDevice) -> None:
    """Copy in both directions."""
    memory = mmap.mmap(-1, 8 << 20)
    memory.madvise(mmap.MADV_DONTFORK)
    with _registered(memory):
        host = torch.frombuffer(memory, dtype=torch.uint8)
        host.copy_(gpu.full(8, len(memory)), non_blocking=True)
        gpu.cuda.synchronize()
        expect(int((host != 8).sum()) == 0, "other bytes arrived")


@fact(
    "Copies of any length, from and to any address, are exact.",
    relies="runtime/cuda/link.py: storages of any length lie at any address of a slab",
)
def odd_copies_are_exact(gpu: ExaminedDevice) -> None:
    """Copy with unaligned lengths and offsets."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator).pin_memory()
    back = _pinned(data.numel())
    for offset, nbytes in ((0, 1), (1, 511), (3, 4097), (4096, 65537), (513, (1 << 20) - 513)):
        device = gpu.empty(nbytes)
        device.copy_(data[offset : offset + nbytes], non_blocking=True)
        back[offset : offset + nbytes].copy_(device, non_blocking=True)
        gpu.cuda.synchronize()
        same = torch.equal(back[offset : offset + nbytes], data[offset : offset + nbytes])
        expect(same, f"{nbytes} bytes at {offset} came back otherwise")


@fact(
    "To register memory twice is an error, and memory stays registered.",
    relies=f"{_PINNED}: refusals",
)
def registering_twice_fails(gpu: ExaminedDevice) -> None:
    """Expect error 712, in another thread, so that the error stays there."""
    gpu.empty(512)
    memory = mmap.mmap(-1, 4 << 20)
    with _registered(memory):
        code = in_thread(lambda: cudart.register(memory))
        expect(code == cudart.ALREADY_REGISTERED, f"the second registration returned {code}")
        pinned = torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
        expect(pinned, "the memory is not pinned any more")


@fact(
    "The runtime remembers a failed call for the thread that made it, and for no other.",
    relies="runtime/cuda/link.py: pin is called in a thread of its own",
)
def errors_are_a_threads(gpu: ExaminedDevice) -> None:
    """Fail a second registration there; here the next kernel runs."""
    gpu.empty(512)
    memory = mmap.mmap(-1, 4 << 20)
    cudart.last_error()

    def fail() -> int:
        cudart.register(memory)
        return cudart.last_error()

    with _registered(memory):
        there = in_thread(fail)
        expect(there == cudart.ALREADY_REGISTERED, f"that thread's last error was {there}")
        here = cudart.peek_error()
        expect(here == 0, f"this thread's last error is {here}")
        expect(int(gpu.full(1, 512).sum()) == 512, "the next kernel did not do its work")


@fact(
    "Memory that one device registered as portable is pinned for the others too.",
    relies="runtime/cuda/pinned.py: one slab for all devices",
    devices=2,
    late=True,
)
def portable_is_pinned_everywhere(gpu: ExaminedDevice) -> None:
    """Check that a copy from the second device does not block the host."""
    memory = mmap.mmap(-1, SIZE_BYTES)
    with _registered(memory), gpu.cuda.device(1):
        host = torch.frombuffer(memory, dtype=torch.uint8)
        source = torch.zeros(SIZE_BYTES, dtype=torch.uint8, device=gpu.second)
        gpu.cuda.synchronize()
        gpu.delay()
        host.copy_(source, non_blocking=True)
        reached = gpu.mark().query()
        gpu.cuda.synchronize()
        expect(not reached, "the copy was over when the call returned")


@contextmanager
def _registered(memory: mmap.mmap) -> Iterator[None]:
    code = cudart.register(memory)
    if code != 0:
        cudart.last_error()
        expect(False, f"cudaHostRegister returned {code}")
    try:
        yield
    finally:
        code = cudart.unregister(memory)
    expect(code == 0, f"cudaHostUnregister returned {code}")


def _pinned(nbytes: int = SIZE_BYTES) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8).pin_memory()


FACTS: Final = tuple(each for each in list(globals().values()) if isinstance(each, Fact))
