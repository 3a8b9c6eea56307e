"""Pure modules: those that compute one tensor from another and do nothing else.

Calling one again with the same tensor, parameters and settings gives the same bits and leaves no trace,
so a recipe (``plan.recipes``) may do it. The list contains only PyTorch's own layers, because what other
modules do cannot be seen from outside.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from penstock.core.errors import HookError, InPlaceError
from penstock.hooks.module_state import check_parameters

_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PURE: Final = frozenset(
    {
        *_BATCH_NORMS,
        nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool2d,
        nn.AdaptiveAvgPool3d,
        nn.AvgPool1d,
        nn.AvgPool2d,
        nn.AvgPool3d,
        nn.CELU,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ELU,
        nn.GELU,
        nn.GLU,
        nn.GroupNorm,
        nn.Hardsigmoid,
        nn.Hardswish,
        nn.Hardtanh,
        nn.LayerNorm,
        nn.LeakyReLU,
        nn.Linear,
        nn.LogSigmoid,
        nn.LogSoftmax,
        nn.MaxPool1d,
        nn.MaxPool2d,
        nn.MaxPool3d,
        nn.Mish,
        nn.PReLU,
        nn.RMSNorm,
        nn.ReLU,
        nn.ReLU6,
        nn.SELU,
        nn.SiLU,
        nn.Sigmoid,
        nn.Softmax,
        nn.Softplus,
        nn.Softsign,
        nn.Tanh,
    }
)
_ACTIVATIONS: Final = "transformers.activations"
"""Module with Hugging Face's activations, which are functions of one tensor."""
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")


def is_pure(module: nn.Module) -> bool:
    """Return whether another call of ``module`` gives the same bits and leaves no trace.

    Subclasses, modules with hooks or a ``forward`` of their own, compiled modules and modules in eval
    mode are not pure.
    """
    kind = type(module)
    if kind not in _PURE and kind.__module__ != _ACTIVATIONS:
        return False
    own = module.__dict__
    if not module.training or "forward" in own or own.get("_compiled_call_impl") is not None:
        return False
    return not any(own.get(name) for name in _HOOKS)


class PureCall:
    """A finished call of a pure module and what it depended on, so that it can be repeated.

    Attributes:
        path: Path of the module.
    """

    __slots__ = ("_autocast", "_module", "_parameters", "_settings", "path")

    def __init__(self, module: nn.Module, path: str, device_type: str) -> None:
        """Record what the call that has just ended depended on.

        Args:
            module: A pure module.
            path: Path of the module.
            device_type: Type of the device on which it computed.
        """
        self._module = module
        self.path = path
        self._settings = _settings(module)
        self._parameters = [
            (each, 0 if each is None else each._version) for each in module._parameters.values()
        ]
        enabled = torch.is_autocast_enabled(device_type)
        self._autocast = (device_type, torch.get_autocast_dtype(device_type), enabled)

    def recompute(self, given: torch.Tensor) -> torch.Tensor:
        """Return the module's output for ``given``, computed without gradients.

        Raises:
            InPlaceError: A parameter or a setting of the module has changed since.
            HookError: The module has other parameters than before.
        """
        module: Any = self._module
        self._check()
        device_type, dtype, enabled = self._autocast
        with torch.no_grad(), torch.autocast(device_type, dtype, enabled, cache_enabled=False):
            if type(module) in _BATCH_NORMS:  # its running statistics include this batch
                weight, bias, eps = module.weight, module.bias, module.eps
                return torch.nn.functional.batch_norm(
                    given, None, None, weight, bias, training=True, momentum=0.0, eps=eps
                )
            result: torch.Tensor = module.forward(given)
            return result

    def _check(self) -> None:
        module = self._module
        now = list(module._parameters.values())
        if [id(each) for each in now] != [id(each) for each, _ in self._parameters]:
            raise HookError(
                f"cannot recompute {self.path} for its backward: it has other parameters than in its"
                " forward, as under torch.func.functional_call; pass recompute=False"
            )
        check_parameters(self.path, self._parameters)
        if _settings(module) != self._settings:
            raise InPlaceError(
                f"cannot recompute {self.path} for its backward: its settings are"
                f" {_settings(module)} now and were {self._settings} in its forward; change them after"
                " the backward, or pass recompute=False"
            )


def _settings(module: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple)
    own = module.__dict__.items()
    return {name: value for name, value in own if name[0] != "_" and isinstance(value, plain)}
