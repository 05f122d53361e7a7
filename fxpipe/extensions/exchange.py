"""What replicas exchange beside their computations, as instructions tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from fxpipe.ir.program import Program


class StageBytes(Protocol):
    """The bytes of what stages have.

    Attributes:
        parameters: stage → bytes of one version of its parameters.
        each: stage → bytes of each of its parameters, in order.
        gradients: stage → bytes of its sums of gradients.
        elements: stage → (number of elements, bytes of one) for each parameter's gradient.
        buckets: stage → the parameters of each bucket of gradients, if there are several.
    """

    @property
    def parameters(self) -> Mapping[int, int]: ...
    @property
    def each(self) -> Mapping[int, Any]: ...
    @property
    def gradients(self) -> Mapping[int, int]: ...
    @property
    def elements(self) -> Mapping[int, Any]: ...
    @property
    def buckets(self) -> Mapping[int, Any]: ...

    def part(self, stage: int, replica: int, replicas: int, bucket: int | None = None) -> int:
        """Bytes of the part of a stage's gradients, or of a bucket, that a replica sums."""
        ...


@dataclass(frozen=True, order=True)
class Exchange:
    """What a stage and its like in the other replicas exchange.

    Attributes:
        stage: the stage.
        batch: the batch, counted like the instruction's.
        bucket: which of several parts, that go one after another; −1 for the last or only one.
        what: its name in texts.
        ways: how often the latency of the link passes: 2 for parts that go there, whose sums come
            back.
        of: the mappings of ``StageBytes`` of which one must know the stage.
    """

    stage: int
    batch: int
    bucket: int = -1
    what: ClassVar[str] = "sum"
    ways: ClassVar[int] = 1
    of: ClassVar[tuple[str, ...]] = ("gradients", "elements")

    @property
    def kind(self) -> Literal["sum"]:
        """The kind by which pictures tell buffers and exchanges apart."""
        return "sum"

    def sent(self, sizes: StageBytes, replica: int, program: Program) -> int:
        """The bytes that a replica sends to the others."""
        raise NotImplementedError

    def most(self, sizes: StageBytes, program: Program) -> int:
        """The bytes that the replica sends that sends the most: here the first."""
        return self.sent(sizes, 0, program)

    def __str__(self) -> str:
        bucket = f" bucket {self.bucket}" if self.bucket >= 0 else ""
        return f"{self.what}:{self.stage}[{self.batch}]{bucket}"
