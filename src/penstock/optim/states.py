"""The states of one optimizer on flash: what is where, and how a step passes over it.

1. ``add_group`` has a group's parameters laid into tiles (:mod:`groups`), and reserves their place
   (:mod:`store`).
2. ``step`` visits every tile that has a gradient, in an order that alternates (:mod:`pipeline`), and
   has it updated (:mod:`update`).
3. ``visit`` lets others read or fill tiles: state dicts, recovery.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from penstock.core.errors import ClosedError, ConfigError, PenstockWarning
from penstock.core.process import fork_guard
from penstock.io.engine import Engine
from penstock.optim.config import RING, RING_BYTES
from penstock.optim.gradients import Gradients, Share
from penstock.optim.groups import Groups, options_of
from penstock.optim.layout import Tile
from penstock.optim.params import fresh_scalars
from penstock.optim.pipeline import TilePipeline
from penstock.optim.pool import make_pool, wait_for_all
from penstock.optim.probe import ProbedOptimizer
from penstock.optim.ring import RecordBuffer
from penstock.optim.slots import RecordSlots
from penstock.optim.squeeze import Squeezer, slack_bytes
from penstock.optim.store import RecordStore, engine_for_records, named_file
from penstock.optim.update import UpdatePass, Updater
from penstock.staging import ready_event

_THREADS: Final = 2


class FlashStates:
    """The states of one optimizer.

    Attributes:
        config: How they are kept.
        groups: What is kept for the groups of the optimizer.
        params: All parameters, by number.
        tiles: All tiles, by number.
        steps: How many steps were made.
        last_norm: The gradients' 2-norm in the last step that had to know it.
        slots: Where each tile's newest record is.
        gradients: Where gradients wait, if there is a budget for them.
    """

    def __init__(self, source: ProbedOptimizer) -> None:
        """Begin without any group."""
        self.config = config = source.config
        self.groups = Groups(source)
        self.params = self.groups.params
        self.tiles = self.groups.tiles
        self.steps = 0
        self.last_norm: Tensor | None = None
        self.slots = RecordSlots()
        self._source = source
        self._backward = False  # which way the next pass goes
        self._torn: str | None = None
        self._held: str | None = None
        self._closed = False
        self._guard = fork_guard()
        self._updater = Updater(source, self.params)
        self._engine = engine_for_records()
        self.store = RecordStore(
            config.directories,
            self._engine,
            slots=2 if config.durable else 1,
            make_file=named_file if config.durable else None,
            allow_memory_filesystem=config.allow_memory_filesystem,
        )
        # beside a backward: see [Note: when squeezing pays]
        self._squeezer = Squeezer(
            False if config.overlap and not config.squeeze else config.squeeze
        )
        self.gradients: Gradients | None = None
        if config.gradient_bytes is not None:
            self.gradients = Gradients(
                self.params,
                self.tiles,
                budget_bytes=config.gradient_bytes,
                directories=config.directories,
                engine=lambda: self._engine,
                wants_norms=config.clip_norm is not None,
                allow_memory_filesystem=config.allow_memory_filesystem,
            )
        self._pipeline: TilePipeline | None = None
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
        if self.gradients is not None:
            self.gradients.lay()

    # -- a step -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Update every parameter that has a gradient.

        Raises:
            ConfigError: A parameter is not what it was, or a gradient is sparse: nothing was touched.
            TransferError: A record could not be read, or (where steps are durable) not be written.
            ChecksumError: A record is not what was written.
            ClosedError: The states are closed, or an earlier step failed in the middle.
        """
        begun = time.perf_counter()
        step = self.begin_pass()
        order = self.order(step.grads)
        rank = {tile.index: -place for place, tile in enumerate(order)}
        pipeline = self.pipeline
        pipeline.begin(order, rank, rotating=pipeline.count)
        if self.gradients is not None:
            self.gradients.begin(order, step.grads)
        try:
            self._run(order, lambda tile: self.update(tile, step))
        finally:
            if self.gradients is not None:
                self.gradients.end()
        self._backward = not self._backward
        self.end_pass(step, begun)

    def begin_pass(self) -> UpdatePass:
        """Check everything that can be checked before anything is touched."""
        self.check_can_step()
        self.groups.check()
        grads: dict[int, Tensor] = {}
        for param in self.params:
            grad = param.flat_grad()
            if grad is not None and param.count:
                grads[param.index] = grad
        factor = None
        if self.config.clip_norm is not None:
            factor = self._clip(list(grads.values()))
        return self.make_pass(grads, factor)

    def make_pass(self, grads: dict[int, Tensor], factor: Tensor | None) -> UpdatePass:
        """A pass over these gradients, with the options that the groups have now."""
        options = [
            fresh_scalars(options_of(group)) for group in self._source.optimizer.param_groups
        ]
        devices = {index: self.params[index].tensor.device for index in grads}
        events = {device: ready_event(device) for device in {*devices.values()}}
        ready = {index: events[device] for index, device in devices.items()}
        was_set = frozenset(param.index for param in self.params if param.was_set)
        return UpdatePass(self.steps + 1, options, grads, factor, {}, ready, was_set)

    def order(self, grads: Mapping[int, Tensor]) -> list[Tile]:
        """The tiles to visit, in this pass's direction."""
        found = [t for t in self.tiles if any(piece.param in grads for piece in t.pieces)]
        return found[::-1] if self._backward else found

    def update(self, tile: Tile, step: UpdatePass) -> None:
        """Visit one tile. In any thread."""
        pipeline = self.pipeline
        buffer = pipeline.acquire(tile)
        try:
            with self._grads_of(tile, step) as grads:
                kept, initial = self.groups.kept_in(tile), self.groups.initial_in(tile)
                self._updater.update(tile, buffer, step, grads=grads, kept=kept, initial=initial)
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
        """All tiles were visited: the step counts. ``begun_s``: since when it was waited for."""
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

    def tear(self, error: BaseException) -> None:
        """A step failed in the middle: some parameters were updated and some not."""
        self._torn = (
            f"step {self.steps + 1} failed in the middle ({type(error).__name__}: {error}): some"
            " parameters were updated and some were not; load weights and a state dict"
        )

    def hold(self, why: str | None) -> None:
        """Let no step be made, not even begun, until this is called with None."""
        self._held = why

    def check_can_step(self) -> None:
        """Raise ClosedError or ConfigError if no step can be made now."""
        self.check_usable()
        if self._held is not None:
            raise ConfigError(self._held)

    def check_usable(self) -> None:
        """Raise ClosedError if the states are not there."""
        if self._guard.in_child:
            raise self._guard.error("this optimizer", "make one here")
        if self._closed:
            raise ClosedError("this optimizer's states were closed, and are gone")
        if self._torn is not None:
            raise ClosedError(self._torn)

    def mend(self) -> None:
        """Everything was loaded anew."""
        self._torn = None
        for param in self.params:
            if param.has_state:
                param.note()

    def _clip(self, grads: list[Tensor]) -> Tensor | None:
        """Return the factor by which ``torch.nn.utils.clip_grad_norm_`` would multiply gradients."""
        if not grads:
            return None
        self.last_norm = torch.nn.utils.get_total_norm(grads)
        return self.factor_of(self.last_norm)

    def factor_of(self, norm: Tensor | None) -> Tensor:
        """Return the factor that clips gradients of this norm, as ``clip_grads_with_norm_`` does."""
        assert self.config.clip_norm is not None
        assert norm is not None
        return torch.clamp(self.config.clip_norm / (norm.cpu() + 1e-6), max=1.0)

    def note_norm(self, step: UpdatePass, known: Mapping[int, Tensor]) -> None:
        """Remember the norm of a pass's gradients for the next one; some are ``known`` already."""
        in_order = sorted(step.grads.items())  # summed as they are without overlap
        if not known:
            self.last_norm = torch.nn.utils.get_total_norm([grad for _, grad in in_order])
            return
        norms = [known[i] if i in known else torch.linalg.vector_norm(g) for i, g in in_order]
        together = torch.stack([norm.to(norms[0].device) for norm in norms])
        self.last_norm = torch.linalg.vector_norm(together)

    def _run(self, tiles: Iterable[Tile], visit: Callable[[Tile], None]) -> None:
        futures = [self.pool.submit(visit, tile) for tile in tiles]
        try:
            wait_for_all(futures)
        except BaseException as error:
            self.tear(error)
            raise

    # -- for state dicts --------------------------------------------------------------------------

    @property
    def class_name(self) -> str:
        """Of the class whose step is run on tiles."""
        return self._source.name

    # -- others -----------------------------------------------------------------------------------

    @contextmanager
    def visiting(self, tile: Tile, *, change: bool) -> Iterator[RecordBuffer]:
        """A tile's record in memory, to look at or to fill."""
        buffer = self.pipeline.acquire(tile)
        try:
            yield buffer
        except BaseException:
            self.pipeline.drop(buffer)
            raise
        if change:
            self.pipeline.release(buffer)
        else:
            self.pipeline.put_back(buffer)

    def begin_visits(self, tiles: Sequence[Tile]) -> None:
        """Read ahead for visits to these tiles in this order."""
        rank = {tile.index: place for place, tile in enumerate(self.tiles)}
        self.pipeline.begin(tiles, rank, rotating=RING)

    def where_of(self, tile: Tile) -> str:
        """The parameters in a tile, for messages."""
        names = [self.params[piece.param].name for piece in tile.pieces]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return "parameters " + ", ".join(names[:3]) + more

    @property
    def threads(self) -> int:
        """Tiles that are updated at once."""
        if self.config.threads is not None:
            return self.config.threads
        return 1 if self.config.overlap else max(1, min(_THREADS, torch.get_num_threads()))

    @property
    def pool(self) -> ThreadPoolExecutor:
        """The threads that update tiles."""
        if self._pool is None:
            devices = (param.tensor.device for param in self.params)
            device = next((each for each in devices if each.type == "cuda"), None)
            self._pool = make_pool(self.threads, device)
        return self._pool

    @property
    def pipeline(self) -> TilePipeline:
        """The buffers; made when they are first needed."""
        if self._pipeline is None:
            longest = max((tile.record_bytes for tile in self.tiles), default=0)
            ring = max(RING, RING_BYTES * self.config.tile // max(longest, 1))
            ring += max(0, self.threads - _THREADS)
            room = max((tile.record_bytes + slack_bytes(tile) for tile in self.tiles), default=0)
            wanted = self.config.host_bytes // max(room, 1)
            self._pipeline = TilePipeline(
                self.store,
                slots=self.slots,
                count=max(1, min(max(ring, wanted), len(self.tiles))),
                buffer_bytes=room,
                write_through=self.config.durable,
                names=self.where_of,
                squeezer=self._squeezer,
            )
        return self._pipeline

    def rest(self) -> None:
        """Have all states on flash and hold no memory for them, until the next step.

        Raises:
            TransferError: A record could not be written; it is still in memory.
        """
        self.check_usable()
        self._retire_pipeline()
        if self.gradients is not None:
            self.gradients.rest()

    def _retire_pipeline(self) -> None:
        """Let the buffers go; the next ones may be more, or longer."""
        if self._pipeline is None:
            return
        self._pipeline.flush()
        retired, self._pipeline = self._pipeline, None
        retired.close()

    def wrap_engine(self, wrap: Callable[[Engine], Engine]) -> None:
        """Have what moves from now on go through ``wrap(engine)``, which owns the present engine."""
        self._engine = self.store.engine = wrap(self._engine)
        if self.gradients is not None:
            self.gradients.engine_changed()

    def close(self) -> None:
        """Wait for what is in flight; the states are gone. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._guard.in_child:
            return  # threads and transfers are the parent's
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._pipeline is not None:
            self._pipeline.close()
        if self.gradients is not None:
            self.gradients.close()
        self._engine.close()
        self.store.close()
