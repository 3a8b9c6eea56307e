"""Processes of ``python -m penstock.testing.gpu --preload emulated`` run on the emulated device."""

from __future__ import annotations

import sys

import emulated_operators
import torch

if "_pytest" in sys.modules and "--observe" not in sys.argv:
    pytest_plugins = ["plugin"]  # which judges all that the kernels tell
else:
    torch.backends.cudnn.enabled = False
    for kind in ("flash", "mem_efficient", "cudnn"):  # which CPUs have not
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    emulated_operators.install()
