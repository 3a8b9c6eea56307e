"""Weights of models on a device that rest in host memory, and are brought from there.

[Note: weights in host memory]
    The home of a weight is then a place in the pinned part of ``host_memory``, from which the device
    copies it without another copy on the host. Weights come before saved tensors there: a byte of them is
    moved at least as often in a step. If not all fit that may rest in files instead, those that fit are
    spread over the order of the model, as those that stay on the device are, so that flash and host
    memory work at once.

    A model on the host has memory already. What fits in pinned memory moves there, and back when the
    session is closed; the rest stays where it is, and is staged as what comes from files is.
"""

from __future__ import annotations

import errno
from collections.abc import MutableMapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from penstock.core.errors import NoSpaceError
from penstock.core.units import format_bytes, round_up
from penstock.homed import local_of, use_count
from penstock.plan.weights import share_of
from penstock.runtime.cuda.mover import CudaMover
from penstock.store.base import Tier
from penstock.store.blob import UNIT_BYTES, ReservedTier
from penstock.store.host import MemoryPlace, MemoryTier
from penstock.weights.device import DeviceHome, can_rest
from penstock.weights.homes import Home, HomeMaker, WeightFiles, copy_out, flat_bytes, view_like

HOST_WEIGHTS: Final = "weights in host memory"
"""Name of their tier."""


