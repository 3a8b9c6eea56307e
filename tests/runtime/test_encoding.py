"""Storages that are encoded on their way out: bits, tickets, budgets, what is recorded."""

import gc
import threading
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from encoding_rig import FLOATS, PIECE, SCRATCH, Rig, bytes_of, floats, storage_of

from penstock.codec import registry
from penstock.codec.base import DTYPES, ITEMSIZE, Fidelity
from penstock.core.errors import BudgetError, ClosedError, ConfigError
from penstock.core.units import KIB, MIB
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder, Stage
from penstock.runtime.encoding import SLOTS, WORKING_SLOTS, HostCoder
from penstock.runtime.movers import RESTORED, CpuMover
from penstock.runtime.storage import Encoding
from penstock.store import FlashTier, Ticket
from penstock.store.account import Account
from penstock.store.frames import SCRATCH as OWNER
from penstock.store.frames import THREAD_NAME, Frames, FrameScratch
from penstock.testing.codec_samples import check_decoded, sources, with_zeros
from penstock.testing.tier_machine import wait_until

SIZES = (1, 7, 64, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5, 25 * PIECE + 3)
LOSSLESS = sorted(
    {(codec.name, dtype) for dtype in DTYPES for codec in registry.lossless_for(dtype)}
    | {("zero-value+exponent", "float32"), ("zero-value+exponent", "bfloat16")}
)
LOSSY = [
    ("positive", "float32"),
    ("bfloat16", "float32"),
    ("int8", "bfloat16"),
    ("zero-value+bfloat16", "float32"),
]


@pytest.fixture
def rig():
    with Rig() as rig:
        yield rig
        assert rig.tier.held_bytes == 0


@pytest.fixture
def flash_rig(disk_path, small_knobs):
    with ExitStack() as stack:
        engine = ThreadEngine()
        stack.callback(engine.close)
        recorder = Recorder()
        tier = FlashTier(str(disk_path), capacity_bytes=16 * MIB, engine=engine, recorder=recorder)
        yield stack.enter_context(Rig(tier=tier))
        assert tier.held_bytes == 0


def check_roundtrip(rig, content, *, skew, encoding):
    source = storage_of(content, skew)
    ticket = rig.stage.write(source, rig.tier, "slot", encoding)
    ticket.written.wait(120)
    back = rig.restored(ticket)
    assert bytes_of(back) == bytes(content)
    assert back.data_ptr() % 64 == source.data_ptr() % 64 == skew
    assert len(ticket.parts) == ticket.pieces
    assert ticket.frame_bytes == sum(part.nbytes for part in ticket.parts)
    assert ticket.nbytes == len(content)
    rig.discard(ticket)
    return ticket


# -- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "dtype"), LOSSLESS)
def test_every_bit_comes_back(rig, codec, dtype):
    """Whatever the size, whether it is a whole number of elements, and wherever it begins."""
    random = np.random.default_rng(1)
    for index, nbytes in enumerate(SIZES):
        skew = (0, 8, 24, 56)[index % 4] + (ITEMSIZE[dtype] if ITEMSIZE[dtype] < 8 else 0)
        content = with_zeros(dtype, nbytes, 0.6, random).tobytes()
        check_roundtrip(rig, content, skew=skew % 64, encoding=Encoding(codec, dtype))


@pytest.mark.parametrize("codec", ["zero-value", "exponent"])
def test_every_content_from_flash(flash_rig, codec):
    """Also what does not become shorter: such pieces are stored as they are."""
    nbytes = 5 * PIECE + 77
    for name, content in sources("float32", nbytes):
        ticket = check_roundtrip(flash_rig, content, skew=4, encoding=Encoding(codec, "float32"))
        assert ticket.frame_bytes <= nbytes + 6 * 64, name


@pytest.mark.parametrize(("codec", "dtype"), LOSSY)
def test_what_loses_something_keeps_its_promise(rig, codec, dtype):
    random = np.random.default_rng(2)
    content = with_zeros(dtype, 9 * PIECE + 5, 0.4, random)
    ticket = rig.written(content.tobytes(), encoding=Encoding(codec, dtype))
    back = np.frombuffer(bytes_of(rig.restored(ticket)), np.uint8)
    for index in range(ticket.pieces):
        start, nbytes = ticket.range_of(index)
        piece = slice(start, start + nbytes)
        check_decoded(registry.get(codec), dtype, content[piece], back[piece].copy())
    rig.discard(ticket)


def test_positive_gives_ones_and_zeros(rig):
    values = np.array([-1.5, -0.0, 0.0, 2.5, np.inf, -np.inf, np.nan], np.float32)
    ticket = rig.written(values.tobytes(), encoding=Encoding("positive", "float32"))
    back = np.frombuffer(bytes_of(rig.restored(ticket)), np.float32)
    assert back.tolist() == [0, 0, 0, 1, 1, 0, 1]
    rig.discard(ticket)


