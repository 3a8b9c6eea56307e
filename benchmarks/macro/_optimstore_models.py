"""Iterations of whole networks: forward and backward replayed, and the weight update after them.

Forward and backward are of a dry profile in 16 bits, replayed with nothing moved; the update is of the
simulated SSD, on timelines. The paper's card, batches and lengths are not known. So cards are assumed,
three of them; lengths are those with which each network was published; and the batch is the largest power
of two that a card holds, with weights in 16 bits on it and gradients that leave as they are made. Of the
sizes only 6.7 and 10.3 billion parameters are known to be the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import _results
from penstock.lab import zoo
from penstock.lab.dry import dry_step
from penstock.lab.dry.roofline import retimed
from penstock.lab.ssd import Placement, Update
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.simulation import SimulationEngine, simulate
from penstock.plan import Budgets, Machine, Profile, policies
from penstock.plan.replay import replay

CARDS = ("a100-g10", "rtx-3090", "v100-nvme")
"""Assumed. The first is shown; a verdict is "yes" only if every card that holds the network has it so."""
LEAST, MEAN, MOST = 2.2, 2.4, 2.5
"""End to end: small models, on average, large models, as a public note has them of the paper."""
ROUNDING = 0.05
"""By how much a figure to a tenth may be off: of each network, beyond the least and the most."""
TOLERANCE = 0.1
"""Of the mean, as of the other ratios of times; the paper's networks are others."""
HALF_BYTES = 2
MOST_BATCH = 4096
HOST_BYTES = 128 << 30
"""Assumed."""
OFFLOADED_BYTES = 24
"""Of host memory for a parameter, by DeepSpeed's own estimate of Adam's states and gradients on the CPU:
16, and half as much again for buffers (``estimate_zero2_model_states_mem_needs``)."""


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """T5 (Raffel et al. 2020): the width of its attention is not that of its stream; lengths recalled."""

    feedforward: int
    heads: int
    head_width: int
    width: int = 1024
    depth: int = 24
    vocab_size: int = 32_128
    sequence_length: int = 512
    target_length: int = 114
    dropout: float = 0.1


class T5Attention(nn.Module):
    """Unscaled, without biases; positions are told by what is added to the scores."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.heads = config.heads
        self.query, self.key, self.value = (
            nn.Linear(config.width, inner, bias=False) for _ in range(3)
        )
        self.out = nn.Linear(inner, config.width, bias=False)
        self.dropout = config.dropout

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (
            project(of).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, of in ((self.query, x), (self.key, source), (self.value, source))
        )
        y = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=self.dropout, scale=1.0
        )
        return self.out(y.transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    """Attention to itself, of a decoder also to the encoder's end, and an MLP with ReLU."""

    def __init__(self, config: T5Config, *, decodes: bool) -> None:
        super().__init__()
        self.attention = nn.ModuleList(T5Attention(config) for _ in range(1 + decodes))
        self.wide = nn.Linear(config.width, config.feedforward, bias=False)
        self.narrow = nn.Linear(config.feedforward, config.width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(config.width) for _ in range(2 + decodes))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor, encoded: Tensor | None) -> Tensor:
        at = self.norms[0](x)
        x = x + self.dropout(self.attention[0](at, at, bias))
        if encoded is not None:
            x = x + self.dropout(self.attention[1](self.norms[1](x), encoded, None))
        y = self.dropout(F.relu(self.wide(self.norms[-1](x))))
        return x + self.dropout(self.narrow(y))


