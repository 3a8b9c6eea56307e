"""Training on one rank: a network, its optimizer and its batches, with the time of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, Final

import torch
import xxhash

from penstock import checkpoint
from penstock.lab import zoo
from penstock.lab.characterize.data import batches
from penstock.lab.characterize.networks import NETWORKS
from penstock.lab.characterize.parallel import make_strategy

_RATES: Final = {"pre-training": 1e-4, "fine-tuning": 2e-5, "training": 1e-4}
_SGD_RATE: Final = 1e-3


class RankTraining:
    """Training of one network, stage after stage. Not thread-safe.

    Attributes:
        module: The module that this rank trains: the network, or its half of it.
        optimizer: Optimizer of the module.
        saves: True if a checkpoint of the job needs this rank.
        data: Name of the training data.
        loss: Loss of the last step, if this rank knows it.
        count: Number of steps made.
    """

    def __init__(
        self, name: str, *, scale: float, parallel: str, device: torch.device, seed: int = 0
    ) -> None:
        """Build it, with the same weights on every rank, and make a first step.

        Args:
            name: Name of one of the nine networks.
            scale: See :mod:`penstock.lab.characterize.networks`.
            parallel: ``none``, ``ddp`` or ``pipeline``; the process group exists already.
            device: Device of the training.
            seed: Seed of weights and batches.
        """
        self._case = NETWORKS[name]
        self._device = device
        self._seed = seed
        torch.manual_seed(seed)
        network = zoo.build(self._case.zoo, **self._case.settings(scale)).to(device)
        self.parameters = sum(each.numel() for each in network.parameters())
        self._config = network.config
        self.loss: float | None = None
        self.count = 0
        self._begin(self._case.stages[0])
        self._strategy = make_strategy(parallel, network, next(self._batches))
        self.module, self.saves = self._strategy.module, self._strategy.saves
        self.optimizer = self._make_optimizer(self._case.stages[0])
        self.step()  # the first step creates the states of the optimizer

    def tune(self) -> None:
        """Start the next stage: other data, a smaller learning rate, the same weights."""
        stage = self._case.stages[1]
        self._begin(stage)
        for group in self.optimizer.param_groups:
            group["lr"] = _RATES[stage]

    def step(self) -> float:
        """Make one step of the optimizer; return its time in seconds."""
        batch = next(self._batches)
        start = time.perf_counter()
        self.loss = self._strategy.loss_and_gradients(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._synchronize()
        self.count += 1
        return time.perf_counter() - start

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint of this rank holds."""
        return checkpoint.training_state(
            model=self.module, optimizer=self.optimizer, step=self.count
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, buffers and states of the optimizer, each tensor counted once."""
        found = {each.data_ptr(): each.nbytes for each in self.module.state_dict().values()}
        for state in self.optimizer.state.values():
            found |= {v.data_ptr(): v.nbytes for v in state.values() if torch.is_tensor(v)}
        return sum(found.values())

    def fingerprint(self) -> str:
        """Hash all bits of parameters and optimizer states, to compare before and after a restore."""
        total = xxhash.xxh3_128()
        for each in self._tensors():
            plain = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            total.update(plain.numpy().data)
        return total.hexdigest()

    @torch.no_grad()
    def wipe(self) -> None:
        """Set all those bits to zero."""
        for each in self._tensors():
            each.zero_()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for each in self.module.parameters():
            yield each
            kept = self.optimizer.state.get(each, {})
            yield from (kept[name] for name in sorted(kept) if torch.is_tensor(kept[name]))

    def _begin(self, stage: str) -> None:
        self.data, made = batches(self._config, self._case.batch, stage, seed=self._seed)
        self._batches = cycle([each.to(self._device) for each in made])

    def _make_optimizer(self, stage: str) -> torch.optim.Optimizer:
        parameters = list(self.module.parameters())
        if self._case.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=_RATES[stage])
        return torch.optim.SGD(parameters, lr=_SGD_RATE, momentum=0.9)

    @property
    def _synchronize(self) -> Callable[[], None]:
        return torch.cuda.synchronize if self._device.type == "cuda" else _nothing


def _nothing() -> None:
    """Do nothing: work on the CPU is synchronous."""
