"""Memory of the machine, its control groups and this process; and what ``memory=`` asks of it."""

import mmap
from fractions import Fraction

import pytest

from penstock.core import memory
from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError, SizeError
from penstock.core.memory import MemoryRequest, ProcessMemory, parse_memory, usable_memory
from penstock.core.ranks import local_processes
from penstock.core.units import GIB, MIB


@pytest.mark.parametrize(
    ("value", "request_", "text"),
    [
        ("8GiB", MemoryRequest(nbytes=8 * GIB), "8.00 GiB"),
        (3 * MIB, MemoryRequest(nbytes=3 * MIB), "3.00 MiB"),
        ("auto", MemoryRequest(), "auto"),
        (" auto ", MemoryRequest(), "auto"),
        ("60%", MemoryRequest(share=Fraction(3, 5)), "60%"),
        ("12.5 %", MemoryRequest(share=Fraction(1, 8)), "12.5%"),
        ("100%", MemoryRequest(share=Fraction(1)), "100%"),
    ],
)
def test_a_size_a_share_or_auto(value, request_, text):
    assert parse_memory(value) == request_
    assert str(parse_memory(value)) == text
    assert OffloadConfig(memory=value, flash=".").memory_request == request_


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0%", "above 0% and at most 100%"),
        ("101%", "above 0% and at most 100%"),
        ("-5%", "as '60%', or 'auto'"),
        ("Auto", "as '60%', or 'auto'"),
        ("8G", "ambiguous.*as '60%', or 'auto'"),
        ("", "not a size.*as '60%', or 'auto'"),
        (0, "more than 0 bytes"),
        ("0GiB", "more than 0 bytes"),
        (True, "bool, not an int"),
        (0.6, "float, not an int"),
    ],
)
def test_what_is_neither_is_refused_with_examples(value, message):
    with pytest.raises(SizeError, match=f"^memory.*{message}"):
        OffloadConfig(memory=value, flash=".")


def test_a_size_becomes_bytes_and_the_rest_stays_as_written(tmp_path):
    assert OffloadConfig(memory="1MiB", flash=".").memory == MIB
    assert OffloadConfig(memory="60%", flash=".").memory == "60%"
    assert OffloadConfig().memory_request is None
    path = tmp_path / "offload.toml"
    path.write_text('[offload]\nmemory = "auto"\nflash = "."\n')
    assert OffloadConfig.from_toml(path).memory == "auto"


def test_a_limit_needs_a_tier_to_offload_to():
    for value in ("auto", "60%", "8GiB"):
        with pytest.raises(ConfigError, match=r"memory=.* needs a tier to offload to"):
            OffloadConfig(memory=value)
    assert OffloadConfig(memory="8GiB", policy="keep").memory == 8 * GIB


