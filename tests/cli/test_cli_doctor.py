"""``penstock doctor``: on this machine nothing fails; elsewhere each check says what to do."""

import errno
import json
import os
import resource
from types import SimpleNamespace

import pytest

from penstock.cli import checks, main, system
from penstock.cli.checks import CheckStatus, DoctorCheck
from penstock.core import fs, knobs
from penstock.core.errors import TransferError
from penstock.core.fs import FileSystem
from penstock.core.memory import CgroupLimit
from penstock.io.cufile import Availability

NAMES = ["python", "torch", "cuda", "settings", "huge pages", "buffers", "tensor pages"]
NAMES += ["memory", "NUMA", "freed memory"]
ANY_VALUE = {"PENSTOCK_BUFFERED_IO", "PENSTOCK_CACHE"}
"""Variables in which no text is malformed."""


def test_this_machine_passes_and_json_is_one_document(disk_path, capsys):
    assert main(["doctor", "--dir", str(disk_path), "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["ok"] is True
    names = [check["name"] for check in document["checks"] if "PENSTOCK_" not in check["name"]]
    of_disk = [f"{disk_path}: {what}" for what in ("direct I/O", "free space", "bandwidth")]
    assert names == [*NAMES, *of_disk, "GPU-direct", "optional"]
    assert {check["verdict"] for check in document["checks"]} <= {"ok", "warn"}
    assert all(check["advice"] for check in document["checks"] if check["verdict"] == "warn")
    assert list(disk_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_fails_and_the_others_go_on(disk_path, capsys, monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    missing = str(disk_path / "none")
    assert main(["doctor", "--dir", missing, "--dir", str(disk_path)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "does not exist; create it or name another" in out
    assert "1 failed" in out
    assert "B/s, write " in out


@pytest.mark.parametrize(
    ("verdicts", "code", "conclusion"),
    [
        ("ok ok", 0, "Penstock works here\n"),
        ("ok warn", 0, "here; warnings: 1"),
        ("warn fail", 1, "1 failed, warnings: 1"),
    ],
)
def test_only_a_failure_is_one(monkeypatch, capsys, verdicts, code, conclusion):
    found = [
        DoctorCheck(f"[{word}]", CheckStatus(word), "value", "do this") for word in verdicts.split()
    ]
    monkeypatch.setattr("penstock.cli.doctor.all_checks", lambda directories: found)
    assert main(["doctor"]) == code
    out = capsys.readouterr().out
    assert conclusion in out
    assert out.count("→ do this") == 2
    assert "[ok]" in out or "[warn]" in out  # no markup


def test_python_and_torch_that_are_too_old(monkeypatch):
    monkeypatch.setattr(checks, "LEAST_PYTHON", (9, 0))
    assert checks.python().verdict is CheckStatus.FAIL
    for version, verdict in (
        ("2.7.1", "fail"),
        ("2.8.0", "ok"),
        ("2.13.0+cpu", "ok"),
        ("3.0a1", "ok"),
    ):
        monkeypatch.setattr(
            checks.importlib, "import_module", lambda _, v=version: SimpleNamespace(__version__=v)
        )
        assert checks.torch().verdict == verdict

    def broken(name):
        raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(checks.importlib, "import_module", broken)
    assert checks.torch().verdict is CheckStatus.FAIL
    assert "libtorch.so" in checks.torch().value
    assert checks.cuda().verdict is CheckStatus.WARN


def fake_torch(devices, built="12.8"):
    properties = SimpleNamespace(name="GPU", total_memory=80 << 30)
    return SimpleNamespace(
        version=SimpleNamespace(cuda=built),
        cuda=SimpleNamespace(
            is_available=lambda: devices > 0,
            device_count=lambda: devices,
            get_device_properties=lambda index: properties,
        ),
    )


@pytest.mark.parametrize(
    ("torch", "driver", "verdict", "words"),
    [
        (fake_torch(2), "570.1", "ok", "CUDA 12.8, driver 570.1: GPU (80.00 GiB), GPU (80.00 GiB)"),
        (fake_torch(0, None), "570.1", "warn", "a build for CPUs"),
        (fake_torch(0), "570.1", "warn", "sees no device (its CUDA: 12.8)"),
        (fake_torch(0, None), None, "ok", "the device is host memory"),
    ],
)
def test_cuda(monkeypatch, torch, driver, verdict, words):
    monkeypatch.setattr(checks.importlib, "import_module", lambda _: torch)
    monkeypatch.setattr(system, "nvidia_driver", lambda: driver)
    check = checks.cuda()
    assert check.verdict == verdict
    assert words in check.value


def test_gpu_direct_matters_only_with_a_gpu(monkeypatch):
    monkeypatch.setattr(system, "nvidia_driver", lambda: None)
    assert checks.gpu_direct(lambda: Availability(False, "no")).verdict is CheckStatus.OK
    monkeypatch.setattr(system, "nvidia_driver", lambda: "570.1")
    assert checks.gpu_direct(lambda: Availability(False, "why")).value == "why"
    assert checks.gpu_direct(lambda: Availability(False, "why")).verdict is CheckStatus.WARN
    assert checks.gpu_direct(lambda: Availability(True, "how")).verdict is CheckStatus.OK


def test_every_variable_of_ours_is_told_with_its_value_and_where_that_is_from(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PENSTOCK_IO_PIECE", "8MiB")
    (check,) = checks.settings()
    assert check.verdict is CheckStatus.OK
    lines = check.value.splitlines()
    assert [line.split(":")[0] for line in lines] == list(knobs.KNOBS)
    assert "PENSTOCK_IO_PIECE: 8.00 MiB (environment)" in lines
    assert "PENSTOCK_FLOOR: 1.00 MiB (default)" in lines
    assert "PENSTOCK_VERIFY: sampled (default)" in lines


@pytest.mark.parametrize("name", sorted(set(knobs.KNOBS) - ANY_VALUE))
def test_each_variable_of_ours_that_makes_no_sense_fails_in_words(monkeypatch, name):
    monkeypatch.setenv(name, "-many")
    monkeypatch.setenv("PENSTOCK_STRIPES", "4MiB")
    in_force, *wrong = checks.settings()
    assert name not in in_force.value
    found = {check.name: check for check in wrong}
    assert found[name].verdict is CheckStatus.FAIL
    assert name in found[name].value
    assert "'-many'" in found[name].value
    assert found["PENSTOCK_STRIPES"].verdict is CheckStatus.WARN
    assert "no such variable" in found["PENSTOCK_STRIPES"].value


@pytest.mark.parametrize("name", ["PENSTOCK_SLAB", "PENSTOCK_IO_THREADS"])
def test_a_variable_that_makes_no_sense_stops_no_other_check(disk_path, monkeypatch, capsys, name):
    monkeypatch.setenv(name, "-many")
    assert main(["doctor", "--dir", str(disk_path), "--json"]) == 1
    checked = {each["name"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert checked[name]["verdict"] == checked[str(disk_path)]["verdict"] == "fail"
    assert name in checked[str(disk_path)]["value"]
    assert "optional" in checked


def test_huge_pages(tmp_path, monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    setting = tmp_path / "enabled"
    assert checks.huge_pages(setting).verdict is CheckStatus.WARN
    cases = (
        ("always madvise [never]", "warn", "warn"),
        ("always [madvise] never", "ok", "warn"),
        ("[always] madvise never", "ok", "ok"),
    )
    for text, kernel, tensors in cases:
        setting.write_text(text)
        assert checks.huge_pages(setting).verdict == kernel
        assert checks.torch_pages(setting).verdict == tensors
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    assert checks.torch_pages(tmp_path / "none").verdict is CheckStatus.OK


def test_pages_are_counted_in_the_mapping_that_is_meant(tmp_path):
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-3000 rw-p 0 00:00 0\nAnonHugePages:   8 kB\n"
        "3000-5000 rw-p 0 00:00 0 [heap]\nRss: 1 kB\nAnonHugePages:   2048 kB\nVmFlags: rd\n"
    )
    assert system.anon_huge_bytes(0x3000, smaps) == 2 << 20
    assert system.anon_huge_bytes(0x2FFF, smaps) == 8 << 10
    assert system.anon_huge_bytes(0x5000, smaps) == 0
    assert system.anon_huge_bytes(0x3000, tmp_path / "none") is None


def test_buffers_without_huge_pages(monkeypatch):
    for huge, verdict in ((32 << 20, "ok"), (2 << 20, "warn"), (None, "warn")):
        monkeypatch.setattr(system, "anon_huge_bytes", lambda address, huge=huge: huge)
        assert checks.arena_pages().verdict == verdict


def test_memory_tells_what_limits_it(monkeypatch):
    monkeypatch.setattr(checks, "cgroup_limits", lambda: [CgroupLimit(1 << 30, 0)])
    assert "a cgroup limits it to 1.00 GiB" in checks.memory().value
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 31, -1))
    assert "limited to 2.00 GiB" in checks.memory().value
    assert checks.memory().verdict is CheckStatus.WARN


def test_memory_that_a_virtual_machine_returns_to_its_host(tmp_path, monkeypatch):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    assert checks.freed_memory(tmp_path / "none").verdict is CheckStatus.OK
    features = tmp_path / "virtio0" / "features"
    features.parent.mkdir()
    features.write_text("0110000010\n")
    assert checks.freed_memory(tmp_path).verdict is CheckStatus.OK
    features.write_text("0110010010\n")
    assert checks.freed_memory(tmp_path).verdict is CheckStatus.WARN
    for size, verdict in (("1048576", "warn"), ("4294967296", "ok"), ("much", "warn")):
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", size)
        assert checks.freed_memory(tmp_path).verdict == verdict


def test_disks(disk_path, monkeypatch):
    path = str(disk_path)
    for free, verdict in ((1 << 40, "ok"), (5 << 30, "warn"), (1 << 20, "fail"), (-1, "fail")):
        monkeypatch.setattr(checks, "free_space_bytes", lambda _, free=free: free)
        assert checks.free_space(path).verdict == verdict
    monkeypatch.setattr(checks, "SLOW_BYTES_PER_S", 10**15)
    assert checks.quick_bandwidth(path).verdict is CheckStatus.WARN
    monkeypatch.setenv("PENSTOCK_BUFFERED_IO", "1")
    assert checks.direct_io(path).verdict is CheckStatus.WARN
    assert "PENSTOCK_BUFFERED_IO" in checks.direct_io(path).advice
    monkeypatch.setattr(fs, "filesystem_of", lambda _: FileSystem("tmpfs", True))
    (refused,) = checks.disk(path)
    assert refused.verdict is CheckStatus.FAIL
    assert "tmpfs" in refused.value


def test_a_directory_that_takes_no_file_fails_in_words(disk_path, monkeypatch):
    def full(path):
        raise TransferError(errno=errno.EDQUOT, op="open", path=path, offset_bytes=0, nbytes=0)

    monkeypatch.setattr(checks, "open_unlinked", full)
    (check,) = checks.disk(str(disk_path))
    assert check.verdict is CheckStatus.FAIL
    assert os.strerror(errno.EDQUOT) in check.value


def test_a_disk_too_full_for_a_probe_fails_in_words(disk_path, monkeypatch):
    monkeypatch.setattr(checks, "_PROBE_BYTES", 1 << 50)
    check = checks.quick_bandwidth(str(disk_path))
    assert check.verdict is CheckStatus.FAIL
    assert "lower its capacity" in check.value


def test_missing_packages_are_named_with_what_installs_them(monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    assert checks.extras().value == "no matplotlib, no scikit-learn, no pillow"
    assert "pip install 'penstock[data,plot]'" in checks.extras().advice


@pytest.fixture
def two_sockets(tmp_path, monkeypatch):
    """A machine with two nodes and a GPU at each; a third one does not tell."""
    there = tmp_path / "devices/system/node"
    there.mkdir(parents=True)
    (there / "has_memory").write_text("0-1\n")
    for bus, node in (("3b", 0), ("d8", 1)):
        device = tmp_path / f"bus/pci/devices/0000:{bus}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    buses = (0x3B, 0xD8, 0x01)
    cuda = SimpleNamespace(
        device_count=lambda: len(buses),
        get_device_properties=lambda number: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=buses[number], pci_device_id=0
        ),
    )
    monkeypatch.setattr(checks.importlib, "import_module", lambda _: SimpleNamespace(cuda=cuda))
    return tmp_path


def test_numa_nodes_of_gpus_are_told(two_sockets):
    found = checks.numa_nodes(two_sockets, lambda: frozenset({0, 1}))
    assert found.verdict is CheckStatus.OK
    assert found.value == (
        "2 nodes; GPU 0 (0000:3b:00.0): node 0; GPU 1 (0000:d8:00.0): node 1;"
        " GPU 2 (0000:01:00.0): node unknown"
    )


def test_a_node_that_this_process_may_not_use_is_warned_of(two_sockets):
    found = checks.numa_nodes(two_sockets, lambda: frozenset({0}))
    assert found.verdict is CheckStatus.WARN
    assert "may not use the memory of GPU 1's node" in found.value
    assert "cpuset.mems" in found.advice
    assert checks.numa_nodes(two_sockets, lambda: None).verdict is CheckStatus.OK


def test_on_one_node_all_memory_is_as_near(tmp_path):
    assert checks.numa_nodes(tmp_path).value == "one node: all memory is equally near"
