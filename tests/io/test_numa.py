"""NUMA on the machine at hand, whose node 0 there always is; and devices of a machine that is made up."""

import platform
from types import SimpleNamespace

import pytest

from memory_nodes import node_at, policy_at
from penstock.core.units import MIB
from penstock.io import numa
from penstock.io.mapping import Mapping
from penstock.store.arena import Arena

ABSENT = 1000
"""A node that no machine has."""
PREFERRED = 1


@pytest.fixture(autouse=True)
def _may_ask():
    mapping = Mapping(2 * MIB)
    refusal = numa.prefer(mapping.address, mapping.nbytes, 0)
    if refusal:
        pytest.skip(f"this system does not let us ask for a node: {refusal}")


@pytest.fixture
def sysfs(tmp_path):
    """``sysfs(address, text)`` has a device say that it is at a node."""

    def tell(address, text):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(text)
        return tmp_path

    return tell


def properties(domain=0, bus=0x3B, device=0):
    return SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("?", None)])
def test_the_kernel_tells_the_node_of_a_device(sysfs, text, node):
    assert numa.node_of(properties(), sysfs("0000:3b:00.0", text)) == node


def test_an_address_has_four_parts(sysfs):
    root = sysfs("0001:c2:1f.0", "3\n")
    assert numa.node_of(properties(domain=1, bus=0xC2, device=0x1F), root) == 3


def test_a_device_that_is_not_told_of_has_no_node(tmp_path):
    assert numa.node_of(properties(), tmp_path) is None
    assert numa.node_of(SimpleNamespace(name="of an old torch"), tmp_path) is None


def test_memory_comes_from_the_node_that_was_asked_for():
    arena = Arena(4 * MIB, node=0)
    assert policy_at(arena.address) == (PREFERRED, 1)
    assert policy_at(arena.address + 4 * MIB - 4096) == (PREFERRED, 1)
    assert arena.pretouch()
    assert node_at(arena.address) == 0
    arena.undo_pretouch()
    assert arena.pretouch()
    assert policy_at(arena.address) == (PREFERRED, 1)  # also what is touched later
    arena.close()


def test_without_a_node_nothing_is_asked_for():
    arena = Arena(4 * MIB)
    assert policy_at(arena.address) == (0, 0)
    arena.close()


def test_a_node_that_there_is_not_is_refused_and_memory_is_there_all_the_same():
    mapping = Mapping(2 * MIB)
    assert numa.prefer(mapping.address, mapping.nbytes, ABSENT)
    arena = Arena(4 * MIB, node=ABSENT)
    assert arena.pretouch()
    assert policy_at(arena.address) == (0, 0)
    arena.close()


def test_a_machine_that_we_do_not_know_is_not_asked(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    mapping = Mapping(2 * MIB)
    assert "s390x" in numa.prefer(mapping.address, mapping.nbytes, 0)


@pytest.mark.parametrize(("text", "count"), [("0\n", 1), ("0-1\n", 2), ("0-2,8\n", 4), ("", 1)])
def test_nodes_are_counted(tmp_path, text, count):
    there = tmp_path / "devices/system/node"
    there.mkdir(parents=True)
    (there / "has_memory").write_text(text)
    assert numa.nodes(tmp_path) == count


def test_what_the_kernel_allows_is_read(tmp_path):
    assert 0 in numa.allowed_nodes()
    status = tmp_path / "status"
    status.write_text("Name:\tx\nMems_allowed_list:\t1,3-4\n")
    assert numa.allowed_nodes(status) == {1, 3, 4}
    assert numa.allowed_nodes(tmp_path / "none") is None
