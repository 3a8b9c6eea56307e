"""A simulated drive as a curve of transfers by size, and as the flash of a machine to plan for."""

import pytest
from small_devices import device, tiny

from penstock.cli import main
from penstock.core.errors import ConfigError
from penstock.lab.ssd import load, with_field
from penstock.lab.ssd.service import measure
from penstock.plan import Machine

SIZES = (4096, 65_536, 1 << 20)


def test_larger_transfers_take_longer_and_are_faster_by_the_byte():
    one = measure(device(), sizes_bytes=SIZES)
    for times in (one.read_s, one.write_s):
        assert list(times) == sorted(times)
        paces = [time_s / size for time_s, size in zip(times, SIZES, strict=True)]
        assert paces == sorted(paces, reverse=True)
    assert one.read_bytes_per_s == pytest.approx(SIZES[-1] / one.read_s[-1])
    # MQSim's default device by hand: a page of 8 KiB is sensed, half of it sent
    assert one.latency_s == pytest.approx(75.31e-6 + 4096 * 3e-9 + 2e-6, rel=0.02)


def test_no_drive_is_faster_than_its_link():
    slow = with_field(load("modern-pcie5"), "link.up_bytes_per_s", 200_000_000)
    one = measure(slow, sizes_bytes=SIZES)
    assert one.read_bytes_per_s < 200e6
    assert one.write_bytes_per_s > 200e6


def test_reads_and_writes_that_want_the_same_dies_share_them():
    # a link each way, and channels as fast: what is left is the array
    assert measure(device(), sizes_bytes=SIZES).shared
    quick = load("modern-pcie5")
    for path, value in {
        "link.up_bytes_per_s": 10**8, "link.down_bytes_per_s": 10**8, "cell.program_ns": [3000],
    }.items():  # fmt: skip
        quick = with_field(quick, path, value)
    assert not measure(quick, sizes_bytes=SIZES).shared


@pytest.mark.parametrize("sizes", [(4096,), (8192, 4096), (0, 4096)])
def test_sizes_that_make_no_sense_are_refused(sizes):
    with pytest.raises(ConfigError, match="two or more, and increase"):
        measure(tiny(), sizes_bytes=sizes)
    with pytest.raises(ConfigError, match="a quarter of the drive"):
        measure(tiny(), sizes_bytes=(4096, 1 << 40))


def test_a_machine_gets_a_simulated_drive(tmp_path, capsys):
    path = tmp_path / "machine.toml"
    argv = ["ssd", "machine", "mqsim-default", "--machine", "rtx-4090", "--output", str(path)]
    assert main(argv) == 0
    assert capsys.readouterr().out == path.read_text()
    made, before = Machine.load(path), Machine.preset("rtx-4090")
    assert made.flash_service is not None
    assert made.compute == before.compute
    assert made.read_s(1 << 20) > before.read_s(1 << 20)  # MQSim's drive is of 2018
    assert made.read_s(made.flash_service.sizes_bytes[-1]) == pytest.approx(
        made.flash_service.read_s[-1]
    )
