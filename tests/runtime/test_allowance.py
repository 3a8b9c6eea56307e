"""The budget of a device where the user gives none: what is left of its memory by the rest of a step."""

from functools import partial

import pytest
import torch
from cuda_training import HOST
from simulated_device import DEVICE
from torch import nn

from offload_runs import session_in
from penstock.core.config import UNLIMITED
from penstock.core.units import MIB
from penstock.homed import UpdateMemory
from penstock.observe.events import Mark
from penstock.observe.recorder import Recorder
from penstock.plan import Action
from penstock.runtime.allowance import (
    HOST as HOST_MEMORY,
)
from penstock.runtime.allowance import (
    LIMIT,
    Allocated,
    DeviceAllowance,
    FirstServed,
    FoundAllowance,
    Remainder,
    SharedAllowance,
)
from penstock.runtime.table import SAVED
from penstock.store.account import Account
from penstock.store.frames import SCRATCH

TOTAL = 160 * MIB
RESERVE = 10 * MIB


class Memory:
    """A device's memory as the allocator sees it: what is charged, and what else there is."""

    def __init__(self, budget):
        self.budget = budget
        self.others = self.peak = self.ever = self.before = 0

    def allocated(self, device):
        now = self.others + self.budget.used_bytes
        self.peak = max(self.peak, now)
        self.ever += max(0, now - self.before)
        self.before = now
        return Allocated(now, self.peak, self.ever)

    def takes(self, nbytes):
        """Some operator takes so much, and gives it back."""
        self.allocated(DEVICE)
        self.peak = max(self.peak, self.before + nbytes)
        self.ever += nbytes


class Rig:
    def __init__(self, weights=20 * MIB):
        self.budget = Account(UNLIMITED)
        self.memory = Memory(self.budget)
        self.memory.others = weights
        self.recorder = Recorder()
        measure = partial(self.memory.allocated, DEVICE)
        self.allowance = FoundAllowance(
            Remainder(measure, self.budget),
            TOTAL,
            account=self.budget,
            recorder=self.recorder,
            device=str(DEVICE),
        )

    def save(self, nbytes):
        """A tensor is made, which takes its memory, and then saved: from then on it is charged."""
        self.memory.others += nbytes
        self.allowance.look()
        self.memory.others -= nbytes
        assert self.budget.try_take(nbytes, SAVED)
        self.allowance.look()


@pytest.fixture
def rig():
    return Rig()


def test_when_it_opens_half_of_what_is_free_is_the_limit_but_for_a_reserve(rig):
    """The step may take the other half, beside what it saves."""
    assert rig.budget.limit_bytes == (TOTAL - 20 * MIB - RESERVE) // 2


def test_saved_tensors_are_not_counted_and_all_else_is(rig):
    rig.allowance.look()
    for _ in range(4):
        rig.save(8 * MIB)
    rig.memory.others += 20 * MIB  # gradients
    rig.allowance.look()
    assert rig.allowance.settle() == TOTAL - 40 * MIB - RESERVE


def test_a_tensor_that_is_not_saved_yet_is_something_else(rig):
    """When it is made, what is saved may fill the budget."""
    rig.allowance.look()
    rig.save(8 * MIB)
    assert rig.allowance.settle() == TOTAL - 28 * MIB - RESERVE


def test_a_workspace_between_two_moments_shows_in_the_peak(rig):
    rig.allowance.look()
    rig.save(8 * MIB)
    rig.memory.takes(30 * MIB)
    rig.allowance.look()
    assert rig.allowance.settle() == TOTAL - 50 * MIB - RESERVE


def test_a_peak_from_before_the_pass_is_none_of_it():
    rig = Rig()
    rig.memory.takes(100 * MIB)  # the model was made twice, say
    rig.allowance.look()
    rig.save(8 * MIB)
    assert rig.allowance.settle() == TOTAL - 28 * MIB - RESERVE


def test_a_workspace_shows_also_where_an_earlier_peak_hides_it():
    """As when the program has run out of memory before, without Penstock."""
    rig = Rig()
    rig.memory.takes(100 * MIB)
    rig.allowance.look()
    rig.save(8 * MIB)
    rig.memory.takes(30 * MIB)
    rig.allowance.look()
    assert rig.allowance.settle() == TOTAL - 50 * MIB - RESERVE


