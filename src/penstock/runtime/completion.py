"""Waits until the operator that saved a tensor has returned.

[Note: complete storages]
    Autograd saves an operator's inputs before it runs the operator's kernel. Some kernels fill such an
    input and give it no new version: ``rrelu`` its noise, normalization its running statistics. So the
    bytes of a saved storage are *complete* when the operator has returned, and are not read before.

    An input that requires a gradient is complete when it is saved: autograd refuses gradients for
    inputs that a kernel fills, and an operator's outputs are saved after its kernel. Everything else
    waits. The operator has returned when the next save finds another autograd sequence number (each
    operator that saves takes one first), when a module has returned, or when backward has begun. And
    while an operator runs it holds the tensors that it was given: a storage that nobody but the saved
    tensors holds cannot be written any more, whoever asks.

    Some operators (``unsafe_chunk``, and so the cells of recurrent networks) return *parts* of one
    storage, each with a version counter of its own. A neighbour may be changed in place after a part was
    saved, and the part's counter does not say so. Such a storage is read only when nobody else holds it.

    On a device that runs behind, a *stream* computes the bytes, and the program may have gone on to
    another one by then. So an action runs on the stream that was current when they were saved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, TypeAlias

import torch

sequence_number: Final[Callable[[], int]] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Return the number that this thread's next autograd node gets."""
Context: TypeAlias = Callable[[], AbstractContextManager[object]]


class Completion(threading.local):
    """Actions of this thread when the running operator has returned. See [Note: complete storages].

    Attributes:
        waiting: Actions, in the order of saving. Each is told whether this is its last call, and returns
            whether it is done.
    """

    def __init__(self, here: Callable[[torch.device], Context] | None = None) -> None:
        """Start without actions; ``here`` is that of a mover whose device runs behind."""
        self.waiting: list[Callable[[bool], bool]] = []
        self._here = here
        self._sequence = 0

    def wait(self, action: Callable[[bool], bool], device: torch.device | None = None) -> None:
        """Call ``action`` when the operator that is saving now has returned.

        Args:
            action: As in ``waiting``.
            device: Device on whose stream of now it works; None: it reads no bytes.
        """
        self._sequence = sequence_number()
        if self._here is not None and device is not None:
            action = partial(_act_within, self._here(device), action)
        self.waiting.append(action)

    def check(self) -> None:
        """Act if the operator has returned. Called where the next one may be saving."""
        if self._sequence != sequence_number():
            self._act(last=False)

    def returned(self) -> None:
        """Act: no operator is running in this thread."""
        self._act(last=True)

    def _act(self, *, last: bool) -> None:
        undone = []
        while self.waiting:
            action = self.waiting.pop(0)
            if not action(last):
                undone.append(action)
        self.waiting = undone


def _act_within(here: Context, action: Callable[[bool], bool], last: bool) -> bool:
    with here():
        return action(last)
