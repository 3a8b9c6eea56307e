"""``penstock run`` with scripts that train. Loading torch takes long: few processes, many checks.

What torch does with the environment, and memory, is looked at in processes that load it themselves.
"""

import json
import re
import signal
import textwrap

import pytest
from cli_processes import end, start_plain, start_under

TRAIN = """
    import os
    import sys

    assert "torch" not in sys.modules and "numpy" not in sys.modules
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir("elsewhere")  # what was named on the command line stays where it was

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Noise(Dataset):
        def __len__(self):
            return 3 * 64

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(index)
            return torch.randn(512, generator=generator), index % 10

    print(torch.get_num_threads())
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Noise(), batch_size=64, num_workers=1)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs.repeat(16, 1)), labels.repeat(16))
        loss.backward()
        if "clip" in sys.argv:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()), repr(sum(p.sum().item() for p in model.parameters())))
        if "fail" in sys.argv:
            loss.backward()
    if "wait" in sys.argv:
        print("waiting", flush=True)
        import time; time.sleep(60)
    """
STATES = ("--optimizer-state", "flash", "--optimizer-memory", "1GiB", "--gradient-memory", "2MiB")
BUDGET = ("--device-memory", "6MiB", "--flash", "spill", "--flash-capacity", "1GiB")


@pytest.fixture
def work(disk_path):
    for name in ("elsewhere", "spill"):
        (disk_path / name).mkdir()
    (disk_path / "train.py").write_text(textwrap.dedent(TRAIN))
    return disk_path


def test_an_unmodified_script_prints_the_same_bits(work):
    log = ("--event-log", "log.jsonl", "--event-log-size", "64MiB", "--event-log-files", "2")
    outputs = ("--trace", "trace.json", *log, "--tbw", "600TB")
    processes = [
        start_plain(work, "train.py"),
        start_under(work, "train.py", options=BUDGET),
        start_under(work, "-m", "train", options=[*BUDGET, *outputs, "--json"], preload=True),
        start_under(work, "train.py", options=[*BUDGET, *STATES], preload=True),
    ]
    plain, under, as_json, states = [end(process) for process in processes]
    assert (states.code, states.out) == (0, plain.out)
    assert "penstock: AdamW: optimizer states: 3.00 MiB of gradients written" in states.err
    assert states.err.count("penstock: AdamW: AdamW on flash takes more memory than in memory") == 1
    assert "takes more memory" not in under.err
    assert (plain.code, plain.err) == (0, "")
    assert plain.out.startswith("1\n")  # OMP_NUM_THREADS came in time
    assert (under.code, under.out) == (0, plain.out)
    assert "3 optimizer steps" in under.err
    assert "written to the SSD" in under.err
    assert (as_json.code, as_json.err) == (0, plain.out)
    document = json.loads(as_json.out)
    assert document["command"] == ["train"]
    summary = document["summary"]
    assert summary["steps"] == 3
    assert any(place["action"] == "offload" and place["nbytes"] for place in summary["places"])
    assert summary["tbw_bytes"] == 600 * 10**12
    (device,) = (line for line in summary["memory"] if line["memory"] == "device")
    assert 0 < device["peak_bytes"] <= device["budget_bytes"] == 6 * 2**20
    trace = json.loads((work / "trace.json").read_text())
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"} >= {"device"}
    assert trace["otherData"]["command"] == "train"
    records = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    assert records[0]["kind"] == "header"
    assert records[-1]["kind"] == "end"
    assert list((work / "spill").iterdir()) == list((work / "elsewhere").iterdir()) == []


def test_weights_on_flash_take_gradients_along_and_a_clipped_script_prints_the_same_bits(work):
    weights = ("--weights", "flash", "--weights-memory", "3MiB", "--flash", "spill")
    processes = [
        start_plain(work, "train.py", "clip", preload=True),
        start_under(work, "train.py", "clip", options=[*weights, *STATES[:2]], preload=True),
    ]
    plain, under = [end(process) for process in processes]
    assert (under.code, under.out) == (0, plain.out)
    assert "penstock: AdamW: optimizer states: 4.00 MiB of gradients written in a step" in under.err
    assert list((work / "spill").iterdir()) == []


