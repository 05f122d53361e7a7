"""What is copied beside a device's computations: what stages keep, to where it is offloaded.

What replicas exchange is told by ``begins`` and ``awaits`` of the instructions.
"""

from __future__ import annotations

from fxpipe.ir import instruction as ins
from fxpipe.ir.launch import COMPUTE
from fxpipe.ir.value import Buffer


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