def test_it_may_be_read_again_and_again(rig):
    content = floats(10 * PIECE)
    ticket = rig.written(content)
    for _ in range(3):
        assert bytes_of(rig.restored(ticket)) == content
    rig.discard(ticket)


# -- what is not encoded --------------------------------------------------------------------------


def test_without_an_encoding_the_mover_does_it(rig):
    content = floats(5 * PIECE)
    ticket = rig.written(content, encoding=None, skew=3)
    assert type(ticket) is Ticket
    assert bytes_of(rig.restored(ticket)) == content
    rig.discard(ticket)


def test_elements_that_begin_nowhere_are_moved_as_they_are(rig):
    """A storage may begin at any byte; a codec wants its words whole."""
    content = floats(5 * PIECE)
    ticket = rig.written(content, skew=2)
    assert type(ticket) is Ticket
    assert rig.recorder.snapshot().counters["encoded.misaligned"] == 1
    assert bytes_of(rig.restored(ticket)) == content
    rig.discard(ticket)


def test_what_cannot_be_encoded_is_said_at_once(rig):
    for encoding in (Encoding("nonsense", "float32"), Encoding("exponent", "int8")):
        with pytest.raises(ConfigError):
            rig.begin(floats(PIECE), encoding=encoding)
    assert rig.tier.held_bytes == 0


def test_a_ticket_is_read_only_while_it_holds_something(rig):
    ticket = rig.written(floats(3 * PIECE))
    target = rig.mover.allocate(ticket)
    rig.discard(ticket)
    rig.discard(ticket)
    with pytest.raises(ConfigError, match="after it was discarded"):
        rig.stage.read(rig.tier, ticket, target, 0)
    rig.mover.drop(target)


# -- memory ---------------------------------------------------------------------------------------


def test_the_target_is_charged_as_any_other(rig):
    content = floats(300 * PIECE)
    plain, encoded = rig.written(content, encoding=None, skew=8), rig.written(content, skew=8)
    assert isinstance(encoded, Frames)
    for ask in (rig.mover.target_bytes, rig.mover.charge_bytes):
        assert ask(plain) == ask(encoded)
    before = rig.mover.used_bytes(rig.budget)
    target = rig.mover.allocate(encoded)
    assert rig.mover.used_bytes(rig.budget) == before + target.block.nbytes
    assert target.block.nbytes == rig.mover.target_bytes(encoded)
    rig.mover.drop(target)
    assert rig.mover.trim(1 << 40) == rig.mover.charge_bytes(encoded)
    assert rig.budget.used_by(RESTORED) == 0
    rig.discard(plain, encoded)


def scratch_of(nbytes, budget):
    """Scratch memory whose slots are mapped, as a stage has it."""
    scratch = FrameScratch(nbytes, budget, slots=SLOTS, working=WORKING_SLOTS)
    scratch.map_slots()
    return scratch


def test_scratch_is_charged_once_and_given_back():
    budget = Account(64 * MIB)
    for nbytes in (SCRATCH, 1 * MIB, 11 * MIB + 12345):
        scratch = scratch_of(nbytes, budget)
        charged = budget.used_by(OWNER)
        assert charged == SLOTS * scratch.slot_bytes + scratch.working_bytes
        assert nbytes * 0.95 - 10 * PIECE < charged <= nbytes
        slots = [scratch.take(is_write=False) for _ in range(SLOTS)]
        assert scratch.take(is_write=False) is None
        for slot in slots:
            assert slot.memory.ctypes.data % 4096 == 0
            slot.memory[:] = 1
            scratch.release(slot)
        del slot, slots
        scratch.close()
        scratch.close()
        assert budget.used_bytes == 0


