"""Saving while training goes on.

[Note: copy at the boundary]
    Parameters and optimizer states change at one moment only: in the optimizer's step. So a save may read
    them until then, from the tensors themselves, in another thread. A hook before the step copies what
    has not been read yet, the last to be written first, until a budget of bytes is used up, and waits
    for the rest to be read. Everything else in the state (buffers, generators, averages) may change at
    any moment and is copied before ``save`` returns. A tensor that is changed all the same is noticed
    by its version, and the save fails: a checkpoint is of one moment or is not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from penstock.checkpoint.fresh import Fresh
from penstock.checkpoint.leaves import Leaf
from penstock.checkpoint.moves import Plain, Region
from penstock.checkpoint.store import Prepared, Saved
from penstock.core.errors import CheckpointError
from penstock.core.locks import condition

Write = Callable[["Saving", list[list[tuple[int, Region]]]], Saved]
"""Writes the regions of all files, telling the first argument which bytes are not read any more."""


class Source(Region):
    """A tensor's bytes, until a copy takes their place."""

    def __init__(self, region: Region, leaf: Leaf, file: int, end: int) -> None:
        """Look at the tensor.

        Args:
            region: Its bytes.
            leaf: It.
            file: Number of the file that it goes to.
            end: Where it ends there.
        """
        self.nbytes = region.nbytes
        self.file = file
        self.end = end
        self.is_copied = False
        self._region = region
        self.storage = _storage(leaf.tensor)
        self._leaf: Leaf | None = leaf
        self._version = leaf.tensor._version

    def copy_out(self, start: int, stop: int, address: int) -> None:
        """Copy some bytes to memory. Raises CheckpointError if the tensor was changed."""
        self._region.copy_out(start, stop, address)
        self._check()

    def copy_in(self, start: int, stop: int, address: int) -> None:
        """Not for what is saved."""
        raise AssertionError("what is saved is not written to")

    def copy(self, memory: torch.Tensor) -> None:
        """Take its bytes to memory of that length, and look at the tensor no more."""
        self._region.copy_out(0, self.nbytes, memory.data_ptr())
        self._check()
        self._region = Plain(memory)
        self._leaf = None
        self.is_copied = True

    def forget(self) -> None:
        """Nobody needs it any more."""
        self._leaf = None
        self.is_copied = True

    def _check(self) -> None:
        if self._leaf is not None and self._leaf.tensor._version != self._version:
            raise CheckpointError(
                f"{self._leaf.name} was changed while it was being saved, not by a step of an optimizer"
                " in the state: this save is given up; call wait() or before_update() before that change"
            )


class Saving:
    """A save on its way, in a thread of its own. Its methods are for the training thread.

    Attributes:
        stall_s: What it has held training up, so far.
        copied_bytes: What had to be copied.
    """

    def __init__(
        self,
        prepared: Prepared,
        write: Write,
        *,
        steady: frozenset[int],
        optimizers: Sequence[torch.optim.Optimizer],
        budget_bytes: int,
    ) -> None:
        """Copy what may change at any moment, and begin to write.

        Args:
            prepared: What is saved.
            write: Writes it.
            steady: Addresses of storages that change in the optimizers' steps only, or never.
            optimizers: Those optimizers.
            budget_bytes: What may be copied in all; the rest is waited for.
        """
        start = time.perf_counter()
        self.stall_s = 0.0
        self.copied_bytes = 0
        self._budget_bytes = budget_bytes
        self._changed = condition()
        self._released = (0, 0)
        self._over = False
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._fresh = Fresh()
        regions = self._sources(prepared)
        unsteady = [each for each in self._all if each.storage not in steady]
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in optimizers]
        self._thread = threading.Thread(
            target=self._run, args=(write, regions), name="penstock-checkpoint"
        )
        self._thread.start()
        self._let_change(unsteady)
        self.stall_s += time.perf_counter() - start

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over

    def wait(self) -> Saved:
        """Wait until it is durable. Raises as :func:`penstock.checkpoint.save`."""
        start = time.perf_counter()
        self._thread.join()
        self.stall_s += time.perf_counter() - start
        self._let_go()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def before_update(self) -> None:
        """Everything in the state may change when this returns; optimizers of torch call it."""
        start = time.perf_counter()
        self._let_change(self._all)
        self._let_go()
        self.stall_s += time.perf_counter() - start

    def _let_change(self, sources: Sequence[Source]) -> None:
        """Copy what the budget allows, from the end, for the thread comes from the beginning."""
        for source in reversed(sources):
            with self._changed:
                if source.is_copied or self._is_released(source):
                    continue
                if self.copied_bytes + source.nbytes > self._budget_bytes:
                    break
                self._take(source)
        with self._changed:
            while not self._over and any(
                not source.is_copied and not self._is_released(source) for source in sources
            ):
                self._changed.wait()

    # -- for the thread that writes -------------------------------------------------------------------

    def filling(self) -> AbstractContextManager[object]:
        """Tensors are read within this."""
        return self._changed

    def released(self, file: int, end: int) -> None:
        """Of a file, by its number, the bytes before ``end`` are not read any more."""
        with self._changed:
            self._released = (file, end)
            self._changed.notify_all()

    def _run(self, write: Write, regions: list[list[tuple[int, Region]]]) -> None:
        try:
            self._saved = write(self, regions)
        except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
            self._error = error.with_traceback(None)
        with self._changed:
            self._over = True
            for source in self._all:
                source.forget()
            self._changed.notify_all()

    def _before_step(self, *_: Any) -> None:
        self.before_update()

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _sources(self, prepared: Prepared) -> list[list[tuple[int, Region]]]:
        made: list[list[tuple[int, Region]]] = []
        self._all: list[Source] = []
        for number, plan in enumerate(prepared.plans):
            members = [i for i in plan.leaves if prepared.leaves[i].nbytes]
            header, *others = plan.regions(prepared.leaves)
            file: list[tuple[int, Region]] = [header]
            for index, (offset, region) in zip(members, others, strict=True):
                leaf = prepared.leaves[index]
                source = Source(region, leaf, number, offset + region.nbytes)
                self._all.append(source)
                file.append((offset, source))
            made.append(file)
        return made

    def _take(self, source: Source) -> None:
        source.copy(self._fresh.memory(source.nbytes))
        self.copied_bytes += source.nbytes

    def _is_released(self, source: Source) -> bool:
        return (source.file, source.end) <= self._released


def steady_in(
    optimizers: Sequence[torch.optim.Optimizer], private: Sequence[torch.Tensor]
) -> frozenset[int]:
    """Addresses of storages that change in steps of the optimizers only, or that nobody else has."""
    found = {_storage(each) for each in private}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update(_storage(each) for each in group["params"])
        for state in optimizer.state.values():
            found.update(_storage(v) for v in state.values() if isinstance(v, torch.Tensor))
    return frozenset(found)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
