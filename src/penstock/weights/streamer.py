"""Brings weights to memory before modules, backward and optimizers need them, and takes them home again.

The table of weights (:mod:`.stays`) has the lock. Upon it work, each on those before: what leaves memory
(:mod:`.eviction`), what is brought (:mod:`.reads`), the modules that use weights (:mod:`.module_uses`),
and who works with them otherwise (:mod:`.access`). The streamer joins them for the session and its hooks.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from penstock.core.config import UNLIMITED
from penstock.core.errors import ConfigError, PenstockError, PenstockWarning
from penstock.core.units import format_bytes
from penstock.homed import UpdateMemory, is_sharded, paused_holders
from penstock.io.engine import Priority
from penstock.store.account import Account
from penstock.weights.access import WeightKeeper
from penstock.weights.brought import BroughtMemory
from penstock.weights.compiled import CompiledCall, compiled_in_place, is_compiled
from penstock.weights.eviction import WeightEviction
from penstock.weights.fsdp import is_exchanged
from penstock.weights.homes import Home, show, view_like
from penstock.weights.module_uses import ModuleUses
from penstock.weights.reads import WeightReads
from penstock.weights.references import WeightReference
from penstock.weights.stays import Stay, WeightTable

RestModel = Callable[[Module, Callable[[list[tuple[int, str]]], None]], Sequence[Home]]
"""Lets the weights of a model rest, and returns their homes.

