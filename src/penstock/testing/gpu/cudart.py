"""Calls of the CUDA runtime library that torch has loaded, but does not offer."""

from __future__ import annotations

import ctypes
import functools
import mmap
from pathlib import Path
from typing import Any, Final

import torch

from penstock.testing.gpu.fact import NotHereError

GLOBAL: Final = 0
"""Value of ``cudaStreamCaptureModeGlobal``; likewise the next two."""
THREAD_LOCAL: Final = 1
RELAXED: Final = 2
CAPTURE_UNSUPPORTED: Final = 900
CAPTURE_INVALIDATED: Final = 901
CAPTURE_UNJOINED: Final = 904
ALREADY_REGISTERED: Final = 712
PORTABLE: Final = 1


def torch_runtime() -> Any:
    """Return torch's module for the runtime. Raises NotHereError if torch uses another runtime."""
    if torch.version.cuda is None and torch.version.hip is None:
        raise NotHereError("this is about CUDA's own runtime")
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@functools.cache
def library() -> Any:
    """Return a handle of the loaded library. Raises NotHereError if it is not a separate library."""
    torch_runtime()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")[2]
        if "libcudart" in path:
            return ctypes.CDLL(f"/{path}")
    raise NotHereError("torch has not loaded libcudart as a separate library")


def last_error() -> int:
    """Return and clear the last error of the calling thread's runtime calls."""
    return int(library().cudaGetLastError())


def peek_error() -> int:
    """Return the last error of the calling thread's runtime calls without clearing it."""
    return int(library().cudaPeekAtLastError())


def event_query(event: Any) -> int:
    """Call ``cudaEventQuery`` for a recorded event of torch, and return its code."""
    return _code_of("cudaEventQuery", ctypes.c_void_p(event.cuda_event))


def event_synchronize(event: Any) -> int:
    """Call ``cudaEventSynchronize`` for a reached event of torch, and return its code."""
    return _code_of("cudaEventSynchronize", ctypes.c_void_p(event.cuda_event))


def host_alloc_code() -> int:
    """Call ``cudaHostAlloc`` for a little memory, free it, and return the code."""
    where = ctypes.c_void_p()
    code = _code_of("cudaHostAlloc", ctypes.byref(where), ctypes.c_size_t(4096), PORTABLE)
    if code == 0:
        library().cudaFreeHost(where)
    return code


def malloc_code() -> int:
    """Call ``cudaMalloc`` for a little memory, free it, and return the code."""
    where = ctypes.c_void_p()
    code = _code_of("cudaMalloc", ctypes.byref(where), ctypes.c_size_t(512))
    if code == 0:
        library().cudaFree(where)
    return code


def _code_of(function: str, *arguments: Any) -> int:
    """Call a function, clear the thread's last error, and return the code."""
    code = int(getattr(library(), function)(*arguments))
    last_error()
    return code


def register(memory: mmap.mmap) -> int:
    """Call ``cudaHostRegister`` for a whole mapping, for every device, and return its code."""
    runtime = torch_runtime()
    return int(runtime.cudaHostRegister(address_of(memory), len(memory), PORTABLE))


def unregister(memory: mmap.mmap) -> int:
    """Call ``cudaHostUnregister``, and return its code."""
    runtime = torch_runtime()
    return int(runtime.cudaHostUnregister(address_of(memory)))


def address_of(memory: mmap.mmap) -> int:
    """Return the address of a mapping."""
    return int(torch.frombuffer(memory, dtype=torch.uint8).data_ptr())


class RawCapture:
    """Capture on a stream without the knowledge of torch's allocator.

    Attributes:
        code: Code of ``cudaStreamEndCapture``, after the block.
    """

    def __init__(self, stream: Any, mode: int) -> None:
        """Capture on ``stream`` in ``mode`` from ``__enter__`` to ``__exit__``."""
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        self._mode = mode
        self.code = -1

    def __enter__(self) -> RawCapture:
        """Begin the capture."""
        code = _code_of("cudaStreamBeginCapture", self._stream, self._mode)
        if code != 0:
            raise NotHereError(f"cudaStreamBeginCapture returned {code}")
        return self

    def __exit__(self, *_: object) -> None:
        """End the capture, and destroy the graph."""
        graph = ctypes.c_void_p()
        self.code = _code_of("cudaStreamEndCapture", self._stream, ctypes.byref(graph))
        if self.code == 0 and graph.value:
            library().cudaGraphDestroy(graph)


def capturing(stream: Any) -> bool:
    """Return whether a stream captures, or did before its capture was invalidated."""
    status = ctypes.c_int()
    library().cudaStreamIsCapturing(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status))
    return status.value != 0


def exchange_mode(mode: int) -> int:
    """Set the calling thread's capture mode, and return the former one."""
    value = ctypes.c_int(mode)
    library().cudaThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return value.value
