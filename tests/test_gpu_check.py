"""``python -m penstock.testing.gpu`` and ``scripts/gpu_check``, with children that only pretend."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import penstock
from penstock.testing.gpu import command, contract, document, fact, figures, processes
from penstock.testing.gpu.fact import FactOutcome

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
SCRIPT = ROOT / "scripts" / "gpu_check"
PRETENDER = """\
#!{python}
import json, os, signal, sys, time

words, plan_file = sys.argv[1:], {plan!r}
plan = json.load(open(plan_file))
if words[:1] == ["-m"] and words[1] == "penstock.testing.gpu.child":
    what, names = words[2], []
    for word in words[3:]:
        if word.startswith("--"):
            break
        names.append(word)
    records = words[words.index("--records") + 1]
else:
    what, names = "tests", [word for word in words if word.endswith(".py")]
    if "--observe" in words:
        names = ["order"]
    (records,) = (word.partition("=")[2] for word in words if word.startswith("--records="))


def note(**record):
    with open(records, "a") as file:
        file.write(json.dumps(record) + "\\n")


def go(name):
    for act in plan.get(name, []):
        if act == "hang":
            note(hangs=os.getpid())
            open(plan_file + ".hangs", "w").close()
            time.sleep(600)
        elif act == "meet":
            open(plan_file + ".meets-" + name, "w").close()
            patience = time.monotonic() + 60
            while len([each for each in os.listdir(os.path.dirname(plan_file)) if ".meets-" in each]) < 2:
                if time.monotonic() > patience:
                    sys.exit(3)
                time.sleep(0.02)
        elif act == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif act == "say":
            print("Error: no such thing in /home/somebody/secret/place.py, line 3", flush=True)
        elif isinstance(act, int):
            sys.exit(act)
        else:
            note(**act)


def finding(name, outcome="holds"):
    said = dict(believed="It is so.", relies="x", found="", seconds=0.1)
    note(finding=dict(said, name=name, outcome=outcome))


if what == "machine":
    go("machine")
elif what == "contract":
    for name in names:
        note(begun=name)
        go(name)
        finding(name, "error" if name in plan["errors"] else "holds")
        if name in plan["errors"]:
            break
elif what == "figures":
    go(names[0])
else:
    go(os.path.basename(names[0]))
