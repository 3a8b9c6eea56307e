"""Tracker of the running module, which gives the first half of a slot's name.

Global forward hooks keep a stack of module paths per thread. They see every module, so a script needs no
change, and a module that ``offload`` registered has the path that ``named_modules`` gives it. A thread
that runs modules with gradients but has no saved-tensor hooks (they are thread-local, TRAPS rule 10) is
reported.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    _has_any_global_hook,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from penstock.runtime.completion import Completion

_autograd: Final[Any] = torch._C._autograd
_EXTRA_CALL: Final = r"Using `torch\.compile\(module\)` when there are global hooks"
"""Beginning of torch's warning that global hooks also run for compiled modules, which is intended."""


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Remove global hooks of modules, with what torch leaves of them; empties the list."""
    while handles:
        handle = handles.pop()
        handle.remove()
        _global_forward_hooks_with_kwargs.pop(handle.id, None)


class WeightUser(Protocol):
    """Brings the weights of modules that are called, from wherever they rest."""

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """Bring the weights of a module that is called now."""

    def leave(self, module: torch.nn.Module) -> None:
        """Let them go again."""


class SavingPlace(NamedTuple):
    """The module in which a tensor is saved."""

    path: str
    """Path of the innermost running module, from the root that was called."""
    kind: str
    """Name of the module's type."""