Before that it calls its second argument with their lengths and names, which raises if they are too long.
"""


class WeightStreamer:
    """Streams the weights of models. Thread-safe, but for ``close``.

    Attributes:
        account: Account of the weights in memory, whose limit the streamer keeps. It yields.
        before_model: Called with each model before the streamer takes charge of it.
        before_training: Called before the first call of a module with autograd enabled, with the most
            bytes that autograd may hold of the weights' gradients at any one time; then None.
        in_inference: Called before that, with False when a module is entered in a call without autograd,
            and with True when an outermost call has ended; it may set the account's limit. Then None.
    """

    def __init__(
        self,
        rest: RestModel,
        *,
        account: Account,
        memory: BroughtMemory,
        updates: UpdateMemory | None = None,
    ) -> None:
        """Take charge of nothing yet; see ``add``.

        Args:
            rest: Lets the weights of a model rest.
            account: Account of the weights in memory, whose limit the streamer keeps.
            memory: Where weights are brought to, charged to ``account``.
            updates: Memory that is left to their updates; None: no limit.
        """
        self._rest = rest
        self.account = account
        self._table = table = WeightTable(account, memory)
        table.update_memory = updates
        self._eviction = WeightEviction(table)
        self._reads = WeightReads(table, self._eviction)
        self._uses = ModuleUses(table)
        self._keeper = WeightKeeper(table, self._eviction, self._reads, self._uses)
        self._own: WeakKeyDictionary[Module, tuple[Callable[[], Parameter | None], ...]] = (
            WeakKeyDictionary()
        )  # weak references to the parameters that each module had
        self._compiled: list[CompiledCall] = []
        self._is_replicated = False
        self.before_model: Callable[[Module], None] | None = None
        self._compiled_whole = ""
        # held while weights get homes; plain: under ``Lock`` no memory is freed
        self._adding = threading.RLock()
        self._has_cast_cache = self._are_casts_cached = False
        self.before_training: Callable[[int], None] | None = None
        self.in_inference: Callable[[bool], None] | None = None
        account.yield_by(self._eviction.give_way)

    def add(self, model: Module) -> None:
        """Take charge of the weights of a model, unless it is known already.

        Several threads may call a model first: one lets its weights rest, and the others wait for that.

        Raises:
            ConfigError: Its weights cannot rest, or another open session streams them.
            NoSpaceError: The directories have no room for them; nothing was moved.
            BudgetError: The largest weight and another one do not fit.
        """
        with self._adding:
            self._add(model)

    def _add(self, model: Module) -> None:
        if self.before_model is not None:
            self.before_model(model)
        homes = self._rest(model, self._table.check_sizes)
        homes = [home for home in homes if home not in self._table.by_home]
        for home in homes:
            self._table.check_process(home)
            if home.keeper is not None:
                raise ConfigError(f"weight {home.name} is streamed by another open session")
        self._is_replicated = self._is_replicated or any(
            isinstance(each, DistributedDataParallel) and each.process_group.size() > 1
            for each in model.modules()
        )
        if self._is_replicated:  # its buckets hold all gradients
            self._table.update_memory = None
        with paused_holders():  # which look at once for what this session gives to gradients
            self._table.add(homes, self._keeper)
        for module in model.modules():
            self._know(module)
        for module in compiled_in_place(model):
            self._compiled.append(CompiledCall(module, self.enter, self.leave))

    # -- for the tracker of modules ---------------------------------------------------------------

    def enter(self, module: Module, args: tuple[Any, ...]) -> None:
        """Bring the weights of a module that is called now."""
        calls = self._uses.stack
        if calls and calls[0][0] is module:  # an interrupt has kept the last call from ending
            self.leave(module)
            while calls:
                self.leave(calls[-1][0])
        if not calls:
            is_training = torch.is_grad_enabled()
            self._has_cast_cache = _has_cast_cache()
            if is_training and self.before_training is not None:
                self._begin_training()
            with self._table.wake:
                self._table.begin_pass(None if is_training else id(module))
        self._look_in_inference()
        pinned: list[Stay] = []
        calls.append((module, pinned))
        if module._parameters and not self._is_known(module):
            self._take_new(module)
        forced = self._reads.forced
        for stay in self._uses.weights_of(module):
            self._table.check_process(stay.home)
            if self._pin(stay, has_few_rows=_needs_few_rows(module, stay, args)):
                pinned.append(stay)
        if is_compiled(module):
            self._show_ordinary(pinned)
            if self._reads.forced > forced:
                self._warn_of_compiled(module, pinned)

    def _show_ordinary(self, pinned: Sequence[Stay]) -> None:
        """Give weights the class that torch.compile knows."""
        for stay in pinned:
            parameter = stay.home.parameter
            if parameter is not None:
                parameter.__class__ = stay.home.kinds.ordinary

    def _warn_of_compiled(self, module: Module, pinned: Sequence[Stay]) -> None:
        """Say once that a compiled module has more weights than fit in memory."""
        if self._compiled_whole:
            return
        name = type(module._modules.get("_orig_mod", module)).__name__
        needed = sum(stay.home.nbytes for stay in pinned)
        self._compiled_whole = (
            f"the compiled {name} needs all of its weights at once, {format_bytes(needed)}: compile each"
            " block by itself before the session, as by block.compile()"
        )
        warnings.warn(
            f"weights in memory exceed their limit of {format_bytes(self.account.limit_bytes)}:"
            f" {self._compiled_whole}",
            PenstockWarning,
            stacklevel=2,
        )

    def _is_known(self, module: Module) -> bool:
        """Return whether a module has the parameters that it had in its last call.

        A new one may have the identity of one that was dropped.
        """
        known, own = self._own.get(module), module._parameters.values()
        return (
            known is not None
            and len(known) == len(own)
            and all(each() is now for each, now in zip(known, own, strict=True))
        )

    def _know(self, module: Module) -> None:
        self._own[module] = tuple(
            _nothing if each is None else weakref.ref(each) for each in module._parameters.values()
        )

    def _take_new(self, module: Module) -> None:
        """Let weights rest that a module got since ``add``, as by ``load_state_dict(assign=True)``."""
        self._know(module)
        parameters = [
            each
            for name, each in module._parameters.items()
            if isinstance(each, Parameter) and not is_exchanged(module, name)
        ]
        if any(self._table.stay_of(each) is None for each in parameters):
            self.add(self._with_new(module))

    def _with_new(self, module: Module) -> Module:
        """Return the outermost module if one that has new parameters is not the only such one in it.

        Then all get their homes, in the same files, with their names in it. Else return the module: the
        outermost one may not have it, as a teacher that it keeps in a list.
        """
        outermost, _ = self._uses.stack[0]
        is_within = has_others = False
        for each in outermost.modules():
            is_within |= each is module
            has_others |= each is not module and not self._is_known(each)
        return outermost if is_within and has_others else module

    def leave(self, module: Module) -> None:
        """Let go of what ``enter`` has brought."""
        calls = self._uses.stack
        while calls:
            entered, pinned = calls.pop()
            for stay in pinned:
                self._reads.release(stay)
            if entered is module:
                break
        if not calls:
            self._look_in_inference(has_ended=True)

    def _look_in_inference(self, *, has_ended: bool = False) -> None:
        look = self.in_inference
        if look is not None and not self._table.guard.in_child:
            look(has_ended)
            self._keep_to_limit()

    def _keep_to_limit(self) -> None:
        self._eviction.give_way(self.account.used_bytes - self.account.limit_bytes)

    def _begin_training(self) -> None:
        with self._adding:
            before, look = self.before_training, self.in_inference
            self.before_training = self.in_inference = None
        if before is None:  # another thread has begun
            return
        try:
            before(self._gradient_bytes())
        except BaseException:
            self.before_training, self.in_inference = before, look
            raise
        self._keep_to_limit()

    def _gradient_bytes(self) -> int:
        """Return the length of three gradients of the longest trained weight.

        The gradient of a weight that is used twice, as one of an embedding and head, is the sum of two,
        and all three are in memory together.
        """
        homes = (stay.home for stay in self._table.stays)
        trained = ((home.nbytes, home.parameter) for home in homes)
        return 3 * max(
            (each for each, of in trained if of is not None and of.requires_grad), default=0
        )

    def _pin(self, stay: Stay, *, has_few_rows: bool) -> bool:
        """Let a module use a weight; return False if it looks its rows up while it runs.

        Few rows are no use of the order: nothing is to be read ahead for them.
        """
        if not has_few_rows:
            self._reads.acquire(stay)
        elif stay.home.is_mapped:
            self._pin_at_home(stay)
        elif stay.is_away:
            return False  # see ``resting``
        else:
            self._reads.acquire(stay, is_touch=True)
        return True

    def _pin_at_home(self, stay: Stay) -> None:
        """Pin a weight where it is, if it is not being read."""
        stay.home.check()
        with self._table.wake:
            if stay.coming is None:
                stay.pins += 1
                if stay.storage is None:
                    stay.at_home += 1
                    stay.home.random()
                stay.show_busy()
                return
        self._reads.acquire(stay, is_touch=True)

    # -- for the hooks of autograd ----------------------------------------------------------------

    def reference(self, tensor: Tensor, storage: torch.UntypedStorage) -> WeightReference | None:
        """Return what autograd holds in place of a saved tensor; None if that is no weight."""
        stay = self._table.by_storage.get(storage._cdata)
        if stay is None:
            return None
        return WeightReference(tensor, stay.home, self._keeper, is_cast=False)

    def cast_reference(self, tensor: Tensor, leaf: Tensor) -> WeightReference | None:
        """Return the same for a cast of a whole parameter, or for a view of one."""
        if is_sharded(leaf) or not isinstance(leaf, Parameter) or not _is_of_cast(tensor, leaf):
            return None
        stay = self._table.stay_of(leaf)
        if stay is None:
            return None
        self._are_casts_cached |= self._has_cast_cache and leaf.requires_grad
        return WeightReference(tensor, stay.home, self._keeper, is_cast=True)

    # -- for the session --------------------------------------------------------------------------

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights that have a home."""
        return self._table.total_bytes

    @property
    def wanted_bytes(self) -> int:
        """Bytes of memory in which all weights could stay; without limit before a model is known."""
        return self._table.total_bytes if self._table.stays else UNLIMITED

    @property
    def least_bytes(self) -> int:
        """Least limit: the two longest weights."""
        return sum(sorted(stay.home.nbytes for stay in self._table.stays)[-2:])

    def check_limit(self) -> None:
        """Raise BudgetError if the two longest weights do not fit in their limit."""
        self._table.check_sizes([(stay.home.nbytes, stay.home.name) for stay in self._table.stays])

    @property
    def present_bytes(self) -> int:
        """Bytes of weights that are in memory."""
        return sum(stay.home.nbytes for stay in tuple(self._table.present))

    @property
    def forced(self) -> int:
        """Times that the limit was exceeded."""
        return self._reads.forced

    @property
    def touches(self) -> Mapping[str, int]:
        """Operations on weights at rest, by name of the weight."""
        return {
            stay.home.name: stay.home.touches for stay in self._table.stays if stay.home.touches
        }

    def note(self) -> str:
        """Return a sentence for the summary."""
        text = self._places()
        if self._is_replicated:
            text += (
                "; each rank reads all of them, as DistributedDataParallel has all on each: with FSDP2"
                " (fully_shard) each reads its part"
            )
        touches = self.touches
        if touches:
            name, times = max(touches.items(), key=lambda each: each[1])
            text += (
                f"; {len(touches)} of them were used outside of the modules that own them, the most"
                f" {name}, {times} times"
            )
        kept = [stay.home.name for stay in self._table.stays if stay.must_stay]
        if kept:
            text += (
                f"; {len(kept)} of them stay in device memory, as their address was given away, as by"
                f" data_ptr(), the first {kept[0]}"
            )
        if self._table.left:
            text += (
                f"; {len(self._table.left)} of them stay in memory, as the program has given them that,"
                f" the first {self._table.left[0]}"
            )
        if self._are_casts_cached:
            text += (
                "; autocast keeps casts of them in memory until its region ends, which"
                " torch.autocast(..., cache_enabled=False) does not"
            )
        if self.forced:
            text += f"; their limit was exceeded {self.forced} times, as all in memory was in use"
            text += f": {self._compiled_whole}" if self._compiled_whole else ""
        return text

    def _places(self) -> str:
        """Return where the weights rest."""
        total = self._table.total_bytes
        here = sum(stay.home.nbytes for stay in self._table.stays if stay.home.is_in_memory)
        text = f"weights of {format_bytes(total)} rest"
        if not here:
            return f"{text} on flash"
        if here == total:
            return f"{text} in host memory"
        return f"{text}, {format_bytes(here)} of them in host memory, the others on flash"

    def end_step(self) -> None:
        """End a step of training: the order of its uses is what the next one is expected to have."""
        while self._uses.stack:  # an interrupt has kept modules from ending
            self.leave(self._uses.stack[-1][0])
        with self._table.wake:
            self._table.order.end()
            self._table.choose_stays()
            failure, self._eviction.failure = self._eviction.failure, None
        self._keep_to_limit()
        self._reads.pump()
        if failure is not None:
            warnings.warn(
                f"weights could not be written home, and stay in memory until they can: {failure}",
                PenstockWarning,
                stacklevel=4,
            )

    def close(self) -> None:
        """Take all weights home, where they rest, and free the memory. Idempotent.

        Warns of those that are to rest on the host again, and are ordinary parameters there, as they
        could not be written.

        Raises:
            TransferError: Others could not be written; they are ordinary parameters in memory now.
        """
        self.before_training = self.in_inference = None
        if self._table.guard.in_child:
            return  # the weights are the parent's
        with paused_holders():
            self._take_all_home()

    def _take_all_home(self) -> None:
        for call in self._compiled:
            call.undo()
        self._compiled.clear()
        self._eviction.failure = None
        self._eviction.gives_way = False
        with self._table.wake:
            self._table.leaving.clear()
        self._table.memory.wait()
        for stay in self._table.stays:
            with suppress(PenstockError):  # a read that nobody waits for any more
                self._reads.finish(stay)
            self._eviction.wait_for_write(stay)
            with self._table.wake:
                stay.pins = stay.touching = stay.at_home = 0
                if stay.storage is not None and stay.is_changed:
                    goes_home = stay.home.is_mapped and not stay.is_lent
                    if goes_home or stay.home.returns:
                        self._eviction.write(stay)
        failure: BaseException | None = None
        not_back: list[BaseException | None] = []
        for stay in self._table.stays:
            self._eviction.wait_for_write(stay)
            if stay.home.returns and not (stay.storage is not None and stay.is_changed):
                not_back += self._give_back(stay)
                continue
            if stay.home.returns and stay.home.parameter is not None:
                not_back.append(self._eviction.failure)
            if not stay.home.is_mapped:
                failure = self._leave_to_device(stay) or failure
                continue
            with self._table.wake:
                stay.home.keeper = None
                if stay.storage is not None and (stay.is_lent or stay.is_changed):
                    stay.home.leave()  # not written, or seen by those who refer to it
                elif stay.storage is not None:
                    self._table.send_home(stay)
                else:
                    stay.home.rest()
        failure, self._eviction.failure = self._eviction.failure or failure, None
        self._table.stays.clear()
        self._table.present.clear()
        self._table.by_home.clear()
        self._table.by_storage.clear()
        self._table.memory.close()
        _tell(not_back, failure)

    def _give_back(self, stay: Stay) -> list[BaseException | None]:
        """Let a weight that is at home rest where it rests outside of the session; return any error."""
        with self._table.wake:
            stay.home.keeper = None
            self._table.give_up(stay)
            failure = stay.home.give_back()
        return [] if failure is None else [failure]

    def _leave_to_device(self, stay: Stay) -> BaseException | None:
        """Leave a weight to device memory of its own; return the error if it cannot be brought there."""
        home = stay.home
        if home.parameter is None:
            home.keeper = None
            return None
        try:
            while stay.storage is None:
                with self._table.wake:
                    if stay.coming is None:
                        self._reads.begin(stay, Priority.DEMAND, force=True)
                self._reads.finish(stay)
        except (PenstockError, torch.OutOfMemoryError) as error:
            home.keeper = None  # it rests, and whoever touches it is told
            return error.with_traceback(None)
        self._table.memory.use(stay.storage)
        parameter, is_lent = home.parameter, stay.is_lent
        with self._table.wake:
            home.keeper = None
            if not is_lent and parameter is not None:
                with torch.inference_mode(False):
                    own = view_like(stay.storage, home.layout).clone()
                show(parameter, own, home.kinds.resting)
            self._table.give_up(stay)
            home.leave()
            self._eviction.failure = None  # what could not be written home is in memory
        return None