"""
MACHINE = {
    "devices": [{"name": "Some GPU (80 GB)", "memory_bytes": 80 << 30}],
    "lacking": "",
    "torch": "2.99",
    "driver": "600.1",
}


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """``pretend(name=[acts], ...)``: children do that in place of facts, files of tests and figures.

    Acts are records to note, ``"say"``, ``"hang"``, ``"die"``, ``"meet"`` (waits for another child that
    does), or an exit code.
    """
    plan, python = tmp_path / "plan.json", tmp_path / "python"
    python.write_text(PRETENDER.replace("{python}", PYTHON).replace("{plan!r}", repr(str(plan))))
    python.chmod(0o755)

    def acts(errors=(), **acts):
        plan.write_text(json.dumps({"machine": [MACHINE], "errors": errors} | acts))
        monkeypatch.setattr(sys, "executable", str(python))

    return acts


@pytest.fixture
def check(tmp_path, capsys):
    """``check(*arguments)``: the exit code, the lines on the terminal, and what is in the file."""

    def run(*arguments):
        out = tmp_path / "out"
        code = command.main(["--out", str(out), "--dir", str(tmp_path), *arguments])
        (file,) = out.glob("*.json")
        return code, capsys.readouterr().out.splitlines(), json.loads(file.read_text())

    return run


def passed(name):
    return {"test": {"test": name, "outcome": "passed", "seconds": 0.1, "said": ""}}


def parts(found):
    return {part["name"]: part["how"] for part in found["parts"]}


# -- the command ------------------------------------------------------------------------------------


def test_a_machine_without_an_accelerator_is_told_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main(["--out", str(tmp_path), "--dir", "/var/tmp"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("There is no accelerator to check: ")
    assert len(out.splitlines()) == 1
    assert not list(tmp_path.glob("*.json"))


def test_mps_is_refused_with_the_reason(tmp_path, capsys):
    arguments = ["--device", "mps", "--out", str(tmp_path), "--dir", "/var/tmp"]
    assert command.main(arguments) == 2
    assert "the memory of 'mps' is the CPU's, and it has no streams" in capsys.readouterr().out


def test_of_other_accelerators_the_contract_alone_is_checked(pretend, check):
    pretend(machine=[MACHINE | {"kind": "xpu"}])
    code, lines, found = check("--device", "xpu")
    assert code == 0
    assert found["contract"]
    assert list(parts(found)) == ["contract"]
    assert [line for line in lines if line.endswith("for CUDA only; left out")] == [
        "tests: for CUDA only; left out",
        "order: for CUDA only; left out",
        "figures: for CUDA only; left out",
    ]


def test_a_fact_that_needs_what_a_kind_of_device_has_not_is_not_examined(monkeypatch):
    """``torch.cpu`` has streams that do nothing, and no more."""
    monkeypatch.setattr(torch.cpu, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    for name, reason in (
        ("capture_is_known", "AttributeError: module 'torch.cpu' has no attribute 'CUDAGraph'"),
        ("blocking_event_sleeps", "TypeError: Event() takes no arguments"),
        ("registered_is_pinned", "this is about CUDA's own runtime"),
        ("set_device_first", "needs 2 devices"),
    ):
        finding = fact.judge(contract.named(name), "cpu")
        assert (finding.outcome, finding.found) == (FactOutcome.NOT_HERE, reason)
    assert fact.judge(contract.named("streams_are_values"), "cpu").outcome is FactOutcome.HOLDS
    assert fact.judge(contract.named("storages_are_aligned"), "cpu").outcome is FactOutcome.DIFFERS


def test_without_a_kernel_that_sleeps_products_keep_a_stream_busy(monkeypatch):
    products = []
    monkeypatch.setattr(torch, "mm", lambda *_, out: products.append(out))
    fact._busy_on(torch.device("cpu"))(30_000_000)
    assert len(products) == 3
    assert products[0] is products[2]


def test_all_is_well_if_everything_is(pretend, check):
    order = {"test": "a", "checked": 7, "complaints": ["mul reads what add writes"]}
    pretend(
        **{
            "link": [{"pinned_out_bytes_per_s": 5.5e10}],
            "test_gpu_link.py": [passed("a")],
            "order": [{"order": order}, passed("a"), 1],  # a test may fail because it is observed
        }
    )
    code, lines, found = check()
    assert code == 0
    assert found["complete"]
    one_device = [each.name for each in contract.FACTS if each.devices == 1]
    assert sorted(each["name"] for each in found["contract"]) == sorted(one_device)
    assert found["tests"] == [passed("a")["test"]]
    assert found["order"] == [order]
    assert "  mul reads what add writes" in lines
    assert set(found["figures"]) == {
        name for name, figure in figures.FIGURES.items() if figure.devices == 1
    }
    assert set(parts(found).values()) == {"done"}
    (shown,) = (line for line in lines if line.startswith("figure    link"))
    assert shown.endswith("pinned_out 55.00 GB/s")
    (named,) = (
        line for line in lines if line.startswith("All results are in penstock-gpu-some-gpu-80")
    )
    assert found["date"] in named


def test_a_part_that_hangs_dies_or_fails_takes_no_other_with_it(pretend, check, monkeypatch):
    first, second, third, fourth = (each.name for each in contract.FACTS[:4])
    pretend(
        errors=[third],
        **{
            second: ["say", "die"],
            "link": [{"nbytes": 5}, "hang"],
            "checkpoints": [{"failed": "RuntimeError: /opt/some/file.py is wrong"}, 1],
            "test_gpu_link.py": [passed("a"), {"begun": "b"}, "die"],
            "test_gpu_state.py": [passed("c"), 1],
            "test_gpu_pools.py": [5],
            "order": ["die"],
        },
    )
    monkeypatch.setattr(command, "_START_S", 0.1)
    monkeypatch.setattr(processes, "_GRACE_S", 0.1)
    for limit_s in (0.5, 2, 8, 32):  # until it has come so far
        short = replace(figures.FIGURES["link"], limit_s=limit_s)
        monkeypatch.setattr(command, "FIGURES", {**figures.FIGURES, "link": short})
        code, lines, found = check()
        if found["figures"]["link"]:
            break
    assert code == 1
    assert found["complete"]
    findings = {each["name"]: each for each in found["contract"]}
    assert findings[first]["outcome"] == "holds"
    assert findings[second]["outcome"] == "ended the process"
    assert findings[second]["found"].startswith(
        "died of SIGKILL: Error: no such thing in .../place.py"
    )
    assert findings[third]["outcome"] == "error"
    assert findings[fourth]["outcome"] == "holds"  # in a process of its own
    assert len(findings) == len([each for each in contract.FACTS if each.devices == 1])
    tests = {each["test"]: each for each in found["tests"]}
    assert tests["b"]["outcome"] == "failed"
    assert tests["b"]["said"] == "died of SIGKILL"
    assert tests["c"]["outcome"] == "passed"
    how = parts(found)
    assert how["tests/gpu/test_gpu_link.py"] == "died of SIGKILL"
    assert how["tests/gpu/test_gpu_state.py"] == "exit code 1"
    assert how["order"] == "died of SIGKILL"
    assert how["tests/gpu/test_gpu_pools.py"] == "done"
    assert how["link"].startswith("stopped after")
    assert found["figures"]["link"]["nbytes"] == 5
    assert any(line.startswith("NOT DONE  link: stopped after") for line in lines)
    text = json.dumps(found)
    assert "/opt" not in text
    assert "somebody" not in text


def test_files_of_tests_run_at_once(pretend, check):
    pretend(
        **{"test_gpu_link.py": ["meet", passed("a")], "test_gpu_state.py": ["meet", passed("b")]}
    )
    code, _, found = check("--parts", "tests", "--jobs", "30")
    assert code == 0
    assert sorted(each["test"] for each in found["tests"]) == ["a", "b"]


def test_what_there_is_no_time_for_is_left_out_and_said_to_be(pretend, check, monkeypatch):
    pretend()
    monkeypatch.setattr(command, "_START_S", 1000)
    code, _, found = check("--parts", "tests", "order", "figures")
    assert code == 1
    assert set(parts(found).values()) == {"left out: no time was left"}
    assert "link" in parts(found)
    assert "tests/gpu/test_gpu_link.py" in parts(found)


def test_an_installed_penstock_has_no_tests_and_says_so(pretend, check, monkeypatch, tmp_path):
    pretend()
    installed = tmp_path / "lib" / "site-packages" / "penstock" / "__init__.py"
    monkeypatch.setattr(command.penstock, "__file__", str(installed))
    code, lines, found = check("--parts", "tests")
    assert code == 0
    assert found["tests"] == []
    assert any("has no tests" in line for line in lines)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_there_is(pretend, tmp_path, number):
    pretend(**{"GPU-direct": [{"written_bytes": 7}, "hang"]})
    out = tmp_path / "out"
    program = (
        "import sys; from penstock.testing.gpu import command;"
        f" sys.executable = {sys.executable!r}; sys.exit(command.main(sys.argv[1:]))"
    )
    arguments = ["--out", str(out), "--dir", str(tmp_path), "--parts", "figures"]
    environment = os.environ | processes.child_environment()
    with subprocess.Popen([PYTHON, "-c", program, *arguments], env=environment) as running:
        patience = time.monotonic() + 120
        while not (tmp_path / "plan.json.hangs").exists():
            assert time.monotonic() < patience
            time.sleep(0.05)
        running.send_signal(number)
        assert running.wait(60) == 130
    (file,) = out.glob("*.json")
    found = json.loads(file.read_text())
    assert not found["complete"]
    assert found["figures"]["GPU-direct"]["written_bytes"] == 7
    assert parts(found)["GPU-direct"] == "interrupted"
    assert "GPU-direct, expandable segments" not in parts(found)
    with pytest.raises(ProcessLookupError):
        os.kill(found["figures"]["GPU-direct"]["hangs"], 0)


def test_a_driver_that_hangs_is_no_accelerator(pretend, tmp_path, capsys):
    pretend(machine=["say", "die"])
    assert command.main(["--out", str(tmp_path / "out"), "--dir", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert "the query failed (died of SIGKILL)" in out
    assert "somebody" not in out


def test_nothing_of_host_user_or_directories_is_sent(monkeypatch):
    monkeypatch.setattr(document.platform, "node", lambda: "node17.example.org")
    monkeypatch.setenv("USER", "somebody")
    said = {
        "a": ['File "/home/somebody/x/lib/python3.11/site-packages/torch/cuda.py", line 7'],
        "b": "somebody@node17: 3.5 GB/s of tests/gpu/test_x.py at node17.example.org",
        "c": 5,
    }
    assert document.scrub(said) == {
        "a": ['File ".../cuda.py", line 7'],
        "b": "<user>@<host>: 3.5 GB/s of tests/gpu/test_x.py at <host>",
        "c": 5,
    }


# -- facts ------------------------------------------------------------------------------------------


def test_facts_have_names_sentences_and_something_that_relies_on_them():
    assert len(contract.FACTS) >= 40
    assert max(Counter(each.name for each in contract.FACTS).values()) == 1
    source = Path(penstock.__file__).parent
    for each in contract.FACTS:
        assert each.believed.endswith("."), each.name
        assert each.believed[0].isupper(), each.name
        named = each.relies.replace(",", " ").replace(":", " ").split()[0]
        assert not named.endswith(".py") or (source / named).exists(), each.relies
        assert each.examine.__doc__, each.name


@pytest.fixture
def device(monkeypatch):
    """Torch as with one device that does nothing."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def judged(examine, **how):
    return fact.judge(fact.fact("It is so.", relies="this", **how)(examine))


