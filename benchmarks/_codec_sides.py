"""Ways to encode and decode the same bytes: the codecs, what one writes by hand, general compressors."""

import importlib
from functools import partial

import numpy as np

from penstock.codec import registry
from penstock.codec.base import Fidelity
from penstock.core.units import round_up
from penstock.io.mapping import PAGE_BYTES, Mapping
from penstock.testing.codec_samples import check_decoded

CHECKED_BYTES = 1 << 20
"""Of what a codec that loses something gives back; to check all takes longer than to measure."""

_MAPPINGS = []


def memory(nbytes):
    """Huge pages, touched once, kept as long as the process: what a session's arena hands out."""
    mapping = Mapping(round_up(nbytes, PAGE_BYTES))
    _MAPPINGS.append(mapping)
    found = mapping.array(0, nbytes)
    found[:] = 0
    return found


class Side:
    """One way to encode and decode; ``encode()`` returns how many bytes that takes."""

    def __init__(self, source, back):
        self.source, self.back = source, back

    def check(self):
        """That what was decoded is right."""
        assert np.array_equal(self.back, self.source), type(self).__name__


class Copy(Side):
    def encode(self):
        np.copyto(self.back, self.source)
        return self.source.size

    decode = encode


class ByCodec(Side):
    def __init__(self, source, back, name="zero-value"):
        super().__init__(source, back)
        self.codec = registry.get(name)
        self.out = memory(self.codec.spec("float32", source.size).bound_bytes)

    def encode(self):
        self.length = self.codec.encode(self.source, self.out, dtype="float32")
        return self.length

    def decode(self):
        self.codec.decode(self.out[: self.length], self.back)

    def check(self):
        if self.codec.fidelity is Fidelity.EXACT:
            super().check()
        else:
            parts = (each[:CHECKED_BYTES] for each in (self.source, self.back))
            check_decoded(self.codec, "float32", *parts)


class ByNumpy(Side):
    """What one writes by hand."""

    def encode(self):
        words = self.source.view(np.uint32)
        mask = words != 0
        self.bits, self.packed = np.packbits(mask, bitorder="little"), words[mask]
        return self.bits.nbytes + self.packed.nbytes

    def decode(self):
        words = self.back.view(np.uint32)
        mask = np.unpackbits(self.bits, count=words.size, bitorder="little").view(bool)
        words[:] = 0
        words[mask] = self.packed


class ByBlosc2(Side):
    """LZ4 behind a byte shuffle, in one thread."""

    def __init__(self, source, back):
        super().__init__(source, back)
        self.blosc2 = importlib.import_module("blosc2")
        self.blosc2.set_nthreads(1)

    def encode(self):
        self.frame = self.blosc2.compress2(
            self.source,
            typesize=4,
            clevel=5,
            codec=self.blosc2.Codec.LZ4,
            filters=[self.blosc2.Filter.SHUFFLE],
            nthreads=1,
        )
        return len(self.frame)

    def decode(self):
        self.blosc2.decompress2(self.frame, dst=self.back, nthreads=1)


class ByZstd(Side):
    """Level 1."""

    def __init__(self, source, back):
        super().__init__(source, back)
        zstandard = importlib.import_module("zstandard")
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()

    def encode(self):
        self.frame = self.compressor.compress(self.source)
        return len(self.frame)

    def decode(self):
        self.back[:] = np.frombuffer(self.decompressor.decompress(self.frame), np.uint8)


class ByLz4(Side):
    """The default mode."""

    def __init__(self, source, back):
        super().__init__(source, back)
        self.block = importlib.import_module("lz4.block")

    def encode(self):
        self.frame = self.block.compress(self.source)
        return len(self.frame)

    def decode(self):
        self.back[:] = np.frombuffer(self.block.decompress(self.frame), np.uint8)


SIDES = {
    "memcpy": Copy,
    "zero-value": ByCodec,
    "numpy": ByNumpy,
    "blosc2": ByBlosc2,
    "zstd": ByZstd,
    "lz4": ByLz4,
    **{name: partial(ByCodec, name=name) for name in ("exponent", "positive", "bfloat16", "int8")},
}
PEERS = {"blosc2": "blosc2", "zstd": "zstandard", "lz4": "lz4", "numba": "numba"}
