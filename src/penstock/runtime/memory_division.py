"""Division of memory between weights on flash and saved tensors, by replays of a whole step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.core.errors import PlanError
from penstock.core.units import MIB, round_down
from penstock.observe.recorder import Recorder, Stage
from penstock.plan import policies
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.weights import ModuleWeights
from penstock.runtime.policy_request import PolicyRequest

if TYPE_CHECKING:
    from penstock.plan.training_step import StepPlanner

_AMPLE_BYTES: Final = 1 << 60
DIVISION: Final = "memory_division"
"""Mark of a division that was found."""


class MemoryDivision:
    """Divides memory as ``penstock plan --weights flash`` does.

    Weights, saved tensors, gradients and the records of optimizers share flash in the replays. Of what
    is left to weights and saved tensors, saved tensors get their budget in a step that moves few bytes
    and is as short as any, or nearly; weights get the rest.
    """

    def __init__(
        self,
        request: Callable[[], PolicyRequest | None],
        weights: Callable[[Profile], Sequence[ModuleWeights]],
        recorder: Recorder,
    ) -> None:
        """Know no step yet.

        Args:
            request: Returns what the plan in force was made from; None before there is one.
            weights: Returns the weights of a profile with operators.
            recorder: Gets a mark for each division, and the time that it takes.
        """
        self._request = request
        self._weights = weights
        self._recorder = recorder
        self._profile: Profile | None = None
        self._planner: StepPlanner | None = None
        self._gradient_bytes = 0
        """Gradients: a plan counts them, and here the program holds them."""
        self._known: dict[int, int | None] = {}

    def weights_bytes(self, left_bytes: int) -> int | None:
        """Return what weights get of what is left to them and to saved tensors.

        ``None`` if no step is known, or no plan was found that has room.
        """
        request = self._request()
        if request is None or not request.profile.operators:
            return None
        left_bytes = round_down(left_bytes, MIB)  # few searches, though it varies
        if request.profile != self._profile:  # each plan has a profile of its own
            self._profile, self._planner, self._known = request.profile, None, {}
        if left_bytes not in self._known:
            start_ns = self._recorder.clock.now_ns()
            self._known[left_bytes] = self._find(request, left_bytes)
            self._recorder.span(Stage.PLAN, start_ns, self._recorder.clock.now_ns())
        return self._known[left_bytes]

    def _find(self, request: PolicyRequest, left_bytes: int) -> int | None:
        try:
            if self._planner is None:
                self._planner = self._planner_of(request, left_bytes)
            saved_bytes = self._planner.saved_bytes(left_bytes + self._gradient_bytes)
        except PlanError:  # the profile does not tell enough
            return None
        if saved_bytes is None:
            return None
        saved_bytes += request.slack_bytes + request.scratch_bytes
        self._recorder.mark(DIVISION, left_bytes=left_bytes, saved_bytes=saved_bytes)
        return max(0, left_bytes - saved_bytes)

    def _planner_of(self, request: PolicyRequest, left_bytes: int) -> StepPlanner:
        from penstock.plan import training_step  # noqa: PLC0415  (few runs need it)

        def policy(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
            found = replace(request, profile=profile, machine=machine, budgets=budgets)
            return replace(found, slack_bytes=0).plan()

        weights = self._weights(request.profile)
        self._gradient_bytes = training_step.gradient_bytes(weights)
        self._gradient_bytes += sum(one.trained_bytes for one in weights if one.waits)
        return training_step.StepPlanner(
            request.profile,
            weights,
            request.machine,
            policy=policy,
            least_policy=policies.get("all") if request.policy == "auto" else None,
            host_bytes=request.budgets.host_bytes,
            most_saved_bytes=left_bytes,
            gradient_memory=_AMPLE_BYTES,
        )
