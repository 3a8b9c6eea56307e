"""Optional transfers between flash and device memory that never touch host memory.

They use NVIDIA's GPUDirect Storage through ``libcufile``, which torch's CUDA builds ship and load. If it
is not available, everything goes through host memory instead.

[Note: cuFile]
    A piece is one blocking ``cuFileRead`` or ``cuFileWrite`` in a worker of the engine, with the GIL
    released. It is not ordered with any stream, not even the default one, so the submitter of a request
    must make sure that the work that precedes it has ended.

    Addresses belong to the CUDA context that is current in the calling thread. Hence ``use_device``,
    which the engine calls before each piece. It must not be undone after the piece: a thread that
    returns to device 0 creates a context there, which costs memory on a device that it never uses.

    Memory is not registered with cuFile: torch allocates and frees it all the time, and some kinds
    cannot be registered. cuFile uses internal buffers where it must.

    A file is opened again for cuFile, through ``/proc`` since a spill file has no name: with O_DIRECT,
    and without O_TMPFILE, which cuFile refuses. Its offsets and lengths need not be aligned.
"""

from __future__ import annotations

import ctypes
import errno as errnos
import fcntl
import os
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.core.locks import Lock
from penstock.core.process import fork_guard
from penstock.io.engine import EngineSpec, File
from penstock.io.threads import Syscalls, ThreadEngine

LIBRARY: Final = "libcufile.so.0"
_MODULE: Final = "/proc/driver/nvidia-fs/version"
"""File that exists while the kernel module nvidia-fs is loaded."""

_SUCCESS: Final = 0
_BASE_ERROR: Final = 5000
"""Number below cuFile's own errors."""
_ALREADY_OPEN: Final = 5026
_MEANINGS: Final = {
    5001: "the kernel module nvidia-fs is not loaded",
    5004: "the version of the kernel module nvidia-fs does not match libcufile",
    5007: "this platform is not supported",
    5008: "the file system or its device is not supported",
    5009: "this GPU is not supported",
    5011: "the CUDA driver reports an error",
    5013: "this kind of GPU memory is not supported",
    5014: "the range reaches beyond one allocation, or one mapping, of GPU memory",
    5015: "the memory belongs to another CUDA context",
    5018: "files of this kind are not supported",
    5019: "the flags that the file was opened with are not supported",
    5025: "no permission to use /dev/nvidia-fs*",
    5034: "it is switched off for this file in cufile.json",
    5036: "GPU memory cannot be pinned",
}
_OPAQUE_FD: Final = 1
_ALLOW_COMPAT_MODE: Final = 1 << 1
_P2P_SUPPORTED: Final = 1 << 4


@dataclass(frozen=True, slots=True)
class Availability:
    """Availability of something optional, with the reason."""

    ok: bool
    reason: str
    """Text that names what was found, or what is missing and what to do."""

    def __bool__(self) -> bool:
        return self.ok


def available(*, ask_library: bool = False) -> Availability:
    """Check if GPU-direct transfers are available on this machine. Never raises.

    A particular directory may still not support them. libcufile is loaded and opened, which may leave a
    file ``cufile.log`` in the working directory, and stays open.

    Args:
        ask_library: Ask libcufile even if the kernel module nvidia-fs is missing: it can also use PCI
            peer-to-peer transfers, which ``cufile.json`` must permit.
    """
    if not ask_library and not os.path.exists(_MODULE):
        return Availability(
            False,
            f"{_MEANINGS[5001]}; it is a part of NVIDIA's GPUDirect Storage (package nvidia-gds)",
        )
    try:
        return _open_library().availability()
    except ConfigError as error:
        return Availability(False, str(error))


