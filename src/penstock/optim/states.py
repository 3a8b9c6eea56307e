"""States of one optimizer on flash: layout, steps over the tiles, and their commit.

1. ``add_group`` lays a group's parameters into tiles (:mod:`params`) and reserves places for their
   records (:mod:`store`); ``begin``, after the last of them, opens the journal.
2. ``step`` updates (:mod:`update`) every tile that has a gradient, in alternating order
   (:mod:`pipeline`), or has :mod:`overlap` finish what backward began; then it commits the step to the
   journal (:mod:`journal`) if steps are durable.
3. ``visiting`` lets state dicts and recovery read or fill tiles.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol

import torch
import xxhash
from torch import Tensor

from penstock.core.errors import ClosedError, ConfigError, PenstockWarning
from penstock.core.process import fork_guard
from penstock.homed import is_sharded
from penstock.io.engine import Engine
from penstock.optim import packing
from penstock.optim.config import RING, RING_BYTES
from penstock.optim.formats import MASTER
from penstock.optim.gradients import Gradients, Share
from penstock.optim.holds import WeightHolds, session_memory
from penstock.optim.journal import Journal, JournalEntry
from penstock.optim.params import Groups, Param, Tile, fresh_scalars, options_of
from penstock.optim.pipeline import RecordBuffer, TilePipeline
from penstock.optim.pool import make_pool, wait_for_all
from penstock.optim.probe import ProbedOptimizer
from penstock.optim.shards import Clipping, common_step, norm_over, total_norm
from penstock.optim.squeeze import Squeezer, slack_bytes
from penstock.optim.store import RecordStore
from penstock.optim.update import UpdatePass, Updater
from penstock.staging import copy_across, ready_event
from penstock.store.engine import shared_engine
from penstock.vector_math import look_up_kernels

_THREADS: Final = 2


class BackwardUpdates(Protocol):
    """Updates that run during backward. See :mod:`penstock.optim.overlap`."""

    @property
    def is_under_way(self) -> bool:
        """True if backward has begun a pass that ``finish`` has not ended."""

    def listen(self) -> None:
        """Listen to parameters that were added."""

    def follow(self, parallel: object) -> None:
        """Update after this ``DistributedDataParallel`` has averaged. Raises ConfigError."""

    def finish(self) -> None:
        """Update what is left and wait for everything. Raises as ``FlashStates.step``."""

    def is_used_now(self, param: Param) -> bool:
        """Return whether what autograd is about to tell of is a gradient's last accumulation."""

    def close(self) -> None:
        """Stop listening."""

    def forget_freed(self) -> None:
        """Take away what stands for gradients that were used up, when no thread is at work on them."""


