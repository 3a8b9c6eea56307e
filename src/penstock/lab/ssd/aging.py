"""Preconditioning of a drive before simulated time begins: it is filled or overwritten, in no time."""

from __future__ import annotations

import random

from penstock.lab.ssd.blocks import EMPTY
from penstock.lab.ssd.ftl import Ftl


def fill(ftl: Ftl, pages: int) -> None:
    """Write the first ``pages`` logical pages in order, in no time, and their part of the map."""
    first = 0
    if ftl.superpages is not None:
        width = ftl.superpages.width
        first = min(-(-pages // width) * width, ftl.superpages.pages)
        for number in range(first // width):
            _place_row(ftl, number, wanted=width)
    for lpn in range(first, pages):
        ftl.place(lpn)
        clean_now(ftl, ftl.plane_of(lpn))
    if ftl.map_entries_per_page and pages:
        store_map(ftl, pages)
    ftl.reset_counts()


def store_map(ftl: Ftl, pages: int) -> None:
    """Write the map of the first ``pages`` logical pages where flash lacks it, in no time."""
    for number in range(ftl.map_entry(pages - 1) // ftl.map_entries_per_page + 1):
        lpn = ftl.map_begin + number
        if ftl.find(lpn) is None:
            ftl.place(lpn)
            clean_now(ftl, ftl.plane_of(lpn))
    ftl.reset_counts()


def overwrite(ftl: Ftl, pages: int, count: int, *, seed: int = 1) -> None:
    """Write ``count`` of the first ``pages`` logical pages, drawn uniformly, in no time."""
    chance = random.Random(seed)
    for _ in range(count):
        lpn = int(chance.random() * pages)
        if ftl.superpages is not None and lpn < ftl.superpages.pages:
            _place_row(ftl, lpn // ftl.superpages.width, wanted=1)
        else:
            ftl.place(lpn)
            clean_now(ftl, ftl.plane_of(lpn))


def clean_now(ftl: Ftl, plane: int) -> None:
    """Clean blocks of a plane as long as it needs cleaning."""
    while blocks := ftl.victim(plane):
        for lpn in blocks[0].lpns:
            if lpn == EMPTY:
                continue
            if blocks[0].row:
                ftl.place_row(lpn // len(blocks), cleaning=True)
            else:
                ftl.place(lpn, cleaning=True)
        for block in blocks:
            ftl.erased(block)


def _place_row(ftl: Ftl, number: int, *, wanted: int) -> None:
    assert ftl.superpages is not None  # otherwise there are no super-page numbers
    ftl.place_row(number, wanted=wanted)
    for plane in ftl.superpages.planes_of(number):
        clean_now(ftl, plane)