@pytest.mark.usefixtures("device")
def test_a_fact_holds_differs_or_cannot_be_examined():
    assert judged(lambda gpu: None).outcome is FactOutcome.HOLDS

    def differs(gpu):
        fact.expect(False, "it is otherwise")

    found = judged(differs)
    assert (found.outcome, found.found, found.tries) == (FactOutcome.DIFFERS, "it is otherwise", 1)

    def fails(gpu):
        raise RuntimeError("CUDA error: of some kind\nCUDA kernel errors might be ...")

    found = judged(fails)
    assert found.outcome is FactOutcome.ERROR
    assert found.found == "RuntimeError: CUDA error: of some kind"
    found = judged(lambda gpu: None, devices=2)
    assert (found.outcome, found.found) == (FactOutcome.NOT_HERE, "needs 2 devices")


@pytest.mark.usefixtures("device")
def test_only_where_the_host_may_be_late_a_fact_is_tried_again_with_longer_delays():
    delays = []

    def late(gpu):
        delays.append(gpu._delay_s)
        fact.expect(len(delays) == 3, "the host was late")

    found = judged(late, late=True)
    assert (found.outcome, found.tries) == (FactOutcome.HOLDS, 3)
    assert found.found == "the host was late; then the host was late"
    assert delays == sorted(set(delays))
    delays.clear()
    assert judged(late).tries == 1


