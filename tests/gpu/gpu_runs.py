"""Training on a GPU with and without a session, for the tests beside this file."""

import gc
from contextlib import contextmanager
from functools import partial

import torch

from cuda_runs import assert_nothing_held, wait_until_settled
from offload_runs import Trace, counted, session_in
from penstock.lab import zoo
from penstock.observe.recorder import Stage

DEVICE = "cuda"
SMALL = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 12 << 30
"""A device with little memory, as the emulated one is, gets smaller networks and batches."""
EMULATED = torch.cuda.is_available() and torch.cuda.get_device_name(0).startswith("emulated")
"""Its operators are the CPU's, so that two runs are the same."""
HOST = "64MiB"
"""All of it for staging, with flash; all of it the host tier, without."""
BOTH = "256MiB" if SMALL else "1GiB"
"""Room for all that a network saves, on both: what is pinned is cleared first, which takes its time."""
BATCHES = {
    "alexnet": 8 if SMALL else 120,
    "vgg16": 4 if SMALL else 48,
    "googlenet": 4 if SMALL else 26,
    "resnet18": 32 if SMALL else 200,
    "resnet272": 4 if SMALL else 32,
    "densenet121": 4 if SMALL else 51,
    "bert-base": 8 if SMALL else 16,
    "gpt2": 8 if SMALL else 16,
}
REPRODUCIBLE = ("resnet18", "gpt2")
"""Of these torch has deterministic kernels for everything; of others it may not, on this device."""


def settings_for(places, **settings):
    """Of a session that spills to ``"flash"``, to ``"host"``, or to both."""
    settings = {"host_memory": BOTH if places == "both" else HOST} | settings
    if places == "host":
        settings |= {"flash": (), "flash_capacity": None}
    return settings


def train(
    model,
    optimizer,
    batch_size,
    *,
    steps=3,
    dtype=torch.float32,
    micro_batches=1,
    amid=lambda: None,
):
    """Every loss, gradient and weight of some steps, from fixed seeds. ``amid()``: before backward."""
    trace = Trace()
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            batch = zoo.example_batch(model, batch_size, seed=10 * step + micro, device=DEVICE)
            torch.manual_seed(1000 + step)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = model(*batch)
            amid()
            loss.backward()
            trace.note(f"step {step}, loss {micro}", loss)
        trace.note_gradients(step, model)
        optimizer.step()
        trace.note_weights(step, model)
    return trace


def prepare(family):
    torch.manual_seed(0)
    model = zoo.build(family, size="tiny").to(DEVICE)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def run(family, path=None, *, wrap_tier=None, session_settings=None, settled=False, **how):
    """The trace of a training; with a path under a session, which is returned closed.

    ``settled``: backward begins when everything has left, so that all of it comes back.
    """
    model, optimizer = prepare(family)
    if path is None:
        return train(model, optimizer, BATCHES[family], **how), None
    settings = session_settings or {}
    with session_in(path, model, optimizer, wrap_tier=wrap_tier, **settings) as session:
        if settled:
            how["amid"] = partial(wait_until_settled, session)
        trace = train(model, optimizer, BATCHES[family], **how)
        assert_nothing_held(session)
    return trace, session


def saved_bytes(family, path):
    """What autograd holds at most, without offloading."""
    _, session = run(family, path, steps=1, session_settings=settings_for("host", policy="keep"))
    return session.budget.peak_bytes


def copied_bytes(session):
    """Bytes out and in, over the link."""
    totals = session.recorder.snapshot()
    return tuple(
        sum(flow.nbytes for (stage, _), flow in totals.flows.items() if stage is wanted)
        for wanted in (Stage.COPY_OUT, Stage.COPY_IN)
    )


def assert_moved(session, places, *, back=False):
    """Bytes really went over the link, and ``back``, and to flash if that was asked for.

    What is needed before it has left need not come back.
    """
    out, returned = copied_bytes(session)
    assert out > 0
    assert returned > 0 or not back
    assert counted(session, "pin.failed") == 0
    if places == "flash":
        assert session.recorder.snapshot().flow(Stage.WRITE, "flash").nbytes > 0


@contextmanager
def little_memory(room, device=0):
    """Torch gets no more than ``room`` beside what it has reserved of a device; yields the sum."""
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    most = torch.cuda.memory_reserved(device) + room
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(most / total, device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        yield most
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
        gc.collect()
        torch.cuda.empty_cache()
