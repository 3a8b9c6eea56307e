"""Profiles for the tests of planning: a plain stack of layers, and whatever hypothesis finds."""

from dataclasses import replace

from hypothesis import strategies as st

from penstock.plan import CodecSample, Machine, PassProfile, Profile, SlotKey, SlotProfile

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
def samples(draw, names=("zero-value", "byteplane", "narrow")):
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
def profiles(draw, max_slots=12, max_passes=3):
    """Any order of needs, shared nodes, overlapping passes, recomputation inside backward, codecs."""
    encoded = draw(st.booleans())
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
            slots.append(SlotProfile(key, p, saved, needed, "Any", held, "int8", codecs=codecs))
    small = draw(st.sampled_from([0, 17]))
    return Profile("cpu", tuple(slots), tuple(spans), small_bytes=small)
