"""What a backward will ask of a saved tensor, proven from the autograd node that saved it.

The backward of a ReLU asks of its result only which elements are greater than zero, and that of a
max-pooling only for the shape of its input. A pack hook is not told for which node it packs. But when a
module that consists of one such operation has run, its output has a node; and if that is the node
expected, it is asked for the saved tensor: what the unpack hook is then given is the handle that the node
holds. No name of a module is believed, nor what it saved besides, only the node and its handle.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

KINDS: Final = {
    "ReLU": ("ReluBackward0", "_saved_result"),
    "MaxPool2d": ("MaxPool2DWithIndicesBackward0", "_saved_self"),
}
"""Types of modules, by name, whose saved tensors are worth a proof: the node that its output then has,
and what that calls the tensor of which it needs signs, or less."""


class Inquiry(threading.local):
    """Asks nodes for their handles. While it is ``open``, the unpack hook says ``note`` and no more.

    Attributes:
        open: Whether this thread is asking.
    """

    def __init__(self) -> None:
        self.open = False
        self._noted: Any = None
        self._nothing = torch.empty(0)

    def sign_only(self, kind: str, output: Any) -> Any:
        """The handle of which backward asks no more than which elements are above zero, if any.

        Args:
            kind: The type's name of the module that has run.
            output: What it returned.
        """
        if isinstance(output, tuple) and output:  # a max-pooling that returns indices
            output = output[0]
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        name, field = KINDS.get(kind, ("", ""))
        if node is None or node.name() != name:
            return None
        self.open = True
        try:
            getattr(node, field)
        except RuntimeError:  # the module has run a backward of its own: nothing is saved any more
            return None
        finally:
            self.open = False
            noted, self._noted = self._noted, None
        return noted

    def note(self, handle: Any) -> torch.Tensor:
        """Remember what the node holds; something to give to it."""
        self._noted = handle
        return self._nothing