class T5(nn.Module):
    """Encoder and decoder of equal depth over one table of embeddings."""

    BUCKETS = 32

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.stacks = nn.ModuleList(
            nn.ModuleList(T5Block(config, decodes=decodes) for _ in range(config.depth))
            for decodes in (False, True)
        )
        self.biases = nn.ModuleList(nn.Embedding(self.BUCKETS, config.heads) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(config.width) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        encoded = self._stack(0, tokens, None)
        decoded = self._stack(1, targets, encoded)
        logits = F.linear(decoded * self.config.width**-0.5, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _stack(self, number: int, tokens: Tensor, encoded: Tensor | None) -> Tensor:
        """Run the encoder or the decoder; distances are clamped to buckets, for only shapes matter."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        bucket = (at[:, None] - at).clamp(0, self.BUCKETS - 1)
        bias = self.biases[number](bucket).permute(2, 0, 1)[None]
        x = self.tokens(tokens)
        for block in self.stacks[number]:
            x = block(x, bias, encoded)
        return self.norms[number](x)


def t5_batch(config: T5Config, count: int) -> tuple[Tensor, Tensor]:
    lengths = config.sequence_length, config.target_length
    inputs, targets = (torch.empty(count, length, dtype=torch.int64) for length in lengths)
    return inputs, targets


@dataclass
class Network:
    """One network, and its profiles by batch: memory and work, which do not depend on the card."""

    name: str
    built: Any
    """A configuration of T5, or a network of the zoo with its settings."""
    profiles: dict[int, Profile] = field(default_factory=dict)
    parameters: int = 0

    def profile(self, batch: int) -> Profile:
        if batch not in self.profiles:
            self.profiles[batch] = self._made(batch)
        return self.profiles[batch]

    def _made(self, batch: int) -> Profile:
        nonzero = None
        with torch.device("meta"):
            if isinstance(self.built, T5Config):
                network: nn.Module = T5(self.built)
                inputs = t5_batch(self.built, batch)
            else:
                name, settings = self.built
                config = zoo.config(name, **settings)
                network, inputs = zoo.build(name, **settings), zoo.empty_batch(config, batch)
                if config.objective == "masked":
                    nonzero = batch * zoo.masked_count(config.sequence_length)
        self.parameters = sum(one.numel() for one in network.parameters())
        return dry_step(
            network.half(), lambda model, *args: model(*args), machine=Machine.preset(CARDS[0]),
            inputs=inputs, device="cuda", nonzero_count=nonzero,
        ).profile  # fmt: skip


def networks() -> Iterator[Network]:
    """Yield the networks, by size within each kind, with the lengths of their publications."""
    yield Network("BERT-Large", ("bert-large", {}))
    yield Network("BERT, 24 x 2048", ("bert-xlarge", {}))
    yield Network("GPT-2 XL", ("gpt2", {"depth": 48, "width": 1600, "heads": 25}))
    yield Network("GPT, 32 x 4096", ("gpt2", {"depth": 32, "width": 4096, "heads": 32}))
    yield Network("GPT, 50 x 4096", ("gpt2", {"depth": 50, "width": 4096, "heads": 32}))
    yield Network("T5-Large", T5Config(feedforward=4096, heads=16, head_width=64))
    yield Network("T5-3B", T5Config(feedforward=16_384, heads=32, head_width=128))
    yield Network("T5-11B", T5Config(feedforward=65_536, heads=128, head_width=128))


@dataclass(frozen=True)
class Pass:
    """Forward and backward on a card."""

    batch: int
    forward_s: float
    backward_s: float


def forward_and_backward(network: Network, card: str) -> Pass | None:
    """Replay the largest power of two that fits with nothing moved; None if not one sample does."""
    machine, found = Machine.preset(card), None
    batch = 1
    while batch <= MOST_BATCH:
        profile = retimed(network.profile(batch), machine)
        budgets = Budgets(machine.device_bytes, machine.host_bytes, machine.flash_bytes)
        run = replay(profile, policies.get("keep")(profile, machine, budgets), machine)
        if run.peak_bytes - HALF_BYTES * network.parameters > machine.device_bytes:
            break
        (only,) = profile.passes
        forward_s = (only.backward_start_ns - only.start_ns) / 1e9
        found = Pass(batch, forward_s, run.step_ns / 1e9 - forward_s)
        batch *= 2
    return found


@dataclass(frozen=True)
class Updates:
    """Seconds of the update of one network, and of writing its gradients to the SSD."""

    host: float
    controller: float
    die: float
    gradient_write: float
    transfers: float
    """Of the host's, what is not its processor's."""


def updates(device: Device, update: Update) -> Updates:
    """Simulate the update on timelines; the host writes gradients at the rate of its states."""
    host, controller, die = (
        simulate(device, update, each, SimulationEngine.TIMELINE)
        for each in (Placement.HOST, Placement.CONTROLLER, Placement.DIE)
    )
    busy = dict(host.busy_s)
    return Updates(
        host.time_s,
        controller.time_s,
        die.time_s,
        busy["write"] * update.gradient_bytes / update.states_bytes,
        host.time_s - busy["processor"],
    )


def iteration(one: Pass, took: Updates) -> dict[str, float]:
    """Return the seconds of an iteration by placement.

    For the host, gradients are written to flash during backward. Within the drive they arrive with the
    update, which begins when backward has ended.
    """
    before = one.forward_s + one.backward_s
    return {
        "host": one.forward_s + max(one.backward_s, took.gradient_write) + took.host,
        "controller": before + took.controller,
        "die": before + took.die,
    }


def on_cpu(network: Network, one: Pass, device: Device, card: str) -> float | None:
    """Return the seconds of an iteration with all states in host memory; None if they do not fit."""
    count, machine = network.parameters, Machine.preset(card)
    if OFFLOADED_BYTES * count > HOST_BYTES:
        return None
    out, back = (
        HALF_BYTES * count / rate
        for rate in (machine.host_write_bytes_per_s, machine.host_read_bytes_per_s)
    )
    update = count / device.host.parameters_per_s
    return one.forward_s + max(one.backward_s, out) + update + back


def measure(device: Device, update: Update) -> dict[str, Any]:
    """Measure, for each network, the update and the iterations on each card."""
    found = {}
    for network in networks():
        passes = {card: forward_and_backward(network, card) for card in CARDS}
        took = updates(device, replace(update, parameters=network.parameters))
        cards = {}
        for card, one in passes.items():
            if one is None:
                cards[card] = None
                continue
            times = iteration(one, took)
            cards[card] = _rounded(
                {
                    **vars(one),
                    **{f"{where}_s": seconds for where, seconds in times.items()},
                    "cpu_s": on_cpu(network, one, device, card),
                    "controller": times["host"] / times["controller"],
                    "die": times["host"] / times["die"],
                    "update_share": took.host / times["host"],
                    "transfer_share": took.transfers / times["host"],
                }
            )
        found[network.name] = {
            "parameters": network.parameters,
            "update": _rounded(vars(took)),
            "cards": cards,
        }
        network.profiles.clear()
    return found


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: round(one, 4) if isinstance(one, float) else one for key, one in figures.items()}


# -- beside the paper ---------------------------------------------------------------------------------


def lines(found: dict[str, Any]) -> dict[str, Any]:
    """Judge end to end: each network, the mean, the smallest against the largest; all two-sided."""
    told = {name: _line(_gains(row), [LEAST, MOST], _in_range) for name, row in found.items()}
    by_card = {card: [] for card in CARDS}
    for row in found.values():
        for card, gain in _gains(row).items():
            by_card[card].append((row["parameters"], gain))
    means = {card: sum(gain for _, gain in rows) / len(rows) for card, rows in by_card.items()}
    told["mean over networks"] = {
        **_line(means, MEAN, lambda mean: abs(mean / MEAN - 1) <= TOLERANCE),
        "tolerance": TOLERANCE,
    }
    ends = {card: [min(rows)[1], max(rows)[1]] for card, rows in by_card.items()}
    told["more for the largest than for the smallest"] = {
        "kind": "predicted",
        "here": [round(gain, 3) for gain in ends[CARDS[0]]],
        "cards": {card: [round(gain, 3) for gain in two] for card, two in ends.items()},
        "paper": [LEAST, MOST],
        "within": all(small < large for small, large in ends.values()),
    }
    return {f"end to end, {name}": one for name, one in told.items()}


def out_of_memory() -> dict[str, Any]:
    """The largest network whose states fit the host; no verdict, for its memory is assumed."""
    return {
        "kind": "assumed",
        "here": round(HOST_BYTES / OFFLOADED_BYTES / 1e9, 2),
        "paper": 6,
        "within": None,
    }


def _gains(row: dict[str, Any]) -> dict[str, float]:
    """Speed-up of the die over the host, by card."""
    return {card: one["die"] for card, one in row["cards"].items() if one is not None}


def _in_range(gain: float) -> bool:
    return LEAST - ROUNDING <= gain <= MOST + ROUNDING


def _line(cards: dict[str, float], paper: Any, fits: Callable[[float], bool]) -> dict[str, Any]:
    return {
        "kind": "predicted",
        "here": round(next(iter(cards.values())), 3),
        "cards": {card: round(one, 3) for card, one in cards.items()},
        "paper": paper,
        "within": all(map(fits, cards.values())),
    }


def other_iterations(found: dict[str, Any], known: str, rest: float) -> dict[str, Any]:
    """End to end, with gradients written in no time, and with the paper's share of forward and backward.

    Args:
        found: As measured.
        known: The network of which the paper tells a share.
        rest: That share of the baseline's iteration.
    """
    free: dict[str, list[float]] = {card: [] for card in CARDS}
    for row in found.values():
        for card, one in row["cards"].items():
            if one is not None:
                before = one["forward_s"] + one["backward_s"]
                took = row["update"]
                free[card].append((before + took["host"]) / (before + took["die"]))
    took = found[known]["update"]
    wanted = took["host"] * rest / (1 - rest)
    batches = {
        card: round(one["batch"] * wanted / (one["forward_s"] + one["backward_s"]), 1)
        for card, one in found[known]["cards"].items()
        if one is not None
    }
    return {
        "mean, gradients written in no time": {
            card: round(sum(gains) / len(gains), 3) for card, gains in free.items()
        },
        f"{known}, forward and backward as long as the paper's": {
            "seconds": round(wanted, 2),
            "batches": batches,
            "gradients written in no time": round(
                (wanted + took["host"]) / (wanted + took["die"]), 3
            ),
        },
    }


def tables(found: dict[str, Any], told: dict[str, Any]) -> str:
    """Return the file from which the manual includes two tables, each between two marks."""
    rows = [
        "| Network | Parameters | Batch | Forward and backward, s | Share of the update | End to end"
        " | 2.2 to 2.5 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        cards = list(row["cards"].values())
        cells = (
            name,
            f"{row['parameters'] / 1e9:.2f} B",
            _by_card(cards, lambda one: f"{one['batch']}"),
            _by_card(cards, lambda one: f"{one['forward_s'] + one['backward_s']:.2f}"),
            _by_card(cards, lambda one: f"{100 * one['update_share']:.0f} %"),
            _by_card(cards, lambda one: f"{one['die']:.2f}"),
            _verdict(told[f"end to end, {name}"]),
        )
        rows.append("| " + " | ".join(cells) + " |")
    mean = told["end to end, mean over networks"]
    means = ", ".join(f"{one:.2f}" for one in mean["cards"].values())
    rows.append(f"| mean (the paper: 2.4, within 10 %) | | | | | {means} | {_verdict(mean)} |")
    rows += [
        "\n<!-- baselines -->\n",
        "| Network | Update on the host | In the controller | On the dies | States in host memory |",
        "|---|---|---|---|---|",
    ]
    for name, row in found.items():
        one = row["cards"][CARDS[0]]
        held = "out of memory" if one["cpu_s"] is None else f"{one['cpu_s']:.2f} s"
        times = " | ".join(f"{one[f'{where}_s']:.2f} s" for where in ("host", "controller", "die"))
        rows.append(f"| {name} | {times} | {held} |")
    head = _results.page_head("macro/optimstore.py", "end to end")
    return head + "\n".join([*rows, "\n<!-- end -->", ""])


def _by_card(cards: list[Any], of: Callable[[Any], str]) -> str:
    return ", ".join("–" if one is None else of(one) for one in cards)


def _verdict(one: dict[str, Any]) -> str:
    return "yes" if one["within"] else "**no**"
