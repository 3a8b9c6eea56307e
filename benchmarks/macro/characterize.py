"""The poster's experiment: nine networks at full size, scaled down beside neighbours, and by two ranks.

``full``: the published networks, three epochs, saved in three ways, with nothing beside them: what a
checkpoint every 100 steps holds training up; and then five of them at the same time. ``mix``: the other
four at the same time, three epochs of three steps, with one thread each. (With threads for all cores,
as in the mix of five, jobs wait for each other's threads: a step of BERT-Base took 15 times as long as
alone. All nine at once do not fit in 25 GB: of each, alone and idle, 23 GB were resident in all.)
``scaled``: a quarter of depths and widths, three epochs, with copies and programs beside each job.
``ddp`` and ``pipeline``: a quarter too, one epoch, some of the networks, each trained by two processes
with nothing beside them. Each network is a part (``--parts``), so that several sittings, each ended by
``--limit``, make one result; the parts are put together as ``penstock characterize --merge`` does.

    python benchmarks/macro/characterize.py --dir /nvme/scratch --parts parts.jsonl --limit 200
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.table import Table

import _results
from _parts import OutOfTimeError, Parts
from penstock.lab.characterize import Settings, characterize, merge, plot, table
from penstock.lab.characterize.networks import NETWORKS
from penstock.report.table import to_text

ASKED = {
    "full": {"scale": 1.0, "epochs": 3, "steps": 5, "colocate": 0},
    "mix": {"scale": 1.0, "epochs": 3, "steps": 3, "colocate": 0, "threads": 1},
    "scaled": {"scale": 0.25, "epochs": 3, "colocate": 1},
    "ddp": {"scale": 0.25, "epochs": 1, "colocate": 0, "parallel": "ddp"},
    "pipeline": {"scale": 0.25, "epochs": 1, "colocate": 0, "parallel": "pipeline"},
}
BY_RANKS = ("bert-base", "gpt2", "resnet18", "alexnet")
"""Networks that two processes train."""
MIX = ("bert-base", "gpt2", "resnet18", "resnet50", "alexnet")
"""Networks that share the machine at full size."""
MIXES = {"full": MIX, "mix": tuple(name for name in NETWORKS if name not in MIX)}
LAST = "bert-large"
"""It takes longest, and is measured when the others are."""


HEAD = _results.page_head("macro/characterize.py")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=ASKED, nargs="+", default=list(ASKED))
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument(
        "--parts", help="a file with what earlier sittings measured; it is added to"
    )
    parser.add_argument("--limit", type=float, help="seconds of this sitting")
    parser.add_argument("--into", default=str(_results.RESULTS))
    options = parser.parse_args()
    parts = Parts(options.parts, options.limit)
    for what in options.what:
        names = [(name,) for name in sorted(networks_of(what), key=lambda name: name == LAST)]
        asked = [{"networks": each} for each in names]
        if what in MIXES:
            asked += [{"networks": (), "mix": MIXES[what]}]
        try:
            found = [
                parts.get(
                    f"{what} {' '.join(each['networks']) or 'mix'}",
                    lambda each=each, what=what: measure(what, each, options),
                )
                for each in asked
            ]
        except OutOfTimeError:
            print(f"{what}: time is up; go on with the same --parts")
            return
        made = merge(found)
        name = f"characterize_{what}"
        _results.write(name, made, ASKED[what], directory=options.dir, into=options.into)
        if "parallel" not in ASKED[what]:
            plot(made, Path(options.into) / f"{name}.svg")
        page = _results.ROOT / "docs" / f"{name}_table.md"
        page.write_text(HEAD + markdown(table(made)), encoding="utf-8")
        print(to_text(table(made)), end="\n\n")


def markdown(page):
    """The tables and the words of ``penstock.lab.characterize.table``."""
    lines = []
    for part in page.renderables:
        if isinstance(part, Table):
            columns = [list(map(str, column.cells)) for column in part.columns]
            heads = [str(column.header) for column in part.columns]
            rows = [heads, ["---"] * len(heads), *zip(*columns, strict=True)]
            lines += [f"**{part.title}**", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
        elif str(part):
            lines += [str(part), ""]
    return "\n".join(lines)


def networks_of(what):
    if what == "mix":
        return ()
    return BY_RANKS if "parallel" in ASKED[what] else NETWORKS


def measure(what, networks, options):
    print(f"{what}: {', '.join(networks['networks'] or networks['mix'])}", flush=True)
    return characterize(Settings(directory=options.dir, **networks, **ASKED[what]))


if __name__ == "__main__":
    main()
