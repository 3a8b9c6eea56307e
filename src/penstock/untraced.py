"""Functions that ``torch.compile`` must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leave_untraced(*functions: Callable[..., Any]) -> None:
    """Keep ``torch.compile`` from tracing these functions and what they call.

    At a graph break it goes on to trace all Python code that runs, including that of hooks.
    """
    try:
        from torch._C._dynamo.eval_frame import (  # noqa: PLC0415  (newer than torch 2.8, perhaps)
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:
        return
    for function in functions:
        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(function.__code__, strategy)
