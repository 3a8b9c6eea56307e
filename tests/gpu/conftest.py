"""On a GPU, equal to the last bit needs that torch itself is: it is told so before it starts CUDA."""

import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def deterministic():
    """The same algorithms in every run; and ``torch.empty`` is NaN, which shows what is not filled."""
    import torch

    backends = torch.backends
    before = torch.are_deterministic_algorithms_enabled(), backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    backends.cudnn.benchmark = False
    for enable in ("flash", "mem_efficient", "cudnn"):
        getattr(backends.cuda, f"enable_{enable}_sdp")(False)
    yield
    torch.use_deterministic_algorithms(before[0])
    backends.cudnn.benchmark = before[1]
    for enable in ("flash", "mem_efficient", "cudnn"):
        getattr(backends.cuda, f"enable_{enable}_sdp")(True)


@pytest.fixture(autouse=True)
def staged(monkeypatch):
    """Through host memory, also where it need not be; ``test_gpu_direct`` says otherwise."""
    monkeypatch.setenv("PENSTOCK_GPU_DIRECT", "off")
