"""How the tests of this folder build tiers, and damage what they hold."""

import ctypes
import os
from contextlib import suppress

from penstock.core.units import KIB, MIB
from penstock.io.threads import ThreadEngine
from penstock.observe.recorder import Recorder
from penstock.store import FlashTier, HostTier
from penstock.store.arena import Arena


def flash(stack, directories, capacity_bytes=2 * MIB, *, syscalls=None, **options):
    """A flash tier with an engine of its own, both closed by the stack."""
    engine = ThreadEngine(2, 64 * KIB, syscalls=syscalls)
    stack.callback(engine.close)
    tier = FlashTier(
        directories, capacity_bytes=capacity_bytes, engine=engine, recorder=Recorder(), **options
    )
    stack.callback(tier.close)
    return tier


def host(stack, capacity_bytes=2 * MIB):
    """A host tier with an arena of its own, both closed by the stack."""
    arena = Arena(capacity_bytes)
    stack.callback(arena.close)
    tier = HostTier(arena, capacity_bytes=capacity_bytes, recorder=Recorder())
    stack.callback(tier.close)
    return tier


def flip_on_flash(ticket):
    """Change the first byte of a ticket's data in its file, behind the tier's back."""
    file, offset_bytes, _ = next(ticket.place.ranges(ticket.window.nbytes))
    skew = ticket.window.skew
    fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)  # buffered: any byte can be written
    try:
        (byte,) = os.pread(fd, 1, offset_bytes + skew)
        os.pwrite(fd, bytes([byte ^ 1]), offset_bytes + skew)
        os.fsync(fd)
    finally:
        os.close(fd)


def flip_on_host(ticket):
    """Change the first byte of a ticket's data in its block."""
    address = ticket.place.blocks[0].address + ticket.window.skew
    byte = ctypes.c_ubyte.from_address(address)
    byte.value ^= 1


def outcome(transfer, timeout_s=20):
    """Wait for a transfer; its error."""
    with suppress(Exception):
        transfer.wait(timeout_s)
    assert transfer.done, f"not settled after {timeout_s} s"
    return transfer.error
