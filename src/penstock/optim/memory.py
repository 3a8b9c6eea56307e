"""Memory of an optimizer on flash, beside the memory of torch's."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core import knobs
from penstock.core.units import format_bytes
from penstock.optim.states import FlashStates


def memory_notes(states: FlashStates) -> Iterator[str]:
    """Yield sentences on memory that a user would not expect to be taken.

    Args:
        states: With all of their groups.

    Yields:
        That ``host_memory`` is raised, with the least that can be given; that the buffers take as much
        as torch's states would. Nothing of buffers that take less than the floor.
    """
    ring_bytes, given = states.pipeline.memory_bytes, states.config.host_bytes
    if ring_bytes < knobs.floor_bytes():
        return
    if 0 < given < ring_bytes:
        yield (
            f"memory for optimizer states was raised from {format_bytes(given)} to"
            f" {format_bytes(ring_bytes)} ({ring_bytes} bytes), the least that its"
            f" {states.pipeline.count} buffers take; a smaller `tile` takes less"
        )
    plain = plain_bytes(states)
    if ring_bytes >= plain:
        yield (
            f"{states.class_name} on flash takes more memory than in memory: its buffers take"
            f" {format_bytes(ring_bytes)}, and the states of torch's {states.class_name} would take"
            f" {format_bytes(plain)}; leave them in memory, or give a smaller `tile` and `host_memory`"
        )


def plain_bytes(states: FlashStates) -> int:
    """Return what the states of all parameters take in torch's optimizer, which keeps no masters."""
    total = 0
    for tile in states.tiles:
        form = tile.form
        elements = sum(piece.stop - piece.start for piece in tile.pieces)
        for state in form.states:
            is_as_stepped = state.dtype == form.master_dtype
            total += elements * (form.param_dtype if is_as_stepped else state.dtype).itemsize
    return total