def test_encoding_may_hold_half_of_the_slots():
    scratch = scratch_of(SCRATCH, Account(MIB))
    held = [scratch.take(is_write=True) for _ in range(SLOTS // 2)]
    assert scratch.take(is_write=True) is None
    held += [scratch.take(is_write=False) for _ in range(SLOTS // 2)]
    assert None not in held
    scratch.release(held.pop(0))
    assert scratch.take(is_write=True) is not None


def test_scratch_that_cannot_be_had():
    with pytest.raises(ConfigError, match="give at least 81920 bytes"):
        scratch_of(SCRATCH - 1, Account(64 * MIB))
    for spare in (0, 2 * 8192, SCRATCH - 1):  # nothing, the working memory, all but a byte
        budget = Account(4 * MIB)
        assert budget.try_take(4 * MIB - spare, "somebody")
        with pytest.raises(BudgetError, match="give at least") as raised:
            scratch_of(SCRATCH, budget)
        assert raised.value.least_bytes == 4 * MIB - spare + SCRATCH
        gc.collect()
        assert budget.used_by(OWNER) == 0
    with pytest.raises(BudgetError):
        scratch_of(SCRATCH, Account(SCRATCH // 2))


@pytest.mark.parametrize("nbytes", [SCRATCH, 1 * MIB, 16 * MIB])
def test_pieces_are_such_that_slots_and_working_memory_suffice(nbytes):
    scratch = FrameScratch(nbytes, Account(64 * MIB), slots=SLOTS, working=WORKING_SLOTS)
    coder = HostCoder(scratch)
    chains = ("zero-value+exponent", "zero-value+bfloat16", "zero-value+int8")
    for name in (*registry.names(), *chains):
        codec = registry.get(name)
        for dtype in codec.dtypes:
            fits = partial(coder.fits, codec, dtype)
            piece = scratch.piece_bytes(fits)
            if not piece:
                assert nbytes == SCRATCH
                assert codec.spec(dtype, 4096).scratch_bytes > scratch.working_bytes
                continue
            spec = codec.spec(dtype, piece)
            assert piece > 0
            assert piece % 4096 == 0
            assert spec.bound_bytes <= scratch.slot_bytes
            assert spec.scratch_bytes <= scratch.working_bytes
            if codec.fidelity is Fidelity.EXACT and "+" not in name:
                assert piece == scratch.slot_bytes - 4096


def test_a_full_budget_does_not_hinder_encoding():
    """Encoding makes room, so it must not need any."""
    with Rig(budget=4 * MIB) as rig:
        rig.budget.try_take(rig.budget.free_bytes, "somebody")
        content = floats(40 * PIECE)
        ticket = rig.written(content)
        assert rig.mover.allocate(ticket) is None
        rig.budget.free(rig.budget.used_by("somebody"), "somebody")
        assert bytes_of(rig.restored(ticket)) == content
        rig.discard(ticket)


def test_a_forced_target_exceeds_the_budget():
    with Rig(budget=4 * MIB) as rig:
        content = floats(40 * PIECE)
        ticket = rig.written(content)
        rig.budget.try_take(rig.budget.free_bytes, "somebody")
        target = rig.mover.allocate(ticket, force=True)
        rig.stage.read(rig.tier, ticket, target, 0).wait(20)
        assert bytes_of(rig.mover.finish(target)) == content


def test_closing_gives_everything_back_and_ends_the_thread():
    rig = Rig()
    ticket = rig.written(floats(10 * PIECE))
    assert [each for each in threading.enumerate() if each.name == THREAD_NAME]
    rig.close()
    rig.stage.close()
    assert rig.budget.used_bytes == 0
    assert not [each for each in threading.enumerate() if each.name == THREAD_NAME]
    rig.discard(ticket)
    with pytest.raises(ClosedError, match="closed, with their session"):
        rig.begin(floats(PIECE))


def test_a_stage_that_is_dropped_gives_everything_back_too():
    rig = Rig()
    rig.written(floats(10 * PIECE))
    budget = rig.budget
    del rig.stage, rig.mover
    gc.collect()
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == THREAD_NAME])
    wait_until(lambda: gc.collect() >= 0 and budget.used_by(OWNER) == 0)


def test_no_thread_before_there_is_something_to_encode(rig):
    rig.discard(rig.written(floats(PIECE), encoding=None))
    assert not [each for each in threading.enumerate() if each.name == THREAD_NAME]


# -- what is recorded -----------------------------------------------------------------------------


def test_spans_and_counters(rig):
    content = floats(10 * PIECE + 100)
    ticket = rig.written(content, label="conv1[0]")
    rig.restored(ticket)
    totals = rig.recorder.snapshot()
    assert totals.counters["encoded.source_bytes.zero-value"] == len(content)
    assert totals.counters["encoded.frame_bytes.zero-value"] == ticket.frame_bytes < len(content)
    for stage in (Stage.ENCODE, Stage.DECODE):
        spans = [each for each in rig.recorder.events() if getattr(each, "stage", "") == stage]
        assert len(spans) == ticket.pieces == 11
        assert sum(span.nbytes for span in spans) == len(content)
        assert {(span.tier, span.slot) for span in spans} == {("host", "conv1[0]")}
    rig.discard(ticket)


def test_larger_scratch_makes_larger_pieces():
    with Rig(scratch=10 * 64 * KIB) as rig:
        ticket = rig.written(floats(1 * MIB))
        assert ticket.piece_bytes == 60 * KIB
        assert (ticket.codec, ticket.dtype) == FLOATS
        rig.discard(ticket)


def test_a_mover_ignores_an_encoding():
    """CPU and CUDA movers move bytes as they are; so a plan with codecs is right on them, too."""
    with Rig() as rig:
        inner = CpuMover(budget=rig.budget)
        ticket = inner.write(storage_of(floats(PIECE)), rig.tier, "slot", FLOATS)
        ticket.written.wait(120)
        assert ticket.nbytes == PIECE
        inner.discard(rig.tier, ticket)
        inner.close()
