"""Optimizers by name. Each is torch's of the same name; Lion, which torch lacks, is defined here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.optim.optimizer import OnFlash


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (NeurIPS 2023), program 1."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """Check the options.

        Args:
            params: As torch's.
            lr: Length of a step in each element; about a tenth of Adam's.
            betas: Weights of the momentum in the update, and in the next momentum.
            weight_decay: Decoupled, times ``lr``.
            maximize: Go up.

        Raises:
            ConfigError: An option is out of range.
        """
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"Lion needs lr and weight_decay of 0 or more and betas in [0, 1); they are {lr},"
                f" {weight_decay} and {betas}"
            )
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, -param.grad if group["maximize"] else param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        momentum = state["exp_avg"]
        beta1, beta2 = group["betas"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        update = momentum.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        param.add_(update, alpha=-group["lr"])
        momentum.mul_(beta2).add_(grad, alpha=1 - beta2)


class FlashAdamW(OnFlash, torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` with its states on flash."""

    torch_class = torch.optim.AdamW
    preferred: ClassVar = {"fused": True}


class FlashAdam(OnFlash, torch.optim.Adam):
    """``torch.optim.Adam(fused=True)`` with its states on flash."""

    torch_class = torch.optim.Adam
    preferred: ClassVar = {"fused": True}


class FlashSGD(OnFlash, torch.optim.SGD):
    """``torch.optim.SGD(fused=True)``, Nesterov's too, with its momentum on flash."""

    torch_class = torch.optim.SGD
    preferred: ClassVar = {"fused": True}


class FlashAdagrad(OnFlash, torch.optim.Adagrad):
    """``torch.optim.Adagrad(fused=True)`` with its states on flash."""

    torch_class = torch.optim.Adagrad
    preferred: ClassVar = {"fused": True}


class FlashRMSprop(OnFlash, torch.optim.RMSprop):
    """``torch.optim.RMSprop`` with its states on flash."""

    torch_class = torch.optim.RMSprop


class FlashLion(OnFlash, Lion):
    """``Lion`` with its momentum on flash."""

    torch_class = Lion
