"""The experiment, run: small networks, few steps; processes that die, and what is left."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import pytest
import torch
from test_characterize_results import SCHEMA

from penstock import WorkerError
from penstock.cli import main
from penstock.lab import zoo
from penstock.lab.characterize import Settings, characterize, checkpoint_methods, mix
from penstock.lab.characterize.machine import threads_per_process
from penstock.lab.characterize.networks import NETWORKS
from penstock.lab.characterize.pipeline_stages import loss_from_logits, split, tied_weight
from penstock.lab.characterize.rank_processes import RankProcesses, spawn
from penstock.lab.characterize.training import RankTraining

SMALL = {"scale": 0.05, "epochs": 1, "steps": 1, "seconds": 0.05}
FACTS = {"scale": 0.05, "parallel": "none", "world": 1, "device": "cpu", "threads": 1}


def children_of(pid):
    """Numbers of its processes that are not dead."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            fields = (each / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(each.name))
    return found


def workers():
    """Processes of the experiment that this one has started."""
    found = []
    for pid in children_of(os.getpid()):
        try:
            if b"penstock.lab.characterize" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_two_halves_compute_what_the_network_does(name):
    torch.manual_seed(0)
    case = NETWORKS[name]
    network = zoo.build(case.zoo, **case.settings(0.05)).eval()
    batch = zoo.example_batch(network, 2)
    first, second = split(network)
    logits = second(first(batch.inputs))
    assert torch.allclose(logits, network(batch.inputs), atol=1e-5)
    loss = loss_from_logits(network)(logits, batch.targets)
    assert torch.allclose(loss, network(*batch), atol=1e-5)
    mine = {id(each) for half in (first, second) for each in half.parameters()}
    assert mine <= {id(each) for each in network.parameters()}
    shared = {id(each) for each in first.parameters()} & {id(each) for each in second.parameters()}
    assert shared == ({id(tied_weight(network))} if case.optimizer == "adam" else set())


