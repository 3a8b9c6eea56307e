"""``penstock.hooks.saved_tensors``: which handle stands for which tensor, and what it costs."""

import pytest
import torch
from torch import nn

from offload_runs import assert_nothing_held, same_bits, small_storages, wait_for_writes
from penstock.hooks.handles import CopiedHandle, ForeignHandle, KeptHandle, MovedHandle, SmallHandle
from penstock.hooks.saved_tensors import COMPACT_SHARE, TINY_BYTES
from penstock.runtime.table import SAVED, SMALL

LARGE = 4096
FLOOR = 8192


@pytest.fixture
def session(session_for):
    with session_for() as session:
        yield session


def kind_of(session, tensor):
    return type(session.hooks.pack(tensor))


def test_sizes_decide_between_kept_small_and_moved(session):
    for nbytes, kind in (
        (4, KeptHandle),
        (TINY_BYTES, KeptHandle),
        (TINY_BYTES + 4, SmallHandle),
        (FLOOR - 4, SmallHandle),
        (FLOOR, MovedHandle),
        (16 * FLOOR, MovedHandle),
    ):
        assert kind_of(session, torch.empty(nbytes // 4)) is kind, nbytes


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.Parameter(torch.ones(LARGE)), KeptHandle),
        (lambda: torch.ones(LARGE, requires_grad=True)[5:], KeptHandle),
        (lambda: torch.ones(LARGE)[:0], KeptHandle),
        (lambda: torch.ones(LARGE, device="meta"), KeptHandle),
        (lambda: torch.ones(64, 64).to_sparse(), ForeignHandle),
        (lambda: torch.ones(LARGE, dtype=torch.complex64).conj(), ForeignHandle),
        (lambda: torch.ones(LARGE, dtype=torch.complex64).conj().imag, ForeignHandle),
        (lambda: torch.ones(LARGE, dtype=torch.complex64), MovedHandle),
        (lambda: torch.ones(LARGE, requires_grad=True) * 2, MovedHandle),
        (lambda: torch.ones(TINY_BYTES // 4, requires_grad=True) * 2, KeptHandle),
        (lambda: torch.ones(LARGE, dtype=torch.bool).repeat(4), MovedHandle),
        (lambda: torch.ones(2 * LARGE, dtype=torch.bfloat16), MovedHandle),
        (lambda: torch.arange(LARGE), MovedHandle),
        (lambda: torch.ones(LARGE).view(64, 64).t(), MovedHandle),
        (lambda: torch.ones(LARGE, 1).expand(LARGE, 7), MovedHandle),
        (lambda: torch.ones(3 * LARGE).view(-1, 3)[:, 1], MovedHandle),
        (lambda: torch.ones(()).expand(LARGE), KeptHandle),
    ],
)
def test_kinds_decide_too(session, make, kind):
    tensor = make()
    packed = session.hooks.pack(tensor)
    assert type(packed) is kind
    back = session.hooks.unpack(packed)
    assert back.layout is tensor.layout
    assert (back.size(), back.dtype) == (tensor.size(), tensor.dtype)
    if tensor.layout is torch.strided:
        assert back.stride() == tensor.stride()
    if not tensor.is_leaf:
        assert back is not tensor, "a saved output that is returned as it came lives for ever"


def test_what_is_kept_is_not_charged(session):
    packed = session.hooks.pack(torch.ones(LARGE, requires_grad=True))
    assert isinstance(packed, KeptHandle)
    assert session.budget.used_bytes == 0


def test_what_is_small_is_charged_until_its_last_handle_dies(session):
    tensor = torch.ones(1500)
    packed = [session.hooks.pack(tensor), session.hooks.pack(tensor[3:])]
    assert len(small_storages(session)) == 1
    assert session.budget.used_by(SMALL) >= 6000
    packed.pop()
    assert session.budget.used_by(SMALL) >= 6000
    packed.pop()
    assert session.budget.used_by(SMALL) == 0


@pytest.mark.parametrize("policy", ["keep", "all"])
def test_any_view_comes_back_as_it_was(session_for, policy):
    base = torch.randn(64, 6, 32, generator=torch.Generator().manual_seed(0))
    views = [
        base,
        base[3:60],
        base.permute(2, 0, 1),
        base[:, 1:5:2, ::3],
        base.unfold(2, 8, 4),
        base.flatten()[7:9000],
        base.as_strided((60, 150), (200, 1), 11),
        torch.view_as_complex(base.view(64, 6, 16, 2)),
    ]
    with session_for(policy=policy) as session:
        packed = [session.hooks.pack(view) for view in views]
        expected = [view.clone() for view in views]
        shapes = [(view.size(), view.stride(), view.storage_offset()) for view in views]
        assert len({each.saved for each in packed}) == 1, "one storage, however many views"
        del base, views
        wait_for_writes(session)
        for _ in range(2):
            backs = [session.hooks.unpack(each) for each in packed]
            assert all(map(same_bits, backs, expected))
            assert [(b.size(), b.stride(), b.storage_offset()) for b in backs] == shapes
            assert len({b.untyped_storage()._cdata for b in backs}) == 1, "aliases alias again"
            del backs
        del packed
        assert_nothing_held(session)


@pytest.mark.parametrize("policy", ["keep", "all"])
def test_aliases_that_are_no_views_come_back_too(session_for, policy):
    """``detach`` and views of another dtype have no base. Whether their version counter is that of a
    tensor that was saved before cannot be seen, so they are saved on their own.
    """
    base = torch.randn(64, 6, 32, generator=torch.Generator().manual_seed(0))
    aliases = [base, base.detach(), base.data, base.view(torch.int32), base.view(torch.bfloat16)]
    with session_for(policy=policy) as session:
        packed = [session.hooks.pack(alias) for alias in aliases]
        expected = [alias.clone() for alias in aliases]
        del base, aliases
        wait_for_writes(session)
        assert all(
            same_bits(session.hooks.unpack(p), e) for p, e in zip(packed, expected, strict=True)
        )
        del packed
        assert_nothing_held(session)


def test_a_view_of_less_than_its_share_is_copied_out(session):
    base = torch.ones(COMPACT_SHARE * LARGE)
    for count, copied in ((LARGE, False), (LARGE - 1, True)):
        packed = session.hooks.pack(base[:count])
        session.hooks.operators_returned()
        assert (type(packed) is CopiedHandle) is copied
        moved = packed.copy if copied else packed
        assert (moved.saved.nbytes < base.nbytes) is copied


def test_an_inactive_session_lets_everything_pass(session):
    session.hooks.active = False
    packed = session.hooks.pack(torch.ones(LARGE))
    assert isinstance(packed, ForeignHandle)
    assert session.budget.used_by(SAVED) == 0
    assert same_bits(session.hooks.unpack(packed), torch.ones(LARGE))
