"""Operators of CUDA tensors, computed by the CPU's kernels in the emulated device's own time.

``install`` registers a Python function for every operator of torch that has a kernel for CUDA, so that
it runs in whichever thread torch dispatches in. Outputs come from meta kernels (their shapes) and torch's
real caching allocator; then a function is enqueued on the real current stream, which runs the CPU's
kernel on that memory when the device comes to it. What has no meta kernel, or a shape that depends on the
data, waits for the device, as it does on a GPU. Copies between device and host are torch's own.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import emulator
import torch

from penstock.testing.access_order import AccessOrder, Span, stream_here

aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_HOST = torch.device("cpu")
UNTRIED = ("penstock.codec.device.triton_exponent", "penstock.codec.device.triton_sparse")
"""Kernels of Triton, which do not run here: to find that out takes each process seconds, as it compiles
what calls the driver. Whoever wants them tried, as ``test_codec_triton.py`` does, deletes the entries."""
NATIVE = {
    "_copy_from_and_resize",
    "_pin_memory",
    "_reshape_alias",
    "as_strided",
    "empty",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "record_stream",
    "resize_",
    "set_",
    "unfold",
    "view",
    "view_as_complex",
    "view_as_real",
}
"""Operators of CUDA that launch nothing: torch's own do."""
COMPOSITE = ("convolution", "convolution_backward", "copy_")
"""Operators made of others, which depend on what NVIDIA's libraries can; taken as a whole."""

REMEMBERED = 1000
"""Calls of one operator whose shapes are remembered."""

failures: list[BaseException] = []
"""Of kernels, in the device's thread."""
_order: AccessOrder | None = None
_numbers = itertools.count(1)
_waiting: dict[int, Callable[[], None]] = {}
_captured: set[int] = set()
_seeding = threading.Lock()
_library: torch.library.Library | None = None


def use(order: AccessOrder | None) -> None:
    """From now on tell ``order`` what is read and written."""
    global _order  # noqa: PLW0603
    _order = order


def install() -> None:
    """Register the functions; for the whole process."""
    global _library  # noqa: PLW0603
    assert _library is None, "kernels are installed once"
    _library = torch.library.Library("aten", "IMPL")
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it overrides one
        for name in sorted(names | set(COMPOSITE)):
            packet, _, overload = name.partition(".")
            function = getattr(getattr(aten, packet), overload or "default", None)
            if packet not in NATIVE and function is not None:
                _library.impl(name, _kernel_of(function), "CUDA", allow_override=True)
    torch.cuda._sleep = sleep
    sys.modules.update(dict.fromkeys(UNTRIED))  # type: ignore[arg-type]


def _kernel_of(function: Any) -> Callable[..., Any]:
    return copy if function is aten.copy_.default else Operator(function)


# -- what the device runs ---------------------------------------------------------------------------


@emulator.KERNEL
def _run(number: int) -> None:
    work = _waiting[number] if number in _captured else _waiting.pop(number)
    try:
        with torch.no_grad():
            work()
    except BaseException as error:  # noqa: BLE001  (a test fails by it)
        traceback.print_exc()
        failures.append(error)


class Operand:
    """What a kernel knows of a tensor: an address and a shape. It keeps nothing alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = torch.Tensor.untyped_storage(tensor)  # that of a subclass may tell somebody
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.size, self.stride = tuple(tensor.size()), tuple(tensor.stride())
        self.offset, self.dtype, self.on_device = (
            tensor.storage_offset(),
            tensor.dtype,
            tensor.is_cuda,
        )

    @property
    def span(self) -> Span:
        if 0 in self.size:
            return self.address, 0, self.on_device
        reach = sum(
            (length - 1) * step for length, step in zip(self.size, self.stride, strict=True)
        )
        start = self.address + self.offset * self.dtype.itemsize
        return start, (reach + 1) * self.dtype.itemsize, self.on_device

    def on_host(self) -> torch.Tensor:
        """The same bytes, where the CPU's kernels find them."""
        if not self.address or not self.nbytes:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        address = emulator.calls.emu_host_address(self.address)
        storage = torch._C._construct_storage_from_data_pointer(address, _HOST, self.nbytes)
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


