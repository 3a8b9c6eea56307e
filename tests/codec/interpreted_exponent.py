"""Program: Triton's interpreter runs the kernels of the codec ``exponent``, beside the codec on the host.

Each access of a kernel must be inside the tensors that it was given, and no byte may be written twice. No
more memory may be taken than is said. It prints how many frames were compared, how many damaged ones were
refused, and how many were accepted.
"""

import numpy as np
import torch
from exponent_words import UNSIGNED, with_exponents
from held_memory import Held
from triton.runtime import interpreter

from penstock.codec.base import HEADER_BYTES, ITEMSIZE, read_header
from penstock.codec.device import base, exponent, kernels, triton_exponent
from penstock.codec.device.words import WORD
from penstock.codec.exponent import Exponent
from penstock.core.errors import CodecError
from penstock.testing.codec_samples import placed, sources, with_zeros

BLOCK = exponent.BLOCK
CODEC = Exponent()


def inputs(dtype, random):
    """Every kind of block, alone and beside others, and lengths around blocks."""
    size = ITEMSIZE[dtype]
    for count in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1):
        for _, source in sources(dtype, count * size + (count % 3 and size - 1), seed=count):
            yield source
    for _, source in sources(dtype, (3 * BLOCK + 3) * size + 1):
        yield source
    for positive in (False, True):
        words = blocks_of_every_kind(dtype, positive, random)
        yield placed(words.tobytes())
        yield placed(random.permutation(words.reshape(-1, BLOCK)).tobytes() + bytes(7))
    for seed in range(4):  # any exponents in a range, some zeros
        rows = []
        for _ in range(4):
            low, span = random.integers(0, 256), random.integers(0, 18)
            row = random.integers(low, min(low + span, 255) + 1, BLOCK)
            row[random.random(BLOCK) < random.choice([0, 0.1, 1])] = 0
            rows.append(row)
        exponents = np.concatenate(rows)[: 3 * BLOCK + 111 * seed]
        yield placed(with_exponents(exponents, dtype, seed).tobytes())


def blocks_of_every_kind(dtype, positive, random):
    """Raw, zeros, four bits, and three bits at the limits of the number of exceptions."""
    rows = [np.full(BLOCK, 100) for _ in range(6)]
    rows[0] = random.integers(0, 256, BLOCK)
    rows[2] = random.integers(100, 115, BLOCK)
    for row, exceptions in zip(rows[3:], (319, 318, 1), strict=True):
        row[random.permutation(BLOCK)[:exceptions]] = 40
    words = with_exponents(np.concatenate(rows), dtype)
    words[BLOCK : 2 * BLOCK] = 0
    return words & words.dtype.type(np.iinfo(words.dtype).max >> 1) if positive else words


class Watch:
    """Stands for the part of the interpreter that reads and writes memory."""

    def __init__(self):
        self._inner = interpreter._interpreter
        self._ranges, self._written = [], []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def launch(self, kernel, programs, device, *arguments):
        """In place of ``kernels.launch``."""
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        self._ranges = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
        self._written = [np.zeros(0, np.uint64)]
        kernel[(programs,)](*arguments)
        written = np.concatenate(self._written)
        assert np.unique(written).size == written.size, f"{kernel} writes a byte twice"

    def load(self, places, mask, other, dtype):
        self._bytes_of(places, mask, np.dtype(dtype))
        return self._inner.load(places, mask, other, dtype)

    def store(self, places, values, mask):
        self._written.append(self._bytes_of(places, mask, values.dtype))
        return self._inner.store(places, values, mask)

    def _bytes_of(self, places, mask, dtype):
        """The addresses of all bytes of an access, which are checked."""
        begins = places[mask].ravel().astype(np.uint64)
        inside = np.zeros(begins.size, bool)
        for start, stop in self._ranges:
            inside |= (begins >= start) & (begins + np.uint64(dtype.itemsize) <= stop)
        assert inside.all(), "an access outside"
        return (begins[:, None] + np.arange(dtype.itemsize, dtype=np.uint64)).ravel()


def encoded(source, dtype):
    """On the host."""
    out = np.empty(CODEC.spec(dtype, source.size).bound_bytes, np.uint8)
    return out[: CODEC.encode(source, out, dtype=dtype)]


def compare(source, dtype, skew):
    """Encode here and there, and decode, at an odd address or at an even one."""
    wanted = encoded(source, dtype)
    frame = base.encode_tensor("exponent", torch.from_numpy(source), dtype)
    assert frame.numpy().tobytes() == wanted.tobytes(), (dtype, source.size)
    moved = torch.cat([frame.new_zeros(skew), frame])[skew:]
    back = base.decode_tensor(moved, source.size, codec_name="exponent", dtype=dtype)
    assert back.numpy().tobytes() == source.tobytes(), (dtype, source.size)
    return wanted


def damaged(frame, random):
    """The same frame with up to three bytes changed, most of them in heads, or cut; or as it is."""
    frame = placed(frame)
    payload = frame[HEADER_BYTES:]
    for _ in range(random.integers(0, 4)):
        heads = 24 if random.random() < 0.7 else payload.size
        value = random.integers(0, random.choice([6, 64, 256]))
        payload[random.integers(min(heads, payload.size))] = value
    cut = random.choice([0, 0, 0, 1, 2, 300])
    frame[16:24].view("<u8")[0] -= min(cut, payload.size)
    return frame


