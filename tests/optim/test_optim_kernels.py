"""Packing of compact states: the kernels give their reference's bytes, and what the notes promise."""

import numpy as np
import optim_reference as reference
import pytest
import torch

from penstock.optim import adam_kernels, compact_adam, kernels

SPECIAL = np.array(
    [0, 0x80000000, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
     0xFFFFFFFF, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF808000, 0x7F7F8000],
    np.uint32,
)  # fmt: skip


def words(count=3000, seed=0):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count, dtype=np.uint32)
    normal = (rng.standard_normal(count) * 10.0 ** rng.integers(-9, 3, count)).astype(np.float32)
    ties = normal.view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)
    return np.concatenate([SPECIAL, bits, normal.view(np.uint32), ties])


def both(name, *arguments, outputs):
    """Run kernel and reference; the outputs, which must agree."""
    results = []
    for module in (kernels, reference):
        mine = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        getattr(module, name)(*mine)
        results.append([mine[i] for i in outputs])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return results[0]


def empty(count, dtype):
    return np.full(count, 0xA5, dtype)


@pytest.mark.parametrize("even", [True, False])
def test_a_split_master_comes_back_to_the_bit(even):
    masters = words()
    n = masters.size
    weights, low, ties = empty(n, np.uint16), empty(n, np.uint16), empty(-(-n // 8), np.uint8)
    more = [ties] if even else []
    end = "_even" if even else ""
    made = both("cut" + end, masters, weights, low, *more, outputs=range(1, 3 + even))
    (back,) = both("join" + end, *made, empty(n, np.uint32), outputs=[2 + even])
    is_nan = (masters & 0x7FFFFFFF) > 0x7F800000
    np.testing.assert_array_equal(back, np.where(is_nan, np.uint32(0x7FC00000), masters))
    rounded = torch.from_numpy(masters.view(np.float32).copy()).bfloat16().view(torch.int16)
    expected = rounded.numpy().view(np.uint16)
    tie = (masters & 0xFFFF) == 0x8000
    same = ~is_nan if even else ~is_nan & ~tie
    np.testing.assert_array_equal(made[0][same], expected[same])


def test_random_rounding_to_bfloat16_keeps_what_is_exact_and_is_right_on_average():
    source = words()
    (out,) = both("to_bfloat16", source, empty(source.size, np.uint16), 7, 0, outputs=[1])
    exact = (source & 0xFFFF == 0) & (source & 0x7FFFFFFF <= 0x7F800000)
    np.testing.assert_array_equal(out[exact], (source[exact] >> 16).astype(np.uint16))
    finite = source & 0x7FFFFFFF < 0x7F800000
    assert np.all(out[finite] & 0x7FFF <= 0x7F7F)
    value = np.full(200_000, 1.0 + 1 / 1024, np.float32)  # an eighth of a bfloat16's step above 1
    made = np.empty(value.size, np.uint16)
    kernels.to_bfloat16(value.view(np.uint32), made, 3, 0)
    wide = np.empty(value.size, np.uint32)
    both("from_bfloat16", made, wide, outputs=[1])
    kernels.from_bfloat16(made, wide)
    assert abs(wide.view(np.float32).mean() - value[0]) < 3e-5


@pytest.mark.parametrize("is_signed", [True, False])
def test_8_bit_floats_are_within_their_bound_and_encode_again_to_themselves(is_signed):
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(4000) * 10.0 ** rng.integers(-4, 3, 4000)).astype(np.float32)
    values[5], values[900] = 0, 1e-44
    values = values if is_signed else np.abs(values)
    source = values.view(np.uint32)
    blocks = -(-source.size // 256)
    codes, exponents = both(
        "to_float8", source, empty(4000, np.uint8), empty(blocks, np.uint8), 9, 0, is_signed,
        outputs=[1, 2],
    )  # fmt: skip
    (out,) = both("from_float8", codes, exponents, empty(4000, np.uint32), is_signed, outputs=[2])
    back = out.view(np.float32)
    tops = np.repeat([np.abs(values[i : i + 256]).max() for i in range(0, 4000, 256)], 256)[:4000]
    floor = tops * 2.0 ** (-14 if is_signed else -30)
    assert np.all(np.abs(back - values) <= np.maximum(np.abs(values) / 8, floor))
    assert np.all((back != 0) | (values == 0) | is_signed)
    again = both(
        "to_float8", out, empty(4000, np.uint8), empty(blocks, np.uint8), 11, 5, is_signed,
        outputs=[1, 2],
    )  # fmt: skip
    (twice,) = both("from_float8", *again, empty(4000, np.uint32), is_signed, outputs=[2])
    np.testing.assert_array_equal(twice & 0x7FFFFFFF, out & 0x7FFFFFFF)


@pytest.mark.parametrize("is_signed", [True, False])
def test_8_bit_floats_of_every_exponent_are_those_of_the_definition(is_signed):
    """Also of blocks of zeros and of subnormal numbers, which the kernel compares at another scale."""
    rng = np.random.default_rng(2)
    tops = np.repeat(np.arange(255), 256)
    exponents = np.maximum(tops - rng.integers(0, 24, tops.size), 0).astype(np.uint32)
    source = exponents << np.uint32(23) | rng.integers(0, 1 << 23, tops.size, np.uint32)
    source = np.concatenate([source, np.zeros(256, np.uint32)])
    source |= rng.integers(0, 2, source.size, np.uint32) << np.uint32(31 if is_signed else 0)
    both(
        "to_float8", source, empty(source.size, np.uint8), empty(256, np.uint8), 9, 0, is_signed,
        outputs=[1, 2],
    )  # fmt: skip


@pytest.mark.parametrize("is_signed", [True, False])
def test_8_bit_floats_survive_what_is_not_finite(is_signed):
    source = words(500)
    source = source if is_signed else source & np.uint32(0x7FFFFFFF)
    blocks = -(-source.size // 256)
    codes, exponents = both(
        "to_float8", source, empty(source.size, np.uint8), empty(blocks, np.uint8), 2, 0,
        is_signed, outputs=[1, 2],
    )  # fmt: skip
    (out,) = both(
        "from_float8", codes, exponents, empty(source.size, np.uint32), is_signed, outputs=[2]
    )
    assert np.all(np.isfinite(out.view(np.float32)))


def test_rounding_does_not_depend_on_where_a_tile_begins():
    source = words()
    whole = np.empty(source.size, np.uint16)
    kernels.to_bfloat16(source, whole, 5, 0)
    part = np.empty(source.size - 512, np.uint16)
    kernels.to_bfloat16(source[512:], part, 5, 512)
    np.testing.assert_array_equal(part, whole[512:])


OPTIONS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.3, 0.9), "maximize": True}),
}


