"""Differences between a state and a checkpoint, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.checkpoint.values import Path, shown
from penstock.core.errors import MismatchError

_MOST_SHOWN: Final = 5
_WRAPPERS: Final = (
    (
        "_orig_mod.",
        "torch.compile",
        "give the module that is in it, `model._orig_mod`, to save and load, or use model.compile()",
    ),
    ("module.", "DistributedDataParallel", "give the module that is in it, `model.module`"),
)
"""Prefixes that wrappers put into the keys of a module, the wrapper, and how to avoid them."""


class Differences:
    """Collects them."""

    def __init__(self) -> None:
        """There is none yet."""
        self._found: list[str] = []

    def add(self, path: Path, how: str) -> None:
        """There is one."""
        self._found.append(f"{shown(path)} {how}")

    def compare_keys(
        self, ours: Mapping[Any, Any], theirs: Mapping[Any, Any], path: Path, *, partial: bool
    ) -> None:
        """Of a dictionary; if ``partial``, the checkpoint may have more."""
        if self._has_wrapper(ours, theirs, path):
            return
        for key in ours:
            if key not in theirs:
                self.add((*path, str(key)), "is here, and not in the checkpoint")
        if not partial:
            for key in theirs:
                if key not in ours:
                    self.add((*path, str(key)), "is in the checkpoint, and not here")

    def _has_wrapper(self, ours: Mapping[Any, Any], theirs: Mapping[Any, Any], path: Path) -> bool:
        missing = [str(key) for key in ours if key not in theirs]
        for infix, maker, advice in _WRAPPERS:
            plain = {str(key).replace(infix, "") for key in theirs}
            if missing and all(key.replace(infix, "") in plain for key in missing):
                here, there = "here", "in the checkpoint"
                if not any(infix in key for key in missing):
                    here, there = there, here
                self.add(
                    path,
                    f"has keys with {infix!r} {here}, where {maker} puts it, and not {there}: {advice}",
                )
                return True
        return False

    def check(self, where: str) -> None:
        """Raise MismatchError, with what differs first, if anything does."""
        if not self._found:
            return
        first, more = self._found[:_MOST_SHOWN], len(self._found) - _MOST_SHOWN
        tail = f"; and {more} more" if more > 0 else ""
        raise MismatchError(
            f"the checkpoint {where!r} is of another state: {'; '.join(first)}{tail}. Nothing was changed"
        )
