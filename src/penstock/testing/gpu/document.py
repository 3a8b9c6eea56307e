"""File to send to the project: the results on a device, without paths and names."""

from __future__ import annotations

import json
import os
import platform
import pwd
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.core.fs import write_durably
from penstock.core.units import format_bandwidth, format_bytes
from penstock.testing.gpu.fact import FactOutcome

SCHEMA: Final = 1
_PATH: Final = re.compile(r"(?<![\w.:/])(?:/[\w.@+~-]+)+/([\w.@+~-]+)")
_UNKNOWN: Final = (FactOutcome.ERROR, FactOutcome.ENDED)
DONE: Final = "done"
"""Status of a successful part."""
_SHOWN: Final = 8
"""Maximum number of printed lines for each kind of problem; all of them are in the file."""


class Document:
    """Results so far. ``write`` writes all of them to the file atomically.

    Attributes:
        contents: Content of the JSON file.
        path: Path of the file.
    """

    def __init__(self, into: Path, machine: dict[str, Any]) -> None:
        """Begin with the machine, and name the file by its first device and the date."""
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        device = re.sub(r"[^a-z0-9]+", "-", machine["devices"][0]["name"].lower()).strip("-")
        self.path = into / f"penstock-gpu-{device}-{today}.json"
        self.contents: dict[str, Any] = {
            "schema": SCHEMA,
            "date": today,
            "complete": False,
            "machine": machine,
            "parts": [],
            "contract": [],
            "tests": [],
            "order": [],
            "figures": {},
        }

    def part(self, name: str, how: str, seconds: float, said: list[str] | None = None) -> None:
        """Record how a part ended (``DONE``, or a description of the problem), and write the file."""
        part: dict[str, Any] = {"name": name, "how": how, "seconds": round(seconds, 1)}
        if said:
            part["said"] = said
        self.contents["parts"].append(part)
        self.write()

    def write(self) -> None:
        """Replace the file."""
        text = json.dumps(scrub(self.contents), indent=1) + "\n"
        write_durably(str(self.path), text.encode())

    @property
    def well(self) -> bool:
        """True if everything was run, no assumption proved wrong, and nothing failed."""
        contents = self.contents
        return (
            contents["complete"]
            and all(part["how"] == DONE for part in contents["parts"])
            and not self._findings(FactOutcome.DIFFERS, *_UNKNOWN)
            and not self._tests("failed")
            and not any("failed" in each for each in contents["figures"].values())
        )

    def lines(self) -> Iterator[str]:
        """Yield some 20 lines for a terminal: results, problems, and what to do with the file."""
        contents, machine = self.contents, self.contents["machine"]
        device = machine["devices"][0]
        count = len(machine["devices"])
        yield (
            f"{device['name']}, {format_bytes(device['memory_bytes'])}"
            f"{f' (one of {count})' if count > 1 else ''}; torch {machine['torch']},"
            f" driver {machine['driver'] or 'unknown'}"
        )
        yield from self._contract_lines()
        yield from self._test_lines()
        yield from self._order_lines()
        for name, figures in contents["figures"].items():
            yield f"figure    {name}: {_brief(figures)}"
        for part in contents["parts"]:
            if part["how"] != DONE:
                yield f"NOT DONE  {part['name']}: {part['how']}"
        if not contents["complete"]:
            yield "The run was interrupted: the file contains the results until then."
        yield ""
        yield f"All results are in {self.path.name}, without paths and names of hosts and users."
        yield "Please look through it and attach it to an issue in Penstock's tracker, with a note on the"
        yield "machine. A wrong assumption is more valuable to the project than a pass."

    def _contract_lines(self) -> Iterator[str]:
        yield from _counts("contract", self.contents["contract"])
        wrong = self._findings(FactOutcome.DIFFERS, *_UNKNOWN)
        yield from _first(
            f"believed: {each['believed']} Found: {each['found']}. [{each['name']}]"
            for each in wrong
        )

    def _test_lines(self) -> Iterator[str]:
        yield from _counts("tests", self.contents["tests"])
        yield from _first(f"{each['test']}: {each['said']}"[:198] for each in self._tests("failed"))

    def _order_lines(self) -> Iterator[str]:
        found = self.contents["order"]
        if not found:
            return
        checked = sum(each["checked"] for each in found)
        complaints = list(dict.fromkeys(line for each in found for line in each["complaints"]))
        yield (
            f"order     {checked} accesses in {len(found)} tests, {len(complaints)} complaints to look"
            " into"
        )
        yield from _first(line[:198] for line in complaints)

    def _findings(self, *outcomes: FactOutcome) -> list[dict[str, Any]]:
        return [each for each in self.contents["contract"] if each["outcome"] in outcomes]

    def _tests(self, outcome: str) -> list[dict[str, Any]]:
        return [each for each in self.contents["tests"] if each["outcome"] == outcome]


def scrub(value: Any) -> Any:
    """Return a value without directories and the names of this host and user."""
    if isinstance(value, dict):
        return {key: scrub(each) for key, each in value.items()}
    if isinstance(value, list):
        return [scrub(each) for each in value]
    if not isinstance(value, str):
        return value
    text = _PATH.sub(r".../\1", value)
    for name, instead in _names().items():
        text = re.sub(rf"\b{re.escape(name)}\b", instead, text)
    return text


def _names() -> dict[str, str]:
    """Return private names with their replacements."""
    found = {platform.node(): "<host>", platform.node().partition(".")[0]: "<host>"}
    with suppress(KeyError):
        found[pwd.getpwuid(os.getuid()).pw_name] = "<user>"
    found[os.environ.get("USER", "")] = "<user>"
    return {name: instead for name, instead in found.items() if len(name) > 2}


def _counts(name: str, results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line with the number of results by outcome, if there are any."""
    found = Counter(each["outcome"] for each in results)
    if found:
        yield f"{name:<9} {', '.join(f'{count} {outcome}' for outcome, count in found.items())}"


def _first(lines: Iterable[str]) -> Iterator[str]:
    """Yield the first lines, indented, and how many more there are."""
    every = list(lines)
    yield from (f"  {line}" for line in every[:_SHOWN])
    if len(every) > _SHOWN:
        yield f"  and {len(every) - _SHOWN} more, which are in the file"


def _brief(figures: dict[str, Any]) -> str:
    """Return the main numbers of a figure in a line."""
    for what in ("failed", "refused"):
        if what in figures:
            return f"{what}: {figures[what]}"[:160]
    parts = []
    for name, value in figures.items():
        if isinstance(value, dict):
            if "penstock" in value:
                parts.append(f"{name}: {value['penstock']['ratio_to_plain']:.3f} x plain")
            elif "refused" in value:
                parts.append(f"{name}: refused")
        elif name.endswith("_bytes_per_s"):
            parts.append(f"{name.removesuffix('_bytes_per_s')} {format_bandwidth(value)}")
        elif name.endswith("_s") and isinstance(value, float):
            parts.append(f"{name.removesuffix('_s')} {value:.3f} s")
        elif isinstance(value, bool):
            parts.append(f"{name.replace('_', ' ')}: {'yes' if value else 'no'}")
    return ", ".join(parts)[:200]
