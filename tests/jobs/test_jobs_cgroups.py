"""The budget kept by the kernel: on a make-believe tree of control groups, of both versions.

What the kernel really does is in ``test_jobs_enforced.py``.
"""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, JobError
from penstock.core.units import MIB
from penstock.jobs import JobsMachine, budget
from penstock.jobs.budget import JobsBudget
from penstock.jobs.cgroups import NO_LIMIT, Cgroup, CgroupMembership, place_of
from penstock.jobs.job_cgroups import JobCgroups, remove_groups
from penstock.jobs.limits import shares
from penstock.jobs.policy import ALIVE, JobEntry, JobPhase

OLD = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
NEW = ("memory.max", "memory.swap.max")
ME = os.getpid()


class FakeKernel:
    """A tree of groups that behaves as the kernel's, as far as that matters here."""

    def __init__(self, root, version, monkeypatch):
        self.root, self.version = root, version
        self.writes = []
        self._mkdir, self._rmdir = os.mkdir, os.rmdir
        (root / "mine").mkdir(parents=True)
        for path in (root, root / "mine"):
            self._fill(path)
        if version == 2:
            (root / "cgroup.subtree_control").write_text("memory")
        self.place = CgroupMembership(str(root / "mine"), version)
        monkeypatch.setattr(os, "mkdir", self.mkdir)
        monkeypatch.setattr(os, "rmdir", self.rmdir)

        def write(group, what, text, **how):
            self.write(Path(group._file(what)), text, **how)

        monkeypatch.setattr(Cgroup, "_write", write)

    def _fill(self, path, *, limited=True):
        (path / "cgroup.procs").touch()
        if self.version == 2:
            (path / "cgroup.subtree_control").touch()
            (path / "cgroup.controllers").write_text("memory pids")
        if limited:
            self._give_limit(path)

    def _give_limit(self, path):
        for name in OLD if self.version == 1 else NEW:
            (path / name).write_text("0")
        self.hold(path, 0)
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        (path / name).write_text("oom_kill_disable 0\noom_kill 0\n")
        if self.version == 2:
            (path / "memory.oom.group").write_text("0")

    def hold(self, path, nbytes, cache=0):
        usage, prefix = ("memory.usage_in_bytes", "total_")
        if self.version == 2:
            usage, prefix = "memory.current", ""
        path = Path(path)
        (path / usage).write_text(f"{nbytes + cache}\n")
        (path / "memory.stat").write_text(
            f"anon 7\n{prefix}inactive_file {cache // 2}\n{prefix}active_file {cache - cache // 2}\n"
        )

    def mkdir(self, path, mode=0o777):
        self._mkdir(path, mode)
        if str(path).startswith(f"{self.root}/"):
            above = Path(path).parent / "cgroup.subtree_control"
            self._fill(Path(path), limited=self.version == 1 or "memory" in above.read_text())

    def rmdir(self, path, **how):
        if not str(path).startswith(f"{self.root}/"):
            return self._rmdir(path, **how)
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError
        if (path / "cgroup.procs").read_text() or any(each.is_dir() for each in path.iterdir()):
            raise OSError(errno.EBUSY, "busy")
        monkey = pytest.MonkeyPatch()
        with monkey.context() as real:
            real.setattr(os, "rmdir", self._rmdir)
            shutil.rmtree(path)
        return None

    def write(self, path, text, *, optional=False):
        if not path.exists():
            if optional:
                return
            raise FileNotFoundError
        here = path.parent
        if path.name == "cgroup.procs":
            if self.version == 2 and (here / "cgroup.subtree_control").read_text():
                raise OSError(errno.EBUSY, "busy")
            for each in self.root.rglob("cgroup.procs"):
                left = [pid for pid in each.read_text().split() if pid != text]
                each.write_text("".join(f"{pid}\n" for pid in left))
            text = f"{path.read_text()}{text}\n"
        elif path.name == "cgroup.subtree_control":
            if text == "+memory" and (here / "cgroup.procs").read_text():
                raise OSError(errno.EBUSY, "busy")
            text = "memory" if text == "+memory" else ""
            for each in here.iterdir():
                if text and each.is_dir() and not (each / NEW[0]).exists():
                    self._give_limit(each)
        self.writes.append((here.name, path.name, text))
        path.write_text(text)