def test_what_is_taken_one_after_the_other_is_no_more_than_the_peak(rig):
    rig.allowance.look()
    rig.save(8 * MIB)
    for _ in range(9):
        rig.memory.takes(30 * MIB)
    rig.allowance.look()
    for _ in range(9):
        rig.memory.takes(30 * MIB)
    rig.allowance.look()
    assert rig.allowance.settle() == TOTAL - 50 * MIB - RESERVE


@pytest.mark.parametrize("peak", [0, MIB])
def test_what_is_charged_between_two_moments_is_not_beside_it(peak):
    """Weights that are read ahead, for example: nothing was freed, as far as is known."""
    memory, others = Account(), [20 * MIB]

    def measure():
        now = others[0] + memory.used_bytes
        return Allocated(now, now + peak, now)

    remainder = Remainder(measure, memory)
    remainder.look()
    assert memory.try_take(100 * MIB, SAVED)
    remainder.look()
    assert remainder.other_bytes == 20 * MIB + peak
    others[0] += 4 * MIB
    memory.free(50 * MIB, SAVED)
    remainder.look()
    assert remainder.other_bytes == 24 * MIB


def test_what_an_optimizer_makes_in_its_first_step_is_taken_off(rig):
    rig.allowance.look()
    rig.save(8 * MIB)
    assert rig.allowance.grown() is None, "before the observed pass is over nothing is compared"
    rig.budget.limit_bytes = rig.allowance.settle()
    assert rig.allowance.grown() is None
    rig.memory.others += 40 * MIB
    assert rig.allowance.grown() == TOTAL - 68 * MIB - RESERVE
    rig.budget.limit_bytes = TOTAL - 68 * MIB - RESERVE
    assert rig.allowance.grown() is None
    rig.memory.others += MIB  # not worth a plan
    assert rig.allowance.grown() is None
    rig.memory.others += MIB
    assert rig.allowance.grown() is None
    rig.memory.others += MIB
    assert rig.allowance.grown() == TOTAL - 71 * MIB - RESERVE


def test_memory_that_comes_free_changes_nothing(rig):
    rig.memory.others += 40 * MIB
    rig.allowance.look()
    first = rig.allowance.settle()
    rig.memory.others -= 40 * MIB
    assert rig.allowance.grown() is None
    rig.allowance.look()
    assert rig.allowance.settle() == first


def test_without_anything_left_there_is_a_limit_still(rig):
    rig.memory.others = 2 * TOTAL
    rig.allowance.look()
    assert rig.allowance.settle() == 1


def test_every_limit_is_marked_with_what_it_was_found_from(rig):
    rig.allowance.settle()
    marks = [each for each in rig.recorder.events() if isinstance(each, Mark)]
    assert [mark.name for mark in marks] == [LIMIT, LIMIT]
    first, then = (mark.fields for mark in marks)
    assert first["limit_bytes"] == (TOTAL - 20 * MIB - RESERVE) // 2
    assert then["limit_bytes"] == TOTAL - 20 * MIB - RESERVE
    assert (first["other_bytes"], first["usable_bytes"]) == (20 * MIB, TOTAL)


# -- sessions -------------------------------------------------------------------------------------

SAVED_MIB = 8
"""By ``Chain``, one after the other, each of one MiB: that is something else until it is saved."""


class Chain(nn.Module):
    def __init__(self, link):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Tanh() for _ in range(SAVED_MIB)))

        def work(module, args, result):
            link.work(20_000_000)
            result.register_hook(lambda gradient: link.work(20_000_000))

        for layer in self.layers:
            layer.register_forward_hook(work)

    def forward(self, x):
        return self.layers(x).square().mean()


def run(link, path, *, memory, others, steps=3, grows_by=0, **settings):
    """Some steps on a device with so much memory; after the first, the program holds more of it."""
    torch.manual_seed(0)
    model = Chain(link)
    link.memory_bytes, link.others_bytes = memory, others
    with session_in(path, model, **({"policy": "auto", "host_memory": HOST} | settings)) as session:
        link.charged_bytes = lambda: session.budget.used_bytes
        gradients = []
        for step in range(steps):
            x = torch.randn(256, 1024, requires_grad=True)
            model(x).backward()
            gradients.append(x.grad)
            if step == 0:
                link.others_bytes += grows_by
            session.step()
        session.summary()
    return session, gradients


def test_a_network_that_fits_stays(link, disk_path):
    session, _ = run(link, disk_path, memory=64 * MIB, others=8 * MIB)
    assert session.budget.limit_bytes == (64 - 8 - 1 - 4) * MIB
    assert {decision.action for decision in session.plan.decisions} == {Action.KEEP}
    assert session.planner.replans == 1