def launch(
    name: str, reads: Iterable[Operand], writes: Iterable[Operand], work: Callable[[], None]
) -> None:
    """Enqueue work on the current stream."""
    device = torch._C._cuda_getDevice()
    handle = torch._C._cuda_getCurrentRawStream(device)
    capturing = emulator.calls.emu_capturing(handle)
    if _order is not None and not capturing:
        read, written = ([operand.span for operand in operands] for operands in (reads, writes))
        _order.enqueued((device, handle), read, written, name)
    number = next(_numbers)
    _waiting[number] = work
    if capturing:
        _captured.add(number)
    emulator.calls.emu_kernel(handle, _run, number)


def sleep(cycles: int) -> None:
    """As ``torch.cuda._sleep``, but at most 50 ms."""
    launch("sleep", (), (), lambda: time.sleep(min(cycles / 2e9, 0.05)))


# -- operators --------------------------------------------------------------------------------------


class Operator:
    """An operator of torch, and what every call of it asks."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._shapes: dict[Any, Shapes | None] = {}

    @cached_property
    def name(self) -> str:
        """Its name and that of its overload."""
        return str(self.function.name())

    @cached_property
    def written(self) -> list[tuple[int, str]]:
        """Positions and names of the arguments that it writes."""
        return [
            (number, argument.name)
            for number, argument in enumerate(self.function._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]

    @cached_property
    def tensors(self) -> list[int]:
        """Positions of the arguments that are one tensor."""
        arguments = enumerate(self.function._schema.arguments)
        return [number for number, argument in arguments if str(argument.type) == "Tensor"]

    @cached_property
    def generator(self) -> int | None:
        """Position of the argument that is a generator."""
        names = [argument.name for argument in self.function._schema.arguments]
        return names.index("generator") if "generator" in names else None

    @cached_property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.function.tags

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Outputs now, their contents later."""
        call = Call(self, arguments, named)
        if call.device.index == torch._C._cuda_getDevice():
            return self._run(call)
        with torch.cuda._DeviceGuard(call.device.index):
            return self._run(call)

    def _run(self, call: Call) -> Any:
        shapes = self._shapes_of(call)
        return call.at_once() if shapes is None else call.later(shapes)

    def _shapes_of(self, call: Call) -> Shapes | None:
        """The shapes of a call's outputs; None if they depend on the data.

        Meta kernels are written in Python and take longer than all the rest, so that each is asked once
        for the same shapes, types and numbers.
        """
        key = call.key()
        if key is None:
            return call.shapes()
        if key not in self._shapes:
            if len(self._shapes) >= REMEMBERED:
                self._shapes.clear()
            self._shapes[key] = call.shapes()
        return self._shapes[key]


@dataclass(frozen=True)
class Shapes:
    """What a meta kernel says of a call."""

    outputs: list[Any]
    """In the order of leaves: an ``Argument``, a ``Fresh``, or what is no tensor."""
    structure: Any
    resized: list[tuple[int, torch.Size]]
    """Arguments that were empty: an ``out``."""


@dataclass(frozen=True)
class Argument:
    """An output that is an argument."""

    number: int


