"""What ``import penstock`` gives, and what it costs."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[1]
EXPORTS = [
    "BudgetError",
    "CheckpointError",
    "ChecksumError",
    "ClosedError",
    "CodecError",
    "ConfigError",
    "DamagedError",
    "DatasetError",
    "HookError",
    "InPlaceError",
    "JobError",
    "MismatchError",
    "NoSpaceError",
    "OffloadConfig",
    "PenstockError",
    "PenstockWarning",
    "PlanError",
    "RestoreError",
    "Session",
    "ShortTransferError",
    "SizeError",
    "SourceChangedError",
    "SuspendError",
    "Suspended",
    "TransferError",
    "WorkerError",
    "__version__",
    "built_on_flash",
    "close",
    "micro_batched",
    "offload",
    "resume",
    "suspend",
]


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_exports_are_these_and_each_is_there():
    assert sorted(penstock.__all__) == EXPORTS
    for name in EXPORTS:
        assert getattr(penstock, name) is not None
    assert set(EXPORTS) <= set(dir(penstock))


@pytest.mark.parametrize("module", ["data", "observe", "store"])
def test_names_that_are_imported_at_their_first_use_are_shown_and_there(module):
    package = importlib.import_module(f"penstock.{module}")
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=f"penstock.{module}.*'nothing'"):
        _ = package.nothing


def test_the_version_is_that_of_the_project():
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert penstock.__version__ == tomllib.load(file)["project"]["version"]


def test_the_changelog_says_what_this_version_has():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {penstock.__version__} (20" in changelog


@pytest.mark.parametrize(
    "module", ["core.units", "plan", "plan.policies", "observe", "io", "store", "lab.ssd", "data"]
)
def test_planning_io_and_observation_do_without_torch(module):
    code = f"import penstock.{module}, sys; print([m for m in sys.modules if m == 'torch'])"
    assert run(code) == "[]"


def test_offloading_loads_what_a_run_of_training_needs_and_no_more(disk_path):
    """``suspend``, checkpoints, optimizers and the parts of accelerators come when they are called."""
    code = f"""
import sys, torch, penstock.api
print(sum(name.partition(".")[0] == "penstock" for name in sys.modules))
model = torch.nn.Linear(256, 256)
with penstock.offload(model, device_memory="1MiB", flash={str(disk_path)!r}, policy="all"):
    model(torch.ones(4096, 256, requires_grad=True)).sum().backward()
print(*sorted({{".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("penstock.")}}))
print("penstock.runtime.cuda.link" in sys.modules)
"""
    count, packages, cuda = run(code).splitlines()
    assert int(count) <= 150
    assert not set(packages.split()) & {
        *("penstock.jobs", "penstock.checkpoint", "penstock.optim", "penstock.data"),
        *("penstock.lab.ssd", "penstock.lab.zoo", "penstock.lab.dry", "penstock.lab.characterize"),
    }
    assert cuda == "False"


def test_planning_is_imported_in_a_blink():
    def best(code):
        """Seconds of a core, for others may want the cores too."""
        return min(float(run(f"{code}\nimport time; print(time.process_time())")) for _ in range(3))

    # everything above a bare interpreter; torch alone would take more than a second
    assert best("import penstock.plan.policies") - best("pass") < 0.3