class CuFileEngine(ThreadEngine):
    """Thread engine with cuFile in place of ``preadv`` and ``pwritev``. See [Note: cuFile].

    Addresses may be those of device memory, or of host memory. Priorities, pieces, short transfers
    and errors are as in :class:`ThreadEngine`.
    """

    def __init__(
        self,
        threads: int | None = None,
        piece_bytes: int | None = None,
        *,
        use_device: Callable[[object], None] | None = None,
    ) -> None:
        """Make an engine; libcufile is opened if it is not open yet.

        Args:
            threads: See :class:`ThreadEngine`.
            piece_bytes: See :class:`ThreadEngine`.
            use_device: Called in a worker before each piece, with the ``keep_alive`` of its request;
                makes the device of that memory current in the thread, for good. None: not called.

        Raises:
            ConfigError: libcufile cannot be loaded or opened; gives the reason.
        """
        self._cufile = CuFileSyscalls(_open_library(), use_device)
        super().__init__(threads, piece_bytes, syscalls=self._cufile)

    @property
    def spec(self) -> EngineSpec:
        """Properties of this engine."""
        return replace(super().spec, name="cufile", gpu_direct=True)

    def close(self) -> None:
        """Close as :meth:`ThreadEngine.close`, and close cuFile's handles."""
        super().close()
        self._cufile.close()