@dataclass(frozen=True)
class Fresh:
    """An output for which memory is allocated."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call:
    """One call of an operator."""

    def __init__(
        self, operator: Operator, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        leaves: list[Any] = []
        self.structure = _flatten((arguments, named), leaves)
        self.operator = operator
        self.device = _device_of(leaves)
        self.overload = _overload_of(operator, arguments)
        self.generator, self.leaves = _random(operator, leaves, self.device)
        written = {id(tensor) for tensor in _written(operator, arguments, named)}
        self.is_written = [id(leaf) in written for leaf in leaves]

    def on(self, leaves: list[Any]) -> Any:
        """What the operator makes of other leaves."""
        arguments, named = _unflatten(self.structure, iter(leaves))
        return self.overload(*arguments, **named)

    def on_host(self, operands: list[Any]) -> Any:
        """What the CPU's kernel makes of the bytes as they are now."""
        leaves = [each.on_host() if isinstance(each, Operand) else each for each in operands]
        generator, position = self.generator, self.operator.generator
        if generator is None:
            return self.on(leaves)
        arguments, named = _unflatten(self.structure, iter(leaves))
        if position is not None:
            if position < len(arguments):
                arguments = (*arguments[:position], generator, *arguments[position + 1 :])
            else:
                named = named | {"generator": generator}
            return self.overload(*arguments, **named)
        with _seeding, torch.random.fork_rng(devices=()):  # native_dropout and its like take none
            torch.set_rng_state(generator.get_state())
            return self.overload(*arguments, **named)

    def key(self) -> Any:
        """All that the shapes of the outputs may depend on; None if that cannot be said."""
        facts: list[Any] = [self.structure, self.overload, torch.get_default_dtype()]
        for leaf in self.leaves:
            if not isinstance(leaf, torch.Tensor):
                facts.append((type(leaf), leaf))  # 1 is no 1.0, and no True
            elif leaf.is_cuda:
                facts.append((leaf.dtype, leaf.size(), leaf.stride()))
            elif leaf.dim() == 0:
                facts.append(leaf.dtype)
            else:
                return None
        return tuple(facts)

    def shapes(self) -> Shapes | None:
        """What the meta kernel says; None if there is none, or if it needs the data."""
        meta = [_as_meta(leaf) for leaf in self.leaves]
        found: list[Any] = []
        try:
            with torch.no_grad():
                structure = _flatten(self.on(meta), found)
        except (NotImplementedError, RuntimeError):
            return None
        given = {id(leaf): number for number, leaf in enumerate(meta)}
        outputs = [
            each
            if not isinstance(each, torch.Tensor)
            else Argument(given[id(each)])
            if id(each) in given
            else Fresh(each.size(), each.stride(), each.dtype)
            for each in found
        ]
        resized = [
            (number, shape.size())
            for number, (leaf, shape) in enumerate(zip(self.leaves, meta, strict=True))
            if _on_cuda(leaf) and leaf.size() != shape.size()
        ]
        return Shapes(outputs, structure, resized)

    def later(self, shapes: Shapes) -> Any:
        """Memory for the outputs, and work that fills it."""
        for number, size in shapes.resized:
            self.leaves[number].resize_(size)
        outputs, fresh = [], []
        for number, output in enumerate(shapes.outputs):
            if isinstance(output, Argument):
                outputs.append(self.leaves[output.number])
            elif isinstance(output, Fresh):
                like = {"dtype": output.dtype, "device": self.device}
                outputs.append(torch.empty_strided(output.size, output.stride, **like))
                fresh.append((number, Operand(outputs[-1])))
            else:
                outputs.append(output)
        operands = [_as_operand(leaf) for leaf in self.leaves]
        reads, writes = [], [operand for _, operand in fresh]
        for operand, written in zip(operands, self.is_written, strict=True):
            if isinstance(operand, Operand):
                (writes if written else reads).append(operand)

        def work() -> None:
            found: list[Any] = []
            _flatten(self.on_host(operands), found)
            for number, operand in fresh:
                operand.on_host().copy_(found[number])

        self.leaves = []  # the work keeps nothing alive
        launch(self.operator.name, reads, writes, work)
        return _unflatten(shapes.structure, iter(outputs))

    def at_once(self) -> Any:
        """For what the host must know before it can go on."""
        torch.cuda.current_stream().synchronize()
        operands = [_as_operand(leaf) for leaf in self.leaves]
        for operand, written in zip(operands, self.is_written, strict=True):
            if _order is not None and isinstance(operand, Operand):
                _order.accessed(operand.span, writes=written, what=self.operator.name)
        result = self.on_host(operands)
        if any(self.is_written):
            return self.leaves[self.is_written.index(True)]
        found: list[Any] = []
        structure = _flatten(result, found)
        moved = [each.to(self.device) if isinstance(each, torch.Tensor) else each for each in found]
        return _unflatten(structure, iter(moved))


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``copy_``: between device and host it is torch's own, of whole tensors of one type."""
    if target.numel() == 0:
        return target
    if source.size() != target.size():
        source = source.expand(target.size())
    if target.device == source.device:
        with torch.cuda.device(target.device):
            to, of = Operand(target), Operand(source)
            launch("copy_", [of], [to], lambda: to.on_host().copy_(of.on_host()))
        return target
    alike = target.dtype == source.dtype and target.stride() == source.stride()
    if alike and target.is_contiguous() and source.is_contiguous():
        _across(target, source, non_blocking)
    elif source.is_cuda and target.is_cuda:
        there = torch.empty(target.size(), dtype=source.dtype, device=target.device)
        copy(target, copy(there, source.contiguous()))
    elif target.is_cuda:
        host = torch.empty(target.size(), dtype=target.dtype).copy_(source)
        copy(target, copy(torch.empty_like(host, device=target.device), host))
    else:
        host = torch.empty(source.size(), dtype=source.dtype)
        target.copy_(copy(host, source.contiguous()))
    return target