@pytest.fixture(params=[1, 2])
def kernel(request, tmp_path, monkeypatch):
    """With this process alone in the group ``mine``."""
    made = FakeKernel(tmp_path / "cgroup", request.param, monkeypatch)
    (tmp_path / "cgroup/mine/cgroup.procs").write_text(f"{ME}\n")
    return made


def enclosure(kernel, **how):
    return JobCgroups(kernel.place, **{"state": "/a/state", "budget_bytes": 100 * MIB, **how})


def entry(name, phase=JobPhase.AWAKE, **how):
    return JobEntry(
        name=name, phase=phase, **{"need_bytes": 40 * MIB, "rest_bytes": 5 * MIB, **how}
    )


# -- where a process stands -----------------------------------------------------------------------


def test_each_version_is_found_where_it_is_mounted(tmp_path):
    old = "30 23 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"
    cpu = "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
    new = f"32 23 0:28 / {tmp_path} rw,nosuid - cgroup2 cgroup2 rw"
    both = "9:cpu:/\n4:memory:/user/x\n0::/\n"
    assert place_of(both, "\n".join([cpu, new, old])) == CgroupMembership(
        "/sys/fs/cgroup/memory/user/x", 1
    )
    (tmp_path / "app").mkdir()
    (tmp_path / "app/cgroup.controllers").write_text("cpu memory pids\n")
    assert place_of("0::/app\n", new) == CgroupMembership(str(tmp_path / "app"), 2)
    (tmp_path / "app/cgroup.controllers").write_text("cpu pids\n")
    with pytest.raises(JobError, match=r"memory controller is not available in .*Delegate=yes"):
        place_of("0::/app\n", new)


def test_a_container_sees_a_part_of_the_tree():
    mount = "30 23 0:26 /docker/7 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    found = place_of("4:memory:/docker/7/jobs\n", mount)
    assert found.path == "/sys/fs/cgroup/memory/jobs"
    assert place_of("4:memory:/docker/7\n", mount).path == "/sys/fs/cgroup/memory"
    with pytest.raises(JobError, match="sees no mount of the memory controller"):
        place_of("4:memory:/elsewhere\n", mount)
    with pytest.raises(JobError, match="no control groups"):
        place_of("", mount)


# -- one group ------------------------------------------------------------------------------------


def test_swap_takes_nothing_unless_it_may(kernel):
    group = Cgroup.make(str(kernel.root / "mine"), "g", kernel.version, limited=False)
    if kernel.version == 2:
        kernel._give_limit(Path(group.path))
    group.limit(64 * MIB)
    limit, swap = (Path(group.path, name) for name in (OLD if kernel.version == 1 else NEW))
    both = str(64 * MIB) if kernel.version == 1 else "0"
    assert (limit.read_text(), swap.read_text()) == (str(64 * MIB), both)
    assert group.can_bar_swap()
    group.limit(32 * MIB, swap=True)
    assert swap.read_text() == ("-1" if kernel.version == 1 else "max")
    group.limit(NO_LIMIT, swap=True)
    assert limit.read_text() == ("-1" if kernel.version == 1 else "max")
    swap.unlink()  # a kernel that does not count swap
    group.limit(32 * MIB)
    assert not group.can_bar_swap()
    assert limit.read_text() == str(32 * MIB)


def test_memory_with_swap_is_never_limited_below_memory(tmp_path, monkeypatch):
    """Of v1 the kernel refuses that; so the order is another upwards and downwards."""
    kernel = FakeKernel(tmp_path / "cgroup", 1, monkeypatch)
    group = Cgroup.make(str(kernel.root / "mine"), "g", 1)
    for nbytes in (64, 128, 32):
        group.limit(nbytes * MIB)
    memory, both = OLD
    assert [what for _, what, _ in kernel.writes] == [both, memory, both, memory, memory, both]


