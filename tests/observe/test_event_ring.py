"""The latest events, in bounded memory: by bytes, whatever the events are."""

from __future__ import annotations

import gc
import tracemalloc
from types import MappingProxyType

from penstock.core.units import KIB
from penstock.observe.events import LEVEL, MARK, SPAN
from penstock.observe.ring import BLOCK_EVENTS, EventRing

LIMIT_BYTES = 256 * KIB


def event(number):
    """Each is made anew, with names of its own, as long as those of a deep network."""
    now_ns = 10**15 + number
    kind = number % 3
    if kind == 0:
        slot = f"base_model.model.layers.{number}.self_attn.q_proj#0 (2.00 MiB)"
        return (SPAN, "write", now_ns, now_ns + 10**6, 10**6 + number, "flash", slot, "")
    if kind == 1:
        return (LEVEL, now_ns, "device", 10**6 + number)
    fields = {"slot": f"layer {number}", "error": f"[Errno 28] of write {number}" * 8}
    return (MARK, now_ns, "spill_failed", MappingProxyType(fields))


def test_the_memory_of_events_is_within_the_limit():
    ring = EventRing(LIMIT_BYTES)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(30 * BLOCK_EVENTS):
            ring.latest.append(event(number))
            if len(ring.latest) >= BLOCK_EVENTS:
                ring.settle()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 * LIMIT_BYTES < ring.held_bytes <= LIMIT_BYTES
    assert 0.7 * LIMIT_BYTES < taken <= LIMIT_BYTES + 2 * KIB  # the list of the latest


def test_the_oldest_go_first():
    ring = EventRing(LIMIT_BYTES)
    total = 20 * BLOCK_EVENTS + 7
    for number in range(total):
        ring.latest.append(event(number))
        if len(ring.latest) >= BLOCK_EVENTS:
            ring.settle()
    held = ring.events()
    assert BLOCK_EVENTS < len(held) < total
    assert held == [event(number) for number in range(total - len(held), total)]


def test_events_are_invisible_to_the_garbage_collector():
    """[Note: raw events]: else thousands of them would slow every full collection down."""
    ring = EventRing(LIMIT_BYTES)
    ring.latest.extend(event(3 * number) for number in range(BLOCK_EVENTS))
    ring.settle()
    gc.collect()
    gc.collect()  # a tuple is left alone once those in it are
    assert not any(map(gc.is_tracked, ring.events()))
    assert not gc.is_tracked(ring._blocks[0][1])