def _across(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    device = source.device if source.is_cuda else target.device
    ready = None
    if source.is_cuda and target.is_cuda:  # torch does the same, once it has been told of the copy
        with torch.cuda.device(target.device):
            ready = torch.cuda.current_stream().record_event()
    with torch.cuda.device(device):
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        if _order is not None:
            stream = stream_here(torch.cuda.current_stream().cuda_stream)
            spans = [Operand(source).span], [Operand(target).span]
            host = source if target.is_cuda else target
            pinned = host.is_cuda or host.is_pinned()
            way = "to the device" if target.is_cuda else "to the host"
            _order.enqueued(stream, *spans, f"copy {way}" + ("" if pinned else ", pageable,"))
        aten.copy_.default.redispatch(_CPU, target, source, non_blocking)
        if _order is not None and not pinned and non_blocking:
            _order.saw_stream(stream)  # the host has waited


# -- arguments --------------------------------------------------------------------------------------


def _on_cuda(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _device_of(leaves: list[Any]) -> torch.device:
    for leaf in leaves:
        if _on_cuda(leaf):
            return leaf.device
    for leaf in leaves:
        if isinstance(leaf, torch.device) and leaf.type == "cuda" and leaf.index is not None:
            return leaf
    return torch.device("cuda", torch.cuda.current_device())


def _as_meta(leaf: Any) -> Any:
    if _on_cuda(leaf):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.Tensor) and leaf.dim() == 0:
        return leaf.to("meta")
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return torch.device("meta")
    return leaf


def _as_operand(leaf: Any) -> Any:
    if _on_cuda(leaf):
        return Operand(leaf)
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return torch.device("cpu")
    return leaf


def _overload_of(operator: Operator, arguments: tuple[Any, ...]) -> Any:
    """The operator; its overload for numbers, if torch has wrapped one as a tensor and unwrapped it."""
    for number in operator.tensors:
        if number < len(arguments) and isinstance(arguments[number], int | float | complex):
            return operator.function.overloadpacket
    return operator.function


def _written(
    operator: Operator, arguments: tuple[Any, ...], named: dict[str, Any]
) -> list[torch.Tensor]:
    found: list[Any] = []
    for number, name in operator.written:
        _flatten(arguments[number] if number < len(arguments) else named.get(name), found)
    return [leaf for leaf in found if _on_cuda(leaf)]


def _flatten(value: Any, leaves: list[Any]) -> Any:
    """Append what is in lists, tuples and dictionaries to ``leaves``; return how they were nested."""
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return kind, None, tuple([_flatten(each, leaves) for each in value])
    if isinstance(value, dict):
        return dict, tuple(value), tuple([_flatten(each, leaves) for each in value.values()])
    leaves.append(value)
    return None


def _unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    """Nest leaves as ``_flatten`` has found them, or others in their places."""
    if structure is None:
        return next(leaves)
    kind, names, parts = structure
    made = [_unflatten(part, leaves) for part in parts]
    return dict(zip(names, made, strict=True)) if kind is dict else kind(made)


# -- random numbers ---------------------------------------------------------------------------------


def _random(operator: Operator, leaves: list[Any], device: torch.device) -> tuple[Any, list[Any]]:
    """A generator for the CPU that begins where CUDA's is, which goes on as on a GPU.

    So what is drawn depends on the order of calls, not on that in which the device comes to them.
    """
    if not operator.is_random:
        return None, leaves
    given = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    source = given if given is not None else torch.cuda.default_generators[device.index]
    offset = source.get_offset()
    source.set_offset(offset + 4)
    generator = torch.Generator().manual_seed((source.initial_seed() * 1000003 + offset) % 2**63)
    return generator, [None if isinstance(leaf, torch.Generator) else leaf for leaf in leaves]
