"""Networks of the zoo in training on the zoo's real data: what autograd saves, and what of it moves."""

import hashlib
import itertools
import time
from contextlib import contextmanager

import torch

from penstock.core.errors import ConfigError
from penstock.lab import zoo
from penstock.observe import Stage
from penstock.observe.summary import ENCODED_FRAME, ENCODED_SOURCE

IMAGE_SIZES = (64, 96, 128, 160, 224, 231)
SEQUENCE_LENGTH = 128
LEARNING_RATE = 0.01
CROPS = 128
BYTE_VOCABULARY = 257
"""Of text as bytes, and a mask."""


class Trainee:
    """A network, real data for it, and an optimizer. The same arguments give the same training."""

    def __init__(
        self, name, *, batch_size, seed=0, data=None, learning_rate=LEARNING_RATE, **settings
    ):
        """Build ``name`` with ``settings``; ``data`` are crops of photographs, or text, by default."""
        torch.manual_seed(seed)
        self.network = zoo.build(name, **settings)
        self.config = self.network.config
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self.data = data or _data_for(self.config)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=learning_rate, momentum=0.9)
        self.steps = 0

    def loss(self):
        """Of the next batch: a forward."""
        batch = self.data.batch(self.config, self.batch_size, generator=self.generator)
        return self.network(*batch)

    def learn(self, loss):
        """A backward, and a step of the optimizer."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def train(self, steps, limit_s):
        """Until so many steps are done; fewer, if that takes longer than ``limit_s``."""
        until = time.monotonic() + limit_s
        while self.steps < steps and time.monotonic() < until:
            self.learn(self.loss())

    @contextmanager
    def watched(self, least_bytes):
        """A list that what autograd saves within is added to at the end: ``[(dtype, storage)]``.

        Weights, buffers and what is smaller are left out. What is overwritten in place within is
        seen as it is at the end, as backward will see it.
        """
        parts = itertools.chain(self.network.parameters(), self.network.buffers())
        own = {each.untyped_storage().data_ptr() for each in parts}
        kept, storages, found = [], {}, []

        def pack(tensor):
            kept.append(tensor)  # or its memory would be given to another tensor
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and storage.nbytes() >= least_bytes:
                storages[storage.data_ptr()] = (str(tensor.dtype).removeprefix("torch."), storage)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield found
        found.extend(storages.values())

    def saved(self, cap_bytes, least_bytes):
        """``[(dtype, bytes)]`` of one more forward, the bytes of it all, and its loss.

        Of more than ``cap_bytes`` the same share of every storage is taken.
        """
        with self.watched(least_bytes) as storages:
            loss = self.loss()
        total = sum(storage.nbytes() for _, storage in storages)
        share = min(1.0, cap_bytes / max(total, 1))
        return [(dtype, sample(storage, share)) for dtype, storage in storages], total, loss.item()


def small_inputs(name, size):
    """Settings for ``name`` with images as small, or text as short, as it takes them."""
    config = zoo.config(name, size=size)
    if isinstance(config, zoo.LanguageConfig):
        length = min(SEQUENCE_LENGTH, config.sequence_length)
        vocabulary = max(config.vocab_size, BYTE_VOCABULARY)
        return {"size": size, "sequence_length": length, "vocab_size": vocabulary}
    settings = {"size": size, "num_classes": max(config.num_classes, 8)}
    for image_size in IMAGE_SIZES:
        if image_size >= config.image_size:
            break
        try:
            zoo.config(name, image_size=image_size, **settings)
        except ConfigError:
            continue  # nothing is left of images so small
        return settings | {"image_size": image_size}
    return settings


def sample(storage, share=1.0):
    """Such a share of a storage, from its middle: a copy, as bytes."""
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    if share >= 1:
        return whole.clone().numpy()
    length = max(4096, int(len(whole) * share) // 64 * 64)
    start = max(0, (len(whole) - length) // 2) // 64 * 64
    return whole[start : start + length].clone().numpy()


def digest(network):
    """Of weights and running averages: the same for the same bits."""
    found = hashlib.sha256()
    for tensor in network.state_dict().values():
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def moved(before, after, steps=1):
    """Bytes per step between two snapshots of a recorder: to flash, from it, and codec by codec."""

    def grown(counter):
        return (after.counters.get(counter, 0) - before.counters.get(counter, 0)) // steps

    prefix = f"{ENCODED_SOURCE}."
    names = sorted(name.removeprefix(prefix) for name in after.counters if name.startswith(prefix))
    codecs = {
        name: {
            "source_bytes": grown(f"{ENCODED_SOURCE}.{name}"),
            "frame_bytes": grown(f"{ENCODED_FRAME}.{name}"),
        }
        for name in names
    }
    return {
        f"{way}_bytes": (after.flow(stage, "flash").nbytes - before.flow(stage, "flash").nbytes)
        // steps
        for way, stage in (("written", Stage.WRITE), ("read", Stage.READ))
    } | {"codecs": {name: row for name, row in codecs.items() if row["source_bytes"]}}


def _data_for(config):
    if isinstance(config, zoo.VisionConfig):
        return zoo.photograph_crops(image_size=config.image_size, count=CROPS)
    return zoo.stdlib_text_bytes("4MiB")
