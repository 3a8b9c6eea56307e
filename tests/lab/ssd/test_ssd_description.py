"""Devices: what a file must tell, what is refused, and that every value has its source."""

import dataclasses
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.lab.ssd import describe, load, presets, with_field
from penstock.lab.ssd.cells import CellMode, PageOrder
from penstock.lab.ssd.description import leaves, parse
from penstock.lab.ssd.device import duration_ps

TEXT = (files("penstock.lab.ssd.devices") / "optimstore.toml").read_text()


def changed(before, after):
    assert TEXT.count(before) >= 1
    return TEXT.replace(before, after, 1)


def refusal(text):
    with pytest.raises(ConfigError) as refused:
        parse(text, source="my.toml")
    assert "my.toml" in str(refused.value)
    return str(refused.value)


def test_these_presets_come_with_penstock():
    assert presets() == (
        *("consumer-tlc", "modern-pcie5", "mqsim-default", "nvmevirt-970pro", "optimstore"),
    )


@pytest.mark.parametrize("name", presets())
def test_every_value_of_a_preset_has_a_source(name):
    described = describe(name)
    assert described.device.name
    for leaf in leaves():
        assert len(described.source_of(leaf)) > 3, leaf


@pytest.mark.parametrize("name", presets())
def test_a_preset_holds_what_it_is_rated_for(name):
    device = load(name)
    rated = device.endurance.capacity_bytes
    assert rated * 0.99 <= device.geometry.raw_bytes <= rated * 1.4


def test_a_file_is_read_as_a_preset_is(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(changed("channels = 8", "channels = 16"))
    assert load(path).geometry.channels == 16
    assert dataclasses.replace(load(path), geometry=load("optimstore").geometry) == load(
        "optimstore"
    )


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            "channels = 8",
            "channels = 0",
            "geometry.channels is 0; it must be a whole number, 1 or more",
        ),
        ("channels = 8", "chanels = 8", "did you mean 'channels'"),
        ("channels = 8\n", "", "'geometry.channels' is missing"),
        ("channels = 8", "channels = '8'", "which is str, not int"),
        ("channels = 8", "channels = 8.5", "which is float, not int"),
        ("channels = 8", "channels = true", "which is bool, not int"),
        ("blocks_per_plane = 1280", "blocks_per_plane = 3", "a plane needs at least 4"),
        ("blocks_per_plane = 1280", "blocks_per_plane = 1280000000000", "is impossible"),
        ("page_bytes = 16_384", "page_bytes = 16_385", "must be a multiple of 512"),
        ("bytes_per_s = 800_000_000", "bytes_per_s = 0", "nothing would ever be transferred"),
        ("up_bytes_per_s = 7_000_000_000", "up_bytes_per_s = 0", "link.up_bytes_per_s is 0"),
        ("read_ns = [30_000]", "read_ns = [30_000, 1]", "needs 1"),
        ("read_ns = [30_000]", "read_ns = [0]", "cell.read_ns is 0"),
        ('mode = "pslc"', 'mode = "pslk"', "did you mean 'pslc'"),
        ('allocation = "CWDP"', 'allocation = "CWDD"', "an order of the letters"),
        ('victim = "greedy"', 'victim = "gredy"', "did you mean 'greedy'"),
        ("overprovisioning = 0.07", "overprovisioning = 1.0", "below 1"),
        ("gc_least_blocks = 4", "gc_least_blocks = 1", "2 or more"),
        ("parameters_per_s = 1.5e9", "parameters_per_s = 0", "must be positive"),
        ("io_efficiency = 0.85", "io_efficiency = 1.5", "at most 1"),
        ("add_pj = 0.9", "add_pj = nan", "must be zero or more"),
        ("multi_plane = true", "multi_plane = false", None),
        ('"cell.mode" =', '"cell.mod" =', "did you mean 'cell.mode'"),
        ("version = 1", "version = 2", "reads 1"),
        ('penstock = "ssd"', 'penstock = "machine"', "not a Penstock SSD"),
        ("[cell]", "[cell", "is not TOML"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(before, after, says):
    text = changed(before, after)
    if says is None:
        assert not parse(text, source="my.toml").device.channel.multi_plane
    else:
        assert says in refusal(text)


def test_pages_of_a_block_must_fill_word_lines():
    tlc = (files("penstock.lab.ssd.devices") / "consumer-tlc.toml").read_text()
    with pytest.raises(ConfigError, match="must be a multiple of the 3 bits of a tlc cell"):
        parse(tlc.replace("pages_per_block = 1536", "pages_per_block = 1537"), source="x")


def test_an_unknown_device_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'optimstore'"):
        load("optimstor")
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "none.toml")


def test_a_field_is_changed_by_its_path():
    device = load("optimstore")
    assert with_field(device, "unit.divider", 1).unit.divider == 1
    assert with_field(device, "cell.read_ns", [40_000]).cell.read_ns == (40_000,)
    assert device.unit.divider == 4
    with pytest.raises(ConfigError, match=r"did you mean 'unit\.divider'"):
        with_field(device, "unit.diviser", 1)
    with pytest.raises(ConfigError, match=r"unit\.divider is 0"):
        with_field(device, "unit.divider", 0)


def test_page_types_take_turns_and_one_shot_programs_with_the_last():
    mlc, tlc = load("nvmevirt-970pro").cell, load("consumer-tlc").cell
    assert [mlc.page_read_ns(page) for page in range(3)] == [30_013, 42_013, 30_013]
    pairs = dataclasses.replace(tlc, one_shot=False, program_ns=(1, 2, 3), order=PageOrder.PAIRS)
    assert [pairs.page_type(page) for page in range(15)] == [0] * 6 + [1] * 2 + [
        0,
        0,
        1,
        1,
        2,
        2,
        0,
    ]
    assert [tlc.page_program_ns(page) for page in range(4)] == [0, 0, 1_000_000, 0]
    assert tlc.mean_program_ns == pytest.approx(1_000_000 / 3)
    assert [CellMode(name).bits for name in ("slc", "pslc", "mlc", "tlc", "qlc")] == [1, 1, 2, 3, 4]


@given(st.integers(0, 1 << 20), st.integers(1, 10**11))
def test_durations_are_the_nearest_picosecond(nbytes, rate):
    ps = duration_ps(nbytes, rate)
    assert abs(2 * (ps * rate - nbytes * 10**12)) <= rate


def test_packets_that_are_started_count_whole():
    link = load("mqsim-default").link
    assert [link.wire_bytes(n) for n in (0, 1, 128, 129)] == [0, 29, 156, 185]
