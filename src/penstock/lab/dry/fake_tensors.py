"""Copies of modules and tensors that have shapes, strides, types and devices, and no data."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from penstock.core.errors import ConfigError
from penstock.hooks.saved_tensors import strided_storage

M = TypeVar("M", bound=torch.nn.Module)


class FakeTensors:
    """Factory for fakes of real tensors and of tensors on "meta". Use it within a FakeTensorMode.

    Tensors that share a storage share one in the copy.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._originals: list[torch.UntypedStorage] = []  # kept alive, so that no address is reused

    def tensor(self, original: torch.Tensor) -> torch.Tensor:
        """Return the fake of a tensor, on the CPU. Raises ConfigError unless it is plain and strided."""
        storage = strided_storage(original)
        if storage is None:
            raise ConfigError(
                f"dry profile: a {type(original).__name__} of layout {original.layout} and shape"
                f" {tuple(original.shape)} has no shape-only copy; use plain strided tensors"
            )
        fake = self._like(original, storage)
        if isinstance(original, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=original.requires_grad)
        return fake.requires_grad_(original.requires_grad)

    def module(self, original: M) -> M:
        """Copy a module, with fake parameters and buffers; the original is not changed.

        Raises:
            ConfigError: A part of it cannot be copied.
        """
        memo = {id(one): self.tensor(one) for one in original.parameters()}
        try:
            with _Copying(self):
                return copy.deepcopy(original, memo)
        except Exception as error:
            raise ConfigError(
                f"dry profile: cannot copy this {type(original).__name__}: {error}; build it on the"
                " device 'meta', without the part that cannot be copied"
            ) from error

    def _like(self, original: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        size, stride = original.size(), original.stride()
        known = self._storages.get(storage._cdata)
        if known is None:
            self._originals.append(storage)
            if original.numel() * original.element_size() == storage.nbytes():
                fake = torch.empty_strided(size, stride, dtype=original.dtype, device="cpu")
                self._storages[storage._cdata] = fake.untyped_storage()
                return fake
            whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
            known = self._storages[storage._cdata] = whole.untyped_storage()
        fake = torch.empty(0, dtype=original.dtype, device="cpu")
        offset = int(original.storage_offset())
        return fake.set_(known, offset, size, stride)


class _Copying(TorchFunctionMode):
    """Mode in which the deep copy of a tensor is its fake, for buffers and all other tensors."""

    def __init__(self, fakes: FakeTensors) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        original, memo = args
        if id(original) not in memo:
            memo[id(original)] = self._fakes.tensor(original)
        return memo[id(original)]
