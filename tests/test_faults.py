"""Bad input and faults of a whole session: each ends in a clear error or a documented fallback."""

import os
import re
import signal
import subprocess
import textwrap
import time

import pytest
import torch

import penstock
import preloaded
from offload_runs import assert_nothing_held, assert_within_budget, same_bits, wait_until

NETWORK = """
import sys, torch, penstock
torch.manual_seed(0)
layers = [torch.nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(10)]
net = torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.ReLU())])
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
images = torch.randn(8, 3, 64, 64)
"""


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(10)]
    return torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.ReLU())])


def gradients(net, session=None):
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    net.zero_grad()
    net(images).square().mean().backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_memory": "2G"}, "ambiguous"),
        ({"device_memory": "2 gigs"}, "unknown unit"),
        ({"device_memory": -1}, "negative"),
        ({"device_memory": 0}, "more than 0"),
        ({"device_memory": True}, "bool"),
        ({"device_memory": "1.5B"}, "not a whole number"),
        ({"devise_memory": "2GiB"}, "unknown setting 'devise_memory'; known are .*device_memory"),
        ({"device_memory": "2GiB"}, "name a flash directory"),
        ({"policy": "all"}, "name a flash directory"),
        ({"flash_capacity": "2GiB"}, "no flash directory"),
        ({"flash": (".", ".")}, "twice"),
        ({"flash": ".", "tbw": "0TB"}, "tbw must be more than 0"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(penstock.ConfigError, match=message):
        penstock.offload(**settings)


def test_an_unknown_policy_is_refused_with_those_there_are(disk_path):
    session = penstock.offload(flash=disk_path, policy="best")
    with pytest.raises(penstock.ConfigError, match=r"'best'; known are all, auto, .*keep"), session:
        pass


def test_config_and_keywords_are_not_both_given(disk_path):
    config = penstock.OffloadConfig(flash=disk_path)
    with pytest.raises(penstock.ConfigError, match="not both"):
        penstock.offload(config=config, device_memory="1GiB")


def test_settings_from_a_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[offload]\ndevice_memory = "2GiB"\nflash = ["/a", "/b"]\n')
    config = penstock.OffloadConfig.from_toml(path)
    assert config.device_bytes == 2 << 30
    assert config.directories == ("/a", "/b")
    path.write_text('[offload]\ndevice_memory = "2G"\nflash = "/a"\n')
    with pytest.raises(penstock.ConfigError, match=rf"{re.escape(str(path))}: device_memory"):
        penstock.OffloadConfig.from_toml(path)
    path.write_text("[ofload]\n")
    with pytest.raises(penstock.ConfigError, match="no table"):
        penstock.OffloadConfig.from_toml(path)


# -- directories -----------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_spilled_to(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path, message in (
        (tmp_path / "missing", "missing"),
        (file, "file"),
        ("/proc", "/proc"),
    ):
        with pytest.raises(penstock.PenstockError, match=message), penstock.offload(flash=path):
            pass


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs to try")
def test_a_directory_in_memory_is_refused():
    with pytest.raises(penstock.ConfigError, match="/dev/shm"), penstock.offload(flash="/dev/shm"):
        pass


def test_more_capacity_than_free_space_is_refused(disk_path):
    session = penstock.offload(flash=disk_path, flash_capacity="1024TB")
    with pytest.raises(penstock.NoSpaceError, match=str(disk_path)), session:
        pass


# -- budgets ---------------------------------------------------------------------------------------


def test_a_budget_too_small_names_slot_and_least_that_works(session_for):
    """Following the advice gets to a budget that works, and its result is right."""
    wanted = gradients(network())
    budget, refusals = 256 << 10, 0
    while True:
        net = network()
        try:
            with session_for(net, device_memory=budget, policy="auto") as session:
                got = gradients(net)
                assert_within_budget(session)
            break
        except penstock.BudgetError as error:
            refused = error
        refusals += 1
        assert refused.limit_bytes == budget
        assert "Sequential." in refused.slot
        assert str(refused.least_bytes) in str(refused)
        assert refused.least_bytes > budget
        budget = refused.least_bytes
        assert refusals < 20, "the advice never ends"
    assert refusals > 0
    assert budget < 12 << 20  # of 20 MiB saved
    assert all(map(same_bits, wanted, got))


def test_after_a_refusal_nothing_is_held(session_for):
    net = network()
    with session_for(net, device_memory=1 << 20, policy="auto") as session:
        with pytest.raises(penstock.BudgetError):
            gradients(net)
        assert_nothing_held(session)


def test_a_budget_without_a_tier_and_keep_is_refused_where_it_is_passed():
    with (
        pytest.raises(penstock.BudgetError, match="name a flash directory to spill to"),
        penstock.offload(network(), device_memory="2MiB", policy="keep") as session,
    ):
        gradients(session._model)


