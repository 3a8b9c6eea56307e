"""Optional: transfers between flash and device memory that never touch host memory.

This is NVIDIA's cuFile (GPUDirect Storage) by way of ``kvikio``, which is loaded only when somebody
asks. Without it nothing here is needed, and everything goes through host memory instead.

kvikio synchronizes CUDA's default stream before each piece, in our worker and without the GIL, so a
piece waits for kernels that were enqueued there meanwhile; they never wait for it.
"""

from __future__ import annotations

import errno as errnos
import fcntl
import importlib
import os
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Protocol

from penstock.core.errors import ConfigError
from penstock.core.locks import Lock
from penstock.io.engine import EngineSpec, File
from penstock.io.threads import Syscalls, ThreadEngine


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether something optional can be used here."""

    ok: bool
    reason: str
    """In words: what was found, or what is missing and what to do."""

    def __bool__(self) -> bool:
        return self.ok


def available() -> Availability:
    """Whether GPU-direct transfers work here. Loads ``kvikio`` if it is installed; never raises."""
    try:
        kvikio = importlib.import_module("kvikio")
    except ImportError as error:
        return Availability(False, f"{error}; install penstock[gds] on a machine with CUDA")
    except Exception as error:  # noqa: BLE001  (a vendor's library may fail to load in any way)
        return Availability(False, f"kvikio fails to load: {error}")
    try:
        return _probe(kvikio)
    except Exception as error:  # noqa: BLE001
        return Availability(False, f"kvikio does not answer: {error}")


class KvikioEngine(ThreadEngine):
    """The thread engine with cuFile in place of ``preadv`` and ``pwritev``.

    Addresses may be those of device memory, or of host memory. Priorities, pieces, short transfers
    and errors are as in :class:`ThreadEngine`.
    """

    def __init__(self, threads: int | None = None, piece_bytes: int | None = None) -> None:
        """Make an engine. Arguments as of :class:`ThreadEngine`.

        Raises:
            ConfigError: GPU-direct transfers do not work here; says why.
        """
        found = available()
        if not found:
            raise ConfigError(f"GPU-direct I/O cannot be used: {found.reason}")
        kvikio = importlib.import_module("kvikio")
        self._cufile = CuFileSyscalls(kvikio)
        super().__init__(threads, piece_bytes, syscalls=self._cufile)
        _ensure_threads(kvikio, self.spec.workers)

    @property
    def spec(self) -> EngineSpec:
        """What this engine is."""
        return replace(super().spec, name="gds", gpu_direct=True)

    def close(self) -> None:
        """As :meth:`ThreadEngine.close`; the handles of cuFile go too."""
        super().close()
        self._cufile.close()


class CuFileSyscalls(Syscalls):
    """Moves pieces by cuFile."""

    def __init__(self, kvikio: ModuleType) -> None:
        """Use a loaded ``kvikio`` module."""
        self._kvikio = kvikio
        self._lock = Lock()
        self._handles: MutableMapping[File, _CuFile] = weakref.WeakKeyDictionary()

    def read(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        """Read up to ``nbytes`` to device or host memory; 0 at the end of the file."""
        return self._call(self._handle(file).pread, address, nbytes, offset_bytes)

    def write(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        """Write up to ``nbytes`` from device or host memory."""
        return self._call(self._handle(file).pwrite, address, nbytes, offset_bytes)

    def close(self) -> None:
        """Close every handle. Idempotent."""
        with self._lock:
            handles = list(self._handles.values())
            self._handles.clear()
        for handle in handles:
            handle.close()

    def _call(self, call: Callable[..., _Future], address: int, nbytes: int, offset: int) -> int:
        # One task each: pieces are cut already. `get` waits with the GIL released.
        try:
            return call(_Memory(address, nbytes), nbytes, offset, task_size=nbytes).get()
        except RuntimeError as error:  # how cuFile's and CUDA's own failures arrive
            raise OSError(errnos.EIO, f"cuFile: {error}") from error

    def _handle(self, file: File) -> _CuFile:
        with self._lock:
            handle = self._handles.get(file)
            if handle is None:
                # By way of /proc, since a spill file has no name of its own.
                mode = fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_ACCMODE
                flags = "r" if mode == os.O_RDONLY else "r+"
                handle = self._kvikio.CuFile(f"/proc/self/fd/{file.fd}", flags)
                self._handles[file] = handle
            return handle


class _Future(Protocol):
    def get(self) -> int: ...


class _CuFile(Protocol):
    """What is used of ``kvikio.CuFile``."""

    def pread(self, buf: _Memory, size: int, file_offset: int, *, task_size: int) -> _Future: ...

    def pwrite(self, buf: _Memory, size: int, file_offset: int, *, task_size: int) -> _Future: ...

    def close(self) -> None: ...


class _Memory:
    """An address as kvikio takes it; it asks the driver itself whose memory it is."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _probe(kvikio: ModuleType) -> Availability:
    version = getattr(kvikio, "__version__", "of unknown version")
    if _compatibility_mode(kvikio.defaults):
        return Availability(
            False,
            f"kvikio {version} is in compatibility mode (through host memory): it found no"
            " libcufile, or /run/udev is not readable, or KVIKIO_COMPAT_MODE is set",
        )
    if not _driver_loaded(kvikio):
        return Availability(
            False, f"kvikio {version} finds no GPUDirect Storage: is the nvidia-fs module loaded?"
        )
    return Availability(True, f"kvikio {version} with GPUDirect Storage")


def _compatibility_mode(defaults: ModuleType) -> bool:
    if hasattr(defaults, "is_compat_mode_preferred"):  # since 25.02
        return bool(defaults.is_compat_mode_preferred())
    mode = defaults.compat_mode()  # a bool, and an enum since 24.12
    return mode if isinstance(mode, bool) else mode.name == "ON"


def _driver_loaded(kvikio: ModuleType) -> bool:
    driver = kvikio.cufile_driver
    if hasattr(driver, "get"):  # since 25.04
        return bool(driver.get("is_gds_available"))
    return bool(driver.DriverProperties().is_gds_available)


def _ensure_threads(kvikio: ModuleType, workers: int) -> None:
    """Its pool has one thread by default, which would serialize ours."""
    defaults = kvikio.defaults
    if hasattr(defaults, "get"):
        if defaults.get("num_threads") < workers:
            defaults.set("num_threads", workers)
    elif defaults.get_num_threads() < workers:
        defaults.num_threads_reset(workers)
