"""Brings weights to memory before modules, backward and optimizers need them, and takes them home again.

[Note: which weights are in memory]
    The streamer has a limit of bytes. Weights stay in memory while they fit. If they do not, reads begin
    in the order of uses (:mod:`.order`) as long as there is room, or something there that is needed later
    than what would be read. What was changed is written home first; at once if it cannot stay until its
    next use, so that it is gone when its memory is needed.

[Note: who uses a weight]
    A module that owns a weight, from the call of its forward to the return; a weight that another module
    touches is brought with that module from then on. Backward, as long as anybody refers to the memory
    that it was given, which is known by the use count of the storage. An optimizer, between ``hold`` and
    ``let_go``. Everybody else meets the weight at rest (:mod:`.resting`).

    What is in memory and not pinned has the class of a resting weight, so that whoever touches it there
    is noticed too: it counts as changed then, if its memory may have been given away.

    Memory to which others refer stays the parameter's memory, so that each sees what the other writes:
    a buffer does not leave then, and a weight whose mapping was lent, or is worked with just now, is
    used at home, by modules too.

[Note: memory and threads]
    Memory and class of a parameter are exchanged under the streamer's lock, in the thread that works with
    it; threads of the engine only set flags. A failed write leaves the weight in memory, over the limit
    if it must, and is tried again in the next step; a failed read is an error where the weight is needed.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter

from penstock.core.config import UNLIMITED
from penstock.core.errors import (
    BudgetError,
    ConfigError,
    InPlaceError,
    PenstockError,
    PenstockWarning,
)
from penstock.core.locks import condition, defer
from penstock.core.process import fork_guard
from penstock.core.units import MIB, format_bytes
from penstock.homed import home_of, paused_holders
from penstock.io.engine import Priority, Transfer
from penstock.store.account import Account
from penstock.weights.brought import BroughtMemory, HostMemory
from penstock.weights.homes import (
    Home,
    is_dense,
    shares_storage,
    show,
    use_count,
    view_like,
)
from penstock.weights.order import UseOrder
from penstock.weights.references import WeightReference
from penstock.weights.resting import BusyParameter, RestingParameter

AHEAD_BYTES: Final = 256 * MIB
"""Most bytes of reads in flight at once, but for a longer weight."""
AHEAD_SHARE: Final = 4
"""Weights leave memory for others that come before this part of the limit is used."""
_NOW: Final = -1
"""Distance of what is needed at once."""
ROWS_SHARE: Final = 8
"""An embedding's rows are read at home, if they are less than this part of it."""


class _Stay:
    """One weight's memory; see [Note: which weights are in memory].

    Attributes:
        storage: Its memory; None if it is not there.
        own_uses: Use count of the storage if nobody else refers to it.
        block, coming: Memory that is being filled, of the kind that the streamer brings weights to,
            and the read.
        writing: Write home in flight.
        dirty: True if the memory is newer than the home.
        version: The parameter's version when the memory was as the home.
        pins: Users that need the class and the memory to stay.
        touching: Operations on the weight in memory that are not over.
        at_home: Users of both kinds that work with the mapping: no read begins meanwhile.
    """

    __slots__ = (
        *("at_home", "block", "coming", "dirty", "home", "index", "own_uses", "pins", "storage"),
        *("address", "touching", "version", "writing"),
    )

    def __init__(self, index: int, home: Home) -> None:
        self.index = index
        self.home = home
        self.storage: torch.UntypedStorage | None = None
        self.own_uses = 0
        self.block: Any = None
        self.coming: Transfer | None = None
        self.writing: Transfer | None = None
        self.dirty = False
        self.version = 0
        self.pins = 0
        self.touching = 0
        self.at_home = 0
        self.address = 0

    @property
    def is_lent(self) -> bool:
        """True if others than the parameter refer to the buffer, or it was moved to shared memory."""
        storage = self.storage
        assert storage is not None
        return use_count(storage) > self.own_uses or storage.data_ptr() != self.address


class _Calls(threading.local):
    """Modules that this thread runs, the innermost last, with what each has pinned."""

    def __init__(self) -> None:
        self.stack: list[tuple[Module, list[_Stay]]] = []


