"""The figures of vDNN, FlashNeuron and G10 beside ours, all on paper: dry profiles, replayed plans.

No network runs and no GPU is there: the profiles are from shapes, the machines from specification sheets
(``penstock.plan.machines``). Nothing is fitted to a network. Batches are the papers'.

    python benchmarks/macro/papers.py --plot docs/papers.svg --table docs/papers_table.md
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _papers_flash
import _papers_g10
import _papers_kernels
import _papers_plot
import _papers_vdnn

import _results

VERDICTS = {True: "yes", False: "**no**", None: ""}


def main() -> None:
    args = parse()
    if args.redraw:
        draw(_results.earlier("papers"), args)
        return
    begun = time.process_time()
    figures = measure(quick=args.quick)
    figures["cpu_s"] = round(time.process_time() - begun, 1)
    show(figures)
    draw(figures, args)
    if not args.quick:
        config = {
            "optimizer": "SGD without momentum: weights and their gradients are fixed",
            "dtype": "float32, TF32 not counted",
            "machines": ["titan-x", "v100-nvme", "v100-two-nvme", "a100-g10"],
            "codecs": "none, but where a line says so: a profile from shapes has no samples to compress",
        }
        print(f"wrote {_results.write('papers', figures, config).name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, help="write a picture to this file")
    parser.add_argument("--table", type=Path, help="write the Markdown table to this file")
    parser.add_argument("--redraw", action="store_true", help="only draw the known result")
    parser.add_argument("--quick", action="store_true", help="small networks; no result file")
    args = parser.parse_args()
    if args.redraw and not (args.plot or args.table):
        parser.error("--redraw needs --plot or --table")
    if args.quick and (args.plot or args.table):
        parser.error("--plot and --table need the whole result, not --quick")
    return args


def measure(*, quick: bool) -> dict[str, Any]:
    kernels = _papers_kernels.measure(quick=quick)
    vdnn = _papers_vdnn.measure(quick=quick)
    flash = _papers_flash.measure(quick=quick)
    g10 = _papers_g10.measure(quick=quick)
    lines = [
        *_papers_kernels.lines(kernels),
        *_papers_vdnn.lines(vdnn),
        *_papers_flash.lines(flash),
        *_papers_g10.lines(g10),
    ]
    return {
        "lines": [line.as_json() for line in lines],
        "kernels": kernels,
        "vdnn": vdnn,
        "flashneuron": flash,
        "g10": g10,
    }


def draw(figures: dict[str, Any], args: argparse.Namespace) -> None:
    if args.plot:
        _papers_plot.plot(figures, args.plot)
    if args.table:
        args.table.write_text(page(figures), encoding="utf-8")


def page(figures: dict[str, Any]) -> str:
    """The table as a file that another page of the manual includes, from the mark on."""
    rows = [
        "| What | Paper | Ours | Aim | Met |",
        "|---|---|---|---|---|",
    ]
    for line in figures["lines"]:
        cells = (line["what"], line["paper"], line["ours"], line["aim"], VERDICTS[line["within"]])
        rows.append("| " + " | ".join(cells) + " |")
    return _results.page_head("macro/papers.py --table") + "\n".join(rows) + "\n"


def show(figures: dict[str, Any]) -> None:
    for line in figures["lines"]:
        print(
            f"{line['what']:<68} paper {line['paper']:<24} ours {line['ours']:<50}"
            f" {line['aim']:<18} {VERDICTS[line['within']]}"
        )


if __name__ == "__main__":
    main()
