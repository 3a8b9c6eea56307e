"""A directory of checkpoints of one run: it has one writer, and keeps the last ones.

The interval between saves follows CheckFreq (Mohan, Phanishayee, Chidambaram; FAST 2021): from the time
of a step, the time for which a save blocks training, and the time that it writes.
"""

from __future__ import annotations

import errno
import math
import operator
import os
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from penstock.checkpoint.api import CheckpointStore, Saved
from penstock.checkpoint.background import Saving, failure_told, steady_in
from penstock.checkpoint.disk import Directory, leads_to, lock
from penstock.checkpoint.frames import Encoder
from penstock.checkpoint.listeners import is_wanted, listeners
from penstock.checkpoint.listing import Info, info_of, listing, name_of_step, steps_in
from penstock.checkpoint.staging import (
    SPARE,
    advice_for_ranks,
    check_only_ours,
    hidden_name_of,
    is_hidden,
    remove_leftovers,
    retire,
)
from penstock.checkpoint.stateful import frozen_in, optimizers_in, parts_of
from penstock.checkpoint.streams import BUFFERS_BYTES, count_within
from penstock.checkpoint.tensors import Prepared
from penstock.checkpoint.values import Json
from penstock.core.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    DamagedError,
    PenstockError,
    PenstockWarning,
    TransferError,
)
from penstock.core.files import absolute_path
from penstock.core.units import MIB, format_bytes, parse_bytes

_REMEMBERED: Final = 25
"""Number of steps and saves in the medians."""


class Interval:
    """Steps between two saves. Not thread-safe.

    Attributes:
        steps: The present interval.
    """

    def __init__(
        self, overhead: float, *, first_steps: int = 10, most_steps: int = 100_000
    ) -> None:
        """Begin without a measurement.

        Args:
            overhead: Fraction that saving may add to the time of training: 0.01 is 1 %.
            first_steps: Interval until a save was measured.
            most_steps: Longest interval.

        Raises:
            ConfigError: The overhead is not between 0 and 1, or an interval is not positive.
        """
        if not 0.0 < overhead < 1.0:
            raise ConfigError(f"an overhead of {overhead} is not between 0 and 1; 0.01 is 1 %")
        if not 1 <= first_steps <= most_steps:
            raise ConfigError(f"intervals from {first_steps} to {most_steps} steps make no sense")
        self.steps = first_steps
        self._overhead = overhead
        self._most = most_steps
        self._step_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._stall_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._busy_s: deque[float] = deque(maxlen=_REMEMBERED)

    def stepped(self, seconds: float) -> None:
        """Note the time of a step, without that of saving."""
        self._step_s.append(seconds)
        self._tune()

    def saved(self, *, stall_s: float, busy_s: float) -> None:
        """Note how long a save blocked training, and how long it took until it was durable."""
        self._stall_s.append(stall_s)
        self._busy_s.append(busy_s)
        self._tune()

    def _tune(self) -> None:
        if not self._stall_s or not self._step_s:
            return
        step_s = max(statistics.median(self._step_s), 1e-9)
        allowed = statistics.median(self._stall_s) / (self._overhead * step_s)
        writing = statistics.median(self._busy_s) / step_s  # one save at a time
        self.steps = min(self._most, max(1, math.ceil(allowed), math.ceil(writing)))


_OWN_BYTES: Final = 6 * MIB
"""Memory for stacks of threads, the manifest and Python's objects: 2.6 MiB for a state of 1.3 GB."""


