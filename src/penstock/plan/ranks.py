"""Ranks that train one network together: the speeds that each has, and its part of the weights.

A plan is that of one rank; all do the same. Ranks change what goes into it: how many bytes a rank reads
and writes, how fast a node's SSDs and links are for each of its ranks, and how long weights and gradients
take over the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from penstock.core.errors import ConfigError
from penstock.plan.machine import Machine
from penstock.plan.weights import ModuleWeights

FSDP2: Final = "fsdp2"
DDP: Final = "ddp"
PARALLEL: Final = (FSDP2, DDP)
"""Ways to train on several ranks: each has a part of every weight, or each has them all."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Number of ranks and nodes, and what the ranks of a node share.

    Raises:
        ConfigError: A number is below 1, or they cannot be divided evenly.
    """

    count: int = 1
    """Ranks in all."""
    nodes: int = 1
    parallel: str = FSDP2
    """One of ``PARALLEL``."""
    ssds: int = 1
    """SSDs of each node, each as fast and as large as the flash of the machine."""
    links: int | None = None
    """Links between host and devices on each node; None: one for each rank."""

    def __post_init__(self) -> None:
        for name, value in (
            ("ranks", self.count),
            ("nodes", self.nodes),
            ("ssds", self.ssds),
            ("links", self.links),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if self.parallel not in PARALLEL:
            raise ConfigError(f"{self.parallel!r} is none of {', '.join(PARALLEL)}")
        if self.count % self.nodes:
            raise ConfigError(
                f"{self.count} ranks cannot be divided evenly among {self.nodes} nodes"
            )
        if self.links is not None and self.per_node % self.links:
            raise ConfigError(
                f"{self.per_node} ranks on a node cannot share {self.links} links evenly"
            )

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.count // self.nodes

    @property
    def shards(self) -> int:
        """Parts into which every weight is divided."""
        return self.count if self.parallel == FSDP2 else 1

    def unknown(self, machine: Machine) -> tuple[str, ...]:
        """Return the fields of a machine that its network's time needs, and that it does not have."""
        needed = []
        if self.nodes > 1:
            needed.append("network_bytes_per_s")
        if self.per_node > 1:
            needed.append("peer_bytes_per_s")
        return tuple(name for name in needed if not getattr(machine, name))

    def share_of(self, machine: Machine, *, device: str) -> Machine:
        """Return what one rank has of a node.

        Its network is as fast as the slowest part that is known. A ring that passes every rank brings
        each rank, and each node, the same bytes, so neither rate is divided.

        Args:
            machine: A node, or for a GPU one device with its link and one SSD.
            device: With ``"cpu"`` the ranks of a node divide its processor and memory, too; with
                ``"cuda"`` each has a device of its own.
        """
        here = self.per_node
        known = [
            rate
            for rate, used in (
                (machine.network_bytes_per_s, self.nodes > 1),
                (machine.peer_bytes_per_s, here > 1),
            )
            if used and rate
        ]
        found = replace(
            machine.with_drives(self.ssds / here),
            host_bytes=machine.host_bytes // here,
            flash_bytes=machine.flash_bytes * self.ssds // here,
            network_bytes_per_s=min(known, default=0.0),
        )
        links = 1 if device == "cpu" else self.links or here
        found = replace(
            found,
            host_write_bytes_per_s=machine.host_write_bytes_per_s * links / here,
            host_read_bytes_per_s=machine.host_read_bytes_per_s * links / here,
        )
        if device != "cpu" or here == 1:
            return found
        compute = machine.compute
        return replace(
            found,
            device_bytes=machine.device_bytes // here,
            compute=compute
            and replace(
                compute,
                float32_flops_per_s=compute.float32_flops_per_s / here,
                half_flops_per_s=compute.half_flops_per_s / here,
                memory_bytes_per_s=compute.memory_bytes_per_s / here,
            ),
        )

    def divide(self, weights: Iterable[ModuleWeights]) -> tuple[ModuleWeights, ...]:
        """Return the weights as one rank has them, with what it receives over the network.

        A ring of ``count`` ranks brings each ``(count - 1) / count`` of all bytes: once for each use and
        once for the gradient with FSDP2, and twice for the gradient with DDP.
        """
        others, count = self.count - 1, self.count
        sharded = self.parallel == FSDP2
        return tuple(
            replace(
                one,
                shards=self.shards,
                gathered_bytes=one.nbytes * others // count if sharded else 0,
                reduced_bytes=one.trained_bytes * others * (1 if sharded else 2) // count
                if one.updated
                else 0,
            )
            for one in weights
        )

    def of_each_ssd(self, nbytes: int) -> int:
        """Return the bytes on each SSD if each rank has so many."""
        return -(-nbytes * self.per_node // self.ssds)

    def steps_until(self, tbw_bytes: int, written_bytes: int) -> int | None:
        """Return the steps until an SSD has ``tbw_bytes``, if each rank writes so many; None: no end."""
        each = self.of_each_ssd(written_bytes)
        return tbw_bytes // each if each else None
