"""What goes on beside a device's instructions: replicas exchange sums of gradients and new weights,
and stages offload what they keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from fxpipe.extensions.simulator.sizes import Piece, Sizes
from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer

Summed = Literal["sum", "weights"]
"""What replicas exchange: gradients, and with sharded optimizers new weights."""


class Sum(NamedTuple):
    """A transfer between the replicas: the gradients of a stage, or its new weights."""

    stage: int
    batch: int
    what: Summed = "sum"
    bucket: int = -1
    """Which of the stage's buckets of gradients; −1 for the last or only one."""

    @property
    def kind(self) -> Literal["sum"]:
        """The kind by which pictures tell buffers and sums apart."""
        return "sum"

    def bucket_in(self, program: Program) -> int | None:
        """Which bucket of gradients it is; None for all gradients of the stage."""
        return self.bucket if self.what != "weights" and self.stage in program.buckets else None

    def __str__(self) -> str:
        bucket = f" bucket {self.bucket}" if self.bucket >= 0 else ""
        return f"{self.what}:{self.stage}[{self.batch}]{bucket}"


GATHERING: Mapping[str, Summed] = {
    "all_gather": "sum",
    "gather_weights": "weights",
}
"""Opcode of an instruction that waits for the other replicas → for what."""


def awaited_by(gathering: ins.Instruction) -> Sum:
    """What an instruction that gathers waits for: of several buckets the last, as they go one after
    another over the same link."""
    return Sum(gathering.stage, gathering.batch, GATHERING[gathering.opcode])


def begun_by(instruction: ins.Instruction, program: Program) -> Sum | None:
    """What an instruction begins to exchange with the other replicas, if anything."""
    match instruction:
        case ins.OncePerStep(stage, batch, opcode="reduce_scatter"):
            return Sum(stage, batch)
        case ins.Compute(stage, batch=batch, partial=True):
            bucket: int = getattr(instruction, "bucket", 0)
            return Sum(stage, batch, bucket=bucket)
        case ins.Update(stage, batch=batch) if "gather_weights" in program.opcodes:
            return Sum(stage, batch, "weights")
    return None


def begins(instruction: ins.Instruction) -> Buffer | None:
    """What an instruction begins to copy to or from where values are offloaded, if anything."""
    beside = isinstance(instruction, ins.Move) and instruction.stream != COMPUTE
    return instruction.buffer if beside else None  # type: ignore[attr-defined]


def beside(instruction: ins.Instruction) -> Buffer | None:
    """The copy, to or from where values are offloaded, that an instruction waits for, if any."""
    match instruction:
        case ins.Free(Buffer("saved" | "state") as buffer):
            return buffer._replace(kind="offloaded")
        case ins.Move(Buffer("fetched") as buffer):
            return buffer._replace(kind="fetching")
    return None


Key = tuple[int, int, int]
"""Stage, batch and bucket of gradients."""


class Gradients:
    """The memory of the sums of gradients on a device, bucket by bucket as in ``Sum``."""

    def __init__(self, program: Program, sizes: Sizes, device: int) -> None:
        self._program, self._sizes, self._device = program, sizes, device
        list_ = program.lists[device]
        self._updated = {(x.stage, x.batch) for x in list_ if isinstance(x, ins.Update)}
        self._bytes: dict[tuple[int, int | None, int], int] = {}

    def sums(self, stage: int, batch: int) -> list[Piece]:
        """A stage's sums, bucket by bucket; the first one is complete last."""
        return [self.sum_of(stage, batch, bucket) for bucket in self._buckets(stage)]

    def parts(self, stage: int, batch: int) -> list[Piece]:
        """The parts of the stage's sums that this replica sums."""
        return [self.part_of(stage, batch, bucket) for bucket in self._buckets(stage)]

    def sum_of(self, stage: int, batch: int, bucket: int) -> Piece:
        """The sum of a bucket. If no update uses it, it is one sum for all batches, which stays."""
        copied = self._program.placement[stage] != self._device
        of = batch if (stage, batch) in self._updated or copied else None
        return Piece("gradients", ("sum", stage, of, bucket), self.bytes(stage, bucket, 1))

    def part_of(self, stage: int, batch: int, bucket: int) -> Piece:
        """The part of a bucket that this replica sums."""
        size = self.bytes(stage, bucket, self._program.replicas)
        return Piece("gradients", ("part", stage, batch, bucket), size)

    def arriving(self, stage: int, batch: int, bucket: int) -> Piece:
        """What comes of a bucket from all replicas: their contributions to this one's part."""
        size = self.bytes(stage, bucket, 1)
        return Piece("gradients", ("arriving", stage, batch, bucket), size)

    def bytes(self, stage: int, bucket: int | None, replicas: int) -> int:
        """The bytes of a bucket, or of all gradients, that the last of ``replicas`` sums."""
        key = stage, bucket if stage in self._program.buckets else None, replicas
        if key not in self._bytes:
            self._bytes[key] = self._sizes.part(stage, replicas - 1, replicas, key[1])
        return self._bytes[key]

    def _buckets(self, stage: int) -> range:
        return range(-1, self._program.buckets.get(stage, 1) - 1)


def graph_of(instruction: ins.Instruction) -> tuple[str, int] | None:
    """The key of a task's graph in ``Sizes.runs``; None for other instructions."""
    letter = instruction.letter
    if letter is None:
        return None
    match instruction:
        case ins.Compute(partial=True):
            letter = f"{letter}{getattr(instruction, 'bucket', 0)}"
        case ins.Backward(rest=True) | ins.WeightGrad(rest=True):
            letter = f"{letter}-1"
    return letter, instruction.stage
