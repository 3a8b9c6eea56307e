"""Journal of durable steps: which records make up the last completed step, after any crash.

[Note: durable steps]
    Each record has two places. A step writes every tile that it visits to the place that the journal
    does not name, then waits for the device, then writes a new journal and waits again: only then is
    the step complete, and ``step`` returns. There are two journals, written in turn; each holds the
    whole truth about one step and a checksum of itself. So whenever the process is killed, the newer
    journal that is whole names records that were not touched since. Newer is the one of the higher
    serial number, which is not the step: a state dict of an earlier step may be loaded. A journal that
    could not be waited for is emptied: it may be whole all the same, and its step did not count. One
    that is read may have been written by a process that was killed before it had waited: whoever goes
    on after it waits first, for the places that the other one names are written to next.

    A journal is one line of JSON, UTF-8: ``{"checksum": ..., "body": ...}``, where the checksum is the
    XXH3 of the body's JSON. The body MUST have ``version`` 3, ``serial``, ``step``, ``layout`` (a
    digest of what lies where), ``tiles`` (number: slot of its record, its checksum's kind and value, or
    null, and its exact length if it is squeezed, or 0), ``params`` (for each, whether it
    has states, and its scalars) and ``norm`` (of the gradients, or null). Weights are in the records,
    as masters. Floats in squeezed records are as [Note: format exponent] in
    :mod:`penstock.codec.exponent` has them.

    A third file has the serial number and the step of the entry to come, in decimal, from when the step
    begins. Nobody waits for it, so it outlives a kill and not always a loss of power. If its serial is
    higher than those of the journals, that step is torn.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import xxhash
from torch import Tensor

from penstock.core.errors import ChecksumError, ConfigError, TransferError, transfer_error
from penstock.core.files import open_regular, parse_json
from penstock.core.fs import FileLock, sync_directory
from penstock.io.traffic_report import written
from penstock.observe.clients import OPTIMIZER
from penstock.optim.store import RecordPlace

_NAME: Final = "penstock-states"
_VERSION: Final = 3


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Contents of a journal."""

    step: int
    layout: str
    tiles: Mapping[int, RecordPlace]
    params: tuple[tuple[bool, Mapping[str, Any]], ...]
    norm: Tensor | None
    serial: int = 0
    """Order of the entries; set by ``Journal.write``."""


