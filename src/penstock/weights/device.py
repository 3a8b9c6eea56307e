"""Weights of models on a device: at rest elsewhere, brought to device memory through pinned memory.

[Note: weights on a device]
    The home is a place in a file, as for the CPU, or in host memory (:mod:`.host_places`); but
    kernels cannot work with a mapping of it. At rest the parameter is one NaN on the device, with
    strides of 0 (:mod:`.resting`). The mover of the session brings it, as it brings saved tensors
    back: through pinned memory, on streams of its own, and each stream that works with it waits for
    the copy (``use``). The memory belongs to torch's allocator, which learns of these streams, so it
    is not given to others before their kernels are done.

    What was changed is written home through pinned memory, too. The copy comes after all streams that
    have worked with the weight, and the weight stays in device memory until the write has ended: so one
    that fails leaves it where it is. Whoever is about to change a weight that is on its way home waits
    until it is there. A weight whose address was given away stays in device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from penstock.core.errors import ClosedError, ConfigError, PenstockError
from penstock.core.units import round_up
from penstock.homed import local_of, settle, use_count
from penstock.io.engine import Priority, Transfer
from penstock.io.mapping import advise_random
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.cuda.pinned import PinnedBlock
from penstock.runtime.cuda.tickets import CudaTarget, CudaTicket
from penstock.store.account import Account
from penstock.store.base import Tier
from penstock.store.blob import UNIT_BYTES
from penstock.store.host import MemoryPlace
from penstock.weights.brought import BroughtMemory
from penstock.weights.dispatched import is_dispatched
from penstock.weights.fsdp import Gathered
from penstock.weights.homes import Home, WeightPlaces, is_dense, view_like
from penstock.weights.model import rest_weights
from penstock.weights.resting import RestingPart
from penstock.weights.state_dict import detached

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Types that rest: those of which NaN can be shown at rest."""


class DeviceHome(Home):
    """Home of a parameter on a device. See [Note: weights on a device]."""

    is_mapped: ClassVar[bool] = False
    __slots__ = ("_layout",)

    def _map(self, like: Tensor) -> None:
        with torch.inference_mode(False), torch._C.DisableTorchFunction():
            nan = torch.full((1,), torch.nan, dtype=like.dtype, device=self._where(like))
            self.resting = nan.as_strided(like.size(), (0,) * like.dim())
            self._layout = torch.empty_strided(
                like.size(), like.stride(), dtype=like.dtype, device="meta"
            )
        self._storage = self.resting.untyped_storage()
        self._free_uses = use_count(self._storage)

    def _where(self, like: Tensor) -> torch.device:
        """Return the device on which a parameter is that is now like a tensor."""
        return like.device

    def rest(self) -> None:
        """See :class:`Home`; the local tensor of a DTensor still always tells of its strides."""
        parameter = self.parameter
        if parameter is not None and self.is_part and not self.is_gathered:
            local = local_of(parameter)
            settle(local, self)
            local.__class__ = RestingPart
        super().rest()

    @property
    def layout(self) -> Tensor:
        """See :class:`Home`: on the meta device."""
        return self._layout

    @property
    def is_lent(self) -> bool:
        """False: at rest there are no values that others could see."""
        return False

    @property
    def is_direct(self) -> bool:
        """False: its place is read and written by the session alone."""
        return False

    @property
    def values(self) -> Tensor:
        """See :class:`Home`: those in a file are mapped anew, for single rows."""
        place = self.place
        if isinstance(place, MemoryPlace):
            mapping = place.memory
        else:
            mapping = self._map_values(self._layout)
            advise_random(mapping)
        return view_like(torch.from_numpy(mapping[: self.nbytes]).untyped_storage(), self._layout)

    def keep(self, tier: Tier, place: MemoryPlace) -> None:
        """Rest in host memory from now on, to where the values are read.

        Args:
            tier: Of the place.
            place: As long as the window of the ticket.

        Raises:
            TransferError, ChecksumError: They cannot be read, and rest where they are.
        """
        try:
            self.tier.read(self.ticket, place.address, keep_alive=place.memory).wait()
        except PenstockError as error:
            raise self.read_failure(error) from None
        self._give_up_claim()
        self.tier, self.place = tier, place
        nbytes = round_up(self.nbytes, UNIT_BYTES)
        self.ticket = tier.adopt(place, nbytes, label=self.name, checksum=None)

    def _give_up_claim(self) -> None:
        self.tier.discard(self.ticket)

    def hold(self) -> None:
        """See :class:`penstock.homed.HomedWeight`; raises ClosedError without a session."""
        self._check_open()
        super().hold()

    def begin_touch(self) -> None:
        """See :class:`.resting.RestingHome`; raises ClosedError without a session."""
        self._check_open()
        super().begin_touch()

    def has_few_rows(self, count: int) -> bool:
        """See :class:`Home`; False for a part: rows of a DTensor are not looked up by its class."""
        return not self.is_part and super().has_few_rows(count)

    def detached(self) -> Tensor | None:
        """See :class:`.resting.RestingHome`; raises ClosedError without a session.

        None for a part: torch's functions for state dicts want a DTensor, which shares the memory.
        """
        self._check_open()
        return None if self.is_part else detached(self)

    def replaced(self, data: Tensor) -> None:
        """See :class:`.resting.RestingHome`; raises ClosedError without a session."""
        self._check_open()
        super().replaced(data)

    def _check_open(self) -> None:
        if self.keeper is None:
            raise ClosedError(
                f"weight {self.name} rests {'in host memory' if self.is_in_memory else 'on flash'}, and"
                f" the session that brings it to {self.resting.device} is closed; it could not be brought"
                " there when that was closed: free device memory, and open another session with"
                f" weights={'host' if self.is_in_memory else 'flash'!r}"
            )


