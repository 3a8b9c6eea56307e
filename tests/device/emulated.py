"""Processes of ``python -m penstock.testing.gpu --preload emulated`` run on the emulated device."""

from __future__ import annotations

import sys

import kernels
import torch

pytest_plugins = ["plugin"]
"""Under pytest, which is given this module as a plugin."""

if "_pytest" not in sys.modules:
    torch.backends.cudnn.enabled = False
    for kind in ("flash", "mem_efficient", "cudnn"):  # which CPUs have not
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    kernels.install()
