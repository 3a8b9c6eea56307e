"""Micro-batches, block by block: a weight is used by all of them before the next weight is.

[Note: one graph for each block and micro-batch]
If all micro-batches were one graph, autograd would sum their gradients of a weight before it adds them to
``.grad``: ``G + (g0 + g1)``, where the loop over micro-batches makes ``(G + g0) + g1``. So each block has
a graph of its own for each micro-batch. They are backpropagated one at a time, the last block first, and
within a block micro-batch 0 first, as in the loop. What crosses from one graph to the next is a gradient:
graphs hold edges and not the tensors between blocks, so these are saved tensors and nothing else, and a
session moves them.

[Note: weights that blocks share]
The loop adds the gradients that one micro-batch has of an embedding tied to the head, and then adds the
sum to ``.grad``. Here the heads of all micro-batches come before their embeddings. So the gradient of
a shared leaf is intercepted before it is accumulated, kept for each micro-batch, and is where the next
block that uses the leaf begins its own sum; the first of these blocks accumulates it. The same goes for
the casts of leaves that autocast caches: there the loop sums in the lower precision.
"""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice, repeat
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import get_device_states
from torch.utils.weak import WeakIdKeyDictionary

from penstock.core.errors import ConfigError, PenstockWarning

_keeps_graph: Final[Callable[[], bool]] = torch._C._autograd._get_current_graph_task_keep_graph
_next_number: Final[Callable[[], int]] = torch._C._autograd._get_sequence_nr
"""Return the number of this thread's next node of a graph."""
_parallel_of: Final[Any] = WeakIdKeyDictionary()
"""By weight: a weak reference to the ``DistributedDataParallel`` that has it; None: there was none."""


def micro_batched(
    blocks: Iterable[Callable[..., Any]], batch: Any, /, *, parts: int, **keywords: Any
) -> list[Any]:
    """Run blocks one after the other, each on all micro-batches of a batch before the next block runs.

    ::

        losses = penstock.micro_batched([*model, loss_of], inputs, parts=8, targets=targets)
        (sum(losses) / 8).backward()

    Backward goes the same way: all micro-batches pass a block before the one below it. So in each
    direction a weight is used at one place of the step, and weights that do not fit in memory are read
    once, however many micro-batches there are. Gradients are bit-identical to those of the loop
    ``for part in ...: (loss(part) / 8).backward()``, on top of gradients that are there already, for
    weights that are used more than once, and in batch normalization's statistics as well. Hooks on
    gradients run once for each micro-batch, as in the loop.

    The price is memory for one tensor between two blocks of each micro-batch, and for its gradient.
    What autograd saves of all micro-batches is held until backward; a session offloads it. For
    a weight that several blocks use, as an embedding tied to the head, ``parts`` gradients are kept
    from the last of these blocks to the first one.

    What differs from the loop:

    - If several blocks draw random numbers (dropout), micro-batches draw others than in the loop, because
      the order is another. A :class:`penstock.PenstockWarning` says so.
    - ``torch.autograd.grad`` and ``backward(inputs=...)`` do not see the weights: only ``backward()``
      does. ``create_graph`` is refused.
    - ``DistributedDataParallel`` reduces nothing, because it is not called, or once for each micro-batch.
      With weights of one this is refused, except within its ``no_sync()``: then average the gradients
      yourself, after backward. One that was made after its weights were first used here, or that
      ``gc.freeze`` hides, is not found.

    The order is that of GreedySnake (arXiv 2512.17570).

    Args:
        blocks: Modules (a ``Sequential``, a ``ModuleList``) or functions. Each is called with what the
            one before returned, as one argument. It may return any nest of tuples, lists and dicts of
            tensors. The last one may compute the loss. What a block uses of other blocks' results must
            be in its arguments.
        batch: A tensor, or a nest of tuples, lists and dicts of tensors and ``None``. All tensors are
            cut along dimension 0, as by ``torch.tensor_split``: their sizes there must agree.
        parts: Number of micro-batches, at most the size of dimension 0. If it does not divide the size,
            the first ones are larger by one.
        **keywords: More of the batch (masks, targets), cut in the same way. Each is given to the blocks
            whose ``forward`` has a parameter of that name. What is not to be cut is bound to the block,
            as by ``functools.partial``.

    Returns:
        What the last block returned for each micro-batch, in the order of the batch.

    Raises:
        ConfigError: There is no block; the batch cannot be cut into so many parts; no block takes one of
            the keywords; a block uses what another one computed and did not return; a weight that
            several blocks use has a hook on its gradient, which would see a part of it;
            ``create_graph`` was asked for; or a ``DistributedDataParallel`` of several ranks would not
            reduce the gradient of a weight.
    """
    stack = list(blocks)
    if not stack:
        raise ConfigError("micro_batched: there is no block")
    taken = [_taken(block, keywords) for block in stack]
    for name in set(keywords).difference(*taken):
        raise ConfigError(
            f"micro_batched: no block has a parameter {name!r}; **kwargs do not count: wrap the block,"
            f" as in `lambda x, {name}: block(x, {name}={name})`"
        )
    states = _cut(batch, keywords, parts)
    passes = _Passes(len(stack), parts) if torch.is_grad_enabled() else None
    entering = [_differentiable(state) for state in states]
    random = 0
    for number, block in enumerate(stack):
        before = _random_states(states[0])
        for part in range(parts):
            value, others = states[part]
            states[part] = ()  # the tensors between two blocks are not needed any longer
            if passes is not None:
                value, others = passes.enter(number, part, (value, others))
            value = block(value, **{name: others[name] for name in taken[number]})
            states[part] = (value, others)
            if passes is not None:
                passes.leave(number, part, states[part])
        after = _random_states(states[0])
        random += not all(map(torch.equal, before, after))
    if parts > 1 and random > 1:
        warnings.warn(
            f"micro_batched: {random} blocks drew random numbers; block by block, micro-batches draw"
            " others than in a loop over micro-batches, so the results are not bit-identical to it",
            PenstockWarning,
            stacklevel=2,
        )
    outputs = [value for value, _ in states]
    if passes is not None:
        _check_is_reduced(passes.weights(), called=_parallel_in(stack) if parts == 1 else [])
    return outputs if passes is None else passes.join(entering, outputs)


