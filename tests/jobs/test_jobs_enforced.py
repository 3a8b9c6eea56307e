"""A budget that the kernel keeps, where this user may make control groups."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from test_jobs_manager import killed_manager, managed, next_manager

from penstock.core.errors import JobError
from penstock.core.units import MIB
from penstock.jobs import Manager
from penstock.jobs.cgroups import Cgroup, own_place
from penstock.jobs.description import Description
from penstock.jobs.job_cgroups import JobCgroups, remove_groups

__all__ = ["managed"]  # a fixture


@pytest.fixture(autouse=True)
def permitted(tmp_path):
    try:
        JobCgroups(own_place(), state=str(tmp_path), budget_bytes=64 * MIB).close()
    except JobError as error:
        pytest.skip(str(error))


def group_of(run):
    machine = run.client.status()["machine"]
    assert machine["enforced"]
    return Path(machine["kept_by"])


def most_held(group):
    """As the kernel has counted it, page cache included."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        with suppress(OSError):
            return int((group / name).read_text())
    return 0


def test_a_process_begins_inside_and_so_do_its_children(tmp_path):
    made = JobCgroups(own_place(), state=str(tmp_path), budget_bytes=64 * MIB)
    group = Cgroup.make(made.path, "a", own_place().version)
    script = "cat /proc/self/cgroup; sh -c 'cat /proc/self/cgroup'"
    out = subprocess.check_output(group.inside(["/bin/sh", "-c", script]), text=True)
    assert out.count(f"/{Path(made.path).name}/a\n") == 2
    made.close()
    assert not os.path.exists(made.path)


def test_a_job_has_the_environment_that_was_described(disk_path):
    script = "import os; print(os.environ['A B'], os.environ['run.id'], os.environ['PLAIN'])"
    (disk_path / "x.py").write_text(script)
    env = {"A B": "x \u00fc", "run.id": "7=8", "PLAIN": "z"}
    document = {
        "machine": {"memory": "1GiB", "enforce": "cgroup"},
        "job": [{"name": "a", "script": "x.py", "env": env, "memory": "500MiB"}],
    }
    description = Description.from_json(document, source="here", base=str(disk_path))
    with Manager(description, state=str(disk_path / "state")) as manager:
        manager.run()
        (job,) = manager.status()["jobs"]
    assert job["outcome"] == "done", job["told"]
    with open(job["log"], encoding="utf-8") as log:
        assert "x \u00fc 7=8 z\n" in log.read()


def test_jobs_share_a_budget_that_the_kernel_keeps(managed):
    jobs = [{"name": name, "how": "mib=64 steps=40"} for name in "abc"]
    with managed(*jobs, enforce="cgroup") as run:
        group = group_of(run)
        run.until(lambda jobs: jobs["a"]["sleeps"] and jobs["b"]["sleeps"])
        most = most_held(group)
        done = run.ended()
    assert run.good, done
    assert 64 * MIB < most <= 140 * MIB
    assert all(each["steps"] == 40 and each["sleeps"] >= 1 for each in done.values())
    assert any(line == f"the budget is enforced by the kernel, in {group}" for line in run.lines)
    run.manager.close()
    assert not group.exists()


def test_who_takes_too_much_at_once_is_ended_and_nobody_else(managed):
    jobs = [
        {"name": "good", "memory": "80MiB", "how": "mib=64 steps=150"},
        {"name": "greedy", "memory": "30MiB", "how": "mib=150 steps=20"},
    ]
    with managed(*jobs, enforce="cgroup") as run:
        done = run.ended()
    assert (done["good"]["outcome"], done["good"]["steps"]) == ("done", 150)
    assert done["greedy"]["outcome"] == "failed"
    told = done["greedy"]["told"]
    assert "killed by SIGKILL: the kernel has killed one of its processes" in told
    assert "of [machine] memory, 140.00 MiB; its need is declared as 30.00 MiB: set its" in told


def test_the_next_manager_takes_over_the_group_and_removes_it(disk_path):
    with killed_manager(disk_path, steps=80, enforce="cgroup") as status:
        group = Path(status["machine"]["kept_by"])
        assert all(Cgroup.at(str(group / f"job-{name}")).processes() for name in "ab")
        out = next_manager(disk_path)
    result = json.loads(out.splitlines()[-1])["status"]
    assert [each["steps"] for each in result["jobs"]] == [80, 80]
    assert result["machine"]["kept_by"] == str(group)
    assert remove_groups(str(group))  # it was removed
