"""Models that are larger than memory, built by their ordinary constructors.

[Note: a model that is being built]
    A hook of torch's is told of every parameter that a module gets. The parameter stays in its memory
    for a while, for its initialiser to work there; it is *young*. When there are too many young ones, the
    oldest get a home, are written there, and rest. Random numbers are drawn by nobody else and in no
    other order, so the values are those of a model in memory, bit by bit. Those of a large parameter
    are drawn by several threads (:mod:`.draws`).

    A resting weight that is touched, as by initialisers that run when the whole model is there, is
    brought to memory and is young again. It is not written through the mapping of its home, which would
    fill the page cache; only an operation on more weights than can be young does that. Memory that
    somebody else refers to, as a view, is not taken away; it is looked at again later.

    The C library's heap keeps what is freed in it, and, as blocks of tensors are aligned, a hole does not
    hold another tensor of the same size. So the heap is trimmed now and then.

    What an initialiser has not touched, as with ``torch.empty``, has no pages. Nothing is written for it:
    a new place in a file has zeros, as its memory has.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock.core import knobs
from penstock.core.errors import ConfigError, PenstockWarning, TransferError
from penstock.core.process import fork_guard
from penstock.core.units import MIB, format_bytes, parse_bytes
from penstock.homed import UpdateMemory, home_of, is_sharded, move_out, use_count
from penstock.io.engine import Priority
from penstock.io.pages import is_untouched, trim_heap, whole_pages
from penstock.observe.clients import WEIGHTS
from penstock.store.arena import Arena
from penstock.store.blob import StrPath
from penstock.store.checksums import RunningSum
from penstock.weights.draws import Draw, drawn
from penstock.weights.failures import AGAIN, named_reads
from penstock.weights.homes import (
    Home,
    WeightFiles,
    flat_bytes,
    is_dense,
    show,
    view_like,
)
from penstock.weights.noticed import Noticed
from penstock.weights.pieces import PieceWriter

YOUNG_BYTES: Final = 128 * MIB
"""Weights that stay in memory for their initialisers, but for a longer one."""
_NAMED: Final = 3
"""Weights that a warning names."""


_ADVICE: Final = "Free some space, or name another directory, and build the model again"


class _Young:
    """A young weight; its home is None if it has had none yet."""

    __slots__ = ("home", "name", "nbytes", "parameter")

    def __init__(self, parameter: Parameter, name: str, home: Home | None) -> None:
        self.parameter = weakref.ref(parameter)
        self.name = name
        self.nbytes = parameter.nbytes
        self.home = home


class Active(threading.local):
    """Builder of this thread; any thread may have closed it."""

    builder: weakref.ref[ModelBuilder] | None = None
    end_script: Callable[[], None] | None = None
    """Ends what builds for a script that knows nothing of it (:mod:`.script_models`)."""


active: Final = Active()


def _builder() -> ModelBuilder | None:
    """Return the builder that this thread gives its parameters to, if any."""
    builder = None if active.builder is None else active.builder()
    return builder if builder is not None and builder.is_open else None


class ModelBuilder:
    """Gives homes to the parameters that one thread registers. See [Note: a model that is being built].

    It is the keeper of these homes while the model is built. Other threads may use the parameters.

    Attributes:
        lock: Held while anything changes.
    """

    def __init__(self, directories: StrPath | Sequence[StrPath], floor_bytes: int) -> None:
        """Check the directories; make no file yet. Raises ConfigError."""
        self._files = WeightFiles(directories)
        self._floor_bytes = floor_bytes
        self._writer = PieceWriter(owner=WEIGHTS, advice=_ADVICE)
        self._young: dict[int, _Young] = {}
        self._young_bytes = 0
        self._homes: list[weakref.ref[Home]] = []
        self._freed_bytes = 0
        self._is_closed = False
        self._guard = fork_guard()
        self.lock = threading.RLock()  # plain: under ``Lock`` no memory is freed
        self._part: list[tuple[weakref.ref[Parameter], str]] = []
        self._modules: weakref.WeakSet[Module] = weakref.WeakSet()

    @property
    def is_open(self) -> bool:
        """False once it is closed, and in a forked process, where what is constructed is in memory."""
        return not self._is_closed and not self._guard.in_child

    # -- parameters that come ---------------------------------------------------------------------

    def registered(self, module: Module, name: str, parameter: Parameter) -> None:
        """Handle a parameter that a module gets."""
        self._modules.add(module)
        if home_of(parameter) is None and not is_sharded(parameter):
            self.add(parameter, f"{type(module).__name__}.{name}")

    def add(self, parameter: Parameter, name: str) -> None:
        """Let a parameter be young, if it can have a home.

        Raises:
            NoSpaceError: There is no room for the older ones.
            TransferError: An older one could not be written.
        """
        with self.lock:
            if self._is_young(parameter) or not _is_large(parameter, self._floor_bytes):
                return
            if not _is_whole(parameter):
                self._part.append((weakref.ref(parameter), name))
                return
            self._remember(parameter, _Young(parameter, name, None))
            self._settle(YOUNG_BYTES, but=parameter)

    def _is_young(self, parameter: Parameter) -> bool:
        young = self._young.get(id(parameter))
        return young is not None and young.parameter() is parameter

    def _remember(self, parameter: Parameter, young: _Young) -> None:
        if id(parameter) in self._young:
            self._forget(id(parameter))  # of one that is dead
        self._young[id(parameter)] = young
        self._young_bytes += young.nbytes

    def _forget(self, key: int) -> _Young:
        young = self._young.pop(key)
        self._young_bytes -= young.nbytes
        return young

    # -- home -------------------------------------------------------------------------------------

    def _settle(self, limit_bytes: int, *, but: Parameter | None = None) -> list[Home]:
        """Send the oldest home until no more than the limit are young, or the rest cannot go now."""
        rested = []
        for key, young in list(self._young.items()):
            if self._young_bytes <= limit_bytes:
                break
            parameter = young.parameter()
            if parameter is None:
                self._forget(key)
            elif parameter is not but and not _is_shared(parameter):
                home = self._send_home(parameter, young)
                self._forget(key)
                self._freed_bytes += young.nbytes
                if home is not None:
                    rested.append(home)
        if self._freed_bytes > YOUNG_BYTES // 2:
            self._freed_bytes = 0
            trim_heap()
        return rested

    def _send_home(self, parameter: Parameter, young: _Young) -> Home | None:
        """Begin to write a weight home and let it rest; return None if it cannot have a home."""
        home = young.home
        if not _is_large(parameter, 1) or not _is_whole(parameter):  # other memory was assigned
            move_out(parameter)
            return None
        if home is None or not _is_alike(home.resting, parameter):
            place = self._files.cut(parameter.nbytes, young.name)
            home = Home(young.name, parameter, self._files.tier, place)
            home.keeper = self
            self._homes.append(weakref.ref(home))
            if _is_untouched(parameter):
                home.rest()
                return home
        flat, done = flat_bytes(parameter), 0
        running = RunningSum(knobs.verify(), parameter.nbytes)

        def fill(target: NDArray[np.uint8]) -> None:
            nonlocal done
            target[:] = flat[done : done + target.nbytes]
            done += target.nbytes

        self._writer.write(home.place.ranges(home.nbytes), fill, running, name=home.name)
        home.filled(running.result())
        home.rest()
        return home

    # -- for homes --------------------------------------------------------------------------------

    def touched(self, home: Home) -> None:
        """Bring a weight that somebody works with to memory, where it is young again.

        Raises:
            ClosedError: This is a forked process.
            TransferError: It cannot be read.
        """
        if self._guard.in_child:
            raise self._guard.error(
                f"weight {home.name}, which rests on flash,", "give the child a copy of the model"
            )
        with self.lock:
            parameter = home.parameter
            if self._is_closed or parameter is None or self._is_young(parameter):
                return
            self._writer.finish()
            show(parameter, view_like(_read(home), home.resting), Parameter)
            self._remember(parameter, _Young(parameter, home.name, home))
            if self._young_bytes > 2 * YOUNG_BYTES:  # nothing was changed for a while
                rested = self._settle(YOUNG_BYTES, but=parameter)
                self._writer.finish()
                for each in rested:  # this very operation may change them where they rest
                    each.ticket.checksum = None

    def begin_touch(self, home: Home) -> None:
        """See :class:`.resting.RestingHome`."""
        self.touched(home)

    def end_touch(self, home: Home, *, changed: bool) -> None:
        """See :class:`.resting.RestingHome`."""
        if changed:
            self.may_differ(home)

    def lent(self, home: Home) -> None:
        """See :class:`.resting.RestingHome`."""
        self.may_differ(home)

    def addressed(self, home: Home) -> None:
        """See :class:`.resting.RestingHome`."""
        self.may_differ(home)

    def is_as_home(self, home: Home) -> bool:
        """True: what is built is at home."""
        return True

    def embedded(self, home: Home, indices: Tensor, embed: Callable[[], Tensor]) -> None:
        """See :class:`.resting.RestingHome`: what is mapped is not asked for rows."""
        return

    def replaced(self, home: Home, data: Tensor) -> None:
        """See :class:`.resting.RestingHome`: it is young, with other memory."""
        with self.lock:
            self.touched(home)
            home.generation += 1
            parameter = home.parameter
            assert parameter is not None
            with torch._C.DisableTorchFunctionSubclass():
                Tensor.data.__set__(parameter, data)  # type: ignore[attr-defined]

    def may_differ(self, home: Home) -> None:
        """Send older ones home, after an operation that has changed a weight."""
        with self.lock:
            parameter = home.parameter
            if parameter is None or not self._is_young(parameter):
                home.ticket.checksum = None
            self._settle(YOUNG_BYTES, but=parameter)

    @property
    def memory_bytes(self) -> int | None:
        """See :class:`penstock.homed.HomedWeight`."""
        return None

    @property
    def update_memory(self) -> UpdateMemory | None:
        """See :class:`penstock.homed.HomedWeight`."""
        return None

    def streamed_bytes(self, home: Home) -> int | None:
        """See :class:`penstock.homed.HomedWeight`."""
        return None

    def hold(self, home: Home) -> None:
        """See :class:`penstock.homed.HomedWeight`."""
        self.touched(home)

    def let_go(self, home: Home, *, changed: bool) -> None:
        """See :class:`penstock.homed.HomedWeight`."""
        if changed:
            self.may_differ(home)

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Send all home, and free the space that was not needed.

        Raises:
            NoSpaceError: There is no room for the last ones.
            TransferError: One could not be written.
        """
        with self.lock:
            self._add_unregistered()
            self._settle(0)
            self._writer.finish()
            self._files.trim()
        trim_heap()

    def _add_unregistered(self) -> None:
        """Handle parameters that torch has exchanged without a call of its hook, as by ``to_empty``."""
        for module in list(self._modules):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.registered(module, name, parameter)

    def warn(self) -> None:
        """Warn of weights that stay in memory."""
        left = [(young.parameter, young.name) for young in self._young.values()] + self._part
        alive = {name: each.nbytes for ref, name in left if (each := ref()) is not None}
        if alive:
            names = ", ".join(list(alive)[:_NAMED]) + (", ..." if len(alive) > _NAMED else "")
            warnings.warn(
                f"{format_bytes(sum(alive.values()))} of weights stay in memory, because other tensors"
                f" share it: {names}",
                PenstockWarning,
                stacklevel=4,
            )

    def close(self) -> None:
        """End; what has a home rests there, and what has none is in memory."""
        with self.lock:
            self._is_closed = True
            with suppress(TransferError):  # after an error, too, what rests is to be whole
                self._writer.finish()
            self._writer.close()
            self._files.trim()  # so that the files are gone with their homes
            for young in self._young.values():
                parameter = young.parameter()
                if parameter is not None:
                    move_out(parameter)  # if it has a home, its values are older
            for each in self._homes:
                home = each()
                if home is not None:
                    home.keeper = None
            self._young.clear()


