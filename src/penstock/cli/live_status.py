"""The figures of a run while it runs, at the bottom of the terminal: ``penstock run --live``.

[Note: the footer]
    The last lines of the terminal are taken out of the part that scrolls, and drawn anew twice a second.
    What the script, its children or C code print scrolls above them, untouched: nothing is redirected.
    Everything is written in one call, which saves the cursor and restores it. A process that is killed
    cannot undo this; the command ``reset`` does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from penstock.cli.output import say
from penstock.core.config import UNLIMITED
from penstock.core.memory import ProcessMemory
from penstock.core.units import format_bandwidth, format_bytes, format_duration
from penstock.observe.counters import SAVED_TENSORS
from penstock.observe.events import Stage
from penstock.observe.metrics import moved_bytes
from penstock.observe.totals import Totals

if TYPE_CHECKING:
    from penstock.session import Session

DRAW_S: Final = 0.5
"""Time between two drawings on a terminal."""
LINE_S: Final = 10.0
"""Least time between two lines where standard error is no terminal."""
_WINDOW: Final = 5
"""Number of samples over which rates are taken: about two seconds."""
_LEAST_ROWS: Final = 12
"""Number of rows of a terminal below which lines are printed instead."""
_BAR: Final = 24
_WAYS: Final = (
    ("to flash", Stage.WRITE),
    ("from flash", Stage.READ),
    ("from the device", Stage.COPY_OUT),
    ("to the device", Stage.COPY_IN),
)


class LiveFigures:
    """The figures of a session, as lines of text. For one thread."""

    def __init__(self, session: Session) -> None:
        """Begin to watch a session that is open."""
        from penstock.store.account import host_account  # noqa: PLC0415  (loaded by the session)

        self._session = session
        self._account = host_account()
        self._process = ProcessMemory()
        self._samples: deque[Totals] = deque([session.recorder.snapshot()], maxlen=_WINDOW)

    def sample(self) -> None:
        """Look at the totals now; rates are those between the oldest and the latest sample."""
        self._samples.append(self._session.recorder.snapshot())

    @property
    def steps(self) -> int:
        """Number of ended optimizer steps."""
        ended = self._session.recorder.steps()
        return ended[-1].index + 1 if ended else 0

    def lines(self) -> list[tuple[str, str]]:
        """Return a label and a text for each line: steps, memory, transfers, waits."""
        return [
            ("steps", ", ".join(self._progress())),
            ("memory", ", ".join(self._memory())),
            ("moving", ", ".join(self._moving())),
            ("waits", ", ".join(self._waits())),
        ]

    def bar(self) -> tuple[int, int] | None:
        """Return what saved tensors hold and their budget; None without a budget."""
        budget = self._session.budget
        limit_bytes = budget.limit_bytes
        return None if limit_bytes >= UNLIMITED else (budget.used_bytes, limit_bytes)

    def close(self) -> None:
        """Close the status of the process. Idempotent."""
        self._process.close()

    def _progress(self) -> Iterator[str]:
        metrics, steps = self._session.metrics(), self.steps
        yield f"{steps} {'step' if steps == 1 else 'steps'}"
        yield f"{format_duration(self._samples[-1].elapsed_ns / 1e9)} since the start"
        if steps:
            step_s, stall_s = metrics["penstock/step_s"], metrics["penstock/stall_s"]
            yield f"the last took {format_duration(step_s)}, {format_duration(stall_s)} of it waiting"
        else:
            yield "the first has not ended"

    def _memory(self) -> Iterator[str]:
        budget = self._session.budget
        yield f"{SAVED_TENSORS} {_of(budget.used_bytes, budget.limit_bytes)}"
        rows = sorted(self._account.holdings().items(), key=lambda row: -row[1].nbytes)
        for owner, row in rows:
            if row.nbytes and owner != SAVED_TENSORS:
                yield f"{owner} {format_bytes(row.nbytes)}"
        yield f"together {_of(self._account.used_bytes, self._account.limit_bytes)}"
        if process_bytes := self._process.held_bytes():
            yield f"process {format_bytes(process_bytes)}"

    def _moving(self) -> Iterator[str]:
        before, now = self._samples[0], self._samples[-1]
        elapsed_ns = max(1, now.end_ns - before.end_ns)
        for way, stage in _WAYS:
            if total := moved_bytes(now, stage):
                rate = (total - moved_bytes(before, stage)) * 1e9 / elapsed_ns
                yield f"{way} {format_bandwidth(rate)} ({format_bytes(total)} in all)"
        if not now.flows:
            yield "nothing yet"

    def _waits(self) -> Iterator[str]:
        now = self._samples[-1]
        share = now.stall_ns / now.elapsed_ns if now.elapsed_ns else 0.0
        yield f"{100 * share:.2f} % of the time"
        for cause, stall in sorted(now.stalls.items(), key=lambda item: -item[1].total_ns):
            yield f"{cause} {format_duration(stall.total_ns / 1e9)}"


def _of(nbytes: int, limit_bytes: int) -> str:
    text = format_bytes(nbytes)
    return text if limit_bytes >= UNLIMITED else f"{text} of {format_bytes(limit_bytes)}"


class TerminalFooter:
    """The last lines of a terminal, outside the part that scrolls. See [Note: the footer]."""

    def __init__(self, fd: int, lines: int) -> None:
        """Use the last ``lines`` rows of the terminal ``fd``, from the first ``draw`` on."""
        self._fd = fd
        self._lines = lines
        self._size: os.terminal_size | None = None

    def draw(self, texts: Sequence[str]) -> None:
        """Draw the lines, cut to the width, if there is room. Raises OSError if the terminal is gone."""
        size = os.get_terminal_size(self._fd)
        if size.lines < _LEAST_ROWS:
            self.close()
            return
        out = ""
        if size != self._size:
            out = self._undo() + self._take(size)
            self._size = size
        first = size.lines - self._lines + 1
        out += "\x1b7"
        for row, text in enumerate(texts, start=first):
            out += f"\x1b[{row};1H\x1b[2K{text[: size.columns - 1]}"
        self._write(out + "\x1b8")

    def close(self) -> None:
        """Clear the lines and let the whole terminal scroll again. Idempotent."""
        undo, self._size = self._undo(), None
        if undo:
            with contextlib.suppress(OSError):
                self._write(undo)

    def _take(self, size: os.terminal_size) -> str:
        """Return what scrolls the text up and takes the last rows out of what scrolls."""
        down, up = "\x1bD" * self._lines, f"\x1b[{self._lines}A"  # both keep the column
        return f"{down}{up}\x1b7\x1b[1;{size.lines - self._lines}r\x1b8"

    def _undo(self) -> str:
        if self._size is None:
            return ""
        first = self._size.lines - self._lines + 1
        return f"\x1b7\x1b[r\x1b[{first};1H\x1b[J\x1b8"

    def _write(self, text: str) -> None:
        data = memoryview(text.encode("utf-8", "replace"))
        while data:
            data = data[os.write(self._fd, data) :]


class LiveStatus:
    """A thread that shows the figures of a session until it is closed."""

    def __init__(self, session: Session) -> None:
        """Begin to show: a footer on a terminal, else a line now and then."""
        self._figures = LiveFigures(session)
        self._stop = threading.Event()
        self._footer: TerminalFooter | None = None
        self._next_line_s = 0.0
        self._told_steps = 0
        file = sys.__stderr__
        if file is not None and file.isatty():
            self._is_utf8 = (file.encoding or "").lower().replace("-", "") == "utf8"
            with contextlib.suppress(OSError):
                if os.get_terminal_size(file.fileno()).lines >= _LEAST_ROWS:
                    self._footer = TerminalFooter(file.fileno(), 5)
        self._thread = threading.Thread(target=self._run, name="penstock-live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and leave the terminal as it was. Idempotent."""
        self._stop.set()
        self._thread.join()
        if self._footer is not None:
            self._footer.close()
        self._figures.close()

    def _run(self) -> None:
        try:
            while True:
                self._figures.sample()
                if self._footer is None:
                    self._say_line()
                else:
                    self._footer.draw(self._footer_lines())
                if self._stop.wait(DRAW_S):
                    return
        except OSError:
            return  # the terminal is gone

    def _footer_lines(self) -> list[str]:
        texts = [f"{label:7} {text}" for label, text in self._figures.lines()]
        return [
            f"── penstock {self._bar()}" if self._is_utf8 else f"-- penstock {self._bar()}",
            *texts,
        ]

    def _bar(self) -> str:
        """Return a bar of what saved tensors hold of their budget."""
        found = self._figures.bar()
        if found is None:
            return ""
        used_bytes, limit_bytes = found
        full = min(_BAR, round(_BAR * used_bytes / max(1, limit_bytes)))
        fill, empty = ("█", "░") if self._is_utf8 else ("#", ".")
        return f"{SAVED_TENSORS} {fill * full}{empty * (_BAR - full)} of the budget"

    def _say_line(self) -> None:
        """Print one line if a step has ended since the last one, which is some time ago."""
        now_s, steps = time.monotonic(), self._figures.steps
        if steps > self._told_steps and now_s >= self._next_line_s:
            self._told_steps, self._next_line_s = steps, now_s + LINE_S
            say("; ".join(text for _, text in self._figures.lines()))
