"""The functions of libcufile in Python, over host memory, as ctypes would show them."""

import ctypes
import fcntl
import os

from penstock.core.locks import Lock
from penstock.io import cufile

NVME = 1 << 4
P2P = 1 << 4
COMPATIBLE = 1 << 1


class Function:
    """One function of a library: its types can be declared, as those of one that ctypes found."""

    restype = argtypes = None

    def __init__(self, call):
        self._call = call

    def __call__(self, *arguments):
        assert len(arguments) == len(self.argtypes), "declared otherwise than called"
        return self._call(*arguments)


class PythonLibrary:
    """In place of what ``ctypes.CDLL`` returns.

    Attributes:
        files: By handle, the descriptor that was registered and one of our own.
        opened, closed: How often the driver was opened, and which handles were given back.
        limit: The most bytes that one call moves.
        refusal: What every read and write returns instead; ``errno`` is ``errno``.
        mapping_bytes: A transfer that crosses from one range of so many bytes to the next fails; the
            first begins at ``mapping_origin``. 0: none does.
        after_read: Called with address and bytes of every read that was not refused.
        calls: Op, address and bytes of every transfer.
    """

    def __init__(self, *, module=(2, 20), status=NVME, control=0, features=0, error=0):
        self.files, self.opened, self.closed = {}, 0, []
        self.limit, self.refusal, self.errno, self.mapping_bytes = 1 << 40, None, 0, 0
        self.mapping_origin, self.after_read, self.calls = 0, None, []
        self._facts = (*module, status, control, features)
        self._error = error
        self._lock = Lock()
        self.cuFileDriverOpen = Function(self._open)
        self.cuFileDriverGetProperties = Function(self._properties)
        self.cuFileHandleRegister = Function(self._register)
        self.cuFileHandleDeregister = Function(self._deregister)
        self.cuFileRead = Function(self._read)
        self.cuFileWrite = Function(self._write)

    def close(self):
        for handle in list(self.files):
            self._deregister(handle)

    def moved_bytes(self, op):
        """By all transfers so far."""
        return sum(nbytes for each, _, nbytes in self.calls if each == op)

    def _open(self):
        self.opened += 1
        return cufile._Status(self._error)

    def _properties(self, reference):
        found = reference._obj
        found.major_version, found.minor_version = self._facts[:2]
        found.status_flags, found.control_flags, found.feature_flags = self._facts[2:]
        return cufile._Status()

    def _register(self, reference, description):
        what = description._obj
        assert what.type == 1, "not a descriptor of Linux"
        fd = what.target.fd
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_TMPFILE & ~os.O_DIRECTORY:
            return cufile._Status(5019)
        if not flags & os.O_DIRECT:
            return cufile._Status(5020)
        ours = os.open(f"/proc/self/fd/{fd}", flags & os.O_ACCMODE)
        with self._lock:
            handle = reference._obj.value = 1000 + len(self.files) + len(self.closed)
            self.files[handle] = fd, ours
        return cufile._Status()

    def _deregister(self, handle):
        fd, ours = self.files.pop(handle)
        os.fstat(fd)  # open until after this
        os.close(ours)
        self.closed.append(handle)

    def _read(self, handle, address, nbytes, offset, beyond):
        nbytes, failed = self._begin("read", address, nbytes, beyond)
        if failed is not None:
            return failed
        data = os.pread(self.files[handle][1], nbytes, offset)
        ctypes.memmove(address, data, len(data))
        if self.after_read is not None:
            self.after_read(address, len(data))
        return len(data)

    def _write(self, handle, address, nbytes, offset, beyond):
        nbytes, failed = self._begin("write", address, nbytes, beyond)
        if failed is not None:
            return failed
        return os.pwrite(self.files[handle][1], ctypes.string_at(address, nbytes), offset)

    def _begin(self, op, address, nbytes, beyond):
        assert beyond == 0, "an offset from memory that was never registered"
        self.calls.append((op, address, nbytes))
        if self.refusal is not None:
            ctypes.set_errno(self.errno)
            return 0, self.refusal
        if mapping := self.mapping_bytes:
            first = address - self.mapping_origin
            if first // mapping != (first + nbytes - 1) // mapping:
                return 0, -5014
        return min(nbytes, self.limit), None
