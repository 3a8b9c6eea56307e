"""The profile of what a session has seen."""

import torch

from offload_runs import same_bits
from penstock.core.units import KIB, MIB
from penstock.plan.plan import Action

BATCH = 256


class Narrowing(torch.nn.Module):
    """Saves maps of 1 MiB, and after the last of them many small ones, of 1 MiB together."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6)))
        self.narrow = torch.nn.ModuleList(torch.nn.Linear(1024, 64) for _ in range(16))

    def forward(self, x):
        for layer in self.wide:
            x = torch.relu(layer(x))
        return sum((each(x).sigmoid() ** 2).sum() for each in self.narrow)


def test_what_is_small_and_saved_last_is_planned_for(session_for):
    """Else what the plan keeps would have to go, in each step, as soon as it is there."""
    torch.manual_seed(0)
    net, inputs = Narrowing(), torch.randn(BATCH, 1024)
    net(inputs).backward()
    expected = [each.grad.clone() for each in net.parameters()]
    small = 16 * BATCH * 64 * 4
    options = {"policy": "auto", "floor": 128 * KIB, "codec": "none"}
    with session_for(net, device_memory=4 * MIB, **options) as session:
        for _ in range(3):
            net.zero_grad()
            net(inputs).backward()
            session.step()
        slots = session.profile.slots
        first = min(slots, key=lambda slot: (slot.needed_at_ns, -slot.saved_at_ns))
        assert first.small_bytes_at_need >= small
        assert all(slot.small_bytes_at_need is None for slot in slots if slot is not first)
        plan = session.plan
        kept = [one.key.nbytes for one in plan.decisions if one.action is Action.KEEP]
        assert kept
        assert sum(kept) + small <= plan.budgets.device_bytes
        assert all(
            same_bits(each.grad, grad)
            for each, grad in zip(net.parameters(), expected, strict=True)
        )