def test_the_host_tier_is_within_the_limit():
    with pytest.raises(ConfigError, match=r"host_memory is 2\.00 GiB, more than memory.*1\.00 GiB"):
        OffloadConfig(memory="1GiB", host_memory="2GiB")
    assert OffloadConfig(memory="1GiB", host_memory="1GiB").host_bytes == GIB
    assert OffloadConfig(memory="60%", host_memory="2GiB").host_bytes == 2 * GIB
    assert OffloadConfig(flash=".").host_bytes == 0


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Make the control groups of this process: a membership, and files with their content."""
    membership, root = tmp_path / "membership", tmp_path / "fs"
    monkeypatch.setattr(memory, "MEMBERSHIP", membership)
    monkeypatch.setattr(memory, "CGROUPS", root)

    def make(text, files):
        membership.write_text(text)
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)

    return make


@pytest.fixture
def machine(monkeypatch):
    """A machine of 16 GiB, of which 6 GiB are available."""
    sizes = {"MemTotal": 16 * GIB, "MemAvailable": 6 * GIB}
    monkeypatch.setattr(memory, "memory_sizes", lambda: sizes)
    return sizes


V1 = {"memory/job/memory.limit_in_bytes": f"{8 * GIB}\n"}
V2 = {
    "job/step/memory.max": "max\n",
    "job/memory.max": f"{8 * GIB}\n",
    "job/memory.current": f"{5 * GIB}\n",
    "job/memory.stat": f"anon 1\nactive_file {GIB}\ninactive_file {GIB}\nfile {3 * GIB}\n",
}


@pytest.mark.parametrize(
    ("membership", "files"), [("4:cpu,memory:/job\n0::/\n", V1), ("0::/job/step\n", V2)]
)
def test_a_share_is_one_of_the_tightest_limit(groups, machine, membership, files):
    groups(membership, files)
    found = usable_memory(parse_memory("60%"), own=GIB)
    assert found.nbytes == 8 * GIB * 6 // 10
    assert found.source == "60% of the cgroup's limit of 8.00 GiB"
    machine["MemTotal"] = 4 * GIB
    found = usable_memory(parse_memory("25%"), own=GIB)
    assert found == (GIB, "25% of the machine's 4.00 GiB")
    found = usable_memory(parse_memory("50%"), own=GIB, processes=2)
    assert found == (GIB, "50% of the machine's 4.00 GiB, divided between 2 processes")


def test_auto_is_what_the_process_holds_and_what_is_available(groups, machine):
    groups("0::/elsewhere\n", V2)
    found = usable_memory(parse_memory("auto"), own=GIB)
    assert found == (7 * GIB, "the machine's available memory")
    found = usable_memory(parse_memory("auto"), own=GIB, processes=3)
    assert found == (3 * GIB, "the machine's available memory, divided between 3 processes")


def test_auto_stays_within_the_control_group(groups, machine):
    """Page cache in the group does not count: the kernel drops it if it needs the memory."""
    groups("0::/job/step\n", V2)
    found = usable_memory(parse_memory("auto"), own=GIB)
    assert found == (GIB + 5 * GIB, "what the cgroup's limit of 8.00 GiB leaves")
    groups("0::/job/step\n", {"job/memory.high": f"{4 * GIB}\n"})
    found = usable_memory(parse_memory("auto"), own=GIB)
    assert found == (GIB + GIB, "what the cgroup's limit of 4.00 GiB leaves")
    groups("0::/job/step\n", {"job/memory.max": f"{2 * GIB}\n"})
    assert usable_memory(parse_memory("auto"), own=GIB).nbytes == GIB, "it holds more than that"


def test_a_system_that_reports_nothing(groups, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "MEMBERSHIP", tmp_path / "none")
    monkeypatch.setattr(memory, "memory_sizes", dict)
    physical = memory.physical_bytes()
    assert usable_memory(parse_memory("auto"), own=GIB).nbytes == physical
    assert usable_memory(parse_memory("50%"), own=GIB).nbytes == physical // 2


def test_cgroup_limits_of_both_versions(tmp_path):
    membership = tmp_path / "cgroup"
    assert memory.cgroup_limits(membership, tmp_path) == []
    root = tmp_path / "fs"
    for folder, name, text in (
        ("a/b", "memory.max", "max\n"),
        ("a", "memory.max", "3000\n"),
        ("memory/x", "memory.limit_in_bytes", "2000\n"),
        ("memory", "memory.limit_in_bytes", "9223372036854771712\n"),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).write_text(text)
    (tmp_path / "memory.max").write_text("1\n")  # above the root: not a cgroup's
    for text, limits in (
        ("0::/a/b\n", [3000]),
        ("0::/\n", []),
        ("5:cpu,memory:/x\n4:cpu:/a\n", [2000]),
        ("5:memory:/x\n0::/a/b/gone\n", [2000, 3000]),
    ):
        membership.write_text(text)
        assert [each.nbytes for each in memory.cgroup_limits(membership, root)] == limits


def test_this_process_is_measured():
    process = ProcessMemory()
    before = process.held_bytes()
    block = mmap.mmap(-1, 32 * MIB)  # new memory, where the heap may have some left
    block.write(b"1" * 32 * MIB)
    assert 30 * MIB < process.held_bytes() - before < 40 * MIB
    assert process.peak_bytes() >= before + 30 * MIB
    block.close()
    process.close()
    process.close()
    assert process.held_bytes() == 0, "it is closed"


def test_processes_of_a_launcher(monkeypatch):
    assert local_processes() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_processes() == 1, "there is no rank"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert local_processes() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert local_processes() == 1
