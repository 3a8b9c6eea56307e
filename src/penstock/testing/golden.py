"""Golden frames, which are written once for each version of a format and must always be decodable.

A folder has pairs ``<dtype>.frame`` and ``<dtype>.decoded``. An encoder may later make other frames of
the same version, but the golden ones MUST decode to the bytes of the day on which they were written.
Frames of a later version are added as ``<dtype>-<version>.frame``, with their decoded bytes.

    python -m penstock.testing.golden NAME FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock.codec.base import ITEMSIZE, Bytes, Codec, read_header
from penstock.codec.registry import get
from penstock.core.errors import ConfigError
from penstock.testing.codec_samples import check_decoded, placed, special_words, with_zeros


def write_golden(codec: Codec, folder: Path) -> None:
    """Write a codec's golden files for the version that it encodes now.

    Raises:
        ConfigError: There already are golden files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {dtype: _name(codec, dtype) for dtype in codec.dtypes}
    if any((folder / f"{name}.frame").exists() for name in names.values()):
        raise ConfigError(
            f"{folder} already has golden files, which are written only once; use another folder"
        )
    for dtype in sorted(codec.dtypes):
        source = _source(dtype)
        out = placed(bytes(codec.spec(dtype, source.size).bound_bytes))
        frame = out[: codec.encode(source, out, dtype=dtype)]
        decoded = placed(bytes(source.size))
        codec.decode(frame, decoded)
        check_decoded(codec, dtype, source, decoded)
        (folder / f"{names[dtype]}.frame").write_bytes(frame.tobytes())
        (folder / f"{names[dtype]}.decoded").write_bytes(decoded.tobytes())


def check_golden(codec: Codec, folder: Path) -> None:
    """Decode all frames in ``folder``; fail if a dtype is missing or a byte differs.

    There must be a frame of the present version for each dtype.
    """
    frames = {path.stem: path for path in sorted(folder.glob("*.frame"))}
    assert {_name(codec, dtype) for dtype in codec.dtypes} <= frames.keys(), (
        f"{folder} lacks golden files of {codec.name}; write them once and keep them:"
        f" python -m penstock.testing.golden {codec.name} {folder}"
    )
    for path in frames.values():
        frame = placed(path.read_bytes())
        wanted = path.with_suffix(".decoded").read_bytes()
        out = placed(bytes(read_header(frame).source_bytes))
        codec.decode(frame, out)
        assert out.tobytes() == wanted, f"{path} decodes to different bytes than before"


def _name(codec: Codec, dtype: str) -> str:
    version = codec.versions[-1]
    return dtype if version == 1 else f"{dtype}-{version}"


def _source(dtype: str) -> Bytes:
    """Return a few hundred elements: half of them zero, a run of zeros, special values, and a tail."""
    return placed(b"".join(_parts(dtype)))


def _parts(dtype: str) -> Iterator[bytes]:
    random = np.random.default_rng(7)
    size = ITEMSIZE[dtype]
    yield with_zeros(dtype, 300 * size, 0.5, random).tobytes()
    yield bytes(70 * size)
    yield special_words(dtype).tobytes()
    yield b"\x01\x02\x03\x04\x05\x06\x07"[: size - 1]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m penstock.testing.golden NAME FOLDER")
    write_golden(get(sys.argv[1]), Path(sys.argv[2]))
