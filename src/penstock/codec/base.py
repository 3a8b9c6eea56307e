"""Interface of codecs, and the format of frames.

1. A client calls ``codec.accepts(dtype)``, then ``codec.spec(dtype, nbytes)`` for the largest sizes of
   output and scratch memory, and for what may be lost. Nothing is found out by trying.
2. ``codec.encode(source, out, dtype=...)`` fills the front of ``out`` with a frame and returns its
   length. A lossless codec whose output would not be shorter than its input stores the input unchanged.
3. ``codec.decode(frame, out)`` fills ``out``, which is exactly as long as the source was. A frame that
   is damaged, or another codec's, raises CodecError: no input makes it crash, or access other memory.

Everything here works on bytes of host memory, as one-dimensional ``numpy.uint8`` arrays, and treats
elements as words of their width: -0.0 is not 0, and every NaN keeps its payload. Encoding and decoding
run in the calling thread, on one core, without the GIL in their hot part. Codecs are stateless: one
instance serves every thread.

[Note: frames]
    A frame is a header of 64 bytes and a payload. Little-endian: magic ``PNSC``; u8 version of the
    format, 1; u8 codec; u8 dtype; u8 flags (1: the payload is the source as it was); u64 bytes of the
    source; u64 bytes of the payload; the rest MUST be zero. The payload ends with the source's last
    ``nbytes % itemsize`` bytes, as they were: a storage need not be a whole number of the elements that a
    view of it has.
    Frames have no checksum, because tiers and checkpoints checksum their contents.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core.errors import CodecError, ConfigError

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""One-dimensional contiguous memory; writeable where it is filled."""
Words: TypeAlias = npt.NDArray[Any]
"""Memory as unsigned integers of the element's width."""

HEADER_BYTES: Final = 64
_MAGIC: Final = b"PNSC"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sBBBBQQ40x")
_RAW: Final = 1
_PADDING: Final = bytes(40)

