"""The ranks of a job, as a session knows them: their store, their meeting, the summary of all of them."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.ranks import local_processes, local_rank, rank, world_size
from penstock.runtime.probe import Meeting

if TYPE_CHECKING:
    from penstock.observe.job_summary import JobSummary
    from penstock.observe.summary import Summary
    from penstock.runtime.rank_store import RankStore

_numbers = itertools.count()
"""Numbers of the sessions of this process."""


class JobRanks:
    """Ranks of a session's job: their store, and this process among them. For the session's thread.

    Attributes:
        number: Rank of this process; None if it is no rank of a job.
        notes: Sentences for the summary.
    """

    def __init__(self) -> None:
        """Begin for a session that is not open yet."""
        self.number = rank()
        self.notes: tuple[str, ...] = ()
        self._session = 0
        self._store: RankStore | None = None

    def open(self) -> None:
        """Number the session, as the other ranks do theirs, and look for their store, or torchrun's."""
        self._session = next(_numbers)
        self._find(by_agent=True)

    def found(self) -> RankStore | None:
        """Return the store that the ranks share; None if there is none by now."""
        if self._store is None:
            self._find()
        return self._store

    def _find(self, *, by_agent: bool = False) -> None:
        dist = torch.distributed
        if (dist.is_available() and dist.is_initialized()) or (
            self.number is not None and by_agent
        ):
            from penstock.runtime.rank_store import RankStore  # noqa: PLC0415  (only for ranks)

            self._store = RankStore.find(session=self._session, by_agent=by_agent)

    def meeting(self) -> Meeting:
        """Return the meeting of the ranks on this machine, which measure bandwidth at once."""
        store = self._store
        if store is None:
            return Meeting()
        here = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
        count = local_processes()
        return Meeting(count, lambda place: store.meet(f"{here}/{place}", count))

    def note(self, meeting: Meeting) -> None:
        """Note for the summary how many ranks have measured at once, if there are several."""
        if local_processes() == 1:
            return
        if meeting.ranks > 1:
            note = f"bandwidth was measured by the {meeting.ranks} ranks on this machine at once"
        elif self._store is None:
            note = (
                "bandwidth was measured by this rank alone: no process group was initialised when the"
                " session was opened"
            )
        else:
            note = (
                "bandwidth was measured by this rank alone: the others on this machine did not open a"
                " session within 10 s"
            )
        self.notes = (note,)

    def label(self) -> dict[str, Any]:
        """Return rank, local rank and machine of this process, if there are several."""
        number = self.number if self._store is None else self._store.rank
        if number is None:
            return {"rank": None, "local_rank": None, "node": None}
        return {"rank": number, "local_rank": local_rank(), "node": socket.gethostname()}

    def job_summary(self, own: Summary, patience_s: float) -> JobSummary:
        """Publish this rank's summary, and return those that are there within ``patience_s`` seconds."""
        from penstock.observe.job_summary import (  # noqa: PLC0415  (loads rich)
            RankLine,
            joined,
            rank_line,
        )

        line = rank_line(own)
        store = self._store
        if store is None:
            return joined([line], world_size())
        store.publish("summary", line.to_text())
        found = {
            number: RankLine.from_text(text)
            for number, text in store.collect("summary", patience_s).items()
        }
        return joined((found | {line.rank: line}).values(), store.world_size)

    def publish(self, summary: Callable[[], Summary]) -> bool:
        """Hand the essentials of a summary to the other ranks; return whether they can be reached."""
        if self._store is None:
            return False
        from penstock.observe.job_summary import rank_line  # noqa: PLC0415  (loads rich)

        return self._store.publish("summary", rank_line(summary()).to_text())
