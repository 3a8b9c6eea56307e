#!/usr/bin/env python3
"""Write ``docs/benchmarks.md`` and the README's table from the result files.

    python benchmarks/page.py            # write both
    python benchmarks/page.py --check    # change nothing, fail if either is stale

``page.md`` beside this script is the template. A row of a table there begins with a result file in
``benchmarks/results/`` and, after a slash, a path in its figures; ``@`` and a path follow where the file
names a commit for each part. A figure is ``{path}`` or ``{path:format}``; the format is Python's, or a
unit of `_page.UNITS`. A row that begins with ``?`` is left out until its file is written. What follows
the mark at the end of the page is written by hand there, and kept.
"""

import argparse
import re
import sys

import _page
from _results import ROOT

TEMPLATE = ROOT / "benchmarks" / "page.md"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
MARK = "<!-- hand-written below: benchmarks/page.py keeps what follows this line -->"
HEAD = "| Result | What | Penstock | Best alternative |"
TABLE = re.compile("^" + re.escape(HEAD) + r".*\n\|---.*\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)
README_TABLE = re.compile(
    r"(?P<head>^\| What \| Penstock \| .*\n\|---.*\n)(?:\|.*\n)+", re.MULTILINE
)
COLUMNS = "| What | Penstock | Best alternative | Ratio (spread) | Machine | Measured |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if stale")
    check = parser.parse_args().check
    for_page, for_readme = TEMPLATE.read_text().split("<!-- README:")
    made = {PAGE: page(for_page, PAGE.read_text()), README: readme(for_readme, README.read_text())}
    stale = [path for path, text in made.items() if path.read_text() != text]
    if check and stale:
        names = " and ".join(path.relative_to(ROOT).as_posix() for path in stale)
        sys.exit(f"{names}: not what the result files say; run python benchmarks/page.py")
    for path in stale:
        path.write_text(made[path])


def page(template: str, old: str) -> str:
    """The page with all figures, and with the hand-written end of the old one."""

    def table(match: re.Match[str]) -> str:
        lines = [COLUMNS, "|" + "---|" * (COLUMNS.count("|") - 1)]
        rows = filter(None, map(_page.filled, match["rows"].splitlines()))
        return "\n".join([*lines, *rows]) + "\n"

    _, _, kept = old.partition(MARK)
    return TABLE.sub(table, template) + MARK + (kept or "\n")


def readme(template: str, old: str) -> str:
    """The README with its measured rows."""
    wanted = TABLE.search(template)["rows"].splitlines()
    rows = [row for row in (_page.filled(each, source=False) for each in wanted) if row]
    text, found = README_TABLE.subn(lambda old: old["head"] + "\n".join(rows) + "\n", old)
    if found != 1:
        sys.exit(f"README.md has {found} tables of measured rows; one is needed")
    return text


if __name__ == "__main__":
    main()
