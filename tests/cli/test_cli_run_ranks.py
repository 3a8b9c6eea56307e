"""``penstock run`` where a launcher starts several processes, and around a launcher itself."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from cli_processes import PENSTOCK, TIMEOUT_S, agent_of_two_ranks, end, start, start_under

import penstock
import preloaded
from penstock.report.run_file import read_run

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
BUDGET = ("--device-memory", "6MiB", "--flash", "spill", "--flash-capacity", "1GiB")
TORCHRUN = "torchrun --no-python ... penstock run ... train.py"
ACCELERATE = "accelerate launch --no_python ... penstock run ... train.py"
TRAIN = """
    import os, torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "MASTER_PORT" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        model(torch.ones(1024, 256)).square().mean().backward()
        optimizer.step()
    print("trained", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    """

SHARDED = """
    import os, torch
    from torch.distributed.fsdp import fully_shard
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    # 2 MiB of each weight on a rank: less would stay in memory
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        seed = torch.Generator().manual_seed(10 * step + int(os.environ["RANK"]))
        loss = model(torch.randn(16, 1024, generator=seed)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", repr(loss.item()), flush=True)
    for each in model.parameters():
        print("sum", each.to_local().double().sum().item(), flush=True)
    torch.distributed.destroy_process_group()
    """


@pytest.fixture
def work(disk_path):
    (disk_path / "spill").mkdir()
    (disk_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (disk_path / "sharded.py").write_text(textwrap.dedent(SHARDED))
    return disk_path


def check_files_of_ranks(work):
    """Each rank has whole files of its own, and there is none without a rank."""
    for rank in (0, 1):
        lines = (work / f"log.rank{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        kinds = [record["kind"] for record in records]
        assert (kinds[0], kinds[-1]) == ("header", "end")
        assert kinds.count("summary") == kinds.count("end") == 1
        (summary,) = (each["summary"] for each in records if each["kind"] == "summary")
        assert (summary["rank"], summary["steps"]) == (rank, 2)
        trace = json.loads((work / f"trace.rank{rank}.json").read_text())
        assert trace["traceEvents"]
    assert not (work / "log.jsonl").exists()
    assert not (work / "trace.json").exists()


def test_each_rank_writes_files_of_its_own_and_a_line_of_json(work):
    words = [*PENSTOCK["command"], "run", *BUDGET, "--event-log", "log.jsonl"]
    words += ["--trace", "trace.json", "--state", "kept", "--json", "train.py"]
    reader, writer = os.pipe()  # both write to one output
    ranks = [
        subprocess.Popen(
            words,
            cwd=work,
            env={**os.environ, **ONE_THREAD, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=writer,
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    os.close(writer)
    with os.fdopen(reader) as output:
        documents = [json.loads(line) for line in output]
    assert [process.wait() for process in ranks] == [0, 0]
    assert sorted(document["rank"] for document in documents) == [0, 1]
    assert {document["summary"]["steps"] for document in documents} == {2}
    check_files_of_ranks(work)
    assert sorted(each.name for each in work.glob("kept*")) == ["kept.rank0", "kept.rank1"]


def test_a_summary_names_its_rank_and_so_do_warnings(work):
    text = "\nraise __import__('penstock').BudgetError('no', slot='', limit_bytes=1, least_bytes=2)"
    with (work / "train.py").open("a") as script:
        script.write(text)
    words = ("train.py", "--policy=all")
    ranks = [
        start_under(work, *words, options=BUDGET, preload=True, RANK=str(rank), WORLD_SIZE="2")
        for rank in (0, 1)
    ]
    first, second = [end(process) for process in ranks]
    for rank, ended in enumerate((first, second)):
        assert f"\nPenstock  rank {rank}: 2 optimizer steps in " in ended.err
        assert ended.err.endswith(f"\npenstock: rank {rank}: error: no\n")
        assert ("note: --policy" in ended.err) == (rank == 0)
    environment = {"RANK": "x", "WORLD_SIZE": "2"}
    alone = end(start_under(work, *words, options=BUDGET, preload=True, **environment))
    assert "\nPenstock  2 optimizer steps in " in alone.err
    assert "penstock.core.errors.BudgetError: no\n" in alone.err
    assert alone.err.endswith("\npenstock: error: no\n")


def test_a_session_of_a_rank_writes_a_log_of_its_own(disk_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with penstock.offload(policy="keep", event_log=disk_path / "log.jsonl") as session:
        torch.ones(3, requires_grad=True).exp().sum().backward()
    (log,) = disk_path.iterdir()
    assert log.name == "log.rank1.jsonl"
    assert session.summary().rank == read_run(log).summary.rank == 1
    assert str(session.summary()).startswith("Penstock  rank 1: ")


@pytest.fixture
def agent():
    with agent_of_two_ranks() as ranks:
        yield ranks


def both_ranks(work, agent, *words, options):
    ranks = [start_under(work, *words, options=options, preload=True, **each) for each in agent]
    return [end(process) for process in ranks]


def test_rank_0_prints_one_summary_of_the_job_and_the_others_their_first_lines(work, agent):
    first, second = both_ranks(work, agent, "train.py", options=BUDGET)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    node = socket.gethostname()
    for rank, ended in enumerate((first, second)):
        assert f"\nPenstock  rank {rank}, local rank {rank} on {node}: 2 optimizer" in ended.err
        assert ("Resident bytes" in ended.err) == (rank == 0)
        assert ("\nRanks of the job\n" in ended.err) == (rank == 0)
    assert "\n2 of 2 ranks: " in first.err
    assert "by the 2 ranks on this machine at once" in first.err


def test_each_rank_has_its_own_directory_and_its_part_of_the_memory_of_a_node(work, agent):
    (work / "other").mkdir()
    (work / "show.py").write_text(
        "import torch; from penstock.session import _open; config = _open[0].config\n"
        "print(*config.directories, config.memory)"
    )
    options = ("--flash", "spill", "--flash", "other", "--flash-by-rank", "--memory", "64MiB/node")
    for rank, name in enumerate(("spill", "other")):
        each = {**agent[rank], "TORCHELASTIC_USE_AGENT_STORE": "False"}
        ended = end(start_under(work, "show.py", options=options, preload=True, **each))
        assert ended.out == f"{work / name} {32 * 2**20}\n", ended.err


def result_of(output):
    return [line for line in output.splitlines() if line.startswith(("loss", "sum"))]


def test_weights_and_states_of_fsdp2_on_flash_have_the_bits_of_plain_ranks_and_rank_0_tells_of_the_job(
    work, agent
):
    words = ("--weights", "flash", "--weights-memory", "5MiB", "--optimizer-state", "flash")
    words += ("--flash", "spill", "--flash-capacity", "1GiB", "--json")
    with agent_of_two_ranks() as other:
        pipe = subprocess.PIPE
        ranks = [
            preloaded.Process([work / "sharded.py"], stdout=pipe, env={**os.environ, **each})
            for each in other
        ]
        ours = both_ranks(work, agent, "sharded.py", options=words)
        plain = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    assert [ended.code for ended in ours] == [0, 0], ours[0].err + ours[1].err
    first, second = documents = [json.loads(ended.out) for ended in ours]
    least = 3 * 4 * 2 * 2**20  # each weight's part in each step
    for ended, expected, document in zip(ours, plain, documents, strict=True):
        assert result_of(ended.err) == result_of(expected) != []
        assert "AdamW: optimizer states: " in ended.err
        summary = document["summary"]
        assert {"weights", "gradients"} <= {line["client"] for line in summary["ssd_written"]}
        flows = {(line["stage"], line["tier"]): line["nbytes"] for line in summary["flows"]}
        assert flows["read", "weights"] >= least
    job = first["job"]
    assert [(line["rank"], line["steps"]) for line in job["ranks"]] == [(0, 3), (1, 3)]
    assert all(line["read_bytes"] >= least for line in job["ranks"])
    assert job["missing"] == []
    assert "job" not in second
    assert list((work / "spill").iterdir()) == []


@pytest.mark.slow
def test_torchrun_starts_penstock_in_each_process(work):
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    words = [*BUDGET, "--event-log", "log.jsonl", "--trace", "trace.json", "train.py"]
    ended = end(start([*launch, "--no-python", *PENSTOCK["command"], "run", *words], work))
    assert ended.code == 0, ended.err
    assert ended.err.count("2 of 2 ranks: ") == 1
    assert ended.err.count("by the 2 ranks on this machine at once") == 1
    check_files_of_ranks(work)


def test_around_a_launcher_it_says_what_to_do(work):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "train.py")
    ended = end(start_under(work, *launch, options=BUDGET, **ONE_THREAD))
    assert (ended.code, ended.out) == (0, "trained\n")
    told = ended.err.splitlines()[-1]
    assert told.startswith("penstock: nothing was offloaded: ")
    assert told.endswith(TORCHRUN)


@pytest.mark.parametrize(
    ("launcher", "command"), [("torchrun", TORCHRUN), ("accelerate", ACCELERATE), ("true", None)]
)
def test_a_program_in_place_of_a_script_is_refused_with_the_right_command(
    tmp_path, launcher, command
):
    program = tmp_path / "bin" / launcher
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    refused = end(start_under(tmp_path, launcher, "train.py", PATH=str(program.parent)))
    assert refused.code == 2
    first, second = refused.err.splitlines()
    assert f"can't open file '{tmp_path / launcher}'" in first
    assert second.startswith(f"penstock: {launcher!r} is a program, but ")
    assert command is None or second.endswith(command)


def test_a_launcher_that_is_named_by_its_path_is_known(work):
    (work / "accelerate").write_text("import torch\n")
    ended = end(start_under(work, "./accelerate", "launch", options=BUDGET, preload=True))
    assert ended.err.splitlines()[-1].endswith(ACCELERATE)
    (work / "other.py").write_text("import torch\ntorch.ones(3, requires_grad=True).sum()\n")
    ended = end(start_under(work, "other.py", options=BUDGET, preload=True))
    assert ended.err.splitlines()[-1].startswith("penstock: no step was seen: ")


def test_options_in_the_wrong_place_are_pointed_out_and_the_script_has_them(tmp_path):
    (tmp_path / "spill").mkdir()
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    words = ("--device-memory", "16MiB", "--flash=.", "--json", "--debug", "--resume", "--lr", "3")
    ended = end(start_under(tmp_path, "script.py", *words))
    assert (ended.code, ended.out) == (0, f"{list(words)}\n")
    (note, _) = ended.err.splitlines()
    assert note == (
        "penstock: note: --device-memory, --flash after script.py: these are passed to script.py;"
        " options for Penstock come before the script"
    )
    given = ("--device-memory", "1GiB", "--flash", "spill")
    assert "note" not in end(start_under(tmp_path, "script.py", *words, options=given)).err
