"""Homes of weights: places in files, mapped to memory, where each weight always can be read.

[Note: homes]
    A weight's home is one place of a :class:`penstock.store.blob.ReservedTier`: it is read and written
    with direct transfers and checked as every tier's bytes are. The same range of the file is mapped, so
    that the parameter has an address at rest. Who writes through the mapping (an initialiser, an
    optimizer that knows nothing of homes) changes bytes that the tier has a checksum of: the home forgets
    it, and has another one when it is next written, or read while nobody refers to the mapping. Homes in
    files of the user's: :mod:`.inplace`.

    Of a parameter that is spread over ranks, a DTensor, the home has what this process has of it.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from penstock.core import knobs
from penstock.core.errors import NoSpaceError, PenstockWarning
from penstock.core.fs import check_space
from penstock.core.units import format_bytes, round_up
from penstock.homed import UpdateMemory, home_of, is_sharded, local_of, move_out, settle, use_count
from penstock.io.engine import Priority, Transfer
from penstock.io.files import DirectFile
from penstock.io.mapping import advise_random, map_files, memory_at
from penstock.observe.clients import WEIGHTS, ClientRecorder
from penstock.staging import copy_across, ready_event
from penstock.store.arena import Arena
from penstock.store.base import Place, Ticket, Tier
from penstock.store.blob import UNIT_BYTES, ReservedPlace, ReservedTier, StrPath, part_bytes
from penstock.store.checksums import Sum, sum_of
from penstock.store.engine import shared_engine
from penstock.store.pool import Block
from penstock.store.window import TransferWindow
from penstock.weights.failures import AGAIN, named_failure
from penstock.weights.resting import KINDS, Kinds, RestingPart

SLAB_BYTES = 1 << 30
"""Length of the files that homes are cut from while a model is built, whose size is not known."""
ROWS_SHARE: Final = 8
"""An embedding's rows are read at home, if they are less than this part of it."""
_REMEDY = ", and load the weights again"
_left: Final[weakref.WeakSet[Tier]] = weakref.WeakSet()
"""Tiers of which a weight has left its home for other memory, as the user was told."""


