"""The update of a stage's weights, and the places where all devices meet."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxpipe.ir.effects import DeviceMemory, Spaces
from fxpipe.ir.opcodes.base import Instruction
from fxpipe.ir.task import KINDS

if TYPE_CHECKING:
    from fxpipe.ir.program import Program
    from fxpipe.runtime.interpreter import Machine


@dataclass(frozen=True, slots=True)
class Update(Instruction):
    """Step a stage's optimizer. Roughly: weights[writes] = optimizer(weights[reads], gradients).

    Attributes:
        reads: the newest version, counted as in Compute.
        writes: the next version.
        batch: the batch whose gradients it uses: 0 for this step's, −1 for the one before.
    """

    opcode = "update"
    form = "s{stage}{batch:batch} v{reads:signed} -> v{writes:signed}", "s0 v0 -> v1"
    task = "U"
    counted = "reads", "writes", "batch"
    after_barrier = True
    completes = True
    spends = "used up", "move it before that"
    stage: int
    reads: int = 0
    writes: int = 1
    batch: int = 0

    @property
    def needs(self) -> Sequence[str]:
        return (*KINDS["U"].follows, "gradients")

    @classmethod
    def of_every_stage(cls, program: Program, there: Container[str]) -> bool:
        return "U" in there

    def spaces(self, memory: DeviceMemory) -> Spaces:
        """It uses up the gradients."""
        return Spaces(over=(memory.sums(self.stage, self.batch),))

    def run(self, machine: Machine) -> None:
        stage, step = self.stage, machine.step
        gradients = machine.store.gradients.pop((stage, self.batch), [])
        machine.weights.update(stage, step + self.reads, gradients)


@dataclass(frozen=True, slots=True)
class Barrier(Instruction):
    """Wait until every device is here, so that no weight changes before all gradients exist."""

    opcode = "barrier"

    def run(self, machine: Machine) -> None:
        machine.weights.arrive()
        machine.channels.meet()


@dataclass(frozen=True, slots=True)
class Pause(Instruction):
    """Give control back to the caller, who resumes the program with more to load."""

    opcode = "pause"

    def run(self, machine: Machine) -> None:
        """Do nothing: the loop returns to the caller."""