def test_a_network_that_does_not_fit_is_planned_for_what_is_left(link, disk_path):
    session, gradients = run(link, disk_path, memory=16 * MIB, others=9 * MIB)
    # what goes while it is looked up may count as something else
    assert 3 * MIB <= session.budget.limit_bytes <= (16 - 9 - 1 - 1) * MIB
    assert session.plan.budgets.device_bytes == session.budget.limit_bytes
    assert session.plan.offloaded_bytes >= 2 * MIB
    _, expected = run(link, disk_path, memory=UNLIMITED, others=0, policy="keep")
    for mine, other in zip(gradients, expected, strict=True):
        assert torch.equal(mine, other)


def test_the_plan_is_made_again_when_the_optimizer_has_made_its_states(link, disk_path):
    session, _ = run(link, disk_path, memory=64 * MIB, others=8 * MIB, grows_by=46 * MIB)
    assert session.budget.limit_bytes == (64 - 54 - 1 - 4) * MIB
    assert session.plan.offloaded_bytes >= 2 * MIB
    reasons = [
        each.fields["reason"]
        for each in session.recorder.events()
        if isinstance(each, Mark) and each.name == "replan"
    ]
    assert reasons == ["first", "memory"]
    assert {line.reason for line in session.summary().replans} == {"first", "memory"}


def test_where_torch_does_not_tell_how_much_memory_there_is_there_is_no_limit(link, disk_path):
    session, _ = run(link, disk_path, memory=None, others=0)
    assert session.budget.limit_bytes == UNLIMITED
    assert sum("torch does not report the memory" in note for note in session.summary().notes) == 1


def test_nothing_fails_for_a_limit_that_was_only_found(link, disk_path):
    """With a byte of room every tensor exceeds it, and training goes on."""
    session, _ = run(link, disk_path, memory=16 * MIB, others=16 * MIB)
    assert session.budget.limit_bytes == 1
    assert session.recorder.snapshot().counted("budget.overflow") > 0
    assert session.recorder.snapshot().counted("budget.refused") == 0


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"device_memory": "24MiB"}, 24 * MIB),
        ({"policy": "keep"}, UNLIMITED),
        ({"host_memory": 0, "flash": (), "flash_capacity": None}, UNLIMITED),
    ],
    ids=["given", "everything is to stay", "nowhere to spill to"],
)
def test_where_it_is_given_or_of_no_use_it_is_not_looked_up(link, disk_path, settings, limit):
    session, _ = run(link, disk_path, memory=16 * MIB, others=9 * MIB, steps=1, **settings)
    assert session.budget.limit_bytes == limit
    assert not session.budget.advisory


def test_the_summary_says_what_the_budget_was_found_from(link, disk_path):
    session, _ = run(link, disk_path, memory=64 * MIB, others=9 * MIB)
    summary = session.summary()
    (note,) = [note for note in summary.notes if "no device_memory was given" in note]
    for figure in ("64.00 MiB", "10.00 MiB", "4.00 MiB", "50.00 MiB"):
        assert figure in note
    (line,) = [line for line in summary.memory if line.memory == "device"]
    assert line.budget_bytes == 50 * MIB


def test_codecs_take_a_part_of_a_limit_that_was_found(link, disk_path):
    torch.manual_seed(0)
    link.memory_bytes, link.others_bytes = 64 * MIB, 0
    settings = {"policy": "auto", "host_memory": HOST, "codec": "zero-value"}
    with session_in(disk_path, Chain(link), **settings) as session:
        link.charged_bytes = lambda: session.budget.used_bytes
        assert session.budget.limit_bytes < 64 * MIB
        assert 0 < session.budget.used_by(SCRATCH) <= session.budget.limit_bytes // 8


class Shared:
    """Saved tensors and weights that share a memory of 64 MiB; replays give saved tensors ``saved``."""

    def __init__(
        self,
        *,
        found=False,
        saved=None,
        least=4 * MIB,
        own=UNLIMITED,
        given=None,
        wanted=UNLIMITED,
    ):
        self.memory = Account(64 * MIB, name="memory")
        self.updates = UpdateMemory(self.memory)
        self.saved = self.memory.child("saved tensors")
        self.weights = self.memory.child("weights", given)
        self.needed, self.others = saved, 0
        process = None
        if found:
            measure = lambda: Allocated(*2 * [self.memory.used_bytes + self.others], 0)  # noqa: E731
            process = self.process = FoundAllowance(
                Remainder(measure, self.memory),
                64 * MIB,
                account=self.memory,
                recorder=Recorder(),
                device=HOST_MEMORY,
                parts=1,
            )
        self.allowance = SharedAllowance(
            self.saved,
            limit_bytes=own,
            first=FirstServed(
                self.weights,
                wanted_bytes=lambda: wanted,
                adapts=given is None,
                least_bytes=lambda: least,
                divide=lambda left: None if self.needed is None else left - self.needed,
                updates=self.updates,
            ),
            process=process,
        )

    @property
    def limits(self):
        return self.weights.limit_bytes // MIB, self.saved.limit_bytes // MIB

    def ends_step(self):
        limit = self.allowance.grown()
        if limit is not None:
            self.saved.limit_bytes = limit
        return limit


