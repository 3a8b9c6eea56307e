"""What the network computes, operator by operator: the work, the moment, and what it needs beside."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Convolution:
    """The geometry of a convolution's forward; its backward is of the same."""

    batch: int
    channels_in: int
    channels_out: int
    groups: int
    input_size: tuple[int, ...]
    """Of the map that comes in, without batch and channels: height and width."""
    kernel_size: tuple[int, ...]
    output_size: tuple[int, ...]
    stride: tuple[int, ...]
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Product:
    """Products of matrices, all of one size: rows by depth with depth by columns."""

    count: int
    rows: int
    columns: int
    depth: int


@dataclass(frozen=True, slots=True)
class WorkspaceLimit:
    """A convolution that is computed otherwise than the fastest way.

    It takes the fastest algorithm whose workspace is within the limit (:mod:`penstock.plan.algorithms`).

    Raises:
        PlanError: The limit is negative, or there is not even one part.
    """

    module: str
    backward: bool
    nbytes: int
    """The most that its workspace may take; 0: the algorithm without any."""
    parts: int = 1
    """Into how many parts its batch may be cut, one computed after the other."""

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.parts < 1:
            raise PlanError(f"convolution {self.module!r}: a workspace limit is impossible: {self}")


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator; in a measured profile, one uninterrupted run of a module's own code.

    Raises:
        PlanError: It ends before it starts, or a count is negative.
    """

    name: str
    """As ``"aten.convolution"``; in a measured profile the module's type, as ``"Conv2d"``."""
    module: str
    """Path of the innermost module whose forward it belongs to, also in backward."""
    pass_index: int
    backward: bool
    start_ns: int
    end_ns: int
    """Both on the profile's own axis of compute time."""
    flops: int = 0
    """Floating-point operations; a multiplication and an addition are two."""
    moved_bytes: int = 0
    """What it reads and writes of device memory at the least: its operands and results, each once."""
    convolution: Convolution | None = None
    half: bool = False
    """Whether it computes in 16 bits."""
    product: Product | None = None
    """The sizes of what it multiplies, if that is all it does."""

    def __post_init__(self) -> None:
        if self.end_ns < self.start_ns or min(self.flops, self.moved_bytes) < 0:
            raise PlanError(
                f"profile: operator {self.name!r} of {self.module!r} is impossible: {self}"
            )

    def moved(self, start_ns: int, end_ns: int) -> Operator:
        """The same at another time. Quicker than ``replace``."""
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
        """Its time."""
        return self.end_ns - self.start_ns
