"""Which module is running: the first half of a slot's name.

Global forward hooks keep a stack of module paths per thread. They see every module, so a script that
knows nothing of Penstock needs no change, and a module that was registered by ``offload`` has the path
that its owner would print. A thread that runs modules with gradients but has no saved-tensor hooks
(they are thread-local, TRAPS rule 10) is told so once.
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
"""As torch begins to warn that such hooks are called for what it compiled as well: ours may be."""


class Place(NamedTuple):
    """Where a tensor is saved."""

    path: str
    """Path of the innermost running module, from the root that was called."""
    kind: str
    """Its type's name."""


class CallObserver(Protocol):
    """Something that looks at every call of a module that is tracked."""

    def enter(self, module: torch.nn.Module, place: Place, args: Any) -> None:
        """A call begins."""

    def leave(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        """It has ended; ``output`` is ``None`` if it raised."""


class CallFollower(Protocol):
    """Something that looks at the calls of some modules."""

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """A call begins."""

    def leave(self, module: torch.nn.Module, kwargs: bool, output: Any) -> None:
        """It has ended; ``kwargs`` is whether it had any, ``output`` is ``None`` if it raised."""


OUTSIDE = Place("", "")
"""No module is running: a loss function called directly, say."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.places: list[Place] = []
        self.hooked = False
        self.watched: list[Any] | None = None
        self.outer: list[list[Any] | None] = []
        """``watched`` of the modules around the innermost; as many as ``places``."""
        self.repeating = 0


class ModuleTracker:
    """Knows the running module of each thread while it is attached.

    Attributes:
        observer: Is told of every call that is tracked.
        recipes: Is told of them as well, while a plan has recipes.
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
            on_root: Called with each outermost module that was not known before.
            on_missed_thread: Called, each time, with the name of a thread that runs a module with
                gradients enabled without saved-tensor hooks.
            on_watched: Called when a module of a watched type has run, while it is still ``here``: with
                its type's name, its output (``None`` if it raised), and what was put into ``watched``.
            completion: Is told when a module has returned, or raised, and something waits for that.
            watch: Names of types.
        """
        self._stack = _Stack()
        self._places: weakref.WeakKeyDictionary[torch.nn.Module, Place] = (
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
        self.recipes: CallFollower | None = None

    def attach(self) -> None:
        """Begin to track, and take the calling thread for one that has saved-tensor hooks."""
        self._stack.hooked = True
        if not _has_any_global_hook():  # type: ignore[no-untyped-call]  # else somebody has to hear it
            warnings.filterwarnings("ignore", _EXTRA_CALL, UserWarning)
            self._filter = warnings.filters[0]
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]

    def detach(self) -> None:
        """Stop tracking."""
        for handle in self._handles:
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch leaves that there
        self._handles = []
        with suppress(ValueError):  # another has set all filters since
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        self._stack.hooked = False
        self._stack.places.clear()
        self._stack.outer.clear()
        self._stack.watched = None

    def register(self, root: torch.nn.Module) -> None:
        """Name a module and all below it; roots of the same type are numbered."""
        name = type(root).__name__
        number = self._roots[name] = self._roots.get(name, 0) + 1
        prefix = name if number == 1 else f"{name}-{number}"
        for path, module in root.named_modules():
            place = Place(f"{prefix}.{path}" if path else prefix, type(module).__name__)
            self._places.setdefault(module, place)
        self._on_root(root)

    @property
    def here(self) -> Place:
        """The innermost running module of this thread."""
        places = self._stack.places
        return places[-1] if places else OUTSIDE

    @property
    def watched(self) -> list[Any] | None:
        """While the innermost running module is of a watched type: a list to note things in."""
        return self._stack.watched

    @property
    def repeating(self) -> bool:
        """Whether this thread is running a module again, which is no news."""
        return self._stack.repeating > 0

    @contextmanager
    def repeat(self) -> Iterator[None]:
        """Within, this thread runs modules again: where they are is not tracked."""
        stack = self._stack
        stack.repeating += 1
        try:
            yield
        finally:
            stack.repeating -= 1

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Within, what is saved is saved at ``place``, and nothing is watched."""
        stack = self._stack
        watched, stack.watched = stack.watched, None
        stack.places.append(place)
        try:
            yield
        finally:
            stack.places.pop()
            stack.watched = watched

    def place_of(self, module: torch.nn.Module) -> Place | None:
        """What a module is called, if it is known."""
        return self._places.get(module)

    def known(self) -> dict[str, list[torch.nn.Module]]:
        """The modules by path; those that are made anew each time share one."""
        found: dict[str, list[torch.nn.Module]] = {}
        for module, place in tuple(self._places.items()):
            found.setdefault(place.path, []).append(module)
        return found

    def forget_watched(self) -> None:
        """A backward is over. After Ctrl-C a module that never ended would be watched for ever."""
        stack = self._stack
        stack.watched = None
        stack.outer = [None] * len(stack.outer)

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # traced: inside, the compiled region is the place
            return
        stack = self._stack
        if stack.repeating:
            return
        place = self._places.get(module)
        if place is None:
            place = self._meet(module)
        stack.places.append(place)
        stack.outer.append(stack.watched)
        stack.watched = [] if place.kind in self._watch else None
        if self.observer is not None:
            self.observer.enter(module, place, args)
        if self.recipes is not None:
            self.recipes.enter(module, args)
        if not stack.hooked and torch.is_grad_enabled() and not _has_hooks():
            self._on_missed_thread(threading.current_thread().name)

    def _leave(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        """``rest`` is the keyword arguments and the output; after an exception it is the output alone."""
        if torch.compiler.is_compiling():
            return
        stack = self._stack
        if not stack.places or stack.repeating:
            return
        watched, stack.watched = stack.watched, None
        try:
            if self._completion is not None and self._completion.waiting:
                self._completion.returned()
            if watched and self._on_watched is not None:
                self._on_watched(stack.places[-1].kind, rest[-1], watched)
            if self.observer is not None:
                self.observer.leave(module, (args, rest[:-1]), rest[-1])
            if self.recipes is not None:
                self.recipes.leave(module, any(rest[:-1]), rest[-1])
        finally:
            stack.places.pop()
            stack.watched = stack.outer.pop()

    def _meet(self, module: torch.nn.Module) -> Place:
        if not self._stack.places:
            self.register(module)
            return self._places[module]
        # made after its root was registered: named by its type under the module that runs it
        kind = type(module).__name__
        place = self._places[module] = Place(f"{self._stack.places[-1].path}.<{kind}>", kind)
        return place


def _has_hooks() -> bool:
    """Whether this thread has any saved-tensor hooks. Backward's on CUDA has those of its caller."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None
