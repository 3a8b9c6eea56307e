"""Training through the CUDA mover, on a device whose copies run late (see ``lazy_device``)."""

import torch
from torch import nn

from cuda_runs import assert_nothing_held, wait_until_settled
from offload_runs import Trace

HOST = "8MiB"
"""All of it for staging, with flash; all of it the host tier, without."""
MORE_HOST = "20MiB"
"""Half for staging, and half the host tier."""
BATCH = 64
"""Autograd then saves 6.6 MiB a step, at most 1 MiB of it at once."""
BUDGET = "4MiB"


class Network(nn.Module):
    """Saves inputs, outputs, indices, and views of one storage."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu_(self.norm(self.first(x)))
        x = nn.functional.max_pool2d(x, 2)
        x = (x + torch.tanh(self.second(x))).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(x.mean(1) * x.amax(1))


def trained(steps=3, session_of=None, *, settled=False, **backward):
    """Losses and gradients of some steps, under a session or none; the session, closed.

    ``settled``: backward begins when all that leaves has left.
    """
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace = Trace()
    session = None if session_of is None else session_of(model, optimizer).__enter__()
    try:
        for step in range(steps):
            x = torch.randn(BATCH, 3, 16, 16)
            loss = nn.functional.cross_entropy(model(x), torch.arange(BATCH) % 10)
            if settled and session is not None:
                wait_until_settled(session)
            loss.backward(**backward)
            if backward:
                loss.backward()
            trace.note(f"step {step}, loss", loss)
            trace.note_gradients(step, model)
            optimizer.step()
            optimizer.zero_grad()
        del x, loss
        if session is not None:
            assert_nothing_held(session)
    finally:
        if session is not None:
            session.close()
    return trace, session