class OwnMemoryHome(Home):
    """Home of a parameter on the host that is its own memory, for a session that works elsewhere.

    Attributes:
        pinned: Where its values are to rest; None: they stay in its own memory.
    """

    __slots__ = ("pinned",)

    def __init__(
        self, name: str, parameter: Parameter, tier: Tier, pinned: MemoryPlace | None
    ) -> None:
        """Leave the values where they are."""
        self.pinned = pinned
        super().__init__(name, parameter, tier, MemoryPlace(flat_bytes(parameter)))

    def _map(self, like: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            storage = Tensor.untyped_storage(like)
        self._take(view_like(storage, like))

    def _take(self, values: Tensor) -> None:
        self.is_addressed = False
        self.resting, self._mapping = values, flat_bytes(values)
        self._address = self._mapping.ctypes.data
        self._storage = values.untyped_storage()
        self._free_uses = use_count(self._storage)

    @property
    def is_direct(self) -> bool:
        """False: it is worked with by the session alone."""
        return False

    def random(self) -> None:
        """Do nothing: memory is not read ahead."""

    def drop(self) -> None:
        """Free the memory, whose values rest elsewhere until ``refill``."""
        with torch.inference_mode(False):
            self._take(self.resting.new_empty(0))
        self.place = self.ticket.place = MemoryPlace(self._mapping)

    def refill(self, values: Tensor) -> None:
        """Have memory again, with these values."""
        with torch.inference_mode(False):
            self._take(values.clone())

    def rest(self) -> None:
        """Let the parameter be an ordinary one, with this memory."""
        super().rest()
        self.leave()


class HostPlaces:
    """Homes of weights in pinned host memory, and in files if they may.

    Not thread-safe.

    Attributes:
        files: Where those rest for which there is no room; None: it is an error if there is none.
        left: Names of parameters that stay in memory, as the user was told.
        tier: Reads and writes what is in host memory.
    """

    def __init__(self, mover: CudaMover, files: WeightFiles | None) -> None:
        """Take nothing yet.

        Args:
            mover: Has the memory.
            files: See the attribute.
        """
        self._mover = mover
        self.files = files
        self.tier = MemoryTier(HOST_WEIGHTS)
        self.left: MutableMapping[Parameter, str] = (
            WeakIdKeyDictionary() if files is None else files.left
        )

    @property
    def room(self) -> ReservedTier | None:
        """Tier of another place in a file, if a weight needs one; None: there is none."""
        return None if self.files is None else self.files.room

    def check_room(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        """See :class:`.homes.WeightPlaces`."""
        if self.files is not None:
            self.files.check_room(parameters)
            return
        sizes = [(name, each.nbytes) for name, each in parameters if can_rest(each)]
        if sum(round_up(nbytes, UNIT_BYTES) for _, nbytes in sizes) > self._mover.free_pinned_bytes:
            raise self._no_space(sizes)

    def move_in(
        self, parameters: Sequence[tuple[str, Parameter]], kind: HomeMaker | None = None
    ) -> list[Home]:
        """Move weights from device memory to new homes, where they rest; the memory is freed one by one.

        Those on the host stay where they are: see :class:`OwnMemoryHome`.

        Args:
            parameters: Name and parameter of each; dense, with a storage of its own.
            kind: Makes the homes of those on a device, or in files.

        Raises:
            NoSpaceError: There is no room for all of them; nothing was moved.
            TransferError: One could not be written; it and those after it are still in memory.
        """
        sizes = [(name, local_of(parameter).nbytes) for name, parameter in parameters]
        places = self._places([nbytes for _, nbytes in sizes])
        missing = [
            each
            for each, place in zip(parameters, places, strict=True)
            if place is None and (self.files is not None or each[1].device.type != "cpu")
        ]
        if missing and self.files is None:
            places.clear()
            raise self._no_space(sizes)
        made: dict[str, Home] = {}
        try:
            if self.files is not None:
                made = {home.name: home for home in self.files.move_in(missing, kind)}
            for (name, parameter), place in zip(parameters, places, strict=True):
                if parameter.device.type == "cpu" and name not in made:
                    made[name] = OwnMemoryHome(name, parameter, self.tier, place)
                elif place is not None:
                    local = local_of(parameter)
                    copy_out(local, place.memory[: local.nbytes])
                    made[name] = (kind or Home)(name, parameter, self.tier, place)
                    made[name].rest()
        except BaseException:
            for home in made.values():
                if not home.is_at_rest or isinstance(home, OwnMemoryHome):
                    home.leave()
            raise
        return [made[name] for name, _ in parameters]

    def _places(self, lengths: Sequence[int]) -> list[MemoryPlace | None]:
        """Return pinned memory for as many weights as fit, spread over all."""
        sizes = [(number, round_up(nbytes, UNIT_BYTES)) for number, nbytes in enumerate(lengths)]
        total = sum(nbytes for _, nbytes in sizes)
        chosen = share_of(sizes, self._mover.free_pinned_bytes / max(1, total))
        return [
            self._mover.lend_pinned(nbytes) if number in chosen else None
            for number, nbytes in sizes
        ]

    def keep(self, homes: Sequence[Home]) -> None:
        """Let weights that have homes already rest in pinned memory, as many as fit.

        Args:
            homes: Homes; those on a device are moved that do not rest there, and that nobody streams.

        Raises:
            NoSpaceError: There is no room for all of them, and they are to rest in no file.
            TransferError, ChecksumError: One cannot be read; it and those after it rest where they were.
        """
        able = [
            home
            for home in homes
            if isinstance(home, DeviceHome) and home.keeper is None and not self._has(home)
        ]
        places = self._places([home.ticket.window.nbytes for home in able])
        if self.files is None and None in places:
            places.clear()
            raise self._no_space([(home.name, home.nbytes) for home in able])
        for home, place in zip(able, places, strict=True):
            if place is not None:
                home.keep(self.tier, place)

    def _has(self, home: Home) -> bool:
        place = home.place
        pinned = place.pinned if isinstance(place, MemoryPlace) else None
        return pinned is not None and self._mover.is_pinned(pinned)

    def _no_space(self, weights: Sequence[tuple[str, int]]) -> NoSpaceError:
        needed = sum(round_up(nbytes, UNIT_BYTES) for _, nbytes in weights)
        free = self._mover.free_pinned_bytes
        missing = max(needed - free, UNIT_BYTES)  # what is free may be in pieces
        return NoSpaceError(
            errno=errno.ENOSPC,
            op="allocate",
            path="host memory",
            offset_bytes=0,
            nbytes=needed,
            free_bytes=free,
            advice=f"{format_bytes(needed)} ({needed} bytes) of weights, from {weights[0][0]} on, are to"
            f" rest in the host tier, which has {format_bytes(free)} ({free} bytes) left: raise"
            f" host_memory by at least {missing} bytes, or name a directory and set"
            " weights='flash', with which those that fit rest there",
        )
