"""Every choice there is for small networks, and machines on which there is something to choose."""

import itertools

from hypothesis import strategies as st
from plan_profiles import COMPUTE, network

from penstock.plan import Budgets, Machine
from penstock.plan.problem import Choice

AMPLE = 10**12


@st.composite
def real_machines(draw):
    """Speeds at which there is something to decide: about as fast as the networks, or not."""
    speed = st.floats(2e8, 1e10)
    return Machine(
        "any",
        draw(speed),
        draw(speed),
        draw(st.sampled_from([0.0, 1e-4])),
        draw(speed),
        draw(speed),
        flash_shared=draw(st.booleans()),
        flash_over_link=draw(st.booleans()),
        interference=draw(st.sampled_from([0.0, 0.1])),
        write_work_s=draw(st.sampled_from([0.0, 2e-3])),
        read_work_s_per_byte=draw(st.sampled_from([0.0, 1e-10])),
        compute=draw(st.sampled_from([None, COMPUTE])),
    )


def antichains(case):
    """Every set of modules and recipes that go together."""
    modules = case.recomputing.modules
    paths = sorted(modules)
    for k in range(len(paths) + 1):
        for chosen in itertools.combinations(paths, k):
            if all(go_together(modules[a], modules[b]) for a in chosen for b in chosen if a < b):
                yield chosen


def go_together(one, other):
    """[Note: recomputation conflicts], implemented once more."""
    if not (one.members or other.members):
        a, b = f"{one.path}.", f"{other.path}."
        return not (a.startswith(b) or b.startswith(a))
    for recipe, module in ((one, other), (other, one)):
        calls = recipe.members if recipe.members and not module.members else ()
        if any(f"{path}.".startswith(f"{module.path}.") for path in calls):
            return False
    makes, reads = ([set(getattr(m, of)) for m in (one, other)] for of in ("groups", "reads"))
    return not (makes[0] & makes[1] or makes[0] & reads[1] or makes[1] & reads[0])


def every_choice(case):
    """Keep, host, flash or recompute for every slot, as far as there is room."""
    rooms = {"host": case.budgets.host_bytes, "flash": case.budgets.flash_bytes}
    places = ["", *(tier for tier, room in rooms.items() if room)]
    for recomputed in antichains(case):
        dropped = case.dropped(case.offload({}, recomputed))
        options = [[""] if g in dropped else places for g in case.indices]
        for tiers in itertools.product(*options):
            used = dict.fromkeys(("", "host", "flash"), 0)
            for group, tier in zip(case.groups, tiers, strict=True):
                used[tier] += group.nbytes
            if all(used[tier] <= room for tier, room in rooms.items()):
                yield Choice(tiers, recomputed)


def any_choice(case, rng):
    """Keep, offload or recompute, at random."""
    modules, recomputed = case.recomputing.modules, []
    paths = list(modules)
    rng.shuffle(paths)
    for path in paths[: rng.randint(0, len(paths))]:
        if all(go_together(modules[path], modules[other]) for other in recomputed):
            recomputed.append(path)
    tiers = {g: rng.choice(["host", "flash"]) for g in case.indices if rng.random() < 0.6}
    return case.offload(tiers, recomputed)


def small_problem(rng, most=5):
    """A network of 3 to ``most`` layers, a machine, and budgets that not everything fits."""
    sizes = [rng.randint(1, 40) for _ in range(rng.randint(3, most))]
    recipes = [i for i in range(len(sizes)) if rng.random() < 0.3]
    times, width = rng.choice([1, 5, 20]), rng.randint(1, 4)
    profile = network(sizes, step_ms=times, width=width, recipes=recipes)
    speeds = [10 ** rng.uniform(8.3, 10) for _ in range(4)]
    machine = Machine(
        "any",
        *speeds[:2],
        rng.choice([0.0, 1e-4]),
        *speeds[2:],
        flash_shared=rng.random() < 0.3,
        flash_over_link=rng.random() < 0.3,
        interference=rng.choice([0.0, 0.1]),
        write_work_s=rng.choice([0.0, 2e-3]),
    )
    saved = profile.saved_bytes
    host, flash = rng.choice([0, int(0.3 * saved), AMPLE]), rng.choice([saved // 2, AMPLE])
    return profile, machine, Budgets(int(rng.uniform(0.2, 0.95) * saved), host, flash)
