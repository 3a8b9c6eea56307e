"""A callback for Lightning, and a plugin that writes its checkpoints."""

from __future__ import annotations

import os
import shutil
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import CheckpointIO

import penstock
from penstock import checkpoint
from penstock.observe.summary import Summary


class LightningOffload(Callback):
    """Opens a session when ``fit`` begins to train, and closes it when that ends, also with an error.

    ::

        offloading = LightningOffload(device_memory="8GiB", flash="/nvme/spill")
        Trainer(callbacks=[offloading]).fit(module, loader)
        print(offloading.summary)

    The session's metrics are logged by the module whenever the trainer logs a step.

    Attributes:
        session: The session; ``None`` unless the trainer trains.
        summary: Summary of the last training that has ended; ``None`` before.
    """

    def __init__(self, **settings: Any) -> None:
        """Open nothing yet; ``settings`` are those of :func:`penstock.offload`."""
        self.session: penstock.Session | None = None
        self.summary: Summary | None = None
        self._settings = settings

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open a session for the module."""
        optimizers = trainer.optimizers
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        self.session = penstock.offload(pl_module, optimizer, **self._settings).open()

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

    def close(self) -> None:
        """Close the session, if there is one, and keep its summary. Idempotent."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
            self.summary = session.summary()


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