class WeightStreamer:
    """Streams the weights of models. Thread-safe, but for ``add`` and ``close``.

    Attributes:
        waited_ns: Time that the threads have waited for reads and for room.
        demands: Reads that began only when the weight was needed.
        forced: Times that the limit was exceeded.
        account: Account of the weights in memory, whose limit the streamer keeps. It yields.
    """

    def __init__(
        self,
        rest: Callable[[Module, Callable[[list[tuple[int, str]]], None]], Sequence[Home]],
        *,
        account: Account,
        clock_ns: Callable[[], int],
        memory: BroughtMemory | None = None,
    ) -> None:
        """Take charge of nothing yet; see ``add``.

        Args:
            rest: Returns the homes of a model's weights, which rest there from then on; before that it
                calls its second argument with their lengths and names, which raises if they are too long.
            account: Account of the weights in memory, whose limit the streamer keeps.
            clock_ns: Returns the time.
            memory: Where weights are brought to, charged to ``account``; None: host memory.
        """
        self._rest = rest
        self._stays: list[_Stay] = []
        self._by_home: dict[Home, _Stay] = {}
        self._by_storage: dict[int, _Stay] = {}
        self.account = account
        self._memory = memory or HostMemory(account)
        self._order = UseOrder()
        self._wake = condition()
        self._calls = _Calls()
        self._own: WeakKeyDictionary[Module, tuple[int, ...]] = WeakKeyDictionary()  # by identity
        self._users: WeakKeyDictionary[Module, list[_Stay]] = (
            WeakKeyDictionary()
        )  # weights that a module touches beside its own
        self._guard = fork_guard()
        self._clock_ns = clock_ns
        self._total_bytes = 0
        self._coming_bytes = 0
        self._failure: BaseException | None = None
        self._left: list[str] = []  # names of weights that have left their homes
        self.waited_ns = 0
        self.demands = 0
        self.forced = 0

    def add(self, model: Module) -> None:
        """Take charge of the weights of a model, unless it is known already.

        Raises:
            ConfigError: Its weights cannot rest, or another open session streams them.
            NoSpaceError: The directories have no room for them; nothing was moved.
            BudgetError: The largest weight and another one do not fit.
        """
        homes = self._rest(model, self._check_sizes)
        homes = [home for home in homes if home not in self._by_home]
        for home in homes:
            if home.keeper is not None:
                raise ConfigError(f"weight {home.name} is streamed by another open session")
        with self._wake:
            for home in homes:
                stay = _Stay(len(self._stays), home)
                self._stays.append(stay)
                self._by_home[home] = stay
                if home.is_mapped:
                    self._by_storage[home.resting.untyped_storage()._cdata] = stay
                self._total_bytes += home.nbytes
                home.keeper = self
            self._order.add(len(homes))

    def _check_sizes(self, sizes: list[tuple[int, str]]) -> None:
        sizes = sorted(sizes)
        least = sum(nbytes for nbytes, _ in sizes[-2:])
        limit = self.account.limit_bytes
        if least <= limit:
            return
        largest = sizes[-1]
        raise BudgetError(
            f"weights in memory are limited to {format_bytes(limit)}, and the largest, {largest[1]}"
            f" ({format_bytes(largest[0])}), and the one after it need {format_bytes(least)}: give"
            f" weights_memory={least} at least",
            slot=largest[1],
            limit_bytes=limit,
            least_bytes=least,
        )

    # -- for the tracker of modules ---------------------------------------------------------------

    def enter(self, module: Module, args: tuple[Any, ...]) -> None:
        """Bring the weights of a module that is called now."""
        calls = self._calls.stack
        if calls and calls[0][0] is module:  # an interrupt has kept the last call from ending
            self.leave(module)
            while calls:
                self.leave(calls[-1][0])
        if not calls:
            with self._wake:
                self._order.begin(None if torch.is_grad_enabled() else id(module))
        pinned: list[_Stay] = []
        calls.append((module, pinned))
        own = tuple(map(id, module._parameters.values()))
        if own and self._own.get(module) != own:
            self._take_new(module, own)
        for stay in self._weights_of(module):
            self._check_process(stay.home)
            if isinstance(module, Embedding) and self._reads_rows(module, stay, args):
                self._pin_at_home(stay)
            else:
                self._acquire(stay)
            pinned.append(stay)
        if "_orig_mod" in module._modules:
            for stay in pinned:
                parameter = stay.home.parameter
                if parameter is not None:
                    parameter.__class__ = Parameter

    def _take_new(self, module: Module, own: tuple[int, ...]) -> None:
        """Let weights rest that a module got since ``add``, as by ``load_state_dict(assign=True)``."""
        self._own[module] = own
        parameters = [each for each in module._parameters.values() if each is not None]
        if any(self._stay_of(each) is None for each in parameters):
            self.add(module)

    def leave(self, module: Module) -> None:
        """Let go of what ``enter`` has brought."""
        calls = self._calls.stack
        while calls:
            entered, pinned = calls.pop()
            for stay in pinned:
                self._release(stay)
            if entered is module:
                return

    def _check_process(self, home: Home) -> None:
        """Raise ClosedError in a forked child: transfers, their threads and locks are the parent's."""
        if self._guard.in_child:
            raise self._guard.error(
                f"weight {home.name}, which rests on flash,", "give the child a copy of the model"
            )

    def _weights_of(self, module: Module) -> Iterator[_Stay]:
        if "_orig_mod" in module._modules:  # compiled: its graph needs all weights at once
            owned = [each for inner in module.modules() for each in inner._parameters.values()]
        else:
            owned = [*module._parameters.values()]
        seen: set[int] = set()
        for parameter in owned:
            stay = None if parameter is None else self._stay_of(parameter)
            if stay is not None and stay.index not in seen:
                seen.add(stay.index)
                yield stay
        for stay in self._users.get(module, ()):
            if stay.index not in seen and self._fits_beside_pinned(stay):
                yield stay

    def _fits_beside_pinned(self, stay: _Stay) -> bool:
        """Return whether this thread's modules would pin no more than half of the memory with a weight.

        A module may use those of the whole model, which do not fit.
        """
        pinned = sum(each.home.nbytes for _, stays in self._calls.stack for each in stays)
        fits = pinned + stay.home.nbytes <= self.account.limit_bytes // 2
        return fits and stay.home.parameter is not None

    def _stay_of(self, parameter: Parameter) -> _Stay | None:
        home = home_of(parameter)
        return None if home is None else self._by_home.get(home)  # type: ignore[call-overload]

    def _reads_rows(self, module: Embedding, stay: _Stay, args: tuple[Any, ...]) -> bool:
        """Return whether an embedding's forward needs so few rows that they are read at home."""
        if not args or not isinstance(args[0], Tensor) or module.max_norm is not None:
            return False
        if not stay.home.is_mapped:
            return False
        row_bytes = stay.home.nbytes // max(module.num_embeddings, 1)
        return args[0].numel() * row_bytes * ROWS_SHARE < stay.home.nbytes

    def _pin_at_home(self, stay: _Stay) -> None:
        """Pin a weight where it is, if it is not being read."""
        stay.home.check()
        with self._wake:
            if stay.coming is None:
                stay.pins += 1
                if stay.storage is None:
                    stay.at_home += 1
                    stay.home.random()
                self._show_busy(stay)
                return
        self._acquire(stay)

    def _show_busy(self, stay: _Stay) -> None:
        parameter = stay.home.parameter
        if parameter is not None and type(parameter) is RestingParameter:
            cast(Any, parameter).__class__ = BusyParameter

    # -- for the hooks of autograd ----------------------------------------------------------------

    def reference(self, tensor: Tensor, storage: torch.UntypedStorage) -> WeightReference | None:
        """Return what autograd holds in place of a saved tensor; None if that is no weight."""
        stay = self._by_storage.get(storage._cdata)
        if stay is None:
            return None
        return WeightReference(tensor, stay.home, self, is_cast=False)

    def cast_reference(self, tensor: Tensor, leaf: Tensor) -> WeightReference | None:
        """Return the same for a cast of a whole parameter, or for a view of one."""
        if not isinstance(leaf, Parameter) or not _is_of_cast(tensor, leaf):
            return None
        stay = self._stay_of(leaf)
        return None if stay is None else WeightReference(tensor, stay.home, self, is_cast=True)

    def bring(self, home: Home, parameter: Parameter) -> torch.UntypedStorage:
        """Return the memory of a weight; it stays as long as anybody refers to it."""
        if home.keeper is not self or (home.parameter is None and home_of(parameter) is None):
            if not home.is_mapped and home.is_at_rest:
                home.begin_touch()  # which raises
            with (
                torch._C.DisableTorchFunctionSubclass()
            ):  # the session is closed, or it has left its home
                return Tensor.untyped_storage(parameter)
        self._check_process(home)
        stay = self._by_home[home]
        self._acquire(stay)
        storage = stay.storage
        if storage is None and home.is_mapped:
            storage = home.resting.untyped_storage()
        self._release(stay)
        if storage is None:
            raise InPlaceError(
                f"weight {home.name}, which backward needs, was replaced meanwhile in another thread"
            )
        return storage

    # -- for optimizers ---------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Limit of the weights in memory; see :class:`penstock.homed.HomedWeight`."""
        return self.account.limit_bytes

    def hold(self, home: Home) -> None:
        """Bring a weight to be changed; see :class:`penstock.homed.HomedWeight`."""
        self._check_process(home)
        stay = self._by_home[home]
        self._acquire(stay)
        self._wait_for_write(stay)
        if stay.storage is not None:
            self._memory.settle(stay.storage)

    def let_go(self, home: Home, *, changed: bool) -> None:
        """End a ``hold``."""
        stay = self._by_home[home]
        if changed:
            self.lent(home)
        self._release(stay)
        with self._wake:
            begin = self._should_leave(stay)
            if begin:
                self._write(stay)

    # -- for resting weights ----------------------------------------------------------------------

    def begin_touch(self, home: Home) -> None:
        """Let a weight stay where it is, no transfer of it be in flight, and note who works with it."""
        self._check_process(home)
        stay = self._by_home[home]
        if not home.is_mapped:
            self._acquire(stay)
            with self._wake:
                self._begin_use(stay)
            self._release(stay)
            self._note_user(stay)
            return
        while True:
            if stay.coming is not None:  # what it reads may be changed now
                self._finish_read(stay)
            with self._wake:
                self._wake.wait_for(lambda: stay.writing is None)
                if stay.coming is None:
                    self._begin_use(stay)
                    break
        self._note_user(stay)

    def _note_user(self, stay: _Stay) -> None:
        """Note that the module that runs uses a weight, which is then brought with it."""
        if self._calls.stack:
            module, _ = self._calls.stack[-1]
            users = self._users.setdefault(module, [])
            if stay not in users and not isinstance(module, Embedding):
                users.append(stay)

    def _begin_use(self, stay: _Stay) -> None:
        if stay.storage is None:
            stay.at_home += 1
        else:
            stay.touching += 1

    def end_touch(self, home: Home, *, changed: bool) -> None:
        """End a touch."""
        stay = self._by_home[home]
        with self._wake:
            if stay.at_home:
                stay.at_home -= 1
            else:
                stay.touching -= 1
            if changed:
                self._changed(stay)
            self._check_memory(stay)
            self._wake.notify_all()

    def _check_memory(self, stay: _Stay) -> None:
        """Let a weight leave its home that has other memory, as ``set_`` gives it. Under the lock."""
        parameter, storage = stay.home.parameter, stay.storage
        if storage is None:
            storage = stay.home.resting.untyped_storage()
        if parameter is not None and not shares_storage(parameter, storage):
            self._leave_home(stay)

    def lent(self, home: Home) -> None:
        """Note that a weight may be changed where it is."""
        self._check_process(home)
        with self._wake:
            self._changed(self._by_home[home])

    def _changed(self, stay: _Stay) -> None:
        if stay.storage is None:
            stay.home.forget()
        else:
            stay.dirty = True

    def replaced(self, home: Home, data: Tensor) -> None:
        """Take other values of a weight, of any shape and type; if it cannot rest, it leaves its home."""
        stay = self._by_home[home]
        if not home.is_mapped:
            self._replaced_on_device(stay, data)
            return
        old = home.resting
        is_dense_here = data.device == old.device and is_dense(data)
        is_same = (data.dtype, data.size(), data.stride()) == (old.dtype, old.size(), old.stride())
        home.begin_touch()
        try:
            if is_dense_here and not is_same:
                self._move(stay, data)
            elif is_dense_here:
                home.take(data)
        finally:
            home.end_touch(changed=True)
        if not is_dense_here:
            parameter = home.parameter
            with self._wake:
                self._leave_home(stay)
            with torch._C.DisableTorchFunctionSubclass():
                Tensor.data.__set__(parameter, data)  # type: ignore[attr-defined]

    def _replaced_on_device(self, stay: _Stay, data: Tensor) -> None:
        """Let a weight whose home is not mapped leave it for other values."""
        parameter = stay.home.parameter
        if parameter is None or data is parameter:  # as by ``to`` with nothing to convert
            return
        with self._wake:
            self._leave_home(stay)
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(parameter, data)  # type: ignore[attr-defined]

    def _move(self, stay: _Stay, data: Tensor) -> None:
        """Let a weight have another shape or type from now on."""
        home = stay.home
        others = [
            each.home
            for each in self._stays
            if each is not stay and each.home.parameter is not None
        ]
        self._check_sizes(
            [(each.nbytes, each.name) for each in others] + [(data.nbytes, home.name)]
        )
        before = home.nbytes
        with self._wake:
            resting = home.resting.untyped_storage()
            kind = type(home.parameter)
            home.move(data)
            if stay.storage is not None:
                self._by_storage.pop(stay.storage._cdata, None)
                stay.storage = None
                stay.at_home, stay.touching = stay.pins + stay.touching, 0
            self._by_storage.pop(resting._cdata, None)
            self._by_storage[home.resting.untyped_storage()._cdata] = stay
            self._total_bytes += home.nbytes - before
            if stay.pins:
                home.parameter.__class__ = kind

    def _leave_home(self, stay: _Stay) -> None:
        """Leave a weight to memory, and to those who have given it that memory. Under the lock."""
        name = stay.home.name
        if stay.storage is not None:
            self._by_storage.pop(stay.storage._cdata, None)
            stay.storage = None
            stay.at_home, stay.touching = stay.pins + stay.touching, 0
        self._by_storage.pop(stay.home.resting.untyped_storage()._cdata, None)
        stay.home.generation += 1
        stay.home.leave()
        self._left.append(name)
        self._total_bytes -= stay.home.nbytes

    # -- for the session --------------------------------------------------------------------------

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights that have a home."""
        return self._total_bytes

    @property
    def wanted_bytes(self) -> int:
        """Bytes of memory in which all weights could stay; without limit before a model is known."""
        return self._total_bytes if self._stays else UNLIMITED

    def give_way(self, nbytes: int) -> None:
        """Begin to free memory for other parts of Penstock, of what is needed last. Never waits.

        Args:
            nbytes: Bytes that are missing.
        """
        account = self.account
        enough = account.used_bytes - nbytes
        while account.used_bytes > enough and self._give_some(account.used_bytes - enough):
            pass

    def _give_some(self, nbytes: int) -> bool:
        """Free idle memory, or let one weight leave; return False if nothing can be freed at once.

        If what is needed last was changed, begin to write as much as ``nbytes``.
        """
        if self._memory.trim(nbytes):
            return True
        with self._wake:
            return self._free(nbytes, later_than=_NOW) or self._take_unneeded_read()

    @property
    def present_bytes(self) -> int:
        """Bytes of weights that are in memory."""
        return sum(stay.home.nbytes for stay in self._stays if stay.storage is not None)

    @property
    def touches(self) -> Mapping[str, int]:
        """Operations on weights at rest, by name of the weight."""
        return {stay.home.name: stay.home.touches for stay in self._stays if stay.home.touches}

    def note(self) -> str:
        """Return a sentence for the summary."""
        text = f"weights of {format_bytes(self._total_bytes)} rest on flash"
        touches = self.touches
        if touches:
            name, times = max(touches.items(), key=lambda each: each[1])
            text += (
                f"; {len(touches)} of them were used outside of the modules that own them, the most"
                f" {name}, {times} times"
            )
        kept = [stay.home.name for stay in self._stays if self._must_stay(stay)]
        if kept:
            text += (
                f"; {len(kept)} of them stay in device memory, as they were changed, or may have been,"
                f" the first {kept[0]}"
            )
        if self._left:
            text += (
                f"; {len(self._left)} of them stay in memory, as the program has given them that,"
                f" the first {self._left[0]}"
            )
        if self.forced:
            text += f"; their limit was exceeded {self.forced} times, as all in memory was in use"
        return text

    def end_step(self) -> None:
        """End a step of training: the order of its uses is what the next one is expected to have."""
        while self._calls.stack:  # an interrupt has kept modules from ending
            self.leave(self._calls.stack[-1][0])
        with self._wake:
            self._order.end()
            failure, self._failure = self._failure, None
        self._pump()
        if failure is not None:
            warnings.warn(
                f"weights could not be written home, and stay in memory until they can: {failure}",
                PenstockWarning,
                stacklevel=4,
            )

    def close(self) -> None:
        """Take all weights home, where they rest, and free the memory. Idempotent.

        Raises:
            TransferError: Some could not be written; they are ordinary parameters in memory now.
        """
        if self._guard.in_child:
            return  # the weights are the parent's
        with paused_holders():
            self._take_all_home()

    def _take_all_home(self) -> None:
        self._failure = None
        for stay in self._stays:
            with suppress(PenstockError):  # a read that nobody waits for any more
                self._finish_read(stay)
            self._wait_for_write(stay)
            with self._wake:
                stay.pins = stay.touching = stay.at_home = 0
                is_here = stay.home.is_mapped and stay.storage is not None
                if is_here and not stay.is_lent and self._is_changed(stay):
                    self._write(stay)
        failure: BaseException | None = None
        for stay in self._stays:
            self._wait_for_write(stay)
            if not stay.home.is_mapped:
                failure = self._leave_to_device(stay) or failure
                continue
            with self._wake:
                stay.home.keeper = None
                if stay.storage is not None and (stay.is_lent or self._is_changed(stay)):
                    stay.home.leave()  # not written, or seen by those who refer to it
                elif stay.storage is not None:
                    self._send_home(stay)
                else:
                    stay.home.rest()
        failure, self._failure = self._failure or failure, None
        self._stays.clear()
        self._by_home.clear()
        self._by_storage.clear()
        self._memory.close()
        if failure is not None:
            raise failure

    def _leave_to_device(self, stay: _Stay) -> BaseException | None:
        """Leave a weight to device memory of its own; return the error if it cannot be brought there."""
        home = stay.home
        if home.parameter is None:
            home.keeper = None
            return None
        try:
            while stay.storage is None:
                with self._wake:
                    if stay.coming is None:
                        self._begin_read(stay, Priority.DEMAND, force=True)
                self._finish_read(stay)
        except (PenstockError, torch.OutOfMemoryError) as error:
            home.keeper = None  # it rests, and whoever touches it is told
            return error.with_traceback(None)
        self._memory.use(stay.storage)
        parameter, is_lent = home.parameter, stay.is_lent
        with self._wake:
            home.keeper = None
            self._by_storage.pop(stay.storage._cdata, None)
            if not is_lent and parameter is not None:
                with torch.inference_mode(False):
                    own = view_like(stay.storage, home.layout).clone()
                show(parameter, own, RestingParameter)
            stay.storage = None
            home.leave()
        return None

    # -- bringing ---------------------------------------------------------------------------------

    def _acquire(self, stay: _Stay) -> None:
        """Bring a weight and pin it."""
        with self._wake:
            self._order.note(stay.index)
            stay.pins += 1
        try:
            self._bring(stay)
        except BaseException:
            with self._wake:
                stay.at_home += stay.storage is None  # which ``_release`` takes away
            self._release(stay)
            raise
        storage = stay.storage
        if storage is not None:
            self._memory.use(storage)
        self._pump()

    def _release(self, stay: _Stay) -> None:
        with self._wake:
            stay.pins -= 1
            if stay.storage is None:
                stay.at_home -= 1
                stay.home.check_version()
            parameter = stay.home.parameter
            if not stay.pins and parameter is not None:
                parameter.__class__ = RestingParameter
                self._check_memory(stay)
            self._wake.notify_all()

    def _bring(self, stay: _Stay) -> None:
        while True:
            with self._wake:
                if stay.storage is not None:
                    self._show_busy(stay)
                    return
                is_gone = stay.home.parameter is None  # the program has dropped it
                if stay.coming is None and (is_gone or stay.at_home or stay.home.is_lent):
                    stay.at_home += 1
                    self._show_busy(stay)
                    return
                is_begun = stay.coming is not None or self._begin_read(stay, Priority.DEMAND)
                has_room = is_begun or self._make_room(stay)
                if not is_begun and has_room:
                    continue
            if not has_room and not self._memory.wait_for_room():
                with self._wake:
                    if stay.storage is None and stay.coming is None:
                        self.forced += 1
                        self._begin_read(stay, Priority.DEMAND, force=True)
            self._finish_read(stay)

    def _finish_read(self, stay: _Stay) -> None:
        """Wait for the read of a weight, if there is one, and let the weight be in memory."""
        coming = stay.coming
        if coming is None:
            return
        if not coming.done:
            coming.promote(Priority.DEMAND)
            begun = self._clock_ns()
            with suppress(Exception):  # looked at below
                coming.wait()
            self.waited_ns += self._clock_ns() - begun
        with self._wake:
            error = self._arrived(stay) if stay.coming is coming else None
        if error is not None:
            raise error

    def _begin_read(self, stay: _Stay, priority: Priority, *, force: bool = False) -> bool:
        """Begin to read a weight if there is memory for it. Under the lock."""
        home = stay.home
        home.check_version()
        resting = home.resting
        home.settle()
        self._resting_moved(stay, resting)
        begun = self._memory.begin(home, priority, force=force)
        if begun is None:
            return False
        block, coming = begun
        stay.block, stay.coming = block, coming
        self._coming_bytes += home.nbytes
        if priority is Priority.DEMAND:
            self.demands += 1
        coming.add_done_callback(lambda _: defer(self._moved))
        return True

    def _resting_moved(self, stay: _Stay, before: Tensor) -> None:
        """Note that a weight may have another home than before. Under the lock."""
        if stay.home.resting is not before:
            self._by_storage.pop(before.untyped_storage()._cdata, None)
            self._by_storage[stay.home.resting.untyped_storage()._cdata] = stay

    def _moved(self) -> None:
        """A read or write is over: go on to give way, if somebody still waits for that."""
        with self._wake:
            self._wake.notify_all()
        owed = self.account.owed_bytes
        if owed and self._give_some(owed):
            defer(self._moved)  # after what was let go is freed, which is deferred as this is

    def _arrived(self, stay: _Stay) -> BaseException | None:
        """Let a weight whose read is over be in memory, or return the error. Under the lock."""
        block, coming = stay.block, stay.coming
        assert block is not None
        assert coming is not None
        stay.block = stay.coming = None
        self._coming_bytes -= stay.home.nbytes
        if coming.error is not None:
            self._memory.drop(block)
            return coming.error.with_traceback(None)
        parameter = stay.home.parameter
        if parameter is None or stay.home.is_lent or not stay.home.is_as_read:
            self._memory.drop(block)  # it may have been changed at home meanwhile
            return None
        storage = self._memory.finish(block, stay.home)
        stay.storage = storage
        stay.address = storage.data_ptr()
        stay.dirty = False
        if parameter is not None:
            kind = BusyParameter if stay.pins else RestingParameter
            show(parameter, view_like(storage, stay.home.layout), kind)
            stay.version = parameter._version
        stay.own_uses = use_count(storage)
        self._by_storage[storage._cdata] = stay
        return None

    def _make_room(self, stay: _Stay) -> bool:
        """Free memory for a weight that is needed now; return False if nothing can go. Under the lock."""
        if self._free(stay.home.nbytes, later_than=_NOW) or self._take_unneeded_read(stay):
            return True
        if any(each.writing is not None or each.coming is not None for each in self._stays):
            begun = self._clock_ns()
            self._wake.wait()
            self.waited_ns += self._clock_ns() - begun
            return True
        return False

    def _take_unneeded_read(self, stay: _Stay | None = None) -> bool:
        """Let a weight whose read is over be in memory, which it can then leave. Under the lock."""
        for each in self._stays:
            if each is not stay and each.coming is not None and each.coming.done:
                self._arrived(each)
                return True
        return False

    def _pump(self) -> None:
        """Begin the reads of what is needed next, as far as there is room.

        Weights leave only for the next few: if they left for all that comes, none would stay until its
        next use where forward follows forward.
        """
        while self._begin_reads():
            pass

    def _begin_reads(self) -> bool:
        """Do so; return True if something has left memory, which is free only when the lock is."""
        with self._wake:
            if self._memory.is_over_limit:
                return self._free(0, later_than=_NOW)
            before, ahead = 0, min(AHEAD_BYTES, self.account.limit_bytes // AHEAD_SHARE)
            for distance, index in enumerate(self._order.upcoming()):
                stay = self._stays[index]
                before, near = before + stay.home.nbytes, before <= ahead
                if stay.storage is not None or stay.coming is not None or stay.at_home:
                    continue
                if stay.home.parameter is None or stay.home.is_lent:
                    continue
                if self._coming_bytes and self._coming_bytes + stay.home.nbytes > AHEAD_BYTES:
                    return False
                if not self._begin_read(stay, Priority.PREFETCH):
                    return near and self._free(stay.home.nbytes, later_than=distance)
        return False

    # -- going home -------------------------------------------------------------------------------

    def _free(self, nbytes: int, *, later_than: int) -> bool:
        """Let the weight that is needed last leave memory, if it is needed later than that.

        If what is needed last was changed, begin to write as much as is to be freed. Under the lock.

        Returns:
            Whether memory was freed.
        """
        leaving = sum(stay.home.nbytes for stay in self._stays if stay.writing is not None)
        idle = (
            (self._order.next_use(stay.index), stay)
            for stay in self._stays
            if stay.storage is not None
            and not (stay.pins or stay.touching)
            and stay.writing is None
        )
        for next_use, stay in sorted(idle, key=lambda each: -each[0]):
            if next_use <= later_than:
                return False
            if stay.is_lent or self._must_stay(stay):
                continue
            if not self._is_changed(stay):
                self._send_home(stay)
                return True
            if leaving < nbytes and self._failure is None:
                self._write(stay)
                leaving += stay.home.nbytes
        return False

    def _is_changed(self, stay: _Stay) -> bool:
        parameter = stay.home.parameter
        return stay.dirty or (parameter is not None and parameter._version != stay.version)

    def _must_stay(self, stay: _Stay) -> bool:
        """Return whether a weight stays in memory because it cannot be written home from there."""
        return stay.storage is not None and not stay.home.is_mapped and self._is_changed(stay)

    def _send_home(self, stay: _Stay) -> None:
        """Free the memory of a weight that is as its home. Under the lock."""
        storage, stay.storage = stay.storage, None
        assert storage is not None
        self._by_storage.pop(storage._cdata, None)
        stay.home.rest()

    def _should_leave(self, stay: _Stay) -> bool:
        """Return whether a weight cannot stay until its next use. Under the lock."""
        if stay.storage is None or stay.writing is not None or not stay.dirty:
            return False
        if self._must_stay(stay):
            return False
        if stay.pins or stay.touching or stay.is_lent:
            return False
        limit, needed = self.account.limit_bytes, stay.home.nbytes
        if self._total_bytes <= limit:
            return False
        seen = {stay.index}
        for index in self._order.upcoming():
            if index == stay.index:
                break
            if index not in seen:
                seen.add(index)
                needed += self._stays[index].home.nbytes
        return needed > limit

    def _write(self, stay: _Stay) -> None:
        """Begin to write a weight home. Under the lock."""
        storage, parameter = stay.storage, stay.home.parameter
        assert storage is not None
        stay.dirty = False
        if parameter is not None:
            stay.version = parameter._version
        resting = stay.home.resting
        try:
            stay.writing = stay.home.written_from(storage.data_ptr(), storage)
        except PenstockError as error:  # as if the write had failed later
            stay.dirty = True
            self._failure = error.with_traceback(None)
            return
        self._resting_moved(stay, resting)
        stay.writing.add_done_callback(lambda transfer: defer(self._written, stay, transfer))

    def _written(self, stay: _Stay, transfer: Transfer) -> None:
        """A weight is at home, or not; in a thread of the engine's."""
        with self._wake:
            stay.writing = None
            if transfer.error is not None:
                stay.dirty = True
                self._failure = transfer.error
        self._moved()

    def _wait_for_write(self, stay: _Stay) -> None:
        with self._wake:  # if it fails, the weight is in memory, and counts as changed
            self._wake.wait_for(lambda: stay.writing is None)


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
