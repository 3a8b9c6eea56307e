"""``penstock plan --script``: a script is stopped before its first update, and planned for."""

import json
import textwrap
from pathlib import Path

import pytest
from cli_processes import PENSTOCK, end, start, start_plain, start_under

from penstock.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
MIB = 2**20
WHOLE = ("--weights", "flash", "--machine", "h200", "--json")

TRAIN = """
    import argparse
    import atexit
    import os
    import sys

    assert "torch" not in sys.modules and "numpy" not in sys.modules
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--how", default="plain")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    inputs = torch.randn(1024, 512)
    adam = torch.optim.AdamW if options.how != "unknown" else torch.optim.LBFGS
    optimizer = adam(model.parameters())

    def checksum():
        return sum(p.double().sum().item() for p in model.parameters())

    def loss_of():
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    def step():
        for _ in range(options.passes):
            loss_of()
        if options.how == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    model(inputs[:2])  # as lazy modules need it
    before = checksum()
    print("begun")
    open("before", "w").close()
    atexit.register(lambda: print("unchanged" if checksum() == before else "changed"))
    if options.how == "count":
        storages = {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and storage.nbytes() >= 2**20:
                storages[storage.data_ptr()] = tensor, storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(inputs).square().mean()
        print(sum(nbytes for _, nbytes in storages.values()), len(storages))
        sys.exit()
    if options.how == "swallow":
        for _ in range(options.steps):
            try:
                step()
            except Exception as error:
                print("swallowed", error)
    elif options.how == "bare":
        while True:
            try:
                step()
            except:
                print("caught", checksum() == before)
    elif options.how == "closure":
        def closure():
            optimizer.zero_grad()
            return loss_of()
        optimizer.step(closure)
    elif options.how == "inside":
        optimizers = {p: torch.optim.SGD([p], lr=1) for p in model.parameters()}

        def update(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            loss_of()
    elif options.how == "fail":
        loss_of()
        raise ValueError("no data")
    elif options.how == "evaluate":
        with torch.no_grad():
            model(inputs)
    elif options.how == "backward":
        loss_of()
        sys.exit(3)
    elif options.how == "fork":
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=step)
        child.start()
        child.join()
        print("child", child.exitcode)
    elif options.how == "spawn":
        torch.multiprocessing.spawn(print, nprocs=2)
    else:
        try:
            for _ in range(options.steps):
                step()
        finally:
            print("cleaned up")
    open("after", "w").close()
    """


@pytest.fixture
def work(disk_path):
    (disk_path / "train.py").write_text(textwrap.dedent(TRAIN))
    return disk_path


def start_plan(cwd, *words, options=(), preload=True):
    command = [*PENSTOCK["command"], "plan", *options, "--script", *map(str, words)]
    return start(command, cwd, preload=preload, OMP_NUM_THREADS="1")


def planned(cwd, *each, preload=True):
    """Documents of several scripts that are planned for at the same time, and what they have printed."""
    processes = [
        start_plan(cwd, *words, options=("--json", *options), preload=preload)
        for words, options in each
    ]
    ends = [end(process) for process in processes]
    for one in ends:
        assert one.code == 0, one.err
    return [(json.loads(one.out), one.err) for one in ends]


def test_the_script_is_stopped_before_its_first_update_and_what_it_saved_is_exact(work):
    count = start_plain(work, "train.py", "--how", "count", preload=True)
    [(plan, err)] = planned(work, (["train.py"], ("--tbw", "1TB")), preload=False)
    [(several, several_err)] = planned(
        work, (["train.py", "--passes", "3", "--how", "swallow"], ())
    )
    nbytes, slots = map(int, end(count).out.splitlines()[1].split())
    assert plan["saved"]["bytes"] == nbytes > 20 * MIB
    assert plan["saved"]["slots"] == slots
    assert several["saved"]["bytes"] == 3 * nbytes
    assert several["saved"]["peak_bytes"] == plan["saved"]["peak_bytes"]
    assert (plan["passes"], plan["samples"], plan["tokens"]) == (1, 1024, None)
    assert (several["passes"], several["samples"]) == (3, 3 * 1024)
    for text in (err, several_err):
        assert text.splitlines()[1] == "begun"
        assert text.splitlines()[-1] == "unchanged"
    assert "cleaned up\n" in err
    assert "swallowed" not in several_err
    assert sorted(one.name for one in work.iterdir()) == ["before", "train.py"]

    parameters = 6 * (512 + 1) * 512 + 513 * 10
    assert plan["weight_bytes"] == plan["gradient_bytes"] == 4 * parameters
    assert plan["optimizer"] == "AdamW"
    assert plan["state_bytes"] == 8 * parameters
    whole, *smaller = plan["budgets"]
    assert whole["budget_bytes"] == plan["saved"]["peak_bytes"]
    assert whole["spilled_bytes"] == 0
    assert [one["name"] for one in smaller][-1] == "least"
    assert smaller[-1]["budget_bytes"] == plan["least_bytes"] < whole["budget_bytes"] / 2
    for one in smaller:
        assert one["fits"]
        assert 0 < one["device_peak_bytes"] <= one["budget_bytes"]
        assert one["spilled_bytes"] > 0
        assert one["steps_to_wear_out"] == 10**12 // one["written_bytes"]
        assert one["step_ns"] >= whole["step_ns"] > 0
    states, both = plan["on_flash"]
    assert states["hiding_units"] < both["hiding_units"]
    assert states["disk_bytes"] < both["disk_bytes"]