class _Enter(torch.autograd.Function):
    """The tensors at the beginning of a block's graph; takes their gradients at its end."""

    @staticmethod
    def forward(ctx: Any, arrived: list[Tensor | None], _: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.arrived = arrived
        return tuple(each.detach() for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.arrived[:] = gradients
        return (None, None, *(None for _ in gradients))


class _Join(torch.autograd.Function):
    """The outputs of all micro-batches; their backward is that of all blocks."""

    @staticmethod
    def forward(
        ctx: Any, passes: _Passes, outputs: list[Tensor], anchor: Tensor, *_: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchor)
        ctx.passes = passes
        return tuple(each.detach() for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # A second backward fails here; and a session notes a backward that is around those of the blocks.
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise ConfigError(
                "micro_batched: gradients of gradients (create_graph) are not supported"
            )
        return (None, None, None, *ctx.passes.backward(gradients))


class _BlockGraph:
    """The graph of one block on one micro-batch.

    Attributes:
        arrived: Gradients of what entered the block, once its backward has run.
        edges: Edges of the graph to which the gradients of what left the block go.
        first: Number of its first node.
    """

    __slots__ = ("arrived", "edges", "first")

    def __init__(self) -> None:
        self.arrived: list[Tensor | None] = []
        self.edges: list[GradientEdge] = []
        self.first = 0

    def take(self) -> list[Tensor | None]:
        """Return the gradients of what entered the block, and forget them."""
        gradients = self.arrived[:]
        self.arrived[:] = [None] * len(gradients)
        return gradients

    def leaves(self, since: int) -> Iterator[Any]:
        """Yield the nodes of the graph that other graphs may share: leaves, and casts of leaves.

        Raises:
            ConfigError: A node with number ``since`` or later is another graph's.
        """
        nodes: list[Any] = [edge.node for edge in self.edges]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if _is_leaf(node) or (node.name() == "ToCopyBackward0" and _is_leaf(_below(node)[0])):
                yield node
            elif since <= node._sequence_nr() < self.first:
                raise ConfigError(
                    "micro_batched: a block used a tensor that another block or micro-batch computed and"
                    " that is not in its arguments: pass it on, in a tuple or a dict"
                )
            found = set(_below(node)) - seen
            seen |= found
            nodes += found


class _Passes:
    """The graphs of all blocks on all micro-batches, from forward to backward."""

    def __init__(self, blocks: int, parts: int) -> None:
        """Prepare ``blocks`` times ``parts`` graphs."""
        self._graphs = [[_BlockGraph() for _ in range(parts)] for _ in range(blocks)]
        self._users: dict[Any, set[int]] = {}
        self._anchor = torch.empty(0, requires_grad=True)
        self._counts: list[int] = []
        self._first = _next_number()

    def enter(self, block: int, part: int, state: Any) -> Any:
        """Return ``state`` with its tensors at the beginning of the graph of a block."""
        graph = self._graphs[block][part]
        graph.first = _next_number()
        tensors = _differentiable(state)
        if not tensors:
            return state
        graph.arrived += [None] * len(tensors)
        detached = [each.detach() for each in tensors]
        entered = _Enter.apply(graph.arrived, self._anchor, *detached)  # type: ignore[no-untyped-call]
        new = dict(zip(map(id, tensors), entered, strict=True))
        leaves, spec = tree_flatten(state)
        return tree_unflatten([new.get(id(leaf), leaf) for leaf in leaves], spec)

    def leave(self, block: int, part: int, state: Any) -> None:
        """Record where the graph of a block ends, and what it uses."""
        graph = self._graphs[block][part]
        graph.edges = [get_gradient_edge(each) for each in _differentiable(state)]
        for node in graph.leaves(self._first):
            if getattr(node, "variable", None) is not self._anchor:
                self._users.setdefault(node, set()).add(block)

    def weights(self) -> list[Tensor]:
        """Return the parameters that blocks have used, before ``join``."""
        leaves = (node.variable for node in self._users if _is_leaf(node))
        return [each for each in leaves if isinstance(each, torch.nn.Parameter)]

    def join(self, entering: list[list[Tensor]], outputs: list[Any]) -> list[Any]:
        """Return the outputs of the last block, as those of one node on ``entering``."""
        self._users = {node: users for node, users in self._users.items() if len(users) > 1}
        for node, users in self._users.items():
            if _is_leaf(node) and node.variable._backward_hooks:
                raise ConfigError(
                    f"micro_batched: a weight of shape {tuple(node.variable.shape)}, which blocks"
                    f" {sorted(users)} share, has a hook on its gradient, which would see a part of it:"
                    " use register_post_accumulate_grad_hook"
                )
        wanted = [_differentiable(each) for each in outputs]
        self._counts = [len(each) for each in wanted]
        flat = [each for tensors in wanted for each in tensors]
        if not flat:
            return outputs
        inputs = [each for tensors in entering for each in tensors]
        joined = _Join.apply(self, flat, self._anchor, *inputs)  # type: ignore[no-untyped-call]
        new = dict(zip(map(id, flat), joined, strict=True))
        return [tree_map(lambda leaf: new.get(id(leaf), leaf), each) for each in outputs]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Backpropagate all graphs; return the gradients of what entered the first block."""
        keep = _keeps_graph()
        rest = iter(gradients)
        flowing = [
            [*islice(rest, count), *repeat(None, len(graph.edges) - count)]  # keywords end here
            for count, graph in zip(self._counts, self._graphs[-1], strict=True)
        ]
        pending: dict[tuple[Any, int], Tensor] = {}
        for block in reversed(range(len(self._graphs))):
            shared = [node for node, users in self._users.items() if block in users]
            above = [node for node in shared if block > min(self._users[node])]
            for part, graph in enumerate(self._graphs[block]):
                given = [*flowing[part], *(pending.pop((node, part), None) for node in shared)]
                edges = [*graph.edges, *(GradientEdge(node, 0) for node in shared)]
                edges = [edge for edge, each in zip(edges, given, strict=True) if each is not None]
                if edges:
                    with _intercepted(above, part, pending):
                        torch.autograd.backward(
                            edges, [each for each in given if each is not None], retain_graph=keep
                        )
                flowing[part] = graph.take()
                if not keep:
                    graph.edges = []
        return [each for found in flowing for each in found]


@contextmanager
def _intercepted(
    nodes: list[Any], part: int, pending: dict[tuple[Any, int], Tensor]
) -> Iterator[None]:
    """Put the gradients that reach ``nodes`` inside the block into ``pending``, and no further."""

    def hook(node: Any) -> Callable[[tuple[Tensor | None, ...]], tuple[None]]:
        def intercept(gradients: tuple[Tensor | None, ...]) -> tuple[None]:
            if gradients[0] is not None:
                pending[node, part] = gradients[0]
            return (None,)

        return intercept

    leaves = [node.variable for node in nodes if _is_leaf(node)]
    after = [hooks for leaf in leaves if (hooks := leaf._post_accumulate_grad_hooks)]
    kept = [dict(hooks) for hooks in after]
    handles = [node.register_prehook(hook(node)) for node in nodes]
    try:
        for hooks in after:
            hooks.clear()  # they would run although nothing is accumulated
        yield
    finally:
        for hooks, own in zip(after, kept, strict=True):
            hooks.update(own)
        for handle in handles:
            handle.remove()


def _check_is_reduced(weights: list[Tensor], *, called: list[DistributedDataParallel]) -> None:
    """Raise ConfigError if a module that is not among ``called`` should reduce gradients of weights."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    _forget_when_parallel_is_made()
    if not all(map(_is_known, weights)):
        _look_for_parallel(weights)
    if _unreduced(weights, called) is None:
        return
    gc.collect()  # a module that is not used any more lives on in cycles
    _look_for_parallel(weights)
    parallel = _unreduced(weights, called)
    if parallel is None:
        return
    used = set(map(id, weights))
    name, one = next(each for each in parallel.named_parameters() if id(each[1]) in used)
    raise ConfigError(
        f"micro_batched: the gradient of {name}, of shape {tuple(one.shape)}, would not be reduced over"
        f" the {dist.get_world_size(parallel.process_group)} ranks of its DistributedDataParallel, which"
        " is not called once for the whole batch: use its no_sync() around micro_batched, and average"
        " the gradients after backward, as by torch.distributed.all_reduce"
    )


def _unreduced(
    weights: list[Tensor], called: list[DistributedDataParallel]
) -> DistributedDataParallel | None:
    """Return a module that should reduce a weight's gradient and is not among ``called``, if any."""
    for weight in weights:
        reference = _parallel_of.get(weight)  # another thread may have made a module meanwhile
        parallel = None if reference is None else reference()
        if parallel is None or parallel in called or not parallel.require_backward_grad_sync:
            continue
        if dist.get_world_size(parallel.process_group) > 1:
            found: DistributedDataParallel = parallel
            return found
    return None


@cache
def _forget_when_parallel_is_made() -> None:
    """Let each ``DistributedDataParallel`` that is made from now on end what searches have found."""

    def registered(module: Module, name: str, inner: Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            _parallel_of.clear()

    register_module_module_registration_hook(registered)


def _is_known(weight: Tensor) -> bool:
    """Return False if no search has covered the weight, or the module that one has found is gone."""
    if weight not in _parallel_of:
        return False
    reference = _parallel_of[weight]
    return reference is None or reference() is not None


def _look_for_parallel(weights: Iterable[Tensor]) -> None:
    """Search all objects of Python for modules that have these weights, and note them."""
    for weight in weights:
        _parallel_of[weight] = None
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel):
            skipped = getattr(found, "parameters_to_ignore", ())
            for name, weight in found.named_parameters():
                if name.removeprefix("module.") not in skipped:
                    _parallel_of[weight] = weakref.ref(found)


def _parallel_in(blocks: Iterable[Any]) -> list[DistributedDataParallel]:
    """Return each ``DistributedDataParallel`` that is a block, or a part of one."""
    modules = (block for block in blocks if isinstance(block, Module))
    return [
        part
        for each in modules
        for part in each.modules()
        if isinstance(part, DistributedDataParallel)
    ]


def _below(node: Any) -> list[Any]:
    """Return the nodes to which a node of a graph sends gradients."""
    return [below for below, _ in node.next_functions if below is not None]


def _is_leaf(node: Any) -> bool:
    """Return whether a node of a graph accumulates a leaf's gradient."""
    return type(node).__name__ == "AccumulateGrad"


def _differentiable(tree: Any) -> list[Tensor]:
    """Return the tensors of a nest that require a gradient, each one once."""
    found = {
        id(leaf): leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    return list(found.values())


def _taken(block: Callable[..., Any], keywords: Mapping[str, Any]) -> list[str]:
    """Return the keywords that a block has a parameter for, beside its first one."""
    if not keywords:
        return []
    inner = getattr(block, "_orig_mod", block)  # torch.compile hides the signature
    try:
        known = inspect.signature(inner.forward if isinstance(inner, Module) else inner).parameters
    except ValueError:  # written in C
        return []
    return [
        name
        for name, parameter in tuple(known.items())[1:]
        if name in keywords
        and parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    ]


def _cut(batch: Any, keywords: Mapping[str, Any], parts: int) -> list[Any]:
    """Return (micro-batch, keywords) for each part."""
    leaves, spec = tree_flatten((batch, dict(keywords)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise ConfigError(
                f"micro_batched: the batch has a {type(leaf).__name__}, but must consist of tensors: bind"
                " other arguments to the block, as by functools.partial"
            )
    sizes = sorted({each.shape[0] if each.ndim else -1 for each in tensors})
    if len(sizes) != 1 or sizes[0] < 0:
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors) or "none"
        raise ConfigError(
            f"micro_batched: tensors of the batch must have one size in dimension 0; their shapes:"
            f" {shapes}"
        )
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= sizes[0]:
        raise ConfigError(
            f"micro_batched: parts is {parts!r}, but must be a number from 1 to the batch's size,"
            f" {sizes[0]}"
        )
    cut = {id(each): each.tensor_split(parts) for each in tensors}
    return [
        tree_unflatten([None if leaf is None else cut[id(leaf)][part] for leaf in leaves], spec)
        for part in range(parts)
    ]


def _random_states(state: Any) -> list[Tensor]:
    """Return the states of the random number generators of the host and of a nest's devices."""
    states = [torch.get_rng_state()]
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        states += get_device_states(*tree_leaves(state))[1]
    return states
