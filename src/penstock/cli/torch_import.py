"""Import hook that acts when other code has imported torch.

A session must be open before the first tensor is saved, but must not cause torch to be imported:
variables that a script puts into ``os.environ`` before its own import (``OMP_NUM_THREADS``,
``CUDA_VISIBLE_DEVICES``, ...) determine what torch does, down to the bits of a sum.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_TORCH: Final = "torch"


def when_imported(action: Callable[[], None]) -> None:
    """Call ``action`` when torch has been imported: now, if it already is.

    The action runs in the importing thread, at the end of the import statement, which passes on its
    exceptions. It is called once per process that imports torch itself, also in a forked one.
    """
    if _TORCH in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(action))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch with the other finders, and adds the action to its loader."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TORCH:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._loaded)
                return spec
        return None

    def _loaded(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._action()


class _Loader(importlib.abc.Loader):
    """Wrapper of a loader, with an action after it. The module itself sees only the wrapped loader."""

    def __init__(self, loader: Any, loaded: Callable[[], None]) -> None:
        self._loader = loader
        self._loaded = loaded

    def __getattr__(self, name: str) -> Any:
        """Forward to the wrapped loader, for code that inspects torch without importing it."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._loaded()
