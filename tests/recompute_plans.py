"""Plans that run modules again, made by hand from a measured profile, and sessions that follow them."""

from dataclasses import replace

from torch import nn
from torch.nn import functional as F

from offload_runs import MACHINE, counted
from penstock.api import Session
from penstock.core.config import OffloadConfig
from penstock.observe.recorder import Stage
from penstock.plan import Action, Decision

FLASH, HOST = ("flash", "host")


class Block(nn.Module):
    """A residual block with a slot for its input, and several that it can make again."""

    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, features):
        return features + self.down(F.gelu(self.up(self.norm(features))))


def inside(path, module):
    return path == module or path.startswith(module + ".")


def maker(slot, paths):
    """Which of ``paths`` makes a slot again, by the seam's rule: it has both made and saved it."""
    if slot.producer is None:
        return None
    return next(
        (path for path in paths if inside(slot.key.module, path) and inside(slot.producer, path)),
        None,
    )


def recomputing(plan, profile, *paths, tier_of=lambda number: ""):
    """``plan``, but with ``paths`` run again; of the other slots, by number, to which tier they go."""
    slots = {slot.key.match_key: slot for slot in profile.slots}
    decisions, number = [], 0
    for decision in plan.decisions:
        key, tier = decision.key, tier_of(number)
        if maker(slots[key.match_key], paths):
            decisions.append(Decision(key, Action.RECOMPUTE, "", "made again"))
        else:
            number += 1
            action = Action.OFFLOAD if tier else Action.KEEP
            decisions.append(Decision(key, action, tier, "as the test says"))
    made = replace(
        plan,
        policy="by hand",
        decisions=tuple(decisions),
        recomputed=tuple(paths),
        window_bytes=sum(d.key.nbytes for d in decisions if d.tier),
    )
    assert made.recomputed_bytes > 0, f"nothing is made again by {paths}"
    return made


def profiled(session_for, model, run, optimizer=None):
    """(plan, profile) of one run in which everything stays."""
    with session_for(model, optimizer, policy="keep") as session:
        run()
        return session.plan, session.profile


def following(path, plan, model, optimizer=None, **settings):
    """A session that follows ``plan``; spills to ``path``."""
    fields = {"flash": path, "flash_capacity": "1GiB", "host_memory": "1GiB", "floor": 8 * 1024}
    config = OffloadConfig.from_mapping(fields | settings)
    return Session(config, model=model, optimizer=optimizer, machine=MACHINE, plan=plan)


def runs_again(session):
    """How many modules were run again so far."""
    return session.recorder.snapshot().flow(Stage.RECOMPUTE).count


def assert_nothing_unknown(session):
    assert counted(session, "unknown_slots") == 0, "slots have other names than in the plan"