def test_a_threads_error_is_its_makers():
    with pytest.raises(ZeroDivisionError):
        fact.in_thread(lambda: 1 // 0)
    assert fact.in_thread(lambda: 5) == 5


# -- processes and the plugin -------------------------------------------------------------------------


def test_records_of_a_process_that_died_while_it_wrote_one_are_kept(tmp_path):
    records = tmp_path / "records"
    processes.append(records, {"a": 1})
    with records.open("a") as file:
        file.write('{"b": ')
    assert processes.read(records) == [{"a": 1}]
    assert processes.read(tmp_path / "none") == []


def test_a_process_that_does_not_end_is_killed_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.1)
    records = tmp_path / "records"
    program = (
        "import json, os, signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        " other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        " open(sys.argv[1], 'w').write(json.dumps({'other': other.pid}) + '\\n');"
        " print('working', flush=True); time.sleep(600)"
    )
    for limit_s in (0.5, 2, 8, 32):  # until it has come so far
        ended = processes.run(["-c", program, str(records)], records=records, limit_s=limit_s)
        if ended.records and ended.said:
            break
    assert ended.stopped
    assert not ended.well
    assert ended.how.startswith("stopped after")
    assert ended.said == ["working"]
    other = ended.records[-1]["other"]
    patience = time.monotonic() + 10
    while Path(f"/proc/{other}").exists() and "Z" not in Path(f"/proc/{other}/stat").read_text():
        assert time.monotonic() < patience
        time.sleep(0.05)


