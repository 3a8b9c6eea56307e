"""The poster's nine networks, and the meaning of a scale. Loads neither NumPy nor torch.

A scale multiplies depths and widths: blocks, heads (of 64 features each) and vocabulary of a language
model, channels and hidden features of a vision model. Batch, sequence length and image size stay. So the
arithmetic of a step shrinks with the bytes of the state, and the share of a checkpoint in the time of
training stays about what it is at full size. Fixed costs do not shrink: at a small scale checkpoints look
more expensive than they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

HEAD_FEATURES: Final = 64
SCALE_MEANS: Final = (
    "blocks, heads of 64 features, vocabulary, channels and hidden features are multiplied by the scale;"
    " batch, sequence length and image size are not"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCase:
    """One of the nine networks, and how it is trained.

    Attributes:
        title: Name in the poster.
        zoo: Name in the zoo.
        batch: Images or sequences in a step.
        optimizer: ``adam``, or ``sgd`` with momentum.
        fixed: Settings of the network at every scale.
        full: Settings at full size, which the scale multiplies.
        stages: Kinds of training, one after the other.
    """

    title: str
    zoo: str
    batch: int
    optimizer: str
    fixed: Mapping[str, int]
    full: Mapping[str, Any]
    stages: tuple[str, ...] = ("training",)

    def settings(self, scale: float) -> dict[str, Any]:
        """Return the settings of the zoo's network at a scale."""
        made: dict[str, Any] = dict(self.fixed)
        for name, value in self.full.items():
            if name == "heads":
                made["heads"] = max(1, round(value * scale))
                made["width"] = HEAD_FEATURES * made["heads"]
            elif name == "divisor":
                made["divisor"] = min((1, 2, 4, 8), key=lambda each: abs(1 / each - scale))
            elif isinstance(value, tuple):
                made[name] = tuple(max(4, round(each * scale)) for each in value)
            else:
                made[name] = max(_MINIMUMS.get(name, 1), round(value * scale))
        return made


_MINIMUMS: Final = {"vocab_size": 320, "depth": 2, "width": 4, "hidden": 32}
"""Lower limits: a vocabulary of bytes, a block for each half of a pipeline, features to learn with."""


def _language(title: str, zoo: str, **full: int) -> NetworkCase:
    stages = ("pre-training", "fine-tuning") if zoo == "gpt2" else ("training",)
    return NetworkCase(
        title=title,
        zoo=zoo,
        batch=4,
        optimizer="adam",
        fixed={"sequence_length": 128},
        full=full,
        stages=stages,
    )


def _vision(title: str, zoo: str, **full: Any) -> NetworkCase:
    return NetworkCase(
        title=title, zoo=zoo, batch=16, optimizer="sgd", fixed={"image_size": 64}, full=full
    )


NETWORKS: Final[Mapping[str, NetworkCase]] = {
    "bert-base": _language("BERT-Base", "bert-base", vocab_size=30522, depth=12, heads=12),
    "bert-large": _language("BERT-Large", "bert-large", vocab_size=30522, depth=24, heads=16),
    "gpt2": _language("GPT-2", "gpt2", vocab_size=50257, depth=12, heads=12),
    "gpt-neo": _language("GPT-Neo", "gpt-neo-125m", vocab_size=50257, depth=12, heads=12),
    "resnet18": _vision("ResNet-18", "resnet18", width=64),
    "resnet50": _vision("ResNet-50", "resnet50", width=64),
    "googlenet": _vision("GoogLeNet", "googlenet", divisor=1),
    "alexnet": _vision("AlexNet", "alexnet", widths=(64, 192, 384, 256, 256), hidden=4096),
    "vgg11": _vision("VGG11", "vgg11", widths=(64, 128, 256, 512, 512), hidden=4096),
}
"""The networks, by their names on the command line."""
