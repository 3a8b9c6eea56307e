"""Weights from safetensors files into a model: each file is read once, from its start to its end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from penstock.core import knobs
from penstock.core.errors import ConfigError, MismatchError
from penstock.core.units import parse_bytes
from penstock.homed import home_of, is_sharded, use_count
from penstock.io.files import open_path
from penstock.observe.clients import WEIGHTS
from penstock.store.blob import StrPath
from penstock.store.checksums import RunningSum
from penstock.weights.dispatched import (
    check_hooks,
    files_of,
    is_dispatched,
    remove_hooks,
    tie_again,
    values_of,
)
from penstock.weights.failures import SOURCE_ADVICE, named_reads
from penstock.weights.homes import Home, WeightFiles, WeightPlaces, flat_bytes
from penstock.weights.inplace import LEAST_BYTES, SourceFile, SourceHome
from penstock.weights.pieces import PieceReader, PieceWriter
from penstock.weights.safetensors import StoredTensor, WeightFile, open_source

CODES: Final[Mapping[torch.dtype, str]] = {
    getattr(torch, name): code
    for name, code in (
        *(("float64", "F64"), ("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")),
        *(("int64", "I64"), ("int32", "I32"), ("int16", "I16"), ("int8", "I8"), ("bool", "BOOL")),
        *(("uint64", "U64"), ("uint32", "U32"), ("uint16", "U16"), ("uint8", "U8")),
        *(("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2"), ("complex64", "C64")),
        ("float8_e8m0fnu", "F8_E8M0"),
    )
    if hasattr(torch, name)
}
"""Codes in safetensors of torch's types."""
_NAMED: Final = 5
"""Names in an error."""
_ADVICE: Final = "Free some space, or name another directory, and load the weights again"
_OWN_USES: Final = use_count(torch.empty(0).untyped_storage()) + 1
"""Use count of memory to which one tensor refers, that lives."""
Slot: TypeAlias = tuple[Module, str]
"""A module, and the name of a parameter or buffer in it."""


def load(
    model: Module,
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    directory: StrPath | Sequence[StrPath] | None = None,
    floor: int | str | None = None,
    in_place: bool = False,
) -> None:
    """Load safetensors files into a model, in one sequential pass over each file.

    The names, shapes and types are compared before anything is read, as ``load_state_dict`` does if it is
    strict; of tied weights one name suffices. About 200 MiB are in memory at a time beside what the model
    keeps there. Where the values go depends on where the model is:

    - Parameters that rest in files, as after ``penstock.built_on_flash``: into these files.
    - Parameters on ``meta``: those of at least ``floor`` get a home in ``directory``, and rest there; the
      others, and buffers, get memory. They become new objects, so make optimizers afterwards.
    - Everything else: into its memory.

    With ``in_place``, parameters that are not trained (``requires_grad`` is False), on ``meta`` or in
    memory of their own, and of at least ``floor``, rest in the source: they are neither read nor copied.
    The files stay open, are never written, and must not be changed: that is an error where a weight is
    next used. A weight whose values the program changes gets memory, or in a session a home.

    A model that accelerate has offloaded to disk is one on ``meta``, and the folder of that may be the
    source. What accelerate keeps in host memory is taken from there, unless the source has it. Hooks of
    accelerate are removed. Accelerate has untied weights: a model's own ``tie_weights``, as those of
    transformers have it, ties them again.

    After an error in the middle, parameters on ``meta`` are as they were; the values of others are mixed.

    Args:
        model: The model.
        source: A ``.safetensors`` file, a list of them, a folder as of Hugging Face, with its
            index, or one of accelerate's disk offload.
        directory: Where parameters on ``meta`` get their homes; one directory or several.
        floor: Least size of a parameter on ``meta`` that gets a home; None: the knob ``PENSTOCK_FLOOR``.
        in_place: Let parameters that are not trained rest in the source.

    Raises:
        ConfigError: There is no such source; the model has parameters on ``meta``, and no directory is
            given; a buffer on ``meta`` is not in the files, as it is not saved.
        MismatchError: Names, shapes or types differ.
        DamagedError: A file is not intact.
        ChecksumError: A file in which weights are to rest was changed meanwhile.
        NoSpaceError: The directory has no room for all parameters on ``meta``; nothing was read.
        TransferError: A file cannot be read or written.
    """
    targets = state_of(model)
    is_meta = any(tensor.is_meta for tensor in targets.values())
    places = None if directory is None or not is_meta else WeightFiles(directory)
    floor_bytes = knobs.floor_bytes() if floor is None else parse_bytes(floor, what="floor")
    _load(model, open_source(source), places, floor_bytes=floor_bytes, in_place=in_place)


