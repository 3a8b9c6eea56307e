"""Models on the host that a session works with on a device, where they need not fit.

[Note: a model that is elsewhere for a session]
    Each large weight keeps its place in a file, or in its own memory, or rests in pinned memory for the
    time (:mod:`.host_places`). What changes is the parameter's memory at rest: on the host the mapping
    of that place, on the device one NaN (:mod:`.device`). The rest of the model, small weights and
    buffers, is copied to the device, and back when the session is closed. Then every weight is written
    home and rests on the host again. Parameters are the same objects all the time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.weak import WeakIdKeyDictionary

from penstock.core.errors import ConfigError, PenstockError
from penstock.homed import home_of, paused_holders, settle
from penstock.io.engine import Transfer
from penstock.store.base import Tier
from penstock.store.checksums import Sum
from penstock.store.host import MemoryPlace
from penstock.weights.device import DTYPES, DeviceHome, can_rest
from penstock.weights.failures import LEFT, named_failure
from penstock.weights.homes import Home, show
from penstock.weights.host_places import HostPlaces, OwnMemoryHome
from penstock.weights.model import rest_weights

CheckSizes = Callable[[list[tuple[int, str]]], None]


class RelocatedHome(DeviceHome):
    """Home on a device of a parameter that rests on the host outside of the session.

    Attributes:
        host: The home there, which has the same place, unless that is pinned memory.
    """

    returns: ClassVar[bool] = True
    __slots__ = ("_device", "_is_newer", "_left", "host")

    def __init__(
        self, host: Home, device: torch.device, left: MutableMapping[Parameter, torch.device]
    ) -> None:
        """Take the place of a home whose parameter is at rest.

        Args:
            host: That home.
            device: The device.
            left: Gets the parameter, if it leaves its home, with the device where it was.
        """
        parameter = host.parameter
        assert parameter is not None
        self.host = host
        self._device = device
        self._left = left
        self._is_newer = False
        host.settle(though_shared=True)
        super().__init__(host.name, parameter, host.tier, host.place)
        self.tier.discard(self.ticket)  # the claim is that of the other home
        self.ticket, self.room = host.ticket, host.room

    def _where(self, like: Tensor) -> torch.device:
        return self._device

    @property
    def values(self) -> Tensor:
        """See :class:`Home`: those of the home on the host, unless they are in pinned memory."""
        if self.is_kept:
            return super().values
        self.host.random()
        return self.host.values

    @property
    def is_kept(self) -> bool:
        """True if the values rest in pinned memory, and not where the home on the host has its place."""
        return self.place is not self.host.place

    @property
    def directory(self) -> str:
        """See :class:`penstock.homed.HomedWeight`."""
        return self.host.directory

    def keep(self, tier: Tier, place: MemoryPlace) -> None:
        """See :class:`DeviceHome`; memory of the parameter's own is free then."""
        super().keep(tier, place)
        if isinstance(self.host, OwnMemoryHome):
            self.host.drop()

    def _give_up_claim(self) -> None:
        return  # it is the other home's

    def filled(self, checksum: Sum | None) -> None:
        """See :class:`Home`."""
        self._is_newer = True
        super().filled(checksum)

    def read_failure(self, error: BaseException) -> BaseException:
        """See :class:`Home`."""
        return self.host.read_failure(error)

    def leave(self) -> None:
        """See :class:`Home`."""
        parameter = self.parameter
        if parameter is not None:
            self._left[parameter] = self.host.resting.device
        super().leave()

    def written_from(self, address: int, keep_alive: object) -> Transfer:
        """See :class:`Home`."""
        host = self.host
        transfer = host.written_from(address, keep_alive)
        self.tier, self.place, self.ticket = host.tier, host.place, host.ticket
        return transfer

    def give_back(self) -> BaseException | None:
        """See :class:`Home`: it rests on the host, or is an ordinary one there."""
        parameter = self.parameter
        if parameter is None:
            return None
        with _gradient_on(parameter, self.host.resting.device):
            failure = self._return_values()
            if failure is None:
                settle(parameter, self.host)
                self.host.rest()
            else:
                with torch.inference_mode(False):
                    values = self.values.clone()
                show(parameter, values, self.kinds.ordinary)
                self.host.leave()
        return failure

    def _return_values(self) -> BaseException | None:
        """Let the home on the host have the values; return the error if they cannot be written there."""
        host = self.host
        if self.is_kept and isinstance(host, OwnMemoryHome):
            host.refill(self.values)
        elif self.is_kept and self._is_newer:
            try:
                host.written_from(self.place.address, self.place.memory).wait()
            except PenstockError as error:
                return named_failure(error, self.name, LEFT, "write")
        return None


