"""Storages that are encoded on a device before the copy: bits, order, memory, and what goes wrong."""

import threading
import weakref
from concurrent.futures import CancelledError
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cuda_rig import HostSpec
from lazy_device import LazyLink

from penstock.codec.base import DTYPES, HEADER_BYTES, ITEMSIZE
from penstock.codec.device import FORMS, kernels
from penstock.codec.device.words import WORD
from penstock.codec.registry import lossless_for
from penstock.core.errors import (
    BudgetError,
    ClosedError,
    CodecError,
    ConfigError,
    HookError,
    NoSpaceError,
)
from penstock.core.units import KIB, MIB
from penstock.io.engine import Priority
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder, Stage
from penstock.runtime.cuda import encoding
from penstock.runtime.cuda.codec_speeds import CodecSpeeds
from penstock.runtime.cuda.encoding import DeviceCoder, open_device_stage
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.cuda.pinned import Slab
from penstock.runtime.movers import RESTORED
from penstock.runtime.storage import Encoding
from penstock.store import FlashTier
from penstock.store.account import Account
from penstock.store.frames import SCRATCH as OWNER
from penstock.store.frames import FrameScratch
from penstock.testing.codec_samples import check_decoded, sources, with_zeros
from penstock.testing.tier_machine import wait_until

FLOATS = Encoding("zero-value", "float32")
SCRATCH = MIB
PIECE = 124 * KIB
"""What a piece of float32 is with so much scratch memory, by ``zero-value``."""
LOSSLESS = sorted({(codec.name, dtype) for dtype in DTYPES for codec in lossless_for(dtype)})
LOSSY = [("positive", "float32"), ("bfloat16", "float32"), ("int8", "bfloat16")]
pytestmark = pytest.mark.usefixtures("one_thread")


class Rig:
    """A stage that encodes, over slabs, on a device whose copies run late."""

    def __init__(self, *, link=None, flash=None, staging=16 * MIB, host=16 * MIB, budget=64 * MIB):
        self.link = link or LazyLink(most_delay_s=0.0002)
        self.recorder = Recorder()
        self.budget = Account(budget)
        self.host_budget = Account(1 << 30, name="host")
        device = torch.device("cpu")
        slabs = [
            Slab(nbytes, link=self.link, device=device, budget=self.host_budget, name=name)
            for name, nbytes in (("staging", staging), ("host tier", host))
        ]
        self.slabs = slabs
        self.mover = CudaMover(
            device=device,
            budget=self.budget,
            recorder=self.recorder,
            link=self.link,
            staging=slabs[0],
            host=slabs[1],
        )
        self.stage = open_device_stage(
            self.mover,
            link=self.link,
            scratch_bytes=SCRATCH,
            budget=self.budget,
            recorder=self.recorder,
            speeds=CodecSpeeds(),
        )
        self.host = HostSpec()
        self.tier = flash or self.host

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stage.close()
        self.link.end()
        assert self.budget.used_bytes == 0
        assert self.budget.peak_bytes <= self.budget.limit_bytes

    def begin(self, content, encoding=FLOATS, tier=None):
        """Begin to write a storage that nobody else holds; the ticket."""
        storage = storage_of(content)
        self.mover.use(storage)
        return self.stage.write(storage, tier or self.tier, "slot", encoding)

    def written(self, content, encoding=FLOATS, tier=None):
        ticket = self.begin(content, encoding, tier)
        ticket.written.wait(20)
        return ticket

    def fetch(self, ticket, priority=Priority.DEMAND):
        target = self.mover.allocate(ticket)
        return target, self.stage.read(self.tier, ticket, target, priority)

    def bytes_of(self, ticket):
        """What comes back, as whoever uses it sees it."""
        target, transfer = self.fetch(ticket)
        transfer.wait(20)
        storage = self.mover.finish(target)
        self.mover.use(storage)
        return bytes_of(storage)

    def nothing_rests(self):
        return all(slab.used_bytes == 0 for slab in self.slabs)


@pytest.fixture
def rig():
    with Rig() as rig:
        yield rig
        wait_until(rig.nothing_rests)


