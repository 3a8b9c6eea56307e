"""Real inputs that are already on the machine; nothing is downloaded.

Text is Python's own standard library. Images come inside scikit-learn (the ``data`` extra): its
digits, and crops of its two photographs, for which it needs Pillow as well. Each data set names its
origin, size and licence, and makes batches for a network's configuration::

    text = zoo.stdlib_text_bytes("4MiB")
    batch = text.batch(network.config, 8, generator=torch.Generator().manual_seed(0))
"""

from __future__ import annotations

import importlib
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.core.errors import ConfigError
from penstock.core.units import parse_bytes
from penstock.lab.zoo.base import Batch, Config, LanguageConfig, VisionConfig
from penstock.lab.zoo.batches import language_batch

BYTES: Final = 256
"""Vocabulary size of text as bytes."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """Origin of some data."""

    name: str
    content: str
    """Description of the part that was taken."""
    nbytes: int
    """Size of that part in memory."""
    licence: str
    """Licence, with the attribution that it asks for."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A long text, one byte for each token."""

    source: DataSource
    tokens: Tensor
    """uint8 ``[nbytes]``."""

    def batch(self, config: Config, batch_size: int, *, generator: torch.Generator) -> Batch:
        """Draw windows of the text at random places, for the objective of ``config``.

        Raises:
            ConfigError: ``config`` is not a language model's, its vocabulary is smaller than that of
                bytes (and a mask, if there is one), or the text is shorter than a sequence.
        """
        if not isinstance(config, LanguageConfig):
            raise ConfigError(f"{self.source.name} is text, {type(config).__name__} needs images")
        least = BYTES + (config.objective == "masked")
        if config.vocab_size < least:
            raise ConfigError(
                f"text as bytes needs vocab_size={least} at least; {type(config).__name__} has"
                f" {config.vocab_size}"
            )
        length = config.sequence_length + 1
        if len(self.tokens) < length:
            raise ConfigError(
                f"{self.source.name}: {len(self.tokens)} bytes are fewer than the {length} of a sequence"
                " with its targets; raise limit_bytes or lower sequence_length"
            )
        starts = torch.randint(len(self.tokens) - length + 1, (batch_size, 1), generator=generator)
        windows = self.tokens[starts + torch.arange(length)].long()
        return language_batch(config, windows, generator=generator)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledImages:
    """Labelled images, as bytes in memory."""

    source: DataSource
    pixels: Tensor
    """uint8 ``[count, channels, height, width]``."""
    labels: Tensor
    """int64 ``[count]``."""
    classes: tuple[str, ...]
    """Names of the labels."""

    def batch(self, config: Config, batch_size: int, *, generator: torch.Generator) -> Batch:
        """Draw images at random, normalised to mean 0 and variance 1 for each channel of the whole set.

        They are resized to the configuration's size, and grey images repeated for its channels.

        Raises:
            ConfigError: ``config`` is not an image classifier's, has fewer classes than these images, or
                another number of channels.
        """
        if not isinstance(config, VisionConfig):
            raise ConfigError(f"{self.source.name} is images, {type(config).__name__} needs tokens")
        channels = self.pixels.shape[1]
        if channels not in (1, config.in_channels):
            raise ConfigError(
                f"{self.source.name} has {channels} channels, {type(config).__name__} needs"
                f" {config.in_channels}; build it with in_channels={channels}"
            )
        if config.num_classes < len(self.classes):
            raise ConfigError(
                f"{self.source.name} has {len(self.classes)} classes, {type(config).__name__} has"
                f" {config.num_classes}; build it with num_classes={len(self.classes)}"
            )
        rows = torch.randint(len(self.labels), (batch_size,), generator=generator)
        images = _resize(self._normalised(rows), config.image_size)
        return Batch(images.expand(-1, config.in_channels, -1, -1).contiguous(), self.labels[rows])

    def _normalised(self, rows: Tensor) -> Tensor:
        whole = self.pixels[:: max(1, len(self.pixels) // 256)].float()
        std, mean = torch.std_mean(whole, dim=(0, 2, 3), keepdim=True)
        return (self.pixels[rows].float() - mean) / std


def stdlib_text_bytes(limit_bytes: int | str = "32MiB") -> Text:
    """Concatenate the .py files of Python's standard library, in the order of their names.

    The result is the same for every run of one Python version. Installed packages are left out.

    Args:
        limit_bytes: Most bytes to take: a number, or a size with a unit.

    Raises:
        ConfigError: The limit is malformed, or Python's library has no sources.
    """
    limit = parse_bytes(limit_bytes, what="limit_bytes")
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _stdlib_files(root)
    text = bytearray()
    used = 0
    for used, file in enumerate(files, start=1):  # noqa: B007 - counts the files used
        text += file.read_bytes()
        if len(text) >= limit:
            break
    del text[limit:]
    if not text:
        raise ConfigError(f"no text: {len(files)} .py files under {root}, limit_bytes={limit}")
    source = DataSource(
        name="Python standard library",
        content=f"{used} of {len(files)} .py files of Python {platform.python_version()}",
        nbytes=len(text),
        licence="PSF-2.0",
    )
    return Text(source, torch.frombuffer(text, dtype=torch.uint8))


def digits() -> LabelledImages:
    """Return scikit-learn's handwritten digits: 1,797 grey images of 8x8 pixels in 10 classes.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    bunch = _sklearn_datasets().load_digits()
    pixels = torch.tensor(bunch.images, dtype=torch.uint8).unsqueeze(1)
    source = DataSource(
        name="scikit-learn digits",
        content=f"{len(pixels)} images of 8x8 pixels",
        nbytes=pixels.nbytes,
        licence="BSD-3-Clause; UCI Optical Recognition of Handwritten Digits, Alpaydin and Kaynak",
    )
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    return LabelledImages(source, pixels, labels, tuple(str(digit) for digit in range(10)))


def photograph_crops(
    *, image_size: int = 64, count: int = 512, grid: tuple[int, int] = (2, 2), seed: int = 0
) -> LabelledImages:
    """Cut square crops at random places out of scikit-learn's two photographs; classify them by place.

    A class is a photograph and a cell of the grid that divides the possible places of a crop, so all
    classes are about equally frequent at any size.

    Args:
        image_size: Side of a crop, in pixels; at most 427, the height of the photographs.
        count: Number of crops.
        grid: Rows and columns of the grid.
        seed: Seed of the places; the same seed gives the same crops.

    Raises:
        ConfigError: The crops do not fit, or scikit-learn or Pillow is not installed.
    """
    photos = _photographs()
    height, width = (int(side) for side in photos.shape[-2:])
    if not 1 <= image_size <= min(height, width):
        raise ConfigError(
            f"image_size={image_size} is not between 1 and {min(height, width)}, the photographs'"
            " height; choose smaller crops: a batch is resized to the network's image_size"
        )
    if count < 1 or min(grid) < 1:
        raise ConfigError(f"count={count} and grid={grid} must not be below 1")
    generator = torch.Generator().manual_seed(seed)
    ranges = (len(photos), height - image_size + 1, width - image_size + 1)
    which, top, left = (torch.randint(room, (count,), generator=generator) for room in ranges)
    crops = [
        photos[p, :, y : y + image_size, x : x + image_size]
        for p, y, x in zip(which.tolist(), top.tolist(), left.tolist(), strict=True)
    ]
    cells = (which * grid[0] + top * grid[0] // ranges[1]) * grid[1] + left * grid[1] // ranges[2]
    pixels = torch.stack(crops)
    return LabelledImages(_photograph_source(pixels), pixels, cells, _class_names(grid))


def _stdlib_files(root: Path) -> list[Path]:
    packages = {"site-packages", "dist-packages"}
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in files if not packages & set(path.parts))
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def _resize(images: Tensor, size: int) -> Tensor:
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", align_corners=False)


def _photographs() -> Tensor:
    """Load china.jpg and flower.jpg as uint8 ``[2, 3, 427, 640]``."""
    try:
        images: Sequence[Any] = _sklearn_datasets().load_sample_images().images
    except ImportError as error:
        raise ConfigError(
            "scikit-learn needs Pillow to read its photographs: pip install pillow"
        ) from error
    return torch.tensor(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def _photograph_source(pixels: Tensor) -> DataSource:
    return DataSource(
        name="scikit-learn sample photographs",
        content=f"{len(pixels)} crops of {pixels.shape[-1]} pixels of china.jpg and flower.jpg",
        nbytes=pixels.nbytes,
        licence="CC BY 2.0; china.jpg by danielbuechele, flower.jpg by vultilion (Flickr)",
    )


def _class_names(grid: tuple[int, int]) -> tuple[str, ...]:
    return tuple(
        f"{photo} row {row} column {column}"
        for photo in ("china", "flower")
        for row in range(grid[0])
        for column in range(grid[1])
    )


def _sklearn_datasets() -> Any:
    try:
        return importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise ConfigError(
            "these images are part of scikit-learn, which is not installed:"
            " pip install 'penstock[data]'"
        ) from error
