"""How long ``auto`` plans a profile of ten thousand slots, on one core.

Planning stands between two training steps, so it must be quick. Profiles are stacks of layers that save
one slot each: one that hides behind the network; one that keeps both tiers busy for longer than the
network, so that all policies are replayed; the same with codecs to choose from; and blocks of layers with
operators, which may be recomputed, half of them convolutions of a whole device, of 32 shapes, which have
algorithms to choose; those of 6000 and 8000 slots as well, for more is tried where there is time for it;
and the same blocks where each output can be made again by one call of its module.
A profile is new in each round: nothing is known of it but what a shape takes. The figure that counts is
the time against the second that the planner is allowed.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _results
from penstock.plan import (
    Action,
    Budgets,
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
    policies,
)

BUDGET_S = 1.0
SLOTS = 10_000
BLOCK = 5
MS = 1_000_000
MB = 10**6
AMPLE = 10**15
FAST = Machine("flash of 1 GB/s", 1e9, 1e9, 1e-4, 4e9, 4e9)
SLOW = Machine("flash of 0.2 GB/s", 2e8, 3e8, 1e-4, 4e8, 4e8)
CARD = Machine(
    "a card with flash of 2 GB/s", 2e9, 3e9, 1e-4, 4e9, 4e9, Compute(6e12, 12e12, 0.6, 3e11, 5e-6)
)
CODECS = (CodecSample("exponent", 0.25, 5e8, 1e9), CodecSample("zero-value", 0.5, 8e9, 8e9))
SHAPES = [
    Convolution(8, 4 * (1 + k), 64, 1, (56, 56), (3, 3), (56, 56), (1, 1), 4) for k in range(32)
]
"""As many as a deep network has."""


def main():
    options = parse()
    count, fewer = (200, (120, 160)) if options.quick else (SLOTS, (6000, 8000))
    figures = {}
    for name, make, machine, host_share in (
        ("hidden behind the network", lambda: stack(count, step_ms=10), FAST, 0.0),
        ("tiers slower than the network", lambda: stack(count, step_ms=10), SLOW, 0.2),
        ("the same, with codecs", lambda: stack(count, step_ms=1, codecs=CODECS), SLOW, 0.2),
        ("convolutions in blocks, a whole device", lambda: blocks(count), CARD, 0.2),
        *((f"the same, of {few} slots", partial(blocks, few), CARD, 0.2) for few in fewer),
        ("outputs that can be made again", partial(blocks, count, again=True), CARD, 0.2),
    ):
        figures[name] = measured(make, machine, host_share, options.rounds)
        print(
            f"{name}: {figures[name]['median_s']:.2f} s (best {figures[name]['best_s']:.2f}),"
            f" {figures[name]['of_budget']:.2f} of the budget"
        )
    if not options.quick:
        config = {"slots": SLOTS, "rounds": options.rounds, "device_share": 0.1, "cores": 1}
        path = _results.write("planning", figures | {"budget_s": BUDGET_S}, config)
        print(f"wrote {path.name}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a small profile; no result file")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    return options


def measured(make, machine, host_share, rounds):
    auto = policies.get("auto")
    took = []
    for _ in range(rounds):
        profile = make()
        saved = profile.saved_bytes
        budgets = Budgets(
            profile.fixed_bytes + saved // 10, int(host_share * saved), flash_bytes=AMPLE
        )
        start = time.perf_counter()
        plan = auto(profile, machine, budgets)
        took.append(time.perf_counter() - start)
        assert plan.feasible, plan.notes
    median = statistics.median(took)
    return {
        "median_s": round(median, 3),
        "best_s": round(min(took), 3),
        "worst_s": round(max(took), 3),
        "of_budget": round(median / BUDGET_S, 3),
        "offloaded": sum(bool(decision.tier) for decision in plan.decisions),
        "encoded": sum(bool(decision.codec) for decision in plan.decisions),
        "recomputed": sum(decision.action is Action.RECOMPUTE for decision in plan.decisions),
    }


def stack(count, *, step_ms, codecs=()):
    step = step_ms * MS
    slots = tuple(
        SlotProfile(
            key=SlotKey(f"layer.{i}", 0, (1 + i % 7) * MB),
            pass_index=0,
            saved_at_ns=i * step,
            needed_at_ns=(2 * count - 1 - i) * step,
            kind="Linear",
            held_elsewhere=False,
            dtype="float32",
            codecs=codecs,
        )
        for i in range(count)
    )
    return Profile("cpu", slots, (PassProfile(0, 0, count * step, 2 * count * step),))


def blocks(count, *, again=False):
    """Blocks of layers that save their inputs; every other one is a convolution."""
    step, slots, operators = MS, [], []
    paths = [f"block.{i // BLOCK}.{i % BLOCK}" for i in range(count)]
    for i, path in enumerate(paths):
        shape = SHAPES[i // 2 % len(SHAPES)] if i % 2 == 0 else None
        needed = (count + 2 * (count - 1 - i)) * step
        slots.append(
            SlotProfile(
                key=SlotKey(path, 0, (1 + i % 7) * MB),
                pass_index=0,
                saved_at_ns=i * step,
                needed_at_ns=needed,
                kind="Conv2d" if shape else "ReLU",
                held_elsewhere=False,
                dtype="float32",
                small_bytes=12 * MB,
                producer=paths[i - 1] if i else None,
                recipe=(paths[i - 1],) if again and i else (),
                source=i - 1 if again and i else None,
            )
        )
        for backward, start in ((False, i * step), (True, needed)):
            end = start + step * (1 + backward)
            operators.append(
                Operator("op", path, 0, backward, start, end, moved_bytes=MB, convolution=shape)
            )
    return Profile(
        "cuda",
        tuple(slots),
        (PassProfile(0, 0, count * step, 3 * count * step),),
        small_bytes=12 * MB,
        operators=tuple(sorted(operators, key=lambda one: one.start_ns)),
        fixed_bytes=10 * MB,
        transients=(Transient(0, 2 * MB),),
    )


if __name__ == "__main__":
    main()
