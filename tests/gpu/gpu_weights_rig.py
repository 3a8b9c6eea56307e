"""Models on a device whose weights rest on flash, and what is compared of them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.homed import home_of

DEVICE = "cuda"
WIDTH = 128
WEIGHT_BYTES = 4 * WIDTH * WIDTH
DEPTH = 6
LIMIT = 3 * WEIGHT_BYTES
FLOOR = 16384


class Blocks(nn.Module):
    """Modules one behind the other, checkpointed or not."""

    def __init__(self, make, *, checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(DEPTH))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class TiedWords(nn.Module):
    """An embedding of ``words`` whose weight is the head's, too."""

    def __init__(self, words, body):
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.body = body
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        words = (x.abs() * 1000).long() % self.embedding.num_embeddings
        return self.head(self.body(self.embedding(words[:, :8])))


def bits(tensor):
    return tensor.detach().cpu().clone()


def state_of(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: bits(each) for name, each in named}


def inputs(steps=3, first=0):
    random = torch.Generator().manual_seed(1)
    made = [torch.randn((16, WIDTH), generator=random) for _ in range(first + steps)]
    return [each.to(DEVICE) for each in made[first:]]


def on_device_flash(model, directory, *, limit=LIMIT, weights="flash", **options):
    options = {
        "device_memory": "64MiB",
        "host_memory": "128MiB" if weights == "host" else "64MiB",
        "floor": FLOOR,
        **options,
    }
    flash = {"flash": str(directory)} if weights == "flash" else {}
    return penstock.offload(model, weights=weights, weights_memory=limit, **flash, **options)


def rested_bytes(model):
    return sum(each.nbytes for each in model.parameters() if home_of(each) is not None)