def load_dispatched(model: Module, places: WeightPlaces, *, floor_bytes: int) -> None:
    """Take over a model whose weights accelerate has offloaded, if it is one.

    Parameters on disk that are not trained rest in accelerate's files; the others are copied, to new
    homes or, where there are no files for these, to memory. What accelerate keeps in host memory, or on
    a device, stays there.

    Args:
        model: The model.
        places: Where its weights are to rest.
        floor_bytes: Least size of a parameter that gets a home.

    Raises:
        ConfigError, DamagedError, MismatchError, NoSpaceError, TransferError: As ``load``.
    """
    if is_dispatched(model):
        _load(model, None, places, floor_bytes=floor_bytes, in_place=True)


def _load(
    model: Module,
    files: Sequence[WeightFile] | None,
    places: WeightPlaces | None,
    *,
    floor_bytes: int,
    in_place: bool,
) -> None:
    """Load files; ``None``: those to which accelerate has offloaded what is on ``meta``."""
    is_offloaded = is_dispatched(model)
    if is_offloaded:
        check_hooks(model)
        tie_again(model)
    targets = state_of(model)
    values = values_of(model) if is_offloaded else {}
    away = {name for name, target in targets.items() if target.is_meta}
    if files is None:
        files = list(_only(files_of(model), away - values.keys()))
    away -= {tensor.name for file in files for tensor in file.tensors}
    values = {name: each for name, each in values.items() if name in away}
    chosen = _match(files, targets, values, others_have_values=is_offloaded)
    loading = _Loading(model, places, floor_bytes)
    loading.take(values, chosen, targets)
    if in_place:
        loading.leave_in_place(files, chosen, targets)
    loading.check(targets)
    with PieceWriter(owner=WEIGHTS, advice=_ADVICE) as writer:
        for file in files:
            wanted = [tensor for tensor in file.tensors if tensor.name in chosen]
            wanted = loading.rest_in(file, wanted, targets)
            if wanted:
                loading.read(file, wanted, targets, writer)
    loading.finish()
    if is_offloaded:
        remove_hooks(model)


def _only(files: Sequence[WeightFile], names: Set[str]) -> Iterator[WeightFile]:
    """Yield files with those tensors alone that have these names."""
    for file in files:
        tensors = tuple(each for each in file.tensors if each.name in names)
        if tensors:
            yield replace(file, tensors=tensors)