class FlashStates:
    """States of one optimizer.

    Attributes:
        config: Settings.
        groups: States kept for each group of the optimizer.
        params: All parameters, by number.
        tiles: All tiles, by number.
        steps: Number of steps made.
        last_norm: 2-norm of the gradients in the last step that needed it.
        gradients: Storage of gradients that wait; None: they stay in memory.
        overlap: Updates during backward; None: there are none.
        holds: Holds of weights whose home is on flash, in a pass.
        has_reported_costs: True once the user was told of the memory and the bytes written.
    """

    def __init__(self, source: ProbedOptimizer) -> None:
        """Begin without any group."""
        look_up_kernels()
        self.config = config = source.config
        self.groups = Groups(source)
        self.params = self.groups.params
        self.tiles = self.groups.tiles
        self.steps = 0
        self.last_norm: Tensor | None = None
        self.overlap: BackwardUpdates | None = None
        self.has_reported_costs = False
        self._journal: Journal | None = None
        self._has_begun = False
        self._source = source
        self._backward = False  # which way the next pass goes
        self._torn: str | None = None
        self._blocked: str | None = None  # why no step can be made, not even begun
        self._closed = False
        self._guard = fork_guard()
        self._updater = Updater(source, self.params)
        self.holds = WeightHolds(
            self.params, self.tiles, resumed=weakref.WeakMethod(self._find_gradient_memory)
        )
        self._engine = shared_engine()
        self.store = RecordStore(config, self._engine, self.groups.where_of)
        # beside a backward: see [Note: when squeezing pays]
        self._squeezer = Squeezer(
            False if config.overlap and not config.squeeze else config.squeeze
        )
        self.gradients: Gradients | None = None
        if config.gradient_bytes is not None:
            self.gradients = self._make_gradients()
        self._pipeline: TilePipeline | None = None
        self._making = threading.Lock()  # plain: under ``Lock``, nothing is freed that it waits for
        self._pool: ThreadPoolExecutor | None = None

    # -- groups -----------------------------------------------------------------------------------

    def add_group(self, group: dict[str, Any]) -> None:
        """Lay a group of the optimizer into tiles.

        Raises:
            ConfigError: The optimizer is not element-wise, or the format is not for these parameters.
            NoSpaceError: The directories have no room for the states.
        """
        laid = self.groups.lay(group)
        self._retire_pipeline()
        self.store.add(laid.tiles)
        self.groups.add(laid)

    def begin(self, overlap: Callable[[FlashStates], BackwardUpdates]) -> None:
        """Open the journal and listen to backward, as configured, now that there are all groups.

        Args:
            overlap: Makes the updates during backward, if these are wanted.

        Raises:
            ConfigError: Another process holds the durable states of the directory, or another
                optimizer updates a parameter in backward.
        """
        if self.config.durable:
            self._journal = Journal(self.config.directories)
            if self._journal.last is not None:
                self._blocked = (
                    f"{self.config.directories[0]!r} holds durable steps of an earlier run, the last"
                    f" of them {self._journal.last.step}: call resume() to go on after it, load a state"
                    " dict to begin anew, or name another directory"
                )
        if self.config.overlap:
            self.overlap = overlap(self)
        self._has_begun = True
        self.listen()

    def listen(self) -> None:
        """Listen to the gradients of parameters that were added, once ``begin`` was called."""
        if not self._has_begun:
            return
        if self.overlap is not None:
            self.overlap.listen()
        elif self.gradients is not None:
            self.gradients.listen()
        self._find_gradient_memory()

    def _find_gradient_memory(self) -> None:
        """Keep gradients that wait within what a session leaves to them, unless the user has said."""
        if not self._has_begun or self._closed or self.config.gradient_bytes is not None:
            return
        if self.gradients is None and self.config.lets_gradients_wait:
            if session_memory(self.params) is None:
                return
            self.gradients = self._make_gradients()
            if self.overlap is None:
                self.gradients.listen()
        if self.gradients is not None:
            self.gradients.want()

    def _make_gradients(self) -> Gradients:
        config = self.config
        made = Gradients(
            self.params,
            self.tiles,
            budget_bytes=config.gradient_bytes,
            directories=config.directories,
            engine=self._engine,
            wants_norms=config.clip_norm is not None,
            allow_memory_filesystem=config.allow_memory_filesystem,
        )
        if self.overlap is not None:
            made.is_used_now = self.overlap.is_used_now
        return made

    def update_after(self, parallel: object) -> None:
        """See ``OnFlash.update_after``."""
        self.check_usable()
        self.check_between_steps("update_after()")
        if self.overlap is None:
            raise ConfigError(
                "update_after is for overlap=True: without it step() comes after the average anyway;"
                " leave the call out"
            )
        self.overlap.follow(parallel)

    # -- a step -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Update every parameter that has a gradient, and commit that if steps are durable.

        Raises:
            ConfigError: A parameter is not what it was, or a gradient is sparse: nothing was touched.
            TransferError: A record could not be read, or (where steps are durable) not be written.
            ChecksumError: A record is not what was written.
            ClosedError: The states are closed, or an earlier step failed in the middle.
        """
        if self.overlap is not None:
            self.overlap.finish()
        else:
            self._update_all()
        self.commit()

    def _update_all(self) -> None:
        begun = time.perf_counter()
        step = self.begin_pass()
        order = self.order(step.grads)
        turns = not self.holds.has_homes  # see ``order``
        rank = {tile.index: -place if turns else place for place, tile in enumerate(order)}
        self.begin_records(order, rank, rotating=None if turns else RING)
        if self.gradients is not None:
            self.gradients.begin(order, step.grads)
        try:
            self._run(order, lambda tile: self.update(tile, step))
        finally:
            if self.gradients is not None:
                self.gradients.end()
            self.holds.end()
        self._backward = not (turns and self._backward)
        self.end_pass(step, begun)

    def note_begun(self) -> None:
        """Note in the journal, if there is one, that the next step begins. Raises TransferError."""
        if self._journal is not None:
            self._journal.begin(self.steps + 1)

    @property
    def torn_step(self) -> int | None:
        """See ``OnFlash.torn_step``."""
        return None if self._journal is None else self._journal.torn

    @property
    def durable_step(self) -> int:
        """The last step whose journal is whole, from 1; 0: there is none."""
        last = None if self._journal is None else self._journal.last
        return 0 if last is None else last.step

    def begin_pass(self) -> UpdatePass:
        """Return a pass over all gradients, after every check that is possible before a change."""
        self.check_can_step()
        self.groups.check()
        grads: dict[int, Tensor] = {}
        for param in self.params:
            grad = param.flat_grad()
            if grad is not None and param.count:
                grads[param.index] = grad
        factor = None
        if self.config.clip_norm is not None:
            self.note_norm(grads, {})
            factor = self.factor_of(self.last_norm) if self._has_common_norm or grads else None
        self.note_begun()
        return self.make_pass(grads, factor)

    @property
    def _has_common_norm(self) -> bool:
        """Return whether the norm is of several ranks, of which some may have no gradient."""
        return self.config.clip_group is not None or self._is_sharded

    @property
    def _is_sharded(self) -> bool:
        """Return whether parameters are spread over processes, of which some may have no gradient."""
        return any(is_sharded(param.tensor) for param in self.params)

    def make_pass(self, grads: dict[int, Tensor], factor: Tensor | None) -> UpdatePass:
        """Return a pass over these gradients, with the present options of the groups."""
        options = [
            fresh_scalars(options_of(group)) for group in self._source.optimizer.param_groups
        ]
        devices = {index: self.params[index].local.device for index in grads}
        events = {device: ready_event(device) for device in {*devices.values()}}
        ready = {index: events[device] for index, device in devices.items()}
        was_set = frozenset(param.index for param in self.params if param.was_set)
        return UpdatePass(self.steps + 1, options, grads, factor, {}, ready, was_set)

    def order(self, grads: Mapping[int, Tensor]) -> list[Tile]:
        """Return the tiles to visit, in this pass's direction.

        It alternates, but always goes back if weights have homes, so that the first ones, which the
        next forward needs, are there.
        """
        found = [t for t in self.tiles if any(piece.param in grads for piece in t.pieces)]
        return found[::-1] if self._backward or self.holds.has_homes else found

    def update(self, tile: Tile, step: UpdatePass) -> None:
        """Update one tile. In any thread."""
        pipeline = self.pipeline
        buffer = pipeline.acquire(tile)
        try:
            with self._grads_of(tile, step) as grads:
                kept, initial = self.groups.kept_in(tile), self.groups.initial_in(tile)
                for part in self.holds.parts(tile, step.grads):
                    with self.holds.of_tile(part, step.grads):
                        self._updater.update(
                            part, buffer, step, grads=grads, kept=kept, initial=initial
                        )
        except BaseException:
            pipeline.drop(buffer)
            raise
        pipeline.release(buffer)

    def _grads_of(
        self, tile: Tile, step: UpdatePass
    ) -> AbstractContextManager[Mapping[int, Share]]:
        if self.gradients is not None:
            return self.gradients.of_tile(tile, step.grads)
        params = (piece.param for piece in tile.pieces)
        return nullcontext({p: (step.grads[p], 0) for p in params if p in step.grads})

    def end_pass(self, step: UpdatePass, begun_s: float) -> None:
        """Count the step, all of whose tiles were visited.

        Args:
            step: The pass.
            begun_s: When the training thread began to wait for it.
        """
        for param in self.params:
            if not param.count and param.tensor.grad is not None:
                initial = self.groups.laid[param.group].initial
                form = self.groups.form(param)
                self._updater.update_empty(param, form, step, initial)
        for index, scalars in step.scalars.items():
            self.params[index].scalars = scalars
            self.params[index].has_state = True
            self.params[index].note()
        self.steps = step.number
        waited, self.pipeline.waited_s = self.pipeline.waited_s, 0.0
        self._squeezer.judge(took_s=time.perf_counter() - begun_s, waited_s=waited)
        failure = self.pipeline.write_failure
        if failure is not None and not self.config.durable:
            warnings.warn(
                f"states could not be written and stay in memory, until they can: {failure}",
                PenstockWarning,
                stacklevel=4,
            )

    def mark_inconsistent(self, error: BaseException) -> None:
        """Refuse further use: a step failed, so some parameters were updated and some were not."""
        self._torn = (
            f"step {self.steps + 1} failed in the middle ({type(error).__name__}: {error}): some"
            " parameters were updated and some were not; load weights and a state dict"
        )

    def check_can_step(self) -> None:
        """Raise ClosedError or ConfigError if no step can be made now."""
        self.check_usable()
        if self._blocked is not None:
            raise ConfigError(self._blocked)

    def check_between_steps(self, what: str) -> None:
        """Raise ConfigError if backward has begun a step that was not finished."""
        if self.overlap is not None and self.overlap.is_under_way:
            raise ConfigError(f"{what} between backward and step: overlap=True has begun the step")

    def check_usable(self) -> None:
        """Raise ClosedError if the states are not there."""
        if self._guard.in_child:
            raise self._guard.error("this optimizer", "make one here")
        if self._closed:
            raise ClosedError("this optimizer's states were closed, and are gone")
        if self._torn is not None:
            raise ClosedError(self._torn)

    def mark_consistent(self) -> None:
        """Allow use again: weights and states were all loaded."""
        self._torn = None
        for param in self.params:
            if param.has_state:
                param.note()

    def factor_of(self, norm: Tensor | None) -> Tensor:
        """Return the factor that clips gradients of this norm, as ``clip_grads_with_norm_`` does."""
        assert self.config.clip_norm is not None
        assert norm is not None
        return torch.clamp(self.config.clip_norm / (norm.cpu() + 1e-6), max=1.0)

    @property
    def _clipping(self) -> Clipping:
        assert self.config.clip_norm is not None
        return Clipping(float(self.config.clip_norm), self.config.overlap)

    def note_norm(self, grads: Mapping[int, Tensor], known: Mapping[int, Tensor]) -> None:
        """Take the norm of all gradients as the last one; of parameters on many ranks, over all of them.

        Args:
            grads: By parameter.
            known: Norms of some of them, by parameter.
        """
        norm = self._norm_of(grads, known)
        if self.config.clip_group is not None:
            norm = norm_over(self.config.clip_group, norm, self._clipping)
        if norm is not None:
            self.last_norm = norm

    def _norm_of(self, grads: Mapping[int, Tensor], known: Mapping[int, Tensor]) -> Tensor | None:
        """Return the norm without other ranks of ``clip_group``; None if there is no gradient."""
        in_order = sorted(grads.items())  # so that the sum is the same with overlap
        if not known and not self._is_sharded:
            return torch.nn.utils.get_total_norm([grad for _, grad in in_order]) if grads else None
        norms = {i: known[i] if i in known else torch.linalg.vector_norm(g) for i, g in in_order}
        if self._is_sharded:
            return total_norm([param.tensor for param in self.params], norms, self._clipping)
        found = list(norms.values())
        together = torch.stack([norm.to(found[0].device) for norm in found])
        whole: Tensor = torch.linalg.vector_norm(together)
        return whole

    def _run(self, tiles: Iterable[Tile], visit: Callable[[Tile], None]) -> None:
        futures = [self.pool.submit(visit, tile) for tile in tiles]
        try:
            wait_for_all(futures)
        except BaseException as error:
            self.mark_inconsistent(error)
            raise
        finally:
            futures.clear()  # an error that is kept refers to this frame

    # -- durable steps ----------------------------------------------------------------------------

    def commit(self) -> None:
        """Write the last step to the journal, if there is one. Raises TransferError."""
        if self._journal is None:
            return
        self.pipeline.flush()
        doubtful = [tile for tile in self.tiles if self.store.is_doubtful(tile)]
        for tile in doubtful:  # write again what a failed sync left in doubt
            with self.visiting(tile, change=True):
                pass
        if doubtful:
            self.pipeline.flush()
        self.store.sync()
        params = tuple((p.has_state, p.scalars) for p in self.params)
        places = self.store.places()
        self._journal.write(
            JournalEntry(self.steps, self._layout(), places, params, self.last_norm)
        )
        self.store.commit()

    def resume(self) -> int:
        """See ``OnFlash.resume``."""
        self.check_between_steps("resume()")
        if self._journal is None:
            raise ConfigError(
                "there is nothing to resume: set durable=True, for this run and the next"
            )
        entries = [e for e in (self._journal.last, self._journal.before) if e is not None]
        step = common_step([entry.step for entry in entries])
        if entries and entries[0].step != step:  # others have not completed it
            for entry in entries[1:]:
                self._check_layout(entry)
            self._journal.go_back()
        if self._journal.last is not None:
            self._restore(self._journal.last)
        self._blocked = None
        return step

    def prepare_for_load(self) -> None:
        """Protect the last durable step while all states are replaced, or forget it first.

        It is kept until there is a newer one if its records lie where those of this model do. Raises
        TransferError.
        """
        last = None if self._journal is None else self._journal.last
        if self._journal is None or last is None:
            return
        if last.layout == self._layout():
            self.store.protect(last.tiles)
        else:
            self._journal.clear()

    def loaded(self) -> None:
        """Commit the states that were loaded; those of an earlier run may be overwritten now."""
        self._blocked = None
        self.commit()

    def _layout(self) -> str:
        """Return a digest of what lies where."""
        facts = [
            [t.group, t.form.format, str(t.form.param_dtype), t.elements, t.record_bytes]
            for t in self.tiles
        ]
        shapes = [[list(p.local.shape), list(p.local.stride()), p.group] for p in self.params]
        arrays = {array for tile in self.tiles for array in tile.arrays}
        names = sorted([a.name, a.packing, str(a.dtype), a.nbytes] for a in arrays)
        count = len(self.config.directories)
        everything = json.dumps([self.class_name, facts, shapes, names, count])
        return xxhash.xxh3_128_hexdigest(everything.encode())

    def _check_layout(self, entry: JournalEntry) -> None:
        if entry.layout != self._layout():
            raise ConfigError(
                f"the durable steps in {self.config.directories[0]!r} are of another model, other"
                " groups, another format or tile, or another number of ranks; make the optimizer as it"
                " was then, or name another directory"
            )

    def _restore(self, entry: JournalEntry) -> None:
        self._check_layout(entry)
        self.pipeline.forget_all()
        self.store.restore(entry.tiles, self.tiles)
        for param, (has_state, scalars) in zip(self.params, entry.params, strict=True):
            param.has_state = has_state
            param.scalars = dict(scalars)
        self.steps = entry.step
        self.last_norm = entry.norm
        try:
            self._restore_weights()
        except BaseException as error:
            self.mark_inconsistent(error)
            raise
        self.mark_consistent()

    def _restore_weights(self) -> None:
        """Set the weights to the masters in the records."""
        tiles = [tile for tile in self.tiles if tile.index in self.store.filled]
        self.begin_visits(tiles)
        wanted = {param.index for param in self.params if param.has_state}
        with WeightHolds(self.params, self.tiles) as holds, torch.no_grad():
            for tile in tiles:
                masters = next(array for array in tile.arrays if array.name == MASTER)
                with holds.of_tile(tile, wanted), self.visiting(tile, change=False) as buffer:
                    for piece in tile.pieces:
                        param = self.params[piece.param]
                        if param.has_state:
                            target = param.flat()[piece.start : piece.stop]
                            source = packing.plain(masters, buffer.memory, piece.at, target.numel())
                            copy_across(source, target, ready_event(target.device))

    # -- others -----------------------------------------------------------------------------------

    @property
    def class_name(self) -> str:
        """Name of the class whose step is run on tiles."""
        return self._source.name

    @contextmanager
    def visiting(self, tile: Tile, *, change: bool) -> Iterator[RecordBuffer]:
        """Yield the buffer with a tile's record, to look at or to fill."""
        buffer = self.pipeline.acquire(tile)
        try:
            yield buffer
        except BaseException:
            self.pipeline.drop(buffer)
            raise
        self.pipeline.release(buffer, changed=change)

    def begin_visits(self, tiles: Sequence[Tile]) -> None:
        """Read ahead for visits to these tiles in this order."""
        rank = {tile.index: place for place, tile in enumerate(self.tiles)}
        self.begin_records(tiles, rank, rotating=RING)

    def begin_records(
        self, order: Sequence[Tile], rank: Mapping[int, int], *, rotating: int | None
    ) -> None:
        """Begin a pass of the pipeline, with what memory a session has for records."""
        memory = session_memory(self.params)
        self.pipeline.begin(order, rank, rotating=rotating, lender=memory)

    @property
    def threads(self) -> int:
        """Number of tiles updated at once."""
        if self.config.threads is not None:
            return self.config.threads
        return 1 if self.config.overlap else max(1, min(_THREADS, torch.get_num_threads()))

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that update tiles; started when they are first needed."""
        if self._pool is None:
            devices = (param.local.device for param in self.params)
            device = next((each for each in devices if each.type == "cuda"), None)
            self._pool = make_pool(self.threads, device)
        return self._pool

    @property
    def pipeline(self) -> TilePipeline:
        """Buffers that records pass through; made when they are first needed."""
        if self._pipeline is None:
            self.make_buffers()
        assert self._pipeline is not None
        return self._pipeline

    @property
    def has_buffers(self) -> bool:
        """True if records have buffers now."""
        return self._pipeline is not None

    def make_buffers(self) -> None:
        """Make the buffers, if there are none. Others may free memory for them, so it may wait.

        Raises:
            BudgetError: There is no memory for them.
        """
        with self._making:
            if self._pipeline is not None:
                return
            longest = max((tile.record_bytes for tile in self.tiles), default=0)
            ring = max(RING, RING_BYTES * self.config.tile // max(longest, 1))
            ring += max(0, self.threads - _THREADS)
            room = max((tile.record_bytes + slack_bytes(tile) for tile in self.tiles), default=0)
            wanted = self.config.host_bytes // max(room, 1)
            count = max(1, min(max(ring, wanted), len(self.tiles)))
            self._pipeline = TilePipeline(
                self.store,
                count=count,
                least=min(count, self.threads + 2),
                buffer_bytes=room,
                write_through=self.config.durable,
                squeezer=self._squeezer,
                most=0 if self.config.host_bytes else len(self.tiles),
            )

    def rest(self) -> None:
        """Write all states to flash and free their memory until the next step.

        Raises:
            TransferError: A record could not be written; it is still in memory.
        """
        self.check_usable()
        self._retire_pipeline()
        if self.gradients is not None:
            self.gradients.trim()

    def _retire_pipeline(self) -> None:
        """Free the buffers; the next ones may be more, or longer."""
        if self._pipeline is None:
            return
        self._pipeline.flush()
        retired, self._pipeline = self._pipeline, None
        retired.close()

    def wrap_engine(self, wrap: Callable[[Engine], Engine]) -> None:
        """Have what moves from now on go through ``wrap(engine)``; neither of the two is closed."""
        self._engine = self.store.files.engine = wrap(self._engine)
        if self.gradients is not None:
            self.gradients.replace_engine(self._engine)

    def close(self) -> None:
        """Wait for what is in flight, and free everything; the states are gone. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.overlap is not None:
            self.overlap.close()
        if self._guard.in_child:
            return  # threads and transfers are the parent's
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self.overlap is not None:
            self.overlap.forget_freed()
        self.holds.end()
        if self._pipeline is not None:
            self._pipeline.close()
        if self.gradients is not None:
            self.gradients.close()
        self.store.close()
        if self._journal is not None:
            self._journal.close()

    def __getstate__(self) -> Any:
        """Refuse to be copied or pickled."""
        raise ConfigError("states on flash cannot be copied or pickled")
