"""Weights leave memory. What was changed is written home first.

A weight that does not stay until its next use (:mod:`.order`) leaves when it has been used. If there is
no room for another one even so, what is needed last leaves; for one that is read ahead, only if it is not
to stay.
"""

from __future__ import annotations

from typing import Final

from penstock.core.errors import PenstockError
from penstock.core.locks import defer
from penstock.io.engine import Transfer
from penstock.weights.failures import LEFT, WRITTEN_AGAIN, named_failure
from penstock.weights.homes import version_of
from penstock.weights.stays import Stay, WeightTable

NOW: Final = -1
"""Distance of what is needed at once."""


class WeightEviction:
    """Frees memory of weights. Thread-safe.

    Attributes:
        failure: Why a weight could not be written home; no more are written in this step then.
        writing: Those whose writes are in flight.
        gives_way: False from when weights are taken home for good: what is brought then, stays.
    """

    def __init__(self, table: WeightTable) -> None:
        """Free memory of the weights of a table."""
        self._table = table
        self.failure: BaseException | None = None
        self.writing: set[Stay] = set()
        self.gives_way = True

    def give_way(self, nbytes: int) -> None:
        """Begin to free memory for other parts of Penstock, of what is needed last. Never waits.

        Args:
            nbytes: Bytes that are missing.
        """
        account = self._table.account
        enough = account.used_bytes - nbytes
        while (
            self.gives_way
            and account.used_bytes > enough
            and self._give_some(account.used_bytes - enough)
        ):
            pass

    def _give_some(self, nbytes: int) -> bool:
        """Free idle memory, or let one weight leave; return False if nothing can be freed at once.

        If what is needed last was changed, begin to write as much as ``nbytes``.
        """
        if self._table.memory.trim(nbytes):
            return True
        with self._table.wake:
            return self.let_leave() or self.free(nbytes) or self.take_unneeded_read()

    def moved(self) -> None:
        """A read or write is over: go on to give way, if somebody still waits for that."""
        with self._table.wake:
            self._table.wake.notify_all()
        account = self._table.account
        owed = max(account.owed_bytes, account.used_bytes - account.limit_bytes)
        if owed > 0 and self.gives_way and self._give_some(owed):
            defer(self.moved)  # after what was let go is freed, which is deferred as this is

    def take_unneeded_read(self, stay: Stay | None = None) -> bool:
        """Let a weight whose read is over be in memory, which it can then leave. Under the lock."""
        for each in self._table.stays if self._table.coming_bytes else ():
            if each is not stay and each.coming is not None and each.coming.done:
                self._table.arrived(each)
                return True
        return False

    def let_leave(self) -> bool:
        """Let weights leave that have been used and do not stay; begin to write those that were changed.

        Under the lock.

        Returns:
            Whether memory was freed.
        """
        leaving, freed = self._table.leaving, False
        for stay in tuple(leaving):
            if stay.pins or stay.touching or stay.writing is not None:
                continue
            if stay.storage is None or stay.must_stay:
                del leaving[stay]
            elif stay.is_lent:
                continue
            elif not stay.is_changed:
                del leaving[stay]
                self._table.send_home(stay)
                freed = True
            elif self.failure is None:
                self.write(stay)
        return freed

    def free(self, nbytes: int, *, later_than: int = NOW, spares: bool = False) -> bool:
        """Let the weight that is needed last leave memory.

        If what is needed last was changed, begin to write as much as is to be freed. Under the lock.

        Args:
            nbytes: Bytes that are missing.
            later_than: Only weights that are needed later than this leave.
            spares: Leave those in memory that are to stay.

        Returns:
            Whether memory was freed.
        """
        idle = [
            (self._table.order.next_use(stay.index), -stay.index, stay)
            for stay in self._table.present
            if not (stay.pins or stay.touching)
            and stay.writing is None
            and not (spares and stay.stays)
        ]
        idle.sort(reverse=True)
        leaving = sum(stay.home.nbytes for stay in self.writing)
        for next_use, _, stay in idle:
            if next_use <= later_than:
                return False
            if stay.is_lent or stay.must_stay:
                continue
            if not stay.is_changed:
                self._table.send_home(stay)
                return True
            if leaving < nbytes and self.failure is None:
                self.write(stay)
                leaving += stay.home.nbytes
        return False

    def write(self, stay: Stay) -> None:
        """Begin to write a weight home. Under the lock."""
        storage, parameter = stay.storage, stay.home.parameter
        assert storage is not None
        stay.dirty = False
        if parameter is not None:
            stay.version = version_of(parameter)
        resting = stay.home.resting
        try:
            stay.writing = self._table.memory.write(stay.home, storage)
            self.writing.add(stay)
            self._table.resting_moved(stay, resting)
            stay.writing.add_done_callback(lambda transfer: defer(self._written, stay, transfer))
        except PenstockError as error:  # as if the write had failed later
            self._note_failure(stay, error)
        except BaseException:  # of a signal's handler: what is at home is not known
            stay.dirty = True
            if stay.writing is not None:
                self.writing.add(stay)
                stay.writing.add_done_callback(lambda end: defer(self._written, stay, end))
            raise

    def _written(self, stay: Stay, transfer: Transfer) -> None:
        """A weight is at home, or not; in a thread of the engine's."""
        with self._table.wake:
            if stay.writing is transfer:
                stay.writing = None
                self.writing.discard(stay)
            if transfer.error is not None:
                self._note_failure(stay, transfer.error)
        self.moved()

    def _note_failure(self, stay: Stay, error: BaseException) -> None:
        """Note that a weight could not be written, so that its memory is newer. Under the lock."""
        stay.dirty = True
        advice = WRITTEN_AGAIN if self.gives_way else LEFT
        self.failure = named_failure(error, stay.home.name, advice, "write")

    def wait_for_write(self, stay: Stay) -> None:
        """Wait until no write of a weight is in flight."""
        with self._table.wake:  # if it fails, the weight is in memory, and counts as changed
            self._table.wake.wait_for(lambda: stay.writing is None)