LARGE = """
    import atexit
    import sys

    def tell_memory():
        lines = dict(line.split(":") for line in open("/proc/self/status"))
        print("RssAnon", int(lines["RssAnon"].split()[0]) // 1024, file=sys.stderr)

    atexit.register(tell_memory)  # what is registered first is called last
    import torch
    from torch import nn

    torch.manual_seed(0)
    nn.Linear(8, 8)(torch.randn(1, 8))  # a small model runs before the large one is there
    tell_memory()
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(32)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model = nn.Sequential(model, nn.Linear(2048, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tell_memory()
    for _ in range(2):
        loss = model(torch.randn(4, 2048)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    tell_memory()
    """


def test_a_script_builds_a_model_that_does_not_fit_in_memory(work):
    (work / "large.py").write_text(textwrap.dedent(LARGE))
    weights = ("--weights", "flash", "--weights-memory", "64MiB", "--flash", "spill")
    processes = [
        start_plain(work, "large.py"),
        start_under(work, "large.py", options=[*weights, "--optimizer-state", "flash"]),
    ]
    plain, under = [end(process) for process in processes]
    assert (under.code, under.out) == (0, plain.out)
    more = []
    for text in (plain.err, under.err):
        before, *later = map(int, re.findall("RssAnon ([0-9]+)", text))
        more.append([mib - before for mib in later])
    (plain_mib, *_), (built_mib, trained_mib, closed_mib) = more
    assert plain_mib > 500  # MiB, as its weights
    assert built_mib < 400
    assert trained_mib < 300
    assert closed_mib < 300
    assert list((work / "spill").iterdir()) == []


def test_a_failing_script_fails_as_it_would_and_the_summary_comes_after(work):
    processes = [
        start_plain(work, "train.py", "fail", preload=True),
        start_under(work, "train.py", "fail", options=BUDGET, preload=True),
    ]
    plain, under = [end(process) for process in processes]
    assert plain.code == under.code == 1
    assert "Trying to backward through the graph a second time" in plain.err
    assert under.out == plain.out
    assert under.err.startswith(plain.err)
    assert "Resident bytes" in under.err.removeprefix(plain.err)
    assert list((work / "spill").iterdir()) == []


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_ends_a_training_run_with_a_summary(work):
    process = start_under(work, "train.py", "wait", options=BUDGET, preload=True)
    while process.stdout.readline() not in ("waiting\n", ""):
        pass
    process.send_signal(signal.SIGINT)
    interrupted = end(process)
    assert interrupted.code == -signal.SIGINT
    assert "KeyboardInterrupt\n\nPenstock  3 optimizer steps" in interrupted.err
    assert list((work / "spill").iterdir()) == []


def test_what_cannot_be_opened_ends_the_script_at_its_import_of_torch(work):
    text = "try:\n    import torch\nexcept Exception:\n    pass\nprint('never')"
    (work / "script.py").write_text(text)
    options = ("--device-memory", "6MiB", "--flash", "spill", "--flash-capacity", "1000TB")
    refused = end(start_under(work, "script.py", options=options, preload=True))
    assert (refused.code, refused.out) == (1, "")
    (error,) = refused.err.splitlines()
    assert error.startswith("penstock: error: ")
    assert "lower its capacity" in error


def test_scripts_that_use_torch_otherwise(work):
    """Huge pages under large tensors; no backward; an environment variable that was set before."""
    (work / "script.py").write_text(
        textwrap.dedent("""
        import os, threading
        import torch
        from penstock.cli import system
        print(os.environ["THP_MEM_ALLOC_ENABLE"])
        tensor = torch.ones(1 << 23)
        print(system.anon_huge_bytes(tensor.data_ptr()) > 1 << 23)
        saved = torch.nn.Linear(1024, 1024)(torch.randn(1024, 1024)).relu()
        """)
    )
    threaded = (
        "import threading\nt = threading.Thread(target=__import__, args=['torch'], name='T')\n"
    )
    (work / "threaded.py").write_text(threaded + "t.start()\nt.join()\nimport torch\n")
    processes = [
        start_under(work, "script.py", options=BUDGET),
        start_under(work, "threaded.py", options=BUDGET, preload=True),
    ]
    script, thread = [end(process) for process in processes]
    assert (script.code, script.out) == (0, "1\nTrue\n")
    assert "0 optimizer steps" in script.err
    assert (thread.code, thread.out) == (0, "")
    assert "torch was first imported in thread 'T'" in thread.err