class CallObserver(Protocol):
    """Observer of every tracked call of a module."""

    def enter(self, module: torch.nn.Module, place: SavingPlace, args: Any) -> None:
        """Handle the beginning of a call."""

    def leave(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        """Handle the end of a call.

        Args:
            module: The called module.
            arguments: Its positional arguments, and a tuple with its keyword arguments.
            output: What it returned; ``None`` if it raised.
        """


OUTSIDE = SavingPlace("", "")
"""Place of tensors that are saved while no module runs, such as by a loss function."""


class RunningModules(threading.local):
    """Modules that this thread runs.

    Attributes:
        here: Place of the innermost one.
        watched: List for notes while that is of a watched type, else ``None``.
    """

    def __init__(self) -> None:
        self.here = OUTSIDE
        self.places: list[SavingPlace] = []
        self.hooked = False
        self.watched: list[Any] | None = None
        self.outer: list[list[Any] | None] = []
        """Value of ``watched`` for each enclosing module; as long as ``places``."""
        self.recomputing = 0


class ModuleTracker:
    """Tracks the running module of each thread while it is attached.

    Attributes:
        running: Modules of the calling thread, for hot paths.
        observer: Notified of every tracked call: of an observed pass, or while a plan has recipes.
        weights: Notified of every call, recomputing ones too; ``None`` if all weights stay in memory.
    """

    def __init__(
        self,
        *,
        on_root: Callable[[torch.nn.Module], None],
        on_missed_thread: Callable[[str], None],
        on_watched: Callable[[str, Any, list[Any]], None] | None = None,
        completion: Completion | None = None,
        watch: Collection[str] = (),
    ) -> None:
        """Track nothing yet.

        Args:
            on_root: Called with each outermost module that is new.
            on_missed_thread: Called with the name of a thread each time that it runs a module with
                gradients enabled but without saved-tensor hooks.
            on_watched: Called when a module of a watched type has run, while it is still ``here``: with
                its type's name, its output (``None`` if it raised), and the contents of ``watched``.
            completion: Notified when a module has returned or raised, if something waits for that.
            watch: Names of the types of modules to watch.
        """
        self.running = RunningModules()
        self._places: weakref.WeakKeyDictionary[torch.nn.Module, SavingPlace] = (
            weakref.WeakKeyDictionary()
        )
        self._roots: dict[str, int] = {}
        self._on_root = on_root
        self._on_missed_thread = on_missed_thread
        self._on_watched = on_watched
        self._completion = completion
        self._watch = frozenset(watch)
        self._handles: list[RemovableHandle] = []
        self._filter: Any = None
        self.observer: CallObserver | None = None
        self.weights: WeightUser | None = None

    def attach(self) -> None:
        """Begin to track; the calling thread counts as one that has saved-tensor hooks."""
        self.running.hooked = True
        if not _has_any_global_hook():  # type: ignore[no-untyped-call]  # other hooks deserve the warning
            warnings.filterwarnings("ignore", _EXTRA_CALL, UserWarning)
            self._filter = warnings.filters[0]
        self._handles.append(register_module_forward_pre_hook(self._enter))
        self._handles.append(
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        )

    def detach(self) -> None:
        """Stop tracking."""
        remove_hooks(self._handles)
        with suppress(ValueError):  # other code has replaced the filters
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        self.running.hooked = False
        self.running.places.clear()
        self.running.here = OUTSIDE
        self.running.outer.clear()
        self.running.watched = None

    def register(self, root: torch.nn.Module) -> None:
        """Name a module and its submodules; roots of the same type are numbered."""
        name = type(root).__name__
        number = self._roots[name] = self._roots.get(name, 0) + 1
        prefix = name if number == 1 else f"{name}-{number}"
        for path, module in root.named_modules():
            place = SavingPlace(f"{prefix}.{path}" if path else prefix, type(module).__name__)
            self._places.setdefault(module, place)
        self._on_root(root)

    @property
    def here(self) -> SavingPlace:
        """The innermost running module of this thread."""
        return self.running.here

    @property
    def recomputing(self) -> bool:
        """True while this thread recomputes a module, whose calls are not tracked again."""
        return self.running.recomputing > 0

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Suspend tracking inside the block, in which this thread recomputes modules."""
        stack = self.running
        stack.recomputing += 1
        try:
            yield
        finally:
            stack.recomputing -= 1

    @contextmanager
    def at(self, place: SavingPlace) -> Iterator[None]:
        """Let tensors be saved at ``place`` inside the block, and watch nothing."""
        stack = self.running
        watched, stack.watched = stack.watched, None
        outer, stack.here = stack.here, place
        stack.places.append(place)
        try:
            yield
        finally:
            stack.places.pop()
            stack.here = outer
            stack.watched = watched

    def place_of(self, module: torch.nn.Module) -> SavingPlace | None:
        """Return the place of a module, or ``None`` if it is not known."""
        return self._places.get(module)

    def known(self) -> dict[str, list[torch.nn.Module]]:
        """Return the known modules by path; modules that are created in each call share a path."""
        found: dict[str, list[torch.nn.Module]] = {}
        for module, place in tuple(self._places.items()):
            found.setdefault(place.path, []).append(module)
        return found

    def forget_watched(self) -> None:
        """Stop watching, after a backward: a module that Ctrl-C interrupted never ends otherwise."""
        stack = self.running
        stack.watched = None
        stack.outer = [None] * len(stack.outer)

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # inside, the compiled region is the place
            return
        stack = self.running
        if stack.recomputing:
            if self.weights is not None:
                self.weights.enter(module, args)
            return
        place = self._places.get(module)
        if place is None:
            place = self._name_new(module)
        stack.places.append(place)
        stack.here = place
        stack.outer.append(stack.watched)
        stack.watched = [] if place.kind in self._watch else None
        if self.weights is not None:  # now, since _leave is called even if this raises
            self.weights.enter(module, args)
        if self.observer is not None and not torch.is_inference_mode_enabled():
            self.observer.enter(module, place, args)
        if not stack.hooked and torch.is_grad_enabled() and not _has_hooks():
            self._on_missed_thread(threading.current_thread().name)

    def _leave(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        """Handle the end of a call; ``rest`` is (kwargs, output), or (output,) after an exception."""
        if torch.compiler.is_compiling():
            return
        if self.weights is not None:
            self.weights.leave(module)
        stack = self.running
        if not stack.places or stack.recomputing:
            return
        watched, stack.watched = stack.watched, None
        try:
            if self._completion is not None and self._completion.waiting:
                self._completion.returned()
            if watched and self._on_watched is not None:
                self._on_watched(stack.places[-1].kind, rest[-1], watched)
            if self.observer is not None and not torch.is_inference_mode_enabled():
                self.observer.leave(module, (args, rest[:-1]), rest[-1])
        finally:
            stack.places.pop()
            stack.here = stack.places[-1] if stack.places else OUTSIDE
            stack.watched = stack.outer.pop()

    def _name_new(self, module: torch.nn.Module) -> SavingPlace:
        if not self.running.places:
            self.register(module)
            return self._places[module]
        # created after its root was registered: named by its type under the module that runs it
        kind = type(module).__name__
        place = self._places[module] = SavingPlace(f"{self.running.places[-1].path}.<{kind}>", kind)
        return place


def _has_hooks() -> bool:
    """Return whether this thread has saved-tensor hooks; a CUDA backward has those of its caller."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None
