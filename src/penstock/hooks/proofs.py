"""Proofs, from autograd nodes, that backward needs only the signs of a saved tensor.

The backward of a ReLU only needs to know which elements of its result are greater than zero, and that of
a max-pooling only needs the shape of its input. A pack hook does not learn for which node it packs. But
when a module that consists of one such operation has run, its output has a node. If that is the expected
node, its saved tensor is read: the unpack hook then receives the handle that the node holds. The proof
relies on the node and its handle only, never on the name of a module.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

KINDS: Final = {
    "ReLU": ("ReluBackward0", "_saved_result"),
    "MaxPool2d": ("MaxPool2DWithIndicesBackward0", "_saved_self"),
}
"""Types of modules, by name, whose saved tensors are worth a proof: the expected node of the output, and
the node's attribute that is the tensor of which signs, or less, suffice."""


class Inquiry(threading.local):
    """Reads the handles of nodes. While it is ``open``, the unpack hook calls ``note`` and nothing else.

    Attributes:
        open: True while this thread reads a handle.
    """

    def __init__(self) -> None:
        self.open = False
        self._noted: Any = None
        self._nothing = torch.empty(0)

    def sign_only(self, kind: str, output: Any) -> Any:
        """Return the handle of the tensor of which backward needs only the signs, if there is one.

        Args:
            kind: Name of the type of the module that has run.
            output: Output of the module.
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
        except RuntimeError:  # the module has run a backward itself: the node's tensors are freed
            return None
        finally:
            self.open = False
            noted, self._noted = self._noted, None
        return noted

    def note(self, handle: Any) -> torch.Tensor:
        """Remember the handle that the node holds; return a placeholder for the node."""
        self._noted = handle
        return self._nothing