def test_page_cache_is_not_held_and_no_limit_is_below_what_is(kernel):
    group = Cgroup(str(kernel.root / "mine"), kernel.version)
    kernel.hold(group.path, 50 * MIB, cache=30 * MIB)
    assert group.held_bytes() == 50 * MIB
    assert not group.limit(20 * MIB)
    assert 50 * MIB < group.limit_bytes < 60 * MIB
    assert group.limit(80 * MIB)


def test_a_group_that_may_not_be_made_is_said(tmp_path):
    with pytest.raises(JobError, match=r"a control group cannot be created in .*Delegate=yes"):
        Cgroup.make(str(tmp_path / "no"), "g", 1)
    with pytest.raises(JobError, match="would have no memory limit"):
        Cgroup.make(str(tmp_path), "g", 1)
    assert not (tmp_path / "g").exists()


# -- the group of all, and one for each -----------------------------------------------------------


def test_all_have_the_budget_and_each_its_part(kernel):
    made = enclosure(kernel)
    made.allow([entry("a", JobPhase.STARTING), entry("b", JobPhase.ASLEEP, held_bytes=5 * MIB)])
    room = made.begin("a")
    name = OLD[0] if kernel.version == 1 else NEW[0]
    assert Path(made.path, name).read_text() == str(100 * MIB)
    assert int(Path(made.path, "job-a", name).read_text()) == room.limit_bytes > 40 * MIB
    assert room.inside(["train"], {"A": "1"})[-2:] == [f"{made.path}/job-a/cgroup.procs", "train"]
    room.end()
    made.close()
    assert not Path(made.path).exists()
    assert (kernel.root / "mine/cgroup.procs").read_text() == f"{ME}\n"  # where it was


@pytest.mark.parametrize("name", ["tasks", "cgroup.procs"])
def test_a_job_may_be_named_as_a_file_of_the_kernel_s(kernel, name):
    made = enclosure(kernel)
    Path(made.path, name).touch()
    made.allow([entry(name)])
    room = made.begin(name)
    assert room.limit_bytes > 40 * MIB
    room.end()
    Path(made.path, name).unlink()
    made.close()


def test_who_gets_less_gets_it_first(kernel):
    made = enclosure(kernel)
    jobs = [entry("a"), entry("b", JobPhase.ASLEEP, held_bytes=5 * MIB)]
    made.allow(jobs)
    for each in jobs:
        made.begin(each.name)
    kernel.writes.clear()
    made.allow([replace(jobs[0], phase=JobPhase.ASLEEP), replace(jobs[1], phase=JobPhase.WAKING)])
    name = OLD[0] if kernel.version == 1 else NEW[0]
    assert [where for where, what, _ in kernel.writes if what == name] == ["job-a", "job-b"]
    kernel.writes.clear()
    made.allow([replace(jobs[0], phase=JobPhase.ASLEEP), replace(jobs[1], phase=JobPhase.WAKING)])
    assert not kernel.writes


def test_a_job_that_was_ended_for_want_of_memory_is_known(kernel):
    made = enclosure(kernel)
    made.allow([entry("a")])
    room = made.begin("a")
    assert not room.was_overrun()
    events = "memory.oom_control" if kernel.version == 1 else "memory.events"
    Path(made.path, "job-a", events).write_text("oom_kill_disable 0\noom_kill 2\n")
    assert room.was_overrun()
    assert not room.was_overrun()  # once


def test_what_a_killed_manager_left_is_taken_over_or_removed(kernel):
    left = enclosure(kernel)
    left.allow([entry("a")])
    left.begin("a")
    procs = Path(left.path, "job-a/cgroup.procs")
    procs.write_text("4711\n")
    found = enclosure(kernel, state="/another/state", found=left.path)
    assert found.path == left.path
    assert found.find("a", 4712) is None
    assert found.find("a", 4711) is not None
    procs.write_text("")
    other = enclosure(kernel, state="/another/state", found=left.path)
    assert not Path(left.path).exists()
    assert other.path != left.path
    assert remove_groups(other.path)