class Relocation:
    """Lets the weights of models on the host rest for a device, and gives the models back."""

    def __init__(self, device: torch.device, places: HostPlaces, floor_bytes: int) -> None:
        """Relocate nothing yet.

        Args:
            device: The session's, with its index.
            places: Where homes of weights are made that have none.
            floor_bytes: Least size of a weight that rests.
        """
        self._device = device
        self._places = places
        self._floor_bytes = floor_bytes
        self._parameters: MutableMapping[Parameter, torch.device] = (
            WeakIdKeyDictionary()
        )  # those that are copied, and where they were
        self._buffers: list[tuple[weakref.ref[Module], str, torch.device]] = []

    def rest(self, model: Module, check: CheckSizes) -> list[Home]:
        """Return the homes of a model's weights on the device. See :func:`.model.rest_weights`.

        Raises:
            ConfigError: A parameter is on another device.
        """
        self._check(model)
        before, buffers = set(map(id, self._parameters)), len(self._buffers)
        if (
            self._places.files is None
        ):  # what was changed, and has no other place, goes to memory first
            for home in map(home_of, model.parameters()):
                if isinstance(home, Home):
                    home.settle(though_shared=True)
        found = rest_weights(
            model,
            check,
            places=self._places,
            floor_bytes=self._floor_bytes,
            gathered_kind=None,
            is_able=lambda each: each.device.type == "cpu" and can_rest(each),
        )
        homes: list[Home] = []
        try:
            with paused_holders():
                for home in found:
                    if home.layout.dtype in DTYPES:
                        homes.append(self._relocated(home))  # noqa: PERF401  (undone below)
                self._keep(homes)
                self._copy(model)
            homes += self._rest_here(model, check)
        except BaseException:
            for home in homes:
                if (
                    isinstance(home, RelocatedHome) and home.keeper is None
                ):  # else it has been there
                    home.give_back()
            for host in found:
                if isinstance(host, OwnMemoryHome):
                    host.leave()
            self._give_back([each for each in self._parameters if id(each) not in before], buffers)
            raise
        return homes

    def _relocated(self, home: Home) -> Home:
        """Return the home on the device of a weight, which rests there from now on."""
        parameter = home.parameter
        if not home.is_mapped or parameter is None:
            return home
        with _gradient_on(parameter, self._device):
            made = RelocatedHome(home, self._device, self._parameters)
            made.rest()
        return made

    def _keep(self, homes: Sequence[Home]) -> None:
        """Let weights rest in pinned memory, as far as there is room."""
        others = []
        for home in homes:
            own = home.host if isinstance(home, RelocatedHome) else None
            if not isinstance(own, OwnMemoryHome):
                others.append(home)
            elif own.pinned is not None and home.keeper is None:
                cast("RelocatedHome", home).keep(self._places.tier, own.pinned)
        self._places.keep(others)

    def _check(self, model: Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.device not in (self._device, torch.device("cpu"), torch.device("meta")):
                raise ConfigError(
                    f"device={str(self._device)!r} is for a model on the host or"
                    f" there, and parameter {name} is on {parameter.device}"
                )

    def _rest_here(self, model: Module, check: CheckSizes) -> list[Home]:
        """Let those rest that were on the device before."""
        own = [
            each
            for each in model.parameters()
            if each.nbytes >= self._floor_bytes
            and each.device == self._device
            and home_of(each) is None
            and each not in self._parameters
        ]
        if not own:
            return []
        return rest_weights(
            model,
            check,
            places=self._places,
            floor_bytes=self._floor_bytes,
            kind=DeviceHome,
            is_able=lambda each: any(each is one for one in own) and can_rest(each),
        )

    def _copy(self, model: Module) -> None:
        """Copy what does not rest to the device."""
        for parameter in model.parameters():
            if parameter.device == self._device:
                continue
            home = cast("Home | None", home_of(parameter))
            if home is not None:  # its type cannot rest there
                home.check()
                home.leave()
            self._parameters[parameter] = parameter.device
            _move(parameter, self._device)
        moved: dict[int, Tensor] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self._device:
                    self._buffers.append((weakref.ref(module), name, buffer.device))
                    module._buffers[name] = moved.setdefault(id(buffer), buffer.to(self._device))

    def give_back(self) -> None:
        """Copy all back to where it was. Idempotent; raises ``RuntimeError`` as torch does."""
        self._give_back(list(self._parameters), 0)

    def _give_back(self, parameters: Sequence[Parameter], first_buffer: int) -> None:
        """Copy these back, and the buffers from one on in the order in which they were copied here."""
        for parameter in parameters:
            _move(parameter, self._parameters.pop(parameter))
        moved: dict[int, Tensor] = {}
        for reference, name, device in self._buffers[first_buffer:]:
            module = reference()
            buffer = None if module is None else module._buffers.get(name)
            if module is not None and buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
        del self._buffers[first_buffer:]


def _move(parameter: Parameter, device: torch.device) -> None:
    with _gradient_on(parameter, device), torch._C.DisableTorchFunctionSubclass():
        values = Tensor.data.__get__(parameter).to(device)  # type: ignore[attr-defined]
        Tensor.data.__set__(parameter, values)  # type: ignore[attr-defined]


@contextmanager
def _gradient_on(parameter: Parameter, device: torch.device) -> Iterator[None]:
    """Move the gradient of a parameter, too, which is moved in the block."""
    gradient = parameter.grad
    if type(gradient) is not Tensor:
        yield
        return
    moved = gradient.to(device)
    parameter.grad = None
    yield
    parameter.grad = moved