def storage_of(content):
    memory = torch.empty(len(content), dtype=torch.uint8)
    memory.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return memory.untyped_storage()


def bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def floats(nbytes, share=0.5, seed=0):
    random = np.random.default_rng(seed)
    return with_zeros("float32", nbytes, share, random).tobytes()


# -- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "dtype"), LOSSLESS)
def test_every_bit_comes_back(rig, codec, dtype):
    """Whatever the length, and whether it is a whole number of elements."""
    random = np.random.default_rng(1)
    for nbytes in (1, 7, 4097, 2 * PIECE + 5, 3 * PIECE):
        content = with_zeros(dtype, nbytes, 0.6, random).tobytes()
        ticket = rig.written(content, Encoding(codec, dtype))
        assert rig.bytes_of(ticket) == content
        assert len(ticket.parts) == ticket.pieces
        assert ticket.frame_bytes == sum(part.nbytes for part in ticket.parts)
        rig.stage.discard(rig.tier, ticket)


@pytest.mark.parametrize("codec", ["zero-value", "exponent", "narrow"])
def test_every_content_from_flash(disk_path, small_knobs, codec):
    """NaNs of any payload, -0.0, subnormals; and what does not become shorter is stored as it is."""
    engine, recorder = ThreadEngine(), Recorder()
    flash = FlashTier(str(disk_path), capacity_bytes=16 * MIB, engine=engine, recorder=recorder)
    with Rig(flash=flash) as rig:
        nbytes = PIECE + 77
        for name, content in sources("float32", nbytes):
            ticket = rig.written(content.tobytes(), Encoding(codec, "float32"))
            assert rig.bytes_of(ticket) == content.tobytes(), name
            assert ticket.frame_bytes <= nbytes + HEADER_BYTES * ticket.pieces
            rig.stage.discard(flash, ticket)
        wait_until(rig.nothing_rests)
        wait_until(lambda: not flash.held_bytes)
        flash.close()
        engine.close()


@pytest.mark.parametrize(("codec", "dtype"), LOSSY)
def test_what_loses_something_keeps_its_promise(rig, codec, dtype):
    content = with_zeros(dtype, 3 * PIECE + 5, 0.4, np.random.default_rng(2))
    ticket = rig.written(content.tobytes(), Encoding(codec, dtype))
    back = np.frombuffer(rig.bytes_of(ticket), np.uint8)
    for index in range(ticket.pieces):
        start, nbytes = ticket.range_of(index)
        piece = slice(start, start + nbytes)
        check_decoded(FORMS[codec].CODEC, dtype, content[piece], back[piece].copy())
    rig.stage.discard(rig.tier, ticket)


def test_fewer_bytes_are_copied(rig):
    content = floats(12 * PIECE, share=0.9)
    ticket = rig.written(content)
    assert rig.link.copied_bytes["out"] == ticket.frame_bytes < 0.2 * len(content)
    assert rig.bytes_of(ticket) == content
    assert rig.link.copied_bytes["in"] == ticket.frame_bytes
    counted = rig.recorder.snapshot().counted
    assert counted("encoded.source_bytes.zero-value") == len(content)
    assert counted("encoded.frame_bytes.zero-value") == ticket.frame_bytes
    rig.stage.discard(rig.tier, ticket)


def test_it_may_be_read_again_and_again_by_several_at_once(rig):
    contents = [floats(4 * PIECE, seed=seed) for seed in range(4)]
    tickets = [rig.written(content) for content in contents]
    for _ in range(3):
        reads = [rig.fetch(ticket, Priority.PREFETCH) for ticket in tickets]
        for (target, transfer), content in zip(reads, contents, strict=True):
            transfer.promote(Priority.DEMAND)
            transfer.wait(20)
            assert bytes_of(rig.mover.finish(target)) == content
        del target, reads
    for ticket in tickets:
        rig.stage.discard(rig.tier, ticket)