class GatheredDeviceHome(Gathered, DeviceHome):
    """Home of this rank's part, on a device, of a weight of FSDP2."""

    __slots__ = ("_shard",)

    def sent(self) -> Tensor:
        """See :class:`.fsdp.Gathered`; raises ClosedError without a session."""
        self._check_open()
        return super().sent()


class DeviceMemory(BroughtMemory):
    """Memory of one device, through the mover of the session."""

    def __init__(self, mover: CudaMover, account: Account, device: torch.device) -> None:
        """Take nothing yet.

        Args:
            mover: Of the session, which stages in pinned memory.
            account: Charged for what is brought.
            device: The device, with its index.
        """
        self._mover = mover
        self._account = account
        self._device = device

    def begin(
        self, home: Home, priority: Priority, *, force: bool
    ) -> tuple[CudaTarget, Transfer] | None:
        """Read the place of a home to device memory; raises ``torch.OutOfMemoryError`` with ``force``."""
        written = Transfer(home.nbytes)
        written.settle()
        ticket = CudaTicket(home.name, home.nbytes, self._device, home.tier, written)
        ticket.buffer = self._pinned(home)
        if ticket.buffer is None:
            ticket.on_flash = home.ticket
        target: CudaTarget | None = self._mover.allocate(ticket, budget=self._account)
        if target is None and force:
            target = self._mover.allocate(ticket, force=True, budget=self._account)
        if target is None:
            return None
        return target, self._mover.read(home.tier, ticket, target, priority)

    def finish(self, memory: CudaTarget, home: Home) -> torch.UntypedStorage:
        """Return the target as a storage, whose copy may be under way."""
        return self._mover.finish(memory)

    def drop(self, memory: CudaTarget) -> None:
        """Give up the target."""
        self._mover.drop(memory)

    def use(self, storage: torch.UntypedStorage) -> None:
        """Let the current stream wait for the copy."""
        self._mover.use(storage)

    def settle(self, storage: torch.UntypedStorage) -> None:
        """Wait for the copy."""
        self._mover.settle(storage)

    def write(self, home: Home, storage: torch.UntypedStorage) -> Transfer:
        """Copy to pinned memory, after all that has worked with the storage, and write from there."""
        pinned = self._pinned(home)
        with torch.cuda.device(self._device):
            if pinned is not None:
                home.filled(None)
                return self._mover.overwrite(storage, home.name, home.tier, pinned)
            return self._mover.write_through(storage, home.name, home.written_from)

    def _pinned(self, home: Home) -> PinnedBlock | None:
        """Return the pinned memory of this session in which a weight rests; None: it rests elsewhere."""
        place = home.place
        pinned: PinnedBlock | None = place.pinned if isinstance(place, MemoryPlace) else None
        return pinned if pinned is not None and self._mover.is_pinned(pinned) else None

    @property
    def excess_bytes(self) -> int:
        """Bytes beyond the account's limit, as when somebody has held many weights."""
        return max(0, -self._account.free_bytes)

    def wait_for_room(self, nbytes: int) -> bool:
        """Wait for a copy whose target was given up, or have saved tensors leave."""
        if self._mover.trim(0) > 0:
            return True
        account = self._account
        return account.missing_elsewhere(nbytes) > 0 and account.make_room(nbytes)

    def wait(self) -> None:
        """Wait for all streams, of which each may work with weights."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Wait until all streams may use what was left in device memory."""
        self.wait()


def resting_on(
    device: torch.device,
    places: WeightPlaces,
    floor_bytes: int,
    keep: Callable[[Sequence[Home]], None],
) -> Callable[[Module, Callable[[list[tuple[int, str]]], None]], list[Home]]:
    """Return what lets the weights of models on a device rest, for the streamer.

    Those of at least ``floor_bytes`` rest that are contiguous real floats and have a storage of their
    own. It raises ConfigError if a large one is on another device.

    Args:
        device: The session's, with its index.
        places: Where the homes are made.
        floor_bytes: Least size of a weight that rests.
        keep: Called with the homes; lets those rest in host memory that have rested elsewhere before.
    """

    def rest(model: Module, check: Callable[[list[tuple[int, str]]], None]) -> list[Home]:
        _check_devices(model, device, floor_bytes)
        homes = rest_weights(
            model,
            check,
            places=places,
            floor_bytes=floor_bytes,
            kind=DeviceHome,
            gathered_kind=GatheredDeviceHome,
            is_able=can_rest,
        )
        keep(homes)
        return homes

    return rest


def _check_devices(model: Module, device: torch.device, floor_bytes: int) -> None:
    if is_dispatched(model):
        raise ConfigError(
            "accelerate has offloaded weights of this model: open the session by"
            f" penstock.offload(model, ..., device={str(device)!r}), which works with all of it there,"
            " and lets those weights rest on the host afterwards"
        )
    for name, parameter in model.named_parameters():
        if parameter.nbytes >= floor_bytes and parameter.device != device:
            raise ConfigError(
                f"weights that rest elsewhere need a model on one device, here {device}, and parameter"
                f" {name} is on {parameter.device}"
            )


def can_rest(parameter: Parameter) -> bool:
    """Return whether a parameter can rest on a device as one NaN."""
    values = local_of(parameter)
    return values.dtype in DTYPES and values.is_contiguous() and is_dense(values)