def shares_of(memory_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Divide the memory of a save in the background between buffers and copies.

    Buffers get as much as in any save, three quarters at most, at least three blocks. More would keep the
    device no busier, and copies spare the optimizer a wait.

    Args:
        memory_bytes: Memory that a save may take.
        block_bytes: Length of a block.

    Returns:
        Bytes for blocks in flight, and for copies of what is about to change.

    Raises:
        ConfigError: The memory is too little.
    """
    rest = memory_bytes - _OWN_BYTES
    buffers = count_within(min(BUFFERS_BYTES, rest * 3 // 4), block_bytes) * block_bytes
    if rest < buffers:
        raise ConfigError(
            f"memory={format_bytes(memory_bytes)} is too little for a save, which takes"
            f" {format_bytes(_OWN_BYTES + buffers)} at least"
        )
    return buffers, rest - buffers


@dataclass(slots=True)
class Stats:
    """Cost of saving so far.

    Attributes:
        saves: Checkpoints that became durable.
        failures: Saves that failed; earlier checkpoints stayed.
        stall_s: Time for which training was blocked.
        write_s: Time of the saves, from their beginning until they were durable.
        written_bytes: Bytes written to the device.
        reused_bytes: Bytes of those that were written over files of a retired checkpoint.
        copied_bytes: Bytes copied because they were about to change before they were written.
    """

    saves: int = 0
    failures: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    written_bytes: int = 0
    reused_bytes: int = 0
    copied_bytes: int = 0


class Checkpointer:
    """Checkpoints of one run in one directory, of which it is the only writer. For one thread.

    Attributes:
        directory: Absolute path of the directory.
        stats: Cost of saving so far.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        every: int | None = None,
        overhead: float | None = None,
        incremental: bool = False,
        codec: str | None = None,
        memory: int | str = "64MiB",
        reuse: bool = True,
        store: CheckpointStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create the directory if it does not exist, lock it, and remove what dead writers left.

        Args:
            directory: Path on a local disk.
            keep: Number of checkpoints to keep, at least 1: those of the last steps, and always the one
                saved last. During a save there is one more.
            every: Interval in steps at which ``due`` is true.
            overhead: Tune the interval instead, so that saving adds this fraction, such as 0.01, to the
                time of training.
            incremental: Share unchanged files with the last checkpoint. One that is damaged later is
                then damaged in both.
            codec: As for :func:`penstock.checkpoint.save`.
            memory: Most memory of a save in the background, in bytes or as ``"64MiB"``: for buffers, and
                for copies of what changes before it is written. For what does not fit, training waits.
            reuse: Write over the files of a retired checkpoint, which is kept as a spare; its space is
                not free meanwhile. See [Note: spare files]. Without effect if ``incremental``, as
                checkpoints then share files.
            store: Saves and loads; for tests.
            clock: Returns seconds.

        Raises:
            ConfigError: A setting is invalid, or another writer has the directory.
            TransferError: The directory cannot be made or opened.
        """
        for name, count in (("keep", keep), ("every", 1 if every is None else every)):
            if not _is_whole(count) or count < 1:
                raise ConfigError(f"{name}={count!r}: it must be a whole number, at least 1")
        if every is not None and overhead is not None:
            raise ConfigError("every=... and overhead=... are two ways to say how often: give one")
        self.directory = absolute_path(directory, "the directory of checkpoints")
        self.stats = Stats()
        self._keep = keep
        self._every = every
        self._interval = None if overhead is None else Interval(overhead)
        self._incremental = incremental
        self._encoder = None if codec is None else Encoder(codec)
        self._store = CheckpointStore() if store is None else store
        self._buffers_bytes, self._copies_bytes = shares_of(
            parse_bytes(memory, what="memory"), self._store.block_bytes
        )
        self._reuse = reuse and not incremental
        self._clock = clock
        self._saving: tuple[Saving, float] | None = None  # and what its stall was when it had begun
        self._last_due: tuple[int, float] | None = None
        self._stalled_s = 0.0
        self._store.disk.make_path(self.directory)
        self._root: Directory | None = self._store.disk.open(self.directory)
        try:
            if not lock(self._root):
                raise ConfigError(
                    f"{self.directory!r} is held by another Checkpointer, in this process or another:"
                    f" close that, or name another directory{advice_for_ranks()}"
                )
            self._store.disk.sync(self._root)  # a killed writer may not have done it
            with _not_on_read_only():
                self._remove_leftovers(self._root)
            for each in listeners:
                each.opened()
        except BaseException:
            self._root.close()
            raise

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def due(self, step: int) -> bool:
        """Return whether to save after this step; call it once after each.

        It is also true when the process is to sleep and its state must survive.
        """
        now = self._clock()
        if self._interval is not None:
            if self._last_due is not None and step > self._last_due[0]:
                steps, began = step - self._last_due[0], self._last_due[1]
                self._interval.stepped(max(0.0, now - began - self._stalled_s) / steps)
            self._last_due, self._stalled_s = (step, now), 0.0
        every = self.interval_steps
        return is_wanted() or (every is not None and step > 0 and step % every == 0)

    @property
    def interval_steps(self) -> int | None:
        """Present number of steps between two saves; None if neither every nor overhead was given."""
        return self._every if self._interval is None else self._interval.steps

    def save(
        self,
        step: int,
        state: object,
        *,
        wait: bool = True,
        facts: Mapping[str, Json] | None = None,
    ) -> Saving | Saved:
        """Save the state after a step, when an earlier save has ended.

        If older checkpoints cannot be removed, this warns with PenstockWarning: the new one is good.

        Args:
            step: Number of the step, whose checkpoint is replaced if there is one.
            state: As for :func:`penstock.checkpoint.save`.
            wait: Wait until it is durable. False: training goes on meanwhile. Until it is durable only
                the ``step`` of optimizers in the state may change its parameters; other code calls
                ``before_update`` of the returned object first. Everything else in the state is copied
                at once.
            facts: Further facts for the manifest.

        Returns:
            The finished save, or with ``wait=False`` the running one.

        Raises:
            CheckpointError: Something in the state has no form in a checkpoint; or the directory was
                replaced.
            NoSpaceError: There is no room; existing checkpoints stay.
            TransferError: The device refuses; existing checkpoints stay.
        """
        root = self._check_open()
        if not _is_whole(step) or not 0 <= step < 10**18:
            raise ConfigError(f"step {step!r} is no whole number between 0 and 10^18")
        step = operator.index(step)
        start = self._clock()
        self._settle()
        settled = self._clock()
        waits = wait or is_wanted()
        path = os.path.join(root.path, name_of_step(step))
        private: list[Any] = []
        prepared = self._store.prepare(state, private=private)
        base = self._base()

        def write(watcher: Saving | None = None, regions: Any = None) -> Saved:
            self._check_same(root)
            with suppress(PenstockError):  # space of a failed save that could not remove its files
                self._remove_leftovers(root, but=SPARE)
            said = {"step": step, **(facts or {})}
            return self._store.write(
                path,
                prepared,
                facts=said,
                base=base,
                encoder=self._encoder,
                watcher=watcher,
                regions=regions,
                buffers_bytes=BUFFERS_BYTES if watcher is None else self._buffers_bytes,
                reuse=self._reuse,
            )

        try:
            if waits:
                saved = self._count(write(), settled)
                for each in listeners:
                    each.saved(path, step, state)
                return saved
            return self._begin(state, prepared, private, write, settled)
        except PenstockError:
            self.stats.failures += waits
            raise
        finally:
            self._held_up(start)

    def wait(self) -> None:
        """Wait until a running save is durable. Raises its error."""
        self._check_open()
        start = self._clock()
        try:
            self._finish()
        finally:
            self._held_up(start)

    def checkpoints(self) -> list[Info]:
        """List the checkpoints, the latest step first. Raises TransferError."""
        return listing(self.directory)

    def latest(self) -> Info | None:
        """Return the last checkpoint whose manifest is whole and whose files exist."""
        return next((each for each in self.checkpoints() if each.ok), None)

    def load(
        self,
        into: object = None,
        *,
        step: int | None = None,
        partial: bool = False,
        fall_back: bool = True,
    ) -> Any:
        """Load the latest checkpoint, or that of a step.

        Args:
            into: As for :func:`penstock.checkpoint.load`.
            step: Number of the step; None for the latest.
            partial: As for :func:`penstock.checkpoint.load`.
            fall_back: Pass over a damaged latest one, with a warning that names it.

        Returns:
            The state; None if there is no checkpoint and no step was named.

        Raises:
            DamagedError: It is damaged; names the one before, which may be loaded.
            CheckpointError: There is none of that step; or as ``load``.
        """
        self._finish()
        there = [each for each in self.checkpoints() if step is None or each.step == step]
        if not there and step is not None:
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self.directory!r}; there are steps"
                f" {[each.step for each in self.checkpoints()]}"
            )
        for index, info in enumerate(there):
            try:
                state = self._store.load(info.path, into, partial=partial)
                for each in listeners:
                    each.loaded(info.path)
                return state
            except DamagedError as error:
                before = next(
                    (each for each in self.checkpoints() if each.ok and each.step < info.step), None
                )
                offer = (
                    "there is none before it" if before is None else f"before it is {before.path!r}"
                )
                if not fall_back or index == len(there) - 1:
                    raise DamagedError(
                        f"{error}; {offer}", path=error.path, overwritten=error.overwritten
                    ) from error
                warnings.warn(f"{error}; {offer}", PenstockWarning, stacklevel=2)
        return None

    def close(self) -> None:
        """Wait for a running save, and unlock the directory. Idempotent. Raises the save's error."""
        root, self._root = self._root, None
        if root is None:
            return
        try:
            self._finish(root)
        finally:
            with suppress(PenstockError):  # the next Checkpointer removes what is left
                self._store.disk.remove(root, SPARE)
            root.close()

    def _begin(
        self, state: object, prepared: Prepared, private: list[Any], write: Any, start: float
    ) -> Saving:
        optimizers = optimizers_in(state)
        prepared_s = self._clock() - start
        saving = Saving(
            prepared,
            write,
            steady=steady_in(optimizers, [*parts_of(private), *frozen_in(state)]),
            optimizers=optimizers,
            copies_bytes=self._copies_bytes,
        )
        saving.stall_s += prepared_s
        self._saving = saving, saving.stall_s
        return saving

    def _settle(self) -> None:
        """End a running save before the next; warn if it failed, so that training goes on."""
        try:
            self._finish()
        except PenstockError as error:
            warnings.warn(failure_told(error), PenstockWarning, stacklevel=4)

    def _finish(self, root: Directory | None = None) -> None:
        if self._saving is None:
            return
        saving, known_s = self._saving
        self._saving = None
        self._stalled_s += saving.stall_s - known_s  # in steps; what calls take is counted there
        try:
            saved = saving.wait()
        except PenstockError:
            self.stats.failures += 1
            raise
        finally:
            self.stats.stall_s += saving.stall_s
            self.stats.copied_bytes += saving.copied_bytes
        if self._interval is not None:
            self._interval.saved(stall_s=saving.stall_s, busy_s=saved.seconds)
        start = self._clock()
        self._add(saved, root)
        self.stats.stall_s += self._clock() - start

    def _count(self, saved: Saved, start: float) -> Saved:
        self._add(saved, None)
        held = self._clock() - start
        self.stats.stall_s += held
        if self._interval is not None:
            self._interval.saved(stall_s=held, busy_s=held)
        return saved

    def _add(self, saved: Saved, root: Directory | None) -> None:
        self.stats.saves += 1
        self.stats.write_s += saved.seconds
        self.stats.written_bytes += saved.written_bytes
        self.stats.reused_bytes += saved.reused_bytes
        root = self._check_open() if root is None else root
        try:
            self._retire(root, saved.path)
        except (TransferError, CheckpointError) as error:
            warnings.warn(
                f"{saved.path!r} is saved, but what is older could not be removed: {error}; the next"
                " save tries again",
                PenstockWarning,
                stacklevel=4,
            )

    def _held_up(self, start: float) -> None:
        self._stalled_s += self._clock() - start

    def _retire(self, root: Directory, newest: str) -> None:
        """Remove checkpoints older than the last ``keep`` whole ones; one of them becomes the spare.

        Args:
            root: The directory.
            newest: Path of the one just saved: it is whole, and stays, whatever its step.
        """
        self._remove_leftovers(root, but=SPARE)
        disk, whole = self._store.disk, 0
        refused: CheckpointError | None = None
        for step, path in steps_in(self.directory):
            if whole < self._keep:
                whole += path == newest or info_of(step, path).ok
                continue
            if path == newest:
                continue
            name = os.path.basename(path)
            try:
                check_only_ours(path)
            except CheckpointError as error:
                refused = error
                continue
            if not (self._reuse and retire(disk, root, name)):
                hidden = hidden_name_of(name)
                disk.remove(root, hidden)
                disk.rename(root, name, hidden)
                disk.remove(root, hidden)
        if refused is not None:
            raise refused

    def _remove_leftovers(self, root: Directory, *, but: str = "") -> None:
        names = [name for name in root.names() if is_hidden(name) and name != but]
        remove_leftovers(self._store.disk, root, names)

    def _base(self) -> str | None:
        latest = self.latest() if self._incremental else None
        return None if latest is None else latest.path

    def _check_same(self, root: Directory) -> None:
        """Raise CheckpointError if the path leads to another directory, which is not locked."""
        if not leads_to(self.directory, root):
            raise CheckpointError(
                f"{self.directory!r} is not the directory any more that this Checkpointer has: that was"
                " removed, moved, or unmounted, or the path leads elsewhere now; put it back, or make"
                " another Checkpointer"
            )

    def _check_open(self) -> Directory:
        if self._root is None:
            raise ClosedError(f"the Checkpointer of {self.directory!r} is closed")
        return self._root


@contextmanager
def _not_on_read_only() -> Iterator[None]:
    """Ignore that a file system has become read-only: checkpoints can still be loaded."""
    try:
        yield
    except TransferError as error:
        if error.errno != errno.EROFS:
            raise


def _is_whole(value: object) -> bool:
    """Return whether it is a whole number, also one of NumPy."""
    return hasattr(value, "__index__") and not isinstance(value, bool)
