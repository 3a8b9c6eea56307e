"""AlexNet as its paper has it (Krizhevsky et al. 2012), in one tower: wider, and with normalizations.

The zoo's is that of 2014, which convnet-benchmarks and torchvision have. Which of the two vDNN took we do
not know; this one says what the difference makes. Response normalization is cuDNN's: one kernel each
way, whose backward reads its input and its output; PyTorch's is made of several operators, and saves
what is between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.lab.dry import dry_step
from penstock.plan import Machine, Profile

CLASSES, IMAGE_SIZE = 1000, 224


class _Normalize(torch.autograd.Function):
    """The bytes of cuDNN's: shapes and passes over memory, not values. For fake tensors only."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor) -> Tensor:
        normal = maps * 1.0
        ctx.save_for_backward(maps, normal)
        return normal

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        maps, normal = ctx.saved_tensors
        return torch.addcmul(gradients[0], maps, normal)


class ResponseNorm(nn.Module):
    """Response normalization across maps; see :class:`_Normalize` for what of it is there."""

    def forward(self, maps: Tensor) -> Tensor:
        normal: Tensor = _Normalize.apply(maps)
        return normal


def network() -> nn.Sequential:
    def relu() -> nn.ReLU:
        return nn.ReLU(inplace=True)

    return nn.Sequential(
        nn.Conv2d(3, 96, 11, stride=4, padding=2),
        relu(),
        ResponseNorm(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2, groups=2),
        relu(),
        ResponseNorm(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1),
        relu(),
        nn.Conv2d(384, 384, 3, padding=1, groups=2),
        relu(),
        nn.Conv2d(384, 256, 3, padding=1, groups=2),
        relu(),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(256 * 36, 4096),
        relu(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        relu(),
        nn.Dropout(),
        nn.Linear(4096, CLASSES),
    )


def profile(batch: int, machine: Machine) -> Profile:
    """Of the whole device, with SGD without momentum, as those of the zoo's networks."""
    with torch.device("meta"):
        model = network()
        images = torch.empty(batch, 3, IMAGE_SIZE, IMAGE_SIZE)
        targets = torch.empty(batch, dtype=torch.long)
    return dry_step(
        model,
        lambda net, x, y: nn.functional.cross_entropy(net(x), y),
        inputs=(images, targets),
        machine=machine,
        device="cuda",
    ).profile
