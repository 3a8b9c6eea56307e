"""How a suspended job's memory comes back: opened, supplied by the system, filled, proven."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from penstock.core.errors import PenstockError
from penstock.core.units import MIB, round_up
from penstock.io import pages as memory
from penstock.io.engine import Transfer
from penstock.io.pages import Pages
from penstock.io.supply import Supply
from penstock.jobs.recall import Recall
from penstock.jobs.state import Held
from penstock.tier.base import Ticket, Tier

STAGED_BYTES: Final = 256 * MIB
"""How much of a device's memory waits in host memory to be written, or has been read for it."""
_NO_PAGES: Final = Pages(0, 0)


@dataclass(slots=True, eq=False)
class Away:
    """A storage on flash."""

    held: Held
    ticket: Ticket | None
    """None: a checkpoint has it."""
    gone: bool = False
    """Whether its memory may have been given back."""
    ahead: bool = False
    """Whether its bytes are there again, closed still, and on flash as well."""
    back: bool = False
    """Whether it is there again, or still."""


class _Read(NamedTuple):
    away: Away
    transfer: Transfer
    staged: torch.Tensor | None
    """Host memory from which a device's storage is filled."""


class Return:
    """Brings some storages back to where they were. Not thread-safe; serves once.

    Attributes:
        failed: Why some are not back, by name.
    """

    def __init__(self, wanted: Sequence[Away], *, tier: Tier, recall: Recall | None) -> None:
        """Touch nothing yet.

        Args:
            wanted: What is to come; their pages are closed.
            tier: Has what has a ticket.
            recall: Has all others; None: there are none.
        """
        self.failed: dict[str, BaseException] = {}
        self._wanted = wanted
        self._tier = tier
        self._recall = recall
        self._reads: deque[_Read] = deque()
        self._staged_bytes = 0

    def run(self) -> None:
        """Fill them. What is ``back`` then is open, all else is closed, and nothing is on its way."""
        opened = list[Away]()
        try:
            for each in self._in_order():
                opened.append(each)  # first, so that it is closed again should this be interrupted
                if each.held.pages is not None and not self._open(each, each.held.pages):
                    opened.pop()
            with Supply([each.held.pages or _NO_PAGES for each in opened]) as supply:
                for number, each in enumerate(opened):
                    supply.wait_for(number)
                    self._fill(each)
                while self._reads:
                    self._end()
        finally:
            for read in self._reads:  # after Ctrl-C
                read.transfer.cancel()
                with suppress(Exception):
                    read.transfer.wait()
            lost = [each.held.pages for each in opened if not each.back]
            memory.abandon(each for each in lost if each is not None)

    def _in_order(self) -> Iterator[Away]:
        """What a checkpoint has comes in the order of its files: those that were passed are closed."""
        if self._recall is not None:
            place_of = self._recall.place_of
            recalled = [each for each in self._wanted if each.ticket is None]
            yield from sorted(recalled, key=lambda each: place_of(each.held))
        yield from (each for each in self._wanted if each.ticket is not None)

    def _open(self, away: Away, pages: Pages) -> bool:
        try:
            memory.open_to_refill(pages)
        except PenstockError as refused:
            self.failed[away.held.name] = refused
            return False
        return True

    def _fill(self, away: Away) -> None:
        """Now, from a checkpoint; or begin to."""
        try:
            if away.ticket is None:
                assert self._recall is not None
                self._recall.bring_back(away.held)
                away.back = True
            else:
                self._reads.append(_Read(away, *self._begin(away, away.ticket)))
        except (PenstockError, OSError) as error:
            self.failed[away.held.name] = error
        while self._staged_bytes > STAGED_BYTES:
            self._end()

    def _begin(self, away: Away, ticket: Ticket) -> tuple[Transfer, torch.Tensor | None]:
        pages, granule = away.held.pages, self._tier.spec.granule_bytes
        if pages is not None:
            return self._tier.read(ticket, pages.address, keep_alive=away.held.storage), None
        buffer = torch.empty(ticket.window.nbytes + granule, dtype=torch.uint8)
        start = round_up(buffer.data_ptr(), granule) - buffer.data_ptr()
        target = buffer[start : start + ticket.window.nbytes]
        transfer = self._tier.read(ticket, target.data_ptr(), keep_alive=target)
        self._staged_bytes += target.nbytes
        return transfer, target

    def _end(self) -> None:
        """Wait for the first of the reads."""
        away, transfer, staged = self._reads[0]
        storage, ticket = away.held.storage, away.ticket
        assert ticket is not None
        try:
            transfer.wait()
            if staged is not None:
                skew = ticket.window.skew
                storage.resize_(ticket.nbytes)
                storage.copy_(staged[skew : skew + ticket.nbytes].clone().untyped_storage())
        except (
            PenstockError,
            OSError,
            RuntimeError,
        ) as error:  # a device may be full: RuntimeError
            self.failed[away.held.name] = error
        else:
            away.back = True
        self._reads.popleft()
        self._staged_bytes -= 0 if staged is None else staged.nbytes