class Keeper(Protocol):
    """Whoever brings a weight to memory: the streamer of a session."""

    @property
    def memory_bytes(self) -> int | None:
        """See :class:`penstock.homed.HomedWeight`."""

    @property
    def update_memory(self) -> UpdateMemory | None:
        """See :class:`penstock.homed.HomedWeight`."""

    def streamed_bytes(self, home: Home) -> int | None:
        """See :class:`penstock.homed.HomedWeight`."""

    def hold(self, home: Home) -> None:
        """See :class:`penstock.homed.HomedWeight`."""

    def let_go(self, home: Home, *, changed: bool) -> None:
        """See :class:`penstock.homed.HomedWeight`."""

    def begin_touch(self, home: Home) -> None:
        """See :class:`.resting.RestingHome`."""

    def end_touch(self, home: Home, *, changed: bool) -> None:
        """See :class:`.resting.RestingHome`."""

    def lent(self, home: Home) -> None:
        """See :class:`.resting.RestingHome`."""

    def addressed(self, home: Home) -> None:
        """See :class:`.resting.RestingHome`."""

    def replaced(self, home: Home, data: Tensor) -> None:
        """See :class:`.resting.RestingHome`."""

    def is_as_home(self, home: Home) -> bool:
        """Return whether the place has the present values; waits for a write that is under way."""

    def embedded(
        self, home: Home, indices: Tensor, embed: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """See :class:`.resting.RestingHome`."""


def _kinds_of(parameter: Tensor) -> Kinds:
    """Return the classes that a parameter has in turn."""
    if not is_sharded(parameter):
        return KINDS
    from penstock.weights import shards  # noqa: PLC0415  (torch has DTensors then)

    return shards.KINDS


class Home:
    """Home of one parameter. Its keeper guards all that changes.

    Attributes:
        name: Name of the parameter in messages.
        nbytes: Length of its values.
        ticket: Claim on what the place holds; its checksum is None if it is not known.
        resting: Mapping of the place, with the shape and the strides of the parameter.
        is_addressed: True if the program has asked for the address of the place, where it may write.
        generation: Number of times that other values have replaced all of these, as ``.data = x`` does.
        keeper: Brings the weight to memory; None while no session does.
        kinds: Classes of the parameter.
        touches: Operations on the weight at rest, other than by modules.
        tier: Reads and writes the place.
        room: Where other places are made, if the weight needs one; None: not known.
    """

    is_mapped: ClassVar[bool] = True
    """True if the parameter can be worked with at home; else only where its keeper brings it."""
    is_gathered: ClassVar[bool] = False
    """True if modules do not use the values: they are read to be sent to other ranks (:mod:`.fsdp`)."""
    returns: ClassVar[bool] = False
    """True if the parameter rests elsewhere when the session is over, where ``give_back`` lets it."""

    __slots__ = (
        *(
            "__weakref__",
            "_address",
            "_free_uses",
            "_mapping",
            "_param",
            "_storage",
            "_version",
            "generation",
            "is_addressed",
            "keeper",
            "kinds",
            "name",
            "nbytes",
            "place",
            "resting",
            "room",
            "ticket",
        ),
        *("tier", "touches"),
    )

    def __init__(self, name: str, parameter: Parameter, tier: Tier, place: Place) -> None:
        """Map a place for a parameter, whose values are not moved yet; see ``adopt``."""
        self.name = name
        self.nbytes = local_of(parameter).nbytes
        self.kinds = _kinds_of(parameter)
        self.tier = tier
        self.room = tier if isinstance(tier, ReservedTier) else None
        self.place: Place = place
        self.ticket: Ticket = tier.adopt(
            place, round_up(self.nbytes, UNIT_BYTES), label=name, checksum=None
        )
        self.keeper: Keeper | None = None
        self.touches = 0
        self.generation = 0
        self._version = version_of(parameter)
        self._map(local_of(parameter))
        self._param: Callable[[], Parameter | None] = weakref.ref(parameter)
        settle(parameter, self)

    def _map(self, like: Tensor) -> None:
        """Map the place, with the shape and the strides of a tensor."""
        self.is_addressed = False
        self._mapping = self._map_values(like)
        self._address: int = self._mapping.ctypes.data
        self._storage = torch.from_numpy(self._mapping[: self.nbytes]).untyped_storage()
        self.resting = view_like(self._storage, like)
        self._free_uses = use_count(self._storage)

    def _map_values(self, like: Tensor) -> NDArray[np.uint8]:
        return map_files(tuple(self.place.ranges(round_up(like.nbytes, UNIT_BYTES))))

    def __repr__(self) -> str:
        return f"Home({self.name}: {self.nbytes} bytes at {self.place})"

    @property
    def parameter(self) -> Parameter | None:
        """The parameter; None if the program has dropped it."""
        return self._param()

    @property
    def is_at_rest(self) -> bool:
        """True if the parameter's memory is the home."""
        parameter = self._param()
        return parameter is not None and shares_storage(parameter, self._storage)

    @property
    def layout(self) -> Tensor:
        """Tensor with the shape, the strides and the dtype of the parameter; its values do not matter."""
        return self.resting

    @property
    def values(self) -> Tensor:
        """The values in host memory, mapped. Raises ChecksumError as ``check`` does."""
        self.check()
        return self.resting

    @property
    def is_part(self) -> bool:
        """True if the parameter is a DTensor, of which this process has a part."""
        return self.kinds is not KINDS

    @property
    def is_in_memory(self) -> bool:
        """True if the values rest in host memory, and not in a file."""
        return self.tier.spec.kind == "host"

    @property
    def directory(self) -> str:
        """See :class:`penstock.homed.HomedWeight`."""
        file, _, _ = next(iter(self.place.ranges(1)))
        path = str(file.path)  # of an unlinked one its directory
        return path if os.path.isdir(path) else os.path.dirname(path)

    def mapped(self) -> Tensor | None:
        """See :class:`penstock.homed.HomedWeight`."""
        if self.keeper is not None and not self.keeper.is_as_home(self):
            return None
        return self.values

    def has_few_rows(self, count: int) -> bool:
        """Return whether so many rows, as of an embedding, are read at home and not the whole."""
        return count * self.nbytes * ROWS_SHARE < self.nbytes * self.layout.size(0)

    @property
    def is_lent(self) -> bool:
        """True if others than the parameter refer to the mapping, who may read and change it there.

        So is one that was moved to memory that processes share: who has it no more sees the file.
        """
        uses = use_count(self._storage) - self.is_at_rest
        return uses > self._free_uses or self._storage.data_ptr() != self._address

    @property
    def is_direct(self) -> bool:
        """True if whoever loads or saves the weight may read and write its place past the mapping."""
        return self.keeper is None and self.resting.is_contiguous()

    def check(self) -> None:
        """Raise ChecksumError if the place is known to have other bytes than the weight's."""

    def read_failure(self, error: BaseException) -> BaseException:
        """Return the error of a read of the place, with the weight, the file and what to do."""
        return named_failure(error, self.name, AGAIN + self.tier.spec.remedy, "read")

    def forget(self) -> None:
        """Note that the values at rest may have been changed through the mapping."""
        self.ticket.checksum = None

    def verify_again(self, address: int) -> None:
        """Take the checksum of values that were just read from the place, if it has none.

        ``forget`` has dropped it, as the values may have been changed. Nobody refers to the mapping now,
        so the next reads are to find what this one has found.

        Args:
            address: Address of the values in memory.
        """
        if self.is_mapped and self.ticket.checksum is None and not self.is_addressed:
            self.filled(sum_of(knobs.verify(), address, self.nbytes))

    def settle(self, *, though_shared: bool = False) -> None:
        """Let reads of the place see what was changed through the mapping.

        Args:
            though_shared: Do so even if others share the mapping, which then may not see what comes.
        """

    def rest(self) -> None:
        """Let the parameter's memory be its home."""
        parameter = self._param()
        if parameter is not None:
            show(parameter, self.resting, self.kinds.resting)
            self._version = version_of(parameter)

    @property
    def is_as_read(self) -> bool:
        """True if no version of the parameter says that it was changed since ``check_version``."""
        parameter = self._param()
        return parameter is None or version_of(parameter) == self._version

    def check_version(self) -> None:
        """Forget the checksum if the parameter was changed at rest by code that torch does not show."""
        parameter = self._param()
        if parameter is not None and version_of(parameter) != self._version:
            self._version = version_of(parameter)
            self.forget()

    def move(self, data: Tensor) -> None:
        """Take another shape or type, with its values; at the same place if that is free and suffices.

        Args:
            data: Dense, on the CPU, and without gradient.

        Raises:
            NoSpaceError: There is no room for it; nothing was changed.
        """
        place = self.place
        is_long = round_up(data.nbytes, UNIT_BYTES) > self.ticket.window.nbytes
        if is_long or self.is_lent or self.tier is not self.room:
            place = self.reserve(data.nbytes)
        values = flat_bytes(data).copy()  # it may be a part of what is here
        self.map_at(place, data)
        self._mapping[: self.nbytes] = values
        self.generation += 1
        self.rest()

    def reserve(self, nbytes: int) -> ReservedPlace:
        """Return another place. Raises NoSpaceError if there is no room for it."""
        assert self.room is not None
        lengths = [round_up(nbytes, UNIT_BYTES)]
        [place] = self.room.reserve(lengths, file_name=None, advice=_advice)
        return place

    def map_at(self, place: ReservedPlace, like: Tensor) -> None:
        """Have another place, whose values are not known, with the shape of ``like``."""
        assert self.room is not None
        self.tier.discard(self.ticket)
        self.tier, self.place, self.nbytes = self.room, place, like.nbytes
        length = round_up(self.nbytes, UNIT_BYTES)
        self.ticket = self.tier.adopt(place, length, label=self.name, checksum=None)
        self._map(like)

    def leave(self) -> None:
        """Leave the parameter to memory, where it is."""
        parameter = self._param()
        if parameter is not None:
            local = local_of(parameter)
            if isinstance(local, RestingPart):
                move_out(local)
                cast(Any, local).__class__ = Tensor
            move_out(parameter)
            parameter.__class__ = self.kinds.ordinary
        self._param = _nobody

    def warn_of_move(self, data: Tensor) -> None:
        """Say, once for all homes in the same files, that a weight has left its home for other memory."""
        files = self.room or self.tier
        is_here = data.device == self.resting.device
        if files in _left or (is_here and not (self.is_mapped and self.room)):
            return  # what rests in place has no room for other values
        _left.add(files)
        if is_here:
            text = (
                f"weight {self.name} has left its home, and stays in memory: it was given other memory"
                " (weight.data = other) while something else refers to that or to its former memory; so"
                " does each weight to which this happens. weight.data.copy_(other) leaves it at home"
            )
        else:
            text = (
                f"weight {self.name} was moved to {data.device}, where it is an ordinary parameter from"
                " now on and rests no more; so is each other weight that is moved. Leave a model that"
                " rests where it is, and give it to penstock.offload(model, weights='flash',"
                " device='cuda')"
            )
        warnings.warn(text, PenstockWarning, stacklevel=2)

    def give_back(self) -> BaseException | None:
        """Let the parameter rest where it rests outside of a session, if it ``returns``.

        Returns:
            The error if its values cannot be written there: it is an ordinary parameter then, with them.
        """
        raise AssertionError(f"{self} is the home that the parameter has outside of a session")

    def rename(self, name: str) -> None:
        """Set the name in messages, which is not known yet while a model is built."""
        self.name = self.ticket.label = name

    def filled(self, checksum: Sum | None) -> None:
        """Note that the place was filled with other values; None: their checksum is not known."""
        self.ticket.nbytes, self.ticket.checksum = self.nbytes, checksum

    def written_from(self, address: int, keep_alive: object) -> Transfer:
        """Begin to write the weight home from memory that nobody changes meanwhile.

        Args:
            address: Address of the values, a multiple of 4 KiB, with as many readable bytes.
            keep_alive: Owner of the memory.
        """
        before = self.ticket
        self.ticket = self.tier.write(
            address,
            self.nbytes,
            keep_alive=keep_alive,
            label=self.name,
            priority=Priority.PREFETCH,  # both ways, so that neither starves
            at=self.place,
            is_private=True,
        )
        self.tier.discard(before)
        return self.ticket.written

    def random(self) -> None:
        """Expect reads of single rows at rest."""
        advise_random(self._mapping)

    # -- for optimizers (penstock.homed) ----------------------------------------------------------

    @property
    def memory_bytes(self) -> int | None:
        """See :class:`penstock.homed.HomedWeight`."""
        return None if self.keeper is None else self.keeper.memory_bytes

    @property
    def update_memory(self) -> UpdateMemory | None:
        """See :class:`penstock.homed.HomedWeight`."""
        return None if self.keeper is None else self.keeper.update_memory

    @property
    def streamed_bytes(self) -> int | None:
        """See :class:`penstock.homed.HomedWeight`."""
        return None if self.keeper is None else self.keeper.streamed_bytes(self)

    def hold(self) -> None:
        """See :class:`penstock.homed.HomedWeight`."""
        if self.keeper is not None:
            self.keeper.hold(self)

    def let_go(self, *, changed: bool) -> None:
        """See :class:`penstock.homed.HomedWeight`."""
        if self.keeper is not None:
            self.keeper.let_go(self, changed=changed)
        elif changed:
            self.forget()

    # -- for the resting parameter ----------------------------------------------------------------

    def begin_touch(self) -> None:
        """See :class:`.resting.RestingHome`."""
        self.touches += 1
        if self.keeper is not None:
            self.keeper.begin_touch(self)

    def end_touch(self, *, changed: bool) -> None:
        """See :class:`.resting.RestingHome`."""
        if self.keeper is not None:
            self.keeper.end_touch(self, changed=changed)
        elif changed:
            self.forget()

    def lent(self) -> None:
        """See :class:`.resting.RestingHome`."""
        if self.keeper is not None:
            self.keeper.lent(self)
        else:
            self.forget()

    def addressed(self) -> None:
        """See :class:`.resting.RestingHome`."""
        self.is_addressed = True
        if self.keeper is not None:
            self.keeper.addressed(self)
        else:
            self.forget()

    def embedded(
        self, indices: Tensor, embed: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """See :class:`.resting.RestingHome`."""
        return None if self.keeper is None else self.keeper.embedded(self, indices, embed)

    def detached(self) -> Tensor | None:
        """See :class:`.resting.RestingHome`: a state dict has the mapping."""
        return None

    def replaced(self, data: Tensor) -> None:
        """See :class:`.resting.RestingHome`."""
        if self.keeper is not None:
            self.keeper.replaced(self, data)
            return
        self.touches += 1
        self.take(data)

    def take(self, data: Tensor) -> None:
        """Take other values, in memory or at home; a parameter that cannot rest leaves its home."""
        parameter = self._param()
        assert parameter is not None
        with torch._C.DisableTorchFunctionSubclass():
            memory = Tensor.untyped_storage(parameter)
            if is_laid_alike(data, self.resting) and shares_storage(data, memory):
                return
            if not self.can_take(data, is_lent=self.is_lent):
                Tensor.data.__set__(parameter, data)  # type: ignore[attr-defined]
                self.leave()
                self.warn_of_move(data)
            elif is_laid_alike(data, self.resting):
                with torch.no_grad():
                    view_like(memory, self.resting).copy_(data)
                self.generation += 1
                self.forget()
            else:
                self.move(data)

    def can_take(self, data: Tensor, *, is_lent: bool) -> bool:
        """Return whether the values of a tensor can be copied to where the weight is, and nobody sees it.

        Else the parameter gets the tensor's memory, as without Penstock: others may write there, or may
        refer to the memory that the weight has now.

        Args:
            data: The tensor.
            is_lent: True if others than the parameter refer to its present memory.
        """
        if data.device != self.resting.device or not is_dense(data) or is_known(data):
            return False
        return not is_lent if is_laid_alike(data, self.resting) else self.room is not None


HomeMaker = Callable[[str, Parameter, Tier, Place], Home]
"""Makes the home of a parameter at a place; its arguments are those of :class:`Home`."""


def _nobody() -> None:
    return None


class WeightPlaces(Protocol):
    """Places in which the weights of models get their homes.

    Attributes:
        left: Names of parameters that stay in memory, as the user was told.
    """

    left: MutableMapping[Parameter, str]

    @property
    def files(self) -> WeightFiles | None:
        """The files; None: no weight rests in one."""

    @property
    def room(self) -> ReservedTier | None:
        """Tier of another place, if a weight needs one; None: there is none."""

    def check_room(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        """Raise NoSpaceError if there is no room for parameters, which are named; they have no values."""

    def move_in(
        self, parameters: Sequence[tuple[str, Parameter]], kind: HomeMaker | None = None
    ) -> list[Home]:
        """See :meth:`WeightFiles.move_in`."""


def setting_of(places: WeightPlaces) -> str:
    """Return the setting of a session whose weights rest in such places, as users write it."""
    return f"weights={'host' if places.files is None else 'flash'!r}"


class WeightFiles:
    """Files in which homes lie, in one directory or several, without names. Not thread-safe.

    Attributes:
        left: Names of parameters that stay in memory, as the user was told.
    """

    def __init__(
        self, directories: StrPath | Sequence[StrPath], *, allow_memory_filesystem: bool = False
    ) -> None:
        """Check the directories; make no file yet.

        Raises:
            ConfigError: A directory is missing, named twice, not writable, or in memory.
        """
        paths = [directories] if isinstance(directories, str) else directories
        first = paths[0] if isinstance(paths, Sequence) else paths
        self.tier = ReservedTier(
            directories,
            engine=shared_engine(),
            recorder=ClientRecorder(str(first)),
            name=WEIGHTS,
            remedy=_REMEDY,
            allow_memory_filesystem=allow_memory_filesystem,
        )
        self.left: MutableMapping[Parameter, str] = WeakIdKeyDictionary()
        self._slab: tuple[DirectFile, ...] = ()
        self._slab_bytes = 0
        self._cut_bytes = 0

    @property
    def files(self) -> WeightFiles:
        """These files."""
        return self

    @property
    def room(self) -> ReservedTier:
        """Their tier."""
        return self.tier

    def check_room(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        """See :class:`WeightPlaces`: their places are to be cut."""
        count = len(self.tier.directories)
        part = sum(part_bytes(each.nbytes, count) for _, each in parameters)
        check_space([(each, part) for each in self.tier.directories], _advice)

    def cut(self, nbytes: int, name: str) -> ReservedPlace:
        """Cut a new place, which reads as zeros, from a slab; ``trim`` frees what is left of the last.

        Args:
            nbytes: Most bytes that it will hold.
            name: Name of the weight, for the error.

        Raises:
            NoSpaceError: There is no room for it.
            TransferError: A file cannot be made.
        """
        directories = len(self.tier.directories)
        part = part_bytes(nbytes, directories)
        if self._cut_bytes + part > self._slab_bytes:
            self.trim()
            self._slab, self._slab_bytes = self._new_slab(part, name, nbytes)
        place = ReservedPlace(self._slab, self._cut_bytes)
        self._cut_bytes += part
        return place

    def _new_slab(self, part: int, name: str, nbytes: int) -> tuple[tuple[DirectFile, ...], int]:
        def advice(needed: int, free: int) -> str:
            return (
                f"there is no room for the next weight, {name} of {format_bytes(nbytes)}, beside"
                f" {format_bytes(self.tier.held_bytes)} that are built: free some space, or name another"
                " directory. `penstock plan --weights flash` says before how much a model takes"
            )

        directories = len(self.tier.directories)
        for length in (max(SLAB_BYTES, part), part):
            try:
                (place,) = self.tier.reserve([length * directories], file_name=None, advice=advice)
            except NoSpaceError:
                if length == part:
                    raise
            else:
                return place.files, length
        raise AssertionError("the second try raises")

    def trim(self) -> None:
        """Free the space that is left of the slab."""
        for file in self._slab:
            os.ftruncate(file.fd, self._cut_bytes)
        self._slab, self._slab_bytes, self._cut_bytes = (), 0, 0

    def move_in(
        self, parameters: Sequence[tuple[str, Parameter]], kind: HomeMaker | None = None
    ) -> list[Home]:
        """Move weights from memory to new homes, where they rest; the memory is freed one by one.

        Args:
            parameters: Name and parameter of each; dense, on the CPU or a CUDA device, with a storage of
                its own.
            kind: Makes the homes; None: :class:`Home`.

        Raises:
            NoSpaceError: The directories have no room for all of them; nothing was moved.
            TransferError: One could not be written; it and those after it are still in memory.
        """
        lengths = [local_of(each).nbytes for _, each in parameters]
        places = self.tier.reserve(lengths, file_name=None, advice=_advice)
        most = round_up(max(lengths, default=1), UNIT_BYTES)
        arena = Arena(2 * most, owner=WEIGHTS)
        window: TransferWindow[tuple[Home, Block]] = TransferWindow(
            complete=lambda item: item[0].rest(),
            fail=_not_moved_in,
            release=lambda item: item[1].free(),
            limit_bytes=most,
        )
        homes = []
        try:
            with window:
                for (name, parameter), place in zip(parameters, places, strict=True):
                    local = local_of(parameter)
                    nbytes = round_up(local.nbytes, UNIT_BYTES)
                    window.make_room(nbytes)
                    block = arena.allocate(nbytes, force=True)
                    assert block is not None, "the window leaves half of the arena"
                    home = (kind or Home)(name, parameter, self.tier, place)
                    homes.append(home)
                    copy_out(local, memory_at(block.address, local.nbytes))
                    home.written_from(block.address, block)
                    window.add((home, block), home.ticket.written, nbytes)
        except BaseException:
            for home in homes:
                if not home.is_at_rest:
                    home.leave()
            raise
        finally:
            arena.close()
        return homes


def _not_moved_in(item: tuple[Home, Block], error: Exception) -> None:
    """Raise the error that a weight could not be written to its new home."""
    advice = "It and those after it are in memory still: free some space, or name another directory"
    raise named_failure(error, item[0].name, advice, "write")


def copy_out(parameter: Tensor, target: NDArray[np.uint8]) -> None:
    """Copy the bytes of a dense parameter to host memory; they are there on return."""
    if parameter.device.type == "cpu":
        target[:] = flat_bytes(parameter)
        return
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        line = Tensor.detach(parameter).as_strided((parameter.numel(),), (1,)).view(torch.uint8)
        copy_across(line, torch.from_numpy(target), ready_event(parameter.device))


def _advice(needed: int, free: int) -> str:
    return (
        f"the homes of weights take {format_bytes(needed)}, and {format_bytes(free)} are free beside what"
        " has been reserved there for saved tensors (flash_capacity) and states: free some space, or name"
        " another directory"
    )


def untransformed() -> AbstractContextManager[Any]:
    """Return a block in which tensors that are made are none of a transform of ``torch.func``."""
    guard: AbstractContextManager[Any] = torch._C._DisableFuncTorch()
    return guard


def view_like(storage: torch.UntypedStorage, parameter: Tensor) -> Tensor:
    """Return the beginning of a storage with the shape, strides and dtype of a parameter."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return view_like(storage, parameter)
    with torch._C.DisableTorchFunction(), untransformed():
        view = torch.empty(0, dtype=parameter.dtype, device=storage.device)
        return view.set_(storage, 0, parameter.size(), parameter.stride())


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill a range of memory, in whichever order."""
    line = sorted(zip(tensor.stride(), tensor.size(), strict=True))
    expected = 1
    for stride, size in line:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.layout == torch.strided and tensor.numel() > 0


def is_laid_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape, strides and offset in their memory."""
    of_one = (one.dtype, one.size(), one.stride(), one.storage_offset())
    return of_one == (other.dtype, other.size(), other.stride(), other.storage_offset())


def is_known(tensor: Tensor) -> bool:
    """Return whether others refer to the memory of a tensor, or it is a part of more."""
    storage = tensor.untyped_storage()
    if isinstance(tensor, Parameter) or storage.nbytes() != tensor.nbytes:
        return True
    uses = own_uses()
    if tensor._base is not None and _base_holders(tensor) == _base_holders(torch.empty(1).view(1)):
        uses += 1  # of the tensor that this is a view of, which nobody else has
    return use_count(storage) > uses


def _base_holders(view: Tensor) -> int:
    """Return the number of references to the tensor of which another is a view, those here included."""
    base = view._base
    return sys.getrefcount(base)


def own_uses() -> int:
    """Return the use count of memory to which one tensor refers, and one variable."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return use_count(storage)


def shares_storage(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Return whether the memory of a tensor is that storage."""
    with torch._C.DisableTorchFunctionSubclass():
        mine: int = Tensor.untyped_storage(local_of(tensor))._cdata
    return bool(mine == storage._cdata)


def flat_bytes(parameter: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a dense parameter in the order of memory; they share it."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        line = Tensor.detach(parameter).as_strided((parameter.numel(),), (1,))
        flat: NDArray[np.uint8] = line.view(torch.uint8).numpy()
    return flat


def version_of(parameter: Tensor) -> int:
    """Return a number that grows if values are changed in place, as far as torch counts it."""
    with torch._C.DisableTorchFunctionSubclass():
        own, local = parameter._version, local_of(parameter)
    return own if local is parameter else own + local._version


def show(parameter: Parameter, data: Tensor, kind: type[Any]) -> None:
    """Exchange the memory of a parameter, and its class, but not its version."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            show(parameter, data, kind)
        return
    local = local_of(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(local, data)  # type: ignore[attr-defined]
    if type(local) is RestingPart and data is not cast(Home, home_of(local)).resting:
        move_out(local)
        cast(Any, local).__class__ = Tensor
    parameter.__class__ = kind
