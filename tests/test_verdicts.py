"""Which figures of the papers are reproduced: the verdicts of the result files, one by one.

A benchmark that is run again may not change a verdict, add a line or drop one unseen: whoever does so
changes the table here, and says why in the change.
"""

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
WORDS = {True: "yes", False: "no", None: "--"}
"""``--``: a figure without an aim."""

PAPERS = """\
--  step of alexnet, batch 128, nothing moved: Titan X, cuDNN 4
--  step of overfeat, batch 128, nothing moved: Titan X, cuDNN 4
--  step of vgg11, batch 64, nothing moved: Titan X, cuDNN 4
--  step of googlenet, batch 128, nothing moved: Titan X, cuDNN 4
no  average memory of alexnet, batch 128, managed pool
yes average memory of overfeat, batch 128, managed pool
yes average memory of googlenet, batch 128, managed pool
--  the same of alexnet with the widths and normalizations of 2012
yes VGG-16, batch 256: static need
no  VGG-16, batch 256, 12 GB: loss of vdnn-dyn, layers joined as in the paper
yes VGG-16, batch 256, 12 GB: loss of vdnn-dyn, written behind as our runtime does
--  the same, joined, by vdnn-dyn's next configuration: only the maps of convolutions
yes the same: loss of auto
yes vgg116, batch 32: who trains it in 12 GB
yes vgg216, batch 32: who trains it in 12 GB
yes vgg316, batch 32: who trains it in 12 GB
yes vgg416, batch 32: who trains it in 12 GB
yes resnet1922: largest batch of flashneuron
no  resnet1922, batch 78: throughput of flashneuron over memory only
no  the same, cast to 16 bits and without zeros (assumed: 32.4 % of an output of ReLU, else a half)
yes resnet1922, batch 78: throughput of auto over flashneuron
yes densenet264: largest batch of flashneuron
no  densenet264, batch 780: throughput of flashneuron over memory only
no  the same, cast to 16 bits and without zeros (assumed: 30.9 % of an output of ReLU, else a half)
yes densenet264, batch 780: throughput of auto over flashneuron
yes bert-xlarge: largest batch of flashneuron
no  bert-xlarge, batch 65: throughput of flashneuron over memory only
no  the same, cast to 16 bits and without zeros (assumed: 47.9 % of an output of ReLU, else a half)
yes bert-xlarge, batch 65: throughput of auto over flashneuron
yes bert-large: largest batch of flashneuron
no  bert-large, batch 286: throughput of flashneuron over memory only
no  the same, cast to 16 bits and without zeros (assumed: 47.9 % of an output of ReLU, else a half)
yes bert-large, batch 286: throughput of auto over flashneuron
--  the mean of these gains of flashneuron
no  bert-base, batch 256: flashneuron's share of ideal
yes bert-base, batch 256: auto's share of ideal
no  bert-base, batch 256, kernels as traced: flashneuron's share of ideal
yes bert-base, batch 256, kernels as traced: auto's share of ideal
no  resnet152, batch 1280: flashneuron's share of ideal
no  resnet152, batch 1280: auto's share of ideal
no  resnet152, batch 1280, kernels as traced: flashneuron's share of ideal
yes resnet152, batch 1280, kernels as traced: auto's share of ideal
no  senet154, batch 1024: flashneuron's share of ideal
no  senet154, batch 1024: auto's share of ideal
yes senet154, batch 1024, kernels as traced: flashneuron's share of ideal
yes senet154, batch 1024, kernels as traced: auto's share of ideal
"""

OPTIMSTORE = """\
yes fitted    die over host
yes fitted    controller over host
yes fitted    die over controller
yes fitted    die over host, timelines
yes fitted    controller over host, timelines
yes fitted    energy, die, system
yes fitted    energy, controller, system
yes input     end to end
yes input     transfers of the baseline's iteration
yes input     written, B a parameter
yes input     life, M iterations of 10.3 B, levelled in the die
yes input     life, years, levelled in the die
yes predicted step on the die, s
yes predicted dies busy, controller
yes predicted drive's power without static
no  predicted drive's power with static
no  predicted life, M iterations of 10.3 B
no  predicted life, years
yes predicted momentum, die over host
no  predicted momentum gains most, adam least
"""


def figures(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["figures"]


def papers_lines():
    return [f"{WORDS[one['within']]:3} {one['what']}" for one in figures("papers")["lines"]]


def optimstore_lines():
    found = figures("optimstore")
    lines = list(found["anchors"].items())
    lines.append((found["order"]["paper"], found["order"]))
    return [f"{WORDS[one['within']]:3} {one['kind']:9} {name}" for name, one in lines]


def test_the_verdicts_on_vdnn_flashneuron_and_g10_are_these():
    assert papers_lines() == PAPERS.splitlines()


def test_the_verdicts_on_optimstore_are_these_and_what_was_fitted_says_so():
    assert optimstore_lines() == OPTIMSTORE.splitlines()


def cell(told):
    """Mean loss and accuracy on what was held out, as the manual has them."""
    if told["lost"]:
        return f"lost {told['lost']} of {len(told['losses'])}"
    return f"{told['loss_mean']:.3f}, {100 * told['accuracy_mean']:.1f} %"


def test_what_the_on_die_arithmetic_costs_is_in_the_manual_as_it_was_measured():
    text = (RESULTS.parents[1] / "docs" / "ssd.md").read_text(encoding="utf-8")
    found = figures("on_die_adam")
    digits, gpt = (found[name]["variants"] for name in ("digits", "gpt"))
    for name, told in digits.items():
        assert f"| {name} | {cell(told)} | {cell(gpt[name])} |" in text


def test_a_verdict_follows_from_its_figures():
    found = figures("optimstore")
    for one in found["anchors"].values():
        assert one["within"] is (abs(one["here"] / one["paper"] - 1) <= one["tolerance"])
    here = found["order"]["here"]
    right = max(here, key=here.get) == "momentum" and min(here, key=here.get) == "adam"
    assert found["order"]["within"] is right


def test_the_table_in_the_manual_has_the_figures_of_the_result_file():
    text = (RESULTS.parents[1] / "docs" / "ssd.md").read_text(encoding="utf-8")
    for name, one in figures("optimstore")["order"]["here"].items():
        assert f"| `{name}` | {one:.2f} |" in text
