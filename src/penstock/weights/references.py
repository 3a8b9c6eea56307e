"""Reference to a weight, which autograd holds in place of a saved one, and which brings it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.core.errors import InPlaceError
from penstock.homed import Reference
from penstock.weights.homes import Home


class WeightBringer(Protocol):
    """Brings weights to memory."""

    def bring(self, home: Home, parameter: Parameter) -> Tensor:
        """Return a weight whole; its memory stays as long as anybody refers to it."""


class WeightReference(Reference):
    """A saved tensor that is a view of a weight, or a view of a cast of it.

    It holds no memory. Backward gets the weight as it was saved, or ``InPlaceError`` if it has changed,
    as autograd itself would say.
    """

    __slots__ = (
        "bringer",
        "cast",
        "dtype",
        "generation",
        "home",
        "offset",
        "parameter",
        "size",
        "stride",
        "version",
    )

    def __init__(
        self, tensor: Tensor, home: Home, bringer: WeightBringer, *, is_cast: bool
    ) -> None:
        """Refer to a weight.

        Args:
            tensor: Saved tensor; its storage is the weight's, or that of a cast with its strides.
            home: The weight's home.
            bringer: Brings it.
            is_cast: True if ``tensor`` is of a cast to another dtype, as autocast makes.
        """
        parameter = home.parameter
        assert parameter is not None
        self.home = home
        self.parameter = (
            parameter  # as autograd does: the program may drop its model before backward
        )
        self.bringer = bringer
        self.cast = tensor.dtype if is_cast else None
        self.dtype = tensor.dtype  # of a view, it may be another than the weight's
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.version = parameter._version
        self.generation = home.generation

    def unpack(self) -> Tensor:
        """Return the tensor that was saved, from memory that belongs to whoever holds it.

        Raises:
            InPlaceError: The weight was changed since.
            TransferError: It cannot be read.
            ChecksumError: It is not what was written.
        """
        parameter = self.parameter
        if self.home.generation != self.generation:
            raise InPlaceError(
                f"weight {self.home.name}, which backward needs, was replaced since, as by"
                " parameter.data = x: its former values were on flash and are gone. Call backward first."
            )
        if parameter._version != self.version:
            raise InPlaceError(
                "one of the variables needed for gradient computation has been modified by an inplace"
                f" operation: weight {self.home.name}, a {parameter.dtype} tensor of"
                f" {tuple(parameter.shape)}, is at version {parameter._version}; expected version"
                f" {self.version} instead. Without Penstock autograd raises here too."
            )
        whole = self.bringer.bring(self.home, parameter)
        if self.cast is not None:
            whole = whole.to(self.cast)
        view = torch.empty(0, dtype=self.dtype, device=whole.device)
        return view.set_(whole.untyped_storage(), self.offset, self.size, self.stride)
