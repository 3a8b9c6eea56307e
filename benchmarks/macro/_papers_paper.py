"""What ``papers.py`` has in common: dry profiles, each made once, and policies replayed on them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.lab.dry.networks import dry_zoo_step
from penstock.lab.step_bound import min_step_ns, oracle_ns
from penstock.plan import Budgets, Machine, Plan, Profile, policies
from penstock.plan.replay import Replayed, replay

GIB = 1 << 30


@dataclass(frozen=True)
class Line:
    """One line of a paper beside ours."""

    what: str
    paper: str
    ours: str
    within: bool | None
    """Whether ours is within the margin; None: there is nothing to hold it to."""
    aim: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "paper": self.paper,
            "aim": self.aim,
            "ours": self.ours,
            "within": self.within,
        }


@dataclass
class OnPaper:
    """One machine, and the profiles of one network on it."""

    network: str
    machine: Machine
    overrides: dict[str, Any] = field(default_factory=dict)
    known: dict[int, Profile] = field(default_factory=dict)
    adapted: Callable[[Profile], Profile] = lambda profile: profile
    """From a profile of PyTorch's to one of the paper's library."""
    of: OnPaper | None = None
    """Whose profiles are adapted, on the same device; None: new ones are made."""

    def profile(self, batch: int) -> Profile:
        """Of the whole device, with SGD without momentum: weights and their gradients are fixed.

        Attention is not fused, as before PyTorch 2.
        """
        if batch not in self.known:
            self.known[batch] = self.adapted(
                self.of.profile(batch) if self.of else self._made(batch)
            )
        return self.known[batch]

    def _made(self, batch: int) -> Profile:
        with sdpa_kernel(SDPBackend.MATH):
            return dry_zoo_step(
                self.network, batch, machine=self.machine, device="cuda", **self.overrides
            ).profile

    @property
    def budgets(self) -> Budgets:
        machine = self.machine
        return Budgets(machine.device_bytes, machine.host_bytes, machine.flash_bytes)

    def plan(self, policy: str, batch: int) -> Plan:
        return policies.get(policy)(self.profile(batch), self.machine, self.budgets)

    def run(self, policy: str, batch: int) -> dict[str, Any]:
        return self.replayed(self.plan(policy, batch), batch)

    def most_share(self, batch: int) -> float:
        """No plan that moves whole tensors or runs modules again reaches more of the ideal speed."""
        profile = self.profile(batch)
        least_ns = min_step_ns(profile, self.machine, self.budgets)
        return round(oracle_ns(profile, self.machine) / least_ns, 4)

    def replayed(self, plan: Plan, batch: int) -> dict[str, Any]:
        return figures(plan, replay(self.profile(batch), plan, self.machine), batch)


def figures(plan: Plan, run: Replayed, batch: int) -> dict[str, Any]:
    """What a result file keeps of a replay; ``loss`` is the share of the ideal throughput lost."""
    return {
        "batch": batch,
        "feasible": plan.feasible and run.feasible,
        "step_s": run.step_ns / 1e9,
        "ideal_s": run.ideal_ns / 1e9,
        "share_of_ideal": round(run.ideal_ns / run.step_ns, 4),
        "loss": round(1 - run.ideal_ns / run.step_ns, 4),
        "samples_per_s": round(batch / (run.step_ns / 1e9), 3),
        "slower_algorithms_s": run.lean_ns / 1e9,
        "recompute_s": run.recompute_ns / 1e9,
        "waits_s": run.stall_ns / 1e9,
        "peak_bytes": run.peak_bytes,
        "average_bytes": run.average_bytes,
        "host_written_bytes": run.host.written_bytes,
        "flash_written_bytes": run.flash.written_bytes,
        "lean_convolutions": len(plan.lean_convolutions),
    }


@contextmanager
def took(what: str) -> Iterator[None]:
    """Say on stderr how long it took."""
    begun = time.process_time()
    yield
    print(f"{what}: {time.process_time() - begun:.1f} s of CPU", file=sys.stderr, flush=True)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"