def _read(home: Home) -> torch.UntypedStorage:
    """Return what a home has, in new memory. Raises TransferError."""
    nbytes = home.ticket.window.nbytes
    arena = Arena(nbytes, owner=WEIGHTS)
    try:
        block = arena.allocate(nbytes, force=True)
        assert block is not None, "the arena is as large"
        read = home.tier.read(
            home.ticket, block.address, keep_alive=block, priority=Priority.DEMAND
        )
        try:
            with named_reads(home.name, AGAIN + home.tier.spec.remedy):
                read.wait()
        except BaseException:
            block.free()
            raise
        return torch.from_numpy(block.lend(0, home.nbytes)).untyped_storage()
    finally:
        arena.close()


@contextmanager
def built_on_flash(
    directory: StrPath | Sequence[StrPath], floor: int | str | None = None
) -> Iterator[None]:
    """Let the parameters of models that are constructed in a ``with`` block rest in files.

    The model may be larger than memory: about 300 MiB of it are in memory at a time, and its largest
    parameter. It has the values that it would have without the block, bit by bit, for the same seeds.
    After the block every parameter reads its file when it is used, whoever uses it; to train or to
    infer at speed give the model to ``penstock.offload(model, weights="flash", ...)``, which keeps the
    files. They have no names, and are gone with the model.

    Buffers, parameters on other devices, parameters below ``floor``, and those whose memory is shared
    with other tensors stay in memory; a warning names the last. The block is for the thread that enters
    it: what others construct stays in memory.

    Args:
        directory: Directory on flash, or several to spread each parameter over.
        floor: Least size of a parameter that rests in a file, in bytes or as ``"1MiB"``; None: the knob
            ``PENSTOCK_FLOOR``.

    Raises:
        ConfigError: A directory is missing, not writable or in memory, or the block is inside another.
        NoSpaceError: The directory has no room for the next parameter; raised where that is constructed.
        TransferError: A parameter could not be written; the model is not usable.
    """
    if active.end_script is not None:
        active.end_script()  # this script builds its models itself
    if _builder() is not None:
        raise ConfigError(
            "built_on_flash is used inside another one: one block builds a whole model"
        )
    floor_bytes = knobs.floor_bytes() if floor is None else parse_bytes(floor, what="floor")
    builder = ModelBuilder(directory, max(1, floor_bytes))
    with building(builder):
        yield
        builder.finish()
        builder.warn()


