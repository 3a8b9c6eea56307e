"""The states of one optimizer on flash: what is where, and how a step passes over it.

1. ``add_group`` finds by trial what is kept (:mod:`probe`), lays the group's parameters into tiles
   (:mod:`layout`) in a form (:mod:`formats`), and reserves their place (:mod:`store`).
2. ``step`` visits every tile that has a gradient, in an order that alternates (:mod:`pipeline`), and
   has it updated (:mod:`update`).
3. ``visit`` lets others read or fill tiles: state dicts, recovery.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from penstock.core import knobs
from penstock.core.errors import ClosedError, ConfigError, PenstockWarning
from penstock.io.engine import Engine
from penstock.io.threads import ThreadEngine
from penstock.optim.config import RING, RING_BYTES, StatesConfig
from penstock.optim.device import ready_event
from penstock.optim.formats import Form, form_of, stepped_dtype
from penstock.optim.layout import Tile, make_tiles
from penstock.optim.params import Param, fresh_scalars
from penstock.optim.pipeline import Buffer, Pipeline
from penstock.optim.probe import Kept, probe
from penstock.optim.squeeze import Squeezer, slack_bytes
from penstock.optim.store import Store, named_file
from penstock.optim.update import Pass, Updater
from penstock.optim.waiting import wait_for_all

_THREADS: Final = 2


class FlashStates:
    """The states of one optimizer.

    Attributes:
        config: How they are kept.
        params: All parameters, by number.
        tiles: All tiles, by number.
        forms: The forms of each group's records.
        steps: How many steps were made.
        last_norm: The gradients' 2-norm in the last step that had to know it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cls: type[torch.optim.Optimizer],
        config: StatesConfig,
        *,
        with_master: bool,
        initial: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        engine: Engine | None = None,
    ) -> None:
        """Begin without any group.

        Args:
            optimizer: Whose states these are.
            cls: The class whose step is run on tiles.
            config: How they are kept.
            with_master: Whether 16-bit parameters have a float32 master, unless the config says.
            initial: States that exist before a first step, given a group's options: a number where
                each element has it, a tensor where the parameter has one.
            engine: Moves the bytes, and is closed with this; the default one if None.
        """
        self.config = config
        self.params: list[Param] = []
        self.tiles: list[Tile] = []
        self.forms: list[list[Form]] = []
        self.steps = 0
        self.last_norm: Tensor | None = None
        self._optimizer = optimizer
        self._cls = cls
        self._with_master = with_master if config.master is None else config.master
        self._find_initial = initial
        self._kept: list[dict[torch.dtype, Kept]] = []
        self._initial: list[Mapping[str, Any]] = []
        self._backward = False  # which way the next pass goes
        self._torn: str | None = None
        self._held: str | None = None
        self._closed = False
        self._pid = os.getpid()
        self._updater = Updater(optimizer, cls, params=self.params, seed=config.seed)
        # half as many again as elsewhere: between transfers they wait for the interpreter, which the
        # threads that update tiles use
        self._engine = ThreadEngine(knobs.io_threads() * 3 // 2) if engine is None else engine
        self.store = Store(
            config.directories,
            self._engine,
            slots=2 if config.durable else 1,
            make_file=named_file if config.durable else None,
            allow_memory_filesystem=config.allow_memory_filesystem,
        )
        self._squeezer = Squeezer(config.squeeze)
        self._pipeline: Pipeline | None = None
        self._inherited: Pipeline | None = None
        self._pool: ThreadPoolExecutor | None = None

    # -- groups -----------------------------------------------------------------------------------

    def add_group(self, group: dict[str, Any]) -> None:
        """Lay a group of the optimizer into tiles.

        Raises:
            ConfigError: The optimizer is not element-wise, or the format is not for these parameters.
            NoSpaceError: The directories have no room for the states.
        """
        number = len(self.forms)
        group.setdefault("format", self.config.format)
        where = f"{self._cls.__name__}, group {number}"
        if len(set(map(id, group["params"]))) < len(group["params"]):
            raise ConfigError(f"{where}: a parameter is named twice; name each once")
        new = [self._param(p, group, number, i) for i, p in enumerate(group["params"])]
        options = _options(group)
        initial = self._find_initial(options)
        kept: dict[torch.dtype, Kept] = {}
        forms: list[Form] = []
        tiles: list[Tile] = []
        kinds: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = {}
        for param in new:
            on_host = param.tensor.device.type == "cpu"
            kinds.setdefault((param.tensor.dtype, on_host), []).append((param.index, param.count))
        for (dtype, on_host), mine in kinds.items():
            has_master = self._with_master or group["format"] != "exact" or not on_host
            stepped = stepped_dtype(dtype, with_master=has_master)
            kept[dtype] = probe(self._optimizer, self._cls, options, stepped, initial, where=where)
            form = form_of(
                group["format"],
                dtype,
                kept[dtype].states,
                with_master=has_master,
                whole_master=self.config.durable or not on_host,
                where=where,
            )
            forms.append(form)
            first = len(self.tiles) + len(tiles)
            tiles += make_tiles(mine, form, group=number, first=first, elements=self.config.tile)
        self._retire_pipeline()
        self.store.add(tiles)
        self.params += new
        for param in new:
            param.scalars = _scalars(initial)
        self.tiles += tiles
        self.forms.append(forms)
        self._kept.append(kept)
        self._initial.append(initial)

    def _param(self, tensor: Tensor, group: Mapping[str, Any], number: int, place: int) -> Param:
        names = group.get("param_names")
        name = repr(names[place]) if names else f"{place} of group {number}"
        index = len(self.params) + place
        return Param(tensor, group=number, index=index, name=f"{name} {tuple(tensor.shape)}")

    # -- a step -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Update every parameter that has a gradient.

        Raises:
            ConfigError: A parameter is not what it was, or a gradient is sparse: nothing was touched.
            TransferError: A record could not be read, or (where steps are durable) not be written.
            ChecksumError: A record is not what was written.
            ClosedError: The states are closed, or an earlier step failed in the middle.
        """
        step = self.begin_pass()
        order = self.order(step.grads)
        rank = {tile.index: -place for place, tile in enumerate(order)}
        pipeline = self.pipeline
        pipeline.begin(order, rank, rotating=pipeline.count)
        self._run(order, lambda tile: self.update(tile, step))
        self._backward = not self._backward
        self.end_pass(step)

    def begin_pass(self) -> Pass:
        """Check everything that can be checked before anything is touched."""
        self.check_can_step()
        self.check_params()
        grads: dict[int, Tensor] = {}
        for param in self.params:
            grad = param.flat_grad()
            if grad is not None and param.count:
                grads[param.index] = grad
        factor = None
        if self.config.clip_norm is not None:
            factor = self._clip(list(grads.values()))
        return self.make_pass(grads, factor)

    def make_pass(self, grads: dict[int, Tensor], factor: Tensor | None) -> Pass:
        """A pass over these gradients, with the options that the groups have now."""
        options = [fresh_scalars(_options(group)) for group in self._optimizer.param_groups]
        ready = {index: ready_event(grad) for index, grad in grads.items()}
        was_set = frozenset(param.index for param in self.params if param.was_set)
        return Pass(self.steps + 1, options, grads, factor, {}, ready, was_set)

    def order(self, grads: Mapping[int, Tensor]) -> list[Tile]:
        """The tiles to visit, in this pass's direction."""
        found = [t for t in self.tiles if any(piece.param in grads for piece in t.pieces)]
        return found[::-1] if self._backward else found

    def update(self, tile: Tile, step: Pass) -> None:
        """Visit one tile. In any thread."""
        pipeline = self.pipeline
        buffer = pipeline.acquire(tile)
        try:
            kept = self._kept[tile.group][tile.form.param_dtype]
            initial = self._initial[tile.group]
            self._updater.update(tile, buffer, step, kept=kept, initial=initial)
        except BaseException:
            pipeline.drop(buffer)
            raise
        pipeline.release(buffer)

    def end_pass(self, step: Pass) -> None:
        """All tiles were visited: the step counts."""
        for index, scalars in step.scalars.items():
            self.params[index].scalars = scalars
            self.params[index].has_state = True
            self.params[index].note()
        self.steps = step.number
        waited, self.pipeline.waited_s = self.pipeline.waited_s, 0.0
        self._squeezer.judge(waited)
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

    def check_params(self) -> None:
        """Raise ConfigError if the optimizer's parameters are not what they were."""
        now = [param for group in self._optimizer.param_groups for param in group["params"]]
        if len(now) != len(self.params) or any(
            tensor is not param.tensor for tensor, param in zip(now, self.params, strict=True)
        ):
            raise ConfigError(
                "the parameters of a group were exchanged, taken away or added to by hand, and their"
                " states cannot know: use add_param_group(), or make a new optimizer"
            )
        for param in self.params:
            param.check()

    def check_usable(self) -> None:
        """Raise ClosedError if the states are not there."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this optimizer's states belong to process {self._pid}, from which this one was"
                " forked; make an optimizer here"
            )
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
        """What ``torch.nn.utils.clip_grad_norm_`` would multiply gradients with."""
        if not grads:
            return None
        self.last_norm = torch.nn.utils.get_total_norm(grads)
        return self.factor_of(self.last_norm)

    def factor_of(self, norm: Tensor | None) -> Tensor:
        """What clips gradients of this norm, as ``torch.nn.utils.clip_grads_with_norm_`` does."""
        assert self.config.clip_norm is not None
        assert norm is not None
        return torch.clamp(self.config.clip_norm / (norm.cpu() + 1e-6), max=1.0)

    def note_norm(self, step: Pass) -> None:
        """Remember the norm of a pass's gradients for the next one."""
        grads = [
            grad for _, grad in sorted(step.grads.items())
        ]  # summed as they are without overlap
        self.last_norm = torch.nn.utils.get_total_norm(grads)

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
        return self._cls.__name__

    def kept(self, param: Param) -> Kept:
        """What the optimizer keeps for a parameter."""
        return self._kept[param.group][param.tensor.dtype]

    def initial_scalars(self, param: Param) -> dict[str, Any]:
        """A parameter's scalars before its first step."""
        return _scalars(self._initial[param.group])

    def highest_step(self) -> int:
        """The most that a parameter was updated, as torch counts it."""
        return max((int(p.scalars["step"]) for p in self.params if "step" in p.scalars), default=0)

    def check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError if groups with these options would keep other states than there are."""
        for number, group in enumerate(groups):
            for dtype, kept in self._kept[number].items():
                where = f"{self._cls.__name__}, group {number} of the state dict"
                form = next(form for form in self.forms[number] if form.param_dtype == dtype)
                stepped = form.master_dtype
                initial = self._initial[number]
                options = _options(group)
                now = probe(self._optimizer, self._cls, options, stepped, initial, where=where)
                if now.states != kept.states:
                    raise ConfigError(
                        f"{where}: with its options {[s.name for s in now.states]} would be kept, and"
                        f" the optimizer was made to keep {[s.name for s in kept.states]}; make it"
                        " with the same options"
                    )

    # -- others -----------------------------------------------------------------------------------

    @contextmanager
    def visiting(self, tile: Tile, *, change: bool) -> Iterator[Buffer]:
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
    def record_bytes(self) -> int:
        """What the states take, once."""
        return sum(tile.record_bytes for tile in self.tiles)

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
            self._pool = ThreadPoolExecutor(
                self.threads, thread_name_prefix="penstock-optim", initializer=_compute_alone
            )
        return self._pool

    @property
    def pipeline(self) -> Pipeline:
        """The buffers; made when they are first needed."""
        if self._pipeline is None:
            longest = max((tile.record_bytes for tile in self.tiles), default=0)
            ring = max(RING, RING_BYTES * self.config.tile // max(longest, 1))
            ring += max(0, self.threads - _THREADS)
            room = max((tile.record_bytes + slack_bytes(tile) for tile in self.tiles), default=0)
            wanted = self.config.host_bytes // max(longest, 1)
            self._pipeline = Pipeline(
                self.store,
                count=max(1, min(max(ring, wanted), len(self.tiles))),
                buffer_bytes=room,
                write_through=self.config.durable,
                names=self.where_of,
                squeezer=self._squeezer,
            )
            if self._inherited is not None:
                self._pipeline.inherit(self._inherited)
                self._inherited = None
        return self._pipeline

    def rest(self) -> None:
        """Have all states on flash and hold no memory for them, until the next step.

        Raises:
            TransferError: A record could not be written; it is still in memory.
        """
        self.check_usable()
        self._retire_pipeline()

    def _retire_pipeline(self) -> None:
        """Let the buffers go; the next ones may be more, or longer."""
        if self._pipeline is None:
            return
        self._pipeline.flush()
        retired, self._pipeline = self._pipeline, None
        retired.close()
        self._inherited = retired

    def wrap_engine(self, wrap: Callable[[Engine], Engine]) -> None:
        """Have what moves from now on go through ``wrap(engine)``, which owns the present engine."""
        self._engine = self.store.engine = wrap(self._engine)

    def close(self) -> None:
        """Wait for what is in flight; the states are gone. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # threads and transfers are the parent's
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._pipeline is not None:
            self._pipeline.close()
        self._engine.close()
        self.store.close()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _scalars(initial: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() for k, v in initial.items() if isinstance(v, Tensor)}


def _compute_alone() -> None:
    """In a thread that updates tiles: no gradients, and torch computes in this thread only.

    ``torch.set_num_threads`` would change it for all threads. What counts for an element-wise operation
    is OpenMP's own setting, which each thread has for itself.
    """
    torch.set_grad_enabled(False)
    torch.get_num_threads()  # has torch set it up in this thread, once
    for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"):
        try:
            ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY).omp_set_num_threads(1)
        except (OSError, AttributeError):
            continue