def test_steps_with_a_closure_and_inside_backward_are_stopped_too_and_bare_excepts(work):
    found = planned(
        work, *((["train.py", "--how", how], ()) for how in ("closure", "inside", "bare"))
    )
    for plan, _ in found:
        assert plan["passes"] == 1
        assert plan["saved"]["bytes"] > 20 * MIB
    closure, inside, bare = (err.splitlines() for _, err in found)
    assert closure[-1] == inside[-1] == "unchanged"
    assert set(bare[2:-1]) == {"caught True"}
    assert "catches every exception" in bare[-1]
    assert not (work / "after").exists()


def test_a_later_step_is_planned_for_after_those_before_it_were_trained(work):
    words, machine = ["train.py", "--passes", "2"], ("--machine", "cpu")
    [(second, err), (named, _)] = planned(
        work, (words, ("--step", "2")), (words, (*machine, "--memory", "12MiB,1MiB"))
    )
    assert (second["step"], second["passes"]) == (2, 2)
    assert err.splitlines()[-1] == "changed"
    assert second["saved"] == named["saved"]
    assert named["machine"].startswith("Two cores")
    assert [(one["budget_bytes"], one["fits"]) for one in named["budgets"][1:]] == [
        (12 * MIB, True),
        (MIB, False),
    ]


def test_the_plan_is_what_a_run_of_the_script_then_does(work):
    budget = ("--memory", "10MiB", "--policy", "ranked")
    flash = ("--flash", ".", "--flash-capacity", "1GiB", "--codec", "none", "--json")
    rates = ("--machine", "h200")  # while the disk is very slow, not all that is spilled is written
    [(plan, _)] = planned(work, (["train.py", "--passes", "2"], (*budget, *rates)))
    options = [*budget, *flash]
    under = end(start_under(work, "train.py", "--passes", "2", options=options, preload=True))
    assert under.code == 0, under.err
    summary = json.loads(under.out)["summary"]
    (device,) = (line for line in summary["memory"] if line["memory"] == "device")
    assert device["peak_bytes"] <= 10 * MIB
    (foretold,) = plan["budgets"][1:]
    lines = {line["what"]: line for line in summary["prediction"]["lines"]}
    assert foretold["spilled_bytes"] == foretold["written_bytes"] > 0
    assert lines["flash written"]["measured"] == foretold["written_bytes"]
    assert foretold["device_peak_bytes"] == lines["device peak"]["predicted"]
    assert summary["saved_peak_bytes"] == plan["saved"]["peak_bytes"]


@pytest.mark.parametrize(
    ("options", "gradients"),
    [(("--memory", "1GiB"), 0), (("--memory", "1GiB", "--weights-memory", "64MiB"), 6 * MIB)],
    ids=str,
)
def test_gradients_wait_in_memory_under_a_run_if_the_plan_of_the_script_says_so(
    work, options, gradients
):
    [(plan, _)] = planned(work, (["train.py"], (*WHOLE, *options)))
    assert plan["step"]["moved"]["gradients_written"] == gradients
    flash = ("--optimizer-state", "flash", "--flash", ".", "--weights", "flash", "--json")
    under = end(start_under(work, "train.py", options=[*flash, *options], preload=True))
    assert under.code == 0, under.err
    flows = json.loads(under.out)["summary"]["flows"]
    written = sum(f["nbytes"] for f in flows if (f["tier"], f["stage"]) == ("gradients", "write"))
    assert written == 5 * gradients


