"""The table of the zoo: names and their networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from penstock.core.errors import ConfigError
from penstock.lab.zoo import (
    alexnet,
    bert,
    densenet,
    googlenet,
    gpt,
    overfeat,
    resnet,
    resnet_cifar,
    senet,
    vgg,
)
from penstock.lab.zoo.base import Config, Network, Setting, ZooEntry

Size = Literal["full", "tiny"]

_ENTRIES: Final[dict[str, ZooEntry]] = {
    **alexnet.ENTRIES,
    **overfeat.ENTRIES,
    **googlenet.ENTRIES,
    **senet.ENTRIES,
    **bert.ENTRIES,
    **gpt.ENTRIES,
}
_PARSERS: Final[tuple[Callable[[str], ZooEntry | None], ...]] = (
    vgg.parse,
    resnet.parse_published,
    resnet_cifar.parse,
    resnet.parse_stretched,  # after the others, because every 9n+2 is also a 3m+2
    densenet.parse,
)
_NAMES: Final = (
    *alexnet.ENTRIES,
    *overfeat.ENTRIES,
    *vgg.NAMES,
    *googlenet.ENTRIES,
    *resnet.NAMES,
    *resnet_cifar.NAMES,
    *senet.ENTRIES,
    *densenet.NAMES,
    *bert.ENTRIES,
    *gpt.ENTRIES,
)
_FAMILIES: Final = (
    "alexnet",
    "overfeat",
    "vgg16",
    "vgg116",
    "googlenet",
    "resnet18",
    "resnet50",
    "resnet272",
    "resnet1202",
    "senet154",
    "densenet121",
    "densenet-bc-100-12",
    "bert-base",
    "gpt2",
    "gpt-neo-125m",
)


def names() -> tuple[str, ...]:
    """Return the names in the table.

    ``build`` accepts more: ``vgg<16+5k>``, ``resnet<9n+2>``, ``resnet<3m+2>``, ``densenet<2m+5>``,
    ``densenet-bc-<6n+4>-<growth>``.
    """
    return _NAMES


def families() -> tuple[str, ...]:
    """Return a name for each kind of network, for tests; together they run all of the zoo's code."""
    return _FAMILIES


def config(name: str, *, size: Size = "full", **overrides: Setting) -> Config:
    """Return the configuration from which ``build`` builds.

    Raises:
        ConfigError: The network or a setting is unknown, or a value is invalid.
    """
    return _entry(name).configure(name, size, overrides)


def build(name: str, *, size: Size = "full", **overrides: Setting) -> Network:
    """Build a network with fresh weights, drawn from torch's global generator.

    Args:
    name: One of ``names()``, or a name of a family's pattern.
    size: ``"full"``: as published. ``"tiny"``: the same kind of layers, few and narrow, some
        hundred kB of parameters, for tests; deep groups have only a few layers.
    overrides: Settings of the network's configuration, over those of ``size``.

    Returns:
    The network, on the default device, in training mode: ``loss = network(inputs, targets)``.

    Raises:
    ConfigError: The network or a setting is unknown, or a value is invalid.
    """
    entry = _entry(name)
    return entry.network(entry.configure(name, size, overrides))


def _entry(name: str) -> ZooEntry:
    if name in _ENTRIES:
        return _ENTRIES[name]
    for parse in _PARSERS:
        entry = parse(name)
        if entry is not None:
            return entry
    raise ConfigError(
        f"the zoo has no {name!r}; it has {', '.join(_NAMES)}, and further depths of vgg<16+5k>,"
        f" resnet<9n+2>, resnet<3m+2> above 152, densenet<2m+5> above 264"
    )
