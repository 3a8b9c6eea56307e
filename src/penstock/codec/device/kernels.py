"""Kernels of Triton in place of torch's operators: where they are used, and how they are launched.

A module ``triton_<name>`` here has some. They are used on a CUDA device if Triton can be imported and
what they make of a small tensor on that device is what the operators make of it, to the last bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

_Key = tuple[str, torch.device, torch.dtype]
_found: Final[dict[_Key, Any]] = {}
"""Modules that were tried, or ``None`` where their kernels do not work."""


def kernels_for(
    name: str,
    agrees: Callable[[Any, torch.device, torch.dtype], bool],
    device: torch.device,
    word: torch.dtype,
) -> Any:
    """Return the module ``triton_<name>`` if its kernels work on a device, else ``None``; tried once.

    Args:
        name: Of the kernels.
        agrees: Tries a module on a device, for words of a type. May raise anything.
        device: Of the tensors. Others than CUDA's have no kernels.
        word: Integer type of the words.
    """
    if device.type != "cuda":
        return None
    key = name, device, word
    if key not in _found:
        try:
            _found[key] = _tried(agrees, *key)
        except torch.OutOfMemoryError:  # tried again the next time
            return None
    return _found[key]


def are_known_to_work(name: str, device: torch.device, word: torch.dtype) -> bool:
    """Return True if the kernels were tried, and are used from now on because they work."""
    return _found.get((name, device, word)) is not None


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any) -> None:
    """Run a kernel, on the current stream of a device."""
    if programs:
        with _on(device):
            kernel[(programs,)](*arguments)


def _tried(
    agrees: Callable[[Any, torch.device, torch.dtype], bool],
    name: str,
    device: torch.device,
    word: torch.dtype,
) -> Any:
    try:
        kernels = importlib.import_module(f"penstock.codec.device.triton_{name}")
        works = agrees(kernels, device, word)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001  (no Triton, no compiler for it, a device that it does not know)
        return None
    return kernels if works else None


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device current, because Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
