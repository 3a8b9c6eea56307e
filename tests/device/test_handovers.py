"""What Penstock's threads hand over counts for the order checker, whichever thread goes on with it."""

import threading

import pytest
import torch
from torch import nn

from penstock.optim import FlashAdamW, pipeline

pytestmark = pytest.mark.gpu


def test_what_a_thread_of_the_engine_begins_another_may_submit(disk_path, monkeypatch):
    """One that has written a record begins to read another in its place; who is updating is quicker."""
    begin_all, left = pipeline._begin_all, []

    def begin_all_later(begun):
        if threading.current_thread().name.startswith("penstock-io"):
            left.extend(begun)
        else:
            begin_all(begun)

    monkeypatch.setattr(pipeline, "_begin_all", begin_all_later)
    parameter = nn.Parameter(torch.ones(1 << 14))
    with_flash = FlashAdamW([parameter], lr=1e-2, flash=disk_path, tile=1024, threads=2)
    for _ in range(4):
        parameter.grad = torch.ones_like(parameter)
        with_flash.step()
    with_flash.close()
    assert left
    assert parameter.unique().numel() == 1