def state_of(model: Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model that are saved, by name; nothing is touched.

    Raises:
        ConfigError: Its state has something else than tensors, or parameters that are spread over ranks.
    """
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{name!r} of the model's state is a {type(value).__name__}; safetensors have tensors"
                " only"
            )
        if is_sharded(value):
            raise ConfigError(
                f"{name} is spread over ranks, as a DTensor: safetensors are loaded before the model is"
                " sharded, and saved with torch.distributed.checkpoint"
            )
    return state


def _match(
    files: Sequence[WeightFile],
    targets: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    *,
    others_have_values: bool,
) -> set[str]:
    """Return the names that are loaded: all in the files and values, but one of each tied weight.

    Args:
        files: The files.
        targets: Parameters and buffers of the model.
        values: Values in memory, of targets.
        others_have_values: What is in neither need not be, unless it is on ``meta``.

    Raises:
        MismatchError: The files are of another model.
    """
    stored = {tensor.name: tensor for file in files for tensor in file.tensors}
    last = {id(targets[name]): name for name in values}
    last |= {id(target): name for name, target in targets.items() if name in stored}
    missing = [
        name
        for name, each in targets.items()
        if id(each) not in last and (each.is_meta or not others_have_values)
    ]
    problems = [
        *_list("missing", missing),
        *_list("unexpected", [name for name in stored if name not in targets]),
        *_list("different", list(_differences(stored, targets))),
        *_list(
            "different in memory",
            [
                name
                for name, each in values.items()
                if (each.shape, each.dtype) != (targets[name].shape, targets[name].dtype)
            ],
        ),
    ]
    if problems:
        where = f"in {files[0].path!r}" if files else "that accelerate has in memory or on disk"
        raise MismatchError(
            f"the weights {where} are not those of this model: {'; '.join(problems)}"
        )
    return set(last.values())


def _list(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"{what}: {', '.join(names[:_NAMED])}{more}"


def _differences(
    stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor]
) -> Iterator[str]:
    for name, tensor in stored.items():
        target = targets.get(name)
        if target is None:
            continue
        code = CODES.get(target.dtype, str(target.dtype))
        if tensor.shape != tuple(target.shape) or tensor.code != code:
            yield f"{name} ({tensor.code} {tensor.shape}, in the model {code} {tuple(target.shape)})"


class _Loading:
    """One call of ``load``."""

    def __init__(
        self,
        model: Module,
        places: WeightPlaces | None,
        floor_bytes: int,
    ) -> None:
        self._model = model
        self._floor_bytes = floor_bytes
        self._places = places
        self._files = None if places is None else places.files
        self._made: dict[
            int, Tensor
        ] = {}  # by the id of a tensor on meta, which the model keeps alive
        self._in_place: set[str] = set()  # names

    def take(
        self, values: Mapping[str, Tensor], chosen: Set[str], targets: Mapping[str, Tensor]
    ) -> None:
        """Let tensors on ``meta`` have values that are in memory, which is theirs from then on."""
        for name in values.keys() & chosen:
            target, made = targets[name], values[name].detach()
            if isinstance(target, Parameter):
                made = Parameter(made, target.requires_grad)
            self._made[id(target)] = made

    def leave_in_place(
        self, files: Sequence[WeightFile], chosen: Set[str], targets: Mapping[str, Tensor]
    ) -> None:
        """Choose the parameters that rest in the files."""
        for file in files:
            for tensor in file.tensors:
                target = targets.get(tensor.name)
                if tensor.name not in chosen or not isinstance(target, Parameter):
                    continue
                is_long = self._is_large(target) and target.nbytes >= LEAST_BYTES
                is_fit = tensor.begin % target.element_size() == 0
                if not target.requires_grad and is_long and is_fit and _can_rest(target):
                    self._in_place.add(tensor.name)

    def rest_in(
        self, file: WeightFile, tensors: Sequence[StoredTensor], targets: Mapping[str, Tensor]
    ) -> list[StoredTensor]:
        """Let parameters rest in a file, and return the tensors that are to be read."""
        others = [tensor for tensor in tensors if tensor.name not in self._in_place]
        source = SourceFile(file) if len(others) < len(tensors) else None
        for tensor in tensors:
            if source is None or tensor.name not in self._in_place:
                continue
            target = targets[tensor.name]
            assert isinstance(target, Parameter)
            if target.is_meta:
                made = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype)
                made = self._made[id(target)] = Parameter(made, requires_grad=False)
                target = made
            torch.autograd.graph.increment_version(target)
            SourceHome(tensor.name, target, source, tensor).rest()
        return others

    def check(self, targets: Mapping[str, Tensor]) -> None:
        """Raise ConfigError if something on ``meta`` has no values, or no place for them.

        Raises NoSpaceError if there is no room for all places, or in memory for all that rests there.
        """
        known = {id(target) for target in targets.values()}
        for path, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta and id(buffer) not in known:
                    raise ConfigError(
                        f"buffer {path}{'.' if path else ''}{name} of a {type(module).__name__} is on"
                        " meta and is not saved with the model, so no file has it: construct the model"
                        " with its parameters alone on meta, as accelerate.init_empty_weights() does,"
                        " or put another such module, constructed on the CPU, in its place before"
                    )
        done: set[int] = set()
        is_on_host = self._places is not None and self._files is None
        if not is_on_host:
            # of tied ones one name is in place
            done = {id(targets[name]) for name in self._in_place} | self._made.keys()
        new: list[tuple[str, Parameter]] = []
        for name, target in targets.items():
            if not (isinstance(target, Parameter) and self._is_large(target)):
                continue
            # what is on the device moves to host memory, too, where that is the place
            if not (target.is_meta or (is_on_host and target.is_cuda)):
                continue
            if id(target) in done:
                continue
            if self._places is None:
                raise ConfigError(
                    f"parameter {name} is on meta: give the directory on flash where it is to rest"
                )
            done.add(id(target))
            new.append((name, target))
        if self._places is not None:
            self._places.check_room(new)

    def _is_large(self, target: Tensor) -> bool:
        return target.nbytes >= max(1, self._floor_bytes)

    def read(
        self,
        file: WeightFile,
        tensors: Sequence[StoredTensor],
        targets: Mapping[str, Tensor],
        writer: PieceWriter,
    ) -> None:
        """Load tensors of one file, in their order there."""
        opened = open_path(file.path, "r")
        try:
            with PieceReader(opened, tensors[0].begin, file.size_bytes, owner=WEIGHTS) as reader:
                for tensor in tensors:
                    if tensor.nbytes:
                        reader.skip_to(tensor.begin)
                    target = targets[tensor.name]
                    if target.is_meta:
                        target = self._materialise(tensor.name, target)
                    with named_reads(tensor.name, SOURCE_ADVICE):
                        _fill(target, reader, writer)
        finally:
            opened.close()

    def _materialise(self, name: str, target: Tensor) -> Tensor:
        """Return what takes the place of a tensor on ``meta``, without values."""
        made = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype)
        if isinstance(target, Parameter):
            made = Parameter(made, target.requires_grad)
            if self._files is not None and self._is_large(made):
                place = self._files.cut(made.nbytes, name)
                Home(name, made, self._files.tier, place).rest()
        self._made[id(target)] = made
        return made

    def finish(self) -> None:
        """Let the model have what was made."""
        if self._files is not None:
            self._files.trim()
        for module in self._model.modules():
            for values in (module._parameters, module._buffers):
                for key, value in values.items():
                    made = None if value is None else self._made.get(id(value))
                    if made is not None:
                        values[key] = made  # type: ignore[assignment]


def _can_rest(parameter: Parameter) -> bool:
    """Return whether a parameter's memory can be exchanged for that of a file."""
    if type(parameter) is not Parameter or not parameter.is_contiguous():
        return False
    if parameter.is_meta:
        return True
    storage = parameter.untyped_storage()
    is_in_memory = parameter.device.type == "cpu" and home_of(parameter) is None
    is_whole = storage.nbytes() == parameter.nbytes
    return is_in_memory and is_whole and use_count(storage) <= _OWN_USES


def _fill(target: Tensor, reader: PieceReader, writer: PieceWriter) -> None:
    """Give a tensor the values that come next in a file."""
    if not target.numel():
        return
    home = home_of(target)
    if isinstance(home, Home) and home.is_direct:
        running = RunningSum(knobs.verify(), home.nbytes)
        writer.write(home.place.ranges(home.nbytes), reader.fill, running, name=home.name)
        home.filled(running.result())
    elif home is None and target.device.type == "cpu" and target.is_contiguous():
        reader.fill(flat_bytes(target))
        torch.autograd.graph.increment_version(target)
    else:
        values = torch.empty(target.shape, dtype=target.dtype)
        reader.fill(flat_bytes(values))
        with torch.no_grad():
            target.copy_(values)
