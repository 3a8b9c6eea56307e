"""Whether a codec pays for a slot: seconds of a core against seconds of a tier, both as measured.

A codec shortens the transfer and costs a core. Times of a slot are those of its bytes alone: latency is
the same with a codec and without, so it decides nothing, and the size cancels out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from penstock.plan.machine import Machine
from penstock.plan.profile import CodecSample

MARGIN: Final = 0.1
"""What a codec must save: a tenth of the transfers that it shortens, and, where it hides behind them, of
the core's time that it takes. Codecs were measured on a core that had nothing else to do; encoding shares
its core with the training thread. A codec that wins by less would win nothing."""

SlotCodecs: TypeAlias = Mapping[int, CodecSample]
"""By index into the profile's slots: how each is encoded; the others go as they are."""
AS_THEY_ARE: Final[SlotCodecs] = MappingProxyType({})


def best(samples: Sequence[CodecSample], machine: Machine, tier: str) -> CodecSample | None:
    """The quickest way to a tier and back; None: the bytes as they are.

    A slower tier never loses a codec: it gets the same, or one that makes fewer bytes.

    Args:
        samples: The codecs that may be used.
        machine: How fast the tiers are.
        tier: ``"flash"`` or ``"host"``.
    """
    raw_s = sum(_raw_s(machine, tier))
    useful = [sample for sample in samples if _pays(sample, raw_s)]
    if not useful:
        return None
    return min(useful, key=lambda s: (sum(_work_s(s)) + s.ratio * raw_s, s.ratio, s.codec))


def pays(sample: CodecSample, machine: Machine, tier: str) -> bool:
    """Whether a slot makes its way out and back in less time, by ``MARGIN``, with nothing overlapping.

    That is to encode, write, read and decode it, against to write and read it as it is.
    """
    return _pays(sample, sum(_raw_s(machine, tier)))


def _pays(sample: CodecSample, raw_s: float) -> bool:
    return sum(_work_s(sample)) <= (1 - sample.ratio - MARGIN) * raw_s


def saved_per_work(sample: CodecSample, machine: Machine, tier: str) -> float:
    """Seconds of a tier's channel that a codec spares for each second of the encoder; both ways."""
    return (1 - sample.ratio) * sum(_raw_s(machine, tier)) / sum(_work_s(sample))


def cost_s(nbytes: int, machine: Machine, tier: str, sample: CodecSample | None) -> float:
    """Seconds for which a slot of ``nbytes`` occupies the tier's channel, both ways."""
    moved = nbytes if sample is None else sample.encoded_bytes(nbytes)
    return machine.write_s(moved, tier) + machine.read_s(moved, tier)


def trip_s(nbytes: int, machine: Machine, tier: str, sample: CodecSample | None) -> float:
    """Seconds from a slot's save until it could be back, if it were alone: the encoder's included."""
    work_s = 0.0 if sample is None else sample.encode_s(nbytes) + sample.decode_s(nbytes)
    return cost_s(nbytes, machine, tier, sample) + work_s


def _raw_s(machine: Machine, tier: str) -> tuple[float, float]:
    """Seconds to write a byte as it is, and to read it."""
    write, read = machine.bytes_per_s(tier)
    return 1 / write, 1 / read


def _work_s(sample: CodecSample) -> tuple[float, float]:
    """Seconds to encode a byte of the source, and to decode it."""
    return 1 / sample.encode_bytes_per_s, 1 / sample.decode_bytes_per_s