def test_in_version_2_the_manager_makes_way_if_it_is_alone(tmp_path, monkeypatch):
    kernel = FakeKernel(tmp_path / "cgroup", 2, monkeypatch)
    mine = tmp_path / "cgroup/mine"
    (mine / "cgroup.procs").write_text(f"{ME}\n")
    (mine / "penstock-manager-1").mkdir()  # of one that was killed
    made = enclosure(kernel)
    assert not (mine / "penstock-manager-1").exists()
    assert (mine / f"penstock-manager-{ME}/cgroup.procs").read_text() == f"{ME}\n"
    made.close()
    assert sorted(each.name for each in mine.iterdir() if each.is_dir()) == []
    (mine / "cgroup.procs").write_text(f"{ME}\n77\n")
    with pytest.raises(JobError, match=r"it has other processes.*Delegate=yes"):
        enclosure(kernel)
    assert sorted((mine / "cgroup.procs").read_text().split()) == sorted([str(ME), "77"])
    assert not any(each.is_dir() for each in mine.iterdir())


# -- what is wanted -------------------------------------------------------------------------------


def test_where_it_is_not_permitted_it_is_said_or_refused(kernel, monkeypatch):
    def refuse():
        raise JobError("no group may be made here")

    monkeypatch.setattr(budget, "own_place", refuse)
    lines = []
    made = JobsBudget(JobsMachine(memory="1GiB"), state="state", tell=lines.append)
    made.enforce(None)
    made.report()
    assert not made.is_enforced
    assert lines == [
        "the budget is enforced by polling, not by the kernel: no group may be made here"
    ]
    wanted = JobsBudget(
        JobsMachine(memory="1GiB", enforce="cgroup"), state="state", tell=lines.append
    )
    with pytest.raises(ConfigError, match=r"\[machine\] enforce is 'cgroup': no group may"):
        wanted.enforce(None)
    with pytest.raises(ConfigError, match="enforce is 'kernel'; known are auto, cgroup, polling"):
        JobsMachine(memory="1GiB", enforce="kernel")


def test_without_enforcement_jobs_of_an_earlier_manager_are_let_go(kernel):
    left = enclosure(kernel)
    left.allow([entry("a")])
    left.begin("a")
    Path(left.path, "job-a/cgroup.procs").write_text("4711\n")
    made = JobsBudget(JobsMachine(memory="1GiB", enforce="polling"), state="state", tell=print)
    made.enforce(left.path)
    name, none = (OLD[0], "-1") if kernel.version == 1 else (NEW[0], "max")
    assert Path(left.path, "job-a", name).read_text() == none
    Path(left.path, "job-a/cgroup.procs").write_text("")
    made.enforce(left.path)
    assert not Path(left.path).exists()


# -- who may hold how much ------------------------------------------------------------------------

sizes = st.integers(0, 100)


@given(
    st.lists(st.tuples(st.sampled_from(ALIVE), sizes, sizes, sizes), min_size=1, max_size=6),
    st.integers(1, 400),
)
def test_together_they_may_hold_no_more_than_the_budget(jobs, budget_mib):
    entries = [
        entry(
            str(number), phase, need_bytes=need * MIB, held_bytes=held * MIB, rest_bytes=rest * MIB
        )
        for number, (phase, need, held, rest) in enumerate(jobs)
    ]
    made = shares(entries, budget_mib * MIB)
    charged = sum(each.charge_bytes for each in entries)
    assert all(made[each.name] >= min(each.held_bytes, each.charge_bytes) for each in entries)
    if charged <= budget_mib * MIB:
        assert sum(made.values()) <= budget_mib * MIB
        assert all(made[each.name] >= each.charge_bytes for each in entries)
    elif all(each.phase is JobPhase.AWAKE for each in entries):
        assert sum(made.values()) <= max(budget_mib * MIB, sum(each.held_bytes for each in entries))


def test_what_is_free_goes_to_who_computes():
    made = shares(
        [
            entry("a"),
            entry("b", JobPhase.ASLEEP, held_bytes=5 * MIB),
            entry("c", JobPhase.WAITING),
            entry("d", JobPhase.OVER),
        ],
        200 * MIB,
    )
    assert made == {"a": 131 * MIB, "b": 69 * MIB}