def spoiled(frame, blocks):
    """Frames that are too long, and that have more exceptions than they say."""
    longer, many = np.concatenate([frame, frame[-2:]]), frame.copy()
    longer[16:24].view("<u8")[0] += 2
    many[HEADER_BYTES + 4 * blocks :] = 0
    yield from map(placed, (longer, many))


def of_unknown_kinds(dtype):
    """Two blocks of zeros of an unknown kind, and as much less behind them as two lengths of -1 are."""
    words = with_exponents(np.resize(np.arange(100, 115), 4 * BLOCK), dtype)
    words[: 2 * BLOCK] = 0
    frame = encoded(placed(words.tobytes()), dtype).copy()
    frame[HEADER_BYTES : HEADER_BYTES + 8 : 4] = 9
    frame[16:24].view("<u8")[0] -= 2
    return placed(frame), words.nbytes


def judged_alike(frame, nbytes):
    """Decode a damaged frame here and there; return whether it was refused by both."""
    wanted = np.empty(nbytes, np.uint8)
    try:
        CODEC.decode(frame, wanted)
    except CodecError:
        wanted = None
    try:
        found = base.decode_tensor(torch.from_numpy(frame), nbytes)
    except CodecError:
        found = None
    assert (wanted is None) == (found is None)
    assert wanted is None or found.numpy().tobytes() == wanted.tobytes()
    return wanted is None


def changed_meanwhile(dtype):
    """Words that change between the two kernels of an encoding spoil nothing outside the payload."""
    exponents = np.append(np.full(BLOCK - 1, 100), 40)
    words = torch.from_numpy(with_exponents(exponents, dtype).view(f"i{ITEMSIZE[dtype]}"))
    heads, ends = triton_exponent.survey(words)
    words[:-1] = 0
    triton_exponent.pack(words, heads, ends, 4 + int(ends[-1]))


def memory_is_as_said(dtype, random):
    """By what is allocated, and without the allowance for headers."""
    source = with_zeros(dtype, (24 * BLOCK + 3) * ITEMSIZE[dtype] + 1, 0.03, random)
    memory, here = torch.from_numpy(source), torch.device("cpu")
    kernels._found["exponent", here, WORD[ITEMSIZE[dtype]]] = triton_exponent
    most = base.scratch_bytes("exponent", dtype, source.size, here) - base._SMALL_TENSORS
    with Held(memory) as held:
        frame = base.encode_tensor("exponent", memory, dtype)
    assert 2 * (frame.numel() - HEADER_BYTES) < held.peak_bytes <= most
    with Held(frame) as held:
        base.decode_tensor(frame, source.size)
    assert 2 * source.size < held.peak_bytes <= most


class Wrong:
    """The kernels, of which one returns a result with a byte that is another."""

    def __init__(self, name, index):
        self._name, self._index = name, index

    def __getattr__(self, name):
        call = getattr(triton_exponent, name)
        return self._spoiling(call) if name == self._name else call

    def _spoiling(self, call):
        def spoiled(*args):
            results = call(*args)
            result = results if self._index is None else results[self._index]
            result.view(torch.uint8)[result.nbytes // 2] ^= 1
            return results

        return spoiled


class Blind:
    """The kernels, which see no damage."""

    def __getattr__(self, name):
        return self._unpack if name == "unpack" else getattr(triton_exponent, name)

    def _unpack(self, *args):
        words, faults = triton_exponent.unpack(*args)
        return words, faults.zero_()


def main():
    calls = []

    class Counting:
        """The kernels, counted."""

        def __getattr__(self, name):
            calls.append(name)
            return getattr(triton_exponent, name)

    watch = Watch()
    interpreter._interpreter, triton_exponent.launch = watch, watch.launch
    exponent.kernels_for = lambda device, word: Counting()
    random = np.random.default_rng(0)
    here, compared, judged, kinds = torch.device("cpu"), 0, [], set()
    for dtype in sorted(UNSIGNED):
        word = WORD[ITEMSIZE[dtype]]
        assert exponent.agrees(triton_exponent, here, word)
        for wrong in (Wrong("pack", None), Wrong("unpack", 0), Blind()):
            assert not exponent.agrees(wrong, here, word)
        memory_is_as_said(dtype, random)
        for source in inputs(dtype, random):
            frame = compare(source, dtype, skew=compared % 2)
            compared += 1
            if not read_header(frame).raw:
                blocks = source.size // ITEMSIZE[dtype] // BLOCK
                kinds |= set(frame[HEADER_BYTES:][: 4 * blocks : 4].tolist())
                frames = [damaged(frame, random) for _ in range(min(blocks, 2))]
                frames += spoiled(frame, blocks) if blocks == 6 else []
                judged += [judged_alike(each, source.size) for each in frames]
        judged.append(judged_alike(*of_unknown_kinds(dtype)))
        changed_meanwhile(dtype)
    assert kinds == set(range(6))
    assert set(calls) == {"survey", "pack", "unpack"}
    print(compared, sum(judged), len(judged) - sum(judged))


if __name__ == "__main__":
    main()
