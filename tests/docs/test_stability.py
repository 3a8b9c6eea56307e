"""What ``docs/stability.md`` and ``CITATION.cff`` say is what the code has."""

import re
from pathlib import Path

import pytest

import penstock
from penstock.checkpoint import manifest
from penstock.codec import base
from penstock.data import index
from penstock.data.formats import packed
from penstock.observe import records
from penstock.optim import journal
from penstock.plan import machine, plan, profile
from penstock.swap import resume_record

ROOT = Path(__file__).parents[2]
VERSIONS = {
    "Checkpoint": [manifest.VERSION],
    "Record of a suspended job": [resume_record._SCHEMA],
    "Frames of codecs": [base._VERSION],
    "Packed data set": [packed.VERSION, index._VERSION],
    "Machine file": [machine.VERSION, plan.VERSION, profile.VERSION],
    "Journal of durable steps": [journal._VERSION],
    "Event log of a run": [records.SCHEMA],
}


@pytest.mark.parametrize("name", VERSIONS)
def test_the_versions_of_formats_are_those_of_the_page(name):
    text = (ROOT / "docs" / "stability.md").read_text()
    lines = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in text.splitlines()]
    row = next(each for each in lines if each.startswith(f"| {name}"))
    said = {int(each) for each in row.split("|")[2].split(",")}
    assert said == set(VERSIONS[name])


def test_the_citation_names_this_version():
    assert f"\nversion: {penstock.__version__}\n" in (ROOT / "CITATION.cff").read_text()