# -- use ---------------------------------------------------------------------------------------------


def test_sessions_do_not_nest(session_for):
    net = network()
    with session_for(net):
        with (
            pytest.raises(penstock.HookError, match="another session is already open"),
            session_for(net),
        ):
            pass
        with pytest.raises(penstock.HookError, match="already open"), session_for(network()):
            pass
    with session_for(net):
        gradients(net)


def test_a_session_is_entered_once(session_for):
    session = session_for(network())
    with pytest.raises(penstock.ClosedError, match="not been opened"):
        session.summary()
    with session:
        pass
    with pytest.raises(penstock.ClosedError, match="cannot be opened again"), session:
        pass


def test_a_script_that_never_calls_backward(session_for):
    net = network()
    with session_for(net, device_memory="8MiB", policy="auto") as session:
        for _ in range(3):
            out = net(torch.randn(8, 3, 64, 64))
        del out
        assert_within_budget(session)
        assert_nothing_held(session)
        assert "0 optimizer steps" in str(session.summary())


def test_backward_after_the_session_is_an_error_that_names_the_slot(session_for):
    net = network()
    with session_for(net, device_memory="8MiB") as session:
        loss = net(torch.randn(8, 3, 64, 64)).square().mean()
        from offload_runs import wait_for_writes

        wait_for_writes(session)
    with pytest.raises(penstock.ClosedError, match=r"Sequential\.\d+#0.*closed"):
        loss.backward()


# -- processes ---------------------------------------------------------------------------------------


def start(script, *args):
    return preloaded.Process(
        ["-c", textwrap.dedent(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PENSTOCK_SLAB": "16MiB"},
    )


PHASES = (
    NETWORK
    + """
import os
path, *phases = sys.argv[1:]
for phase in phases:  # each has a process, and torch is loaded once
    if not os.fork():
        break
    os.wait()
else:
    sys.exit()
def stop(what):
    if what == phase:
        print(phase, os.getpid(), flush=True)
        sys.stdin.read()
with penstock.offload(net, device_memory="8MiB", flash=path, flash_capacity="256MiB",
                      policy="all", floor="64KiB") as session:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            stop("forward")
            return x.clone()
        @staticmethod
        def backward(ctx, grad):
            stop("backward")
            return grad
    for step in range(3):
        loss = net[10:](Stop.apply(net[:10](images))).square().mean()
        stop("between")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stop("step")
stop("after")
"""
)


def test_kill_9_leaves_no_file(disk_path):
    phases = ["forward", "between", "backward", "step"]
    with preloaded.Process(
        ["-c", PHASES, disk_path, *phases],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PENSTOCK_SLAB": "16MiB"},
    ) as parent:
        for line, phase in zip(parent.stdout, phases, strict=True):
            said, pid = line.split()
            assert said == phase
            deleted = [
                target
                for fd in os.listdir(f"/proc/{pid}/fd")
                if str(disk_path) in (target := os.readlink(f"/proc/{pid}/fd/{fd}"))
            ]
            assert deleted, "nothing was spilled, so nothing is shown"
            assert all("deleted" in target for target in deleted)
            os.kill(int(pid), signal.SIGKILL)
            wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), "it is dead")
            assert os.listdir(disk_path) == []
    assert parent.returncode == 0


def test_two_processes_in_one_directory(disk_path):
    script = (
        NETWORK
        + """
with penstock.offload(net, device_memory="8MiB", flash=sys.argv[1], flash_capacity="256MiB",
                      policy="all", floor="64KiB") as session:
    for step in range(5):
        loss = net(images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
"""
    )
    children = [start(script, disk_path) for _ in range(2)]
    said = [child.communicate(timeout=200) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert said[0][0].count("\n") == 5
    assert os.listdir(disk_path) == []


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_ends_a_wait_cleanly(disk_path):
    """On a disk so slow that the training thread waits for it, in pack, all the time."""
    script = (
        NETWORK
        + """
from penstock import Session, OffloadConfig
from penstock.store import ThrottledTier
config = OffloadConfig(device_memory="8MiB", flash=sys.argv[1], flash_capacity="256MiB",
                       policy="all", floor="64KiB")
from penstock.plan import Machine
machine = Machine("slow", 1e6, 1e6, 0.0, 1e9, 1e9)
slow = lambda tier: ThrottledTier(tier, write_bytes_per_s=10**6, read_bytes_per_s=10**6)
with Session(config, model=net, wrap_tier=slow, machine=machine):
    print("here", flush=True)
    net(images).square().mean().backward()
"""
    )
    child = start(script, disk_path)
    assert child.stdout.readline() == "here\n"
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, errors = child.communicate(timeout=200)
    assert "KeyboardInterrupt" in errors
    assert child.returncode != 0
    assert time.monotonic() - began < 30
    assert os.listdir(disk_path) == []
