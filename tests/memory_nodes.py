"""How the system placed memory on NUMA nodes, by ``get_mempolicy``."""

import ctypes
import platform

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_NODE, _AT_ADDRESS = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def policy_at(address):
    """The policy by which memory there is found, and of which nodes below 64."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    _asked(mode, mask, 16 * 64, address, _AT_ADDRESS)
    return mode.value, mask[0]


def node_at(address):
    """The node of a resident page."""
    node = ctypes.c_int(-1)
    assert not _asked(node, None, 0, address, _NODE | _AT_ADDRESS)
    return node.value


def _asked(out, mask, size, address, flags):
    number = _GET_MEMPOLICY[platform.machine()]
    address = ctypes.c_ulong(address)
    return _libc.syscall(
        number, ctypes.byref(out), mask, ctypes.c_ulong(size), address, ctypes.c_ulong(flags)
    )
