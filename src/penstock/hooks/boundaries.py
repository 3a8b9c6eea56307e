"""Detection of where a backward and a step begin and end, without the script's help.

A backward is identified by autograd's graph task: the first unpack inside a task asks the engine for a
callback when the task is done. Reentrant checkpointing runs tasks inside a task; the backward is over
when the outermost one is. A backward that raises never calls back, which is detected at the next save
outside any task. A step ends when an optimizer has stepped; if that is called in the step of another one
which holds it, as torchtitan's containers do, the step ends with the outermost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from penstock.core.locks import Lock
from penstock.core.process import fork_guard

task_id: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Return the number of this thread's graph task, or -1."""
_STEP: Final = getattr(torch.optim.Optimizer.profile_hook_step(lambda _: None), "__code__", None)
"""Code that runs the step of any optimizer, with its hooks."""


class Boundaries:
    """Reports the ends of backwards and steps.

    Attributes:
        tasks: Numbers of the running graph tasks of autograd.
    """

    def __init__(
        self,
        *,
        on_backward_end: Callable[[], None],
        on_step: Callable[[torch.optim.Optimizer, bool], None],
    ) -> None:
        """Report nothing yet.

        Args:
            on_backward_end: Called after the outermost backward, in the thread that called it.
            on_step: Called after each optimizer step, with the optimizer, and True if that is within the
                step of another one.
        """
        self._on_backward_end = on_backward_end
        self._on_step = on_step
        self.tasks: set[int] = set()
        self._lock = Lock()
        self._handle: RemovableHandle | None = None
        self._guard = fork_guard()

    def attach(self) -> None:
        """Begin to report."""
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def detach(self) -> None:
        """Stop reporting."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def note_unpack(self) -> None:
        """Record the unpack of a saved tensor; the first one of a task begins a backward."""
        task = task_id()
        if task == -1 or task in self.tasks:  # -1: a program reads grad_fn._saved_*
            return
        with self._lock:
            if task in self.tasks:
                return
            self.tasks.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, task))

    def note_pack(self) -> None:
        """Record the save of a tensor; outside any task it ends a backward that was left open."""
        if self.tasks and task_id() == -1:
            with self._lock:
                self.tasks.clear()
            self._on_backward_end()

    def _ended(self, task: int) -> None:
        with self._lock:
            self.tasks.discard(task)
            outermost = not self.tasks
        if outermost:
            self._on_backward_end()

    @_disable_dynamo
    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._guard.in_child:  # a forked child has no session
            self._on_step(optimizer, _is_within_another())


def _is_within_another() -> bool:
    """Return whether the step that has just ended was called by another one that is not compiled."""
    frame, steps = sys._getframe(), 0
    while (outer := frame.f_back) is not None:
        frame = outer
        steps += frame.f_code is _STEP
    return steps > 1
