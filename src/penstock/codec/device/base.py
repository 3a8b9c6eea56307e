"""Frames on the device: ``encode`` and ``decode`` of :class:`penstock.codec.base.Codec`, for tensors.

A frame made here is identical to the one that the host codec makes of the same bytes, and each decodes
the other's frames. Tensors are uint8, one-dimensional and contiguous, on any device.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from penstock.codec.base import (
    HEADER_BYTES,
    ITEMSIZE,
    Fidelity,
    Header,
    read_header,
)
from penstock.codec.device import FORMS, KERNEL_SCRATCH, SCRATCH, kernels
from penstock.codec.device.words import as_bytes, as_type, word_type
from penstock.core.errors import CodecError, ConfigError

_SMALL_TENSORS: Final = 64 * 1024
"""Allowance for headers, flags and the like, and for a padded block or bitmap word."""
_LARGE_BYTES: Final = 1 << 20
"""torch's allocator gives a tensor that is longer than this up to as much more than it needs."""


def encode_tensor(codec_name: str, memory: Tensor, dtype: str) -> Tensor:
    """Encode bytes of elements of ``dtype`` to a frame on the same device.

    Runs on the current stream; waits for the device if the frame's length depends on the data. Allocates
    from the caching allocator: the frame, and temporaries of a few times the source.

    Args:
        codec_name: One of ``FORMS``.
        memory: uint8[n], contiguous.
        dtype: The elements' type, by torch's name.

    Returns:
        The frame, uint8[m].

    Raises:
        ConfigError: The codec has no device form or does not accept the dtype, or the memory is no
            contiguous row of bytes.
    """
    form = _form(codec_name)
    if not form.CODEC.accepts(dtype):
        raise ConfigError(f"codec {codec_name} does not encode {dtype}")
    _check_row(memory, "memory")
    whole = memory.numel() - memory.numel() % ITEMSIZE[dtype]
    payload = form.encode(as_type(memory[:whole], word_type(dtype)), dtype)
    raw = payload is None
    assert not raw or form.CODEC.fidelity is Fidelity.EXACT, f"{codec_name} exceeded its bound"
    body = memory[:whole] if payload is None else payload
    tail = memory[whole:]
    nbytes = body.numel() + tail.numel()
    header = Header(form.CODEC.id, dtype, raw, memory.numel(), nbytes)
    return torch.cat([_pack_header(header).to(memory.device), body, tail])


def scratch_bytes(
    codec_name: str, dtype: str, nbytes: int, device: torch.device | None = None
) -> int:
    """Return the most device memory that encoding or decoding ``nbytes`` takes, as torch counts it.

    It includes the frame and the result, but not the input, and what torch's allocator leaves unused in
    blocks for tensors of more than a MiB. The internal memory of torch's CUDA operators
    was taken from their source: eight bytes per element where some are selected. Tries no kernels, so it
    does not wait: it is less once they were tried.

    Args:
        codec_name: One of ``FORMS``.
        dtype: The elements' type, by torch's name.
        nbytes: Length of the source.
        device: Where that is; without one, by operators of torch.

    Raises:
        ConfigError: The codec has no device form or does not accept the dtype.
    """
    form = _form(codec_name)
    if not form.CODEC.accepts(dtype):
        raise ConfigError(f"codec {codec_name} does not encode {dtype}")
    need = SCRATCH[codec_name]
    if (
        device is not None
        and codec_name in KERNEL_SCRATCH
        and kernels.are_known_to_work(codec_name, device, word_type(dtype))
    ):
        need = KERNEL_SCRATCH[codec_name]
    per_element, per_byte = need
    count = -(-nbytes // ITEMSIZE[dtype])
    unused = 0
    if max(8 * count, nbytes) > _LARGE_BYTES:
        unused = (
            -(-per_element // 4) + per_byte
        ) * _LARGE_BYTES  # a tensor has four bytes per element
    return per_element * count + per_byte * nbytes + unused + _SMALL_TENSORS


def decode_tensor(
    frame: Tensor,
    nbytes: int,
    *,
    header: Header | None = None,
    codec_name: str | None = None,
    dtype: str | None = None,
) -> Tensor:
    """Decode a frame of any codec in ``FORMS``; bytes after it are ignored.

    Runs on the current stream; waits for the device if a check depends on the data, and for the header,
    unless the caller has it.

    Args:
        frame: uint8[m], contiguous.
        nbytes: Length of the source.
        header: Result of ``read_header`` for this frame, if it was on the host anyway.
        codec_name: The expected codec, if known: a frame of another one is damaged.
        dtype: The expected element type, if known: a frame of another one is damaged.

    Returns:
        The source's bytes, uint8[nbytes], on the same device.

    Raises:
        CodecError: The frame is damaged, or of another length, or of a codec without a device form.
        ConfigError: The frame is no contiguous row of bytes.
    """
    _check_row(frame, "frame")
    header = header or _header_of(frame)
    form = _form_of(header)
    made_by = form.CODEC.name, header.dtype
    if made_by != (codec_name or made_by[0], dtype or made_by[1]):
        raise CodecError(
            f"the frame is of codec {made_by[0]} and {made_by[1]}, expected {codec_name} and {dtype}"
        )
    if header.source_bytes != nbytes:
        raise CodecError(
            f"codec {form.CODEC.name}: the frame decodes to {header.source_bytes} bytes, not {nbytes}"
        )
    payload = frame[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    count, tail = divmod(nbytes, ITEMSIZE[header.dtype])
    if payload.numel() != header.payload_bytes or payload.numel() < tail:
        raise CodecError(
            f"codec {form.CODEC.name}: the payload of {payload.numel()} bytes is too short"
        )
    body = payload[: payload.numel() - tail]
    if header.raw:
        if form.CODEC.fidelity is not Fidelity.EXACT or payload.numel() != nbytes:
            raise CodecError(
                f"codec {form.CODEC.name}: {payload.numel()} raw bytes for {nbytes}: damaged"
            )
        return payload.clone()
    words = as_bytes(form.decode(body, count, header.dtype))
    return torch.cat([words, payload[body.numel() :]]) if tail else words


def _form(name: str) -> ModuleType:
    try:
        return FORMS[name]
    except KeyError:
        raise ConfigError(
            f"codec {name!r} has no device form; these have one: {', '.join(FORMS)}"
        ) from None


def _form_of(header: Header) -> ModuleType:
    for form in FORMS.values():
        if form.CODEC.id == header.codec and form.CODEC.accepts(header.dtype):
            return form
    raise CodecError(f"codec {header.codec} has no device form for {header.dtype}")


def _check_row(tensor: Tensor, name: str) -> None:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ConfigError(f"{name} is not a contiguous row of bytes: {tensor.dtype} {tensor.shape}")


def _pack_header(header: Header) -> Tensor:
    return torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)


def _header_of(frame: Tensor) -> Header:
    """Copy a frame's header, 64 bytes, to the host and parse it."""
    head = frame[:HEADER_BYTES].cpu().numpy().copy()
    if head.size < HEADER_BYTES:
        return read_header(head)  # raises
    payload_bytes = int.from_bytes(head[16:24].tobytes(), "little")
    if payload_bytes > frame.numel() - HEADER_BYTES:
        raise CodecError(
            f"a truncated frame: its payload has {payload_bytes} bytes,"
            f" {frame.numel() - HEADER_BYTES} are there"
        )
    head[16:24] = 0  # the payload is not on the host to be checked
    return replace(read_header(head), payload_bytes=payload_bytes)
