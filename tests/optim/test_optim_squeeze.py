"""Records made shorter without loss: in records, and that an optimizer does not see it."""

import contextlib
import json
import os
import threading

import numpy as np
import pytest
import torch
import xxhash
from optim_runs import assert_same, assert_same_states, give_gradients, parameters, train

from penstock import ChecksumError, ConfigError
from penstock.optim import FlashAdamW, squeeze
from penstock.optim.formats import State, form_of
from penstock.optim.params import make_tiles
from penstock.optim.squeeze import Squeezer, extent, slack_bytes, stretches

# -- records ------------------------------------------------------------------------------------------

STATES = (State("exp_avg", torch.float32), State("exp_avg_sq", torch.float32))
FORMS = [("exact", torch.float32), ("exact", torch.bfloat16), ("exact", torch.float16),
         ("split", torch.bfloat16), ("bf16", torch.bfloat16), ("bf16", torch.float32),
         ("int8", torch.bfloat16)]  # fmt: skip


def a_tile(format_name, dtype, count):
    form = form_of(format_name, dtype, STATES, with_master=True, whole_master=False, where="here")
    return make_tiles([(0, count)], form, group=0, first=0, elements=1 << 20)[0]


@pytest.mark.parametrize("count", [1, 300, 511, 512, 1300, 70_001])
@pytest.mark.parametrize(("format_name", "dtype"), FORMS)
def test_a_record_is_covered_and_comes_back_whatever_its_length(format_name, dtype, count):
    tile = a_tile(format_name, dtype, count)
    parts = stretches(tile.arrays, tile.record_bytes)
    assert [0, *(part.stop for part in parts)] == [*(p.start for p in parts), tile.record_bytes]
    random, buffer = np.random.default_rng(count), np.zeros(tile.record_bytes + 8192, np.uint8)
    for source in ("normal", "bytes"):
        if source == "normal":
            values = random.standard_normal(tile.record_bytes // 4).astype(np.float32)
            buffer[: tile.record_bytes] = values.view(np.uint8)
        else:
            buffer[: tile.record_bytes] = random.integers(0, 256, tile.record_bytes, np.uint8)
        before = buffer[: tile.record_bytes].copy()
        squeezer = Squeezer(True)
        length = squeezer.squeeze(tile, buffer)
        start, nbytes = extent(tile, length)
        assert start % 4096 == nbytes % 4096 == 0
        if length:
            assert nbytes < tile.record_bytes
            assert start + nbytes == tile.record_bytes + slack_bytes(tile) <= buffer.size
            buffer[:start] = 0
            assert squeezer.expand(tile, buffer, length)
        np.testing.assert_array_equal(buffer[: tile.record_bytes], before)
    assert not length  # of any bytes


def test_a_length_that_cannot_be_is_refused():
    tile = a_tile("exact", torch.float32, 4096)
    buffer = np.zeros(tile.record_bytes + slack_bytes(tile), np.uint8)
    for length in (-1, 1, buffer.size, buffer.size + 1, 1 << 40):
        assert not Squeezer(True).expand(tile, buffer, length)


# -- when it pays -------------------------------------------------------------------------------------


def passes(squeezer, waits, took=(1.0, 1.0), share=0.85, count=12):
    """Whether it was on in each pass; ``waits``, ``took``: with squeezing, and without."""
    found = []
    for _ in range(count):
        found.append(squeezer.is_on)
        way = 0 if squeezer.is_on else 1
        if squeezer.is_on:
            squeezer._spent_s, squeezer._whole, squeezer._squeezed = 1.0, 100, int(100 * share)
        squeezer.judge(took_s=took[way], waited_s=waits[way])
    return found


def test_it_goes_on_while_threads_wait_for_flash():
    assert all(passes(Squeezer(None), (0.9, 9), (9.0, 1.0)))
    assert all(passes(Squeezer(True), (0, 0), (9.0, 1.0)))
    assert not any(passes(Squeezer(False), (9, 9)))
    assert passes(Squeezer(None), (9, 9), share=0.99) == [True] * 3 + [False] * 9


def test_where_they_do_not_wait_a_trial_decides_for_long():
    first = [True] * 5 + [False] * 3  # three hints; then one pass that does not count, and two
    faster_without = passes(Squeezer(None), (0.0, 9.0), (1.0, 0.8), count=90)
    assert faster_without[:72] == first + [False] * 64
    assert faster_without[72:76] == [True] * 3 + [False]  # tried again, and left again
    slower_without = passes(Squeezer(None), (0.0, 9.0), (0.8, 1.0), count=70)
    assert slower_without == first + [True] * 62


def test_a_moment_without_waiting_is_no_reason_for_a_trial():
    squeezer = Squeezer(None)
    for turn in range(30):
        passes(squeezer, (0.0 if turn % 3 else 0.9, 9), (9.0, 1.0), count=1)
        assert squeezer.is_on


# -- optimizers ---------------------------------------------------------------------------------------

SIZES = [(90, 1000), (3, 7), (4001,), (64, 129)]


@pytest.fixture
def shrinking(small):
    """Tiles long enough that squeezing saves a few blocks of each, and more of them than buffers."""
    return {**small, "tile": 4096, "squeeze": True}


@pytest.mark.parametrize(
    "more", [{}, {"overlap": True}, {"durable": True}, {"host_memory": "1GiB"}]
)
def test_training_is_torchs_to_the_bit(more, shrinking):
    ours, theirs = parameters(sizes=SIZES), parameters(sizes=SIZES)
    a, b = FlashAdamW(ours, **shrinking, **more), torch.optim.AdamW(theirs, fused=True)
    train(a, ours, skip=lambda step: (1,) if step == 3 else ())
    train(b, theirs, skip=lambda step: (1,) if step == 3 else ())
    assert_same(ours, theirs)
    assert_same_states(a.state_dict(), b.state_dict())
    train(a, ours, steps=1, first=6)
    train(b, theirs, steps=1, first=6)
    assert_same(ours, theirs)
    a.close()


@pytest.mark.parametrize(
    ("squeeze", "overlap", "is_on"),
    [(None, False, True), (None, True, False), (True, True, True), (False, False, False)],
)
def test_beside_a_backward_it_is_off_unless_forced(squeeze, overlap, is_on, shrinking, monkeypatch):
    lengths, real = [], Squeezer.squeeze

    def noted(squeezer, tile, buffer):
        lengths.append(real(squeezer, tile, buffer))
        return lengths[-1]

    monkeypatch.setattr(Squeezer, "squeeze", noted)
    params = parameters(sizes=SIZES)
    settings = {**shrinking, "squeeze": squeeze, "overlap": overlap}
    with contextlib.closing(FlashAdamW(params, **settings)) as a:
        train(a, params, steps=2)
    assert lengths
    assert any(lengths) == is_on


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("format_name", ["exact", "split", "bf16", "int8"])
def test_every_format_is_what_it_is_without(format_name, count, shrinking):
    folders = [shrinking["flash"] / str(i) for i in range(count)]
    for folder in folders:
        folder.mkdir()
    settings = {**shrinking, "flash": tuple(folders), "format": format_name}
    found = []
    for on in (True, False):
        params = parameters(torch.bfloat16, sizes=SIZES)
        a = FlashAdamW(params, **{**settings, "squeeze": on})
        train(a, params)
        found.append((params, a.state_dict(), a._penstock.store.written))
        a.close()
    assert_same(found[0][0], found[1][0])
    assert_same_states(found[0][1], found[1][1])
    assert format_name == "int8" or found[0][2] < 0.93 * found[1][2]


def test_steps_with_and_without_follow_each_other_and_wear_is_what_is_written(shrinking):
    ours, theirs = parameters(sizes=SIZES), parameters(sizes=SIZES)
    a, b = FlashAdamW(ours, **shrinking), torch.optim.AdamW(theirs, fused=True)
    store, squeezer = a._penstock.store, a._penstock._squeezer
    for step in range(9):
        squeezer.is_on = step % 4 < 2
        before = store.written
        train(a, ours, steps=1, first=step)
        train(b, theirs, steps=1, first=step)
        if step == 5:
            assert store.written - before == pytest.approx(a.wear().bytes_per_step, rel=0.1)
    assert_same(ours, theirs)
    a.close()


def test_a_damaged_record_is_a_checksum_error_also_without_checksums(shrinking, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VERIFY", "off")
    params = parameters(sizes=SIZES)
    a = FlashAdamW(params, **shrinking)
    train(a, params, steps=2)
    files = next(iter(a._penstock.store._places.values())).files
    descriptor = os.open(f"/proc/self/fd/{files[0].fd}", os.O_WRONLY)
    os.pwrite(descriptor, b"?" * files[0].size_bytes, 0)
    os.close(descriptor)
    give_gradients(params, 2)
    with pytest.raises(ChecksumError, match=r"tile \d+ \(parameters 0 .*cannot be expanded"):
        a.step()
    a.close()


def test_a_killed_run_goes_on_with_records_of_both_kinds(shrinking):
    ours, theirs = parameters(sizes=SIZES), parameters(sizes=SIZES)
    train(torch.optim.AdamW(theirs, fused=True), theirs, steps=6)
    for first, on in ((0, True), (2, False), (4, True)):
        ours = parameters(sizes=SIZES)
        a = FlashAdamW(ours, **{**shrinking, "squeeze": on}, durable=True)
        assert a.resume() == first
        train(a, ours, steps=2, first=first)
        a.close()
    assert_same(ours, theirs)


def test_an_engines_threads_never_squeeze(shrinking, monkeypatch):
    found, real = set(), Squeezer.squeeze

    def seen(self, tile, buffer):
        found.add(threading.current_thread().name)
        return real(self, tile, buffer)

    monkeypatch.setattr(squeeze.Squeezer, "squeeze", seen)
    params = parameters(sizes=SIZES)
    a = FlashAdamW(params, **shrinking)
    train(a, params)
    a.close()
    assert any(name.startswith("penstock-optim") for name in found)
    assert not any(name.startswith("penstock-io") for name in found), found


def test_journals_of_another_version_or_with_an_impossible_length_are_refused(shrinking):
    params = parameters(sizes=SIZES)
    a = FlashAdamW(params, **shrinking, durable=True)
    train(a, params, steps=1)
    a.close()
    for version in (1, 2, 4):
        rewrite_journal(shrinking["flash"], version, lambda *each: each)
        with pytest.raises(ConfigError, match=rf"is of version {version}; .* reads 3: finish that"):
            FlashAdamW(parameters(sizes=SIZES), **shrinking, durable=True)
    for length in (-1, 1 << 20):
        rewrite_journal(shrinking["flash"], 3, lambda *each: [*each[:2], length])  # noqa: B023
        c = FlashAdamW(parameters(sizes=SIZES), **shrinking, durable=True)
        with pytest.raises(ChecksumError, match="journal is damaged"):
            c.resume()
        c.close()


def rewrite_journal(folder, version, place):
    """Put another version's account of the tiles into the only journal."""
    (path,) = folder.glob("*.journal")
    body = json.loads(json.loads(path.read_text())["body"])
    body["version"] = version
    body["tiles"] = {index: place(*each) for index, each in body["tiles"].items()}
    text = json.dumps(body)
    checksum = xxhash.xxh3_64_intdigest(text.encode())
    path.write_text(json.dumps({"checksum": checksum, "body": text}))
