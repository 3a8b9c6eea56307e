"""PyTorch's own sample inputs of its differentiable operators, run plain and under Penstock.

``torch.testing._internal`` is the test support that torch ships: no public interface, so what it lacks
in some version shows here and nowhere else.
"""

from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_flatten, tree_map

from offload_runs import same_bits, wait_for_writes
from penstock.hooks import saved_tensors
from penstock.hooks.handles import MovedHandle
from penstock.observe.recorder import Stage

SEED = 11


@dataclass
class Count:
    """What was tried, and what came of it."""

    operators: int = 0
    samples: int = 0
    saved: int = 0
    """Tensors that were saved and may move: no leaves."""
    moved: int = 0
    """Storages that were read back from flash."""
    saving_operators: int = 0
    moving_operators: int = 0
    unlike_itself: list = field(default_factory=list)
    """Operators of which two plain runs differ."""
    wrong: list = field(default_factory=list)

    def __str__(self):
        return (
            f"{self.operators} operators, {self.samples} samples, {self.saved} tensors saved,"
            f" {self.moved} storages read back from flash ({self.moving_operators} of"
            f" {self.saving_operators} operators that save), {len(self.wrong)} wrong,"
            f" plain runs differ: {self.unlike_itself or 'none'}"
        )


def differentiable(op_db):
    """The operators that have a backward on the CPU, each with the type that it is tried with."""
    for op in op_db:
        types = op.supported_backward_dtypes("cpu") if op.supports_autograd else ()
        for dtype in (torch.float32, torch.float64, torch.complex64):
            if dtype in types:
                yield op, dtype
                break


def name_of(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def copy_of(value):
    """A tensor in a copy of its storage, which nobody else holds."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    plain = value.detach()
    if plain.is_conj() or plain.is_neg():
        return plain.clone().requires_grad_(value.requires_grad)
    place = plain.storage_offset(), plain.size(), plain.stride()
    copy = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage().clone(), *place)
    return copy.requires_grad_(value.requires_grad)


def moving(value):
    """A tensor that is no leaf, so that it may move, if it is all that there is in its storage."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    whole = value.untyped_storage().nbytes() == value.nbytes
    return value.clone() if whole and value.requires_grad else value


def floating(values):
    return [
        each
        for each in tree_flatten(values)[0]
        if isinstance(each, torch.Tensor) and each.requires_grad
    ]


def forward(op, sample, leaves):
    """The operator's outputs, copied, and a loss of them; nothing else of the forward stays alive."""
    args, kwargs = tree_map(moving, leaves)
    outputs = floating(sample.output_process_fn_grad(op(*args, **kwargs)))
    results = [each.detach().clone() for each in outputs]
    loss = 0
    for i, each in enumerate(outputs):
        dense = each.to_dense() if each.layout is not torch.strided else each
        generator = torch.Generator().manual_seed(SEED + i)
        weights = torch.rand(dense.shape, generator=generator, dtype=torch.float64)
        wide = dense.to(torch.complex128) if dense.is_complex() else dense.double()
        loss = loss + (wide * weights).sum().abs()
    return results, loss


def run(op, sample, *, after=lambda: None):
    """Outputs and gradients of one sample, or the type of the error that it ends in."""
    leaves = tree_map(copy_of, ((sample.input, *sample.args), dict(sample.kwargs)))
    torch.default_generator.manual_seed(SEED)  # not of every device: operators run on the CPU
    results, loss = forward(op, sample, leaves)
    if not results:
        return [], []
    after()
    loss.backward()
    return results, [each.grad for each in floating(leaves)]


def equal(mine, plain):
    if mine is None or plain is None or mine.layout is torch.strided:
        return same_bits(mine, plain)
    return mine.layout is plain.layout and same_bits(mine.to_dense(), plain.to_dense())


def all_equal(mine, plain):
    return all(
        len(one) == len(other) and all(map(equal, one, other))
        for one, other in zip(mine, plain, strict=True)
    )


def try_samples(op, samples, everything, count):
    """Run each sample plain and in a session in which everything moves; note what differs."""
    saved_before, moved_before = count.saved, count.moved
    for sample in samples:
        if sample.kwargs.get("driver") == "gelsy":
            continue  # torch gives it an uninitialised array of pivots: plain runs differ
        with everything.session.paused():
            plain = run(op, sample)
        if not plain[0]:
            continue
        reads, handles = everything.reads, everything.handles
        mine = run(op, sample, after=everything.settle)
        count.samples += 1
        count.saved += everything.handles - handles
        count.moved += everything.reads - reads
        if not all_equal(mine, plain):
            with everything.session.paused():
                again = run(op, sample)
            if all_equal(again, plain):
                count.wrong.append(f"{name_of(op)}: {sample}"[:500])
            elif name_of(op) not in count.unlike_itself:
                count.unlike_itself.append(name_of(op))
    count.operators += 1
    count.saving_operators += count.saved > saved_before
    count.moving_operators += count.moved > moved_before


class Everything:
    """A session that moves every saved tensor that may move, however small, and counts them."""

    def __init__(self, session, monkeypatch):
        monkeypatch.setattr(saved_tensors, "TINY_BYTES", 0)
        self.session = session
        self.handles = 0
        pack = session.hooks._pack

        def counted(*args, **named):
            packed = pack(*args, **named)
            self.handles += isinstance(packed, MovedHandle)
            return packed

        monkeypatch.setattr(session.hooks, "_pack", counted)

    def settle(self):
        """Until every saved tensor that may move is on flash and nowhere else."""
        self.session.hooks.operators_returned()
        wait_for_writes(self.session)

    @property
    def reads(self):
        return flow_count(self.session)


def flow_count(session):
    return session.recorder.snapshot().flow(Stage.READ, "flash").count
