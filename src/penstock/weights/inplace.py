"""Weights whose home is the file that they came in, which is only read.

[Note: homes in files of the user's]
    Nobody writes to such a file. It is mapped privately: what a program writes through the mapping stays
    in memory, where it is read too. Direct reads would not see that, so a home that may have been
    changed is compared with its file first. If it differs, the weight gets a place of its own.

    Values begin anywhere in a file, and in memory at multiples of 4 KiB, as those of every home do:
    results of matrix products may depend on addresses. So the pages around them are read, and then they
    are moved to where the pages began. The last bytes of a file, which fill no page, are kept in memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from penstock.core.errors import ChecksumError, ConfigError, NoSpaceError, TransferError
from penstock.core.units import MIB, round_down, round_up
from penstock.io.engine import Transfer
from penstock.io.files import DirectFile, open_path
from penstock.io.mapping import PAGE_BYTES, map_files, memory_at
from penstock.observe.clients import WEIGHTS, ClientRecorder
from penstock.store.base import Place, Ticket, Tier, TierSpec, Window
from penstock.store.blob import UNIT_BYTES
from penstock.store.engine import shared_engine
from penstock.weights.homes import Home, show
from penstock.weights.safetensors import StoredTensor, WeightFile

_PAGE_BYTES: Final = max(PAGE_BYTES, UNIT_BYTES)
LEAST_BYTES: Final = 2 * _PAGE_BYTES
"""Length of the shortest weight that rests in place: some of it is in whole pages of the file."""
_COMPARED_BYTES: Final = 32 * MIB


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A range of a file, which begins anywhere.

    Attributes:
        file: The file, open for reading.
        mtime_ns, size_bytes: Its time of change and its length when it was opened.
        begin: Offset of the first byte.
        nbytes: Length of the range.
        tail: Its last bytes, if they are in the last page of the file and that is not whole.
    """

    file: DirectFile
    mtime_ns: int
    size_bytes: int
    begin: int
    nbytes: int
    tail: bytes

    @property
    def start(self) -> int:
        """Offset of the page in which the range begins."""
        return round_down(self.begin, _PAGE_BYTES)

    @property
    def skew(self) -> int:
        """Distance of the range from there."""
        return self.begin - self.start

    @property
    def window_bytes(self) -> int:
        """Length of the pages around the range."""
        return round_up(self.skew + self.nbytes, _PAGE_BYTES)

    def ranges(self, nbytes: int) -> Iterator[tuple[DirectFile, int, int]]:
        """Yield the part of the first ``nbytes`` of the pages that direct reads can have."""
        end = round_down(self.size_bytes, UNIT_BYTES)
        yield self.file, self.start, min(nbytes, end - self.start)

    def change(self, label: str) -> ChecksumError | None:
        """Return an error if the file is not what it was when it was opened."""
        found = os.fstat(self.file.fd)
        if (found.st_mtime_ns, found.st_size) == (self.mtime_ns, self.size_bytes):
            return None
        return ChecksumError(
            f"{label} rests in {self.file.path!r}, at offset {self.begin}, and that file was changed"
            f" since its weights were loaded in place: it had {self.size_bytes} bytes and has"
            f" {found.st_size}, and its time of change is another one. Load the weights again; leave such"
            " files as they are"
        )

    def __str__(self) -> str:
        return f"offset {self.begin} of {self.file.path!r}"


class SourceFile:
    """A safetensors file in which weights rest. It is open as long as any of them does."""

    def __init__(self, source: WeightFile) -> None:
        """Open it.

        Raises:
            TransferError: It cannot be opened.
            ChecksumError: It is not the file any more whose header was read.
        """
        self._file = open_path(source.path, "r")
        found = os.fstat(self._file.fd)
        self._mtime_ns, self._size_bytes = found.st_mtime_ns, source.size_bytes
        self.tier = SourceTier(source.path)
        if found.st_size != source.size_bytes:
            raise ChecksumError(f"{source.path!r} was changed while it was loaded: load it again")

    def place(self, tensor: StoredTensor) -> SourcePlace:
        """Return the place of a tensor of ``LEAST_BYTES`` or more."""
        start, end = round_down(tensor.begin, _PAGE_BYTES), tensor.begin + tensor.nbytes
        whole = round_down(self._size_bytes, UNIT_BYTES)
        tail = b""
        if end > whole:
            tail = map_files([(self._file, start, end - start)], private=True)[
                whole - start :
            ].tobytes()
        return SourcePlace(
            self._file, self._mtime_ns, self._size_bytes, tensor.begin, tensor.nbytes, tail
        )