def test_weights_have_three_quarters_until_a_step_is_known():
    shared = Shared(saved=4 * MIB)
    assert shared.limits == (48, 16)
    shared.saved.limit_bytes = shared.allowance.settle()
    assert shared.limits == (60, 4)
    shared.needed = 10 * MIB  # another plan
    assert shared.ends_step() == 10 * MIB
    assert shared.limits == (54, 10)
    assert shared.ends_step() is None


def test_gradients_that_wait_have_what_weights_do_not_need_of_their_part():
    shared = Shared(saved=4 * MIB, wanted=30 * MIB)
    assert shared.updates.waiting.limit_bytes == 0
    shared.updates.want(shared, [2 * MIB, 18 * MIB])
    assert shared.memory.used_bytes == 18 * MIB  # the one that is being made
    shared.allowance.look()
    shared.saved.limit_bytes = shared.allowance.settle()
    assert shared.updates.waiting.limit_bytes == 12 * MIB  # 64 - 18 - 4 - 30
    assert shared.saved.limit_bytes == 4 * MIB
    gradient = torch.empty(MIB)
    assert shared.updates.keep(gradient)
    assert not shared.updates.keep(torch.empty(4 * MIB))
    assert shared.ends_step() is None  # they are no others
    assert shared.saved.extend(MIB)
    assert shared.updates.waiting.limit_bytes == 11 * MIB
    del gradient
    assert shared.updates.waiting.used_bytes == 0


def test_gradients_that_wait_have_half_of_what_a_limit_of_weights_leaves():
    shared = Shared(given=32 * MIB)
    shared.updates.want(shared, 8 * [MIB])
    shared.allowance.look()
    shared.saved.limit_bytes = shared.allowance.settle()
    assert shared.updates.waiting.limit_bytes == 8 * MIB
    assert shared.saved.limit_bytes == 23 * MIB  # 64 - 32 - 8, and the one that is being made


def test_half_of_a_memory_that_was_found_is_left_to_the_first_step():
    """What the step takes beside is not known: the process would be killed for it."""
    shared = Shared(found=True)
    assert shared.limits == (22, 7)  # of 60 MiB; four are left free
    assert shared.weights.extend(80 * MIB)  # of a model that is about to leave memory
    shared.saved.limit_bytes = shared.allowance.begin_again(0)
    assert shared.limits == (22, 7)
    assert shared.weights.extend(8 * MIB)  # two long weights
    assert not shared.weights.extend(60 * MIB)
    shared.saved.limit_bytes = shared.allowance.settle()
    assert shared.limits == (22, 7)  # the optimizer's step is still to come
    assert shared.ends_step() == 15 * MIB
    assert shared.limits == (45, 15)
    assert shared.weights.extend(8 * MIB)  # longer weights than all before
    assert shared.limits == (53, 7)


def test_calls_without_autograd_leave_no_half_to_a_step():
    """But what they take beside is measured, also within a call."""
    shared = Shared(found=True)
    assert shared.allowance.infer(has_ended=False) is None
    assert shared.limits == (22, 7)
    assert shared.allowance.infer(has_ended=True) == 15 * MIB
    assert shared.limits[0] == 45
    shared.saved.limit_bytes = 15 * MIB
    assert shared.allowance.infer(has_ended=True) is None
    shared.others = 16 * MIB
    shared.memory.limit_bytes = shared.process.measured()
    assert shared.allowance.infer(has_ended=False) == 11 * MIB
    assert shared.limits[0] == 33
    assert shared.process.measured() is None
    begin_again(shared, 0)  # the first training call
    assert shared.limits == (16, 5)


def begin_again(shared, step_bytes):
    shared.memory.limit_bytes = shared.process.begin_again(step_bytes)
    shared.saved.limit_bytes = shared.allowance.begin_again(step_bytes)


