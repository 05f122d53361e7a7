"""What goes on beside the devices: replicas exchange sums of gradients and new weights; stages
offload what they keep."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fxpipe.ir import instruction as ins
from fxpipe.ir.program import Program
from fxpipe.ir.value import Buffer, fetching, offloaded

Summed = Literal["sum", "part", "weights"]
"""What replicas exchange: gradients until all have their sums, or, where optimizers are sharded,
until each has the sum of its part; and then the parts of the new weights."""


class Sum(NamedTuple):
    """The gradients of a stage, or its new weights, on their way between the replicas."""

    stage: int
    batch: int
    what: Summed = "sum"
    bucket: int = -1
    """Which of the stage's buckets of gradients; −1 for the last, or for all where there is one."""

    @property
    def kind(self) -> Literal["sum"]:
        """What a picture tells it by, as it does buffers."""
        return "sum"

    def bucket_in(self, program: Program) -> int | None:
        """Which bucket of gradients it is; None for all that the stage has."""
        return self.bucket if self.what != "weights" and self.stage in program.buckets else None

    def __str__(self) -> str:
        bucket = f" bucket {self.bucket}" if self.bucket >= 0 else ""
        return f"{self.what}:{self.stage}[{self.batch}]{bucket}"


_AWAITED: dict[type[ins.Instruction], Summed] = {
    ins.AllGather: "sum",
    ins.TakePart: "part",
    ins.GatherWeights: "weights",
}


def awaited_by(gathering: ins.Gathering) -> Sum:
    """What an instruction that waits for the other replicas waits for; of several buckets the last
    one, as they take the same way one after another."""
    return Sum(gathering.stage, gathering.batch, _AWAITED[type(gathering)])


def begun_by(instruction: ins.Instruction, program: Program) -> Sum | None:
    """What an instruction begins to exchange with the other replicas."""
    match instruction:
        case ins.ReduceScatter(stage, batch):
            return Sum(stage, batch, "part" if stage in program.sharded else "sum")
        case ins.PartialBackward(stage, batch=batch, bucket=bucket):
            return Sum(stage, batch, "part" if stage in program.sharded else "sum", bucket)
        case ins.Update(stage, batch=batch) if stage in program.sharded:
            return Sum(stage, batch, "weights")
    return None


def beside(instruction: ins.Instruction) -> Buffer | None:
    """What an instruction waits for that goes on beside its own device: that something is stored,
    or fetched."""
    match instruction:
        case ins.Await(Buffer(_, _, stage, _, i, batch)):
            return fetching(stage, i, batch)
        case ins.Free(Buffer("saved", _, stage, _, i, batch)):
            return offloaded(stage, i, batch)
    return None
