"""Models of a script that knows nothing of Penstock, built on flash until one of them is to run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from penstock.store.blob import StrPath
from penstock.weights.build import ModelBuilder, active, building


class ScriptModels:
    """Lets the models that a script's thread constructs rest on flash, until one of them is to run.

    As :func:`.build.built_on_flash`, for a script that knows nothing of it. Any thread may run a model.
    """

    def __init__(self, directories: Sequence[StrPath], floor_bytes: int) -> None:
        """Begin, for the parameters that this thread registers.

        Args:
            directories: Directories on flash.
            floor_bytes: Least size of a parameter that rests in a file.

        Raises:
            ConfigError: A directory is missing, not writable or in memory.
        """
        builder = ModelBuilder(directories, max(1, floor_bytes))
        self._builder: ModelBuilder | None = builder
        self._floor_bytes = floor_bytes
        self._stack = ExitStack()
        self._stack.enter_context(building(builder))
        active.end_script = self.end

    def before_run(self, model: Module) -> None:
        """End, if a model that is to run has a parameter that is not small. Raises as ``end`` does."""
        builder = self._builder
        if builder is None or not builder.is_open:
            return
        known = (each for each in model.parameters() if not is_lazy(each))
        dense = (each for each in known if each.layout == torch.strided)
        if any(each.nbytes >= self._floor_bytes for each in dense):
            self.end()

    def end(self, *, finish: bool = True) -> None:
        """End; models that are constructed later are in memory. Idempotent.

        Args:
            finish: Send home what has been constructed; False: leave the latest in memory.

        Raises:
            NoSpaceError: There is no room for the last parameters.
            TransferError: One could not be written.
        """
        builder = self._builder
        if builder is None:
            return
        with builder.lock, self._stack:
            if finish and builder.is_open:
                builder.finish()
        self._builder = None  # it has the files, which are to be gone with their weights
