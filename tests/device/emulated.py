"""Processes of ``python -m penstock.testing.gpu --preload emulated`` run on the emulated device."""

from __future__ import annotations

import sys

import kernels
import torch

pytest_plugins = ["plugin"]
"""Under pytest, which is given this module as a plugin."""

if "_pytest" not in sys.modules:
    torch.backends.cudnn.enabled = False
    kernels.install()