def test_the_first_step_has_room_for_what_it_is_known_to_take():
    """Such are gradients of long weights: the process was killed for those of a tied embedding."""
    shared = Shared(found=True)
    begin_again(shared, 20 * MIB)
    assert shared.memory.limit_bytes == 60 * MIB  # a third of it is in the half that is left
    begin_again(shared, 36 * MIB)
    assert shared.memory.limit_bytes == 24 * MIB
    assert shared.limits == (9, 3)
    shared.saved.limit_bytes = shared.allowance.settle()
    assert shared.memory.limit_bytes == 60 * MIB  # now it is measured
    assert shared.ends_step() == 15 * MIB
    assert shared.limits == (45, 15)


def test_what_the_first_step_is_known_to_take_yields_to_weights_that_fit_no_other_way():
    shared = Shared(found=True)
    begin_again(shared, 50 * MIB)
    assert shared.memory.limit_bytes == 10 * MIB
    missing = 40 * MIB - shared.weights.limit_bytes
    assert shared.weights.extend(missing)
    assert shared.limits[0] == 40
    assert shared.memory.limit_bytes == 41 * MIB  # saved tensors have the last one
    assert shared.weights.extend(19 * MIB)
    assert not shared.weights.extend(MIB)
    assert shared.memory.limit_bytes == 60 * MIB


def test_weights_cede_what_saved_tensors_cannot_do_without():
    shared = Shared(saved=4 * MIB, least=50 * MIB)
    shared.saved.limit_bytes = shared.allowance.settle()
    assert shared.saved.extend(6 * MIB)
    assert shared.limits == (54, 10)
    assert shared.ends_step() is None  # and it stays so
    assert shared.limits == (54, 10)
    assert not shared.saved.extend(5 * MIB)  # the two longest weights need the rest
    assert shared.limits == (54, 10)
    shared.needed = 12 * MIB  # replays of the larger step know of it
    assert shared.ends_step() == 12 * MIB
    assert shared.limits == (52, 12)


def test_weights_cede_nothing_beyond_the_limit_that_the_user_gave():
    shared = Shared(saved=4 * MIB, own=8 * MIB)
    assert not Shared(found=True, own=8 * MIB).saved.advisory
    assert Shared(found=True).saved.advisory
    shared.saved.limit_bytes = shared.allowance.settle()
    assert shared.saved.extend(4 * MIB)
    assert not shared.saved.extend(MIB)
    assert shared.saved.limit_bytes == 8 * MIB


def test_half_of_what_weights_of_a_given_size_leave_is_left_to_the_first_step():
    shared = Shared(found=True, given=40 * MIB)
    assert shared.limits == (40, 10)  # of 60 MiB
    shared.saved.limit_bytes = shared.allowance.settle()
    assert shared.limits == (40, 20)


def test_in_device_memory_weights_and_saved_tensors_share_what_the_program_leaves():
    memory = Account(name="device memory")
    saved, weights, others = memory.child("device"), memory.child("weights"), [40 * MIB]
    measure = lambda: Allocated(*3 * [others[0] + memory.used_bytes])  # noqa: E731
    recorder, remainder = Recorder(), Remainder(measure, memory)
    found = FoundAllowance(
        remainder, 64 * MIB, account=memory, recorder=recorder, device="cuda:0", parts=1
    )
    first = FirstServed(weights, wanted_bytes=lambda: UNLIMITED, adapts=True)
    allowance = DeviceAllowance(saved, found, first=first)

    def limits():
        return [each.limit_bytes // MIB for each in (memory, weights, saved)]

    assert limits() == [20, 7, 2]  # of half of it
    others[0] = 8 * MIB  # the weights were a part of it
    saved.limit_bytes = allowance.begin_again(0)
    assert limits() == [52, 19, 6]
    saved.limit_bytes = allowance.infer(has_ended=True)
    assert limits() == [52, 39, 13]
    saved.limit_bytes = allowance.begin_again(0)
    assert limits() == [52, 19, 6]
    allowance.look()
    others[0] = 12 * MIB
    allowance.look()
    saved.limit_bytes = allowance.settle()
    assert limits() == [48, 18, 6]
    saved.limit_bytes = allowance.grown()
    assert limits() == [48, 36, 12]
    others[0] = 20 * MIB  # an optimizer has made its states
    saved.limit_bytes = allowance.grown()
    assert limits() == [40, 30, 10]
    assert allowance.grown() is None
    assert "64.00 MiB that PyTorch can use on cuda:0, a step takes up to 20.00 MiB" in str(
        allowance
    )
