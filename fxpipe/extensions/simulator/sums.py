"""What goes on beside a device's instructions: replicas exchange sums of gradients and new weights,
and stages offload what they keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

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
