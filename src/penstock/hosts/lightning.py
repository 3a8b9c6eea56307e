"""A callback for Lightning, and a plugin that writes its checkpoints."""

from __future__ import annotations

import os
import shutil
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import CheckpointIO

from penstock import checkpoint
from penstock.hosts.session import HostedSession


class LightningOffload(HostedSession, Callback):
    """Opens a session when ``fit`` begins to train, and closes it when that ends, also with an error.

    ::

        offloading = LightningOffload(device_memory="8GiB", flash="/nvme/spill")
        Trainer(callbacks=[offloading]).fit(module, loader)
        print(offloading.summary)

    The session's metrics are logged by the module whenever the trainer logs a step.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open a session for the module."""
        optimizers = trainer.optimizers
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        self._open(pl_module, optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        """Log the session's metrics, where the trainer logs."""
        if self.session is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self.session.metrics())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the session, and keep its summary."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the session, and keep its summary."""
        self.close()


class LightningCheckpoints(CheckpointIO):
    """Writes Lightning's checkpoints as those of :func:`penstock.checkpoint.save`, each a folder.

    ::

        Trainer(plugins=[LightningCheckpoints()]).fit(module, loader)
    """

    def save_checkpoint(
        self, checkpoint_of: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save; durable and whole when this returns."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        checkpoint.save(path, checkpoint_of)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load, and verify what was read; into host memory, whatever ``map_location`` says."""
        loaded: dict[str, Any] = checkpoint.load(path)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove the folder."""
        shutil.rmtree(path)