DTYPES: Final = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
"""Element types, by torch's names. A frame's header stores the position in this tuple."""
ITEMSIZE: Final = dict(zip(DTYPES, (1, 1, 1, 2, 4, 8, 2, 2, 4, 8), strict=True))
_WORD: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Fidelity(Enum):
    """Fidelity of decoded elements."""

    EXACT = "exact"
    """Every bit is restored."""
    POSITIVE = "positive"
    """Elements decode to 1 if they are greater than zero or NaN, else to 0: a ReLU needs no more."""
    BOUNDED = "bounded"
    """Values are restored within a stated bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBound:
    """Bound on the error of a decoded finite value ``x``; NaN stays NaN, and infinities stay.

    ``|decoded - x| <= max(relative * |x|, absolute)``, and beyond ``largest`` the decoded value is
    ``largest`` with the sign of ``x``. With ``block`` the bound is ``relative`` times the largest
    magnitude in the block of that many elements that ``x`` lies in.
    """

    relative: float
    absolute: float
    largest: float
    block: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecSpec:
    """Sizes and fidelity of encoding a source of one dtype and size, known in advance."""

    bound_bytes: int
    """Length of the longest possible frame, which ``out`` must have."""
    scratch_bytes: int
    """Largest working memory that ``encode`` and ``decode`` each allocate, beside ``out``."""
    fidelity: Fidelity
    error_bound: ErrorBound | None = None
    """Bound on the error, for BOUNDED."""


class Codec(ABC):
    """Encoding of tensors in fewer bytes. Thread-safe.

    A codec defines its constants and overrides ``_spec``, ``_encode`` and ``_decode``.

    Attributes:
        name: Name in plans and knobs: ``"zero-value"``.
        id: Number in a frame's header. Never reused.
        dtypes: Element types that it accepts.
        fidelity: Fidelity of its decoded elements.
    """

    name: str
    id: int
    dtypes: frozenset[str]
    fidelity: Fidelity

    # -- primitives, for subclasses ---------------------------------------------------------------

    def _spec(self, dtype: str, count: int) -> tuple[int, int, ErrorBound | None]:
        """Return the largest payload and scratch sizes, and the error bound, for ``count`` elements.

        An EXACT codec's payload is bounded by the source's size regardless: if it would not be shorter,
        ``_encode`` returns None.
        """
        return count * ITEMSIZE[dtype], 0, None

    @abstractmethod
    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        """Encode all of ``words``, which is read-only, to the front of ``payload``.

        Returns:
            Number of bytes written; ``None`` if ``payload`` is too short.
        """

    @abstractmethod
    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        """Fill all of ``words`` from ``payload``, which is read-only.

        Raises:
            CodecError: ``payload`` is not what ``_encode`` makes.
        """

    # -- public methods ---------------------------------------------------------------------------

    def accepts(self, dtype: str) -> bool:
        """Return True if it encodes elements of this type."""
        return dtype in self.dtypes

    def spec(self, dtype: str, nbytes: int) -> CodecSpec:
        """Return the sizes for a source of ``nbytes``. Raises ConfigError if ``dtype`` is refused."""
        self._check_dtype(dtype)
        if nbytes < 0:
            raise ConfigError(
                f"codec {self.name}: {nbytes} bytes cannot be encoded; the size must be zero or more"
            )
        count, tail = divmod(nbytes, ITEMSIZE[dtype])
        payload, scratch, bound = self._spec(dtype, count)
        if self.fidelity is Fidelity.EXACT:
            payload = nbytes - tail  # the source is stored raw if encoding does not shorten it
        return CodecSpec(
            bound_bytes=HEADER_BYTES + payload + tail,
            scratch_bytes=scratch,
            fidelity=self.fidelity,
            error_bound=bound,
        )

    def encode(self, source: Bytes, out: Bytes, *, dtype: str) -> int:
        """Encode ``source`` to a frame at the front of ``out``, which must not overlap it.

        Args:
            source: Bytes of elements of ``dtype``; aligned to them.
            out: At least ``spec(dtype, source.size).bound_bytes`` long.
            dtype: The elements' type, by torch's name.

        Returns:
            The frame's length in bytes.

        Raises:
            ConfigError: The dtype is not accepted, or a buffer is unsuitable.
        """
        spec = self.spec(dtype, source.size)
        _check_buffer(source, "source", self.name)
        _check_buffer(out, "out", self.name, writeable=True)
        if out.size < spec.bound_bytes:
            raise ConfigError(
                f"codec {self.name}: out has {out.size} bytes; {source.size} bytes of {dtype} may"
                f" take {spec.bound_bytes}"
            )
        words, tail = _words(source, dtype, self.name)
        words.flags.writeable = False  # Numba compiles a kernel once for each kind of memory
        room = spec.bound_bytes - HEADER_BYTES - tail.size
        body = out[HEADER_BYTES : HEADER_BYTES + room]
        length = self._encode(words, body, dtype)
        raw = False
        if length is None or (self.fidelity is Fidelity.EXACT and length >= body.size > 0):
            assert self.fidelity is Fidelity.EXACT, f"{self.name} exceeded its bound"
            raw, length = True, body.size
            body[:] = source[:length]
        end = HEADER_BYTES + length + tail.size
        out[HEADER_BYTES + length : end] = tail
        header = Header(self.id, dtype, raw, source.size, length + tail.size)
        out[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
        return end

    def decode(self, frame: Bytes, out: Bytes, *, dtype: str | None = None) -> None:
        """Decode ``frame`` to all of ``out``; bytes after the frame are ignored.

        Args:
            frame: A frame that ``encode`` made, anywhere in memory.
            out: Memory as long as the source was; aligned to its elements.
            dtype: The expected element type, if known: a frame of another one is damaged.

        Raises:
            CodecError: The frame is damaged, another codec's, of another length than ``out``, or, if
                ``dtype`` is not given, of a type that ``out`` is not aligned to.
            ConfigError: A buffer is unsuitable.
        """
        _check_buffer(frame, "frame", self.name)
        _check_buffer(out, "out", self.name, writeable=True)
        header = read_header(frame)
        if header.codec != self.id:
            raise CodecError(
                f"codec {self.name} (id {self.id}) cannot decode a frame of codec {header.codec}"
            )
        if not self.accepts(header.dtype):
            raise CodecError(
                f"codec {self.name}: the frame is of {header.dtype}, which this codec never encodes"
            )
        if dtype is not None and header.dtype != dtype:
            raise CodecError(f"codec {self.name}: the frame is of {header.dtype}, expected {dtype}")
        if header.source_bytes != out.size:
            raise CodecError(
                f"codec {self.name}: the frame decodes to {header.source_bytes} bytes, but out has"
                f" {out.size}"
            )
        if dtype is None and _misaligned(out, header.dtype):  # the type may be wrong
            raise CodecError(
                f"codec {self.name}: memory at {out.ctypes.data:#x} is misaligned for {header.dtype}:"
                " corrupted frame, or wrong buffer"
            )
        payload = frame[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        words, tail = _words(out, header.dtype, self.name)
        if payload.size < tail.size:
            raise CodecError(
                f"codec {self.name}: the payload of {payload.size} bytes is too short: damaged frame"
            )
        body = payload[: payload.size - tail.size]
        tail[:] = payload[body.size :]
        body.flags.writeable = False
        if not header.raw:
            self._decode(body, words, header.dtype)
            return
        if self.fidelity is not Fidelity.EXACT or body.size != words.nbytes:
            raise CodecError(
                f"codec {self.name}: {body.size} raw bytes for {words.nbytes}: the frame is damaged"
            )
        out[: body.size] = body

    def _check_dtype(self, dtype: str) -> None:
        if not self.accepts(dtype):
            raise ConfigError(
                f"codec {self.name} does not encode {dtype}; it encodes"
                f" {', '.join(sorted(self.dtypes))}"
            )

    def __repr__(self) -> str:
        return f"<codec {self.name}>"


@dataclass(frozen=True, slots=True)
class Header:
    """Content of a frame's header."""

    codec: int
    dtype: str
    raw: bool
    """True if the payload is the unencoded source."""
    source_bytes: int
    payload_bytes: int

    def pack(self) -> bytes:
        """Return the 64 bytes that ``read_header`` reads."""
        code, flags = DTYPES.index(self.dtype), _RAW if self.raw else 0
        lengths = self.source_bytes, self.payload_bytes
        return _HEADER.pack(_MAGIC, _VERSION, self.codec, code, flags, *lengths)


