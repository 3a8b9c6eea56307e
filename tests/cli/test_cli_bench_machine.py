"""``penstock bench machine``: what is measured, printed and written. Not how fast."""

import json
import threading
import time
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_runs import wait_until
from penstock.cli import bench_machine, main, transfer_work, update_work
from penstock.cli.bandwidth import Measurement, Rate
from penstock.core.errors import ConfigError
from penstock.core.units import MIB
from penstock.lab import compute
from penstock.observe import Stage
from penstock.plan.machine import Machine


@pytest.fixture
def quick(monkeypatch):
    """Everything once, and small."""
    monkeypatch.setattr(bench_machine, "_FILE_BYTES", 32 * MIB)
    monkeypatch.setattr(transfer_work, "SMALL", (MIB, 2))
    monkeypatch.setattr(transfer_work, "LARGE", (2 * MIB, 2))
    monkeypatch.setattr(update_work, "PARAMETERS", 1 << 12)
    monkeypatch.setattr(compute, "ROUND_S", 0.0)
    monkeypatch.setattr(compute, "_SIDES", (32, 64))
    monkeypatch.setattr(compute, "_BATCH", {"cpu": 2})
    monkeypatch.setattr(compute, "_LOAD", {"size": "tiny"})
    monkeypatch.setattr(compute, "_STREAM_FLOATS", {"cpu": 1 << 12})
    monkeypatch.setattr(compute, "device", lambda: torch.device("cpu"))


def test_the_network_and_its_batch_are_on_the_device_that_is_measured(monkeypatch):
    monkeypatch.setattr(compute, "_BATCH", {"meta": 2})
    monkeypatch.setattr(compute, "_LOAD", {"size": "tiny"})
    assert compute.Load(torch.device("meta")).run(0.0) > 0  # on two devices it would raise


def bench(directory, *more):
    return main(
        ["bench", "machine", "--flash", str(directory), "--seconds", "0.02", *map(str, more)]
    )


def test_a_machine_file_is_printed_and_written(quick, disk_path, capsys):
    output = disk_path / "here.toml"
    assert bench(disk_path, "--output", output) == 0
    captured = capsys.readouterr()
    machine = Machine.load(output)
    assert captured.out == output.read_text(encoding="utf-8") == machine.to_toml()
    assert machine.compute is not None
    assert len(machine.compute.product_efficiency) == 7
    assert "in products with a shortest side of 1 ... 4096" in captured.err
    assert machine.device_bytes == machine.host_bytes > 0
    assert machine.flash_bytes > 0
    assert not machine.flash_over_link
    assert machine.interference >= 0
    work = [getattr(machine, f"{way}_work_s") for way in ("write", "read")]
    assert min(work) >= 0
    assert min(machine.update_exact_s, machine.update_split_s) > 0
    assert min(machine.update_bf16_s, machine.update_int8_s) > 0
    assert "measured by penstock bench machine on 20" in machine.sources[0]
    assert machine.sources[2].startswith("updates: steps of FlashAdamW")
    assert machine.sources[3].startswith("work: steps of a stack")
    words = (
        "flash in",
        "host copies",
        "computing on cpu",
        "while flash moves",
        "updates of parameters",
        "latency",
        "work of",
    )
    for word in words:
        assert word in captured.err
    assert list(disk_path.iterdir()) == [output]


def test_an_update_takes_one_thread_s_share_of_all_that_compute(disk_path, monkeypatch):
    monkeypatch.setattr(update_work, "PARAMETERS", 1 << 12)
    clock = SimpleNamespace(perf_counter=count(0.0, 3.0).__next__)
    monkeypatch.setattr(update_work, "time", clock)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert update_work.measure(str(disk_path), "exact") == 3.0 / (1 << 12) / 4
    assert list(disk_path.iterdir()) == []


def test_json_is_one_document(quick, disk_path, capsys):
    assert bench(disk_path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert document["machine"]["compute"]["float32_flops_per_s"] > 0
    assert document["machine"]["sources"]
    assert list(disk_path.iterdir()) == []


def test_what_cannot_be_measured_or_written(quick, disk_path, capsys):
    assert bench(disk_path / "none") == 2
    assert "does not exist" in capsys.readouterr().err
    assert bench(disk_path, "--output", disk_path / "no" / "where.toml") == 2
    assert "--output" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the time to measure"):
        bench_machine.measure(str(disk_path), seconds=0.0, file_bytes=32 * MIB)


def test_interference_is_how_much_longer_a_turn_takes_while_flash_moves(disk_path, monkeypatch):
    monkeypatch.setattr(bench_machine, "_MOVED_BYTES", 1 * MIB)

    def work(seconds):
        assert seconds == 1.0
        moving = any(thread.name == "penstock-bench" for thread in threading.enumerate())
        time.sleep(0.1 * moving)
        return 0.015 if moving else 0.010

    found = bench_machine.interference(str(disk_path), work, 12.0)
    assert found.slower == pytest.approx(0.5)
    assert min(found.write_bytes_per_s, found.read_bytes_per_s) > 0
    assert bench_machine.interference(str(disk_path), lambda _: 1.0, 12.0).slower == 0.0
    assert list(disk_path.iterdir()) == []


@pytest.mark.parametrize(
    "way", [bench_machine._write_continuously, bench_machine._read_continuously]
)
def test_what_moves_beside_goes_on_until_it_is_enough(disk_path, way, monkeypatch):
    monkeypatch.setattr(bench_machine, "_MOVED_BYTES", 1 * MIB)
    with bench_machine._flash_tier(str(disk_path)) as (tier, addresses):
        assert len(addresses) == 4
        stage = Stage.READ if way is bench_machine._read_continuously else Stage.WRITE
        with bench_machine._while_moving(partial(way, tier, addresses)):
            wait_until(
                lambda: tier.recorder.snapshot().flow(stage, "flash").nbytes > 8 * MIB,
                "more has been moved than is there",
            )
        assert tier._held_bytes == 0


def test_the_bandwidth_of_flash_is_that_beside_computing_where_that_is_slower():
    assert bench_machine._slower(3e9, 2e9) == 2e9
    assert bench_machine._slower(3e9, 4e9) == 3e9
    assert bench_machine._slower(3e9, 0.0) == 3e9  # nothing was moved


def test_a_failure_beside_computing_is_told():
    def fail(enough):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), bench_machine._while_moving(fail):
        pass