def test_scripts_without_a_step_are_told_apart(work):
    (work / "empty.py").write_text("print('nothing')\n")
    cases = {
        (
            "train.py",
            "--how",
            "fail",
        ): "train.py ended, by ValueError before step 1 of an optimizer",
        (
            "train.py",
            "--how",
            "evaluate",
        ): "no backward and no step() of a torch optimizer was seen",
        ("train.py", "--how", "backward"): "ended, by sys.exit(3) before step 1 of an optimizer, so"
        " there is nothing to plan: 1 backward",
        ("train.py", "--how", "fork"): "processes that it starts, such as ranks, are not profiled",
        ("train.py", "--how", "spawn"): "the script starts processes of its own",
        ("empty.py",): "it did not import torch",
    }
    processes = [start_plan(work, *words) for words in cases]
    for process, (words, message) in zip(processes, cases.items(), strict=True):
        ended = end(process)
        assert (ended.code, ended.out) == (1, ""), words
        assert message in ended.err
        assert ended.err.count("penstock: error:") == 1
        if "fail" in words:
            assert '    raise ValueError("no data")\nValueError: no data\n' in ended.err
        if "fork" in words:
            assert "child 1\n" in ended.err
            assert "only a script that trains in its own process" in ended.err
            assert "\nunchanged\n" in ended.err


def test_the_text_answers_with_a_sentence_a_table_and_a_picture(work):
    processes = [
        start_plan(
            work, EXAMPLES / "plain_loop.py", "--batch", "4", options=("--plot", "cost.svg")
        ),
        start_plan(work, "train.py", "--how", "unknown", options=("--memory", "8MiB")),
        start_plan(
            *(work, "-m", "train", "--how", "clip"),
            options=(*WHOLE, "--gradient-memory", "0B"),
        ),
    ]
    loop, unknown, whole = [end(process) for process in processes]
    assert loop.code == 0, loop.err
    assert "the first step, 2 forwards and backwards of 1024 tokens" in loop.out
    assert "saved for backward:" in loop.out
    assert "What a budget costs, for each step of the optimizer" in loop.out
    assert "\npenstock run --memory " in loop.out
    assert "tokens a step" in loop.out
    assert "</svg>" in (work / "cost.svg").read_text()
    assert unknown.code == 0, unknown.err
    assert "states that are not known" in unknown.out
    assert "LBFGS is not element-wise" in unknown.out
    assert whole.code == 0, whole.err
    step = json.loads(whole.out)
    assert (step["device"], step["update"], step["clips"]) == ("cpu", "step", True)
    assert step["network"] == "-m train --how clip"
    moved = step["step"]["moved"]  # beside the last layer's gradient, which is short
    assert (moved["gradients_read"], moved["gradients_written"]) == (18 * MIB, 12 * MIB)
    assert (step["units"], step["unit"], step["optimizer"]) == (1024, "samples", "AdamW")
    assert step["step"]["weight_bytes"] == 4 * (6 * 513 * 512 + 513 * 10)
    assert step["step"]["disk_bytes"] > 2 * step["step"]["weight_bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet50", "--script", "x.py"], "NETWORK does not go with --script"),
        (
            ["--batch", "4", "--script", "x.py"],
            "--batch does not go with --script: the script says",
        ),
        (["--optimizer", "adam", "--script", "x.py"], "--optimizer does not go with --script"),
        (["--format", "int8", "--script", "x.py"], "--format needs --weights flash or --ranks"),
        (["--parts", "2", "--script", "x.py"], "--parts does not go with --script: the script has"),
        (["--clip", "--script", "x.py"], "--clip does not go with --script: it is noted if"),
        (["--memory", "8MiB,x", "--script", "x.py"], "--memory"),
        (["--step", "0", "--script", "x.py"], "--step is 0; it must be 1 or more"),
        (["--policy", "all", "--script", "x.py"], "--policy all does not go with --script"),
        (["--machine", "cpu", "--flash", ".", "--script", "x.py"], "give one of the two"),
        (["--weights", "flash", "--plot", "a.svg", "--script", "x.py"], "--plot: there is no plot"),
        (["--script"], "--script: nothing to run"),
        (["--step", "2", "resnet50"], "--step needs --script"),
        ([], "plan needs NETWORK and --machine, or --script"),
        (["resnet50", "--batch", "1"], "--machine is missing"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_runs(words, message, capsys):
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_a_launcher_and_a_missing_script_are_refused(monkeypatch, capsys, disk_path):
    monkeypatch.chdir(disk_path)
    with pytest.raises(SystemExit) as left:
        main(["plan", "--script", "missing.py"])
    assert left.value.code == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["plan", "--script", "x.py"]) == 2
    assert "a launcher has started several" in capsys.readouterr().err
