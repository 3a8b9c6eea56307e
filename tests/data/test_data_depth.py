"""How far ahead: enough that nobody waits, and no more; times are told, not measured."""

from penstock.data.depth import Depth


def steps(depth, count, step_s, waited_s=0.0):
    for _ in range(count):
        depth.stepped(step_s, waited_s)


def test_slow_steps_need_few():
    depth = Depth()
    depth.arrived(0.010)
    steps(depth, 50, 0.100)
    assert depth.batches == 2
    assert depth.waits == 0


def test_quick_steps_need_as_many_as_pass_while_one_is_read():
    depth = Depth()
    for _ in range(40):
        depth.arrived(0.010)
    steps(depth, 50, 0.001)
    assert depth.batches in (11, 12)


def test_a_wait_asks_for_more_and_quiet_gives_it_back():
    depth = Depth()
    depth.arrived(0.001)
    steps(depth, 10, 0.100)
    before = depth.batches
    steps(depth, 3, 0.150, 0.050)
    assert depth.waits == 3
    more = depth.batches
    assert more > before
    steps(depth, 20_000, 0.100)
    assert depth.batches == before
