"""Holds of weights that have a home on flash, while their tiles are updated or read.

[Note: when a weight is held]
    From the first of its tiles in a pass to the last, so that it is brought once and written home once.
    With ``overlap`` from the end of its backward, when it is in memory anyway. Holds are to take half of
    the memory that there is for weights, so that others can be read ahead: a tile that needs more is
    worked on in parts, and waits while others are; backward waits for tiles that end holds. Both wait for
    updates that are under way, too, if two more weights would not fit beside those that are held: else
    they would take the memory of one that is to stay. One part is always worked on, whatever it needs, so
    that nothing waits for ever.

    A weight gets its home, and loses it, only while no tile is worked on: ``pause``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident

from penstock.core.locks import condition
from penstock.homed import HomedWeight, UpdateMemory, add_holder, home_of
from penstock.optim.params import Param, ParameterPiece, Tile


class _Hold:
    """Hold of one weight. What changes is guarded by the lock of all holds.

    Attributes:
        left: Tiles of the weight that this pass has not ended yet.
        users: Tiles that are worked on now.
        is_coming: True while a thread is in ``hold``.
        is_held: True between ``hold`` and ``let_go``.
    """

    __slots__ = ("home", "is_coming", "is_held", "left", "nbytes", "users")

    def __init__(self, home: HomedWeight, nbytes: int, left: int) -> None:
        self.home = home
        self.nbytes = nbytes
        self.left = left
        self.users = 0
        self.is_coming = False
        self.is_held = False


class WeightHolds:
    """Holds of the weights of one optimizer, in passes over its tiles. Thread-safe."""

    def __init__(
        self,
        params: Sequence[Param],
        tiles: Sequence[Tile],
        *,
        changed: bool = True,
        resumed: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> None:
        """Hold nothing yet.

        Args:
            params: Parameters of the optimizer; more may come.
            tiles: Tiles of the optimizer; more may come.
            changed: True if the passes change the weights.
            resumed: Returns what to call after weights have got homes, or lost them; or None.
        """
        self._params = params
        self._tiles = tiles
        self._changed = changed
        self._resumed = resumed
        self._wake = condition()
        self._holds: dict[int, _Hold] = {}
        self._counts: dict[int, int] = {}  # by parameter: tiles that have a part of it
        self._counted = 0
        self._at_work: list[int] = []  # threads; one whose handler of a signal raised may be left
        self._paused = 0  # times that ``pause`` was called without ``resume``
        add_holder(self)

    def __enter__(self) -> WeightHolds:
        """Begin a pass."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the pass; see ``end``."""
        self.end()

    @property
    def has_homes(self) -> bool:
        """Return whether any of the weights has a home."""
        return any(home_of(param.tensor) is not None for param in self._params)

    def take(self, index: int) -> None:
        """Hold a weight until all tiles that have a part of it were worked on. Raises as ``hold``.

        Args:
            index: Number of the parameter.
        """
        home = home_of(self._params[index].tensor)
        if home is not None:
            with self._wake:
                hold = self._hold_of(index, home)
            self._bring(hold)

    def parts(self, tile: Tile, wanted: Container[int]) -> list[Tile]:
        """Return a tile in parts of which the weights are not too many to be held together.

        Args:
            tile: The tile.
            wanted: Parameters that are needed.
        """
        batches: list[list[ParameterPiece]] = [[]]
        taken = 0
        for piece in tile.pieces:
            tensor = self._params[piece.param].tensor
            home = home_of(tensor) if piece.param in wanted else None
            if home is not None:
                nbytes = self._params[piece.param].local.nbytes
                if taken and _exceed(home, taken + nbytes):
                    batches.append([])
                    taken = 0
                taken += nbytes
            batches[-1].append(piece)
        if len(batches) == 1:
            return [tile]
        return [replace(tile, pieces=tuple(batch)) for batch in batches]

    @contextmanager
    def of_tile(self, tile: Tile, wanted: Container[int]) -> Iterator[None]:
        """Hold the weights in a tile, of which those in ``wanted`` are needed, in a ``with`` block.

        Raises:
            TransferError: A weight cannot be read.
            ChecksumError: It is not what was written.
        """
        indices = [i for i in dict.fromkeys(p.param for p in tile.pieces) if i in wanted]
        holds: dict[int, _Hold] = {}
        has_begun = False
        try:
            with self._wake:
                self._wake.wait_for(lambda: self._may_begin(indices))
                holds = {i: self._hold_of(i, home) for i, home in self._homes_of(indices).items()}
                for hold in holds.values():
                    hold.users += 1
                self._at_work.append(get_ident())
                has_begun = True
            for hold in holds.values():
                self._bring(hold)
            yield
        except BaseException:
            if has_begun:  # a signal's handler may raise before
                self._leave(holds, parts=0)
            raise
        self._leave(holds, parts=1)

    @property
    def is_crowded(self) -> bool:
        """Return whether holds should end before others begin."""
        with self._wake:
            held = [hold for hold in self._holds.values() if hold.is_held]
            return len(held) > 1 and _exceed(held[0].home, sum(hold.nbytes for hold in held))

    @property
    def is_full(self) -> bool:
        """Return whether holds should end before backward goes on, if they can."""
        with self._wake:
            held = [(hold.home, hold.nbytes) for hold in self._holds.values() if hold.is_held]
        return _fill(held)

    def interrupt(self) -> None:
        """Let go of weights that no tile is worked on with; tiles to come bring them again."""
        with self._wake:
            idle = [hold for hold in self._holds.values() if not hold.users]
            ended = self._ended(idle)
        self._let_go(ended)

    def pause(self) -> None:
        """See :class:`penstock.homed.WeightHolder`."""
        with self._wake:
            self._paused += 1
            self._wake.wait_for(lambda: not self._are_others_at_work)
        self.interrupt()

    def resume(self) -> None:
        """See :class:`penstock.homed.WeightHolder`."""
        with self._wake:
            self._paused -= 1
            self._wake.notify_all()
        resumed = self._resumed()
        if resumed is not None:
            resumed()

    def end(self) -> None:
        """Let go of everything: a pass is over, completed or not, and no tile is worked on."""
        with self._wake:
            ended = self._ended(list(self._holds.values()))
            self._holds.clear()
        self._let_go(ended)

    def _hold_of(self, index: int, home: HomedWeight) -> _Hold:
        """Return the hold of a weight, which may not have begun. Under the lock."""
        hold = self._holds.get(index)
        if hold is None:
            for tile in self._tiles[self._counted :]:
                for param in {piece.param for piece in tile.pieces}:
                    self._counts[param] = self._counts.get(param, 0) + 1
            self._counted = len(self._tiles)
            nbytes = self._params[index].local.nbytes
            hold = self._holds[index] = _Hold(home, nbytes, self._counts[index])
        if not hold.is_held:
            hold.home = home  # it may be another one than before a pause
        return hold

    def _homes_of(self, indices: Sequence[int]) -> dict[int, HomedWeight]:
        """Return the homes of weights that have one."""
        found = ((index, home_of(self._params[index].tensor)) for index in indices)
        return {index: home for index, home in found if home is not None}

    @property
    def _are_others_at_work(self) -> bool:
        """True if threads but for this one work on tiles. Under the lock."""
        return any(each != get_ident() for each in self._at_work)

    def _may_begin(self, indices: Sequence[int]) -> bool:
        """Return whether a tile that needs these weights may be worked on. Under the lock."""
        if self._paused or not self._are_others_at_work:
            return not self._paused
        new = {i: home for i, home in self._homes_of(indices).items() if i not in self._holds}
        if not new:
            return True
        wanted = [(hold.home, hold.nbytes) for hold in self._holds.values()]
        wanted += [(home, self._params[index].local.nbytes) for index, home in new.items()]
        return not (_exceed(wanted[-1][0], sum(nbytes for _, nbytes in wanted)) or _fill(wanted))

    def _bring(self, hold: _Hold) -> None:
        """Hold a weight, unless that was done. Without the lock: it may wait."""
        with self._wake:
            self._wake.wait_for(lambda: not hold.is_coming)
            if hold.is_held:
                return
            hold.is_coming = True
        is_held = False
        try:
            hold.home.hold()
            is_held = True
        finally:
            with self._wake:
                hold.is_coming, hold.is_held = False, is_held
                self._wake.notify_all()

    def _leave(self, holds: Mapping[int, _Hold], *, parts: int) -> None:
        """End the work on a tile, of which so many parts of each weight are done."""
        with self._wake:
            for hold in holds.values():
                hold.users -= 1
                hold.left -= parts
            over = [index for index, hold in holds.items() if not hold.left]
            ended = self._ended([self._holds.pop(index) for index in over])
        self._let_go(ended)
        with self._wake:
            self._at_work.remove(get_ident())
            self._wake.notify_all()

    def _ended(self, holds: Sequence[_Hold]) -> list[HomedWeight]:
        """Mark holds as ended; return the homes to tell. Under the lock."""
        homes = [hold.home for hold in holds if hold.is_held]
        for hold in holds:
            hold.is_held = False
        return homes

    def _let_go(self, homes: Sequence[HomedWeight]) -> None:
        for home in homes:
            home.let_go(changed=self._changed)


def session_memory(params: Iterable[Param]) -> UpdateMemory | None:
    """Return what a session gives to updates of its weights; None if none of these is in a session."""
    found = (memory_for(param) for param in params)
    return next((each for each in found if each is not None), None)


def memory_for(param: Param) -> UpdateMemory | None:
    """Return what a session gives to updates of a weight; None: its gradients have no limit."""
    home = home_of(param.tensor)
    return None if home is None or not param.tensor.requires_grad else home.update_memory


def _fill(held: Sequence[tuple[HomedWeight, int]]) -> bool:
    """Return whether two more weights would not fit beside these, with their bytes, and those kept."""
    limits = [home.streamed_bytes for home, _ in held]
    streamed = [nbytes for (_, nbytes), most in zip(held, limits, strict=True) if most is not None]
    needed = sum(streamed) + 2 * max(streamed, default=0)
    return any(most is not None and needed > most for most in limits)


def _exceed(home: HomedWeight, nbytes: int) -> bool:
    """Return whether so many bytes are more than holds are to take."""
    most = home.memory_bytes
    return most is not None and nbytes > most // 2
