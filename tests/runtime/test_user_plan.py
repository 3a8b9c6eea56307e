"""A plan that is given instead of a policy: followed as it is, or refused with the first difference."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import penstock
from offload_runs import (
    MACHINE,
    assert_nothing_held,
    counted,
    wait_for_writes,
    written_bytes,
)
from penstock.api import Session
from penstock.core.errors import ConfigError, PlanError
from penstock.core.units import MIB
from penstock.plan import Action, Budgets, Plan
from penstock.runtime.user_plan import check_tiers, note_on_budget
from recompute_plans import FLASH, HOST, Block, following, profiled, recomputing, runs_again


@pytest.fixture
def disk(disk_path, small_knobs, one_thread):
    return disk_path


def blocks(depth=3, width=64):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def run(model, rows=512, width=64, amid=lambda: None):
    loss = model(torch.randn(rows, width)).square().mean()
    amid()
    loss.backward()


@pytest.fixture
def plan(session_for):
    """Block 1 is run again, what else is saved goes to flash."""
    model = blocks()
    base, profile = profiled(session_for, model, lambda: run(model))
    return recomputing(base, profile, "Sequential.1", tier_of=lambda number: FLASH)


def test_a_plan_is_followed_from_the_first_step_and_never_replaced(plan, disk):
    model = blocks()
    with following(disk, plan, model) as session:
        for _ in range(3):
            run(model, amid=lambda: wait_for_writes(session))
            assert session.plan.decisions == plan.decisions
        assert written_bytes(session) > 0
        assert runs_again(session) == 3
        assert session.planner.replans == 0
        assert session.profile is None
        summary = session.summary()
        assert summary.policy == "by hand"
        assert summary.saved_peak_bytes == sum(d.key.nbytes for d in plan.decisions)
        assert_nothing_held(session)


def test_offload_takes_a_plan_a_path_and_a_name(plan, disk, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    settings = {"flash": disk, "flash_capacity": "1GiB", "floor": "8KiB"}
    for policy in (plan, path, str(path)):
        model = blocks()
        with penstock.offload(model, policy=policy, **settings) as session:
            run(model)
            assert runs_again(session) == 1
            assert session.plan.decisions == plan.decisions
    with penstock.offload(blocks(), policy="keep", **settings) as session:
        assert session.plan is None


def test_a_plan_saved_by_a_session_can_be_given_to_the_next(session_for, disk, tmp_path):
    model = blocks()
    with session_for(model, policy="all") as session:
        run(model)
        (tmp_path / "plan.json").write_text(session.plan.to_json())
        (tmp_path / "profile.json").write_text(session.profile.to_json())
        kept = session.plan
    with following(disk, Plan.from_json((tmp_path / "plan.json").read_text()), model) as session:
        run(model, amid=lambda: wait_for_writes(session))
        assert session.plan.decisions == kept.decisions
        assert written_bytes(session) > 0


def test_configuration_and_policy_are_not_both_given(plan):
    with pytest.raises(ConfigError, match="either config or its fields"):
        penstock.offload(config=penstock.OffloadConfig(), policy=plan)


# -- refused --------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_or_no_plan(disk, tmp_path):
    with pytest.raises(ConfigError, match=r"plan '.*missing\.json' cannot be read"):
        penstock.offload(policy=tmp_path / "missing.json", flash=disk)
    (tmp_path / "other.json").write_text('{"penstock": "machine"}')
    with pytest.raises(PlanError, match=r"other\.json.*not a Penstock plan"):
        penstock.offload(policy=tmp_path / "other.json", flash=disk)


def test_another_batch_is_refused_with_the_first_slot_that_differs(plan, disk):
    model = blocks()
    with (
        following(disk, plan, model),
        pytest.raises(
            PlanError, match=r"another batch.*Sequential\.0\.norm saves 262144 bytes.*says 131072"
        ),
    ):
        run(model, rows=1024)


def test_another_model_is_refused_when_it_is_named(plan, disk):
    session = following(disk, plan, blocks(depth=2))
    with pytest.raises(PlanError, match=r"another model.*no module 'Sequential\.2\.norm'"):
        session.__enter__()


def test_a_model_that_saves_more_is_refused_with_the_first_slot_that_is_unknown(plan, disk):
    model = blocks(depth=4)
    with following(disk, plan, model), pytest.raises(PlanError, match=r"does not know"):
        run(model)


def test_a_module_that_is_run_again_is_not_the_only_one_that_is_looked_at(plan, disk):
    """Within it slots are dropped, not saved: the batch is another all the same."""
    model = blocks()
    with following(disk, plan, model), pytest.raises(PlanError, match="another batch"):
        model[1](torch.randn(1024, 64, requires_grad=True) * 2)


def test_a_later_pass_that_differs_is_guessed_and_told(plan, disk):
    """The last batch of an epoch is smaller."""
    model = blocks()
    with following(disk, plan, model) as session:
        run(model)
        assert counted(session, "unknown_slots") == 0
        run(model, rows=100)
        assert counted(session, "unknown_slots") > 0
        assert runs_again(session) == 2


def test_tiers_that_are_not_there():
    budgets = Budgets(device_bytes=MIB)
    key = penstock.plan.SlotKey("a", 0, MIB)
    for tier, wanted in ((HOST, "host_memory"), (FLASH, "a flash directory")):
        decision = penstock.plan.Decision(key, Action.OFFLOAD, tier, "")
        plan = Plan("p", budgets, (decision,), (), 0)
        with pytest.raises(PlanError, match=rf"sends slot a#0.* to the {tier} tier.*give {wanted}"):
            check_tiers(plan, budgets)


def test_a_smaller_budget_is_told(plan):
    assert note_on_budget(plan, plan.budgets) == ()
    larger = replace(plan, budgets=replace(plan.budgets, device_bytes=2 * MIB))
    (note,) = note_on_budget(larger, Budgets(device_bytes=MIB))
    assert "made for 2.00 MiB of device memory, the session has 1.00 MiB" in note


def test_session_takes_a_plan_as_well(plan, disk):
    config = penstock.OffloadConfig(flash=disk, floor="8KiB")
    with Session(config, machine=MACHINE, plan=plan) as session:
        run(blocks())
        assert runs_again(session) == 1
