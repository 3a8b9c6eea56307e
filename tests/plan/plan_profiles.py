"""Profiles for the tests of planning: a plain stack of layers, and whatever hypothesis finds."""

from dataclasses import replace

from hypothesis import strategies as st

from penstock.plan import (
    CodecSample,
    Compute,
    Convolution,
    Machine,
    Operator,
    PassProfile,
    Profile,
    SlotKey,
    SlotProfile,
    Transient,
)

MS = 1_000_000
MB = 10**6
MACHINE = Machine("test", 1e9, 1e9, 0.0, 4e9, 4e9)


def stack(sizes_mb, *, step_ms=10, passes=1, held=(), never=(), small_bytes=0, module="layer"):
    """Layers that take ``step_ms`` each way and save one slot each; last in, first out."""
    count, slots, spans = len(sizes_mb), [], []
    for p in range(passes):
        start = 2 * count * step_ms * MS * p
        spans.append(
            PassProfile(p, start, start + count * step_ms * MS, start + 2 * count * step_ms * MS)
        )
        for i, size in enumerate(sizes_mb):
            needed = start + (2 * count - 1 - i) * step_ms * MS
            slots.append(
                SlotProfile(
                    key=SlotKey(f"{module}.{i}", 0, size * MB),
                    pass_index=p,
                    saved_at_ns=start + i * step_ms * MS,
                    needed_at_ns=None if i in never else needed,
                    kind="Linear",
                    held_elsewhere=i in held,
                    dtype="float32",
                )
            )
    return Profile("cpu", tuple(slots), tuple(spans), small_bytes=small_bytes)


def encodable(profile, *samples, only=None):
    """The profile with these samples on all slots, or on those of ``only``, by index."""
    slots = (
        replace(slot, codecs=samples) if only is None or i in only else slot
        for i, slot in enumerate(profile.slots)
    )
    return replace(profile, slots=tuple(slots))


@st.composite
def samples(draw, names=("zero-value", "exponent", "narrow")):
    """One sample of each of some codecs; ratios above 1 too, as of noise behind a header."""
    speed = st.floats(1e3, 1e12)
    chosen = draw(st.lists(st.sampled_from(names), unique=True))
    return tuple(
        CodecSample(name, draw(st.floats(0, 1.25)), draw(speed), draw(speed)) for name in chosen
    )


@st.composite
def machines(draw):
    speed = st.floats(1e3, 1e12)
    return Machine("any", draw(speed), draw(speed), draw(st.floats(0, 1)), draw(speed), draw(speed))


@st.composite
def profiles(draw, max_slots=12, max_passes=3, beside=True):
    """Any order of needs, shared nodes, overlapping passes, recomputation inside backward, codecs.

    With ``beside`` slots differ in what is beside them, at their save and at their need.
    """
    encoded, small = draw(st.booleans()), draw(st.sampled_from([0, 17, 900]))
    smalls = st.none() | st.integers(0, small) if beside else st.none()
    spans, slots = [], []
    for p in range(draw(st.integers(1, max_passes))):
        start = draw(st.integers(0, 500)) * MS
        turn = start + draw(st.integers(0, 500)) * MS
        end = turn + draw(st.integers(0, 500)) * MS
        spans.append(PassProfile(p, start, turn, end))
        for i in range(draw(st.integers(0, max_slots))):
            saved = draw(st.integers(start, turn if draw(st.booleans()) else end))
            needed = draw(st.none() | st.integers(max(turn, saved), max(end, saved)))
            key = SlotKey(f"m{draw(st.integers(0, max_slots))}", i, draw(st.integers(1, 1000)))
            codecs = draw(samples()) if encoded else ()
            held = draw(st.integers(0, 5)) == 0
            slots.append(
                SlotProfile(
                    *(key, p, saved, needed, "Any", held, "int8"),
                    codecs=codecs,
                    small_bytes=draw(smalls),
                    small_bytes_at_need=draw(smalls),
                )
            )
    return Profile("cpu", tuple(slots), tuple(spans), small_bytes=small)


def network(
    sizes_mb, *, step_ms=10, width=2, convolution=None, whole=0, transient_mb=0, recipes=()
):
    """Blocks of ``width`` layers in a row, with operators; a layer saves its input.

    The first layer of a block saves what the block before made, the others what was made inside it, so
    that running a block again makes all but its first slot. Backward takes twice as long as forward.

    Args:
        sizes_mb: What each layer saves.
        step_ms: Forward of a layer.
        width: Layers in a block.
        convolution: A geometry: every other layer is a convolution.
        whole: Fixed bytes of a profile of a whole device; 0: the budget counts saved slots only.
        transient_mb: Of such a profile, what is on its way all the time.
        recipes: The layers whose input can be made again from that of the layer before them.
    """
    count, slots, operators = len(sizes_mb), [], []
    paths = [f"block.{i // width}.{i % width}" for i in range(count)]
    forward_ns, turn = step_ms * MS, count * step_ms * MS
    beside = whole + transient_mb * MB if whole else None
    for i, size in enumerate(sizes_mb):
        needed = turn + 2 * (count - 1 - i) * forward_ns
        shape = convolution if i % 2 == 0 else None
        kind = "Conv2d" if shape else "ReLU"
        slots.append(
            SlotProfile(
                key=SlotKey(paths[i], 0, int(size * MB)),
                pass_index=0,
                saved_at_ns=i * forward_ns,
                needed_at_ns=needed,
                kind=kind,
                held_elsewhere=False,
                dtype="float32",
                small_bytes=beside,
                producer=paths[i - 1] if i else None,
                recipe=(paths[i - 1],) if i and i in recipes else (),
                source=i - 1 if i and i in recipes else None,
            )
        )
        for backward, start in ((False, i * forward_ns), (True, needed)):
            end = start + forward_ns * (1 + backward)
            operators.append(
                Operator(kind, paths[i], 0, backward, start, end, moved_bytes=1, convolution=shape)
            )
    operators.sort(key=lambda one: one.start_ns)
    return Profile(
        "cuda" if whole else "cpu",
        tuple(slots),
        (PassProfile(0, 0, turn, 3 * turn),),
        small_bytes=beside or 0,
        operators=tuple(operators),
        fixed_bytes=whole,
        transients=(Transient(0, transient_mb * MB),) if whole else (),
    )


SHAPE = Convolution(
    batch=8,
    channels_in=64,
    channels_out=64,
    groups=1,
    input_size=(56, 56),
    kernel_size=(3, 3),
    output_size=(56, 56),
    stride=(1, 1),
    element_bytes=4,
)
COMPUTE = Compute(6e12, 12e12, 0.6, 3e11, 5e-6)
"""A graphics card of 2015."""


@st.composite
def networks(draw, max_layers=12):
    """Any such network, of a whole device or not, with convolutions or without."""
    shape = replace(SHAPE, batch=draw(st.integers(1, 16)))
    return network(
        draw(st.lists(st.integers(1, 40), min_size=1, max_size=max_layers)),
        step_ms=draw(st.sampled_from([1, 5, 20])),
        width=draw(st.integers(1, 4)),
        convolution=draw(st.sampled_from([None, shape])),
        whole=draw(st.sampled_from([0, 0, 5 * MB])),
        transient_mb=draw(st.integers(0, 10)),
        recipes=draw(st.sets(st.integers(1, max_layers - 1), max_size=4)),
    )
