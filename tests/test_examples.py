"""The scripts in ``examples/`` know nothing of Penstock, and print the same bits under it."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.jobs.description import load

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed(name, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")]


@pytest.mark.filterwarnings("ignore:(?!.*budget)")  # what others warn of is theirs
@pytest.mark.parametrize(
    ("name", "batch", "budget", "needs"),
    [
        ("plain_loop.py", "1", "2MiB", ()),
        ("hf_trainer.py", "2", "4MiB", ("transformers", "accelerate")),
        ("lightning_trainer.py", "2", "4MiB", ("lightning", "sklearn")),
    ],
)
def test_an_example_prints_the_same_within_a_session(
    disk_path, monkeypatch, capsys, one_thread, *, name, batch, budget, needs
):
    for each in needs:
        pytest.importorskip(each)
    monkeypatch.setattr(sys, "argv", [name, "--steps", "2", "--batch", batch])
    without = printed(name, capsys)
    assert without[-1].startswith("sha256 of all weights: ")
    with penstock.offload(
        device_memory=budget, flash=disk_path, flash_capacity="1GiB", floor="16KiB"
    ) as session:
        assert printed(name, capsys) == without
    assert session.summary().ssd_written_bytes
    assert not any(disk_path.iterdir())


def test_the_jobs_of_the_example_are_described_rightly():
    description = load(str(EXAMPLES / "jobs.toml"))
    assert [job.name for job in description.jobs] == ["first", "second"]


@pytest.mark.slow
def test_the_jobs_of_the_example_print_what_they_print_alone(disk_path):
    for name in ("jobs.toml", "plain_loop.py"):
        (disk_path / name).write_bytes((EXAMPLES / name).read_bytes())
    command = [sys.executable, "-m", "penstock", "jobs", "run", "jobs.toml", "--state", "state"]
    subprocess.run(command, cwd=disk_path, check=True, timeout=280)
    for seed, name in enumerate(("first", "second"), start=1):
        words = [sys.executable, "plain_loop.py", "--seed", str(seed), "--steps", "8"]
        alone = subprocess.run(words, cwd=disk_path, check=True, stdout=subprocess.PIPE, text=True)
        log = (disk_path / "state" / "logs" / f"{name}.log").read_text()
        assert alone.stdout.splitlines()[-1] in log