@contextmanager
def building(builder: ModelBuilder) -> Iterator[None]:
    """Tell a builder of the parameters that this thread registers in the block, and close it."""

    def registered(module: Module, name: str, parameter: Parameter | None) -> None:
        if parameter is not None and _builder() is builder:
            builder.registered(module, name, parameter)

    hook = register_module_parameter_registration_hook(registered)
    active.builder = weakref.ref(builder)
    for each in _noticed:
        each.begin()
    try:
        yield
    finally:
        for each in _noticed:
            each.end()
        hook.remove()
        builder.close()


def _with_copies(plain: Callable[..., Parameter]) -> Callable[..., Parameter]:
    """Let deep copies of young parameters be young: no module registers them before all are there."""

    def noticed(parameter: Parameter, memo: dict[int, Any]) -> Parameter:
        copy = plain(parameter, memo)
        builder = _builder()
        if builder is not None:
            builder.add(copy, "a deep copy")
        return copy

    return noticed


def _with_draws(plain: Draw) -> Draw:
    """Let several threads draw the numbers of a large tensor for a thread that builds."""

    def noticed(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
        if _builder() is None:
            return plain(tensor, *args, **named)
        return drawn(plain, tensor, *args, **named)

    return noticed


_noticed: Final = (
    Noticed(Parameter, "__deepcopy__", _with_copies),
    Noticed(Tensor, "uniform_", _with_draws),
    Noticed(Tensor, "normal_", _with_draws),
)


def _is_large(parameter: Parameter, floor_bytes: int) -> bool:
    """Return whether a parameter is one that could rest in a file."""
    if type(parameter) is not Parameter or parameter.device.type != "cpu":
        return False
    return parameter.layout == torch.strided and parameter.nbytes >= floor_bytes


def _is_whole(parameter: Parameter) -> bool:
    """Return whether a parameter is all of its memory."""
    storage = parameter.untyped_storage()
    starts_there = parameter.storage_offset() == 0 and storage.nbytes() == parameter.nbytes
    return starts_there and is_dense(parameter)


def _uses(parameter: Tensor) -> int:
    return use_count(parameter.untyped_storage())


_OWN_USES: Final = _uses(torch.empty(0))
"""Use count of memory to which one tensor refers."""


def _is_shared(parameter: Parameter) -> bool:
    """Return whether anything else refers to a parameter's memory, as another process may."""
    if _uses(parameter) > _OWN_USES:
        return True
    storage = parameter.untyped_storage()
    return storage.is_shared() and storage.filename is None


def _is_alike(first: Tensor, second: Tensor) -> bool:
    return (
        first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
    )


def _is_untouched(parameter: Parameter) -> bool:
    """Return whether a parameter's memory is as it was allocated, and zero."""
    storage = parameter.untyped_storage()
    if not storage.resizable() or storage.is_shared():  # may be a file's
        return False
    pages = whole_pages(storage.data_ptr(), storage.nbytes())
    if not pages.nbytes or not is_untouched(pages):
        return False
    flat = flat_bytes(parameter)
    begin = pages.address - storage.data_ptr()
    return not flat[:begin].any() and not flat[begin + pages.nbytes :].any()