def test_the_plugin_notes_every_test_as_it_ends(tmp_path):
    (tmp_path / "test_some.py").write_text(
        """\
import os, pytest


def test_good():
    pass


def test_bad():
    assert 1 == 2, "of course"


def test_left():
    pytest.skip("not today")


@pytest.fixture
def broken():
    raise ValueError("broken")


def test_never_run(broken):
    pass


def test_crash():
    os._exit(3)
"""
    )
    records = tmp_path / "records"
    options = ["-p", "penstock.testing.gpu.plugin", "-p", "no:cacheprovider", "-c", "/dev/null"]
    ended = processes.run(
        ["-m", "pytest", *options, f"--records={records}", "test_some.py"],
        records=records,
        limit_s=60,
        directory=tmp_path,
        environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert ended.code == 3
    found = {
        each["test"]["test"].partition("::")[2]: each["test"]
        for each in ended.records
        if "test" in each
    }
    outcomes = {name: each["outcome"] for name, each in found.items()}
    assert outcomes == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_left": "skipped",
        "test_never_run": "failed",
    }
    assert found["test_bad"]["said"].startswith("AssertionError: of course")
    assert found["test_left"]["said"] == "Skipped: not today"
    assert found["test_never_run"]["said"] == "ValueError: broken"
    assert ended.records[-1]["begun"].endswith("::test_crash")


# -- scripts/gpu_check --------------------------------------------------------------------------------


def script(tmp_path, text, *arguments, **environment):
    python = tmp_path / "python"
    python.write_text(text)
    python.chmod(0o755)
    return subprocess.run(
        [SCRIPT, *arguments],
        check=False,
        env=os.environ | {"PYTHON": str(python), "OUT": str(tmp_path / "out")} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_script_runs_the_command_of_the_checkout(tmp_path):
    pretender = '#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "$PYTHONPATH" "$@"\nexit 130\n'
    done = script(tmp_path, pretender, "--parts", "contract", LIMIT_S="77")
    assert done.returncode == 130
    path, *words = done.stdout.split()
    assert path.split(":")[0] == str(ROOT / "src")
    out = str(tmp_path / "out")
    expected = ["-m", "penstock.testing.gpu", "--out", out, "--limit", "77", "--parts", "contract"]
    assert words == expected


def test_the_script_says_what_its_python_lacks(tmp_path):
    done = script(tmp_path, '#!/bin/sh\n[ "$1" = -c ] && echo rich, torch\nexit 0\n')
    assert done.returncode == 1
    assert "this Python lacks rich, torch" in done.stderr