def adam_numbers(name, count):
    cls, options = OPTIONS[name]
    group = cls([torch.zeros(1)], lr=1e-2, **options).param_groups[0]
    return compact_adam.numbers_of(group, count)


def floats(count, seed):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-4, 3, count)).astype(np.float32)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_in_one_pass_is_torchs_but_for_the_last_bits(name):
    weights, m, v, grads = (floats(3000, seed) for seed in range(4))
    v = v * v
    numbers = adam_numbers(name, 4)
    made = []
    for adam in (adam_kernels.adam, reference.adam):
        mine = weights.copy(), m.copy(), v.copy()
        adam(*mine, grads, numbers)
        made.append(mine)
    for ours, theirs in zip(*made, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    cls, options = OPTIONS[name]
    param = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    param.grad = torch.from_numpy(grads.copy())
    optimizer = cls([param], lr=1e-2, fused=True, **options)
    optimizer.state[param] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.from_numpy(m.copy()),
        "exp_avg_sq": torch.from_numpy(v.copy()),
    }
    optimizer.step()
    state = optimizer.state[param]
    slope = np.abs(grads) + np.abs(weights)
    mean = np.abs(m) + slope
    root, eps, size = numbers[6:]
    terms = np.abs(weights) + size * mean / (np.sqrt(made[0][2]) / root + eps), mean, v + slope**2
    theirs = param.detach(), state["exp_avg"], state["exp_avg_sq"]
    for ours, torchs, term in zip(made[0], theirs, terms, strict=True):
        assert np.all(np.abs(ours - torchs.numpy()) <= term * 2.0**-21)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_one_pass_unpacks_steps_and_packs_as_the_kernels_do_one_by_one(dtype):
    count, blocks = 10_000, 40
    masters, grads = floats(count, 5).view(np.uint32), floats(count, 6).view(np.uint32)
    weights, low = empty(count, np.uint16), empty(count, np.uint16)
    kernels.cut(masters, weights, low)
    if dtype is np.uint16:
        grads = (grads >> 16).astype(np.uint16)
    wide = (grads.astype(np.uint32) << 16 if dtype is np.uint16 else grads).view(np.float32)
    states = floats(count, 7), floats(count, 8) ** 2
    keys, numbers = np.array([3, 4], np.uint32), adam_numbers("AdamW", 7)
    for is_float8 in (False, True):
        packed = []
        for state, is_signed in zip(states, (True, False), strict=True):
            if is_float8:
                packed.append([empty(count, np.uint8), empty(blocks, np.uint8)])
                kernels.to_float8(state.view(np.uint32), *packed[-1], 1, 0, is_signed)
            else:
                packed.append([empty(count, np.uint16)])
                kernels.to_bfloat16(state.view(np.uint32), *packed[-1], 1, 0)
        ours = [weights.copy(), low.copy(), *(part.copy() for parts in packed for part in parts)]
        alone = [masters.copy(), *(part.copy() for part in ours[2:])]
        step = adam_kernels.step_float8 if is_float8 else adam_kernels.step_bfloat16
        rest = grads, keys, np.uint32(512), numbers
        step(empty(adam_kernels.STRIP, np.uint32), *ours, *rest)
        step(alone[0], *2 * [empty(0, np.uint16)], *alone[1:], *rest)
        values = []
        for parts, is_signed in zip(packed, (True, False), strict=True):
            values.append(empty(count, np.uint32))
            more = [is_signed] if is_float8 else []
            (reference.from_float8 if is_float8 else reference.from_bfloat16)(
                *parts, values[-1], *more
            )
        whole = masters.copy()
        reference.adam(whole.view(np.float32), *(x.view(np.float32) for x in values), wide, numbers)
        for value, parts, key, is_signed in zip(values, packed, keys, (True, False), strict=True):
            more = [is_signed] if is_float8 else []
            pack = reference.to_float8 if is_float8 else reference.to_bfloat16
            pack(value, *parts, int(key), 512, *more)
        theirs = [empty(count, np.uint16), empty(count, np.uint16)]
        reference.cut(whole, *theirs)
        theirs += [part for parts in packed for part in parts]
        for mine, other in zip([*ours, *alone], [*theirs, whole, *theirs[2:]], strict=True):
            np.testing.assert_array_equal(mine, other)