def test_a_run_from_the_command_line_leaves_its_results_and_nothing_else(disk_path, capsys):
    place, out = disk_path / "place", disk_path / "out"
    place.mkdir()
    words = ["characterize", "--networks", "resnet18", "--scale", "0.05", "--epochs", "1"]
    words += ["--steps", "2", "--colocate", "0", "--dir", str(place), "--out", str(out), "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    jsonschema.validate(told, SCHEMA)
    assert told == json.loads((out / "characterize.json").read_text(encoding="utf-8"))
    assert (out / "characterize.svg").exists()
    (record,) = told["networks"]
    (stage,) = record["stages"]
    assert stage["steps"] == 2
    for way in stage["checkpoint"].values():
        assert way["same_bits"]
        assert way["nbytes"] >= record["state_bytes"]
        assert way["stall_s"] <= way["latency_s"] or way is stage["checkpoint"]["async"]
    assert record["dram"]["written_bytes"] == 0  # the checkpoint has it
    assert not list(place.iterdir())
    assert not workers()


def test_different_networks_share_the_machine_and_each_is_saved_beside_the_others(
    disk_path, capsys, monkeypatch
):
    training, most, beside, ended, ends = set(), 0, [], 0, []
    send, receive = RankProcesses.send, RankProcesses.receive

    def sends(job, command, **arguments):
        nonlocal most, ended
        if command == "save":
            beside.append(len(training))
            ends.append(ended)
            ended = 0
        if "until" in arguments:
            training.add(job)
            most = max(most, len(training))
        send(job, command, **arguments)

    def receives(job):
        nonlocal ended
        ended += job in training
        training.discard(job)
        return receive(job)

    monkeypatch.setattr(RankProcesses, "send", sends)
    monkeypatch.setattr(RankProcesses, "receive", receives)
    names = ["resnet18", "gpt-neo"]
    words = ["characterize", "--networks", "--mix", *names, "--scale", "0.05", "--threads", "1"]
    words += ["--epochs", "2", "--steps", "1", "--dir", str(disk_path), "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    jsonschema.validate(told, SCHEMA)
    assert told["networks"] == []
    assert [(each["name"], each["threads"]) for each in told["mix"]["networks"]] == [
        (name, 1) for name in names
    ]
    assert most == 2
    # in each epoch both jobs are saved in three ways: first alone, then while the other trains
    assert beside == 2 * (6 * [0] + 6 * [1])
    # both end when they have trained together; then each only when it is to be saved
    beside_the_other = [2 + 1, 0, 0, 1, 0, 0]
    assert ends == [*6 * [0], *beside_the_other, 2, *5 * [0], *beside_the_other]
    assert told["claims"][-1]["verdict"] != "not measured"
    assert not list(disk_path.iterdir())
    assert not workers()


def test_one_of_a_mix_that_is_killed_ends_the_run_and_nothing_is_left(disk_path, monkeypatch):
    settings = Settings(networks=(), mix=("resnet18", "alexnet"), directory=str(disk_path), **SMALL)
    wait = mix.wait_for_any

    def kill(jobs, seconds):  # when all train
        os.kill(workers()[1], signal.SIGKILL)
        begun = time.monotonic()
        assert wait(jobs, 60)
        assert time.monotonic() - begun < 30
        return True

    monkeypatch.setattr(mix, "wait_for_any", kill)
    with pytest.raises(WorkerError, match=r"the job of .* in the mix .* was killed by signal 9"):
        characterize(settings)
    assert not list(disk_path.iterdir())
    assert not workers()


@pytest.mark.parametrize("part", ["model", "optimizer", None])
@pytest.mark.parametrize("way", ["torch_save", "sync"])
def test_a_restore_that_leaves_a_part_out_is_noticed(part, way, disk_path, monkeypatch):
    training = RankTraining("resnet18", scale=0.05, parallel="none", device=torch.device("cpu"))
    wanted = training.fingerprint()
    checkpoint_methods.save(training, way, disk_path / "way", steps=0, step_s=1.0)
    if part is not None:
        whole = checkpoint_methods._LOADS[way]

        def partly(training, folder):
            whole(training, folder)
            last = list(training.module.parameters())[-1]
            (last if part == "model" else training.optimizer.state[last]["momentum_buffer"]).zero_()

        monkeypatch.setitem(checkpoint_methods._LOADS, way, partly)
    with torch.no_grad():
        found = checkpoint_methods.restore(training, way, disk_path / "way", wanted=wanted)
    assert found["same"] is (part is None)


def test_help_needs_no_directory_that_can_be_written(monkeypatch, capsys):
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    with pytest.raises(SystemExit) as end:
        main(["characterize", "--help"])
    assert end.value.code == 0
    assert "--merge" in capsys.readouterr().out


def test_what_makes_no_sense_is_said_in_a_line(disk_path, capsys):
    (disk_path / "deep.json").write_text("[" * 100_000)
    (disk_path / "empty.json").write_text('{"schema": 1, "networks": [{}]}')
    for words, said in (
        (["--networks", "resnet99"], "'resnet99' is not one of"),
        (["--scale", "7"], "scale=7.0 is not between"),
        (["--dir", str(disk_path / "no")], "does not exist"),
        (["--merge", str(disk_path / "no.json")], "cannot be read"),
        (["--merge", str(disk_path / "deep.json")], "nested too deep"),
        (["--merge", str(disk_path / "empty.json")], "a file is not a whole result"),
    ):
        assert main(["characterize", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_worker_that_is_killed_ends_the_run_and_nothing_is_left(disk_path):
    settings = Settings(networks=("resnet18",), directory=str(disk_path), colocate=0, **SMALL)

    def kill():
        while not (found := workers()):
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(found[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerError, match=r"the job of ResNet-18 .* was killed by signal 9"):
        characterize(settings)
    killer.join()
    assert not list(disk_path.iterdir())
    assert not workers()


def test_processes_of_a_job_have_no_more_threads_together_than_there_are_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2, 4, 6, 8})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_per_process(world) for world in (2, 4, 8)] == [2, 1, 1]
    assert threads_per_process(1) == 0  # torch's default
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_process(2) == 0  # torch obeys it


@pytest.mark.slow
def test_one_of_two_ranks_that_dies_takes_the_other_along(disk_path):
    facts = FACTS | {"parallel": "ddp", "world": 2}
    with spawn("resnet18", "the job", disk_path, **facts) as team:
        team.receive()
        team.send("train", steps=100_000)
        os.kill(workers()[1], signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(WorkerError, match="killed by signal 9"):
            team.receive()
        assert time.monotonic() - begun < 30
    assert not workers()


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(disk_path):
    words = ["-m", "penstock", "characterize", "--networks", "resnet18", "--dir", str(disk_path)]
    run = subprocess.Popen([sys.executable, *words], stderr=subprocess.DEVNULL)
    while not (found := children_of(run.pid)):
        time.sleep(0.05)
    run.kill()
    run.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in found):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_leaves_nothing(how, disk_path):
    words = ["-m", "penstock", "characterize", "--networks", "resnet18", "--dir", str(disk_path)]
    run = subprocess.Popen([sys.executable, *words], stderr=subprocess.DEVNULL)
    while not (found := children_of(run.pid)):
        time.sleep(0.05)
    time.sleep(1)
    run.send_signal(how)
    assert run.wait(timeout=60) == 130
    assert not list(disk_path.iterdir())
    assert not [pid for pid in found if Path(f"/proc/{pid}/cmdline").exists()]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "pipeline"])
def test_two_processes_share_a_job(parallel, disk_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = Settings(
        networks=("gpt2", "googlenet"),
        parallel=parallel,
        directory=str(disk_path),
        colocate=0,
        **SMALL,
    )
    made = characterize(settings)
    jsonschema.validate(json.loads(json.dumps(made)), SCHEMA)
    assert made["machine"]["processes"] == 2
    share = max(1, made["machine"]["cores"] // 2)
    assert [each["threads"] for each in made["networks"]] == [share, share]
    assert [stage["stage"] for stage in made["networks"][0]["stages"]] == [
        "pre-training",
        "fine-tuning",
    ]
    assert all(way["same_bits"] for each in made["networks"] for stage in each["stages"]
               for way in stage["checkpoint"].values())  # fmt: skip
    assert not list(disk_path.iterdir())


@pytest.mark.slow
def test_a_pipeline_computes_the_losses_of_one_process(disk_path):
    losses = {}
    for parallel, world in (("none", 1), ("pipeline", 2)):
        own = disk_path / parallel
        own.mkdir()
        facts = FACTS | {"parallel": parallel, "world": world}
        with spawn("gpt-neo", "the job", own, **facts) as team:  # it has no dropout
            team.receive()
            told = [team.ask("train", steps=1) for _ in range(3)]
        losses[parallel] = [each[-1]["loss"] for each in told]
    assert losses["pipeline"] == pytest.approx(losses["none"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # on a busy machine: its neighbours are at work on all cores, and more
def test_all_nine_run_with_neighbours(disk_path):
    settings = Settings(directory=str(disk_path), **SMALL)
    made = characterize(settings)
    jsonschema.validate(json.loads(json.dumps(made)), SCHEMA)
    assert [each["name"] for each in made["networks"]] == list(NETWORKS)
    assert all(
        set(each["colocation"]) == {"copies", "cpu", "memory", "io"} for each in made["networks"]
    )
