"""Steps that survive the process: which records make up the last completed one.

[Note: durable steps]
    Each record has two places. A step writes every tile that it visits to the place that the journal
    does not name, then waits for the device, then writes a new journal and waits again: only then is
    the step complete, and ``step`` returns. There are two journals, written in turn; each holds the
    whole truth about one step and a checksum of itself. So whenever the process is killed, the newer
    journal that is whole names records that nobody has touched since.

    A journal is one line of JSON, UTF-8: ``{"checksum": ..., "body": ...}``, where the checksum is the
    XXH3 of the body's JSON. The body MUST have ``version`` 1, ``step``, ``layout`` (a digest of what
    lies where), ``tiles`` (number: slot and checksum of its record) and ``params`` (for each, whether
    it has states, and its scalars). Weights are in the records, as float32 masters.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import Tensor

from penstock.core.errors import ConfigError, TransferError, transfer_error
from penstock.io.files import DirectFile
from penstock.optim import packing
from penstock.optim.formats import MASTER
from penstock.optim.params import Param
from penstock.optim.states import FlashStates

_NAME: Final = "penstock-states"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """What a journal says."""

    step: int
    layout: str
    tiles: Mapping[int, tuple[int, int | None]]
    params: tuple[tuple[bool, Mapping[str, Any]], ...]


class Journal:
    """The two journals of a directory. Held by one process at a time.

    Attributes:
        last: What the newer whole one says; None if there is none.
    """

    def __init__(self, directory: str) -> None:
        """Open and lock it, and read what is there.

        Raises:
            ConfigError: Another process holds it.
            TransferError: It cannot be opened or read.
        """
        self._directory = directory
        path = os.path.join(directory, f"{_NAME}.lock")
        self._lock = DirectFile(self._open(path), path, 0)
        try:
            fcntl.flock(self._lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ConfigError(
                f"directory {directory!r} holds the durable states of an optimizer in another process,"
                " or of another one in this; close that, or name another directory"
            ) from error
        self._paths = [os.path.join(directory, f"{_NAME}-{i}.journal") for i in range(2)]
        found = [self._read(path) for path in self._paths]
        steps = [-1 if entry is None else entry.step for entry in found]
        self._next = 0 if steps[0] <= steps[1] else 1
        self.last = found[1 - self._next]

    def write(self, entry: Entry) -> None:
        """Make a step complete. Returns when it is on the device.

        Raises:
            TransferError: It is not; the step before is the last completed one.
        """
        path = self._paths[self._next]
        data = _encode(entry)
        file = self._open(path)
        try:
            os.ftruncate(file, 0)
            if os.pwrite(file, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
            _sync_directory(self._directory)
        except OSError as error:
            raise _failed("write", path, len(data), error) from error
        finally:
            os.close(file)
        self._next = 1 - self._next
        self.last = entry

    def close(self) -> None:
        """Let another process have it."""
        self._lock.close()

    def _open(self, path: str) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _failed("open", path, 0, error) from error

    def _read(self, path: str) -> Entry | None:
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed("read", path, 0, error) from error
        return _decode(data)


def layout_of(states: FlashStates) -> str:
    """A digest of what lies where."""
    facts = [
        [tile.group, tile.form.format, str(tile.form.param_dtype), tile.elements, tile.record_bytes]
        for tile in states.tiles
    ]
    shapes = [[list(p.tensor.shape), list(p.tensor.stride()), p.group] for p in states.params]
    names = [[array.name, array.packing] for tile in states.tiles[:1] for array in tile.arrays]
    everything = json.dumps([facts, shapes, names, len(states.config.directories)])
    return xxhash.xxh3_128_hexdigest(everything.encode())


def commit(states: FlashStates, journal: Journal) -> None:
    """Make the step that has just been made a durable one. Raises TransferError."""
    pipeline = states.pipeline
    pipeline.flush()
    states.store.sync()
    tiles = {
        index: (slot, states.store.sum_of(states.tiles[index], slot))
        for index, slot in pipeline.slots.items()
    }
    params = tuple((p.has_state, p.scalars) for p in states.params)
    journal.write(Entry(states.steps, layout_of(states), tiles, params))
    pipeline.commit()


def restore(states: FlashStates, entry: Entry) -> None:
    """Set weights and states to those of a step. Raises ConfigError if they are another model's."""
    if entry.layout != layout_of(states):
        raise ConfigError(
            f"the durable steps in {states.config.directories[0]!r} are of another model, other"
            " groups, another format or tile; make the optimizer as it was then, or name another"
            " directory"
        )
    for index, (slot, checksum) in entry.tiles.items():
        states.store.expect(states.tiles[index], slot, checksum)
    states.pipeline.restore({index: slot for index, (slot, _) in entry.tiles.items()})
    for param, (has_state, scalars) in zip(states.params, entry.params, strict=True):
        param.has_state = has_state
        param.scalars = dict(scalars)
    states.steps = entry.step
    _restore_weights(states)
    states.mend()


def _restore_weights(states: FlashStates) -> None:
    tiles = [tile for tile in states.tiles if states.pipeline.is_filled(tile)]
    states.begin_visits(tiles)
    for tile in tiles:
        masters = next(array for array in tile.arrays if array.name == MASTER)
        with states.visiting(tile, change=False) as buffer, torch.no_grad():
            for piece in tile.pieces:
                param: Param = states.params[piece.param]
                if param.has_state:
                    target = param.flat()[piece.start : piece.stop]
                    target.copy_(packing.plain(masters, buffer.memory, piece.at, target.numel()))


def _encode(entry: Entry) -> bytes:
    body = json.dumps(
        {
            "version": _VERSION,
            "step": entry.step,
            "layout": entry.layout,
            "tiles": {str(index): list(each) for index, each in entry.tiles.items()},
            "params": [
                [has_state, {name: _plain(value) for name, value in scalars.items()}]
                for has_state, scalars in entry.params
            ],
        }
    )
    checksum = xxhash.xxh3_64_intdigest(body.encode())
    return json.dumps({"checksum": checksum, "body": body}).encode()


def _decode(data: bytes) -> Entry | None:
    """None: it is torn, or nothing was written."""
    try:
        document = json.loads(data)
        body = document["body"]
        if document["checksum"] != xxhash.xxh3_64_intdigest(body.encode()):
            return None
        content = json.loads(body)
        if content["version"] != _VERSION:
            raise ConfigError(f"a journal of version {content['version']} is not known here")
        return Entry(
            content["step"],
            content["layout"],
            {int(index): (slot, checksum) for index, (slot, checksum) in content["tiles"].items()},
            tuple(
                (has_state, {name: _value(each) for name, each in scalars.items()})
                for has_state, scalars in content["params"]
            ),
        )
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
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


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(op: str, path: str, nbytes: int, error: OSError) -> TransferError:
    code = error.errno or errno.EIO
    return transfer_error(errno=code, op=op, path=path, offset_bytes=0, nbytes=nbytes)