def test_what_is_not_to_be_encoded_goes_as_it_is(rig):
    content = floats(3 * PIECE)
    for wish, counter in (
        (None, ""),
        (Encoding("zero-value+exponent", "float32"), "encoded.no_device_form"),
    ):
        ticket = rig.written(content, wish)
        assert not hasattr(ticket, "frame_bytes")
        assert rig.bytes_of(ticket) == content
        assert not counter or rig.recorder.snapshot().counted(counter) == 1
        rig.stage.discard(rig.tier, ticket)
    whole = torch.frombuffer(bytearray(content + b"1"), dtype=torch.uint8).untyped_storage()
    shifted = whole[1 : len(content) + 1]
    rig.mover.use(shifted)
    ticket = rig.stage.write(shifted, rig.tier, "slot", FLOATS)
    ticket.written.wait(20)
    assert rig.recorder.snapshot().counted("encoded.misaligned") == 1
    assert rig.bytes_of(ticket) == bytes_of(shifted)
    rig.stage.discard(rig.tier, ticket)


# -- order ----------------------------------------------------------------------------------------


def test_a_source_is_encoded_when_its_stream_has_made_it(rig):
    """The stream that saved it is far behind the host, and so is another one that works with it."""
    content = floats(5 * PIECE)
    storage = storage_of(bytes(len(content)))
    gate = threading.Event()
    stream = rig.link.copy_stream(rig.mover.device)
    stream.work.put(gate.wait)
    rig.link._copy("out", stream, storage.data_ptr(), _address(content), len(content))
    rig.link.current = stream
    rig.mover.use(storage)
    rig.link.current = rig.link.NOW
    rig.mover.use(storage)
    ticket = rig.stage.write(storage, rig.tier, "slot", FLOATS)
    del storage
    assert not ticket.written.done
    gate.set()
    ticket.written.wait(20)
    assert rig.bytes_of(ticket) == content
    rig.stage.discard(rig.tier, ticket)


def test_a_target_is_filled_when_its_memory_is_free(rig, monkeypatch):
    """What used the memory before is done with it only when ``ready`` is reached."""
    content = floats(5 * PIECE)
    ticket = rig.written(content)
    gate, seen = threading.Event(), []
    stream = rig.link.copy_stream(rig.mover.device)
    stream.work.put(gate.wait)
    rig.link.current = stream
    target = rig.mover.allocate(ticket)
    rig.link.current = rig.link.NOW
    decode = encoding.decode_tensor

    def decoding(*args, **named):
        seen.append(gate.is_set())
        return decode(*args, **named)

    monkeypatch.setattr(encoding, "decode_tensor", decoding)
    transfer = rig.stage.read(rig.tier, ticket, target, Priority.DEMAND)
    threading.Timer(0.2, gate.set).start()  # long after the first frame has arrived
    transfer.wait(20)
    assert seen == [True] * ticket.pieces
    assert bytes_of(rig.mover.finish(target)) == content
    rig.stage.discard(rig.tier, ticket)


def _address(content):
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    _held.append(memory)
    return memory.data_ptr()


_held = []


def test_capturing_is_refused_as_without_a_codec(rig, monkeypatch):
    monkeypatch.setattr(rig.link, "capturing", lambda: True)
    with pytest.raises(HookError, match="CUDA graph"):
        rig.begin(floats(PIECE))


# -- memory ---------------------------------------------------------------------------------------


def test_scratch_memory_is_charged_once_and_frames_to_it(rig):
    charged = rig.budget.used_by(OWNER)
    assert charged == SCRATCH == rig.budget.used_bytes
    ticket = rig.written(floats(12 * PIECE, share=0.1))
    assert rig.budget.peak_bytes == charged
    target, transfer = rig.fetch(ticket)
    transfer.wait(20)
    assert rig.budget.used_by(RESTORED) == ticket.nbytes
    assert rig.budget.peak_bytes == charged + ticket.nbytes
    frames = rig.stage._scratch.frames
    assert 0 < frames.peak_bytes <= frames.limit_bytes < charged
    del target
    wait_until(lambda: frames.used_bytes == 0)
    rig.stage.discard(rig.tier, ticket)


