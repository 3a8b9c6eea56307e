"""Records of passes as an executor would make them under given orders, without one."""

from dataclasses import dataclass, field, replace

from penstock.core.config import UNLIMITED
from penstock.core.units import MIB
from penstock.observe.clock import ManualClock
from penstock.observe.counters import PLANS
from penstock.observe.recorder import Recorder
from penstock.plan import Action, Budgets, Machine, SlotKey
from penstock.plan.profile import CodecSample
from penstock.runtime.orders import PassRecord, SlotOutcome
from penstock.runtime.planner import Planner, PlannerSettings

MS = 1_000_000
FAST = Machine("fast flash", 1e13, 1e13, 0.0, 1e13, 1e13)
SLOW = Machine("slow flash", 1e6, 1e6, 1e-4, 8e9, 8e9)
ROOMY = Budgets(device_bytes=1 << 40, flash_bytes=1 << 40)
SCRATCH_BYTES = 2 * MIB


def key(name, nbytes=MIB, ordinal=0):
    return SlotKey(name, ordinal, nbytes)


def sample(ratio, codec="zero-value"):
    return CodecSample(codec, ratio, 4e9, 4e9)


@dataclass(frozen=True)
class Pass:
    """What a pass does; the orders say what of it is recorded."""

    names: str = "abcd"
    """Modules, each of which saves one slot; forward takes 10 ms for each."""
    nbytes: int = MIB
    ratio: float | None = 0.25
    """Ratio that a codec has on every slot; ``None``: no codec takes them."""
    held: str = ""
    """Modules whose slots something else holds."""
    waits_ms: dict = field(default_factory=dict)
    """Time for which backward waits, by module."""
    dropped: str = ""
    """Modules whose slots are not saved if they are recomputed."""
    facts: dict = field(default_factory=dict)
    """Further fields of the record."""

    def under(self, orders, index):
        """Return the record of the pass under these orders."""
        names = [
            name
            for name in self.names
            if orders.observes or (name, 0) not in orders.recomputed or name not in self.dropped
        ]
        kept = [name for name in names if (name, 0, self.nbytes) in orders.kept]
        end = 20 * len(names) * MS
        slots = tuple(
            self._slot(orders, name, 10 * n * MS, end - 10 * n * MS)
            for n, name in enumerate(names)
            if name not in kept
        )
        record = PassRecord(
            index=index,
            start_ns=0,
            backward_start_ns=end // 2,
            end_ns=end + 10 * MS,
            slots=slots,
            kept_bytes=len(kept) * self.nbytes,
            observed=orders.observes,
            sampled=orders.samples,
        )
        return replace(record, **self.facts)

    def _slot(self, orders, name, saved_at, needed_at):
        samples = () if self.ratio is None else (sample(self.ratio),)
        decision = orders.decision_for(key(name, self.nbytes))
        encoded = decision is not None and decision.codec and self.ratio is not None
        return SlotOutcome(
            key(name, self.nbytes),
            kind="Linear",
            dtype="float32",
            saved_at_ns=saved_at,
            needed_at_ns=needed_at,
            waited_ns=self.waits_ms.get(name, 0) * MS,
            held_elsewhere=name in self.held,
            codecs=samples if orders.samples else (),
            frame_bytes=int(self.ratio * self.nbytes) if encoded else None,
            producer=name if orders.observes else None,
        )


class Planning:
    """A planner, the orders that it gave, and what it told the recorder."""

    def __init__(
        self, policy="all", machine=FAST, budgets=ROOMY, scratch=SCRATCH_BYTES, **settings
    ):
        self.loaders = settings.pop("loaders", None)
        self.recorder = Recorder(clock=ManualClock())
        self.opened = 0
        self.scratch_bytes = scratch
        self.planner = Planner(
            PlannerSettings(policy=policy, machine=machine, budgets=budgets, **settings),
            recorder=self.recorder,
            loaders=self.loaders,
            open_codecs=self._open,
        )
        self.index = 0

    def _open(self):
        self.opened += 1
        return self.scratch_bytes

    @property
    def orders(self):
        return self.planner.orders

    def counted(self, name):
        return self.recorder.snapshot().counted(name)

    def marks(self, name):
        return [each for each in self.recorder.events() if getattr(each, "name", None) == name]

    def reasons(self):
        return [mark.fields["reason"] for mark in self.marks("replan")]

    def learn(self, one):
        """Let a pass run; return the reason of a new plan, or ``""``."""
        before = self.orders
        self.index += 1
        found = self.planner.learn(one.under(before, self.index))
        assert (found is None) == (self.orders is before), "told of every change, and of no other"
        made = self.orders.plan_number - before.plan_number
        assert self.counted(f"{PLANS}.{self.reasons()[-1]}") >= 1 if made else True
        return self.reasons()[-1] if made else ""

    def run(self, *passes):
        return [self.learn(one) for one in passes]


def unlimited(**budgets):
    return Budgets(device_bytes=UNLIMITED, **budgets)


def actions(orders):
    """Decisions as a word: k, o or r for each slot of the plan."""
    letter = {Action.KEEP: "k", Action.OFFLOAD: "o", Action.RECOMPUTE: "r"}
    return "".join(letter[each.action] for each in orders.plan.decisions)