@pytest.mark.parametrize(("mixed", "shared"), [(1.0e9, True), (1.4e9, True), (1.9e9, False)])
def test_flash_is_shared_if_both_ways_at_once_win_little(mixed, shared):
    rates = [
        Rate(kind=kind, engine_bytes_per_s=rate, plain_bytes_per_s=rate, ratio=1.0, rounds=3)
        for kind, rate in (("read", 1e9), ("overwrite", 1e9), ("mixed", mixed))
    ]
    measured = Measurement(
        directories=("d",), direct=True, granule_bytes=512, threads=1, piece_bytes=4 * MIB,
        file_bytes=1, pass_bytes=1, latency_s=1e-4, rates=tuple(rates),
    )  # fmt: skip
    assert bench_machine._share_one_bandwidth(measured) is shared


def test_rates_are_operations_over_time(monkeypatch):
    monkeypatch.setattr(compute, "_SIDES", (256,))
    monkeypatch.setattr(transfer_work, "SMALL", (MIB, 2))
    monkeypatch.setattr(transfer_work, "LARGE", (2 * MIB, 2))
    monkeypatch.setattr(update_work, "PARAMETERS", 1 << 12)
    monkeypatch.setattr(compute, "ROUND_S", 0.0)
    times = iter([0.5, 0.25])
    monkeypatch.setattr(compute, "_best_s", lambda work, wait: next(times))
    where = torch.device("cpu")
    assert compute._peak_flops(where, torch.float32, lambda: None) == 2 * 256**3 / 0.5
    monkeypatch.setattr(compute, "_STREAM_FLOATS", {"cpu": 1000})
    assert compute._stream(where, lambda: None) == 12_000 / 0.25


def test_products_are_timed_where_no_launch_is_longer_than_they_are(quick, monkeypatch):
    monkeypatch.setattr(compute, "_BATCH", {"meta": 2})
    monkeypatch.setattr(compute, "_STREAM_FLOATS", {"meta": 1 << 12})
    found = compute.measure(torch.device("meta"))
    assert found.product_efficiency == ()
    assert 0 < found.efficiency <= 1


@given(st.lists(st.floats(1e-3, 1), min_size=7, max_size=7))
def test_shares_as_they_are_written_neither_fall_nor_grow_faster_than_the_rows(rates):
    shares = compute._shares(rates, 1.0)
    assert shares[0] == float(f"{rates[0]:.4g}")
    assert all(a <= b <= 4 * a for a, b in pairwise(shares))


@given(
    st.floats(0, 1),
    st.floats(0, 1e-6),
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.floats(0, 1),
)
def test_work_is_told_by_transfer_and_by_byte(transfer_s, per_byte_s, small, more, known):
    sizes = small, small + more
    taken = tuple(transfer_s + per_byte_s * nbytes for nbytes in sizes)
    found = transfer_work.affine(taken, sizes)
    again = tuple(found.transfer_s + found.per_byte_s * nbytes for nbytes in sizes)
    assert again == pytest.approx(taken, rel=1e-6, abs=1e-12)
    assert found.beyond(known).per_byte_s <= found.per_byte_s


def test_work_is_never_less_than_none():
    for taken in (-1.0, -2.0), (-2.0, -1.0), (1.0, -1.0), (-1.0, 1.0):
        found = transfer_work.affine(taken, (10, 20))
        assert found.transfer_s >= 0
        assert found.per_byte_s >= 0
    assert transfer_work.affine((-1.0, 1.0), (10, 20)) == transfer_work.TransferWork(0.0, 0.05)
    assert transfer_work.affine((3.0, 2.0), (10, 20)) == transfer_work.TransferWork(3.0, 0.0)


def test_what_a_stack_moves_is_counted(disk_path):
    """Backward may take back a write that has not begun, so that not all that is saved moves."""
    stack = transfer_work.LayerStack(MIB, 8)
    moved = []

    def counted(session):
        moved.append(original(session))
        return moved[-1]

    original = transfer_work._moved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_work, "_moved", counted)
        written_s, read_s = transfer_work.added_seconds(
            stack, str(disk_path), Machine.preset("cpu"), 0.0
        )
    writes, reads = (after - before for before, after in zip(*moved, strict=True))
    assert 1 <= reads <= writes <= 8
    assert isinstance(written_s, float)
    assert isinstance(read_s, float)
    assert list(disk_path.iterdir()) == []