def test_no_more_frames_are_alive_than_there_are_slots(rig, monkeypatch):
    alive, most = set(), []
    make = encoding.encode_tensor

    def making(*args):
        frame = make(*args)
        storage = frame.untyped_storage()
        alive.add(storage._cdata)
        most.append(len(alive))
        weakref.finalize(storage, alive.discard, storage._cdata)
        return frame

    monkeypatch.setattr(encoding, "encode_tensor", making)
    tickets = [rig.written(floats(8 * PIECE, seed=seed)) for seed in range(3)]
    assert max(most) <= encoding._SLOTS // 2
    for ticket in tickets:
        rig.stage.discard(rig.tier, ticket)


@pytest.mark.parametrize(("codec", "dtype"), LOSSLESS + LOSSY)
def test_a_piece_keeps_to_the_scratch_memory(codec, dtype):
    scratch = scratch_of(SCRATCH, Account(2 * MIB))
    piece = piece_bytes(scratch, codec, dtype)
    assert piece % 4096 == 0
    assert encoding.scratch_bytes(codec, dtype, piece) <= scratch.working_bytes
    assert FORMS[codec].CODEC.spec(dtype, piece).bound_bytes <= scratch.slot_bytes
    scratch.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_where_kernels_are_known_to_work_a_piece_is_as_long_as_a_slot_allows(monkeypatch, dtype):
    scratch = scratch_of(SCRATCH, Account(2 * MIB))
    monkeypatch.setattr(kernels, "_found", {})
    by_operators = piece_bytes(scratch, "exponent", dtype)
    key = "exponent", torch.device("cpu"), WORD[ITEMSIZE[dtype]]
    monkeypatch.setitem(kernels._found, key, object())
    assert by_operators < piece_bytes(scratch, "exponent", dtype) / 2
    assert piece_bytes(scratch, "exponent", dtype) == scratch.slot_bytes - 4096
    scratch.close()


def piece_bytes(scratch, codec, dtype):
    inner = SimpleNamespace(device=torch.device("cpu"))
    coder = DeviceCoder(inner, None, scratch, CodecSpeeds())
    return scratch.piece_bytes(lambda nbytes: coder.fits(FORMS[codec].CODEC, dtype, nbytes))


def scratch_of(nbytes, budget):
    return FrameScratch(nbytes, budget, slots=encoding._SLOTS, working=encoding._SLOTS)


def test_scratch_memory_that_cannot_be_had():
    with pytest.raises(ConfigError, match="at least 65536 bytes"):
        scratch_of(60 * KIB, Account(2 * MIB))
    with pytest.raises(BudgetError, match="switch codecs off"):
        scratch_of(SCRATCH, Account(SCRATCH - 1))


def test_a_device_without_memory_for_a_frame_moves_that_piece_as_it_is(rig, monkeypatch):
    content = floats(6 * PIECE)
    calls, make = [], encoding.encode_tensor

    def sometimes(*args):
        calls.append(args)
        if len(calls) % 2:
            raise torch.OutOfMemoryError("simulated")
        return make(*args)

    monkeypatch.setattr(encoding, "encode_tensor", sometimes)
    ticket = rig.written(content)
    assert ticket.raw == set(range(0, ticket.pieces, 2))
    assert all(part.nbytes == ticket.piece_bytes for part in ticket.parts[0:-1:2])
    assert all(part.nbytes < ticket.piece_bytes for part in ticket.parts[1::2])
    assert rig.bytes_of(ticket) == content
    rig.stage.discard(rig.tier, ticket)


def test_a_source_is_let_go_of_when_it_is_written(rig):
    storage = storage_of(floats(4 * PIECE))
    rig.mover.use(storage)
    ticket = rig.stage.write(storage, rig.tier, "slot", FLOATS)
    dead = []
    weakref.finalize(storage, dead.append, True)
    ticket.written.add_done_callback(lambda _: dead.append("written"))
    del storage
    ticket.written.wait(20)
    wait_until(lambda: dead == [True, "written"])
    rig.stage.discard(rig.tier, ticket)


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 5, 40, HEADER_BYTES])
def test_a_damaged_frame_is_an_error_that_names_the_slot(rig, monkeypatch, place):
    make = encoding.encode_tensor

    def damaged(*args):
        frame = make(*args)
        frame[place:] = ~frame[place:]
        return frame

    monkeypatch.setattr(encoding, "encode_tensor", damaged)
    ticket = rig.written(floats(3 * PIECE))
    target, transfer = rig.fetch(ticket)
    with pytest.raises(
        CodecError, match=r"slot: piece 0 of 5, as read from tier host .* not decode"
    ):
        transfer.wait(20)
    rig.mover.drop(target)
    del target, transfer
    wait_until(lambda: rig.budget.used_by(RESTORED) == 0)
    rig.stage.discard(rig.tier, ticket)


