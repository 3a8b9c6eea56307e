"""The notebooks of ``examples/notebooks`` run: cell by cell, in a process and folder of their own."""

import json
from pathlib import Path

import pytest

import preloaded

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
RUN = """
import json, sys

names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"], start=1):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
"""


def named():
    return [pytest.param(notebook, id=notebook.stem) for notebook in NOTEBOOKS]


@pytest.mark.parametrize("notebook", named())
def test_the_cells_of_a_notebook_run_in_order(notebook, disk_path):
    program = disk_path / "cells.py"
    program.write_text(RUN)
    work = disk_path / "work"
    work.mkdir()
    done = preloaded.run(["-W", "error", program, notebook], cwd=work)
    assert done.returncode == 0, done.stderr
    assert "Penstock" in done.stdout  # a summary
    for cell in json.loads(notebook.read_text())["cells"]:
        if "(memory.png)" in "".join(cell["source"]):
            assert (work / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("notebook", named())
def test_a_notebook_has_no_output_of_the_machine_where_it_was_written(notebook):
    document = json.loads(notebook.read_text())
    assert document["nbformat"] == 4
    for cell in document["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert "/root" not in "".join(cell["source"])


def test_the_manual_leads_to_each_notebook():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert NOTEBOOKS
    for notebook in NOTEBOOKS:
        assert f"(../examples/notebooks/{notebook.name})" in pages
