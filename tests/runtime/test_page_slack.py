"""Restored storages take whole pages: a plan leaves room for those that are not full."""

import torch

from offload_runs import counted, wait_for_writes
from penstock.core.units import GIB, MIB
from penstock.runtime.movers import page_slack_bytes

LAYERS, BATCH, CHANNELS, SIDE = 12, 2, 16, 138
SAVED_EACH = BATCH * CHANNELS * SIDE * SIDE * 4
"""2.3 MiB: what is read back fills one page, and a part of another."""


def network():
    torch.manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def test_what_a_plan_keeps_is_never_evicted_for_pages_that_are_not_full(session_for):
    net = network()
    with session_for(net, policy="auto", device_memory=11 * SAVED_EACH) as session:
        for _ in range(4):
            net(torch.randn(BATCH, CHANNELS, SIDE, SIDE)).sum().backward()
            wait_for_writes(session)
            session.step()
        assert session.plan.offloaded_bytes > 0
        assert counted(session, "evicted") == 0
        assert session.plan.budgets.device_bytes == 11 * SAVED_EACH - page_slack_bytes(
            11 * SAVED_EACH
        )


def test_the_slack_is_two_pages_or_a_part_of_a_small_budget():
    assert page_slack_bytes(8 * MIB) == MIB
    assert page_slack_bytes(64 * MIB) == page_slack_bytes(GIB) == 4 * MIB
