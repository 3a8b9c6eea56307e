"""Wrong bits of flash: how many there are, what corrects them, and what an optimizer does with them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.lab.ssd import Placement, Update, load, step
from penstock.lab.ssd.bit_flips import BitFlips, DieCheck
from penstock.lab.ssd.cells import CellMode
from penstock.lab.ssd.energy import Boundary
from penstock.lab.ssd.faults import LIGHT, NO_CODE, RAW, Bch, Ldpc, aged, raw_rate
from penstock.optim import FlashAdamW
from penstock.testing.corrupting_engine import CorruptingEngine

TLC = load("consumer-tlc")
ADAM = Update(parameters=10**9, optimizer="adam")
SHARES = st.floats(0, 1)


# -- how many -----------------------------------------------------------------------------------


@given(st.sampled_from(CellMode), SHARES, SHARES, SHARES, SHARES)
def test_wear_and_time_only_make_it_worse(mode, a, b, c, d):
    law = RAW[mode]
    young = law.rate(cycles=3000 * min(a, b), hours=1000 * min(c, d))
    assert law.base <= young <= law.rate(cycles=3000 * max(a, b), hours=1000 * max(c, d)) <= 0.5


def test_the_measured_law_by_hand():
    rate = RAW[CellMode.TLC].rate(cycles=3000, hours=100, reads=0)
    expected = 1.48e-3 + 3.9e-10 * 3000**2.05 + 6.28e-5 * 3000**0.14 * 100**0.54
    assert rate == pytest.approx(expected, rel=1e-12)


def test_fewer_bits_of_a_cell_are_orders_better():
    rates = [RAW[mode].rate(cycles=1000, hours=72) for mode in ("slc", "pslc", "mlc", "tlc", "qlc")]
    assert rates == sorted(rates)
    assert rates[3] / rates[1] > 1000
    assert raw_rate(load("optimstore"), life=1.0, days=3) < 1e-5


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="hours is -1"):
        RAW[CellMode.TLC].rate(cycles=1, hours=-1)
    with pytest.raises(ConfigError, match=r"a rate of errors is 0\.7"):
        BitFlips(0.7)


# -- codes --------------------------------------------------------------------------------------


@given(st.floats(1e-9, 0.4))
def test_no_code_leaves_all(rate):
    assert NO_CODE.left(rate) == pytest.approx(rate, rel=1e-6)
    assert NO_CODE.fails(rate) == pytest.approx(-math.expm1(NO_CODE.bits * math.log1p(-rate)))


def test_a_small_code_by_hand():
    code = Bch(data_bits=4, corrects=1)  # of seven bits, as Hamming's
    assert code.bits == 7
    p = 0.1
    assert code.fails(p) == pytest.approx(1 - 0.9**7 - 7 * p * 0.9**6)
    assert code.left(p) == pytest.approx(p - p * 0.9**6)  # but for words with one


@given(st.floats(1e-7, 1e-2), st.integers(0, 6))
def test_a_stronger_code_fails_less_often(rate, corrects):
    fewer, more = (Bch(data_bits=4096, corrects=corrects + each) for each in (0, 1))
    near = 1 + 1e-6
    assert more.left(rate) <= fewer.left(rate) * near <= rate * near**2


def test_a_light_code_has_52_bits_of_parity():
    assert LIGHT.parity_bits == 52
    assert LIGHT.left(1e-6) < 1e-15


def test_sensing_again_until_nothing_helps():
    code = Ldpc()
    assert [code.levels(rate) for rate in (1e-4, 4e-3, 4.1e-3, 5.5e-3, 1.4e-2)] == [0, 0, 1, 1, 7]
    with pytest.raises(ConfigError, match="data is lost"):
        code.levels(2e-2)


def test_an_old_drive_reads_slower_and_for_more_joules():
    young, old = aged(TLC, life=0.0), aged(TLC, life=1.0, days=30)
    assert young.cell.mean_read_ns == TLC.cell.mean_read_ns + Ldpc().decode_ns
    assert old.cell.mean_read_ns > young.cell.mean_read_ns
    one, other = (step(each, ADAM, Placement.CONTROLLER) for each in (young, old))
    assert other.time_s > one.time_s
    assert other.ledger.joules(Boundary.SSD) > one.ledger.joules(Boundary.SSD)
    with pytest.raises(ConfigError, match="data is lost"):
        aged(TLC, life=1.0, days=365)


# -- in memory ----------------------------------------------------------------------------------


def spoiled(flips, words):
    memory = np.array(words, np.float32)
    flips(memory.ctypes.data, memory.nbytes)
    return memory


def test_bits_are_flipped_at_their_rate():
    flips = BitFlips(1e-3, seed=3)
    memory = np.zeros(1 << 17, np.uint8)
    flips(memory.ctypes.data, memory.nbytes)
    wrong = int(np.unpackbits(memory).sum())
    assert flips.bits == 1 << 20
    assert wrong == flips.flipped
    assert abs(wrong - 1048.6) < 6 * 1048.6**0.5


def test_the_same_seed_flips_the_same_bits():
    once, again, other = (spoiled(BitFlips(1e-2, seed=s), np.ones(1000)) for s in (1, 1, 2))
    assert (once == again).all()
    assert not (once == other).all()


@given(st.integers(0, 3), st.integers(1, 4))
def test_a_code_leaves_only_words_with_too_many(seed, corrects):
    code = Bch(data_bits=512, corrects=corrects)
    flips = BitFlips(3e-3, code=code, seed=seed)
    memory = np.zeros(512 // 8 * 2000, np.uint8)
    flips(memory.ctypes.data, memory.nbytes)
    each = np.unpackbits(memory).reshape(2000, 512).sum(axis=1)
    assert flips.flipped == each.sum()
    # parity may be among the wrong bits, so some of a word's may be elsewhere
    parity = code.parity_bits
    assert ((each == 0) | (each + parity > corrects)).all()
    assert (each > 0).mean() == pytest.approx(code.fails(3e-3), abs=0.03)


def test_checks_by_hand():
    big = np.float32(2.0**100)
    words = [0.5, -1.5, np.nan, np.inf, -np.inf, big, 3.0]
    nan = spoiled(BitFlips(0.0, check=DieCheck.NAN), words)
    assert nan[[0, 1, 5, 6]].tolist() == [0.5, -1.5, big, 3.0]
    assert np.abs(nan[2:5]).tolist() == [1.5, 1.0, 1.0]
    below = spoiled(BitFlips(0.0, check=DieCheck.BELOW_TWO), words)
    assert below[:2].tolist() == [0.5, -1.5]
    assert (np.abs(below) < 2).all()


# -- in the records of an optimizer ---------------------------------------------------------------


def trained(tmp_path, flips):
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 256).bfloat16()
    optimizer = FlashAdamW(
        model.parameters(), lr=1e-3, flash=tmp_path, tile=8192, squeeze=False,
        allow_memory_filesystem=True,
    )  # fmt: skip
    if flips is not None:
        optimizer.wrap_engine(lambda engine: CorruptingEngine(engine, flips))
    for _ in range(6):
        model(torch.randn(8, 512).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return model.weight.detach().float()


def test_an_optimizer_goes_on_with_what_it_reads(tmp_path, monkeypatch):
    """No correction, no checksum: wrong masters and moments make other weights; none, the same."""
    monkeypatch.setenv("PENSTOCK_VERIFY", "off")
    clean, none = trained(tmp_path, None), BitFlips(0.0)
    assert torch.equal(trained(tmp_path, none), clean)
    if not none.bits:
        pytest.fail("no record was read: the states stayed in memory")
    flips = BitFlips(1e-5, seed=2)
    assert not torch.equal(trained(tmp_path, flips), clean)
    assert flips.flipped > 0
    corrected = BitFlips(1e-6, code=LIGHT, seed=2)
    assert torch.equal(trained(tmp_path, corrected), clean)
    assert corrected.flipped == 0


def test_checksums_find_them_where_they_are_on(tmp_path, monkeypatch):
    from penstock.core.errors import ChecksumError

    monkeypatch.setenv("PENSTOCK_VERIFY", "full")
    with pytest.raises(ChecksumError):
        trained(tmp_path, BitFlips(1e-4))