def _tell(not_back: Sequence[BaseException | None], failure: BaseException | None) -> None:
    """Warn of what could not be written, and raise what failed, also where warnings are errors."""
    try:
        _warn_of_unwritten(not_back)
    finally:
        if failure is not None:
            raise failure


def _warn_of_unwritten(failures: Sequence[BaseException | None]) -> None:
    """Warn of weights that rest no more, as they could not be written; None: no error of its own.

    Without a directory memory is the place of what was changed: that is no failure.
    """
    failed = [each for each in failures if not isinstance(each, ConfigError)]
    known = next(filter(None, failed), None)
    if known is not None:
        more = f"; so it is with {len(failed) - 1} more" if len(failed) > 1 else ""
        warnings.warn(f"{known}{more}", PenstockWarning, stacklevel=5)


def _nothing() -> None:
    """Return what a weak reference to an absent parameter would."""
    return None


def _has_cast_cache() -> bool:
    """Return whether autocast is on and caches casts of parameters that require gradients."""
    is_on = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return is_on and torch.is_autocast_cache_enabled()


def _is_of_cast(tensor: Tensor, leaf: Tensor) -> bool:
    """Return whether a saved tensor is of one cast of a whole leaf, laid and valued as by ``leaf.to``.

    It may be a view of the cast. A cast of a cast is rounded twice, and one of a view may be laid
    otherwise.
    """
    cast = tensor._base if tensor._is_view() else tensor
    if cast is None or cast._version or cast.grad_fn is None:  # changed since, or no cast
        return False
    node = cast.grad_fn
    inputs = node.next_functions
    if node.name() != "ToCopyBackward0" or getattr(inputs[0][0], "variable", None) is not leaf:
        return False
    is_alike = cast.size() == leaf.size() and cast.stride() == leaf.stride()
    return bool(is_alike and cast.untyped_storage().nbytes() == leaf.numel() * cast.element_size())


def _needs_few_rows(module: Module, stay: Stay, args: tuple[Any, ...]) -> bool:
    """Return whether a module is an embedding whose forward needs few rows, which can be read at home."""
    if not isinstance(module, Embedding) or module.max_norm is not None:
        return False
    return bool(args) and isinstance(args[0], Tensor) and stay.home.has_few_rows(args[0].numel())