class CuFileSyscalls(Syscalls):
    """System calls that move pieces with cuFile."""

    def __init__(self, library: _Library, use_device: Callable[[object], None] | None) -> None:
        """Use an open library. For ``use_device`` see :class:`CuFileEngine`."""
        self._library = library
        self._use_device = use_device
        self._lock = Lock()
        self._handles: MutableMapping[File, _Handle] = weakref.WeakKeyDictionary()

    def prepare(self, owner: object) -> None:
        """Make the device of the memory current."""
        if self._use_device is not None:
            self._use_device(owner)

    def read(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        """Read up to ``nbytes`` to device or host memory; 0 at the end of the file."""
        return self._library.read(self._handle(file).value, address, nbytes, offset_bytes)

    def write(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        """Write up to ``nbytes`` from device or host memory."""
        return self._library.write(self._handle(file).value, address, nbytes, offset_bytes)

    def close(self) -> None:
        """Close every handle. Idempotent."""
        with self._lock:
            handles = list(self._handles.values())
            self._handles.clear()
        for handle in handles:
            handle.close()

    def _handle(self, file: File) -> _Handle:
        with self._lock:
            handle = self._handles.get(file)
            if handle is None:
                handle = self._handles[file] = _Handle(self._library, file)
            return handle


class _Handle:
    """Handle of a file in cuFile. Closed with the file, or with the engine."""

    def __init__(self, library: _Library, file: File) -> None:
        """Open and register. Raises OSError."""
        self._library = library
        self._guard = fork_guard()
        self._fd = -1  # until registered, for `__del__`
        mode = fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_ACCMODE
        try:
            fd = os.open(f"/proc/self/fd/{file.fd}", mode | os.O_DIRECT)
        except OSError as error:
            raise OSError(error.errno, "it cannot be opened for direct I/O (O_DIRECT)") from error
        try:
            self.value = library.register(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Deregister and close; in a forked child, where cuFile must not be used, only close."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if not self._guard.in_child:
            self._library.deregister(self.value)
        os.close(fd)


class _Status(ctypes.Structure):
    """``CUfileError_t``."""

    _fields_ = (("error", ctypes.c_int), ("cuda_error", ctypes.c_int))


class _Target(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("handle", ctypes.c_void_p))


class _Description(ctypes.Structure):
    """``CUfileDescr_t``."""

    _fields_ = (("type", ctypes.c_int), ("target", _Target), ("operations", ctypes.c_void_p))


class _Properties(ctypes.Structure):
    """``CUfileDrvProps_t``: the fields that are used, and padding for the others."""

    _fields_ = (
        ("major_version", ctypes.c_uint),
        ("minor_version", ctypes.c_uint),
        ("poll_threshold_size", ctypes.c_size_t),
        ("max_direct_io_size", ctypes.c_size_t),
        ("status_flags", ctypes.c_uint),
        ("control_flags", ctypes.c_uint),
        ("feature_flags", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 212),
    )


class _Library:
    """Functions of libcufile that are used, all thread-safe."""

    def __init__(self, library: Any) -> None:
        """Declare the functions. Raises AttributeError."""

        def declare(name: str, result: Any, *arguments: Any) -> Any:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            return function

        pointer, size, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        moving = (pointer, pointer, size, offset, offset)
        self._open = declare("cuFileDriverOpen", _Status)
        self._get_properties = declare("cuFileDriverGetProperties", _Status, pointer)
        self._register = declare("cuFileHandleRegister", _Status, pointer, pointer)
        self._deregister = declare("cuFileHandleDeregister", None, pointer)
        self._read = declare("cuFileRead", ctypes.c_ssize_t, *moving)
        self._write = declare("cuFileWrite", ctypes.c_ssize_t, *moving)

    def open(self) -> None:
        """Initialize the library for this process until its end. Idempotent."""
        status = self._open()
        if status.error != _ALREADY_OPEN:
            _check(status)

    def availability(self) -> Availability:
        """Return the kind of direct transfers that is available, if any."""
        found = _Properties()
        try:
            _check(self._get_properties(ctypes.byref(found)))
        except OSError as error:
            return Availability(False, f"libcufile does not report its properties: {error}")
        module = f"nvidia-fs {found.major_version}.{found.minor_version}"
        loaded = module != "nvidia-fs 0.0"
        if loaded and found.status_flags:
            way = module
        elif found.feature_flags & _P2P_SUPPORTED:
            way = "PCI peer-to-peer"
        else:
            nothing = f"{module} supports no file system or device of this machine"
            return Availability(
                False,
                "libcufile is in compatibility mode (through host memory):"
                f" {nothing if loaded else _MEANINGS[5001]}, and there is no PCI peer-to-peer",
            )
        if found.control_flags & _ALLOW_COMPAT_MODE:
            way += (
                "; where that is impossible, libcufile itself goes through host memory"
                " (allow_compat_mode in cufile.json)"
            )
        return Availability(True, f"libcufile over {way}")

    def register(self, fd: int) -> int:
        """Return a handle for an open file. Raises OSError."""
        handle = ctypes.c_void_p()
        description = _Description(type=_OPAQUE_FD, target=_Target(fd=fd))
        _check(self._register(ctypes.byref(handle), ctypes.byref(description)))
        return handle.value or 0

    def deregister(self, handle: int) -> None:
        """Deregister a handle that no transfer uses any more. The file stays open."""
        self._deregister(handle)

    def read(self, handle: int, address: int, nbytes: int, offset_bytes: int) -> int:
        """Read, and return the bytes moved. Raises OSError."""
        return _moved(self._read(handle, address, nbytes, offset_bytes, 0))

    def write(self, handle: int, address: int, nbytes: int, offset_bytes: int) -> int:
        """Write, and return the bytes moved. Raises OSError."""
        return _moved(self._write(handle, address, nbytes, offset_bytes, 0))


def _open_library() -> _Library:
    """Load libcufile, which torch may have loaded, and initialize it. Raises ConfigError."""
    try:
        library = _Library(_load())
    except OSError as error:
        raise ConfigError(
            f"{LIBRARY} cannot be loaded ({error}): it comes with torch's builds for CUDA, and with"
            " the CUDA toolkit"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{LIBRARY} is not NVIDIA's cuFile, or too old: {error}") from error
    try:
        library.open()
    except OSError as error:
        raise ConfigError(f"libcufile cannot be initialized: {error}") from error
    return library


def _load() -> Any:
    """Load the library, or return the one that torch has loaded; calls release the GIL."""
    return ctypes.CDLL(LIBRARY, use_errno=True)


def _check(status: _Status) -> None:
    if status.error != _SUCCESS:
        raise _error(status.error, status.cuda_error)


def _moved(count: int) -> int:
    """Check the result of a transfer: bytes, -1 and ``errno``, or a negative error number."""
    if count >= 0:
        return count
    if count == -1:
        code = ctypes.get_errno() or errnos.EIO
        raise OSError(code, os.strerror(code))
    raise _error(-count)


def _error(code: int, cuda_error: int = 0) -> OSError:
    if code <= _BASE_ERROR:
        return OSError(code, os.strerror(code))
    driver = f", CUDA driver error {cuda_error}" if cuda_error else ""
    meaning = _MEANINGS.get(code, "see the cuFile API reference and cufile.log")
    return OSError(errnos.EIO, f"cuFile error {code}{driver}: {meaning}")
