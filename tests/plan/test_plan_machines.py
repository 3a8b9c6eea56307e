"""Machines in files: TOML and JSON, both ways and strictly; and those that come with Penstock."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_profiles import MACHINE, machines

from penstock.core.errors import ConfigError, PlanError
from penstock.plan import Compute, Machine
from penstock.plan.machines import find
from penstock.plan.service import Service

COMPUTE = Compute(1e12, 2e12, 0.5, 1e11, 1e-6)
WHOLE = replace(
    MACHINE,
    compute=COMPUTE,
    device_bytes=12 * 2**30,
    flash_shared=True,
    interference=0.25,
    write_work_s=2e-5,
    write_work_s_per_byte=1e-10,
    read_work_s=3e-5,
    update_int8_s=2e-9,
    sources=('a "quoted" \\ figure', "über\n"),
)


@st.composite
def whole_machines(draw):
    some = st.none() | st.builds(Compute, *[st.floats(1e3, 1e15)] * 2, st.floats(0.01, 1), *[
        st.floats(1e3, 1e15)
    ] * 2, st.integers(4, 9), st.integers(0, 200))  # fmt: skip
    return replace(
        draw(machines()),
        name=draw(st.text(st.characters(codec="utf-8"))),
        compute=draw(some),
        device_bytes=draw(st.integers(0, 2**50)),
        flash_over_link=draw(st.booleans()),
        write_work_s=draw(st.floats(0, 1)),
        read_work_s=draw(st.floats(0, 1)),
        update_bf16_s=draw(st.floats(0, 1)),
        flash_service=draw(
            st.none()
            | st.builds(
                Service,
                *[st.just((4096, 2**20))],
                *[st.lists(st.floats(1e-9, 10), min_size=2, max_size=2).map(sorted).map(tuple)] * 2,
            )
        ),
        sources=tuple(draw(st.lists(st.text(st.characters(codec="utf-8"))))),
    )


@given(whole_machines())
def test_machines_survive_toml_and_json(machine):
    assert Machine.from_toml(machine.to_toml()) == machine
    assert Machine.from_json(machine.to_json()) == machine


def test_a_file_is_read_by_what_is_in_it(tmp_path):
    for name, text in (("a.toml", WHOLE.to_toml()), ("b.json", WHOLE.to_json())):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert Machine.load(tmp_path / name) == find(tmp_path / name) == WHOLE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flash_write_bytes_per_s = 1", "flash_write_bytes_per_s = -1", "flash_write_bytes_per_s is -"),
        ("flash_latency_s = 0.0", "", "field 'flash_latency_s' is missing"),
        ("flash_latency_s = 0.0", "flash_latency_s = nan", "flash_latency_s: nan is not a finite"),
        ("flash_latency_s = 0.0", "flash_latency_s = 'no'", "flash_latency_s: 'no' is str, not float"),
        ("flash_latency_s = 0.0", "flash_latency_s = 1979-05-27", "'1979-05-27' is str, not float"),
        ("flash_shared = true", "flash_shared = true\ncolour = 1", "unknown field 'colour'"),
        ("device_bytes = 12_884_901_888", "device_bytes = -1", "device_bytes is -1, it must be zero"),
        ("device_bytes = 12_884_901_888", "device_bytes = 1.5", "device_bytes: 1.5 is float, not int"),
        ("interference = 0.25", "interference = -0.25", "interference is -0.25, it must be zero"),
        ("write_work_s = 2e-05", "write_work_s = -1.0", "write_work_s is -1.0, it must be zero or"),
        ("read_work_s = 3e-05", "read_work_s = 'no'", "read_work_s: 'no' is str, not float"),
        ("efficiency = 0.5", "efficiency = 1.5", "efficiency is 1.5, it must be over 0 and at most 1"),
        ("efficiency = 0.5", "", "compute: field 'efficiency' is missing"),
        ("operator_s = 1e-06", "operator_s = -1.0", "operator_s is -1.0, it must be zero or more"),
        ("processors = 0", "processors = -1", "processors is -1, it must be 0 or more"),
        ("cudnn = 4", "cudnn = 3", "cudnn is 3, it must be 4 or more"),
        ("product_efficiency = []", "product_efficiency = [0.5]", "[0.5]; it must be 7 numbers over 0"),
        ("product_efficiency = []", f"product_efficiency = {[0.5] * 6 + [1.5]}", "0.5, 1.5]; it must"),
        ("product_efficiency = []", f"product_efficiency = {[0.9] + [0.1] * 6}", "none below the one"),
        ("[compute]", "[compute", "is not TOML"),
        ("version = 2", "version = 1", "field 'version' is 1, this Penstock reads 2"),
        ('penstock = "machine"', 'penstock = "plan"', "not a Penstock machine"),
    ],
)  # fmt: skip
def test_a_bad_figure_is_told_with_its_file_and_field(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    text = WHOLE.to_toml()
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Machine.load(path)
    assert "mine.toml" in str(caught.value)
    assert message in str(caught.value)
    with pytest.raises(PlanError):
        Machine.from_toml(path.read_text(encoding="utf-8"))


def test_a_file_of_before_need_not_tell_of_cudnn_nor_of_processors():
    text = WHOLE.to_toml()
    for line in ("cudnn = 4", "processors = 0", "product_efficiency = []"):
        text = text.replace(f"{line}\n", "")
    assert "cudnn" not in text
    assert Machine.from_toml(text) == WHOLE


def test_a_file_from_before_the_work_of_transfers_was_known_has_none():
    lines = WHOLE.to_toml().splitlines(keepends=True)
    old = "".join(line for line in lines if "_work_s" not in line)
    assert len(old.splitlines()) == len(lines) - 4
    none = {"write_work_s": 0.0, "write_work_s_per_byte": 0.0, "read_work_s": 0.0}
    assert Machine.from_toml(old) == replace(WHOLE, **none)


@pytest.mark.parametrize("value", [np.float32(-1), np.int64(0), float("nan"), "fast", None])
def test_a_speed_in_code_is_checked_too(value):
    with pytest.raises(ConfigError, match=r"flash_write_bytes_per_s is .*, it must be"):
        replace(WHOLE, flash_write_bytes_per_s=value)


def test_a_machine_need_not_know_what_it_computes_with():
    text = replace(WHOLE, compute=None).to_toml()
    assert "compute" not in text
    assert Machine.from_toml(text).compute is None


def test_files_that_cannot_be_read_and_names_that_are_not_known(tmp_path):
    with pytest.raises(ConfigError, match=r"machine file '.*gone\.toml' cannot be read"):
        find(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match=r"machine file 'gone\.toml' cannot be read"):
        find("gone.toml")
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        find(tmp_path / "bin.toml")
    with pytest.raises(
        ConfigError, match=r"unknown machine 'titan-y'; known are a100-g10, .*titan-x"
    ):
        find("titan-y")


@pytest.mark.parametrize("name", Machine.presets())
def test_every_preset_is_whole_and_says_where_each_figure_is_from(name):
    machine = find(name)
    assert machine == Machine.preset(name)
    assert Machine.from_toml(machine.to_toml()) == machine
    assert machine.compute is not None
    assert min(machine.device_bytes, machine.host_bytes, machine.flash_bytes) > 0
    told = " ".join(machine.sources)
    for word in ("compute", "memory_bytes_per_s", "device_bytes", "efficiency", "host_", "flash"):
        assert word in told


def test_the_machines_of_the_papers_are_there():
    expected = {"titan-x", "v100-nvme", "rtx-3090", "rtx-4090", "h200", "a100-g10", "cpu"}
    assert expected <= {*Machine.presets()}
    g10 = find("a100-g10")
    assert (g10.flash_read_bytes_per_s, g10.host_read_bytes_per_s) == (3.2e9, 15.754e9)
    assert find("titan-x").device_bytes == 12 * 2**30


# -- a drive's service curve --------------------------------------------------------------------


CURVE = Service((4096, 8192, 1 << 20), (1e-4, 1.5e-4, 1e-3), (2e-4, 2e-4, 4e-4))


def test_a_service_curve_is_a_line_between_its_sizes():
    assert CURVE.seconds(4096, writing=True) == CURVE.seconds(1, writing=True) == 1e-4
    assert CURVE.seconds(6144, writing=True) == pytest.approx(1.25e-4)
    assert CURVE.seconds(1 << 20, writing=False) == pytest.approx(4e-4)
    # beyond its largest it goes on at that pace
    pace = (1e-3 - 1.5e-4) / (2**20 - 8192)
    assert CURVE.seconds(2 << 20, writing=True) == pytest.approx(1e-3 + 2**20 * pace)


def test_a_machine_takes_a_curve_before_a_bandwidth():
    machine = replace(MACHINE, flash_latency_s=1e-4, flash_service=CURVE)
    assert machine.write_s(1 << 20) == pytest.approx(1e-3)
    assert machine.flash_busy_s(1 << 20, writing=True) == pytest.approx(9e-4)
    assert machine.flash_busy_s(1, writing=True) == 0
    assert machine.write_s(1 << 20, "host") == MACHINE.write_s(1 << 20, "host")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (((4096,), (1.0,), (1.0,)), "two sizes or more"),
        (((4096, 8192), (1.0,), (1.0, 1.0)), "two sizes or more"),
        (((8192, 4096), (1.0, 1.0), (1.0, 1.0)), "must grow"),
        (((4096, 8192), (2.0, 1.0), (1.0, 1.0)), "write_s is"),
        (((4096, 8192), (1.0, 1.0), (0.0, 1.0)), "read_s is"),
    ],
)
def test_a_curve_that_makes_no_sense_is_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        Service(*fields)


def test_what_something_else_reads_of_flash_is_not_there():
    machine = replace(Machine.preset(Machine.presets()[0]), flash_shared=False)
    read, write = machine.flash_read_bytes_per_s, machine.flash_write_bytes_per_s
    less = machine.less_read(0.25 * read)
    assert less.flash_read_bytes_per_s == 0.75 * read
    assert less.flash_write_bytes_per_s == write
    assert machine.less_read(5 * read).flash_read_bytes_per_s == pytest.approx(0.1 * read)
    shared = replace(machine, flash_shared=True).less_read(0.25 * read)
    assert shared.flash_write_bytes_per_s == 0.75 * write
    curve = Service((4096, 1 << 20), (1e-5, 1e-3), (1e-5, 1e-3))
    curved = replace(machine, flash_service=curve).less_read(0.5 * read)
    assert curved.flash_service == Service((4096, 1 << 20), (1e-5, 1e-3), (2e-5, 2e-3))
    assert machine.less_read(0) == machine