def test_a_full_tier_is_an_error_of_the_write_and_leaves_nothing_behind():
    with Rig(host=6 * PIECE) as rig:
        ticket = rig.begin(floats(20 * PIECE, share=0.1))
        with pytest.raises(NoSpaceError):
            ticket.written.wait(20)
        wait_until(rig.nothing_rests)
        again = rig.written(floats(4 * PIECE))
        rig.stage.discard(rig.tier, again)
        wait_until(rig.nothing_rests)


def test_a_write_that_is_cancelled_before_its_source_is_complete(rig):
    gate = threading.Event()
    stream = rig.link.copy_stream(rig.mover.device)
    stream.work.put(gate.wait)
    storage = storage_of(floats(4 * PIECE))
    rig.link.current = stream
    rig.mover.use(storage)
    rig.link.current = rig.link.NOW
    ticket = rig.stage.write(storage, rig.tier, "slot", FLOATS)
    assert ticket.written.cancel()
    with pytest.raises(CancelledError):
        ticket.written.wait(20)
    gate.set()
    after = rig.written(floats(PIECE))
    assert not ticket.parts
    with pytest.raises(ConfigError, match="although writing it failed"):
        rig.stage.read(rig.tier, ticket, None, Priority.DEMAND)
    for each in (ticket, after):
        rig.stage.discard(rig.tier, each)


def test_discarded_meanwhile(rig):
    """On its way out and on its way back: what is under way ends as cancelled, or is done."""
    out = [rig.begin(floats(8 * PIECE, seed=seed)) for seed in range(3)]
    for ticket in out:
        rig.stage.discard(rig.tier, ticket)
    back = rig.written(floats(8 * PIECE))
    target, transfer = rig.fetch(back)
    rig.stage.discard(rig.tier, back)
    wait_until(lambda: transfer.done and all(ticket.written.done for ticket in out))
    assert isinstance(transfer.error, CancelledError | type(None))
    rig.mover.drop(target)


def test_closed_with_everything_in_flight():
    with Rig() as rig:
        written = [rig.written(floats(8 * PIECE, seed=seed)) for seed in range(2)]
        reads = [rig.fetch(ticket) for ticket in written]
        writes = [rig.begin(floats(12 * PIECE, seed=seed)) for seed in range(4)]
        rig.stage.close()
        assert all(transfer.done for _, transfer in reads)
        assert all(ticket.written.done for ticket in writes)
        with pytest.raises(ClosedError):
            rig.begin(floats(PIECE))
        del reads


def test_drained_is_everything_that_was_begun(rig):
    """Also what is not complete yet, and so has not been handed to the worker."""
    gate = threading.Event()
    stream = rig.link.copy_stream(rig.mover.device)
    stream.work.put(gate.wait)
    rig.link.current = stream
    storage = storage_of(floats(4 * PIECE))
    rig.mover.use(storage)
    ticket = rig.stage.write(storage, rig.tier, "slot", FLOATS)
    rig.link.current = rig.link.NOW
    threading.Timer(0.1, gate.set).start()
    rig.stage.drain()
    assert ticket.written.done
    assert rig.bytes_of(ticket) == bytes_of(storage)
    rig.stage.discard(rig.tier, ticket)


def test_pieces_are_recorded(rig):
    ticket = rig.written(floats(3 * PIECE))
    rig.bytes_of(ticket)
    totals = rig.recorder.snapshot()
    for stage in (Stage.ENCODE, Stage.DECODE):
        assert totals.flow(stage, "host").nbytes == 3 * PIECE
    rig.stage.discard(rig.tier, ticket)
