"""Measurements of several networks, each in parts: their options, their result file, their table.

A part is a case of one network, that takes a minute or less. What is measured is written to the result
file after each network, beside what is there from earlier runs; so a long series can be measured in
several goes, ``--networks`` and ``--only`` saying which part of it. Each network says with what machine
file, and of which commit, it was measured last; ``--anew`` forgets what there was.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import _memory
import _results
from penstock.cli import bench_machine
from penstock.core.units import GIB
from penstock.plan import Machine

Found = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """One benchmark.

    ``measure`` gets the name of a network, the machine, the options, and what earlier runs have found of
    it, and returns all that is known then. ``page`` makes Markdown lines of the figures.
    """

    name: str
    networks: Sequence[str]
    measure: Callable[[str, Machine, argparse.Namespace, Found], Found]
    page: Callable[[Found], list[str]]
    parts: Sequence[str]
    """What ``--only`` can name."""
    rounds: int
    config: Mapping[str, Any]
    summary: Callable[[list[Found]], Found] = lambda networks: {}

    def run(self, arguments: Sequence[str] | None = None) -> None:
        """Do what the options say."""
        args = self._parse(arguments)
        if args.table:
            self._write_table(self._earlier())
            return
        _results.warn_if_busy()
        machine = machine_for(args)
        figures = {"networks": {}} if args.anew or args.quick else self._earlier()
        found = figures["networks"]
        for name in args.networks:
            found[name] = self.measure(name, machine, args, found.get(name, {}))
            found[name]["measured"] = {
                "commit": _results.commit(),
                "machine": asdict(replace(machine, name="this machine")),
            }
            if not args.quick:
                self._store(found, args)
        print(self.summary([found[name] for name in args.networks]))

    @property
    def table(self) -> Path:
        """Where the manual includes it from."""
        return _results.ROOT / "docs" / f"{self.name}_table.md"

    def _parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=f"The benchmark {self.name!r}.")
        add = parser.add_argument
        add("--networks", nargs="*", choices=self.networks, default=list(self.networks))
        add("--only", nargs="*", choices=self.parts, default=list(self.parts), metavar="PART",
            help=f"parts of each network: {', '.join(self.parts)}")  # fmt: skip
        add("--rounds", type=int, default=self.rounds, help="plain and planned, in turns")
        add("--machine", help="machine file, by `penstock bench machine`; measured if not given")
        add("--dir", default=tempfile.gettempdir(), help="directory to spill to")
        add("--anew", action="store_true", help="forget what earlier runs have found")
        add("--quick", action="store_true", help="few rounds; no result")
        add("--table", action="store_true", help="only write the table in docs again")
        args = parser.parse_args(arguments)
        if args.quick:
            args.rounds = 1
        return args

    def _earlier(self) -> Found:
        return {"networks": {}, **_results.earlier(self.name)}

    def _store(self, found: Found, args: argparse.Namespace) -> None:
        """After each network: the last may take long."""
        ordered = {name: found[name] for name in self.networks if name in found}
        figures = {"networks": ordered, **self.summary(list(ordered.values()))}
        config = {
            **self.config,
            "rounds": args.rounds,
            "threads": torch.get_num_threads(),
            "memory": _memory.KEEPS,
        }
        print(f"wrote {_results.write(self.name, figures, config, directory=args.dir).name}")
        self._write_table(figures)

    def _write_table(self, figures: Found) -> None:
        head = _results.page_head(f"macro/{self.name}.py")
        self.table.write_text(head + "\n".join([*self.page(figures), ""]))


def machine_for(args: argparse.Namespace) -> Machine:
    """The file's, or measured now."""
    if args.machine:
        return Machine.load(args.machine)
    return bench_machine.measure(args.dir, seconds=10.0, file_bytes=GIB)
