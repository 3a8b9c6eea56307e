"""What is believed of CUDA holds for the device that is emulated; a GPU is asked the same."""

import os

import pytest
import torch

import preloaded
from penstock.testing.gpu import contract, processes
from penstock.testing.gpu.fact import FactOutcome, judge

pytestmark = pytest.mark.gpu
CHILD = "import sys; from penstock.testing.gpu.child import main; sys.exit(main())"
HERE = [each for each in contract.FACTS if not each.fresh and each.devices == 1]
ELSEWHERE = [each for each in contract.FACTS if each not in HERE]


def named(facts):
    return [pytest.param(each, id=each.name) for each in facts]


@pytest.mark.concurrent_streams
@pytest.mark.parametrize("one", named(HERE))
def test_a_fact_holds(one):
    finding = judge(one)
    assert finding.outcome is FactOutcome.HOLDS, finding.found


@pytest.mark.parametrize("one", named(ELSEWHERE))
def test_a_fact_of_a_new_process_or_two_devices_holds(one, tmp_path):
    records = tmp_path / "records"
    child = ["contract", one.name, "--preload", "emulated", "--records", str(records)]
    settings = {"EMU_DEVICES": str(one.devices), "EMU_SCHEDULE": "lazy"}
    ended = preloaded.run(["-c", CHILD, *child], env=os.environ | settings, timeout=90)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (finding,) = (each["finding"] for each in processes.read(records) if "finding" in each)
    assert finding["outcome"] == FactOutcome.HOLDS, finding["found"]


def test_a_belief_that_is_wrong_is_found_out():
    """An emulator that is as wrong as it can be: whatever the host waits for has not happened."""
    fact = contract.named("reached_means_visible")
    synchronize = torch.cuda.Event.synchronize
    torch.cuda.Event.synchronize = lambda self: None
    try:
        finding = judge(fact)
    finally:
        torch.cuda.Event.synchronize = synchronize
    assert finding.outcome is FactOutcome.DIFFERS
    assert "bytes were not there yet" in finding.found