class SourceTier(Tier):
    """Reads weights of one file at their places there."""

    def __init__(self, path: str) -> None:
        """Make a tier for the file at ``path``."""
        folder = os.path.dirname(os.path.abspath(path))
        spec = TierSpec(
            name=WEIGHTS,
            kind="flash",
            capacity_bytes=0,
            granule_bytes=UNIT_BYTES,
            where=folder,
            remedy=", and load a copy of the file from another one",
        )
        super().__init__(spec, engine=shared_engine(), recorder=ClientRecorder(folder))

    def adopt(self, place: Place, nbytes: int, *, label: str, checksum: object) -> Ticket:
        """Claim a place; safetensors have no checksums."""
        ticket = super().adopt(place, place.window_bytes, label=label, checksum=None)
        ticket.window = Window(0, place.window_bytes, 0)  # the bytes are moved there once read
        ticket.nbytes = nbytes
        return ticket

    def _mismatch(self, ticket: Ticket, address: int) -> ChecksumError | None:
        """Move what was read to the beginning of its window, and look whether the file is the same."""
        place = ticket.place
        read = place.nbytes - len(place.tail)
        if place.skew:
            ctypes.memmove(address, address + place.skew, read)
        ctypes.memmove(address + read, place.tail, len(place.tail))
        error: ChecksumError | None = place.change(ticket.label)
        return error

    def _allocate(self, nbytes: int) -> Place:
        raise AssertionError(f"{nbytes} bytes were written to a file that is only read")

    def _discard(self, place: Place) -> None:
        return  # it is the user's

    def _close(self) -> None:
        return  # places hold the file


class SourceHome(Home):
    """Home of a weight in a file of the user's; see [Note: homes in files of the user's]."""

    __slots__ = ("_may_differ",)

    def __init__(
        self, name: str, parameter: Parameter, source: SourceFile, tensor: StoredTensor
    ) -> None:
        """Map the place of a tensor for a contiguous parameter of its type and shape."""
        self._may_differ = False
        super().__init__(name, parameter, source.tier, source.place(tensor))

    @property
    def is_in_place(self) -> bool:
        """True if the weight has no place of its own yet."""
        return self.tier is not self.room

    @property
    def is_direct(self) -> bool:
        """See ``Home``."""
        return not self.is_in_place and super().is_direct

    def _map_values(self, like: Tensor) -> NDArray[np.uint8]:
        if not self.is_in_place:
            return super()._map_values(like)
        return _mapped(self.place)

    def check(self) -> None:
        """Raise ChecksumError if the file was changed."""
        error = self.place.change(self.name) if self.is_in_place else None
        if error is not None:
            raise error

    def read_failure(self, error: BaseException) -> BaseException:
        """See ``Home``; a ChecksumError if the file was changed, as one that was cut short."""
        changed: ChecksumError | None = self.place.change(self.name) if self.is_in_place else None
        if changed is None:
            return super().read_failure(error)
        changed.__cause__ = error.with_traceback(None)
        return changed

    def begin_touch(self) -> None:
        """See :class:`.resting.RestingHome`; raises ChecksumError if the file was changed."""
        self.check()
        super().begin_touch()

    def end_touch(self, *, changed: bool) -> None:
        """See :class:`.resting.RestingHome`."""
        super().end_touch(changed=changed)
        if self.keeper is None:
            self.settle()

    def replaced(self, data: Tensor) -> None:
        """See :class:`.resting.RestingHome`."""
        super().replaced(data)
        if self.keeper is None:
            self.settle()

    def verify_again(self, address: int) -> None:
        """See ``Home``; the file is the user's, and what it is to have is not known."""
        if not self.is_in_place:
            super().verify_again(address)

    def forget(self) -> None:
        """See ``Home``."""
        super().forget()
        self._may_differ = True

    def settle(self, *, though_shared: bool = False) -> None:
        """Give the weight a place of its own, or memory, if it was changed.

        Args:
            though_shared: Do so even if others share the mapping, which then do not see what comes.

        Raises:
            NoSpaceError: There is no room for a place.
        """
        if not (self._may_differ and self.is_in_place and self.is_at_rest):
            return
        if self.is_lent and not though_shared:
            return
        if self._differs(self._mapping[: self.nbytes]):
            values = self.resting.clone()
            if self.room is None:
                parameter = self.parameter
                self.leave()
                if parameter is not None:
                    show(parameter, values, Parameter)
            else:
                self.map_at(self.reserve(self.nbytes), values)
                self.resting.copy_(values)
                self.rest()
        self._may_differ = False

    def written_from(self, address: int, keep_alive: object) -> Transfer:
        """See ``Home``; a weight that is as in its file is not written."""
        if self.is_in_place:
            transfer = Transfer(self.nbytes)
            if not self._differs(memory_at(address, self.nbytes)):
                transfer.settle()
                return transfer
            if self.room is None:
                transfer.settle(
                    ConfigError(
                        f"weight {self.name} was changed, and no directory was named for it"
                    )
                )
                return transfer
            try:
                place = self.reserve(self.nbytes)
            except (NoSpaceError, TransferError) as error:
                transfer.settle(error)
                return transfer
            self.map_at(place, self.resting)
        return super().written_from(address, keep_alive)

    def _differs(self, values: NDArray[np.uint8]) -> bool:
        """Return whether values differ from the file's."""
        stored = _mapped(self.place)
        return any(
            not np.array_equal(
                stored[at : min(at + _COMPARED_BYTES, self.nbytes)],
                values[at : at + _COMPARED_BYTES],
            )
            for at in range(0, self.nbytes, _COMPARED_BYTES)
        )


def _mapped(place: SourcePlace) -> NDArray[np.uint8]:
    parts = [(place.file, place.start, place.window_bytes)]
    return map_files(parts, private=True)[place.skew :]
