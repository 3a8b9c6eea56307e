"""Placing blocks in an address space: against a naive model, and what fragmentation comes out."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from plan_profiles import MACHINE, MB, stack

from penstock.plan import Budgets, policies
from penstock.plan.address_space import GRANULE_BYTES, AddressSpace, first_fit, two_ended
from penstock.plan.replay import Residence, replay
from tries import tries

KB = 1024


class Placing(RuleBasedStateMachine):
    """A space beside a plain list of which byte is taken."""

    def __init__(self):
        super().__init__()
        self.space = AddressSpace()
        self.bytes = []  # whether each address is taken
        self.blocks = []

    @rule(nbytes=st.integers(1, 9))
    def allocate(self, nbytes):
        self.bytes += [False] * nbytes
        fits = (at for at in range(len(self.bytes)) if not any(self.bytes[at : at + nbytes]))
        expected = next(fits)
        assert self.space.allocate(nbytes) == expected
        self.bytes[expected : expected + nbytes] = [True] * nbytes
        self.blocks.append((expected, nbytes))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data):
        place = data.draw(st.integers(0, len(self.blocks) - 1))
        address, nbytes = self.blocks.pop(place)
        self.space.free(address, nbytes)
        self.bytes[address : address + nbytes] = [False] * nbytes

    @invariant()
    def the_top_is_that_of_the_highest_block(self):
        while self.bytes and not self.bytes[-1]:
            self.bytes.pop()
        assert self.space.top == len(self.bytes)


Placing.TestCase.settings = settings(max_examples=tries(150), stateful_step_count=40)
TestPlacing = Placing.TestCase


def lives(*them):
    return [
        Residence(start, end, i, nbytes * KB, kept)
        for i, (start, end, nbytes, kept) in enumerate(them)
    ]


def test_a_hole_between_blocks_that_stay_is_of_no_use_to_a_larger_one():
    them = lives((0, 2, 4, False), (1, 9, 4, True), (3, 9, 5, False))
    # 4 of 8 are free when 5 come
    assert first_fit(them).peak_address == 13 * KB
    assert first_fit(them).peak_live_bytes == 9 * KB
    assert first_fit(them).fragmentation == 13 / 9
    # kept from one end, the others from the other: the hole is where the next one begins
    assert two_ended(them).peak_address == 9 * KB
    assert two_ended(them).fragmentation == 1


def test_who_leaves_makes_room_for_who_comes_at_the_same_time():
    them = lives((0, 5, 4, False), (5, 9, 4, False))
    assert first_fit(them).peak_address == first_fit(them).peak_live_bytes == 4 * KB


def test_nothing_takes_nothing():
    assert first_fit([]).peak_address == two_ended([]).peak_address == 0
    assert first_fit([]).fragmentation == 1
    assert first_fit(lives((3, 3, 4, True))).peak_live_bytes == 0


def test_blocks_take_whole_granules():
    (one,) = lives((0, 1, 1, True))
    assert first_fit([one._replace(nbytes=1)]).peak_address == GRANULE_BYTES


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 9), st.booleans()),
        max_size=25,
    )
)
def test_addresses_are_never_fewer_than_the_bytes_alive(raw):
    them = lives(*((min(a, b), max(a, b), size, kept) for a, b, size, kept in raw))
    one_end, both = first_fit(them), two_ended(them)
    assert one_end.peak_live_bytes == both.peak_live_bytes
    assert one_end.peak_address >= one_end.peak_live_bytes
    assert both.peak_address >= both.peak_live_bytes
    if len({one.kept for one in them}) < 2:
        assert one_end == both


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.floats(0.2, 1.1))
def test_a_replayed_step_is_placed_as_its_memory_says(sizes, share):
    profile = stack(sizes)
    budgets = Budgets(int(profile.peak_saved_bytes * share), 10**12, 10**12)
    plan = policies.get("auto")(profile, MACHINE, budgets)
    found = replay(profile, plan, MACHINE, trace=True)
    use = first_fit(found.trace.residences)
    most = max(level for _, level in found.trace.memory["device"])
    assert most <= use.peak_live_bytes < most + GRANULE_BYTES * len(sizes)
    assert use.peak_live_bytes <= two_ended(found.trace.residences).peak_address


def test_ten_thousand_slots_are_placed():
    profile = stack([1 + i % 7 for i in range(10_000)], step_ms=1)
    budgets = Budgets(9000 * MB, 10**12, 10**12)
    plan = policies.get("auto")(profile, MACHINE, budgets)
    found = replay(profile, plan, MACHINE, trace=True)
    use = first_fit(found.trace.residences)
    assert 1 <= use.fragmentation < 2
