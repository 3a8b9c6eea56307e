"""DeepSpeed as one process on the CPU: it reads its environment when it is imported."""

import os

for name, value in {
    "DS_ACCELERATOR": "cpu",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29577",
}.items():
    os.environ.setdefault(name, value)

import deepspeed  # noqa: E402

__all__ = ["deepspeed"]
