"""Threads that update tiles hold no more weights than leave room for those that are to stay."""

import threading
from types import SimpleNamespace

import pytest
import torch

from penstock.homed import settle
from penstock.optim.holds import WeightHolds
from penstock.optim.params import Param, ParameterPiece

WEIGHT_BYTES = 4 * 64
PATIENCE_S = 20


class Home:
    """Home of a weight, in memory of which all of them may have ``memory_bytes``."""

    memory_bytes = 8 * WEIGHT_BYTES
    update_memory = None

    def __init__(self, streamed_bytes):
        self.streamed_bytes = streamed_bytes

    def hold(self):
        pass

    def let_go(self, *, changed):
        pass


@pytest.mark.parametrize(
    ("streamed", "waits"), [(3 * WEIGHT_BYTES, True), (4 * WEIGHT_BYTES, False), (None, False)]
)
def test_a_tile_waits_rather_than_that_its_weight_takes_the_memory_of_one_that_stays(
    streamed, waits
):
    """As under DistributedDataParallel, where no backward waits for the updates."""
    tensors = [torch.nn.Parameter(torch.zeros(64)) for _ in range(2)]
    params = [Param(t, group=0, index=i, name=str(i)) for i, t in enumerate(tensors)]
    tiles = [SimpleNamespace(pieces=(ParameterPiece(i, 0, 64, 0),)) for i in range(2)]
    for tensor in tensors:
        settle(tensor, Home(streamed))
    holds, has_begun = WeightHolds(params, tiles), threading.Event()

    def work():
        with holds.of_tile(tiles[1], {0, 1}):
            has_begun.set()

    other = threading.Thread(target=work)
    with holds.of_tile(tiles[0], {0, 1}):
        other.start()
        assert has_begun.wait(0.2 if waits else PATIENCE_S) != waits
    assert has_begun.wait(PATIENCE_S)
    other.join()
