"""Codec choice for one slot: measured seconds of a core against measured seconds of a tier.

A codec shortens the transfer and costs a core. Latency is the same with a codec and without it, so only
the times of the bytes are compared, and the size cancels out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from penstock.plan.machine import Machine
from penstock.plan.profile import CodecSample

MARGIN: Final = 0.1
"""Least relative gain of a codec: a tenth of the transfer time that it shortens and, if it overlaps with
transfers, of its own core time. Codecs are measured on an idle core, but encoding shares its core with
the training thread, so a codec that wins by less would win nothing."""

SlotCodecs: TypeAlias = Mapping[int, CodecSample]
"""Codec sample by index of the profile's slot; slots that are not in it are not encoded."""
AS_THEY_ARE: Final[SlotCodecs] = MappingProxyType({})


def best(samples: Sequence[CodecSample], machine: Machine, tier: str) -> CodecSample | None:
    """Return the codec sample with the quickest round trip to a tier; None: no codec.

    For a slower tier the answer is the same codec or one that makes fewer bytes, never None instead.

    Args:
        samples: The codecs that may be used.
        machine: The tiers' speeds.
        tier: ``"flash"`` or ``"host"``.
    """
    raw_s = sum(_raw_s(machine, tier))
    useful = [sample for sample in samples if _pays(sample, raw_s)]
    if not useful:
        return None
    return min(useful, key=lambda s: (sum(_work_s(s)) + s.ratio * raw_s, s.ratio, s.codec))


def _pays(sample: CodecSample, raw_s: float) -> bool:
    """Return True if a codec shortens a slot's round trip by ``MARGIN``, with nothing overlapping."""
    return sum(_work_s(sample)) <= (1 - sample.ratio - MARGIN) * raw_s


def saved_per_work(sample: CodecSample, machine: Machine, tier: str) -> float:
    """Return the seconds of a tier's channel saved per second of codec work, both ways."""
    return (1 - sample.ratio) * sum(_raw_s(machine, tier)) / sum(_work_s(sample))


def cost_s(nbytes: int, machine: Machine, tier: str, sample: CodecSample | None) -> float:
    """Return the seconds for which a slot of ``nbytes`` occupies the tier's channel, both ways."""
    moved = nbytes if sample is None else sample.encoded_bytes(nbytes)
    return machine.write_s(moved, tier) + machine.read_s(moved, tier)


def round_trip_s(nbytes: int, machine: Machine, tier: str, sample: CodecSample | None) -> float:
    """Return the seconds of a slot's round trip on an idle tier, codec work included."""
    work_s = 0.0 if sample is None else sample.encode_s(nbytes) + sample.decode_s(nbytes)
    return cost_s(nbytes, machine, tier, sample) + work_s


def _raw_s(machine: Machine, tier: str) -> tuple[float, float]:
    """Return the seconds to write a raw byte, and to read it."""
    write, read = machine.bytes_per_s(tier)
    return 1 / write, 1 / read


def _work_s(sample: CodecSample) -> tuple[float, float]:
    """Return the seconds to encode a byte of the source, and to decode it."""
    return 1 / sample.encode_bytes_per_s, 1 / sample.decode_bytes_per_s