def frame_bytes(header: Bytes) -> int:
    """Return the length of a frame by the first ``HEADER_BYTES`` of it, which are not checked."""
    return HEADER_BYTES + int(_HEADER.unpack_from(header.data)[-1])


def read_header(frame: Bytes) -> Header:
    """Parse and check a frame's header. Raises CodecError."""
    if frame.size < HEADER_BYTES:
        raise CodecError(
            f"a frame of {frame.size} bytes is shorter than its header, {HEADER_BYTES}"
        )
    magic, version, codec, code, flags, source, payload = _HEADER.unpack_from(frame.data)
    if magic != _MAGIC:
        raise CodecError(f"not a frame: it begins with {magic!r}, not {_MAGIC!r}")
    if version != _VERSION:
        raise CodecError(f"a frame of format {version}; this Penstock reads format {_VERSION}")
    if code >= len(DTYPES) or flags & ~_RAW or frame[24:HEADER_BYTES].tobytes() != _PADDING:
        raise CodecError(
            f"a damaged frame: dtype {code}, flags {flags:#x}, or padding that is not 0"
        )
    if payload > frame.size - HEADER_BYTES:
        raise CodecError(
            f"a truncated frame: its payload has {payload} bytes, {frame.size - HEADER_BYTES} are there"
        )
    return Header(codec, DTYPES[code], bool(flags & _RAW), source, payload)


def _words(memory: Bytes, dtype: str, codec: str) -> tuple[Words, Bytes]:
    """Return memory as words of the element's width, and the remaining bytes."""
    size = ITEMSIZE[dtype]
    whole = memory.size - memory.size % size
    if _misaligned(memory, dtype):
        raise ConfigError(
            f"codec {codec}: memory at {memory.ctypes.data:#x} is misaligned for {dtype}"
        )
    return memory[:whole].view(_WORD[size]), memory[whole:]


def _misaligned(memory: Bytes, dtype: str) -> bool:
    """Return True if the memory is not aligned to elements of this type."""
    size = ITEMSIZE[dtype]
    return memory.size >= size and memory.ctypes.data % size != 0


def _check_buffer(memory: Bytes, name: str, codec: str, *, writeable: bool = False) -> None:
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise ConfigError(f"codec {codec}: {name} is not a contiguous row of bytes")
    if writeable and not memory.flags.writeable:
        raise ConfigError(f"codec {codec}: {name} cannot be written to")
