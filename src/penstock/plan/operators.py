"""Operators that a network computes: work, time, and geometry."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Convolution:
    """Geometry of a convolution's forward, shared by its backward."""

    batch: int
    channels_in: int
    channels_out: int
    groups: int
    input_size: tuple[int, ...]
    """Height and width of the input map, without batch and channels."""
    kernel_size: tuple[int, ...]
    output_size: tuple[int, ...]
    stride: tuple[int, ...]
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of one size: rows by depth with depth by columns."""

    count: int
    rows: int
    columns: int
    depth: int


@dataclass(frozen=True, slots=True)
class WorkspaceLimit:
    """Limit of a convolution's workspace.

    It uses the fastest algorithm whose workspace is within the limit (:mod:`penstock.plan.algorithms`).

    Raises:
        PlanError: The limit is negative, or there are fewer parts than one.
    """

    module: str
    backward: bool
    nbytes: int
    """Largest workspace in bytes; 0: the algorithm without one."""
    parts: int = 1
    """Number of parts that its batch may be cut into, computed one after the other."""

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.parts < 1:
            raise PlanError(
                f"convolution {self.module!r}: workspace limit {self} must have nbytes of 0 or more"
                " and at least one part"
            )


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator; in a measured profile, one uninterrupted run of a module's own code.

    Raises:
        PlanError: It ends before it starts, or a count is negative.
    """

    name: str
    """Name such as ``"aten.convolution"``; in a measured profile the module's type, as ``"Conv2d"``."""
    module: str
    """Path of the innermost module whose forward it belongs to, also in backward."""
    pass_index: int
    backward: bool
    start_ns: int
    end_ns: int
    """End on the profile's axis of compute time, as ``start_ns``."""
    flops: int = 0
    """Floating-point operations; a multiplication and an addition are two."""
    moved_bytes: int = 0
    """Least device memory traffic: its operands and results, each once."""
    convolution: Convolution | None = None
    half: bool = False
    """True if it computes in 16 bits."""
    product: Product | None = None
    """Sizes of its matrix products, if it computes nothing else."""

    def __post_init__(self) -> None:
        if self.end_ns < self.start_ns or min(self.flops, self.moved_bytes) < 0:
            raise PlanError(
                f"profile: operator {self.name!r} of {self.module!r} ends before it starts or has a"
                f" negative count: {self}"
            )

    def moved(self, start_ns: int, end_ns: int) -> Operator:
        """Return this operator at another time. Quicker than ``replace``."""
        return Operator(
            self.name,
            self.module,
            self.pass_index,
            self.backward,
            start_ns,
            end_ns,
            self.flops,
            self.moved_bytes,
            self.convolution,
            self.half,
            self.product,
        )

    @property
    def took_ns(self) -> int:
        """Duration in ns."""
        return self.end_ns - self.start_ns
