"""A callback for Hugging Face's ``Trainer``, and for those of TRL that are built on it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from penstock.core.errors import ConfigError
from penstock.hosts.session import HostedSession


class TrainerOffload(HostedSession, TrainerCallback):
    """Opens a session when training begins, and closes it when training has ended.

    ::

        offloading = TrainerOffload(device_memory="8GiB", flash="/nvme/spill")
        Trainer(model, args, train_dataset=dataset, callbacks=[offloading]).train()
        print(offloading.summary)

    An error in the training leaves the session open, so that it can be inspected; ``close`` closes it, as
    does the next training with this callback.
    """

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        **others: Any,
    ) -> None:
        """Open a session for the model; raises ConfigError if TRL moves the same tensors."""
        if getattr(args, "activation_offloading", False):
            raise ConfigError(
                "activation_offloading=True has TRL move the tensors that Penstock is to move: set it to"
                " False, or leave TrainerOffload out"
            )
        self._open(model, optimizer)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any
    ) -> None:
        """Add the session's metrics to what is logged: to ``log_history``, and for later callbacks."""
        if self.session is None or logs is None or "loss" not in logs:
            return
        found = self.session.metrics()
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Close the session, and keep its summary."""
        self.close()
