"""Initialisation of weights, as in the papers. All functions draw from torch's global generator."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def kaiming_(network: nn.Module, *, linear_std: float | None) -> None:
    """Initialise as He et al. 2015: convolutions keep the gradient's variance; norms are the identity.

    Args:
        network: Module to initialise in place, with its submodules.
        linear_std: Standard deviation of linear layers; ``None`` keeps torch's own initialisation.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            zero_bias_(module)
        elif isinstance(module, nn.Linear) and linear_std is not None:
            nn.init.normal_(module.weight, std=linear_std)
            zero_bias_(module)


def gaussian_(network: nn.Module, *, std: float) -> None:
    """Draw every weight, embeddings too, from one normal distribution; set biases to zero."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            zero_bias_(module)


def truncated_(network: nn.Module, *, std: float) -> None:
    """Draw every weight from a normal distribution cut off at two standard deviations; zero the biases.

    Ten times slower than ``gaussian_``; use it for small networks.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            zero_bias_(module)


def near_identity_(conv: nn.Conv2d, *, noise: float) -> None:
    """Set a convolution of equal widths to the identity plus ``noise`` times He's weights."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    with torch.no_grad():
        identity = nn.init.dirac_(torch.empty_like(conv.weight))
        conv.weight.mul_(noise).add_(identity)
    zero_bias_(conv)


def zero_bias_(module: nn.Module) -> None:
    """Zero the bias of a module that has one."""
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor):
        nn.init.zeros_(bias)