class Journal:
    """The two journal files of an optimizer, in its first directory, and the locks of all directories.

    Attributes:
        last: Entry of the newer whole file; None if there is none.
        before: Entry of the older one, which the next step replaces; None if there is none.
        torn: Number of the step that the process before had begun and not completed; None: none is known.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        """Lock the directories, and read what is there.

        Raises:
            ConfigError: Another process holds one, or one is the first of another optimizer.
            ChecksumError: Both journals are damaged, which no crash can do.
            TransferError: Something cannot be opened or read.
        """
        self._directory = directories[0]
        self._locks: list[FileLock] = []
        self._paths = _paths(self._directory)
        self._begun_path = os.path.join(self._directory, f"{_NAME}.begun")
        self._begun_file: int | None = None
        self._begun_serial = -1
        self.torn: int | None = None
        try:
            for directory in directories:
                self._lock(directory)
            for other in directories[1:]:
                if any(map(os.path.exists, _paths(other))):
                    raise ConfigError(
                        f"directory {other!r} has the journals of durable steps: name it first, as it"
                        " was then, or name another"
                    )
            found = [self._read(path) for path in self._paths]
            if not any(found) and all(
                os.path.exists(p) and os.path.getsize(p) for p in self._paths
            ):
                raise ChecksumError(
                    f"both journals of durable steps in {self._directory!r} are damaged, which no crash"
                    " does: the device may be faulty; remove them to begin anew"
                )
            serials = [-1 if entry is None else entry.serial for entry in found]
            self._next = 0 if serials[0] <= serials[1] else 1
            self.last, self.before = found[1 - self._next], found[self._next]
            self._serial = max(0, *serials)
            self.torn = self._torn_step()
            if self.last is not None:
                self._secure(self._paths[1 - self._next])
        except BaseException:
            self.close()
            raise

    def begin(self, step: int) -> None:
        """Note that a step begins, for who opens this after a kill. Raises TransferError."""
        if self._begun_serial == self._serial + 1:
            return
        data = f"{self._serial + 1:>20} {step:>20}\n".encode()
        try:
            if self._begun_file is None:
                self._begun_file = self._open(self._begun_path)
            os.pwrite(self._begun_file, data, 0)
        except OSError as error:
            raise _failed("write", self._begun_path, len(data), error) from error
        self._begun_serial = self._serial + 1

    def _torn_step(self) -> int | None:
        try:
            with open(self._begun_path, "rb", opener=open_regular) as file:
                serial, step = map(int, file.read().split())
        except (OSError, ValueError):
            return None
        return step if serial > self._serial else None

    def write(self, entry: JournalEntry) -> None:
        """Make a step complete. Returns when it is on the device.

        Raises:
            TransferError: It is not; the step before is the last completed one.
        """
        path = self._paths[self._next]
        entry = replace(entry, serial=self._serial + 1)
        data = _encode(entry)
        file = self._open(path)
        try:
            os.ftruncate(file, 0)
            with written(OPTIMIZER, len(data), path):
                if os.pwrite(file, data, 0) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file)
            sync_directory(self._directory)
        except OSError as error:
            with suppress(OSError):
                _empty(file)
            raise _failed("write", path, len(data), error) from error
        finally:
            os.close(file)
        self._next = 1 - self._next
        self._serial = entry.serial
        self.last, self.before = entry, self.last

    def clear(self) -> None:
        """Forget all steps. Returns when that is on the device. Raises TransferError."""
        for path in (self._paths[self._next], self._paths[1 - self._next]):  # the older one first
            self._clear(path)
        self.last = self.before = None
        # as without journals: if two first ones are torn, one after the other, they are the same file
        self._next = 0

    def go_back(self) -> None:
        """Forget the last step, as one that other ranks have not completed; the one before is the last.

        Its records are as they were, because a step writes to places that the last one does not name.
        Returns when that is on the device. Raises TransferError.
        """
        self._clear(self._paths[1 - self._next])
        self._next = 1 - self._next
        self.last, self.before = self.before, None

    def _clear(self, path: str) -> None:
        file = self._open(path)
        try:
            _empty(file)
        except OSError as error:
            raise _failed("write", path, 0, error) from error
        finally:
            os.close(file)

    def close(self) -> None:
        """Release the locks. Idempotent."""
        if self._begun_file is not None:
            os.close(self._begun_file)
            self._begun_file = None
        for lock in self._locks:
            lock.close()

    def _lock(self, directory: str) -> None:
        path = os.path.join(directory, f"{_NAME}.lock")
        fd = self._open(path)
        try:
            lock = FileLock(
                fd,
                f"directory {directory!r}, which holds an optimizer's durable states,",
                "close that optimizer, or name another directory",
            )
        except OSError as error:
            raise _failed("lock", path, 0, error) from error
        self._locks.append(lock)

    def _open(self, path: str) -> int:
        try:
            return open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _failed("open", path, 0, error) from error

    def _secure(self, path: str) -> None:
        """Wait for a journal that another process may not have waited for."""
        file = self._open(path)
        try:
            os.fsync(file)
            sync_directory(self._directory)
        except OSError as error:
            raise _failed("sync", path, 0, error) from error
        finally:
            os.close(file)

    def _read(self, path: str) -> JournalEntry | None:
        try:
            with open(path, "rb", opener=open_regular) as file:
                data = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed("read", path, 0, error) from error
        return _decode(data)


def _encode(entry: JournalEntry) -> bytes:
    body = json.dumps(
        {
            "version": _VERSION,
            "serial": entry.serial,
            "step": entry.step,
            "norm": _plain(entry.norm),
            "layout": entry.layout,
            "tiles": {
                str(index): [place.slot, place.checksum, place.squeezed_bytes]
                for index, place in entry.tiles.items()
            },
            "params": [
                [has_state, {name: _plain(value) for name, value in scalars.items()}]
                for has_state, scalars in entry.params
            ],
        }
    )
    checksum = xxhash.xxh3_64_intdigest(body.encode())
    return json.dumps({"checksum": checksum, "body": body}).encode()


def _decode(data: bytes) -> JournalEntry | None:
    """None: it is torn, or nothing was written."""
    try:
        document = parse_json(data)
        body = document["body"]
        if document["checksum"] != xxhash.xxh3_64_intdigest(body.encode()):
            return None
        content = parse_json(body)
        if content["version"] != _VERSION:
            raise ConfigError(
                f"a journal of durable steps is of version {content['version']!r}; this Penstock reads"
                f" {_VERSION}: finish that run with the version of Penstock that wrote it, or remove"
                " the journals to begin anew"
            )
        return JournalEntry(
            content["step"],
            content["layout"],
            {int(index): _place(*each) for index, each in content["tiles"].items()},
            tuple(
                (has_state, {name: _value(each) for name, each in scalars.items()})
                for has_state, scalars in content["params"]
            ),
            _value(content["norm"]),
            content["serial"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    return value


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
    return value


def _place(slot: int, checksum: Any, squeezed_bytes: int) -> RecordPlace:
    return RecordPlace(
        slot, None if checksum is None else (checksum[0], checksum[1]), squeezed_bytes
    )


def _paths(directory: str) -> list[str]:
    return [os.path.join(directory, f"{_NAME}-{i}.journal") for i in range(2)]


def _empty(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.fsync(descriptor)


def _failed(op: str, path: str, nbytes: int, error: OSError) -> TransferError:
    if isinstance(error, TransferError):
        return error
    code = error.errno or errno.EIO
    return transfer_error(errno=code, op=op, path=path, offset_bytes=0, nbytes=nbytes)
